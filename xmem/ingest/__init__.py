"""Reads traces and snapshots into a store: the library's entry point of this room, `ingest`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from xmem.ingest.adapter import Filters
from xmem.room import make_callable

__all__ = ["DeviceFacts", "Filters", "IngestOptions", "Ingested", "IssueFacts", "SourceFacts", "ingest"]

#: Called with the source's name, the bytes read so far, and the bytes in all (None where unknown).
Progress = Callable[[str, int, int | None], None]


@dataclass(frozen=True)
class IngestOptions:
    """How to read: where to, what part, and what to do with trouble.

    `strict` refuses a source with any issue but notes, `as_ranks` makes one run of all files, `rank` overrides what
    the file says, `force` reads again what is there, `hta` adds the hta_* tables.
    """

    store: str | Path | None = None
    force: bool = False
    strict: bool = False
    as_ranks: bool = False
    rank: int | None = None
    name: str | None = None
    filters: Filters = field(default_factory=Filters)
    hta: bool = False
    progress: Progress | None = None


@dataclass(frozen=True)
class SourceFacts:
    """One source file: a row of `runs`, shortened."""

    rank: int
    source_file: str
    source_bytes: int
    source_sha256: str
    torch_version: str | None
    source_entries: int
    event_count: int
    memory_event_count: int
    span_count: int
    stack_count: int
    baseline_bytes: int
    ring_buffer: bool
    truncated: bool
    time_base: str
    first_ts_ns: int | None
    last_ts_ns: int | None


@dataclass(frozen=True)
class DeviceFacts:
    """One device of one rank, with the peaks that its events show."""

    rank: int
    device: str
    name: str | None
    total_bytes: int | None
    baseline_bytes: int
    peak_allocated_bytes: int
    end_allocated_bytes: int
    peak_reserved_bytes: int | None
    complete_history: bool


@dataclass(frozen=True)
class IssueFacts:
    """One row of `issues`."""

    rank: int
    code: str
    severity: str
    count: int
    first_at: int | None
    first_unit: str | None
    detail: str | None


@dataclass(frozen=True)
class Ingested:
    """What is in the store now, and what was met on the way; `warnings` are sentences for a person."""

    run_id: str
    name: str
    adapter: str
    already_there: bool
    ranks: tuple[int, ...]
    event_count: int
    memory_event_count: int
    span_count: int
    stack_count: int
    sources: tuple[SourceFacts, ...]
    devices: tuple[DeviceFacts, ...]
    issues: tuple[IssueFacts, ...]
    warnings: tuple[str, ...]


def ingest(paths: str | Path | Sequence[str | Path], *, options: IngestOptions | None = None) -> list[Ingested]:
    """Read sources into the store and return one result for each run, in order.

    A path is a file, `-` for standard input, a folder or a pattern of ranks (one run each). Raises UsageError
    (missing file, two files with one rank), UnreadableError (nothing to read in it) and RefusedError (hostile,
    full disk); whatever is raised, the store is as it was before the run concerned.
    """
    from xmem.ingest.pipeline import ingest_group
    from xmem.ingest.ranks import group_paths

    chosen = options or IngestOptions()
    listed = [paths] if isinstance(paths, str | Path) else list(paths)
    return [ingest_group(group, chosen) for group in group_paths(listed, chosen)]


make_callable(__name__)
