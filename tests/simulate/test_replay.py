"""The replay loop, held against an allocator that writes down what it is asked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xmem.errors import UsageError
from xmem.simulate.allocator import DEFAULT_POOL, OutOfMemory, PoolId, Stats
from xmem.simulate.peaks import NEVER, block_sizes, cycle_peaks, held_at, lifetimes, step_peaks
from xmem.simulate.replay import encode, replay
from xmem.simulate.requests import check_requests
from xmem.simulate.trial import Setup, try_on
from xmem.simulate.verdict import HeldBy

MIB = 1 << 20


def table(*rows: tuple[Any, ...], **columns: list[Any]) -> pa.Table:
    """Requests from (action, alloc_id, bytes) rows; seq counts up."""
    actions, ids, sizes = zip(*rows, strict=True) if rows else ((), (), ())
    named = {
        "seq": pa.array(range(len(rows)), pa.int64()),
        "action": pa.array(actions, pa.string()),
        "alloc_id": pa.array(ids, pa.int64()),
        "bytes": pa.array(sizes, pa.int64()),
    }
    return check_requests(pa.table(named | {name: pa.array(values) for name, values in columns.items()}), "it")


class Scribe:
    """Hands out rising addresses up to a limit, and writes down every call."""

    def __init__(self, limit: int = 1000) -> None:
        self.limit, self.held, self.next = limit, 0, 1000
        self.sizes: dict[int, int] = {}
        self.calls: list[tuple[Any, ...]] = []
        self.ooms = 0

    def alloc(self, size: int, *, stream: int = 0, pool: PoolId = DEFAULT_POOL) -> int:
        self.calls.append(("alloc", size, stream, pool))
        if self.held + size > self.limit:
            self.ooms += 1
            raise OutOfMemory(size, device_free_bytes=self.limit - self.held)
        self.next += 10
        self.held += size
        self.sizes[self.next] = size
        return self.next

    def free_requested(self, address: int) -> None:
        self.calls.append(("free_requested", address))
        self.held -= self.sizes.pop(address, 0)

    def free_completed(self, address: int) -> None:
        self.calls.append(("free_completed", address))

    def record_stream(self, address: int, stream: int) -> None:
        self.calls.append(("record_stream", address, stream))

    def empty_cache(self) -> None:
        self.calls.append(("empty_cache",))

    def delete_pool(self, pool: PoolId) -> None:
        self.calls.append(("delete_pool", pool))
        raise UsageError("no such pool")

    def stats(self) -> Stats:
        return Stats(allocated_bytes=self.held, active_bytes=self.held, reserved_bytes=self.limit, num_ooms=self.ooms)


def test_every_action_becomes_its_call() -> None:
    requests = table(
        ("alloc", 7, 100), ("alloc", 3, 50), ("record_stream", 7, None), ("free_requested", 7, None),
        ("free_completed", 7, None), ("empty_cache", None, None), ("delete_pool", None, None),
        ("create_pool", None, None), ("free_requested", 3, None),
        stream=[0, 5, 9, 0, 0, None, None, None, 5],
        pool_id=["0:0", "0:2", "0:0", "0:0", "0:0", None, "0:2", None, "0:2"],
    )  # fmt: skip
    scribe = Scribe()
    result = replay(encode(requests), scribe, with_levels=True)
    assert scribe.calls == [
        ("alloc", 100, 0, (0, 0)),
        ("alloc", 50, 5, (0, 2)),
        ("record_stream", 1010, 9),
        ("free_requested", 1010),
        ("free_completed", 1010),
        ("empty_cache",),
        ("delete_pool", (0, 2)),
        ("free_requested", 1020),
    ]
    assert result.fits
    assert result.done == 9
    assert result.levels is not None
    assert result.levels[:, 0].tolist() == [100, 150, 150, 50, 50, 50, 50, 50, 0]


def test_the_replay_stops_at_the_first_request_that_fails() -> None:
    scribe = Scribe(limit=120)
    result = replay(encode(table(("alloc", 0, 100), ("alloc", 1, 50), ("alloc", 2, 1))), scribe, with_levels=True)
    assert not result.fits
    assert result.done == 1
    assert [failure.index for failure in result.failures] == [1]
    assert result.failures[0].error.requested_bytes == 50
    assert result.failures[0].stats.allocated_bytes == 100
    assert result.levels is not None
    assert len(result.levels) == 1


def test_a_recorded_failure_is_tried_and_passed_over() -> None:
    scribe = Scribe(limit=120)
    result = replay(encode(table(("oom", None, 50), ("alloc", 0, 100), ("oom", None, 50), ("alloc", 1, 1))), scribe)
    assert [call[0] for call in scribe.calls] == ["alloc", "free_requested", "alloc", "alloc", "alloc"]
    assert [failure.index for failure in result.failures] == [2]
    assert result.done == 4


def test_frees_of_nothing_do_nothing() -> None:
    requests = table(
        ("alloc", 0, 10), ("free_requested", 0, None), ("free_requested", 0, None), ("free_requested", 99, None)
    )
    encoded = encode(requests)
    assert encoded.dropped_frees == 2
    scribe = Scribe()
    replay(encoded, scribe)
    assert [call for call in scribe.calls if call[0] == "free_requested"] == [
        ("free_requested", 1010), ("free_requested", 0), ("free_requested", 0),
    ]  # fmt: skip


def test_no_requests_at_all() -> None:
    result = replay(encode(table()), Scribe(), with_levels=True)
    assert (result.fits, result.done) == (True, 0)
    assert result.levels is not None
    assert result.levels.shape == (0, 4)


def test_a_pool_that_is_no_pool_is_explained() -> None:
    with pytest.raises(UsageError) as caught:
        encode(table(("alloc", 0, 1), pool_id=["blue"]))
    assert caught.value.message == "'blue' is not a pool id."


def test_calls_of_the_device_belong_to_their_request() -> None:
    requests = table(
        ("alloc", 0, 30 * MIB), ("alloc", 1, 512), ("free_requested", 0, None), ("empty_cache", None, None)
    )
    result = try_on(encode(requests), Setup("native", "", None), 1 << 30, in_full=True)
    assert [(index, action, size) for index, action, _, size in result.calls] == [
        (0, "segment_alloc", 30 * MIB),
        (1, "segment_alloc", 2 * MIB),
        (3, "segment_free", 30 * MIB),
    ]
    expandable = try_on(encode(requests), Setup("native", "expandable_segments:True", None), 1 << 30, in_full=True)
    assert [(index, action, size) for index, action, _, size in expandable.calls] == [
        (0, "segment_map", 40 * MIB),
        (1, "segment_map", 2 * MIB),
        (3, "segment_unmap", 40 * MIB),
    ]


def test_lifetimes_and_block_sizes() -> None:
    encoded = encode(table(("alloc", 5, 1), ("alloc", 6, 600), ("free_requested", 5, None)))
    births, deaths = lifetimes(encoded)
    assert births.tolist() == [0, 1]
    assert deaths.tolist() == [2, NEVER]
    assert block_sizes(encoded, np.array([512, 1536, 1024])).tolist() == [512, 1024]
    assert block_sizes(encoded, np.array([512])).tolist() == [512, 0]


def test_who_holds_memory_is_grouped_largest_first() -> None:
    requests = table(
        ("alloc", 0, 1), ("alloc", 1, 2), ("alloc", 2, 4), ("free_requested", 1, None),
        category=["parameter", "activation", "parameter", None], op=["a", "b", "a", None],
    )  # fmt: skip
    encoded = encode(requests)
    sizes = np.array([1, 2, 4])
    assert held_at(encoded, requests, sizes, 2) == (HeldBy("parameter", "a", 5, 2), HeldBy("activation", "b", 2, 1))
    assert held_at(encoded, requests, sizes, 3) == (HeldBy("parameter", "a", 5, 2),)
    assert held_at(encoded, requests, sizes, -1) == ()


def test_a_long_list_of_holders_ends_in_one_row_for_the_rest() -> None:
    requests = table(*[("alloc", n, 1) for n in range(20)], op=[f"op{n:02}" for n in range(20)])
    held = held_at(encode(requests), requests, np.arange(20) + 1, 19)
    assert len(held) == 12
    assert held[-1] == HeldBy(None, "9 others", sum(range(1, 10)), 9)
    assert sum(row.bytes for row in held) == sum(range(1, 21))


def test_step_peaks() -> None:
    allocated = np.array([5, 9, 2, 4, 3])
    rows = [("alloc", n, 1) for n in range(5)]
    assert step_peaks(allocated, table(*rows, step=[None, 3, 3, 4, 5])) == (9, 4)
    assert step_peaks(allocated, table(*rows, step=[0, 0, 0, 0, None])) == (9, None)
    assert step_peaks(allocated, table(*rows)) == (None, None)


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=30), st.randoms(use_true_random=False))
def test_cycle_peaks_agree_with_a_plain_count(sizes: list[tuple[int, bool]], random: Any) -> None:
    """Random allocations, some freed later: cycles found in columns are those found one by one."""
    rows: list[tuple[str, int, int | None]] = []
    live: list[int] = []
    for number, (size, is_freed) in enumerate(sizes):
        rows.append(("alloc", number, size))
        if is_freed:
            live.append(number)
        while live and random.random() < 0.5:
            rows.append(("free_requested", live.pop(random.randrange(len(live))), None))
    rows += [("free_requested", number, None) for number in live]
    allocated, passing, end = [], 0, None
    level = 0
    freed = {number for action, number, _ in rows if action == "free_requested"}
    for index, (action, number, _) in enumerate(rows):
        sign = 1 if action == "alloc" else -1
        level += sign * sizes[number][0]
        passing += sign * sizes[number][0] * (number in freed)
        allocated.append(level)
        if end is None and action == "free_requested" and passing == 0:
            end = index
    first, steady = cycle_peaks(encode(table(*rows)), np.array(allocated, dtype=np.int64))
    if not rows:
        assert (first, steady) == (None, None)
    elif end is None:
        assert (first, steady) == (max(allocated), None)
    else:
        later = any(action == "free_requested" for action, _, _ in rows[end + 1 :])
        assert first == max(allocated[: end + 1])
        assert steady == (max(allocated[end + 1 :]) if later else None)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 30 * MIB), st.integers(0, 6), st.integers(0, 9)), min_size=1, max_size=60),
    st.sampled_from(["", "expandable_segments:True", "max_split_size_mb:20"]),
    st.sampled_from([40 * MIB, 200 * MIB, 1 << 40]),
)
def test_columns_and_single_requests_give_the_same(sizes: list[tuple[int, int, int]], conf: str, total: int) -> None:
    """Levels, calls, failures and figures do not depend on whether requests are served in columns."""
    rows: list[tuple[str, int | None, int | None]] = []
    streams: list[int] = []
    for number, (size, age, kind) in enumerate(sizes):
        rows.append(("alloc", number, size))
        streams.append(int(kind == 9))
        if age and number >= age:
            rows.append(("free_requested", number - age, None))
            streams.append(0)
        if kind in (7, 8):
            rows.append(("empty_cache", None, None) if kind == 7 else ("oom", None, size))
            streams.append(0)
    encoded = encode(table(*rows, stream=streams))
    one_by_one = try_on(encoded, Setup("native", conf, None), total, in_full=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("xmem.simulate.replay.KEEP_ADDRESSES", -1)
        patch.setattr("xmem.simulate.replay.WORTH_BULK", 1)
        in_columns = try_on(encoded, Setup("native", conf, None), total, in_full=True)
    assert one_by_one.levels is not None
    assert in_columns.levels is not None
    assert in_columns.levels.tolist() == one_by_one.levels.tolist()
    assert in_columns.calls == one_by_one.calls
    assert in_columns.stats == one_by_one.stats
    assert in_columns.done == one_by_one.done
    assert [f.index for f in in_columns.failures] == [f.index for f in one_by_one.failures]
    assert in_columns.layout == one_by_one.layout
    known = [pair for pair in zip(in_columns.addresses, one_by_one.addresses, strict=True) if pair[0]]
    assert all(one == other for one, other in known)
