"""Comparing runs: what came, what went, and the gate for CI."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from tests.query import tiny
from xmem.errors import UsageError
from xmem.query.diff import Change, DiffOptions, diff, diff_predicted, parse_limit
from xmem.render_diff import diff_json, diff_text
from xmem.store import Store

SMALLER = tiny.TRAINING.replace("2048", "1024").replace("temporary", "workspace")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    tables = {"spans": tiny.SPANS, "stacks": tiny.STACKS}
    tiny.write(tmp_path / "s", SMALLER, run_id="b", name="after", **tables)
    return tiny.write(tmp_path / "s", tiny.TRAINING, run_id="a", name="before", **tables)


def rows(changes: tuple[Change, ...]) -> list[tuple[str, int | None, int | None]]:
    return [(one.name, one.a_bytes, one.b_bytes) for one in changes]


def test_parts_add_up_to_the_peaks(store: Store) -> None:
    found = diff("before", "after", store=store.path)
    assert rows(found.peaks) == [
        ("peak allocated", 4608, 3584), ("peak active", 4608, 3584), ("peak reserved", 8192, 8192),
    ]  # fmt: skip
    assert rows(found.parts["category"]) == [
        ("activation", 2560, 1536), ("temporary", 1024, 0), ("workspace", 0, 1024), ("parameter", 1024, 1024),
    ]  # fmt: skip
    assert rows(found.parts["operator"]) == [
        ("aten::linear", 2560, 1536), ("(not recorded)", 1024, 1024), ("aten::mm", 1024, 1024),
    ]  # fmt: skip
    assert rows(found.parts["step"]) == [("step 0", 4608, 3584), ("step 1", 3328, 3328)]
    for key in ("category", "operator", "module", "stack"):
        assert sum(one.a_bytes or 0 for one in found.parts[key]) == 4608
        assert sum(one.b_bytes or 0 for one in found.parts[key]) == 3584


def test_rest_is_summed_up(store: Store) -> None:
    found = diff("before", "after", store=store.path, options=DiffOptions(by=("category",), top=1))
    assert rows(found.parts["category"]) == [("activation", 2560, 1536), ("(3 others)", 2048, 2048)]


def test_gate(store: Store) -> None:
    shrunk, grown = diff("before", "after", store=store.path), diff("after", "before", store=store.path)
    assert not shrunk.exceeds("0%")
    assert grown.exceeds("28%") and not grown.exceeds("29%")  # 1024 of 3584 is 28.57 %
    assert grown.exceeds("1023") and not grown.exceeds("1KiB")
    assert not diff("before", "before", store=store.path).exceeds("0%")


def test_prediction_is_compared_both_ways(store: Store) -> None:
    with pytest.raises(UsageError, match=r"There is no replay of 'before' \(cuda:0\) in the store.\nMake one: xmem"):
        diff_predicted("before", store=store.path)
    replay = {
        "simulation_id": "s1", "device_type": "cuda", "device_index": 0, "allocator": "native", "alloc_conf": "",
        "torch_version": "2.14", "gpu": "T4", "usable_bytes": 1 << 30, "fits": True, "peak_requested_bytes": 1,
        "peak_allocated_bytes": 4600, "peak_active_bytes": 4608, "peak_reserved_bytes": 8192, "num_alloc_retries": 0,
        "num_ooms": 0, "simulated_ns": 1,
    }  # fmt: skip
    store.write_table("simulations", "a", 0, "s1", pl.DataFrame([replay]))
    events = [
        {"simulation_id": "s1", "seq": seq, "action": "alloc", "allocated_bytes": size, "active_bytes": size,
         "reserved_bytes": 8192} for seq, size in ((5, 4600), (8, 4000), (15, 3400))
    ]  # fmt: skip
    store.write_table("simulation_events", "a", 0, "s1", pl.DataFrame(events))
    found = diff_predicted("before", store=store.path)
    assert found.b == "replay s1: native on T4"
    assert rows(found.peaks)[0] == ("peak allocated", 4608, 4600)
    assert rows(found.parts["step"]) == [("step 0", 4608, 4600), ("step 1", 3328, 3400)]
    assert found.exceeds("0.1%") and not found.exceeds("0.2%")


def test_wrong_use_is_said(store: Store) -> None:
    with pytest.raises(UsageError) as caught:
        diff("before", "after", store=store.path, options=DiffOptions(by=("colour",)))
    assert str(caught.value) == (
        "Memory cannot be compared by 'colour'.\nKnown: category, module, operator, stack, step"
    )
    for text in ("-1%", "x%", "nan%", "inf%"):
        with pytest.raises(UsageError) as caught:
            parse_limit(text)
        assert str(caught.value) == (
            f"limit {text!r} is not a percentage.\nWrite it like 2% or 0.5%, or in bytes like 100MiB."
        )


def test_text_and_json(store: Store) -> None:
    found = diff("before", "after", store=store.path, options=DiffOptions(by=("category",)))
    text = diff_text(found)
    assert text.startswith("A  before (a), rank 0, cuda:0\nB  after (b), rank 0, cuda:0\n\n")
    assert "peak allocated  4.50 KiB  3.50 KiB  -1.00 KiB  -22.2%" in text
    assert "temporary                 1.00 KiB   0 bytes  -1.00 KiB    gone" in text
    assert "workspace                  0 bytes  1.00 KiB  +1.00 KiB     new" in text
    parts = diff_json(found)["parts"]
    assert parts["category"][1] == {  # type: ignore[index]
        "name": "temporary", "a_bytes": 1024, "b_bytes": 0, "change_bytes": -1024, "change": -1.0,
    }  # fmt: skip
