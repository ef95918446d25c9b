"""Peaks out of logged levels: by step, and who held the memory; all in columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xmem.simulate.allocator import ALLOC, FREE
from xmem.simulate.replay import ALLOC_ELSEWHERE, OOM, Encoded
from xmem.simulate.verdict import HeldBy

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

    Integers = npt.NDArray[np.int64]

NEVER = 1 << 62
_SHOWN = 12


def lifetimes(encoded: Encoded) -> tuple[Integers, Integers]:
    """Return for each slot the index of its alloc and of its free (NEVER where it has none)."""
    import numpy as np

    births = np.full(encoded.slot_count + 1, NEVER, dtype=np.int64)
    deaths = births.copy()
    for codes, found in (((ALLOC, ALLOC_ELSEWHERE), births), ((FREE,), deaths)):
        rows = np.flatnonzero(np.isin(encoded.codes, codes))
        found[encoded.slots[rows]] = rows
    return births[:-1], deaths[:-1]


def block_sizes(encoded: Encoded, allocated: Integers) -> Integers:
    """Return the block size of each slot that was served, from the rise of the allocated level; 0 for the others."""
    import numpy as np

    births, _ = lifetimes(encoded)
    rises = np.diff(allocated, prepend=0)
    served = births < len(allocated)
    sizes = np.zeros(encoded.slot_count, dtype=np.int64)
    sizes[served] = rises[births[served]]
    return sizes


def step_peaks(allocated: Integers, table: pa.Table) -> tuple[int | None, int | None]:
    """Return the peak up to the end of the first step, and the peak of the later steps; None where unknown."""
    import numpy as np

    column = table.column("step").slice(0, len(allocated))
    if column.null_count == len(column):
        return None, None
    steps = column.cast("double").to_numpy()
    known = np.flatnonzero(~np.isnan(steps))
    first_end = int(known[steps[known] == steps[known].min()].max()) + 1
    later = known[steps[known] > steps[known].min()]
    return int(allocated[:first_end].max()), int(allocated[later].max()) if len(later) else None


def cycle_peaks(encoded: Encoded, allocated: Integers) -> tuple[int | None, int | None]:
    """Return the peaks of the first cycle and of the later ones, where no steps are named.

    A cycle ends where every allocation that is ever freed has been freed; what is never freed does not count.
    """
    import numpy as np

    if not len(allocated):
        return None, None
    births, deaths = lifetimes(encoded)
    sizes = block_sizes(encoded, allocated)
    passing = np.flatnonzero((deaths < NEVER) & (births < NEVER))
    level = np.zeros(len(allocated), dtype=np.int64)
    for rows, sign in ((births[passing], 1), (deaths[passing], -1)):
        inside = rows < len(allocated)
        np.add.at(level, rows[inside], sign * sizes[passing][inside])
    busy = np.cumsum(level) > 0
    if not busy.any():
        return int(allocated.max()), None
    start = int(np.argmax(busy))
    end = start + int(np.argmin(busy[start:])) if not busy[start:].all() else len(allocated)
    later = busy[end:].any()
    return int(allocated[:end].max()), int(allocated[end:].max()) if later else None


def held_at_peak(encoded: Encoded, table: pa.Table, allocated: Integers, peak: int) -> tuple[HeldBy, ...]:
    """Say who holds memory at the peak of allocated bytes, a tried out-of-memory request included."""
    import numpy as np

    if not len(allocated):
        return ()
    sizes = block_sizes(encoded, allocated)
    tries = np.flatnonzero(encoded.codes[: len(allocated)] == OOM)
    if peak <= allocated.max() or not len(tries):
        return held_at(encoded, table, sizes, int(allocated.argmax()))
    index = int(tries[(allocated[tries] + encoded.sizes[tries]).argmax()])
    row = table.slice(index, 1).to_pylist()[0]
    tried = HeldBy(row["category"], row["op"], peak - int(allocated[index]), 1)
    return tuple(sorted((*held_at(encoded, table, sizes, index), tried), key=lambda held: -held.bytes))


def held_at(encoded: Encoded, table: pa.Table, sizes: Integers, index: int) -> tuple[HeldBy, ...]:
    """Group what is live after request `index` by category and operator, largest first; the tail is one row."""
    import numpy as np
    import pyarrow as pa

    births, deaths = lifetimes(encoded)
    live = np.flatnonzero((births <= index) & (deaths > index) & (sizes > 0))
    rows = pa.table(
        {
            "category": table.column("category").take(births[live]),
            "op": table.column("op").take(births[live]),
            "bytes": sizes[live],
        }
    )
    grouped = rows.group_by(["category", "op"]).aggregate([("bytes", "sum"), ("bytes", "count")])
    ordered = grouped.sort_by([("bytes_sum", "descending"), ("category", "ascending"), ("op", "ascending")])
    held = [HeldBy(r["category"], r["op"], r["bytes_sum"], r["bytes_count"]) for r in ordered.to_pylist()]
    if len(held) <= _SHOWN:
        return tuple(held)
    rest = held[_SHOWN - 1 :]
    others = HeldBy(None, f"{len(rest)} others", sum(row.bytes for row in rest), sum(row.count for row in rest))
    return (*held[: _SHOWN - 1], others)
