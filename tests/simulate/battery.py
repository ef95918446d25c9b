"""What must hold for every allocator, built in or plugged in, on any sequence of requests."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from xmem.simulate.allocator import Allocator, OutOfMemory, Stats

MIB = 1 << 20
#: Sizes round the constants of real allocators, and any others.
SIZES = st.one_of(
    st.sampled_from([0, 1, 511, 512, 513, MIB - 1, MIB, MIB + 1, 2 * MIB, 10 * MIB - 1, 10 * MIB, 20 * MIB, 33 * MIB]),
    st.integers(1, 4 * MIB),
    st.integers(1, 80 * MIB),
)
REQUESTS = st.lists(
    st.one_of(
        st.tuples(st.just("alloc"), SIZES, st.integers(0, 2)),
        st.tuples(st.just("alloc"), SIZES, st.integers(0, 2)),
        st.tuples(st.just("free"), st.integers(0, 1 << 16), st.just(0)),
        st.tuples(st.just("record_stream"), st.integers(0, 1 << 16), st.integers(0, 3)),
        st.tuples(st.just("empty_cache"), st.just(0), st.just(0)),
    ),
    max_size=80,
)
Make = Callable[[int], Allocator]


@dataclass
class Run:
    """A run of requests: live blocks by address, and everything that could be seen."""

    allocator: Allocator
    live: dict[int, int] = field(default_factory=dict)
    seen: list[Any] = field(default_factory=list)

    def serve(self, action: str, number: int, stream: int) -> None:
        addresses = sorted(self.live)
        if action == "alloc":
            self.alloc(number, stream)
        elif action == "empty_cache":
            self.allocator.empty_cache()
        elif addresses and action == "free":
            address = addresses[number % len(addresses)]
            self.allocator.free_requested(address)
            self.allocator.free_completed(address)
            del self.live[address]
        elif addresses:
            self.allocator.record_stream(addresses[number % len(addresses)], stream)
        stats = self.allocator.stats()
        check_stats(stats, sum(self.live.values()))
        self.seen.append(stats)

    def alloc(self, size: int, stream: int) -> None:
        try:
            address = self.allocator.alloc(size, stream=stream)
        except OutOfMemory as error:
            assert error.requested_bytes >= size
            self.seen.append("out of memory")
            return
        if size == 0:
            assert address == 0
            return
        addresses = sorted(self.live)
        index = bisect_left(addresses, address)
        assert address not in self.live
        assert index == len(addresses) or address + size <= addresses[index], "overlaps the block above"
        assert index == 0 or addresses[index - 1] + self.live[addresses[index - 1]] <= address, "overlaps one below"
        self.live[address] = size
        self.seen.append(address)


def check_stats(stats: Stats, live: int) -> None:
    assert stats.reserved_bytes >= stats.active_bytes >= stats.allocated_bytes >= live
    assert stats.peak_reserved_bytes >= stats.reserved_bytes
    assert stats.peak_allocated_bytes >= stats.allocated_bytes
    assert stats.peak_active_bytes >= stats.active_bytes
    assert min(stats.inactive_split_bytes, stats.segments, stats.num_ooms, stats.num_alloc_retries) >= 0
    assert stats.requested_bytes >= live


def check(make: Make, examples: int = 60) -> None:
    """Run the battery; `make` makes an allocator over a fresh device of so many bytes."""

    @settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(REQUESTS, st.sampled_from([64 * MIB, 200 * MIB, 1 << 30]))
    def battery(requests: list[tuple[str, int, int]], capacity: int) -> None:
        first, second = Run(make(capacity)), Run(make(capacity))
        for request in requests:
            first.serve(*request)
            second.serve(*request)
        assert first.seen == second.seen, "the same input gave another output"
        assert first.allocator.stats().reserved_bytes <= capacity
        for address in list(first.live):
            first.allocator.free_requested(address)
            first.allocator.free_completed(address)
        first.allocator.empty_cache()
        stats = first.allocator.stats()
        assert (stats.allocated_bytes, stats.active_bytes, stats.reserved_bytes, stats.requested_bytes) == (0, 0, 0, 0)

    battery()
