"""Rules of the arena, of cudaMallocAsync and of the floor, each as a few requests."""

from __future__ import annotations

from typing import Any

import pytest

from xmem.errors import UsageError
from xmem.simulate.allocator import Allocator, OutOfMemory, make_allocator
from xmem.simulate.device import Device

K, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def make(name: str, capacity: int = GIB, conf: str = "", **device: Any) -> tuple[Allocator, list[list[Any]]]:
    log: list[list[Any]] = []
    return make_allocator(name, Device(capacity, log=log, **device), conf), log


def sizes(log: list[list[Any]], kind: str = "malloc") -> list[int]:
    return [call[2] for call in log if call[0] == kind]


def test_arena_regions_double() -> None:
    arena, log = make("arena")
    for _ in range(4):
        arena.alloc(2 * MIB)
    assert sizes(log) == [2 * MIB, 4 * MIB, 8 * MIB]
    arena.alloc(100 * MIB)
    assert sizes(log)[-1] == 128 * MIB  # doubled until it fits, and then not again
    arena.alloc(100 * MIB)
    assert sizes(log)[-1] == 128 * MIB


def test_arena_takes_the_best_fit_and_splits_big_rests_only() -> None:
    arena, _ = make("arena", conf="allow_growth:False")
    first, gap, second, _ = (arena.alloc(size) for size in (10 * K, 256, 4 * K, 256))
    arena.free_requested(first)
    arena.free_requested(second)
    assert arena.alloc(3 * K) == second  # 4 KiB fits best
    assert arena.stats().allocated_bytes == 4 * K + 512  # 1 KiB over is not split off: less than the request
    assert arena.alloc(4 * K) == first
    assert arena.alloc(6 * K) == first + 4 * K  # 6 KiB over was
    arena.free_requested(gap)


def test_arena_merges_neighbours() -> None:
    arena, _ = make("arena")
    blocks = [arena.alloc(512 * K) for _ in range(4)]
    for index in (0, 2, 1, 3):
        arena.free_requested(blocks[index])
    assert arena.alloc(2 * MIB) == blocks[0]
    assert arena.stats().reserved_bytes == 2 * MIB


def test_arena_shrinks_a_region_once_where_the_device_refuses() -> None:
    device = Device(100 * MIB, log=(log := []))
    arena = make_allocator("arena", device)  # its limit is what was free at the start
    arena.alloc(30 * MIB)
    device.ext_malloc(46 * MIB)
    arena.alloc(20 * MIB)
    assert sizes(log, "malloc_fail")[0] == 32 * MIB
    assert len(sizes(log, "malloc_fail")) == 4 and 20 * MIB < sizes(log)[-1] < 22 * MIB  # 0.9 ** 4
    with pytest.raises(OutOfMemory):
        arena.alloc(30 * MIB)


def test_arena_gives_unused_regions_back_before_it_fails() -> None:
    arena, log = make("arena", 100 * MIB)
    for _ in range(2):
        arena.free_requested(arena.alloc(40 * MIB))
    arena.alloc(90 * MIB)
    assert "free" in [call[0] for call in log]
    kept, log = make("arena", 100 * MIB, "garbage_collection:False")
    kept.free_requested(kept.alloc(60 * MIB))
    with pytest.raises(OutOfMemory):
        kept.alloc(90 * MIB)
    assert "free" not in [call[0] for call in log]


def test_arena_takes_all_at_the_start_without_growth() -> None:
    arena, log = make("arena", GIB, "allow_growth:False,memory_fraction:0.75")
    arena.alloc(1)
    assert sizes(log) == [768 * MIB]
    assert arena.stats().reserved_bytes == 768 * MIB


@pytest.mark.parametrize("text", ["growth:True", "allow_growth:yes", "memory_fraction:2", "memory_fraction:x"])
def test_arena_settings_are_checked(text: str) -> None:
    with pytest.raises(UsageError):
        make("arena", conf=text)


def test_async_does_not_round_what_it_counts() -> None:
    allocator, log = make("cuda_malloc_async")
    block = allocator.alloc(1000)
    assert allocator.stats().allocated_bytes == 1000
    assert sizes(log) == [32 * MIB]
    allocator.free_requested(block)
    stats = allocator.stats()
    assert (stats.allocated_bytes, stats.reserved_bytes, stats.peak_allocated_bytes) == (0, 32 * MIB, 1000)
    assert (stats.segments, stats.inactive_split_bytes, stats.num_alloc_retries) == (0, 0, 0)
    allocator.empty_cache()
    assert allocator.stats().reserved_bytes == 0


def test_async_limits_used_bytes() -> None:
    allocator, _ = make("cuda_malloc_async", GIB, "per_process_memory_fraction:0.5")
    allocator.alloc(500 * MIB)
    with pytest.raises(OutOfMemory) as caught:
        allocator.alloc(13 * MIB)
    assert caught.value.limit_bytes == 512 * MIB
    with pytest.raises(UsageError):
        allocator.set_memory_fraction(2)  # type: ignore[attr-defined]


def test_async_trims_before_it_fails() -> None:
    allocator, log = make("cuda_malloc_async", 100 * MIB)
    allocator.free_requested(allocator.alloc(30 * MIB))
    allocator.alloc(90 * MIB)
    assert [call[0] for call in log] == ["malloc", "malloc_fail", "free", "malloc"]
    with pytest.raises(OutOfMemory):
        allocator.alloc(20 * MIB)


def test_the_floor_counts_live_bytes_and_no_more() -> None:
    floor, log = make("ideal", 100, other_bytes=10)
    first = floor.alloc(33)
    floor.alloc(57)
    with pytest.raises(OutOfMemory) as caught:
        floor.alloc(1)
    assert caught.value.device_free_bytes == 0
    floor.free_requested(first)
    stats = floor.stats()
    assert (stats.reserved_bytes, stats.peak_reserved_bytes, stats.num_ooms, log) == (57, 90, 1, [])


@pytest.mark.parametrize("name", ["arena", "cuda_malloc_async", "ideal"])
def test_levels_and_unknown_addresses(name: str) -> None:
    allocator, _ = make(name)
    assert allocator.alloc(0) == 0
    allocator.free_requested(0)
    allocator.alloc(1000)
    stats = allocator.stats()
    assert allocator.levels() == (  # type: ignore[attr-defined]
        stats.allocated_bytes, stats.active_bytes, stats.reserved_bytes, stats.requested_bytes,
    )  # fmt: skip
    with pytest.raises(UsageError, match="no allocated block at address 99"):
        allocator.free_requested(99)
