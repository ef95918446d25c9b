"""The true order of events within a device, and which devices there are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from xmem.errors import UsageError

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

    kept = of_device(events, notes.filters.device).with_columns(
        pl.col("ts_ns") + offset_ns, pl.col("inferred").fill_null(False)
    )
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


def of_device(rows: pl.DataFrame, wanted: str | None) -> pl.DataFrame:
    """Keep the rows of the device that was asked for: `cuda:1`, `cpu`, or every device of a type, `cuda`."""
    import polars as pl

    if wanted is None:
        return rows
    keep = pl.lit(False)
    for device_type, device_index in used_devices(rows):
        if wanted in (device_name(device_type, device_index), device_type):
            keep |= (pl.col("device_type") == device_type) & (pl.col("device_index") == device_index)
    return rows.filter(keep)


def check_device(wanted: str | None, *tables: pl.DataFrame) -> None:
    """Raise UsageError where no row is of the device that was asked for."""
    used = used_devices(*tables)
    if wanted is None or any(wanted in (device_name(*device), device[0]) for device in used):
        return
    names = ", ".join(device_name(*device) for device in used) or "none"
    raise UsageError(f"The source has no memory events of device {wanted!r}.", f"Devices there: {names}.")


def used_devices(*tables: pl.DataFrame) -> list[tuple[str, int]]:
    """Return the devices that have rows, by type and index."""
    import polars as pl

    columns = [pl.col("device_type").cast(pl.String), pl.col("device_index")]
    rows = pl.concat([table.select("device_type", "device_index").unique().select(columns) for table in tables])
    return [(kind, index) for kind, index in rows.unique().sort("device_type", "device_index").iter_rows()]
