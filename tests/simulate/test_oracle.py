"""The native allocator against recordings of the real one: every op, driver call, statistic and segment."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.paths import REPOSITORY, needs_shared
from tests.simulate.oracle_cases import CASES, read
from tests.simulate.replay_oracle import BrokenCaseError, DifferenceError, Replay, main, read_case

SCRIPT = Path(__file__).with_name("replay_oracle.py")
#: A small case with splits, retries and releases.
SAMPLE = "c_retry_simple"

pytestmark = needs_shared


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_replay_equals_the_recording(path: Path) -> None:
    Replay(read_case(path)).run()


def test_there_are_all_cases() -> None:
    assert len(CASES) == 91


@pytest.fixture
def sample() -> dict[str, Any]:
    return copy.deepcopy(read(next(path for path in CASES if path.stem == SAMPLE)))


def difference(case: dict[str, Any]) -> DifferenceError:
    with pytest.raises(DifferenceError) as caught:
        Replay(case).run()
    return caught.value


@pytest.mark.parametrize("field", range(9))
def test_one_changed_statistic_is_seen(sample: dict[str, Any], field: int) -> None:
    sample["results"][3]["s"][field] += 1
    found = difference(sample)
    assert (found.index, found.field) == (3, f"s.{sample['fields'][field]}")
    assert found.expected == found.got + 1


def test_a_changed_driver_call_is_seen(sample: dict[str, Any]) -> None:
    index = next(i for i, result in enumerate(sample["results"]) if result.get("d"))
    sample["results"][index]["d"][0][2] += 512
    assert difference(sample).field == "d[0]"


def test_a_changed_address_of_a_driver_call_is_seen(sample: dict[str, Any]) -> None:
    index = next(i for i, result in enumerate(sample["results"]) if result.get("d"))
    sample["results"][index]["d"][0][1] += 1
    assert difference(sample).field == "d[0]"


@pytest.mark.parametrize("change", ["drop", "repeat", "swap"])
def test_number_and_order_of_driver_calls_are_seen(sample: dict[str, Any], change: str) -> None:
    index = next(i for i, result in enumerate(sample["results"]) if len(result.get("d", ())) > 1)
    calls = sample["results"][index]["d"]
    if change == "swap":
        calls[0], calls[1] = calls[1], calls[0]
    elif change == "drop":
        calls.pop()
    else:
        calls.append(calls[-1])
    assert difference(sample).index == index


def test_a_changed_block_is_seen(sample: dict[str, Any]) -> None:
    index = next(i for i, result in enumerate(sample["results"]) if result.get("a"))
    sample["results"][index]["a"] += 512
    assert difference(sample).field == "a"


def test_every_changed_final_statistic_is_seen(sample: dict[str, Any]) -> None:
    for name in sample["final"]["stats"]:
        changed = copy.deepcopy(sample)
        changed["final"]["stats"][name] += 1
        assert difference(changed).field == f"final.stats[{name!r}]"


@pytest.mark.parametrize("name", ["size", "alloc", "active", "req", "stream", "a"])
def test_a_changed_final_segment_is_seen(sample: dict[str, Any], name: str) -> None:
    sample["final"]["segments"][0][name] += 1
    assert name in difference(sample).field or "segments" in difference(sample).field


@pytest.mark.parametrize("column", range(3))
def test_a_changed_final_block_is_seen(sample: dict[str, Any], column: int) -> None:
    sample["final"]["segments"][0]["blocks"][0][column] += 1
    assert ".blocks" in difference(sample).field


def test_one_byte_more_in_a_request_is_seen(sample: dict[str, Any]) -> None:
    sample["ops"][0]["size"] += 1
    assert difference(sample).index == 0


def test_unknown_optional_keys_are_passed_over(sample: dict[str, Any]) -> None:
    sample["recorder"] = {"anything": 1}
    sample["ops"][0]["comment"] = "first"
    sample["results"][0]["elapsed"] = 3
    sample["final"]["more"] = []
    Replay(sample).run()


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, cwd=REPOSITORY)


def test_the_script_says_equal_and_exits_0() -> None:
    done = run(str(CASES[0]), str(CASES[1]))
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "2 of 2 equal")


def test_the_script_prints_the_first_difference_in_full(sample: dict[str, Any], tmp_path: Path) -> None:
    sample["results"][5]["s"][1] += 7
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(sample))
    done = run(str(path))
    assert done.returncode == 1
    assert str(path) in done.stdout
    assert "op 5: " in done.stdout and "s.reserved" in done.stdout
    assert str(sample["results"][5]["s"][1]) in done.stdout and str(sample["results"][5]["s"][1] - 7) in done.stdout


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "cannot be read"),
        ("[]", "not an object"),
        ("{}", "'ops' is missing"),
        ('{"ops": [], "results": [], "fields": [], "final": {}}', "'final.stats' is missing"),
        ('{"ops": [1], "results": [], "fields": [], "final": {"stats": {}, "segments": []}}', "1 ops but 0 results"),
        ('{"ops": [], "results": [], "fields": ["x"], "final": {"stats": {}, "segments": []}}', "unknown fields"),
    ],
)
def test_a_broken_file_is_named_with_its_fault(content: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text(content)
    with pytest.raises(BrokenCaseError, match=reason):
        read_case(path)
    assert main([str(path)]) == 2


def test_an_unknown_op_is_a_broken_case(sample: dict[str, Any]) -> None:
    sample["ops"][1] = {"op": "defragment"}
    with pytest.raises(BrokenCaseError, match="unknown op 'defragment'"):
        Replay(sample).run()


def test_bad_settings_are_a_broken_case(sample: dict[str, Any], tmp_path: Path) -> None:
    sample["settings"]["alloc_conf"] = "max_split_size_mb:1"
    path = tmp_path / "settings.json"
    path.write_text(json.dumps(sample))
    assert main([str(path)]) == 2
