"""The floor: live bytes alone, as if memory were never rounded, split or cached."""

from __future__ import annotations

from xmem.errors import UsageError
from xmem.simulate.allocator import DEFAULT_POOL, Memory, OutOfMemory, PoolId, Stats
from xmem.simulate.device import MALLOC_BASE, as_device


def make(memory: Memory, conf_text: str = "", torch_version: str | None = None) -> Ideal:
    """Make the floor; it has no settings, so the text is not looked at."""
    del conf_text, torch_version
    return Ideal(memory)


class Ideal:
    """Counts bytes; addresses are never used twice. No allocator needs less."""

    def __init__(self, memory: Memory) -> None:
        self._capacity = as_device(memory).free_bytes
        self._next = MALLOC_BASE
        self._sizes: dict[int, int] = {}
        self._held = 0
        self._peak = 0
        self._num_ooms = 0

    def alloc(self, size: int, *, stream: int = 0, pool: PoolId = DEFAULT_POOL) -> int:
        """Return an address of its own for `size` bytes, 0 for size 0; raise OutOfMemory."""
        del stream, pool
        if size == 0:
            return 0
        if self._held + size > self._capacity:
            self._num_ooms += 1
            free = self._capacity - self._held
            raise OutOfMemory(size, device_free_bytes=free, limit_bytes=self._capacity)
        address = self._next
        self._next += size
        self._sizes[address] = size
        self._held += size
        self._peak = max(self._peak, self._held)
        return address

    def free_requested(self, address: int) -> None:
        """Forget the bytes at `address`; 0 is ignored."""
        if address == 0:
            return
        size = self._sizes.pop(address, None)
        if size is None:
            raise UsageError(f"There is no allocated block at address {address}.")
        self._held -= size

    def free_completed(self, address: int) -> None:
        """Do nothing: a free is complete at once."""

    def record_stream(self, address: int, stream: int) -> None:
        """Do nothing: streams do not matter here."""

    def empty_cache(self) -> None:
        """Do nothing: nothing is cached."""

    def stats(self) -> Stats:
        """Live bytes in every place."""
        held, peak = self._held, self._peak
        return Stats(held, held, held, held, 0, 0, len(self._sizes), peak, peak, peak, peak, num_ooms=self._num_ooms)

    def levels(self) -> tuple[int, int, int, int]:
        """Allocated, active, reserved and requested bytes now."""
        return (self._held,) * 4
