"""Pairs the alloc and free rows of one device into allocations: by address, by the source's own number, or by size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

#: Codes of the actions that make and end an allocation, in the order in which they happen to one.
ALLOC, FREE_REQUESTED, FREE_COMPLETED, OTHER = 0, 1, 2, 3

#: Addresses are useless where at most one free in this many finds its own allocation by address
#: and at least half of them find one by size.
_USELESS_SHARE = 10
#: Digits by which keys are ordered, and from how many on it pays no more.
_DIGIT_BITS, _MOST_DIGITS = 16, 2
#: Frees that it takes before missing matches alone (without a contradiction) count as evidence.
_USELESS_EVIDENCE = 20


@dataclass(frozen=True)
class Rows:
    """What pairing looks at, for each row of a device in true order."""

    action: npt.NDArray[np.int8]
    key: npt.NDArray[Any]
    has_key: Bools
    size: Ints
    size_class: Ints


@dataclass(frozen=True)
class Pairing:
    """The allocation of each row (-1: none), and the rows of each allocation (-1: the recording lacks it).

    `before` marks allocations that were there before the recording, `following` the first row of the next
    allocation with the same key.
    """

    owner: Ints
    alloc: Ints
    requested: Ints
    completed: Ints
    first: Ints
    following: Ints
    before: Bools

    @property
    def count(self) -> int:
        """Number of allocations."""
        return len(self.alloc)


def pair_by_key(rows: Rows, *, sizes_agree: bool) -> Pairing:
    """Pair rows that carry the same key: one allocation is an alloc, a free_requested and a free_completed at most.

    With `sizes_agree` a free of another size than the alloc before it belongs to another allocation.
    """
    chosen = np.flatnonzero((rows.action != OTHER) & rows.has_key)
    return _pair(rows, chosen, rows.key[chosen], sizes_agree=sizes_agree)


def pair_by_size(rows: Rows, *, all_rows: bool) -> Pairing:
    """Pair rows of one size, the newest alloc with the next free; only rows without a key unless `all_rows`.

    Of free_requested and free_completed only the one that the rows hold more of is paired.
    """
    wanted = rows.action != OTHER if all_rows else (rows.action != OTHER) & ~rows.has_key
    requested, completed = (np.count_nonzero(wanted & (rows.action == code)) for code in (1, 2))
    wanted &= rows.action != (FREE_COMPLETED if requested >= completed else FREE_REQUESTED)
    chosen = np.flatnonzero(wanted)
    order = np.lexsort((chosen, rows.size_class[chosen], rows.size[chosen]))
    chosen = chosen[order]
    group = _group_numbers(rows.size[chosen], rows.size_class[chosen])
    key = _nesting_keys(group, rows.action[chosen] == ALLOC)
    pairing = _pair(rows, *_by_position(chosen, key), sizes_agree=False)
    return Pairing(**{**vars(pairing), "before": pairing.alloc < 0})


def empty_pairing(rows: int) -> Pairing:
    """Return the pairing of rows that belong to no allocation."""
    none = np.zeros(0, dtype=np.int64)
    return Pairing(np.full(rows, -1, dtype=np.int64), none, none, none, none, none, np.zeros(0, dtype=bool))


def join(first: Pairing, second: Pairing) -> Pairing:
    """Put two pairings of disjoint rows together."""
    if second.count == 0:
        return first
    moved = np.where(second.owner >= 0, second.owner + first.count, -1)
    owner = np.where(first.owner >= 0, first.owner, moved)
    names = ("alloc", "requested", "completed", "first", "following", "before")
    return Pairing(owner, *(np.concatenate([getattr(first, name), getattr(second, name)]) for name in names))


def few_match(rows: Rows, by_key: Pairing) -> bool:
    """Say whether almost no free finds its allocation by address."""
    return _frees(rows) > 0 and _matched(by_key) * _USELESS_SHARE <= _frees(rows)


def addresses_are_useless(rows: Rows, by_key: Pairing, by_size: Pairing, stated_before: int | None) -> bool:
    """Say whether the addresses mean nothing: almost no free finds its allocation by them, most do by size.

    It takes a contradiction (addresses taken again and again without a free, or more bytes freed without an alloc
    than `stated_before`, what recorded totals say was there at the start) or many frees to say so.
    """
    if not few_match(rows, by_key):
        return False
    if _matched(by_size) * 2 < _frees(rows) or _matched(by_size) <= _matched(by_key):
        return False
    unfreed = (by_key.alloc >= 0) & (by_key.requested < 0) & (by_key.completed < 0)
    broken = np.count_nonzero(unfreed & (by_key.following >= 0))
    allocs = np.count_nonzero(by_key.alloc >= 0)
    unmatched = int(rows.size[by_key.first[by_key.alloc < 0]].sum())
    contradicted = stated_before is not None and unmatched > stated_before
    return contradicted or bool(broken * 2 >= allocs > 0) or _frees(rows) >= _USELESS_EVIDENCE


def _frees(rows: Rows) -> int:
    return int(np.count_nonzero(((rows.action == FREE_REQUESTED) | (rows.action == FREE_COMPLETED)) & rows.has_key))


def _matched(pairing: Pairing) -> int:
    return int(np.count_nonzero((pairing.alloc >= 0) & ((pairing.requested >= 0) | (pairing.completed >= 0))))


def _group_numbers(*columns: npt.NDArray[Any]) -> Ints:
    """Number the runs of equal values in sorted columns from 0."""
    changed = np.zeros(len(columns[0]), dtype=bool)
    for column in columns:
        changed[1:] |= column[1:] != column[:-1]
    numbers: Ints = np.cumsum(changed, dtype=np.int64)
    return numbers


def _nesting_keys(group: Ints, is_alloc: Bools) -> Ints:
    """Give alloc and free the same key where they pair last in, first out within a group; lone frees get their own."""
    count = len(group)
    if count == 0:
        return np.zeros(0, dtype=np.int64)
    step = np.where(is_alloc, 1, -1)
    total: Ints = np.cumsum(step)
    starts = np.flatnonzero(np.diff(group, prepend=-1))
    level = total - (total[starts] - step[starts])[group]
    apart = group * (count + 1)
    lowest = np.minimum(np.minimum.accumulate(level - apart) + apart, 0)
    depth = level - lowest + ~is_alloc
    previous_lowest = np.where(np.isin(np.arange(count), starts), 0, np.roll(lowest, 1))
    lone = ~is_alloc & (lowest < previous_lowest)
    key = group * (count + 1) + depth
    key[lone] = -1 - np.flatnonzero(lone)
    return key


def _by_position(chosen: Ints, key: Ints) -> tuple[Ints, Ints]:
    order = np.argsort(chosen, kind="stable")
    return chosen[order], key[order]


def _stable_order(key: npt.NDArray[Any]) -> Ints:
    """Order integers, equal ones by place: digit by digit, as numpy is fastest with 16 bits, where few digits tell."""
    if len(key) == 0:
        return np.zeros(0, dtype=np.int64)
    above = key.view(np.uint64) - key.min().view(np.uint64)
    bits = int(np.bitwise_or.reduce(above))
    grain = max((bits & -bits).bit_length() - 1, 0)  # addresses are multiples of 512 at least
    digits = -(-(bits.bit_length() - grain) // _DIGIT_BITS)
    if digits > _MOST_DIGITS:
        return np.argsort(key, kind="stable")
    order: Ints | None = None
    for digit in range(digits):
        part = (above >> np.uint64(grain + digit * _DIGIT_BITS)).astype(np.uint16)
        order = np.argsort(part, kind="stable") if order is None else order[np.argsort(part[order], kind="stable")]
    return np.arange(len(key)) if order is None else order


def _pair(rows: Rows, chosen: Ints, key: npt.NDArray[Any], *, sizes_agree: bool) -> Pairing:
    order = _stable_order(key)
    row, key = chosen[order], key[order]
    action, size = rows.action[row], rows.size[row]
    other_key = np.ones(len(row), dtype=bool)
    other_key[1:] = key[1:] != key[:-1]
    begins = other_key.copy()
    begins[1:] |= action[1:] <= action[:-1]
    if sizes_agree:
        begins[1:] |= (action[:-1] == ALLOC) & (size[1:] != size[:-1])
    number = np.cumsum(begins) - 1
    starts = np.flatnonzero(begins)
    columns = [np.full(len(starts), -1, dtype=np.int64) for _ in range(3)]
    for code, column in enumerate(columns):
        here = action == code
        column[number[here]] = row[here]
    following = np.full(len(starts), -1, dtype=np.int64)
    same_key = ~other_key[starts[1:]]
    following[:-1][same_key] = row[starts[1:]][same_key]
    owner = np.full(len(rows.action), -1, dtype=np.int64)
    owner[row] = number
    before = (action[starts] != ALLOC) & other_key[starts]
    alloc, requested, completed = columns
    return Pairing(owner, alloc, requested, completed, row[starts], following, before)
