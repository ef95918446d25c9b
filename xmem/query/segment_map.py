"""Rebuilds the segments and the blocks in them at the moment of the peak."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xmem.query.curve import WHERE

if TYPE_CHECKING:
    import duckdb

    from xmem.query.subject import Subject

#: Start, end, stream, and whether it was mapped into an expandable segment.
Piece = tuple[int, int, int | None, bool]
_MOST_SEGMENTS = 400
_MOST_BLOCKS = 6000
_PIECES = f"""
SELECT seq, action, address, bytes, stream FROM segments_over_time
WHERE {WHERE} AND address IS NOT NULL AND seq <= $seq ORDER BY seq
"""
_BLOCKS = """
SELECT e.address, l.bytes, coalesce(l.category, 'unknown') AS category
FROM lifetimes AS l
JOIN events AS e ON e.run_id = l.run_id AND e.rank = l.rank AND e.seq = l.start_seq
WHERE l.run_id = $run AND l.rank = $rank AND l.device_type = $device_type AND l.device_index = $device_index
  AND l.start_seq <= $seq AND (l.end_seq IS NULL OR l.end_seq > $seq) AND e.address > 0
ORDER BY e.address
"""


def find_segments(connection: duckdb.DuckDBPyConnection, subject: Subject, seq: int) -> list[dict[str, Any]]:
    """Return segments at an event, largest first: address, bytes, stream, blocks as (offset, bytes, category).

    Mapped ranges of expandable segments that touch are one segment. Empty where the source names no segments.
    """
    values = {**subject.parameters, "seq": seq}
    pieces: list[Piece] = []
    for _, action, address, size, stream in connection.execute(_PIECES, values).fetchall():
        if action in ("segment_alloc", "segment_map"):
            pieces.append((address, address + size, stream, action == "segment_map"))
        else:
            pieces = [part for piece in pieces for part in _cut(piece, address, address + size)]
    segments: list[dict[str, Any]] = [
        {"address": start, "bytes": end - start, "stream": stream, "blocks": []}
        for start, end, stream, _ in _join(pieces)
    ]
    _place(connection.execute(_BLOCKS, values).fetchall() if segments else [], segments)
    return sorted(segments, key=lambda segment: (-segment["bytes"], segment["address"]))[:_MOST_SEGMENTS]


def _cut(piece: Piece, start: int, end: int) -> list[Piece]:
    """Take a range out of a piece."""
    left, right, stream, mapped = piece
    parts = [(left, min(right, start), stream, mapped), (max(left, end), right, stream, mapped)]
    return [part for part in parts if part[0] < part[1]] if start < right and end > left else [piece]


def _join(pieces: list[Piece]) -> list[Piece]:
    """Join mapped ranges that touch; other segments stay as the allocator made them."""
    joined: list[Piece] = []
    for start, end, stream, mapped in sorted(pieces, key=lambda piece: piece[:2]):
        if mapped and joined and joined[-1][1] >= start and joined[-1][2:] == (stream, True):
            joined[-1] = (joined[-1][0], max(joined[-1][1], end), stream, True)
        else:
            joined.append((start, end, stream, mapped))
    return joined


def _place(blocks: list[tuple[int, int, str]], segments: list[dict[str, Any]]) -> None:
    """Put blocks into their segments; both are in order of address."""
    at = 0
    for address, size, category in blocks[:_MOST_BLOCKS]:
        while at < len(segments) and segments[at]["address"] + segments[at]["bytes"] <= address:
            at += 1
        if at < len(segments) and segments[at]["address"] <= address:
            segments[at]["blocks"].append((address - segments[at]["address"], size, category))
