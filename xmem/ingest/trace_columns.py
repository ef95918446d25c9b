"""Turns decoded trace records into columns of memory events and spans, in exact nanoseconds."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

from xmem.ingest.adapter import Batch, Notes
from xmem.ingest.trace_records import (
    DEVICE_TYPES,
    INSTANTS,
    MEMORY,
    NO_ARGS,
    NO_RAW,
    OUT_OF_MEMORY,
    ExactEvent,
    Record,
    Span,
    decode_again,
)

Times: TypeAlias = npt.NDArray[np.int64]

BATCH_ROWS = 1 << 16
#: Span kinds by Kineto's category, today's and those of 2021.
KINDS = {
    "cpu_op": "operator", "Operator": "operator", "user_annotation": "annotation", "python_function": "python",
    "kernel": "kernel", "Kernel": "kernel", "gpu_memcpy": "memcpy", "Memcpy": "memcpy", "gpu_memset": "memset",
    "Memset": "memset", "cuda_sync": "sync", "gpu_user_annotation": "gpu_annotation", "overhead": "overhead",
    "Runtime": "runtime",
}  # fmt: skip
DEVICE_KINDS = ("kernel", "memcpy", "memset", "sync", "gpu_annotation")
_SPELLINGS_2021 = {"external_id": "external_id_2021", "input_shapes": "input_shapes_2021"}
_HOST = ("cpu_op", "Operator", "user_annotation", "python_function")
_INT64 = 1 << 63
_ADDRESS_MASK = (1 << 64) - 1
#: Below this many microseconds a float holds three decimals exactly.
_EXACT_BELOW = float(1 << 43)
#: Times are cut off here (the year 2096), so that a start and a duration add up in 64 bits.
_LARGEST_MICROS = 4_000_000_000_000_000
#: Times from here on (the year 1998) count from 1970, whatever base the file states.
_ABSOLUTE_FROM_NS = 900_000_000_000_000_000


class InexactTimesError(Exception):
    """Floats cannot hold these times: decode them again with every digit."""


class TraceColumns:
    """Collects records and hands them out as batches."""

    def __init__(self, notes: Notes, base_ns: int | None) -> None:
        self.notes = notes
        self.base_ns = base_ns
        self.absolute = False
        self.records = 0
        self.memory_records = 0
        self.memory_rows = 0
        self.oom_rows = 0
        self.other_devices: set[str] = set()
        self._devices: dict[tuple[str, int], None] = {}
        self._spans = _Frames()
        self._events = _Frames()

    def seen_devices(self) -> list[tuple[str, int]]:
        """Devices of the memory events, in order of appearance."""
        return list(self._devices)

    def add_devices(self, devices: list[tuple[str, int]]) -> None:
        """Add devices that others have seen."""
        self._devices |= dict.fromkeys(devices)

    def add(self, records: list[Record], text: bytes | None) -> None:
        """Take decoded records; `text` is the list they were decoded from, if that can be done again."""
        spans, memory = _part(records)
        if not self.notes.filters.spans and not self.notes.filters.steps:
            spans = []
        timed = spans if None not in [span.ts for span in spans] else [span for span in spans if span.ts is not None]
        whole = memory if _are_whole(memory) else list(filter(_is_whole, memory))
        try:
            starts, durations = to_ns([span.ts for span in timed]), to_ns([span.dur for span in timed])
            event_times = to_ns([record.ts for record in whole])
        except InexactTimesError:
            if text is None:  # pragma: no cover - records that are decoded carefully keep every digit
                raise
            return self.add(decode_again(text, self.notes), None)
        self.records += len(records)
        self.memory_records += len(memory)
        if len(whole) < len(memory):
            self.notes.add("missing_field", count=len(memory) - len(whole), detail="[memory] without Bytes or ts")
        if len(timed) < len(spans):
            self.notes.add("missing_field", count=len(spans) - len(timed), detail="a span without ts")
        if timed:
            self._spans.add(_span_frame(timed, self._placed(starts), self._checked(durations)))
        if whole:
            self._events.add(_event_frame(whole, self._placed(event_times)))
        return None

    def take(self, *, everything: bool = False) -> Iterator[Batch]:
        """Hand out batches that are large enough."""
        if self._events.rows >= (1 if everything else BATCH_ROWS):
            yield Batch("events", self._count(finish_events(self._events.empty(), self.notes)))
        if self._spans.rows >= (1 if everything else BATCH_ROWS):
            yield Batch("spans", self._wanted(finish_spans(self._spans.empty())))

    def _placed(self, times: Times) -> Times:
        """Add the base to times that are relative to it."""
        self._checked(times)
        if times[-1] >= _ABSOLUTE_FROM_NS:
            self.absolute = True
        return times if self.base_ns is None or self.absolute else times + self.base_ns

    def _checked(self, times: Times) -> Times:
        cut = int(np.count_nonzero(np.abs(times) >= _LARGEST_MICROS * 1000))
        if cut:
            self.notes.add("wide_integer", count=cut, detail="a time was cut off")
        return times

    def _wanted(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Drop the spans that the filters surely exclude."""
        filters = self.notes.filters
        if not filters.spans:
            return frame.filter(pl.col("kind") == "step")
        if not filters.stacks:
            frame = frame.filter(pl.col("kind") != "python")
        if filters.device and ":" in filters.device:
            index = filters.device.rpartition(":")[2]
            frame = frame.filter(
                pl.col("device_index").is_null() | (pl.col("device_index") == (int(index) if index.isdecimal() else -1))
            )
        if self.absolute or self.base_ns is not None:
            if filters.since_ns is not None:
                frame = frame.filter(pl.col("ts_ns") + pl.col("dur_ns") >= filters.since_ns)
            if filters.until_ns is not None:
                frame = frame.filter(pl.col("ts_ns") <= filters.until_ns)
        return frame

    def _count(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Keep the events of the device that is asked for, and count what there is."""
        wanted = self.notes.filters.device
        if wanted is not None:
            keep = (pl.col("device_type") == wanted) | (device_label() == wanted)
            self.other_devices.update(frame.filter(~keep).select(device_label().unique()).to_series())
            frame = frame.filter(keep)
        for kind, index in frame.select("device_type", "device_index").unique(maintain_order=True).iter_rows():
            self._devices[kind, index] = None
        self.oom_rows += frame.filter(pl.col("action") == "oom").height
        self.memory_rows += frame.filter(pl.col("action") != "oom").height
        return frame


class _Frames:
    """Columns of chunk after chunk. Each is made at once: values that live on would scatter those of the next."""

    def __init__(self) -> None:
        self.rows = 0
        self._frames: list[pl.DataFrame] = []

    def add(self, frame: pl.DataFrame) -> None:
        """Keep the columns of one chunk."""
        self.rows += frame.height
        self._frames.append(frame)

    def empty(self) -> pl.DataFrame:
        """Hand over what was collected and begin anew; a column that a chunk lacks is null in it."""
        frames, self._frames, self.rows = self._frames, [], 0
        same = all(frame.width == frames[0].width for frame in frames)
        return pl.concat(frames, how="vertical" if same else "diagonal")


def _part(records: list[Record]) -> tuple[list[Any], list[Any]]:
    """Part spans and memory events from the rest; records are all exact or all of types that tell."""
    if records and type(records[0]) is ExactEvent:
        spans: list[Any] = [record for record in records if record.ph == "X"]
        others: list[Any] = [record for record in records if record.ph != "X"]
    else:
        spans = [record for record in records if type(record) is Span]
        others = [record for record in records if type(record) in INSTANTS]
    names = [record.name for record in others]
    if names.count(MEMORY) == len(names):
        return spans, others
    return spans, [record for record in others if record.name == MEMORY or record.name == OUT_OF_MEMORY]


def _is_whole(record: Any) -> bool:
    args = record.args
    return args is not None and record.ts is not None and (args.size is not None or record.name == OUT_OF_MEMORY)


def _are_whole(memory: list[Any]) -> bool:
    """Say quickly whether all are whole; false may be wrong."""
    args = [record.args for record in memory]
    return None not in args and None not in [arg.size for arg in args] and None not in [record.ts for record in memory]


def _span_frame(spans: list[Any], starts: Times, durations: Times) -> pl.DataFrame:
    args = [span.args or NO_ARGS for span in spans]
    columns = {
        "kind": pl.Series([span.cat for span in spans], dtype=pl.String),
        "name": pl.Series([span.name for span in spans], dtype=pl.String),
        "process_id": _identifiers([span.pid for span in spans]),
        "thread_id": _identifiers([span.tid for span in spans]),
        "device_index": _integers([arg.device for arg in args]),
        "stream": _integers([arg.stream for arg in args]),
        "correlation_id": _integers([arg.correlation for arg in args]),
        "external_id": _integers([arg.external_id for arg in args]),
        "sequence_number": _integers([arg.sequence_number for arg in args]),
        "fwd_thread_id": _integers([arg.fwd_thread_id for arg in args]),
        "ts_ns": pl.Series(starts),
        "dur_ns": pl.Series(durations),
    }
    for column, values in _rare_columns(args).items():
        if values.count(NO_RAW) < len(values):
            columns[column] = _texts(values)
    old_ids = [arg.external_id_2021 for arg in args]
    if old_ids.count(None) < len(old_ids):
        columns["external_id_2021"] = _integers(old_ids)
    return pl.DataFrame(columns)


def _rare_columns(args: list[Any]) -> dict[str, list[msgspec.Raw]]:
    """Return the args that only some files hold; each is spelled out, which is three times as fast as a loop."""
    return {
        "input_shapes": [arg.input_dims for arg in args],
        "input_strides": [arg.input_strides for arg in args],
        "input_types": [arg.input_types for arg in args],
        "concrete_inputs": [arg.concrete_inputs for arg in args],
        "input_shapes_2021": [arg.input_dims_2021 for arg in args],
    }


def _event_frame(records: list[Any], times: Times) -> pl.DataFrame:
    args = [record.args for record in records]
    columns = {
        "ts_ns": pl.Series(times),
        "order_key": _integers([arg.ev_idx for arg in args]),
        "device": _integers([arg.device_type for arg in args]),
        "device_index": _integers([arg.device_id for arg in args]),
        "oom": pl.Series([record.name == OUT_OF_MEMORY for record in records], dtype=pl.Boolean),
        "bytes": _integers([arg.size for arg in args]),
        "address": _addresses([arg.address for arg in args]),
        "thread_id": _identifiers([record.tid for record in records]),
        "process_id": _identifiers([record.pid for record in records]),
        "total_allocated": _integers([arg.total_allocated for arg in args]),
        "total_reserved": _integers([arg.total_reserved for arg in args]),
    }
    return pl.DataFrame(columns)


def finish_events(frame: pl.DataFrame, notes: Notes) -> pl.DataFrame:
    """Name devices and actions; note what is missing or unknown.

    CPU events hold the bytes asked for, all others the bytes of the allocator's block.
    """
    known = pl.col("device").is_between(0, len(DEVICE_TYPES) - 1)
    unknown = frame.select((~known).fill_null(False).sum()).item()
    if unknown:
        notes.add("unknown_device_type", count=unknown)
    missing = frame.select(pl.any_horizontal(pl.col("device", "device_index").is_null()).sum()).item()
    if missing:
        notes.add("missing_field", count=missing, detail="[memory] without Device Type or Device Id")
    oom, cpu, size = pl.col("oom"), (pl.col("device") == 0).fill_null(False), pl.col("bytes").abs()
    free = pl.when(pl.col("bytes") < 0).then(pl.lit("free_requested")).otherwise(pl.lit("alloc"))
    return frame.with_columns(
        device_type=pl.when(known)
        .then(pl.col("device").replace_strict(dict(enumerate(DEVICE_TYPES)), default=None, return_dtype=pl.String))
        .when(pl.col("device").is_null())
        .then(pl.lit("unknown"))
        .otherwise(pl.concat_str(pl.lit("unknown"), pl.col("device").cast(pl.String))),
        device_index=pl.when(cpu).then(-1).otherwise(pl.col("device_index").fill_null(0)),
        action=pl.when(oom).then(pl.lit("oom")).otherwise(free),
        requested_bytes=pl.when(oom | cpu).then(size),
        block_bytes=pl.when(~oom & ~cpu).then(size),
        total_reserved=pl.when(~oom).then(pl.col("total_reserved")),
        address=pl.when(~oom).then(pl.col("address")),
    ).drop("oom", "bytes", "device")


def finish_spans(frame: pl.DataFrame) -> pl.DataFrame:
    """Tell kinds from Kineto's categories and names, and give device activity its device and stream."""
    category, label = pl.col("kind"), pl.col("name")
    kind = (
        pl.when(category.is_in(_HOST) & label.str.starts_with("ProfilerStep#"))
        .then(pl.lit("step"))
        .when((category == "python_function") & label.str.starts_with("nn.Module: "))
        .then(pl.lit("module"))
        .when(category.str.ends_with("_runtime") | category.str.ends_with("_driver"))
        .then(pl.lit("runtime"))
        .otherwise(category.replace_strict(KINDS, default="other", return_dtype=pl.String))
        .fill_null("other")
    )
    on_device = pl.col("kind").is_in(DEVICE_KINDS)
    frame = frame.with_columns(pl.col("name").fill_null(""))
    for new, old in _SPELLINGS_2021.items():
        if old in frame.columns:
            both = pl.coalesce(new, old) if new in frame.columns else pl.col(old)
            frame = frame.with_columns(both.alias(new)).drop(old)
    return frame.with_columns(kind=kind).with_columns(
        pl.when(~on_device).then(pl.col("process_id")).alias("process_id"),
        pl.when(~on_device).then(pl.col("thread_id")).alias("thread_id"),
        pl.when(on_device).then(pl.coalesce("device_index", "process_id")).alias("device_index"),
        pl.when(on_device).then(pl.coalesce("stream", "thread_id")).alias("stream"),
    )


def device_label() -> pl.Expr:
    """`cpu`, `cuda:0`: how people name a device."""
    kind = pl.col("device_type")
    return pl.when(kind == "cpu").then(kind).otherwise(pl.format("{}:{}", kind, pl.col("device_index")))


def to_ns(micros: list[Any]) -> Times:
    """Turn microseconds into nanoseconds without an error, None into 0.

    Raises InexactTimesError where floats cannot hold them.
    """
    if type(next((value for value in micros if value is not None), 0)) is not Decimal:
        try:
            series = pl.Series(micros, dtype=pl.Float64)
            times = (series.fill_null(0) if series.null_count() else series).to_numpy()
        except (TypeError, OverflowError):
            times = np.array([np.inf])
        if not len(times) or max(times.max(), -times.min()) < _EXACT_BELOW:
            return np.asarray(np.rint(times * 1000), np.int64)
        kinds = set(map(type, micros))
        if float in kinds:
            raise InexactTimesError
        if Decimal not in kinds and np.all(np.abs(times) < _LARGEST_MICROS):
            return np.asarray(pl.Series(micros, dtype=pl.Int64).fill_null(0).to_numpy() * 1000, np.int64)
    return np.array([_decimal_ns(value or 0) for value in micros], np.int64)


def _decimal_ns(value: float | Decimal) -> int:
    exact = Decimal(value)
    if exact.adjusted() > 15 or abs(exact) > _LARGEST_MICROS:
        exact = Decimal(_LARGEST_MICROS).copy_sign(exact)
    return int((exact * 1000).to_integral_value())


def _addresses(values: list[int | None]) -> pl.Series:
    """Kineto writes addresses as signed 64-bit decimals."""
    try:
        return pl.Series(values, dtype=pl.Int64).reinterpret(signed=False)
    except (OverflowError, TypeError):
        return pl.Series([value if value is None else value & _ADDRESS_MASK for value in values], dtype=pl.UInt64)


def _integers(values: list[int | None]) -> pl.Series:
    try:
        return pl.Series(values, dtype=pl.Int64)
    except (OverflowError, TypeError):
        return pl.Series(
            [value if value is None or -_INT64 <= value < _INT64 else None for value in values], dtype=pl.Int64
        )


def _identifiers(values: list[Any]) -> pl.Series:
    """Process and thread ids: numbers, or numbers as text; other text (`Spans`) is null."""
    try:
        return pl.Series(values, dtype=pl.Int64)
    except (OverflowError, TypeError):
        return _integers([_identifier(value) for value in values])


def _identifier(value: object) -> int | None:
    if isinstance(value, str):
        text = value.removeprefix("stream ")
        return int(text) if len(text) < 20 and text.lstrip("-").isdecimal() else None
    return value if isinstance(value, int) else None


def _texts(values: list[msgspec.Raw]) -> pl.Series:
    texts = pl.Series([None if value is NO_RAW else bytes(value) for value in values], dtype=pl.Binary)
    return texts.cast(pl.String, strict=False)
