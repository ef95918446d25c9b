"""Runs the estimator over measured runs: error, sign, verdict and time for every row, beside published estimators."""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from xmem.capture.workload import Workload
from xmem.errors import UnreadableError, UsageError
from xmem.evaluate.estimate import make_case, setup_reserved
from xmem.evaluate.job import Job, prepare_job
from xmem.simulate.gpu_table import Target, find_gpu
from xmem.simulate.options import SimulateOptions, parse_reserve
from xmem.simulate.rules import gpu_facts

Progress = Callable[[str], None]
#: What torch the measured runs had.
MEASURED_TORCH = "2.6.0"
#: What built their models; later ones allocate differently.
MEASURED_TRANSFORMERS = "4.51.3"
#: The least that reports give for a CUDA context (RTX 3090, torch 2.7); the measured cards drove nothing else.
NON_TORCH = "256MiB"
NEEDED = ("model", "optimizer", "batch_size", "total_gpu_memory", "ground_bytes", "real_oom")
ENGINES = ("cpu", "vgpu")
_ZERO_GRAD = {"": "start", "0": "start", "1": "before-backward", "2": "end"}


@dataclass(frozen=True)
class EvaluateOptions:
    """How to evaluate: `sample` rows spread over the file (None: all), the engine, and where profiles are kept."""

    sample: int | None = None
    engine: str = "cpu"
    cache: str | Path | None = None
    families: tuple[str, ...] = ("cnn", "transformer")
    progress: Progress | None = None


def other_transformers() -> str | None:
    """Return the installed version of transformers where its models are not the measured ones."""
    try:
        installed = version("transformers")
    except PackageNotFoundError:
        return None
    same = installed.split(".")[:2] == MEASURED_TRANSFORMERS.split(".")[:2]
    return None if same else installed


def read_runs(path: str | Path) -> list[dict[str, str]]:
    """Read a file in the format of measured_runs.csv."""
    file = Path(path)
    if not file.is_file():
        raise UsageError(f"There is no file {str(path)!r}.", "Give a CSV of measured runs.")
    with file.open(newline="", encoding="utf-8") as text:
        reader = csv.DictReader(text)
        missing = [name for name in NEEDED if name not in (reader.fieldnames or [])]
        if missing:
            raise UnreadableError(f"{file.name} has no column {missing[0]!r}.", f"Needed are: {', '.join(NEEDED)}.")
        return list(reader)


def evaluate_measured(path: str | Path, how: EvaluateOptions = EvaluateOptions()) -> list[dict[str, Any]]:
    """Estimate every row and return the file's own columns with the estimate's."""
    if how.engine not in ENGINES:
        raise UsageError(f"The engine {how.engine!r} is unknown.", f"Choose from {', '.join(ENGINES)}.")
    rows = [row for row in read_runs(path) if how.engine == "vgpu" or row.get("family", "cnn") in how.families]
    chosen = _sample(rows, how.sample)
    if how.engine == "vgpu":
        from xmem.evaluate.virtual import estimate_rows

        return estimate_rows(chosen, workload_of, how.cache, how.progress)
    jobs: dict[str, tuple[Job, float]] = {}
    return [_with_estimate(row, jobs, how, f"{n} of {len(chosen)}") for n, row in enumerate(chosen, 1)]


def _sample(rows: list[dict[str, str]], count: int | None) -> list[dict[str, str]]:
    """Take rows spread evenly over the file, which is sorted by model."""
    if count is None or count >= len(rows):
        return rows
    if count < 1:
        raise UsageError(f"--sample {count} takes no rows.")
    return [rows[index * len(rows) // count] for index in range(count)]


def workload_of(row: dict[str, str]) -> Workload:
    """Describe the job that a row measured; `workload`, where there is one, says all of it."""
    if row.get("workload"):
        return Workload(**json.loads(row["workload"]))
    return Workload(
        model=row["model"],
        batch_size=int(row["batch_size"]),
        optimizer=row["optimizer"],
        zero_grad=_ZERO_GRAD.get(row.get("zero_grad_mode") or "", "start"),
        iterations=int(row.get("target_iteration") or 3) + 1,
    )


def _with_estimate(
    row: dict[str, str], jobs: dict[str, tuple[Job, float]], how: EvaluateOptions, place: str
) -> dict[str, Any]:
    workload = workload_of(row)
    started = time.monotonic()
    if how.progress is not None:
        how.progress(f"row {place}: {workload.model} {workload.optimizer} {workload.batch_size}")
    key = workload.with_batch(1).key()
    if key not in jobs:
        job = prepare_job(workload, cache=how.cache, check=False, progress=how.progress)
        jobs[key] = (job, time.monotonic() - started)
    job, profiling_s = jobs[key]
    replay_started = time.monotonic()
    figures = estimate_row(job, row)
    runtime_s = profiling_s + time.monotonic() - replay_started
    return {**row, **figures, "runtime_s": round(runtime_s, 3)}


def estimate_row(job: Job, row: dict[str, str]) -> dict[str, Any]:
    """Estimate one row on its own GPU: peak reserved, what of it set-up took, and whether it runs out of memory."""
    from xmem.simulate.judge import replay_both
    from xmem.simulate.replay import encode

    gpu = find_gpu(row.get("gpu_name", ""))
    target = Target(row.get("gpu_name", ""), int(row["total_gpu_memory"]), "", gpu)
    options = SimulateOptions(torch_version=MEASURED_TORCH, non_torch=NON_TORCH)
    batch_size = int(row["batch_size"])
    table, _ = job.requests(batch_size, gpu_facts(target, (2, 6)))
    case = make_case(job, batch_size, target, options)
    usable = parse_reserve(options).usable(target.total_bytes)
    unlimited, on_device = replay_both(encode(table), case.setup, target.total_bytes, usable)
    shown = on_device if on_device.fits else unlimited
    estimate = shown.stats.peak_reserved_bytes
    setup = setup_reserved(table, unlimited.levels)
    ground = int(row["ground_bytes"])
    return {
        "estimate_bytes": estimate,
        "relative_error": (estimate - ground) / ground,
        "predicted_oom": not on_device.fits,
        "setup_bytes": setup,
        "relative_error_less_setup": (estimate - setup - ground) / ground,
        "peak_allocated_bytes": shown.stats.peak_allocated_bytes,
    }


def rows_without_oom(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the rows whose real run did not run out of memory."""
    return (row for row in rows if row["real_oom"] != "true")
