"""Options that several commands share, and the types of their values."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click

from xmem.errors import XmemError
from xmem.render import make_inert

Function = TypeVar("Function", bound=Callable[..., Any])


def store_option(function: Function) -> Function:
    """Add `--store`."""
    return click.option(
        "--store",
        metavar="FOLDER",
        envvar="XMEM_STORE",
        help="Store folder.  [default: .xmem in the working directory; env: XMEM_STORE]",
    )(function)


def json_option(function: Function) -> Function:
    """Add `--json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON; keys are only ever added.")(function)


def verbosity_options(function: Function) -> Function:
    """Add `-q` and `-v`."""
    quiet = click.option("-q", "--quiet", is_flag=True, help="Say nothing on standard error but errors.")
    verbose = click.option("-v", "--verbose", is_flag=True, help="Say more.")
    return quiet(verbose(function))


def print_text(text: str) -> None:
    """Print a result with one line end after it."""
    click.echo(text.rstrip("\n"))


def print_error(error: XmemError) -> None:
    """Print what failed and what to do on standard error."""
    click.echo(f"error: {make_inert(error.message)}", err=True)
    if error.hint:
        click.echo(f"hint: {make_inert(error.hint)}", err=True)


def terminal_width() -> int | None:
    """Return the width to fit tables into; None where the output is not a terminal."""
    return shutil.get_terminal_size((100, 24)).columns if sys.stdout.isatty() else None
