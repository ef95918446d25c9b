"""The fast way through the native allocator: whole columns of requests in one loop."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from xmem.simulate.allocator import ALLOC, FREE, OutOfMemory, Served
from xmem.simulate.blocks import EDGE, KEY_SHIFT, Block
from xmem.simulate.rounding import IMPOSSIBLE_SIZE, MIN_BLOCK, SMALL_SIZE
from xmem.simulate.statistics import FULL

if TYPE_CHECKING:
    from xmem.simulate.heap import Heap
    from xmem.simulate.native import Native

Give = Callable[[Block], None]
Take = Callable[[int], Block | None]
Requests = tuple[list[int], list[int], list[int]]  # codes, slots, sizes

#: How many requests are served between two sums of the statistics; memory for the log is bounded by it.
CHUNK = 1 << 15
FIRST_CHUNK = 1 << 10
MOST_PLANS = 1 << 16


class Plan(NamedTuple):
    """What a request of one size on stream 0 of the default pool does: worked out once, looked up after."""

    search: int  # smallest key in the list that serves it
    rounded: int
    keys: list[int]
    blocks: list[Block]
    least: int  # smallest rest that is split off
    most: int  # from this rest on the block is oversize
    charge: int  # where the block gets the rounded size


def make_take(heap: Heap, plan_for: Callable[[int], Plan | None], plans: dict[int, Plan]) -> Take:
    """Return a function that allocates from the free lists as Heap.find and Heap.cut do; None where those must."""
    log_code, log_charge, _ = heap.statistics.log_functions()
    split, plan_of, charge_for = make_split(heap), plans.get, heap.statistics.charge
    mixed, growing = heap.mixed, heap.conf.expandable_segments

    def take(size: int) -> Block | None:
        plan = plan_of(size) or plan_for(size)
        if plan is None:
            return None
        search, rounded, keys, blocks, least, most, charge = plan
        index = bisect_left(keys, search)
        try:
            block = blocks[index]
        except IndexError:
            return None
        rest = block.size - rounded
        page = mixed and block.segment.page
        if rest >= most or (page and not (growing and (block.next.mapped or index + 1 == len(keys)))):
            return None
        log_charge(charge)
        if rest >= least:
            return split(block, plan, rest, index)
        del keys[index], blocks[index]
        block.key, block.charge = 0, charge
        log_code(0 if page or (block.prev is EDGE and block.next is EDGE) else 3)
        if rest:
            block.charge = heap.statistics.charges[-1] = charge_for(size, block.size, block.free_list.pool.is_small)
        return block

    return take


def make_split(heap: Heap) -> Callable[[Block, Plan, int, int], Block]:
    """Return a function that cuts the front off the free block at an index of its list and leaves the rest in it."""
    log_code, _, log_extra = heap.statistics.log_functions()
    spare, mixed = heap.spare, heap.mixed

    def split(block: Block, plan: Plan, rest: int, index: int) -> Block:
        _, rounded, keys, blocks, _, _, charge = plan
        before, pos = block.prev, block.pos
        front = spare.pop() if spare else Block(block.segment, block.free_list, pos, rounded)
        front.segment, front.free_list, front.charge = block.segment, block.free_list, charge
        front.pos, front.size, front.prev = pos, rounded, before
        if before is not EDGE or block.next is not EDGE:
            log_code(0 if mixed and block.segment.page else 1)
        elif mixed and block.segment.page:
            log_code(0)
        else:
            log_code(2)
            log_extra(rest)
        front.next, before.next, block.prev = block, front, front  # where before is EDGE nobody reads its next
        pos += rounded
        block.size, block.pos, block.key = rest, pos, (rest << 56) + pos
        if index and keys[index - 1] > block.key:
            del keys[index], blocks[index]
            _place(keys, blocks, block)
        else:
            keys[index] = block.key
        return front

    return split


def make_give(heap: Heap) -> Give:
    """Return a function that completes the free of a block that is not special, as Heap.free does."""
    log_code, log_charge, log_extra = heap.statistics.log_functions()
    drop, mixed = heap.spare.append, heap.mixed

    def give(block: Block) -> None:
        log_charge(block.charge)
        keys, blocks = block.free_list.keys, block.free_list.blocks
        size, before, after = block.size, block.prev, block.next
        code = 6
        if after.key:
            grown, after.pos = size, block.pos
            if before.key:
                grown, after.pos, code = size + before.size, before.pos, 7
                before = _unlist(keys, blocks, before, drop)
            kept, index, total = after, bisect_left(keys, after.key), grown + after.size
        elif before.key:
            kept, index, total = before, bisect_left(keys, before.key), size + before.size
            before, kept.next, after.prev = before.prev, after, before  # where after is EDGE nobody reads its prev
        else:
            log_code(4 if (before is EDGE and after is EDGE) or (mixed and block.segment.page) else 5)
            block.key = (size << 56) + block.pos
            _place(keys, blocks, block)
            return
        kept.size, kept.prev, before.next = total, before, kept
        drop(block)
        if mixed and block.segment.page:
            code = 4
        elif before is EDGE and kept.next is EDGE:
            code += 2
            log_extra(total - size)
        log_code(code)
        index, kept.key = index + 1, (total << 56) + kept.pos
        if index < len(keys) and keys[index] < kept.key:
            del keys[index - 1], blocks[index - 1]
            _place(keys, blocks, kept)
        else:
            keys[index - 1] = kept.key

    return give


def _unlist(keys: list[int], blocks: list[Block], block: Block, drop: Give) -> Block:
    """Take a block that is being merged out of its list and return the one before it."""
    index = bisect_left(keys, block.key)
    del keys[index], blocks[index]
    block.key = 0
    drop(block)
    return block.prev


def _place(keys: list[int], blocks: list[Block], block: Block) -> None:
    key = block.key
    index = bisect_left(keys, key)
    keys.insert(index, key)
    blocks.insert(index, block)


class Bulk:
    """Serves columns of requests: allocations and frees by the fast functions, all else by the allocator's methods.

    Blocks are held by slot while a column is served and entered by address at its end.
    """

    def __init__(self, native: Native, addresses: list[int]) -> None:
        heap = native.heap
        self.addresses = addresses
        self._native = native
        self._heap = heap
        self._log = heap.statistics.codes
        self._held: dict[int, Block] = {}
        self._plans: dict[int, Plan] = {}
        self._fast = heap.version != (2, 12) and not heap.collecting and not heap.large.searches
        self._take = make_take(heap, self._plan, self._plans)
        self._give: Give = make_give(heap) if self._fast else heap.free
        self._surplus = 0  # logged changes less requests
        self._marks: list[tuple[int, int, int, int]] = []  # request, surplus, reserved bytes, calls after it
        self._error: OutOfMemory | None = None

    def serve(self, requests: Requests, start: int, with_levels: bool) -> Served:
        """Serve requests from `start` until one is neither ALLOC nor FREE, or fails."""
        statistics = self._heap.statistics
        served = Served(start, None, [], [])
        statistics.full = 1 << 62  # positions in the log are counted: it is summed up between chunks only
        try:
            for first, last in _chunks(start, len(requests[0])):
                chunk = [column[first:last] for column in requests]
                if self._heap.settle(self._held.values()):
                    self._plans.clear()
                before = self._native.levels() if with_levels else None
                done = self._serve_chunk(*chunk)
                served.calls.extend((first + mark[0], mark[3]) for mark in self._marks)
                if before is not None:
                    served.levels.append(self._levels(before, done))
                served = replace(served, done=first + done, error=self._error)
                if done < len(chunk[0]):
                    break
        finally:
            statistics.full = FULL
            self._enter()
        return served

    def _serve_chunk(self, codes: list[int], slots: list[int], sizes: list[int]) -> int:
        """Serve one chunk; return how many requests were served. This is the loop."""
        self._surplus = 0
        self._marks.clear()
        self._error = None
        held, give, take = self._held, self._give, self._usable_take()
        find = held.pop
        for code, slot, size in zip(codes, slots, sizes, strict=True):
            if code == ALLOC:
                block = take(size)
                if block is not None:
                    held[slot] = block
                    continue
                done = len(self._log) - self._surplus
                if not self._alloc(slot, size):
                    return done
                take = self._usable_take()
            elif code == FREE:
                block = find(slot, None)
                if block is not None and not block.special:
                    give(block)
                else:
                    self._free(slot, block)
                    take = self._usable_take()
            else:
                return len(self._log) - self._surplus
        return len(codes)

    def _usable_take(self) -> Take:
        """Frees that wait are looked at before each request, and captures route it: the full method does both."""
        return self._take if self._fast and self._native.is_plain else _take_nothing

    def _alloc(self, slot: int, size: int) -> bool:
        """Allocate by the full method; False where memory is out."""
        request = len(self._log) - self._surplus
        try:
            address = self._native.alloc(size)
        except OutOfMemory as error:
            self._error = error
            return False
        if address:
            self._held[slot] = self._heap.active.pop(address)
        else:
            self.addresses[slot] = 0
        self._mark(request)
        return True

    def _free(self, slot: int, block: Block | None) -> None:
        """Free a block that was entered by its address, or needs the full method, or nothing."""
        active = self._heap.active
        if block is None:
            block = active.pop(self.addresses[slot], None)
            if block is not None and not block.special:
                self._give(block)
                return
        request = len(self._log) - self._surplus
        if block is not None:
            address = block.address
            active[address] = block
            self._native.free_requested(address)
        self._mark(request)

    def _mark(self, request: int) -> None:
        heap = self._heap
        self._surplus = len(self._log) - request - 1
        calls = heap.device.log
        self._marks.append((request, self._surplus, heap.reserved_bytes, len(calls) if calls is not None else 0))

    def _plan(self, size: int) -> Plan | None:
        """Work out what a size gets; None where that is not decided by the free lists of stream 0 alone."""
        if not 0 < size < IMPOSSIBLE_SIZE:
            return None
        heap = self._heap
        rounded = self._native.round(size)
        if rounded >= heap.max_split:
            return None
        small = rounded <= SMALL_SIZE
        lists = (heap.small if small else heap.large).free_list(0)
        least = MIN_BLOCK if small or heap.conf.expandable_segments else SMALL_SIZE + 1
        charge = heap.statistics.charge(size, rounded, small)
        plan = Plan(rounded << KEY_SHIFT, rounded, lists.keys, lists.blocks, least, heap.max_split - rounded, charge)
        if len(self._plans) >= MOST_PLANS:
            self._plans.clear()
        self._plans[size] = plan
        return plan

    def _enter(self) -> None:
        """Enter held blocks by their addresses, so that every method knows them."""
        active, addresses = self._heap.active, self.addresses
        for slot, block in self._held.items():
            address = addresses[slot] = block.address
            active[address] = block
        self._held.clear()

    def _levels(self, before: tuple[int, int, int, int], done: int) -> Any:
        """Return the four levels after each request of a chunk as an array of `done` rows."""
        import numpy as np

        marks = np.array([(-1, 0, before[2], 0), *self._marks], dtype=np.int64)
        found = np.searchsorted(marks[:, 0], np.arange(done), side="right") - 1
        ends = np.arange(1, done + 1) + marks[found, 1]
        logged = self._heap.statistics.settle_levels()
        rows = np.empty((done, 4), dtype=np.int64)
        rows[:, 2] = marks[found, 2]
        for column, name in ((0, "allocated_bytes"), (1, "active_bytes"), (3, "requested_bytes")):
            changes = logged[name]
            rows[:, column] = np.concatenate(([before[column]], changes if changes is not None else []))[ends]
        return rows


def _chunks(start: int, end: int) -> Iterator[tuple[int, int]]:
    """Cut a range into chunks that grow: a column that is left early and entered again is not copied each time."""
    size = FIRST_CHUNK
    while start < end:
        yield start, min(start + size, end)
        start, size = start + size, min(2 * size, CHUNK)


def _take_nothing(size: int) -> None:
    """Stand in for the fast function where it may not be used."""
