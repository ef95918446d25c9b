"""Holds the batches of one source until all are there: in memory while they are small, on disk from there on."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from xmem.errors import UnreadableError
from xmem.ingest.adapter import LATE_STACKS
from xmem.schema import layout

if TYPE_CHECKING:
    import polars as pl

#: Bytes of batches that stay in memory.
MEMORY_BYTES = 96 << 20

#: Columns of few distinct words, held as categoricals.
WORDS = ("action", "device_type", "pool_id", "phase", "category", "kind", "name", "segment_type", "state")
#: Columns of a batch that the schema does not have: order within equal times, process of a thread.
_EXTRA = {"events": {"order_key": "BIGINT", "process_id": "BIGINT"}, LATE_STACKS: {"stack_id": "BIGINT"}}
#: Columns that adapters may yield and nothing needs.
_UNUSED = {"events": ("process_id",)}


class Spool:
    """Batches by table, in source order; `frames` may be asked for any number of times."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / f"spool-{uuid.uuid4().hex}"
        self._kept: dict[str, list[pl.DataFrame | Path]] = {}
        self._rows: dict[str, int] = {}
        self._bytes = 0

    def take(self, table: str, columns: pl.DataFrame) -> pl.DataFrame | None:
        """Keep a batch in the types of its table and return it; None where it has no rows."""
        if columns.height == 0:
            return None
        frame = in_types_of(table, columns).drop(_UNUSED.get(table, ()), strict=False)
        self._kept.setdefault(table, []).append(frame)
        self._rows[table] = self._rows.get(table, 0) + frame.height
        self._bytes += int(frame.estimated_size())
        if self._bytes > MEMORY_BYTES:
            self._to_disk()
        return frame

    def rows(self, table: str) -> int:
        """Number of rows of a table."""
        return self._rows.get(table, 0)

    def frames(self, table: str) -> Iterator[pl.DataFrame]:
        """Yield the batches of a table in order."""
        for kept in self._kept.get(table, []):
            yield self._load(kept)

    def take_all(self, table: str) -> pl.DataFrame:
        """Return all rows of a table as one frame and let go of them."""
        import polars as pl

        frames = [self._load(kept) for kept in self._kept.pop(table, [])]
        return pl.concat(frames, how="diagonal_relaxed") if frames else empty_frame(table)

    def settle(self) -> None:
        """Put the rest on disk too where a part of it is there: the source is large."""
        if self._folder.exists():
            self._to_disk()

    def discard(self) -> None:
        """Let go of everything, on disk too."""
        self._kept.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _load(self, kept: pl.DataFrame | Path) -> pl.DataFrame:
        import polars as pl

        return pl.read_ipc_stream(kept) if isinstance(kept, Path) else kept

    def _to_disk(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        for table, batches in self._kept.items():
            for number, kept in enumerate(batches):
                if not isinstance(kept, Path):
                    file = self._folder / f"{table}-{number}.arrow"
                    kept.write_ipc_stream(file)
                    batches[number] = file
        self._bytes = 0


def in_types_of(table: str, columns: pl.DataFrame) -> pl.DataFrame:
    """Bring a batch into the column types of its table; words become categoricals, absent columns stay absent."""
    import polars as pl

    types = column_types(table)
    unknown = [name for name in columns.columns if name not in types]
    if unknown:
        raise AssertionError(f"an adapter yielded {table} with unknown columns {', '.join(unknown)}")
    try:
        return columns.with_columns(
            pl.col(name).cast(types[name]) for name in columns.columns if columns.schema[name] != types[name]
        )
    except pl.exceptions.PolarsError as error:
        raise UnreadableError(f"A batch of {table} does not fit its columns: {error}") from error


def place_late(spool: Spool) -> pl.Expr:
    """Return the stack id of events whose stacks came later: those have -2, -3, ... for the first, second, ... row."""
    import polars as pl

    late = spool.take_all(LATE_STACKS)["stack_id"]
    own = pl.col("stack_id")
    if not len(late):
        return own
    place = pl.when(own < -1).then(-2 - own)
    return pl.when(own < -1).then(pl.lit(late).gather(place)).otherwise(own)


def empty_frame(table: str) -> pl.DataFrame:
    """Return a table without rows."""
    import polars as pl

    return pl.DataFrame(schema=column_types(table))


def complete(table: str, frame: pl.DataFrame) -> pl.DataFrame:
    """Add the columns that a frame of a table lacks, as nulls."""
    import polars as pl

    unused = _UNUSED.get(table, ())
    types = column_types(table).items()
    absent = {name: kind for name, kind in types if name not in frame.columns and name not in unused}
    return frame.with_columns(pl.lit(None, dtype=kind).alias(name) for name, kind in absent.items())


def column_types(table: str) -> dict[str, pl.DataType]:
    """Return the polars type of each column of a table as it is held in memory."""
    import polars as pl

    kinds: dict[str, pl.DataType] = {
        "BIGINT": pl.Int64(), "INTEGER": pl.Int32(), "UBIGINT": pl.UInt64(), "BOOLEAN": pl.Boolean(),
        "VARCHAR": pl.String(), "DOUBLE": pl.Float64(),
    }  # fmt: skip
    found: dict[str, pl.DataType] = {}
    for column in () if table == LATE_STACKS else layout()[table].columns:
        if column.name in ("run_id", "rank"):
            continue
        if column.type not in kinds:
            frame = pl.Struct({"name": pl.String, "filename": pl.String, "line": pl.Int32})
            found[column.name] = pl.List(frame)
        else:
            found[column.name] = pl.Categorical() if column.name in WORDS else kinds[column.type]
    found.update({name: kinds[kind] for name, kind in _EXTRA.get(table, {}).items()})
    return found
