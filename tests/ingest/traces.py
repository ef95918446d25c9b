"""Small traces for tests, and what an adapter makes of them."""

from __future__ import annotations

import gzip
import io
import json
from dataclasses import dataclass
from typing import Any

import polars as pl

from xmem.ingest import torch_trace
from xmem.ingest.adapter import Filters, Notes

MIB = 1 << 20
ADDRESS = 139637976727552


def memory(ts: object, size: object, address: object = ADDRESS, **args: Any) -> dict[str, Any]:
    """A [memory] event on cuda:0; further args by their names in the file."""
    stated = {"Total Reserved": 64 * MIB, "Total Allocated": 0, "Bytes": size, "Addr": address}
    stated |= {"Device Id": 0, "Device Type": 1, "Ev Idx": 1} | args
    event = {"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": 7, "tid": 8}
    return event | {"ts": ts, "args": stated}


def span(name: str, ts: object = 1, dur: object = 2, cat: str = "cpu_op", **more: Any) -> dict[str, Any]:
    """A complete event."""
    return {"ph": "X", "cat": cat, "name": name, "pid": 7, "tid": 8, "ts": ts, "dur": dur, "args": {}} | more


def trace(*records: Any, **fields: Any) -> dict[str, Any]:
    """A trace as Kineto writes it."""
    return {"schemaVersion": 1, "profile_memory": 1, **fields, "traceEvents": list(records)}


@dataclass
class Reading:
    """All that an adapter said."""

    tables: dict[str, pl.DataFrame]
    notes: Notes

    @property
    def events(self) -> pl.DataFrame:
        """Memory events."""
        return self.tables.get("events", pl.DataFrame())

    @property
    def spans(self) -> pl.DataFrame:
        """Spans."""
        return self.tables.get("spans", pl.DataFrame())

    def counts(self) -> dict[str, int]:
        """Issues with their counts."""
        return {code: issue.count for code, issue in self.notes.issues.items()}

    def sizes(self) -> list[int]:
        """Signed sizes of the events in file order."""
        size = pl.coalesce("block_bytes", "requested_bytes")
        signed = pl.when(pl.col("action") == "free_requested").then(-size).otherwise(size)
        return self.events.select(signed.alias("size"))["size"].to_list() if self.events.height else []


def read(
    content: bytes | str | dict[str, Any] | list[Any],
    *,
    adapter: Any = torch_trace,
    filters: Filters | None = None,
    filename: str = "t.json",
) -> Reading:
    """Let an adapter read a text, or an object that is written as JSON."""
    text = content if isinstance(content, bytes) else content.encode() if isinstance(content, str) else None
    notes = Notes(filename=filename, filters=filters or Filters())
    frames: dict[str, list[pl.DataFrame]] = {}
    for batch in adapter.read(io.BytesIO(text if text is not None else json.dumps(content).encode()), notes):
        frames.setdefault(batch.table, []).append(batch.columns)
    return Reading({table: pl.concat(parts) for table, parts in frames.items()}, notes)


def gzipped(text: bytes) -> bytes:
    """One gzip member, the same on every run."""
    return gzip.compress(text, mtime=0)
