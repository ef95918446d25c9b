"""Reads torch.profiler traces (Kineto's Chrome JSON): memory events, spans and devices."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, BinaryIO

from xmem.errors import UnreadableError, UsageError
from xmem.ingest.adapter import Batch, Notes
from xmem.ingest.json_stream import RecordStream
from xmem.ingest.source import Source
from xmem.ingest.trace_records import MEMORY, OUT_OF_MEMORY, Record, decode_exact, decode_fast, rescue_event

if TYPE_CHECKING:
    from xmem.ingest.trace_columns import TraceColumns
    from xmem.ingest.trace_shares import Share

name = "torch_trace"

#: Top-level keys that are looked for even where the header is broken.
KNOWN_FIELDS = (
    "baseTimeNanoseconds", "deviceProperties", "distributedInfo", "profile_memory", "record_shapes", "with_stack",
    "with_modules", "host_name", "torch_version", "schemaVersion",
)  # fmt: skip
SWITCHES = ("profile_memory", "record_shapes", "with_stack", "with_modules", "with_flops")
HOW_TO_RECORD = "Record with torch.profiler.profile(profile_memory=True, record_shapes=True, with_stack=True)."
_METADATA_LIMIT = 1 << 16


def sniff(head: bytes, filename: str) -> bool:
    """Say whether it is JSON that no other adapter claims: this one also explains what is missing in it."""
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip(b" \t\r\n\0")
    return text[:1] in (b"{", b"[") and text[1:2] != b"\0"  # that would be UTF-16


def read(source: BinaryIO, notes: Notes) -> Iterator[Batch]:
    """Yield events and spans in file order, devices last; facts and rank are complete at the end."""
    from xmem.ingest.trace_shares import start_shares

    stream = open_stream(source, notes)
    if not stream.start():
        raise _not_a_trace(stream)
    base_ns = base_time(stream.fields)
    shares = start_shares(source, stream, base_ns)  # before the imports that columns need
    from xmem.ingest.trace_columns import TraceColumns

    columns = TraceColumns(notes, base_ns)
    yield from _read_all(stream, columns, shares)
    if not columns.memory_rows and not columns.oom_rows:
        raise _no_memory(stream, columns)
    _state_facts(stream.fields, columns, notes)
    yield from device_batches(stream.fields, columns.seen_devices())


def open_stream(source: BinaryIO, notes: Notes) -> RecordStream[Record]:
    """Return the records of a trace; it is for the caller to start."""
    return RecordStream(
        source, notes, decode_fast, decode_exact, lambda value, at: rescue_event(value, at, notes), known=KNOWN_FIELDS
    )


def _read_all(stream: RecordStream[Record], columns: TraceColumns, shares: list[Share]) -> Iterator[Batch]:
    """Read the first share here and take the others; what fails there, and all behind it, is read here too."""
    from xmem.ingest.trace_shares import end_shares, take_share

    try:
        yield from _read_on(stream, columns)
        if stream.at_stop and isinstance(stream.source, Source):
            stream.source.finish()  # hash the rest while the others are at work
        for share in shares:
            if not stream.at_stop:
                break
            batches = take_share(share, columns, stream)
            if batches is not None:
                yield from batches
                continue
            with open(share.path, "rb") as file:
                stream.go_on_from(file, file.seek(share.start))
                yield from _read_on(stream, columns)
    finally:
        end_shares(shares)


def _read_on(stream: RecordStream[Record], columns: TraceColumns) -> Iterator[Batch]:
    for records, text in stream:
        columns.add(records, text)
        del records, text  # their memory is for the next chunk
        yield from columns.take()
    yield from columns.take(everything=True)


def base_time(fields: dict[str, object]) -> int | None:
    """Return baseTimeNanoseconds, to which times are relative; None where the file does not state it."""
    base = fields.get("baseTimeNanoseconds")
    if isinstance(base, str) and base.isdecimal():
        base = int(base)
    return base if isinstance(base, int) and 0 < base < 1 << 63 else None


def stated_rank(fields: dict[str, object]) -> int | None:
    """Return the rank that distributedInfo states."""
    distributed = fields.get("distributedInfo")
    rank = distributed.get("rank") if isinstance(distributed, dict) else None
    if isinstance(rank, str) and rank.isdecimal() and len(rank) < 10:
        rank = int(rank)
    return rank if isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank < 1 << 31 else None


def device_batches(fields: dict[str, object], seen: list[tuple[str, int]]) -> Iterator[Batch]:
    """Yield the devices that the file describes; their type is that of the memory events."""
    import polars as pl

    described = fields.get("deviceProperties")
    rows = [item for item in described if isinstance(item, dict)] if isinstance(described, list) else []
    kinds = [kind for kind, _ in seen if kind not in ("cpu", "unknown")]
    kind = kinds[0] if kinds else "hip" if any(key.startswith("hip_") for key in fields) else "cuda"
    whole = {
        "device_index": "id", "total_bytes": "totalGlobalMem", "compute_major": "computeMajor",
        "compute_minor": "computeMinor", "multiprocessors": "numSms",
    }  # fmt: skip
    devices = []
    for row in rows:
        values: dict[str, object] = {
            column: row[key] for column, key in whole.items() if isinstance(row.get(key), int) and row[key] < 1 << 63
        }
        if "device_index" in values:
            label = row.get("name")
            devices.append({"device_type": kind, "name": label if isinstance(label, str) else None, **values})
    if devices:
        schema = {"device_type": pl.String, "name": pl.String} | dict.fromkeys(whole, pl.Int64)
        frame = pl.DataFrame(devices, schema=schema).unique(["device_type", "device_index"], maintain_order=True)
        yield Batch("devices", frame)


def _state_facts(fields: dict[str, object], columns: TraceColumns, notes: Notes) -> None:
    base = base_time(fields)
    if columns.base_ns is None and base is not None and not columns.absolute:
        notes.facts["ts_offset_ns"] = base
    notes.facts["time_base"] = "unix" if columns.absolute or base is not None else "relative"
    notes.facts["source_entries"] = columns.memory_records
    notes.facts["memory_event_count"] = columns.memory_rows
    version = find_torch_version(fields)
    if version:
        notes.facts["torch_version"] = version
    notes.facts["metadata"] = metadata_text(fields)
    notes.rank = stated_rank(fields)


def find_torch_version(fields: dict[str, object]) -> str | None:
    """Return torch's version where somebody wrote it into the file (torch itself does not)."""
    for key in ("torch_version", "pytorch_version", "torch", "PyTorch version", "torch.__version__"):
        value = fields.get(key)
        if isinstance(value, str) and re.match(r"\d+\.\d+", value):
            return value[:64]
    return None


def metadata_text(fields: dict[str, object]) -> str | None:
    """Return the other header fields as JSON text, long ones left out."""
    import msgspec

    kept: dict[str, object] = {}
    room = _METADATA_LIMIT
    for key, value in fields.items():
        size = len(msgspec.json.encode(value, enc_hook=str))
        if key != "deviceProperties" and size <= room:
            room -= size
            kept[key] = value
    return msgspec.json.encode(kept, enc_hook=str).decode() if kept else None


def switches(fields: dict[str, object]) -> dict[str, bool]:
    """Return which of the profiler's switches were on: Kineto writes only those."""
    nested: object = fields.get("metadata")
    for key in ("profiler", "torch_profiler_kwargs"):
        nested = nested.get(key) if isinstance(nested, dict) else None
    stated = {**nested, **fields} if isinstance(nested, dict) else fields
    return {switch: stated.get(switch) in (1, True, "1", "true", "True") for switch in SWITCHES}


def _not_a_trace(stream: RecordStream[Record]) -> UnreadableError:
    keys = ", ".join(repr(key) for key in list(stream.fields)[:6])
    if not stream.fields:
        what = "It is JSON" if not stream.notes.issues else "It looks like JSON but cannot be read as such"
    else:
        what = f"It is a JSON object with the keys {keys}"
    return UnreadableError(
        f"{stream.notes.filename or 'The source'} is no torch.profiler trace: {what}, without a list traceEvents.",
        "xmem reads torch.profiler traces, CUDA memory snapshots, memory timelines and its own event logs."
        f" {HOW_TO_RECORD}",
    )


def _no_memory(stream: RecordStream[Record], columns: TraceColumns) -> UnreadableError | UsageError:
    shown = stream.notes.filename or "The source"
    if columns.other_devices:
        return UsageError(
            f"{shown} has no memory events of the device {stream.notes.filters.device!r}.",
            f"It has: {', '.join(sorted(columns.other_devices))}.",
        )
    if not columns.records:
        return UnreadableError(f"{shown} holds no trace records that can be read.", HOW_TO_RECORD)
    if columns.memory_records:
        return UnreadableError(
            f"{shown} has {columns.memory_records:,} {MEMORY} events, but none of them has Bytes and ts.", HOW_TO_RECORD
        )
    plural = "s" if columns.records != 1 else ""
    counted = f"{columns.records:,} record{plural}, but no {MEMORY} or {OUT_OF_MEMORY} event"
    if not stream.bare and "schemaVersion" not in stream.fields and not any(switches(stream.fields).values()):
        return UnreadableError(
            f"{shown} has {counted}: it has no schemaVersion, so another program than torch.profiler wrote it.",
            f"xmem needs the allocations and frees themselves. {HOW_TO_RECORD}",
        )
    if switches(stream.fields)["profile_memory"]:
        return UnreadableError(
            f"{shown} has {counted}, although it was recorded with profile_memory=True: nothing was allocated or freed"
            " while the profiler recorded, or the events were lost in the export.",
            "Record at least one whole training step; if there still are none, ingest a memory snapshot instead"
            " (torch.cuda.memory._dump_snapshot).",
        )
    return UnreadableError(
        f"{shown} has {counted}: it was recorded without profile_memory=True.",
        HOW_TO_RECORD,
    )
