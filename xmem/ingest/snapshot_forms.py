"""Brings every form of a memory snapshot into one: pickles, bare lists, JSON dumps, torch.save archives, cut files.

Runs in the reading process (see snapshot_process) and imports the standard library only. Everything it is given
comes from a file that nobody vouches for: it looks at types before it looks inside, and it never recurses.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass, field
from typing import Any

from xmem.ingest.safe_pickle import DamagedDataError, HostileDataError, Meter, load_plain, salvage

_ZIP = b"PK\x03\x04"
_BOM = b"\xef\xbb\xbf"
#: Keys of which a snapshot has at least one.
_KEYS = ("segments", "device_traces")
_LISTS = (*_KEYS, "external_annotations", "host_segments", "host_traces")


@dataclass
class Snapshot:
    """A snapshot with its parts as plain lists; entries may still be anything."""

    segments: list[Any] = field(default_factory=list)
    traces: list[tuple[int, list[Any]]] = field(default_factory=list)
    host_segments: list[Any] = field(default_factory=list)
    host_traces: list[tuple[int, list[Any]]] = field(default_factory=list)
    annotations: list[Any] = field(default_factory=list)
    settings: dict[Any, Any] = field(default_factory=dict)
    device_type: str | None = None
    damage: str = ""
    cut: bool = False
    invalid_utf8: bool = False
    commas: int = 0


class ForeignDataError(Exception):
    """The file can be read, but holds no snapshot; the arguments are what it is and what to do."""


def read_snapshot(meter: Meter) -> Snapshot:
    """Read a snapshot of any form. Raises HostileDataError, DamagedDataError or ForeignDataError."""
    stream = io.BufferedReader(meter, 1 << 20)
    head = stream.peek(64)
    if head[:4] == _ZIP:
        return _read_archive(meter.read_rest())
    if head.removeprefix(_BOM).lstrip()[:1] in (b"{", b"["):
        return read_json(meter.read_rest())
    try:
        root = load_plain(stream)
    except DamagedDataError as damage:
        return salvage_snapshot(meter.read_rest(), damage)
    meter.forget()
    found = arrange(root, "pickle")
    if not found.damage and stream.peek(1).strip(b"\0"):
        found.damage = "bytes stand behind the end of the pickle"
    return found


def arrange(root: object, kind: str) -> Snapshot:
    """Find the snapshot in what a file holds: the dict, a list of segments or entries, or a dict around it."""
    if isinstance(root, list):
        return Snapshot(**_sort_list(root, kind))
    if not isinstance(root, dict):
        raise ForeignDataError(f"it is a {kind}, but it holds a {type(root).__name__} and no snapshot")
    if not any(key in root for key in _KEYS):
        inner = next((part for part in root.values() if isinstance(part, dict) and _KEYS[0] in part), None)
        if inner is None:
            keys = ", ".join(str(key)[:40] for key in list(root)[:5] if isinstance(key, str | int))
            raise ForeignDataError(f"it is a {kind}, but it holds no snapshot (its keys: {keys or 'none'})")
        root = inner
    wrong = [key for key in _LISTS if not isinstance(root.get(key), (list, tuple, type(None)))]
    wrong = [key for key in wrong if not (key == "device_traces" and _by_number(root[key]))]
    if wrong and not any(isinstance(root.get(key), (list, tuple)) or _by_number(root.get(key)) for key in _KEYS):
        raise ForeignDataError(f"it is a {kind}, but its {wrong[0]} is a {type(root[wrong[0]]).__name__}, not a list")
    parts = {key: _as_list(root.get(key)) for key in _LISTS}
    settings = root.get("allocator_settings")
    device_type = root.get("device_type")
    return Snapshot(
        segments=parts["segments"],
        traces=_number(root.get("device_traces")),
        host_segments=parts["host_segments"],
        host_traces=[(-1, entries) for _, entries in _number(root.get("host_traces"))],
        annotations=parts["external_annotations"],
        settings=settings if isinstance(settings, dict) else {},
        device_type=device_type if isinstance(device_type, str) else None,
        damage=f"{wrong[0]} is a {type(root[wrong[0]]).__name__}, not a list" if wrong else "",
    )


def _sort_list(root: list[Any], kind: str) -> dict[str, Any]:
    first = next((item for item in root if isinstance(item, dict)), None)
    if first is None:
        what = "a list without any segment" if root else "an empty list"
        raise ForeignDataError(f"it is a {kind}, but it holds {what}")
    if "action" in first:
        return {"traces": [(0, root)]}
    if "blocks" in first or "total_size" in first:
        return {"segments": root}
    raise ForeignDataError(f"it is a {kind}, but its list holds no segments")


def _as_list(part: object) -> list[Any]:
    return part if isinstance(part, list) else list(part) if isinstance(part, tuple) else []


def _by_number(part: object) -> bool:
    """Say whether lists stand under the numbers of their devices."""
    return isinstance(part, dict) and all(
        type(key) is int and 0 <= key < 1 << 16 and isinstance(value, list) for key, value in part.items()
    )


def _number(part: object) -> list[tuple[int, list[Any]]]:
    """Give each device's trace its number; a flat list of entries is device 0."""
    if isinstance(part, dict) and _by_number(part):
        return sorted(part.items())
    traces = _as_list(part)
    if traces and isinstance(traces[0], dict):
        return [(0, traces)]
    return [(number, _as_list(trace)) for number, trace in enumerate(traces)]


def _read_archive(data: bytes) -> Snapshot:
    """Read the pickle in a zip archive that torch.save wrote, where that is a snapshot."""
    import zipfile

    not_snapshot = ForeignDataError(
        "it is an archive that torch.save wrote, such as a checkpoint, and no memory snapshot",
        "Write the snapshot with torch.cuda.memory._dump_snapshot(FILE), not with torch.save.",
    )
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            member = next(item for item in archive.infolist() if item.filename.endswith("data.pkl"))
            if member.compress_type != zipfile.ZIP_STORED or member.file_size > len(data):
                raise not_snapshot
            root = load_plain(io.BytesIO(archive.read(member)))
            return arrange(root, "torch.save archive")
    except (zipfile.BadZipFile, StopIteration, HostileDataError, DamagedDataError, ForeignDataError):
        raise not_snapshot from None


def salvage_snapshot(data: bytes, damage: DamagedDataError) -> Snapshot:
    """Return every whole segment and entry before the place where a pickle breaks; nothing whole is the damage."""
    waiting = salvage(data)
    found = _reassemble(waiting)
    if not found.segments and not any(entries for _, entries in found.traces):
        raise damage
    found.cut, found.damage = damage.cut, str(damage) if damage.cut else f"everything behind it: {damage}"
    return found


def _reassemble(waiting: list[Any]) -> Snapshot:
    """Put together what still waited for its container: outer ones come first, whole entries are never empty.

    A dict gets all of its items at once, when the last one is complete. So an empty dict where an entry or a segment
    should stand is the one in which the file broke; what follows belongs to it and is dropped.
    """
    if waiting and isinstance(waiting[0], dict) and any(key in waiting[0] for key in _KEYS):
        return arrange(waiting[0], "pickle")
    if waiting and isinstance(waiting[0], list):  # a bare list of segments
        waiting = [{}, "segments", *waiting]
    found, key, outer, inner = Snapshot(), "", None, None
    for item in waiting[1:]:
        if isinstance(item, str):
            key, outer, inner = item, None, None
        elif outer is None:
            outer = item if isinstance(item, list) else None
            _place(found, key, item)
        elif isinstance(item, list):
            inner = item
            if key == "device_traces":
                found.traces.append((len(found.traces), inner))
            elif key == "host_traces":
                found.host_traces.append((-1, inner))
        elif isinstance(item, dict) and item:
            (outer if inner is None else inner).append(item)
        else:
            break
    return found


def _place(found: Snapshot, key: str, part: Any) -> None:
    """Set the part of that key; lists stay the same objects, since more may be appended to them."""
    if key in _LISTS and not isinstance(part, list):
        return
    if key == "segments":
        found.segments = part
    elif key == "device_traces":
        found.traces = _number(part)
    elif key == "host_traces":
        found.host_traces = [(-1, entries) for _, entries in _number(part)]
    elif key == "host_segments":
        found.host_segments = part
    elif key == "external_annotations":
        found.annotations = part
    elif key == "allocator_settings":
        found.settings = part if isinstance(part, dict) else {}


_COMMA = re.compile(r'"(?:[^"\\]|\\.)*+"|,(\s*+[\]}])', re.DOTALL)
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)


def read_json(data: bytes) -> Snapshot:
    """Read a snapshot that was dumped as JSON; of a cut or broken one, everything whole before the fault."""
    import json

    text = data.decode("utf-8-sig", errors="replace")
    damage, cut, commas = "", False, 0
    try:
        try:
            root = json.loads(text, strict=False)
        except ValueError:
            text, commas = _drop_commas(text)
            root = json.loads(text, strict=False)
    except (ValueError, RecursionError) as error:
        position = getattr(error, "pos", len(text))
        damage, cut = str(error)[:100], position >= len(text.rstrip()) - 8 or "Unterminated" in str(error)
        try:
            root = json.loads(_close_json(text[:position]), strict=False)
        except (ValueError, RecursionError):
            raise DamagedDataError(damage, cut=cut) from None
    found = arrange(root, "JSON file")
    if damage:
        found.damage, found.cut = damage if cut else f"everything behind it: {damage}", cut
    found.commas = commas
    found.invalid_utf8 = "\ufffd" in text and b"\xef\xbf\xbd" not in data
    return found


def _drop_commas(text: str) -> tuple[str, int]:
    """Leave out commas before a closing bracket, and count them."""
    dropped = 0

    def drop(match: re.Match[str]) -> str:
        nonlocal dropped
        dropped += match[1] is not None
        return match[1] or match[0]

    return _COMMA.sub(drop, text), dropped


def _close_json(text: str) -> str:
    """Cut the text after its last whole entry and close what is open there."""
    root, depth, dicts, end = "", 0, 0, 0
    kinds: list[bool] = []  # of what is open inside of the root: is it a dict
    for token in _TOKEN.finditer(text):
        mark = token[0]
        if mark in ("[", "{"):
            if root:
                kinds.append(mark == "{")
                dicts += mark == "{"
            root = root or mark
        elif mark in ("]", "}"):
            if not kinds:
                break
            dicts -= kinds.pop()
            if dicts == 0:
                end, depth = token.end(), len(kinds)
    return text[:end] + "]" * depth + ("]" if root == "[" else "}")
