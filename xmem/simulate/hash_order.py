"""The order in which torch visits streams and pools: that of a robin-hood hash table with Fibonacci hashing."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

_FIBONACCI = 11400714819323198485  # 2**64 / golden ratio
_WORD = (1 << 64) - 1
_LEAST_SLOTS = 4
_LEAST_LOOKUPS = 4


class HashOrder(Generic[K]):
    """Keys in the slots where such a table puts them; it grows at half load and never shrinks.

    The order of completed frees, and with it the peak of inactive split memory, depends on it.
    """

    def __init__(self) -> None:
        self._slots: list[tuple[int, K, int] | None] = []  # distance from the wanted slot, key, hash
        self._buckets = 0
        self._lookups = _LEAST_LOOKUPS
        self._count = 0

    def __iter__(self) -> Iterator[K]:
        return iter([slot[1] for slot in self._slots if slot is not None])

    def __len__(self) -> int:
        return self._count

    def at(self, index: int) -> K | None:
        """Return the key in a slot, None where it is empty or past the end."""
        slot = self._slots[index] if index < len(self._slots) else None
        return None if slot is None else slot[1]

    @property
    def slot_count(self) -> int:
        """How many slots there are."""
        return len(self._slots)

    def add(self, key: K, hashed: int) -> None:
        """Put a key in; nothing happens where it is there."""
        index, distance = self._wanted(hashed), 0
        while index < len(self._slots):
            slot = self._slots[index]
            if slot is None or slot[0] < distance:
                break
            if slot[1] == key:
                return
            index, distance = index + 1, distance + 1
        self._add_new(index, distance, key, hashed)

    def remove(self, key: K) -> None:
        """Take a key out; those behind it move up."""
        index = next(i for i, slot in enumerate(self._slots) if slot is not None and slot[1] == key)
        following = index + 1
        while following < len(self._slots):
            slot = self._slots[following]
            if slot is None or slot[0] == 0:
                break
            self._slots[index] = (slot[0] - 1, slot[1], slot[2])
            index, following = following, following + 1
        self._slots[index] = None
        self._count -= 1

    def _wanted(self, hashed: int) -> int:
        if self._buckets == 0:
            return 0
        return (_FIBONACCI * hashed & _WORD) >> (64 - (self._buckets.bit_length() - 1))

    def _add_new(self, index: int, distance: int, key: K, hashed: int) -> None:
        if self._buckets == 0 or distance == self._lookups or (self._count + 1) * 2 > self._buckets:
            self._grow()
            self.add(key, hashed)
            return
        placed, entry = index, (distance, key, hashed)
        while True:
            slot = self._slots[index]
            if slot is None:
                self._slots[index] = entry
                self._count += 1
                return
            if slot[0] < entry[0]:
                self._slots[index], entry = entry, slot
            entry = (entry[0] + 1, entry[1], entry[2])
            index += 1
            if entry[0] == self._lookups:
                first = self._slots[placed]
                assert first is not None
                self._slots[placed] = (first[0], entry[1], entry[2])
                self._grow()
                self.add(first[1], first[2])
                return

    def _grow(self) -> None:
        old = [slot for slot in self._slots if slot is not None]
        self._buckets = max(_LEAST_SLOTS, 2 * self._buckets)
        self._lookups = max(_LEAST_LOOKUPS, self._buckets.bit_length() - 1)
        self._slots = [None] * (self._buckets + self._lookups)
        self._count = 0
        for slot in old:
            self.add(slot[1], slot[2])


def stream_hash(stream: int) -> int:
    """Hash of a CUDA stream of device 0: its id in torch, for the pool's streams 1, 2, ... in order of creation."""
    identity = 32 * (stream - 1) + 3 if 0 < stream <= 32 else stream
    return (1 << 56) | (identity & ((1 << 48) - 1))


def pool_hash(pool: tuple[int, int]) -> int:
    """Hash of a pool's id."""
    return pool[0] or pool[1]
