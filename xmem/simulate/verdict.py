"""What a simulation says: frozen dataclasses whose fields are the keys of the JSON answer."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xmem.simulate.rules import RuleEffect


@dataclass(frozen=True)
class HeldBy:
    """Live memory of one kind at one moment, blocks as the allocator rounds them."""

    category: str | None
    op: str | None
    bytes: int
    count: int


@dataclass(frozen=True)
class SegmentUse:
    """One segment: how much of it is live, how much is free, and in what pieces."""

    address: int
    bytes: int
    segment_type: str
    stream: int
    pool_id: str
    is_expandable: bool
    active_bytes: int
    free_bytes: int
    largest_free_bytes: int
    live_blocks: int


@dataclass(frozen=True)
class PinningBlock:
    """A live block that keeps its segment from being given back or used whole."""

    alloc_id: int | None
    bytes: int
    category: str | None
    op: str | None
    step: int | None
    seq: int | None


@dataclass(frozen=True)
class Pin:
    """A segment that is at least half free and cannot be released, with its oldest live blocks."""

    segment_address: int
    segment_bytes: int
    free_bytes: int
    live_bytes: int
    live_blocks: int
    oldest: tuple[PinningBlock, ...]


@dataclass(frozen=True)
class Oom:
    """The first request that failed, the state at that moment, and what would have saved it.

    `free_in_cache_bytes` is reserved less active; `largest_free_block_bytes` the largest piece of it, and
    `largest_usable_block_bytes` the largest that the request's stream and pool may use. `pending_bytes` wait for other
    streams, `private_pool_free_bytes` belong to graphs and MemPools. `recorded` says that it failed in the recording.
    """

    seq: int
    alloc_id: int | None
    requested_bytes: int
    rounded_bytes: int
    segment_bytes: int
    stream: int
    pool_id: str
    op: str | None
    step: int | None
    phase: str | None
    category: str | None
    recorded: bool
    device_free_bytes: int | None
    limit_bytes: int | None
    rejected_by_policy: bool
    allocated_bytes: int
    active_bytes: int
    reserved_bytes: int
    free_in_cache_bytes: int
    largest_free_block_bytes: int | None
    largest_usable_block_bytes: int | None
    pending_bytes: int
    private_pool_free_bytes: int
    other_stream_free_bytes: int
    held_by: tuple[HeldBy, ...]
    segments: tuple[SegmentUse, ...]
    pins: tuple[Pin, ...]
    saved_by: tuple[str, ...] | None
    sentence: str


@dataclass(frozen=True)
class IssueLine:
    """An issue that was met when the run was read."""

    code: str
    severity: str
    count: int
    detail: str | None


@dataclass(frozen=True)
class Verdict:
    """Does the recording fit, what does it need, and what is the smallest device on which it runs.

    The peaks are those of the replay on the device where it fits, else of a replay without a limit (`peaks_on` says
    which). First-step and steady peaks are of allocated bytes, null where steps are unknown. `smallest_device_bytes`
    is a total, non-torch memory and headroom included; null where it was not searched. `rules` say what was done to the
    requests of a CPU recording to make them those of a GPU.
    """

    fits: bool
    total_bytes: int
    non_torch_bytes: int
    usable_bytes: int
    headroom_bytes: int
    peak_requested_bytes: int
    peak_allocated_bytes: int
    peak_active_bytes: int
    peak_reserved_bytes: int
    first_step_peak_bytes: int | None
    steady_peak_bytes: int | None
    smallest_device_bytes: int | None
    num_ooms: int
    num_alloc_retries: int
    oom: Oom | None
    allocator: str
    alloc_conf: str
    torch_version: str
    torch_version_assumed: bool
    issues: tuple[IssueLine, ...]
    run_id: str | None
    run_name: str
    rank: int
    device: str
    gpu: str
    gpu_note: str
    peaks_on: str
    smallest_usable_bytes: int | None
    end_allocated_bytes: int
    end_reserved_bytes: int
    unused_at_peak_bytes: int
    fragmentation: float | None
    recorded_peak_allocated_bytes: int | None
    recorded_peak_reserved_bytes: int | None
    requests: int
    at_peak: tuple[HeldBy, ...]
    notes: tuple[str, ...]
    simulation_id: str
    rules: tuple[RuleEffect, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as plain data, ready for JSON; keys are only ever added."""
        return asdict(self)
