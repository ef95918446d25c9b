"""Runs scripts on virtual cards for tests: one driver for all, and a Python that has torch's CUDA wheel."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from xmem.capture.vgpu.cards import Card, make_card
from xmem.capture.vgpu.run import Job, Outcome, run_job
from xmem.capture.vgpu.settings import VirtualGpu
from xmem.capture.vgpu.torch_facts import TorchFacts, find_torch
from xmem.errors import UsageError
from xmem.units import GIB

#: Another Python to run the jobs with, where the one that runs the tests has no CUDA build of torch.
PYTHON = os.environ.get("XMEM_CUDA_PYTHON") or sys.executable
JOBS = Path(__file__).with_name("jobs.py")


@pytest.fixture(scope="session")
def cuda_torch() -> TorchFacts:
    try:
        return find_torch(PYTHON)
    except UsageError as error:
        pytest.skip(f"no CUDA build of torch: {error.message} XMEM_CUDA_PYTHON can name another Python.")


@pytest.fixture(scope="session")
def driver_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("driver")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def run_on_card(cuda_torch: TorchFacts, driver_cache: Path, tmp_path: Path) -> Callable[..., Outcome]:
    """Run words on a virtual card of some size; options go to the job."""

    def run(*words: str, gib: float = 8.0, conf: str = "", devices: int = 1, **options: object) -> Outcome:
        job = Job(words, tmp_path / "out", driver_cache, PYTHON, **{"timeout_s": 120, **options})
        gpu = VirtualGpu(small_card(), int(gib * GIB), taken_bytes=0, devices=devices)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTORCH_CUDA_ALLOC_CONF", conf)
            return run_job(job, gpu)

    return run


def small_card() -> Card:
    numbers = {"multiprocessors": 84, "sm_clock_khz": 1_700_000, "memory_clock_khz": 9_000_000, "bus_bits": 384}
    numbers |= {"l2_bytes": 6 << 20, "total_bytes": 8 << 30}
    return make_card({"name": "Test", "compute_capability": "8.6", "source": "tests", **numbers}, "test.toml")
