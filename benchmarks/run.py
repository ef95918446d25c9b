"""Runs every benchmark and writes docs/benchmarks.md: what was measured, on which machine, by which command.

A benchmark is a script in this folder that measures when it is run without arguments and prints what it found.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "benchmarks.md"
#: Scripts that make inputs for the others and measure nothing.
MAKERS = ("run", "big_store", "ingest_trace")
PACKAGES = ("duckdb", "polars", "pyarrow", "msgspec", "numpy")


def scripts() -> list[Path]:
    """Return the benchmarks in name order."""
    return [file for file in sorted(HERE.glob("*.py")) if file.stem not in MAKERS and not file.stem.startswith("_")]


def machine() -> str:
    """Describe the machine and what is installed."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    packages = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    return (
        f"{_processor()}, {os.cpu_count()} cores, {memory_gib:.0f} GiB memory, {platform.system()}, "
        f"Python {platform.python_version()}, {packages}"
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def section(script: Path) -> str:
    """Run one benchmark and return its part of the page."""
    name = f"benchmarks/{script.name}"
    sys.stderr.write(f"{name} ...\n")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(  # with bytecode kept, as an installed package has it
        [sys.executable, str(script)], capture_output=True, text=True, cwd=HERE.parent, env=environment
    )
    shown = done.stdout.rstrip() if done.returncode == 0 else f"failed: {done.stderr.strip().splitlines()[-1:]}"
    return f"## {script.stem.replace('_', ' ')}\n\n`{shlex.join(['python', name])}`\n\n```text\n{shown}\n```"


def main() -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="benchmarks to run; the page is written only when all are run")
    wanted = parser.parse_args().names
    sections = [section(script) for script in scripts() if not wanted or script.stem in wanted]
    intro = f"`make bench` on {datetime.date.today():%Y-%m-%d}: {machine()}."
    page = "\n\n".join(["# Benchmarks", intro, *sections]) + "\n"
    if wanted:
        sys.stdout.write(page)
    else:
        PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
