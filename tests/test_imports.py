"""Starts real processes: the help page and the bare package import nothing heavy."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "hta", "altair", "polars", "duckdb", "pyarrow", "numpy", "pandas", "transformers")


def imported_by(code: str) -> set[str]:
    """Return the top-level names of all modules that a fresh interpreter has after running `code`."""
    probe = (
        f"import sys\n{code}\nprint(','.join(sorted({{name.split('.')[0] for name in sys.modules}})), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    return set(done.stderr.strip().splitlines()[-1].split(","))


@pytest.mark.parametrize(
    "code",
    [
        "import xmem",
        "from xmem.cli import run; run(['--help'])",
        "from xmem.cli import run; run(['--version'])",
        "from xmem.cli import run; run(['ingest', '--help'])",
        "from xmem.cli import run; run(['simulate', '--help'])",
        "from xmem.cli import run; run(['query', '--help'])",
    ],
)
def test_nothing_heavy_is_imported(code: str) -> None:
    assert imported_by(code) & set(HEAVY) == set()


def test_the_probe_sees_imports() -> None:
    assert "numpy" in imported_by("import numpy")
