"""Makes small snapshots for tests, and reads bytes through the adapter."""

from __future__ import annotations

import io
import pickle
from typing import Any

import polars as pl

from xmem.ingest import cuda_snapshot
from xmem.ingest.adapter import Filters, Notes

MIB = 1 << 20
BASE = 0x7F00_0000_0000
FORWARD = [{"name": "forward", "filename": "model.py", "line": 10}, {"name": "main", "filename": "train.py", "line": 3}]


def entry(action: str, address: int | None, size: int | None, time_us: int | None, **more: Any) -> dict[str, Any]:
    """Make a trace entry as torch 2.14 writes it; None leaves a key out."""
    made = {"action": action, "addr": address, "size": size, "stream": 0, "time_us": time_us}
    return (
        {key: value for key, value in made.items() if value is not None} | {"frames": FORWARD, "pool_id": (0, 0)} | more
    )


def basic() -> dict[str, Any]:
    """Make a snapshot: one segment of 20 MiB, 4 and 8 MiB allocated, 4 freed; the peak is 12 MiB."""
    trace = [
        entry("segment_alloc", BASE, 20 * MIB, 10),
        entry("alloc", BASE, 4 * MIB, 11),
        entry("alloc", BASE + 4 * MIB, 8 * MIB - 100, 12),
        entry("free_requested", BASE, 4 * MIB, 13),
        entry("free_completed", BASE, 4 * MIB, 13),
    ]
    blocks = [
        {"address": BASE, "size": 4 * MIB, "requested_size": 7, "state": "inactive", "frames": []},
        {
            "address": BASE + 4 * MIB,
            "size": 8 * MIB,
            "requested_size": 8 * MIB - 100,
            "state": "active_allocated",
            "frames": FORWARD,
        },
        {"address": BASE + 12 * MIB, "size": 8 * MIB, "requested_size": 0, "state": "inactive", "frames": []},
    ]
    segment = {
        "device": 0,
        "address": BASE,
        "total_size": 20 * MIB,
        "allocated_size": 8 * MIB,
        "active_size": 8 * MIB,
        "requested_size": 8 * MIB - 100,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }
    return {
        "segments": [segment],
        "device_traces": [trace],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64", "expandable_segments": False},
        "external_annotations": [],
    }


def with_trace(*entries: object, **more: Any) -> dict[str, Any]:
    """Make a snapshot with nothing but one device's trace."""
    return {"segments": [], "device_traces": [list(entries)]} | more


def read(
    snapshot: object, *, name: str = "x.pickle", filters: Filters | None = None
) -> tuple[dict[str, pl.DataFrame], Notes]:
    """Read a snapshot (bytes, or what to pickle) through the adapter into one frame a table."""
    data = snapshot if isinstance(snapshot, bytes) else pickle.dumps(snapshot)
    notes = Notes(filename=name, filters=filters or Filters())
    parts: dict[str, list[pl.DataFrame]] = {}
    for batch in cuda_snapshot.read(io.BytesIO(data), notes):
        parts.setdefault(batch.table, []).append(batch.columns)
    return {table: pl.concat(frames) for table, frames in parts.items()}, notes


def issues(notes: Notes) -> dict[str, int]:
    """Return how often each issue was met."""
    return {code: issue.count for code, issue in notes.issues.items()}
