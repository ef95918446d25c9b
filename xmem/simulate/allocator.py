"""What an allocator is: the protocols, its errors and statistics, and the registry of allocators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from xmem.errors import UsageError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

#: Id of a memory pool as PyTorch writes it: (0, 0) is the default pool, (k, 0) a captured graph's, (0, k) a MemPool's.
PoolId = tuple[int, int]
DEFAULT_POOL: PoolId = (0, 0)

#: A stream that no program has: a block recorded on it stays pending until `free_completed` or a synchronizing call.
UNKNOWN_STREAM = -1

# What a request of a column is to a BulkAllocator.
ALLOC = 0
FREE = 1

ENTRY_POINT_GROUP = "xmem.allocators"


class OutOfMemory(Exception):  # noqa: N818 - the name that the contract gives it
    """A request that the device, a limit or a policy refused; all fields are integers in bytes, or None.

    A Memory fills in the request and the device's figures; an allocator adds what it knows.
    """

    def __init__(
        self,
        requested_bytes: int,
        *,
        rounded_bytes: int | None = None,
        segment_bytes: int | None = None,
        device_free_bytes: int | None = None,
        limit_bytes: int | None = None,
        rejected_by_policy: bool = False,
    ) -> None:
        super().__init__(f"out of memory: {requested_bytes} bytes requested, {device_free_bytes} free on the device")
        self.requested_bytes = requested_bytes  # what the program asked for
        self.rounded_bytes = requested_bytes if rounded_bytes is None else rounded_bytes
        self.segment_bytes = self.rounded_bytes if segment_bytes is None else segment_bytes
        self.device_free_bytes = device_free_bytes  # free on the device when it failed
        self.limit_bytes = limit_bytes  # per-process limit on reserved bytes, None where there is none
        self.rejected_by_policy = rejected_by_policy  # throw_on_cudamalloc_oom


@dataclass(frozen=True, slots=True)
class Stats:
    """What an allocator holds now, and the peaks since the start or the last reset; integers in bytes."""

    allocated_bytes: int = 0
    active_bytes: int = 0
    reserved_bytes: int = 0
    requested_bytes: int = 0
    inactive_split_bytes: int = 0
    segments: int = 0
    active_blocks: int = 0
    peak_allocated_bytes: int = 0
    peak_active_bytes: int = 0
    peak_reserved_bytes: int = 0
    peak_requested_bytes: int = 0
    num_alloc_retries: int = 0
    num_ooms: int = 0
    num_oom_rejections: int = 0


@dataclass(frozen=True)
class Layout:
    """Segments and blocks as columns of equal length, in address order; names are those of the tables.

    segments: address, total_bytes, allocated_bytes, active_bytes, requested_bytes, stream, pool_id, segment_type,
    is_expandable. blocks: segment (row number in segments), address, block_bytes, requested_bytes (None where the
    block is inactive), state (active_allocated, active_pending_free, inactive).
    """

    segments: dict[str, list[Any]] = field(default_factory=dict)
    blocks: dict[str, list[Any]] = field(default_factory=dict)


class Memory(Protocol):
    """The lower level: a device that hands out memory, or a wrapper that limits, logs or counts."""

    def reserve(self, size: int) -> int:
        """Take `size` bytes and return their address; raise OutOfMemory where they are not there."""

    def release(self, address: int) -> None:
        """Give back what `reserve` returned."""


class Allocator(Protocol):
    """The upper level: what a framework puts over a Memory. Method names are the actions of the event table.

    **Completion of frees.** `free_requested` says that the program let go. Where no side stream holds the block
    (`record_stream`), the allocator completes the free itself, at once, as the real one does. Where one does, the
    block stays active until the allocator learns that the stream has passed: by `free_completed`, by a call that
    synchronizes (`empty_cache`, the retry before an out-of-memory error), or from the device's own events
    (Device.hold_events). So `free_completed` may be called for every free of a recording: for a block that is not
    pending it does nothing. A recording that shows only a late `free_completed` is replayed by
    `record_stream(address, UNKNOWN_STREAM)` before `free_requested`.
    """

    def alloc(self, size: int, *, stream: int = 0, pool: PoolId = DEFAULT_POOL) -> int:
        """Return the address of a block of `size` bytes or more, 0 for size 0; raise OutOfMemory."""

    def free_requested(self, address: int) -> None:
        """The program let go of the block at `address`; 0 is ignored."""

    def free_completed(self, address: int) -> None:
        """Every stream that used the block at `address` has passed; ignored for a block that is not pending."""

    def record_stream(self, address: int, stream: int) -> None:
        """The block at `address` is used on another stream too, so its free must wait for that stream."""

    def empty_cache(self) -> None:
        """Give back to the Memory all that holds no live block."""

    def stats(self) -> Stats:
        """What is held now, and the peaks."""


@runtime_checkable
class PoolAllocator(Protocol):
    """What an allocator with private pools, captures and run-time settings has beside Allocator (`native`)."""

    def create_pool(self, *, use_on_oom: bool = False, no_split: bool = False) -> PoolId:
        """Make a MemPool, as `torch.cuda.MemPool()` does, and return its id."""

    def delete_pool(self, pool: PoolId) -> None:
        """Drop a MemPool: its use count falls and its free memory goes back."""

    def begin_capture(self, stream: int, share: PoolId | None = None) -> PoolId:
        """Begin a graph capture on `stream` into a new private pool, or into the pool `share`."""

    def end_capture(self, pool: PoolId) -> None:
        """End the capture into `pool`; the graph keeps the pool."""

    def delete_graph(self, pool: PoolId) -> None:
        """Drop a captured graph: its pool's use count falls; memory goes back at the next release."""

    def set_memory_fraction(self, fraction: float) -> None:
        """Limit reserved bytes to `fraction` of the device, as `set_per_process_memory_fraction` does."""

    def set_conf(self, text: str) -> None:
        """Apply PYTORCH_ALLOC_CONF text at run time, with torch's reset rules; raise UsageError."""

    def reset_peak_stats(self) -> None:
        """Set every peak to its current value."""

    def reset_accumulated_stats(self) -> None:
        """Set the sums of increases and decreases, and the event counts, to 0."""

    def memory_stats(self) -> dict[str, int]:
        """The flat dictionary of `torch.cuda.memory_stats()`."""

    def segments(self) -> Layout:
        """All segments and blocks, as a snapshot shows them."""


@dataclass(frozen=True)
class Served:
    """What became of a column of requests.

    Those before index `done` were served; `error` is why the one there failed, None where it was of another kind or
    there is none. `levels` are arrays of four columns, one row a request served, to be concatenated: allocated, active,
    reserved, requested bytes after it. `calls` gives (request, length of the device's log after it) for each request
    that may have called the device.
    """

    done: int
    error: OutOfMemory | None
    levels: list[Any]
    calls: list[tuple[int, int]]


@runtime_checkable
class BulkAllocator(Protocol):
    """An allocator that serves whole columns of requests, several times as fast as one call a request (`native`)."""

    def serve(
        self,
        codes: list[int],
        slots: list[int],
        sizes: list[int],
        addresses: list[int],
        *,
        start: int = 0,
        with_levels: bool = False,
    ) -> Served:
        """Serve ALLOC (stream 0, default pool) and FREE requests from `start` until one is of another kind, or fails.

        `slots` point into `addresses`, where each allocation's address is entered before this returns; that of a freed
        one is undefined. A free of a slot whose address is 0 does nothing. Any other method may be called afterwards.
        """


#: Makes an allocator over a memory: (memory, PYTORCH_ALLOC_CONF text, torch version or None for the newest known).
Factory = Callable[[Memory, str, str | None], Allocator]

#: Built-in allocators, name to "module:factory"; plug-ins name a factory of the same kind in their entry point.
ALLOCATORS: dict[str, str] = {
    "native": "xmem.simulate.native:make",
    "expandable": "xmem.simulate.expandable:make",
    "cuda_malloc_async": "xmem.simulate.cuda_malloc_async:make",
    "arena": "xmem.simulate.arena:make",
    "ideal": "xmem.simulate.ideal:make",
}


def allocator_names() -> list[str]:
    """Names of the built-in allocators and of installed plug-ins, built-ins first."""
    return [*ALLOCATORS, *sorted(point.name for point in _plug_ins() if point.name not in ALLOCATORS)]


def make_allocator(name: str, memory: Memory, conf_text: str = "", torch_version: str | None = None) -> Allocator:
    """Make the allocator `name` over `memory`.

    Raises UsageError where the name is unknown, the plug-in behind it cannot be loaded, or the settings are wrong.
    """
    return _factory(name)(memory, conf_text, torch_version)


def _plug_ins() -> Sequence[EntryPoint]:
    from importlib.metadata import entry_points  # slow to import, needed only for plug-ins

    return tuple(entry_points(group=ENTRY_POINT_GROUP))


def _factory(name: str) -> Factory:
    places = [ALLOCATORS[name]] if name in ALLOCATORS else [p.value for p in _plug_ins() if p.name == name]
    if not places:
        raise UsageError(f"There is no allocator {name!r}.", f"Choose one of: {', '.join(allocator_names())}.")
    module, _, attribute = places[0].partition(":")
    try:
        factory: Factory = getattr(import_module(module), attribute or "make")
    except Exception as error:
        raise UsageError(
            f"The allocator plug-in {name!r} ({places[0]}) cannot be loaded: {type(error).__name__}: {error}",
            "Repair or uninstall the package that brings it.",
        ) from error
    if not callable(factory):
        raise UsageError(
            f"The allocator plug-in {name!r} ({places[0]}) is not a factory.",
            "It must be callable as factory(memory, conf_text, torch_version).",
        )
    return factory
