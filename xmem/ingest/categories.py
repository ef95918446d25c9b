"""What each allocation is for, by named rules over where it begins and ends; where none applies it stays unknown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from xmem.ingest import traits
from xmem.ingest.levels import row_bytes
from xmem.ingest.nesting import Forest, innermost
from xmem.ingest.phases import BACKWARD, FORWARD, OPTIMIZER, OTHER
from xmem.ingest.words import code_words

if TYPE_CHECKING:
    import polars as pl

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Codes = npt.NDArray[np.int8]

WORDS = ("parameter", "gradient", "optimizer_state", "activation", "input", "temporary", "workspace", "unknown")
PARAMETER, GRADIENT, OPTIMIZER_STATE, ACTIVATION, INPUT, TEMPORARY, WORKSPACE, UNKNOWN = range(len(WORDS))

#: What torch 2.x allocates for cuBLAS on the first matmul of a handle and stream: 8,519,680 bytes up to compute
#: capability 8.9, 32 MiB from 9.0. Only the first is odd enough to be told by its size alone.
_ODD_WORKSPACE, _WORKSPACES = 8_519_680, (8_519_680, 33_554_432)
#: An end that the recording does not hold.
_NEVER = -2


@dataclass(frozen=True)
class Scene:
    """Where events happened: position in the forest, outermost operator, phase and step codes, what stacks say."""

    forest: Forest
    operators: npt.NDArray[np.int32]
    flags: npt.NDArray[np.uint8]
    place: npt.NDArray[np.int32]
    phase: Codes
    step: Ints
    stack: Codes


@dataclass(frozen=True)
class Lives:
    """One entry for each allocation: its first row, the row that ends it (-1), and what holds at both."""

    first: Ints
    last: Ints
    size: Ints
    inferred: Bools
    phase: Codes
    end_phase: Codes
    step: Ints
    end_step: Ints
    stack: Codes
    before_forward: Bools


def categorise(events: pl.DataFrame, scene: Scene) -> pl.DataFrame:
    """Fill category on all rows of an allocation where the source has not given it."""
    import polars as pl

    group = events["group"].to_numpy()
    action = code_words(events["action"], {"alloc": 0, "free_requested": 1, "free_completed": 1}, 2)
    first = np.flatnonzero((action == 0) & (group >= 0))
    if len(first) == 0:
        return events
    lives = _lives(events, first, scene)
    code = np.full(int(group.max()) + 2, len(WORDS), dtype=np.int64)
    code[group[first]] = _rules(lives, scene)
    given = events["category"]
    if given.null_count() < len(given):
        given = _of_alloc_row(given, group, first)
    words = pl.Series([*WORDS, None], dtype=pl.String).cast(pl.Categorical)
    worked_out = words.gather(pl.Series(np.where(action < 2, code[group], len(WORDS)).astype(np.uint32)))
    return events.with_columns(category=pl.select(pl.coalesce(given, worked_out)).to_series())


def _of_alloc_row(given: pl.Series, group: Ints, first: Ints) -> pl.Series:
    """Give each row the category of its allocation's first row, rows of no allocation keep theirs."""
    import polars as pl

    row = np.full(int(group.max()) + 2, -1, dtype=np.int64)
    row[group[first]] = first
    source = row[group]
    return given.gather(pl.Series(np.where(source >= 0, source, np.arange(len(group)))))


def _lives(events: pl.DataFrame, first: Ints, scene: Scene) -> Lives:
    last = events["end_seq"].fill_null(-1).to_numpy()[first]
    ended = last >= 0
    forward = np.flatnonzero(scene.phase == FORWARD)
    step = scene.step[first]
    return Lives(
        first=first,
        last=last,
        size=row_bytes(events)[first],
        inferred=events["inferred"].to_numpy()[first],
        phase=scene.phase[first],
        end_phase=np.where(ended, scene.phase[last], _NEVER).astype(np.int8),
        step=step,
        end_step=np.where(ended, scene.step[last], _NEVER),
        stack=scene.stack[first],
        before_forward=_before(first, step, forward, scene.step),
    )


def _before(first: Ints, step: Ints, forward: Ints, steps: Ints) -> Bools:
    """Say whether a row comes before the first forward row of its step (outside of steps: of all).

    A step without any forward row is one that the recording cuts off before it got there.
    """
    if len(forward) == 0:
        return np.zeros(len(first), dtype=bool)
    numbers, place = np.unique(steps[forward], return_index=True)
    begins = forward[place]
    found = np.minimum(np.searchsorted(numbers, step), len(numbers) - 1)
    own = np.where(numbers[found] == step, begins[found], np.where(step < 0, forward[0], len(steps)))
    before: Bools = first < own
    return before


def _rules(lives: Lives, scene: Scene) -> Ints:
    """Apply the rules; the first that holds decides."""
    operator = np.append(scene.operators, np.int32(-1))[scene.place]
    begin, end = operator[lives.first], np.where(lives.last >= 0, operator[lives.last], -1)
    alive = lives.last < 0
    same_step = lives.end_step == lives.step
    forward, backward, optimizer = (lives.phase == phase for phase in (FORWARD, BACKWARD, OPTIMIZER))
    into_next = (lives.end_phase == OTHER) & (lives.end_step == lives.step + 1)
    last_step = lives.step == scene.step.max(initial=-1)
    copied = _is_flagged(scene, np.append(scene.operators, np.int32(-1))[scene.place[lives.first]], traits.COPY)
    setup = alive & lives.before_forward & (lives.step < 0)
    rules = (
        (WORKSPACE, _is_workspace(lives, scene, alive)),
        (TEMPORARY, (begin >= 0) & (begin == end)),
        (OPTIMIZER_STATE, optimizer & ~(same_step | into_next)),
        (TEMPORARY, optimizer),
        (TEMPORARY, backward & (lives.end_phase == BACKWARD) & same_step),
        (GRADIENT, backward),
        (INPUT, _under(scene, lives.first, traits.LOADER) & ~forward),
        (INPUT, copied & lives.before_forward & (lives.step >= 0) & ~lives.inferred),
        (TEMPORARY, forward & (lives.end_phase == FORWARD) & same_step),
        (ACTIVATION, forward & (~alive | (last_step & ~lives.inferred))),
        (PARAMETER, setup & (lives.stack == traits.IN_MODULE)),
        (PARAMETER, setup & ~lives.inferred & (lives.stack == traits.NO_STACK) & _is_trained(scene)),
    )
    category = np.full(len(lives.first), UNKNOWN, dtype=np.int64)
    for code, holds in reversed(rules):
        category[holds] = code
    return category


def _is_workspace(lives: Lives, scene: Scene, alive: Bools) -> Bools:
    """cuBLAS workspaces: of its sizes, made in a matmul or of the odd size, and never given back."""
    in_matmul = np.isin(lives.size, _WORKSPACES) & _under(scene, lives.first, traits.MATMUL)
    workspace: Bools = alive & (in_matmul | (lives.size == _ODD_WORKSPACE))
    return workspace


def _is_trained(scene: Scene) -> bool:
    return bool((scene.phase == BACKWARD).any())


def _under(scene: Scene, rows: Ints, bit: int) -> Bools:
    """Say whether a row lies in a span with a flag, at any depth."""
    held = innermost(scene.forest.parent, (scene.flags & bit) != 0)
    inside: Bools = np.append(held, np.int32(-1))[scene.place[rows]] >= 0
    return inside


def _is_flagged(scene: Scene, places: npt.NDArray[np.int32], bit: int) -> Bools:
    flagged: Bools = (np.append(scene.flags, np.uint8(0))[places] & bit) != 0
    return flagged
