"""Cuts events to a window of time or steps; what lives at its start becomes memory that was there before."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import polars as pl

    from xmem.ingest.adapter import Notes
    from xmem.ingest.attribute import Attribution
    from xmem.ingest.lifetimes import DeviceHistory


def cut_to_window(
    events: pl.DataFrame,
    histories: list[tuple[str, int, DeviceHistory]],
    attribution: Attribution,
    notes: Notes,
) -> tuple[pl.DataFrame, int]:
    """Return the events in the window and the bytes that were allocated at its start."""
    return events, sum(history.baseline_bytes for _, _, history in histories)
