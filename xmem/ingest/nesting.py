"""Which span lies in which: parents by time on each thread, and the innermost span around a moment."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]
Times = npt.NDArray[np.int64]

#: Times are rounded when they are written: a child may seem to end this much after its parent.
_ROUNDING_NS, _ROUNDING_WHOLE_US_NS = 2, 1000


@dataclass(frozen=True)
class Forest:
    """Host spans in order of thread and start, each before what lies in it.

    `row` is the span's row in its source, `parent` the position of the innermost span around it (-1: none).
    """

    row: Indices
    thread: npt.NDArray[np.int32]
    start: Times
    end: Times
    parent: Indices

    @property
    def count(self) -> int:
        """Number of spans."""
        return len(self.row)


def build_forest(row: Indices, thread: npt.NDArray[np.int32], start: Times, end: Times) -> Forest:
    """Order spans by thread, start and length, and find the span around each.

    Every span begins with its predecessor as a guess; a guess that does not hold the span is replaced by that one's
    own guess, which doubles the stride, until it holds it or the thread has no further span.
    """
    order = np.lexsort((row, -end, start, thread)).astype(np.int32)
    row, thread, start, end = row[order], thread[order], start[order], end[order]
    slack = _ROUNDING_WHOLE_US_NS if not np.any(start % 1000) and not np.any(end % 1000) else _ROUNDING_NS
    parent = np.arange(-1, len(row) - 1, dtype=np.int32)
    open_ = np.flatnonzero(parent >= 0).astype(np.int32)
    while len(open_):
        guess = parent[open_]
        outside = (thread[guess] != thread[open_]) | (end[guess] <= start[open_]) | (end[guess] + slack < end[open_])
        open_, guess = open_[outside], guess[outside]
        parent[open_] = np.where(thread[guess] == thread[open_], parent[guess], -1)
        open_ = open_[parent[open_] >= 0]
    return Forest(row, thread, start, end, parent)


def innermost_at(forest: Forest, thread: npt.NDArray[np.int32], time: Times) -> Indices:
    """Return for each moment the position of the innermost span around it on its thread, -1 where there is none."""
    found = np.full(len(time), -1, dtype=np.int32)
    firsts = np.searchsorted(forest.thread, np.arange(int(thread.max(initial=-1)) + 2))
    for number in np.unique(thread[thread >= 0]):
        low, high = int(firsts[number]), int(firsts[number + 1])
        here = np.flatnonzero(thread == number)
        place = low + np.searchsorted(forest.start[low:high], time[here], side="right") - 1
        found[here] = np.where(place >= low, place, -1)
    open_ = np.flatnonzero(found >= 0)
    while len(open_):
        guess = found[open_]
        outside = forest.end[guess] < time[open_]
        open_ = open_[outside]
        found[open_] = forest.parent[guess[outside]]
        open_ = open_[found[open_] >= 0]
    return found


def outermost(parent: Indices, chosen: Bools) -> Indices:
    """Return for each span the outermost chosen span at or above it, -1 where there is none."""
    return _climb(parent, chosen, prefer_upper=True)


def innermost(parent: Indices, chosen: Bools) -> Indices:
    """Return for each span the innermost chosen span at or above it, -1 where there is none."""
    return _climb(parent, chosen, prefer_upper=False)


def _climb(parent: Indices, chosen: Bools, *, prefer_upper: bool) -> Indices:
    """Look further up by doubled strides: each round a span learns what its ancestor learned so far."""
    best = np.where(chosen, np.arange(len(parent), dtype=np.int32), np.int32(-1))
    ancestor = parent.copy()
    climbing = np.flatnonzero(ancestor >= 0).astype(np.int32)
    while len(climbing):
        above = ancestor[climbing]
        learned, own = best[above], best[climbing]
        keep = (learned < 0) if prefer_upper else (own >= 0)
        further = ancestor[above]
        best[climbing] = np.where(keep, own, learned)
        ancestor[climbing] = further
        climbing = climbing[further >= 0]
    return best
