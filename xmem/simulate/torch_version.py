"""Versions of torch, and what changed in the allocator between them."""

from __future__ import annotations

import re

from xmem.errors import UsageError

#: (major, minor); patch releases did not change the allocator's decisions.
Version = tuple[int, int]

#: The newest torch whose rules are known; newer versions are taken to follow them.
NEWEST: Version = (2, 14)
_VERSION = re.compile(r"v?(\d+)\.(\d+)(?:[.a+\-].*)?")


def parse_version(text: str | None) -> Version:
    """Turn `"2.6"`, `"2.13.0"` or `"2.14.1+cu130"` into (major, minor); None is the newest known."""
    if text is None:
        return NEWEST
    match = _VERSION.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{text!r} is not a torch version.", "Write it like 2.6, 2.13.0 or 2.14.1+cu130.")
    return int(match[1]), int(match[2])
