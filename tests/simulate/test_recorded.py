"""The native allocator against random mixes of everything, recorded from the real one and kept in this repository."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulate.replay_oracle import Replay, read_case

RECORDED = sorted((Path(__file__).parent / "recorded").glob("*.json.gz"))


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name.partition(".")[0])
def test_replay_equals_the_recording(path: Path) -> None:
    Replay(read_case(path)).run()


def test_there_are_cases() -> None:
    assert len(RECORDED) >= 40
