"""Reads what export_memory_timeline wrote: rows of single changes (.raw.json.gz), or levels by category (.json)."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, BinaryIO

import msgspec

from xmem.errors import UnreadableError
from xmem.ingest.adapter import Batch, Notes
from xmem.ingest.json_repair import find_end
from xmem.ingest.json_shapes import ROWS
from xmem.ingest.json_stream import RecordStream
from xmem.ingest.trace_records import read_integer

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import polars as pl

    Ints = npt.NDArray[np.int64]

name = "memory_timeline"

#: torch.profiler's categories in the order of its numbers (torch 2.13).
CATEGORIES = (
    "parameter", "optimizer_state", "input", "temporary", "activation", "gradient", "autograd_detail", "unknown",
)  # fmt: skip
PREEXISTING, CREATE, INCREMENT_VERSION, DESTROY = 1, 2, 3, 4
#: Times from here on (the year 1998) count from 1970.
_UNIX_FROM_NS = 900_000_000_000_000_000
_INT64 = 1 << 63
_BATCH_ROWS = 1 << 16
_LEVELS_LIMIT = 1 << 28
_START = re.compile(rb"(?:\xef\xbb\xbf)?[\s\x00]*\[\s*(?=\[)")
_ROW = re.compile(
    rb"\[\s*-?\d+\s*,\s*[0-9]\s*,\s*-?\d+\s*,\s*(?:-?\d+|null)\s*\]\s*(?:,\s*\[\s*(?!\s|\[)|,?\s*\]|,?\s*\Z)"
)
_TIMES = re.compile(rb"\[[-+\d.eE,\s]*(?:\]\s*,\s*\[\s*[\[\]]|\Z)")

Row = tuple[int, int, int, int | None]
_Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
_decode_rows = msgspec.json.Decoder(list[tuple[_Int64, _Int64, _Int64, _Int64 | None]]).decode
_decode_levels = msgspec.json.Decoder(list[list[_Int64]]).decode


def sniff(head: bytes, filename: str) -> bool:
    """Recognise a list of lists of numbers, in one of the two forms."""
    start = _START.match(head)
    return start is not None and bool(_ROW.match(head, start.end()) or _TIMES.match(head, start.end()))


def read(source: BinaryIO, notes: Notes) -> Iterator[Batch]:
    """Yield events of the one device of the file, whose type the format does not tell (`unknown`)."""
    head = source.read(1 << 16)
    start = _START.match(head)
    notes.facts["source_entries"] = notes.facts["memory_event_count"] = 0
    if start is None or not _ROW.match(head, start.end()):
        yield from _read_levels(head + source.read(_LEVELS_LIMIT), notes)
    else:
        yield from _read_changes(_Joined(head, source), notes)
    if not notes.facts["source_entries"]:
        raise UnreadableError(
            f"{notes.filename or 'The source'} is a memory timeline without a single row.",
            "Export it again from a profiler with record_shapes, profile_memory and with_stack on.",
        )


class _Joined(io.RawIOBase):
    """What was read already, and the rest of the source."""

    def __init__(self, head: bytes, source: BinaryIO) -> None:
        super().__init__()
        self._head = head
        self._source = source

    def read(self, size: int = -1) -> bytes:
        """Return the head first, whole."""
        head, self._head = self._head, b""
        return head or self._source.read(size)


# ---------------------------------------------------------------------- rows of changes


def _read_changes(source: io.RawIOBase, notes: Notes) -> Iterator[Batch]:
    import polars as pl

    stream: RecordStream[Row] = RecordStream(
        source,  # type: ignore[arg-type]
        notes, _decode_rows, _decode_rows, lambda value, at: _rescue_row(value, at, notes), shape=ROWS,
    )  # fmt: skip
    stream.start()
    notes.facts["pairing"] = "size"
    waiting: list[Row] = []
    first_ns: int | None = None
    read_rows = 0
    for rows, _ in stream:
        waiting += rows
        if first_ns is None:
            first_ns = next((row[0] for row in rows if row[0] >= 0), None)
        if first_ns is not None and len(waiting) >= _BATCH_ROWS:
            yield Batch("events", _changes(pl.DataFrame(_columns(waiting, read_rows)), first_ns, notes))
            read_rows += len(waiting)
            waiting = []
    if waiting:
        yield Batch("events", _changes(pl.DataFrame(_columns(waiting, read_rows)), first_ns or 0, notes))
    count = read_rows + len(waiting)
    notes.facts.update(source_entries=count, memory_event_count=count, time_base=_time_base(first_ns or 0))


def _columns(rows: list[Row], start: int) -> dict[str, pl.Series]:
    import polars as pl

    names = ("time", "number", "change", "category")
    columns = {label: pl.Series([row[index] for row in rows], dtype=pl.Int64) for index, label in enumerate(names)}
    return {"order_key": pl.int_range(start, start + len(rows), eager=True), **columns}


def _changes(frame: pl.DataFrame, first_ns: int, notes: Notes) -> pl.DataFrame:
    """Name the actions. A version step takes from the old category before it gives to the new one."""
    import polars as pl

    number, change, category = pl.col("number"), pl.col("change"), pl.col("category")
    known = number.is_between(PREEXISTING, DESTROY)
    strange = frame.filter(~known)
    if strange.height:
        notes.add("unknown_action", count=strange.height, at=strange["order_key"][0], detail=str(strange["number"][0]))
    gives = (number == PREEXISTING) | (number == CREATE) | ((number == INCREMENT_VERSION) & (change >= 0))
    step = (number == INCREMENT_VERSION) & (pl.col("time") == pl.col("time").shift(-1)) & (change > 0)
    late = (step & (number.shift(-1) == number) & (change.shift(-1) == -change)).fill_null(False)
    return frame.select(
        ts_ns=pl.when(pl.col("time") < 0).then(first_ns).otherwise(pl.col("time")),
        order_key=2 * pl.col("order_key") + 3 * late.cast(pl.Int64),
        device_type=pl.lit("unknown"),
        device_index=pl.lit(0),
        action=pl.when(~known)
        .then(number.cast(pl.String))
        .when(gives)
        .then(pl.lit("alloc"))
        .otherwise(pl.lit("free_requested")),
        requested_bytes=change.abs(),
        category=category.replace_strict(dict(enumerate(CATEGORIES)), default="unknown", return_dtype=pl.String),
        inferred=(number == PREEXISTING) | (pl.col("time") < 0),
    )


def _rescue_row(value: object, at: int, notes: Notes) -> Row | None:
    if not isinstance(value, list) or not 3 <= len(value) <= 16:
        return None
    numbers = [read_integer(item, at, notes, what="row") for item in value[:4]]
    time, number, change = numbers[:3]
    if time is None or number is None or change is None or max(abs(time), abs(number), abs(change)) >= _INT64:
        return None
    category = numbers[3] if len(numbers) > 3 else None
    return time, number, change, category if category is None or abs(category) < _INT64 else None


# ---------------------------------------------------------------------- levels by category


def _read_levels(text: bytes, notes: Notes) -> Iterator[Batch]:
    """Turn running totals into the changes between them: sums are exact, single allocations are not known."""
    import numpy as np

    times, rest, offset = _split_times(text, notes)
    stream: RecordStream[list[int]] = RecordStream(
        io.BytesIO(rest), notes, _decode_levels, _decode_levels,
        lambda value, at: _rescue_levels(value, at + offset, notes), shape=ROWS,
    )  # fmt: skip
    stream.start()
    rows = [row for records, _ in stream for row in records][: len(times)]
    longest = max(map(len, rows), default=0)
    if short := sum(len(row) < longest for row in rows):
        notes.add("missing_field", count=short, detail=f"a row of less than {longest} sizes: the rest are 0")
    rows = [_eight(row) for row in rows]
    if below := sum(min(row) < 0 for row in rows):
        notes.add("negative_total", count=below, detail=f"{min(map(min, rows))}: sizes below zero are 0")
        rows = [[max(0, size) for size in row] for row in rows]
    notes.facts.update(
        pairing="none", source_entries=len(rows), memory_event_count=len(rows), time_base=_time_base(max(times or [0]))
    )
    if not rows:
        return
    yield Batch("events", _steps(np.array(times[: len(rows)], np.int64), np.array(rows, np.int64)))


def _steps(times: Ints, levels: Ints) -> pl.DataFrame:
    """The changes from row to row; what goes, goes before what comes, so that no peak is made up."""
    import numpy as np
    import polars as pl

    changes = np.diff(levels, axis=0, prepend=0)
    step, category = np.nonzero(changes)
    change = changes[step, category]
    columns = {"ts_ns": times[step], "change": change, "category": np.array(CATEGORIES)[category], "step": step}
    frame = pl.DataFrame(columns).with_columns(gives=pl.col("change") > 0).sort("step", "gives", maintain_order=True)
    return frame.select(
        "ts_ns",
        order_key=pl.int_range(pl.len()),
        device_type=pl.lit("unknown"),
        device_index=pl.lit(0),
        action=pl.when("gives").then(pl.lit("alloc")).otherwise(pl.lit("free_requested")),
        requested_bytes=pl.col("change").abs(),
        category=pl.col("category"),
        inferred=pl.col("step") == 0,
    )


def _split_times(text: bytes, notes: Notes) -> tuple[list[int], bytes, int]:
    """Return the times in ns, the text of the levels, and where that begins."""
    start = _START.match(text)
    end = find_end(text, start.end()) if start else None
    if start is None or end is None or len(text) >= _LEVELS_LIMIT:
        said = "is too large" if len(text) >= _LEVELS_LIMIT else "ends within its times, before any size"
        raise UnreadableError(
            f"{notes.filename or 'The source'} looks like a memory timeline, but it {said}.",
            "Export it again, as .raw.json.gz if it is large.",
        )
    try:
        micros = msgspec.json.decode(text[start.end() : end], type=list[Decimal])
        times = [int(value * 1000) for value in micros if value.adjusted() < 16]
    except (msgspec.MsgspecError, ValueError) as error:
        raise UnreadableError(
            f"{notes.filename or 'The source'} looks like a memory timeline, but its times cannot be read: {error}",
            "Export it again.",
        ) from error
    rest = text[end:].lstrip(b", \t\r\n")
    closing = find_end(rest, 0) if rest[:1] == b"[" else None
    if closing is not None:
        rest = rest[:closing]
    return times, rest or b"[", len(text) - len(rest)


def _eight(row: list[int]) -> list[int]:
    """The levels of the eight categories; torch writes a zero before them."""
    levels = row[1:9]
    return levels + [0] * (8 - len(levels))


def _rescue_levels(value: object, at: int, notes: Notes) -> list[int] | None:
    if not isinstance(value, list) or len(value) > 64:
        return None
    sizes = [read_integer(item, at, notes, what="size") or 0 for item in value]
    return sizes if max(map(abs, sizes), default=0) < _INT64 else None


def _time_base(time_ns: int) -> str:
    return "unix" if time_ns >= _UNIX_FROM_NS else "relative"
