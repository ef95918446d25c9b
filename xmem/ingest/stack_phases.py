"""Steps and phases of snapshots, whose entries carry stacks in place of spans."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Literal

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
from xmem.ingest.traits import (
    IN_BACKWARD,
    IN_ENGINE,
    IN_FORWARD,
    IN_MODULE,
    IN_OPTIMIZER,
    IN_PYTHON,
    IN_ZERO_GRAD,
    NO_STACK,
)

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


def phases_of_stacks(events: pl.DataFrame, codes: pl.DataFrame, marks: Marks) -> tuple[Ints, Codes] | None:
    """Return step and phase of events as their stacks tell them, None where no stack tells of training.

    An entry with an empty stack beside entries with stacks ran on a thread of the autograd engine: backward.
    Python code that is neither model nor optimizer is forward between a model's code and the backward pass.
    Annotations of the optimizer (`marks`) are exact and come first. Each device has its own course of time.
    """
    if codes.height == 0 or events.height == 0:
        return None
    code = codes_of_events(events, codes)
    if not np.isin(code, (IN_FORWARD, IN_BACKWARD, IN_OPTIMIZER)).any():
        return None
    device = events["device_index"].to_numpy()
    cuts = [0, *(np.flatnonzero(device[1:] != device[:-1]) + 1).tolist(), events.height]
    time, inferred = events["ts_ns"].to_numpy(), events["inferred"].to_numpy()
    parts = []
    for low, high in pairwise(cuts):
        part = slice(low, high)
        parts.append(_of_one_device(code[part], time[part], inferred[part], marks))
    steps, phases = zip(*parts, strict=True)
    return np.concatenate(steps), np.concatenate(phases)


def _of_one_device(code: Codes, time: Ints, inferred: npt.NDArray[np.bool_], annotated: Marks) -> tuple[Ints, Codes]:
    """Take twice the place of an event as its moment, so that annotations without events fit in between."""
    moment = 2 * np.arange(len(code), dtype=np.int64)
    low, high = (2 * np.searchsorted(time, edge, side=side) - 1 for edge, side in _edges(annotated))
    order = np.argsort(low, kind="stable")
    place = np.searchsorted(low[order], moment, side="right") - 1
    within = (place >= 0) & (moment <= np.append(high[order], -1)[place])
    kinds = np.array(sorted(_MARKS), dtype=np.int8)
    chosen = np.flatnonzero(np.isin(code, kinds) & ~within & ~inferred)
    mark = np.array([_MARKS[kind] for kind in kinds.tolist()], dtype=np.int8)[np.searchsorted(kinds, code[chosen])]
    runs = Marks(
        np.concatenate([mark, annotated.code]),
        np.concatenate([moment[chosen], low]),
        np.concatenate([moment[chosen], high]),
    )
    none = np.zeros(0, dtype=np.int64)
    counted = find_steps(_merged(runs), Steps(none, none, none))
    timeline = build_timeline(runs, counted, named=False)
    told = np.full(len(code), -1, dtype=np.int8) if timeline is None else phase_at(timeline, moment)
    told[(code == IN_FORWARD) & (told < 0)] = FORWARD
    for kind, direct in _DIRECT.items():
        told[(code == kind) & ~within] = direct
    told[(code == NO_STACK) & ~within] = -1
    told[inferred] = -1
    for kind, direct in {**_DIRECT, IN_FORWARD: FORWARD}.items():
        told[inferred & (code == kind)] = direct
    return step_at(counted, moment), told


def _edges(marks: Marks) -> tuple[tuple[Ints, Literal["left"]], tuple[Ints, Literal["right"]]]:
    return (marks.start, "left"), (marks.end, "right")


def _merged(marks: Marks) -> Marks:
    """Merge marks of one kind that no other kind parts: an optimizer step is many allocations."""
    order = np.argsort(marks.start, kind="stable")
    code, start, end = marks.code[order], marks.start[order], marks.end[order]
    if len(code) == 0:
        return marks
    first = np.flatnonzero(np.append(True, code[1:] != code[:-1]))
    return Marks(code[first], start[first], np.maximum.reduceat(end, first))


def codes_of_events(events: pl.DataFrame, codes: pl.DataFrame) -> Codes:
    """Return what the stack of each event says; an empty stack means nothing where no other stack means anything."""
    if codes.height == 0:
        return np.full(events.height, NO_STACK, dtype=np.int8)
    joined = events.select("stack_id").join(codes, on="stack_id", how="left", maintain_order="left")
    found: Codes = joined["code"].fill_null(NO_STACK).to_numpy()
    if not np.isin(found, (IN_FORWARD, IN_OPTIMIZER, IN_MODULE, IN_PYTHON)).any():
        found = np.where(found == IN_ENGINE, NO_STACK, found).astype(np.int8)
    return found
