"""The lower level: a GPU's memory as the CUDA driver hands it out (cudaMalloc, virtual memory, events)."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any, Literal

from xmem.errors import UsageError
from xmem.simulate.allocator import Memory, OutOfMemory

#: What cudaMalloc and cuMemCreate round to (observed on all current GPUs: 2 MiB).
GRANULARITY = 2 << 20
#: Simulated addresses: cudaMalloc memory and virtual reservations lie in ranges of their own.
MALLOC_BASE = 1 << 46
MALLOC_SPAN = 1 << 42
VIRTUAL_BASE = 1 << 50

AddressPolicy = Literal["first", "up", "down"]


class Device:
    """One GPU: `total_bytes` of memory of which `other_bytes` (context, other processes) are never free.

    `address_policy` says which address cudaMalloc returns: the lowest that is free ("first"), or ever higher or
    lower ones. `log`, a list, takes every driver call as [kind, address or handle, size], in order. `hold_events`
    keeps recorded events unfinished until `complete_events` or a synchronizing call.
    """

    def __init__(
        self,
        total_bytes: int,
        *,
        other_bytes: int = 0,
        address_policy: AddressPolicy = "first",
        log: list[list[Any]] | None = None,
        hold_events: bool = False,
    ) -> None:
        if total_bytes < 0 or other_bytes < 0:
            raise UsageError("A device's bytes cannot be negative.", f"Got {total_bytes} and {other_bytes}.")
        self.total_bytes = total_bytes
        self.other_bytes = other_bytes
        self.used_bytes = 0
        self.log = log
        self.hold_events = hold_events
        self._policy = address_policy
        self._next = MALLOC_BASE + (MALLOC_SPAN if address_policy == "down" else 0)
        self._hole_addresses = [MALLOC_BASE]
        self._hole_sizes = [MALLOC_SPAN]
        self._reserved: dict[int, int] = {}
        self._handles: dict[int, int] = {}
        self._next_handle = 1
        self._next_virtual = VIRTUAL_BASE
        self._ticket = 0
        self._done = 0

    @property
    def free_bytes(self) -> int:
        """Bytes that are free now."""
        return max(0, self.total_bytes - self.other_bytes - self.used_bytes)

    # -- cudaMalloc

    def reserve(self, size: int) -> int:
        """Do `cudaMalloc`: take `size` bytes, rounded up to 2 MiB; raise OutOfMemory."""
        rounded = -(-size // GRANULARITY) * GRANULARITY
        if not self._take(rounded):
            self._note("malloc_fail", None, size)
            raise OutOfMemory(size, device_free_bytes=self.free_bytes)
        address = self._place(rounded)
        self._reserved[address] = size
        self._note("malloc", address, size)
        return address

    def release(self, address: int) -> None:
        """Do `cudaFree`; it synchronizes the device."""
        size = self._reserved.pop(address, None)
        if size is None:
            raise UsageError(f"Address {address} was not reserved from this device.")
        rounded = -(-size // GRANULARITY) * GRANULARITY
        self.used_bytes -= rounded
        if self._policy == "first":
            self._add_hole(address, rounded)
        self._note("free", address, size)
        self._done = self._ticket

    # -- virtual memory (expandable segments)

    def reserve_addresses(self, size: int) -> int:
        """Do `cuMemAddressReserve`: addresses without memory."""
        address = self._next_virtual
        self._next_virtual += -(-size // GRANULARITY) * GRANULARITY
        self._note("reserve", address, size)
        return address

    def free_addresses(self, address: int, size: int) -> None:
        """Do `cuMemAddressFree`."""
        self._note("addrfree", address, size)

    def create(self, size: int) -> int:
        """Do `cuMemCreate`: take memory that has no address yet and return its handle; raise OutOfMemory."""
        if not self._take(size):
            self._note("create_fail", None, size)
            raise OutOfMemory(size, device_free_bytes=self.free_bytes)
        handle = self._next_handle
        self._next_handle += 1
        self._handles[handle] = size
        self._note("create", handle, size)
        return handle

    def release_handle(self, handle: int) -> None:
        """Do `cuMemRelease`; unmap before."""
        size = self._handles.pop(handle)
        self.used_bytes -= size
        self._note("release", handle, size)

    def map(self, address: int, size: int) -> None:
        """Do `cuMemMap` with access for this device."""
        self._note("map", address, size)

    def unmap(self, address: int, size: int) -> None:
        """Do `cuMemUnmap`."""
        self._note("unmap", address, size)

    # -- events and synchronization

    def record_event(self) -> int:
        """Record an event on some stream and return its ticket."""
        self._ticket += 1
        if not self.hold_events:
            self._done = self._ticket
        return self._ticket

    def event_done(self, ticket: int) -> bool:
        """Say whether all work before the event has finished."""
        return ticket <= self._done

    def synchronize_event(self, ticket: int) -> None:
        """Wait for an event."""
        self._done = max(self._done, ticket)
        self._note("sync", None, 0)

    def synchronize(self) -> None:
        """Wait for all work."""
        self._done = self._ticket
        self._note("sync", None, 0)

    def complete_events(self) -> None:
        """Let every recorded event finish."""
        self._done = self._ticket

    # -- memory of others

    def ext_malloc(self, size: int) -> int:
        """Take memory as another user of the device does; raise OutOfMemory."""
        return self.reserve(size)

    def ext_free(self, address: int) -> None:
        """Give back what `ext_malloc` took."""
        self.release(address)

    def _take(self, size: int) -> bool:
        if self.used_bytes + size > self.total_bytes - self.other_bytes:
            return False
        self.used_bytes += size
        return True

    def _note(self, kind: str, address: int | None, size: int) -> None:
        if self.log is not None:
            self.log.append([kind, address, size] if kind != "sync" else [kind])

    def _place(self, size: int) -> int:
        if self._policy == "down":
            self._next -= size
            return self._next
        if self._policy == "up":
            self._next += size
            return self._next - size
        index = next(i for i, hole in enumerate(self._hole_sizes) if hole >= size)
        address = self._hole_addresses[index]
        if self._hole_sizes[index] == size:
            del self._hole_addresses[index], self._hole_sizes[index]
        else:
            self._hole_addresses[index] += size
            self._hole_sizes[index] -= size
        return address

    def _add_hole(self, address: int, size: int) -> None:
        addresses, sizes = self._hole_addresses, self._hole_sizes
        index = bisect_left(addresses, address)
        if index < len(addresses) and address + size == addresses[index]:
            size += sizes[index]
            del addresses[index], sizes[index]
        if index and addresses[index - 1] + sizes[index - 1] == address:
            sizes[index - 1] += size
        else:
            addresses.insert(index, address)
            sizes.insert(index, size)


class PlainDevice(Device):
    """A Device over any Memory: cudaMalloc goes to it, there is no virtual memory, and events finish at once."""

    def __init__(self, memory: Memory) -> None:
        super().__init__(getattr(memory, "total_bytes", MALLOC_SPAN))
        self._memory = memory

    @property
    def free_bytes(self) -> int:
        """Bytes that are free now, where the memory knows."""
        return int(getattr(self._memory, "free_bytes", self.total_bytes))

    def reserve(self, size: int) -> int:
        """Ask the memory."""
        return self._memory.reserve(size)

    def release(self, address: int) -> None:
        """Give back to the memory."""
        self._memory.release(address)
        self.complete_events()

    def reserve_addresses(self, size: int) -> int:
        """Refuse: a plain Memory has no virtual addresses."""
        raise UsageError(
            f"{type(self._memory).__name__} cannot map memory, which expandable segments need.",
            "Simulate on a Device, or turn expandable_segments off.",
        )


def as_device(memory: Memory) -> Device:
    """Return `memory` itself where it is a Device, else a Device over it."""
    return memory if isinstance(memory, Device) else PlainDevice(memory)
