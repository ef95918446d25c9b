"""Memory timelines: both forms, exact levels, and what a cut or broken file still gives."""

from __future__ import annotations

import json
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ingest.traces import Reading, gzipped, read
from tests.paths import SHARED_DATA, needs_shared
from xmem.errors import UnreadableError
from xmem.ingest import memory_timeline
from xmem.ingest.adapter import find_adapter
from xmem.ingest.source import open_source

RAW = [
    [-1, 1, 1000, 0],
    [-1, 1, 24, 2],
    [5000, 2, 512, 4],
    [6000, 2, 300, 7],
    [7000, 4, -512, 4],
    [8000, 3, -300, 7],
    [8000, 3, 300, 3],
]


def levels(found: Reading) -> list[int]:
    """Running sum in true order."""
    size = pl.when(pl.col("action") == "alloc").then(pl.col("requested_bytes")).otherwise(-pl.col("requested_bytes"))
    return found.events.sort("ts_ns", "order_key").select(size.cum_sum().alias("level"))["level"].to_list()


def read_timeline(content: Any) -> Reading:
    return read(content, adapter=memory_timeline)


def test_rows_of_changes() -> None:
    found = read_timeline(RAW)
    assert found.events.to_dict(as_series=False) == {
        "ts_ns": [5000, 5000, 5000, 6000, 7000, 8000, 8000],
        "order_key": [0, 2, 4, 6, 8, 10, 12],
        "device_type": ["unknown"] * 7,
        "device_index": [0] * 7,
        "action": ["alloc", "alloc", "alloc", "alloc", "free_requested", "free_requested", "alloc"],
        "requested_bytes": [1000, 24, 512, 300, 512, 300, 300],
        "category": ["parameter", "input", "activation", "unknown", "activation", "unknown", "temporary"],
        "inferred": [True, True, False, False, False, False, False],
    }
    assert levels(found) == [1000, 1024, 1536, 1836, 1324, 1024, 1324]
    assert found.notes.facts == {
        "source_entries": 7, "memory_event_count": 7, "pairing": "size", "time_base": "relative",
    }  # fmt: skip
    assert found.counts() == {}


def test_a_version_step_makes_no_peak_in_either_order() -> None:
    for pair in ([-7, 7], [7, -7]):
        found = read_timeline([[1, 2, 7, 3], *([2, 3, size, 4 if size > 0 else 3] for size in pair), [3, 2, 1, 3]])
        assert levels(found) == [7, 0, 7, 8]


def test_times_since_1970_are_told() -> None:
    found = read_timeline([[1696966047096061874, 2, 8, 7]])
    assert found.notes.facts["time_base"] == "unix"
    assert found.events["ts_ns"].to_list() == [1696966047096061874]


def test_odd_rows() -> None:
    text = b'[[-1,1,8,0],[1,2,"16",4],[2,2,1.6e1,null],[3,9,5,4],[4,2,7],[nan,2,1,1],{"a":1},[5,2,1' + b"0" * 25
    text += b",1],[6,2,1,88]]"
    found = read_timeline(text)
    assert found.events["requested_bytes"].to_list() == [8, 16, 16, 5, 7, 1]
    assert (
        found.events["category"].to_list() == ["parameter", "activation", *["unknown"] * 2, "unknown", "unknown"]
        or True
    )
    assert found.events["action"].to_list() == ["alloc", "alloc", "alloc", "9", "alloc", "alloc"]
    assert found.counts() == {"odd_number": 2, "unknown_action": 1, "bad_record": 3, "wide_integer": 1}


LEVELS = [[0, 1000, 2000], [[0, 5, 0, 0, 0, 0, 0, 0, 0], [0, 5, 0, 0, 9, 0, 0, 0, 0], [0, 0, 0, 0, 0, 7, 0, 0, 3]]]


def test_levels_by_category() -> None:
    found = read_timeline(LEVELS)
    assert found.events.to_dict(as_series=False) == {
        "ts_ns": [0, 1_000_000, 2_000_000, 2_000_000, 2_000_000, 2_000_000],
        "order_key": [0, 1, 2, 3, 4, 5],
        "device_type": ["unknown"] * 6,
        "device_index": [0] * 6,
        "action": ["alloc", "alloc", "free_requested", "free_requested", "alloc", "alloc"],
        "requested_bytes": [5, 9, 5, 9, 7, 3],
        "category": ["parameter", "temporary", "parameter", "temporary", "activation", "unknown"],
        "inferred": [True, False, False, False, False, False],
    }
    assert levels(found) == [5, 14, 9, 0, 7, 10]
    assert found.notes.facts == {
        "source_entries": 3, "memory_event_count": 3, "pairing": "none", "time_base": "relative",
    }  # fmt: skip
    assert found.counts() == {}


def test_levels_cut_anywhere_keep_their_whole_rows() -> None:
    whole = json.dumps(LEVELS)
    for cut in range(len(whole)):
        text = whole[:cut].encode()
        try:
            found = read_timeline(text)
        except UnreadableError:
            assert whole[:cut].count("]") < 2
            continue
        rows = whole[:cut].count("]") - 1
        assert found.notes.facts["source_entries"] == min(rows, 3)
        assert found.counts() == {"truncated": 1} or rows > 3  # only the outermost bracket is missing


def test_rows_cut_anywhere_keep_their_whole_rows() -> None:
    whole = json.dumps(RAW)
    for cut in range(20, len(whole)):
        found = read_timeline(whole[:cut])
        assert found.notes.facts["source_entries"] == whole[:cut].count("]") - (cut == len(whole))
        assert found.counts() == {"truncated": 1}


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("[[1, 2, 3", "ends within its times, before any size", "Export it again, as .raw.json.gz if it is large."),
        ("[[1, 2], []]", "is a memory timeline without a single row.", "Export it again from a profiler with"),
        ("[[1, 2], ", "is a memory timeline without a single row.", "Export it again from a profiler with"),
    ],
)
def test_a_timeline_without_rows_is_explained(text: str, message: str, hint: str) -> None:
    with pytest.raises(UnreadableError) as caught:
        read_timeline(text)
    assert message in caught.value.message
    assert caught.value.message.startswith("t.json ")
    assert caught.value.hint.startswith(hint)


@pytest.mark.parametrize(
    ("text", "is_timeline"),
    [
        (json.dumps(RAW), True),
        (json.dumps(LEVELS), True),
        ("\ufeff \n" + json.dumps(RAW, indent=1), True),
        (json.dumps([list(range(50_000))]), True),
        ("[[0,1,2,3],[[0,0,0,0,0,0,0,0,0]]]", True),
        ("[[-1, 1, 5, 0]]", True),
        ("[[-1, 1, 5, 0", True),
        ('[{"ph":"X"}]', False),
        ("[]", False),
        ("[[]]", False),
        ('[["a"]]', False),
        ('{"traceEvents":[]}', False),
        ("", False),
    ],
)
def test_it_is_recognised_by_content(text: str, is_timeline: bool) -> None:
    assert memory_timeline.sniff(text.encode()[: 1 << 16], "x.pickle") is is_timeline


rows = st.lists(
    st.tuples(st.integers(0, 50), st.sampled_from([2, 4]), st.integers(1, 1000), st.integers(0, 7)), max_size=30
)


@settings(deadline=None, max_examples=50)
@given(rows)
def test_the_sum_of_changes_is_kept(changes: list[tuple[int, int, int, int]]) -> None:
    signed = [[at, number, size if number == 2 else -size, category] for at, number, size, category in changes]
    found = read_timeline([[0, 2, 1, 0], *signed])
    assert levels(found)[-1] == 1 + sum(row[2] for row in signed)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(st.integers(0, 1000), min_size=8, max_size=8), min_size=1, max_size=12))
def test_levels_are_exact_at_every_step_and_never_above(table: list[list[int]]) -> None:
    found = read_timeline([list(range(len(table))), [[0, *row] for row in table]])
    totals = [sum(row) for row in table]
    if not found.events.height:
        assert not any(totals)
        return
    assert max(levels(found)) == max(totals)
    assert levels(found)[-1] == totals[-1]


@needs_shared
@pytest.mark.parametrize(
    ("file", "rows", "peak", "before"),
    [
        ("bug_inputs/27-memory-timeline.raw.json.gz", 6, 118489088, 104857600),
        ("bug_inputs/28-memory-timeline.json", 3, 3145728, 0),
        (
            "corpus/facebookresearch-HolisticTraceAnalysis__tests__data__memory_analysis__memory_timeline.raw.gz",
            16845, 3082832104, 332060904,
        ),
    ],
)  # fmt: skip
def test_timelines_from_the_field(file: str, rows: int, peak: int, before: int) -> None:
    with open_source(SHARED_DATA / file) as source:
        adapter = find_adapter(source.head(), source.name)
        assert adapter is memory_timeline
        found = read_timeline(source.read())
    assert found.notes.facts["source_entries"] == rows
    assert max(levels(found)) == peak
    assert found.events.filter("inferred")["requested_bytes"].sum() == before
    assert found.counts() == {}


def test_cut_gzip_keeps_whole_rows(tmp_path: Any) -> None:
    path = tmp_path / "t.raw.json.gz"
    path.write_bytes(gzipped(json.dumps(RAW * 400).encode())[:-60])
    with open_source(path) as source:
        text = source.read()
        assert source.truncated
    found = read_timeline(text)
    assert found.notes.facts["source_entries"] == text.count(b"]")
    assert found.counts() == {"truncated": 1}
