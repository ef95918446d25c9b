"""Operation files: the reported cases give their expected figures, wrong files are explained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.paths import SHARED_DATA, needs_shared
from xmem.errors import UnreadableError, UsageError
from xmem.simulate import SimulateOptions, simulate_ops

MIB = 1 << 20
_CONFS = {
    "reserved": "",
    "reserved_default": "",
    "reserved_max_split_size_mb_20": "max_split_size_mb:20",
    "reserved_expandable": "expandable_segments:True",
}


def write_ops(folder: Path, *ops: list[Any], capacity: int | None = 1 << 30) -> Path:
    file = folder / "case.json"
    file.write_text(json.dumps({"ops": list(ops)} | ({} if capacity is None else {"capacity": capacity})))
    return file


@needs_shared
@pytest.mark.parametrize("name", ["60-stranded-remainders.json", "62-rounding.json", "63-first-step-spike.json"])
def test_reported_cases(name: str) -> None:
    folder = SHARED_DATA / "bug_inputs"
    expected = json.loads((folder / "expected.json").read_text())[name]
    verdict = simulate_ops(folder / name)
    assert verdict.fits
    assert verdict.end_allocated_bytes == expected.get("allocated", verdict.end_allocated_bytes)
    assert verdict.peak_allocated_bytes == expected.get("peak_allocated", verdict.peak_allocated_bytes)
    assert verdict.steady_peak_bytes == expected.get("steady_peak", verdict.steady_peak_bytes)
    for key, conf in _CONFS.items():
        if key in expected:
            found = simulate_ops(folder / name, options=SimulateOptions(alloc_conf=conf))
            assert found.peak_reserved_bytes == expected[key], key


def test_first_step_and_steady_peak_stand_apart(tmp_path: Path) -> None:
    """By hand: 2 MiB stay; the first cycle takes 7 MiB more, later ones 1 MiB."""
    ops = [["alloc", "w", 2 * MIB], ["alloc", "bench", 7 * MIB], ["free", "bench"]]
    ops += [[word, "t", MIB][: 3 if word == "alloc" else 2] for word in ("alloc", "free", "alloc", "free")]
    verdict = simulate_ops(write_ops(tmp_path, *ops))
    assert (verdict.first_step_peak_bytes, verdict.steady_peak_bytes) == (9 * MIB, 3 * MIB)


def test_named_steps_win_over_cycles(tmp_path: Path) -> None:
    ops: list[list[Any]] = [["step", 0], ["alloc", "a", 8 * MIB], ["free", "a"], ["alloc", "b", 9 * MIB], ["free", "b"]]
    verdict = simulate_ops(write_ops(tmp_path, *ops, ["step", 1], ["alloc", "c", MIB]))
    assert (verdict.first_step_peak_bytes, verdict.steady_peak_bytes) == (9 * MIB, MIB)


def test_the_capacity_is_all_usable(tmp_path: Path) -> None:
    file = write_ops(tmp_path, ["alloc", "a", 10 * MIB], capacity=10 * MIB)
    verdict = simulate_ops(file)
    assert verdict.fits
    assert (verdict.total_bytes, verdict.non_torch_bytes, verdict.usable_bytes) == (10 * MIB, 0, 10 * MIB)
    assert verdict.gpu_note == "The capacity that case.json states: 10485760 bytes."
    assert not simulate_ops(file, options=SimulateOptions(non_torch="2MiB")).fits
    on_a_gpu = simulate_ops(file, gpu=1)
    assert (on_a_gpu.total_bytes, on_a_gpu.non_torch_bytes) == (1 << 30, 429496729)


def test_streams_pools_and_empty_cache(tmp_path: Path) -> None:
    ops: list[list[Any]] = [
        ["alloc", "a", 2 * MIB, 7], ["free", "a"], ["alloc", "b", 2 * MIB, 0, "0:1"],
        ["record_stream", "b", 3], ["free", "b"], ["empty_cache"],
    ]  # fmt: skip
    verdict = simulate_ops(write_ops(tmp_path, *ops))
    assert (verdict.peak_reserved_bytes, verdict.end_reserved_bytes) == (40 * MIB, 20 * MIB)


def test_an_id_may_live_again(tmp_path: Path) -> None:
    file = write_ops(tmp_path, ["alloc", 1, 5 * MIB], ["free", 1], ["alloc", 1, 3 * MIB])
    assert simulate_ops(file).end_allocated_bytes == 3 * MIB


@pytest.mark.parametrize(
    ("operation", "problem"),
    [
        (["free", "x"], "'x' is not allocated"),
        (["alloc", "a", 1], "'a' is allocated already"),
        (["alloc", "b", -1], "size and stream must be whole numbers from 0, a pool text like 0:1"),
        (["alloc", "b", 1.5], "size and stream must be whole numbers from 0, a pool text like 0:1"),
        (["alloc", "b"], "it is no operation that this version knows"),
        (["malloc", "b", 1], "it is no operation that this version knows"),
    ],
)
def test_wrong_operations_are_named(tmp_path: Path, operation: list[Any], problem: str) -> None:
    with pytest.raises(UsageError) as caught:
        simulate_ops(write_ops(tmp_path, ["alloc", "a", 1], operation))
    assert caught.value.message == f"Operation 1 of case.json, {json.dumps(operation)}: {problem}."
    assert caught.value.hint.startswith('The form is {"capacity"')


def test_wrong_files_are_explained(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="There is no file"):
        simulate_ops(tmp_path / "absent.json")
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        simulate_ops(tmp_path)
    file = tmp_path / "case.json"
    for text, message in (
        ("nonsense", "case.json is not JSON: "),
        ("[]", "case.json is not an operation file: it has no list 'ops'."),
        ('{"ops": 1}', "case.json is not an operation file: it has no list 'ops'."),
        ('{"ops": [], "capacity": "8"}', "The capacity of case.json is not a whole number of bytes."),
    ):
        file.write_text(text)
        with pytest.raises(UnreadableError) as caught:
            simulate_ops(file)
        assert caught.value.message.startswith(message)
    with pytest.raises(UsageError) as missing:
        simulate_ops(write_ops(tmp_path, capacity=None))
    assert missing.value.message == "case.json states no capacity."
    with pytest.raises(UsageError) as item:
        simulate_ops(write_ops(tmp_path, "alloc"))  # type: ignore[arg-type]
    assert item.value.message == "Operation 0 of case.json is not a list such as ['alloc', 'a', 1024]."
