"""Which engine answers an estimate where none is named, and what is said of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from xmem.capture.vgpu import library, torch_facts
from xmem.capture.vgpu.torch_facts import TorchFacts
from xmem.capture.workload import Workload
from xmem.errors import UsageError
from xmem.evaluate import engines
from xmem.evaluate.engines import estimate, run_engines, why_cpu
from xmem.evaluate.estimate import EstimateOptions
from xmem.simulate.options import SimulateOptions

ASKED = (Workload("gpt2"), 24, SimulateOptions())


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> EstimateOptions:
    """Make this a machine that can run the virtual GPU."""
    monkeypatch.setattr(torch_facts, "find_torch", lambda python: TorchFacts(python, tmp_path, "2.14.1", "13.0"))
    monkeypatch.setattr(library, "find_compiler", lambda: "g++")
    return EstimateOptions(cache=tmp_path)


def answers(monkeypatch: pytest.MonkeyPatch, **found: Any) -> None:
    """Let engines answer with a word, or fail with an error."""

    def answer(one: Any) -> Any:
        def ask(*_: object, **__: object) -> Any:
            if isinstance(one, Exception):
                raise one
            return one

        return ask

    monkeypatch.setattr(engines, "ENGINES", {name: answer(one) for name, one in found.items()})


def test_the_virtual_gpu_answers_where_it_can(here: EstimateOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    answers(monkeypatch, vgpu="virtual", cpu="modelled")
    (answer,) = run_engines("auto", *ASKED, replace(here, progress=told.append))
    assert (answer.engine, answer.estimate) == ("vgpu", "virtual")
    assert told == ["engine vgpu: a CUDA build of torch is here (--engine cpu needs none)"]
    assert estimate(Workload("gpt2"), gpu=24, how=here) == "virtual"
    assert estimate(Workload("gpt2"), gpu=24, how=here, engine="cpu") == "modelled"


@pytest.mark.parametrize(
    ("how", "options", "why"),
    [
        ({"max_batch": True}, {}, "the largest batch"),
        ({"exact": True}, {}, "a profile of this batch size"),
        ({"check": False}, {}, "no check of the extrapolation"),
        ({"explain_rules": True}, {}, "the rules from CPU to GPU"),
        ({}, {"allocator": "ideal"}, "another allocator"),
        ({}, {"torch_version": "2.6"}, "another torch"),
    ],
)
def test_what_only_the_cpu_answers_is_asked_of_it(
    here: EstimateOptions, how: dict[str, bool], options: dict[str, str], why: str
) -> None:
    assert why_cpu(SimulateOptions(**options), replace(here, **how)) == f"it was asked for {why}"  # type: ignore[arg-type]
    assert why_cpu(SimulateOptions(), here) == ""


def test_a_machine_without_a_compiler_has_the_cpu_unless_the_driver_is_built(
    here: EstimateOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> str:
        raise UsageError("There is no compiler.")

    monkeypatch.setattr(library, "find_compiler", none)
    assert why_cpu(SimulateOptions(), here) == "the virtual GPU cannot run here. There is no compiler."
    monkeypatch.setattr(library, "is_built", lambda torch, cache: True)
    assert why_cpu(SimulateOptions(), here) == ""


def test_the_cpu_answers_where_the_virtual_gpu_fails_and_says_so(
    here: EstimateOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    answers(monkeypatch, vgpu=UsageError("The job failed: LSTM."), cpu="modelled")
    (answer,) = run_engines("auto", *ASKED, replace(here, progress=told.append))
    assert (answer.engine, answer.estimate) == ("cpu", "modelled")
    assert told[-1] == "engine cpu: the virtual GPU could not run it. The job failed: LSTM."
    with pytest.raises(UsageError, match="There is no GPU"):
        run_engines("auto", Workload("gpt2"), "nosuchcard", SimulateOptions(), here)
