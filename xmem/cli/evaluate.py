"""`xmem evaluate`: how good the estimates are."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from xmem.cli.options import json_option, print_text, terminal_width, verbosity_options
from xmem.errors import UsageError
from xmem.render import json_text, make_inert, table_text
from xmem.units import MIB

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xmem.evaluate.metrics import Summary
    from xmem.evaluate.virtual import RangeSummary


@click.group()
def command() -> None:
    """Score the estimator against what was measured, here or elsewhere."""


@command.command()
@click.option("--runs", metavar="FILE", required=True, help="CSV of measured runs.")
@click.option("--sample", type=click.IntRange(min=1), metavar="N", help="N rows spread over the file.  [default: all]")
@click.option(
    "--engine",
    default="cpu",
    show_default=True,
    help="cpu: profiles on the CPU; vgpu: runs on virtual cards; fake: fake tensors.",
)
@click.option("--page", metavar="FILE", help="Write the accuracy page there, with its chart beside it.")
@click.option("--beside", metavar="FILE", help="JSON of an evaluation by the engine vgpu, for the page.")
@click.option("--cache", metavar="FOLDER", envvar="XMEM_CACHE", help="Where profiles are kept.  [default: user cache]")
@json_option
@verbosity_options
def measured(as_json: bool, quiet: bool, verbose: bool, **options: Any) -> None:
    """Estimate measured runs and compare: error, sign, verdict, time, beside the published estimators.

    The file needs the columns model, optimizer, batch_size, total_gpu_memory, ground_bytes and real_oom.

    \b
    xmem evaluate measured --runs measured_runs.csv --sample 20
    """
    from xmem.evaluate.measured import MEASURED_TRANSFORMERS, EvaluateOptions, evaluate_measured, other_transformers
    from xmem.evaluate.metrics import by_family, by_model, summaries
    from xmem.evaluate.virtual import range_summaries

    page, engine = options.pop("page"), options["engine"]
    beside = _read_beside(options.pop("beside"))
    told = None if quiet else lambda text: print(make_inert(text), file=sys.stderr)  # noqa: T201
    if told is not None and (other := other_transformers()):
        told(
            f"note: the measured runs had transformers {MEASURED_TRANSFORMERS}; that of {other} allocates differently."
        )
    rows = evaluate_measured(options.pop("runs"), EvaluateOptions(**options, progress=told))
    overall, models, families = summaries(rows), by_model(rows), by_family(rows)
    if page is not None:
        from xmem.evaluate.accuracy_page import write_page

        write_page(rows, page, beside)
    if as_json:
        parts: dict[str, Sequence[Any]] = {
            "summaries": overall,
            "models": models,
            "families": families,
            "ranges": range_summaries(rows),
        }
        print_text(
            json_text(
                {"engine": engine, "rows": rows, **{name: [asdict(s) for s in part] for name, part in parts.items()}}
            )
        )
    else:
        print_text(_text(overall) + "\n\nby family\n" + _text(families) + _ranges_text(range_summaries(rows)))
        print_text("\nby model, CNN rows less set-up\n" + _text(models) + _troubles_text(rows))


@command.command()
@click.option("--jobs", metavar="FILE", required=True, help="TOML with a table [[jobs]] for each job.")
@click.option(
    "-o", "--output", metavar="FILE", default="local_runs.csv", show_default=True, help="CSV of rows to write."
)
@click.option("--force", is_flag=True, help="Replace the output file where there is one.")
@click.option("--python", metavar="FILE", help="Python that has the jobs' torch.  [default: as for xmem run]")
@click.option("--cache", metavar="FOLDER", envvar="XMEM_CACHE", help="Where the driver is kept.  [default: user cache]")
@json_option
@verbosity_options
def local(as_json: bool, quiet: bool, verbose: bool, jobs: str, output: str, force: bool, **options: Any) -> None:
    """Run jobs on this machine's GPU and on the virtual GPU of the same kind, and compare.

    Needs a GPU. Rows are written in the form of the measured runs, with the real allocator's own statistics; nothing
    else should use the GPU meanwhile. The fields of a job are those of xmem estimate: model, optimizer, batch_size, …

    \b
    xmem evaluate local --jobs jobs.toml -o local_runs.csv
    xmem evaluate measured --runs local_runs.csv --engine vgpu
    """
    import pyarrow as pa

    from xmem.cli.output import check_target, write_rows
    from xmem.evaluate.local import evaluate_local, read_jobs

    target = Path(output)
    check_target(target, force=force, suffixes=(".csv",))
    told = None if quiet else lambda text: print(make_inert(text), file=sys.stderr)  # noqa: T201
    rows = evaluate_local(read_jobs(jobs), **options, progress=told)
    write_rows(pa.Table.from_pylist(rows), target)
    if as_json:
        print_text(json_text({"file": output, "rows": rows}))
    else:
        print_text(_local_text(rows))


def _local_text(rows: Sequence[dict[str, Any]]) -> str:
    header = ("job", "measured", "reserved", "virtual", "error", "range", "allocator")
    return table_text(header, [_local_cells(row) for row in rows], width=terminal_width())


def _local_cells(row: dict[str, Any]) -> tuple[str, ...]:
    def size(name: str) -> str:
        return "-" if row[name] is None else f"{int(row[name]) / MIB:,.0f} MiB"

    names = ("peak_reserved_bytes", "peak_allocated_bytes", "num_alloc_retries")
    same = all(row[f"real_{name}"] == row[f"virtual_{name}"] for name in names)
    return (
        f"{row['model']} {row['optimizer']} {row['batch_size']}",
        "out of memory" if row["real_oom"] == "true" else size("ground_bytes"),
        size("real_peak_reserved_bytes"),
        size("virtual_peak_reserved_bytes"),
        share_text(row["relative_error"], signed=True),
        f"{size('range_low_bytes')} to {size('range_high_bytes')}",
        "the same" if same else "differs",
    )


def _read_beside(file: str | None) -> list[dict[str, Any]]:
    """Return the rows of an earlier answer in JSON."""
    if file is None:
        return []
    try:
        with open(file, encoding="utf-8") as text:
            return list(json.load(text)["rows"])
    except OSError as error:
        raise UsageError(f"{file!r} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{file!r} is no JSON answer of xmem evaluate measured.", "Write it with --json.") from error


def _text(summaries: Sequence[Summary]) -> str:
    header = ("", "rows", "median", "p90", "worst", "bias", "OOM caught", "false alarms", "runtime")
    return table_text(header, [_cells(summary) for summary in summaries], width=terminal_width())


def _ranges_text(found: Sequence[RangeSummary]) -> str:
    lines = [
        f"{one.name}: {one.held} of {one.rows} measured peaks lie in their range{one.less_text},"
        f" which is {share_text(one.median_width)} wide in the median"
        for one in found
    ]
    return "".join(f"\n{line}" for line in lines)


def _troubles_text(rows: Sequence[dict[str, Any]]) -> str:
    """List the rows that could not be estimated."""
    said = [f"\nrow {number}: {make_inert(row['trouble'])}" for number, row in enumerate(rows, 1) if row["trouble"]]
    return f"\n{len(said)} of {len(rows)} rows could not be estimated" + "".join(said) if said else ""


def _cells(summary: Summary) -> tuple[str, ...]:
    runtime = "" if summary.median_runtime_s is None else f"{summary.median_runtime_s:.1f} s"
    return (
        summary.name,
        str(summary.rows),
        share_text(summary.median_error),
        share_text(summary.p90_error),
        share_text(summary.worst_error, signed=True),
        share_text(summary.median_signed, signed=True),
        f"{summary.ooms_caught} of {summary.ooms}",
        str(summary.false_alarms),
        runtime,
    )


def share_text(value: float | None, *, signed: bool = False) -> str:
    """Show a share in per cent."""
    if value is None:
        return "-"
    return f"{value:+.2%}" if signed else f"{value:.2%}"
