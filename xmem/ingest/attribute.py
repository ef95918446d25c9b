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
from xmem.ingest.stack_phases import codes_of_events, phases_of_stacks
from xmem.ingest.window import span_window

if TYPE_CHECKING:
    import polars as pl

    from xmem.ingest.adapter import Filters, Notes
    from xmem.ingest.spool import Spool

Ints = npt.NDArray[np.int64]

#: Kinds of spans that hold others on their thread; runtime calls and overhead lie in them and hold nothing.
HOLDERS = ("operator", "annotation", "step", "module", "python")
LEAVES = ("runtime", "overhead", "other")
_NO_THREAD = np.iinfo(np.int64).min
_KINDS = (*HOLDERS, *LEAVES)
_OPERATOR, _ANNOTATION, _STEP, _MODULE = range(4)
_DEVICE = len(_KINDS)


@dataclass
class SpanColumns:
    """What attribution needs of each span, in source order."""

    start: Ints
    end: Ints
    thread: Ints
    kind: npt.NDArray[np.int8]
    flags: npt.NDArray[np.uint8]
    span_id: Ints
    named_steps: Steps


@dataclass
class Attribution:
    """Spans by row of the source, the forest of those that hold others, and the training that they show."""

    columns: SpanColumns
    forest: Forest
    thread_keys: Ints
    parent_id: Ints
    op_id: Ints
    module_id: Ints
    marks: Marks
    steps: Steps
    timeline: Timeline | None
    stack_codes: pl.DataFrame
    operators: npt.NDArray[np.int32]

    def write_spans(
        self, spool: Spool, offset_ns: int, filters: Filters, write: Callable[[str, pl.DataFrame], None]
    ) -> int:
        """Write the spans in source order, with their numbers and parents; return how many were wanted."""
        import polars as pl

        first = written = 0
        since, until = span_window(filters, self.steps)
        for frame in spool.frames("spans") if filters.spans else ():
            part = slice(first, first + frame.height)
            first += frame.height
            ids = {"parent_id": self.parent_id, "op_id": self.op_id, "module_id": self.module_id}
            filled = {name: _nullable(column[part]) for name, column in ids.items()}
            numbered = frame.with_columns(
                pl.col("ts_ns") + offset_ns,
                span_id=pl.Series(self.columns.span_id[part]),
                **{name: pl.coalesce(name, new) if name in frame.columns else new for name, new in filled.items()},
            )
            if since is not None:
                numbered = numbered.filter(pl.col("ts_ns") + pl.col("dur_ns") >= since)
            if until is not None:
                numbered = numbered.filter(pl.col("ts_ns") <= until)
            written += numbered.height
            write("spans", numbered)
        return written


def attribute_spans(spool: Spool, notes: Notes, offset_ns: int) -> Attribution:
    """Find parents, operators and modules of all spans, and steps and phases of the whole source."""
    columns = _span_columns(spool, offset_ns)
    keys, thread = _threads(columns.thread)
    holders = np.flatnonzero(columns.kind < len(HOLDERS)).astype(np.int32)
    forest = build_forest(holders, thread[holders], columns.start[holders], columns.end[holders])
    position = np.full(len(columns.kind), -1, dtype=np.int32)
    position[forest.row] = forest.parent
    leaves = np.flatnonzero((columns.kind >= len(HOLDERS)) & (columns.kind < _DEVICE)).astype(np.int32)
    position[leaves] = innermost_at(forest, thread[leaves], columns.start[leaves])
    kind = columns.kind[forest.row]
    operators = outermost(forest.parent, kind == _OPERATOR)
    modules = innermost(forest.parent, kind == _MODULE)
    own = np.full(len(columns.kind), -1, dtype=np.int32)
    own[forest.row] = np.arange(forest.count, dtype=np.int32)
    at_or_above = np.where(own >= 0, own, position)
    marks = _marks(columns, forest, operators)
    steps = find_steps(marks, columns.named_steps)
    stacks = [traits.codes_of_stacks(frame) for frame in spool.frames("stacks")]
    if columns.kind.size == 0 and spool.rows("events") and not notes.facts.get("ordered") and notes.filters.spans:
        notes.add("no_spans")
    return Attribution(
        columns=columns,
        forest=forest,
        thread_keys=keys,
        parent_id=_ids(columns, forest, position),
        op_id=_ids(columns, forest, _pick(operators, at_or_above)),
        module_id=_ids(columns, forest, _pick(modules, at_or_above)),
        marks=marks,
        steps=steps,
        timeline=build_timeline(marks, steps, named=len(columns.named_steps.number) > 0),
        stack_codes=_concat_codes(stacks),
        operators=operators,
    )


def attribute_events(events: pl.DataFrame, attribution: Attribution, notes: Notes) -> pl.DataFrame:
    """Fill span_id, step, phase and category of events where the source has not given them."""
    import polars as pl

    time = events["ts_ns"].to_numpy()
    place = np.full(events.height, -1, dtype=np.int32)
    if attribution.forest.count:
        key = events["thread_id"].fill_null(_NO_THREAD).to_numpy()
        number = np.searchsorted(attribution.thread_keys, key)
        number[number == len(attribution.thread_keys)] = 0
        known = (attribution.thread_keys[number] == key) & ~events["inferred"].to_numpy()
        place = innermost_at(attribution.forest, np.where(known, number, -1).astype(np.int32), time)
    span = _ids(attribution.columns, attribution.forest, place)
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
    flags = attribution.columns.flags[attribution.forest.row]
    scene = Scene(attribution.forest, attribution.operators, flags, place, phase, step, stack)
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
        return (step if len(attribution.columns.named_steps.number) else told[0]), told[1]
    before = (events["inferred"] & (events["action"] == "alloc")).to_numpy()
    return np.where(before, -1, step), np.where(before, -1, phase).astype(np.int8)


def _nullable(column: Ints) -> pl.Series:
    import polars as pl

    series = pl.Series(column)
    return series.set(series < 0, None)


def _pick(values: npt.NDArray[np.int32], places: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    picked: npt.NDArray[np.int32] = np.append(values, np.int32(-1))[places]
    return picked


def _ids(columns: SpanColumns, forest: Forest, places: npt.NDArray[np.int32]) -> Ints:
    """Turn positions in the forest into span ids, -1 stays."""
    ids: Ints = np.append(columns.span_id[forest.row], np.int64(-1))[places]
    return ids


def _threads(thread: Ints) -> tuple[Ints, npt.NDArray[np.int32]]:
    keys = np.unique(thread)
    return keys, np.searchsorted(keys, thread).astype(np.int32)


def _concat_codes(stacks: list[pl.DataFrame]) -> pl.DataFrame:
    import polars as pl

    return pl.concat(stacks) if stacks else pl.DataFrame(schema={"stack_id": pl.Int64, "code": pl.Int8})


def _span_columns(spool: Spool, offset_ns: int) -> SpanColumns:
    table = traits.NameTable()
    parts = [_of_batch(frame, table, offset_ns) for frame in spool.frames("spans")]
    if not parts:
        none = np.zeros(0, dtype=np.int64)
        return SpanColumns(none, none, none, none.astype(np.int8), none.astype(np.uint8), none, Steps(none, none, none))
    start, end, thread, kind, flags, ids, step = (np.concatenate(column) for column in zip(*parts, strict=True))
    if (ids < 0).any():
        ids = np.empty(len(start), dtype=np.int64)
        ids[np.argsort(start, kind="stable")] = np.arange(len(start))
    named = np.flatnonzero(step >= 0)
    return SpanColumns(start, end, thread, kind, flags, ids, Steps(step[named], start[named], end[named]))


def _of_batch(frame: pl.DataFrame, table: traits.NameTable, offset_ns: int) -> tuple[npt.NDArray[Any], ...]:
    """Return start, end, thread, kind, flags, id (-1: not given) and number of step (-1: none) of a batch's spans."""
    import polars as pl

    codes = {word: code for code, word in enumerate(_KINDS)}
    kind = frame["kind"].cast(pl.String).replace_strict(codes, default=_DEVICE, return_dtype=pl.Int8).to_numpy()
    start = (frame["ts_ns"] + offset_ns).to_numpy()
    nothing = pl.Series([None], dtype=pl.Int64).new_from_index(0, frame.height)
    thread = frame["thread_id"] if "thread_id" in frame.columns else nothing
    ids = frame["span_id"] if "span_id" in frame.columns else nothing
    flags = np.where(kind < _STEP, table.flags(frame["name"]), 0).astype(np.uint8)
    step = np.full(frame.height, -1, dtype=np.int64)
    steps = np.flatnonzero(kind == _STEP)
    step[steps] = [traits.step_of_name(name) for name in frame["name"].gather(steps).cast(pl.String).to_list()]
    end = start + frame["dur_ns"].to_numpy()
    return start, end, thread.fill_null(_NO_THREAD).to_numpy(), kind, flags, ids.fill_null(-1).to_numpy(), step


def _marks(columns: SpanColumns, forest: Forest, operators: npt.NDArray[np.int32]) -> Marks:
    """Collect what tells phases: flagged spans, and the program's own operators on its main thread."""
    flags = columns.flags[forest.row]
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
