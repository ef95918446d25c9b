"""A store: a folder of Hive-partitioned Parquet tables, written atomically run by run and opened as DuckDB."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from xmem.disk import disk_errors, fsync
from xmem.errors import UnreadableError, UsageError
from xmem.schema import INGEST_TABLES, SCHEMA_VERSION, SIMULATION_TABLES, arrow_schema, ddl, tables

if TYPE_CHECKING:
    import duckdb
    import polars as pl
    import pyarrow as pa
    import pyarrow.parquet as pq

DEFAULT_FOLDER = ".xmem"
ENVIRONMENT_VARIABLE = "XMEM_STORE"
_MARKER = "xmem-store.json"
_STAGING = ".staging"
_JOURNALS = ".commits"
_PARTITIONED = (*INGEST_TABLES, *SIMULATION_TABLES)


@dataclass(frozen=True)
class Run:
    """A run in the store; `ranks` ascending, `sources` the SHA-256 of each rank's file."""

    run_id: str
    name: str
    ranks: tuple[int, ...]
    adapter: str
    torch_version: str | None
    ingested_ns: int
    event_count: int
    memory_event_count: int
    sources: tuple[str, ...]


def store_path(path: str | Path | None = None) -> Path:
    """Return the store's folder: the argument, else XMEM_STORE, else `.xmem` in the working directory."""
    return Path(path or os.environ.get(ENVIRONMENT_VARIABLE) or DEFAULT_FOLDER)


class Store:
    """One store folder. Readers see committed runs only; a killed writer leaves what was there."""

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = store_path(path)
        self._recover()

    # ------------------------------------------------------------------ reading

    def runs(self) -> list[Run]:
        """Return committed runs, oldest first; an absent or empty store has none."""
        files = self._files("runs")
        if not files:
            return []
        import pyarrow.parquet as pq

        found: dict[str, list[dict[str, object]]] = {}
        for file in files:
            row = _read_first_row(pq, file)
            row["rank"] = int(file.parent.name.partition("=")[2])
            found.setdefault(file.parent.parent.name.partition("=")[2], []).append(row)
        return sorted(
            (_run(run_id, rows) for run_id, rows in found.items()), key=lambda run: (run.ingested_ns, run.run_id)
        )

    def find_run(self, text: str | None = None) -> Run:
        """Return the run with this id, unique prefix of an id, or name; the newest where `text` is None.

        Raises UsageError where there is none or where the text fits several.
        """
        runs = self.runs()
        if not runs:
            raise UsageError(f"There is no run yet in the store {str(self.path)!r}.", "Make one: xmem ingest FILE")
        if text is None:
            return runs[-1]
        exact = [run for run in runs if run.run_id == text]
        named = (
            exact or [run for run in runs if run.name == text] or [run for run in runs if run.run_id.startswith(text)]
        )
        if len(named) == 1:
            return named[0]
        listing = ", ".join(f"{run.run_id} ({run.name})" for run in (named or runs)[-8:])
        if named:
            raise UsageError(f"{text!r} fits {len(named)} runs.", f"Name one by its id: {listing}")
        raise UsageError(f"There is no run {text!r} in the store {str(self.path)!r}.", f"Runs there: {listing}")

    def connect(self) -> duckdb.DuckDBPyConnection:
        """Open an in-memory DuckDB connection with one view for each table of the schema over committed runs."""
        import duckdb

        connection = duckdb.connect()
        connection.execute("SET enable_progress_bar = false")  # it would print into results
        connection.execute(ddl())
        committed = {folder.name for folder in self._run_folders("runs")}
        for table in _PARTITIONED:
            files = self._files(table, committed)
            if files:
                connection.execute(f'DROP TABLE "{table}"')
                connection.execute(_view_sql(connection, table, files))
                _copy_comments(connection, table)
        return connection

    def folders(self) -> list[Path]:
        """Return the folders that a reader of this store needs, for a fenced connection."""
        return [self.path / table for table in _PARTITIONED]

    # ------------------------------------------------------------------ writing

    @contextmanager
    def writer(self, run_id: str) -> Iterator[RunWriter]:
        """Stage a run; it is committed by `commit` and thrown away if the block ends without it."""
        writer = RunWriter(self, run_id)
        try:
            with disk_errors(self.path):
                yield writer
        finally:
            writer.discard()

    def write_table(self, table: str, run_id: str, rank: int, part: str, frame: pl.DataFrame) -> Path:
        """Write one file of a table beside committed ones, atomically (simulations; `part` is its stem)."""
        folder = self.path / table / f"run_id={run_id}" / f"rank={rank}"
        with disk_errors(self.path):
            self._create()
            folder.mkdir(parents=True, exist_ok=True)
            temporary = self.path / _STAGING / f"{uuid.uuid4().hex}.parquet"
            temporary.parent.mkdir(exist_ok=True)
            try:
                import pyarrow.parquet as pq

                pq.write_table(_conform(table, frame, arrow_schema(table)), temporary, compression="zstd")
                fsync(temporary)
                os.replace(temporary, folder / f"{part}.parquet")
                fsync(folder)
            finally:
                temporary.unlink(missing_ok=True)
        return folder / f"{part}.parquet"

    def remove(self, run_id: str) -> None:
        """Remove a run and its simulations."""
        with disk_errors(self.path), self._lock():
            for table in ("runs", *_PARTITIONED):
                shutil.rmtree(self.path / table / f"run_id={run_id}", ignore_errors=True)

    # ------------------------------------------------------------------ inside

    def _create(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        marker = self.path / _MARKER
        if not marker.exists():
            temporary = self.path / f"{_MARKER}.{uuid.uuid4().hex}"
            temporary.write_text(json.dumps({"xmem_store": SCHEMA_VERSION}) + "\n")
            os.replace(temporary, marker)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        with open(self.path / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _recover(self) -> None:
        """Finish commits that a killed process left half-way: their journal says what remains to be renamed."""
        journals = self.path / _JOURNALS
        if not journals.is_dir() or not any(journals.iterdir()):
            return
        with disk_errors(self.path), self._lock():
            for journal in sorted(journals.glob("*.json")):
                _roll_forward(self.path, journal)

    def _run_folders(self, table: str) -> list[Path]:
        return sorted(folder for folder in (self.path / table).glob("run_id=*") if folder.is_dir())

    def _files(self, table: str, committed: set[str] | None = None) -> list[Path]:
        folders = [folder for folder in self._run_folders(table) if committed is None or folder.name in committed]
        return [file for folder in folders for file in sorted(folder.glob("rank=*/*.parquet"))]


class RunWriter:
    """Collects the tables of one run in a staging folder and renames them into the store."""

    def __init__(self, store: Store, run_id: str) -> None:
        self._store = store
        self._run_id = run_id
        self._id = uuid.uuid4().hex
        self._open: dict[tuple[str, int, int], pq.ParquetWriter] = {}
        self._made_store = not store.path.exists()
        with disk_errors(store.path):
            store._create()
            self.folder = store.path / _STAGING / self._id
            self.folder.mkdir(parents=True)
        _drop_abandoned(store.path / _STAGING)

    def write(self, table: str, rank: int, frame: pl.DataFrame, part: int = 0) -> None:
        """Append rows to a table of this run as one row group; columns that are absent become null.

        Each `part` is a file of its own: different threads may write different parts.
        """
        if frame.height == 0:
            return
        key = (table, rank, part)
        if key not in self._open:
            import pyarrow.parquet as pq

            folder = self.folder / table / f"rank={rank}"
            folder.mkdir(parents=True, exist_ok=True)
            schema = _file_schema(table, frame).with_metadata({"xmem_schema_version": str(SCHEMA_VERSION)})
            words = [field.name for field in arrow_schema(table) if str(field.type) == "string"]
            numbers = [field.name for field in schema if str(field.type) in ("int32", "int64", "uint64")]
            self._open[key] = pq.ParquetWriter(
                folder / f"part-{part:05d}.parquet",
                schema,
                compression="zstd",
                store_schema=False,  # what is a dictionary here is plain text for readers
                use_dictionary=words,
                column_encoding=dict.fromkeys(numbers, "DELTA_BINARY_PACKED"),  # a third faster, no larger
            )
        writer = self._open[key]
        writer.write_table(_conform(table, frame, writer.schema))

    def commit(self, run_id: str | None = None) -> None:
        """Make the run visible, replacing an older form of it; after a kill it is finished by the next opening.

        `run_id` names it where that was not known when the writer was made.
        """
        self._run_id = run_id or self._run_id
        staged = sorted({table for table, _, _ in self._open})
        for writer in self._open.values():
            writer.close()
        self._open.clear()
        for file in sorted(self.folder.rglob("*")):
            fsync(file)
        journals = self._store.path / _JOURNALS
        journals.mkdir(exist_ok=True)
        with self._store._lock():
            journal = journals / f"{self._id}.json"
            temporary = self.folder / "journal"
            temporary.write_text(json.dumps({"run_id": self._run_id, "staged": self._id, "tables": staged}))
            fsync(temporary)
            os.replace(temporary, journal)
            fsync(journals)
            _roll_forward(self._store.path, journal)

    def discard(self) -> None:
        """Close and remove whatever is still staged."""
        for writer in self._open.values():
            try:
                writer.close()
            except OSError:  # a full disk: the file goes away just below
                continue
        self._open.clear()
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._made_store:
            _remove_if_unused(self._store.path)


def _remove_if_unused(root: Path) -> None:
    """Remove a store that holds nothing but its marker: a first ingest that failed leaves no trace."""
    with suppress(OSError):  # another writer is at work in it
        (root / _STAGING).rmdir()
        if [file.name for file in root.iterdir()] == [_MARKER]:
            shutil.rmtree(root)


def _roll_forward(root: Path, journal: Path) -> None:
    """Do the renames that a journal names; doing it twice does no harm. `runs` comes last."""
    plan = json.loads(journal.read_text())
    staged, partition = root / _STAGING / plan["staged"], f"run_id={plan['run_id']}"
    trash = root / _STAGING / f"{plan['staged']}-old"
    for table in (*SIMULATION_TABLES, *INGEST_TABLES):
        source, target = staged / table, root / table / partition
        done = table in plan["tables"] and not source.exists()
        if done:
            continue
        if target.exists():
            trash.mkdir(parents=True, exist_ok=True)
            os.replace(target, trash / f"{table}-{uuid.uuid4().hex}")
        if table in plan["tables"]:
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(source, target)
            fsync(target.parent)
    journal.unlink()
    shutil.rmtree(trash, ignore_errors=True)
    shutil.rmtree(staged, ignore_errors=True)


def _drop_abandoned(staging: Path, older_than_s: float = 86_400) -> None:
    """Remove staging folders that killed ingests left a day ago or earlier."""
    for folder in staging.iterdir():
        try:
            if time.time() - folder.stat().st_mtime > older_than_s:
                shutil.rmtree(folder, ignore_errors=True)
        except FileNotFoundError:
            continue


def _file_schema(table: str, frame: pl.DataFrame) -> pa.Schema:
    """Return the Arrow schema of a table with text in the form in which polars has it: writing is twice as fast."""
    import polars as pl
    import pyarrow as pa

    word, text = pa.dictionary(pa.uint32(), pa.large_string()), pa.large_string()
    schema = arrow_schema(table)
    for index, field in enumerate(schema):
        if str(field.type) == "string":
            schema = schema.set(
                index, field.with_type(word if frame.schema.get(field.name) == pl.Categorical else text)
            )
    return schema


def _conform(table: str, frame: pl.DataFrame, schema: pa.Schema) -> pa.Table:
    """Bring a frame into an Arrow schema: order, types, nulls for absent columns; raises where there must be none."""
    import polars as pl
    import pyarrow as pa

    unknown = set(frame.columns) - set(schema.names)
    if unknown:
        raise AssertionError(f"table {table} has no column {', '.join(sorted(unknown))}")
    words = [field.name for field in schema if pa.types.is_dictionary(field.type) and field.name in frame.columns]
    arrow = frame.with_columns(pl.col(words).cast(pl.Categorical)).to_arrow(compat_level=pl.CompatLevel.oldest())
    columns = []
    for field in schema:
        there = field.name in frame.columns
        column = arrow.column(field.name) if there else pa.chunked_array([pa.nulls(frame.height, field.type)])
        if column.null_count and not field.nullable:
            raise AssertionError(f"{table}.{field.name} must not be null")
        columns.append(column if column.type == field.type else column.cast(field.type))
    return pa.Table.from_arrays(columns, schema=schema)


def _run(run_id: str, rows: list[dict[str, object]]) -> Run:
    rows = sorted(rows, key=lambda row: int(str(row["rank"])))
    first = rows[0]
    return Run(
        run_id=run_id,
        name=str(first["name"]),
        ranks=tuple(int(str(row["rank"])) for row in rows),
        adapter=str(first["adapter"]),
        torch_version=None if first["torch_version"] is None else str(first["torch_version"]),
        ingested_ns=max(int(str(row["ingested_ns"])) for row in rows),
        event_count=sum(int(str(row["event_count"])) for row in rows),
        memory_event_count=sum(int(str(row["memory_event_count"])) for row in rows),
        sources=tuple(str(row["source_sha256"]) for row in rows),
    )


def _read_first_row(parquet: object, file: Path) -> dict[str, object]:
    try:
        rows: list[dict[str, object]] = parquet.ParquetFile(file).read().to_pylist()  # type: ignore[attr-defined]
        return rows[0]
    except (OSError, ValueError, IndexError) as error:
        raise UnreadableError(
            f"The store's file {str(file)!r} is damaged: {error}",
            "Remove its run_id folder and ingest the trace again.",
        ) from error


def _view_sql(connection: duckdb.DuckDBPyConnection, table: str, files: list[Path]) -> str:
    """A view over a table's files; a column that an older file lacks is null there."""
    listed = ", ".join("'" + _literal_glob(str(file)).replace("'", "''") + "'" for file in files)
    source = (
        f"read_parquet([{listed}], hive_partitioning=true,"
        " hive_types={'run_id': VARCHAR, 'rank': INTEGER}, union_by_name=true)"
    )
    present = set(connection.sql(f"SELECT * FROM {source} LIMIT 0").columns)
    columns = ", ".join(
        f"CAST({_quoted(column.name) if column.name in present else 'NULL'} AS {column.type}) AS {_quoted(column.name)}"
        for column in tables()[table].columns
    )
    return f"CREATE VIEW {_quoted(table)} AS SELECT {columns} FROM {source}"


def _quoted(name: str) -> str:
    return f'"{name}"'


def _literal_glob(path: str) -> str:
    """DuckDB reads `*`, `?` and `[` in a path as a pattern; in brackets they stand for themselves."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in path)


def _copy_comments(connection: duckdb.DuckDBPyConnection, table: str) -> None:
    description = tables()[table]
    connection.execute(f"COMMENT ON VIEW \"{table}\" IS '{description.comment.replace(chr(39), chr(39) * 2)}'")
    for column in description.columns:
        text = column.comment.replace("'", "''")
        connection.execute(f'COMMENT ON COLUMN "{table}"."{column.name}" IS \'{text}\'')
