"""How the records of a long JSON list look: what starts them, what parts them, what ends their list."""

from __future__ import annotations

import re
from dataclasses import dataclass

from xmem.ingest.json_repair import find_end


@dataclass(frozen=True)
class Shape:
    """How records look: how they start, what parts two of them, what ends their list, what all of them hold."""

    opener: bytes
    start: re.Pattern[bytes]
    boundary: re.Pattern[bytes]
    end: re.Pattern[bytes]
    sign: bytes
    may_stay_open: bool


_EVENT = rb'\{\s*+"(?:ph|name|cat|pid|tid|ts|s|id|dur|bp|args)"\s*+:'
#: Records are objects that begin with a key of Chrome's trace format, whose bare list need not be closed.
EVENTS = Shape(
    b"{",
    re.compile(_EVENT),
    re.compile(rb"\}\s*+(?:,\s*+)?(?=" + _EVENT + rb")"),
    re.compile(rb'\}\s*+(?:,\s*+)?\](?=\s*+(?:\}|\Z|,\s*+"[^"\\]{1,200}"\s*+:))'),
    b'"ph"',
    may_stay_open=True,
)
#: Records are lists.
ROWS = Shape(
    b"[",
    re.compile(rb"\["),
    re.compile(rb"\]\s*+(?:,\s*+)?(?=\[)"),
    re.compile(rb"\]\s*+(?:,\s*+)?\](?=\s*+\Z)"),
    b"[",
    may_stay_open=False,
)


def last_boundary(text: bytes, shape: Shape) -> tuple[int, int] | None:
    """Return the end of the last record that another one follows, and where that one starts."""
    for window in (1 << 14, 1 << 18, len(text)):
        found = list(shape.boundary.finditer(text, max(0, len(text) - window)))
        if found:
            return found[-1].start() + 1, found[-1].end()
    return None


def stands_alone(text: bytes, shape: Shape, key: str, *, ended: bool) -> bool:
    """Say whether the first record stands in no list: the next one follows it, or, where the text `ended`, nothing."""
    end = find_end(text, 0) if shape.start.match(text) else None
    if end is None or shape.sign not in text[:end] or f'"{key}"'.encode() in text[:end]:
        return False
    rest = text[end:].lstrip(b" \t\r\n\0,")
    return bool(shape.start.match(rest)) or (ended and not rest)
