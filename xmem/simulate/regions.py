"""Regions of device memory cut into chunks: best fit, split on demand, merged with free neighbours."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

from xmem.errors import UsageError
from xmem.simulate.allocator import Memory, Stats


@dataclass(eq=False, slots=True)
class Chunk:
    """A piece of a region; `requested` is None where it is free."""

    address: int
    size: int
    region: int
    requested: int | None = None
    before: Chunk | None = None
    after: Chunk | None = None


class Regions:
    """Memory taken from a Memory region by region, its chunks, and the figures of both."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.reserved_bytes = 0
        self.allocated_bytes = 0
        self.requested_bytes = 0
        self.num_ooms = 0
        self._sizes: dict[int, int] = {}  # of regions, by address
        self._used: dict[int, int] = {}  # chunks in use, by region
        self._chunks: dict[int, Chunk] = {}  # in use, by address
        self._free: list[tuple[int, int]] = []  # (size, address)
        self._free_at: dict[int, Chunk] = {}
        self._peaks = {"allocated": 0, "reserved": 0, "requested": 0}

    def add(self, size: int) -> None:
        """Take a region from the memory; raises OutOfMemory."""
        address = self.memory.reserve(size)
        self._sizes[address] = size
        self._used[address] = 0
        self.reserved_bytes += size
        self._peaks["reserved"] = max(self._peaks["reserved"], self.reserved_bytes)
        self._put(Chunk(address, size, address))

    def take(self, size: int, requested: int, least_rest: int | None) -> int | None:
        """Return the smallest free chunk that holds `size`, None where there is none.

        What is left of it is split off where it is at least `least_rest` bytes; None for a rest as big as the size, or
        128 MiB, whichever is less (the rule of a BFC arena).
        """
        index = bisect_left(self._free, (size, 0))
        if index == len(self._free):
            return None
        chunk = self._free_at.pop(self._free.pop(index)[1])
        rest = chunk.size - size
        if rest and rest >= (min(size, 128 << 20) if least_rest is None else least_rest):
            self._put(Chunk(chunk.address + size, rest, chunk.region, before=chunk, after=chunk.after))
            chunk.size = size
        chunk.requested = requested
        self._chunks[chunk.address] = chunk
        self._used[chunk.region] += 1
        self._change(chunk.size, requested)
        return chunk.address

    def give(self, address: int) -> None:
        """Free the chunk at `address` and merge it with free neighbours."""
        chunk = self._chunks.pop(address, None)
        if chunk is None:
            raise UsageError(f"There is no allocated block at address {address}.")
        self._change(-chunk.size, -(chunk.requested or 0))
        chunk.requested = None
        self._used[chunk.region] -= 1
        for other in (chunk.before, chunk.after):
            if other is not None and other.requested is None:
                self._drop(other)
                chunk.address = min(chunk.address, other.address)
                chunk.size += other.size
                if other is chunk.before:
                    chunk.before = other.before
                else:
                    chunk.after = other.after
        self._put(chunk)

    def release_unused(self) -> int:
        """Give regions without a chunk in use back to the memory; return their bytes."""
        unused = [address for address, count in self._used.items() if count == 0]
        for address in unused:
            self._drop(self._free_at[address])
            del self._used[address]
            self.reserved_bytes -= self._sizes[address]
            self.memory.release(address)
        return sum(self._sizes.pop(address) for address in unused)

    @property
    def unused_bytes(self) -> int:
        """Bytes of regions without a chunk in use."""
        return sum(self._sizes[address] for address, count in self._used.items() if count == 0)

    def stats(self) -> Stats:
        """The figures in the words of the contract."""
        return Stats(
            allocated_bytes=self.allocated_bytes,
            active_bytes=self.allocated_bytes,
            reserved_bytes=self.reserved_bytes,
            requested_bytes=self.requested_bytes,
            inactive_split_bytes=self.reserved_bytes - self.allocated_bytes - self.unused_bytes,
            segments=len(self._sizes),
            active_blocks=len(self._chunks),
            peak_allocated_bytes=self._peaks["allocated"],
            peak_active_bytes=self._peaks["allocated"],
            peak_reserved_bytes=self._peaks["reserved"],
            peak_requested_bytes=self._peaks["requested"],
            num_ooms=self.num_ooms,
        )

    def levels(self) -> tuple[int, int, int, int]:
        """Allocated, active, reserved and requested bytes now."""
        return self.allocated_bytes, self.allocated_bytes, self.reserved_bytes, self.requested_bytes

    def _change(self, size: int, requested: int) -> None:
        self.allocated_bytes += size
        self.requested_bytes += requested
        self._peaks["allocated"] = max(self._peaks["allocated"], self.allocated_bytes)
        self._peaks["requested"] = max(self._peaks["requested"], self.requested_bytes)

    def _put(self, chunk: Chunk) -> None:
        if chunk.before is not None:
            chunk.before.after = chunk
        if chunk.after is not None:
            chunk.after.before = chunk
        insort(self._free, (chunk.size, chunk.address))
        self._free_at[chunk.address] = chunk

    def _drop(self, chunk: Chunk) -> None:
        del self._free[bisect_left(self._free, (chunk.size, chunk.address))]
        del self._free_at[chunk.address]
