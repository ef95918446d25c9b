"""The shipped examples are real, small, readable, and do what their page says."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import xmem
from tests.paths import EXAMPLES

RECORDINGS = (
    "cpu_training.json.gz",
    "cpu_training.timeline.raw.json.gz",
    "gpt_small_a100.pickle",
    "mobilenet_oom.pickle",
)
LARGEST_BYTES = 2_000_000


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("examples") / "store"
    options = xmem.IngestOptions(store=folder)
    xmem.ingest([EXAMPLES / name for name in RECORDINGS], options=options)
    return folder


def test_they_are_small() -> None:
    assert sum(file.stat().st_size for file in EXAMPLES.rglob("*") if file.is_file()) < LARGEST_BYTES


def test_each_stands_on_their_page() -> None:
    page = (EXAMPLES / "README.md").read_text()
    left_out = [file.name for file in EXAMPLES.iterdir() if file.is_file() and f"`{file.name}`" not in page]
    assert left_out == ["README.md"]


@pytest.mark.parametrize("script", sorted(EXAMPLES.rglob("*.py")), ids=lambda script: script.name)
def test_each_script_says_what_it_does(script: Path) -> None:
    assert ast.get_docstring(ast.parse(script.read_text()))


def test_kinds_and_counts(store: Path) -> None:
    found = {run.name: run for run in xmem.runs(store)}
    kinds = {name: run.adapter for name, run in found.items()}
    assert kinds == {
        "cpu_training": "torch_trace",
        "cpu_training.timeline": "memory_timeline",
        "gpt_small_a100": "cuda_snapshot",
        "mobilenet_oom": "cuda_snapshot",
    }
    assert found["cpu_training"].memory_event_count == 1631


def test_the_cpu_trace_is_attributed(store: Path) -> None:
    frame = xmem.query(
        "SELECT DISTINCT step FROM allocations JOIN runs USING (run_id, rank) WHERE name = 'cpu_training' AND step >= 0"
        " ORDER BY step",
        store=store,
    )
    assert frame["step"].to_list() == [0, 1, 2, 3]
    ops = xmem.query("SELECT DISTINCT op FROM allocations WHERE op IS NOT NULL", store=store)["op"].to_list()
    assert "aten::conv2d" in ops


def test_the_snapshot_fits_on_what_it_was_made_for(store: Path) -> None:
    assert xmem.simulate("gpt_small_a100", gpu="a100", store=store).fits
    verdict = xmem.simulate("gpt_small_a100", gpu="0.8", store=store)
    assert not verdict.fits and verdict.oom is not None and verdict.smallest_device_bytes is not None


def test_the_oom_snapshot_records_its_oom(store: Path) -> None:
    rows = xmem.query("SELECT count(*) AS n FROM events WHERE action = 'oom'", store=store)
    assert rows["n"].to_list() == [14]


@pytest.mark.slow
def test_the_cpu_recordings_can_be_made_again(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs the extra capture")
    subprocess.run(
        [sys.executable, str(EXAMPLES / "make_cpu_trace.py"), str(tmp_path)], check=True, capture_output=True
    )
    made = xmem.ingest(sorted(tmp_path.glob("*.gz")), options=xmem.IngestOptions(store=tmp_path / "store"))
    assert [one.adapter for one in made] == ["torch_trace", "memory_timeline"]
    assert made[0].memory_event_count > 1000
