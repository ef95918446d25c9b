"""Sweeps and recommendations: order, what is tried, parallel as serial, and honesty."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from tests.paths import SHARED_DATA, needs_shared
from tests.simulate.stores import MIB, event, make_store
from tests.simulate.test_replay import table
from xmem.errors import UsageError
from xmem.simulate import SimulateOptions, recommend, sweep
from xmem.simulate.gpu_table import Target
from xmem.simulate.judge import Case
from xmem.simulate.options import Reserve
from xmem.simulate.recommend import choose
from xmem.simulate.replay import encode
from xmem.simulate.sweep import SETTINGS, SweepRow, sweep_settings
from xmem.simulate.trial import Setup
from xmem.store import Store

#: `xmem.simulate.sweep` is the function; this is the module of that name.
_MODULE = import_module("xmem.simulate.sweep")


def stranded_store(folder: Path) -> Store:
    """The reported case of 530 MiB temporaries that 270 MiB weights split, at a tenth of the size."""
    events = []
    for number in range(4):
        events.append(event("alloc", 2 * number, 53 * MIB))
        events.append(event("free_requested", 2 * number, 53 * MIB))
        events.append(event("alloc", 2 * number + 1, 27 * MIB))
    return make_store(folder, events)


def case_on(total: int, setup: Setup | None = None) -> Case:
    target = Target("test", total, "")
    return Case(None, "case", 0, "cuda:0", target, Reserve(0), setup or Setup("native", "", None))


def test_a_sweep_is_best_first_and_knows_the_current_setting(tmp_path: Path) -> None:
    rows = sweep(gpu="1GiB", store=stranded_store(tmp_path).path)
    assert rows[0].alloc_conf in ("expandable_segments:True", "max_split_size_mb:20")
    assert [row.peak_reserved_bytes for row in rows] == sorted(row.peak_reserved_bytes for row in rows)
    current = [row for row in rows if row.is_current]
    assert len(current) == 1
    assert (current[0].alloc_conf, current[0].fits) == ("", True)
    assert current[0].peak_reserved_bytes > rows[0].peak_reserved_bytes
    for row in rows:
        assert row.unused_bytes == row.peak_reserved_bytes - row.peak_active_bytes


def test_what_fits_comes_before_what_does_not(tmp_path: Path) -> None:
    """Peak live is 134 MiB; the default strands remainders, so that a device between the two tells settings apart."""
    store = stranded_store(tmp_path)
    rows = sweep(gpu="162MiB", store=store.path, options=SimulateOptions(non_torch=0))
    assert rows[0].fits
    assert [row.fits for row in rows] == sorted((row.fits for row in rows), reverse=True)


def test_settings_may_be_named(tmp_path: Path) -> None:
    store = stranded_store(tmp_path)
    rows = sweep(gpu=1, store=store.path, settings=["max_split_size_mb:64", "max_split_size_mb:64"])
    assert sorted(row.alloc_conf for row in rows) == ["", "max_split_size_mb:64"]
    with pytest.raises(UsageError, match="max_spit_size_mb"):
        sweep(gpu=1, store=store.path, settings=["max_spit_size_mb:64"])


def test_settings_that_a_version_does_not_know_are_left_out() -> None:
    encoded = encode(table(("alloc", 0, 1)))
    old = [row.alloc_conf for row in sweep_settings(encoded, case_on(1 << 30, Setup("native", "", "2.6")))]
    assert "large_segment_size_mb:40" not in old
    assert "expandable_segments:True" in old
    new = [row.alloc_conf for row in sweep_settings(encoded, case_on(1 << 30))]
    assert set(SETTINGS) < set(new)


def test_an_allocator_without_these_settings_has_one_row() -> None:
    rows = sweep_settings(encode(table(("alloc", 0, 1))), case_on(1 << 30, Setup("ideal", "", None)))
    assert [(row.allocator, row.is_current) for row in rows] == [("ideal", True)]


def test_processes_give_what_one_process_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [("alloc", n, (n % 7 + 1) * 3 * MIB) for n in range(40)]
    encoded = encode(table(*rows, *[("free_requested", n, None) for n in range(0, 40, 3)]))
    serial = sweep_settings(encoded, case_on(400 * MIB))
    monkeypatch.setattr(_MODULE, "WORTH_PROCESSES", 0)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert sweep_settings(encoded, case_on(400 * MIB)) == serial


def test_without_processes_a_sweep_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no processes here")

    monkeypatch.setattr(_MODULE, "WORTH_PROCESSES", 0)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr(_MODULE, "ProcessPoolExecutor", refuse)
    assert sweep_settings(encode(table(("alloc", 0, 1))), case_on(1 << 30))[0].fits


def test_a_recommendation_can_be_pasted(tmp_path: Path) -> None:
    advice = recommend(gpu="1GiB", store=stranded_store(tmp_path).path)
    assert advice.line == f"export PYTORCH_ALLOC_CONF={advice.best.alloc_conf}"
    assert advice.saves_bytes == advice.current.peak_reserved_bytes - advice.best.peak_reserved_bytes > 0
    assert advice.sentence.startswith("Peak reserved ")
    old = recommend(gpu="1GiB", store=tmp_path, options=SimulateOptions(torch_version="2.6"))
    assert old.line == f"export PYTORCH_CUDA_ALLOC_CONF={old.best.alloc_conf}"


@needs_shared
def test_an_operation_file_can_be_swept() -> None:
    """The reported case: 2,120 MiB by default, 1,610 MiB and 1,340 MiB with the settings that help."""
    file = SHARED_DATA / "bug_inputs" / "60-stranded-remainders.json"
    reserved = {row.alloc_conf: row.peak_reserved_bytes for row in sweep(ops=file)}
    assert reserved[""] == 2120 * MIB
    assert reserved["max_split_size_mb:20"] == 1610 * MIB
    assert reserved["expandable_segments:True"] == 1340 * MIB
    assert recommend(ops=file).line == "export PYTORCH_ALLOC_CONF=expandable_segments:True"


def test_where_nothing_helps_it_says_so(tmp_path: Path) -> None:
    store = make_store(tmp_path, [event("alloc", 0, 40 * MIB)])
    advice = recommend(gpu="1GiB", store=store.path)
    assert (advice.line, advice.alloc_conf, advice.saves_bytes) == (None, None, 0)
    assert advice.sentence.startswith("No setting helps: the run fits as it is")
    small = recommend(gpu="20MiB", store=store.path, options=SimulateOptions(non_torch=0))
    assert small.line is None
    assert (
        small.sentence
        == "No setting helps: none makes the run fit; the default needs least, 40.00 MiB without a limit."
    )


def row(conf: str, fits: bool, reserved: int, retries: int = 0, current: bool = False) -> SweepRow:
    return SweepRow("native", conf, fits, reserved, 50, reserved - 50, retries, int(not fits), 9, current)


def test_a_setting_that_rescues_is_taken_even_if_it_reserves_more() -> None:
    advice = choose((row("a:1", True, 110), row("", False, 100, current=True)), None)
    assert advice.line == "export PYTORCH_ALLOC_CONF=a:1"
    assert advice.sentence == (
        "With this setting the run fits, without it it does not: peak reserved 110 bytes instead of 100 bytes"
        " (10 bytes more)."
    )


def test_less_than_one_per_cent_is_not_worth_a_setting() -> None:
    assert choose((row("a:1", True, 9950), row("", True, 10000, current=True)), None).line is None
    assert choose((row("a:1", True, 9900), row("", True, 10000, current=True)), None).line is not None


def test_fewer_retries_are_worth_a_setting() -> None:
    advice = choose((row("a:1", True, 100), row("", True, 100, retries=7, current=True)), None)
    assert advice.sentence == ("Peak reserved 100 bytes instead of 100 bytes (0 bytes less), 0 retries instead of 7.")


def test_dropping_the_recorded_setting_can_be_the_advice() -> None:
    advice = choose((row("", True, 100), row("a:1", True, 200, current=True)), "2.6")
    assert advice.line == "unset PYTORCH_CUDA_ALLOC_CONF"
