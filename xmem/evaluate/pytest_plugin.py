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
        result = yield from _recorded(item, Path(folder), str(marker.args[0]))
    return result


def _recorded(item: pytest.Item, folder: Path, gpu: str) -> Generator[None, Any, Any]:
    import torch

    from xmem.capture.record import record
    from xmem.errors import XmemError

    kind, name = ("cuda", "test.pickle") if torch.cuda.is_available() else ("cpu", "test.xmem.jsonl.gz")
    with record(folder / name, device=kind):
        result = yield
    try:
        headline = judge_log(folder / name, folder / "store", gpu)
    except XmemError as error:
        pytest.fail(f"{MARKER}: {error.message}{f' {error.hint}' if error.hint else ''}", pytrace=False)
    if headline is None:
        item.warn(pytest.PytestWarning(f"{MARKER}: this test allocated nothing on {kind}, so nothing was judged."))
    elif headline:
        pytest.fail(headline, pytrace=False)
    return result


def judge_log(log: Path, store: Path, gpu: str) -> str | None:
    """Return why the recorded run does not fit, an empty text where it does, None where nothing was allocated."""
    from xmem.errors import UnreadableError
    from xmem.ingest import IngestOptions, ingest
    from xmem.simulate import SimulateOptions, simulate
    from xmem.simulate.gpu_table import parse_gpu
    from xmem.units import format_bytes

    parse_gpu(gpu)
    try:
        ingest([log], options=IngestOptions(store=store))
        verdict = simulate(gpu=gpu, store=store, options=SimulateOptions(keep=False))
    except UnreadableError:
        return None
    if verdict.fits:
        return ""
    oom = verdict.oom
    where = f" in {oom.op}" if oom is not None and oom.op else ""
    return (
        f"This test would not fit {gpu}: it needs {format_bytes(verdict.peak_reserved_bytes)} reserved of"
        f" {format_bytes(verdict.usable_bytes)} usable, and runs out{where}."
    )
