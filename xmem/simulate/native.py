"""PyTorch's native CUDA caching allocator, decision for decision."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from xmem.errors import UsageError
from xmem.simulate import layout, mapping, release
from xmem.simulate.allocator import DEFAULT_POOL, Layout, Memory, OutOfMemory, PoolId, Served, Stats
from xmem.simulate.blocks import Block, BlockPool, PrivatePool
from xmem.simulate.bulk import Bulk
from xmem.simulate.conf import AllocConf, apply_conf, parse_conf
from xmem.simulate.device import Device, as_device
from xmem.simulate.hash_order import HashOrder, pool_hash
from xmem.simulate.heap import Heap
from xmem.simulate.pending import PendingFrees
from xmem.simulate.rounding import IMPOSSIBLE_SIZE, SMALL_SIZE, round_size, segment_size
from xmem.simulate.statistics import FREE_ASKED, change
from xmem.simulate.torch_version import Version, parse_version

#: How many sizes are remembered with what they round to.
MOST_SIZES = 1 << 16


def make(memory: Memory, conf_text: str = "", torch_version: str | None = None) -> Native:
    """Make the native allocator over a memory, with PYTORCH_ALLOC_CONF text, as the given torch behaves."""
    return Native(as_device(memory), parse_conf(conf_text, torch_version), parse_version(torch_version))


@dataclass(eq=False)
class Graph:
    """A captured graph: its pool, and the MemPools that served it."""

    pool: PoolId
    mem_pools: dict[PoolId, None] = field(default_factory=dict)


class Native:
    """The allocator: Allocator and PoolAllocator of the contract."""

    def __init__(self, device: Device, conf: AllocConf, version: Version) -> None:
        self.device = device
        self.heap = Heap(device, conf, version)
        self.pending = PendingFrees(self.heap)
        self._rounded: dict[int, int] = {}
        self._captures: dict[PoolId, int] = {}
        self._graphs: list[Graph] = []
        self._bulk: Bulk | None = None  # valid under one set of settings
        self._pools_on_oom: HashOrder[PoolId] = HashOrder()
        self._pool_count = 0
        self._graph_count = 0
        self._first_conf = conf
        if conf.per_process_memory_fraction < 1.0:
            self.set_memory_fraction(conf.per_process_memory_fraction)

    # -- requests

    def alloc(self, size: int, *, stream: int = 0, pool: PoolId = DEFAULT_POOL) -> int:
        """Return the address of a block of `size` bytes or more, 0 for size 0; raise OutOfMemory."""
        if self._captures and pool != DEFAULT_POOL:
            self._keep_for_graph(pool)
        if size == 0:
            return 0
        if size >= IMPOSSIBLE_SIZE:
            raise OutOfMemory(size, device_free_bytes=self.device.free_bytes)
        heap = self.heap
        if self.pending.blocks and not self._captures and (pool == DEFAULT_POOL or heap.version >= (2, 13)):
            self.pending.poll()
        if len(heap.statistics.codes) >= heap.statistics.full:
            heap.settle()
        rounded = self.round(size)
        block_pool = heap.block_pool(self._route(pool, stream), rounded <= SMALL_SIZE)
        found = heap.find(block_pool, stream, rounded)
        block = heap.cut(found, rounded, size) if found else self._make_room(block_pool, stream, rounded, size)
        address = block.address
        heap.active[address] = block
        return address

    def free_requested(self, address: int) -> None:
        """The program let go of the block at `address`; 0 is ignored."""
        if address == 0:
            return
        heap = self.heap
        block = heap.active.pop(address, None)
        if block is None:
            raise UsageError(f"There is no allocated block at address {address}.")
        if block.size >= heap.max_split:
            change(heap.statistics.oversize_allocations, -1)
        if not block.stream_uses:
            heap.free(block)
            return
        heap.log(FREE_ASKED, block.charge)
        if self._captures:
            self.pending.defer(block)
        else:
            self.pending.hold(block)

    def free_completed(self, address: int) -> None:
        """Every stream that used the block at `address` has passed; ignored for a block that is not pending."""
        self.pending.complete(address)

    def record_stream(self, address: int, stream: int) -> None:
        """The block at `address` is used on another stream too, so its free must wait for that stream."""
        if address == 0:
            return
        block = self.heap.active.get(address)
        if block is None:
            raise UsageError(f"There is no allocated block at address {address}.")
        if stream == block.free_list.stream:
            return
        if block.stream_uses is None:
            block.stream_uses = {}
        block.stream_uses[stream] = None
        block.special = True
        if self._captures:
            self.pending.captured_uses.setdefault(block, set()).add(stream)

    def empty_cache(self) -> None:
        """Give back to the device all that holds no live block."""
        release.release_cached(self.heap, self.pending, capturing=bool(self._captures))

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
        """Serve a column of requests; see BulkAllocator."""
        if self._bulk is None or self._bulk.addresses is not addresses:
            self._bulk = Bulk(self, addresses)
        return self._bulk.serve((codes, slots, sizes), start, with_levels)

    # -- pools and captures

    def create_pool(self, *, use_on_oom: bool = False, no_split: bool = False) -> PoolId:
        """Make a MemPool, as `torch.cuda.MemPool()` does, and return its id."""
        self._pool_count += 1
        private = self._use_pool((0, self._pool_count))
        private.no_split = no_split
        if use_on_oom:
            self._pools_on_oom.add(private.id, pool_hash(private.id))
        return private.id

    def delete_pool(self, pool: PoolId) -> None:
        """Drop a MemPool: its use count falls and, unless a capture is on, its free memory goes back."""
        self._leave_pool(pool)
        if pool in self._pools_on_oom:
            self._pools_on_oom.remove(pool)
        if not self._captures:
            release.release_cached(self.heap, self.pending, pool)

    def begin_capture(self, stream: int, share: PoolId | None = None) -> PoolId:
        """Begin a graph capture on `stream` into a new private pool, or into the pool `share`."""
        if share is None:
            self._graph_count += 1
            share = (self._graph_count, 0)
        self._use_pool(share)
        self._captures[share] = stream
        self._graphs.append(Graph(share))
        return share

    def end_capture(self, pool: PoolId) -> None:
        """End the capture into `pool`; the graph keeps the pool."""
        if self._captures.pop(pool, None) is None:
            raise UsageError(f"No capture into pool {pool} is on.")

    def delete_graph(self, pool: PoolId) -> None:
        """Drop the oldest graph of a pool: use counts fall; memory goes back at the next release."""
        graph = next((graph for graph in self._graphs if graph.pool == pool), None)
        if graph is None:
            raise UsageError(f"There is no graph in pool {pool}.")
        self._graphs.remove(graph)
        for kept in (pool, *graph.mem_pools):
            self._leave_pool(kept)

    # -- settings

    def set_memory_fraction(self, fraction: float) -> None:
        """Limit reserved bytes to `fraction` of the device, as `set_per_process_memory_fraction` does."""
        if not 0.0 <= fraction <= 1.0:
            raise UsageError(f"A memory fraction lies between 0 and 1; {fraction} does not.")
        self._bulk = None
        self.heap.set_limit(int(fraction * self.device.total_bytes) if fraction < 1.0 else None)

    def set_conf(self, text: str) -> None:
        """Apply PYTORCH_ALLOC_CONF text at run time, with torch's reset rules; raise UsageError."""
        conf, error = apply_conf(text, self.heap.version, self.heap.conf)
        if error is None and conf.backend != self.heap.conf.backend:
            conf = replace(conf, backend=self.heap.conf.backend)
            error = UsageError("The backend is fixed when torch is loaded; it cannot change at run time.")
        self._rounded.clear()
        self._bulk = None
        self.heap.apply(conf)
        if error is not None:
            raise error

    # -- figures

    def stats(self) -> Stats:
        """What is held now, and the peaks."""
        statistics = self.heap.statistics
        statistics.settle()
        current = {name: rows[0] for name, rows in statistics.figures.items()}
        counts = statistics.counts
        return Stats(
            allocated_bytes=current["allocated_bytes"][0],
            active_bytes=current["active_bytes"][0],
            reserved_bytes=current["reserved_bytes"][0],
            requested_bytes=current["requested_bytes"][0],
            inactive_split_bytes=current["inactive_split_bytes"][0],
            segments=current["segment"][0],
            active_blocks=current["active"][0],
            peak_allocated_bytes=current["allocated_bytes"][1],
            peak_active_bytes=current["active_bytes"][1],
            peak_reserved_bytes=current["reserved_bytes"][1],
            peak_requested_bytes=current["requested_bytes"][1],
            num_alloc_retries=counts["num_alloc_retries"],
            num_ooms=counts["num_ooms"],
            num_oom_rejections=counts["num_oom_rejections"],
        )

    def memory_stats(self) -> dict[str, int]:
        """The flat dictionary of `torch.cuda.memory_stats()`; max_split_size stays what it was at the start."""
        size = self._first_conf.max_split_size
        return self.heap.statistics.flat() | {"max_split_size": -1 if size is None else size}

    def reset_peak_stats(self) -> None:
        """Set every peak to its current value."""
        self.heap.statistics.reset_peaks()

    def reset_accumulated_stats(self) -> None:
        """Set the sums of increases and decreases, and the event counts, to 0."""
        self.heap.statistics.reset_accumulated()

    def segments(self) -> Layout:
        """All segments and blocks, as a snapshot shows them."""
        return layout.read_layout(self.heap)

    def levels(self) -> tuple[int, int, int, int]:
        """Allocated, active, reserved and requested bytes now."""
        statistics = self.heap.statistics
        statistics.settle()
        figures = statistics.figures
        return (
            figures["allocated_bytes"][0][0],
            figures["active_bytes"][0][0],
            self.heap.reserved_bytes,
            figures["requested_bytes"][0][0],
        )

    # -- inside a request

    @property
    def is_plain(self) -> bool:
        """Say whether no free waits and no capture is on."""
        return not self.pending.blocks and not self._captures

    def round(self, size: int) -> int:
        """Return the block size for a request under the settings in force."""
        rounded = self._rounded.get(size)
        if rounded is None:
            rounded = round_size(size, self.heap.conf.roundup_power2_divisions, self.heap.version)
            if len(self._rounded) >= MOST_SIZES:
                self._rounded.clear()
            self._rounded[size] = rounded
        return rounded

    def _route(self, pool: PoolId, stream: int) -> PoolId:
        """Return the pool that serves a request: the one asked for, else that of a capture on the stream."""
        if pool != DEFAULT_POOL:
            if pool not in self.heap.private_pools:
                self._use_pool(pool)
            return pool
        for captured in reversed(self._captures):
            if self._captures[captured] == stream:
                return captured
        return DEFAULT_POOL

    def _keep_for_graph(self, pool: PoolId) -> None:
        """A MemPool that serves a request during a capture is kept as long as the graph."""
        graph = self._graphs[-1]
        if pool not in graph.mem_pools:
            graph.mem_pools[pool] = None
            self._use_pool(pool)

    def _use_pool(self, pool: PoolId) -> PrivatePool:
        private = self.heap.private_pools.get(pool)
        if private is None:
            private = self.heap.private_pools[pool] = PrivatePool(pool)
        private.use_count += 1
        return private

    def _leave_pool(self, pool: PoolId) -> None:
        private = self.heap.private_pools.get(pool)
        if private is None or private.use_count == 0:
            raise UsageError(f"There is no pool {pool} in use.")
        private.use_count -= 1
        if private.use_count == 0:
            self.heap.freeable.add(pool, pool_hash(pool))

    def _make_room(self, pool: BlockPool, stream: int, rounded: int, size: int) -> Block:
        """Allocate what the free lists did not have: grown, from a spare pool, or after releasing memory."""
        heap = self.heap
        if heap.collecting:
            release.collect_garbage(heap)
        needed = segment_size(rounded, heap.conf.large_segment_size)
        block = self._grow(pool, stream, rounded, needed, size)
        if block is None and pool.owner is None:
            block = self._find_on_oom(pool.is_small, stream, rounded)
            if block is not None:
                return heap.cut(block, rounded, size, expandable=False)
        if block is None and release.release_available(heap, pool, stream, rounded):
            block = self._grow(pool, stream, rounded, needed, size)
        if block is None and not self._captures:
            release.release_cached(heap, self.pending)
            heap.statistics.counts["num_alloc_retries"] += 1
            block = self._grow(pool, stream, rounded, needed, size)
        if block is None:
            heap.statistics.counts["num_ooms"] += 1
            raise self._out_of_memory(size, rounded, needed)
        return heap.cut(block, rounded, size)

    def _grow(self, pool: BlockPool, stream: int, rounded: int, needed: int, size: int) -> Block | None:
        """Take new memory from the device, None where the limit or the device refuses."""
        heap = self.heap
        if heap.limit is not None and heap.reserved_bytes + needed > heap.limit:
            return None
        share = int(heap.conf.per_process_memory_fraction * self.device.total_bytes)  # the text's, not the API's
        if heap.conf.throw_on_cudamalloc_oom and heap.reserved_bytes + needed > share:
            heap.statistics.counts["num_oom_rejections"] += 1
            raise self._out_of_memory(size, rounded, needed, rejected=True)
        if heap.conf.expandable_segments:
            block = mapping.grow(heap, pool, stream, rounded)
            if block is not None and pool.owner is not None:
                pool.owner.segment_count += 1
            return block
        try:
            address = self.device.reserve(needed)
        except OutOfMemory:
            return None
        return heap.add_segment(pool, stream, address, needed)

    def _find_on_oom(self, small: bool, stream: int, rounded: int) -> Block | None:
        """Look in MemPools that serve others at an out-of-memory error, as if expandable segments were off."""
        for pool in self._pools_on_oom:
            block = self.heap.find(self.heap.block_pool(pool, small), stream, rounded, expandable=False)
            if block is not None:
                return block
        return None

    def _out_of_memory(self, size: int, rounded: int, needed: int, *, rejected: bool = False) -> OutOfMemory:
        return OutOfMemory(
            size,
            rounded_bytes=rounded,
            segment_bytes=needed,
            device_free_bytes=self.device.free_bytes,
            limit_bytes=self.heap.limit,
            rejected_by_policy=rejected,
        )
