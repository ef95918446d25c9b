"""What is alive at many moments: groups of allocations with one cause, and how each changes from moment to moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xmem.query.curve import WHERE, Curve, read_batches

if TYPE_CHECKING:
    import duckdb
    import numpy as np
    import polars as pl

    from xmem.query.subject import Subject

_KEYS = ("category", "phase", "op", "leaf_op", "module", "stack_id")
#: Most changes that a page carries; beyond them the smallest groups are put together.
MOST_CHANGES = 60_000
_DEEPEST = 60


@dataclass(frozen=True)
class Alive:
    """Groups (category, phase, op, leaf_op, module, stack_id, frames) and their changes at each moment.

    `changes[m]` lists (group, bytes, allocations) that come (or go, negative) between moment m - 1 and m.
    """

    groups: list[dict[str, Any]]
    changes: list[list[tuple[int, int, int]]]


_LIFETIMES = f"""
SELECT start_seq, end_seq, bytes, coalesce(category, 'unknown') AS category, phase, span_id, stack_id
FROM lifetimes WHERE {WHERE}
"""
_PLACES = """
SELECT span_id, op, leaf_op, module FROM places
WHERE run_id = $run AND rank = $rank AND span_id IN (SELECT unnest($spans))
"""
_STACKS = """
SELECT stack_id, frames FROM stacks
WHERE run_id = $run AND rank = $rank AND stack_id IN (SELECT unnest($stacks))
"""


def find_alive(connection: duckdb.DuckDBPyConnection, subject: Subject, curve: Curve) -> Alive:
    """Return what is alive at each moment of a curve, every byte of it."""
    changes = _group_changes(connection, subject, curve.moment_seqs)
    groups, levels, counts = _matrices(changes, len(curve.moments))
    groups, levels, counts = _merge_small(groups, levels, counts)
    frames = _frames(connection, subject, groups)
    named = [
        {**group, "frames": frames.get(group["stack_id"], []) if group["stack_id"] is not None else []}
        for group in groups.to_dicts()
    ]
    return Alive(named, _sparse(levels, counts))


def _group_changes(connection: duckdb.DuckDBPyConnection, subject: Subject, seqs: np.ndarray[Any, Any]) -> pl.DataFrame:
    """Return for each group and moment the bytes and allocations that come or go there."""
    import numpy as np
    import polars as pl

    parts = []
    for batch in read_batches(connection, _LIFETIMES, subject.parameters):
        end = batch["end_seq"].fill_null(1 << 62).to_numpy()
        placed = batch.drop("start_seq", "end_seq").with_columns(
            comes=pl.Series(np.searchsorted(seqs, batch["start_seq"].to_numpy())),
            goes=pl.Series(np.searchsorted(seqs, end)),
        )
        lasting = placed.filter(pl.col("comes") < pl.col("goes"))
        keys = ["category", "phase", "span_id", "stack_id"]
        for column, sign in (("comes", 1), ("goes", -1)):
            parts.append(
                lasting.filter(pl.col(column) < len(seqs))
                .group_by(*keys, pl.col(column).alias("moment"))
                .agg(bytes=pl.col("bytes").sum() * sign, allocations=pl.len().cast(pl.Int64) * sign)
            )
    changes = pl.concat(parts) if parts else pl.DataFrame()
    places = _places(connection, subject, changes["span_id"].drop_nulls().unique().to_list())
    return (
        changes.join(places, on="span_id", how="left")
        .group_by(*_KEYS, "moment")
        .agg(pl.col("bytes").sum(), pl.col("allocations").sum())
    )


def _places(connection: duckdb.DuckDBPyConnection, subject: Subject, spans: list[int]) -> pl.DataFrame:
    import polars as pl

    values = {"run": subject.run.run_id, "rank": subject.device.rank, "spans": spans}
    rows = pl.from_arrow(connection.sql(_PLACES, params=values).to_arrow_table())
    assert isinstance(rows, pl.DataFrame)
    return rows


def _matrices(changes: pl.DataFrame, moments: int) -> tuple[pl.DataFrame, Any, Any]:
    """Return the groups in a fixed order, and their bytes and allocations at every moment."""
    import numpy as np
    import polars as pl

    groups = changes.select(_KEYS).unique().sort(_KEYS, nulls_last=True).with_row_index("group")
    placed = changes.join(groups, on=_KEYS, how="left", nulls_equal=True)
    levels, counts = (np.zeros((groups.height, moments), dtype=np.int64) for _ in range(2))
    where = placed["group"].to_numpy(), placed["moment"].to_numpy()
    np.add.at(levels, where, placed["bytes"].to_numpy())
    np.add.at(counts, where, placed["allocations"].to_numpy())
    order = np.argsort(-levels.cumsum(axis=1).max(axis=1, initial=0), kind="stable")
    return groups[pl.Series(order)].drop("group"), levels.cumsum(axis=1)[order], counts.cumsum(axis=1)[order]


def _merge_small(groups: pl.DataFrame, levels: Any, counts: Any) -> tuple[pl.DataFrame, Any, Any]:
    """Put the smallest groups of each category together until the changes are few enough."""
    import numpy as np
    import polars as pl

    kept = groups.height
    while kept > 50 and np.count_nonzero(np.diff(levels[:kept], axis=1, prepend=0)) > MOST_CHANGES:
        kept = kept * 3 // 4
    if kept == groups.height:
        return groups, levels, counts
    rest = groups[kept:].with_row_index("place")
    merged, sums = [], []
    for category in rest["category"].unique().sort():
        places = rest.filter(pl.col("category") == category)["place"].to_numpy() + kept
        merged.append({"category": category, "op": f"({len(places)} smaller causes)"})
        sums.append((levels[places].sum(axis=0), counts[places].sum(axis=0)))
    lumps = pl.DataFrame(merged, schema=groups.schema)
    return (
        pl.concat([groups[:kept], lumps]),
        np.vstack([levels[:kept], *(level for level, _ in sums)]),
        np.vstack([counts[:kept], *(count for _, count in sums)]),
    )


def _sparse(levels: Any, counts: Any) -> list[list[tuple[int, int, int]]]:
    import numpy as np

    sizes, numbers = (np.diff(matrix, axis=1, prepend=0) for matrix in (levels, counts))
    changes: list[list[tuple[int, int, int]]] = [[] for _ in range(levels.shape[1])]
    for moment in range(levels.shape[1]):
        moved = np.flatnonzero((sizes[:, moment] != 0) | (numbers[:, moment] != 0))
        rows = moved.tolist(), sizes[moved, moment].tolist(), numbers[moved, moment].tolist()
        changes[moment] = list(zip(*rows, strict=True))
    return changes


def _frames(connection: duckdb.DuckDBPyConnection, subject: Subject, groups: pl.DataFrame) -> dict[int, list[str]]:
    """Return the frames of each stack, outermost first: Python's where there are any."""
    stacks = groups["stack_id"].drop_nulls().unique().to_list()
    values = {"run": subject.run.run_id, "rank": subject.device.rank, "stacks": stacks}
    rows = connection.execute(_STACKS, values).fetchall()
    return {stack: _readable(frames) for stack, frames in rows}


def _readable(frames: list[dict[str, Any]]) -> list[str]:
    python = [frame for frame in frames if (frame["filename"] or "").endswith(".py")]
    return [_frame(frame) for frame in reversed((python or frames)[:_DEEPEST])]


def _frame(frame: dict[str, Any]) -> str:
    parts = (frame["filename"] or "").replace("\\", "/").split("/")
    place = f" ({'/'.join(parts[-2:])}:{frame['line']})" if parts[-1] else ""
    return f"{frame['name']}{place}"
