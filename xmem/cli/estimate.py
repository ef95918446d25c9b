"""`xmem estimate`: will this training job fit on that GPU? Profiles, ingests and simulates in one command."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from xmem.cli.options import json_option, print_text, terminal_width, verbosity_options
from xmem.cli.workload_options import make_workload, workload_options
from xmem.errors import EXIT_DOES_NOT_FIT, EXIT_OK
from xmem.render import bytes_text, fact_lines, json_text, make_inert, table_text
from xmem.render_verdict import verdict_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xmem.evaluate.engines import Answer
    from xmem.evaluate.estimate import Estimate
    from xmem.evaluate.virtual_range import PeakRange


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
@click.option(
    "--engine", type=click.Choice(("auto", "vgpu", "cpu", "fake", "all")), default="auto", show_default=True,
    help="Run it on a virtual GPU, the CPU or fake tensors, or compare all; auto: the first of GPU and CPU that can.",
)  # fmt: skip
@click.option("--optimistic", is_flag=True, help="On a virtual GPU, end with 0 where a fit is too close to call.")
@click.option("--cache", metavar="FOLDER", envvar="XMEM_CACHE", help="Where profiles are kept.  [default: user cache]")
@json_option
@verbosity_options
def command(as_json: bool, quiet: bool, verbose: bool, explain_rules: bool, **options: Any) -> int:
    """Estimate what a training job needs on a GPU.

    It is run on a virtual GPU, or a few small batches are run on the CPU. The virtual GPU needs a CUDA build of
    torch and a C++ compiler, but no GPU; the CPU answers without, and for --max-batch, --no-extrapolate, --no-check,
    --explain-rules, --allocator and --torch. MODEL is as for xmem profile. Ends with 0 where the job fits and with 1
    where it does not, or where a virtual GPU finds it too close to call. A job that was run before is not run again.

    \b
    xmem estimate VGG19 -b 130 -o SGD --gpu rtx3060
    xmem estimate gpt2 -o Adam --gpu 24 --max-batch
    """
    from xmem.evaluate.engines import best_of, run_engines
    from xmem.evaluate.estimate import EstimateOptions
    from xmem.simulate.options import SimulateOptions

    workload = make_workload(options)
    names = ("non_torch", "headroom", "allocator", "alloc_conf", "torch_version")
    how = EstimateOptions(
        cache=options["cache"],
        exact=options["no_extrapolate"],
        check=not options["no_check"],
        max_batch=options["max_batch"],
        explain_rules=explain_rules,
        progress=None if quiet else lambda text: print(make_inert(text), file=sys.stderr),  # noqa: T201
    )
    answers = run_engines(
        options["engine"], workload, options["gpu"], SimulateOptions(**{name: options[name] for name in names}), how
    )
    found = best_of(answers)
    if as_json:
        compared = {"engines": [answer.to_dict() for answer in answers]} if len(answers) > 1 else {}
        print_text(json_text({**found.to_dict(), **compared}))
    else:
        table = _engines_text(answers) + "\n\n" if len(answers) > 1 else ""
        print_text(table + _text(found, explain_rules))
    surely = options["optimistic"] or found.peak_range is None or not found.too_close_to_call
    return EXIT_OK if found.fits and surely else EXIT_DOES_NOT_FIT


def _engines_text(answers: Sequence[Answer]) -> str:
    rows = []
    for answer in answers:
        found, seconds = answer.estimate, f"{answer.seconds:.1f} s"
        if found is None:
            rows.append((answer.engine, "-", "-", answer.trouble, seconds))
            continue
        ranged = found.peak_range
        span = "-" if ranged is None else f"{_size(ranged.low_bytes)} to {_size(ranged.high_bytes)}"
        peak = found.verdict.peak_reserved_bytes if ranged is None else ranged.estimate_bytes
        rows.append((answer.engine, _size(peak), span, "fits" if found.fits else "does not fit", seconds))
    return table_text(("engine", "reserved", "range", "verdict", "time"), rows, width=terminal_width())


def _size(size: int) -> str:
    return bytes_text(size).partition("(")[0].strip()


def _text(found: Estimate, explain_rules: bool) -> str:
    blocks = [_max_batch_text(found)] if found.max_batch is not None else []
    blocks += [verdict_text(found.verdict, width=terminal_width()), _outside_text(found)]
    if found.peak_range is not None:
        blocks.append(_range_text(found.peak_range))
    elif found.too_close_to_call:
        blocks.append(_CLOSE)
    if explain_rules:
        blocks.append(_rules_text(found))
    return "\n\n".join(blocks)


def _range_text(found: PeakRange) -> str:
    low, high, middle = (bytes_text(size).strip() for size in (found.low_bytes, found.high_bytes, found.estimate_bytes))
    lines = [f"Reserved is {middle} at the peak, between {low} and {high}: {'stable' if found.stable else 'unstable'}."]
    lines += [f"  unstable here: {one}" for one in found.unstable]
    if found.too_close:
        lines.append(
            "Too close to call: so near to the card's memory, what nobody knows beforehand decides (--optimistic)."
        )
    return "\n".join(lines)


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
