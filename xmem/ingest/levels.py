"""Levels of a device after every row, and how they compare with the totals that the source recorded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from xmem.ingest.matching import Bools, Ints
from xmem.ingest.words import Codes, code_words
from xmem.units import format_bytes

if TYPE_CHECKING:
    import polars as pl

    from xmem.ingest.adapter import Notes

_ALLOC, _REQUESTED, _COMPLETED, _GROWS, _SHRINKS = range(1, 6)
_CODES = {
    "alloc": _ALLOC,
    "free_requested": _REQUESTED,
    "free_completed": _COMPLETED,
    "segment_alloc": _GROWS,
    "segment_map": _GROWS,
    "segment_free": _SHRINKS,
    "segment_unmap": _SHRINKS,
}
#: A fresh device reserves at most this much for its first small and large request.
_SMALL, _SMALL_SEGMENT, _LARGE_SEGMENT, _GRAIN = 1 << 20, 2 << 20, 20 << 20, 2 << 20


@dataclass(frozen=True)
class Levels:
    """A device's events with allocated_bytes, active_bytes and reserved_bytes, and its baseline."""

    events: pl.DataFrame
    baseline_bytes: int
    baseline_reserved_bytes: int | None
    before_count: int
    empty_at_start: bool


def row_bytes(events: pl.DataFrame) -> Ints:
    """Bytes of each row: the block's where it is known, else what was asked for."""
    import polars as pl

    sizes: Ints = events.select(pl.coalesce("block_bytes", "requested_bytes").fill_null(0)).to_series().to_numpy()
    return sizes


def fill_levels(rows: pl.DataFrame, pending: Bools) -> Levels:
    """Add the three levels; `pending` marks allocations that stay active after free_requested."""
    import polars as pl

    action = code_words(rows["action"], _CODES, 0)
    size, group = row_bytes(rows), rows["group"].to_numpy()
    alloc, requested, completed = (action == code for code in (_ALLOC, _REQUESTED, _COMPLETED))
    allocated = _level(size, alloc, requested | (completed & ~_has(group, requested)))
    stays = np.append(pending, False)[group] | bool(completed.any())
    active = _level(size, alloc, completed | (requested & ~_has(group, completed) & ~stays))
    reserved = _reserved(rows, action)
    inferred = rows["inferred"].to_numpy()
    start = int(np.argmin(inferred)) if not inferred.all() else len(inferred)
    first_reserved = None if reserved is None or len(reserved) == 0 else int(reserved[max(start - 1, 0)])
    has_segments = bool(((action == _GROWS) | (action == _SHRINKS)).any())
    if has_segments and start == 0:
        first_reserved = 0
    return Levels(
        events=rows.with_columns(
            allocated_bytes=pl.Series(allocated, dtype=pl.Int64),
            active_bytes=pl.Series(active, dtype=pl.Int64),
            reserved_bytes=pl.lit(None, dtype=pl.Int64) if reserved is None else pl.Series(reserved, dtype=pl.Int64),
        ),
        baseline_bytes=int(allocated[start - 1]) if start else 0,
        baseline_reserved_bytes=first_reserved,
        before_count=int(np.count_nonzero(alloc[:start])),
        empty_at_start=start == 0 and (has_segments or _fits_fresh_device(rows, size, first_reserved)),
    )


def _has(group: Ints, chosen: Bools) -> Bools:
    """Say for each row whether its allocation has a chosen row (rows of no allocation: whether any row is chosen)."""
    if len(group) == 0:
        return np.zeros(0, dtype=bool)
    found = np.zeros(int(group.max()) + 2, dtype=bool)
    found[group[chosen]] = True
    found[-1] = bool(chosen.any())
    return found[group]


def _level(size: Ints, up: Bools, down: Bools) -> Ints:
    level: Ints = np.cumsum(np.where(up, size, 0) - np.where(down, size, 0))
    return level


def _reserved(rows: pl.DataFrame, action: Codes) -> Ints | None:
    grows, shrinks = action == _GROWS, action == _SHRINKS
    if grows.any() or shrinks.any():
        return _level(rows["requested_bytes"].fill_null(0).to_numpy(), grows, shrinks)
    recorded = rows["total_reserved"]
    if not (recorded.fill_null(0) != 0).any():
        return None
    filled: Ints = recorded.fill_null(strategy="forward").fill_null(strategy="backward").to_numpy()
    return filled


def _fits_fresh_device(rows: pl.DataFrame, size: Ints, first_reserved: int | None) -> bool:
    """Say whether the first recorded reservation is what the first allocation alone needs."""
    if first_reserved is None or rows.height == 0:
        return True
    grown = -(-int(size[0]) // _GRAIN) * _GRAIN
    return first_reserved <= (_SMALL_SEGMENT if size[0] <= _SMALL else max(_LARGE_SEGMENT, grown))


def signed_bytes(events: pl.DataFrame) -> Ints:
    """What each recorded row adds to the allocated total; free_completed counts where nothing else ends a block."""
    action = code_words(events["action"], _CODES, 0)
    free = _REQUESTED if (action == _REQUESTED).any() else _COMPLETED
    return np.where(action == _ALLOC, 1, np.where(action == free, -1, 0)) * row_bytes(events)


def baseline_of_totals(events: pl.DataFrame, device: str, notes: Notes) -> tuple[int, int]:
    """Return what the recorded totals say was there before the first row, and by how much they must be shifted up.

    The CPU's totals also hold what other sessions left and never lose what was freed between them: they say nothing
    about the start.
    """
    totals = events["total_allocated"]
    if totals.null_count() == len(totals):
        return 0, 0
    lowest = int(str(totals.min()))
    shift = max(0, -lowest)
    if shift:
        notes.add(
            "negative_total",
            count=int((totals < 0).sum()),
            detail=f"{device}: shifted up by {shift} bytes",
        )
    return (0 if device == "cpu" else max(0, _offset(events) + shift)), shift


def _offset(events: pl.DataFrame) -> int:
    """First recorded total less everything recorded up to it."""
    totals = events["total_allocated"]
    first = int(str(totals.is_not_null().arg_max()))
    return int(totals[first]) - int(signed_bytes(events)[: first + 1].sum())


def check_totals(rows: pl.DataFrame, recorded: pl.DataFrame, device: str, shift: int, notes: Notes) -> None:
    """Report events at which the recorded total is not the level that allocations and frees give."""
    totals = recorded["total_allocated"]
    known = totals.is_not_null().to_numpy()
    if not known.any():
        return
    if device == "cpu":
        level = _offset(recorded) + np.cumsum(signed_bytes(recorded)) + shift
        place = np.arange(recorded.height)
    else:
        place = np.flatnonzero(rows["source_row"].to_numpy() >= 0)
        level = rows["allocated_bytes"].to_numpy()[place]
    difference = totals.fill_null(0).to_numpy() + shift - level
    wrong = np.flatnonzero(known & (difference != 0))
    if len(wrong):
        first = int(wrong[0])
        notes.add(
            "total_mismatch",
            count=len(wrong),
            at=int(place[first]),
            unit="seq",
            detail=f"{device}: recorded {totals[first]}, events give {int(level[first]) - shift} bytes",
        )


def check_device_total(levels: Levels, device: str, total_bytes: int | None, notes: Notes) -> None:
    """Report a level above what the device has."""
    allocated = levels.events["allocated_bytes"].to_numpy()
    if total_bytes is None or len(allocated) == 0 or device == "cpu":
        return
    above = np.flatnonzero(allocated > total_bytes)
    if len(above):
        peak = format_bytes(int(allocated.max()))
        notes.add(
            "above_device_total",
            count=len(above),
            at=int(above[0]),
            unit="seq",
            detail=f"{device}: {peak} allocated of {format_bytes(total_bytes)}",
        )
