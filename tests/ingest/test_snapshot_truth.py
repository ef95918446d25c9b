"""Every handed snapshot, through the whole of ingest: the rows agree with the snapshot's own segments and the index."""

from __future__ import annotations

import csv
import pickle
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from tests.paths import SHARED_DATA, needs_shared
from xmem.ingest import IngestOptions, ingest
from xmem.store import Store

pytestmark = needs_shared

SNAPSHOTS = sorted((SHARED_DATA / "snapshots").glob("*.pickle"))
CORPUS = sorted(path for path in (SHARED_DATA / "corpus").glob("*.p*kl*") if path.suffix in (".pickle", ".pkl"))
#: Corpus snapshots whose recording holds the device's first allocation (column from_first_alloc of the index).
COMPLETE = ("shreyansh26", "silmont2000-assignment2-systems__mem_snapshot")


def index() -> dict[str, dict[str, str]]:
    with open(SHARED_DATA / "corpus" / "index.csv", newline="", encoding="utf-8") as file:
        return {row["file"]: row for row in csv.DictReader(file) if row["kind"] == "snapshot"}


def load(path: Path) -> dict[str, Any]:
    """Load a snapshot that we made or know; tests only."""
    loaded = pickle.loads(path.read_bytes())
    assert isinstance(loaded, dict)
    return loaded


Stored = Callable[[Path], dict[str, pl.DataFrame]]
TABLES = ("events", "segments", "blocks", "runs", "devices")


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    """Give the tables of a snapshot; each is ingested once."""

    @cache
    def read(path: Path) -> dict[str, pl.DataFrame]:
        folder = tmp_path_factory.mktemp("store")
        ingest(path, options=IngestOptions(store=folder))
        connection = Store(folder).connect()
        return {table: connection.sql(f"SELECT * FROM {table}").pl() for table in TABLES}

    return read


def recorded(events: pl.DataFrame) -> pl.DataFrame:
    return events.filter(~pl.col("inferred"))


@pytest.mark.parametrize("path", SNAPSHOTS + CORPUS, ids=lambda path: path.stem[:40])
def test_rows_agree_with_the_file(path: Path, stored: Stored) -> None:
    snapshot, tables = load(path), stored(path)
    entries = [entry for trace in snapshot["device_traces"] for entry in trace]
    rows = recorded(tables["events"]).sort("seq")
    assert rows["action"].to_list() == [entry["action"] for entry in entries]
    assert rows["address"].to_list() == [entry.get("addr") for entry in entries]
    assert rows["requested_bytes"].to_list() == [entry["size"] for entry in entries]
    assert rows["stream"].to_list() == [entry["stream"] for entry in entries]
    if entries and "time_us" in entries[0]:
        assert rows["ts_ns"].to_list() == [entry["time_us"] * 1000 for entry in entries]
    assert tables["runs"]["source_entries"].to_list() == [len(entries)]
    segments = sorted(snapshot["segments"], key=lambda segment: (segment["device"], segment["address"]))
    assert tables["segments"].sort("segment_id")["address"].to_list() == [segment["address"] for segment in segments]
    assert tables["segments"]["total_bytes"].sum() == sum(segment["total_size"] for segment in segments)
    blocks = [block for segment in segments for block in segment["blocks"]]
    assert tables["blocks"].sort("segment_id", "address")["block_bytes"].to_list() == [
        block["size"] for block in blocks
    ]


@pytest.mark.parametrize("path", SNAPSHOTS + CORPUS, ids=lambda path: path.stem[:40])
def test_the_end_is_what_the_segments_say(path: Path, stored: Stored) -> None:
    snapshot, tables = load(path), stored(path)
    events = tables["events"].sort("seq")
    for device in {segment["device"] for segment in snapshot["segments"]}:
        of_device = events.filter(pl.col("device_index") == device)
        segments = [segment for segment in snapshot["segments"] if segment["device"] == device]
        live = [b for s in segments for b in s["blocks"] if b["state"] == "active_allocated"]
        freed = of_device.filter(pl.col("action").is_in(["free_requested", "free_completed"]))["alloc_id"]
        kept = of_device.filter((pl.col("action") == "alloc") & ~pl.col("alloc_id").is_in(freed.unique().implode()))
        assert sorted(kept["address"]) == sorted(block["address"] for block in live)
        reserved = of_device.select(
            pl.when(pl.col("action").is_in(["segment_alloc", "segment_map"]))
            .then("requested_bytes")
            .when(pl.col("action").is_in(["segment_free", "segment_unmap"]))
            .then(-pl.col("requested_bytes"))
            .sum()
        ).item()
        assert reserved == sum(segment["total_size"] for segment in segments)


def is_complete(path: Path) -> bool:
    return path in SNAPSHOTS or path.name.startswith(COMPLETE)


@pytest.mark.parametrize(
    "path", [path for path in SNAPSHOTS + CORPUS if is_complete(path)], ids=lambda path: path.stem[:40]
)
def test_complete_histories_give_exact_levels(path: Path, stored: Stored) -> None:
    snapshot, tables = load(path), stored(path)
    assert tables["devices"]["complete_history"].to_list() == [True]
    assert tables["devices"]["baseline_bytes"].to_list() == [0]
    events = tables["events"].sort("seq")
    assert not events["inferred"].any()
    live: dict[int, int] = {}
    requested, peak, requested_levels = 0, 0, []
    final = {
        block["address"]: block["size"]
        for s in snapshot["segments"]
        for block in s["blocks"]
        if block["state"] != "inactive"
    }
    for entry in snapshot["device_traces"][0]:
        if entry["action"] == "alloc":
            live[entry["addr"]] = entry["size"]
            requested += entry["size"]
        elif entry["action"] == "free_requested":
            requested -= live.pop(entry["addr"])
        peak = max(peak, requested)
        requested_levels.append(requested)
    assert sorted(live) == sorted(final)
    asked = pl.when(pl.col("action") == "alloc").then("requested_bytes")
    asked = asked.when(pl.col("action") == "free_requested").then(-pl.col("requested_bytes")).otherwise(0)
    sums = events.select(asked.cum_sum()).to_series()
    assert sums.to_list() == requested_levels
    assert sums.max() == peak
    allocated, reserved = events["allocated_bytes"], events["reserved_bytes"]
    assert allocated.max() == tables["events"]["allocated_bytes"].max()
    assert reserved[-1] == sum(segment["total_size"] for segment in snapshot["segments"])
    assert peak <= allocated.max() <= reserved.max()
    ended = events.filter(pl.col("action") == "alloc").group_by("address", maintain_order=True).last()
    ended = ended.filter(pl.col("address").is_in(list(final)))
    assert dict(ended.select("address", "block_bytes").iter_rows()) == final


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem[:40])
def test_counts_are_those_of_the_index(path: Path, stored: Stored) -> None:
    row, tables = index()[path.name], stored(path)
    rows = recorded(tables["events"])
    for action in ("alloc", "free_requested", "free_completed", "segment_alloc", "segment_free"):
        assert rows.filter(pl.col("action") == action).height == int(row[f"n_{action}"]), action
    assert tables["segments"].height == int(row["n_segments"])
    assert tables["segments"]["total_bytes"].sum() == int(row["reserved_end"])
    assert tables["segments"]["allocated_bytes"].sum() == int(row["allocated_end"])
    assert tables["runs"]["ring_buffer"].item() is ("ring buffer" in row["oddities"] or "kkaitlyn111" in path.name)


def test_all_snapshots_of_the_index_are_here() -> None:
    assert {path.name for path in CORPUS} == set(index())
    assert len(SNAPSHOTS) == 4
    assert len(CORPUS) == 11
