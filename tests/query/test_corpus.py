"""Views, reports and the page on every real file, against a count that goes through the events one by one."""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.paths import SHARED_DATA, needs_shared
from xmem.ingest import IngestOptions, ingest
from xmem.query import connect, query
from xmem.query.alive import find_alive
from xmem.query.curve import thin_curve
from xmem.query.exchange import weighted_stacks
from xmem.query.reports import find_report, reports, run_report
from xmem.query.subject import Subject, devices_of
from xmem.store import Store

FILES = sorted(
    file
    for folder in ("corpus", "snapshots")
    for file in (SHARED_DATA / folder).glob("*")
    if file.suffix in (".pickle", ".pkl", ".gz") and "SunnySood80" not in file.name  # holds nothing at all
)
KEYS = {
    "categories": "category",
    "operators": "op",
    "modules": "module",
    "stack_bytes": "stack_id",
    "streams": "stream",
}
Device = tuple[int, str, int]


class Count:
    """Goes through the events of one device in order and remembers what is alive."""

    def __init__(self) -> None:
        self.alive: dict[int, int] = {}
        self.at_peak: dict[int, int] = {}
        self.level = self.peak = 0
        self.peak_seq = -1
        self.total = 0

    def take(self, event: dict[str, Any]) -> None:
        if self.peak_seq < 0:
            self.peak_seq = event["seq"]
        if event["action"] == "alloc":
            size = event["block_bytes"] if event["block_bytes"] is not None else event["requested_bytes"] or 0
            self.alive[event["alloc_id"]] = size
            self.level += size
            self.total += size
        elif event["action"] in ("free_requested", "free_completed"):
            self.level -= self.alive.pop(event["alloc_id"], 0)
        if self.level > self.peak:
            self.peak, self.peak_seq, self.at_peak = self.level, event["seq"], dict(self.alive)


def count(store: Path) -> dict[Device, Count]:
    found: dict[Device, Count] = {}
    columns = "rank, device_type, device_index, seq, action, alloc_id, block_bytes, requested_bytes"
    for event in query(f"SELECT {columns} FROM events ORDER BY rank, seq", store=store).iter_rows(named=True):
        device = (event["rank"], event["device_type"], event["device_index"])
        found.setdefault(device, Count()).take(event)
    return found


@pytest.fixture(scope="module", params=FILES, ids=lambda file: file.name[:60])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("corpus") / "store"
    ingest(request.param, options=IngestOptions(store=folder))
    return request.param, folder


def guessed(folder: Path) -> bool:
    """Say whether the source itself does not tell which allocation a free ends: its levels are recorded totals."""
    return query("SELECT 1 FROM issues WHERE code IN ('useless_addresses', 'no_addresses')", store=folder).height > 0


@needs_shared
def test_peaks_and_parts_equal_a_count_one_by_one(store: tuple[Path, Path]) -> None:
    _, folder = store
    counted = count(folder)
    rows = query("FROM peaks", store=folder).rows(named=True)
    assert {(row["rank"], row["device_type"], row["device_index"]) for row in rows} == set(counted)
    attributes = {
        (row["rank"], row["alloc_id"]): row for row in query("FROM allocations", store=folder).iter_rows(named=True)
    }
    for row in rows:
        device = (row["rank"], row["device_type"], row["device_index"])
        own = counted[device]
        if not guessed(folder):
            assert (row["peak_allocated_bytes"], row["end_allocated_bytes"]) == (own.peak, own.level)
            assert row["peak_allocated_seq"] == own.peak_seq
        where = f"rank = {device[0]} AND device_type = '{device[1]}' AND device_index = {device[2]}"
        for view, key in KEYS.items():
            parts = query(f"SELECT {key}, at_peak_bytes, total_bytes FROM {view} WHERE {where}", store=folder).rows()
            assert sum(total for _, _, total in parts) == own.total
            if row["peak_allocated_seq"] == own.peak_seq:
                expected: Counter[object] = Counter()
                for number, size in own.at_peak.items():
                    expected[attributes[device[0], number][key]] += size
                assert {name: size for name, size, _ in parts if size} == {k: v for k, v in expected.items() if v}


@needs_shared
def test_moments_stacks_and_reports_are_whole(store: tuple[Path, Path]) -> None:
    _, folder = store
    connection = connect(folder)
    run = Store(folder).find_run()
    for device in devices_of(connection, run):
        subject = Subject(run, device)
        for one in reports():
            assert run_report(connection, one, subject).columns
        if guessed(folder):
            continue
        curve = thin_curve(connection, subject)
        alive = find_alive(connection, subject, curve)
        levels = curve.points["allocated_bytes"].to_list()
        held = [0] * len(alive.groups)
        for moment, changes in zip(curve.moments, alive.changes, strict=True):
            for group, size, _ in changes:
                held[group] += size
            assert sum(held) == levels[moment] and min(held, default=0) >= 0
        assert max(levels) == device.peak_allocated_bytes
        assert sum(size for _, size in weighted_stacks(connection, subject)) == device.peak_allocated_bytes
        shown = run_report(connection, find_report("peak"), subject, 3).pl()
        assert shown["at_peak_bytes"].sum() == device.peak_allocated_bytes


@needs_shared
def test_figures_of_the_index(store: tuple[Path, Path]) -> None:
    """The corpus's index was made by other code than this: final levels of snapshots, peaks of traces."""
    file, folder = store
    with (SHARED_DATA / "corpus" / "index.csv").open(newline="") as opened:
        row = next((row for row in csv.DictReader(opened) if row["file"] == file.name), None)
    if row is None:
        pytest.skip("not a file of the index")
    peaks = {
        one["device_type"]: one for one in query("FROM peaks ORDER BY peak_allocated_bytes", store=folder).to_dicts()
    }
    if row["kind"] == "snapshot":
        ends = query("SELECT sum(end_active_bytes) AS a, sum(end_reserved_bytes) AS r FROM peaks", store=folder).row(0)
        assert ends == (int(row["allocated_end"]), int(row["reserved_end"]))
    elif row["peaks"]:
        numbers = {"type0": "cpu", "type1": "cuda", "type6": "hip"}
        for name, figures in json.loads(row["peaks"]).items():
            if figures["minalloc"] is not None:  # the file records totals
                peak = peaks[numbers[name.partition("/")[0]]]
                assert peak["peak_allocated_bytes"] == figures["alloc"]
                assert peak["peak_reserved_bytes"] in (figures["resv"], None)


@needs_shared
def test_the_peak_of_the_small_gpt_is_accounted_for(tmp_path: Path) -> None:
    file = SHARED_DATA / "snapshots" / "gpt_small_adamw_b4_a100.pickle"
    ingest(file, options=IngestOptions(store=tmp_path / "s"))
    connection = connect(tmp_path / "s")
    run = Store(tmp_path / "s").find_run()
    (device,) = devices_of(connection, run)
    subject = Subject(run, device)
    peak = count(tmp_path / "s")[device.rank, device.device_type, device.device_index].peak
    assert peak == device.peak_allocated_bytes > 450 << 20
    shown = run_report(connection, find_report("peak"), subject).pl()
    assert shown["at_peak_bytes"].sum() == peak and shown["share"].sum() == pytest.approx(1)
    assert sum(size for _, size in weighted_stacks(connection, subject)) == peak
