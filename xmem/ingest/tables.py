"""Turns the batches of one source into the tables of the schema: orders, completes, attributes and hands them on."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from xmem.ingest.attribute import Attribution, attribute_events, attribute_spans, write_spans
from xmem.ingest.lifetimes import DeviceHistory, DeviceSource, build_history
from xmem.ingest.ordering import check_device, device_name, of_device, order_events, used_devices
from xmem.ingest.spool import Spool, column_types, complete, in_types_of
from xmem.ingest.window import DeviceStart, cut_to_window
from xmem.ingest.words import code_words
from xmem.schema import SCHEMA_VERSION, issue_codes, layout
from xmem.version import __version__

if TYPE_CHECKING:
    import polars as pl

    from xmem.ingest.adapter import Notes


class Write(Protocol):
    """Takes rows of a table on their way into the store; each part is a file of its own."""

    def __call__(self, table: str, frame: pl.DataFrame, part: int = 0) -> None:
        """Append the rows."""


_MEMORY_ACTIONS = {"alloc": 1, "free_requested": 1, "free_completed": 1}
#: Rows that are written at a time.
_ROWS_AT_A_TIME = 1 << 18
#: Spans beyond which they are worked on before the events, not beside: it keeps memory low.
_MANY_SPANS = 2_000_000


@dataclass(frozen=True)
class FinalState:
    """Segments and blocks of a snapshot; blocks carry the device, stream and pool of their segment."""

    segments: pl.DataFrame
    blocks: pl.DataFrame


def build_tables(spool: Spool, notes: Notes, facts: dict[str, object], write: Write) -> None:
    """Write every table of one source; spans are written beside the work on events."""
    offset_ns = int(str(notes.facts.pop("ts_offset_ns", 0)))
    counts = {"stack_count": spool.rows("stacks")}
    notes.issues.pop("no_addresses", None)  # counted again where frees are paired
    spool.settle()
    recorded_events = complete("events", spool.take_all("events"))
    state = _final_state(spool, recorded_events, notes.filters.device)
    devices = complete("devices", spool.take_all("devices"))
    events = order_events(recorded_events, notes, offset_ns)
    del recorded_events
    recorded = _recorded_facts(events, notes)
    with ThreadPoolExecutor(2) as beside:
        many = spool.rows("spans") > _MANY_SPANS
        building = None if many else beside.submit(_histories, events, state, devices, notes)
        attribution, places = attribute_spans(spool, offset_ns)
        writing = beside.submit(write_spans, attribution, places, spool, offset_ns, notes.filters, write)
        del places
        if many:
            writing.result()
        histories = building.result() if building else _histories(events, state, devices, notes)
        del events
        joined, alloc_of_block = _joined(histories, state, attribution, notes)
        kept, starts = cut_to_window(joined, [history.start for history in histories], notes.filters)
        _write_events(kept, write)
        counts["span_count"] = writing.result()
    for frame in spool.frames("stacks"):
        write("stacks", frame)
    write("segments", complete("segments", state.segments))
    write("blocks", state.blocks.select(_names("blocks", state.blocks)).with_columns(alloc_id=alloc_of_block))
    write("devices", _device_rows(starts, devices, notes))
    write("issues", issue_rows(notes))
    baseline = sum(start.baseline_bytes for start in starts)
    facts = {**facts, **counts, **recorded, "event_count": kept.height, "baseline_bytes": baseline}
    write("runs", _run_row(facts, notes))


def issue_rows(notes: Notes) -> pl.DataFrame:
    """Return the issues of one source as rows."""
    import polars as pl

    codes = issue_codes()
    rows = [
        {
            "code": code, "severity": codes[code].severity, "count": issue.count,
            "first_at": issue.first_at, "first_unit": issue.first_unit, "detail": issue.detail or None,
        }
        for code, issue in notes.issues.items()
    ]  # fmt: skip
    words = {"code": pl.String, "severity": pl.String, "first_unit": pl.String, "detail": pl.String}
    return pl.DataFrame(rows, schema={"count": pl.Int64, "first_at": pl.Int64, **words})


def _names(table: str, frame: pl.DataFrame) -> list[str]:
    wanted = set(layout()[table].column_names)
    return [name for name in frame.columns if name in wanted]


def _final_state(spool: Spool, events: pl.DataFrame, device: str | None) -> FinalState:
    segments = complete("segments", spool.take_all("segments"))
    check_device(device, events, segments)
    segments = of_device(segments, device)
    blocks = complete("blocks", spool.take_all("blocks"))
    holder = segments.select("segment_id", "device_type", "device_index", "stream", "pool_id")
    held = blocks.join(holder, on="segment_id", maintain_order="left")
    return FinalState(segments, held.with_row_index("block_row"))


def _histories(events: pl.DataFrame, state: FinalState, devices: pl.DataFrame, notes: Notes) -> list[DeviceHistory]:
    """Build the history of each device that has rows, in order of device."""
    found = []
    first_seq = 0
    last_ns = int(events["ts_ns"].max() or 0) if events.height else 0  # type: ignore[arg-type]
    used = used_devices(events, state.segments)
    for device_type, device_index in used:
        of_device = {"device_type": device_type, "device_index": device_index}
        about = devices.filter(**of_device)
        source = DeviceSource(
            device_type=device_type,
            device_index=device_index,
            events=events if len(used) == 1 else events.filter(**of_device),
            segments=state.segments.filter(**of_device),
            blocks=state.blocks.filter(**of_device),
            pairing="given" if notes.facts.get("paired") else str(notes.facts.get("pairing", "address")),
            ordered=bool(notes.facts.get("ordered", False)),
            total_bytes=about["total_bytes"][0] if about.height else None,
            default_ts_ns=last_ns,
            first_seq=first_seq,
            rounded=device_type in ("cuda", "hip") and state.segments.height > 0 and not _rounds_further(notes),
        )
        history = build_history(source, notes)
        first_seq += history.events.height
        found.append(history)
    if len(used) > 1:
        names = ", ".join(device_name(*device) for device in used)
        notes.add("several_devices", count=len(used), detail=names)
    return found


def _rounds_further(notes: Notes) -> bool:
    """Say whether the recording's settings round requests to parts of powers of two."""
    if "roundup_power2_divisions" in str(notes.facts.get("alloc_conf") or ""):
        return True
    settings = json.loads(str(notes.facts.get("allocator_settings") or "{}"))
    divisions = settings.get("roundup_power2_divisions") if isinstance(settings, dict) else None
    return any(divisions.values()) if isinstance(divisions, dict) else bool(divisions)


def _joined(
    histories: list[DeviceHistory], state: FinalState, attribution: Attribution, notes: Notes
) -> tuple[pl.DataFrame, pl.Series]:
    """Put the devices' events behind one another, number allocations through, and attribute them."""
    import polars as pl

    parts, first_group, first_seq = [], 0, 0
    alloc_of_block = np.full(state.blocks.height, -1, dtype=np.int64)
    block_rows = []
    for history in histories:
        of_device = {"device_type": history.start.device_type, "device_index": history.start.device_index}
        group = pl.when(pl.col("group") >= 0).then(pl.col("group") + first_group).otherwise(-1)
        parts.append(
            history.events.with_columns(
                device_type=pl.lit(of_device["device_type"], dtype=pl.Categorical),
                device_index=pl.lit(of_device["device_index"], dtype=pl.Int32),
                group=group,
                end_seq=pl.when(pl.col("end_row") >= 0).then(pl.col("end_row") + first_seq),
            )
        )
        first_seq += history.events.height
        rows = state.blocks.filter(**of_device)["block_row"].to_numpy()
        block_rows.append((rows, np.where(history.block_groups >= 0, history.block_groups + first_group, -1)))
        first_group += history.groups
    events = pl.concat(parts) if parts else complete("events", spool_empty())
    ids = _alloc_ids(events, first_group)
    for rows, groups in block_rows:
        alloc_of_block[rows] = ids[groups]
    alloc_id = pl.Series(ids[events["group"].to_numpy()])
    events = events.with_columns(seq=pl.int_range(pl.len(), dtype=pl.Int64), alloc_id=alloc_id.set(alloc_id < 0, None))
    blocks = pl.Series(alloc_of_block)
    return attribute_events(events, attribution, notes), blocks.set(blocks < 0, None)


def spool_empty() -> pl.DataFrame:
    """Return events without rows, with the columns that lifetimes add."""
    import polars as pl

    from xmem.ingest.spool import empty_frame

    names = ("group", "source_row", "end_row")
    return empty_frame("events").with_columns(pl.lit(None, dtype=pl.Int64).alias(name) for name in names)


def _alloc_ids(events: pl.DataFrame, groups: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Number allocations by their first row; numbers that the source gave stay, others come behind them."""
    group = events["group"].to_numpy()
    owned = np.flatnonzero(group >= 0)[::-1]
    first = np.full(groups, -1, dtype=np.int64)
    first[group[owned]] = owned  # of several rows the last assignment stays, which is the first row
    known = np.flatnonzero(first >= 0)
    ids = np.full(groups + 1, -1, dtype=np.int64)
    given = events["alloc_id"]
    if given.null_count() < len(given):
        ids[known] = given.fill_null(-1).to_numpy()[first[known]]
    fresh = known[ids[known] < 0]
    begins = np.zeros(events.height, dtype=np.int64)
    begins[first[fresh]] = 1
    ids[fresh] = np.cumsum(begins)[first[fresh]] + int(ids.max(initial=-1))
    return ids


def _write_events(frame: pl.DataFrame, write: Write) -> None:
    """Write events in row groups; many of them as two files, by two threads."""
    chosen = frame.select(_names("events", frame))
    parts = 2 if chosen.height > 2 * _ROWS_AT_A_TIME else 1
    half = -(-chosen.height // parts)

    def write_part(part: int) -> None:
        rows = chosen.slice(part * half, half)
        for start in range(0, rows.height, _ROWS_AT_A_TIME):
            write("events", rows.slice(start, _ROWS_AT_A_TIME), part)

    with ThreadPoolExecutor(parts) as pool:
        list(pool.map(write_part, range(parts)))


def _device_rows(starts: list[DeviceStart], devices: pl.DataFrame, notes: Notes) -> pl.DataFrame:
    import polars as pl

    lossy = bool(notes.facts.get("ring_buffer")) or "bad_record" in notes.issues
    keys = ["device_type", "device_index"]
    names = [*keys, "baseline_bytes", "baseline_reserved_bytes", "complete_history"]
    types = column_types("devices")
    rows = [{name: getattr(start, name) for name in names} for start in starts]
    frame = pl.DataFrame(rows, schema={name: types[name] for name in names})
    known = devices.drop("baseline_bytes", "baseline_reserved_bytes", "complete_history").unique(keys, keep="first")
    whole = pl.col("complete_history") & (not lossy)
    return frame.with_columns(whole).join(known, on=keys, how="left", maintain_order="left")


def _recorded_facts(events: pl.DataFrame, notes: Notes) -> dict[str, object]:
    """Count what the source held, where the adapter did not."""

    memory = int((code_words(events["action"], _MEMORY_ACTIONS, 0) > 0).sum())
    return {
        "first_ts_ns": events["ts_ns"].min(),
        "last_ts_ns": events["ts_ns"].max(),
        "source_entries": notes.facts.get("source_entries", events.height),
        "memory_event_count": notes.facts.get("memory_event_count", memory),
    }


def _run_row(facts: dict[str, object], notes: Notes) -> pl.DataFrame:
    import polars as pl

    row: dict[str, object] = {
        "schema_version": SCHEMA_VERSION, "xmem_version": __version__, "time_base": "relative",
        "ring_buffer": False, "truncated": False,
    }  # fmt: skip
    known = set(layout()["runs"].column_names)
    row.update({name: value for name, value in notes.facts.items() if name in known and value is not None})
    row.update(facts)
    if not isinstance(row.get("metadata"), str | None):
        row["metadata"] = json.dumps(row["metadata"], default=str)
    return in_types_of("runs", pl.DataFrame([row], infer_schema_length=None))
