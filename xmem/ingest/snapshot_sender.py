"""Main of the reading process: reads a snapshot from standard input and sends its columns to standard output.

A message is one line of JSON (what it is, how many rows, which columns, which new words) and then the columns, raw.
Imports the standard library only.
"""

from __future__ import annotations

import json
import os
import sys
from array import array
from collections.abc import Iterator
from typing import Any

from xmem.ingest.safe_pickle import DamagedDataError, HostileDataError, Limits, Meter, drop_privileges
from xmem.ingest.snapshot_columns import (
    Budget,
    Pools,
    Record,
    Remarks,
    Rows,
    Stacks,
    Words,
    show_tree,
    take_integers,
    take_words,
)
from xmem.ingest.snapshot_forms import ForeignDataError, Snapshot, read_snapshot

_SLICE = 2048
_MESSAGE = 32 * _SLICE

#: Columns of each kind of record: name, type, and the keys under which versions of torch put it.
#: Q is an address, q another integer, w a text, p a pool id.
ENTRY = (
    ("action", "w", ("action",)),
    ("address", "Q", ("addr", "address")),
    ("size", "q", ("size",)),
    ("stream", "q", ("stream",)),
    ("time_us", "q", ("time_us",)),
    ("device_free", "q", ("device_free",)),
    ("pool_id", "p", ("segment_pool_id", "pool_id")),
    ("user_metadata", "w", ("user_metadata",)),
    ("compile_context", "w", ("compile_context",)),
    ("category", "w", ("category",)),
)
SEGMENT = (
    ("device", "q", ("device",)),
    ("address", "Q", ("address",)),
    ("total_bytes", "q", ("total_size",)),
    ("allocated_bytes", "q", ("allocated_size",)),
    ("active_bytes", "q", ("active_size",)),
    ("requested_bytes", "q", ("requested_size",)),
    ("stream", "q", ("stream",)),
    ("is_expandable", "q", ("is_expandable",)),
    ("segment_type", "w", ("segment_type",)),
    ("pool_id", "p", ("segment_pool_id", "pool_id")),
)
BLOCK = (
    ("segment", "q", ("segment",)),
    ("address", "Q", ("address",)),
    ("block_bytes", "q", ("size",)),
    ("requested_bytes", "q", ("requested_size",)),
    ("state", "w", ("state",)),
)
ANNOTATION = (
    ("stage", "w", ("stage",)),
    ("name", "w", ("name",)),
    ("device", "q", ("device",)),
    ("time_us", "q", ("time_us",)),
)
Fields = tuple[tuple[str, str, tuple[str, ...]], ...]


class Sender:
    """Turns records into messages; keeps the words and stacks that were sent before."""

    def __init__(self, file_bytes: int, *, stacks: bool) -> None:
        self.budget = Budget(file_bytes)
        self.remarks = Remarks()
        self._stacks = Stacks(self.budget) if stacks else None
        self._words: dict[str, Words] = {}
        self._late: list[list[Record]] = []
        self._late_rows = 0

    def tell(self, kind: str, **facts: Any) -> None:
        """Send a message without columns."""
        _write([json.dumps({"kind": kind, **facts}).encode() + b"\n"])

    def send(self, kind: str, records: list[Any], fields: Fields, **facts: Any) -> None:
        """Send records as columns, in messages of bounded size.

        Entries behind the first message get numbers in place of their stacks, which `send_late_stacks` sends: what
        needs no stacks can be worked on meanwhile.
        """
        for start in range(0, len(records), _MESSAGE):
            part = Part(fields, late=fields is ENTRY and start > 0 and self._stacks is not None)
            for at in range(start, min(start + _MESSAGE, len(records)), _SLICE):
                rows = records[at : min(at + _SLICE, start + _MESSAGE)]
                self.budget.take_rows(len(rows))
                self._add(part, self._drop_foreign(rows, at), at)
            if not part.rows:
                continue
            words = {name: self._words[name].take_fresh() for name in part.words}
            if part.late:
                part.send(kind, words, {**facts, "at": start, "late": self._late_rows})
                self._late_rows += part.rows
            else:
                self._send_stacks()
                part.send(kind, words, {**facts, "at": start})

    def send_late_stacks(self) -> None:
        """Send the stacks of the entries that went without, in the same order."""
        if self._stacks is None:
            return
        for start in range(0, len(self._late), _MESSAGE // _SLICE):
            part = Part(())
            for records in self._late[start : start + _MESSAGE // _SLICE]:
                part.add("stack", self._stacks.take([record.get("frames") for record in records]), None)
                part.rows += len(records)
            self._send_stacks()
            part.send("late_stacks", {}, {})

    def _drop_foreign(self, rows: list[Any], at: int) -> list[Record]:
        if set(map(type, rows)) == {dict}:
            return rows
        for index, row in enumerate(rows):
            if not isinstance(row, dict):
                self.remarks.add("bad_record", at + index, f"an entry is of type {type(row).__name__}")
        return [row for row in rows if isinstance(row, dict)]

    def _add(self, part: Part, records: list[Record], at: int) -> None:
        if not records:
            return
        rows = Rows(records)
        for name, kind, keys in part.fields:
            if kind in "Qq":
                part.add(name, *take_integers(rows, keys, kind, self.remarks, at))
            else:
                words = self._words.get(name)
                if words is None:
                    words = Pools(self.budget) if kind == "p" else Words(self.budget, ("", "N/A"))
                    self._words[name] = words
                part.add(name, take_words(rows, keys, words, self.remarks, at), None)
        if part.late:
            self._late.append(records)
        else:
            part.add("stack", self._take_stacks(rows, part.fields), None)
        part.rows += len(records)

    def _take_stacks(self, rows: Rows, fields: Fields) -> array[int]:
        """Number the stacks; where none are wanted, say of blocks alone whether they have one."""
        if self._stacks is None and fields is BLOCK:
            return array("i", [0 if row.get("frames") else -1 for row in rows.records])
        try:
            lists = None if self._stacks is None else rows.column(("frames",))
        except KeyError:
            lists = [row.get("frames") for row in rows.records]
        if self._stacks is None or lists is None:
            return array("i", [-1]) * len(rows.records)
        return self._stacks.take(lists)

    def _send_stacks(self) -> None:
        if self._stacks is None:
            return
        lengths, flat = self._stacks.take_fresh()
        if len(lengths):
            header = {
                "kind": "stacks",
                "rows": len(lengths),
                "parts": len(flat),
                "words": self._stacks.names.take_fresh(),
            }
            _write([json.dumps(header).encode() + b"\n", lengths, flat])


class Part:
    """The columns of one message."""

    def __init__(self, fields: Fields, *, late: bool = False) -> None:
        self.fields = fields
        self.late = late
        self.words = [name for name, kind, _ in fields if kind in "wp"]
        self.rows = 0
        self._columns: dict[str, list[array[int]]] = {}
        self._known: dict[str, bytearray] = {}

    def add(self, name: str, column: array[int], known: bytes | None) -> None:
        """Append to a column; `known` says which values are there where some are not."""
        self._columns.setdefault(name, []).append(column)
        if known is not None and name not in self._known:
            self._known[name] = bytearray(b"\1" * self.rows)
        if name in self._known:
            self._known[name] += b"\1" * len(column) if known is None else known

    def send(self, kind: str, words: dict[str, list[str]], facts: dict[str, Any]) -> None:
        """Write the message."""
        columns = [[name, slices[0].typecode, name in self._known] for name, slices in self._columns.items()]
        header = {"kind": kind, "rows": self.rows, "columns": columns, "words": words, **facts}
        parts: list[Any] = [json.dumps(header).encode() + b"\n"]
        for name, slices in self._columns.items():
            parts.append(b"".join(slices))
            if name in self._known:
                parts.append(self._known[name])
        _write(parts)


def _write(parts: list[Any]) -> None:
    for part in parts:
        rest = memoryview(part).cast("B")
        while rest:
            rest = rest[os.write(1, rest) :]


def send_segments(sender: Sender, segments: list[Any], host: bool) -> None:
    """Send segments and their blocks; a block names its segment by its place among those sent."""
    segments = [segment for segment in segments if isinstance(segment, dict)]
    sender.send("segments", segments, SEGMENT, host=host)
    waiting: list[Record] = []
    for number, segment in enumerate(segments):
        blocks = segment.get("blocks")
        if isinstance(blocks, list):
            sender.budget.take_rows(len(blocks))
            waiting += _renew_blocks(number, segment, blocks)
        if len(waiting) >= _MESSAGE:
            sender.send("blocks", waiting, BLOCK, host=host)
            waiting = []
    sender.send("blocks", waiting, BLOCK, host=host)


def _renew_blocks(number: int, segment: Record, blocks: list[Any]) -> Iterator[Record]:
    """Give blocks of any version their segment, address, requested size and frames.

    torch 2.0 has no address (blocks tile their segment) and a history, whose first item is the newest.
    """
    address = segment.get("address")
    address = address if isinstance(address, int) else None
    for block in blocks:
        if not isinstance(block, dict):
            continue
        block = {**block, "segment": number}
        if block.get("address") is None and address is not None:
            block["address"] = address
        size, start = block.get("size"), block.get("address")
        address = start + size if isinstance(start, int) and isinstance(size, int) else None
        history = block.get("history")
        if isinstance(history, list) and history and isinstance(history[0], dict):
            block.setdefault("requested_size", history[0].get("real_size"))
            block.setdefault("frames", history[0].get("frames"))
        yield block


def send_snapshot(snapshot: Snapshot, meter: Meter, options: dict[str, Any]) -> None:
    """Send every part of a snapshot."""
    sender = Sender(meter.count, stacks=options["stacks"])
    settings = snapshot.settings
    conf = next((settings[key] for key in settings if str(key).endswith("_ALLOC_CONF")), None)
    sender.tell(
        "facts",
        entries=[[device, len(entries)] for device, entries in snapshot.traces[:4096]],
        alloc_conf=conf if isinstance(conf, str) else None,
        settings=show_tree(settings) if settings else None,
        device_type=snapshot.device_type,
        damage=snapshot.damage,
        cut=snapshot.cut,
        invalid_utf8=snapshot.invalid_utf8,
        commas=snapshot.commas,
        bytes=meter.count,
    )
    for device, entries in snapshot.traces:
        if options["device"] in (None, device):
            sender.send("events", entries, ENTRY, device=device, host=False)
    for device, entries in snapshot.host_traces:
        sender.send("events", entries, ENTRY, device=device, host=True)
    send_segments(sender, snapshot.segments, host=False)
    send_segments(sender, snapshot.host_segments, host=True)
    sender.send("annotations", snapshot.annotations, ANNOTATION)
    sender.send_late_stacks()
    sender.tell("end", remarks=sender.remarks.found)


def main(options: dict[str, Any]) -> None:
    """Read, send, and leave at once: taking a large snapshot apart again would cost as long as extracting it."""
    drop_privileges()
    meter = Meter(0, Limits(**options["limits"]))
    try:
        send_snapshot(read_snapshot(meter), meter, options)
    except (HostileDataError, DamagedDataError, ForeignDataError) as error:
        cut = isinstance(error, DamagedDataError) and error.cut
        failure = {
            "kind": "failure",
            "why": type(error).__name__,
            "text": [str(part) for part in error.args],
            "cut": cut,
        }
        _write([json.dumps({**failure, "bytes": meter.count}).encode() + b"\n"])
    except MemoryError:
        failure = {
            "kind": "failure",
            "why": "HostileDataError",
            "text": ["it needs far more memory than its size can need"],
        }
        _write([json.dumps({**failure, "cut": False, "bytes": meter.count}).encode() + b"\n"])
    except BrokenPipeError:
        pass
    sys.stderr.flush()
    os._exit(0)
