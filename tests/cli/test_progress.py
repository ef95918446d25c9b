"""The progress line: a bar where a file's size is known, nothing where nobody looks."""

from __future__ import annotations

import io

import pytest

from xmem.cli.progress import progress_line, progress_text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("done", "total", "text"),
    [
        (0, 100, "[........................]   0%"),
        (50, 100, "[############............]  50%"),
        (100, 100, "[########################] 100%"),
        (200, 100, "[########################] 100%"),
        (2048, None, "2.00 KiB"),
        (2048, 0, "2.00 KiB"),
    ],
)
def test_the_bar(done: int, total: int | None, text: str) -> None:
    assert progress_text(done, total) == text


def test_it_is_drawn_on_a_terminal_and_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with progress_line(quiet=False) as progress:
        assert progress is not None
        progress("name\x1b[2J", 50, 100)
        progress("name", 51, 100)  # too soon after the last to be drawn
        progress("name", 100, 100)
    written = terminal.getvalue()
    assert written.count("\r") == 3
    assert "50%" in written and "51%" not in written and "100%" in written
    assert "name\\x1b[2J" in written
    assert written.endswith("\r\x1b[K")


def test_nothing_is_drawn_into_a_file_or_when_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", io.StringIO())
    with progress_line(quiet=False) as progress:
        assert progress is None
    monkeypatch.setattr("sys.stderr", Terminal())
    with progress_line(quiet=True) as progress:
        assert progress is None


def test_nothing_is_cleared_that_was_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with progress_line(quiet=False):
        pass
    assert terminal.getvalue() == ""
