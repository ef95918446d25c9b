"""`estimate`: asks one engine, or all of them, or the one that this machine and the question allow."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xmem.errors import XmemError
from xmem.evaluate.estimate import Estimate, EstimateOptions, estimate_on_cpu, estimate_on_fakes
from xmem.evaluate.job import cache_folder
from xmem.evaluate.virtual_estimate import estimate_virtually
from xmem.simulate.options import SimulateOptions

if TYPE_CHECKING:
    from xmem.capture.workload import Workload

#: By trust, most first: real code over modelled code, values over none.
ENGINES: dict[str, Callable[..., Estimate]] = {
    "vgpu": estimate_virtually,
    "cpu": estimate_on_cpu,
    "fake": estimate_on_fakes,
}
_DEFAULTS, _HOW = SimulateOptions(), EstimateOptions()


@dataclass(frozen=True)
class Answer:
    """What one engine said, or why it could not, and how many seconds it took."""

    engine: str
    estimate: Estimate | None
    seconds: float
    trouble: str = ""
    error: XmemError | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the keys of the JSON answer."""
        own = {"engine": self.engine, "runtime_s": round(self.seconds, 3), "trouble": self.trouble or None}
        return own | ({} if self.estimate is None else self.estimate.to_dict())


def estimate(
    workload: Workload,
    *,
    gpu: str | int,
    options: SimulateOptions = _DEFAULTS,
    how: EstimateOptions = _HOW,
    engine: str = "auto",
) -> Estimate:
    """Estimate a training job's memory on a GPU by one engine: vgpu, cpu, or the best that can answer; UsageError."""
    return best_of(run_engines(engine, workload, gpu, options, how))


def why_cpu(options: SimulateOptions, how: EstimateOptions) -> str:
    """Say why the engine cpu has to answer; an empty text where vgpu can."""
    from xmem.capture.vgpu.library import find_compiler, is_built
    from xmem.capture.vgpu.torch_facts import default_python, find_torch

    asked = {
        "the largest batch": how.max_batch,
        "a profile of this batch size": how.exact,
        "no check of the extrapolation": not how.check,
        "the rules from CPU to GPU": how.explain_rules,
        "another allocator": options.allocator != _DEFAULTS.allocator,
        "another torch": options.torch_version is not None,
    }
    for what, wanted in asked.items():
        if wanted:
            return f"it was asked for {what}"
    try:
        torch = find_torch(default_python())
        if not is_built(torch, cache_folder(how.cache)):
            find_compiler()
    except XmemError as error:
        return f"the virtual GPU cannot run here. {error.message}"
    return ""


def _ask_best(workload: Workload, gpu: str | int, options: SimulateOptions, how: EstimateOptions) -> Answer:
    """Ask the virtual GPU where it can be asked, otherwise or where it fails the CPU, and say which it was."""
    from xmem.simulate.gpu_table import parse_gpu

    parse_gpu(gpu)
    started = time.monotonic()
    tell = how.progress or (lambda text: None)
    why = why_cpu(options, how)
    if not why:
        tell("engine vgpu: a CUDA build of torch is here (--engine cpu needs none)")
        try:
            found = ENGINES["vgpu"](workload, gpu=gpu, options=options, how=how)
            return Answer("vgpu", found, time.monotonic() - started)
        except XmemError as error:
            why = f"the virtual GPU could not run it. {error.message}"
    tell(f"engine cpu: {why}")
    found = ENGINES["cpu"](workload, gpu=gpu, options=options, how=how)
    return Answer("cpu", found, time.monotonic() - started, why)


def run_engines(
    engine: str, workload: Workload, gpu: str | int, options: SimulateOptions, how: EstimateOptions
) -> list[Answer]:
    """Ask one engine, "all" or "auto"; with "all" an engine that cannot answer says why."""
    if engine == "auto":
        return [_ask_best(workload, gpu, options, how)]
    answers = []
    for name in ENGINES if engine == "all" else (engine,):
        started = time.monotonic()
        try:
            found = ENGINES[name](workload, gpu=gpu, options=options, how=how)
            answers.append(Answer(name, found, time.monotonic() - started))
        except XmemError as error:
            if engine != "all":
                raise
            answers.append(Answer(name, None, time.monotonic() - started, error.message, error))
    return answers


def best_of(answers: Sequence[Answer]) -> Estimate:
    """Return the answer of the most trusted engine that has one; raises what the last one said where none has."""
    for answer in answers:
        if answer.estimate is not None:
            return answer.estimate
    error = answers[-1].error
    assert error is not None
    raise error
