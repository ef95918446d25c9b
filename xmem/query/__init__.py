"""SQL over a store: one read-only, fenced door to every table and view."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from xmem import fence
from xmem.room import make_callable
from xmem.schema import Table, ddl, describe
from xmem.store import Run, Store

if TYPE_CHECKING:
    import duckdb
    import polars as pl
    import pyarrow as pa

__all__ = ["View", "connect", "query", "query_arrow", "runs", "view_tables", "views"]

DEFAULT_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class View:
    """A view over the tables: its SQL and the query that the documentation shows for it."""

    name: str
    sql: str
    example: str


@cache
def views() -> tuple[View, ...]:
    """Return the views of `views/*.sql` in name order."""
    folder = Path(__file__).parent / "views"
    return tuple(_read_view(file) for file in sorted(folder.glob("*.sql")))


def connect(store: str | Path | None = None, *, fenced: bool = True) -> duckdb.DuckDBPyConnection:
    """Open a DuckDB connection with every table and view of a store.

    Fenced, it reads the store's own files and nothing else, and cannot write.
    """
    opened = Store(store)
    connection = opened.connect()
    _create_views(connection)
    if fenced:
        fence.lock(connection, opened.folders())
    return connection


def query_arrow(sql: str, *, store: str | Path | None = None, timeout_s: float = DEFAULT_TIMEOUT_S) -> pa.Table:
    """Run one SELECT over a store and return an Arrow table; see `query`."""
    return _with_integers(fence.run_select(connect(store), sql, timeout_s=timeout_s))


def query(sql: str, *, store: str | Path | None = None, timeout_s: float = DEFAULT_TIMEOUT_S) -> pl.DataFrame:
    """Run one SELECT over a store's tables and views and return its rows as a polars frame.

    Raises UsageError where the SQL is wrong or takes longer than `timeout_s`, RefusedError where it is
    anything but one SELECT, or reaches outside of the store.
    """
    import polars as pl

    frame = pl.from_arrow(query_arrow(sql, store=store, timeout_s=timeout_s))
    assert isinstance(frame, pl.DataFrame)
    return frame


def runs(store: str | Path | None = None) -> list[Run]:
    """Return the runs of a store, oldest first."""
    return Store(store).runs()


@cache
def view_tables() -> dict[str, Table]:
    """Return the views by name, described as the schema describes its tables."""
    import duckdb

    connection = duckdb.connect()
    connection.execute(ddl())
    _create_views(connection)
    examples = {view.name: view.example for view in views()}
    described = describe(connection, "view")
    return {table.name: replace(table, example=examples.get(table.name, "")) for table in described}


def _with_integers(table: pa.Table) -> pa.Table:
    """Give sums as 64-bit integers where they fit: DuckDB sums to 128 bits, Arrow shows those as decimals."""
    import pyarrow as pa

    for index, field in enumerate(table.schema):
        if pa.types.is_decimal(field.type) and field.type.scale == 0:
            try:
                table = table.set_column(index, field.name, table.column(index).cast(pa.int64()))
            except pa.ArrowInvalid:
                continue
    return table


def _read_view(file: Path) -> View:
    text = file.read_text(encoding="utf-8")
    example = next((line for line in text.splitlines() if line.startswith("-- example: ")), "")
    return View(file.stem, text, example.removeprefix("-- example: "))


def _create_views(connection: duckdb.DuckDBPyConnection) -> None:
    """Create the views, those that others read first."""
    import duckdb

    waiting = list(views())
    while waiting:
        later = []
        for view in waiting:
            try:
                connection.execute(view.sql)
            except duckdb.CatalogException:
                later.append(view)
        if len(later) == len(waiting):
            connection.execute(later[0].sql)
        waiting = later


make_callable(__name__)
