"""What the tests of the command line share: a way to run it, and a small store whose every byte is known."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from xmem.cli import run
from xmem.store import Store

MIB = 1 << 20


@dataclass(frozen=True)
class Outcome:
    """What a command printed and how it ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Xmem = Callable[..., Outcome]


@pytest.fixture(autouse=True)
def clean_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an empty folder with none of xmem's variables set."""
    import os

    for name in [name for name in os.environ if name.startswith("XMEM") or name == "NO_COLOR"]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def xmem(capsys: pytest.CaptureFixture[str]) -> Xmem:
    """Run the command line in this process."""

    def call(*arguments: str) -> Outcome:
        capsys.readouterr()
        code = run(arguments)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return call


#: (action, alloc_id, bytes, step, phase, category, span_id, allocated, reserved afterwards)
EVENTS = [
    ("segment_alloc", None, 20 * MIB, None, None, None, None, 0, 20),
    ("alloc", 0, 4 * MIB, 0, "forward", "parameter", 1, 4, 20),
    ("alloc", 1, 8 * MIB, 0, "forward", "activation", 2, 12, 20),
    ("free_requested", 1, 8 * MIB, 0, "backward", "activation", None, 4, 20),
    ("free_completed", 1, 8 * MIB, 0, "backward", "activation", None, 4, 20),
    ("alloc", 2, 6 * MIB, 1, "backward", "gradient", 2, 10, 20),
]


def write_tiny_run(store: Store, run_id: str = "abc123", name: str = "tiny", ingested_ns: int = 10**18) -> None:
    """Write a run with three allocations on cuda:0, peak 12 MiB allocated and 20 MiB reserved."""
    columns = ("action", "alloc_id", "requested_bytes", "step", "phase", "category", "span_id", "allocated", "reserved")
    events = pl.DataFrame(EVENTS, schema=list(columns), orient="row").with_row_index("seq")
    events = events.with_columns(
        pl.col("seq").cast(pl.Int64),
        ts_ns=pl.col("seq").cast(pl.Int64) * 1000,
        device_type=pl.lit("cuda"),
        device_index=pl.lit(0),
        address=(pl.col("alloc_id").fill_null(0) * (16 * MIB) + (1 << 40)).cast(pl.UInt64),
        stream=pl.lit(0),
        pool_id=pl.lit("0:0"),
        inferred=pl.lit(False),
        allocated_bytes=pl.col("allocated") * MIB,
        active_bytes=pl.col("allocated") * MIB,
        reserved_bytes=pl.col("reserved") * MIB,
    ).drop("allocated", "reserved")
    spans = pl.DataFrame(
        {"span_id": [1, 2], "op_id": [1, 2], "kind": ["operator"] * 2, "name": ["aten::empty", "aten::conv2d"],
         "ts_ns": [500, 1500], "dur_ns": [600, 4000]}
    )  # fmt: skip
    devices = pl.DataFrame(
        {"device_type": ["cuda"], "device_index": [0], "name": ["Tiny GPU"], "total_bytes": [1 << 30],
         "baseline_bytes": [0], "complete_history": [True]}
    )  # fmt: skip
    issues = pl.DataFrame({"code": ["no_rank"], "severity": ["info"], "count": [1]})
    runs = pl.DataFrame(
        {"name": [name], "source_file": [f"{name}.pickle"], "source_sha256": ["ab" * 32], "source_bytes": [10],
         "adapter": ["cuda_snapshot"], "schema_version": [1], "xmem_version": ["0"], "ingested_ns": [ingested_ns],
         "torch_version": ["2.14.1"], "time_base": ["unix"], "baseline_bytes": [0], "ring_buffer": [False],
         "truncated": [False], "source_entries": [6], "event_count": [6], "memory_event_count": [5],
         "span_count": [2], "stack_count": [0]}
    )  # fmt: skip
    with store.writer(run_id) as writer:
        tables = {"events": events, "spans": spans, "devices": devices, "issues": issues, "runs": runs}
        for table, frame in tables.items():
            writer.write(table, 0, frame)
        writer.commit()


@pytest.fixture
def tiny_store(clean_folder: Path) -> Store:
    """The store `.xmem` of the working directory, with one small run."""
    store = Store(".xmem")
    write_tiny_run(store)
    return store
