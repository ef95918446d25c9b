"""Joins memory with what ran: spans with their parents, events with span, step, phase and category."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from xmem.ingest import traits
from xmem.ingest.categories import categorise
from xmem.ingest.nesting import Forest, build_forest, innermost, innermost_at, number_threads, outermost
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
from xmem.ingest.stack_phases import phases_of_stacks

if TYPE_CHECKING:
    import polars as pl

    from xmem.ingest.adapter import Notes
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
    steps: Steps
    timeline: Timeline | None
    stack_codes: pl.DataFrame
    operators: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, dtype=np.int32))

    def write_spans(self, spool: Spool, offset_ns: int, write: Callable[[str, pl.DataFrame], None]) -> None:
        """Write the spans in source order, with their numbers and parents."""
        import polars as pl

        first = 0
        for frame in spool.frames("spans"):
            part = slice(first, first + frame.height)
            first += frame.height
            ids = {"parent_id": self.parent_id, "op_id": self.op_id, "module_id": self.module_id}
            given = [name for name in ids if name in frame.columns]
            filled = {name: pl.Series(column[part]) for name, column in ids.items()}
            numbered = frame.with_columns(
                pl.col("ts_ns") + offset_ns,
                span_id=pl.Series(self.columns.span_id[part]),
                **{
                    name: pl.coalesce(name, column.set(column < 0, None)) if name in given else column.set(column < 0, None)
                    for name, column in filled.items()
                },
            )
            write("spans", numbered)


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
    if attribution.timeline is not None:
        step, phase = step_at(attribution.steps, time), phase_at(attribution.timeline, time)
    else:
        step, phase = step_at(attribution.steps, time), np.full(events.height, -1, dtype=np.int8)
    step, phase = phases_of_stacks(events, attribution.stack_codes, attribution.steps, step, phase)
    words = pl.Series([*PHASE_WORDS, None], dtype=pl.String)
    phase_word = words.gather(pl.Series(np.where(phase < 0, len(PHASE_WORDS), phase).astype(np.uint32)))
    filled = events.with_columns(
        span_id=pl.coalesce("span_id", _nullable(span)),
        step=pl.coalesce("step", _nullable(step)),
        phase=pl.coalesce("phase", phase_word.cast(pl.Categorical)),
    )
    return categorise(filled, place, attribution.operators, attribution.columns.flags[attribution.forest.row])


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
    import polars as pl

    table = traits.NameTable()
    codes = {word: code for code, word in enumerate(_KINDS)}
    parts: list[tuple[npt.NDArray[np.int64], ...]] = []
    steps: list[tuple[int, int, int]] = []
    given = True
    for frame in spool.frames("spans"):
        kind = frame["kind"].cast(pl.String).replace_strict(codes, default=_DEVICE, return_dtype=pl.Int8)
        start = frame["ts_ns"] + offset_ns
        thread = frame["thread_id"] if "thread_id" in frame.columns else pl.Series([None] * frame.height, dtype=pl.Int64)
        flags = np.where(kind.to_numpy() < _STEP, table.flags(frame["name"]), 0)
        given &= "span_id" in frame.columns and frame["span_id"].null_count() == 0
        ids = frame["span_id"].to_numpy() if given else np.zeros(frame.height, dtype=np.int64)
        end = start + frame["dur_ns"]
        parts.append((start.to_numpy(), end.to_numpy(), thread.fill_null(_NO_THREAD).to_numpy(), kind.to_numpy(), flags, ids))
        for row in np.flatnonzero(kind.to_numpy() == _STEP).tolist():
            steps.append((traits.step_of_name(str(frame["name"][row])), int(start[row]), int(end[row])))
    if not parts:
        none = np.zeros(0, dtype=np.int64)
        return SpanColumns(none, none, none, none.astype(np.int8), none.astype(np.uint8), none, Steps(none, none, none))
    start, end, thread, kinds, flags, ids = (np.concatenate(column) for column in zip(*parts, strict=True))
    if not given:
        ids = np.empty(len(start), dtype=np.int64)
        ids[np.argsort(start, kind="stable")] = np.arange(len(start))
    numbered = np.array([step for step in steps if step[0] >= 0], dtype=np.int64).reshape(-1, 3)
    return SpanColumns(start, end, thread, kinds, flags, ids, Steps(numbered[:, 0], numbered[:, 1], numbered[:, 2]))


def _marks(columns: SpanColumns, forest: Forest, operators: npt.NDArray[np.int32]) -> Marks:
    """Collect what tells phases: flagged spans, and the program's own operators on its main thread."""
    flags = columns.flags[forest.row]
    telling = traits.BACKWARD | traits.OPTIMIZER_STEP | traits.ZERO_GRAD | traits.LOADER
    flagged = (flags & telling) != 0
    covered = innermost(forest.parent, flagged) >= 0
    own = (operators == np.arange(forest.count)) & ~covered
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
