"""`xmem query`: runs one SELECT over the store's tables and views."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from xmem.cli.options import json_option, print_text, store_option, terminal_width
from xmem.cli.output import check_target, iterate_rows, write_rows
from xmem.errors import UsageError
from xmem.render import csv_rows, json_rows, make_inert, table_text

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pyarrow as pa


@click.command()
@click.argument("sql", required=False)
@click.option("-f", "--file", "sql_file", metavar="FILE", help="Read the SQL from a file.")
@store_option
@json_option
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV.")
@click.option("-o", "--output", metavar="FILE", help="Write the rows to FILE.parquet, .csv or .json.")
@click.option("--force", is_flag=True, help="Replace the output file where there is one.")
@click.option(
    "--rows", "most_rows", type=click.IntRange(min=0), default=200, help="Rows to print as a table; 0 prints all."
)
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(min=0.001), default=60.0, help="Seconds that it may take."
)
def command(
    sql: str | None, sql_file: str | None, as_json: bool, as_csv: bool, output: str | None, **options: Any
) -> None:
    """Run one SELECT over the store's tables and views.

    \b
    xmem query "SELECT category, sum(bytes) FROM allocations GROUP BY category"
    xmem query - < question.sql

    `xmem schema` lists tables, views and columns. The query reads the store and nothing else.
    """
    from xmem.query import query_arrow

    if as_json and as_csv:
        raise click.UsageError("--json and --csv exclude each other.")
    text = _sql_text(sql, sql_file)
    if output is not None:
        check_target(Path(output), force=options["force"])
    table = query_arrow(text, store=options["store"], timeout_s=options["timeout_s"])
    if output is not None:
        write_rows(table, Path(output))
        click.echo(f"{table.num_rows:,} rows written to {make_inert(output)}", err=True)
    elif as_json:
        _print_pieces(json_rows(table.column_names, iterate_rows(table)))
    elif as_csv:
        _print_pieces(csv_rows(table.column_names, iterate_rows(table), inert=sys.stdout.isatty()))
    else:
        _print_table(table, options["most_rows"])


def _sql_text(sql: str | None, sql_file: str | None) -> str:
    if (sql is None) == (sql_file is None):
        raise click.UsageError("Give the SQL as one argument, as - for standard input, or with -f FILE.")
    if sql_file is None:
        assert sql is not None
        return sys.stdin.read() if sql == "-" else sql
    try:
        return Path(sql_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UsageError(f"The SQL file {sql_file!r} cannot be read: {reason}.", "Check the path.") from error


def _print_pieces(pieces: Iterable[str]) -> None:
    for piece in pieces:
        click.echo(piece, nl=False)


def _print_table(table: pa.Table, most_rows: int) -> None:
    shown = table.slice(0, most_rows) if most_rows else table
    print_text(table_text(shown.column_names, iterate_rows(shown), width=terminal_width()))
    if shown.num_rows < table.num_rows:
        left_out = table.num_rows - shown.num_rows
        click.echo(f"({left_out:,} more rows; --rows 0, --csv, --json and -o give all)", err=True)
