"""Turns the batches of one source into the tables of the schema: orders, completes, attributes and hands them on."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

import numpy as np

from xmem.ingest.attribute import Attribution, attribute_events, attribute_spans, write_spans
from xmem.ingest.beginning import Beginning, FinalState, build_histories, take_ordered
from xmem.ingest.lifetimes import DeviceHistory
from xmem.ingest.spool import Spool, column_types, complete, in_types_of, place_late
from xmem.ingest.window import DeviceStart, cut_to_window
from xmem.schema import SCHEMA_VERSION, issue_codes, layout
from xmem.version import __version__

if TYPE_CHECKING:
    import polars as pl

    from xmem.ingest.adapter import Notes


class Write(Protocol):
    """Takes rows of a table on their way into the store; each part is a file of its own."""

    def __call__(self, table: str, frame: pl.DataFrame, part: int = 0) -> None:
        """Append the rows."""


#: Rows that are written at a time.
_ROWS_AT_A_TIME = 1 << 18
#: Spans beyond which they are worked on before the events, not beside: it keeps memory low.
_MANY_SPANS = 2_000_000


def build_tables(
    spool: Spool, notes: Notes, facts: dict[str, object], write: Write, begun: Beginning | None = None
) -> None:
    """Write every table of one source; spans are written beside the work on events, which may have `begun`."""
    offset_ns = int(str(notes.facts.pop("ts_offset_ns", 0)))
    counts = {"stack_count": spool.rows("stacks")}
    notes.issues.pop("no_addresses", None)  # counted again where frees are paired
    spool.settle()
    ordered = begun.ordered if begun else take_ordered(spool, notes, offset_ns)
    state, devices, recorded = ordered.state, ordered.devices, ordered.recorded
    with ThreadPoolExecutor(2) as beside:
        many = spool.rows("spans") > _MANY_SPANS
        building = None if many or begun else beside.submit(build_histories, ordered, notes)
        attribution, places = attribute_spans(spool, offset_ns)
        writing = beside.submit(write_spans, attribution, places, spool, offset_ns, notes.filters, write)
        del places
        if many:
            writing.result()
        histories = begun.join(notes) if begun else building.result() if building else build_histories(ordered, notes)
        del ordered, begun, building
        joined, alloc_of_block = _joined(histories, state, attribution, place_late(spool), notes)
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


def _joined(
    histories: list[DeviceHistory], state: FinalState, attribution: Attribution, stack: pl.Expr, notes: Notes
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
    alloc_id = alloc_id.set(alloc_id < 0, None)
    events = events.with_columns(seq=pl.int_range(pl.len(), dtype=pl.Int64), alloc_id=alloc_id, stack_id=stack)
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
