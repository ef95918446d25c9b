"""Serving columns gives what one call a request gives: figures, driver calls, layout and levels."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.paths import needs_shared
from tests.simulate.oracle_cases import CASES, read
from xmem.simulate.allocator import ALLOC, FREE, BulkAllocator, OutOfMemory, make_allocator
from xmem.simulate.device import Device
from xmem.simulate.native import Native, make

MIB = 1 << 20
EMPTY_CACHE, RECORD_STREAM = 5, 4


@dataclass
class Columns:
    """Requests as columns; `streams` is used where one is recorded on a stream."""

    codes: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    slot_count: int = 0

    def add(self, code: int, slot: int = 0, size: int = 0) -> None:
        self.codes.append(code)
        self.slots.append(slot)
        self.sizes.append(size)


def columns_of(case: dict[str, Any]) -> Columns:
    columns, live = Columns(), {}
    for op in case["ops"]:
        if op["op"] == "alloc":
            live[op["id"]] = columns.slot_count
            columns.add(ALLOC, columns.slot_count, op["size"])
            columns.slot_count += 1
        elif op["op"] == "free":
            columns.add(FREE, live.pop(op["id"]))
        elif op["op"] == "record_stream" and op["id"] in live:
            columns.add(RECORD_STREAM, live[op["id"]], op["stream"])
        elif op["op"] == "empty_cache":
            columns.add(EMPTY_CACHE)
    return columns


@dataclass
class Outcome:
    """All that can be seen of a run."""

    calls: list[list[Any]]
    stats: dict[str, int]
    layout: Any
    levels: list[tuple[int, ...]]
    addresses: dict[int, int]


def rare(allocator: Native, code: int, address: int, stream: int) -> None:
    if code == EMPTY_CACHE:
        allocator.empty_cache()
    elif address:
        allocator.record_stream(address, stream)


def call_by_call(allocator: Native, log: list[list[Any]], columns: Columns) -> Outcome:
    live: dict[int, int] = {}
    levels = []
    for code, slot, size in zip(columns.codes, columns.slots, columns.sizes, strict=True):
        if code == ALLOC:
            try:
                live[slot] = allocator.alloc(size)
            except OutOfMemory:
                live[slot] = 0
        elif code == FREE:
            allocator.free_requested(live.pop(slot, 0))
        else:
            rare(allocator, code, live.get(slot, 0), size)
        levels.append(allocator.levels())
    return Outcome(log, allocator.memory_stats(), allocator.segments(), levels, live)


def in_columns(allocator: Native, log: list[list[Any]], columns: Columns, length: int) -> Outcome:
    addresses = [0] * (columns.slot_count + 1)
    freed: set[int] = set()
    levels: list[tuple[int, ...]] = []
    total = len(columns.codes)
    for first in range(0, total, length):
        part = [column[first : first + length] for column in (columns.codes, columns.slots, columns.sizes)]
        done = 0
        while done < len(part[0]):
            start = done
            served = allocator.serve(*part, addresses, start=start, with_levels=True)
            done = served.done
            levels += [tuple(row) for rows in served.levels for row in rows.tolist()]
            assert len(levels) == first + done
            freed.update(
                slot for code, slot in zip(part[0][start:done], part[1][start:done], strict=True) if code == FREE
            )
            if done < len(part[0]):
                code, slot, size = (column[done] for column in part)
                if served.error is None:
                    rare(allocator, code, 0 if slot in freed else addresses[slot], size)
                levels.append(allocator.levels())
                done += 1
    live = {slot: addresses[slot] for slot in range(columns.slot_count) if slot not in freed}
    return Outcome(log, allocator.memory_stats(), allocator.segments(), levels, live)


def outcomes(
    columns: Columns,
    capacity: int,
    conf: str,
    version: str | None,
    *,
    length: int = 977,
    fraction: float | None = None,
    hold: bool = False,
) -> tuple[Outcome, Outcome]:
    found = []
    for serve in (call_by_call, in_columns):
        log: list[list[Any]] = []
        allocator = make(Device(capacity, log=log, hold_events=hold), conf, version)
        if fraction is not None:
            allocator.set_memory_fraction(fraction)
        more = () if serve is call_by_call else (length,)
        found.append(serve(allocator, log, columns, *more))  # type: ignore[operator]
    return found[0], found[1]


@needs_shared
@pytest.mark.parametrize("version", ["2.14", "2.12", "2.9"])
@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_columns_equal_calls(path: Path, version: str) -> None:
    case = read(path)
    given_settings = case["settings"]
    conf = given_settings.get("alloc_conf") or ""
    if version != "2.14" and ("large_segment" in conf or "throw_on" in conf or "per_process" in conf):
        conf = ""
    capacity = given_settings.get("device_bytes", 24 << 30)
    one, other = outcomes(columns_of(case), capacity, conf, version, fraction=given_settings.get("memory_fraction"))
    assert one.calls == other.calls
    assert one.levels == other.levels
    assert one.stats == other.stats
    assert one.layout == other.layout
    assert one.addresses == other.addresses


REQUESTS = st.lists(
    st.one_of(
        st.tuples(st.just(ALLOC), st.sampled_from([0, 1, 700, MIB, MIB + 1, 5 * MIB, 10 * MIB, 30 * MIB, 1 << 61])),
        st.tuples(st.just(ALLOC), st.integers(1, 40 * MIB)),
        st.tuples(st.just(FREE), st.integers(0, 1 << 16)),
        st.tuples(st.just(FREE), st.integers(0, 1 << 16)),
        st.tuples(st.just(RECORD_STREAM), st.integers(0, 1 << 16)),
        st.tuples(st.just(EMPTY_CACHE), st.just(0)),
    ),
    max_size=120,
)
CONFS = st.sampled_from(
    ["", "expandable_segments:True", "max_split_size_mb:24", "expandable_segments:True,max_split_size_mb:24",
     "roundup_power2_divisions:4", "garbage_collection_threshold:0.5,per_process_memory_fraction:0.9"]
)  # fmt: skip


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(REQUESTS, CONFS, st.booleans(), st.integers(1, 40))
def test_columns_equal_calls_on_anything(requests: list[tuple[int, int]], conf: str, hold: bool, length: int) -> None:
    columns, live = Columns(), []
    for code, number in requests:
        if code == ALLOC:
            live.append(columns.slot_count)
            columns.add(ALLOC, columns.slot_count, number)
            columns.slot_count += 1
        elif code == EMPTY_CACHE:
            columns.add(EMPTY_CACHE)
        elif live:
            slot = live[number % len(live)]
            columns.add(code, slot, 1 + number % 3 if code == RECORD_STREAM else 0)
            if code == FREE:
                live.remove(slot)
    one, other = outcomes(columns, 160 * MIB, conf, None, length=length, hold=hold)
    assert (one.calls, one.stats, one.layout) == (other.calls, other.stats, other.layout)
    assert one.levels == other.levels
    assert one.addresses == other.addresses


def test_native_is_a_bulk_allocator() -> None:
    assert isinstance(make(Device(64 * MIB)), BulkAllocator)
    assert not isinstance(make_allocator("ideal", Device(64 * MIB)), BulkAllocator)


def test_a_failing_request_stops_the_column_and_tells_why() -> None:
    allocator = make(Device(64 * MIB))
    served = allocator.serve([ALLOC, ALLOC, ALLOC], [0, 1, 2], [MIB, 100 * MIB, MIB], addresses := [0] * 3)
    assert served.done == 1
    assert served.error is not None and served.error.requested_bytes == 100 * MIB
    assert addresses[0] and not addresses[1]
    assert allocator.serve([ALLOC, ALLOC, ALLOC], [0, 1, 2], [MIB, 100 * MIB, MIB], addresses, start=2).done == 3
    assert allocator.stats().num_ooms == 1


def test_calls_point_at_the_requests_that_made_them() -> None:
    log: list[list[Any]] = []
    allocator = make(Device(64 * MIB, log=log))
    served = allocator.serve([ALLOC] * 4, [0, 1, 2, 3], [MIB, 100, 5 * MIB, 6 * MIB], [0] * 4)
    assert served.calls == [(0, 1), (2, 2)]
    assert [call[0] for call in log] == ["malloc", "malloc"]


def test_memory_does_not_grow_with_the_number_of_sizes() -> None:
    allocator = make(Device(1 << 30))
    numbers = np.arange(1, 200_001)
    codes = [ALLOC, FREE] * len(numbers)
    slots = np.repeat(np.arange(len(numbers)), 2).tolist()
    sizes = np.repeat(numbers, 2).tolist()
    kept = allocator.alloc(3 * MIB + 7)
    served = allocator.serve(codes, slots, sizes, [0] * len(numbers))
    assert served.done == len(codes)
    assert allocator.heap.statistics.charge_count < 1 << 17
    assert allocator.stats().requested_bytes == 3 * MIB + 7
    allocator.free_requested(kept)
    stats = allocator.memory_stats()
    assert stats["requested_bytes.all.allocated"] == int(numbers.sum()) + 3 * MIB + 7
    assert stats["allocation.all.allocated"] == len(numbers) + 1
    assert stats["requested_bytes.all.current"] == 0
