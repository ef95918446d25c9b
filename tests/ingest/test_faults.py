"""Faults while a run is stored: killed at any moment, full disk, read-only store, two ingests at once."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ingest.traces import MIB, memory, span, trace
from tests.paths import REPOSITORY
from xmem.errors import RefusedError, UsageError
from xmem.ingest import IngestOptions, ingest
from xmem.store import RunWriter, Store

#: Runs an ingest that ends itself without any clean-up on the Nth call of a function.
KILLED = """
import importlib, os, resource, signal, sys
from xmem.ingest import IngestOptions, ingest

file, store, place, number, force = sys.argv[1:6]
module, _, path = place.partition(":")
owner = importlib.import_module(module)
*owners, name = path.split(".")
for part in owners:
    owner = getattr(owner, part)
original, calls = getattr(owner, name), []

def counted(*arguments, **options):
    calls.append(1)
    if len(calls) == int(number):
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*arguments, **options)

setattr(owner, name, counted)
ingest(file, options=IngestOptions(store=store, force=force == "force"))
"""

#: The same with files that may not grow beyond a few kilobytes.
LIMITED = """
import resource, sys
from xmem.errors import XmemError
from xmem.ingest import IngestOptions, ingest

file, store = sys.argv[1:3]
import polars, pyarrow.parquet, duckdb, xmem.ingest.tables
resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500))
try:
    ingest(file, options=IngestOptions(store=store))
except XmemError as error:
    print(error.exit_code, error.message)
"""


def write(folder: Path, name: str, size: int) -> Path:
    file = folder / name
    records = [
        span("aten::mm", 1, 9),
        memory(2, size, 1 * MIB),
        memory(5, 2 * size, 2 * MIB),
        memory(7, -size, 1 * MIB),
    ]
    file.write_text(json.dumps(trace(*records, distributedInfo={"rank": 0})))
    return file


def store_of(file: Path, store: Path, **options):
    (run,) = ingest(file, options=IngestOptions(store=store, **options))
    return run


def start(script: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def check_whole(store: Path, expected: dict[str, str]) -> None:
    """Every run is there with all its rows, and nothing else is visible."""
    found = Store(store)
    assert {run.run_id: run.name for run in found.runs()} == expected
    connection = found.connect()
    rows = connection.execute(
        "SELECT run_id, event_count, span_count, (SELECT count(*) FROM events e WHERE e.run_id = r.run_id),"
        " (SELECT count(*) FROM spans s WHERE s.run_id = r.run_id) FROM runs r"
    ).fetchall()
    assert sorted(rows) == sorted((run_id, 3, 1, 3, 1) for run_id in expected)
    assert {row[0] for row in connection.execute("SELECT run_id FROM events").fetchall()} <= set(expected)


#: Functions and the call of each at which the process ends; a new run is made of six renames, a replaced one of eleven.
MOMENTS = [
    ("xmem.ingest.spool:Spool.take", 1),
    ("xmem.store:RunWriter.write", 1),
    ("xmem.store:RunWriter.write", 3),
    ("xmem.store:RunWriter.commit", 1),
    ("xmem.store:fsync", 1),
    ("xmem.store:fsync", 8),
]
CASES = [
    *[(moment, again) for moment in MOMENTS for again in (False, True)],
    *[(("os:replace", number), False) for number in range(1, 7)],
    *[(("os:replace", number), True) for number in (1, 2, 3, 6, 10, 11)],
]


@pytest.mark.parametrize(
    ("moment", "again"),
    CASES,
    ids=[f"{place.partition(':')[2]}-{number}-{'replacing' if again else 'new'}" for (place, number), again in CASES],
)
def test_killed_at_any_moment(moment, again, tmp_path):
    store = tmp_path / "store"
    first, second = write(tmp_path, "first.json", 512), write(tmp_path, "second.json", 1024)
    before = {store_of(first, store).run_id: "first"}
    if again:
        before[store_of(second, store).run_id] = "second"
    process = start(KILLED, second, store, *moment, "force" if again else "")
    _, said = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL, said
    runs = {run.run_id: run.name for run in Store(store).runs()}
    assert before.items() <= runs.items()
    check_whole(store, runs)
    if not again and moment[0] != "os:replace":
        assert runs == before
    run = store_of(second, store)
    assert run.already_there == (run.run_id in runs)
    check_whole(store, {**before, run.run_id: "second"})
    assert not list(store.glob(".commits/*"))


def test_two_ingests_at_once(tmp_path):
    store = tmp_path / "store"
    files = [write(tmp_path, f"run{number}.json", 512 * (number + 1)) for number in range(3)]
    script = (
        "import sys; from xmem.ingest import *\n"
        "print(ingest(sys.argv[1], options=IngestOptions(store=sys.argv[2], force=True))[0].run_id)"
    )
    processes = [start(script, file, store) for file in (*files, files[0], files[0])]
    said = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [0] * 5, said
    ids = [out.strip() for out, _ in said]
    assert ids[0] == ids[3] == ids[4]
    check_whole(store, {run_id: f"run{number}" for number, run_id in enumerate(ids[:3])})


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.ENOSPC, "the disk is full"),
        (errno.EDQUOT, "your disk quota is used up"),
        (errno.EFBIG, "files may not become this large here"),
        (errno.EROFS, "it is read-only for you"),
        (errno.EACCES, "it is read-only for you"),
    ],
)
@pytest.mark.parametrize("moment", [1, 4])
def test_disk_errors_leave_the_store_as_it_was(number, reason, moment, tmp_path, monkeypatch):
    store = tmp_path / "store"
    before = store_of(write(tmp_path, "first.json", 512), store)
    original, calls = RunWriter.write, []

    def failing(self, *arguments):
        calls.append(1)
        if len(calls) == moment:
            raise OSError(number, os.strerror(number))
        original(self, *arguments)

    monkeypatch.setattr(RunWriter, "write", failing)
    with pytest.raises(RefusedError) as caught:
        store_of(write(tmp_path, "second.json", 1024), store)
    monkeypatch.undo()
    assert caught.value.exit_code == 4
    assert caught.value.message == f"The store {str(store)!r} cannot be written: {reason}. The store is as it was."
    assert "--store" in caught.value.hint
    check_whole(store, {before.run_id: "first"})
    assert not any(store.glob(".staging/*"))


def test_polars_names_the_error_in_its_text_only(tmp_path, monkeypatch):
    def failing(*arguments):
        raise OSError("No space left on device (os error 28)")

    monkeypatch.setattr("xmem.ingest.spool.Spool.take", failing)
    with pytest.raises(RefusedError, match="the disk is full"):
        store_of(write(tmp_path, "t.json", 512), tmp_path / "store")


def test_files_that_may_not_grow(tmp_path):
    store = tmp_path / "store"
    before = store_of(write(tmp_path, "first.json", 512), store)
    process = start(LIMITED, write(tmp_path, "second.json", 1024), store)
    out, _ = process.communicate(timeout=120)
    assert out.startswith(f"4 The store {str(store)!r} cannot be written: files may not become this large here."), out
    check_whole(store, {before.run_id: "first"})


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_store(tmp_path):
    store = tmp_path / "store"
    before = store_of(write(tmp_path, "first.json", 512), store)
    for folder in (store, *store.rglob("*")):
        folder.chmod(0o555 if folder.is_dir() else 0o444)
    try:
        with pytest.raises(RefusedError, match="it is read-only for you"):
            store_of(write(tmp_path, "second.json", 1024), store)
        check_whole(store, {before.run_id: "first"})
    finally:
        for folder in (store, *store.rglob("*")):
            folder.chmod(0o755)


def test_store_that_is_a_file(tmp_path):
    store = tmp_path / "store"
    store.write_text("")
    with pytest.raises(UsageError) as caught:
        store_of(write(tmp_path, "t.json", 512), store)
    assert caught.value.message == f"The store {str(store)!r} is not a folder."
