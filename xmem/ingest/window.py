"""Cuts events to a window of time or steps; what lives at its start becomes memory that was there before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from xmem.errors import UsageError
from xmem.ingest.levels import fill_levels

if TYPE_CHECKING:
    import polars as pl

    from xmem.ingest.adapter import Filters
    from xmem.ingest.phases import Steps

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class DeviceStart:
    """What a device held before its first row, and whether everything that it ever held is known from there on."""

    device_type: str
    device_index: int
    baseline_bytes: int
    baseline_reserved_bytes: int | None
    complete_history: bool


def span_window(filters: Filters, steps: Steps) -> tuple[int | None, int | None]:
    """Return from when to when spans are wanted (None: open)."""
    since, until = filters.since_ns, filters.until_ns
    if filters.steps is not None:
        chosen = (steps.number >= filters.steps[0]) & (steps.number <= filters.steps[1])
        if chosen.any():
            since = max(int(steps.start[chosen].min()), since or 0)
            until = min(int(steps.end[chosen].max()), until if until is not None else np.iinfo(np.int64).max)
    return since, until


def cut_to_window(
    events: pl.DataFrame, starts: Sequence[DeviceStart], filters: Filters
) -> tuple[pl.DataFrame, list[DeviceStart]]:
    """Return the events between --since and --until, or of --steps, and what each device held before them.

    Rows before the window are kept only as far as they say what is there at its start; those are marked inferred.
    """
    import polars as pl

    if filters.steps is None and filters.since_ns is None and filters.until_ns is None:
        return events, list(starts)
    wanted = _wanted(events, filters)
    parts, found, first_seq = [], [], 0
    for start in starts:
        own = (events["device_type"] == start.device_type) & (events["device_index"] == start.device_index)
        kept, cut = _cut_device(events.filter(own), wanted[own.to_numpy()], start)
        parts.append(_renumber(kept, first_seq))
        first_seq += kept.height
        found.append(cut)
    return (pl.concat(parts) if parts else events), found


def _wanted(events: pl.DataFrame, filters: Filters) -> Bools:
    """Mark the rows in the window."""
    wanted = np.ones(events.height, dtype=bool)
    time = events["ts_ns"].to_numpy()
    if filters.since_ns is not None:
        wanted &= time >= filters.since_ns
    if filters.until_ns is not None:
        wanted &= time <= filters.until_ns
    if filters.steps is not None:
        low, high = filters.steps
        step = events["step"].fill_null(-1).to_numpy()
        of_steps = (step >= low) & (step <= high)
        if not of_steps.any():
            there = step[step >= 0]
            shown = f"has steps {there.min()} to {there.max()}" if len(there) else "names no steps"
            raise UsageError(
                f"No event lies in steps {low} to {high}: the source {shown}.",
                "Choose other steps, or cut by time with --since and --until.",
            )
        wanted &= of_steps
    return wanted


def _cut_device(rows: pl.DataFrame, wanted: Bools, start: DeviceStart) -> tuple[pl.DataFrame, DeviceStart]:
    """Keep the stretch from the first to the last wanted row, and put what lives at its start before it."""
    import polars as pl

    place = np.flatnonzero(wanted & ~(rows["inferred"].to_numpy() & (np.arange(rows.height) < _recorded_from(rows))))
    if len(place) == 0:
        return rows.clear(), DeviceStart(start.device_type, start.device_index, 0, None, False)
    low, high = int(place[0]), int(place[-1]) + 1
    if low <= _recorded_from(rows):
        return rows[:high], start
    inside = rows[low:high]
    before = _still_there(rows, low).with_columns(
        ts_ns=pl.lit(inside["ts_ns"][0], dtype=pl.Int64),
        inferred=pl.lit(True),
        step=pl.lit(None, dtype=pl.Int64),
        total_allocated=pl.lit(None, dtype=pl.Int64),
        total_reserved=pl.lit(None, dtype=pl.Int64),
    )
    groups = int(rows["group"].to_numpy().max(initial=-1)) + 1
    levels = fill_levels(before, np.ones(groups, dtype=bool)).events
    reserved = rows["reserved_bytes"][low - 1]
    if levels["reserved_bytes"].null_count() == levels.height:
        levels = levels.with_columns(reserved_bytes=pl.lit(reserved, dtype=pl.Int64))
    kept = pl.concat([levels.select(rows.columns), inside])
    level = int(levels["allocated_bytes"][-1]) if levels.height else 0
    return kept, DeviceStart(start.device_type, start.device_index, level, reserved, False)


def _recorded_from(rows: pl.DataFrame) -> int:
    """Position of the first row that is not memory from before."""
    inferred = rows["inferred"].to_numpy()
    return len(inferred) if inferred.all() else int(np.argmin(inferred))


def _still_there(rows: pl.DataFrame, low: int) -> pl.DataFrame:
    """Return the rows before `low` that say what is there at `low`: segments, live and pending allocations."""
    import polars as pl

    action = rows["action"].cast(pl.String)
    group = rows["group"].to_numpy()
    place = np.arange(rows.height)
    gone = np.zeros(int(group.max(initial=-1)) + 2, dtype=bool)
    ends = action.is_in(["free_requested", "free_completed"]).to_numpy() & (group >= 0)
    last = np.full(len(gone), -1, dtype=np.int64)
    np.maximum.at(last, group[ends], place[ends])
    gone = (last >= 0) & (last < low)
    memory = (action.is_in(["alloc", "free_requested"]).to_numpy() & (group >= 0)) & ~gone[group]
    address = rows["address"].fill_null(0)
    segment = action.is_in(["segment_alloc", "segment_free"])
    newest = rows.select(
        place=pl.int_range(pl.len()), address=address, early=pl.int_range(pl.len()) < low, segment=segment
    ).filter("early", "segment")
    keep = np.zeros(rows.height, dtype=bool)
    keep[newest.group_by("address").agg(pl.col("place").max())["place"].to_numpy()] = True
    keep &= (action == "segment_alloc").to_numpy()
    keep |= action.is_in(["segment_map", "segment_unmap"]).to_numpy()
    keep |= memory
    kept = rows.filter(pl.Series(keep & (place < low)))
    rank = kept["action"].cast(pl.String).replace_strict({"alloc": 1, "free_requested": 2}, default=0)
    by_address = pl.when(rank > 0).then(pl.col("address"))
    return (
        kept.with_columns(rank=rank.clip(0, 1), stage=rank)
        .sort("rank", by_address, "stage", nulls_last=True, maintain_order=True)
        .drop("rank", "stage")
    )


def _renumber(rows: pl.DataFrame, first_seq: int) -> pl.DataFrame:
    """Give rows new seq, and alloc rows the new seq of their end; ends behind the window are unknown."""
    import polars as pl

    old = rows["seq"]
    numbers = pl.DataFrame({"end_seq": old, "new_end": pl.int_range(first_seq, first_seq + rows.height, eager=True)})
    joined = rows.join(numbers, on="end_seq", how="left", maintain_order="left")
    return joined.with_columns(
        seq=pl.int_range(first_seq, first_seq + rows.height, dtype=pl.Int64), end_seq=pl.col("new_end")
    ).drop("new_end")
