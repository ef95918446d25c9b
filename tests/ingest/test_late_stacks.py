"""Large snapshots, whose stacks come behind everything else: every event gets its own, whatever was dropped."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from tests.ingest.snapshots import MIB, entry
from xmem.ingest import Filters, IngestOptions, ingest
from xmem.ingest import beginning as room
from xmem.store import Store

#: Entries of the first message, whose stacks come along.
FIRST = 65_536
COUNT = FIRST + 5_000
ASK = "SELECT e.address, s.frames[1].line FROM events e LEFT JOIN stacks s USING (run_id, rank, stack_id)"


def numbered(number: int) -> list[dict[str, Any]]:
    return [{"name": f"f{number % 700}", "filename": "a.py", "line": number % 700 + 1}]


def large(count: int = COUNT) -> dict[str, Any]:
    """Make allocations that tell their stack by their address, one by one, on each of two devices."""
    odd = {FIRST + 10: "no entry", FIRST + 11: entry("alloc", 1, -5, 1), FIRST + 12: entry("alloc", 2, 1 << 60, 1)}
    traces = [
        [
            odd.get(number, entry("alloc", (number + 1) * MIB, 512, number, frames=numbered(number + device)))
            for number in range(count)
        ]
        for device in (0, 1)
    ]
    traces[1][FIRST + 20] = {**traces[1][FIRST + 20], "frames": None}
    return {"segments": [], "device_traces": traces}


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("late") / "large.pickle"
    path.write_bytes(pickle.dumps(large()))
    return path


def stored(path: Path, store: Path, device: int) -> dict[int, int | None]:
    rows = Store(store).connect().execute(f"{ASK} WHERE e.device_index = $1 AND e.action = 'alloc'", [device])
    return dict(rows.fetchall())


@pytest.mark.parametrize("at_once", [True, False])
def test_every_event_gets_its_own_stack(
    snapshot: Path, tmp_path: Path, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not at_once:
        monkeypatch.setattr(room, "_MOST_EVENTS", 0)
    (run,) = ingest(snapshot, options=IngestOptions(store=tmp_path / "store"))
    dropped = {FIRST + 10, FIRST + 11, FIRST + 12}
    assert run.event_count == 2 * (COUNT - len(dropped))
    for device in (0, 1):
        expected: dict[int, int | None] = {
            (number + 1) * MIB: (number + device) % 700 + 1 for number in range(COUNT) if number not in dropped
        }
        if device == 1:
            expected[(FIRST + 21) * MIB] = None
        assert stored(snapshot, tmp_path / "store", device) == expected
    found = Store(tmp_path / "store").connect().execute("SELECT code, count FROM issues").fetchall()
    assert dict(found)["bad_record"] == 6
    assert Store(tmp_path / "store").connect().execute("SELECT count(*) FROM stacks").fetchone() == (
        701,
    )  # one was of dropped entries


def test_no_stack_is_left_as_a_number_where_none_are_wanted(snapshot: Path, tmp_path: Path) -> None:
    ingest(snapshot, options=IngestOptions(store=tmp_path, filters=Filters(stacks=False)))
    assert Store(tmp_path).connect().execute("SELECT count(stack_id), count(*) FROM events").fetchone() == (
        0,
        2 * (COUNT - 3),
    )


def test_one_device_alone_keeps_its_stacks(snapshot: Path, tmp_path: Path) -> None:
    ingest(snapshot, options=IngestOptions(store=tmp_path, filters=Filters(device="cuda:1")))
    found = stored(snapshot, tmp_path, 1)
    assert len(found) == COUNT - 3
    assert found[COUNT * MIB] == COUNT % 700 + 1
