"""Adapter for memory snapshots: torch.cuda.memory._snapshot() and memory_snapshot() as pickle or JSON, torch 2.0 on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, BinaryIO

from xmem.errors import UnreadableError
from xmem.ingest import snapshot_tables as tables
from xmem.ingest.adapter import LATE_STACKS, Batch, Notes
from xmem.schema import enums

if TYPE_CHECKING:
    import polars as pl

    from xmem.ingest.snapshot_process import Message

name = "cuda_snapshot"

_PICKLE = re.compile(rb"\x80[\x02-\x05]|[\]}]q|\((?:dp|lp|[di])|c[A-Za-z_][\w.]*\n[A-Za-z_][\w.]*\n[(qp\x94)]")
_ARCHIVE = b"PK\x03\x04"
_JSON_KEYS = re.compile(rb'"(?:device_traces|segments)"\s*:\s*\[|"total_size"\s*:\s*\d+.*"blocks"\s*:', re.DOTALL)
_SUFFIXES = (".pickle", ".pkl", ".pickle.gz", ".pkl.gz")
_JSON_STARTS = (b"{", b"[")
_ENTRY_TEXTS = ("action", "pool_id", "user_metadata", "compile_context", "category")
_SEGMENT_TEXTS = ("segment_type", "pool_id")
#: What names the backend in a recorded stack, where it is not CUDA.
_BACKENDS = {"XPUCachingAllocator": "xpu", "/torch/xpu/": "xpu", "HIPCachingAllocator": "hip"}
_DEVICE = re.compile(r"\w+:(\d+)")


def sniff(head: bytes, filename: str) -> bool:
    """Recognise a pickle of any protocol, an archive of torch.save, and a snapshot dumped as JSON."""
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text[:1] in _JSON_STARTS:
        return b'"traceEvents"' not in head and _JSON_KEYS.search(head) is not None
    if head[:4] == _ARCHIVE:
        return b"data.pkl" in head or filename.endswith((".pt", ".pth", *_SUFFIXES))
    return _PICKLE.match(head) is not None or filename.endswith(_SUFFIXES)


def read(source: BinaryIO, notes: Notes) -> Iterator[Batch]:
    """Yield events as they are read, then stacks, segments, blocks and annotations.

    Raises RefusedError for a hostile file, UnreadableError where there is no snapshot in it.
    """
    from xmem.ingest.snapshot_process import read_messages

    match = _DEVICE.fullmatch(notes.filters.device or "")
    device = int(match[1]) if match else None
    snapshot = _Reading(notes)
    for message in read_messages(source, notes.filename, stacks=notes.filters.stacks, device=device):
        yield from snapshot.take(message)
    yield from snapshot.finish()


class _Reading:
    """What has been read of one snapshot so far."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self._vocabulary = tables.Vocabulary()
        self._device_type: str | None = None
        self._stacks = 0
        self._empty_stack: int | None = None
        self._entries = 0
        self._events = 0
        self._indexed: bool | None = None
        self._first_us: int | None = None
        self._last_us = 0
        self._traced: list[pl.DataFrame] = []
        self._segments: list[pl.DataFrame] = []
        self._blocks: list[pl.DataFrame] = []
        self._annotations: list[pl.DataFrame] = []
        self._closed = False

    def take(self, message: Message) -> Iterator[Batch]:
        """Take a message; yield what is complete."""
        if message.kind == "stacks":
            yield from self._take_stacks(message)
            return
        if message.kind == "late_stacks":
            yield from self._close()
            yield Batch(LATE_STACKS, tables.read_columns(message, self._vocabulary, ()))
            return
        self._vocabulary.learn(message.facts.get("words", {}))
        if message.kind == "facts":
            self._take_facts(message)
        elif message.kind == "events":
            yield from self._take_events(message)
        elif message.kind == "segments":
            self._segments.append(self._place(message, _SEGMENT_TEXTS))
        elif message.kind == "blocks":
            self._blocks.append(self._place(message, ("state",)))
        elif message.kind == "annotations":
            self._annotations.append(tables.read_columns(message, self._vocabulary, ("stage", "name")))
        elif message.kind == "end":
            for code, (count, at, detail) in message.facts["remarks"].items():
                self._notes.add(code, count=count, at=at, detail=detail)

    def _take_facts(self, message: Message) -> None:
        facts, notes = message.facts, self._notes
        self._entries = sum(count for _, count in facts["entries"])
        notes.facts |= {"ordered": True, "source_entries": self._entries, "time_base": "unix", "ring_buffer": False}
        notes.facts |= {"alloc_conf": facts["alloc_conf"], "allocator_settings": facts["settings"], "truncated": False}
        self._device_type = facts["device_type"]
        if facts["cut"]:
            notes.facts["truncated"] = True
            notes.add("truncated", at=facts["bytes"], unit="byte", detail=facts["damage"])
        elif facts["damage"]:
            notes.add("unreadable_part", detail=facts["damage"])
        if facts["invalid_utf8"]:
            notes.add("invalid_utf8")
        notes.add("repaired_syntax", count=facts["commas"], detail="a comma before a closing bracket")

    def _take_stacks(self, message: Message) -> Iterator[Batch]:
        words = message.facts["words"]
        self._vocabulary.learn({"frames": words})
        if self._device_type is None:
            self._device_type = next((kind for mark, kind in _BACKENDS.items() if mark in "\n".join(words)), None)
        columns = tables.make_stacks(message, self._vocabulary.known("frames"), self._stacks)
        lengths = message.columns["lengths"][0]
        if self._empty_stack is None and not lengths.all():
            self._empty_stack = self._stacks + int((lengths == 0).argmax())
        self._stacks += columns.height
        yield Batch("stacks", columns)

    def _take_events(self, message: Message) -> Iterator[Batch]:
        import polars as pl

        frame = tables.read_columns(message, self._vocabulary, _ENTRY_TEXTS)
        times, missing = frame["time_us"], frame["time_us"].null_count()
        if self._indexed is None:
            self._indexed = missing == frame.height
            self._notes.facts["time_base"] = "index" if self._indexed else "unix"
            self._first_us = None if self._indexed else int(times.min())  # type: ignore[arg-type]
        if missing:
            self._notes.add("no_times", count=missing, at=message.facts["at"] + int(times.is_null().arg_max() or 0))
        frame = tables.time_events(frame, message.facts["at"], indexed=self._indexed, last_us=self._last_us)
        self._last_us = int(frame["ts_ns"][-1]) // 1000
        frame = self._drop_faulty(tables.find_faults(frame), message.facts["at"])
        host, index = message.facts["host"], message.facts["device"]
        if not host:
            self._traced.append(frame.select("action", "address", pl.lit(index, dtype=pl.Int32).alias("device_index")))
        kind, index = ("cpu", -1) if host else (self._device_type or "cuda", index)
        self._events += frame.height
        if frame.height:
            yield Batch("events", tables.make_events(frame, kind, index))

    def _drop_faulty(self, frame: pl.DataFrame, at: int) -> pl.DataFrame:
        import polars as pl

        said = (
            ("no_action", "missing_field", "an entry has no action"),
            ("no_size", "missing_field", "an entry has no size"),
            ("below_zero", "bad_record", "an entry has a negative size"),
        )
        for column, code, detail in said:
            faulty = frame[column]
            if faulty.any():
                self._notes.add(code, count=int(faulty.sum()), at=at + int(faulty.arg_max() or 0), detail=detail)
        unknown = ~frame["action"].is_in(enums()["action"])
        if unknown.any():
            first = int(unknown.arg_max() or 0)
            self._notes.add(
                "unknown_action", count=int(unknown.sum()), at=at + first, detail=str(frame["action"][first])
            )
        return frame.filter(~(pl.col("no_action") | pl.col("no_size") | pl.col("below_zero")))

    def _place(self, message: Message, texts: tuple[str, ...]) -> pl.DataFrame:
        """Add what the process does not say: the device's type, whose number this is, no stack where it is empty."""
        import polars as pl

        frame = tables.read_columns(message, self._vocabulary, texts)
        host = message.facts["host"]
        stack = pl.when(pl.col("stack_id") != (-1 if self._empty_stack is None else self._empty_stack))
        frame = frame.with_columns(stack.then(pl.col("stack_id")).alias("stack_id"))
        if message.kind == "segments":
            number = pl.int_range(pl.len(), dtype=pl.Int64) + message.facts["at"]
            index = pl.lit(-1) if host else pl.col("device").fill_null(0)
            kind = "cpu" if host else self._device_type or "cuda"
            frame = frame.with_columns(
                number.alias("segment"), index.cast(pl.Int64, strict=False).alias("device_index")
            )
            frame = frame.with_columns(pl.lit(kind).alias("device_type")).drop("device")
        return frame.with_columns((pl.col("segment") * 2 + int(host)).alias("segment"))

    def _close(self) -> Iterator[Batch]:
        """Yield segments, blocks and spans, once: only stacks may still follow."""
        import polars as pl

        if self._closed:
            return
        self._closed = True
        if self._segments:
            parts = self._blocks or [tables.no_blocks()]
            segments, blocks = tables.make_segments(pl.concat(self._segments), pl.concat(parts))
            lost = sum(part.height for part in self._segments) - segments.height
            self._notes.add("missing_field", count=lost, detail="a segment has no address or no size, or stands twice")
            gaps = tables.count_untiled(segments, blocks)
            self._notes.add("state_mismatch", count=gaps, detail="the blocks of a segment do not add up to its size")
            self._look_for_ring(segments, blocks)
            yield Batch("segments", segments)
            yield Batch("blocks", blocks if self._notes.filters.stacks else blocks.drop("stack_id"))
        if self._annotations:
            spans, _ = tables.make_spans(pl.concat(self._annotations), self._first_us or 0, self._last_us)
            yield Batch("spans", spans)

    def finish(self) -> Iterator[Batch]:
        """Yield what was not yielded before, and say what the snapshot lacks."""
        yield from self._close()
        if self._entries and not self._events and not self._segments:
            raise UnreadableError(
                f"{self._notes.filename!r} cannot be read: it is made like a memory snapshot,"
                " but none of its entries is one.",
                "Dump a fresh snapshot with torch.cuda.memory._dump_snapshot(FILE).",
            )
        if self._entries == 0:
            self._notes.add("no_history")
        elif self._notes.filters.stacks and self._stacks == (self._empty_stack is not None):
            self._notes.add("no_stacks", count=self._entries)

    def _look_for_ring(self, segments: pl.DataFrame, blocks: pl.DataFrame) -> None:
        """Say so where history was recorded and is gone."""
        import polars as pl

        if not self._traced:
            return
        traced = pl.concat(self._traced)
        live = blocks.filter(pl.col("state") != "inactive")
        live = live.join(segments.select("segment_id", "device_index"), on="segment_id")
        detail = tables.find_overwritten(traced, live)
        if detail:
            self._notes.facts["ring_buffer"] = True
            self._notes.add("ring_buffer", detail=detail)
