"""`xmem inspect`: what a file is, at a glance and without a store."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import MIB, Xmem
from tests.cli.test_ingest import TRACE, memory_event, trace
from tests.paths import EXAMPLES
from xmem.ingest.inspect import inspect

#: Events that make a trace larger than what is read at once.
COPIES = 150_000


def test_a_trace(xmem: Xmem, tmp_path: Path) -> None:
    done = xmem("inspect", str(EXAMPLES / "cpu_training.json.gz"))
    assert (done.code, done.err) == (0, "")
    assert done.out == (
        "cpu_training.json.gz\n"
        "  kind      torch_trace\n"
        "  size      196.01 KiB, gzip\n"
        "  torch     not stated\n"
        "  rank      not stated\n"
        "  devices   cpu\n"
        "  entries   1,631, 123 bytes each\n"
        "  spans     7,562\n"
        "  stacks    0\n"
        "  time      379 ms from 2026-12-01 04:21:41 UTC\n"
        "  history   no ring buffer, whole\n"
        "  switches  profile_memory on, record_shapes on, with_stack on\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_snapshot(xmem: Xmem) -> None:
    found = xmem("inspect", str(EXAMPLES / "gpt_small_a100.pickle"), "--json").json
    assert (found["kind"], found["entries"], found["stacks"]) == ("cuda_snapshot", 3969, 27)
    assert (found["devices"], found["ring_buffer"], found["switches"]) == (["cuda:0"], False, {})


def test_switches_that_were_off_and_how_to_turn_them_on(xmem: Xmem) -> None:
    Path("trace.json").write_bytes(TRACE)
    done = xmem("inspect", "trace.json")
    assert "  switches  profile_memory on, record_shapes OFF, with_stack OFF" in done.out.splitlines()
    assert done.out.splitlines()[-2:] == [
        "advice: Record with record_shapes=True: without it operators have no shapes, which a prediction for a GPU"
        " needs.",
        "advice: Record with with_stack=True: without it allocations have neither modules nor lines of code.",
    ]


def test_a_trace_without_memory_says_why(xmem: Xmem) -> None:
    event = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 1, "pid": 1, "tid": 1}
    Path("trace.json").write_bytes(trace(event, profile_memory=0))
    done = xmem("inspect", "trace.json")
    assert done.code == 0
    assert (
        "advice: Record with profile_memory=True: without it a trace holds no memory events." in done.out.splitlines()
    )


def test_the_rank_that_a_trace_states(xmem: Xmem) -> None:
    Path("trace.json").write_bytes(trace(memory_event(1, MIB, MIB, 0), distributedInfo={"rank": 3}))
    assert xmem("inspect", "trace.json", "--json").json["rank"] == 3


def test_what_is_read_in_part_is_called_an_estimate(xmem: Xmem) -> None:
    one = json.dumps(memory_event(1, MIB, MIB, 0)).encode()
    head = trace(distributedInfo={"rank": 3}).removesuffix(b"]}")
    Path("trace.json").write_bytes(head + b",".join([one] * COPIES) + b"]}")
    found = inspect("trace.json", budget_s=0)
    assert found.estimated and found.rank == 3
    assert found.entries == pytest.approx(COPIES, rel=0.05)
    assert not inspect("trace.json", budget_s=600).estimated


def test_a_file_that_ends_early(xmem: Xmem) -> None:
    Path("cut.json").write_bytes(TRACE[:-20])
    done = xmem("inspect", "cut.json")
    assert "  history   the end of the file is missing" in done.out.splitlines()
    assert "  issues    truncated 1" in done.out.splitlines()


@pytest.mark.parametrize(
    ("content", "code", "message"),
    [
        (b"", 3, "'bad' is empty: there is nothing to read."),
        (b"hello\n", 3, "'bad' is plain text, not a trace or snapshot that xmem knows."),
        (b"cbuiltins\nprint\n(S'x'\ntR.", 4, "it asks for the Python object builtins.print"),
    ],
)
def test_what_cannot_be_read(xmem: Xmem, content: bytes, code: int, message: str) -> None:
    Path("bad").write_bytes(content)
    done = xmem("inspect", "bad")
    assert (done.code, done.out) == (code, "")
    assert message in done.err


def test_a_missing_file_and_a_folder(xmem: Xmem) -> None:
    assert xmem("inspect", "missing").err == "error: There is no file 'missing'.\nhint: Check the path.\n"
    Path("folder").mkdir()
    done = xmem("inspect", "folder")
    assert done.code == 2
    assert done.err == "error: 'folder' is a folder, not a file.\nhint: Name the trace or snapshot in it.\n"
