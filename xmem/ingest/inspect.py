"""Says what a file is without storing anything: kind, size, time, devices, and what could be recorded better."""

from __future__ import annotations

import re
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xmem.errors import UnreadableError
from xmem.ingest.adapter import Adapter, Batch, Notes
from xmem.schema import issue_codes

if TYPE_CHECKING:
    from xmem.ingest.source import Source

#: Reading stops after this; what follows is estimated from the part that was read.
BUDGET_S = 1.5
#: Switches of torch.profiler that a trace states, and what one misses without them.
SWITCHES = {
    "profile_memory": "without it a trace holds no memory events",
    "record_shapes": "without it operators have no shapes, which a prediction for a GPU needs",
    "with_stack": "without it allocations have neither modules nor lines of code",
}


@dataclass(frozen=True)
class Inspection:
    """What a file is. `estimated` says that only its beginning was read and that counts are extrapolated.

    `entries` are records that speak of memory, `memory_events` rows of allocations, frees and segments; times are ns in
    `time_base`. `switches` are those of torch.profiler that the file states. `advice` is what to do better.
    """

    file: str
    kind: str
    source_bytes: int
    compressed: bool
    estimated: bool
    torch_version: str | None
    rank: int | None
    devices: tuple[str, ...]
    entries: int
    memory_events: int
    spans: int
    stacks: int
    bytes_per_entry: int | None
    time_base: str | None
    first_ts_ns: int | None
    last_ts_ns: int | None
    ring_buffer: bool
    truncated: bool
    switches: dict[str, bool]
    issues: dict[str, int]
    advice: tuple[str, ...]


@dataclass
class _Seen:
    """What the batches held so far."""

    rows: Counter[str] = field(default_factory=Counter)
    devices: set[str] = field(default_factory=set)
    first_ts_ns: int | None = None
    last_ts_ns: int | None = None
    complaint: UnreadableError | None = None
    whole: bool = True

    def take(self, batch: Batch) -> None:
        """Count a batch."""
        self.rows[batch.table] += batch.columns.height
        if batch.table not in ("events", "segments") or batch.columns.height == 0:
            return
        for kind, index in batch.columns.select("device_type", "device_index").unique().rows():
            self.devices.add(kind if index < 0 else f"{kind}:{index}")
        if batch.table == "segments":
            return
        times: Any = batch.columns["ts_ns"]
        if (first := times.min()) is not None:
            self.first_ts_ns = first if self.first_ts_ns is None else min(first, self.first_ts_ns)
            self.last_ts_ns = times.max() if self.last_ts_ns is None else max(times.max(), self.last_ts_ns)


def inspect(path: str | Path, *, budget_s: float = BUDGET_S) -> Inspection:
    """Read the beginning of a file, the whole of it where `budget_s` seconds are enough, and say what it is.

    Raises UsageError (no such file), UnreadableError (empty, unknown) and RefusedError (hostile), as `ingest` does.
    """
    from xmem.ingest.pipeline import adapter_of
    from xmem.ingest.source import open_source

    with open_source(path) as source:
        adapter = adapter_of(source, str(path))
        notes = Notes(filename=source.name)
        head = _head(source.head(), adapter)
        seen = _read(adapter, source, notes, budget_s)
        return _inspection(source, adapter, notes, seen, head)


def _read(adapter: Adapter, source: Source, notes: Notes, budget_s: float) -> _Seen:
    """Take batches until the budget is used up, or to the end where everything has left the disk by then."""
    seen, size, deadline = _Seen(), _size(source), None
    try:
        for batch in adapter.read(source, notes):  # type: ignore[arg-type]
            seen.take(batch)
            deadline = deadline or time.monotonic() + budget_s
            if time.monotonic() > deadline and source.disk_bytes < size:
                seen.whole = False
                break
    except UnreadableError as error:
        seen.complaint = error
    return seen


def _size(source: Source) -> int:
    return source.path.stat().st_size if source.path is not None else source.disk_bytes


def _inspection(source: Source, adapter: Adapter, notes: Notes, seen: _Seen, head: bytes) -> Inspection:
    facts = notes.facts
    size = _size(source)
    share = 1.0 if seen.whole else min(1.0, source.disk_bytes / max(size, 1))
    memory_events = round(seen.rows["events"] / share)
    entries = int(str(facts.get("source_entries") or 0)) if seen.whole else memory_events
    offset = int(str(facts.get("ts_offset_ns") or 0))
    switches = _switches(head)
    return Inspection(
        file=source.name,
        kind=adapter.name,
        source_bytes=size,
        compressed=source.compressed,
        estimated=not seen.whole,
        torch_version=_text(facts.get("torch_version")),
        rank=_rank(source, notes, head),
        devices=tuple(sorted(seen.devices)),
        entries=entries,
        memory_events=memory_events,
        spans=round(seen.rows["spans"] / share),
        stacks=round(seen.rows["stacks"] / share),
        bytes_per_entry=round(size / entries) if entries else None,
        time_base=_text(facts.get("time_base")),
        first_ts_ns=None if seen.first_ts_ns is None else seen.first_ts_ns + offset,
        last_ts_ns=None if seen.last_ts_ns is None else seen.last_ts_ns + offset,
        ring_buffer=bool(facts.get("ring_buffer")),
        truncated=bool(facts.get("truncated")) or source.truncated,
        switches=switches,
        issues={code: issue.count for code, issue in notes.issues.items()},
        advice=_advice(adapter, notes, seen, switches),
    )


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _head(beginning: bytes, adapter: Adapter) -> bytes:
    """Return what stands before the events of a torch.profiler trace; nothing for other kinds."""
    head, _, _ = beginning.partition(b'"traceEvents"')
    return head if adapter.name == "torch_trace" and b'"schemaVersion"' in head else b""


def _switches(head: bytes) -> dict[str, bool]:
    """Return the profiler's switches; a trace states only those that are on."""
    if not head:
        return {}
    return {name: re.search(rb'"%s"\s*:\s*1' % name.encode(), head) is not None for name in SWITCHES}


def _rank(source: Source, notes: Notes, head: bytes) -> int | None:
    from xmem.ingest.ranks import rank_from_name

    if notes.rank is not None:
        return notes.rank
    stated = re.search(rb'"rank"\s*:\s*(\d{1,9})', head)
    return int(stated[1]) if stated else rank_from_name(source.name)


def _advice(adapter: Adapter, notes: Notes, seen: _Seen, switches: dict[str, bool]) -> tuple[str, ...]:
    advice = [f"Record with {name}=True: {SWITCHES[name]}." for name, on in switches.items() if not on]
    if seen.complaint is not None:
        advice += [seen.complaint.message, seen.complaint.hint]
    advice += [issue_codes()[code].advice for code in notes.issues]
    if adapter.name == "cuda_snapshot" and not seen.rows["stacks"] and seen.rows["events"]:
        advice.append('Record stacks with _record_memory_history(stacks="python").')
    return tuple(dict.fromkeys(text for text in advice if text))
