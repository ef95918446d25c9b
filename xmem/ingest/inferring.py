"""Rows that a recording implies but does not hold: lost frees, memory that was there before, final state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from xmem.ingest.matching import Bools, Ints, Pairing

if TYPE_CHECKING:
    import polars as pl

#: Position of rows that come before everything recorded.
AT_START = -1
#: Columns that an inferred row takes from the row or block that shows it.
_COPIED = ("address", "requested_bytes", "block_bytes", "stream", "pool_id", "stack_id", "category")
#: Order of inferred rows at one place.
_STAGES = {"segment_alloc": 0, "segment_map": 0, "alloc": 1, "free_requested": 2, "free_completed": 3}


@dataclass
class Additions:
    """Inferred rows, each with the position of the row that it stands before and the allocation it belongs to."""

    frames: list[pl.DataFrame] = field(default_factory=list)

    def add(self, action: str, at: Ints | int, group: Ints | int, source: pl.DataFrame, *, late: bool = False) -> None:
        """Add a row for each row of `source`; `late` puts an alloc behind the frees inferred at the same place."""
        import polars as pl

        if source.height == 0:
            return
        stage = _STAGES[action] + (4 if late else 0)
        taken = source.select(name for name in _COPIED if name in source.columns)
        self.frames.append(
            taken.with_columns(
                at=pl.Series(np.broadcast_to(np.asarray(at, dtype=np.int64), source.height)),
                group=pl.Series(np.broadcast_to(np.asarray(group, dtype=np.int64), source.height)),
                action=pl.lit(action, dtype=pl.Categorical),
                stage=pl.lit(stage, dtype=pl.Int8),
            )
        )

    def bytes_at_start(self) -> int:
        """Sum of the allocations that stand at the start."""
        import polars as pl

        rows = [
            frame.filter(pl.col("at") == AT_START, pl.col("action") == "alloc").select(
                pl.coalesce(name for name in ("block_bytes", "requested_bytes") if name in frame.columns).sum()
            )
            for frame in self.frames
        ]
        return sum(int(frame.item()) for frame in rows)

    def sorted(self) -> pl.DataFrame | None:
        """Return all rows in order of place; at the start in address order, rows without an address last."""
        import polars as pl

        if not self.frames:
            return None
        rows = pl.concat(self.frames, how="diagonal")
        by_address = pl.when(pl.col("at") == AT_START).then(pl.col("address"))
        place = pl.when(pl.col("at") == AT_START).then(pl.col("address").is_null())
        return rows.sort([pl.col("at"), place, by_address, pl.col("stage")], nulls_last=True, maintain_order=True)


def without_stack(rows: pl.DataFrame) -> pl.DataFrame:
    """Drop what a row says about itself only: its stack and category are not those of the allocation it ends."""
    return rows.drop([name for name in ("stack_id", "category") if name in rows.columns])


def close_lost(events: pl.DataFrame, pairing: Pairing, additions: Additions, *, has_completed: bool) -> int:
    """End each allocation whose key is taken again without a free in between; return how many there are."""
    again = pairing.following >= 0
    unrequested = again & (pairing.requested < 0) & (pairing.completed < 0)
    uncompleted = again & (pairing.completed < 0) & has_completed
    first = np.where(pairing.alloc >= 0, pairing.alloc, pairing.first)
    for action, missing in (("free_requested", unrequested), ("free_completed", uncompleted)):
        group = np.flatnonzero(missing)
        additions.add(action, pairing.following[group], group, without_stack(events[first[group]]))
    return int(np.count_nonzero(unrequested | uncompleted))


def open_lost(events: pl.DataFrame, pairing: Pairing, additions: Additions) -> int:
    """Begin each allocation of which only the free was recorded: at the start, or just before the free where
    another allocation held its address earlier. Return how many there are.
    """
    absent = pairing.alloc < 0
    early, late = np.flatnonzero(absent & pairing.before), np.flatnonzero(absent & ~pairing.before)
    additions.add("alloc", AT_START, early, without_stack(events[pairing.first[early]]))
    additions.add("alloc", pairing.first[late], late, without_stack(events[pairing.first[late]]), late=True)
    return int(np.count_nonzero(absent))


def request_lost(events: pl.DataFrame, pairing: Pairing, additions: Additions) -> None:
    """Add the free_requested of allocations that have a free_completed only, on a device that records both.

    For memory that was there before it stands at the start: the recording began between the two.
    """
    lonely = (pairing.requested < 0) & (pairing.completed >= 0)
    early, late = np.flatnonzero(lonely & pairing.before), np.flatnonzero(lonely & ~pairing.before)
    additions.add("free_requested", AT_START, early, without_stack(events[pairing.completed[early]]))
    rows = pairing.completed[late]
    additions.add("free_requested", rows, late, without_stack(events[rows]), late=True)


@dataclass(frozen=True)
class FinalBlocks:
    """What the blocks of the final state are to the allocations: `group` for each block (-1: none).

    `pending` marks groups that wait for another stream, `contradictions` counts blocks and allocations that
    history and final state tell differently.
    """

    group: Ints
    pending: Bools
    contradictions: int
    found_before: int


def join_final_blocks(
    events: pl.DataFrame, pairing: Pairing, blocks: pl.DataFrame, additions: Additions
) -> FinalBlocks:
    """Join active blocks of the final state with allocations; unknown ones were there before, or come at the end."""
    import polars as pl

    active = (blocks["state"].cast(pl.String) != "inactive").to_numpy()
    waiting = (blocks["state"].cast(pl.String) == "active_pending_free").to_numpy() & active
    last = _last_group_of(events, pairing, blocks)
    seen = last >= 0
    requested, completed = (np.append(column, -1)[last] >= 0 for column in (pairing.requested, pairing.completed))
    alive = active & seen & ~completed & (waiting | ~requested)
    unseen, contradicted = active & ~seen, active & seen & ~alive
    group = np.where(alive, last, -1)
    fresh = np.flatnonzero(unseen | contradicted)
    group[fresh] = pairing.count + np.arange(len(fresh))
    place = np.where(unseen, AT_START, events.height)
    additions.add("alloc", place[fresh], group[fresh], blocks[fresh])
    ended = np.flatnonzero(waiting & ~(alive & requested))
    additions.add("free_requested", place[ended], group[ended], without_stack(blocks[ended]))
    pending = np.zeros(pairing.count + len(fresh), dtype=bool)
    pending[group[waiting]] = True
    open_groups = (pairing.requested < 0) & (pairing.completed < 0) & (pairing.following < 0)
    dangling = int(np.count_nonzero(open_groups)) - int(np.count_nonzero(alive & ~requested))
    return FinalBlocks(group, pending, int(np.count_nonzero(contradicted)) + dangling, int(np.count_nonzero(unseen)))


def _last_group_of(events: pl.DataFrame, pairing: Pairing, blocks: pl.DataFrame) -> Ints:
    """For each block the newest allocation at its address, -1 where history never names the address."""
    import polars as pl

    newest = pl.DataFrame(
        {"address": events["address"].gather(pairing.first), "group": np.arange(pairing.count, dtype=np.int64)}
    ).filter(pl.Series(pairing.following < 0))
    joined = blocks.select("address").join(newest, on="address", how="left", maintain_order="left")
    found: Ints = joined["group"].fill_null(-1).to_numpy()
    return found
