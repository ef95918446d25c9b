"""A progress line on standard error, drawn only on a terminal."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from xmem.render import make_inert
from xmem.units import format_bytes

Progress = Callable[[str, int, int | None], None]
_BAR = 24
_INTERVAL_S = 0.1


@contextmanager
def progress_line(*, quiet: bool) -> Iterator[Progress | None]:
    """Give a function `(name, done_bytes, total_bytes)` that draws; None where there is nobody to see it."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    line = _Line()
    try:
        yield line.draw
    finally:
        line.clear()


class _Line:
    def __init__(self) -> None:
        self._drawn_at = 0.0

    def draw(self, name: str, done_bytes: int, total_bytes: int | None) -> None:
        now = time.monotonic()
        if now - self._drawn_at < _INTERVAL_S and done_bytes != total_bytes:
            return
        self._drawn_at = now
        text = f"{progress_text(done_bytes, total_bytes)} {make_inert(name)}"
        sys.stderr.write("\r" + text[: shutil.get_terminal_size().columns - 1] + "\x1b[K")
        sys.stderr.flush()

    def clear(self) -> None:
        if self._drawn_at:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def progress_text(done_bytes: int, total_bytes: int | None) -> str:
    """Show how far a file has been read: a bar where its size is known, else the bytes so far."""
    if not total_bytes:
        return format_bytes(done_bytes)
    share = min(done_bytes / total_bytes, 1.0)
    full = int(share * _BAR)
    return f"[{'#' * full}{'.' * (_BAR - full)}] {share:4.0%}"
