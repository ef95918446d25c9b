"""Why a request failed: what was free and where, which live blocks pin which segments, and what would have saved it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xmem.simulate.allocator import DEFAULT_POOL, Layout
from xmem.simulate.peaks import block_sizes, held_at, lifetimes
from xmem.simulate.replay import Encoded, Failure, Replay
from xmem.simulate.verdict import HeldBy, Oom, Pin, PinningBlock, SegmentUse
from xmem.units import format_bytes

if TYPE_CHECKING:
    import pyarrow as pa

_SEGMENTS_SHOWN = 20
_PINS_SHOWN = 8
_OLDEST_SHOWN = 3


@dataclass(frozen=True)
class _Pieces:
    """Free and pending memory of a layout, split by who may use it."""

    largest_free: int | None = None
    largest_usable: int | None = None
    pending: int = 0
    private_free: int = 0
    other_stream_free: int = 0


def explain_failure(
    encoded: Encoded, table: pa.Table, result: Replay, saved_by: tuple[str, ...] | None = None
) -> Oom | None:
    """Return the first failure of a replay in full, None where there is none."""
    if not result.failures:
        return None
    failure = result.failures[0]
    row = table.slice(failure.index, 1).to_pylist()[0]
    row |= {"stream": row["stream"] or 0, "pool_id": row["pool_id"] or "0:0"}
    pieces = _pieces(result.layout, row["stream"], row["pool_id"], failure.error.rounded_bytes)
    held: tuple[HeldBy, ...] = ()
    if result.levels is not None:
        sizes = block_sizes(encoded, result.levels[: failure.index, 0])
        held = held_at(encoded, table, sizes, failure.index - 1)
    return Oom(
        **{name: row[name] for name in ("seq", "alloc_id", "stream", "pool_id", "op", "step", "phase", "category")},
        **_figures(failure),
        recorded=row["action"] == "oom",
        largest_free_block_bytes=pieces.largest_free,
        largest_usable_block_bytes=pieces.largest_usable,
        pending_bytes=pieces.pending,
        private_pool_free_bytes=pieces.private_free,
        other_stream_free_bytes=pieces.other_stream_free,
        held_by=held,
        segments=_segment_uses(result.layout),
        pins=_pins(encoded, table, result, failure),
        saved_by=saved_by,
        sentence=_sentence(row, failure, pieces, held),
    )


def _figures(failure: Failure) -> dict[str, Any]:
    """Return what the allocator and its device said when the request failed."""
    error, stats = failure.error, failure.stats
    return {
        "requested_bytes": error.requested_bytes,
        "rounded_bytes": error.rounded_bytes,
        "segment_bytes": error.segment_bytes,
        "device_free_bytes": error.device_free_bytes,
        "limit_bytes": error.limit_bytes,
        "rejected_by_policy": error.rejected_by_policy,
        "allocated_bytes": stats.allocated_bytes,
        "active_bytes": stats.active_bytes,
        "reserved_bytes": stats.reserved_bytes,
        "free_in_cache_bytes": stats.reserved_bytes - stats.active_bytes,
    }


def _sentence(row: dict[str, Any], failure: Failure, pieces: _Pieces, held: tuple[HeldBy, ...]) -> str:
    error, stats = failure.error, failure.stats
    where = f" in {row['op']}" if row["op"] else ""
    when = f", step {row['step']}" if row["step"] is not None else ""
    when += f" ({row['phase']})" if row["phase"] else ""
    free = stats.reserved_bytes - stats.active_bytes
    largest = "" if pieces.largest_usable is None else f", largest usable piece {format_bytes(pieces.largest_usable)}"
    names = [f"{name} {format_bytes(size)}" for name, size in _holders(held)[:3]]
    holding = f" Memory is held by {', '.join(names)}." if names else ""
    return (
        f"Allocating {format_bytes(error.requested_bytes)}{where}{when} failed at seq {row['seq']}: "
        f"{format_bytes(stats.allocated_bytes)} allocated, {format_bytes(stats.reserved_bytes)} reserved, "
        f"{format_bytes(error.device_free_bytes)} free on the device, {format_bytes(free)} free in the cache"
        f"{largest}.{holding}"
    )


def _holders(held: tuple[HeldBy, ...]) -> list[tuple[str, int]]:
    """Add up holders by category where the recording has categories, else by operator, largest first."""
    by_category = any(row.category not in (None, "unknown") for row in held)
    sums: dict[str, int] = {}
    for row in held:
        name = (row.category if by_category else row.op) or "unknown"
        sums[name] = sums.get(name, 0) + row.bytes
    return sorted(sums.items(), key=lambda item: -item[1])


def _pool_text(pool: Any) -> str:
    return f"{pool[0]}:{pool[1]}"


def _pieces(layout: Layout | None, stream: int, pool: str, rounded: int) -> _Pieces:
    """Add up the free blocks of a layout by whether the failed request could have used them."""
    if layout is None:
        return _Pieces()
    segments, blocks = layout.segments, layout.blocks
    small = "small" if rounded <= 1 << 20 else "large"
    largest = usable = pending = private = other_stream = 0
    for segment, size, state in zip(blocks["segment"], blocks["block_bytes"], blocks["state"], strict=True):
        if state == "active_pending_free":
            pending += size
        if state != "inactive":
            continue
        largest = max(largest, size)
        if segments["pool_id"][segment] != DEFAULT_POOL:
            private += size
        if segments["stream"][segment] != stream:
            other_stream += size
        elif _pool_text(segments["pool_id"][segment]) == pool and segments["segment_type"][segment] == small:
            usable = max(usable, size)
    return _Pieces(largest, usable, pending, private, other_stream)


def segment_uses(layout: Layout) -> list[SegmentUse]:
    """Describe every segment of a layout, in address order."""
    count = len(layout.segments["address"])
    free, largest, live = [0] * count, [0] * count, [0] * count
    blocks = layout.blocks
    for segment, size, state in zip(blocks["segment"], blocks["block_bytes"], blocks["state"], strict=True):
        if state == "inactive":
            free[segment] += size
            largest[segment] = max(largest[segment], size)
        else:
            live[segment] += 1
    columns = layout.segments
    return [
        SegmentUse(
            address=columns["address"][i],
            bytes=columns["total_bytes"][i],
            segment_type=columns["segment_type"][i],
            stream=columns["stream"][i],
            pool_id=_pool_text(columns["pool_id"][i]),
            is_expandable=columns["is_expandable"][i],
            active_bytes=columns["active_bytes"][i],
            free_bytes=free[i],
            largest_free_bytes=largest[i],
            live_blocks=live[i],
        )
        for i in range(count)
    ]


def _segment_uses(layout: Layout | None) -> tuple[SegmentUse, ...]:
    """Return the segments with most free memory, then the largest."""
    if layout is None:
        return ()
    return tuple(sorted(segment_uses(layout), key=lambda use: (-use.free_bytes, -use.bytes))[:_SEGMENTS_SHOWN])


def _pins(encoded: Encoded, table: pa.Table, result: Replay, failure: Failure) -> tuple[Pin, ...]:
    """Return segments that live blocks keep although at least half of them is free, most free memory first."""
    layout = result.layout
    if layout is None:
        return ()
    uses = enumerate(segment_uses(layout))
    pinned = [(n, use) for n, use in uses if use.live_blocks and 2 * use.free_bytes >= use.bytes]
    pinned.sort(key=lambda pair: -pair[1].free_bytes)
    owners = owners_at(encoded, result, failure.index)
    wanted = {number for number, _ in pinned[:_PINS_SHOWN]}
    inside: dict[int, list[tuple[int, int]]] = {number: [] for number in wanted}
    blocks = layout.blocks
    columns = zip(blocks["segment"], blocks["address"], blocks["block_bytes"], blocks["state"], strict=True)
    for segment, address, size, state in columns:
        if segment in wanted and state != "inactive":
            inside[segment].append((owners.get(address, -1), size))
    return tuple(_pin(use, inside[number], encoded, table) for number, use in pinned[:_PINS_SHOWN])


def _pin(use: SegmentUse, live: list[tuple[int, int]], encoded: Encoded, table: pa.Table) -> Pin:
    births, _ = lifetimes(encoded)
    oldest = []
    for slot, size in sorted(live)[:_OLDEST_SHOWN]:
        row = table.slice(int(births[slot]), 1).to_pylist()[0] if slot >= 0 else {}
        facts = {name: row.get(name) for name in ("alloc_id", "category", "op", "step", "seq")}
        oldest.append(PinningBlock(bytes=size, **facts))
    return Pin(
        segment_address=use.address,
        segment_bytes=use.bytes,
        free_bytes=use.free_bytes,
        live_bytes=use.bytes - use.free_bytes,
        live_blocks=use.live_blocks,
        oldest=tuple(oldest),
    )


def owners_at(encoded: Encoded, result: Replay, index: int) -> dict[int, int]:
    """Return the slot that holds each address before request `index`; pending blocks still belong to theirs."""
    import numpy as np

    births, deaths = lifetimes(encoded)
    born = np.flatnonzero(births < index)
    order = born[np.lexsort((births[born], deaths[born] >= index))]  # live ones last, so that they win an address
    addresses = result.addresses
    return {addresses[slot]: slot for slot in order.tolist() if addresses[slot]}
