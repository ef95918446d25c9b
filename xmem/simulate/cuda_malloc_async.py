"""torch's cudaMallocAsync backend: every request goes to the driver's own memory pool.

What torch adds is read from its source of about 2.0: sizes are not rounded; a request fails where used bytes and it
exceed the fraction of the device; empty_cache synchronizes and trims the pool to what is in use; all other statistics
are 0. How the driver's pool keeps memory is not documented. Here it takes 32 MiB at a time (the step that
cudaMemPoolAttrReservedMemCurrent shows), reuses freed memory best fit in units of 512 bytes, on every stream, and keeps
it until it is trimmed (torch sets the release threshold to the maximum). Its reserved bytes are an estimate.
"""

from __future__ import annotations

from xmem.errors import UsageError
from xmem.simulate.allocator import DEFAULT_POOL, Memory, OutOfMemory, PoolId, Stats
from xmem.simulate.conf import AllocConf, parse_conf
from xmem.simulate.device import as_device
from xmem.simulate.regions import Regions

UNIT = 512
STEP = 32 << 20


def make(memory: Memory, conf_text: str = "", torch_version: str | None = None) -> CudaMallocAsync:
    """Make the backend; of PYTORCH_ALLOC_CONF only per_process_memory_fraction has an effect."""
    return CudaMallocAsync(memory, parse_conf(conf_text, torch_version))


class CudaMallocAsync:
    """The allocator: frees are ordered with the stream, so they are complete at once for what follows."""

    def __init__(self, memory: Memory, conf: AllocConf) -> None:
        self._device = as_device(memory)
        self._regions = Regions(memory)
        self._limit = self._device.total_bytes
        self.set_memory_fraction(conf.per_process_memory_fraction)

    def set_memory_fraction(self, fraction: float) -> None:
        """Limit used bytes to `fraction` of the device."""
        if not 0.0 <= fraction <= 1.0:
            raise UsageError(f"A memory fraction lies between 0 and 1; {fraction} does not.")
        self._limit = int(fraction * self._device.total_bytes)

    def alloc(self, size: int, *, stream: int = 0, pool: PoolId = DEFAULT_POOL) -> int:
        """Return the address of `size` bytes, 0 for size 0; raise OutOfMemory."""
        del stream, pool
        if size == 0:
            return 0
        regions, rounded = self._regions, -(-size // UNIT) * UNIT
        if regions.requested_bytes + size > self._limit:
            raise self._out_of_memory(size, rounded)
        address = regions.take(rounded, size, 1)
        if address is None:
            try:
                regions.add(-(-rounded // STEP) * STEP)
            except OutOfMemory:
                regions.release_unused()  # the driver takes back what no stream uses before it refuses
                try:
                    regions.add(-(-rounded // STEP) * STEP)
                except OutOfMemory:
                    raise self._out_of_memory(size, rounded) from None
            address = regions.take(rounded, size, 1)
        assert address is not None
        return address

    def free_requested(self, address: int) -> None:
        """Free the block at `address`; 0 is ignored."""
        if address:
            self._regions.give(address)

    def free_completed(self, address: int) -> None:
        """Do nothing: a free is complete in stream order."""

    def record_stream(self, address: int, stream: int) -> None:
        """Do nothing: the driver orders streams itself."""

    def empty_cache(self) -> None:
        """Trim the pool."""
        self._regions.release_unused()

    def stats(self) -> Stats:
        """What is held now, and the peaks; allocated bytes are what was asked for."""
        stats = self._regions.stats()
        return Stats(
            allocated_bytes=stats.requested_bytes,
            active_bytes=stats.requested_bytes,
            reserved_bytes=stats.reserved_bytes,
            requested_bytes=stats.requested_bytes,
            peak_allocated_bytes=stats.peak_requested_bytes,
            peak_active_bytes=stats.peak_requested_bytes,
            peak_reserved_bytes=stats.peak_reserved_bytes,
            peak_requested_bytes=stats.peak_requested_bytes,
            num_ooms=stats.num_ooms,
        )

    def levels(self) -> tuple[int, int, int, int]:
        """Allocated, active, reserved and requested bytes now."""
        used = self._regions.requested_bytes
        return used, used, self._regions.reserved_bytes, used

    def _out_of_memory(self, size: int, rounded: int) -> OutOfMemory:
        self._regions.num_ooms += 1
        free = self._device.free_bytes
        return OutOfMemory(size, rounded_bytes=rounded, device_free_bytes=free, limit_bytes=self._limit)
