"""Jobs on fake tensors: the same requests as with real ones, without their memory, and sentences where values count."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="fake tensors are torch's (pip install 'xmem[capture]')")

import torch.optim.optimizer as optim  # noqa: E402
from torch.nn.modules import module as nn_module  # noqa: E402
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack  # noqa: E402

from xmem.capture.recorder import Recorder  # noqa: E402
from xmem.capture.training import run_workload  # noqa: E402
from xmem.capture.workload import Workload  # noqa: E402
from xmem.cli import run  # noqa: E402
from xmem.errors import UsageError  # noqa: E402
from xmem.evaluate.estimate import make_case  # noqa: E402
from xmem.evaluate.job import prepare_job  # noqa: E402
from xmem.simulate.gpu_table import parse_gpu  # noqa: E402
from xmem.simulate.options import SimulateOptions  # noqa: E402

SCRIPT = """
import torch


class Line(torch.nn.Module):
    def __init__(self, width=16, out=8):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(out, width))

    def forward(self, x):
        return (x @ self.weight.t()).mean()


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(32, 4, dropout=0.1, batch_first=True)
        self.norm = torch.nn.LayerNorm(32)
        self.feed = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))

    def forward(self, x):
        x = self.norm(x + self.attention(x, x, x)[0])
        return (x + self.feed(x)).float().mean()


class Choosy(Line):
    def forward(self, x):
        return super().forward(x[x.sum(1) > 0])


class Recurrent(Line):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.GRU(16, 16)


class Cut(Line):
    def forward(self, x):
        return super().forward(x[: (x.sum(1) == 0).sum().item()])


class Waiting(Line):
    def forward(self, x):
        y = super().forward(x)
        while y.item() > 0.5:
            y = y * 0.5
        return y


class Outside(Line):
    def forward(self, x):
        x.detach().numpy()
        return super().forward(x)


def rows(n):
    return (torch.zeros(n, 16),)


def line():
    return Line(), None, rows


def huge():
    return Line(100_000, 100_000), None, lambda n: (torch.zeros(n, 100_000),)


def block():
    module = Block()
    return module, torch.optim.AdamW(module.parameters(), lr=0.01), lambda n: (torch.zeros(n, 7, 32),)


def cast():
    module = Block()
    return module, torch.optim.Adam(module.parameters(), lr=0.01), lambda n: (torch.zeros(n, 7, 32).bfloat16(),)


def cut():
    return Cut(), None, rows


def waiting():
    return Waiting(), None, rows


def outside():
    return Outside(), None, rows


def choosy():
    return Choosy(), None, rows


def recurrent():
    return Recurrent(), None, rows
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "jobs.py"
    path.write_text(SCRIPT)
    return path


def events(found: Recorder) -> list[tuple[Any, ...]]:
    return [(action, size, step, phase, found.categories.get(n)) for _, action, n, size, _, step, phase in found.events]


def in_any_order(found: list[tuple[Any, ...]]) -> list[Any]:
    """Sort what is freed at a stroke: the cache of autocast lets go in order of addresses."""
    runs = [(is_free, list(run)) for is_free, run in groupby(found, lambda event: event[0] != "alloc")]
    return [event for is_free, run in runs for event in (sorted(run, key=str) if is_free else run)]


def test_every_request_of_a_line_is_as_counted_by_hand(script: Path) -> None:
    found = run_workload(Workload(f"{script}:line", 3, iterations=1), fake=True)
    assert [(action, size, phase, category) for action, size, _, phase, category in events(found)] == [
        ("alloc", 8 * 16 * 4, "other", "parameter"),
        ("alloc", 3 * 16 * 4, "forward", "input"),
        ("alloc", 3 * 8 * 4, "forward", None),  # x @ weight
        ("alloc", 4, "forward", None),  # its mean
        ("free_requested", 3 * 8 * 4, "forward", None),
        ("alloc", 4, "forward", None),  # a gradient of ones
        ("alloc", 3 * 8 * 4, "backward", None),  # spread over the product
        ("alloc", 8 * 16 * 4, "backward", "gradient"),
        ("free_requested", 3 * 8 * 4, "backward", None),
        ("free_requested", 4, "other", None),
    ]


@pytest.mark.parametrize(
    "more",
    [
        {"optimizer": "Adam", "accumulate": 2},
        {"autocast": "bfloat16"},
        {"zero_grad": "end", "set_to_none": False},
    ],
    ids=str,
)
def test_fake_and_real_tensors_make_the_same_requests(script: Path, more: dict[str, Any]) -> None:
    workload = Workload(f"{script}:block", 3, **more, iterations=2)
    assert in_any_order(events(run_workload(workload, fake=True))) == in_any_order(events(run_workload(workload)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_convolutional_model_makes_the_same_requests(dtype: str) -> None:
    pytest.importorskip("torchvision", reason="the model is torchvision's")
    workload = Workload("resnet18", 2, "Adam", dtype=dtype, iterations=2)
    assert events(run_workload(workload, fake=True)) == events(run_workload(workload))


def test_an_optimizer_of_ones_own_keeps_parameters_of_another_type(script: Path) -> None:
    workload = Workload(f"{script}:cast", 3, dtype="bfloat16", iterations=2)
    assert events(run_workload(workload, fake=True)) == events(run_workload(workload))


def test_a_model_whose_widths_are_values_is_as_wide_as_it_is() -> None:
    pytest.importorskip("torchvision", reason="the model is torchvision's")
    workload = Workload("regnet_x_400mf", 2, iterations=1)
    assert events(run_workload(workload, fake=True)) == events(run_workload(workload))


def test_weights_of_forty_gigabytes_take_no_memory(script: Path) -> None:
    found = run_workload(Workload(f"{script}:huge", 2, iterations=1), fake=True)
    assert events(found)[0] == ("alloc", 40_000_000_000, None, "other", "parameter")


@pytest.mark.parametrize(
    ("job", "why"),
    [
        ("choosy", "aten.nonzero.default depends on values."),
        ("cut", "aten._local_scalar_dense.default depends on values."),  # a whole number may be a size
        ("waiting", "it read 50 values; does a loop wait for one?"),
        ("outside", "RuntimeError: .numpy() is not supported for tensor subclasses."),
    ],
)
def test_a_job_that_needs_values_is_said_and_leaves_torch_as_it_was(
    script: Path, monkeypatch: pytest.MonkeyPatch, job: str, why: str
) -> None:
    monkeypatch.setattr("xmem.capture.fake.MOST_READS", 50)
    types, hooks = list(optim._foreach_supported_types), len(nn_module._global_forward_hooks)
    with pytest.raises(UsageError) as error:
        run_workload(Workload(f"{script}:{job}", 2), fake=True)
    assert error.value.message == f"{script}:{job} cannot run on fake tensors: {why}"
    assert error.value.hint == "Use --engine cpu, which has values, or --engine vgpu."
    assert optim._foreach_supported_types == types
    assert len(nn_module._global_forward_hooks) == hooks
    assert not _get_current_dispatch_mode_stack()
    assert type(torch.ones(1)) is torch.Tensor


def test_recurrent_layers_are_refused(script: Path) -> None:
    with pytest.raises(UsageError, match="has recurrent layers, which fake tensors take apart"):
        run_workload(Workload(f"{script}:recurrent", 2), fake=True)


def test_the_engine_answers_as_the_cpu_does(script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = {}
    for engine in ("cpu", "fake"):
        words = ["estimate", f"{script}:block", "-b", "50", "--gpu", "8GiB", "--engine", engine, "--json", "-q"]
        assert run([*words, "--cache", str(tmp_path / "cache")]) == 0
        answers[engine] = json.loads(capsys.readouterr().out)
    assert answers["fake"]["profiled_batch_sizes"] == [50]
    for name in ("peak_reserved_bytes", "peak_allocated_bytes", "setup_reserved_bytes", "smallest_device_bytes"):
        assert answers["fake"][name] == answers["cpu"][name], name
    assert any(note.startswith("Recorded on fake tensors") for note in answers["fake"]["notes"])
    assert not any(note.startswith("Recorded on fake tensors") for note in answers["cpu"]["notes"])


def test_a_larger_batch_is_extrapolated_from_fakes_and_says_so(script: Path, tmp_path: Path) -> None:
    job = prepare_job(Workload(f"{script}:line", 50, iterations=1), cache=tmp_path, fake=True)
    notes = make_case(job, 50, parse_gpu("8GiB"), SimulateOptions()).notes
    assert notes[0] == "Batch size 50 is extrapolated from profiles with batch size 2 and 3 on fake tensors."
    assert notes[-1].endswith("what kernels allocate inside comes from rules, and the peak has no range.")
