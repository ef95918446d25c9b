"""The records of a torch.profiler trace: typed for speed, and taken from plain JSON where types do not fit."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation
from typing import Annotated, Any, ClassVar, Union

import msgspec

from xmem.ingest.adapter import Notes

MEMORY, OUT_OF_MEMORY = "[memory]", "[OutOfMemory]"
#: c10::DeviceType by number (torch 2.13).
DEVICE_TYPES = (
    "cpu", "cuda", "mkldnn", "opengl", "opencl", "ideep", "hip", "fpga", "maia", "xla", "vulkan", "metal", "xpu",
    "mps", "meta", "hpu", "ve", "lazy", "ipu", "mtia", "privateuseone",
)  # fmt: skip
_DEVICE_NUMBERS = {name: number for number, name in enumerate(DEVICE_TYPES)}
_INT64 = 1 << 63
_UINT64 = (1 << 64) - 1
NO_RAW = msgspec.Raw()


Int64 = Annotated[int, msgspec.Meta(ge=-_INT64, le=_INT64 - 1)]


class SpanArgs(msgspec.Struct, gc=False):
    """What is needed of the args of a span."""

    external_id: Int64 | None = msgspec.field(name="External id", default=None)
    external_id_2021: Int64 | None = msgspec.field(name="external id", default=None)
    sequence_number: Int64 | None = msgspec.field(name="Sequence number", default=None)
    fwd_thread_id: Int64 | None = msgspec.field(name="Fwd thread id", default=None)
    correlation: Int64 | None = None
    device: Int64 | None = None
    stream: Int64 | None = None
    input_dims: msgspec.Raw = msgspec.field(name="Input Dims", default=NO_RAW)
    input_strides: msgspec.Raw = msgspec.field(name="Input Strides", default=NO_RAW)
    input_types: msgspec.Raw = msgspec.field(name="Input type", default=NO_RAW)
    concrete_inputs: msgspec.Raw = msgspec.field(name="Concrete Inputs", default=NO_RAW)
    input_dims_2021: msgspec.Raw = msgspec.field(name="Input dims", default=NO_RAW)


class MemoryArgs(msgspec.Struct, gc=False):
    """What is needed of the args of a memory event."""

    ev_idx: Int64 | None = msgspec.field(name="Ev Idx", default=None)
    size: Int64 | None = msgspec.field(name="Bytes", default=None)
    address: Int64 | None = msgspec.field(name="Addr", default=None)
    device_type: Int64 | None = msgspec.field(name="Device Type", default=None)
    device_id: Int64 | None = msgspec.field(name="Device Id", default=None)
    total_allocated: Int64 | None = msgspec.field(name="Total Allocated", default=None)
    total_reserved: Int64 | None = msgspec.field(name="Total Reserved", default=None)


class Args(SpanArgs, gc=False):
    """The args of any record."""

    ev_idx: Int64 | None = msgspec.field(name="Ev Idx", default=None)
    size: Int64 | None = msgspec.field(name="Bytes", default=None)
    address: Int64 | None = msgspec.field(name="Addr", default=None)
    device_type: Int64 | None = msgspec.field(name="Device Type", default=None)
    device_id: Int64 | None = msgspec.field(name="Device Id", default=None)
    total_allocated: Int64 | None = msgspec.field(name="Total Allocated", default=None)
    total_reserved: Int64 | None = msgspec.field(name="Total Reserved", default=None)


class Span(msgspec.Struct, gc=False, tag_field="ph", tag="X"):
    """A complete event, times in microseconds."""

    ph: ClassVar[str] = "X"
    cat: str | None = None
    name: str | None = None
    pid: Int64 | str | None = None
    tid: Int64 | str | None = None
    ts: int | float | None = None
    dur: int | float | None = None
    args: SpanArgs | None = None


class Instant(msgspec.Struct, gc=False, tag_field="ph", tag="i"):
    """An event without a duration: memory events are such."""

    ph: ClassVar[str] = "i"
    name: str | None = None
    pid: Int64 | str | None = None
    tid: Int64 | str | None = None
    ts: int | float | None = None
    args: MemoryArgs | None = None


class Arrow(msgspec.Struct, gc=False, tag_field="ph", tag="s"):
    """A record of which nothing is needed: flow arrows, names of processes and threads."""

    ph: ClassVar[str] = "s"
    name: ClassVar[str] = ""


class ExactEvent(msgspec.Struct, gc=False):
    """Any record, with every digit of its times."""

    ph: str | None = None
    cat: str | None = None
    name: str | None = None
    pid: Int64 | str | None = None
    tid: Int64 | str | None = None
    ts: Any = None
    dur: Any = None
    args: Args | None = None


Record = Span | Instant | Arrow | ExactEvent
NO_ARGS = Args()


def _variants(kind: type[msgspec.Struct], tags: str) -> tuple[type[msgspec.Struct], ...]:
    return tuple(msgspec.defstruct(f"{kind.__name__}_{tag}", [], bases=(kind,), tag=tag, gc=False) for tag in tags)


#: The types of records that may be memory events.
INSTANTS = frozenset((Instant, *_variants(Instant, "ICn")))
#: Tells records by `ph`; one that it does not know makes it fail.
_KINDS = (Span, *INSTANTS, Arrow, *_variants(Arrow, "tfMBEbeNODPvRc"))
_FAST = msgspec.json.Decoder(list[Union[_KINDS]])  # type: ignore[valid-type]  # noqa: UP007
_EXACT = msgspec.json.Decoder(list[ExactEvent], float_hook=Decimal)
_TIME_TYPES = (int, Decimal, type(None))


def decode_fast(text: bytes) -> list[Record]:
    """Decode a JSON list of records whose fields have the usual types."""
    records: list[Record] = _FAST.decode(text)
    return records


def decode_exact(text: bytes) -> list[Record]:
    """Decode a JSON list of records and keep every digit of their times."""
    records = _EXACT.decode(text)
    if not all(type(record.ts) in _TIME_TYPES and type(record.dur) in _TIME_TYPES for record in records):
        raise ValueError("a time is no number")
    return list(records)


def decode_again(text: bytes, notes: Notes) -> list[Record]:
    """Decode once more what `decode_fast` decoded, with every digit of the times."""
    try:
        return decode_exact(text)
    except (msgspec.ValidationError, ValueError):
        values = msgspec.json.Decoder(list[Any], float_hook=Decimal).decode(text)
        return [record for value in values if (record := rescue_event(value, 0, notes)) is not None]


def rescue_event(value: object, at: int, notes: Notes) -> Record | None:
    """Make a record of plain JSON whose fields have unusual types; None where it is no object."""
    if not isinstance(value, dict):
        return None
    args = value.get("args")
    return ExactEvent(
        ph=_text(value.get("ph")),
        cat=_text(value.get("cat")),
        name=_text(value.get("name")),
        pid=_identifier(value.get("pid")),
        tid=_identifier(value.get("tid")),
        ts=_time(value.get("ts"), at, notes),
        dur=_time(value.get("dur"), at, notes),
        args=_args(args, at, notes) if isinstance(args, dict) else None,
    )


def read_integer(value: object, at: int, notes: Notes, *, what: str = "") -> int | None:
    """Read an integer that may be written as text, in hexadecimal or with a fraction; what is wider is left out."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        number = value
    else:
        number = _odd_integer(value, what)
        if number is not None:
            notes.add("odd_number", at=at, unit="byte", detail=f"{what}: {value!r}")
    if number is not None and what == "Bytes" and _INT64 <= number <= _UINT64:
        notes.add("odd_number", at=at, unit="byte", detail=f"{what}: {number} is a free written without a sign")
        number -= _UINT64 + 1
    if number is not None and not -_INT64 <= number < (_UINT64 + 1 if what == "Addr" else _INT64):
        notes.add("wide_integer", at=at, unit="byte", detail=f"{what}: {str(number)[:80]}")
        return None
    return number


def _odd_integer(value: object, what: str) -> int | None:
    try:
        if isinstance(value, str) and len(value) <= 100:
            text = value.strip()
            if what == "Device Type" and text.lower() in _DEVICE_NUMBERS:
                return _DEVICE_NUMBERS[text.lower()]
            if text.lower().lstrip("+-").startswith("0x"):
                return int(text, 16)
            value = Decimal(text)
        if isinstance(value, Decimal) and value.adjusted() > 30:  # not worth its digits
            return _UINT64 + 1
        if isinstance(value, (bool, Decimal, float)):
            return int(value)
    except (ValueError, OverflowError, InvalidOperation):
        pass
    return None


_INTEGERS = tuple(
    (field.name, field.encode_name) for field in msgspec.structs.fields(Args) if field.type is not msgspec.Raw
)


_RAW = tuple((field.name, field.encode_name) for field in msgspec.structs.fields(Args) if field.type is msgspec.Raw)


def _args(args: dict[Any, Any], at: int, notes: Notes) -> Args:
    values: dict[str, Any] = {
        name: read_integer(args.get(key), at, notes, what=key) for name, key in _INTEGERS if key in args
    }
    values |= {name: msgspec.Raw(msgspec.json.encode(args[key], enc_hook=str)) for name, key in _RAW if key in args}
    return Args(**values)


def _text(value: object) -> str | None:
    return value if value is None or isinstance(value, str) else str(value)


def _identifier(value: object) -> int | str | None:
    if isinstance(value, Decimal):
        value = int(value) if value.is_finite() and value.adjusted() < 20 else None
    if isinstance(value, int):
        return value if -_INT64 <= value < _INT64 else None
    return value if value is None or isinstance(value, str) else str(value)


def _time(value: object, at: int, notes: Notes) -> Decimal | None:
    if isinstance(value, (int, Decimal)) and not isinstance(value, bool):
        return Decimal(value)
    if isinstance(value, str) and len(value) <= 100:
        try:
            number = Decimal(value.strip())
        except InvalidOperation:
            return None
        notes.add("odd_number", at=at, unit="byte", detail=f"time: {value!r}")
        return number if number.is_finite() else None
    return None
