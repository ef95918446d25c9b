"""Writes the rows of a query to a file: Parquet, CSV or JSON; whole or not at all."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from xmem.errors import RefusedError, UsageError
from xmem.render import csv_rows, json_rows

if TYPE_CHECKING:
    import pyarrow as pa


def check_target(target: Path, *, force: bool = False, suffixes: Sequence[str] = ()) -> None:
    """Raise where a file cannot be written there: before the query runs, not after.

    `suffixes` are the formats that the caller writes; rows of a query, where none are named.
    """
    if target.suffix.lower() not in (suffixes or _WRITERS):
        known = ", ".join(suffixes or _WRITERS)
        raise UsageError(f"The suffix of {str(target)!r} names no format that can be written.", f"Known: {known}")
    if target.is_dir():
        raise UsageError(f"The output file {str(target)!r} is a folder.", "Name a file in it.")
    if not target.parent.is_dir():
        raise UsageError(f"The folder {str(target.parent)!r} of the output file is not there.", "Make it first.")
    if target.exists() and not force:
        raise RefusedError(f"The output file {str(target)!r} exists already.", "--force replaces it.")


def write_rows(table: pa.Table, target: Path) -> None:
    """Write rows in the format of the target's suffix, under another name first."""
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        _WRITERS[target.suffix.lower()](table, temporary)
        os.replace(temporary, target)
    except OSError as error:
        reason = error.strerror or str(error)
        raise RefusedError(f"The output file {str(target)!r} cannot be written: {reason}.", "Name another.") from error
    finally:
        temporary.unlink(missing_ok=True)


def iterate_rows(table: pa.Table) -> Iterator[tuple[object, ...]]:
    """Yield the rows of an Arrow table as Python values, a batch at a time."""
    for batch in table.to_batches(max_chunksize=10_000):
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


def _write_parquet(table: pa.Table, path: Path) -> None:
    import pyarrow.parquet as pq

    pq.write_table(table, path, compression="zstd")


def _write_csv(table: pa.Table, path: Path) -> None:
    _write_pieces(csv_rows(table.column_names, iterate_rows(table)), path)


def _write_json(table: pa.Table, path: Path) -> None:
    _write_pieces(json_rows(table.column_names, iterate_rows(table)), path)


def _write_pieces(pieces: Iterable[str], path: Path) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        file.writelines(pieces)


_WRITERS: dict[str, Callable[[pa.Table, Path], None]] = {
    ".parquet": _write_parquet,
    ".csv": _write_csv,
    ".json": _write_json,
}
