"""Requests through an allocator: columns in, the one loop over single requests, columns out."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from xmem.errors import UsageError
from xmem.simulate.allocator import DEFAULT_POOL, Allocator, Layout, OutOfMemory, PoolId, Stats

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

    Integers = npt.NDArray[np.int64]

# What a request is in the loop; plain integers, for speed.
ALLOC = 0  # on stream 0 and in the default pool
FREE = 1
ALLOC_ELSEWHERE = 2  # on another stream or in another pool
COMPLETED = 3
RECORD_STREAM = 4
EMPTY_CACHE = 5
OOM = 6
CREATE_POOL = 7
DELETE_POOL = 8
DELETE_GRAPH = 9
_CODES = {
    "alloc": ALLOC,
    "free_requested": FREE,
    "free_completed": COMPLETED,
    "record_stream": RECORD_STREAM,
    "empty_cache": EMPTY_CACHE,
    "oom": OOM,
    "create_pool": CREATE_POOL,
    "delete_pool": DELETE_POOL,
    "delete_graph": DELETE_GRAPH,
}
Levels = tuple[int, int, int, int]


@dataclass(frozen=True)
class Encoded:
    """A request stream as integers: `slots` number the allocations from 0, `pools` point into `pool_ids`.

    A request that concerns no allocation, or a free that has nothing to free, has the slot `slot_count`.
    """

    codes: Integers
    slots: Integers
    sizes: Integers
    streams: Integers
    pools: Integers
    pool_ids: tuple[PoolId, ...]
    slot_count: int
    dropped_frees: int

    def __len__(self) -> int:
        return len(self.codes)


@dataclass(frozen=True)
class Failure:
    """A request that the allocator could not serve, and its figures right then."""

    index: int
    error: OutOfMemory
    stats: Stats


@dataclass
class Replay:
    """What a replay did, up to the first `done` requests.

    `levels` after each request are allocated, active, reserved, requested bytes. `addresses` is where each slot was
    put. `calls` are the allocator's calls to the device as (index of the request, kind, address, bytes). `layout` is
    the state at the first failure, else at the end.
    """

    stats: Stats
    done: int
    failures: list[Failure]
    levels: Integers | None = None
    addresses: list[int] = field(default_factory=list)
    calls: list[tuple[int, str, int, int]] = field(default_factory=list)
    layout: Layout | None = None

    @property
    def fits(self) -> bool:
        """Say whether every request was served."""
        return not self.failures


def encode(table: pa.Table) -> Encoded:
    """Turn checked requests (see requests.check_requests) into integers; frees of unknown allocations do nothing."""
    import numpy as np
    import pyarrow.compute as pc

    words = table.column("action").combine_chunks().dictionary_encode()
    by_word = np.array([_CODES[word] for word in words.dictionary.to_pylist()], dtype=np.int64)
    codes = by_word[words.indices.to_numpy()] if len(table) else np.zeros(0, dtype=np.int64)
    ids = pc.fill_null(table.column("alloc_id"), -1).to_numpy()
    slots, slot_count = _slots(ids, codes == ALLOC)
    sizes = pc.fill_null(table.column("bytes"), 0).to_numpy()
    streams = pc.fill_null(table.column("stream"), 0).to_numpy()
    pools = pc.fill_null(table.column("pool_id"), "0:0").combine_chunks().dictionary_encode()
    pool_ids = tuple(_pool_id(text) for text in pools.dictionary.to_pylist())
    pool_numbers = pools.indices.to_numpy().astype(np.int64)
    elsewhere = (streams != 0) | ~np.isin(pool_numbers, [n for n, pool in enumerate(pool_ids) if pool == DEFAULT_POOL])
    for code in (FREE, COMPLETED):
        slots = _only_first(slots, codes == code, slot_count)
    dropped = int(np.count_nonzero(slots[np.isin(codes, (FREE, COMPLETED, RECORD_STREAM))] == slot_count))
    codes = np.where((codes == ALLOC) & elsewhere, ALLOC_ELSEWHERE, codes)
    return Encoded(codes, slots, sizes, streams, pool_numbers, pool_ids, slot_count, dropped)


def _only_first(slots: Integers, mask: npt.NDArray[np.bool_], nowhere: int) -> Integers:
    """Point all but the first request of a kind for an allocation nowhere: nothing is freed twice."""
    import numpy as np

    rows = np.flatnonzero(mask)
    again = np.ones(len(rows), dtype=bool)
    again[np.unique(slots[rows], return_index=True)[1]] = False
    changed = slots.copy()
    changed[rows[again]] = nowhere
    return changed


def _slots(ids: Integers, is_alloc: npt.NDArray[np.bool_]) -> tuple[Integers, int]:
    """Number allocations in order; ids that are never allocated share one number past the last."""
    import numpy as np

    allocated = ids[is_alloc]
    order = np.argsort(allocated, kind="stable")
    place = np.searchsorted(allocated[order], ids)
    place_or_last = np.minimum(place, max(len(allocated) - 1, 0))
    if not len(allocated):
        return np.zeros(len(ids), dtype=np.int64), 0
    known = allocated[order][place_or_last] == ids
    return np.where(known, order[place_or_last], len(allocated)).astype(np.int64), len(allocated)


def _pool_id(text: str) -> PoolId:
    first, _, second = text.partition(":")
    try:
        return int(first), int(second)
    except ValueError:
        raise UsageError(f"{text!r} is not a pool id.", "Write it as a:b; 0:0 is the default pool.") from None


def replay(
    encoded: Encoded,
    allocator: Allocator,
    *,
    device_log: list[list[Any]] | None = None,
    with_levels: bool = False,
    with_layout: bool = False,
) -> Replay:
    """Feed the requests to the allocator until one fails that did not fail in the recording.

    `with_levels` logs the four levels after each request; `device_log`, the list that the allocator's device logs
    into, gives the calls of each; `with_layout` keeps segments and blocks.
    """
    import numpy as np

    feed = _Feed(encoded, allocator, with_layout)
    levels = array("q")
    ends: list[int] = []
    watch = None
    if with_levels or device_log is not None:
        watch = _watcher(_levels_of(allocator) if with_levels else None, levels, device_log, ends)
    done = feed.run(watch)
    return Replay(
        stats=allocator.stats(),
        done=done,
        failures=feed.failures,
        levels=np.array(levels, dtype=np.int64).reshape(-1, 4) if with_levels else None,
        addresses=feed.addresses,
        calls=[] if device_log is None else _calls(device_log, ends),
        layout=feed.layout or (feed.read_layout() if with_layout else None),
    )


class _Feed:
    """The state of a replay: where each allocation was put (0: nowhere), and what failed."""

    def __init__(self, encoded: Encoded, allocator: Allocator, with_layout: bool) -> None:
        self.encoded = encoded
        self.allocator = allocator
        self.with_layout = with_layout
        self.addresses = [0] * (encoded.slot_count + 1)
        self.failures: list[Failure] = []
        self.layout: Layout | None = None

    def run(self, watch: Callable[[], None] | None) -> int:
        """Serve request after request; return how many were served."""
        encoded, addresses = self.encoded, self.addresses
        alloc, free = self.allocator.alloc, self.allocator.free_requested
        requests = zip(encoded.codes.tolist(), encoded.slots.tolist(), encoded.sizes.tolist(), strict=True)
        for index, (code, slot, size) in enumerate(requests):
            if code == FREE:
                free(addresses[slot])
            elif code == ALLOC:
                try:
                    addresses[slot] = alloc(size)
                except OutOfMemory as error:
                    self._fail(index, error)
                    return index
            elif not self._serve(index, code, slot, size):
                return index
            if watch is not None:
                watch()
        return len(encoded)

    def _serve(self, index: int, code: int, slot: int, size: int) -> bool:
        """Serve a request of a rarer kind; False where the replay ends with it."""
        allocator, addresses, encoded = self.allocator, self.addresses, self.encoded
        pool = encoded.pool_ids[int(encoded.pools[index])]
        stream = int(encoded.streams[index])
        if code in (ALLOC_ELSEWHERE, OOM):
            try:
                address = allocator.alloc(size, stream=stream, pool=pool)
            except OutOfMemory as error:
                self._fail(index, error)
                return code == OOM
            if code == OOM:
                allocator.free_requested(address)
            else:
                addresses[slot] = address
        elif code == COMPLETED:
            if addresses[slot]:
                allocator.free_completed(addresses[slot])
        elif code == RECORD_STREAM:
            if addresses[slot]:
                allocator.record_stream(addresses[slot], stream)
        elif code == EMPTY_CACHE:
            allocator.empty_cache()
        else:
            self._change_pool(code, pool)
        return True

    def _change_pool(self, code: int, pool: PoolId) -> None:
        """Make or drop a pool, where the allocator has pools and knows this one."""
        word = {CREATE_POOL: "create_pool", DELETE_POOL: "delete_pool", DELETE_GRAPH: "delete_graph"}[code]
        act = getattr(self.allocator, word, None)
        if act is None:
            return
        try:
            act() if code == CREATE_POOL else act(pool)
        except UsageError:
            return

    def _fail(self, index: int, error: OutOfMemory) -> None:
        if self.with_layout and not self.failures:
            self.layout = self.read_layout()
        self.failures.append(Failure(index, error, self.allocator.stats()))

    def read_layout(self) -> Layout | None:
        """Return the allocator's segments and blocks, None where it cannot show them."""
        read = getattr(self.allocator, "segments", None)
        return read() if read is not None else None


def _levels_of(allocator: Allocator) -> Callable[[], Levels]:
    own: Callable[[], Levels] | None = getattr(allocator, "levels", None)
    if own is not None:
        return own

    def from_stats() -> Levels:
        stats = allocator.stats()
        return stats.allocated_bytes, stats.active_bytes, stats.reserved_bytes, stats.requested_bytes

    return from_stats


def _watcher(
    read: Callable[[], Levels] | None, levels: array[int], log: list[list[Any]] | None, ends: list[int]
) -> Callable[[], None]:
    """Return what looks at the allocator after each request: levels, and how far the device's log has grown."""

    def watch() -> None:
        if read is not None:
            levels.extend(read())
        if log is not None:
            ends.append(len(log))

    return watch


_CALLS = {"malloc": "segment_alloc", "free": "segment_free", "map": "segment_map", "unmap": "segment_unmap"}


def _calls(log: list[list[Any]], ends: list[int]) -> list[tuple[int, str, int, int]]:
    """Give the device's log the allocator's words and the request of each; neighbouring pages of a request are one."""
    import numpy as np

    owners = np.searchsorted(np.array(ends, dtype=np.int64), np.arange(len(log)), side="right").tolist()
    calls: list[tuple[int, str, int, int]] = []
    for owner, entry in zip(owners, log, strict=True):
        kind = _CALLS.get(entry[0])
        if kind is None:
            continue
        address, size = int(entry[1]), int(entry[2])
        paged = kind in ("segment_map", "segment_unmap")
        if paged and calls and calls[-1][:2] == (owner, kind) and sum(calls[-1][2:]) == address:
            calls[-1] = (owner, kind, calls[-1][2], calls[-1][3] + size)
        else:
            calls.append((owner, kind, address, size))
    return calls
