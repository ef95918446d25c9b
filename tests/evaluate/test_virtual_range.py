"""The range of an estimate from a virtual card, and comparing engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from xmem.capture.vgpu.farm import Peaks
from xmem.capture.vgpu.settings import VirtualGpu
from xmem.capture.vgpu.torch_facts import default_python, find_torch
from xmem.capture.workload import Workload
from xmem.cli import run as run_xmem
from xmem.errors import UsageError
from xmem.evaluate import engines
from xmem.evaluate.engines import best_of, run_engines
from xmem.evaluate.estimate import EstimateOptions
from xmem.evaluate.virtual import card_of
from xmem.evaluate.virtual_range import find_range, keep_peaks, make_range, range_file
from xmem.simulate.options import SimulateOptions
from xmem.units import GIB, MIB


def peaks(reserved_mib: int, *, oom: bool = False) -> Peaks:
    return Peaks(oom, reserved_mib * MIB, reserved_mib * MIB, 0, reserved_mib * MIB, 0)


def test_text_is_estimated_as_it_is_and_convolutions_by_the_middle() -> None:
    text = make_range(
        {"base": peaks(1000), "one-token-less": peaks(990), "one-token-more": peaks(1020)}, True, close=False
    )
    assert text.estimate_bytes == 1000 * MIB and text.stable
    assert (text.low_bytes, text.high_bytes) == (round(990 * MIB * 0.99) - 4 * MIB, round(1060 * MIB * 1.01))
    found = {"base": peaks(1300), "small-workspaces": peaks(1010), "no-workspaces": peaks(1000)}
    images = make_range(found, False, close=True)
    assert images.estimate_bytes == 1010 * MIB and images.too_close and not images.stable
    assert images.unstable == ("with the engines that cuDNN picks the peak is 1,300 MiB, not 1,010 MiB",)


def test_peaks_come_from_the_cache_and_a_card_that_is_too_small_is_left(tmp_path: Path) -> None:
    gpu = VirtualGpu(card_of(""), 8 * GIB, GIB)
    small, roomy = range_file(tmp_path, "small"), range_file(tmp_path, "roomy")
    keep_peaks({"base": peaks(7000, oom=True)}, small)
    keep_peaks({"base": peaks(9000), "one-token-less": "it left without an answer"}, roomy)
    found = find_range(Workload("gpt2"), (gpu, small), (gpu, roomy))
    assert found.estimate_bytes == 9000 * MIB and not found.too_close


def test_all_engines_are_asked_and_one_that_cannot_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise UsageError("no CUDA build of torch")

    answered = object()
    monkeypatch.setattr(engines, "ENGINES", {"vgpu": fail, "cpu": lambda *_, **__: answered})
    asked = (Workload("gpt2"), 24, SimulateOptions(), EstimateOptions())
    answers = run_engines("all", *asked)
    assert [(answer.engine, answer.trouble) for answer in answers] == [("vgpu", "no CUDA build of torch"), ("cpu", "")]
    assert best_of(answers) is answered
    with pytest.raises(UsageError, match="no CUDA build"):
        run_engines("vgpu", *asked)
    monkeypatch.setattr(engines, "ENGINES", {"vgpu": fail})
    with pytest.raises(UsageError, match="no CUDA build"):
        best_of(run_engines("all", *asked))


@pytest.mark.cuda_wheel
@pytest.mark.slow
def test_what_does_not_fit_is_judged_by_a_run_that_came_to_its_end(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    try:
        find_torch(default_python())
    except UsageError as error:
        pytest.skip(f"no CUDA build of torch: {error.message}")
    found = []
    for gpu in ("0.5", "8"):
        words = ["estimate", "resnet18", "-b", "16", "-o", "Adam", "--gpu", gpu, "--engine", "vgpu", "-q", "--json"]
        code = run_xmem([*words, "--cache", str(tmp_path)])
        found.append((code, json.loads(capfd.readouterr().out)))
    (failed, small), (fits, large) = found
    assert (failed, small["fits"], fits, large["fits"]) == (1, False, 0, True)
    assert small["peak_allocated_bytes"] == large["peak_allocated_bytes"]
    assert small["smallest_device_bytes"] > 512 * MIB
    assert [file.name.endswith("-oom.xmem.jsonl.gz") for file in sorted(tmp_path.glob("*.gz"))].count(True) == 1
