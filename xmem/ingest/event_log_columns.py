"""Turns records of the event log into typed columns, and operator and module names into spans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from xmem.ingest.snapshot_columns import Remarks, clean_text, show_tree, to_integer
from xmem.schema import layout

if TYPE_CHECKING:
    import polars as pl

#: Columns of the tables that only reading can fill.
_DERIVED = {
    "events": {"seq", "allocated_bytes", "active_bytes", "reserved_bytes", "end_seq"},
    "spans": {"op_id", "module_id"},
    "devices": {"baseline_bytes", "baseline_reserved_bytes", "complete_history"},
    "blocks": {"alloc_id"},
}
#: Columns of an event that are turned into spans.
NAMES = ("module", "op")
#: Where a row stood; it is dropped before the row is handed on.
LINE = "line"
_REQUIRED = {
    "spans": ("name", "ts_ns"),
    "stacks": ("stack_id", "frames"),
    "segments": ("segment_id", "address", "total_bytes"),
    "blocks": ("segment_id", "address", "block_bytes"),
    "devices": (),
}
_FILLED: dict[str, dict[str, Any]] = {
    "spans": {"kind": "other", "dur_ns": 0},
    "segments": {"allocated_bytes": 0, "active_bytes": 0},
    "blocks": {"state": "active_allocated"},
}
#: Spans made from names are numbered from here, far above the numbers that a log gives its own.
FIRST_MADE_SPAN = 1 << 40


@cache
def column_types(table: str) -> Mapping[str, str]:
    """Return the columns that a log may fill, with their DuckDB types."""
    derived = _DERIVED.get(table, set()) | {"run_id", "rank"}
    found = {column.name: column.type for column in layout()[table].columns if column.name not in derived}
    return found | ({"process_id": "BIGINT"} | dict.fromkeys(NAMES, "VARCHAR") if table == "events" else {})


def polars_type(duckdb_type: str) -> Any:
    """Return the polars type of a column."""
    import polars as pl

    simple = {
        "BIGINT": pl.Int64,
        "UBIGINT": pl.UInt64,
        "INTEGER": pl.Int32,
        "VARCHAR": pl.String,
        "BOOLEAN": pl.Boolean,
    }
    frame = pl.Struct({"name": pl.String, "filename": pl.String, "line": pl.Int32})
    return simple.get(duckdb_type) or pl.List(frame)


def make_columns(table: str, records: Sequence[dict[str, Any]], remarks: Remarks, lines: Sequence[int]) -> pl.DataFrame:
    """Return the records as a frame with the columns of their table; `lines` says where each stood."""
    import polars as pl

    keys = dict.fromkeys(key for record in records for key in record)
    types = column_types(table)
    for key in keys:
        if key not in types and key != "table":
            first = next(index for index, record in enumerate(records) if key in record)
            remarks.add("unknown_field", lines[first], f"{table}.{clean_text(key)[:80]}")
    columns = []
    for name in (name for name in types if name in keys):
        values = [record.get(name) for record in records]
        dtype = polars_type(types[name])
        try:
            columns.append(pl.Series(name, values, dtype=dtype, strict=True))
        except (TypeError, ValueError, OverflowError, pl.exceptions.PolarsError):
            careful = [
                _to_type(types[name], name, value, (remarks, at)) for value, at in zip(values, lines, strict=True)
            ]
            columns.append(pl.Series(name, careful, dtype=dtype, strict=False))
    return pl.DataFrame([*columns, pl.Series(LINE, lines, dtype=pl.Int64)])


def _to_type(kind: str, name: str, value: Any, place: tuple[Remarks, int]) -> Any:
    if value is None:
        return None
    if kind == "VARCHAR":
        return clean_text(show_tree(value))
    if kind == "BOOLEAN":
        return value if isinstance(value, bool) else _odd(name, value, place)
    if kind in ("BIGINT", "UBIGINT", "INTEGER"):
        number = to_integer(value, "Q" if kind == "UBIGINT" else "q", name, place)
        fits = number is None or kind != "INTEGER" or abs(number) < 1 << 31
        return number if fits else _odd(name, value, place)
    if not isinstance(value, list):
        return _odd(name, value, place)
    return [_to_frame(frame) for frame in value]


def _odd(name: str, value: Any, place: tuple[Remarks, int]) -> None:
    place[0].add("odd_value", place[1], f"{name} is of type {type(value).__name__}")


def _to_frame(frame: Any) -> dict[str, Any]:
    frame = frame if isinstance(frame, dict) else {"name": frame}
    line = frame.get("line")
    texts = {key: clean_text(show_tree(frame.get(key) or "")) for key in ("name", "filename")}
    return {**texts, "line": line if type(line) is int and abs(line) < 1 << 31 else 0}


def complete(table: str, frame: pl.DataFrame, remarks: Remarks, line: int) -> pl.DataFrame:
    """Drop rows of a side table that lack what they need, and fill in what they may leave out."""
    import polars as pl

    absent = [name for name in _REQUIRED[table] if name not in frame.columns]
    whole = frame.clear() if absent else frame.drop_nulls(list(_REQUIRED[table]))
    lost = frame.height - whole.height
    remarks.add("missing_field", line, f"{table} needs {', '.join(_REQUIRED[table])}", lost)
    types = column_types(table)
    fills = {name: pl.lit(fill, polars_type(types[name])) for name, fill in _FILLED.get(table, {}).items()}
    return whole.with_columns(
        (pl.col(name).fill_null(fill) if name in whole.columns else fill).alias(name) for name, fill in fills.items()
    )


def name_spans(events: pl.DataFrame, first_id: int) -> tuple[pl.DataFrame, pl.DataFrame | None]:
    """Turn `module` and `op` into spans: each run of events of one thread under one name becomes one.

    Returns the events with span_id in place of the names, and the spans, or None where there is nothing to name.
    """
    import polars as pl

    missing = [pl.lit(None, pl.String).alias(name) for name in NAMES if name not in events.columns]
    given = pl.col("span_id") if "span_id" in events.columns else pl.lit(None, pl.Int64)
    thread = pl.col("thread_id") if "thread_id" in events.columns else pl.lit(None, pl.Int64)
    named = events.with_columns(*missing, given.alias("span_id"), thread.alias("thread_id"))
    unnamed = named.select(pl.all_horizontal(pl.col(*NAMES).is_null()).all()).item()
    if unnamed or events.height == 0:
        return events.drop(NAMES, strict=False), None
    named = named.with_row_index("row").sort("thread_id", "row", nulls_last=True)
    named = named.with_columns(call=pl.struct("thread_id", "module").rle_id())
    named = named.with_columns(part=pl.struct("call", "op").rle_id())
    modules = _span_rows(named.filter(pl.col("module").is_not_null()), "call", "module", first_id)
    ops = _span_rows(named.filter(pl.col("op").is_not_null()), "part", "op", first_id + modules.height)
    ops = ops.join(modules.select("call", parent_id="span_id"), on="call", how="left")
    named = named.join(ops.select("part", op_span="span_id"), on="part", how="left")
    named = named.join(modules.select("call", module_span="span_id"), on="call", how="left")
    span = pl.coalesce("span_id", "op_span", "module_span").alias("span_id")
    named = (
        named.with_columns(span)
        .sort("row")
        .select(*(c for c in events.columns if c not in NAMES and c != "span_id"), "span_id")
    )
    columns = ["span_id", "parent_id", "kind", "name", "ts_ns", "dur_ns", "thread_id"]
    modules = modules.with_columns(pl.lit(None, pl.Int64).alias("parent_id"))
    return named, pl.concat([modules.select(columns), ops.select(columns)]).sort("span_id")


def _span_rows(named: pl.DataFrame, key: str, name: str, first_id: int) -> pl.DataFrame:
    import polars as pl

    kind = "operator" if name == "op" else "module"
    start, end = pl.col("ts_ns").min(), pl.col("ts_ns").max()
    rows = named.group_by(key, maintain_order=True).agg(
        *([pl.col("call").first()] if key != "call" else []),
        pl.col(name).first().alias("name"),
        start.alias("ts_ns"),
        (end - start).alias("dur_ns"),
        pl.col("thread_id").first(),
    )
    return rows.with_columns(
        (pl.int_range(pl.len(), dtype=pl.Int64) + first_id).alias("span_id"), pl.lit(kind).alias("kind")
    )
