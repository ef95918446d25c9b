"""Whole ingests: identity, strictness, windows, names, progress, and the order of everything in the store."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys

import polars as pl
import pytest

from tests.ingest.traces import MIB, memory, span, trace
from xmem.errors import UnreadableError, UsageError
from xmem.ingest import Filters, IngestOptions, ingest
from xmem.ingest.spool import Spool
from xmem.store import Store


@pytest.fixture
def store(tmp_path):
    return tmp_path / "store"


def write(tmp_path, *records, name="t.json", **fields):
    file = tmp_path / name
    file.write_text(json.dumps(trace(*records, **{"distributedInfo": {"rank": 0}, **fields})))
    return file


def one(paths, store, **options):
    (run,) = ingest(paths, options=IngestOptions(store=store, **options))
    return run


def ask(store, sql):
    return Store(store).connect().execute(sql).fetchall()


LOOP = [
    span("ProfilerStep#0", 0, 100, cat="user_annotation"),
    span("ProfilerStep#1", 200, 100, cat="user_annotation"),
    span("aten::mm", 210, 20),
    memory(10, 512, 1 * MIB, **{"Total Allocated": 512, "Ev Idx": 1}),
    memory(20, 1024, 2 * MIB, **{"Total Allocated": 1536, "Ev Idx": 2}),
    memory(220, 2048, 3 * MIB, **{"Total Allocated": 3584, "Ev Idx": 3}),
    memory(250, -512, 1 * MIB, **{"Total Allocated": 3072, "Ev Idx": 4}),
    memory(400, -2048, 3 * MIB, **{"Total Allocated": 1024, "Ev Idx": 5}),
]


def test_run_id_is_the_hash_of_the_content(tmp_path, store):
    file = write(tmp_path, *LOOP)
    run = one(file, store)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert run.run_id == digest[:12]
    assert run.sources[0].source_sha256 == digest
    assert run.sources[0].source_bytes == file.stat().st_size
    assert (run.name, run.adapter, run.already_there) == ("t", "torch_trace", False)


def test_the_same_file_is_recognised_and_read_again_when_forced(tmp_path, store):
    file = write(tmp_path, *LOOP)
    first = one(file, store)
    copy = tmp_path / "other name.json"
    copy.write_bytes(file.read_bytes())
    second = one(copy, store)
    assert second.already_there
    assert second.name == "t"
    assert (second.devices, second.issues, second.sources) == (first.devices, first.issues, first.sources)
    third = one(copy, store, force=True)
    assert not third.already_there
    assert third.name == "other name"
    assert [run.run_id for run in Store(store).runs()] == [first.run_id]


def test_events_are_numbered_in_true_order_device_after_device(tmp_path, store):
    cpu = {"Device Type": 0, "Device Id": -1}
    file = write(
        tmp_path,
        memory(30, -512, 1 * MIB, **{"Ev Idx": 9, "Total Allocated": 0}),
        memory(30, 512, 1 * MIB, **{"Ev Idx": 8, "Total Allocated": 512}),
        memory(5, 64, 9, **cpu, **{"Total Allocated": 64}),
        memory(40, -64, 9, **cpu),
    )
    run = one(file, store)
    rows = ask(store, "SELECT seq, device_type, action, alloc_id, end_seq FROM events ORDER BY seq")
    assert rows == [
        (0, "cpu", "alloc", 0, 1),
        (1, "cpu", "free_requested", 0, None),
        (2, "cuda", "alloc", 1, 3),
        (3, "cuda", "free_requested", 1, None),
    ]
    assert {issue.code for issue in run.issues} == {"out_of_order", "no_spans", "several_devices"}


def test_what_the_result_says_is_what_the_store_holds(tmp_path, store):
    run = one(write(tmp_path, *LOOP, deviceProperties=[{"id": 0, "name": "G", "totalGlobalMem": 9 * MIB}]), store)
    assert run.event_count == ask(store, "SELECT count(*) FROM events")[0][0] == 5
    assert run.span_count == ask(store, "SELECT count(*) FROM spans")[0][0] == 3
    assert run.memory_event_count == 5
    (device,) = run.devices
    assert (device.device, device.name, device.total_bytes) == ("cuda:0", "G", 9 * MIB)
    assert (device.peak_allocated_bytes, device.end_allocated_bytes) == (3584, 1024)
    assert ask(store, "SELECT max(allocated_bytes), arg_max(allocated_bytes, seq) FROM events") == [(3584, 1024)]


def test_strict_stores_nothing_where_anything_was_repaired(tmp_path, store):
    file = tmp_path / "t.json"
    file.write_bytes(write(tmp_path, *LOOP).read_bytes().replace(b"aten::mm", b"C:\\srv"))
    assert one(file, tmp_path / "lenient").run_id
    with pytest.raises(UnreadableError) as caught:
        one(file, store, strict=True)
    assert caught.value.message == "Nothing was stored, as --strict asks: t.json: repaired_string."
    assert caught.value.exit_code == 3
    assert Store(store).runs() == []


def test_strict_lets_notes_pass(tmp_path, store):
    run = one(write(tmp_path, *LOOP[3:7]), store, strict=True)
    assert {issue.severity for issue in run.issues} == {"note"}


def test_warnings_are_sentences(tmp_path, store):
    file = write(tmp_path, *LOOP)
    file.write_text(file.read_text()[:-80])
    run = one(file, store)
    assert run.sources[0].truncated
    (warning,) = run.warnings
    assert warning.startswith("The end of the file is missing; everything whole before it was kept. First at byte ")
    assert warning.endswith("Let the exporting job end, or record fewer steps.")


def test_window_of_steps_begins_with_what_is_there(tmp_path, store):
    file = write(tmp_path, *LOOP)
    run = one(file, store, filters=Filters(steps=(1, 1)))
    rows = ask(store, "SELECT seq, action, block_bytes, inferred, allocated_bytes, end_seq FROM events ORDER BY seq")
    assert rows == [
        (0, "alloc", 512, True, 512, 3),
        (1, "alloc", 1024, True, 1536, None),
        (2, "alloc", 2048, False, 3584, None),
        (3, "free_requested", 512, False, 3072, None),
    ]
    assert run.sources[0].baseline_bytes == 1536
    assert not run.devices[0].complete_history
    assert run.run_id != hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    assert ask(store, "SELECT filters FROM runs") == [('{"steps": [1, 1]}',)]
    assert sorted(ask(store, "SELECT name FROM spans")) == [("ProfilerStep#1",), ("aten::mm",)]
    assert one(file, store).run_id != run.run_id


def test_window_of_time(tmp_path, store):
    run = one(write(tmp_path, *LOOP), store, filters=Filters(since_ns=15_000, until_ns=230_000))
    rows = ask(store, "SELECT action, block_bytes, inferred FROM events ORDER BY seq")
    assert rows == [("alloc", 512, True), ("alloc", 1024, False), ("alloc", 2048, False)]
    assert run.devices[0].baseline_bytes == 512


def test_steps_that_are_not_there(tmp_path, store):
    with pytest.raises(UsageError) as caught:
        one(write(tmp_path, *LOOP), store, filters=Filters(steps=(5, 6)))
    assert caught.value.message == "No event lies in steps 5 to 6: the source has steps 0 to 1."
    with pytest.raises(UsageError) as caught:
        one(write(tmp_path, *LOOP[3:]), store, filters=Filters(steps=(5, 6)))
    assert caught.value.message == "No event lies in steps 5 to 6: the source names no steps."
    assert Store(store).runs() == []


def test_one_device(tmp_path, store):
    file = write(tmp_path, *LOOP, memory(7, 64, 9, **{"Device Type": 0, "Device Id": -1}))
    run = one(file, store, filters=Filters(device="cpu"))
    assert [device.device for device in run.devices] == ["cpu"]
    with pytest.raises(UsageError) as caught:
        one(file, store, filters=Filters(device="cuda:3"))
    assert "'cuda:3'" in caught.value.message
    assert caught.value.exit_code == 2


def test_without_spans(tmp_path, store):
    run = one(write(tmp_path, *LOOP), store, filters=Filters(spans=False))
    assert run.span_count == 0
    assert ask(store, "SELECT count(span_id) FROM events") == [(0,)]


def test_progress_reaches_the_size_of_the_file(tmp_path, store):
    told = []
    file = write(tmp_path, *LOOP)
    one(file, store, progress=lambda *place: told.append(place))
    assert told[-1] == ("t.json", file.stat().st_size, file.stat().st_size)


def test_standard_input(tmp_path, store, repository):
    file = write(tmp_path, *LOOP)
    code = f"from xmem.ingest import *; print(ingest('-', options=IngestOptions(store={str(store)!r}))[0].run_id)"
    done = subprocess.run(
        [sys.executable, "-c", code], stdin=file.open("rb"), capture_output=True, text=True, check=True, cwd=repository
    )
    assert done.stdout.strip() == hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    assert ask(store, "SELECT name, source_file FROM runs") == [("stdin", "-")]


def test_missing_and_unknown_files(tmp_path, store):
    with pytest.raises(UsageError) as caught:
        one(tmp_path / "none.json", store)
    assert "none.json" in caught.value.message
    other = tmp_path / "notes.txt"
    other.write_text("just some words\n")
    with pytest.raises(UnreadableError) as caught:
        one(other, store)
    assert caught.value.message == f"{str(other)!r} is plain text, not a trace or snapshot that xmem knows."
    assert Store(store).runs() == []


def test_batches_beyond_the_limit_go_to_disk_and_come_back(tmp_path, monkeypatch):
    monkeypatch.setattr("xmem.ingest.spool.MEMORY_BYTES", 100)
    spool = Spool(tmp_path)
    for number in range(3):
        frame = pl.DataFrame({"ts_ns": [number] * 10, "action": ["alloc"] * 10, "address": [number] * 10})
        spool.take("events", frame)
    assert len(list(tmp_path.rglob("*.arrow"))) == 3
    assert spool.rows("events") == 30
    assert spool.take_all("events")["ts_ns"].to_list() == [0] * 10 + [1] * 10 + [2] * 10


def test_results_do_not_depend_on_the_spool(tmp_path, monkeypatch):
    file = write(tmp_path, *LOOP)
    small = one(file, tmp_path / "a")
    monkeypatch.setattr("xmem.ingest.spool.MEMORY_BYTES", 1)
    monkeypatch.setattr("xmem.ingest.tables._MANY_SPANS", 1)
    large = one(file, tmp_path / "b")
    assert (small.devices, small.issues) == (large.devices, large.issues)
    for table in ("events", "spans"):
        assert ask(tmp_path / "a", f"FROM {table} ORDER BY ALL") == ask(tmp_path / "b", f"FROM {table} ORDER BY ALL")
    assert not list((tmp_path / "b").rglob("*.arrow"))


def test_importing_ingest_is_light(repository):
    heavy = ("polars", "duckdb", "pyarrow", "numpy", "hta")
    code = f"import sys, xmem.ingest; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=repository)
    assert done.stdout.strip() == "[]"
