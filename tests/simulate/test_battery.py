"""The battery over the built-in allocators under many settings."""

from __future__ import annotations

import pytest

from tests.simulate.battery import check
from xmem.simulate.allocator import ALLOCATORS, Allocator, make_allocator
from xmem.simulate.device import Device

SETTINGS = [
    *((name, "", None) for name in ALLOCATORS),
    *(("native", "", version) for version in ("2.0", "2.3", "2.11", "2.12")),
    ("native", "max_split_size_mb:32", None),
    ("native", "garbage_collection_threshold:0.4,per_process_memory_fraction:0.9", None),
    ("native", "roundup_power2_divisions:8,large_segment_size_mb:12", None),
    ("native", "throw_on_cudamalloc_oom:True", None),
    ("expandable", "max_split_size_mb:32,per_process_memory_fraction:0.7", None),
    ("expandable", "", "2.12"),
    ("arena", "allow_growth:False", None),
    ("arena", "memory_fraction:0.5,garbage_collection:False", None),
    ("cuda_malloc_async", "per_process_memory_fraction:0.5", None),
]


@pytest.mark.parametrize(("name", "conf", "version"), SETTINGS, ids=["-".join(map(str, s)) for s in SETTINGS])
@pytest.mark.parametrize("held", [False, True], ids=["events_pass", "events_held"])
def test_battery(name: str, conf: str, version: str | None, held: bool) -> None:
    if held and name not in ("native", "expandable"):
        pytest.skip("only torch's native allocator waits for events")

    def make(capacity: int) -> Allocator:
        return make_allocator(name, Device(capacity, hold_events=held), conf, version)

    check(make, examples=25)
