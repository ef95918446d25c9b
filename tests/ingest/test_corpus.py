"""Every handed input: counts as in the index, levels as in the snapshot's own segments, totals at every event."""

from __future__ import annotations

import csv

import pytest

from tests.ingest.check_inputs import OPS_KEYS, check_folder, compare, names_of_pickle
from tests.ingest.check_inputs import Outcome as Reading
from tests.paths import EXAMPLES, SHARED_DATA, needs_shared
from xmem.ingest import IngestOptions, ingest
from xmem.store import Store

#: Traces that carry totals, with the accelerator's events in each.
WITH_TOTALS = {
    "AMD-AGI-TraceLens__tests__traces__h100__Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz": ("cuda", 2250),
    "AMD-AGI-TraceLens__tests__traces__h100__gaunernst_bert-small-uncased__1016001.json.gz": ("cuda", 218),
    "AMD-AGI-TraceLens__tests__traces__mi300__gaunernst_bert-small-uncased__1016001.json.gz": ("hip", 234),
    "facebookresearch-HolisticTraceAnalysis__tests__data__df_index_resolver__df_index_resolver.json.gz": (
        "cuda",
        26770,
    ),
}
KINETO_2021 = "pytorch-kineto__tb_plugin__samples__resnet50_num_workers_0__worker0.1623143089861.pt.trace.json.gz"


def index() -> list[dict[str, str]]:
    file = SHARED_DATA / "corpus/index.csv"
    return list(csv.DictReader(file.open(encoding="utf-8"))) if file.exists() else []


def snapshots() -> list[str]:
    folder = SHARED_DATA / "snapshots"
    return sorted(file.name for file in folder.glob("*.pickle")) if folder.is_dir() else []


class Stored:
    """One file in a store of its own."""

    def __init__(self, file, folder):
        (self.run,) = ingest(file, options=IngestOptions(store=folder))
        self.connection = Store(folder).connect()

    def ask(self, sql):
        return self.connection.execute(sql).fetchall()

    def issues(self):
        return {issue.code: issue.count for issue in self.run.issues}


def check_state(stored: Stored) -> None:
    """Levels at the end are those of the final segments, and peaks are maxima of the running sums."""
    wrong = stored.ask("""
        SELECT device_index, s.*, e.* FROM (
          SELECT device_index, sum(allocated_bytes) AS allocated, sum(active_bytes) AS active,
            sum(total_bytes) AS reserved
          FROM segments GROUP BY ALL
        ) s JOIN (
          SELECT device_index, arg_max(allocated_bytes, seq) AS allocated, arg_max(active_bytes, seq) AS active,
            arg_max(reserved_bytes, seq) AS reserved
          FROM events GROUP BY ALL
        ) e USING (device_index)
        WHERE (s.allocated, s.active, s.reserved) IS DISTINCT FROM (e.allocated, e.active, e.reserved)
    """)
    assert wrong == []
    summed = stored.ask("""
        SELECT count(*) FROM (
          SELECT allocated_bytes AS level, sum(
            CASE action WHEN 'alloc' THEN 1 WHEN 'free_requested' THEN -1 ELSE 0 END
            * coalesce(block_bytes, requested_bytes)
          ) OVER (PARTITION BY device_type, device_index ORDER BY seq) AS total
          FROM events WHERE alloc_id IS NOT NULL
        ) WHERE level <> total
    """)
    frees = stored.ask("SELECT count(*) FROM events WHERE action = 'free_requested'")[0][0]
    assert frees == 0 or summed == [(0,)]


def check_lives(stored: Stored) -> None:
    """Every free belongs to an allocation, and no two allocations hold one address at a time."""
    assert stored.ask("""
        SELECT count(*) FROM events WHERE alloc_id IS NULL AND action IN ('alloc', 'free_requested', 'free_completed')
    """) == [(0,)]
    assert stored.ask("""
        SELECT count(*) FROM (
          SELECT seq, end_seq, lead(seq) OVER (PARTITION BY device_type, device_index, address ORDER BY seq) AS next
          FROM events WHERE action = 'alloc' AND address IS NOT NULL
        ) WHERE next IS NOT NULL AND (end_seq IS NULL OR end_seq > next)
    """) == [(0,)]


@needs_shared
@pytest.mark.parametrize("name", snapshots())
def test_snapshots_of_the_real_allocator(name, tmp_path):
    stored = Stored(SHARED_DATA / "snapshots" / name, tmp_path / "store")
    check_state(stored)
    check_lives(stored)
    assert stored.issues() == {"no_rank": 1}
    assert stored.run.devices[0].complete_history
    assert stored.ask("SELECT count(*) FROM events WHERE inferred") == [(0,)]


@needs_shared
@pytest.mark.parametrize("row", [row for row in index() if row["kind"] == "snapshot"], ids=lambda row: row["file"])
def test_counts_of_a_snapshot_are_those_of_the_index(row, tmp_path):
    stored = Stored(SHARED_DATA / "corpus" / row["file"], tmp_path / "store")
    found = dict(stored.ask("SELECT action, count(*) FROM events WHERE NOT inferred GROUP BY ALL"))
    for action in ("alloc", "free_requested", "free_completed", "segment_alloc", "segment_free"):
        assert found.get(action, 0) == int(row[f"n_{action}"] or 0), action
    (totals,) = stored.ask("SELECT count(*), coalesce(sum(total_bytes), 0) FROM segments")
    assert totals == (int(row["n_segments"]), int(row["reserved_end"]))
    ends = stored.ask("SELECT device_index, arg_max(allocated_bytes, seq) FROM events GROUP BY ALL")
    assert sum(end for _, end in ends) == int(row["allocated_end"])
    check_state(stored)
    check_lives(stored)
    complete = [device.complete_history for device in stored.run.devices]
    assert complete == ([True] if row["from_first_alloc"] == "dev0:YES" else [False] * len(complete))


@needs_shared
@pytest.mark.parametrize("row", [row for row in index() if row["kind"] == "kineto-trace"], ids=lambda row: row["file"])
def test_counts_of_a_trace_are_those_of_the_index(row, tmp_path):
    stored = Stored(SHARED_DATA / "corpus" / row["file"], tmp_path / "store")
    assert stored.run.memory_event_count == int(row["n_memory"])
    assert stored.ask("SELECT count(*) FROM events WHERE NOT inferred") == [(int(row["n_memory"]),)]
    check_lives(stored)
    assert "total_mismatch" not in stored.issues()
    if row["file"] in WITH_TOTALS:
        kind, count = WITH_TOTALS[row["file"]]
        levels = stored.ask(f"""
            SELECT count(*), count(*) FILTER (allocated_bytes <> total_allocated) FROM events
            WHERE device_type = '{kind}' AND total_allocated IS NOT NULL
        """)
        assert levels == [(count, 0)]
    if row["file"] == KINETO_2021:
        assert set(stored.issues()) == {"no_addresses", "no_rank", "several_devices"}
        assert stored.issues()["no_addresses"] == 12838


@needs_shared
def test_memory_timeline_of_the_index(tmp_path):
    (row,) = [row for row in index() if row["kind"] == "memory-timeline"]
    stored = Stored(SHARED_DATA / "corpus" / row["file"], tmp_path / "store")
    assert stored.run.sources[0].source_entries == 16845
    assert stored.ask("SELECT count(*) FROM events WHERE inferred") == [(645,)]
    assert stored.ask("SELECT min(allocated_bytes) >= 0 FROM events") == [(True,)]


def test_snapshots_shipped_as_examples(tmp_path):
    for file in sorted(EXAMPLES.glob("*.pickle")):
        stored = Stored(file, tmp_path / file.name)
        check_state(stored)
        check_lives(stored)


@needs_shared
@pytest.mark.slow
def test_every_handed_input_is_read_as_expected():
    assert {name: wrong for name, wrong in check_folder(SHARED_DATA / "bug_inputs").items() if wrong} == {}


def test_the_check_itself_finds_wrong_figures(tmp_path):
    rows = [
        {"what": "peak_allocated", "rank": 0, "device": "cuda:0", "value": "5"},
        {"what": "peak_allocated", "rank": 0, "device": "cpu", "value": "90"},
        {"what": "issue:unmatched_free", "rank": 0, "device": None, "value": "2"},
        {
            "what": "run",
            "rank": 0,
            "device": "torch_trace",
            "value": '{"preexisting_bytes": 1, "memory_events": 2, "trace_entries": 3, "truncated": true}',
        },
    ]
    reading = Reading(0, "warning: the end is missing, the file was cut", True, rows, [])
    right = {
        "peak_allocated": 5,
        "unmatched_frees": 2,
        "memory_events": 2,
        "truncated": True,
        "ranks": [0],
        "note": "x",
    }
    assert compare(right, reading, tmp_path) == []
    assert compare({"peak_allocated": 6}, reading, tmp_path) == ["peak_allocated: 5, expected 6"]
    assert compare({"exit": 3}, reading, tmp_path) == ["exit: 0, expected 3"]
    assert compare({"memory_events_at_least": 3}, reading, tmp_path) == [
        "memory_events_at_least: 2, at least 3 expected"
    ]
    assert compare({"never_heard_of": 1}, reading, tmp_path) == ["never_heard_of: this key is not known"]
    assert compare({"must_explain": True}, reading, tmp_path) == ["must_explain: something was stored"]
    assert compare({"must_warn": True}, reading, tmp_path) == ["must_warn: no such issue among []"]
    assert "note" in OPS_KEYS


def test_names_in_a_pickle_are_found_without_loading_it(tmp_path):
    file = tmp_path / "x.pickle"
    file.write_bytes(b"\x80\x04\x8c\x02os\x8c\x06system\x93.")
    assert names_of_pickle(file) == {"os.system"}
    file.write_bytes(b"cposix\nsystem\n.")
    assert names_of_pickle(file) == {"posix.system"}
