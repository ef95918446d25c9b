"""Statements of the allocator's rules, each as a few requests."""

from __future__ import annotations

from typing import Any

import pytest

from xmem.errors import UsageError
from xmem.simulate.allocator import UNKNOWN_STREAM, OutOfMemory, PoolAllocator, make_allocator
from xmem.simulate.device import Device
from xmem.simulate.native import Native, make

K, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def native(
    capacity: int = GIB, conf: str = "", version: str | None = None, **device: Any
) -> tuple[Native, list[list[Any]]]:
    log: list[list[Any]] = []
    return make(Device(capacity, log=log, **device), conf, version), log


def kinds(log: list[list[Any]]) -> list[str]:
    return [call[0] for call in log]


def equal_blocks(version: str, policy: str) -> list[int]:
    """Free three equal segments in another order than they were made; return the order in which they are reused."""
    allocator = make(Device(GIB, address_policy=policy), "", version)  # type: ignore[arg-type]
    made = [allocator.alloc(20 * MIB) for _ in range(3)]
    for index in (1, 2, 0):
        allocator.free_requested(made[index])
    return [made.index(allocator.alloc(20 * MIB)) for _ in range(3)]


@pytest.mark.parametrize(
    ("version", "policy", "order"),
    [
        ("2.9", "up", [0, 1, 2]),
        ("2.11", "down", [2, 1, 0]),  # by address
        ("2.12", "down", [0, 1, 2]),  # by creation number
        ("2.13", "down", [0, 1, 2]),  # by creation of the segment
        ("2.14.1+cu130", "down", [0, 1, 2]),
    ],
)
def test_which_of_equal_blocks_is_reused(version: str, policy: str, order: list[int]) -> None:
    assert equal_blocks(version, policy) == order


def test_in_2_12_a_split_gives_the_front_a_new_number_and_a_merge_keeps_that_of_the_freed() -> None:
    allocator, _ = native(version="2.12")
    first = [allocator.alloc(4 * MIB) for _ in range(5)]  # one segment: numbers 2, 3, 4, 5 and the rest 1 as the fifth
    other = [allocator.alloc(4 * MIB) for _ in range(5)]
    allocator.free_requested(other[1])
    allocator.free_requested(first[4])  # the whole rest: number 1, older than any of the second segment
    assert allocator.alloc(4 * MIB) == first[4]
    allocator.free_requested(first[1])
    assert allocator.alloc(4 * MIB) == first[1]  # 3 is older than 8


def test_zero_bytes_take_nothing() -> None:
    allocator, log = native()
    assert allocator.alloc(0) == 0
    allocator.free_requested(0)
    allocator.record_stream(0, 1)
    assert log == [] and allocator.stats().active_blocks == 0


def test_an_absurd_size_fails_at_once_without_counting() -> None:
    allocator, log = native()
    with pytest.raises(OutOfMemory) as caught:
        allocator.alloc(1 << 60)
    assert caught.value.requested_bytes == 1 << 60
    assert log == [] and allocator.stats().num_ooms == 0


def test_an_impossible_request_tries_twice_and_tells_all() -> None:
    allocator, log = native(100 * MIB, other_bytes=30 * MIB)
    with pytest.raises(OutOfMemory) as caught:
        allocator.alloc(200 * MIB - 5)
    error = caught.value
    assert kinds(log) == ["malloc_fail", "malloc_fail"]
    assert (error.requested_bytes, error.rounded_bytes, error.segment_bytes) == (200 * MIB - 5, 200 * MIB, 200 * MIB)
    assert (error.device_free_bytes, error.limit_bytes, error.rejected_by_policy) == (70 * MIB, None, False)
    stats = allocator.stats()
    assert (stats.num_alloc_retries, stats.num_ooms) == (1, 1)


def test_a_limit_is_checked_before_the_device_is_asked() -> None:
    allocator, log = native(conf="per_process_memory_fraction:0.1")
    with pytest.raises(OutOfMemory) as caught:
        allocator.alloc(200 * MIB)
    assert log == [] and caught.value.limit_bytes == int(0.1 * GIB)


def test_throw_on_cudamalloc_oom_keeps_the_cache() -> None:
    allocator, log = native(100 * MIB, "throw_on_cudamalloc_oom:True")
    allocator.free_requested(allocator.alloc(60 * MIB))
    with pytest.raises(OutOfMemory) as caught:
        allocator.alloc(70 * MIB)
    assert caught.value.rejected_by_policy
    assert kinds(log) == ["malloc"]
    stats = allocator.stats()
    assert (stats.reserved_bytes, stats.num_oom_rejections, stats.num_ooms) == (60 * MIB, 1, 0)


def test_garbage_collection_frees_old_segments_of_the_large_pool_only_under_a_limit() -> None:
    for fraction, freed in ((1.0, 0), (0.99, 3)):
        allocator, log = native(GIB, "garbage_collection_threshold:0.2")
        allocator.set_memory_fraction(fraction)
        blocks = [allocator.alloc(size * MIB) for size in (40, 60, 80, 100)]
        for block in blocks[:3]:
            allocator.free_requested(block)
        allocator.alloc(300 * MIB)
        assert kinds(log).count("free") == freed


def test_max_split_size_neither_splits_nor_lends_big_blocks() -> None:
    allocator, log = native(GIB, "max_split_size_mb:64")
    allocator.free_requested(allocator.alloc(100 * MIB))
    allocator.alloc(30 * MIB)  # must not take the 100 MiB
    allocator.alloc(85 * MIB)  # may: less than 20 MiB over
    assert [call[2] for call in log] == [100 * MIB, 30 * MIB]
    stats = allocator.memory_stats()
    assert stats["allocated_bytes.all.current"] == 130 * MIB
    assert stats["oversize_allocations.current"] == 1 and stats["oversize_segments.current"] == 1
    assert stats["max_split_size"] == 64 * MIB


def test_release_available_frees_the_one_big_block_that_makes_room() -> None:
    allocator, log = native(300 * MIB, "max_split_size_mb:64")
    small, big = allocator.alloc(70 * MIB), allocator.alloc(150 * MIB)
    allocator.free_requested(small)
    allocator.free_requested(big)
    allocator.alloc(100 * MIB)
    assert kinds(log)[2:] == ["malloc_fail", "free", "malloc"]
    assert allocator.stats().num_alloc_retries == 0


def test_streams_share_nothing() -> None:
    allocator, log = native()
    allocator.free_requested(allocator.alloc(20 * MIB, stream=1))
    allocator.alloc(20 * MIB, stream=2)
    assert kinds(log) == ["malloc", "malloc"]


def test_a_side_stream_keeps_a_freed_block_active_until_the_next_request() -> None:
    allocator, _ = native()
    block = allocator.alloc(20 * MIB)
    allocator.record_stream(block, 0)  # its own stream: nothing
    allocator.record_stream(block, 7)
    allocator.free_requested(block)
    stats = allocator.stats()
    assert (stats.allocated_bytes, stats.active_bytes) == (0, 20 * MIB)
    assert allocator.segments().blocks["state"] == ["active_pending_free"]
    assert allocator.alloc(20 * MIB) == block


def test_held_events_finish_in_order_stream_by_stream() -> None:
    device = Device(GIB, hold_events=True)
    allocator = make(device)
    one, two = allocator.alloc(20 * MIB), allocator.alloc(20 * MIB)
    for block in (one, two):
        allocator.record_stream(block, 7)
        allocator.free_requested(block)
    allocator.alloc(MIB)
    assert allocator.stats().active_bytes == 41 * MIB
    device.complete_events()
    allocator.alloc(MIB)
    assert allocator.stats().active_bytes == 2 * MIB


def test_free_completed_tells_what_no_event_does() -> None:
    allocator, _ = native()
    block = allocator.alloc(20 * MIB)
    allocator.record_stream(block, UNKNOWN_STREAM)
    allocator.free_completed(block)  # not freed: nothing
    allocator.free_requested(block)
    assert allocator.alloc(20 * MIB) != block
    allocator.free_completed(block)
    allocator.free_completed(block)
    assert allocator.alloc(20 * MIB) == block


def test_free_completed_at_a_capture() -> None:
    allocator, _ = native()
    block = allocator.alloc(20 * MIB)
    pool = allocator.begin_capture(1)
    allocator.record_stream(block, 1)
    allocator.free_requested(block)
    allocator.free_completed(block)
    allocator.end_capture(pool)
    assert allocator.stats().active_bytes == 0
    assert allocator.alloc(20 * MIB) == block


def test_empty_cache_waits_for_side_streams() -> None:
    allocator, log = native(hold_events=True)
    block = allocator.alloc(20 * MIB)
    allocator.record_stream(block, UNKNOWN_STREAM)
    allocator.free_requested(block)
    allocator.empty_cache()
    assert kinds(log) == ["malloc", "sync", "free"]
    assert allocator.memory_stats()["num_sync_all_streams"] == 1


@pytest.mark.parametrize("call", ["free_requested", "record_stream"])
def test_an_unknown_address_is_refused(call: str) -> None:
    allocator, _ = native()
    with pytest.raises(UsageError, match="There is no allocated block at address 12345"):
        getattr(allocator, call)(12345, *([1] if call == "record_stream" else []))


def test_example_of_expandable_segments() -> None:
    """10 | 60 | 10 MiB, free the middle, empty the cache: 40 MiB go, 10 MiB stay on either side; 32 MiB refill it."""
    allocator, log = native(8 * GIB, "expandable_segments:True")
    blocks = [allocator.alloc(size * MIB) for size in (10, 60, 10)]
    assert allocator.stats().reserved_bytes == 80 * MIB
    allocator.free_requested(blocks[1])
    allocator.empty_cache()
    assert kinds(log).count("unmap") == 2 and allocator.stats().reserved_bytes == 40 * MIB
    refill = allocator.alloc(32 * MIB)
    assert refill == blocks[1] and allocator.stats().reserved_bytes == 80 * MIB
    assert allocator.stats().segments == 0 and allocator.stats().inactive_split_bytes == 0


def test_addresses_reserved_for_a_segment() -> None:
    _, log = native(80 * GIB, "expandable_segments:True")
    allocator = make(Device(80 * GIB, log=log), "expandable_segments:True")
    allocator.alloc(20 * MIB)
    assert log[0][0] == "reserve" and log[0][2] == 96636764160


def test_a_refused_page_rolls_the_call_back() -> None:
    allocator, log = native(50 * MIB, "expandable_segments:True")
    with pytest.raises(OutOfMemory):
        allocator.alloc(60 * MIB)
    assert kinds(log) == ["reserve", *["create", "create", "create_fail", "release", "release"] * 2]
    assert allocator.device.used_bytes == 0


def test_expandable_is_native_with_the_mode_on_and_can_be_turned_off() -> None:
    log: list[list[Any]] = []
    allocator = make_allocator("expandable", Device(GIB, log=log))
    assert isinstance(allocator, Native)
    allocator.alloc(15 * MIB)
    allocator.set_conf("expandable_segments:False")
    allocator.alloc(15 * MIB)
    assert kinds(log) == ["reserve", "create", "map", "malloc"]
    with pytest.raises(UsageError, match="no expandable segments"):
        make_allocator("expandable", Device(GIB), "", "2.0.1")


def test_a_mempool_is_its_own_world_until_it_is_dropped() -> None:
    allocator, log = native()
    pool = allocator.create_pool()
    assert pool == (0, 1) and allocator.create_pool() == (0, 2)
    block = allocator.alloc(20 * MIB, pool=pool)
    allocator.free_requested(block)
    assert allocator.alloc(20 * MIB) != block
    assert allocator.alloc(20 * MIB, pool=pool) == block
    allocator.free_requested(block)
    allocator.empty_cache()
    assert "free" not in kinds(log)
    allocator.delete_pool(pool)
    assert kinds(log)[-1] == "free"
    assert allocator.memory_stats()["reserved_bytes_by_private_pools.0_1.all.peak"] == 20 * MIB
    with pytest.raises(UsageError, match=r"There is no pool \(0, 1\) in use"):
        allocator.delete_pool(pool)


def test_pools_of_a_recording_need_not_be_made() -> None:
    allocator, _ = native()
    block = allocator.alloc(20 * MIB, pool=(3, 0))
    assert allocator.segments().segments["pool_id"] == [(3, 0)]
    allocator.free_requested(block)
    assert allocator.alloc(20 * MIB) != block


def test_a_no_split_pool_gives_whole_segments() -> None:
    allocator, _ = native()
    pool = allocator.create_pool(no_split=True)
    allocator.alloc(100, pool=pool)
    assert allocator.stats().allocated_bytes == 2 * MIB


def test_a_capture_routes_its_stream_and_frees_come_back_after_the_graph() -> None:
    allocator, log = native()
    pool = allocator.begin_capture(3)
    inside, outside = allocator.alloc(20 * MIB, stream=3), allocator.alloc(20 * MIB, stream=0)
    allocator.end_capture(pool)
    assert sorted(allocator.segments().segments["pool_id"]) == [(0, 0), (1, 0)]
    second = allocator.begin_capture(3, share=pool)
    assert second == pool
    allocator.end_capture(pool)
    allocator.free_requested(inside)
    allocator.free_requested(outside)
    allocator.delete_graph(pool)
    allocator.empty_cache()
    assert kinds(log).count("free") == 1
    allocator.delete_graph(pool)
    allocator.empty_cache()
    assert kinds(log).count("free") == 2
    for drop in (allocator.delete_graph, allocator.end_capture):
        with pytest.raises(UsageError):
            drop(pool)


def test_a_graph_keeps_the_mempools_that_served_it() -> None:
    allocator, log = native()
    pool = allocator.create_pool()
    graph = allocator.begin_capture(1)
    block = allocator.alloc(20 * MIB, stream=1, pool=pool)
    allocator.end_capture(graph)
    allocator.free_requested(block)
    allocator.delete_pool(pool)
    assert "free" not in kinds(log)
    allocator.delete_graph(graph)
    allocator.empty_cache()
    assert kinds(log)[-1] == "free"


def test_no_cache_is_given_back_for_a_request_during_a_capture() -> None:
    allocator, log = native(50 * MIB)
    allocator.free_requested(allocator.alloc(30 * MIB))
    allocator.begin_capture(1)
    with pytest.raises(OutOfMemory):
        allocator.alloc(40 * MIB, stream=1)
    allocator.empty_cache()
    assert kinds(log) == ["malloc", "malloc_fail"]
    assert allocator.stats().num_alloc_retries == 0


def test_settings_at_run_time() -> None:
    allocator, _ = native(conf="max_split_size_mb:64")
    allocator.set_conf("roundup_power2_divisions:4")
    assert allocator.heap.conf.max_split_size is None
    assert allocator.memory_stats()["max_split_size"] == 64 * MIB  # torch reports what it began with
    allocator.free_requested(allocator.alloc(1025 * K))
    assert allocator.stats().peak_allocated_bytes == 1280 * K
    with pytest.raises(UsageError):
        allocator.set_conf("garbage_collection_threshold:0.5,max_split_size_mb:1")
    assert allocator.heap.conf.garbage_collection_threshold == 0.5  # keys before the error stay set
    for text in ("backend:cudaMallocAsync", "backend:cudaMallocAsync"):
        with pytest.raises(UsageError, match="backend is fixed"):
            allocator.set_conf(text)
    with pytest.raises(UsageError, match="lies between 0 and 1"):
        allocator.set_memory_fraction(1.5)


def test_freeing_a_piece_of_a_segment_fails_as_in_torch() -> None:
    allocator, _ = native(240 * MIB)
    blocks = [allocator.alloc(200 * MIB)]
    allocator.free_requested(blocks[0])
    allocator.alloc(40 * MIB)  # cut off the 200 MiB
    allocator.set_conf("max_split_size_mb:64")
    with pytest.raises(UsageError, match="part of a segment"):
        allocator.alloc(100 * MIB, stream=0) and allocator.alloc(100 * MIB)


def test_resets() -> None:
    allocator, _ = native(100 * MIB)
    allocator.free_requested(allocator.alloc(60 * MIB))
    with pytest.raises(OutOfMemory):
        allocator.alloc(200 * MIB)
    allocator.reset_peak_stats()
    allocator.reset_accumulated_stats()
    stats = allocator.memory_stats()
    assert {name: value for name, value in stats.items() if value} == {"max_split_size": -1}
    assert allocator.levels() == (0, 0, 0, 0)


def test_native_is_a_pool_allocator_and_the_floor_is_not() -> None:
    assert isinstance(native()[0], PoolAllocator)
    assert not isinstance(make_allocator("ideal", Device(GIB)), PoolAllocator)
