"""Recording on CUDA: what is asked of torch's snapshots, with a torch made for the test."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from xmem.capture import record as hook


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    made: list[Any] = []
    memory = SimpleNamespace(
        _record_memory_history=lambda *args, **options: made.append(("history", args, options)),
        _dump_snapshot=lambda path: made.append(("dump", path)),
    )
    torch = SimpleNamespace(cuda=SimpleNamespace(memory=memory, is_available=lambda: True))
    monkeypatch.setattr(hook, "require", lambda name, what: torch)
    return made


def test_a_snapshot_is_dumped_and_history_ends(calls: list[Any], tmp_path: Path) -> None:
    target = tmp_path / "a.pickle"

    @hook.record(target)
    def train() -> None:
        calls.append("train")

    train()
    history = ("history", (), {"stacks": "python"})
    assert calls == [history, "train", ("dump", str(target)), ("history", (), {"enabled": None})]


def test_memory_that_runs_out_is_dumped_and_raised(calls: list[Any], tmp_path: Path) -> None:
    with pytest.raises(MemoryError), hook.record(tmp_path / "a.pickle"):
        raise MemoryError
    assert [call[0] for call in calls] == ["history", "dump", "history"]
