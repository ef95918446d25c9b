"""Adapter for the event log, xmem's neutral format: JSON lines or Parquet, written by hooks and foreign tools.

The format is described in docs/event-log.md.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, BinaryIO

from xmem.errors import RefusedError, UnreadableError
from xmem.ingest.adapter import Batch, Notes
from xmem.ingest.event_log_columns import (
    FIRST_MADE_SPAN,
    LINE,
    column_types,
    complete,
    make_columns,
    name_spans,
    polars_type,
)
from xmem.ingest.snapshot_columns import Remarks, clean_text, show_tree
from xmem.schema import enums

if TYPE_CHECKING:
    import polars as pl

name = "event_log"

#: The version of the format that this adapter reads.
VERSION = 1
_FIRST_LINE = re.compile(rb'\A(?:\xef\xbb\xbf)?\s*\{[^\n]*"xmem"\s*:\s*\d')
_PARQUET = b"PAR1"
_SUFFIXES = (".xmem.jsonl", ".xmem.jsonl.gz", ".xmem.parquet")
_BLOCK = 1 << 20
_LINE_MOST = 64 << 20
#: Rows that a Parquet file can honestly hold for each of its bytes.
_ROWS_PER_BYTE = 64
_SIDE_TABLES = ("spans", "stacks", "devices", "segments", "blocks")
_RUN_FIELDS = ("torch_version", "alloc_conf", "allocator_settings", "time_base", "ring_buffer", "metadata")
_OWN_FIELDS = ("xmem", "rank", "device_type", "device_index")
_TIME_BASES = ("unix", "relative", "index")
_SIZED = ("alloc", "segment_alloc", "segment_free", "segment_map", "segment_unmap")


def sniff(head: bytes, filename: str) -> bool:
    """Recognise the first line of a log, or Parquet."""
    return _FIRST_LINE.match(head) is not None or head[:4] == _PARQUET or filename.endswith(_SUFFIXES)


def read(source: BinaryIO, notes: Notes) -> Iterator[Batch]:
    """Yield events and what stands beside them, in the order of the log.

    Raises UnreadableError where it is no event log, or of a newer version.
    """
    log = _Log(notes)
    first = source.read(4)
    if first == _PARQUET:
        yield from _read_parquet(first + source.read(), log)
    else:
        yield from _read_lines(source, first, log)
    log.finish()


class _Log:
    """What has been read of one log so far."""

    def __init__(self, notes: Notes) -> None:
        self.notes = notes
        self.remarks = Remarks()
        self._device: tuple[str, int] = ("cuda", 0)
        self._events = 0
        self._spans = FIRST_MADE_SPAN
        self._last_ns = 0
        self._timed = False
        notes.facts |= {"ordered": True, "pairing": "address", "time_base": "relative", "source_entries": 0}
        notes.facts |= {"ring_buffer": False, "truncated": False}

    def open(self, header: object) -> None:
        """Take the run fields of the first line."""
        if not isinstance(header, dict) or type(header.get("xmem")) is not int:
            raise UnreadableError(
                f"{self.notes.filename!r} is no event log: its first line must be an object"
                f' like {{"xmem": {VERSION}}}.',
                "The format is described in docs/event-log.md.",
            )
        if header["xmem"] > VERSION:
            raise UnreadableError(
                f"{self.notes.filename!r} is written in version {header['xmem']} of the event log;"
                f" this xmem reads version {VERSION}.",
                "Install a newer xmem.",
            )
        for key in header:
            if key not in _RUN_FIELDS and key not in _OWN_FIELDS:
                self.remarks.add("unknown_field", 1, f"run field {clean_text(key)[:80]}")
        for key in _RUN_FIELDS:
            if header.get(key) is not None:
                value = header[key]
                self.notes.facts[key] = value if key == "ring_buffer" else clean_text(show_tree(value))
        self.notes.facts["ring_buffer"] = self.notes.facts["ring_buffer"] is True
        if self.notes.facts["time_base"] not in _TIME_BASES:
            self.notes.facts["time_base"] = "relative"
        rank = header.get("rank")
        if type(rank) is int and 0 <= rank < 1 << 31:
            self.notes.rank = rank
        elif rank is not None:
            self.remarks.add("odd_value", 1, f"rank: {clean_text(show_tree(rank))[:80]}")
        kind, index = header.get("device_type"), header.get("device_index")
        kind = kind if isinstance(kind, str) else "cuda"
        self._device = kind, index if type(index) is int else -1 if kind == "cpu" else 0

    def take(self, table: str, frame: pl.DataFrame) -> Iterator[Batch]:
        """Take rows of one table; yield them with what they may leave out filled in."""
        if table != "events":
            frame = self._place(frame) if table in ("devices", "segments") else frame
            rows = complete(table, frame, self.remarks, int(frame[LINE][0])).drop(LINE)
            if rows.height:
                yield Batch(table, rows)
            return
        self.notes.facts["source_entries"] += frame.height  # type: ignore[operator]
        frame = self._drop_faulty(self._time(self._place(frame))).drop(LINE)
        if "alloc_id" in frame.columns and frame["alloc_id"].null_count() < frame.height:
            self.notes.facts["pairing"] = "given"
        frame, spans = name_spans(frame, self._spans)
        if spans is not None:
            self._spans += spans.height
            yield Batch("spans", spans)
        self._events += frame.height
        if frame.height:
            yield Batch("events", frame)

    def finish(self) -> None:
        """Hand the remarks over."""
        for code, (count, at, detail) in self.remarks.found.items():
            self.notes.add(code, count=count, at=at, unit="line", detail=detail)

    def _place(self, frame: pl.DataFrame) -> pl.DataFrame:
        import polars as pl

        kind, index = self._device
        defaults = {"device_type": pl.lit(kind), "device_index": pl.lit(index, pl.Int32)}
        return frame.with_columns(
            (pl.col(key).fill_null(value) if key in frame.columns else value).alias(key)
            for key, value in defaults.items()
        )

    def _time(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Give a row without a time that of the row before it; the number of the row where no row has one."""
        import polars as pl

        timed = "ts_ns" in frame.columns and frame["ts_ns"].null_count() < frame.height
        if not timed and not self._timed:
            self.notes.facts["time_base"] = "index"
            self.remarks.add("no_times", None, "events carry no ts_ns")
            return frame.with_columns((pl.int_range(pl.len(), dtype=pl.Int64) + self._events).alias("ts_ns"))
        self._timed = True
        time = pl.col("ts_ns").forward_fill().fill_null(self._last_ns) if timed else pl.lit(self._last_ns, pl.Int64)
        frame = frame.with_columns(time.alias("ts_ns"))
        self._last_ns = int(frame["ts_ns"][-1])
        return frame

    def _drop_faulty(self, frame: pl.DataFrame) -> pl.DataFrame:
        import polars as pl

        absent = [key for key in ("action", "requested_bytes", "block_bytes") if key not in frame.columns]
        frame = frame.with_columns(pl.lit(None, polars_type(column_types("events")[key])).alias(key) for key in absent)
        size = pl.coalesce("block_bytes", "requested_bytes")
        no_size = pl.col("action").is_in(_SIZED) & size.is_null()
        for faulty, detail in (
            (pl.col("action").is_null(), "an event has no action"),
            (no_size, "an event has no size"),
            ((size < 0).fill_null(False), "an event has a negative size"),
        ):
            lines = frame.filter(faulty)[LINE]
            if len(lines):
                self.remarks.add("missing_field", int(lines[0]), detail, len(lines))
                frame = frame.filter(~faulty)
        unknown = frame.filter(~pl.col("action").is_in(enums()["action"]))
        if unknown.height:
            self.remarks.add("unknown_action", int(unknown[LINE][0]), str(unknown["action"][0]), unknown.height)
        return frame


def _read_lines(source: BinaryIO, first: bytes, log: _Log) -> Iterator[Batch]:
    number, opened = 0, False
    for lines, whole in _split_lines(source, first, log.notes):
        records: list[tuple[int, dict[str, Any]]] = []
        for line in lines:
            number += 1
            if not line.strip():
                continue
            last = not whole and line is lines[-1]
            if not opened:
                log.open(_decode_first(line))
                opened = True
            elif (record := _decode(line, number, log, last=last)) is not None:
                records.append((number, record))
        yield from _sort_out(records, log)
    if not opened:
        log.open(None)


def _split_lines(source: BinaryIO, first: bytes, notes: Notes) -> Iterator[tuple[list[bytes], bool]]:
    """Yield whole lines, many at a time; at the end what stands behind the last line end, marked as not whole."""
    rest = first.removeprefix(b"\xef\xbb\xbf")
    if rest != first:
        notes.add("byte_order_mark")
    while block := source.read(_BLOCK):
        lines = (rest + block).split(b"\n")
        rest = lines.pop()
        if len(rest) > _LINE_MOST:
            raise UnreadableError(
                f"{notes.filename!r} cannot be read: one of its lines is longer than {_LINE_MOST >> 20} MiB.",
                "An event log has one object a line; see docs/event-log.md.",
            )
        if lines:
            yield lines, True
    if rest.strip():
        yield [rest], False


def _decode_first(line: bytes) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _decode(line: bytes, number: int, log: _Log, *, last: bool) -> dict[str, Any] | None:
    import msgspec

    try:
        record = msgspec.json.decode(line)
    except (ValueError, RecursionError) as error:
        try:
            record = json.loads(line.decode("utf-8", "replace"), strict=False)
        except (ValueError, RecursionError):
            if last:
                log.notes.facts["truncated"] = True
            log.remarks.add("truncated" if last else "bad_record", number, str(error)[:150])
            return None
        log.remarks.add("repaired_string", number, str(error)[:150])
    if not isinstance(record, dict):
        log.remarks.add("bad_record", number, f"the line is of type {type(record).__name__}")
        return None
    return record


def _sort_out(records: list[tuple[int, dict[str, Any]]], log: _Log) -> Iterator[Batch]:
    """Make one frame a table of these lines; the order within a table is kept."""
    by_table: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for number, record in records:
        table = record.get("table", "events")
        if not isinstance(table, str) or (table != "events" and table not in _SIDE_TABLES):
            log.remarks.add("bad_record", number, f"there is no table {clean_text(show_tree(table))[:80]!r}")
            continue
        by_table.setdefault(table, []).append((number, record))
    for table, rows in by_table.items():
        numbers = [number for number, _ in rows]
        yield from log.take(table, make_columns(table, [record for _, record in rows], log.remarks, numbers))


def _read_parquet(data: bytes, log: _Log) -> Iterator[Batch]:
    import polars as pl

    try:
        said = pl.read_parquet_metadata(io.BytesIO(data)).get("xmem")
        rows = pl.scan_parquet(io.BytesIO(data)).select(pl.len()).collect().item()
        columns = pl.scan_parquet(io.BytesIO(data)).collect_schema().names()
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
        raise _damaged_parquet(log, error) from None
    _open_parquet(said, columns, log)
    if rows > _ROWS_PER_BYTE * len(data) + (1 << 20):
        raise RefusedError(
            f"{log.notes.filename!r} was refused: its {len(data):,} bytes claim to hold {rows:,} events.",
            "An event has a time and an address of its own; write a smaller log.",
        )
    yield from _take_parquet(data, log)


def _open_parquet(said: str | None, columns: list[str], log: _Log) -> None:
    """Take the run fields of the metadata; other tools may leave them out."""
    try:
        header = json.loads(said or "null")
    except (ValueError, RecursionError):
        header = None
    if "action" not in columns:
        raise UnreadableError(
            f"{log.notes.filename!r} is no event log: it is a Parquet file without a column action.",
            "The format is described in docs/event-log.md.",
        )
    log.open({"xmem": VERSION} if said is None else header)


def _take_parquet(data: bytes, log: _Log) -> Iterator[Batch]:
    import polars as pl

    types = column_types("events")
    try:
        found = pl.scan_parquet(io.BytesIO(data)).collect_schema()
        for column in found:
            if column not in types:
                log.remarks.add("unknown_field", None, f"events.{clean_text(column)[:80]}")
        given = pl.scan_parquet(io.BytesIO(data)).select(name for name in found if name in types).collect()
        frame = given.select(_cast_column(given[name], polars_type(types[name]), log) for name in given.columns)
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
        raise _damaged_parquet(log, error) from None
    for part in frame.with_row_index(LINE).with_columns(pl.col(LINE).cast(pl.Int64)).iter_slices(1 << 17):
        yield from log.take("events", part)


def _cast_column(values: pl.Series, wanted: pl.DataType, log: _Log) -> pl.Series:
    """Bring a column into its type; values that do not fit are null, and said."""
    import polars as pl

    try:
        cast = values.cast(wanted, strict=False)
    except pl.exceptions.PolarsError:
        cast = pl.Series(values.name, [None] * len(values), dtype=wanted)
    lost = cast.null_count() - values.null_count()
    log.remarks.add("odd_value", None, f"{values.name} is of type {values.dtype}", count=lost)
    return cast


def _damaged_parquet(log: _Log, error: BaseException) -> UnreadableError:
    said = (str(error).splitlines() or ["no reason given"])[0][:100]
    return UnreadableError(
        f"{log.notes.filename!r} cannot be read: it is a damaged Parquet file ({said}).",
        "Copy the file again, or write it again.",
    )
