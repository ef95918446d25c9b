"""An allocator of one's own: blocks of powers of two, each cudaMalloc'd alone and kept for the next of its size.

pip install ./examples/my_allocator
xmem simulate RUN --gpu 24GiB --allocator power_of_two
"""

from __future__ import annotations

from collections import defaultdict

from xmem.simulate.allocator import DEFAULT_POOL, Memory, OutOfMemory, PoolId, Stats

SMALLEST = 512


def make(memory: Memory, conf_text: str = "", torch_version: str | None = None) -> PowerOfTwo:
    """Make the allocator; the entry point names this function. It has no settings."""
    return PowerOfTwo(memory)


class PowerOfTwo:
    """Wastes up to half of each block, but never fragments."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.live: dict[int, tuple[int, int]] = {}  # address: (block size, bytes asked for)
        self.cached: dict[int, list[int]] = defaultdict(list)  # block size: addresses
        self.allocated = self.reserved = self.requested = 0
        self.peaks = (0, 0, 0)

    def alloc(self, size: int, *, stream: int = 0, pool: PoolId = DEFAULT_POOL) -> int:
        """Return the address of a block; 0 for size 0."""
        if size == 0:
            return 0
        block = max(SMALLEST, 1 << (size - 1).bit_length())
        address = self.cached[block].pop() if self.cached[block] else self._reserve(block, size)
        self.live[address] = block, size
        self._change(block, 0, size)
        return address

    def free_requested(self, address: int) -> None:
        """Keep the block for the next request of its size."""
        if address:
            block, size = self.live.pop(address)
            self.cached[block].append(address)
            self._change(-block, 0, -size)

    def free_completed(self, address: int) -> None:
        """Frees are complete at once here."""

    def record_stream(self, address: int, stream: int) -> None:
        """Streams are not looked at here."""

    def empty_cache(self) -> None:
        """Give back all that is cached."""
        for block, addresses in self.cached.items():
            while addresses:
                self.memory.release(addresses.pop())
                self._change(0, -block, 0)

    def stats(self) -> Stats:
        """What is held now, and the peaks."""
        return Stats(
            allocated_bytes=self.allocated,
            active_bytes=self.allocated,
            reserved_bytes=self.reserved,
            requested_bytes=self.requested,
            active_blocks=len(self.live),
            segments=len(self.live) + sum(map(len, self.cached.values())),
            peak_allocated_bytes=self.peaks[0],
            peak_active_bytes=self.peaks[0],
            peak_reserved_bytes=self.peaks[1],
            peak_requested_bytes=self.peaks[2],
        )

    def _reserve(self, block: int, size: int) -> int:
        try:
            address = self.memory.reserve(block)
        except OutOfMemory:  # the cache may hold what is missing
            self.empty_cache()
            address = self.memory.reserve(block)
        self._change(0, block, 0)
        return address

    def _change(self, allocated: int, reserved: int, requested: int) -> None:
        self.allocated += allocated
        self.reserved += reserved
        self.requested += requested
        now = (self.allocated, self.reserved, self.requested)
        self.peaks = tuple(map(max, self.peaks, now))  # type: ignore[assignment]
