"""Expandable segments: address ranges that grow and shrink by mapping pages of memory into them."""

from __future__ import annotations

from xmem.errors import UsageError
from xmem.simulate.allocator import OutOfMemory
from xmem.simulate.blocks import Block, BlockPool, FreeList, Segment
from xmem.simulate.heap import Heap
from xmem.simulate.rounding import SMALL_SEGMENT


def grow(heap: Heap, pool: BlockPool, stream: int, rounded: int) -> Block | None:
    """Return a free block of at least `rounded` bytes, out of its list, mapping what is missing; None if refused."""
    free_list = pool.free_list(stream)
    block = _find_range(free_list, rounded) or _reserve_range(heap, free_list)
    if not block.mapped and not _map(heap, block, min(block.size, rounded)):
        return None
    while block.size < rounded:  # a free block with an unmapped one behind it
        following = block.next
        if not _map(heap, following, min(rounded - block.size, following.size)):
            return None
        block = following
    free_list.remove(block)
    return block


def shrink(heap: Heap, block: Block) -> None:
    """Unmap the pages that lie wholly inside a free block; what is left on either side stays as free blocks."""
    segment, free_list = block.segment, block.free_list
    page = segment.page
    first = -(-(block.address - segment.address) // page)
    last = (block.address + block.size - segment.address) // page
    if first >= last:
        return
    _unmap_pages(heap, segment, first, last)
    free_list.remove(block)
    start = segment.address + first * page - segment.shift
    size = (last - first) * page
    before = start - block.pos
    after = block.size - before - size
    if before:
        left = heap.new_block(segment, free_list, block.pos, before)
        left.put_between(block.prev, block)
        heap.insert(left)
    if after:
        right = heap.new_block(segment, free_list, start + size, after)
        right.put_between(block, block.next)
        heap.insert(right)
    block.pos, block.size, block.mapped = start, size, False
    heap.merge(block, block.prev)
    heap.merge(block, block.next)
    free_list.add_unmapped(block)
    heap.change_reserved(free_list.pool, -size)
    owner = free_list.pool.owner
    if owner is not None:
        if owner.segment_count == 0:
            raise UsageError(
                f"Pool {owner.id} gives back more mapped ranges than it counted.",
                "torch stops here too, with an internal assertion: it counts one where growing took several calls.",
            )
        owner.segment_count -= 1
    heap.statistics.counts["num_device_free"] += 1
    if block.size == segment.size:
        free_list.remove_unmapped(block)
        heap.drop_block(block)
        heap.device.free_addresses(segment.address, segment.size)


def _find_range(free_list: FreeList, rounded: int) -> Block | None:
    """Return where the first run of free and unmapped blocks with `rounded` bytes begins."""
    for block in free_list.unmapped:
        start = block.prev if block.prev.is_available else block
        size, end = 0, start
        while size < rounded and end.is_available:
            size += end.size
            end = end.next
        if size >= rounded:
            return start
    return None


def _reserve_range(heap: Heap, free_list: FreeList) -> Block:
    """Reserve addresses for one and an eighth of the device, in pages of the pool's kind."""
    page = SMALL_SEGMENT if free_list.pool.is_small else heap.conf.large_segment_size
    total = heap.device.total_bytes
    size = -(-(total + total // 8) // page) * page
    segment = heap.new_segment(heap.device.reserve_addresses(size), size, page)
    block = heap.new_block(segment, free_list, segment.address - segment.shift, size)
    block.mapped = False
    free_list.add_unmapped(block)
    return block


def _map(heap: Heap, block: Block, size: int) -> bool:
    """Map pages for the first `size` bytes of an unmapped block and merge it with its free neighbours."""
    segment, free_list = block.segment, block.free_list
    page = segment.page
    first = (block.address - segment.address) // page
    last = -(-(block.address + size - segment.address) // page)
    if not _map_pages(heap, segment, first, last):
        return False
    mapped = (last - first) * page
    free_list.remove_unmapped(block)
    block.mapped = True
    if mapped < block.size:
        rest = heap.new_block(segment, free_list, block.pos + mapped, block.size - mapped)
        rest.mapped = False
        rest.put_between(block, block.next)
        free_list.add_unmapped(rest)
        block.size = mapped
    heap.merge(block, block.prev)
    heap.merge(block, block.next)
    heap.insert(block)
    heap.change_reserved(free_list.pool, mapped)
    heap.statistics.counts["num_device_alloc"] += 1
    return True


def _map_pages(heap: Heap, segment: Segment, first: int, last: int) -> bool:
    """Create the memory of pages first..last-1 and map it; undo all of it where one is refused."""
    device, page = heap.device, segment.page
    created: list[int] = []
    try:
        for _ in range(first, last):
            created.append(device.create(page))
    except OutOfMemory:
        for handle in created:
            device.release_handle(handle)
        return False
    for number, handle in zip(range(first, last), created, strict=True):
        device.map(segment.address + number * page, page)
        segment.handles[number] = handle
    return True


def _unmap_pages(heap: Heap, segment: Segment, first: int, last: int) -> None:
    heap.device.synchronize()
    for number in range(first, last):
        heap.device.unmap(segment.address + number * segment.page, segment.page)
        heap.device.release_handle(segment.handles.pop(number))
