"""Large traces are read by several processes, and nothing shows it."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from tests.ingest.traces import memory, span, trace
from xmem.errors import UnreadableError
from xmem.ingest import torch_trace, trace_shares
from xmem.ingest.adapter import Filters, Notes
from xmem.ingest.source import hash_file, open_source
from xmem.ingest.spool import in_types_of

BASE = 1_751_410_836_000_000_000
RECORDS = [
    memory(n, n + 1, **{"Device Id": n % 2, "Device Type": 99 if n == 190 else 1})
    if n % 3
    else span(f"s{n}", n + 0.125)
    for n in range(200)
]


@pytest.fixture(autouse=True)
def three_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_shares, "SMALLEST_SHARE_BYTES", 1000)
    monkeypatch.setattr(trace_shares, "processors", lambda: 3)
    monkeypatch.setattr("xmem.ingest.json_stream.CHUNK_BYTES", 500)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[trace_shares.Share]:
    """The shares that were started, and how many of them came to a good end."""
    found: list[trace_shares.Share] = []
    start = trace_shares.start_shares

    def watch(*args: Any) -> list[trace_shares.Share]:
        shares = start(*args)
        found.extend(shares)
        return shares

    monkeypatch.setattr(trace_shares, "start_shares", watch)
    return found


Told = tuple[dict[str, pl.DataFrame], dict[str, Any], dict[str, tuple[int, int | None, str]], int | None]


def tell(source: Any, filters: Filters | None = None) -> Told:
    """All that the adapter says of a source."""
    notes = Notes(filename="t.json", filters=filters or Filters())
    frames: dict[str, list[pl.DataFrame]] = {}
    for batch in torch_trace.read(source, notes):
        frames.setdefault(batch.table, []).append(in_types_of(batch.table, batch.columns))
    issues = {code: (issue.count, issue.first_at, issue.detail) for code, issue in notes.issues.items()}
    tables = {table: pl.concat(parts, how="diagonal") for table, parts in frames.items()}
    return tables, notes.facts, issues, notes.rank


def check_same(path: Path, text: str | bytes, filters: Filters | None = None) -> Told:
    """Read a file in shares and in one go; both must say the same."""
    content = text.encode() if isinstance(text, str) else text
    path.write_bytes(content)
    with open_source(path) as source:
        shared = tell(source, filters)
        source.finish()
        assert (source.sha256, source.disk_bytes) == hash_file(path)
    alone = tell(io.BytesIO(content), filters)
    assert shared[0].keys() == alone[0].keys()
    for table, frame in alone[0].items():
        assert shared[0][table].equals(frame.select(shared[0][table].columns)), table
    assert shared[1:] == alone[1:]
    return shared


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("base_first", [True, False])
def test_shares_say_the_same(tmp_path: Path, indent: int | None, base_first: bool, started: list[Any]) -> None:
    fields = {"baseTimeNanoseconds": BASE, "distributedInfo": {"rank": 5}, "deviceProperties": [{"id": 0, "name": "x"}]}
    content = fields | trace(*RECORDS) if base_first else trace(*RECORDS) | fields
    tables, _, issues, rank = check_same(tmp_path / "t.json", json.dumps(content, indent=indent))
    assert len(started) == 2
    assert (tables["events"].height, tables["spans"].height, rank) == (133, 67, 5)
    assert issues == {"unknown_device_type": (1, None, "")}
    assert all(share.process.returncode == 0 and share.spool.closed for share in started)


def test_filters_reach_the_shares(tmp_path: Path, started: list[Any]) -> None:
    filters = Filters(device="cuda:1", stacks=False, steps=(1, 2), since_ns=BASE + 50_000, until_ns=BASE + 150_000)
    content = json.dumps({"baseTimeNanoseconds": BASE} | trace(*RECORDS))
    tables, *_ = check_same(tmp_path / "t.json", content, filters)
    assert started
    assert tables["events"]["device_index"].unique().to_list() == [1]


def test_broken_records_in_any_share(tmp_path: Path, started: list[Any]) -> None:
    parts = [json.dumps(record) for record in RECORDS]
    for at in (10, 90, 170):
        parts[at] = '{"ph":"X","name":"say "hi"","ts":1,"dur":nan}'
    _, _, issues, _ = check_same(tmp_path / "t.json", '{"traceEvents":[' + ",\n".join(parts) + "]}")
    assert started
    assert issues["repaired_string"][0] == 3
    assert issues["non_finite_number"][0] == 3


@pytest.mark.parametrize("cut", [1, 30, 3000])
def test_a_cut_file(tmp_path: Path, cut: int, started: list[Any]) -> None:
    _, facts, issues, _ = check_same(tmp_path / "t.json", json.dumps(trace(*RECORDS))[:-cut])
    assert started
    assert facts["truncated"] is True
    assert issues["truncated"][0] == 1


def test_a_boundary_inside_of_a_record_is_seen(tmp_path: Path, started: list[Any]) -> None:
    inner = span("outer", args={"list": [span(f"inner{n}") for n in range(300)]})
    tables, *_ = check_same(tmp_path / "t.json", json.dumps(trace(*RECORDS[:20], inner, *RECORDS[20:60])))
    assert len(started) == 2
    assert tables["spans"]["name"].cast(pl.String).str.starts_with("inner").sum() == 0


def test_a_list_that_ends_before_the_first_stop(tmp_path: Path, started: list[Any]) -> None:
    content = trace(*RECORDS[:20]) | {
        "other": [span(f"foreign{n}") for n in range(300)],
        "distributedInfo": {"rank": 3},
    }
    tables, _, _, rank = check_same(tmp_path / "t.json", json.dumps(content))
    assert started
    assert (tables["spans"].height, rank) == (7, 3)


def test_a_list_that_ends_in_a_middle_share(tmp_path: Path, started: list[Any]) -> None:
    content = trace(*RECORDS[:100]) | {"other": [span(f"foreign{n}") for n in range(60)]}
    tables, *_ = check_same(tmp_path / "t.json", json.dumps(content))
    assert started
    assert tables["events"].height + tables["spans"].height == 100


@pytest.mark.parametrize(
    "program", ["import sys; sys.exit(3)", "print('nonsense')", "import os; os.kill(os.getpid(), 9)"]
)
def test_a_share_that_fails_is_read_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, started: list[Any]
) -> None:
    monkeypatch.setattr(trace_shares, "_BOOT", program)
    check_same(tmp_path / "t.json", json.dumps(trace(*RECORDS)))
    assert len(started) == 2


def test_only_a_later_share_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[Any]) -> None:
    take, seen = trace_shares.take_share, []

    def fail_second(share: Any, *args: Any) -> Any:
        seen.append(share)
        return take(share, *args) if len(seen) == 1 else None

    monkeypatch.setattr(trace_shares, "take_share", fail_second)
    check_same(tmp_path / "t.json", json.dumps(trace(*RECORDS)))
    assert seen == started


def test_reading_that_is_given_up_ends_the_processes(tmp_path: Path, started: list[Any]) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps(trace(*RECORDS)))
    with open_source(path) as source:
        batches = torch_trace.read(source, Notes())  # type: ignore[arg-type]
        next(batches)
        batches.close()  # type: ignore[attr-defined]
    assert len(started) == 2
    assert all(share.process.returncode is not None for share in started)


def test_a_trace_without_memory_is_explained_by_all_shares(tmp_path: Path, started: list[Any]) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps(trace(*(span(f"s{n}") for n in range(100)))))
    with (
        open_source(path) as source,
        pytest.raises(UnreadableError, match=r"t\.json has 100 records, but no \[memory\]"),
    ):
        list(torch_trace.read(source, Notes(filename="t.json")))  # type: ignore[arg-type]
    assert started


def test_small_and_packed_sources_are_read_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("a process was started"))
    text = json.dumps(trace(*RECORDS)).encode()
    assert tell(io.BytesIO(text))[0]["events"].height == 133
    monkeypatch.setattr(trace_shares, "processors", lambda: 1)
    check_same(tmp_path / "one.json", text)
    monkeypatch.setattr(trace_shares, "processors", lambda: 3)
    monkeypatch.setattr(trace_shares, "SMALLEST_SHARE_BYTES", 1 << 30)
    check_same(tmp_path / "small.json", text)


def test_processes_find_this_package_only_by_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "xmem.py").write_text("raise SystemExit('the wrong one')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    check_same(tmp_path / "t.json", json.dumps(trace(*RECORDS)))
