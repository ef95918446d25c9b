"""Requests through an allocator: columns in, the one loop over single requests, columns out."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from xmem.errors import UsageError
from xmem.simulate.allocator import (
    ALLOC,
    DEFAULT_POOL,
    FREE,
    Allocator,
    BulkAllocator,
    Layout,
    OutOfMemory,
    PoolId,
    Served,
    Stats,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

    Integers = npt.NDArray[np.int64]

# What a request is in the loop besides ALLOC (on stream 0, in the default pool) and FREE; plain integers, for speed.
ALLOC_ELSEWHERE = 2  # on another stream or in another pool
COMPLETED = 3
RECORD_STREAM = 4
EMPTY_CACHE = 5
OOM = 6
CREATE_POOL = 7
DELETE_POOL = 8
DELETE_GRAPH = 9

#: Up to this many requests a replay in full goes one by one, which gives the address of every allocation.
KEEP_ADDRESSES = 50_000
#: Shorter stretches of plain requests are served one by one: a column has its own cost.
WORTH_BULK = 64
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
    feed = _Feed(encoded, allocator, _Log(allocator, device_log, with_levels), with_layout)
    done = feed.run()
    return Replay(
        stats=allocator.stats(),
        done=done,
        failures=feed.failures,
        levels=feed.log.levels() if with_levels else None,
        addresses=feed.addresses,
        calls=[] if device_log is None else _calls(device_log, feed.log.marks, done),
        layout=feed.layout or (feed.read_layout() if with_layout else None),
    )


class _Log:
    """What is written down after each request: the levels, and how far the device's own log has grown (`marks`)."""

    def __init__(self, allocator: Allocator, device_log: list[list[Any]] | None, with_levels: bool) -> None:
        self.with_levels = with_levels
        self.marks: list[tuple[int, int]] = []
        self._read = _levels_of(allocator)
        self._device_log: list[list[Any]] = [] if device_log is None else device_log
        self._length = 0
        self._row: array[int] = array("q")
        self._parts: list[Integers] = []

    def add(self, index: int) -> None:
        """Write down request `index`, which was just served."""
        if self.with_levels:
            self._row.extend(self._read())
        if len(self._device_log) != self._length:
            self._length = len(self._device_log)
            self.marks.append((index, self._length))

    def add_column(self, start: int, served: Served) -> None:
        """Write down a column of requests that began with request `start`."""
        self.marks += [(start + request, length) for request, length in served.calls]
        self._length = len(self._device_log)
        if served.levels:
            self._flush()
            self._parts += served.levels

    def levels(self) -> Integers:
        """Return all levels, a row a request."""
        import numpy as np

        self._flush()
        return np.concatenate(self._parts) if self._parts else np.zeros((0, 4), dtype=np.int64)

    def _flush(self) -> None:
        import numpy as np

        if self._row:
            self._parts.append(np.array(self._row, dtype=np.int64).reshape(-1, 4))
            self._row = array("q")


class _Feed:
    """The state of a replay: where each allocation was put (0: nowhere), and what failed."""

    def __init__(self, encoded: Encoded, allocator: Allocator, log: _Log, with_layout: bool) -> None:
        self.encoded = encoded
        self.allocator = allocator
        self.log = log
        self.with_layout = with_layout
        self.addresses = [0] * (encoded.slot_count + 1)
        self.failures: list[Failure] = []
        self.layout: Layout | None = None
        self._codes = encoded.codes.tolist()
        self._slots = encoded.slots.tolist()
        self._sizes = encoded.sizes.tolist()
        self._serve_bulk: Callable[..., Served] | None = None
        if isinstance(allocator, BulkAllocator) and not (log.with_levels and len(encoded) <= KEEP_ADDRESSES):
            self._serve_bulk = allocator.serve

    def run(self) -> int:
        """Serve request after request; return how many were served."""
        import numpy as np

        begin = 0
        for rare in [*np.flatnonzero(self.encoded.codes > FREE).tolist(), len(self.encoded)]:
            reached = self._serve_column(begin, rare)
            if reached < rare or rare == len(self.encoded):
                return reached
            if not self._serve(rare, self._codes[rare], self._slots[rare], self._sizes[rare]):
                return rare
            self.log.add(rare)
            begin = rare + 1
        raise AssertionError("the last stretch ends the loop")

    def _serve_column(self, start: int, stop: int) -> int:
        """Serve plain allocations and frees, all at once where the allocator can and it pays; return where it ended."""
        if self._serve_bulk is None or stop - start < WORTH_BULK:
            return self._serve_each(start, stop)
        column = (values[start:stop] for values in (self._codes, self._slots, self._sizes))
        served = self._serve_bulk(*column, self.addresses, with_levels=self.log.with_levels)
        self.log.add_column(start, served)
        if served.error is not None:
            self._fail(start + served.done, served.error)
        return start + served.done

    def _serve_each(self, start: int, stop: int) -> int:
        """Serve plain allocations and frees one by one; return where it ended."""
        addresses, alloc, free = self.addresses, self.allocator.alloc, self.allocator.free_requested
        add = self.log.add
        for index in range(start, stop):
            slot = self._slots[index]
            if self._codes[index] == FREE:
                free(addresses[slot])
            else:
                try:
                    addresses[slot] = alloc(self._sizes[index])
                except OutOfMemory as error:
                    self._fail(index, error)
                    return index
            add(index)
        return stop

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


_CALLS = {"malloc": "segment_alloc", "free": "segment_free", "map": "segment_map", "unmap": "segment_unmap"}


def _calls(log: list[list[Any]], marks: list[tuple[int, int]], done: int) -> list[tuple[int, str, int, int]]:
    """Give the device's log the allocator's words and the request of each; neighbouring pages of a request are one.

    `marks` are (request, length of the log after it); what comes after the last belongs to the request that failed.
    """
    import numpy as np

    table = np.array([*marks, (done, len(log) + 1)], dtype=np.int64)
    owners = table[np.searchsorted(table[:, 1], np.arange(len(log)), side="right"), 0].tolist()
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
