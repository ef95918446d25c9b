"""`profile`: a few training steps on the CPU, written as an event log that stands for the job."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from xmem.capture.models import INSTALL, find_source, require
from xmem.capture.workload import Workload
from xmem.errors import RefusedError, UsageError

Progress = Callable[[str], None]
SUFFIX = ".xmem.jsonl.gz"
_PACKAGES = ("torch", "torchvision", "transformers", "timm")
#: Changes with what a profile holds, so that old ones are not taken for new ones.
FORMAT = 6


def profile(
    workload: Workload,
    output: str | Path | None = None,
    *,
    trace: str | Path | None = None,
    force: bool = False,
    fake: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Run the job on the CPU and write what it allocated to `output`; return the file.

    The run takes the paths that the same code takes on CUDA, and leaves out arithmetic on which no allocation depends.
    `trace` names a file for torch.profiler's own trace of the same steps, from a second run that computes everything.
    On `fake` tensors the run needs no memory and computes nothing at all.
    Raises UsageError where torch or the model is missing, RefusedError where the file exists.
    """
    target = Path(output) if output is not None else Path(default_name(workload))
    if not target.name.endswith((".jsonl", ".jsonl.gz")):
        raise UsageError(f"{target} is no name for an event log.", f"End it in {SUFFIX}.")
    own = None if trace is None else Path(trace)
    if own is not None and not own.name.endswith((".json", ".json.gz")):
        raise UsageError(f"{own} is no name for a torch.profiler trace.", "End it in .json or .json.gz.")
    for file in (target, *([] if own is None else [own])):
        _check_free(file, force)
    torch = require("torch", "Profiling")
    from xmem.capture.log import write_log
    from xmem.capture.training import run_workload, trace_workload

    def told(step: int) -> None:
        if progress is not None:
            progress(f"batch size {workload.batch_size}: step {step} of {workload.iterations}")

    recorder = run_workload(workload, told, fake=fake)
    metadata = {**workload.describe(), "recurrent": recorder.recurrent, "fake": fake}
    write_log(recorder, target, {"torch_version": str(torch.__version__), "metadata": metadata})
    if own is not None:
        trace_workload(workload, own, told)
    return target


def _check_free(file: Path, force: bool) -> None:
    if file.exists() and not force:
        raise RefusedError(f"{file} exists already.", "--force replaces it.")
    if not file.parent.is_dir():
        raise UsageError(f"The folder {file.parent} is not there.", "Make it first.")


def default_name(workload: Workload) -> str:
    """Name a profile after its job: `vgg19_sgd_b130.xmem.jsonl.gz`."""
    model = re.sub(r"[^a-z0-9]+", "-", workload.model.lower().rsplit("/", 1)[-1]).strip("-") or "model"
    return f"{model}_{workload.optimizer.lower()}_b{workload.batch_size}{SUFFIX}"


def profile_key(workload: Workload, *, fake: bool = False) -> str:
    """Return the hash of everything that decides the profile: the job, the versions, the user's own files."""
    versions = [f"{name} {installed(name)}" for name in _PACKAGES]
    kind = ["fake tensors"] if fake else []
    return workload.key(f"format {FORMAT}", *versions, _content_of(workload.model), *kind)


def installed(package: str) -> str:
    """Return the version of an installed package without importing it, or an empty text."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def check_installed() -> None:
    """Raise UsageError where the extra `capture` is missing."""
    if not installed("torch"):
        raise UsageError("Profiling needs torch, which is not installed.", INSTALL)


def _content_of(model: str) -> str:
    own = ":" in model and not model.startswith("timm:")
    place = (find_source(model) if own else None) or Path(model)
    place = place / "config.json" if place.is_dir() else place
    if place.suffix in (".py", ".json") and place.is_file():
        return hashlib.sha256(place.read_bytes()).hexdigest()
    return ""
