"""Writes small stores by hand: a table of events in text, its levels counted one by one."""

from __future__ import annotations

import io
from pathlib import Path

import polars as pl

from xmem.store import Store

_INTEGERS = ("seq", "id", "bytes", "step", "span", "stack", "stream", "index", "rank", "ts")


def write(
    path: Path, events: str, *, run_id: str = "tiny", name: str = "tiny", **tables: list[dict[str, object]]
) -> Store:
    """Write a run from a table of events: `seq action id bytes` and any of category, step, phase, span, stack, ..."""
    store = Store(path)
    rows = _read(events)
    with store.writer(run_id) as writer:
        for rank in sorted({row.get("rank") or 0 for row in rows}):
            own = [row for row in rows if (row.get("rank") or 0) == rank]
            frame = _events(own)
            writer.write("events", rank, frame)
            for table, given in tables.items():
                chosen = [row for row in given if row.get("rank", 0) == rank]
                if chosen:
                    bare = [{key: value for key, value in row.items() if key != "rank"} for row in chosen]
                    writer.write(table, rank, pl.DataFrame(bare, infer_schema_length=None))
            writer.write("runs", rank, _run(name, frame))
        writer.commit()
    return store


def _read(text: str) -> list[dict[str, object]]:
    lines = [line.split() for line in text.strip().splitlines()]
    rows = []
    for line in lines[1:]:
        cells = dict(zip(lines[0], line, strict=True))
        known = {key: value for key, value in cells.items() if value != "-"}
        rows.append({key: int(value) if key in _INTEGERS else value for key, value in known.items()})
    return rows


def _events(rows: list[dict[str, object]]) -> pl.DataFrame:
    levels: dict[object, list[int]] = {}
    sizes = {row["id"]: row["bytes"] for row in rows if row["action"] == "alloc"}
    requested = {row.get("id") for row in rows if row["action"] == "free_requested"}
    completed = {row.get("id") for row in rows if row["action"] == "free_completed"}
    segments = {row.get("device", "cuda") for row in rows if str(row["action"]).startswith("segment")}
    ends = {row["id"]: row["seq"] for row in rows if row["action"] == "free_completed"}
    ends |= {row["id"]: row["seq"] for row in rows if row["action"] == "free_requested"}
    written = []
    for row in rows:
        device, action, number = row.get("device", "cuda"), str(row["action"]), row.get("id")
        level = levels.setdefault((device, row.get("index")), [0, 0, 0])
        size = int(str(sizes.get(number, row.get("bytes", 0))))
        if action == "alloc":
            level[0], level[1] = level[0] + size, level[1] + size
        if action == "free_requested" or (action == "free_completed" and number not in requested):
            level[0] -= size
        if action == "free_completed" or (action == "free_requested" and number not in completed):
            level[1] -= size
        if action in ("segment_alloc", "segment_map"):
            level[2] += size
        if action in ("segment_free", "segment_unmap"):
            level[2] -= size
        written.append(
            {
                "seq": row["seq"],
                "ts_ns": row.get("ts", int(str(row["seq"])) * 10),
                "device_type": device,
                "device_index": row.get("index", -1 if device == "cpu" else 0),
                "action": action,
                "alloc_id": number,
                "block_bytes": size,
                "stream": row.get("stream"),
                "pool_id": row.get("pool"),
                "span_id": row.get("span"),
                "stack_id": row.get("stack"),
                "step": row.get("step"),
                "phase": row.get("phase"),
                "category": row.get("category"),
                "inferred": "inferred" in row,
                "allocated_bytes": level[0],
                "active_bytes": level[1],
                "reserved_bytes": level[2] if device in segments else None,
                "end_seq": ends.get(number) if action == "alloc" else None,
            }
        )
    return pl.DataFrame(written, infer_schema_length=None)


def _run(name: str, frame: pl.DataFrame) -> pl.DataFrame:
    row = {
        "name": name, "source_file": f"{name}.json", "source_sha256": "0" * 64, "source_bytes": 1,
        "adapter": "torch_trace", "schema_version": 1, "xmem_version": "0", "ingested_ns": 1, "time_base": "relative",
        "first_ts_ns": frame["ts_ns"].min(), "last_ts_ns": frame["ts_ns"].max(), "baseline_bytes": 0,
        "ring_buffer": False, "truncated": False, "source_entries": frame.height, "event_count": frame.height,
        "memory_event_count": frame.height, "span_count": 0, "stack_count": 0,
    }  # fmt: skip
    return pl.DataFrame([row])


def as_csv(frame: pl.DataFrame) -> str:
    """Show rows as CSV without the end of the last line."""
    buffer = io.StringIO()
    frame.write_csv(buffer)
    return buffer.getvalue().strip()


TRAINING = """
seq action         id bytes category        step phase     span stack stream device inferred
0   segment_alloc  -  4096  -               -    -         -    -     0      cuda   yes
1   alloc          0  1024  parameter       -    -         -    -     0      cuda   yes
2   alloc          1  512   activation      0    forward   2    0     0      cuda   -
3   alloc          2  2048  activation      0    forward   3    1     0      cuda   -
4   segment_alloc  -  4096  -               0    backward  4    1     7      cuda   -
5   alloc          3  1024  temporary       0    backward  4    -     7      cuda   -
6   free_requested 3  1024  temporary       0    backward  4    -     7      cuda   -
7   free_completed 3  1024  temporary       0    backward  4    -     7      cuda   -
8   alloc          4  1024  gradient        0    backward  4    1     0      cuda   -
9   free_requested 2  2048  activation      0    backward  -    -     0      cuda   -
10  free_completed 2  2048  activation      0    backward  -    -     0      cuda   -
11  alloc          5  512   optimizer_state 0    optimizer 5    -     0      cuda   -
12  free_requested 1  512   activation      0    optimizer -    -     0      cuda   -
13  alloc          6  512   activation      1    forward   7    0     0      cuda   -
14  free_completed 1  512   activation      1    forward   -    -     0      cuda   -
15  alloc          7  256   unknown         1    forward   7    2     0      cuda   -
16  free_requested 4  1024  gradient        1    backward  -    -     0      cuda   -
17  free_completed 4  1024  gradient        1    backward  -    -     0      cuda   -
18  free_requested 6  512   activation      1    backward  -    -     0      cuda   -
19  free_completed 6  512   activation      1    backward  -    -     0      cuda   -
20  oom            -  6144  -               1    backward  8    1     0      cuda   -
21  alloc          8  100   input           1    backward  8    -     -      cpu    -
22  free_requested 8  100   input           1    backward  8    -     -      cpu    -
"""


def span(number: int, kind: str, name: str, ts: int, dur: int, **more: object) -> dict[str, object]:
    """Return a row of `spans`; operators stand for themselves unless `op_id` says otherwise."""
    return {
        "span_id": number, "kind": kind, "name": name, "ts_ns": ts, "dur_ns": dur,
        "parent_id": more.get("parent"), "op_id": more.get("op", number if kind == "operator" else None),
        "module_id": more.get("module"), "correlation_id": more.get("correlation"),
        "device_index": more.get("device"), "stream": more.get("stream"),
    }  # fmt: skip


SPANS = [
    span(0, "step", "ProfilerStep#0", 15, 110),
    span(1, "module", "nn.Module: Linear_0", 15, 30, parent=0),
    span(2, "operator", "aten::linear", 15, 30, parent=1, module=1),
    span(3, "operator", "aten::empty", 25, 10, parent=2, op=2, module=1),
    span(4, "operator", "aten::mm", 38, 50),
    span(5, "annotation", "Optimizer.step#Adam.step", 105, 15),
    span(6, "step", "ProfilerStep#1", 125, 90),
    span(7, "operator", "aten::linear", 125, 30, parent=6),
    span(8, "operator", "aten::cat", 195, 30, parent=6),
    span(9, "runtime", "cudaLaunchKernel", 40, 2, parent=4, op=4, correlation=77),
    span(10, "kernel", "gemm<float>", 45, 20, correlation=77, device=0, stream=7),
    span(11, "kernel", "late", 60, 20, device=0, stream=7),
    span(12, "memcpy", "Memcpy HtoD", 130, 10, device=0, stream=7),
]
STACKS = [
    {"stack_id": 0, "frames": [
        {"name": "at::empty", "filename": "aten/Empty.cpp", "line": 0},
        {"name": "forward", "filename": "/usr/lib/python3/dist-packages/torch/nn/linear.py", "line": 116},
        {"name": "encode", "filename": "/home/me/model.py", "line": 12}]},
    {"stack_id": 1, "frames": [{"name": "backward", "filename": "/site-packages/torch/autograd.py", "line": 5}]},
    {"stack_id": 2, "frames": [{"name": "remember", "filename": "train.py", "line": 40}]},
]  # fmt: skip
SEGMENTS = [
    {"segment_id": 0, "device_type": "cuda", "device_index": 0, "address": 4096, "total_bytes": 4096,
     "allocated_bytes": 1792, "active_bytes": 1792, "stream": 0, "pool_id": "0:0"},
    {"segment_id": 1, "device_type": "cuda", "device_index": 0, "address": 65536, "total_bytes": 4096,
     "allocated_bytes": 0, "active_bytes": 0, "stream": 7, "pool_id": "0:0"},
]  # fmt: skip
BLOCKS = [
    {"segment_id": 0, "address": 4096, "block_bytes": 1792, "state": "active_allocated"},
    {"segment_id": 0, "address": 5888, "block_bytes": 2304, "state": "inactive"},
    {"segment_id": 1, "address": 65536, "block_bytes": 4096, "state": "inactive"},
]
DEVICES = [
    {"device_type": "cuda", "device_index": 0, "name": "NVIDIA T4", "total_bytes": 9216, "baseline_bytes": 1024,
     "complete_history": False},
]  # fmt: skip

IDLE = [{"stream": 7, "idle_category": "host_wait", "idle_ns": 60, "share": 0.75},
        {"stream": 7, "idle_category": "kernel_wait", "idle_ns": 20, "share": 0.25}]  # fmt: skip


def write_training(path: Path, **changes: object) -> Store:
    """Write the run that most tests here read."""
    tables = {
        "hta_idle_time": IDLE,
        "spans": SPANS,
        "stacks": STACKS,
        "segments": SEGMENTS,
        "blocks": BLOCKS,
        "devices": DEVICES,
    }
    return write(path, TRAINING, **{**tables, **changes})  # type: ignore[arg-type]
