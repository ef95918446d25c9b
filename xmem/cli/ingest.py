"""`xmem ingest`: reads traces into the store."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import click

from xmem.cli.options import json_option, print_error, print_text, store_option, verbosity_options
from xmem.cli.progress import progress_line
from xmem.errors import EXIT_OK, XmemError
from xmem.render import json_text, make_inert
from xmem.render_ingest import ingested_text, next_step

if TYPE_CHECKING:
    from xmem.ingest import Ingested, IngestOptions


class StepRange(click.ParamType["tuple[int, int]"]):
    """A step or a range of steps: 3 or 3-5, both ends included."""

    name = "A-B"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        """Turn the text into a pair of numbers."""
        match = re.fullmatch(r"(\d{1,18})(?:[-:](\d{1,18}))?", str(value))
        if match is None:
            self.fail(f"{value!r} is no step and no range of steps; write 3 or 3-5.", param, ctx)
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            self.fail(f"{value!r} ends before it begins.", param, ctx)
        return first, last


@click.command()
@click.argument("files", metavar="FILE...", nargs=-1, required=True)
@store_option
@click.option("--force", is_flag=True, help="Read a file again although the store has it.")
@click.option(
    "--strict", is_flag=True, help="End with exit code 3, storing nothing, where a file has anything to repair."
)
@click.option("--as-ranks", is_flag=True, help="The files are ranks of one run.")
@click.option("--rank", type=click.IntRange(min=0), metavar="N", help="Rank of the file, where it does not say.")
@click.option("--name", metavar="NAME", help="Readable name of the run.  [default: the file's]")
@click.option("--steps", type=StepRange(), help="Keep these steps only.")
@click.option(
    "--since", "since_ns", type=int, metavar="NS", help="Keep what happened from this time on (events.ts_ns)."
)
@click.option("--until", "until_ns", type=int, metavar="NS", help="Keep what happened up to this time (events.ts_ns).")
@click.option("--device", metavar="NAME", help="Keep this device only, such as cuda:0.")
@click.option("--no-stacks", is_flag=True, help="Leave call stacks out.")
@click.option("--no-spans", is_flag=True, help="Leave operators, modules and kernels out.")
@click.option("--hta", is_flag=True, help="Add holistic-trace-analysis' tables of a GPU trace.")
@json_option
@verbosity_options
def command(files: tuple[str, ...], as_json: bool, quiet: bool, verbose: bool, **options: Any) -> int:
    """Read traces into the store.

    FILE is a torch.profiler trace, a CUDA memory snapshot, a memory timeline or an xmem event log, gzip or not;
    its content decides, not its name. A folder is one run with ranks, - is standard input.
    """
    done: list[Ingested] = []
    code = EXIT_OK
    for group in [files] if options["as_ranks"] else [(file,) for file in files]:
        try:
            read = _ingest_group(group, quiet, options)
        except XmemError as error:  # the other files are still read
            print_error(error)
            code = code or error.exit_code
            continue
        if not as_json:
            print_text(ingested_text(read, verbose=verbose))
        done += read
    if as_json:
        print_text(json_text(done))
    elif done and not quiet:
        print_text(next_step(done[-1]))
    return code


def _ingest_group(group: tuple[str, ...], quiet: bool, options: dict[str, Any]) -> list[Ingested]:
    """Read what is one run, or one argument of the command line, and warn of what was odd in it."""
    from xmem.ingest import ingest

    with progress_line(quiet=quiet) as progress:
        read = ingest(group, options=_ingest_options(options, progress))
    for one in read:
        for warning in () if quiet else one.warnings:
            click.echo(f"warning: {make_inert(one.name)}: {make_inert(warning)}", err=True)
    return read


def _ingest_options(options: dict[str, Any], progress: Any) -> IngestOptions:
    from xmem.ingest import Filters, IngestOptions

    filters = Filters(
        steps=options["steps"],
        since_ns=options["since_ns"],
        until_ns=options["until_ns"],
        device=options["device"],
        stacks=not options["no_stacks"],
        spans=not options["no_spans"],
    )
    passed = {name: options[name] for name in ("store", "force", "strict", "as_ranks", "rank", "name", "hta")}
    return IngestOptions(filters=filters, progress=progress, **passed)
