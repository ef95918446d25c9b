"""`xmem inspect`: says what a file is without ingesting it."""

from __future__ import annotations

import click

from xmem.cli.options import json_option, print_text
from xmem.render import json_text
from xmem.render_ingest import inspection_text


@click.command()
@click.argument("file", metavar="FILE")
@json_option
def command(file: str, as_json: bool) -> None:
    """Say in a second or two what a file is, without storing anything.

    Kind, torch version, entries, time range, ring buffer or not, ranks, devices, and which switches of the
    recording were off.
    """
    from xmem.ingest.inspect import inspect

    inspection = inspect(file)
    print_text(json_text(inspection) if as_json else inspection_text(inspection))
