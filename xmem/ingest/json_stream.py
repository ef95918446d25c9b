"""Reads a long JSON list record by record in bounded memory; what is broken costs at most its own record."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from typing import BinaryIO, Generic, TypeVar

import msgspec

from xmem.ingest.adapter import Notes
from xmem.ingest.json_fields import is_top_level, read_fields, salvage_fields
from xmem.ingest.json_repair import REPAIR_LIMIT, find_end, repair_json
from xmem.ingest.json_shapes import EVENTS, Shape, last_boundary, stands_alone

T = TypeVar("T")

#: Bytes that are decoded at once.
CHUNK_BYTES = 1 << 20
#: A record (or header, or tail) longer than this is left out.
RECORD_LIMIT = 16 << 20
_GROUP = 64
_PLAIN = msgspec.json.Decoder(float_hook=Decimal)
_BOM = b"\xef\xbb\xbf"
_BLANK = b" \t\r\n\0"
_ERRORS = (msgspec.MsgspecError, RecursionError, ValueError)
_GAP = re.compile(rb"[\s,\x00]*+")
_PLAIN_END = re.compile(rb'\][\s\x00]*+(?:\Z|[}\]]|,[\s\x00]*+["}])')
_NOT_THE_END = re.compile(rb"\][\s\x00]*+(?:,[\s\x00]*+)?[{\[]")
_FOLLOWS = re.compile(rb"[\s\x00]*+(?:[,\]{\[]|\Z)")
_SCALAR = re.compile(rb'(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"|[^,\]{\["])*+', re.DOTALL)


@dataclass
class RecordStream(Generic[T]):
    """The records of a list, decoded in chunks: `for records, text in stream`.

    The list is the value of `key` in a top-level object, or the whole source (`bare`). `fast` decodes a JSON list of
    records that is as it should be; where it fails, `exact` decodes parts of it, and `rescue` takes what only plain
    JSON can hold (None: not a record). `text` is the list that `fast` decoded, None where the others were at work.
    `fields` holds the other top-level keys, complete after the last record; `known` ones are found in broken text too.
    Reading stops at the offset `stop_at` if that lies between two records (`at_stop`), and goes on where it does not.
    """

    source: BinaryIO
    notes: Notes
    fast: Callable[[bytes], list[T]]
    exact: Callable[[bytes], list[T]]
    rescue: Callable[[object, int], T | None]
    key: str = "traceEvents"
    shape: Shape = EVENTS
    known: tuple[str, ...] = ()
    found: bool = False
    bare: bool = False
    fields: dict[str, object] = field(default_factory=dict)
    offset: int = 0
    stop_at: int | None = None
    at_stop: bool = False
    _buffer: bytes = b""
    _ended: bool = False
    _closed: bool = False
    _wanted: int = 0

    def __iter__(self) -> Iterator[tuple[list[T], bytes | None]]:
        while self.found and not self._closed:
            self._fill(self._wanted or CHUNK_BYTES)
            cut = None if self._ended else last_boundary(self._buffer, self.shape)
            text = None if cut is None else _as_list(memoryview(self._buffer)[: cut[0]])
            fast = None if text is None else _try(self.fast, text)
            if cut is not None and fast is not None:
                self._advance(cut[1])
                yield fast, text
                del fast, text  # the next chunk takes their place, which is still in the processor's cache
                continue
            part = self._buffer if cut is None else self._buffer[: cut[0]]
            records, used = self._read_carefully(part, whole=cut is not None)
            self._advance(used)
            if records:
                yield records, None
            if self._ended and not self._closed:
                self.at_stop = self.stop_at is not None and not self._buffer.strip(_BLANK + b",")
                if self.stop_at is None or self.at_stop:
                    break
                self._pass_stop()
            elif not self._closed:
                self._want_more(used)
        if self.found and not self.at_stop:
            self._read_tail() if self._closed else self._note_open_end()

    @property
    def read_to(self) -> int:
        """Offset up to which the source was read."""
        return self.offset + len(self._buffer)

    def go_on_from(self, source: BinaryIO, offset: int) -> None:
        """After a stop: the next round reads on from another source, whose next byte starts a record at `offset`."""
        self._pass_stop()
        self.source, self.offset, self._buffer, self.at_stop = source, offset, b"", False

    def _pass_stop(self) -> None:
        self.stop_at, self._ended = None, self._ended and self.stop_at is None

    # ------------------------------------------------------------------ before the records

    def start(self) -> bool:
        """Read up to the first record; say whether there is such a list. `fields` holds what stood before it."""
        self._fill(CHUNK_BYTES)
        if self._buffer.startswith(_BOM):
            self.notes.add("byte_order_mark", at=0, unit="byte")
            self._advance(len(_BOM))
        while not self._ended and not self._buffer.strip(_BLANK):
            self._advance(len(self._buffer))
            self._fill(CHUNK_BYTES)
        self._advance(len(self._buffer) - len(self._buffer.lstrip(_BLANK)))
        if self._buffer.startswith(b"["):
            self.found = self.bare = True
            self._advance(1)
        elif self._buffer.startswith(b"{"):
            if stands_alone(self._buffer, self.shape, self.key, ended=self._ended):
                self.found = self.bare = True
                self.notes.add("repaired_syntax", at=self.offset, unit="byte", detail="records without a list")
            else:
                self._find_list()
        return self.found

    def _find_list(self) -> None:
        pattern = re.compile(b'"' + re.escape(self.key.encode()) + rb'"\s*+:\s*+\[')
        second_best: re.Match[bytes] | None = None
        seen = 0
        while True:
            for match in pattern.finditer(self._buffer, seen):
                begins = self._may_begin(match.end())
                if begins and is_top_level(self._buffer[: match.start()]):
                    return self._begin(match.start(), match.end())
                if second_best is None or (begins and not self._may_begin(second_best.end())):
                    second_best = match
            if self._ended or len(self._buffer) >= RECORD_LIMIT:
                break
            seen = max(0, len(self._buffer) - 256)
            self._fill(len(self._buffer) + CHUNK_BYTES)
        if second_best is not None:  # brackets or quotes of the header do not match
            return self._begin(second_best.start(), second_best.end())
        if self._ended:
            self._take_fields(self._buffer)
            return None
        return self._find_far(pattern)

    def _may_begin(self, at: int) -> bool:
        """Say whether a list of records can begin there: with a record, with its end, or behind the buffer."""
        return self._buffer[at : at + 64].lstrip(_BLANK)[:1] in (b"", b"]", self.shape.opener)

    def _find_far(self, pattern: re.Pattern[bytes]) -> None:
        """The header is longer than the limit: keep its known fields and take the first match behind."""
        self.notes.add("broken_header", at=0, unit="byte", detail=f"the header is longer than {RECORD_LIMIT:,} bytes")
        self.fields.update(salvage_fields(self._buffer, self.known))
        while not self._ended:
            self._advance(max(0, len(self._buffer) - 256))
            self._fill(len(self._buffer) + CHUNK_BYTES)
            match = pattern.search(self._buffer)
            if match is not None:
                self.found = True
                return self._advance(match.end())
        return None

    def _begin(self, start: int, end: int) -> None:
        self.found = True
        self._take_fields(self._buffer[:start].rstrip().rstrip(b",") + b"}")
        self._advance(end)

    # ------------------------------------------------------------------ records, carefully

    def _read_carefully(self, part: bytes, *, whole: bool) -> tuple[list[T], int]:
        """Decode groups of records, and one by one where a group fails; return records and bytes used."""
        ends = [match.start() + 1 for match in self.shape.boundary.finditer(part)]
        ends += [len(part)] if whole else []
        records: list[T] = []
        position, one_by_one = 0, 0
        while True:
            start = _GAP.match(part, position).end()  # type: ignore[union-attr]
            if start >= len(part):
                return records, start if whole or self._ended else position
            if part[start : start + 1] == b"]" and self._is_end(part, start):
                if not self._ended and not part[start + 1 :].strip(_BLANK + b","):
                    return records, position
                self._note_comma(part[position:start], start)
                self._closed = True
                return records, start + 1
            position = start
            if position >= one_by_one and position < (ends[-1] if ends else 0):
                one_by_one = ends[min(bisect_right(ends, position) + _GROUP, len(ends)) - 1]
                group = _try(self.exact, _as_list(part[position:one_by_one]))
                if group is not None:
                    records += group
                    position = one_by_one
                    continue
            step = self._read_one(part, position, ends)
            if step is None:
                return records, position
            records += step[0]
            position = step[1]

    def _is_end(self, part: bytes, at: int) -> bool:
        """Say whether the list ends at a bracket, or whether that is one too many."""
        if _PLAIN_END.match(part, at):
            return True
        return not _NOT_THE_END.match(part, at) and self.shape.sign not in part[at:]

    def _read_one(self, part: bytes, start: int, ends: list[int]) -> tuple[list[T], int] | None:
        """Read one record that may be broken; None where its end is not in sight."""
        if part[start : start + 1] != self.shape.opener:
            return self._skip_foreign(part, start)
        index = bisect_right(ends, start)
        near = ends[index] if index < len(ends) else None
        own = find_end(part, start)
        for end in self._candidates(part, start, near, own):
            records = _try(self.exact, _as_list(part[start:end]))
            if records is None:
                records = self._repair(part, start, end)
            if records is not None:
                return records, end
        if _is_unfinished(part[start:]):
            return None  # what looked like its end is inside of it, maybe in a text
        if own is not None and _FOLLOWS.match(part, own):
            near = own if near is None else min(near, own)
        elif near is None:
            closing = self.shape.end.search(part, start) if self._ended else None
            if closing is None:
                return None
            near = closing.start() + 1
        self._lose(start, part[start : start + 80])
        return [], near

    def _candidates(self, part: bytes, start: int, near: int | None, own: int | None) -> Iterator[int]:
        """Where the record may end: at the next boundary, at its own bracket, at the end of the list."""
        if near is not None:
            yield near
        if own is not None and own != near and _FOLLOWS.match(part, own):
            yield own
        for count, closing in enumerate(self.shape.end.finditer(part, start, near or len(part))):
            if count == 8:
                break
            if closing.start() + 1 not in (near, own):
                yield closing.start() + 1

    def _repair(self, part: bytes, start: int, end: int) -> list[T] | None:
        text, at = part[start:end], self.offset + start
        repaired = _read_plain(text) or (repair_json(text) if len(text) <= REPAIR_LIMIT else None)
        record = None if repaired is None else self.rescue(repaired[0], at)
        if repaired is None or record is None:
            return None
        for code, count in repaired[1].items():
            self.notes.add(code, count=count, at=at, unit="byte", detail=_show(text))
        return [record]

    def _skip_foreign(self, part: bytes, start: int) -> tuple[list[T], int] | None:
        """Something stands in the list that is no record: pass over it."""
        if part[start : start + 1] in (b"{", b"["):
            end = find_end(part, start)
            if end is None and not self._ended and len(part) - start < REPAIR_LIMIT:
                return None
        else:
            end = max(_SCALAR.match(part, start).end(), start + 1)  # type: ignore[union-attr]
        record = self.shape.start.search(part, start + 1, end or len(part))
        if record is not None:
            end = record.start()  # a bracket or quote too many before a record
        if end is None or end >= len(part):
            return None
        self._lose(start, part[start : start + 80])
        return [], end

    def _lose(self, at: int, text: bytes) -> None:
        self.notes.add("bad_record", at=self.offset + at, unit="byte", detail=_show(text))

    def _note_comma(self, gap: bytes, at: int) -> None:
        if b"," in gap:
            self.notes.add("repaired_syntax", at=self.offset + at, unit="byte", detail="a comma before the end")

    # ------------------------------------------------------------------ after the records

    def _note_open_end(self) -> None:
        """The source ended before its list did; a bare list of events may."""
        whole = not self._buffer.strip(_BLANK + b",")
        if not (whole and self.bare and self.shape.may_stay_open):
            self._cut_off(0, "before its list of records does" if whole else "inside a record")

    def _read_tail(self) -> None:
        """Take the fields behind the list; note what else stands there."""
        self._pass_stop()
        while not self._ended and len(self._buffer) < RECORD_LIMIT:
            self._fill(len(self._buffer) + CHUNK_BYTES)
        tail, at = self._buffer.strip(_BLANK), self.offset
        text, foreign = b"{" + tail.lstrip(b", \t\r\n\0"), b""
        if not self._ended:
            text, foreign = text + b"}", b"more than fits"
        elif self.bare:
            text, foreign = b"{}", tail
        end = find_end(text, 0)
        if end is None:
            self._cut_off(len(self._buffer), "behind its list of records")
            self.fields.update(salvage_fields(text, self.known))
        else:
            foreign = foreign or text[end:].strip(_BLANK)
            self._take_fields(text[:end])
        if self.key in self.fields:
            foreign = foreign or b"a second " + self.key.encode()
            del self.fields[self.key]
        if foreign:
            self.notes.add("unreadable_part", at=at, unit="byte", detail=f"behind the list stands {_show(foreign)}")
        while not self._ended:
            self._advance(len(self._buffer))
            self._fill(CHUNK_BYTES)

    def _cut_off(self, at: int, where: str) -> None:
        self.notes.facts["truncated"] = True
        self.notes.add("truncated", at=self.offset + at, unit="byte", detail=f"the file ends {where}")

    def _take_fields(self, text: bytes) -> None:
        fields, broken = read_fields(text, self.known)
        if broken:
            self.notes.add("broken_header", at=self.offset, unit="byte", detail=_show(text))
        self.fields.update(fields)

    # ------------------------------------------------------------------ the buffer

    def _fill(self, size: int) -> None:
        """Read until `size` bytes are there, or up to a chunk more: a source hands over whole blocks uncopied."""
        parts = [self._buffer]
        have, room = len(self._buffer), None if self.stop_at is None else self.stop_at - self.offset
        read = getattr(self.source, "read1", self.source.read)
        while have < (size if room is None else min(size, room)) and not self._ended:
            most = max(size - have, CHUNK_BYTES)
            block = read(most if room is None else min(most, room - have))
            if not block:
                self._ended, self.stop_at = True, None
            parts.append(block)
            have += len(block)
        self._buffer = b"".join(parts)
        if self.stop_at is not None and self.offset + have >= self.stop_at:
            self._ended = True

    def _advance(self, size: int) -> None:
        self._buffer = self._buffer[size:]
        self.offset += size

    def _want_more(self, used: int) -> None:
        """Grow the window while a record does not end in it; give the record up at the limit."""
        self._wanted = 0
        if used:
            return
        if len(self._buffer) < RECORD_LIMIT:
            self._wanted = 2 * len(self._buffer) + CHUNK_BYTES
            return
        self._lose(0, self._buffer[:80])
        while True:
            boundary = self.shape.boundary.search(self._buffer, 1)
            if boundary is not None:
                return self._advance(boundary.end())
            if self._ended:
                return None
            self._advance(max(1, len(self._buffer) - 1024))
            self._fill(len(self._buffer) + CHUNK_BYTES)


def _try(decode: Callable[[bytes], list[T]], text: bytes) -> list[T] | None:
    try:
        return decode(text)
    except _ERRORS:
        return None


def _as_list(text: bytes | memoryview) -> bytes:
    return b"".join((b"[", text, b"]"))


def _read_plain(text: bytes) -> tuple[object, Counter[str]] | None:
    """Read a text that is valid JSON, but not of the expected types."""
    try:
        return _PLAIN.decode(text), Counter()
    except _ERRORS:
        return None


def _is_unfinished(text: bytes) -> bool:
    """Say whether a text is valid JSON so far."""
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except msgspec.DecodeError as error:
        return "truncated" in str(error)
    except RecursionError:
        return True
    return False


def _show(text: bytes) -> str:
    return text[:160].decode("utf-8", "backslashreplace")
