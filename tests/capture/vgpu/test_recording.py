"""From the recorder's lines to an event log: phases, steps, categories, and files that were cut off."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from xmem.capture.vgpu.recording import log_lines, read_parts, write_log
from xmem.ingest import IngestOptions, ingest

HEADER = {
    "torch_version": "2.14.1", "alloc_conf": None, "pid": 7, "argv": ["t.py"], "cudnn_version": 92400,
    "asks_cudnn": True, "device_name": "NVIDIA Test", "devices": 1,
}  # fmt: skip
FACTS = {"total_bytes": 1 << 30, "virtual_gpu": "Test"}
MODULE = ["_call_impl", "/lib/torch/nn/modules/module.py", 1]


def entry(action: str, address: int, size: int = 512, stack: int | None = None) -> list[Any]:
    return [action, address, size, 0, stack, "0:0"]


def chunk(entries: list[Any], marks: list[Any], **more: Any) -> dict[str, Any]:
    line = {"rank": None, "status": "running", "entries": {"0": entries}, "stacks": [], "marks": marks}
    return {**line, "stats": {}, "unmodelled": [], "communicators": {}, **more}


def write_part(folder: Path, *lines: dict[str, Any], name: str = "part-7.jsonl", rest: str = "") -> None:
    text = "".join(json.dumps(line) + "\n" for line in (HEADER, *lines))
    (folder / name).write_text(text + rest)


def events(folder: Path) -> list[dict[str, Any]]:
    (part,) = read_parts(folder)
    return [line for line in log_lines(part, FACTS) if "action" in line]


def one_step(folder: Path) -> None:
    first = [
        entry("segment_alloc", 0, 2 << 20), entry("alloc", 0), entry("alloc", 512, stack=0), entry("alloc", 1024),
        entry("free_requested", 1024), entry("alloc", 1536), entry("alloc", 2048),
    ]  # fmt: skip
    marks = [
        [0, 2, "backward", None], [0, 4, "after_backward", None], [0, 5, "own", ["parameter", [0]]],
        [0, 5, "own", ["gradient", [1536]]], [0, 5, "optimizer", None], [0, 6, "own", ["optimizer_state", [2048]]],
        [0, 6, "step", 1],
    ]  # fmt: skip
    write_part(folder, chunk(first, marks, stacks=[[0, MODULE]]), chunk([entry("alloc", 4096)], []))


def test_marks_give_phase_step_and_category(tmp_path: Path) -> None:
    one_step(tmp_path)
    found = [(e["action"], e.get("phase"), e.get("step"), e.get("category")) for e in events(tmp_path)]
    assert found == [
        ("segment_alloc", None, None, None),
        ("alloc", None, None, "parameter"),
        ("alloc", "forward", 0, "activation"),
        ("alloc", "backward", 0, "temporary"),
        ("free_requested", "backward", 0, None),
        ("alloc", "forward", 0, "gradient"),
        ("alloc", "optimizer", 0, "optimizer_state"),
        ("alloc", "forward", 1, None),
    ]


def test_a_line_that_was_cut_off_costs_that_line(tmp_path: Path) -> None:
    write_part(tmp_path, chunk([entry("alloc", 0)], []), rest='{"rank": null, "entr')
    (part,) = read_parts(tmp_path)
    assert part.entries == {0: [entry("alloc", 0)]} and part.status == "killed"


def test_ranks_are_in_order_and_idle_processes_left_out(tmp_path: Path) -> None:
    for pid, rank in ((1, 1), (2, 0)):
        write_part(tmp_path, chunk([entry("alloc", 0)], [], rank=rank, status="steps"), name=f"part-{pid}.jsonl")
    write_part(tmp_path, chunk([], []), name="part-3.jsonl")
    assert [part.rank for part in read_parts(tmp_path)] == [0, 1]


def test_out_of_memory_is_told(tmp_path: Path) -> None:
    oom = [["oom", None, 4096, 0, None, "0:0", 100]]
    write_part(tmp_path, chunk([entry("alloc", 0), *oom], [[0, 1, "oom", [4096, 512, 100]]]))
    (part,) = read_parts(tmp_path)
    assert part.out_of_memory == [(0, 4096, 100)]
    assert next(e for e in events(tmp_path) if e["action"] == "oom")["device_free"] == 100


def test_the_log_is_read_and_is_the_same_each_time(tmp_path: Path) -> None:
    one_step(tmp_path)
    (part,) = read_parts(tmp_path)
    first = write_log(part, tmp_path / "a.xmem.jsonl.gz", FACTS).read_bytes()
    assert write_log(part, tmp_path / "b.xmem.jsonl.gz", FACTS).read_bytes() == first
    (run,) = ingest([tmp_path / "a.xmem.jsonl.gz"], options=IngestOptions(store=tmp_path / "store"))
    assert run.devices[0].name == "NVIDIA Test" and run.devices[0].total_bytes == 1 << 30
    assert run.devices[0].peak_reserved_bytes == 2 << 20
