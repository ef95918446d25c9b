"""Loads schemas/*.sql: tables, words and issue codes; everything that knows a column learns it here."""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

SCHEMA_VERSION = 1

#: The catalogue's connection serves one call at a time, and tables are written from several threads.
_LOCK = threading.Lock()
_COMMENT = re.compile(r"^COMMENT ON .*;$", re.MULTILINE)

#: Tables of holistic-trace-analysis, written with `--hta`.
HTA_TABLES = (
    "hta_temporal", "hta_kernel_types", "hta_kernels", "hta_idle_time", "hta_overlap", "hta_bandwidth",
    "hta_queue_length",
)  # fmt: skip
#: Tables that ingest writes, in the order in which a run is committed: `runs` last, it makes the rest visible.
INGEST_TABLES = ("events", "spans", "stacks", "segments", "blocks", *HTA_TABLES, "devices", "issues", "runs")
#: Tables that a simulation writes.
SIMULATION_TABLES = ("simulation_events", "simulation_segments", "simulations")


@dataclass(frozen=True)
class Column:
    """One column: its DuckDB type, whether it may be null, and its comment."""

    name: str
    type: str
    nullable: bool
    comment: str


@dataclass(frozen=True)
class Table:
    """One table or view: its comment and its columns in order; for a view an example of its use."""

    name: str
    comment: str
    columns: tuple[Column, ...]
    kind: str = "table"
    example: str = ""

    @property
    def column_names(self) -> tuple[str, ...]:
        """Names of the columns in order."""
        return tuple(column.name for column in self.columns)


@dataclass(frozen=True)
class IssueCode:
    """One kind of issue with its severity, meaning and advice."""

    code: str
    severity: str
    meaning: str
    advice: str


def schema_folder() -> Path:
    """Folder of the DDL: inside the installed package, else beside it in a checkout."""
    inside = Path(__file__).parent / "schemas"
    return inside if inside.is_dir() else Path(__file__).parent.parent / "schemas"


def ddl() -> str:
    """Return the whole DDL as one text, types first."""
    files = sorted(schema_folder().glob("*.sql"), key=lambda file: (file.name != "types.sql", file.name))
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


@cache
def _whole() -> duckdb.DuckDBPyConnection:
    """Return a database that has the tables with their comments."""
    return _database(ddl())


@cache
def _bare() -> duckdb.DuckDBPyConnection:
    """Return one without comments, which are most of the DDL's statements and take most of its time."""
    return _database(_COMMENT.sub("", ddl()))


def _database(sql: str) -> duckdb.DuckDBPyConnection:
    import duckdb

    connection = duckdb.connect(config={"threads": 1})  # hundreds of small statements: threads only cost here
    connection.execute(sql)
    return connection


def _catalogue() -> duckdb.DuckDBPyConnection:
    """Return the one that is there, else the one that is quickly made; to be called under the lock."""
    return _whole() if _whole.cache_info().currsize else _bare()


def _ask(sql: str) -> list[tuple[Any, ...]]:
    """Ask the catalogue; a connection serves one thread at a time."""
    with _LOCK:
        return _catalogue().execute(sql).fetchall()


@cache
def layout() -> dict[str, Table]:
    """Return every table of the schema by name, without comments: all that reading and writing need."""
    with _LOCK:
        return {table.name: table for table in describe(_bare(), "table")}


@cache
def tables() -> dict[str, Table]:
    """Return every table of the schema by name, with comments."""
    with _LOCK:
        return {table.name: table for table in describe(_whole(), "table")}


def describe(connection: duckdb.DuckDBPyConnection, kind: str) -> list[Table]:
    """Return what a connection knows as tables or (kind "view") as views, by name, with comments and columns."""
    rows = connection.execute(
        f"SELECT t.{kind}_name, coalesce(t.comment, ''), c.column_name, c.data_type, c.is_nullable,"
        f" coalesce(c.comment, '') FROM duckdb_{kind}s() t JOIN duckdb_columns() c ON c.table_oid = t.{kind}_oid"
        f" AND c.table_name = t.{kind}_name WHERE NOT t.internal ORDER BY t.{kind}_name, c.column_index"
    )
    found: dict[str, tuple[str, list[Column]]] = {}
    for name, comment, column, data_type, nullable, column_comment in rows.fetchall():
        found.setdefault(name, (comment, []))[1].append(Column(column, data_type, nullable, column_comment))
    return [Table(name, comment, tuple(columns), kind) for name, (comment, columns) in found.items()]


@cache
def enums() -> dict[str, tuple[str, ...]]:
    """Return the words of every type: `enums()["category"]`."""
    rows = _ask("SELECT type_name, labels FROM duckdb_types() WHERE NOT internal AND labels IS NOT NULL")
    return {name: tuple(labels) for name, labels in rows}


@cache
def enum_comments() -> dict[str, str]:
    """Return the comment of every type."""
    sql = "SELECT type_name, coalesce(comment, '') FROM duckdb_types() WHERE NOT internal AND labels IS NOT NULL"
    with _LOCK:
        return dict(_whole().execute(sql).fetchall())


@cache
def issue_codes() -> dict[str, IssueCode]:
    """Return every issue code by name."""
    rows = _ask("SELECT code, severity, meaning, advice FROM issue_codes")
    return {row[0]: IssueCode(*row) for row in rows}


@cache
def arrow_schema(table: str) -> pa.Schema:
    """Return the Arrow schema of a table, without the partition columns run_id and rank; NOT NULL is kept."""
    import pyarrow as pa

    with _LOCK:
        empty = _catalogue().sql(f'SELECT * EXCLUDE (run_id, rank) FROM "{table}"').to_arrow_table()
    known = tables() if tables.cache_info().currsize else layout()
    nullable = {column.name: column.nullable for column in known[table].columns}
    return pa.schema([field.with_nullable(nullable[field.name]) for field in empty.schema])
