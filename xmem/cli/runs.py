"""`xmem runs`: lists what the store holds."""

from __future__ import annotations

import datetime

import click

from xmem.cli.options import json_option, print_text, store_option, terminal_width
from xmem.render import json_text, table_text


@click.command()
@store_option
@json_option
def command(store: str | None, as_json: bool) -> None:
    """List the runs of the store, oldest first.

    Commands that take a RUN know it by its id, the start of its id, or its name; without one they take the newest.
    """
    from xmem.query import runs

    found = runs(store)
    if as_json:
        print_text(json_text(found))
        return
    if not found:
        click.echo("no runs yet; make one: xmem ingest FILE", err=True)
        return
    rows = [
        (run.run_id, run.name, run.adapter, run.torch_version or "unknown", len(run.ranks), run.event_count,
         _when(run.ingested_ns))
        for run in found
    ]  # fmt: skip
    columns = ("run_id", "name", "adapter", "torch", "ranks", "events", "ingested")
    print_text(table_text(columns, rows, width=terminal_width()))


def _when(time_ns: int) -> str:
    return datetime.datetime.fromtimestamp(time_ns // 10**9).isoformat(" ")
