"""The true order of events within a device, and which devices there are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import polars as pl

    from xmem.ingest.adapter import Notes


def device_name(device_type: str, device_index: int) -> str:
    """Return `cuda:0`, `cpu` (its index is -1), `unknown99:0`."""
    return device_type if device_index < 0 else f"{device_type}:{device_index}"


def order_events(events: pl.DataFrame, notes: Notes, offset_ns: int) -> pl.DataFrame:
    """Bring events into true order: by time, the source's own tie-breaker (Ev Idx), place in the file.

    Sources whose entry order is the true order (snapshots) stay as they are. Devices are not told apart here.
    """
    import polars as pl

    kept = _of_device(events, notes).with_columns(pl.col("ts_ns") + offset_ns, pl.col("inferred").fill_null(False))
    if notes.facts.get("ordered") or kept.height == 0:
        return kept.drop("order_key")
    time = kept["ts_ns"].to_numpy()
    key = kept["order_key"].fill_null(0).to_numpy()
    later = (time[1:] < time[:-1]) | ((time[1:] == time[:-1]) & (key[1:] < key[:-1]))
    moved = int(np.count_nonzero(later))
    if moved == 0:
        return kept.drop("order_key")
    first = int(np.argmax(later)) + 1
    notes.add("out_of_order", count=moved, at=first, unit="entry")
    order = np.lexsort((key, time))
    return kept.drop("order_key")[order]


def _of_device(events: pl.DataFrame, notes: Notes) -> pl.DataFrame:
    """Keep the device that was asked for."""
    wanted = notes.filters.device
    if wanted is None:
        return events
    chosen = [device for device in used_devices(events, events) if wanted in (device_name(*device), device[0])]
    import polars as pl

    keep = pl.lit(False)
    for device_type, device_index in chosen:
        keep |= (pl.col("device_type") == device_type) & (pl.col("device_index") == device_index)
    return events.filter(keep)


def used_devices(events: pl.DataFrame, segments: pl.DataFrame) -> list[tuple[str, int]]:
    """Return the devices that have rows, by type and index."""
    import polars as pl

    columns = [pl.col("device_type").cast(pl.String), "device_index"]
    both = pl.concat([events.select("device_type", "device_index"), segments.select("device_type", "device_index")])
    distinct = both.unique().select(columns).sort("device_type", "device_index")
    return [(kind, index) for kind, index in distinct.iter_rows()]
