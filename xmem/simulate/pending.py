"""Frees that wait for side streams: events recorded at the free, polled later in order, stream by stream."""

from __future__ import annotations

from collections import deque

from xmem.simulate.allocator import UNKNOWN_STREAM
from xmem.simulate.blocks import Block, PrivatePool
from xmem.simulate.hash_order import HashOrder, stream_hash
from xmem.simulate.heap import Heap
from xmem.simulate.statistics import LATE


class PendingFrees:
    """Blocks whose free was requested and is not complete."""

    def __init__(self, heap: Heap) -> None:
        self._heap = heap
        self._events: dict[int, deque[tuple[int, Block]]] = {}
        self._order: HashOrder[int] = HashOrder()
        self._deferred: list[Block] = []
        self.blocks = heap.pending
        self.captured_uses: dict[Block, set[int]] = {}

    def hold(self, block: Block) -> None:
        """Record an event on each stream that used the block."""
        self.blocks[block.address] = block
        self._record_events(block)

    def defer(self, block: Block) -> None:
        """Keep the block until no capture is on: events recorded during one cannot be polled.

        torch visits such blocks in the order of its own host pointers, which nothing tells; here it is the order of
        the frees. Only sums and peaks of inactive split memory can differ.
        """
        self.blocks[block.address] = block
        self._deferred.append(block)

    def poll(self) -> None:
        """Complete the frees whose events have all finished, stopping in each stream at the first that has not."""
        self._record_deferred()
        device = self._heap.device
        slot = 0
        while slot < self._order.slot_count:
            stream = self._order.at(slot)
            if stream is not None:
                events = self._events[stream]
                while events and stream != UNKNOWN_STREAM and device.event_done(events[0][0]):
                    self._finish(events.popleft()[1])
                if not events:
                    del self._events[stream]
                    self._order.remove(stream)
                    continue  # another stream may have moved up into the slot
            slot += 1

    def synchronize(self, pool: PrivatePool | None = None) -> None:
        """Wait for all events, or for those of a private pool's blocks, and complete their frees."""
        self._heap.statistics.counts["num_sync_all_streams"] += 1
        self._record_deferred()
        for stream in self._order:
            events = self._events[stream]
            kept: deque[tuple[int, Block]] = deque()
            for ticket, block in events:
                if pool is not None and block.free_list.pool.owner is not pool:
                    kept.append((ticket, block))
                    continue
                self._heap.device.synchronize_event(ticket)
                self._finish(block)
            self._events[stream] = kept

    def complete(self, address: int) -> None:
        """Complete the free of the block at `address`, whatever its events say; ignored where none is pending."""
        block = self.blocks.get(address)
        if block is None:
            return
        if block in self._deferred:
            self._deferred.remove(block)
            block.stream_uses = None
        for stream, events in self._events.items():
            self._events[stream] = deque(event for event in events if event[1] is not block)
        block.event_count = 1
        self._finish(block)

    def _record_deferred(self) -> None:
        deferred, self._deferred = self._deferred, []
        for block in deferred:
            captured = self.captured_uses.pop(block, None)
            for stream in captured or ():
                (block.stream_uses or {}).pop(stream, None)
            self._record_events(block)
            if block.event_count == 0:
                block.event_count = 1
                self._finish(block)

    def _record_events(self, block: Block) -> None:
        uses: HashOrder[int] = HashOrder()
        for stream in block.stream_uses or ():
            uses.add(stream, stream_hash(stream))
        for stream in uses:
            block.event_count += 1
            ticket = self._heap.device.record_event()
            self._events.setdefault(stream, deque()).append((ticket, block))
            self._order.add(stream, stream_hash(stream))
        block.stream_uses = None

    def _finish(self, block: Block) -> None:
        block.event_count -= 1
        if block.event_count == 0:
            del self.blocks[block.address]
            self._heap.free(block, LATE)
