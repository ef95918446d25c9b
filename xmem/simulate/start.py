"""The state that a recording began in, as requests that rebuild it segment by segment and block by block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from xmem.simulate.rounding import SMALL_SEGMENT, SMALL_SIZE

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

    from xmem.simulate.requests import Source

_MINIMUM = 512


@dataclass(frozen=True)
class _Place:
    """A live block at the beginning: where it lies, and the bytes that it is known to take."""

    address: int
    bytes: int
    alloc_id: int


class _Builder:
    """Collects requests; what only fills gaps has negative numbers and is freed at the end."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.fillers: list[int] = []

    def alloc(self, size: int, where: dict[str, Any], alloc_id: int | None = None) -> int:
        """Ask for `size` bytes on the stream and pool of a segment."""
        number = alloc_id if alloc_id is not None else -len(self.rows) - 1
        self.rows.append({"seq": -1, "action": "alloc", "alloc_id": number, "bytes": size, **where})
        return number

    def free(self, number: int) -> None:
        """Let go of an allocation."""
        self.rows.append({"seq": -1, "action": "free_requested", "alloc_id": number, "bytes": None})

    def segment(self, address: int, size: int, where: dict[str, Any], blocks: list[_Place]) -> None:
        """Make one segment of this size, and tile it: live blocks at their places, fillers between."""
        small = size == SMALL_SEGMENT
        self.free(self.alloc(SMALL_SIZE if small else size, where))
        for start, end, block in _tiles(address, size, blocks, small):
            if block is not None:
                self.alloc(end - start, where, block.alloc_id)
                continue
            for piece in range(start, end, SMALL_SIZE if small else end - start):
                self.fillers.append(self.alloc(min(SMALL_SIZE if small else end - start, end - piece), where))


def _tiles(address: int, size: int, blocks: list[_Place], small: bool) -> Iterator[tuple[int, int, _Place | None]]:
    """Cut a segment into live blocks and gaps; a remainder too small to be split off belongs to its block."""
    position = address
    ends = [*(block.address for block in blocks), address + size][1:]
    for block, following in zip(blocks, ends, strict=True):
        if block.address > position:
            yield position, block.address, None
        end = block.address + -(-block.bytes // _MINIMUM) * _MINIMUM
        if following - end <= (0 if small else SMALL_SIZE):
            end = following
        yield block.address, end, block
        position = end
    if position < address + size:
        yield position, address + size, None


def rebuild_start(
    connection: duckdb.DuckDBPyConnection, source: Source, requests: pa.Table
) -> tuple[pa.Table, int] | None:
    """Return requests that begin by rebuilding what was there before the recording, and how many of them do.

    None where the recording does not show those segments (traces, expandable segments), or where blocks overlap.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    rows = connection.execute(
        "SELECT seq, action, address, alloc_id, coalesce(block_bytes, requested_bytes), coalesce(stream, 0),"
        " coalesce(pool_id, '0:0') FROM events WHERE run_id = $1 AND rank = $2 AND device_type = $3"
        " AND device_index = $4 AND inferred AND action IN ('alloc', 'segment_alloc', 'segment_map')"
        " ORDER BY address, action = 'alloc'",
        [source.run_id, source.rank, source.device_type, source.device_index],
    ).fetchall()
    builder = _Builder()
    if not rows or not _build(builder, rows):
        return None
    for number in builder.fillers:
        builder.free(number)
    replaced = pa.array([row[0] for row in rows], pa.int64())
    kept = requests.filter(pc.invert(pc.is_in(requests.column("seq"), value_set=replaced)))
    prefix = pa.Table.from_pylist(builder.rows, schema=requests.schema)
    return pa.concat_tables([prefix, kept]), len(builder.rows)


def _build(builder: _Builder, rows: list[tuple[Any, ...]]) -> bool:
    """Add every segment with its blocks, in address order; False where the rows do not make segments with blocks."""
    segments: list[tuple[int, int, dict[str, Any], list[_Place]]] = []
    for _, action, address, alloc_id, size, stream, pool in rows:
        if action == "segment_map" or address is None:
            return False
        if action == "segment_alloc":
            segments.append((address, size, {"stream": stream, "pool_id": pool}, []))
        elif segments and address + size <= segments[-1][0] + segments[-1][1]:
            segments[-1][3].append(_Place(address, size, alloc_id))
        else:
            return False
    for address, size, where, blocks in segments:
        if any(one.address + one.bytes > two.address for one, two in pairwise(blocks)):
            return False
        builder.segment(address, size, where, blocks)
    return True
