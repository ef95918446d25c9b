"""Steps and phases of snapshots, whose entries carry stacks in place of spans."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from xmem.ingest.phases import (
    BACKWARD,
    FORWARD,
    MARK_BACKWARD,
    MARK_OPERATOR,
    MARK_OPTIMIZER,
    MARK_ZERO_GRAD,
    OPTIMIZER,
    OTHER,
    Marks,
    Steps,
    build_timeline,
    find_steps,
    phase_at,
    step_at,
)
from xmem.ingest.traits import IN_BACKWARD, IN_ENGINE, IN_FORWARD, IN_OPTIMIZER, IN_PYTHON, IN_ZERO_GRAD, NO_STACK

if TYPE_CHECKING:
    import polars as pl

Codes = npt.NDArray[np.int8]
Ints = npt.NDArray[np.int64]

_MARKS = {
    IN_FORWARD: MARK_OPERATOR,
    IN_BACKWARD: MARK_BACKWARD,
    IN_ENGINE: MARK_BACKWARD,
    IN_OPTIMIZER: MARK_OPTIMIZER,
    IN_ZERO_GRAD: MARK_ZERO_GRAD,
}
_DIRECT = {IN_BACKWARD: BACKWARD, IN_ENGINE: BACKWARD, IN_OPTIMIZER: OPTIMIZER, IN_ZERO_GRAD: OTHER}


def phases_of_stacks(
    events: pl.DataFrame, codes: pl.DataFrame, steps: Steps, step: Ints, phase: Codes
) -> tuple[Ints, Codes]:
    """Return step and phase of events, told by their stacks where spans do not tell.

    An entry with an empty stack beside entries with stacks ran on a thread of the autograd engine: backward.
    Python code that is neither model nor optimizer is forward between a model's code and the backward pass.
    """
    if codes.height == 0 or events.height == 0:
        return step, phase
    code = _codes_of_events(events, codes)
    if not np.isin(code, (IN_FORWARD, IN_BACKWARD, IN_OPTIMIZER)).any():
        return step, phase
    moment = np.arange(len(code), dtype=np.int64)
    kinds = np.array(sorted(_MARKS), dtype=np.int8)
    chosen = np.flatnonzero(np.isin(code, kinds))
    mark = np.array([_MARKS[kind] for kind in kinds.tolist()], dtype=np.int8)[np.searchsorted(kinds, code[chosen])]
    marks = _as_runs(mark, moment[chosen])
    none = np.zeros(0, dtype=np.int64)
    counted = find_steps(marks, Steps(none, none, none))
    timeline = build_timeline(marks, counted, named=False)
    told = np.full(len(code), -1, dtype=np.int8) if timeline is None else phase_at(timeline, moment)
    told[(code == IN_FORWARD) & (told < 0)] = FORWARD
    for kind, direct in _DIRECT.items():
        told[code == kind] = direct
    told[code == NO_STACK] = -1
    if len(steps.number) == 0:
        step = step_at(counted, moment)
    return step, np.where(phase >= 0, phase, told)


def _codes_of_events(events: pl.DataFrame, codes: pl.DataFrame) -> Codes:
    joined = events.select("stack_id").join(codes, on="stack_id", how="left", maintain_order="left")
    found: Codes = joined["code"].fill_null(NO_STACK).to_numpy()
    if not np.isin(found, (IN_FORWARD, IN_OPTIMIZER, IN_PYTHON)).any():
        found = np.where(found == IN_ENGINE, NO_STACK, found).astype(np.int8)
    return found


def _as_runs(mark: Codes, moment: Ints) -> Marks:
    """Merge neighbouring marks of one kind into stretches."""
    if len(mark) == 0:
        return Marks(mark, moment, moment)
    begins = np.append(True, mark[1:] != mark[:-1])
    ends = np.append(begins[1:], True)
    return Marks(mark[begins], moment[begins], moment[ends])
