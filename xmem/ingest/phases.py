"""Steps and phases of training: which moments belong to which step, and to forward, backward or optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Codes = npt.NDArray[np.int8]
Times = npt.NDArray[np.int64]

#: Phases as codes; -1 stands for "the source does not say".
FORWARD, BACKWARD, OPTIMIZER, OTHER = range(4)
PHASE_WORDS = ("forward", "backward", "optimizer", "other")

#: What a mark stands for: an operator of the program itself, an autograd node, an optimizer step, zero_grad,
#: begin and end of a step.
MARK_OPERATOR, MARK_BACKWARD, MARK_OPTIMIZER, MARK_ZERO_GRAD, MARK_STEP, MARK_STEP_END = range(6)


@dataclass(frozen=True)
class Marks:
    """Stretches of time that say something about training, in any order."""

    code: Codes
    start: Times
    end: Times


@dataclass(frozen=True)
class Timeline:
    """Runs of equal marks in order of start, with the phase inside each, in the gap behind it, and before the first."""

    start: Times
    end: Times
    inside: Codes
    behind: Codes
    before: int = OTHER


@dataclass(frozen=True)
class Steps:
    """Steps in order of time."""

    number: Times
    start: Times
    end: Times


def find_steps(marks: Marks, named: Steps) -> Steps:
    """Return the named steps (ProfilerStep#N); without any, count them from the ends of optimizer steps.

    A counted step runs from the end of one optimizer step to the end of the next, the first from the first operator;
    what follows the last one is a step of its own only if it holds an operator.
    """
    if len(named.number):
        order = np.argsort(named.start, kind="stable")
        return Steps(named.number[order], named.start[order], named.end[order])
    ends = np.sort(marks.end[marks.code == MARK_OPTIMIZER])
    work = np.isin(marks.code, (MARK_OPERATOR, MARK_BACKWARD))
    if len(ends) == 0:
        return named
    begin = int(marks.start[work].min()) if work.any() else int(marks.start[marks.code == MARK_OPTIMIZER].min())
    start = np.append(min(begin, int(ends[0])), ends[:-1] + 1)
    if work.any() and int(marks.start[work].max()) > ends[-1]:
        start, ends = np.append(start, ends[-1] + 1), np.append(ends, marks.end[work].max())
    return Steps(np.arange(len(ends), dtype=np.int64), start, ends)


def step_at(steps: Steps, time: Times) -> Times:
    """Return the number of the step around each moment, -1 outside of steps."""
    if len(steps.number) == 0:
        return np.full(len(time), -1, dtype=np.int64)
    place = np.searchsorted(steps.start, time, side="right") - 1
    held = (place >= 0) & (time <= steps.end[place])
    return np.where(held, steps.number[place], -1)


def build_timeline(marks: Marks, steps: Steps, *, named: bool) -> Timeline | None:
    """Return the phases of a source, None where its marks do not tell training from other work.

    Operators that lead up to a backward pass of their step are forward, those after it are other; a step without
    any backward pass is forward. zero_grad, the loading of data and what lies outside of named steps are other.
    Marks of the optimizer alone say nothing about the rest.
    """
    trained = bool(np.isin(marks.code, (MARK_BACKWARD, MARK_OPTIMIZER)).any())
    if not trained and not named:
        return None
    runs = _runs(_with_steps(marks, steps) if named else marks)
    if not np.isin(marks.code, (MARK_OPERATOR, MARK_BACKWARD)).any():
        return _optimizer_only(runs)
    code = runs.code
    boundary = np.isin(code, (MARK_STEP, MARK_STEP_END)) if named else code == MARK_OPTIMIZER
    in_step = _last_is(code, MARK_STEP, (MARK_STEP, MARK_STEP_END)) if named else np.ones(len(code), dtype=bool)
    to_backward = _next_is(code, MARK_BACKWARD, (MARK_BACKWARD, MARK_OPTIMIZER, MARK_STEP, MARK_STEP_END))
    section = np.cumsum(boundary)
    had_backward = _seen(code == MARK_BACKWARD, section)
    had_operator = _seen(code == MARK_OPERATOR, section)
    ahead = to_backward | (~had_backward & (named | (section > 0)))
    operator = np.where(in_step & ahead, FORWARD, OTHER)
    table = np.array([OTHER, BACKWARD, OPTIMIZER, OTHER, OTHER, OTHER])
    inside = np.where(code == MARK_OPERATOR, operator, table[code])
    between = in_step & had_operator & to_backward & np.isin(code, (MARK_OPERATOR, MARK_ZERO_GRAD))
    behind = np.where(code == MARK_OPERATOR, operator, np.where(between, FORWARD, OTHER))
    return Timeline(runs.start, runs.end, inside.astype(np.int8), behind.astype(np.int8))


def phase_at(timeline: Timeline, time: Times) -> Codes:
    """Return the phase at each moment; before the first mark it is other or unknown."""
    place = np.searchsorted(timeline.start, time, side="right") - 1
    within = time <= timeline.end[place]
    found = np.where(within, timeline.inside[place], timeline.behind[place])
    return np.where(place >= 0, found, timeline.before).astype(np.int8)


def _optimizer_only(runs: Marks) -> Timeline:
    inside = np.where(runs.code == MARK_OPTIMIZER, OPTIMIZER, np.where(runs.code == MARK_ZERO_GRAD, OTHER, -1))
    nothing = np.full(len(runs.code), -1, dtype=np.int8)
    return Timeline(runs.start, runs.end, inside.astype(np.int8), nothing, before=-1)


def _with_steps(marks: Marks, steps: Steps) -> Marks:
    count = len(steps.number)
    words = np.repeat(np.array([MARK_STEP, MARK_STEP_END], dtype=np.int8), count)
    moments = np.concatenate([steps.start, steps.end])
    return Marks(
        np.concatenate([marks.code, words]),
        np.concatenate([marks.start, moments]),
        np.concatenate([marks.end, moments]),
    )


def _runs(marks: Marks) -> Marks:
    """Merge neighbouring marks of one code; a step's begin goes before, its end behind what starts with it."""
    rank = np.where(marks.code == MARK_STEP, -1, np.where(marks.code == MARK_STEP_END, 1, 0))
    order = np.lexsort((rank, marks.start))
    code, start, end = marks.code[order], marks.start[order], marks.end[order]
    begins = np.ones(len(code), dtype=bool)
    begins[1:] = (code[1:] != code[:-1]) | np.isin(code[1:], (MARK_STEP, MARK_STEP_END))
    first = np.flatnonzero(begins)
    if len(first) == 0:
        return Marks(code, start, end)
    return Marks(code[first], start[first], np.maximum.reduceat(end, first))


def _last_is(code: Codes, wanted: int, among: tuple[int, ...]) -> npt.NDArray[np.bool_]:
    """Say for each run whether the newest run among some codes, itself included, is of the wanted one."""
    place = np.maximum.accumulate(np.where(np.isin(code, among), np.arange(len(code)), -1))
    found: npt.NDArray[np.bool_] = (place >= 0) & (code[place] == wanted)
    return found


def _next_is(code: Codes, wanted: int, among: tuple[int, ...]) -> npt.NDArray[np.bool_]:
    """Say for each run whether the next run among some codes, itself not included, is of the wanted one."""
    count = len(code)
    own = np.where(np.isin(code, among), np.arange(count), count)
    place = np.append(np.minimum.accumulate(own[::-1])[::-1][1:], count) if count else own
    found: npt.NDArray[np.bool_] = np.append(code, -1)[place] == wanted
    return found


def _seen(chosen: npt.NDArray[np.bool_], section: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Say for each run whether a chosen run came before it, or is it, in its section."""
    if len(section) == 0:
        return chosen
    total = np.cumsum(chosen)
    first = np.searchsorted(section, section, side="left")
    before: npt.NDArray[np.bool_] = np.greater(total, total[first] - chosen[first])
    return before
