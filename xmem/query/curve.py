"""Thins a device's memory over time for a picture: every cell keeps its highest, lowest and last event."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import duckdb
    import numpy as np
    import polars as pl

    from xmem.query.subject import Subject

_BATCH = 1_000_000
#: Cells along time, and along the events; an event belongs to one of each, so bursts and quiet stretches keep theirs.
CELLS = 300
WHERE = "run_id = $run AND rank = $rank AND device_type = $device_type AND device_index = $device_index"


@dataclass(frozen=True)
class Curve:
    """Points of a device's memory in order, and which of them are the moments that can be looked into.

    `points` has seq, ts_ns, step, phase, allocated_bytes, active_bytes, reserved_bytes and one column of bytes for
    each of `categories`; `moments` are positions in it: the highest of each cell, and the peak.
    """

    points: pl.DataFrame
    categories: tuple[str, ...]
    moments: tuple[int, ...]
    peak: int

    @property
    def moment_seqs(self) -> np.ndarray[Any, Any]:
        """Return events.seq of each moment."""
        seqs: np.ndarray[Any, Any] = self.points["seq"].to_numpy()[list(self.moments)]
        return seqs


_CELLS = f"""
WITH chosen AS (SELECT seq, ts_ns, allocated_bytes, reserved_bytes FROM events WHERE {WHERE}),
bounds AS (
  SELECT min(ts_ns) AS t, max(ts_ns) - min(ts_ns) + 1 AS dt, min(seq) AS s, max(seq) - min(seq) + 1 AS ds FROM chosen
)
SELECT
  arg_max(seq, allocated_bytes) AS highest, arg_min(seq, allocated_bytes) AS lowest,
  arg_max(seq, reserved_bytes) AS reserved, min(seq) AS first, max(seq) AS last
FROM chosen CROSS JOIN bounds
GROUP BY CAST($cells * ((ts_ns - t) / dt) AS BIGINT), CAST($cells * ((seq - s) / ds) AS BIGINT)
"""
_PEAK = f"SELECT peak_allocated_seq FROM peaks WHERE {WHERE}"
_POINTS = f"""
SELECT seq, ts_ns, step, phase, allocated_bytes, active_bytes, reserved_bytes
FROM events WHERE {WHERE} AND seq IN (SELECT unnest($seqs)) ORDER BY seq
"""
_CHANGES = f"""
SELECT seq, coalesce(category, 'unknown') AS category, bytes FROM (
  SELECT start_seq AS seq, category, bytes FROM lifetimes WHERE {WHERE}
  UNION ALL
  SELECT end_seq, category, -bytes FROM lifetimes WHERE {WHERE} AND end_seq IS NOT NULL
)
"""


def thin_curve(connection: duckdb.DuckDBPyConnection, subject: Subject, cells: int = CELLS) -> Curve:
    """Return the curve of a device; no peak is lost, whatever the number of events."""
    import numpy as np
    import polars as pl

    values = subject.parameters
    found = connection.execute(_CELLS, {**values, "cells": cells}).fetchnumpy()
    ((peak_seq,),) = connection.execute(_PEAK, values).fetchall()
    highest = np.append(_known(found["highest"]), peak_seq)
    others = [_known(found[name]) for name in ("lowest", "last", "reserved")]
    seqs = np.unique(np.concatenate([highest, *others, _known(found["first"]).min(keepdims=True)]))
    points = pl.from_arrow(connection.sql(_POINTS, params={**values, "seqs": seqs.tolist()}).to_arrow_table())
    assert isinstance(points, pl.DataFrame)
    levels = _category_levels(connection, subject, seqs)
    moments = np.searchsorted(seqs, np.unique(highest))
    return Curve(
        points=points.hstack(levels),
        categories=tuple(levels.columns),
        moments=tuple(int(one) for one in moments),
        peak=int(np.searchsorted(seqs, peak_seq)),
    )


def _known(column: Any) -> np.ndarray[Any, Any]:
    """Return the values of a column of numbers that are not null."""
    import numpy as np

    return np.asarray(np.ma.compressed(column), dtype=np.int64)


def _category_levels(
    connection: duckdb.DuckDBPyConnection, subject: Subject, seqs: np.ndarray[Any, Any]
) -> pl.DataFrame:
    """Return the bytes of each category at each point, the largest category first."""
    import numpy as np
    import polars as pl

    sums: dict[str, np.ndarray[Any, Any]] = {}
    for batch in read_batches(connection, _CHANGES, subject.parameters):
        place = np.searchsorted(seqs, batch["seq"].to_numpy())
        counted = batch.with_columns(place=pl.Series(place)).group_by("category", "place").agg(pl.col("bytes").sum())
        for (category,), rows in counted.group_by("category"):
            level = sums.setdefault(str(category), np.zeros(len(seqs) + 1, dtype=np.int64))
            level[rows["place"].to_numpy()] += rows["bytes"].to_numpy()
    levels = {category: change[:-1].cumsum() for category, change in sums.items()}
    ordered = sorted(levels, key=lambda category: (-int(levels[category].max(initial=0)), category))
    return pl.DataFrame({category: levels[category] for category in ordered})


def read_batches(
    connection: duckdb.DuckDBPyConnection, sql: str, parameters: dict[str, object]
) -> Iterator[pl.DataFrame]:
    """Yield the rows of a query, a million at a time."""
    import polars as pl

    for batch in connection.sql(sql, params=parameters).to_arrow_reader(_BATCH):
        frame = pl.from_arrow(batch)
        assert isinstance(frame, pl.DataFrame)
        yield frame
