"""The device under the allocators: what is free, where it is, and what others hold."""

from __future__ import annotations

from typing import Any

import pytest

from xmem.errors import UsageError
from xmem.simulate.allocator import OutOfMemory, make_allocator
from xmem.simulate.device import GRANULARITY, MALLOC_BASE, VIRTUAL_BASE, Device

MIB = 1 << 20


def test_malloc_rounds_to_two_mib_and_takes_the_lowest_place() -> None:
    device = Device(20 * MIB)
    first, second, third = (device.reserve(size) for size in (1, 2 * MIB, 3 * MIB))
    assert (first, second, third) == (MALLOC_BASE, MALLOC_BASE + 2 * MIB, MALLOC_BASE + 4 * MIB)
    assert device.used_bytes == 8 * MIB and device.free_bytes == 12 * MIB
    device.release(second)
    device.release(first)
    assert device.reserve(4 * MIB) == first
    device.release(third)
    assert device.reserve(5 * MIB) == third


@pytest.mark.parametrize(("policy", "step"), [("up", 2 * MIB), ("down", -2 * MIB)])
def test_addresses_that_are_never_used_again(policy: Any, step: int) -> None:
    device = Device(20 * MIB, address_policy=policy)
    first = device.reserve(MIB)
    device.release(first)
    assert device.reserve(MIB) - first == step


def test_what_others_hold_is_never_free() -> None:
    log: list[list[Any]] = []
    device = Device(10 * MIB, other_bytes=3 * MIB, log=log)
    assert device.free_bytes == 7 * MIB
    taken = device.ext_malloc(4 * MIB)
    with pytest.raises(OutOfMemory) as caught:
        device.reserve(4 * MIB)
    assert (caught.value.requested_bytes, caught.value.device_free_bytes) == (4 * MIB, 3 * MIB)
    device.ext_free(taken)
    device.reserve(4 * MIB)
    assert [call[0] for call in log] == ["malloc", "malloc_fail", "free", "malloc"]
    assert Device(MIB, other_bytes=2 * MIB).free_bytes == 0


def test_virtual_memory() -> None:
    log: list[list[Any]] = []
    device = Device(5 * MIB, log=log)
    address = device.reserve_addresses(100 * MIB)
    assert address == VIRTUAL_BASE and device.used_bytes == 0
    handle = device.create(2 * MIB)
    device.map(address, 2 * MIB)
    device.create(2 * MIB)
    with pytest.raises(OutOfMemory):
        device.create(2 * MIB)
    device.unmap(address, 2 * MIB)
    device.release_handle(handle)
    device.free_addresses(address, 100 * MIB)
    assert device.free_bytes == 3 * MIB
    assert [call[0] for call in log] == [
        "reserve", "create", "map", "create", "create_fail", "unmap", "release", "addrfree",
    ]  # fmt: skip


def test_events() -> None:
    device = Device(4 * MIB, hold_events=True)
    first, second = device.record_event(), device.record_event()
    assert not device.event_done(first)
    device.synchronize_event(first)
    assert device.event_done(first) and not device.event_done(second)
    device.release(device.reserve(MIB))  # cudaFree waits for everything
    assert device.event_done(second)
    third = device.record_event()
    device.synchronize()
    assert device.event_done(third)
    device.hold_events = False
    assert device.event_done(device.record_event())


def test_wrong_use() -> None:
    with pytest.raises(UsageError, match="cannot be negative"):
        Device(-1)
    with pytest.raises(UsageError, match="Address 5 was not reserved"):
        Device(MIB).release(5)


class Counted:
    """A Memory of one's own: it counts."""

    def __init__(self) -> None:
        self.total_bytes = 100 * MIB
        self.held: dict[int, int] = {}
        self.next = 1 << 30

    def reserve(self, size: int) -> int:
        if sum(self.held.values()) + size > self.total_bytes:
            raise OutOfMemory(size)
        self.next += -(-size // GRANULARITY) * GRANULARITY
        self.held[self.next] = size
        return self.next

    def release(self, address: int) -> None:
        del self.held[address]


@pytest.mark.parametrize("name", ["native", "arena", "cuda_malloc_async", "ideal"])
def test_any_memory_will_do(name: str) -> None:
    memory = Counted()
    allocator = make_allocator(name, memory)
    block = allocator.alloc(20 * MIB)
    assert name == "ideal" or sum(memory.held.values()) >= 20 * MIB
    with pytest.raises(OutOfMemory):
        allocator.alloc(90 * MIB)
    allocator.free_requested(block)
    allocator.empty_cache()
    assert memory.held == {}


def test_expandable_segments_need_a_device() -> None:
    allocator = make_allocator("expandable", Counted())
    with pytest.raises(UsageError, match="Counted cannot map memory"):
        allocator.alloc(MIB)
