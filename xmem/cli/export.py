"""`xmem export`: memory for Perfetto, speedscope, flame graph tools, Arrow and Parquet."""

from __future__ import annotations

import gzip
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from xmem.cli.options import print_text, store_option
from xmem.render import json_text

if TYPE_CHECKING:
    from typing import BinaryIO

FORMATS = {
    "perfetto": "Counter tracks as Chrome trace JSON, on the clock of the original trace.",
    "speedscope": "Profiles weighted by bytes: at the peak, in total, at the end.",
    "collapsed": "Stacks weighted by bytes for flame graph tools: outer;inner BYTES.",
    "arrow": "Rows of a table or view as an Arrow IPC file.",
    "parquet": "Rows of a table or view as a Parquet file.",
}


def _format_options(function: Any) -> Any:
    for name, text in reversed(FORMATS.items()):
        function = click.option(f"--{name}", "form", flag_value=name, help=text)(function)
    return function


@click.command()
@click.argument("run", required=False)
@_format_options
@click.option(
    "-o", "--output", metavar="FILE", default="-", help="File to write; .gz packs text; - is standard output."
)
@store_option
@click.option("--rank", type=int, help="Rank to export.  [default: the one with the highest peak]")
@click.option("--device", metavar="NAME", help="Device to export: cuda:0, cpu.  [default: highest peak]")
@click.option("--weight", type=click.Choice(["peak", "total", "end"]), default="peak", help="Bytes of --collapsed.")
@click.option("--table", default="allocations", help="Table or view of --arrow and --parquet.")
@click.option("--force", is_flag=True, help="Replace the output file where there is one.")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON; needs -o.")
def command(run: str | None, form: str | None, output: str, as_json: bool, **options: Any) -> None:
    """Write a run's memory (the newest, where no RUN is named) in the format of another tool.

    \b
    xmem export --perfetto -o counters.json.gz     for ui.perfetto.dev
    xmem export --speedscope -o memory.speedscope.json
    xmem export --collapsed | flamegraph.pl --countname bytes > memory.svg
    xmem export --arrow --table timeline -o timeline.arrow
    """
    from xmem.errors import RefusedError, UsageError

    if form is None:
        raise click.UsageError(f"Name a format: {', '.join('--' + name for name in FORMATS)}.")
    if as_json and output == "-":
        raise click.UsageError("--json tells of a file that was written: name one with -o.")
    if output != "-" and Path(output).exists() and not options["force"]:
        raise RefusedError(f"The output file {output!r} exists already.", "--force replaces it.")
    if output == "-" and form in ("arrow", "parquet") and sys.stdout.isatty():
        raise UsageError(f"--{form} is not for a terminal.", "Name a file with -o.")
    pieces = _pieces(form, run, options)
    first = next(pieces, b"")  # what is wrong is said before a file is made
    _write(output, first, pieces)
    if as_json:
        print_text(json_text({"file": output, "format": form, "bytes": Path(output).stat().st_size}))


def _pieces(form: str, run: str | None, options: dict[str, Any]) -> Iterator[bytes]:
    from xmem.query import exchange

    chosen = {"store": options["store"], "rank": options["rank"], "device": options["device"]}
    if form == "perfetto":
        return _encoded(exchange.perfetto(run, **chosen))
    if form == "collapsed":
        return _encoded(exchange.collapsed(run, **chosen, weight=options["weight"]))
    if form == "speedscope":
        return _encoded([json_text(exchange.speedscope(run, **chosen))])
    return iter([_packed(form, exchange.arrow(options["table"], run, store=options["store"]))])


def _encoded(texts: Iterable[str]) -> Iterator[bytes]:
    for text in texts:
        yield text.encode("utf-8", "replace")


def _packed(form: str, table: Any) -> bytes:
    import io

    buffer = io.BytesIO()
    if form == "arrow":
        import pyarrow as pa

        with pa.ipc.new_file(buffer, table.schema) as writer:
            writer.write_table(table)
    else:
        import pyarrow.parquet as pq

        pq.write_table(table, buffer, compression="zstd")
    return buffer.getvalue()


def _write(output: str, first: bytes, pieces: Iterator[bytes]) -> None:
    import os
    import uuid

    from xmem.errors import RefusedError

    if output == "-":
        _write_all(sys.stdout.buffer, first, pieces)
        return
    target = Path(output)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        with gzip.open(temporary, "wb", 6) if target.suffix == ".gz" else temporary.open("wb") as file:
            _write_all(file, first, pieces)  # type: ignore[arg-type]
        os.replace(temporary, target)
    except OSError as error:
        reason = error.strerror or str(error)
        raise RefusedError(f"The output file {output!r} cannot be written: {reason}.", "Name another.") from error
    finally:
        temporary.unlink(missing_ok=True)


def _write_all(file: BinaryIO, first: bytes, pieces: Iterator[bytes]) -> None:
    file.write(first)
    for piece in pieces:
        file.write(piece)
