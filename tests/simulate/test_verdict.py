"""The verdict: its keys, its lines, what decides it, and what is kept of it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulate.stores import MIB, event, make_store
from tests.simulate.test_replay import table
from xmem.errors import UsageError
from xmem.simulate import SimulateOptions, simulate
from xmem.simulate.options import Reserve, parse_reserve
from xmem.simulate.replay import encode
from xmem.simulate.trial import UNLIMITED_BYTES, Setup, find_smallest_usable, try_on
from xmem.store import Store

#: The JSON keys that are fixed; keys are only ever added.
FIXED_KEYS = (
    "fits", "total_bytes", "non_torch_bytes", "usable_bytes", "headroom_bytes", "peak_requested_bytes",
    "peak_allocated_bytes", "peak_active_bytes", "peak_reserved_bytes", "first_step_peak_bytes", "steady_peak_bytes",
    "smallest_device_bytes", "num_ooms", "num_alloc_retries", "oom", "allocator", "alloc_conf", "torch_version",
    "torch_version_assumed", "issues",
)  # fmt: skip


def training_store(folder: Path, **options: object) -> Store:
    """Two steps: 30 MiB of weights, then 50 MiB in the first step and 40 MiB in the second."""
    events = [
        event("alloc", 0, 30 * MIB, category="parameter", op="init"),
        event("alloc", 1, 50 * MIB, step=1, category="activation", phase="forward"),
        event("free_requested", 1, 50 * MIB, step=1),
        event("alloc", 2, 40 * MIB, step=2, category="activation", phase="forward"),
        event("free_requested", 2, 40 * MIB, step=2),
    ]
    for row in events:
        row.pop("op", None)
    return make_store(folder, events, **options)  # type: ignore[arg-type]


def test_a_run_that_fits(tmp_path: Path) -> None:
    store = training_store(tmp_path)
    verdict = simulate(gpu="1GiB", store=store.path)
    assert verdict.fits
    assert verdict.oom is None
    assert (verdict.total_bytes, verdict.non_torch_bytes, verdict.usable_bytes) == (1 << 30, 429496729, 644245095)
    assert verdict.peak_allocated_bytes == verdict.peak_active_bytes == verdict.peak_requested_bytes == 80 * MIB
    assert verdict.peak_reserved_bytes == 80 * MIB
    assert (verdict.first_step_peak_bytes, verdict.steady_peak_bytes) == (80 * MIB, 70 * MIB)
    assert (verdict.end_allocated_bytes, verdict.end_reserved_bytes) == (30 * MIB, 80 * MIB)
    assert verdict.smallest_usable_bytes == 80 * MIB
    assert verdict.smallest_device_bytes == 80 * MIB + 429496729
    assert verdict.fragmentation == 0.0
    assert verdict.unused_at_peak_bytes == 0
    assert (verdict.num_ooms, verdict.num_alloc_retries) == (0, 0)
    assert verdict.peaks_on == "device"
    assert [(row.category, row.bytes) for row in verdict.at_peak] == [("activation", 50 * MIB), ("parameter", 30 * MIB)]
    assert (verdict.run_id, verdict.run_name, verdict.rank, verdict.device) == ("abc123", "tiny", 0, "cuda:0")
    assert verdict.notes == ()


def test_the_json_keys_are_there_and_plain(tmp_path: Path) -> None:
    answer = simulate(gpu="64MiB", store=training_store(tmp_path).path, options=SimulateOptions(non_torch=0)).to_dict()
    assert [key for key in FIXED_KEYS if key not in answer] == []
    assert json.loads(json.dumps(answer))["oom"]["requested_bytes"] == 50 * MIB


def test_a_run_that_does_not_fit_says_what_it_needs(tmp_path: Path) -> None:
    verdict = simulate(gpu="64MiB", store=training_store(tmp_path).path, options=SimulateOptions(non_torch=0))
    assert not verdict.fits
    assert (verdict.num_ooms, verdict.num_alloc_retries) == (1, 1)
    assert verdict.peaks_on == "unlimited"
    assert verdict.peak_reserved_bytes == 80 * MIB
    assert verdict.smallest_device_bytes == 80 * MIB
    oom = verdict.oom
    assert oom is not None
    assert (oom.seq, oom.step, oom.phase, oom.category) == (1, 1, "forward", "activation")
    assert (oom.requested_bytes, oom.segment_bytes, oom.device_free_bytes) == (50 * MIB, 50 * MIB, 34 * MIB)
    assert (oom.allocated_bytes, oom.reserved_bytes, oom.free_in_cache_bytes) == (30 * MIB, 30 * MIB, 0)
    assert [(row.category, row.bytes) for row in oom.held_by] == [("parameter", 30 * MIB)]
    assert not oom.recorded
    assert oom.saved_by == ()


def test_usable_is_total_less_non_torch_less_headroom(tmp_path: Path) -> None:
    store = training_store(tmp_path)
    options = SimulateOptions(non_torch="10MiB", headroom="5%")
    verdict = simulate(gpu="100MiB", store=store.path, options=options)
    assert (verdict.non_torch_bytes, verdict.headroom_bytes, verdict.usable_bytes) == (10 * MIB, 5 * MIB, 85 * MIB)
    assert verdict.fits
    assert verdict.smallest_device_bytes is not None
    reserve = parse_reserve(options)
    assert reserve.usable(verdict.smallest_device_bytes) >= 80 * MIB > reserve.usable(verdict.smallest_device_bytes - 1)
    assert not simulate(gpu="94MiB", store=store.path, options=options).fits


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 32), st.integers(0, 990))
def test_total_for_is_the_least_total(usable: int, non_torch: int, permille: int) -> None:
    from decimal import Decimal

    reserve = Reserve(non_torch, headroom_percent=Decimal(permille) / 10)
    total = reserve.total_for(usable)
    assert reserve.usable(total) >= usable
    assert usable == 0 or reserve.usable(total - 1) < usable


@pytest.mark.parametrize("text", ["100%", "-1%", "x%"])
def test_headroom_must_be_a_share(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_reserve(SimulateOptions(headroom=text))
    assert caught.value.message == f"--headroom {text!r} is not a share of the GPU."


def test_without_a_gpu_the_recorded_device_counts(tmp_path: Path) -> None:
    verdict = simulate(store=training_store(tmp_path / "a").path)
    assert verdict.total_bytes == 1024 * MIB
    assert verdict.gpu_note == "Tiny GPU as recorded: 1073741824 bytes of total memory."
    store = training_store(tmp_path / "b", device={"total_bytes": None})
    with pytest.raises(UsageError) as caught:
        simulate(store=store.path)
    assert caught.value.message == "The recording does not say how large its cuda:0 is."


def test_settings_and_version_come_from_the_run_unless_told(tmp_path: Path) -> None:
    run = {"torch_version": "2.6.0+cu124", "alloc_conf": "expandable_segments:True"}
    store = training_store(tmp_path / "a", run=run)
    verdict = simulate(gpu=1, store=store.path)
    assert (verdict.torch_version, verdict.torch_version_assumed) == ("2.6.0+cu124", False)
    assert verdict.alloc_conf == "expandable_segments:True"
    assert verdict.notes == ("Allocator settings are those of the recording: expandable_segments:True",)
    told = simulate(gpu=1, store=store.path, options=SimulateOptions(alloc_conf="", torch_version="2.9"))
    assert (told.torch_version, told.alloc_conf, told.notes) == ("2.9", "", ())
    assumed = simulate(gpu=1, store=training_store(tmp_path / "b").path)
    assert (assumed.torch_version, assumed.torch_version_assumed) == ("2.14", True)


def test_notes_say_what_is_assumed(tmp_path: Path) -> None:
    events = [event("alloc", 0, MIB, device_type="cpu", device_index=-1), event("oom", None, MIB, device_type="cpu",
              device_index=-1)]  # fmt: skip
    device = {"device_type": "cpu", "device_index": -1, "complete_history": False}
    store = make_store(tmp_path, events, device=device)
    verdict = simulate(gpu=1, store=store.path, options=SimulateOptions(cpu_to_gpu=False))
    joined = " ".join(verdict.notes)
    assert "This is a CPU recording, replayed as if its requests were made on a GPU, without any adjustment" in joined
    assert "does not hold the device's first allocation" in joined
    assert "met 1 out-of-memory error;" in joined
    assert "names no steps" in joined


def test_a_tried_request_is_among_those_that_hold_the_peak(tmp_path: Path) -> None:
    events = [event("alloc", 0, 30 * MIB, category="parameter"), event("oom", None, 50 * MIB)]
    verdict = simulate(gpu=1, store=make_store(tmp_path, events).path)
    assert verdict.peak_allocated_bytes == 80 * MIB
    assert [(row.category, row.bytes) for row in verdict.at_peak] == [(None, 50 * MIB), ("parameter", 30 * MIB)]


def test_a_recording_that_starts_late_says_so(tmp_path: Path) -> None:
    verdict = simulate(gpu=1, store=make_store(tmp_path, [event("alloc", 0, MIB, step=7)]).path)
    assert verdict.notes == ("The first recorded step is step 7; what earlier steps took is not in the recording.",)


def test_no_requests_at_all_fit_with_a_note(tmp_path: Path) -> None:
    store = training_store(tmp_path)
    verdict = simulate(gpu=1, store=store.path, options=SimulateOptions(requests_sql="FROM requests WHERE false"))
    assert (verdict.fits, verdict.requests, verdict.peak_reserved_bytes, verdict.smallest_usable_bytes) == (
        True,
        0,
        0,
        0,
    )
    assert (verdict.at_peak, verdict.fragmentation, verdict.steady_peak_bytes) == ((), None, None)
    assert verdict.notes[-1] == "There are no requests at all, so nothing was replayed."


def test_a_cpu_recording_is_turned_into_the_requests_of_a_gpu(tmp_path: Path) -> None:
    where = {"device_type": "cpu", "device_index": -1, "thread_id": 1, "span_id": 0}
    shapes = "[[2, 3], [3, 4]]"
    span = {"span_id": 0, "kind": "operator", "name": "aten::mm", "ts_ns": 0, "dur_ns": 9, "op_id": 0, "thread_id": 1}
    events = [event("alloc", 0, MIB, **where)]
    device = {"device_type": "cpu", "device_index": -1, "total_bytes": None, "name": None}
    tables = {"spans": [span | {"input_shapes": shapes, "process_id": 1}]}
    store = make_store(tmp_path, events, device=device, tables=tables)
    verdict = simulate(gpu="t4", store=store.path)
    assert verdict.notes[0] == "This is a CPU recording, turned into the requests of a GPU by named rules."
    assert [(effect.rule, effect.bytes) for effect in verdict.rules] == [("cublas_workspace", 8519680)]
    assert verdict.peak_requested_bytes == MIB + 8519680
    assert simulate(gpu="t4", store=store.path, options=SimulateOptions(cpu_to_gpu=False)).rules == ()


def test_issues_of_the_run_are_in_the_answer(tmp_path: Path) -> None:
    issues = [{"code": "no_totals", "severity": "info", "count": 3, "detail": "x"}]
    verdict = simulate(gpu=1, store=training_store(tmp_path, tables={"issues": issues}).path)
    assert [(issue.code, issue.severity, issue.count, issue.detail) for issue in verdict.issues] == [
        ("no_totals", "info", 3, "x")
    ]


def test_the_replay_is_kept_and_joins_with_the_recording(tmp_path: Path) -> None:
    store = training_store(tmp_path)
    verdict = simulate(gpu="64MiB", store=store.path, options=SimulateOptions(non_torch=0))
    again = simulate(gpu="64MiB", store=store.path, options=SimulateOptions(non_torch=0))
    assert verdict.simulation_id == again.simulation_id
    connection = store.connect()
    rows = connection.sql(
        "SELECT seq, action, bytes, block_bytes, allocated_bytes, reserved_bytes FROM simulation_events ORDER BY ALL"
    ).fetchall()
    assert rows == [
        (0, "alloc", 30 * MIB, 30 * MIB, 30 * MIB, 30 * MIB),
        (0, "segment_alloc", 30 * MIB, None, 0, 30 * MIB),
        (1, "oom", 50 * MIB, None, 30 * MIB, 30 * MIB),
    ]
    assert connection.sql("SELECT simulation_id, fits, peak_reserved_bytes, num_ooms FROM simulations").fetchall() == [
        (verdict.simulation_id, False, 80 * MIB, 1)
    ]
    joined = connection.sql(
        "SELECT e.action, s.block_bytes - e.requested_bytes FROM events e JOIN simulation_events s USING (run_id, rank,"
        " seq) WHERE s.action = 'alloc'"
    ).fetchall()
    assert joined == [("alloc", 0)]
    blocks = connection.sql("SELECT segment_bytes, state, block_bytes, alloc_id FROM simulation_segments").fetchall()
    assert blocks == [(30 * MIB, "active_allocated", 30 * MIB, 0)]


def test_keep_false_writes_nothing(tmp_path: Path) -> None:
    store = training_store(tmp_path)
    simulate(gpu=1, store=store.path, options=SimulateOptions(keep=False))
    assert not (tmp_path / "simulations").exists()


def test_a_store_that_cannot_be_written_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, os.strerror(30))

    store = training_store(tmp_path)
    monkeypatch.setattr("os.replace", refuse)
    verdict = simulate(gpu=1, store=store.path)
    assert verdict.fits
    assert verdict.notes[-1].startswith("The replay was not kept: The store")


def test_several_ranks_the_largest_is_simulated_and_named(tmp_path: Path) -> None:
    store = make_store(tmp_path, [event("alloc", 0, MIB, step=0)], rank=0)
    import polars as pl

    with store.writer("two") as writer:
        for rank, size in ((0, 1), (1, 9)):
            base = {"run_id": "abc123"}
            for name in ("events", "devices", "runs"):
                frame = pl.read_parquet(tmp_path / name / f"run_id={base['run_id']}" / "rank=0" / "*.parquet")
                frame = frame.drop([column for column in ("run_id", "rank") if column in frame.columns])
                if name == "events":
                    frame = frame.with_columns(
                        (pl.col("requested_bytes") * size).alias("requested_bytes"),
                        (pl.col("allocated_bytes") * size).alias("allocated_bytes"),
                    )
                writer.write(name, rank, frame)
        writer.commit()
    verdict = simulate("two", gpu=1, store=store.path)
    assert (verdict.rank, verdict.peak_allocated_bytes) == (1, 9 * MIB)
    assert verdict.notes[0] == ("Simulated is rank 1 cuda:0, which has the largest peak; also recorded: rank 0 cuda:0.")
    assert simulate("two", gpu=1, store=store.path, options=SimulateOptions(rank=0)).peak_allocated_bytes == MIB


def test_the_smallest_device_lies_below_peak_reserved() -> None:
    """By hand: 30 MiB freed and cached, then 40 MiB: reserved is 70 MiB, but 40 MiB are enough after a retry."""
    requests = encode(table(("alloc", 0, 30 * MIB), ("free_requested", 0, None), ("alloc", 1, 40 * MIB)))
    setup = Setup("native", "", None)
    unlimited = try_on(requests, setup, UNLIMITED_BYTES)
    assert unlimited.stats.peak_reserved_bytes == 70 * MIB
    assert find_smallest_usable(requests, setup, unlimited, Reserve(0)) == 40 * MIB


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40 * MIB), st.integers(0, 6)), min_size=1, max_size=25),
    st.sampled_from(["", "expandable_segments:True", "max_split_size_mb:20"]),
)
def test_the_smallest_device_fits_and_two_mebibytes_less_does_not(sizes: list[tuple[int, int]], conf: str) -> None:
    rows: list[tuple[str, int, int | None]] = []
    for number, (size, age) in enumerate(sizes):
        rows.append(("alloc", number, size))
        if age and number >= age:
            rows.append(("free_requested", number - age, None))
    encoded, setup = encode(table(*rows)), Setup("native", conf, None)
    smallest = find_smallest_usable(encoded, setup, try_on(encoded, setup, UNLIMITED_BYTES), Reserve(0))
    assert smallest is not None
    assert smallest % (2 * MIB) == 0
    assert try_on(encoded, setup, smallest).fits
    assert smallest == 2 * MIB or not try_on(encoded, setup, smallest - 2 * MIB).fits
