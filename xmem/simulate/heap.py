"""The state of the native allocator and its primitives: find, cut, free and merge blocks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import chain

from xmem.simulate import statistics as codes
from xmem.simulate.allocator import DEFAULT_POOL, PoolId
from xmem.simulate.blocks import EDGE, KEY_SHIFT, Block, BlockPool, FreeList, PrivatePool, Segment
from xmem.simulate.conf import AllocConf
from xmem.simulate.device import Device
from xmem.simulate.hash_order import HashOrder
from xmem.simulate.rounding import MIN_BLOCK, SMALL_SIZE
from xmem.simulate.statistics import Statistics, change
from xmem.simulate.torch_version import Version

#: Stands for "no limit" where sizes are compared; torch's own is the largest size_t.
UNLIMITED = (1 << 64) - 1
MANY_CHARGES = 1 << 16


class Heap:
    """Pools, segments and statistics over a device, under the settings in force."""

    def __init__(self, device: Device, conf: AllocConf, version: Version) -> None:
        self.device = device
        self.version = version
        self.statistics = Statistics()
        self.small = BlockPool(True)
        self.large = BlockPool(False)
        self.private_pools: dict[PoolId, PrivatePool] = {}
        self.freeable: HashOrder[PoolId] = HashOrder()  # private pools that nobody uses any more
        self.reserved_bytes = 0
        self.limit: int | None = None
        self.active: dict[int, Block] = {}  # by address
        self.pending: dict[int, Block] = {}  # freed, but waiting for side streams; by address
        self.spare: list[Block] = []
        self._next_position = 0
        self._next_serial = 0
        self.mixed = False  # whether there may be expandable segments
        self.apply(conf)

    def apply(self, conf: AllocConf) -> None:
        """Take over settings; blocks that are live keep what they have."""
        self.conf = conf
        self.max_split = UNLIMITED if conf.max_split_size is None else conf.max_split_size
        self.mixed = self.mixed or conf.expandable_segments
        self.collecting = self.limit is not None and conf.garbage_collection_threshold > 0

    def set_limit(self, limit: int | None) -> None:
        """Set the limit on reserved bytes."""
        self.limit = limit
        self.collecting = limit is not None and self.conf.garbage_collection_threshold > 0

    # -- pools

    def block_pool(self, pool: PoolId, small: bool) -> BlockPool:
        """Return the half of a pool that serves a size."""
        if pool == DEFAULT_POOL:
            return self.small if small else self.large
        private = self.private_pools[pool]
        return private.small if small else private.large

    # -- blocks

    def new_block(self, segment: Segment, free_list: FreeList, pos: int, size: int) -> Block:
        """Make a block, from a spare one where there is one."""
        if self.spare:
            block = self.spare.pop()
            block.segment, block.free_list, block.pos, block.size = segment, free_list, pos, size
            block.prev = block.next = EDGE
        else:
            block = Block(segment, free_list, pos, size)
        if self.version == (2, 12):
            self._next_serial += 1
            block.serial = self._next_serial
        return block

    def new_segment(self, address: int, size: int, page: int = 0) -> Segment:
        """Make a segment; its place in creation order is what its blocks are sorted by from 2.13 on."""
        if self.version >= (2, 13):
            position = self._next_position
            self._next_position += size
        else:
            position = address
        return Segment(address, size, position, page)

    def add_segment(self, pool: BlockPool, stream: int, address: int, size: int) -> Block:
        """Enter memory that cudaMalloc returned: one block, not yet in a list."""
        segment = self.new_segment(address, size)
        block = self.new_block(segment, pool.free_list(stream), address - segment.shift, size)
        self._count_segment(pool, size, 1)
        self.statistics.counts["num_device_alloc"] += 1
        return block

    def drop_segment(self, pool: BlockPool, size: int) -> None:
        """Account for a segment that cudaFree took."""
        self._count_segment(pool, size, -1)

    def change_reserved(self, pool: BlockPool, size: int) -> None:
        """Account for pages that were mapped, or unmapped where `size` is negative."""
        self.reserved_bytes += size
        self.statistics.change_segments(pool.is_small, 0, size, pool.owner.id if pool.owner else None)

    def _count_segment(self, pool: BlockPool, size: int, count: int) -> None:
        owner = pool.owner
        if owner is not None:
            owner.segment_count += count
        self.reserved_bytes += size * count
        self.statistics.change_segments(pool.is_small, count, size * count, owner.id if owner else None)
        if size >= self.max_split:
            change(self.statistics.oversize_segments, count)

    def drop_block(self, block: Block) -> None:
        """Forget a block that was merged or released."""
        block.key = 0
        block.mapped = True
        block.special = False
        self.spare.append(block)

    def insert(self, block: Block) -> None:
        """Put a free block into its list."""
        free_list = block.free_list
        tie = block.serial if self.version == (2, 12) else block.pos
        key = block.key = (block.size << KEY_SHIFT) + tie
        index = bisect_left(free_list.keys, key)
        free_list.keys.insert(index, key)
        free_list.blocks.insert(index, block)
        block.insert_count = free_list.pool.searches

    def find(self, pool: BlockPool, stream: int, rounded: int, *, expandable: bool = True) -> Block | None:
        """Take the block that a request gets out of its list, None where there is none."""
        if self.collecting:
            pool.searches += 1
        free_list = pool.lists.get(stream)
        if free_list is None:
            return None
        blocks = free_list.blocks
        index = bisect_left(free_list.keys, rounded << KEY_SHIFT)
        if index < len(blocks) and blocks[index].segment.page:
            index = self._skip_expandable(blocks, index, expandable)
        if index == len(blocks):
            return None
        block = blocks[index]
        if rounded < self.max_split <= block.size:
            return None
        if self.max_split <= rounded and block.size >= rounded + self.conf.max_non_split_rounding_size:
            return None
        del free_list.keys[index], blocks[index]
        block.key = 0
        return block

    def _skip_expandable(self, blocks: list[Block], index: int, wanted: bool) -> int:
        """Move on from an expandable candidate: to one that can grow less, or, with the mode off, past all of them."""
        last = len(blocks) - 1
        if wanted and self.conf.expandable_segments:
            while index < last and blocks[index].segment.page and _reach(blocks[index + 1]) < _reach(blocks[index]):
                index += 1
            return index
        while index <= last and blocks[index].segment.page:
            index += 1
        return index

    def cut(self, block: Block, rounded: int, requested: int, *, expandable: bool = True) -> Block:
        """Allocate a block that left its list: return its front part, or all of it, and log what changed."""
        free_list = block.free_list
        pool = free_list.pool
        mapped = block.segment.page != 0
        was_split = block.is_split
        code = codes.ALLOC
        by_bytes = pool.is_small or (expandable and self.conf.expandable_segments)
        if self._splits(pool, rounded, block.size - rounded, by_bytes):
            front = self.new_block(block.segment, free_list, block.pos, rounded)
            front.put_between(block.prev, block)
            block.pos += rounded
            block.size -= rounded
            self.insert(block)
            if not mapped:
                code = codes.ALLOC_CUT if was_split else codes.ALLOC_SPLIT
                if not was_split:
                    self.statistics.extras.append(block.size)
            block = front
        elif was_split and not mapped:
            code = codes.ALLOC_LAST
        block.charge = self.statistics.charge(requested, block.size, pool.is_small)
        self.log(code, block.charge)
        if block.size >= self.max_split:
            block.special = True
            change(self.statistics.oversize_allocations, 1)
        return block

    def _splits(self, pool: BlockPool, rounded: int, remaining: int, by_bytes: bool) -> bool:
        if pool.owner is not None and pool.owner.no_split:
            return False
        if by_bytes:
            return remaining >= MIN_BLOCK
        return rounded < self.max_split and remaining > SMALL_SIZE

    def free(self, block: Block, late: int = 0) -> None:
        """Complete a free: merge with free neighbours, put into the list. `late` is LATE after a pending free."""
        block.special = False
        before, after = self.merge(block, block.prev), self.merge(block, block.next)
        code = codes.FREE
        if block.segment.page == 0:
            joined = (before != 0) + (after != 0)
            if block.is_split:
                code = codes.FREE_ALONE + joined
            elif joined:
                code = codes.FREE_WHOLE - 1 + joined
                self.statistics.extras.append(before + after)
        self.insert(block)
        self.log(code + late, block.charge)

    def merge(self, block: Block, other: Block) -> int:
        """Merge a neighbour into `block` where it is free or, like the block, unmapped; return its size or 0."""
        if not other.is_available or other.mapped != block.mapped:
            return 0
        if other.mapped:
            other.free_list.remove(other)
        else:
            other.free_list.remove_unmapped(other)
        if block.prev is other:
            block.pos = other.pos
            block.prev = other.prev
            if block.prev is not EDGE:
                block.prev.next = block
        else:
            block.next = other.next
            if block.next is not EDGE:
                block.next.prev = block
        size = other.size
        block.size += size
        self.drop_block(other)
        return size

    def settle(self, others: Iterable[Block] = ()) -> bool:
        """Sum up the statistics; forget charges that are not in use where there are many, and say so.

        `others` are live blocks that are not entered by address.
        """
        statistics = self.statistics
        statistics.settle()
        if statistics.charge_count < max(MANY_CHARGES, 4 * len(self.active)):
            return False
        statistics.renumber(chain(self.active.values(), self.pending.values(), others))
        return True

    def log(self, code: int, charge: int) -> None:
        """Log a change of the statistics."""
        statistics = self.statistics
        statistics.codes.append(code)
        statistics.charges.append(charge)


def _reach(block: Block) -> int:
    """Size that an expandable block can grow to without touching what lies behind the next hole."""
    return block.size if block.next.mapped else block.size + block.next.size
