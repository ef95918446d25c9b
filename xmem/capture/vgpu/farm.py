"""Runs many described jobs in a few processes, without histories, on virtual cards or the card that is here."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from xmem.capture.vgpu.library import build_library
from xmem.capture.vgpu.settings import Recording, VirtualGpu, make_environment
from xmem.capture.vgpu.torch_facts import TorchFacts, find_torch
from xmem.capture.workload import Workload
from xmem.errors import UsageError

MODULE = "xmem.capture.vgpu.workloads"


@dataclass(frozen=True)
class Run:
    """One job on one card; `lengths` and `batch_sizes` give each iteration its own; without `cudnn` no workspaces.

    With a `recording` its history is written there too. All runs of a call share the first one's `alloc_conf`.
    """

    key: str
    workload: Workload
    gpu: VirtualGpu
    lengths: tuple[int, ...] = ()
    batch_sizes: tuple[int, ...] = ()
    cudnn: bool = True
    workspace_most_bytes: int | None = None
    requests: bool = False
    recording: Recording | None = None
    alloc_conf: str = ""


@dataclass(frozen=True)
class Peaks:
    """What the real allocator counted: peaks over all iterations and after set-up, and whether memory ran out."""

    oom: bool
    peak_reserved_bytes: int
    peak_allocated_bytes: int
    setup_reserved_bytes: int
    first_peak_reserved_bytes: int
    num_alloc_retries: int
    iterations: list[dict[str, int]] = field(default_factory=list)
    requests: list[int] = field(default_factory=list, repr=False)


@dataclass(frozen=True)
class Measured:
    """What a job took of a card of this machine: the allocator's counts, and NVML's with the card's own facts."""

    peaks: Peaks
    device: dict[str, Any]


def run_many(runs: Sequence[Run], python: str, cache: Path) -> Iterator[tuple[Run, Peaks | str]]:
    """Yield every run with its peaks, or with why it could not be run, in the order given."""
    torch = find_torch(python)
    library = build_library(torch, cache)
    by_key = {run.key: run for run in runs}
    environment = _base_environment(runs[0], torch, library) if runs else {}
    for found in _answers([_job(run, torch, library) for run in runs], python, environment):
        yield by_key[found["key"]], _peaks(found)


def run_here(workloads: Sequence[Workload], python: str, environment: Mapping[str, str]) -> Iterator[Measured]:
    """Run every job on the card that this machine has; yield what was measured; raises UsageError where one fails."""
    jobs = [{"key": str(n), "workload": asdict(workload), "measure": True} for n, workload in enumerate(workloads)]
    answers = list(_answers(jobs, python, {**environment, "PYTHONPATH": _python_path()}))
    if len(answers) < len(jobs):
        raise UsageError(f"{len(jobs) - len(answers)} of {len(jobs)} jobs left this machine's GPU without an answer.")
    for found in answers:
        peaks = _peaks(found)
        if isinstance(peaks, str):
            raise UsageError(f"{workloads[int(found['key'])].model} cannot be run on this machine's GPU: {peaks}")
        yield Measured(peaks, found["device"])


def _answers(jobs: list[dict[str, Any]], python: str, environment: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    lines = "".join(json.dumps(job) + "\n" for job in jobs)
    done = subprocess.run(
        [python, "-m", MODULE], input=lines, env=dict(environment), capture_output=True, text=True, check=False
    )
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"key"')]
    if done.returncode != 0 and not answers:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UsageError(f"Jobs cannot be run on the GPU: {last[:300]}", f"The Python is {python}.")
    yield from answers


def _python_path() -> str:
    return os.pathsep.join(filter(None, [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH")]))


def _base_environment(run: Run, torch: TorchFacts, library: Path) -> dict[str, str]:
    environment = make_environment(run.gpu, torch, library, Recording(Path()))
    for name in ("XMEM_VGPU_FOLDER", "PYTHONPATH"):
        environment.pop(name, None)
    conf = {"PYTORCH_CUDA_ALLOC_CONF": run.alloc_conf} if run.alloc_conf else {}
    return environment | {"PYTHONPATH": _python_path(), **conf}


def _job(run: Run, torch: TorchFacts, library: Path) -> dict[str, Any]:
    settings = make_environment(run.gpu, torch, library, run.recording or Recording(Path()), {})
    wanted = {key: value for key, value in settings.items() if key.startswith("XMEM_VGPU_")}
    if not run.cudnn:
        wanted["XMEM_VGPU_CUDNN"] = ""
    if run.workspace_most_bytes is not None:
        wanted["XMEM_VGPU_WORKSPACE_MOST_BYTES"] = str(run.workspace_most_bytes)
    return {
        "key": run.key,
        "workload": asdict(run.workload),
        "lengths": list(run.lengths),
        "batch_sizes": list(run.batch_sizes),
        "environment": wanted,
        "requests": run.requests,
        "record": run.recording is not None,
    }


def _peaks(found: dict[str, Any]) -> Peaks | str:
    if "error" in found:
        return str(found["error"])
    if "recorded" in found:
        return str(found["recorded"])
    iterations = found["iterations"]
    return Peaks(
        oom=found["oom"],
        peak_reserved_bytes=max(one["peak_reserved_bytes"] for one in iterations),
        peak_allocated_bytes=max(one["peak_allocated_bytes"] for one in iterations),
        setup_reserved_bytes=found["setup"]["reserved_bytes"],
        first_peak_reserved_bytes=iterations[0]["peak_reserved_bytes"],
        num_alloc_retries=iterations[-1]["num_alloc_retries"],
        iterations=iterations,
        requests=found.get("requests", []),
    )
