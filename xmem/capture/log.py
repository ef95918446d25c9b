"""Writes what a recorder saw as an event log, the neutral format that `xmem ingest` reads."""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from xmem.capture.recorder import Recorder

_SPAN_FIELDS = ("span_id", "parent_id", "kind", "name", "ts_ns", "dur_ns", "sequence_number")
_JSON_FIELDS = ("input_shapes", "input_strides", "input_types", "concrete_inputs")


def write_log(recorder: Recorder, path: Path, facts: dict[str, Any]) -> None:
    """Write the recording to `path` (gzipped where it ends in .gz), whole or not at all."""
    encode = msgspec.json.Encoder().encode
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    text = b"\n".join(encode(line) for line in _lines(recorder, facts)) + b"\n"
    try:
        with open(partial, "wb") as file:
            file.write(gzip.compress(text, 6, mtime=0) if path.suffix == ".gz" else text)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _lines(recorder: Recorder, facts: dict[str, Any]) -> Iterator[dict[str, Any]]:
    start = recorder.events[0][0] if recorder.events else 0
    start = min(start, recorder.spans[0][4]) if recorder.spans else start
    yield {"xmem": 1, "time_base": "relative", "device_type": recorder.device_type, "device_index": -1, **facts}
    for span in recorder.spans:
        yield _span_line(span, start)
    for ts_ns, action, alloc_id, size, span_id, step, phase in recorder.events:
        category = recorder.categories.get(alloc_id)
        line = {"ts_ns": ts_ns - start, "action": action, "alloc_id": alloc_id, "requested_bytes": size}
        place = {"span_id": span_id, "step": step, "phase": phase, "category": category or _category(phase)}
        yield {key: value for key, value in {**line, **place}.items() if value is not None}


def _category(phase: str) -> str:
    """What nobody claimed: made in forward it is an activation, elsewhere a temporary."""
    return "activation" if phase == "forward" else "temporary"


def _span_line(span: list[Any], start: int) -> dict[str, Any]:
    line = {"table": "spans", "thread_id": 1, **dict(zip(_SPAN_FIELDS, span, strict=False))}
    line["ts_ns"] -= start
    for name, value in zip(_JSON_FIELDS, span[len(_SPAN_FIELDS) :], strict=False):
        if value is not None:
            line[name] = msgspec.json.encode(value).decode()
    return {key: value for key, value in line.items() if value is not None}
