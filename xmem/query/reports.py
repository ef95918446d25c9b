"""Named reports: one SQL file each, about one device of one rank of one run."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xmem import fence
from xmem.errors import UsageError
from xmem.query import connect
from xmem.query.subject import Subject, find_subject

if TYPE_CHECKING:
    import duckdb
    import pandas as pd  # type: ignore[import-untyped]
    import polars as pl
    import pyarrow as pa

ENVIRONMENT_VARIABLE = "XMEM_REPORTS"
DEFAULT_TOP = 15
#: What a report's SQL may ask for.
PARAMETERS = {
    "run": "id of the run",
    "rank": "rank",
    "device_type": "device type, such as cuda",
    "device_index": "device index, -1 for the CPU",
    "top": "how many rows are wanted (--top)",
}


@dataclass(frozen=True)
class ReportFile:
    """A report that can be asked for: its name, help and SQL."""

    name: str
    help: str
    sql: str


@dataclass(frozen=True)
class ReportOptions:
    """What a report is about, and how long it may be."""

    rank: int | None = None
    device: str | None = None
    top: int = DEFAULT_TOP
    folder: str | Path | None = None


@dataclass(frozen=True)
class Report:
    """Rows of a report, and what they are about."""

    name: str
    help: str
    subject: Subject
    table: pa.Table

    @property
    def columns(self) -> list[str]:
        """Names of the columns."""
        names: list[str] = self.table.column_names
        return names

    def rows(self) -> list[tuple[Any, ...]]:
        """Return the rows as tuples."""
        columns = [column.to_pylist() for column in self.table.columns]
        return list(zip(*columns, strict=True)) if columns else []

    def arrow(self) -> pa.Table:
        """Return the rows as an Arrow table."""
        return self.table

    def pl(self) -> pl.DataFrame:
        """Return the rows as a polars frame."""
        import polars as pl

        frame = pl.from_arrow(self.table)
        assert isinstance(frame, pl.DataFrame)
        return frame

    def df(self) -> pd.DataFrame:
        """Return the rows as a pandas frame (pandas must be installed)."""
        return self.table.to_pandas()


def reports(folder: str | Path | None = None) -> tuple[ReportFile, ...]:
    """Return the built-in reports, and those of `folder` or XMEM_REPORTS, which may replace them."""
    found = {file.stem: _read(file) for file in sorted((Path(__file__).parent / "reports").glob("*.sql"))}
    own = folder or os.environ.get(ENVIRONMENT_VARIABLE)
    if own:
        if not Path(own).is_dir():
            raise UsageError(
                f"The folder of reports {str(own)!r} is not there.", "Give --reports a folder of .sql files."
            )
        found |= {file.stem: _read(file) for file in sorted(Path(own).glob("*.sql"))}
    return tuple(found.values())


def report(
    name: str = "summary",
    run: str | None = None,
    *,
    store: str | Path | None = None,
    options: ReportOptions | None = None,
) -> Report:
    """Run a named report on a run (the newest, where none is named).

    Raises UsageError for a name, run, rank or device that is not there.
    """
    options = options or ReportOptions()
    chosen = find_report(name, options.folder)
    connection = connect(store)
    subject = find_subject(connection, store, run, options.rank, options.device)
    return run_report(connection, chosen, subject, options.top)


def find_report(name: str, folder: str | Path | None = None) -> ReportFile:
    """Return a report by its name."""
    listed = reports(folder)
    found = next((one for one in listed if one.name == name), None)
    if found is None:
        raise UsageError(f"There is no report {name!r}.", f"Reports: {', '.join(one.name for one in listed)}")
    return found


def run_report(
    connection: duckdb.DuckDBPyConnection, chosen: ReportFile, subject: Subject, top: int = DEFAULT_TOP
) -> Report:
    """Run a report on a fenced connection; values reach its SQL as prepared parameters only."""
    import duckdb

    values = {**subject.parameters, "top": top}
    wanted = duckdb.extract_statements(fence.check_select(chosen.sql))[0].named_parameters
    unknown = sorted(set(wanted) - set(values))
    if unknown:
        raise UsageError(
            f"The report {chosen.name!r} asks for ${', $'.join(unknown)}.",
            f"A report may use {', '.join('$' + name for name in PARAMETERS)}.",
        )
    table = fence.run_select(connection, chosen.sql, parameters={name: values[name] for name in wanted})
    return Report(chosen.name, chosen.help, subject, table)


def _read(file: Path) -> ReportFile:
    try:
        sql = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"The report {str(file)!r} cannot be read: {error}.", "A report is one SQL file in UTF-8."
        ) from error
    first = sql.lstrip().split("\n", 1)[0]
    return ReportFile(file.stem, first.removeprefix("--").strip() if first.startswith("--") else "", sql)
