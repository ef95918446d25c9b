"""`xmem simulate`: replays a run on a GPU and says whether it fits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from xmem.cli.options import json_option, print_text, store_option, terminal_width
from xmem.errors import EXIT_DOES_NOT_FIT, EXIT_OK
from xmem.render import json_text, make_inert
from xmem.render_verdict import recommendation_text, sweep_text, verdict_text

if TYPE_CHECKING:
    from xmem.simulate import SimulateOptions


@click.command()
@click.argument("run", required=False)
@click.option(
    "--gpu",
    metavar="GPU",
    help="A name (xmem gpus), 23.6GiB, 24GB (10^9), GiB as a number, or bytes.  [default: the recorded GPU]",
)
@click.option(
    "--non-torch",
    metavar="SIZE",
    help="Memory of the GPU that PyTorch's allocator never sees; 0 for none.  [default: 0.4GiB]",
)
@click.option("--headroom", metavar="SIZE", default="0", help="Memory to keep free: a size or a share, 5%.")
@click.option("--allocator", metavar="NAME", default="native", help="Allocator to replay through.")
@click.option("--alloc-conf", metavar="TEXT", help="PYTORCH_ALLOC_CONF to replay with.  [default: the recorded one]")
@click.option(
    "--torch",
    "torch_version",
    metavar="VERSION",
    help="torch whose rules hold.  [default: the recorded one, else the newest]",
)
@click.option(
    "--device", metavar="NAME", help="Recorded device, such as cuda:0.  [default: the one with the highest peak]"
)
@click.option(
    "--rank", type=click.IntRange(min=0), metavar="N", help="Recorded rank.  [default: the one with the highest peak]"
)
@click.option(
    "--requests", "requests_sql", metavar="SQL", help="Replay what this SELECT over `requests` gives: a what-if."
)
@click.option("--raw-cpu", is_flag=True, help="Replay a CPU recording as it is, not turned into a GPU's requests.")
@click.option("--ops", metavar="FILE", help="Replay a file of operations instead of a run.")
@click.option("--sweep", is_flag=True, help="Try many allocator settings and list them, best first.")
@click.option("--recommend", is_flag=True, help="Name the allocator setting to use and what it saves.")
@click.option("--compare", is_flag=True, help="Check the replay against the segments that the run recorded.")
@click.option(
    "--explain", "--explain-rules", "explain", is_flag=True,
    help="Where it fails, show segments and what keeps them; list what each rule moved in a CPU recording.",
)  # fmt: skip
@store_option
@json_option
def command(run: str | None, as_json: bool, **options: Any) -> int:
    """Replay a run's allocations on a GPU: does it fit, and why not?

    RUN is an id, the start of one, or a name; the newest run where it is left out. Ends with 0 where the run fits
    and with 1 where it does not.

    \b
    xmem simulate --gpu rtx4090
    xmem simulate --gpu 16 --alloc-conf expandable_segments:True
    """
    chosen = [f"--{name}" for name in _MODES if options[name]]
    if len(chosen) > 1:
        raise click.UsageError(f"{' and '.join(chosen)} exclude each other.")
    if options["ops"] is not None and (run is not None or options["compare"]):
        raise click.UsageError("--ops replays a file instead of a run; leave RUN and --compare out.")
    show = _MODES[chosen[0].removeprefix("--")] if chosen else _print_verdict
    return EXIT_OK if show(run, as_json, options) else EXIT_DOES_NOT_FIT


def _simulate_options(options: dict[str, Any]) -> SimulateOptions:
    from xmem.simulate import SimulateOptions

    names = ("non_torch", "headroom", "allocator", "alloc_conf", "torch_version", "device", "rank", "requests_sql")
    return SimulateOptions(cpu_to_gpu=not options["raw_cpu"], **{name: options[name] for name in names})


def _target(options: dict[str, Any]) -> dict[str, Any]:
    return {name: options[name] for name in ("gpu", "store", "ops")} | {"options": _simulate_options(options)}


def _print_verdict(run: str | None, as_json: bool, options: dict[str, Any]) -> bool:
    from xmem.simulate import simulate, simulate_ops

    chosen = _simulate_options(options)
    if options["ops"] is not None:
        verdict = simulate_ops(options["ops"], gpu=options["gpu"], options=chosen)
    else:
        verdict = simulate(run, gpu=options["gpu"], store=options["store"], options=chosen)
    text = verdict_text(verdict, width=terminal_width(), explain=options["explain"])
    print_text(json_text(verdict.to_dict()) if as_json else text)
    return verdict.fits


def _print_comparison(run: str | None, as_json: bool, options: dict[str, Any]) -> bool:
    from xmem.simulate import compare_recorded

    comparison = compare_recorded(run, store=options["store"], options=_simulate_options(options))
    print_text(json_text(comparison) if as_json else make_inert(comparison.sentence))
    return bool(comparison.equal)


def _print_sweep(run: str | None, as_json: bool, options: dict[str, Any]) -> bool:
    from xmem.simulate import sweep

    rows = sweep(run, **_target(options))
    print_text(json_text(rows) if as_json else sweep_text(rows, width=terminal_width()))
    return any(bool(row.fits) for row in rows)


def _print_recommendation(run: str | None, as_json: bool, options: dict[str, Any]) -> bool:
    from xmem.simulate import recommend

    advice = recommend(run, **_target(options))
    print_text(json_text(advice) if as_json else recommendation_text(advice, width=terminal_width()))
    return bool(advice.best.fits)


#: What --sweep, --recommend and --compare do instead of a plain verdict; each says whether it went well.
_MODES: dict[str, Callable[[str | None, bool, dict[str, Any]], bool]] = {
    "sweep": _print_sweep,
    "recommend": _print_recommendation,
    "compare": _print_comparison,
}
