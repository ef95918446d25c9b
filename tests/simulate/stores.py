"""Makes small stores by hand, so that the simulator is tested without reading any trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl

from xmem.store import Store

MIB = 1 << 20

_RUN: dict[str, Any] = {
    "name": "tiny", "source_file": "tiny.json", "source_sha256": "0" * 64, "source_bytes": 1, "adapter": "by_hand",
    "schema_version": 1, "xmem_version": "0", "ingested_ns": 1, "time_base": "index", "baseline_bytes": 0,
    "ring_buffer": False, "truncated": False, "source_entries": 1, "event_count": 1, "memory_event_count": 1,
    "span_count": 0, "stack_count": 0,
}  # fmt: skip
_DEVICE: dict[str, Any] = {
    "device_type": "cuda", "device_index": 0, "name": "Tiny GPU", "total_bytes": 1024 * MIB, "baseline_bytes": 0,
    "complete_history": True,
}  # fmt: skip
_GROWS = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


def event(action: str, alloc_id: int | None = None, size: int | None = None, **columns: Any) -> dict[str, Any]:
    """One row of events; seq and levels are filled in by make_store."""
    row = {"action": action, "alloc_id": alloc_id, "requested_bytes": size, "stream": 0, "pool_id": "0:0"}
    return row | columns


def make_store(
    folder: Path,
    events: list[dict[str, Any]],
    *,
    run_id: str = "abc123",
    rank: int = 0,
    tables: dict[str, list[dict[str, Any]]] | None = None,
    run: dict[str, Any] | None = None,
    device: dict[str, Any] | None = None,
) -> Store:
    """Write one run with these events, in order; levels are summed up from requested bytes."""
    store = Store(folder)
    rows = []
    sizes: dict[int, int] = {}
    allocated = reserved = 0
    for seq, given in enumerate(events):
        row = {"seq": seq, "ts_ns": seq, "device_type": "cuda", "device_index": 0, "inferred": False} | given
        if row["action"] == "alloc":
            sizes[row["alloc_id"]] = row["requested_bytes"]
            allocated += row["requested_bytes"]
        elif row["action"] == "free_requested":
            allocated -= sizes[row["alloc_id"]]
        reserved += _GROWS.get(row["action"], 0) * (row["requested_bytes"] or 0)
        rows.append(row | {"allocated_bytes": allocated, "reserved_bytes": reserved})
    with store.writer(run_id) as writer:
        writer.write("events", rank, pl.DataFrame(rows, infer_schema_length=None))
        writer.write("devices", rank, pl.DataFrame([_DEVICE | (device or {})]))
        writer.write("runs", rank, pl.DataFrame([_RUN | (run or {})]))
        for table, more in (tables or {}).items():
            writer.write(table, rank, pl.DataFrame(more, infer_schema_length=None))
        writer.commit()
    return store
