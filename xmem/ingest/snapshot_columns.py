"""Turns the records of a snapshot into columns, in slices small enough to stay in the processor's cache.

Runs in the reading process (see snapshot_process) and imports the standard library only. Every column has a fast way,
which takes a well-formed slice in one sweep, and a careful one for slices with missing, odd or hostile values.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain, islice, repeat
from operator import contains, itemgetter
from typing import Any

from xmem.ingest.safe_pickle import HostileDataError

_WORD = 1 << 64
_SIGNED = range(-(1 << 63), 1 << 63)
_TEXT_MOST = 1 << 16
_TEXT_BYTES = 64 << 20
_TEXT_PER_BYTE = 16

#: So many lists and frames are remembered by identity: as many as fit into the processor's cache.
_CACHED = 1 << 14
#: Stacks of fewer frames on average are looked up again sooner than remembered by their list.
_SHALLOW = 16
#: An allocation's list of frames is met again at its frees.
_SHARES = 4
#: Records of so many keys are spread out at once; torch 2.14 writes nine.
_KEYS = range(2, 33)

Record = dict[Any, Any]


class Remarks:
    """Issues met, counted, each with its first place and words."""

    def __init__(self) -> None:
        self.found: dict[str, list[Any]] = {}

    def add(self, code: str, at: int | None = None, detail: str = "", count: int = 1) -> None:
        """Count an issue."""
        if count:
            remark = self.found.setdefault(code, [0, at, detail])
            remark[0] += count


class Budget:
    """Holds what is sent within what a file of that size can mean: references may name one thing over and over."""

    def __init__(self, file_bytes: int) -> None:
        self._rows = max(file_bytes, 1000)
        self._text = _TEXT_BYTES + _TEXT_PER_BYTE * file_bytes

    def take_rows(self, rows: int) -> None:
        """Count records or frames; each takes at least a byte of the file."""
        self._rows -= rows
        if self._rows < 0:
            raise HostileDataError("it names the same records over and over, to more than the file has bytes")

    def take_text(self, size: int) -> None:
        """Count characters."""
        self._text -= size
        if self._text < 0:
            raise HostileDataError("it names the same long text over and over")


class Words(dict[Any, int]):
    """Numbers texts in order of appearance; `fresh` holds those that were not sent yet."""

    def __init__(self, budget: Budget, empty: Sequence[str] = ()) -> None:
        super().__init__(zip(empty, repeat(-1), strict=False))
        self.fresh: list[str] = []
        self._budget = budget
        self._numbers: dict[str, int] = {}

    def __missing__(self, value: Any) -> int:
        text = clean_text(self.show(value))
        self._budget.take_text(len(text))
        number = self._numbers.get(text)
        if number is None:
            number = self._numbers[text] = len(self._numbers)
            self.fresh.append(text)
        self[value] = number
        return number

    def can_hold(self, values: Sequence[Any]) -> bool:
        """Say whether all of them are of the type that this numbers; others must not even be hashed."""
        return set(map(type, values)) <= {str, bytes}

    def show(self, value: Any) -> str:
        """Return the text of a value that it can hold."""
        return value if isinstance(value, str) else str(value, "utf-8", "replace")

    def take_fresh(self) -> list[str]:
        """Return the words since the last call."""
        fresh, self.fresh = self.fresh, []
        return fresh


class Pools(Words):
    """Numbers pool ids: pairs of integers, shown as a:b."""

    def can_hold(self, values: Sequence[Any]) -> bool:
        """Say whether all of them are pairs of integers."""
        pairs = set(map(type, values)) == {tuple} and set(map(len, values)) == {2}
        return pairs and set(map(type, chain.from_iterable(values))) == {int}

    def show(self, value: Any) -> str:
        """Return a:b."""
        return ":".join(str(part) if abs(part) < _WORD else "?" for part in value)


def clean_text(text: str) -> str:
    """Make a text writable as UTF-8 and bound its length."""
    return text[:_TEXT_MOST].encode("utf-8", "surrogatepass").decode("utf-8", "replace")


def show_tree(value: Any) -> str:
    """Show any plain value as JSON text, without recursion and cut where it grows beyond reason.

    References can make a small file mean an endless tree.
    """
    if isinstance(value, str):
        return value
    import json

    parts: list[str] = []
    todo: list[Any] = [value]
    size = 0
    while todo and size < _TEXT_MOST and len(todo) < _TEXT_MOST:
        item = todo.pop()
        if isinstance(item, _Literal):
            part = item.text
        elif isinstance(item, dict):
            todo.append(_Literal("}"))
            for index, (key, inner) in reversed(list(enumerate(islice(item.items(), 1000)))):
                todo += (inner, _Literal((", " if index else "") + json.dumps(str_key(key)) + ": "))
            part = "{"
        elif isinstance(item, list | tuple):
            todo.append(_Literal("]"))
            for index, inner in reversed(list(enumerate(item[:1000]))):
                todo += (inner, _Literal(", " if index else ""))
            part = "["
        elif isinstance(item, bool | float | None) or (isinstance(item, int) and abs(item) < _WORD):
            part = json.dumps(item)
        else:
            part = json.dumps(str_key(item))
        parts.append(part)
        size += len(part)
    return "".join(parts)


class _Literal:
    def __init__(self, text: str) -> None:
        self.text = text


def str_key(key: Any) -> str:
    """Show a scalar; anything larger by its type only."""
    if isinstance(key, str):
        return clean_text(key)
    small = isinstance(key, float | bool | None) or (isinstance(key, int) and abs(key) < _WORD)
    return str(key) if small else f"<{type(key).__name__}>"


class Rows:
    """A slice of records; where all have the same keys, as torch writes them, every column is taken in one sweep."""

    def __init__(self, records: list[Record]) -> None:
        self.records = records
        self._columns = _spread(records)

    def column(self, names: Sequence[str]) -> Sequence[Any] | None:
        """Return the values under the first of the names that any record uses as a key, or None where none does.

        Raises KeyError where not all records have it.
        """
        if self._columns is not None:
            return next((self._columns[name] for name in names if name in self._columns), None)
        for name in names:
            if name in self.records[0] or any(map(contains, self.records, repeat(name))):
                return [record[name] for record in self.records]
        return None


def _spread(records: list[Record]) -> dict[str, tuple[Any, ...]] | None:
    """Return the values of each key; None where the records have different keys, or odd ones."""
    keys = tuple(records[0])
    if len(keys) not in _KEYS or set(map(type, keys)) != {str} or set(map(len, records)) != {len(keys)}:
        return None
    try:
        return dict(zip(keys, zip(*map(itemgetter(*keys), records), strict=True), strict=True))
    except KeyError:
        return None


def take_integers(
    rows: Rows, names: Sequence[str], typecode: str, remarks: Remarks, at: int
) -> tuple[array[int], bytes | None]:
    """Return a column of integers ('Q' for addresses, 'q' else) and, where something is missing, which are there."""
    try:
        values = rows.column(names)
        if values is None:
            return array(typecode, bytes(8 * len(rows.records))), bytes(len(rows.records))
        return array(typecode, values), None
    except (KeyError, TypeError, OverflowError):
        pass
    numbers, known = array(typecode), bytearray()
    for index, record in enumerate(rows.records):
        value = next((record[name] for name in names if name in record), None)
        number = to_integer(value, typecode, names[0], (remarks, at + index))
        numbers.append(0 if number is None else number)
        known.append(number is not None)
    return numbers, bytes(known)


def to_integer(value: Any, typecode: str, name: str, place: tuple[Remarks, int]) -> int | None:
    """Read a number that is none of the usual; what cannot be one is None."""
    remarks, at = place
    number: int | None = None
    if isinstance(value, int):
        number = int(value)
    elif isinstance(value, float) and value == value and abs(value) != float("inf"):
        number = int(value)
        remarks.add("odd_number", at, f"{name}: {value!r}")
    elif isinstance(value, str):
        try:
            number = int(value[:80], 0)
            remarks.add("odd_number", at, f"{name}: {value[:80]!r}")
        except ValueError:
            remarks.add("odd_value", at, f"{name} is no number: {value[:80]!r}")
    elif value is not None:
        remarks.add("odd_value", at, f"{name} is of type {type(value).__name__}")
    if number is None or number in _SIGNED:
        return number if number is None or typecode == "q" else number % _WORD
    if typecode == "Q" or name == "stream":  # pointers: the low 64 bits name them just as well
        if not 0 <= number < _WORD:
            remarks.add("wide_integer", at, f"{name} has {number.bit_length()} bits")
        number %= _WORD
        return number if typecode == "Q" or number in _SIGNED else number - _WORD
    remarks.add("wide_integer", at, f"{name} has {number.bit_length()} bits")
    return None


def take_words(rows: Rows, names: Sequence[str], words: Words, remarks: Remarks, at: int) -> array[int]:
    """Return a column of numbered texts; -1 where there is none."""
    try:
        values = rows.column(names)
        if values is None:
            return array("i", [-1]) * len(rows.records)
        if words.can_hold(values[:1]) and values.count(values[0]) == len(values):
            return array("i", [words[values[0]]]) * len(values)
        if words.can_hold(values):
            return array("i", map(words.__getitem__, values))
    except KeyError:
        pass
    numbers = array("i")
    for index, record in enumerate(rows.records):
        value = next((record[name] for name in names if name in record), None)
        numbers.append(-1 if value is None else _take_odd_word(value, words, (names[0], remarks, at + index)))
    return numbers


def _take_odd_word(value: Any, words: Words, place: tuple[str, Remarks, int]) -> int:
    name, remarks, at = place
    if isinstance(value, list) and len(value) == 2:  # a pool id in JSON
        value = tuple(value)
    if words.can_hold([value]):
        return words[value]
    if name == "user_metadata":
        return words[show_tree(value)]
    remarks.add("odd_value", at, f"{name} is of type {type(value).__name__}")
    return -1


class Stacks:
    """Numbers the distinct stacks by content. torch shares frames, and an allocation's list with its frees."""

    def __init__(self, budget: Budget) -> None:
        self.names = Words(budget)
        self._budget = budget
        self._shallow = True
        self._by_list: dict[int, int] = {}
        self._by_frames: dict[tuple[int, ...], int] = {}
        self._frames: dict[int, int] = {}
        self._frame_numbers: dict[tuple[int, int, int], int] = {}
        self._stacks: dict[tuple[int, ...], int] = {}
        self._kept: list[tuple[int, int, int]] = []
        self._fresh: list[tuple[int, ...]] = []

    def take(self, lists: Sequence[Any]) -> array[int]:
        """Return the number of each stack; -1 for None and what is no list. An empty list is a stack of its own."""
        numbers = list(map(id, lists))
        known = self._by_list
        if self._shallow or len(known) > _CACHED:
            known.clear()
        fresh = dict(zip(numbers, lists, strict=True))
        if known:
            fresh = {number: frames for number, frames in fresh.items() if number not in known}
        if fresh:
            self._add(fresh)
        return array("i", map(known.__getitem__, numbers))

    def _add(self, fresh: dict[int, Any]) -> None:
        for cache in (self._by_frames, self._frames):
            if len(cache) > _CACHED:
                cache.clear()
        if set(map(type, fresh.values())) != {list}:
            self._by_list.update(dict.fromkeys(fresh, -1))
            fresh = {number: frames for number, frames in fresh.items() if isinstance(frames, list | tuple)}
        frames_seen = sum(map(len, fresh.values()))
        self._budget.take_rows(frames_seen // _SHARES)
        self._shallow = frames_seen <= _SHALLOW * len(fresh)
        keys = [tuple(map(id, frames)) for frames in fresh.values()]
        stacks = list(map(self._by_frames.get, keys))
        if None in stacks:
            for key, frames in zip(keys, fresh.values(), strict=True):
                if key not in self._by_frames:
                    self._by_frames[key] = self._add_stack(frames)
            stacks = list(map(self._by_frames.get, keys))
        self._by_list.update(zip(fresh, stacks, strict=True))  # type: ignore[arg-type]

    def _add_stack(self, frames: Sequence[Any]) -> int:
        content = tuple([self._add_frame(frame) for frame in frames])
        found = self._stacks.get(content)
        if found is None:
            found = self._stacks[content] = len(self._stacks)
            self._fresh.append(content)
        return found

    def _add_frame(self, frame: Any) -> int:
        number = self._frames.get(id(frame))
        if number is None:
            if isinstance(frame, dict):
                line = frame.get("line")
                line = line if type(line) is int and 0 <= line < 1 << 31 else 0
                content = self._word(frame.get("name")), self._word(frame.get("filename")), line
            else:
                content = self._word(frame), self._word(None), 0
            number = self._frame_numbers.setdefault(content, len(self._frame_numbers))
            if number == len(self._kept):
                self._kept.append(content)
            self._frames[id(frame)] = number
        return number

    def _word(self, value: Any) -> int:
        return self.names[value if isinstance(value, str | bytes) else ""]

    def take_fresh(self) -> tuple[array[int], array[int]]:
        """Return the stacks since the last call: how long each is, and name, file and line of every frame in turn."""
        lengths = array("i", map(len, self._fresh))
        flat = array("i", [part for stack in self._fresh for frame in stack for part in self._kept[frame]])
        self._budget.take_text(len(flat))
        self._fresh.clear()
        return lengths, flat
