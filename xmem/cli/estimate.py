"""`xmem estimate`: will this training job fit on that GPU? Profiles, ingests and simulates in one command."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from xmem.cli.options import json_option, print_text, terminal_width, verbosity_options
from xmem.cli.workload_options import make_workload, workload_options
from xmem.errors import EXIT_DOES_NOT_FIT, EXIT_OK
from xmem.render import bytes_text, fact_lines, json_text, make_inert
from xmem.render_verdict import verdict_text

if TYPE_CHECKING:
    from xmem.evaluate.estimate import Estimate


_CLOSE = (
    "Too close to call: within the range of memory outside the allocator the answer changes."
    " Measure it on that GPU and give it with --non-torch, or keep some --headroom."
)


@click.command()
@workload_options
@click.option("--gpu", metavar="GPU", required=True, help="A name (xmem gpus), 23.6GiB, 24GB, GiB or bytes.")
@click.option("--max-batch", is_flag=True, help="Find the largest batch size that fits.")
@click.option("--non-torch", metavar="SIZE", help="Memory that PyTorch's allocator never sees.  [default: 0.4GiB]")
@click.option("--headroom", metavar="SIZE", default="0", help="Memory to keep free: a size or a share, 5%.")
@click.option("--allocator", metavar="NAME", default="native", help="Allocator to replay through.")
@click.option("--alloc-conf", metavar="TEXT", help="PYTORCH_ALLOC_CONF to replay with.")
@click.option(
    "--torch", "torch_version", metavar="VERSION", help="torch whose rules hold.  [default: the installed one]"
)
@click.option("--no-extrapolate", is_flag=True, help="Profile the wanted batch size itself.")
@click.option("--no-check", is_flag=True, help="Do not check the extrapolation with a third batch size.")
@click.option("--explain-rules", is_flag=True, help="Say what each rule from CPU to GPU moved.")
@click.option("--engine", type=click.Choice(("cpu", "vgpu")), default="cpu", help="Run it on the CPU or a virtual GPU.")
@click.option("--cache", metavar="FOLDER", envvar="XMEM_CACHE", help="Where profiles are kept.  [default: user cache]")
@json_option
@verbosity_options
def command(as_json: bool, quiet: bool, verbose: bool, explain_rules: bool, **options: Any) -> int:
    """Estimate what a training job needs on a GPU, from small runs on the CPU.

    MODEL is as for xmem profile. Ends with 0 where the job fits and with 1 where it does not. A job that was profiled
    before is not run again.

    \b
    xmem estimate VGG19 -b 130 -o SGD --gpu rtx3060
    xmem estimate gpt2 -o Adam --gpu 24 --max-batch
    """
    from xmem.evaluate.estimate import EstimateOptions, estimate
    from xmem.evaluate.virtual_estimate import estimate_virtually
    from xmem.simulate.options import SimulateOptions

    workload = make_workload(options)
    names = ("non_torch", "headroom", "allocator", "alloc_conf", "torch_version")
    how = EstimateOptions(
        cache=options["cache"],
        exact=options["no_extrapolate"],
        check=not options["no_check"],
        max_batch=options["max_batch"],
        progress=None if quiet else lambda text: print(make_inert(text), file=sys.stderr),  # noqa: T201
    )
    found = {"cpu": estimate, "vgpu": estimate_virtually}[options["engine"]](
        workload, gpu=options["gpu"], options=SimulateOptions(**{name: options[name] for name in names}), how=how
    )
    print_text(json_text(found.to_dict()) if as_json else _text(found, explain_rules))
    return EXIT_OK if found.fits else EXIT_DOES_NOT_FIT


def _text(found: Estimate, explain_rules: bool) -> str:
    blocks = [_max_batch_text(found)] if found.max_batch is not None else []
    blocks += [verdict_text(found.verdict, width=terminal_width()), _outside_text(found)]
    if found.too_close_to_call:
        blocks.append(_CLOSE)
    if explain_rules:
        blocks.append(_rules_text(found))
    return "\n\n".join(blocks)


def _max_batch_text(found: Estimate) -> str:
    best = found.max_batch
    assert best is not None
    if best.batch_size == 0:
        return "Not even a batch of 1 fits."
    more = ""
    if best.next_peak_reserved_bytes is not None:
        more = (
            f"; {best.batch_size + 1} does not (it would reserve {bytes_text(best.next_peak_reserved_bytes).strip()})"
        )
    return f"The largest batch that fits is {best.batch_size}{more}, by {best.replays} replays."


def _outside_text(found: Estimate) -> str:
    rows = [
        (line.name, f"{bytes_text(line.least_bytes).strip()} to {bytes_text(line.most_bytes).strip()}  {line.source}")
        for line in found.outside
        if line.source != "--non-torch"
    ]
    setup = ("set-up", f"{bytes_text(found.setup_reserved_bytes).strip()}  reserved before the first step")
    return "outside the allocator, never part of reserved\n" + "\n".join(fact_lines([*rows, setup]))


def _rules_text(found: Estimate) -> str:
    rows = [(r.rule, f"{r.change:6} {r.allocations:6,}  {bytes_text(r.bytes)}  {r.description}") for r in found.rules]
    return "rules from CPU to GPU\n" + "\n".join(fact_lines(rows))
