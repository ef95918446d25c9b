"""The explanation of a failure: free memory by who may use it, pins, holders, and what would have saved it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.simulate.stores import MIB, event, make_store
from tests.simulate.test_replay import table
from xmem.simulate import SimulateOptions, simulate
from xmem.simulate.explain import explain_failure
from xmem.simulate.replay import encode
from xmem.simulate.trial import Setup, try_on
from xmem.simulate.verdict import Oom


def explain(total: int, *rows: tuple[Any, ...], conf: str = "", **columns: list[Any]) -> Oom:
    requests = table(*rows, **columns)
    encoded = encode(requests)
    oom = explain_failure(encoded, requests, try_on(encoded, Setup("native", conf, None), total, in_full=True))
    assert oom is not None
    return oom


def test_a_small_block_pins_a_big_segment(tmp_path: Path) -> None:
    """By hand: ten blocks of 2 MiB share a segment of 20 MiB, one stays; 64 MiB do not fit beside it in 80 MiB."""
    events = [event("alloc", n, 2 * MIB, category="activation", step=n) for n in range(10)]
    events += [event("free_requested", n, 2 * MIB) for n in range(10) if n != 4]
    events += [event("alloc", 10, 64 * MIB, step=10)]
    store = make_store(tmp_path, events)
    verdict = simulate(gpu="80MiB", store=store.path, options=SimulateOptions(non_torch=0))
    oom = verdict.oom
    assert oom is not None
    assert (oom.allocated_bytes, oom.reserved_bytes, oom.free_in_cache_bytes) == (2 * MIB, 20 * MIB, 18 * MIB)
    assert (oom.largest_free_block_bytes, oom.largest_usable_block_bytes) == (10 * MIB, 10 * MIB)
    assert oom.device_free_bytes == 60 * MIB
    (pin,) = oom.pins
    assert (pin.segment_bytes, pin.free_bytes, pin.live_bytes, pin.live_blocks) == (20 * MIB, 18 * MIB, 2 * MIB, 1)
    (block,) = pin.oldest
    assert (block.alloc_id, block.bytes, block.category, block.step, block.seq) == (4, 2 * MIB, "activation", 4, 4)
    (segment,) = oom.segments
    assert (segment.bytes, segment.active_bytes, segment.free_bytes) == (20 * MIB, 2 * MIB, 18 * MIB)
    assert (segment.segment_type, segment.stream, segment.pool_id, segment.live_blocks) == ("large", 0, "0:0", 1)
    assert oom.saved_by == ("large_segment_size_mb:12", "expandable_segments:True")
    assert oom.sentence == (
        "Allocating 64.00 MiB, step 10 failed at seq 19: 2.00 MiB allocated, 20.00 MiB reserved, 60.00 MiB free on the"
        " device, 18.00 MiB free in the cache, largest usable piece 10.00 MiB. Memory is held by activation 2.00 MiB."
    )


def test_the_settings_that_are_said_to_save_do(tmp_path: Path) -> None:
    events = [event("alloc", n, (n % 5 + 1) * 3 * MIB) for n in range(12)]
    events += [event("free_requested", n, 1) for n in range(0, 12, 2)]
    events += [event("alloc", 12, 40 * MIB)]
    store = make_store(tmp_path, events)
    named = 0
    for size in range(100, 200, 4):
        verdict = simulate(gpu=f"{size}MiB", store=store.path, options=SimulateOptions(non_torch=0))
        for conf in (verdict.oom.saved_by or ()) if verdict.oom else ():
            options = SimulateOptions(non_torch=0, alloc_conf=conf)
            assert simulate(gpu=f"{size}MiB", store=store.path, options=options).fits, conf
            named += 1
    assert named


def test_memory_of_other_streams_and_pools_is_told_apart() -> None:
    """By hand: 20 MiB free on stream 7, 20 MiB free in a private pool that is alive, nothing for stream 0."""
    oom = explain(
        50 * MIB,
        ("alloc", 0, 4 * MIB), ("alloc", 1, 4 * MIB), ("alloc", 2, 4 * MIB), ("alloc", 3, 4 * MIB),
        ("free_requested", 1, None), ("free_requested", 3, None), ("alloc", 4, 18 * MIB),
        stream=[7, 7, 0, 0, 7, 0, 0], pool_id=["0:0", "0:0", "0:1", "0:1", "0:0", "0:1", "0:0"],
    )  # fmt: skip
    assert oom.other_stream_free_bytes == 16 * MIB
    assert oom.private_pool_free_bytes == 16 * MIB
    assert oom.free_in_cache_bytes == 32 * MIB
    assert oom.largest_free_block_bytes == 16 * MIB
    assert oom.largest_usable_block_bytes == 0


def test_where_it_failed_is_said_in_full() -> None:
    oom = explain(
        64 * MIB, ("alloc", 0, 60 * MIB), ("alloc", 1, 12 * MIB), op=["aten::empty", "aten::conv2d"],
        phase=["forward", "backward"], step=[0, 3], category=["parameter", None],
    )  # fmt: skip
    assert (oom.op, oom.phase, oom.step, oom.alloc_id) == ("aten::conv2d", "backward", 3, 1)
    assert oom.sentence.startswith("Allocating 12.00 MiB in aten::conv2d, step 3 (backward) failed at seq 1: ")
    assert oom.sentence.endswith("Memory is held by parameter 60.00 MiB.")
    assert (oom.requested_bytes, oom.rounded_bytes, oom.segment_bytes) == (12 * MIB, 12 * MIB, 12 * MIB)
    assert (oom.limit_bytes, oom.rejected_by_policy) == (None, False)


def test_a_limit_below_the_device_is_told() -> None:
    conf = "per_process_memory_fraction:0.5"
    oom = explain(64 * MIB, ("alloc", 0, 20 * MIB), ("alloc", 1, 20 * MIB), conf=conf)
    assert oom.limit_bytes == 32 * MIB
    assert oom.device_free_bytes == 44 * MIB


def test_a_failure_of_the_recording_is_marked() -> None:
    oom = explain(64 * MIB, ("alloc", 0, 60 * MIB), ("oom", None, 12 * MIB))
    assert oom.recorded
    assert oom.alloc_id is None


def test_an_address_that_lives_twice_belongs_to_the_live_one() -> None:
    """The pinning block lies where an older block was freed: its allocation is named, not the older one's."""
    rows = [("alloc", 0, 2 * MIB), ("free_requested", 0, None), ("alloc", 1, 2 * MIB), ("alloc", 2, 64 * MIB)]
    oom = explain(70 * MIB, *rows)
    assert [(block.alloc_id, block.seq) for block in oom.pins[0].oldest] == [(1, 2)]


def test_no_failure_no_explanation() -> None:
    requests = table(("alloc", 0, 1))
    encoded = encode(requests)
    result = try_on(encoded, Setup("native", "", None), 64 * MIB, in_full=True)
    assert explain_failure(encoded, requests, result) is None
