"""Jobs on this machine's card beside the virtual one: what is read, what is said, and rows that are read again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from xmem.capture.vgpu.farm import run_here
from xmem.capture.vgpu.library import build_library
from xmem.capture.vgpu.settings import Recording, VirtualGpu, make_environment
from xmem.capture.vgpu.torch_facts import TorchFacts, default_python, find_torch
from xmem.capture.workload import Workload
from xmem.cli import run as run_xmem
from xmem.errors import UsageError
from xmem.evaluate.local import evaluate_local, read_jobs
from xmem.evaluate.measured import workload_of
from xmem.evaluate.virtual import card_of
from xmem.units import GIB, MIB

JOBS = """
[[jobs]]
model = "resnet18"
optimizer = "Adam"
batch_size = 16
image_size = 64
optimizer_args = {lr = 0.1}

[[jobs]]
model = "gpt2"
batch_size = 64
iterations = 2
"""


def jobs_file(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "jobs.toml"
    file.write_text(text)
    return file


def test_jobs_are_read(tmp_path: Path) -> None:
    first = Workload("resnet18", 16, "Adam", '{"lr": 0.1}', image_size=64)
    assert read_jobs(jobs_file(tmp_path, JOBS)) == [first, Workload("gpt2", 64, iterations=2)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[jobs]", "The file of jobs jobs.toml is not TOML: "),
        ("jobs = []", "jobs.toml has no jobs."),
        ("jobs = [1]", "jobs.toml has no jobs."),
        ('[[jobs]]\noptimizer = "SGD"', "Job 1 of jobs.toml has no model."),
        ('[[jobs]]\nmodel = "a"\nbatch = 3', "Job 1 of jobs.toml has the unknown field 'batch'."),
        ('[[jobs]]\nmodel = "a"\nbatch_size = "3"', "Job 1 of jobs.toml has '3' as batch_size."),
        ('[[jobs]]\nmodel = "a"\nbatch_size = true', "Job 1 of jobs.toml has True as batch_size."),
    ],
)
def test_what_is_no_job_is_said(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        read_jobs(jobs_file(tmp_path, text))
    assert error.value.message.startswith(message) and error.value.hint


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_jobs(tmp_path / "none.toml")


def test_the_output_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "rows.csv"
    kept.write_text("mine")
    jobs = str(jobs_file(tmp_path, JOBS))
    assert run_xmem(["evaluate", "local", "--jobs", jobs, "-o", str(kept)]) == 4
    assert "exists already" in capsys.readouterr().err and kept.read_text() == "mine"


@pytest.fixture
def cuda_torch() -> TorchFacts:
    try:
        return find_torch(default_python())
    except UsageError as error:
        pytest.skip(f"no CUDA build of torch: {error.message}")


@pytest.mark.cuda_wheel
@pytest.mark.slow
def test_a_machine_without_a_gpu_is_told(cuda_torch: TorchFacts) -> None:
    hidden = {"CUDA_VISIBLE_DEVICES": "", "PATH": "/usr/bin:/bin"}
    with pytest.raises(UsageError, match="resnet18 cannot be run on this machine's GPU: RuntimeError: "):
        list(run_here([Workload("resnet18")], cuda_torch.python, hidden))


@pytest.mark.cuda_wheel
@pytest.mark.slow
def test_a_virtual_card_in_the_real_ones_place(cuda_torch: TorchFacts, tmp_path: Path) -> None:
    """The real runs get a virtual card too: both sides must then agree to the byte, but for what NVML alone sees."""
    library = build_library(cuda_torch, tmp_path)
    gpu = VirtualGpu(card_of("RTX 3060"), 3 * GIB, 300 * MIB)
    here = make_environment(gpu, cuda_torch, library, Recording(Path()))
    here = {name: value for name, value in here.items() if name != "XMEM_VGPU_FOLDER"}
    jobs = read_jobs(jobs_file(tmp_path, JOBS))
    images, text = evaluate_local(jobs, cache=tmp_path, python=cuda_torch.python, here=here)
    for row in (images, text):
        assert (row["gpu_name"], row["total_gpu_memory"]) == ("NVIDIA GeForce RTX 3060", str(3 * GIB))
        assert row["first_sample_bytes"] == 300 * MIB
        for name in ("peak_reserved_bytes", "peak_allocated_bytes", "setup_reserved_bytes", "num_alloc_retries"):
            assert row[f"real_{name}"] == row[f"virtual_{name}"] is not None
        assert workload_of({name: str(value) for name, value in row.items()}) in jobs
    assert (images["real_oom"], images["predicted_oom"]) == ("false", False)
    assert int(images["ground_bytes"]) == images["real_peak_reserved_bytes"] > images["real_setup_reserved_bytes"] > 0
    assert (text["real_oom"], text["predicted_oom"], text["family"]) == ("true", True, "transformer")
    json.dumps([images, text])
