"""Runs the README's console blocks and compares every line of what they print."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest

from tests.paths import REPOSITORY
from xmem.cli import run

README = REPOSITORY / "README.md"
BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)


def transcript(block: str) -> str:
    """Run the commands of a block and return it with what they print now."""
    lines = []
    for command in [line for line in block.splitlines() if line.startswith("$ ")]:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            run(shlex.split(command)[2:])
        lines += [command, out.getvalue().rstrip("\n"), ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def fresh(store: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the README with its console blocks run anew."""
    monkeypatch.setenv("XMEM_STORE", str(store))
    monkeypatch.chdir(REPOSITORY)
    return BLOCK.sub(lambda match: f"```console\n{transcript(match[1])}```", README.read_text(encoding="utf-8"))


def test_the_readme_shows_what_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    expected = fresh(tmp_path / "store", monkeypatch)
    if request.config.getoption("--rewrite"):
        README.write_text(expected, encoding="utf-8")
    assert README.read_text(encoding="utf-8") == expected, "pytest tests/test_readme.py --rewrite writes it anew"
