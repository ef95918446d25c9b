"""One replay on one device with one setting, and the smallest device on which a replay succeeds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from xmem.simulate.allocator import make_allocator
from xmem.simulate.conf import parse_conf
from xmem.simulate.device import GRANULARITY, AddressPolicy, Device
from xmem.simulate.options import Reserve
from xmem.simulate.replay import Encoded, Replay, replay

#: A device on which nothing ever fails.
UNLIMITED_BYTES = 1 << 41


@dataclass(frozen=True)
class Setup:
    """The allocator of a replay: its name, PYTORCH_ALLOC_CONF text and torch version (None: the newest known).

    `address_policy` says how the driver's addresses go; it matters up to torch 2.11, which breaks ties by address.
    """

    allocator: str
    alloc_conf: str
    torch_version: str | None
    address_policy: AddressPolicy = "first"

    def resolved(self) -> Setup:
        """Return the setup with the allocator that its settings name (`backend:cudaMallocAsync`)."""
        if self.allocator == "native" and parse_conf(self.alloc_conf, self.torch_version).backend == "cudaMallocAsync":
            return replace(self, allocator="cuda_malloc_async")
        return self


def try_on(encoded: Encoded, setup: Setup, total_bytes: int, other_bytes: int = 0, *, in_full: bool = False) -> Replay:
    """Replay on a device of `total_bytes` of which `other_bytes` are taken; `in_full` logs levels, calls and layout."""
    log: list[list[Any]] | None = [] if in_full else None
    policy = setup.address_policy
    device = Device(total_bytes, other_bytes=min(other_bytes, total_bytes), address_policy=policy, log=log)
    return replay_on(encoded, setup, device, in_full)


def replay_on(encoded: Encoded, setup: Setup, device: Device, in_full: bool) -> Replay:
    """Replay on this device, which is fresh; `in_full` needs its log."""
    allocator = make_allocator(setup.allocator, device, setup.alloc_conf, setup.torch_version)
    return replay(encoded, allocator, device_log=device.log, with_levels=in_full, with_layout=in_full)


def depends_on_device(setup: Setup) -> bool:
    """Say whether a device with room to spare can still change what the allocator does (limits, address ranges)."""
    if setup.allocator != "native":
        return setup.allocator != "ideal"
    conf = parse_conf(setup.alloc_conf, setup.torch_version)
    return conf.expandable_segments or conf.per_process_memory_fraction < 1.0


def find_smallest_usable(encoded: Encoded, setup: Setup, unlimited: Replay, reserve: Reserve) -> int | None:
    """Return the smallest usable bytes, a multiple of 2 MiB, on which every request is served.

    Bisection over replays: the result is replayed and fits, and 2 MiB less is replayed (or is less than what is live)
    and does not. The cache is elastic, so this lies below peak reserved. A still smaller device that happens to fit,
    as fragmentation allows, is not looked for. None where no device of any size serves the requests.
    """

    def fits(pages: int) -> bool:
        usable = pages * GRANULARITY
        total = reserve.total_for(usable)
        return try_on(encoded, setup, total, total - usable).fits

    if not unlimited.fits:
        return None
    too_small = -(-unlimited.stats.peak_requested_bytes // GRANULARITY) - 1
    enough = max(-(-unlimited.stats.peak_reserved_bytes // GRANULARITY), too_small + 1)
    while not fits(enough):
        too_small, enough = enough, enough + enough // 8 + 1
        if enough * GRANULARITY > UNLIMITED_BYTES:
            return None
    while enough - too_small > 1:
        middle = (enough + too_small) // 2
        if fits(middle):
            enough = middle
        else:
            too_small = middle
    return enough * GRANULARITY
