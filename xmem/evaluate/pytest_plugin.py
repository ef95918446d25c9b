"""The pytest marker `gpu_memory_limit`: records a test and fails it where the run would not fit the GPU."""

from __future__ import annotations

import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

MARKER = "gpu_memory_limit"


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line("markers", f"{MARKER}(gpu): fail where the recorded run would not fit this GPU (xmem)")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Record a marked test and judge what it allocated."""
    marker = item.get_closest_marker(MARKER)
    if marker is None:
        return (yield)
    if len(marker.args) != 1:
        pytest.fail(f'{MARKER} takes one GPU, like @pytest.mark.{MARKER}("12GiB")', pytrace=False)
    with tempfile.TemporaryDirectory() as folder:
        result = yield from _recorded(Path(folder), str(marker.args[0]))
    return result


def _recorded(folder: Path, gpu: str) -> Generator[None, Any, Any]:
    from xmem.capture.record import record

    log = folder / "test.xmem.jsonl.gz"
    with record(log, device="cpu"):
        result = yield
    headline = judge_log(log, folder / "store", gpu)
    if headline is not None:
        pytest.fail(headline, pytrace=False)
    return result


def judge_log(log: Path, store: Path, gpu: str) -> str | None:
    """Return why the recorded run does not fit, None where it does; a run without allocations fits."""
    from xmem.errors import UnreadableError
    from xmem.ingest import IngestOptions, ingest
    from xmem.simulate import SimulateOptions, simulate
    from xmem.units import format_bytes

    try:
        ingest([log], options=IngestOptions(store=store))
    except UnreadableError:
        return None
    verdict = simulate(gpu=gpu, store=store, options=SimulateOptions(keep=False))
    if verdict.fits:
        return None
    oom = verdict.oom
    where = f" in {oom.op}" if oom is not None and oom.op else ""
    return (
        f"This test would not fit {gpu}: it needs {format_bytes(verdict.peak_reserved_bytes)} reserved of"
        f" {format_bytes(verdict.usable_bytes)} usable, and runs out{where}."
    )
