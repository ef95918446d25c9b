"""Evidence from this machine's own card: each job runs on it and on the virtual card of the same kind, side by side.

Rows have the form of measured_runs.csv, and `evaluate measured` reads them; `workload` holds what its columns cannot.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from xmem.capture.models import is_text_model
from xmem.capture.vgpu.cards import read_toml
from xmem.capture.vgpu.farm import Measured, Peaks, run_here, run_many
from xmem.capture.vgpu.settings import VirtualGpu
from xmem.capture.vgpu.torch_facts import default_python
from xmem.capture.workload import ZERO_GRAD, Workload
from xmem.errors import UsageError
from xmem.evaluate.job import cache_folder
from xmem.evaluate.virtual import card_of, figures, perturbed

Row = dict[str, Any]
Progress = Callable[[str], None]
EXAMPLE = 'Write each like: [[jobs]] model = "resnet18" optimizer = "Adam" batch_size = 32'


def read_jobs(path: str | Path) -> list[Workload]:
    """Read jobs from TOML: a table of `jobs` for each, with the fields of a workload."""
    file = Path(path)
    jobs = read_toml(file, "file of jobs", EXAMPLE).get("jobs")
    if not isinstance(jobs, list) or not jobs or not all(isinstance(job, dict) for job in jobs):
        raise UsageError(f"{file.name} has no jobs.", EXAMPLE)
    return [_workload(job, f"Job {number} of {file.name}") for number, job in enumerate(jobs, 1)]


def _workload(job: dict[str, Any], where: str) -> Workload:
    kinds = {field.name: str(field.type).split(" ")[0] for field in fields(Workload)}
    arguments = job.get("optimizer_args")
    job = job | ({"optimizer_args": json.dumps(arguments, sort_keys=True)} if isinstance(arguments, dict) else {})
    if "model" not in job:
        raise UsageError(f"{where} has no model.", EXAMPLE)
    for name, value in job.items():
        if name not in kinds:
            raise UsageError(f"{where} has the unknown field {name!r}.", f"Known are: {', '.join(kinds)}.")
        if type(value).__name__ != kinds[name]:
            raise UsageError(f"{where} has {value!r} as {name}.", f"Needed is {kinds[name]}.")
    return Workload(**job)


def evaluate_local(
    jobs: list[Workload],
    *,
    cache: str | Path | None = None,
    python: str | None = None,
    here: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> list[Row]:
    """Run the jobs on this machine's card and on the virtual one; `here` is the environment of the real runs."""
    own = python or default_python()
    if progress is not None:
        progress(f"{len(jobs)} job{'s' * (len(jobs) != 1)} on this machine's GPU")
    measured = list(run_here(jobs, own, os.environ if here is None else here))
    if progress is not None:
        progress(f"{len(jobs)} job{'s' * (len(jobs) != 1)} on a virtual {measured[0].device['gpu_name']}")
    runs = [
        run
        for number, (job, found) in enumerate(zip(jobs, measured, strict=True))
        for run in perturbed(str(number), job, _same_card(found.device), is_cnn=not is_text_model(job.model))
    ]
    virtual: list[dict[str, Peaks | str]] = [{} for _ in jobs]
    for run, peaks in run_many(runs, own, cache_folder(cache)):
        number, _, name = run.key.partition("/")
        virtual[int(number)][name] = peaks
    return [_row(*found) for found in zip(jobs, measured, virtual, strict=True)]


def _same_card(device: dict[str, Any]) -> VirtualGpu:
    """Describe the virtual card of the same kind; what lay on the real one at the first sample is never free."""
    name = str(device["gpu_name"]).removeprefix("NVIDIA ")
    return VirtualGpu(card_of(name), int(device["total_gpu_memory"]), int(device["first_sample_bytes"]))


def _row(job: Workload, measured: Measured, virtual: dict[str, Peaks | str]) -> Row:
    device, real = measured.device, measured.peaks
    is_text = is_text_model(job.model)
    row = {
        "family": "transformer" if is_text else "cnn",
        "gpu_name": device["gpu_name"],
        "total_gpu_memory": str(device["total_gpu_memory"]),
        "model": job.model,
        "optimizer": job.optimizer,
        "batch_size": str(job.batch_size),
        "input_size": str(job.sequence_length) if is_text else f"{job.image_size}x{job.image_size}x3",
        "zero_grad_mode": str(ZERO_GRAD.index(job.zero_grad)),
        "target_iteration": str(job.iterations - 1),
        "ground_bytes": str(device["peak_bytes"] - device["first_sample_bytes"]),
        "real_oom": str(real.oom).lower(),
        **{name: device[name] for name in ("first_sample_bytes", "torch_version", "cudnn_version")},
    }
    base = virtual.get("base")
    own = asdict(base) if isinstance(base, Peaks) else {}
    counted = ("peak_reserved_bytes", "peak_allocated_bytes", "setup_reserved_bytes", "num_alloc_retries")
    return {
        **row,
        "workload": json.dumps(asdict(job), sort_keys=True),
        **{f"real_{name}": getattr(real, name) for name in counted},
        **{f"virtual_{name}": own.get(name) for name in counted},
        **figures(row, virtual),
    }
