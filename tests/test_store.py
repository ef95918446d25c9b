"""The store: runs appear whole or not at all, whatever stops the writer, and every message says what to do."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow.parquet as pq
import pytest

import xmem.store
from xmem.errors import RefusedError, UnreadableError, UsageError
from xmem.schema import tables
from xmem.store import Store, store_path


def run_row(name: str = "tiny", ingested_ns: int = 1, **changes: object) -> pl.DataFrame:
    row: dict[str, object] = {
        "name": name, "source_file": f"{name}.json", "source_sha256": "ab" * 32, "source_bytes": 10,
        "adapter": "torch_trace", "schema_version": 1, "xmem_version": "0", "ingested_ns": ingested_ns,
        "time_base": "unix", "baseline_bytes": 0, "ring_buffer": False, "truncated": False, "source_entries": 2,
        "event_count": 2, "memory_event_count": 2, "span_count": 0, "stack_count": 0,
    }  # fmt: skip
    return pl.DataFrame({key: [value] for key, value in (row | changes).items()})


def event_rows(count: int = 2) -> pl.DataFrame:
    return pl.DataFrame(
        {
            "seq": range(count), "ts_ns": range(count), "device_type": ["cuda"] * count, "device_index": [0] * count,
            "action": ["alloc"] * count, "alloc_id": range(count), "requested_bytes": [512] * count,
            "address": [2**63 + i for i in range(count)], "inferred": [False] * count,
        },
        schema_overrides={"address": pl.UInt64},
    )  # fmt: skip


def add_run(store: Store, run_id: str, *, ranks: int = 1, **row: Any) -> None:
    with store.writer(run_id) as writer:
        for rank in range(ranks):
            writer.write("events", rank, event_rows())
            writer.write("runs", rank, run_row(**row))
        writer.commit()


def count(store: Store, table: str) -> int:
    counted = store.connect().execute(f"SELECT count(*) FROM {table}").fetchone()
    assert counted is not None
    return int(counted[0])


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


# ------------------------------------------------------------------ reading and writing


def test_a_store_that_is_not_there_is_empty_and_stays_absent(store: Store) -> None:
    assert store.runs() == []
    assert count(store, "events") == 0
    assert not store.path.exists()


def test_a_run_is_there_after_its_commit(store: Store) -> None:
    add_run(store, "abc123", ranks=2, torch_version="2.14.1")
    (run,) = store.runs()
    assert (run.run_id, run.name, run.ranks, run.torch_version) == ("abc123", "tiny", (0, 1), "2.14.1")
    assert (run.event_count, run.memory_event_count, run.sources) == (4, 4, ("ab" * 32, "ab" * 32))
    assert count(store, "events") == 4
    assert store.connect().execute("SELECT DISTINCT run_id, rank FROM events ORDER BY rank").fetchall() == [
        ("abc123", 0),
        ("abc123", 1),
    ]


def test_addresses_keep_64_unsigned_bits(store: Store) -> None:
    add_run(store, "abc123")
    assert store.connect().execute("SELECT max(address) FROM events").fetchone() == (2**63 + 1,)


def test_a_first_writer_without_commit_leaves_no_store(store: Store) -> None:
    with store.writer("abc123") as writer:
        writer.write("runs", 0, run_row())
    assert store.runs() == []
    assert not store.path.exists()


def test_a_first_writer_without_commit_leaves_the_store_to_others(store: Store) -> None:
    with store.writer("abc123"):
        add_run(store, "def456")
    assert [run.run_id for run in store.runs()] == ["def456"]


def test_a_writer_that_raises_leaves_nothing(store: Store) -> None:
    add_run(store, "old")
    with pytest.raises(ValueError, match="torn"), store.writer("abc123") as writer:
        writer.write("events", 0, event_rows())
        raise ValueError("torn")
    assert count(store, "events") == 2
    assert list((store.path / ".staging").iterdir()) == []


def test_the_same_run_again_replaces_the_old_one(store: Store) -> None:
    add_run(store, "abc123", ranks=2)
    add_run(store, "abc123", ranks=1, name="later")
    (run,) = store.runs()
    assert (run.name, run.ranks) == ("later", (0,))
    assert count(store, "events") == 2


def test_an_unknown_column_is_a_fault_of_the_writer(store: Store) -> None:
    with store.writer("abc123") as writer, pytest.raises(AssertionError, match="table events has no column colour"):
        writer.write("events", 0, pl.DataFrame({"colour": ["red"]}))


def test_a_missing_value_where_one_must_be_is_not_written(store: Store) -> None:
    with store.writer("abc123") as writer, pytest.raises(Exception, match="null"):
        writer.write("events", 0, event_rows().with_columns(seq=pl.lit(None, pl.Int64)))


def test_simulations_stand_beside_committed_runs_and_go_with_them(store: Store) -> None:
    add_run(store, "abc123")
    frame = pl.DataFrame(
        {"simulation_id": ["s"], "seq": [0], "action": ["alloc"], "allocated_bytes": [1], "active_bytes": [1],
         "reserved_bytes": [1]}
    )  # fmt: skip
    store.write_table("simulation_events", "abc123", 0, "s", frame)
    assert count(store, "simulation_events") == 1
    add_run(store, "abc123")
    assert count(store, "simulation_events") == 0


def test_removing_a_run_removes_it_whole(store: Store) -> None:
    add_run(store, "abc123")
    add_run(store, "def456")
    store.remove("abc123")
    assert [run.run_id for run in store.runs()] == ["def456"]
    assert count(store, "events") == 2


def test_tables_keep_their_comments_over_files(store: Store) -> None:
    add_run(store, "abc123")
    rows = store.connect().execute("SELECT column_name, comment FROM duckdb_columns() WHERE table_name = 'events'")
    assert dict(rows.fetchall()) == {column.name: column.comment for column in tables()["events"].columns}


@pytest.mark.parametrize("name", ["it's", "a b", "star*", "what?", "[brackets]", "semi;colon", "ünï", 'quo"te'])
def test_any_folder_name_will_do(tmp_path: Path, name: str) -> None:
    store = Store(tmp_path / name)
    add_run(store, "abc123")
    (tmp_path / "starX").mkdir()
    assert count(store, "events") == 2


def test_a_file_from_before_a_column_was_added_reads_as_null(store: Store) -> None:
    add_run(store, "abc123")
    add_run(store, "def456")
    (file,) = (store.path / "events" / "run_id=abc123").rglob("*.parquet")
    pq.write_table(pq.read_table(file, partitioning=None).drop_columns(["address", "step"]), file)
    rows = store.connect().execute("SELECT run_id, count(*), count(address) FROM events GROUP BY ALL ORDER BY ALL")
    assert rows.fetchall() == [("abc123", 2, 0), ("def456", 2, 2)]


# ------------------------------------------------------------------ finding runs


def test_no_run_yet(store: Store) -> None:
    with pytest.raises(UsageError) as caught:
        store.find_run()
    assert caught.value.message == f"There is no run yet in the store {str(store.path)!r}."
    assert caught.value.hint == "Make one: xmem ingest FILE"


def test_the_newest_run_is_the_default(store: Store) -> None:
    add_run(store, "fff", name="first", ingested_ns=1)
    add_run(store, "aaa", name="second", ingested_ns=2)
    assert store.find_run().name == "second"


def test_a_run_is_known_by_id_name_and_unique_prefix(store: Store) -> None:
    add_run(store, "abc123", name="one")
    add_run(store, "abd456", name="two")
    assert [store.find_run(text).run_id for text in ("abc123", "two", "abc")] == ["abc123", "abd456", "abc123"]


def test_a_prefix_of_two_runs_is_asked_about(store: Store) -> None:
    add_run(store, "abc123", name="one", ingested_ns=1)
    add_run(store, "abd456", name="two", ingested_ns=2)
    with pytest.raises(UsageError) as caught:
        store.find_run("ab")
    assert caught.value.message == "'ab' fits 2 runs."
    assert caught.value.hint == "Name one by its id: abc123 (one), abd456 (two)"


def test_an_unknown_run_lists_those_that_are_there(store: Store) -> None:
    add_run(store, "abc123", name="one")
    with pytest.raises(UsageError) as caught:
        store.find_run("zzz")
    assert caught.value.message == f"There is no run 'zzz' in the store {str(store.path)!r}."
    assert caught.value.hint == "Runs there: abc123 (one)"


def test_where_the_store_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XMEM_STORE", raising=False)
    assert store_path() == Path(".xmem")
    monkeypatch.setenv("XMEM_STORE", "/elsewhere")
    assert store_path() == Path("/elsewhere")
    assert store_path("here") == Path("here")


# ------------------------------------------------------------------ faults


def stop_after(monkeypatch: pytest.MonkeyPatch, renames: int) -> None:
    """Let a commit die, as kill -9 would, after that many renames of its tables."""
    real, done = os.replace, []

    def replace(source: Any, target: Any) -> None:
        if Path(source).name in xmem.store.INGEST_TABLES:
            if len(done) == renames:
                raise KeyboardInterrupt
            done.append(source)
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)


@pytest.mark.parametrize("renames", [0, 1])
def test_a_commit_that_was_killed_half_way_is_finished_by_the_next_opening(
    store: Store, monkeypatch: pytest.MonkeyPatch, renames: int
) -> None:
    add_run(store, "old", name="old")
    with monkeypatch.context() as patch:
        stop_after(patch, renames)
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)  # a killed process cleans nothing up
        with pytest.raises(KeyboardInterrupt):
            add_run(store, "abc123")
    assert [run.run_id for run in store.runs()] == ["old"]
    assert {run.run_id for run in Store(store.path).runs()} == {"old", "abc123"}
    assert count(Store(store.path), "events") == 4
    assert list((store.path / ".commits").iterdir()) == []


def test_a_writer_that_was_killed_before_its_commit_leaves_the_store_as_it_was(store: Store) -> None:
    add_run(store, "old")
    writer = xmem.store.RunWriter(store, "abc123")
    writer.write("runs", 0, run_row())
    reopened = Store(store.path)
    assert [run.run_id for run in reopened.runs()] == ["old"]
    assert count(reopened, "runs") == 1
    writer.discard()


def test_what_a_killed_writer_left_goes_after_a_day(store: Store) -> None:
    add_run(store, "old")
    left = store.path / ".staging" / "left"
    left.mkdir(parents=True)
    os.utime(left, (1, 1))
    add_run(store, "new")
    assert not left.exists()


def fail_with(number: int) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize(
    ("number", "message", "hint"),
    [
        (errno.ENOSPC, "the disk is full", "Free some space or name another folder with --store."),
        (errno.EROFS, "it is read-only for you", "Name a folder of your own with --store or XMEM_STORE."),
        (errno.EACCES, "it is read-only for you", "Name a folder of your own with --store or XMEM_STORE."),
    ],
)
def test_what_the_disk_says_becomes_a_sentence(
    store: Store, monkeypatch: pytest.MonkeyPatch, number: int, message: str, hint: str
) -> None:
    add_run(store, "old")
    with monkeypatch.context() as patch, pytest.raises(RefusedError) as caught:
        patch.setattr(xmem.store, "fsync", fail_with(number))
        add_run(store, "abc123")
    assert (
        caught.value.message == f"The store {str(store.path)!r} cannot be written: {message}. The store is as it was."
    )
    assert caught.value.hint == hint
    assert [run.run_id for run in Store(store.path).runs()] == ["old"]


def test_a_file_in_the_place_of_the_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError) as caught:
        add_run(Store(tmp_path / "file"), "abc123")
    assert caught.value.message == f"The store {str(tmp_path / 'file')!r} is not a folder."
    assert caught.value.hint == "Name a folder with --store or XMEM_STORE."


def test_a_damaged_file_is_named(store: Store) -> None:
    add_run(store, "abc123")
    (file,) = (store.path / "runs").rglob("*.parquet")
    file.write_bytes(b"PAR1 no more")
    with pytest.raises(UnreadableError) as caught:
        store.runs()
    assert caught.value.message.startswith(f"The store's file {str(file)!r} is damaged: ")
    assert caught.value.hint == "Remove its run_id folder and ingest the trace again."


def test_the_marker_says_which_schema_the_store_has(store: Store) -> None:
    add_run(store, "abc123")
    assert json.loads((store.path / "xmem-store.json").read_text()) == {"xmem_store": 1}
