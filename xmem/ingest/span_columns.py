"""What attribution needs of each span, as narrow columns in source order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from xmem.ingest import traits
from xmem.ingest.phases import Steps
from xmem.ingest.words import code_words

if TYPE_CHECKING:
    import polars as pl

    from xmem.ingest.spool import Spool

Ints = npt.NDArray[np.int64]

#: Kinds of spans that hold others on their thread; runtime calls and overhead lie in them and hold nothing.
HOLDERS = ("operator", "annotation", "step", "module", "python")
LEAVES = ("runtime", "overhead", "other")
OPERATOR, ANNOTATION, STEP, MODULE = range(4)
#: Code of what runs on a device.
DEVICE = len(HOLDERS) + len(LEAVES)
#: Stands for a span or event that names no thread.
NO_THREAD = np.iinfo(np.int64).min


@dataclass(frozen=True)
class SpanColumns:
    """One entry for each span: when and where it ran, what it is, and its id; `steps` are the named ones."""

    start: Ints
    end: Ints
    thread: npt.NDArray[np.int32]
    thread_keys: Ints
    kind: npt.NDArray[np.int8]
    flags: npt.NDArray[np.uint8]
    span_id: npt.NDArray[Any]
    steps: Steps


def read_span_columns(spool: Spool, offset_ns: int) -> SpanColumns:
    """Collect the columns of all spans; ids that the source does not give are numbers in order of start."""
    table = traits.NameTable()
    parts = [_of_batch(frame, table, offset_ns) for frame in spool.frames("spans")]
    if not parts:
        none = np.zeros(0, dtype=np.int64)
        no_steps = Steps(none, none, none)
        return SpanColumns(
            none, none, none.astype(np.int32), none, none.astype(np.int8), none.astype(np.uint8), none, no_steps
        )
    columns = list(zip(*parts, strict=True))
    del parts
    start, end, threads, kind, flags, ids, step = (np.concatenate(columns.pop(0)) for _ in range(7))
    thread_keys = np.unique(threads)
    thread = np.searchsorted(thread_keys, threads).astype(np.int32)
    if (ids < 0).any():
        ids = np.empty(len(start), dtype=np.int32)
        ids[np.argsort(start, kind="stable")] = np.arange(len(start), dtype=np.int32)
    named = np.flatnonzero(step >= 0)
    steps = Steps(step[named], start[named], end[named])
    return SpanColumns(start, end, thread, thread_keys, kind, flags, ids, steps)


def _of_batch(frame: pl.DataFrame, table: traits.NameTable, offset_ns: int) -> tuple[npt.NDArray[Any], ...]:
    """Return start, end, thread, kind, flags, id (-1: not given) and number of step (-1: none) of a batch's spans."""
    import polars as pl

    codes = {word: code for code, word in enumerate((*HOLDERS, *LEAVES))}
    kind = code_words(frame["kind"], codes, DEVICE)
    start = (frame["ts_ns"] + offset_ns).to_numpy()
    nothing = pl.Series([None], dtype=pl.Int64).new_from_index(0, frame.height)
    thread = frame["thread_id"] if "thread_id" in frame.columns else nothing
    ids = frame["span_id"].fill_null(-1).to_numpy() if "span_id" in frame.columns else np.array([-1], dtype=np.int64)
    flags = np.where(kind < STEP, table.flags(frame["name"]), 0).astype(np.uint8)
    steps = np.flatnonzero(kind == STEP)
    step = np.full(frame.height, -1, dtype=np.int32)
    step[steps] = [traits.step_of_name(name) for name in frame["name"].gather(steps).cast(pl.String).to_list()]
    end = start + frame["dur_ns"].to_numpy()
    return start, end, thread.fill_null(NO_THREAD).to_numpy(), kind, flags, ids, step
