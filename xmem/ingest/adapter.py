"""What an adapter is: the protocol, the batches it yields, the notes it takes, and the registry of adapters."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, BinaryIO, Protocol, cast

from xmem.errors import UsageError
from xmem.schema import issue_codes

if TYPE_CHECKING:
    import polars as pl

#: How many bytes of the (decompressed) source `sniff` sees.
HEAD_BYTES = 1 << 16

#: No table of the schema: the stack ids of events that were yielded without. Such events carry -2, -3, ... as stack_id
#: in place of the first, second, ... row of these batches, behind which nothing but stacks may follow.
LATE_STACKS = "late_stacks"

#: Built-in adapters in the order in which they are asked; each is a module of this package.
BUILT_IN = ("cuda_snapshot", "event_log", "memory_timeline", "torch_trace")
ENTRY_POINT_GROUP = "xmem.adapters"


@dataclass(frozen=True)
class Batch:
    """Columns for one table of the schema, in source order; columns that are absent are null.

    An `events` batch may also carry `order_key` (Int64): the source's own tie-breaker for equal times (Ev Idx).
    It need not carry seq, alloc_id, span_id, step, phase or category: what the source does not say is filled in
    afterwards from addresses and spans. run_id and rank are never in a batch. Stacks may come late, see LATE_STACKS.
    """

    table: str
    columns: pl.DataFrame


@dataclass(frozen=True)
class Filters:
    """What part of a source is wanted; None and True mean everything. Times are in ns, as in events.ts_ns."""

    steps: tuple[int, int] | None = None
    since_ns: int | None = None
    until_ns: int | None = None
    device: str | None = None
    stacks: bool = True
    spans: bool = True


@dataclass
class Issue:
    """A kind of issue met so far: how often, and where first."""

    count: int = 0
    first_at: int | None = None
    first_unit: str | None = None
    detail: str = ""


@dataclass
class Notes:
    """What an adapter says beside its batches: facts for the `runs` row, and issues.

    `facts` takes column names of `runs` (torch_version, alloc_conf, time_base, ring_buffer, truncated,
    source_entries, memory_event_count, metadata, ...), `rank` the rank that the source states.
    """

    filename: str = ""
    filters: Filters = field(default_factory=Filters)
    rank: int | None = None
    facts: dict[str, object] = field(default_factory=dict)
    issues: dict[str, Issue] = field(default_factory=dict)

    def add(self, code: str, *, count: int = 1, at: int | None = None, unit: str = "entry", detail: str = "") -> None:
        """Count an issue; `at` in `unit` (byte, line, entry, seq) is kept for the first case only."""
        if code not in issue_codes():
            raise AssertionError(f"unknown issue code {code!r}: add it to schemas/issues.sql")
        if count <= 0:
            return
        issue = self.issues.setdefault(code, Issue())
        if issue.count == 0:
            issue.first_at, issue.first_unit = at, unit if at is not None else None
            issue.detail = detail[:200]
        issue.count += count

    def take(self, issues: Mapping[str, Issue]) -> None:
        """Add what was noted elsewhere, behind what is noted here."""
        for code, issue in issues.items():
            unit = issue.first_unit or "entry"
            self.add(code, count=issue.count, at=issue.first_at, unit=unit, detail=issue.detail)


class Adapter(Protocol):
    """Turns one kind of source into batches. A module can be one; entry-point group `xmem.adapters`."""

    @property
    def name(self) -> str:
        """Name shown in `runs.adapter`."""

    def sniff(self, head: bytes, filename: str) -> bool:
        """Say from the first HEAD_BYTES decompressed bytes whether this is such a source; never raises."""

    def read(self, source: BinaryIO, notes: Notes) -> Iterator[Batch]:
        """Yield batches in source order. `source` is decompressed, read once, forward only.

        Raises UnreadableError (nothing to read in it) and RefusedError (hostile); a bad record is an issue.
        """


def adapters() -> tuple[Adapter, ...]:
    """Return plug-ins first, then built-ins, so that a plug-in can take over a format."""
    return (*_plugged(), *map(_built_in, BUILT_IN))


@cache
def _plugged() -> tuple[Adapter, ...]:
    from importlib.metadata import entry_points

    plugged = []
    for point in entry_points(group=ENTRY_POINT_GROUP):
        try:
            plugged.append(cast(Adapter, point.load()))
        except Exception as error:
            raise UsageError(
                f"The adapter plug-in {point.name!r} ({point.value}) cannot be imported: {error}",
                "Repair or uninstall the package that provides it.",
            ) from error
    return tuple(plugged)


def _built_in(name: str) -> Adapter:
    return cast(Adapter, importlib.import_module(f"xmem.ingest.{name}"))


def find_adapter(head: bytes, filename: str) -> Adapter | None:
    """Return the first adapter that recognises the head, or None; those behind it are not even imported."""
    candidates = chain(_plugged(), map(_built_in, BUILT_IN))
    return next((adapter for adapter in candidates if adapter.sniff(head, filename)), None)
