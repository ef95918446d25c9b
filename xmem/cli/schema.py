"""`xmem schema`: describes tables, views, words and issue codes."""

from __future__ import annotations

import click

from xmem.cli.options import json_option, print_text, terminal_width
from xmem.errors import UsageError
from xmem.render import json_text, table_text
from xmem.schema import Table, enums, tables


@click.command()
@click.argument("name", required=False)
@json_option
def command(name: str | None, as_json: bool) -> None:
    """Describe tables and views, or the columns of one.

    NAME is a table, a view, or a type such as category, whose words are then listed.
    `xmem schema issue_codes` explains what reading a file can report.
    """
    from xmem.query import view_tables

    known = {**tables(), **view_tables()}
    if name is None:
        _print_all(known, as_json)
    elif name in known:
        _print_one(known[name], as_json)
    elif name in enums():
        words = enums()[name]
        print_text(json_text(words) if as_json else "\n".join(words))
    else:
        raise UsageError(
            f"There is no table, view or type {name!r}.", f"Known: {', '.join(sorted((*known, *enums())))}"
        )


def _print_all(known: dict[str, Table], as_json: bool) -> None:
    if as_json:
        print_text(json_text([known[name] for name in sorted(known)]))
        return
    rows = [(table.kind, table.name, table.comment) for table in known.values()]
    print_text(table_text(("kind", "name", "holds"), sorted(rows), width=terminal_width(), wrap=True))


def _print_one(table: Table, as_json: bool) -> None:
    if as_json:
        print_text(json_text(table))
        return
    rows = [(column.name, column.type, "null" if column.nullable else "", column.comment) for column in table.columns]
    listed = table_text(("column", "type", "may be", "meaning"), rows, width=terminal_width(), wrap=True)
    print_text(f"{table.name}: {table.comment}\n\n{listed}")
