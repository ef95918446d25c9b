"""Asks one engine for an estimate, or all of them, and says which answer counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xmem.errors import XmemError
from xmem.evaluate.estimate import Estimate, EstimateOptions, estimate, estimate_on_fakes
from xmem.evaluate.virtual_estimate import estimate_virtually

if TYPE_CHECKING:
    from xmem.capture.workload import Workload
    from xmem.simulate.options import SimulateOptions

#: By trust, most first: real code over modelled code, values over none.
ENGINES: dict[str, Callable[..., Estimate]] = {"vgpu": estimate_virtually, "cpu": estimate, "fake": estimate_on_fakes}


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


def run_engines(
    engine: str, workload: Workload, gpu: str | int, options: SimulateOptions, how: EstimateOptions
) -> list[Answer]:
    """Ask one engine, or "all"; with "all" an engine that cannot answer says why."""
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
