"""Reads a made-up CSV of memory events into xmem: a template for an adapter of your own, in its own package.

The CSV has the header `time_us,device,action,address,bytes`, for example

    time_us,device,action,address,bytes
    10,0,alloc,4096,2097152
    15,0,free,4096,2097152

An adapter is anything with `name`, `sniff` and `read`; a module will do. pyproject.toml names it in the entry-point
group `xmem.adapters`; once the package is installed beside xmem, `xmem ingest FILE` asks it first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

import polars as pl

from xmem.errors import UnreadableError
from xmem.ingest.adapter import Batch, Notes

name = "my_csv"

HEADER = b"time_us,device,action,address,bytes"
TYPES = {"time_us": pl.Int64, "device": pl.Int32, "action": pl.String, "address": pl.UInt64, "bytes": pl.Int64}


def sniff(head: bytes, filename: str) -> bool:
    """Say from the first bytes whether this is such a file; never raise."""
    return head.startswith(HEADER)


def read(source: BinaryIO, notes: Notes) -> Iterator[Batch]:
    """Yield the events in the order of the file; what cannot be read is an issue, not an error."""
    try:
        rows = pl.read_csv(source.read(), schema=TYPES, ignore_errors=True, truncate_ragged_lines=True)
    except pl.exceptions.PolarsError as error:
        raise UnreadableError(f"{notes.filename!r} is no such CSV: {error}.", "Write it again.") from None
    whole = rows.drop_nulls()
    notes.add("bad_record", count=rows.height - whole.height, detail="a line lacks a value")
    notes.facts |= {"ordered": True, "time_base": "relative", "source_entries": rows.height}
    if whole.height == 0:
        raise UnreadableError(f"{notes.filename!r} holds no events.", "Was the writer still running?")
    yield Batch(
        "events",
        whole.select(
            (pl.col("time_us") * 1000).alias("ts_ns"),
            pl.lit("cuda").alias("device_type"),
            pl.col("device").alias("device_index"),
            pl.col("action").replace({"free": "free_requested"}).alias("action"),
            "address",
            pl.col("bytes").alias("requested_bytes"),
        ),
    )
