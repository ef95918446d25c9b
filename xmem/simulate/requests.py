"""The ordered request stream of one device of a run: made by a DuckDB query, checked, and kept as columns."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

from xmem.errors import UnreadableError, UsageError
from xmem.fence import lock, run_select
from xmem.store import Run, Store

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

#: Columns of `requests` and their DuckDB types; the first four must be there, the others may be absent.
COLUMNS = {
    "seq": "BIGINT",
    "action": "VARCHAR",
    "alloc_id": "BIGINT",
    "bytes": "BIGINT",
    "stream": "BIGINT",
    "pool_id": "VARCHAR",
    "step": "BIGINT",
    "phase": "VARCHAR",
    "category": "VARCHAR",
    "op": "VARCHAR",
}
_NEEDED = ("seq", "action", "alloc_id", "bytes")

#: Actions of a request. `oom` is a request that failed in the recording: it is tried, and let go where it succeeds.
ACTIONS = (
    "alloc",
    "free_requested",
    "free_completed",
    "record_stream",
    "empty_cache",
    "oom",
    "create_pool",
    "delete_pool",
    "delete_graph",
)
_OF_AN_ALLOCATION = ("alloc", "free_requested", "free_completed", "record_stream")


@dataclass(frozen=True)
class Source:
    """The device whose requests are replayed, and what the run says about it."""

    run_id: str
    run_name: str
    adapter: str
    rank: int
    device_type: str
    device_index: int
    device_name: str | None
    total_bytes: int | None
    complete_history: bool
    baseline_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int | None
    torch_version: str | None
    alloc_conf: str | None
    chosen_from: tuple[str, ...] = ()

    @property
    def device(self) -> str:
        """The device as torch writes it: `cuda:0`, `cpu`."""
        return device_text(self.device_type, self.device_index)


def device_text(device_type: str, device_index: int) -> str:
    """Write a device as torch does; the CPU has no index."""
    return device_type if device_index < 0 else f"{device_type}:{device_index}"


def find_source(
    connection: duckdb.DuckDBPyConnection, run: Run, *, rank: int | None = None, device: str | None = None
) -> Source:
    """Choose rank and device: as asked, else the largest allocated peak, accelerators before the CPU."""
    rows = _rows(connection, _sql("devices"), {"run_id": run.run_id})
    if not rows:
        raise UnreadableError(
            f"The run {run.run_id} ({run.name}) holds no memory requests to replay.",
            "A snapshot needs history: torch.cuda.memory._record_memory_history() before the code of interest.",
        )
    asked = [
        row
        for row in rows
        if (rank is None or row["rank"] == rank)
        and (device is None or device in (device_text(row["device_type"], row["device_index"]), row["device_type"]))
    ]
    if not asked:
        known = ", ".join(f"rank {r['rank']} {device_text(r['device_type'], r['device_index'])}" for r in rows[:16])
        wanted = " ".join([*([] if rank is None else [f"rank {rank}"]), *([] if device is None else [repr(device)])])
        raise UsageError(f"The run {run.run_id} ({run.name}) has no memory requests on {wanted}.", f"It has: {known}.")
    chosen_from = tuple(f"rank {r['rank']} {device_text(r['device_type'], r['device_index'])}" for r in asked)
    return _source(connection, run, asked[0], chosen_from)


def _source(
    connection: duckdb.DuckDBPyConnection, run: Run, row: dict[str, Any], chosen_from: tuple[str, ...]
) -> Source:
    facts = _rows(
        connection,
        "SELECT torch_version, alloc_conf, adapter FROM runs WHERE run_id = $run_id AND rank = $rank",
        {"run_id": run.run_id, "rank": row["rank"]},
    )[0]
    return Source(
        run_id=run.run_id,
        run_name=run.name,
        adapter=facts["adapter"],
        rank=row["rank"],
        device_type=row["device_type"],
        device_index=row["device_index"],
        device_name=row["name"],
        total_bytes=row["total_bytes"],
        complete_history=row["complete_history"],
        baseline_bytes=row["baseline_bytes"],
        peak_allocated_bytes=row["peak_allocated_bytes"] or 0,
        peak_reserved_bytes=row["peak_reserved_bytes"],
        torch_version=facts["torch_version"],
        alloc_conf=facts["alloc_conf"],
        chosen_from=chosen_from,
    )


def make_recorded_requests(connection: duckdb.DuckDBPyConnection, source: Source) -> None:
    """Make the table `requests` on the connection: what the device was asked for, as recorded."""
    parameters = {
        "run_id": source.run_id,
        "rank": source.rank,
        "device_type": source.device_type,
        "device_index": source.device_index,
    }
    fill_requests(connection, connection.sql(_sql("recorded"), params=parameters).to_arrow_table())


def fill_requests(connection: duckdb.DuckDBPyConnection, rows: pa.Table) -> None:
    """Make the table `requests` on the connection from Arrow columns of the same names."""
    columns = ", ".join(f'CAST("{name}" AS {type_}) AS "{name}"' for name, type_ in COLUMNS.items())
    connection.register("request_rows", rows)
    connection.execute(f"CREATE OR REPLACE TEMP TABLE requests AS SELECT {columns} FROM request_rows")
    connection.unregister("request_rows")


def read_requests(
    connection: duckdb.DuckDBPyConnection, sql: str | None = None, store: Store | None = None
) -> pa.Table:
    """Return the table `requests` of the connection, or what a person's SELECT makes of it, checked and in order.

    The person's SQL runs behind the fence: afterwards the connection is locked for good.
    """
    if sql is None:
        return check_requests(connection.sql("SELECT * FROM requests").to_arrow_table(), "requests")
    lock(connection, store.folders() if store is not None else [])
    return check_requests(run_select(connection, sql), "the result of --requests")


def check_requests(rows: pa.Table, what: str) -> pa.Table:
    """Return the rows with exactly the columns of `requests`, ordered by seq; UsageError says what is wrong."""
    import pyarrow as pa

    missing = [name for name in _NEEDED if name not in rows.column_names]
    if missing:
        raise UsageError(
            f"{what[0].upper()}{what[1:]} lacks the column {', '.join(missing)}.",
            f"It needs {', '.join(_NEEDED)}; {', '.join(list(COLUMNS)[4:])} may be absent. Start from SELECT *.",
        )
    columns = [_column(rows, name, what) for name in COLUMNS]
    table = pa.table(dict(zip(COLUMNS, columns, strict=True)))
    _check_values(table, what)
    return _in_order(table)


def _column(rows: pa.Table, name: str, what: str) -> Any:
    import pyarrow as pa

    wanted = pa.int64() if COLUMNS[name] == "BIGINT" else pa.string()
    if name not in rows.column_names:
        return pa.nulls(rows.num_rows, wanted)
    column = rows.column(name)
    if wanted == pa.int64() and not (pa.types.is_integer(column.type) or pa.types.is_decimal(column.type)):
        if not pa.types.is_null(column.type):
            raise UsageError(
                f"Column {name} of {what} is {column.type}, not whole numbers.",
                f"Use // or CAST({name} AS BIGINT).",
            )
        return pa.nulls(rows.num_rows, wanted)
    try:
        return column.cast(wanted)
    except pa.ArrowInvalid as error:
        raise UsageError(f"Column {name} of {what} does not fit: {error}", f"It must be {COLUMNS[name]}.") from error


def _check_values(table: pa.Table, what: str) -> None:
    import pyarrow.compute as pc

    for name in ("seq", "action"):
        if table.column(name).null_count:
            raise UsageError(f"Column {name} of {what} holds null.", "Every request has a place and an action.")
    words = set(pc.unique(table.column("action")).to_pylist())
    unknown = sorted(words - set(ACTIONS))
    if unknown:
        raise UsageError(f"{unknown[0]!r} in {what} is not an action.", f"Actions are: {', '.join(ACTIONS)}.")
    of_an_allocation = pc.is_in(table.column("action"), value_set=_array(_OF_AN_ALLOCATION))
    if pc.any(pc.and_(of_an_allocation, pc.is_null(table.column("alloc_id")))).as_py():
        raise UsageError(f"Column alloc_id of {what} holds null for an allocation or a free.", "Keep alloc_id.")
    asking = table.filter(pc.is_in(table.column("action"), value_set=_array(("alloc", "oom"))))
    sizes = asking.column("bytes")
    if sizes.null_count or (len(sizes) and pc.min(sizes).as_py() < 0):
        raise UsageError(f"Column bytes of {what} holds null or less than 0 for an allocation.", "Give 0 or more.")
    ids = table.filter(pc.equal(table.column("action"), "alloc")).column("alloc_id")
    if pc.count_distinct(ids).as_py() != len(ids):
        raise UsageError(
            f"{what[0].upper()}{what[1:]} allocates one alloc_id twice.", "Give each allocation a number of its own."
        )


def _in_order(table: pa.Table) -> pa.Table:
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    seq = table.column("seq").to_numpy()
    if len(seq) < 2 or bool(np.all(seq[1:] >= seq[:-1])):
        return table
    first = pc.is_in(table.column("action"), value_set=_array(("record_stream", "delete_pool", "delete_graph")))
    order = np.lexsort((~first.to_numpy(zero_copy_only=False), seq))
    return table.take(pa.array(order))


def _array(words: tuple[str, ...]) -> Any:
    import pyarrow as pa

    return pa.array(words)


def _rows(connection: duckdb.DuckDBPyConnection, sql: str, parameters: dict[str, object]) -> list[dict[str, Any]]:
    result = connection.execute(sql, parameters)
    names = [column[0] for column in result.description or []]
    return [dict(zip(names, row, strict=True)) for row in result.fetchall()]


def _sql(name: str) -> str:
    return resources.files("xmem.simulate").joinpath("sql", f"{name}.sql").read_text(encoding="utf-8")
