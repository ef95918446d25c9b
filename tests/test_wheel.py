"""Builds the wheel and uses it as a stranger would: a fresh environment with base dependencies only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.paths import EXAMPLES, REPOSITORY

pytestmark = [pytest.mark.slow, pytest.mark.network, pytest.mark.xdist_group("wheel")]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        str(folder),
        str(REPOSITORY),
    ]
    subprocess.run(command, check=True)
    (built,) = folder.glob("xmem-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the bin folder of an environment that has the wheel and its base dependencies."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    subprocess.run([str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", str(wheel)], check=True)
    return folder / "bin"


def call(installed: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("XMEM", "PYTHON"))}
    command = [str(installed / "xmem"), *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_the_wheel_holds_what_the_code_reads(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    data = {
        str(file.relative_to(REPOSITORY))
        for suffix in ("*.sql", "*.csv", "py.typed")
        for file in (REPOSITORY / "xmem").rglob(suffix)
    }
    data |= {f"xmem/schemas/{file.name}" for file in (REPOSITORY / "schemas").glob("*.sql")}
    assert data and data <= names
    assert [name for name in names if name.startswith(("tests/", "examples/", "docs/"))] == []


def test_the_base_has_neither_torch_nor_hta(installed: Path) -> None:
    listed = subprocess.run(
        [str(installed / "python"), "-m", "pip", "list", "--format=json"], capture_output=True, text=True
    )
    names = {package["name"].lower() for package in json.loads(listed.stdout)}
    assert names & {"torch", "torchvision", "transformers", "holistictraceanalysis", "pandas"} == set()


def test_the_command_line_answers_at_once(installed: Path, tmp_path: Path) -> None:
    assert call(installed, tmp_path, "--help").returncode == 0


def test_an_example_goes_from_file_to_verdict(installed: Path, tmp_path: Path) -> None:
    read = call(installed, tmp_path, "ingest", str(EXAMPLES / "gpt_small_a100.pickle"), "--json")
    assert read.returncode == 0, read.stderr
    verdict = call(installed, tmp_path, "simulate", "--gpu", "24", "--json")
    assert verdict.returncode == 0, verdict.stderr
    assert json.loads(verdict.stdout)["fits"] is True
    answer = call(installed, tmp_path, "query", "SELECT count(*) AS n FROM allocations", "--json")
    assert json.loads(answer.stdout)[0]["n"] > 0


def test_a_missing_extra_is_named_with_the_command_that_adds_it(installed: Path, tmp_path: Path) -> None:
    done = call(installed, tmp_path, "ingest", str(EXAMPLES / "cpu_training.json.gz"), "--hta")
    assert done.returncode == 2
    assert "pip install 'xmem[hta]'" in done.stderr
