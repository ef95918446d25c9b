"""Blocks of memory, the segments they tile, and the ordered free lists that hold the free ones."""

from __future__ import annotations

from bisect import bisect_left

from xmem.simulate.allocator import PoolId

#: A free list is ordered by size, then tie: key = (size << KEY_SHIFT) + tie. Positions and addresses are below 2**56.
KEY_SHIFT = 56


class Segment:
    """Memory that came from the device in one piece, or the address range of an expandable segment.

    `shift` turns a block's position into its address. `page` is 0 for cudaMalloc memory; for an expandable segment it
    is the size of a page, and `handles` holds what backs each mapped page.
    """

    __slots__ = ("address", "handles", "page", "shift", "size")

    def __init__(self, address: int, size: int, position: int, page: int = 0) -> None:
        self.address = address
        self.size = size
        self.shift = address - position
        self.page = page
        self.handles: dict[int, int] = {}


class Block:
    """A piece of a segment: allocated, pending (freed, but used on a side stream), free, or unmapped.

    `key` is not 0 exactly where the block is in its free list. `charge` numbers what was asked for and given (see
    statistics). `special` marks a live block whose free needs more than
    merging: recorded on a side stream, oversize, or expandable.
    """

    __slots__ = (
        "charge", "event_count", "free_list", "insert_count", "key", "mapped", "next",
        "pos", "prev", "segment", "serial", "size", "special", "stream_uses",
    )  # fmt: skip

    prev: Block
    next: Block

    def __init__(self, segment: Segment, free_list: FreeList, pos: int, size: int) -> None:
        self.segment = segment
        self.free_list = free_list
        self.pos = pos
        self.size = size
        self.prev = self.next = EDGE
        self.key = 0
        self.charge = 0
        self.special = False
        self.mapped = True
        self.stream_uses: dict[int, None] | None = None
        self.event_count = 0
        self.insert_count = 0
        self.serial = 0

    @property
    def address(self) -> int:
        """Address on the device."""
        return self.pos + self.segment.shift

    @property
    def is_split(self) -> bool:
        """Say whether it shares its segment with other blocks."""
        return self.prev is not EDGE or self.next is not EDGE

    @property
    def is_available(self) -> bool:
        """Say whether it is free or unmapped."""
        return self.key != 0 or not self.mapped

    def put_between(self, before: Block, after: Block) -> None:
        """Enter the chain of the segment between two neighbours."""
        self.prev, self.next = before, after
        if before is not EDGE:
            before.next = self
        if after is not EDGE:
            after.prev = self


def _edge() -> Block:
    edge = Block.__new__(Block)
    edge.key = edge.size = 0
    edge.mapped = True
    return edge


#: Stands for "no neighbour" on either side; never free, never unmapped.
EDGE = _edge()


class FreeList:
    """Free blocks of one pool and stream by size and tie, and the unmapped ones by address."""

    __slots__ = ("blocks", "keys", "pool", "stream", "unmapped", "unmapped_at")

    def __init__(self, pool: BlockPool, stream: int) -> None:
        self.pool = pool
        self.stream = stream
        self.keys: list[int] = []
        self.blocks: list[Block] = []
        self.unmapped: list[Block] = []
        self.unmapped_at: list[int] = []

    def remove(self, block: Block) -> None:
        """Take a free block out."""
        index = bisect_left(self.keys, block.key)
        del self.keys[index], self.blocks[index]
        block.key = 0

    def add_unmapped(self, block: Block) -> None:
        """Put an unmapped block in."""
        index = bisect_left(self.unmapped_at, block.address)
        self.unmapped_at.insert(index, block.address)
        self.unmapped.insert(index, block)

    def remove_unmapped(self, block: Block) -> None:
        """Take an unmapped block out; its address must be what it was when it was put in."""
        index = bisect_left(self.unmapped_at, block.address)
        del self.unmapped_at[index], self.unmapped[index]


class BlockPool:
    """The small or the large half of a pool: one free list a stream, and the search counter for block ages."""

    __slots__ = ("is_small", "lists", "owner", "searches")

    def __init__(self, is_small: bool, owner: PrivatePool | None = None) -> None:
        self.is_small = is_small
        self.owner = owner
        self.lists: dict[int, FreeList] = {}
        self.searches = 0

    def free_list(self, stream: int) -> FreeList:
        """Return the stream's list, made where it is missing."""
        found = self.lists.get(stream)
        if found is None:
            found = self.lists[stream] = FreeList(self, stream)
        return found

    def ordered_blocks(self) -> list[Block]:
        """Return all free blocks in list order: stream, size, tie."""
        return [block for stream in sorted(self.lists) for block in self.lists[stream].blocks]


class PrivatePool:
    """A graph's pool or a MemPool: block pools of its own, kept until nobody uses it and its memory went back."""

    __slots__ = ("id", "large", "no_split", "segment_count", "small", "use_count")

    def __init__(self, pool_id: PoolId) -> None:
        self.id = pool_id
        self.small = BlockPool(True, self)
        self.large = BlockPool(False, self)
        self.use_count = 0
        self.segment_count = 0
        self.no_split = False
