"""Segments and mapped ranges that were there before the recording, from the final state and from what is given back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from xmem.ingest.inferring import AT_START, Additions
from xmem.ingest.matching import ALLOC, FREE_REQUESTED, OTHER, Ints, Rows, pair_by_key

if TYPE_CHECKING:
    import polars as pl

#: Pieces of mapped ranges beyond which mapping before the recording is not worked out (a hostile file).
_MOST_PIECES = 50_000_000


def infer_segments(events: pl.DataFrame, segments: pl.DataFrame, additions: Additions) -> int:
    """Add a segment_alloc for each segment that was there before; return how many contradict the final state."""
    import polars as pl

    action = events["action"].cast(pl.String)
    code = np.full(events.height, OTHER, dtype=np.int8)
    code[(action == "segment_alloc").to_numpy()] = ALLOC
    code[(action == "segment_free").to_numpy()] = FREE_REQUESTED
    address = events["address"].fill_null(0).to_numpy()
    size = events["requested_bytes"].fill_null(0).to_numpy()
    pairing = pair_by_key(Rows(code, address, code != OTHER, size, size), sizes_agree=False)
    freed = np.flatnonzero(pairing.alloc < 0)
    additions.add("segment_alloc", AT_START, -1, _plain(events[pairing.first[freed]]))
    fixed = segments.filter(~pl.col("is_expandable").fill_null(False))
    newest = pl.DataFrame(
        {
            "address": events["address"].gather(pairing.first),
            "open": (pairing.requested < 0),
        }
    ).filter(pl.Series(pairing.following < 0))
    known = fixed.join(newest, on="address", how="left", maintain_order="left")
    additions.add("segment_alloc", AT_START, -1, _as_rows(known.filter(pl.col("open").is_null())))
    closed = known.filter(~pl.col("open"))
    additions.add("segment_alloc", events.height, -1, _as_rows(closed))
    dangling = int(newest["open"].sum()) - int(known["open"].fill_null(False).sum())
    return closed.height + (dangling if segments.height else 0)


def infer_mapped(events: pl.DataFrame, segments: pl.DataFrame, additions: Additions) -> int:
    """Add a segment_map for each range of an expandable segment that was mapped before the recording.

    Ranges are cut at every end that any row names; a piece was mapped before if its first row unmaps it, or if
    no row names it and the final state holds it. Returns how many pieces contradict the final state.
    """
    import polars as pl

    rows = events.filter(pl.col("action").cast(pl.String).is_in(["segment_map", "segment_unmap"]))
    final = _as_rows(segments.filter(pl.col("is_expandable").fill_null(False)))
    if rows.height == 0 and final.height == 0:
        return 0
    is_unmap = np.append((rows["action"].cast(pl.String) == "segment_unmap").to_numpy(), np.zeros(final.height, bool))
    ranges = pl.concat([_plain(rows).select(_RANGE), final.select(_RANGE)])
    start = ranges["address"].to_numpy().astype(np.int64)
    end = start + ranges["requested_bytes"].to_numpy()
    cuts = np.unique(np.append(start, end))
    low, high = np.searchsorted(cuts, start), np.searchsorted(cuts, end)
    if int((high - low).sum()) > _MOST_PIECES:
        return 0
    row, piece = _expand(low, high)
    is_final = row >= rows.height
    history = ~is_final
    first, last = _first_and_last(piece[history], row[history], len(cuts))
    shown = np.full(len(cuts), -1, dtype=np.int64)
    shown[piece[is_final]] = row[is_final]
    named = first < rows.height
    unmapped_first = named & np.append(is_unmap, False)[np.where(named, first, -1)]
    source = np.where(unmapped_first, first, np.where(~named & (shown >= 0), shown, -1))
    additions.add("segment_map", AT_START, -1, _merge(cuts, source, ranges))
    ends_mapped = named & ~np.append(is_unmap, False)[np.where(named, last, -1)]
    return int(np.count_nonzero(named & (ends_mapped != (shown >= 0)))) if segments.height else 0


_RANGE = ("address", "requested_bytes", "stream", "pool_id")


def _plain(rows: pl.DataFrame) -> pl.DataFrame:
    return rows.select(name for name in _RANGE if name in rows.columns)


def _as_rows(segments: pl.DataFrame) -> pl.DataFrame:
    return segments.select("address", "stream", "pool_id", "stack_id", requested_bytes="total_bytes")


def _expand(low: Ints, high: Ints) -> tuple[Ints, Ints]:
    """Give each (row, piece) pair that the piece ranges low..high of the rows cover."""
    count = high - low
    row = np.repeat(np.arange(len(low)), count)
    within = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
    return row, np.repeat(low, count) + within


def _first_and_last(piece: Ints, row: Ints, pieces: int) -> tuple[Ints, Ints]:
    first = np.full(pieces, np.iinfo(np.int64).max, dtype=np.int64)
    last = np.full(pieces, -1, dtype=np.int64)
    np.minimum.at(first, piece, row)
    np.maximum.at(last, piece, row)
    return first, last


def _merge(cuts: Ints, source: Ints, ranges: pl.DataFrame) -> pl.DataFrame:
    """Join neighbouring pieces that one row shows into ranges."""
    import polars as pl

    begins = np.flatnonzero((source >= 0) & (source != np.append(-2, source[:-1])))
    ends = np.flatnonzero((source >= 0) & (source != np.append(source[1:], -2))) + 1
    shown = ranges[source[begins]]
    return shown.with_columns(
        address=pl.Series(cuts[begins].astype(np.uint64)), requested_bytes=pl.Series(cuts[ends] - cuts[begins])
    )
