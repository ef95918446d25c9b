"""The request stream: what the query makes of recordings, and how handed-in SQL is checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.simulate.stores import MIB, event, make_store
from xmem.errors import RefusedError, UnreadableError, UsageError
from xmem.simulate.requests import COLUMNS, check_requests, find_source, make_recorded_requests, read_requests
from xmem.store import Store


def recorded(store: Store, sql: str | None = None) -> list[dict[str, Any]]:
    connection = store.connect()
    source = find_source(connection, store.find_run())
    make_recorded_requests(connection, source)
    return read_requests(connection, sql, store).to_pylist()


def short(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(row["seq"], row["action"], row["alloc_id"], row["bytes"]) for row in rows]


def test_frees_that_complete_at_once_are_one_request(tmp_path: Path) -> None:
    events = [event("alloc", 0, 100), event("free_requested", 0, 100), event("free_completed", 0, 100)]
    assert short(recorded(make_store(tmp_path, events))) == [
        (0, "alloc", 0, 100),
        (1, "free_requested", 0, None),
    ]


def test_a_late_completion_is_held_by_the_unknown_stream(tmp_path: Path) -> None:
    events = [
        event("alloc", 0, 100),
        event("free_requested", 0, 100),
        event("alloc", 1, 200),
        event("free_completed", 0, 100),
    ]
    rows = recorded(make_store(tmp_path, events))
    assert short(rows) == [
        (0, "alloc", 0, 100),
        (1, "record_stream", 0, None),
        (1, "free_requested", 0, None),
        (2, "alloc", 1, 200),
        (3, "free_completed", 0, None),
    ]
    assert rows[1]["stream"] == -1


def test_a_free_that_is_still_pending_at_the_end_stays_pending(tmp_path: Path) -> None:
    events = [
        event("alloc", 0, 100), event("alloc", 1, 100),
        event("free_requested", 0, 100), event("free_completed", 0, 100),
        event("free_requested", 1, 100),
    ]  # fmt: skip
    assert short(recorded(make_store(tmp_path, events)))[-2:] == [
        (4, "record_stream", 1, None),
        (4, "free_requested", 1, None),
    ]


def test_one_kind_of_free_stands_for_both(tmp_path: Path) -> None:
    for number, action in enumerate(("free_requested", "free_completed")):
        store = make_store(tmp_path / str(number), [event("alloc", 0, 100), event(action, 0, 100)])
        assert short(recorded(store)) == [(0, "alloc", 0, 100), (1, "free_requested", 0, None)]


def test_bytes_are_the_block_where_only_that_is_known(tmp_path: Path) -> None:
    events = [event("alloc", 0, 100, block_bytes=512), event("oom", None, 9 * MIB)]
    assert short(recorded(make_store(tmp_path, events))) == [(0, "alloc", 0, 100), (1, "oom", None, 9 * MIB)]
    store = make_store(tmp_path / "cuda", [event("alloc", 0, 0, block_bytes=512) | {"requested_bytes": 0}])
    connection = store.connect()
    connection.execute("CREATE OR REPLACE VIEW events AS SELECT * REPLACE (NULL::BIGINT AS requested_bytes) FROM "
                       f"read_parquet('{tmp_path}/cuda/events/*/*/*.parquet', hive_partitioning=true)")  # fmt: skip
    make_recorded_requests(connection, find_source(connection, store.find_run()))
    assert short(read_requests(connection).to_pylist()) == [(0, "alloc", 0, 512)]


def segment_story(*tail: dict[str, Any]) -> list[dict[str, Any]]:
    """A whole segment is made and its block freed, then what comes."""
    begin = [event("segment_alloc", None, 20 * MIB), event("alloc", 0, 20 * MIB), event("free_requested", 0, 20 * MIB)]
    return [*begin, *tail]


def test_a_release_that_makes_room_for_nothing_is_empty_cache(tmp_path: Path) -> None:
    events = segment_story(event("segment_free", None, 20 * MIB), event("alloc", 1, 5))
    assert short(recorded(make_store(tmp_path, events)))[2:] == [
        (3, "empty_cache", None, None),
        (4, "alloc", 1, 5),
    ]


def test_a_release_at_the_end_is_empty_cache(tmp_path: Path) -> None:
    events = segment_story(event("segment_free", None, 20 * MIB))
    assert short(recorded(make_store(tmp_path, events)))[2:] == [(3, "empty_cache", None, None)]


def test_a_release_before_a_segment_that_had_no_room_is_a_retry(tmp_path: Path) -> None:
    events = segment_story(
        event("segment_free", None, 20 * MIB), event("segment_alloc", None, 30 * MIB), event("alloc", 1, 30 * MIB)
    )
    assert short(recorded(make_store(tmp_path, events)))[2:] == [(5, "alloc", 1, 30 * MIB)]


def test_a_release_before_an_out_of_memory_error_is_a_retry(tmp_path: Path) -> None:
    events = segment_story(event("segment_free", None, 20 * MIB), event("oom", None, 99 * MIB))
    assert short(recorded(make_store(tmp_path, events)))[2:] == [(4, "oom", None, 99 * MIB)]


def test_a_release_before_a_segment_that_had_room_is_empty_cache(tmp_path: Path) -> None:
    events = [
        event("segment_alloc", None, 90 * MIB), event("segment_free", None, 90 * MIB), event("alloc", 9, 1),
        *segment_story(event("segment_free", None, 20 * MIB), event("segment_alloc", None, 30 * MIB),
                       event("alloc", 1, 30 * MIB)),
    ]  # fmt: skip
    assert [row[:2] for row in short(recorded(make_store(tmp_path, events)))] == [
        (1, "empty_cache"), (2, "alloc"), (4, "alloc"), (5, "free_requested"), (6, "empty_cache"), (8, "alloc"),
    ]  # fmt: skip


def test_a_stack_decides_whether_a_release_is_empty_cache(tmp_path: Path) -> None:
    frames = [{"name": "empty_cache", "filename": "/x/torch/cuda/memory.py", "line": 1}]
    other = [{"name": "malloc", "filename": "a.cpp", "line": 1}]
    tail = (event("segment_alloc", None, 30 * MIB), event("alloc", 1, 30 * MIB))
    stacks = {"stacks": [{"stack_id": 0, "frames": frames}, {"stack_id": 1, "frames": other}]}
    for stack, expected in ((0, ["empty_cache", "alloc"]), (1, ["alloc"])):
        events = segment_story(event("segment_free", None, 20 * MIB, stack_id=stack), *tail)
        rows = recorded(make_store(tmp_path / str(stack), events, tables=stacks))
        assert [row["action"] for row in rows[2:]] == expected


def test_the_release_of_a_private_pool_drops_the_pool(tmp_path: Path) -> None:
    events = segment_story(event("segment_free", None, 20 * MIB, pool_id="1:0"))
    rows = recorded(make_store(tmp_path, events))
    assert [(row["action"], row["pool_id"]) for row in rows[2:]] == [("delete_graph", "1:0"), ("empty_cache", None)]


def test_op_is_the_outermost_operator_else_the_python_frame(tmp_path: Path) -> None:
    spans = [
        {"span_id": 0, "kind": "operator", "name": "aten::conv2d", "ts_ns": 0, "dur_ns": 9, "op_id": 0},
        {"span_id": 1, "kind": "operator", "name": "aten::empty", "ts_ns": 1, "dur_ns": 1, "op_id": 0},
        {"span_id": 2, "kind": "annotation", "name": "mine", "ts_ns": 1, "dur_ns": 1, "op_id": None},
    ]
    frames = [
        {"name": "malloc", "filename": "alloc.cpp", "line": 7},
        {"name": "linear", "filename": "/site/torch/nn/linear.py", "line": 3},
        {"name": "forward", "filename": "/home/me/net.py", "line": 12},
    ]
    events = [event("alloc", n, 1, span_id=n) for n in range(3)] + [
        event("alloc", 3, 1, stack_id=0),
        event("alloc", 4, 1),
    ]
    store = make_store(tmp_path, events, tables={"spans": spans, "stacks": [{"stack_id": 0, "frames": frames}]})
    assert [row["op"] for row in recorded(store)] == [
        "aten::conv2d", "aten::conv2d", "mine", "forward (net.py:12)", None,
    ]  # fmt: skip


def test_the_largest_accelerator_is_chosen_and_others_are_named(tmp_path: Path) -> None:
    events = [
        event("alloc", 0, 900, device_type="cpu", device_index=-1),
        event("alloc", 1, 10),
        event("alloc", 2, 500, device_index=1),
    ]
    store = make_store(tmp_path, events)
    connection = store.connect()
    run = store.find_run()
    source = find_source(connection, run)
    assert source.device == "cuda:1"
    assert source.chosen_from == ("rank 0 cuda:1", "rank 0 cuda:0", "rank 0 cpu")
    assert find_source(connection, run, device="cpu").device == "cpu"
    assert find_source(connection, run, device="cuda:0").complete_history
    with pytest.raises(UsageError) as caught:
        find_source(connection, run, rank=3, device="xpu:0")
    assert caught.value.message == "The run abc123 (tiny) has no memory requests on rank 3 'xpu:0'."
    assert caught.value.hint == "It has: rank 0 cuda:1, rank 0 cuda:0, rank 0 cpu."


def test_a_run_without_requests_is_unreadable(tmp_path: Path) -> None:
    store = make_store(tmp_path, [event("snapshot", None, 0)])
    with pytest.raises(UnreadableError) as caught:
        find_source(store.connect(), store.find_run())
    assert caught.value.message == "The run abc123 (tiny) holds no memory requests to replay."


def test_handed_in_sql_is_a_what_if(tmp_path: Path) -> None:
    events = [event("alloc", 0, 100, category="optimizer_state"), event("alloc", 1, 100, category="activation")]
    store = make_store(tmp_path, events)
    sql = "SELECT * REPLACE (bytes // 2 AS bytes) FROM requests WHERE category IS DISTINCT FROM 'optimizer_state'"
    assert short(recorded(store, sql)) == [(1, "alloc", 1, 50)]
    joined = "SELECT r.* FROM requests r JOIN events e ON e.seq = r.seq WHERE e.category = 'activation'"
    assert short(recorded(store, joined)) == [(1, "alloc", 1, 100)]


def test_handed_in_sql_is_put_in_order(tmp_path: Path) -> None:
    store = make_store(tmp_path, [event("alloc", 0, 1), event("free_requested", 0, 1), event("alloc", 1, 2)])
    assert [row[0] for row in short(recorded(store, "FROM requests ORDER BY seq DESC"))] == [0, 1, 2]


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("SELECT seq, action FROM requests", "The result of --requests lacks the column alloc_id, bytes."),
        ("SELECT * REPLACE (bytes / 2 AS bytes) FROM requests",
         "Column bytes of the result of --requests is double, not whole numbers."),
        ("SELECT * REPLACE (-bytes AS bytes) FROM requests",
         "Column bytes of the result of --requests holds null or less than 0 for an allocation."),
        ("SELECT * REPLACE (NULL AS bytes) FROM requests",
         "Column bytes of the result of --requests holds null or less than 0 for an allocation."),
        ("SELECT * REPLACE (NULL AS seq) FROM requests", "Column seq of the result of --requests holds null."),
        ("SELECT * REPLACE (NULL AS alloc_id) FROM requests",
         "Column alloc_id of the result of --requests holds null for an allocation or a free."),
        ("SELECT * REPLACE ('malloc' AS action) FROM requests",
         "'malloc' in the result of --requests is not an action."),
        ("FROM requests UNION ALL FROM requests", "The result of --requests allocates one alloc_id twice."),
    ],
)  # fmt: skip
def test_wrong_results_are_explained(tmp_path: Path, sql: str, message: str) -> None:
    store = make_store(tmp_path, [event("alloc", 0, 100)])
    with pytest.raises(UsageError) as caught:
        recorded(store, sql)
    assert caught.value.message == message


def test_handed_in_sql_stays_behind_the_fence(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", [event("alloc", 0, 100)])
    (tmp_path / "secret.txt").write_text("secret")
    with pytest.raises(RefusedError, match="Cannot access file"):
        recorded(store, f"SELECT * FROM read_text('{tmp_path}/secret.txt')")
    with pytest.raises(RefusedError, match="DELETE statement"):
        recorded(store, "DELETE FROM requests")


def test_a_number_too_wide_is_explained() -> None:
    rows = pa.table({"seq": [0], "action": ["alloc"], "alloc_id": [0], "bytes": pa.array([1 << 63], pa.uint64())})
    with pytest.raises(UsageError, match=r"^Column bytes of it does not fit: "):
        check_requests(rows, "it")


def test_absent_columns_become_null() -> None:
    rows = pa.table({"seq": [0], "action": ["alloc"], "alloc_id": [0], "bytes": [7]})
    assert check_requests(rows, "it").column_names == list(COLUMNS)
