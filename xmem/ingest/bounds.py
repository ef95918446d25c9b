"""Keeps what adapters yield within what tables and sums can hold: narrow integers, and sizes that memory can have."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from xmem.units import TIB, format_bytes

if TYPE_CHECKING:
    import polars as pl

    from xmem.ingest.adapter import Batch, Notes

#: No single allocation or segment is larger; sums of more would pass 64 bits.
LARGEST_BYTES = 256 * TIB
_SIZES = {"events": ("requested_bytes", "block_bytes"), "segments": ("total_bytes",), "blocks": ("block_bytes",)}


def keep_bounds(batch: Batch, notes: Notes) -> Batch:
    """Return the batch without rows of impossible size, and with null for integers that their column cannot hold."""
    frame = _drop_impossible(batch.table, batch.columns, notes)
    frame = _clear_wide(batch.table, frame, notes)
    return batch if frame is batch.columns else replace(batch, columns=frame)


def _drop_impossible(table: str, frame: pl.DataFrame, notes: Notes) -> pl.DataFrame:
    import polars as pl

    for name in _SIZES.get(table, ()):
        largest = frame[name].max() if name in frame.columns else None
        if isinstance(largest, int) and largest > LARGEST_BYTES:
            possible = (pl.col(name) <= LARGEST_BYTES).fill_null(True)
            kept = frame.filter(possible)
            detail = f"{name} of {largest} is more than {format_bytes(LARGEST_BYTES)}"
            notes.add("bad_record", count=frame.height - kept.height, detail=detail)
            frame = kept
    return frame


def _clear_wide(table: str, frame: pl.DataFrame, notes: Notes) -> pl.DataFrame:
    """Narrow integers; a device without a number is device 0."""
    import polars as pl

    from xmem.ingest.spool import column_types

    types = column_types(table)
    for name in frame.columns:
        if types.get(name) != pl.Int32 or frame.schema[name] not in (pl.Int64, pl.UInt64):
            continue
        narrow = frame[name].cast(pl.Int32, strict=False)
        wide = narrow.null_count() - frame[name].null_count()
        if wide:
            notes.add("wide_integer", count=wide, detail=f"{name}: {frame[name].max()!r}")
            narrow = narrow.fill_null(0) if name == "device_index" else narrow
        frame = frame.with_columns(narrow.alias(name))
    return frame
