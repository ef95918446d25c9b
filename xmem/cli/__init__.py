"""The command line: finds the verb, runs it, and turns errors into one sentence and an exit code."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click

from xmem.cli.options import print_error
from xmem.errors import XmemError
from xmem.version import __version__

#: Commands in the order of the help page; each is a module of this package that holds a click command `command`.
VERBS = (
    "ingest", "inspect", "runs", "simulate", "gpus", "query", "report", "diff", "export", "explain",
    "profile", "run", "estimate", "evaluate", "schema",
)  # fmt: skip

#: Modules that have another name than their verb: `run` is a function of this package.
MODULES = {"run": "run_script"}

EXIT_INTERNAL = 70
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

EPILOG = """\b
Exit codes: 0 fits, or done. 1 does not fit. 2 wrong use. 3 unreadable input. 4 refused.
Every option has an environment variable: XMEM_SIMULATE_GPU=24 stands for simulate --gpu 24.
"""


class VerbGroup(click.Group):
    """A group that imports a verb's module when the verb is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the verbs in order."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a verb."""
        if cmd_name not in VERBS:
            return None
        command: click.Command = importlib.import_module(f"xmem.cli.{MODULES.get(cmd_name, cmd_name)}").command
        _name_variables(cmd_name, command)
        return command

    def make_context(self, *args: Any, **options: Any) -> click.Context:
        """Parse; a reader of the help page that goes away early is no error."""
        with _quiet_pipe():
            return super().make_context(*args, **options)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the verb; a reader of the result that goes away early is no error."""
        if os.environ.get("NO_COLOR"):
            ctx.color = False
        with _quiet_pipe():
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result


def _name_variables(path: str, command: click.Command) -> None:
    """Give every option of a command, and of the commands under it, its environment variable."""
    for parameter in command.params:
        if parameter.envvar is None and isinstance(parameter, click.Option):
            parameter.envvar = _variable(path, parameter)
    for name, inner in command.commands.items() if isinstance(command, click.Group) else ():
        _name_variables(f"{path}_{name}", inner)


def _variable(verb: str, option: click.Option) -> str:
    """Return the environment variable that stands for an option: XMEM_SIMULATE_ALLOC_CONF."""
    longest = max(option.opts, key=len)
    return f"XMEM_{verb}_{longest.lstrip('-')}".replace("-", "_").upper()


@contextmanager
def _quiet_pipe() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        raise click.exceptions.Exit(EXIT_BROKEN_PIPE) from None


@click.group(
    cls=VerbGroup,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@click.version_option(__version__, prog_name="xmem", message="%(prog)s %(version)s")
def xmem_command() -> None:
    """Will this deep-learning job fit on that GPU? Ask its trace.

    \b
    xmem ingest trace.json.gz        read a torch.profiler trace, CUDA snapshot or memory timeline
    xmem simulate --gpu 24           replay it on a 24 GiB GPU: fits or not, and why
    xmem query "FROM peaks"          ask anything else in SQL
    """


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; no exception leaves here."""
    try:
        result = xmem_command.main(
            args=list(arguments) if arguments is not None else None, prog_name="xmem", standalone_mode=False
        )
        return result if isinstance(result, int) else 0
    except click.Abort:
        return EXIT_INTERRUPTED
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except XmemError as error:
        print_error(error)
        return error.exit_code
    except Exception as error:
        if os.environ.get("XMEM_DEBUG"):
            traceback.print_exc()
        told = f"xmem failed in a way that it should not: {type(error).__name__}: {error}"
        hint = "This is a fault of xmem, not of your input. XMEM_DEBUG=1 shows where it happened."
        print_error(XmemError(told, hint))
        return EXIT_INTERNAL


def main() -> None:
    """Run the command line and leave the process with its exit code."""
    sys.exit(run())
