"""Giving memory back to the device: garbage collection, making room for one request, releasing all."""

from __future__ import annotations

from bisect import bisect_left

from xmem.errors import UsageError
from xmem.simulate import mapping
from xmem.simulate.allocator import DEFAULT_POOL, PoolId
from xmem.simulate.blocks import KEY_SHIFT, Block, BlockPool
from xmem.simulate.heap import UNLIMITED, Heap
from xmem.simulate.pending import PendingFrees


def collect_garbage(heap: Heap) -> None:
    """Free whole cached blocks of at least average age while more is reserved than the threshold allows."""
    if heap.limit is None:
        return
    threshold = int(heap.conf.garbage_collection_threshold * heap.limit)
    if heap.reserved_bytes <= threshold:
        return
    target = heap.reserved_bytes - threshold
    searches = heap.large.searches
    blocks = [block for block in heap.large.ordered_blocks() if not block.is_split]
    total_age = sum(searches - block.insert_count for block in blocks)
    count, reclaimed, freed = len(blocks), 0, True
    candidates = [block for block in blocks if not block.segment.page]
    while reclaimed < target and freed and count > 0:
        average, freed, kept = total_age / count, False, []
        for block in candidates:
            age = searches - block.insert_count
            if age < average:
                kept.append(block)
                continue
            freed = True
            reclaimed += block.size
            total_age -= age
            count -= 1
            release_block(heap, block)
        candidates = kept


def release_available(heap: Heap, pool: BlockPool, stream: int, rounded: int) -> bool:
    """Free oversize blocks of the stream until they make up for the request; say whether they do."""
    if heap.max_split == UNLIMITED:
        return False
    wanted = max(rounded, heap.max_split)
    free_list = pool.free_list(stream)
    index = bisect_left(free_list.keys, wanted << KEY_SHIFT)
    if index < len(free_list.blocks) and not free_list.blocks[index].segment.page:
        release_block(heap, free_list.blocks[index])
        return True
    released = 0
    for block in reversed(free_list.blocks[:index]):
        if released >= wanted or block.size < heap.max_split:
            break
        if not block.segment.page:
            released += block.size
            release_block(heap, block)
    return released >= wanted


def release_cached(heap: Heap, pending: PendingFrees, pool: PoolId = DEFAULT_POOL, *, capturing: bool = False) -> None:
    """Give back every segment without a live block: of all pools that may, or of one private pool."""
    if pool == DEFAULT_POOL and not capturing:
        pending.synchronize()
        _release_pool(heap, heap.large)
        _release_pool(heap, heap.small)
    slot = 0
    while slot < heap.freeable.slot_count:
        private_id = heap.freeable.at(slot)
        if private_id is not None and pool in (DEFAULT_POOL, private_id):
            private = heap.private_pools[private_id]
            if pool != DEFAULT_POOL:
                pending.synchronize(private)
            _release_pool(heap, private.small)
            _release_pool(heap, private.large)
            if private.segment_count == 0:
                del heap.private_pools[private_id]
                heap.freeable.remove(private_id)
                continue  # another pool may have moved up into the slot
        slot += 1


def release_block(heap: Heap, block: Block) -> None:
    """Give the segment of a whole free block back."""
    pool = block.free_list.pool
    heap.statistics.counts["num_device_free"] += 1
    if block.is_split:
        raise UsageError(
            f"cudaFree of a part of a segment, {block.size} bytes at {block.address}: invalid argument.",
            "torch does the same: max_split_size_mb was lowered at run time, below a block cut before.",
        )
    block.free_list.remove(block)
    heap.device.release(block.segment.address)
    heap.drop_segment(pool, block.size)
    heap.drop_block(block)


def _release_pool(heap: Heap, pool: BlockPool) -> None:
    to_shrink = []
    for block in pool.ordered_blocks():
        if block.segment.page:
            to_shrink.append(block)
        elif not block.is_split:
            release_block(heap, block)
    for block in to_shrink:
        mapping.shrink(heap, block)
