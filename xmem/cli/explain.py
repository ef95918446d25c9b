"""`xmem explain`: reads a pasted out-of-memory message and says what its numbers mean."""

from __future__ import annotations

import sys

import click

from xmem.cli.options import json_option, print_text


@click.command()
@click.argument("message", required=False)
@click.option("-f", "--file", "file", metavar="FILE", help="Read the message, or a whole log, from a file.")
@json_option
def command(message: str | None, file: str | None, as_json: bool) -> None:
    """Say what the numbers of an out-of-memory message mean, and what to try.

    \b
    xmem explain "CUDA out of memory. Tried to allocate 250.00 MiB. GPU 0 has ..."
    xmem explain -f train.log
    python train.py 2>&1 | xmem explain -

    Any torch since 0.4; CUDA, HIP, XPU, MPS and CPU; noise around the message does no harm.
    """
    from xmem.query.oom_message import read_messages
    from xmem.render import json_text, make_inert
    from xmem.render_oom import oom_json, oom_text

    messages = read_messages(_text(message, file))
    if as_json:
        print_text(json_text(oom_json(messages)))
    else:
        print_text("\n".join(make_inert(line) for line in oom_text(messages).split("\n")))


def _text(message: str | None, file: str | None) -> str:
    from xmem.errors import UsageError

    if (message is None) == (file is None):
        raise click.UsageError("Give the message as one argument, as - for standard input, or with -f FILE.")
    if file is None:
        return sys.stdin.buffer.read().decode("utf-8", "replace") if message == "-" else str(message)
    try:
        with open(file, "rb") as opened:
            return opened.read().decode("utf-8", "replace")
    except OSError as error:
        raise UsageError(f"The file {file!r} cannot be read: {error.strerror}.", "Check the path.") from error
