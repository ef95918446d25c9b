"""`xmem gpus`: lists the GPUs that --gpu knows by name."""

from __future__ import annotations

import click

from xmem.cli.options import json_option, print_text, terminal_width
from xmem.render import json_text, table_text
from xmem.units import format_bytes


@click.command()
@click.argument("text", required=False)
@json_option
def command(text: str | None, as_json: bool) -> None:
    """List the GPUs that --gpu knows by name.

    TEXT keeps those whose name holds it. Bytes are what torch reports as total memory; one name can have several
    figures (driver, ECC, Windows), and --gpu takes the least.
    """
    from xmem.simulate import gpus

    wanted = (text or "").lower()
    found = [gpu for gpu in gpus() if wanted in " ".join((gpu.name, *gpu.aliases)).lower()]
    if as_json:
        print_text(json_text(found))
        return
    if not found:
        click.echo(f"no GPU's name holds {text!r}; --gpu also takes a size, such as 23.6GiB", err=True)
        return
    rows = [
        (
            gpu.name,
            ", ".join(gpu.aliases),
            format_bytes(gpu.bytes),
            gpu.bytes,
            min(gpu.figures, key=lambda figure: figure.bytes).source,
        )
        for gpu in found
    ]
    print_text(table_text(("name", "also", "memory", "bytes", "source"), rows, width=terminal_width(), wrap=True))
