"""The segments and blocks of a heap as columns, as a snapshot shows them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from xmem.simulate.allocator import DEFAULT_POOL, Layout
from xmem.simulate.blocks import Block, BlockPool
from xmem.simulate.heap import Heap

_SEGMENT_COLUMNS = (
    "address", "total_bytes", "allocated_bytes", "active_bytes", "requested_bytes",
    "stream", "pool_id", "segment_type", "is_expandable",
)  # fmt: skip
_BLOCK_COLUMNS = ("segment", "address", "block_bytes", "requested_bytes", "state")


def read_layout(heap: Heap) -> Layout:
    """List every mapped block under its segment; an expandable segment is one row a contiguous mapped range."""
    layout = Layout({name: [] for name in _SEGMENT_COLUMNS}, {name: [] for name in _BLOCK_COLUMNS})
    previous: Block | None = None
    for block in sorted(_all_blocks(heap), key=lambda b: b.address):
        if previous is None or previous.next is not block:
            _add_segment(layout, block)
        _add_block(layout, block, heap.statistics.requested(block.charge), block.address in heap.pending)
        previous = block
    return layout


def _all_blocks(heap: Heap) -> Iterator[Block]:
    pools: list[BlockPool] = [heap.small, heap.large]
    for private in heap.private_pools.values():
        pools += (private.small, private.large)
    free = (block for pool in pools for free_list in pool.lists.values() for block in free_list.blocks)
    return chain(heap.active.values(), heap.pending.values(), free)


def _add_segment(layout: Layout, first: Block) -> None:
    pool = first.free_list.pool
    row = (
        first.address, 0, 0, 0, 0,
        first.free_list.stream, pool.owner.id if pool.owner else DEFAULT_POOL,
        "small" if pool.is_small else "large", first.segment.page != 0,
    )  # fmt: skip
    for name, value in zip(_SEGMENT_COLUMNS, row, strict=True):
        layout.segments[name].append(value)


def _add_block(layout: Layout, block: Block, requested: int, pending: bool) -> None:
    segments = layout.segments
    segments["total_bytes"][-1] += block.size
    active = block.key == 0
    if active:
        segments["active_bytes"][-1] += block.size
        segments["requested_bytes"][-1] += requested
        if not pending:
            segments["allocated_bytes"][-1] += block.size
    state = "inactive" if not active else "active_pending_free" if pending else "active_allocated"
    row = (len(segments["address"]) - 1, block.address, block.size, requested if active else None, state)
    for name, value in zip(_BLOCK_COLUMNS, row, strict=True):
        layout.blocks[name].append(value)
