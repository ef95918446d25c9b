"""`xmem ingest`: one file or many, what it prints, and one clear sentence for everything that cannot be read."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import MIB, Xmem
from tests.paths import EXAMPLES, SHARED_DATA, needs_shared

SNAPSHOT = EXAMPLES / "gpt_small_a100.pickle"
#: JSON keys of one ingested run: keys are only ever added.
PROMISED = [
    "run_id", "name", "adapter", "already_there", "ranks", "event_count", "memory_event_count", "span_count",
    "stack_count", "sources", "devices", "issues", "warnings",
]  # fmt: skip


def memory_event(ts: int, change: int, total: int, index: int, address: int = 4096) -> dict[str, Any]:
    arguments = {"Device Type": 1, "Device Id": 0, "Addr": address, "Bytes": change, "Total Allocated": total,
                 "Total Reserved": 20 * MIB, "Ev Idx": index}  # fmt: skip
    return {
        "ph": "i",
        "cat": "cpu_instant_event",
        "s": "t",
        "name": "[memory]",
        "pid": 1,
        "tid": 1,
        "ts": ts,
        "args": arguments,
    }


def trace(*events: dict[str, Any], **head: Any) -> bytes:
    return json.dumps({"schemaVersion": 1, "profile_memory": 1, **head, "traceEvents": list(events)}).encode()


TRACE = trace(memory_event(1, 4 * MIB, 4 * MIB, 0), memory_event(2, -4 * MIB, 0, 1))


# ------------------------------------------------------------------ what is read


def test_a_snapshot_goes_into_the_store(xmem: Xmem) -> None:
    done = xmem("ingest", str(SNAPSHOT))
    assert (done.code, done.err) == (0, "")
    first, *facts, last = done.out.splitlines()
    assert first.startswith("gpt_small_a100: run ")
    run_id = first.split()[-1]
    assert facts[0] == "  source  cuda_snapshot, 387.35 KiB"
    assert last == f"next: xmem simulate {run_id} --gpu 24"
    assert [run["run_id"] for run in xmem("runs", "--json").json] == [run_id]


def test_json_holds_the_promised_keys(xmem: Xmem) -> None:
    (one,) = xmem("ingest", str(SNAPSHOT), "--json").json
    assert list(one)[: len(PROMISED)] == PROMISED
    assert (one["adapter"], one["name"], one["ranks"], one["already_there"]) == (
        "cuda_snapshot", "gpt_small_a100", [0], False,
    )  # fmt: skip


def test_the_same_file_again_is_known(xmem: Xmem) -> None:
    Path("a.json").write_bytes(TRACE)
    xmem("ingest", "a.json")
    done = xmem("ingest", "a.json")
    assert done.code == 0
    assert "(in the store already; --force reads it again)" in done.out.splitlines()[0]
    assert xmem("ingest", "a.json", "--force", "--json").json[0]["already_there"] is False
    assert len(xmem("runs", "--json").json) == 1


@pytest.mark.parametrize("name", ["trace.json", "trace.txt", "no_suffix", "a name with 'quotes'; --.json"])
def test_content_decides_not_the_name(xmem: Xmem, name: str) -> None:
    Path(name).write_bytes(TRACE)
    assert xmem("ingest", name, "--json").json[0]["adapter"] == "torch_trace"


def test_gzip_needs_no_suffix(xmem: Xmem) -> None:
    Path("trace.json").write_bytes(gzip.compress(TRACE))
    assert xmem("ingest", "trace.json", "--json").json[0]["memory_event_count"] == 2


def test_standard_input_is_a_dash(xmem: Xmem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TRACE)))
    (one,) = xmem("ingest", "-", "--json").json
    assert one["sources"][0]["source_file"] == "-"


def test_a_folder_is_one_run_with_ranks(xmem: Xmem) -> None:
    Path("ranks").mkdir()
    for rank in (0, 1):
        Path(f"ranks/rank{rank}.json").write_bytes(
            trace(
                memory_event(1, (rank + 1) * MIB, (rank + 1) * MIB, 0), distributedInfo={"rank": rank, "world_size": 2}
            )
        )
    done = xmem("ingest", "ranks")
    assert "  source            torch_trace, 2 ranks (0, 1), " in done.out
    assert "cuda:0 of rank 1  peak 1.00 MiB" not in done.out
    assert "cuda:0 of rank 1  peak 2.00 MiB allocated" in done.out


def test_warnings_go_to_standard_error(xmem: Xmem) -> None:
    Path("cut.json").write_bytes(TRACE[:-20])
    done = xmem("ingest", "cut.json")
    assert done.code == 0
    assert done.err.startswith("warning: cut: The end of the file is missing; everything whole before it was kept.")
    assert xmem("ingest", "cut.json", "-q", "--force").err == ""
    assert "  issue   truncated 1 (data_loss), first at byte " in xmem("ingest", "cut.json", "-v", "--force").out


def test_strict_stores_nothing(xmem: Xmem) -> None:
    Path("cut.json").write_bytes(TRACE[:-20])
    done = xmem("ingest", "cut.json", "--strict")
    assert done.code == 3
    assert done.err.startswith("error: Nothing was stored, as --strict asks: cut.json: truncated.\nhint: ")
    assert xmem("runs", "--json").json == []


def test_the_other_files_are_read_where_one_fails(xmem: Xmem) -> None:
    Path("a.json").write_bytes(TRACE)
    Path("empty.json").write_bytes(b"")
    done = xmem("ingest", "missing.json", "empty.json", "a.json")
    assert done.code == 2
    assert done.err.splitlines()[0] == "error: There is no file 'missing.json'."
    assert done.err.splitlines()[2] == "error: 'empty.json' is empty: there is nothing to read."
    assert [run["name"] for run in xmem("runs", "--json").json] == ["a"]


def test_a_part_of_a_file(xmem: Xmem) -> None:
    (one,) = xmem("ingest", str(EXAMPLES / "cpu_training.json.gz"), "--steps", "1-2", "--no-spans", "--json").json
    assert one["span_count"] == 0
    steps = xmem(
        "query", "SELECT DISTINCT step FROM events WHERE NOT inferred AND step IS NOT NULL ORDER BY 1", "--json"
    )
    assert [row["step"] for row in steps.json] == [1, 2]


def test_names_from_a_file_stay_inert(xmem: Xmem) -> None:
    Path("x\x1b[2J.json").write_bytes(TRACE)
    done = xmem("ingest", "x\x1b[2J.json")
    assert done.code == 0
    assert "\x1b" not in done.out + done.err
    done = xmem("ingest", "no\x1b[2J.json")
    assert done.code == 2
    assert "\x1b" not in done.out + done.err


# ------------------------------------------------------------------ what cannot be read


def deep() -> bytes:
    return b"[" * 200_000


class Runs:
    """Pickles to a call of `print`."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return print, ("run",)


BAD = {
    "empty": (b"", 3, "'bad' is empty: there is nothing to read."),
    "words": (b"hello\n", 3, "'bad' is plain text, not a trace or snapshot that xmem knows."),
    "noise": (bytes(range(256)) * 4, 3, "'bad' is binary data, not a trace or snapshot that xmem knows."),
    "other JSON": (b'{"a": 1}', 3, "bad is no torch.profiler trace: It is a JSON object with the keys 'a'"),
    "no records": (trace(), 3, "bad holds no trace records that can be read."),
    "memory switched off": (
        b'{"schemaVersion": 1, "traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 1}]}',
        3,
        "it was recorded without profile_memory=True.",
    ),
    "code in a pickle": (pickle.dumps(Runs()), 4, "it asks for the Python object builtins.print"),
    "a pickle of something else": (pickle.dumps({"weights": [1, 2]}), 3, "bad"),
    "empty gzip": (gzip.compress(b""), 3, "'bad' is empty"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_read_ends_in_one_sentence_and_stores_nothing(xmem: Xmem, tmp_path: Path, case: str) -> None:
    content, code, message = BAD[case]
    Path("bad").write_bytes(content)
    done = xmem("ingest", "bad")
    assert (done.code, done.out) == (code, "")
    error, _, hint = done.err.partition("\n")
    assert error.startswith("error: ") and message in error
    assert hint.startswith("hint: ") and hint.count("\n") == 1
    assert "Traceback" not in done.err and "run\n" not in done.out
    assert [path.name for path in tmp_path.iterdir()] == ["bad"]


def test_a_missing_file(xmem: Xmem, tmp_path: Path) -> None:
    done = xmem("ingest", "missing.json")
    assert (done.code, done.err) == (2, "error: There is no file 'missing.json'.\nhint: Check the path.\n")
    assert list(tmp_path.iterdir()) == []


def test_a_pattern_that_fits_nothing(xmem: Xmem) -> None:
    done = xmem("ingest", "rank*.json")
    assert done.code == 2
    assert done.err == "error: No file fits the pattern 'rank*.json'.\nhint: Check the folder and the pattern.\n"


def test_an_empty_folder(xmem: Xmem) -> None:
    Path("folder").mkdir()
    done = xmem("ingest", "folder")
    assert done.code == 3
    assert done.err.startswith("error: The folder 'folder' holds no trace or snapshot.\nhint: ")


def test_two_files_with_one_rank_are_asked_about(xmem: Xmem) -> None:
    Path("ranks").mkdir()
    for name in ("a", "b"):
        Path(f"ranks/{name}.json").write_bytes(
            trace(memory_event(1, MIB, MIB, 0), traceName=name, distributedInfo={"rank": 0, "world_size": 2})
        )
    done = xmem("ingest", "ranks")
    assert done.code == 2
    assert "rank 0" in done.err and "a.json" in done.err and "b.json" in done.err
    assert xmem("runs", "--json").json == []


@needs_shared
def test_the_ranks_of_the_field_report(xmem: Xmem) -> None:
    (one,) = xmem("ingest", str(SHARED_DATA / "bug_inputs" / "25-ranks"), "--json").json
    assert one["ranks"] == [0, 1, 2]
