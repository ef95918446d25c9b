"""The allocator's statistics: changes are logged as small codes and summed up with their peaks in bulk."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xmem.simulate.blocks import Block

# Codes of logged changes. An alloc raises allocation and active; a free lowers both; FREE_LATE lowers active only
# (the completion of a pending free) and FREE_ASKED allocation only. What happens to inactive split memory:
ALLOC = 0  # nothing
ALLOC_CUT = 1  # a split block shrank by the size
ALLOC_SPLIT = 2  # a whole block became split: +1, + extra bytes
ALLOC_LAST = 3  # a split block was taken whole: -1, - size
FREE = 4  # nothing
FREE_ALONE = 5  # +1, + size
FREE_JOINED = 6  # one neighbour merged: + size
FREE_BRIDGED = 7  # both merged: -1, + size
FREE_WHOLE = 8  # one merged and the segment is whole again: -1, - extra bytes
FREE_WHOLE_2 = 9  # both merged and the segment is whole again: -2, - extra bytes
LATE = 6  # FREE_x + LATE is the same for the completion of a pending free
FREE_ASKED = 16

_CURRENT, _PEAK, _ALLOCATED, _FREED = range(4)
#: Logged statistics, in the order of the rows of a change.
LOGGED = (
    "allocation",
    "allocated_bytes",
    "active",
    "active_bytes",
    "requested_bytes",
    "inactive_split",
    "inactive_split_bytes",
)
#: Statistics that change with segments only and are kept at once.
KEPT = ("segment", "reserved_bytes")
POOLS = ("all", "small_pool", "large_pool")

_ALLOCATION = [1] * 4 + [-1] * 6 + [0] * 6 + [-1]
_ACTIVE = [1] * 4 + [-1] * 12 + [0]
_SPLITS = [0, 0, 1, -1] + [0, 1, 0, -1, -1, -2] * 2 + [0]
_SPLIT_SIZE = [0, -1, 0, -1] + [0, 1, 1, 1, 0, 0] * 2 + [0]
_SPLIT_EXTRA = [0, 0, 1, 0] + [0, 0, 0, 0, -1, -1] * 2 + [0]

#: Up to this many changes are summed one by one, where numpy would be slower.
FEW = 48
#: A log of this length is summed up.
FULL = 1 << 16

Figures = list[int]
Log = Callable[[int], None]


def change(figures: Figures, amount: int) -> None:
    """Raise or lower a statistic [current, peak, allocated, freed]."""
    current = figures[_CURRENT] = figures[_CURRENT] + amount
    if amount > 0:
        figures[_ALLOCATED] += amount
        if current > figures[_PEAK]:
            figures[_PEAK] = current
    else:
        figures[_FREED] -= amount


class Statistics:
    """Every figure of `torch.cuda.memory_stats()`.

    A change is logged as a code in `codes` and a charge in `charges`; a charge numbers a (requested, block size,
    is small) triple. `extras` holds the bytes that some codes need beside. `settle` sums the log up.
    """

    def __init__(self) -> None:
        self.codes: list[int] = []
        self.charges: list[int] = []
        self.extras: list[int] = []
        self.levels: dict[str, Any] | None = None
        self.full = FULL
        self.figures: dict[str, list[Figures]] = {name: [[0] * 4 for _ in POOLS] for name in (*LOGGED, *KEPT)}
        self.oversize_allocations: Figures = [0] * 4
        self.oversize_segments: Figures = [0] * 4
        self.private_pools: dict[tuple[int, int], list[Figures]] = {}
        self.counts = dict.fromkeys(COUNTS, 0)
        self._charge_numbers: dict[tuple[int, int, bool], int] = {}
        self._charge_requested = array("q")
        self._charge_size = array("q")
        self._charge_small = array("b")

    def charge(self, requested: int, size: int, small: bool) -> int:
        """Return the number of a charge."""
        triple = (requested, size, small)
        number = self._charge_numbers.get(triple)
        if number is None:
            number = self._charge_numbers[triple] = len(self._charge_size)
            self._charge_requested.append(requested)
            self._charge_size.append(size)
            self._charge_small.append(small)
        return number

    @property
    def charge_count(self) -> int:
        """How many charges there are."""
        return len(self._charge_size)

    def renumber(self, blocks: Iterable[Block]) -> None:
        """Forget the charges that no block has; the log must be empty."""
        requested, sizes, small = self._charge_requested, self._charge_size, self._charge_small
        self._charge_numbers = {}
        self._charge_requested, self._charge_size, self._charge_small = array("q"), array("q"), array("b")
        for block in blocks:
            number = block.charge
            block.charge = self.charge(requested[number], sizes[number], bool(small[number]))

    def log_functions(self) -> tuple[Log, Log, Log]:
        """Return what appends to codes, charges and extras; the lists stay the same for good."""
        return self.codes.append, self.charges.append, self.extras.append

    def requested(self, number: int) -> int:
        """Return what was asked for in a charge."""
        return self._charge_requested[number]

    def change_segments(self, small: bool, count: int, size: int, pool: tuple[int, int] | None) -> None:
        """Count segments (0 for mapped pages) and their bytes, negative where they go back."""
        half = 1 if small else 2
        for index in (0, half):
            if count:
                change(self.figures["segment"][index], count)
            change(self.figures["reserved_bytes"][index], size)
            if pool is not None:
                change(self.private_pools.setdefault(pool, [[0] * 4 for _ in POOLS])[index], size)

    def settle(self) -> None:
        """Sum up the log and empty it."""
        if not self.codes:
            return
        if len(self.codes) <= FEW and self.levels is None:
            self._settle_few()
        else:
            self._settle_many()
        self.codes.clear()
        self.charges.clear()
        self.extras.clear()

    def settle_levels(self) -> dict[str, Any]:
        """Sum up the log and return allocated_bytes, active_bytes and requested_bytes after each logged change."""
        self.levels = dict.fromkeys(("allocated_bytes", "active_bytes", "requested_bytes"))
        self.settle()
        levels, self.levels = self.levels, None
        return levels or {}

    def reset_peaks(self) -> None:
        """Set every peak to its current value."""
        self.settle()
        for figures in self._all_figures():
            figures[_PEAK] = figures[_CURRENT]

    def reset_accumulated(self) -> None:
        """Set sums of increases and decreases and the counts of events to 0."""
        self.settle()
        for figures in self._all_figures():
            figures[_ALLOCATED] = figures[_FREED] = 0
        for name in RESETTABLE_COUNTS:
            self.counts[name] = 0

    def flat(self) -> dict[str, int]:
        """Return all figures under PyTorch's flat names."""
        self.settle()
        flat: dict[str, int] = {}
        for name, rows in self.figures.items():
            _flatten(flat, name, rows)
        for pool, rows in self.private_pools.items():
            _flatten(flat, f"reserved_bytes_by_private_pools.{pool[0]}_{pool[1]}", rows)
        for name in ("oversize_allocations", "oversize_segments"):
            for kind, value in zip(KINDS, getattr(self, name), strict=True):
                flat[f"{name}.{kind}"] = value
        return flat | self.counts

    def _all_figures(self) -> list[Figures]:
        rows = [*self.figures.values(), *self.private_pools.values()]
        return [figures for row in rows for figures in row] + [self.oversize_allocations, self.oversize_segments]

    def _settle_few(self) -> None:
        extras = iter(self.extras)
        for code, number in zip(self.codes, self.charges, strict=True):
            size = self._charge_size[number]
            extra = next(extras) if _SPLIT_EXTRA[code] else 0
            allocation, active = _ALLOCATION[code], _ACTIVE[code]
            amounts = (
                allocation, allocation * size, active, active * size, active * self._charge_requested[number],
                _SPLITS[code], _SPLIT_SIZE[code] * size + _SPLIT_EXTRA[code] * extra,
            )  # fmt: skip
            half = 1 if self._charge_small[number] else 2
            for name, amount in zip(LOGGED, amounts, strict=True):
                if amount:
                    rows = self.figures[name]
                    change(rows[0], amount)
                    change(rows[half], amount)

    def _settle_many(self) -> None:
        amounts, small = self._amounts()
        large = ~small
        sums: dict[str, Any] = {}
        for name, deltas in amounts.items():
            rows = self.figures[name]
            if self.levels is not None and name in self.levels:
                self.levels[name] = rows[0][_CURRENT] + deltas.cumsum()
            sums[name] = [_sum_up(part) for part in (deltas, deltas[small], deltas[large])]
        if "active" not in sums:
            sums |= {"active": sums["allocation"], "active_bytes": sums["allocated_bytes"]}
            if self.levels is not None:
                change_of_active = (
                    self.figures["active_bytes"][0][_CURRENT] - self.figures["allocated_bytes"][0][_CURRENT]
                )
                self.levels["active_bytes"] = self.levels["allocated_bytes"] + change_of_active
        for name, parts in sums.items():
            for figures, (total, peak, raised) in zip(self.figures[name], parts, strict=True):
                figures[_PEAK] = max(figures[_PEAK], figures[_CURRENT] + peak)
                figures[_CURRENT] += total
                figures[_ALLOCATED] += raised
                figures[_FREED] += raised - total

    def _amounts(self) -> tuple[dict[str, Any], Any]:
        """Return the change of each statistic at each logged event, and which events are of the small pool.

        active and active_bytes are left out where they change as allocation and allocated_bytes do.
        """
        import numpy as np

        codes = np.frombuffer(bytes(self.codes), dtype=np.uint8)
        charges = np.frombuffer(array("i", self.charges), dtype=np.int32)
        sizes = np.frombuffer(self._charge_size, dtype=np.int64)[charges]
        requested = np.frombuffer(self._charge_requested, dtype=np.int64)[charges]
        small = np.frombuffer(self._charge_small, dtype=np.bool_)[charges]
        allocation, active, splits, split_size, split_extra = (
            np.array(row, dtype=np.int64)[codes] for row in (_ALLOCATION, _ACTIVE, _SPLITS, _SPLIT_SIZE, _SPLIT_EXTRA)
        )
        split_bytes = split_size * sizes
        if self.extras:
            at = np.flatnonzero(split_extra)
            split_bytes[at] += split_extra[at] * np.array(self.extras, dtype=np.int64)
        amounts = {
            "allocation": allocation,
            "allocated_bytes": allocation * sizes,
            "requested_bytes": active * requested,
        }
        amounts |= {"inactive_split": splits, "inactive_split_bytes": split_bytes}
        if int(codes.max()) >= FREE + LATE:
            amounts |= {"active": active, "active_bytes": active * sizes}
        return amounts, small


KINDS = ("current", "peak", "allocated", "freed")
COUNTS = (
    "num_alloc_retries",
    "num_ooms",
    "num_oom_rejections",
    "num_device_alloc",
    "num_device_free",
    "num_sync_all_streams",
)
RESETTABLE_COUNTS = COUNTS


def _flatten(flat: dict[str, int], name: str, rows: list[Figures]) -> None:
    for pool, figures in zip(POOLS, rows, strict=True):
        for kind, value in zip(KINDS, figures, strict=True):
            flat[f"{name}.{pool}.{kind}"] = value


def _sum_up(deltas: Any) -> tuple[int, int, int]:
    """Return the sum of changes, the highest running sum (0 at least) and the sum of the raises."""
    if not len(deltas):
        return 0, 0, 0
    sums = deltas.cumsum()
    return int(sums[-1]), max(0, int(sums.max())), int(deltas[deltas > 0].sum())
