"""Joins memory with what ran: spans with their parents, events with span, step, phase and category."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from xmem.ingest import traits
from xmem.ingest.categories import Scene, categorise
from xmem.ingest.nesting import Forest, build_forest, innermost, innermost_at, outermost
from xmem.ingest.phases import (
    MARK_BACKWARD,
    MARK_OPERATOR,
    MARK_OPTIMIZER,
    MARK_ZERO_GRAD,
    PHASE_WORDS,
    Marks,
    Steps,
    Timeline,
    build_timeline,
    find_steps,
    phase_at,
    step_at,
)
from xmem.ingest.span_columns import DEVICE, HOLDERS, MODULE, NO_THREAD, OPERATOR, read_span_columns
from xmem.ingest.stack_phases import codes_of_events, phases_of_stacks
from xmem.ingest.window import span_window

if TYPE_CHECKING:
    import polars as pl

    from xmem.ingest.adapter import Filters, Notes
    from xmem.ingest.spool import Spool

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Attribution:
    """The forest of spans that hold others, and the training that the spans show.

    `ids`, `flags` and `outermost_operator` belong to positions in the forest.
    """

    forest: Forest
    ids: npt.NDArray[Any]
    flags: npt.NDArray[np.uint8]
    outermost_operator: npt.NDArray[np.int32]
    thread_keys: Ints
    marks: Marks
    steps: Steps
    steps_are_named: bool
    timeline: Timeline | None
    stack_codes: pl.DataFrame
    has_spans: bool


@dataclass(frozen=True)
class SpanPlaces:
    """One entry for each span of the source: its id, and its parent, operator and module as positions (-1: none)."""

    span_id: npt.NDArray[Any]
    parent: npt.NDArray[np.int32]
    operator: npt.NDArray[np.int32]
    module: npt.NDArray[np.int32]


def write_spans(
    attribution: Attribution,
    places: SpanPlaces,
    spool: Spool,
    offset_ns: int,
    filters: Filters,
    write: Callable[[str, pl.DataFrame], None],
) -> int:
    """Write the spans in source order, with their numbers and parents; return how many were wanted."""
    import polars as pl

    first = written = 0
    since, until = span_window(filters, attribution.steps)
    ids = np.append(attribution.ids, -1).astype(np.int64)
    for frame in spool.frames("spans") if filters.spans else ():
        part = slice(first, first + frame.height)
        first += frame.height
        names = {"parent_id": places.parent, "op_id": places.operator, "module_id": places.module}
        filled = {name: _nullable(ids[place[part]]) for name, place in names.items()}
        numbered = frame.with_columns(
            pl.col("ts_ns") + offset_ns,
            span_id=pl.Series(places.span_id[part], dtype=pl.Int64),
            **{name: pl.coalesce(name, new) if name in frame.columns else new for name, new in filled.items()},
        )
        if since is not None:
            numbered = numbered.filter(pl.col("ts_ns") + pl.col("dur_ns") >= since)
        if until is not None:
            numbered = numbered.filter(pl.col("ts_ns") <= until)
        written += numbered.height
        write("spans", numbered)
    return written


def attribute_spans(spool: Spool, offset_ns: int) -> tuple[Attribution, SpanPlaces]:
    """Find parents, operators and modules of all spans, and steps and phases of the whole source."""
    columns = read_span_columns(spool, offset_ns)
    count, kind, thread = len(columns.kind), columns.kind, columns.thread
    holders = np.flatnonzero(kind < len(HOLDERS)).astype(np.int32)
    forest = build_forest(holders, thread[holders], columns.start[holders], columns.end[holders])
    parent = np.full(count, -1, dtype=np.int32)
    parent[forest.row] = forest.parent
    leaves = np.flatnonzero((kind >= len(HOLDERS)) & (kind < DEVICE)).astype(np.int32)
    parent[leaves] = innermost_at(forest, thread[leaves], columns.start[leaves])
    own = parent.copy()
    own[forest.row] = np.arange(forest.count, dtype=np.int32)
    operators = outermost(forest.parent, kind[forest.row] == OPERATOR)
    modules = innermost(forest.parent, kind[forest.row] == MODULE)
    flags = columns.flags[forest.row]
    marks = _marks(flags, forest, operators)
    steps = find_steps(marks, columns.steps)
    named = len(columns.steps.number) > 0
    attribution = Attribution(
        forest=forest,
        ids=columns.span_id[forest.row],
        flags=flags,
        outermost_operator=operators,
        thread_keys=columns.thread_keys,
        marks=marks,
        steps=steps,
        steps_are_named=named,
        timeline=build_timeline(marks, steps, named=named),
        stack_codes=_stack_codes(spool),
        has_spans=count > 0,
    )
    return attribution, SpanPlaces(columns.span_id, parent, _pick(operators, own), _pick(modules, own))


def attribute_events(events: pl.DataFrame, attribution: Attribution, notes: Notes) -> pl.DataFrame:
    """Fill span_id, step, phase and category of events where the source has not given them."""
    import polars as pl

    if events.height and not attribution.has_spans and not notes.facts.get("ordered") and notes.filters.spans:
        notes.add("no_spans")
    time = events["ts_ns"].to_numpy()
    place = np.full(events.height, -1, dtype=np.int32)
    if attribution.forest.count:
        key = events["thread_id"].fill_null(NO_THREAD).to_numpy()
        number = np.searchsorted(attribution.thread_keys, key)
        number[number == len(attribution.thread_keys)] = 0
        known = (attribution.thread_keys[number] == key) & ~events["inferred"].to_numpy()
        place = innermost_at(attribution.forest, np.where(known, number, -1).astype(np.int32), time)
    span = np.append(attribution.ids, -1).astype(np.int64)[place]
    if not notes.filters.spans:
        span[:] = -1
    stack = codes_of_events(events, attribution.stack_codes)
    step, phase = _step_and_phase(events, time, attribution)
    words = pl.Series([*PHASE_WORDS, None], dtype=pl.String)
    phase_word = words.gather(pl.Series(np.where(phase < 0, len(PHASE_WORDS), phase).astype(np.uint32)))
    filled = events.with_columns(
        span_id=pl.coalesce("span_id", _nullable(span)),
        step=pl.coalesce("step", _nullable(step)),
        phase=pl.coalesce("phase", phase_word.cast(pl.Categorical)),
    )
    scene = Scene(attribution.forest, attribution.outermost_operator, attribution.flags, place, phase, step, stack)
    return categorise(filled, scene)


def _step_and_phase(events: pl.DataFrame, time: Ints, attribution: Attribution) -> tuple[Ints, npt.NDArray[np.int8]]:
    """Tell step and phase from spans, or from stacks where spans show no operator.

    Memory that was there before has neither, unless its stack tells.
    """
    step = step_at(attribution.steps, time)
    phase = np.full(events.height, -1, dtype=np.int8)
    if attribution.timeline is not None:
        phase = phase_at(attribution.timeline, time)
    told = None
    if not np.isin(attribution.marks.code, (MARK_OPERATOR, MARK_BACKWARD)).any():
        told = phases_of_stacks(events, attribution.stack_codes, attribution.marks)
    if told is not None:
        return (step if attribution.steps_are_named else told[0]), told[1]
    before = (events["inferred"] & (events["action"] == "alloc")).to_numpy()
    return np.where(before, -1, step), np.where(before, -1, phase).astype(np.int8)


def _nullable(column: Ints) -> pl.Series:
    import polars as pl

    series = pl.Series(column)
    return series.set(series < 0, None)


def _pick(values: npt.NDArray[np.int32], places: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    picked: npt.NDArray[np.int32] = np.append(values, np.int32(-1))[places]
    return picked


def _stack_codes(spool: Spool) -> pl.DataFrame:
    import polars as pl

    codes = [traits.codes_of_stacks(frame) for frame in spool.frames("stacks")]
    return pl.concat(codes) if codes else pl.DataFrame(schema={"stack_id": pl.Int64, "code": pl.Int8})


def _marks(flags: npt.NDArray[np.uint8], forest: Forest, operators: npt.NDArray[np.int32]) -> Marks:
    """Collect what tells phases: flagged spans, and the program's own operators on its main thread."""
    telling = traits.BACKWARD | traits.OPTIMIZER_STEP | traits.ZERO_GRAD | traits.LOADER
    flagged = (flags & telling) != 0
    covered = innermost(forest.parent, flagged) >= 0
    own = (operators == np.arange(forest.count)) & ~covered & ((flags & traits.COPY) == 0)
    main = np.unique(forest.thread[(flags & (traits.OPTIMIZER_STEP | traits.ZERO_GRAD)) != 0])
    if len(main) == 0 and own.any():
        main = np.array([np.argmax(np.bincount(forest.thread[own]))])
    own &= np.isin(forest.thread, main)
    code = np.full(forest.count, -1, dtype=np.int8)
    code[own] = MARK_OPERATOR
    for bit, mark in (
        (traits.BACKWARD, MARK_BACKWARD),
        (traits.ZERO_GRAD, MARK_ZERO_GRAD),
        (traits.OPTIMIZER_STEP, MARK_OPTIMIZER),
    ):
        code[(flags & bit) != 0] = mark
    chosen = np.flatnonzero(code >= 0)
    return Marks(code[chosen], forest.start[chosen], forest.end[chosen])
