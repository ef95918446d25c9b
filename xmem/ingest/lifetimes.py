"""Gives the events of one device their allocations: who frees what, inferred rows, levels, contradictions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from xmem.ingest.inferring import AT_START, Additions, close_lost, join_final_blocks, open_lost, request_lost
from xmem.ingest.levels import (
    Levels,
    baseline_of_totals,
    check_device_total,
    check_totals,
    fill_levels,
    row_bytes,
)
from xmem.ingest.matching import (
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    OTHER,
    Bools,
    Ints,
    Pairing,
    Rows,
    addresses_are_useless,
    empty_pairing,
    few_match,
    join,
    pair_by_key,
    pair_by_size,
)
from xmem.ingest.ordering import device_name
from xmem.ingest.segments import infer_mapped, infer_segments
from xmem.ingest.window import DeviceStart
from xmem.ingest.words import Codes, code_words

if TYPE_CHECKING:
    import polars as pl

    from xmem.ingest.adapter import Notes

_LEAST_BLOCK = 512
_CODES = {"alloc": ALLOC, "free_requested": FREE_REQUESTED, "free_completed": FREE_COMPLETED}


@dataclass(frozen=True)
class DeviceSource:
    """The events of one device in true order, its final state, and how the source tells allocations apart.

    `pairing` is address, size, given or none; `ordered` sources (snapshots, logs) carry the allocator's addresses.
    `rounded` says that requests were rounded up to 512 bytes and no further.
    """

    device_type: str
    device_index: int
    events: pl.DataFrame
    segments: pl.DataFrame
    blocks: pl.DataFrame
    pairing: str = "address"
    ordered: bool = False
    total_bytes: int | None = None
    default_ts_ns: int = 0
    first_seq: int = 0
    rounded: bool = False

    @property
    def device(self) -> str:
        """Name of the device: `cuda:0`, `cpu`."""
        return device_name(self.device_type, self.device_index)


@dataclass(frozen=True)
class DeviceHistory:
    """The events of one device with inferred rows, `group` (number of the allocation, -1: none) and levels."""

    events: pl.DataFrame
    block_groups: Ints
    groups: int
    start: DeviceStart


def build_history(source: DeviceSource, notes: Notes) -> DeviceHistory:
    """Work out allocations and levels of one device; what was repaired or inferred goes into `notes`."""
    baseline, shift = baseline_of_totals(source.events, source.device, notes)
    pairing, guessed = _pair_rows(source, baseline, notes)
    additions = Additions()
    lost = _complete_pairs(source, pairing, additions, notes)
    final = join_final_blocks(source.events, pairing, source.blocks, additions)
    contradictions = infer_segments(source.events, source.segments, additions)
    contradictions += infer_mapped(source.events, source.segments, additions)
    if source.segments.height:
        contradictions += final.contradictions
    pending = _add_remainder(baseline - additions.bytes_at_start(), final.pending, additions)
    events = _with_groups(source, pairing, final.group)
    rows = _insert(events, additions.sorted(), source.default_ts_ns)
    rows = _complete_rows(_rounded(rows) if source.rounded else rows, len(pending))
    levels = fill_levels(rows, pending)
    if guessed and source.device != "cpu":
        levels = _use_totals(levels, shift)
    check_totals(levels.events, source.events, source.device, shift, notes)
    check_device_total(levels, source.device, source.total_bytes, notes)
    _note_state(source, levels, pending, contradictions, notes)
    whole = not (lost or contradictions or guessed or levels.before_count) and levels.empty_at_start
    return DeviceHistory(
        events=levels.events,
        block_groups=final.group,
        groups=len(pending),
        start=DeviceStart(
            source.device_type,
            source.device_index,
            levels.baseline_bytes,
            levels.baseline_reserved_bytes,
            whole and source.events.height > 0,
        ),
    )


def _pair_rows(source: DeviceSource, baseline: int, notes: Notes) -> tuple[Pairing, bool]:
    """Return the allocations, and whether they are a guess because addresses are absent or useless."""
    events = source.events
    if source.pairing == "none" or events.height == 0:
        return empty_pairing(events.height), False
    rows = _rows(source)
    if source.pairing == "size":
        return pair_by_size(rows, all_rows=True), False
    by_key = pair_by_key(rows, sizes_agree=not source.ordered and source.pairing == "address")
    if source.pairing == "given":
        return by_key, False
    memory = rows.action != OTHER
    if memory.any() and not (memory & rows.has_key).any():
        totals = "" if events["total_allocated"].is_not_null().any() else ", and no totals"
        notes.add(
            "no_addresses", count=int(memory.sum()), detail=f"{source.device}: {int(memory.sum())} events{totals}"
        )
        return pair_by_size(rows, all_rows=True), True
    if not source.ordered and few_match(rows, by_key):
        by_size = pair_by_size(rows, all_rows=True)
        counted = source.device != "cpu" and events["total_allocated"].is_not_null().all()
        if addresses_are_useless(rows, by_key, by_size, baseline if counted else None):
            notes.add("useless_addresses", count=int(memory.sum()), detail=f"{source.device}: paired by size instead")
            return by_size, True
    if rows.has_key[memory].all():
        return by_key, False
    return join(by_key, pair_by_size(rows, all_rows=False)), False


def _rows(source: DeviceSource) -> Rows:
    import polars as pl

    events = source.events
    action = action_codes(events)
    key = events["alloc_id"] if source.pairing == "given" else events["address"]
    has_key = (key.is_not_null() if source.pairing == "given" else key.fill_null(0) != 0).to_numpy()
    category = events["category"].cast(pl.Categorical).to_physical().fill_null(0).cast(pl.Int64).to_numpy()
    return Rows(action, key.fill_null(0).to_numpy(), has_key, row_bytes(events), category)


def action_codes(events: pl.DataFrame) -> Codes:
    """Code each row's action as ALLOC, FREE_REQUESTED, FREE_COMPLETED or OTHER."""
    return code_words(events["action"], _CODES, OTHER)


def _complete_pairs(source: DeviceSource, pairing: Pairing, additions: Additions, notes: Notes) -> bool:
    """Add the rows that complete allocations; return whether the history has a hole."""
    events, device = source.events, source.device
    has_requested, has_completed = bool((pairing.requested >= 0).any()), bool((pairing.completed >= 0).any())
    lost = close_lost(events, pairing, additions, has_completed=has_completed)
    if has_requested:
        request_lost(events, pairing, additions)
    unmatched = open_lost(events, pairing, additions)
    if lost:
        first = int(np.min(pairing.following[pairing.following >= 0]))
        notes.add("lost_free", count=lost, at=first, unit="seq", detail=f"{device}: {lost} blocks")
    if unmatched:
        rows = pairing.first[pairing.alloc < 0]
        size = int(row_bytes(events)[rows].sum())
        notes.add("unmatched_free", count=unmatched, at=int(rows.min()), unit="seq", detail=f"{device}: {size} bytes")
    return bool(lost or unmatched)


def _add_remainder(missing: int, pending: Bools, additions: Additions) -> Bools:
    """Add one allocation without an address for memory that only the recorded totals know of."""
    import polars as pl

    if missing <= 0:
        return pending
    schema = {"address": pl.UInt64, "block_bytes": pl.Int64}
    row = pl.DataFrame({"address": [None], "block_bytes": [missing]}, schema=schema)
    additions.add("alloc", AT_START, len(pending), row)
    return np.append(pending, False)


def _with_groups(source: DeviceSource, pairing: Pairing, block_groups: Ints) -> pl.DataFrame:
    """Number the rows' allocations and give those that live at the end the size of their final block."""
    import polars as pl

    events = source.events.with_columns(group=pl.Series(pairing.owner), source_row=pl.int_range(pl.len()))
    known = np.flatnonzero((block_groups >= 0) & (block_groups < pairing.count))
    if len(known) == 0:
        return events
    row = pairing.alloc[block_groups[known]]
    known, row = known[row >= 0], row[row >= 0]
    sizes = source.blocks[known]
    place = pl.Series(row, dtype=pl.Int64)
    for name in ("block_bytes", "requested_bytes"):
        column, final = events[name], sizes[name]
        there = column.gather(place)
        events = events.with_columns(column.scatter(place, pl.select(pl.coalesce(there, final)).to_series()))
    return events


def _insert(events: pl.DataFrame, added: pl.DataFrame | None, default_ts_ns: int) -> pl.DataFrame:
    """Put inferred rows in their places; they carry the time of the row that they stand before."""
    import polars as pl

    if added is None:
        return events
    place = np.maximum(added["at"].to_numpy(), 0)
    times = np.append(events["ts_ns"].to_numpy(), events["ts_ns"][-1] if events.height else default_ts_ns)
    added = added.drop("at", "stage").with_columns(
        ts_ns=pl.Series(times[np.minimum(place, events.height)]),
        inferred=pl.lit(True),
        source_row=pl.lit(-1, dtype=pl.Int64),
    )
    together = pl.concat([events, added.match_to_schema(events.schema, missing_columns="insert")])
    order = np.empty(together.height, dtype=np.int64)
    recorded = np.arange(events.height)
    order[recorded + np.searchsorted(place, recorded, side="right")] = recorded
    order[place + np.arange(added.height)] = events.height + np.arange(added.height)
    return together[order]


def _rounded(rows: pl.DataFrame) -> pl.DataFrame:
    """Give allocations whose block nobody saw the least block that torch makes for the request.

    The CUDA caching allocator rounds up to 512 bytes (torch 2.3 to 2.14, without roundup_power2_divisions). A block
    that was not split is larger: that only a replay knows.
    """
    import polars as pl

    least = (pl.col("requested_bytes") + (_LEAST_BLOCK - 1)) // _LEAST_BLOCK * _LEAST_BLOCK
    unseen = (pl.col("action") == "alloc") & (pl.col("group") >= 0) & pl.col("block_bytes").is_null()
    return rows.with_columns(block_bytes=pl.when(unseen).then(least).otherwise("block_bytes"))


def _complete_rows(rows: pl.DataFrame, groups: int) -> pl.DataFrame:
    """Give frees the sizes of their alloc row (what an alloc adds is what its free takes off), and alloc rows
    `end_row`: the row that takes them off the allocated level, -1 where none does.
    """
    import polars as pl

    code, group = action_codes(rows), rows["group"].to_numpy()
    place = np.arange(rows.height)
    rows_of = []
    for word in (ALLOC, FREE_REQUESTED, FREE_COMPLETED):
        row_of = np.full(groups + 1, -1, dtype=np.int64)
        here = (code == word) & (group >= 0)
        row_of[group[here]] = place[here]
        rows_of.append(row_of)
    alloc_row, requested_row, completed_row = rows_of
    is_free = ((code == FREE_REQUESTED) | (code == FREE_COMPLETED)) & (group >= 0)
    source = pl.Series(np.where(is_free, alloc_row[group], place))
    end = np.where(requested_row >= 0, requested_row, completed_row)[group]
    return rows.with_columns(
        *(rows[name].gather(source).alias(name) for name in ("requested_bytes", "block_bytes")),
        end_row=pl.Series(np.where((code == ALLOC) & (group >= 0), end, -1)),
    )


def _use_totals(levels: Levels, shift: int) -> Levels:
    """Take the allocated level from the recorded totals where addresses say nothing."""
    import polars as pl

    recorded = pl.coalesce(pl.col("total_allocated") + shift, "allocated_bytes")
    events = levels.events.with_columns(allocated_bytes=recorded)
    return Levels(**{**vars(levels), "events": events})


def _note_state(source: DeviceSource, levels: Levels, pending: Bools, contradictions: int, notes: Notes) -> None:
    device, code = source.device, action_codes(source.events)
    requested, completed = (int((code == word).sum()) for word in (FREE_REQUESTED, FREE_COMPLETED))
    if levels.before_count:
        detail = f"{device}: {levels.baseline_bytes} bytes in {levels.before_count} blocks"
        notes.add("preexisting_memory", count=levels.before_count, detail=detail)
    if pending.any():
        notes.add("pending_free", count=int(pending.sum()), detail=f"{device}: {int(pending.sum())} blocks")
    if contradictions:
        notes.add("state_mismatch", count=contradictions, detail=f"{device}: {contradictions} blocks or segments")
    skipped = requested > int(pending.sum()) if completed == 0 else requested == 0
    if source.segments.height and skipped:
        word = "free_completed" if completed == 0 else "free_requested"
        notes.add("skipped_actions", count=max(requested, completed), detail=f"{device}: no {word}")
