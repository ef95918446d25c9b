"""Runs the estimator over measured runs: error, sign, verdict and time for every row, beside published estimators."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from xmem.errors import UsageError, XmemError
from xmem.evaluate.estimate import make_case, setup_reserved
from xmem.evaluate.job import CHECK, Job, prepare_job
from xmem.evaluate.runs_file import (
    Row,
    check_row,
    errors_of,
    ground_of,
    read_runs,
    torch_of,
    total_bytes_of,
    without_answer,
    workload_of,
)
from xmem.simulate.gpu_table import Target, find_gpu
from xmem.simulate.options import SimulateOptions, parse_reserve
from xmem.simulate.rules import gpu_facts

Progress = Callable[[str], None]
#: What built their models; later ones allocate differently.
MEASURED_TRANSFORMERS = "4.51.3"
#: The least that reports give for a CUDA context (RTX 3090, torch 2.7); the measured cards drove nothing else.
NON_TORCH = "256MiB"
ENGINES = ("cpu", "vgpu", "fake")


@dataclass(frozen=True)
class EvaluateOptions:
    """How to evaluate: `sample` rows spread over the file (None: all), the engine, and where profiles are kept."""

    sample: int | None = None
    engine: str = "cpu"
    cache: str | Path | None = None
    progress: Progress | None = None


def other_transformers() -> str | None:
    """Return the installed version of transformers where its models are not the measured ones."""
    try:
        installed = version("transformers")
    except PackageNotFoundError:
        return None
    same = installed.split(".")[:2] == MEASURED_TRANSFORMERS.split(".")[:2]
    return None if same else installed


def evaluate_measured(path: str | Path, how: EvaluateOptions = EvaluateOptions()) -> list[Row]:
    """Estimate every row and return the file's own columns with the estimate's.

    A row that cannot be estimated says why under `trouble`; raises UsageError where none can.
    """
    if how.engine not in ENGINES:
        raise UsageError(f"The engine {how.engine!r} is unknown.", f"Choose from {', '.join(ENGINES)}.")
    rows = _sample([_checked(row) for row in read_runs(path)], how.sample)
    sound = [row for row in rows if not row["trouble"]]
    if how.engine == "vgpu":
        from xmem.evaluate.virtual import estimate_rows

        found = estimate_rows(sound, how.cache, how.progress)
    else:
        jobs: dict[str, tuple[Job, float]] = {}
        found = [_with_estimate(row, jobs, how, f"{n} of {len(sound)}") for n, row in enumerate(sound, 1)]
    answers = iter(found)
    done = [row if row["trouble"] else next(answers) for row in rows]
    if done and all(row["trouble"] for row in done):
        raise UsageError(f"No row can be estimated; the first: {done[0]['trouble']}")
    return done


def _checked(row: Row) -> Row:
    try:
        return {**check_row(row), "trouble": None}
    except UsageError as error:
        return without_answer(row, error.message)


def _sample(rows: list[Row], count: int | None) -> list[Row]:
    """Take rows spread evenly over the file, which is sorted by model."""
    if count is None or count >= len(rows):
        return rows
    if count < 1:
        raise UsageError(f"--sample {count} takes no rows.")
    return [rows[index * len(rows) // count] for index in range(count)]


def _with_estimate(row: Row, jobs: dict[str, tuple[Job, float]], how: EvaluateOptions, place: str) -> Row:
    workload = workload_of(row)
    started = time.monotonic()
    if how.progress is not None:
        how.progress(f"row {place}: {workload.model} {workload.optimizer} {workload.batch_size}")
    # A small batch is profiled as it is, and so is any on fake tensors.
    key = (workload if how.engine == "fake" else workload.with_batch(min(workload.batch_size, CHECK + 1))).key()
    try:
        if key not in jobs:
            fake = how.engine == "fake"
            job = prepare_job(workload, cache=how.cache, exact=fake, check=False, fake=fake, progress=how.progress)
            jobs[key] = (job, time.monotonic() - started)
        job, profiling_s = jobs[key]
        replay_started = time.monotonic()
        figures = estimate_row(job, row)
    except XmemError as error:
        return without_answer(row, error.message)
    except Exception as error:  # a model's own code: whatever it raises, other rows go on
        return without_answer(row, f"{type(error).__name__}: {error}"[:500])
    runtime_s = profiling_s + time.monotonic() - replay_started
    return {**row, **figures, "runtime_s": round(runtime_s, 3)}


def estimate_row(job: Job, row: Row) -> Row:
    """Estimate one row on its own GPU: peak reserved, what of it set-up took, and whether it runs out of memory."""
    from xmem.simulate.judge import replay_both
    from xmem.simulate.replay import encode

    gpu = find_gpu(row.get("gpu_name") or "")
    target = Target(row.get("gpu_name") or "", total_bytes_of(row), "", gpu)
    options = SimulateOptions(torch_version=torch_of(row), non_torch=NON_TORCH)
    batch_size = workload_of(row).batch_size
    table, _ = job.requests(batch_size, gpu_facts(target, (2, 6)))
    case = make_case(job, batch_size, target, options)
    usable = parse_reserve(options).usable(target.total_bytes)
    unlimited, on_device = replay_both(encode(table), case.setup, target.total_bytes, usable)
    shown = on_device if on_device.fits else unlimited
    estimate = shown.stats.peak_reserved_bytes
    setup = setup_reserved(table, unlimited.levels)
    return {
        "estimate_bytes": estimate,
        "predicted_oom": not on_device.fits,
        "setup_bytes": setup,
        "peak_allocated_bytes": shown.stats.peak_allocated_bytes,
        **errors_of(ground_of(row), estimate, setup),
    }
