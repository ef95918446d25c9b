"""Makes the events of a device from short words, for tests of lifetimes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import polars as pl

from xmem.ingest.adapter import Notes
from xmem.ingest.lifetimes import DeviceHistory, DeviceSource, build_history
from xmem.ingest.spool import complete, in_types_of

WORDS = {
    "A": "alloc",
    "R": "free_requested",
    "C": "free_completed",
    "SA": "segment_alloc",
    "SF": "segment_free",
    "SM": "segment_map",
    "SU": "segment_unmap",
    "X": "defragment",
}
MIB = 1 << 20


def device_events(rows: Sequence[tuple[Any, ...]], *, blocks: bool = True, device: str = "cuda") -> pl.DataFrame:
    """Return events from (word, address, bytes[, total_allocated]) rows; times count in microseconds."""
    size = "block_bytes" if blocks else "requested_bytes"
    frame = pl.DataFrame(
        [
            {
                "ts_ns": 1000 * place,
                "device_type": device,
                "device_index": -1 if device == "cpu" else 0,
                "action": WORDS[row[0]],
                "address": row[1],
                ("requested_bytes" if row[0].startswith("S") else size): row[2],
                "total_allocated": row[3] if len(row) > 3 else None,
            }
            for place, row in enumerate(rows)
        ],
        infer_schema_length=None,
    )
    return complete("events", in_types_of("events", frame)).with_columns(pl.col("inferred").fill_null(False))


def history_of(events: pl.DataFrame, **options: Any) -> tuple[DeviceHistory, Notes]:
    """Build the history of events, without a final state unless one is given."""
    notes = Notes()
    empty = {"segments": complete("segments", pl.DataFrame()), "blocks": complete("blocks", pl.DataFrame())}
    kind = events["device_type"].cast(pl.String)[0] if events.height else "cuda"
    source = DeviceSource(kind, -1 if kind == "cpu" else 0, events, **{**empty, **options})
    return build_history(source, notes), notes


def final_state(*segments: tuple[int, int, Sequence[tuple[int, int, str]]], expandable: bool = False) -> dict[str, Any]:
    """Return segments and blocks from (address, bytes, [(address, bytes, state), …])."""
    rows = [
        {
            "segment_id": number,
            "device_type": "cuda",
            "device_index": 0,
            "address": address,
            "total_bytes": size,
            "allocated_bytes": sum(block[1] for block in blocks if block[2] == "active_allocated"),
            "active_bytes": sum(block[1] for block in blocks if block[2] != "inactive"),
            "stream": 7,
            "pool_id": "0:0",
            "is_expandable": expandable,
        }
        for number, (address, size, blocks) in enumerate(segments)
    ]
    held = [
        {
            "segment_id": number,
            "address": block[0],
            "block_bytes": block[1],
            "requested_bytes": block[1] if block[2] != "inactive" else None,
            "state": block[2],
            "stream": 7,
            "pool_id": "0:0",
        }
        for number, (_, _, blocks) in enumerate(segments)
        for block in blocks
    ]
    frame = pl.DataFrame(held, infer_schema_length=None)
    typed = in_types_of("blocks", frame.drop("stream", "pool_id"))
    extra = frame.select(pl.col("stream").cast(pl.Int64), pl.col("pool_id").cast(pl.Categorical))
    return {
        "segments": complete("segments", in_types_of("segments", pl.DataFrame(rows, infer_schema_length=None))),
        "blocks": complete("blocks", typed).hstack(extra),
    }


def shown(history: DeviceHistory) -> list[tuple[Any, ...]]:
    """Return (word, address, bytes, allocation, inferred) of each row; allocations are numbered as they appear."""
    letters = {action: word for word, action in WORDS.items()}
    rows = history.events.select(
        pl.col("action").cast(pl.String), "address", pl.coalesce("block_bytes", "requested_bytes"), "group", "inferred"
    ).rows()
    number = {-1: -1}
    for row in rows:
        number.setdefault(row[3], len(number) - 1)
    return [(letters[row[0]], row[1], row[2], number[row[3]], row[4]) for row in rows]


def levels(history: DeviceHistory, name: str = "allocated_bytes") -> list[int]:
    """Return a level after each row."""
    return history.events[name].to_list()


def counts(notes: Notes) -> dict[str, int]:
    """Return how often each issue happened."""
    return {code: issue.count for code, issue in notes.issues.items()}
