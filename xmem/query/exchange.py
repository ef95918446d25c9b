"""Hands memory to other tools: Perfetto counters, speedscope, collapsed stacks, Arrow and Parquet."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xmem.query import connect
from xmem.query.subject import Subject, find_subject

if TYPE_CHECKING:
    import duckdb
    import polars as pl
    import pyarrow as pa

#: Sums of bytes that stacks can be weighted by.
WEIGHTS = {
    "peak": "alive at the peak",
    "total": "allocated in total",
    "end": "alive at the end",
}
_BATCH = 100_000
_ALIVE = {
    "peak": "l.start_seq <= p.peak_allocated_seq AND (l.end_seq IS NULL OR l.end_seq > p.peak_allocated_seq)",
    "total": "true",
    "end": "l.end_seq IS NULL",
}
_WHERE = "run_id = $run AND rank = $rank AND device_type = $device_type AND device_index = $device_index"


def perfetto(
    run: str | None = None, *, store: str | Path | None = None, rank: int | None = None, device: str | None = None
) -> Iterator[str]:
    """Yield counter tracks as Chrome trace JSON on the clock of the original trace, piece by piece.

    Times are microseconds since the trace's own baseTimeNanoseconds, so both files can be joined or loaded together.
    """
    connection = connect(store)
    subject = find_subject(connection, store, run, rank, device)
    base, process = _clock(connection, subject)
    yield json.dumps({"displayTimeUnit": "ms", "baseTimeNanoseconds": base})[:-1] + ', "traceEvents": [\n'
    name = {"name": "process_name", "ph": "M", "pid": process, "args": {"name": f"memory of {subject.run.name}"}}
    yield json.dumps(name)
    for batch in _counter_batches(connection, subject, base):
        lines = _counter_lines(batch, process, subject.device.label)
        yield "".join(f",\n{line}" for line in lines)
    yield "\n]}\n"


def _clock(connection: duckdb.DuckDBPyConnection, subject: Subject) -> tuple[int, int]:
    """Return the trace's base time in ns and the process that its operators ran in."""
    values = {"run": subject.run.run_id, "rank": subject.device.rank}
    ((metadata,),) = connection.execute(
        "SELECT metadata FROM runs WHERE run_id = $run AND rank = $rank", values
    ).fetchall()
    found = json.loads(metadata) if metadata else {}
    base = found.get("baseTimeNanoseconds") if isinstance(found, dict) else None
    ((process,),) = connection.execute(
        "SELECT mode(process_id) FROM spans WHERE run_id = $run AND rank = $rank AND kind = 'operator'", values
    ).fetchall()
    return base if isinstance(base, int) else 0, process or 0


def _counter_batches(connection: duckdb.DuckDBPyConnection, subject: Subject, base: int) -> Iterator[pl.DataFrame]:
    """Yield levels after each event, and the level of the event's own category."""
    import polars as pl

    changes: dict[str, int] = {}
    reader = connection.sql(_COUNTERS, params=subject.parameters | {"base": base}).to_arrow_reader(_BATCH)
    for batch in reader:
        frame = pl.from_arrow(batch)
        assert isinstance(frame, pl.DataFrame)
        frame = frame.with_columns(pl.col("category").fill_null("unknown"))
        before = pl.col("category").replace_strict(changes, default=0, return_dtype=pl.Int64)
        frame = frame.with_columns(level=before + pl.col("change").cum_sum().over("category"))
        last = frame.group_by("category").agg(pl.col("level").last())
        changes |= dict(zip(last["category"].to_list(), last["level"].to_list(), strict=True))
        yield frame


_COUNTERS = f"""
SELECT
  (ts_ns - $base) // 1000 AS us,
  (ts_ns - $base) % 1000 AS ns,
  allocated_bytes, reserved_bytes, category,
  CASE
    WHEN action = 'alloc' THEN coalesce(block_bytes, requested_bytes, 0)
    WHEN ended THEN -coalesce(block_bytes, requested_bytes, 0)
    ELSE 0
  END AS change
FROM (
  SELECT *, action = 'free_requested' OR (action = 'free_completed' AND NOT requested) AS ended
  FROM events
  CROSS JOIN (SELECT count(*) > 0 AS requested FROM events WHERE {_WHERE} AND action = 'free_requested')
  WHERE {_WHERE}
)
ORDER BY seq
"""


def _counter_lines(frame: pl.DataFrame, process: int, device: str) -> Iterator[str]:
    """Write one line for each counter that an event moved."""
    head = f'{{"ph": "C", "pid": {process}, "name": '
    rows = frame.select("us", "ns", "allocated_bytes", "reserved_bytes", "category", "change", "level").iter_rows()
    reserved_before = None
    for us, ns, allocated, reserved, category, change, level in rows:
        time = f'"ts": {us}.{ns:03d}, "args": {{"bytes": '
        yield f"{head}{json.dumps(f'{device} allocated')}, {time}{allocated or 0}}}}}"
        if change:
            yield f"{head}{json.dumps(f'{device} {category}')}, {time}{level}}}}}"
        if reserved is not None and reserved != reserved_before:
            yield f"{head}{json.dumps(f'{device} reserved')}, {time}{reserved}}}}}"
            reserved_before = reserved


# --------------------------------------------------------------------------- stacks


def weighted_stacks(
    connection: duckdb.DuckDBPyConnection, subject: Subject, weight: str = "peak"
) -> list[tuple[tuple[str, ...], int]]:
    """Return call paths, outermost first below their category, with their bytes; they add up to the whole sum.

    An allocation without a recorded stack has the path of its spans instead.
    """
    sql = _WEIGHTED.replace("{alive}", _ALIVE[weight])
    rows = connection.execute(sql, subject.parameters).fetchall()
    paths = _span_paths(connection, subject, {span for _, _, span, _, _ in rows if span is not None})
    summed: dict[tuple[str, ...], int] = {}
    for category, frames, span, _, size in rows:
        tail = tuple(_frame(frame) for frame in reversed(frames)) if frames else paths.get(span, ())
        path = (category, *(tail or ("(no stack recorded)",)))
        summed[path] = summed.get(path, 0) + size
    return sorted(summed.items(), key=lambda item: (-item[1], item[0]))


_WEIGHTED = """
SELECT
  coalesce(l.category, 'unknown') AS category,
  any_value(s.frames) AS frames,
  CASE WHEN any_value(s.frames) IS NULL OR len(any_value(s.frames)) = 0 THEN l.span_id END AS span_id,
  l.stack_id,
  CAST(sum(l.bytes) AS BIGINT) AS bytes
FROM (
  SELECT run_id, rank, category, stack_id, CASE WHEN stack_id IS NULL THEN span_id END AS span_id, sum(bytes) AS bytes
  FROM lifetimes AS l
  CROSS JOIN (
    SELECT peak_allocated_seq FROM peaks
    WHERE run_id = $run AND rank = $rank AND device_type = $device_type AND device_index = $device_index
  ) AS p
  WHERE run_id = $run AND rank = $rank AND device_type = $device_type AND device_index = $device_index AND ({alive})
  GROUP BY ALL
) AS l
LEFT JOIN stacks AS s ON s.run_id = l.run_id AND s.rank = l.rank AND s.stack_id = l.stack_id
GROUP BY 1, l.span_id, l.stack_id
HAVING sum(l.bytes) > 0
"""
_PARENTS = """
SELECT span_id, parent_id, name FROM spans
WHERE run_id = $run AND rank = $rank AND kind IN ('operator', 'annotation', 'step', 'module', 'python')
"""


def _span_paths(
    connection: duckdb.DuckDBPyConnection, subject: Subject, wanted: set[int]
) -> dict[int, tuple[str, ...]]:
    """Return for each span the names from the root down to it."""
    if not wanted:
        return {}
    values = {"run": subject.run.run_id, "rank": subject.device.rank}
    known: dict[int, tuple[int | None, str]] = {}
    missing = set(wanted)
    while missing:
        sql = f"{_PARENTS} AND list_contains($ids, span_id)"
        found = connection.execute(sql, {**values, "ids": sorted(missing)}).fetchall()
        known |= {span: (parent, name) for span, parent, name in found}
        missing = {parent for _, parent, _ in found if parent is not None} - known.keys()
    return {span: _path(span, known) for span in wanted}


def _path(span: int | None, known: dict[int, tuple[int | None, str]]) -> tuple[str, ...]:
    names: list[str] = []
    while span is not None and span in known:
        span, name = known[span]
        names.append(name)
    return tuple(reversed(names))


def _frame(frame: dict[str, Any]) -> str:
    place = f" ({frame['filename']}:{frame['line']})" if frame["filename"] else ""
    return f"{frame['name']}{place}"


def collapsed(
    run: str | None = None,
    *,
    store: str | Path | None = None,
    rank: int | None = None,
    device: str | None = None,
    weight: str = "peak",
) -> Iterator[str]:
    """Yield collapsed stacks, `outer;inner bytes`, one path a line."""
    connection = connect(store)
    subject = find_subject(connection, store, run, rank, device)
    for path, size in weighted_stacks(connection, subject, weight):
        yield ";".join(" ".join(name.replace(";", ":").split()) for name in path) + f" {size}\n"


def speedscope(
    run: str | None = None, *, store: str | Path | None = None, rank: int | None = None, device: str | None = None
) -> dict[str, Any]:
    """Return a speedscope file with one profile for each sum of bytes."""
    connection = connect(store)
    subject = find_subject(connection, store, run, rank, device)
    frames: dict[str, int] = {}
    profiles = []
    for weight, title in WEIGHTS.items():
        stacks = weighted_stacks(connection, subject, weight)
        weights = [size for _, size in stacks]
        profiles.append(
            {
                "type": "sampled",
                "name": f"{subject.device.label}: {title}",
                "unit": "bytes",
                "startValue": 0,
                "endValue": sum(weights),
                "samples": [[frames.setdefault(name, len(frames)) for name in path] for path, _ in stacks],
                "weights": weights,
            }
        )
    return {
        "$schema": "https://www.speedscope.app/file-format-schema.json",
        "name": subject.run.name,
        "exporter": "xmem",
        "activeProfileIndex": 0,
        "shared": {"frames": [{"name": name} for name in frames]},
        "profiles": profiles,
    }


def arrow(table: str = "allocations", run: str | None = None, *, store: str | Path | None = None) -> pa.Table:
    """Return a table or view of one run as an Arrow table, with the column comments as field metadata."""
    import pyarrow as pa

    from xmem.errors import UsageError
    from xmem.query import view_tables
    from xmem.schema import tables
    from xmem.store import Store

    known = {**tables(), **view_tables()}
    if table not in known:
        raise UsageError(f"There is no table or view {table!r}.", f"Known: {', '.join(sorted(known))}")
    found = Store(store).find_run(run)
    connection = connect(store)
    rows = connection.sql(f'SELECT * FROM "{table}" WHERE run_id = $run', params={"run": found.run_id}).to_arrow_table()
    comments = {column.name: column.comment for column in known[table].columns}
    fields = [field.with_metadata({"comment": comments[field.name]}) for field in rows.schema]
    return rows.cast(pa.schema(fields, metadata={"xmem_table": table, "xmem_run": found.run_id}))
