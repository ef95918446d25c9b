"""The event log in both forms: rows, defaults, names that become spans, and what is tolerated."""

from __future__ import annotations

import io
import json
from typing import Any

import polars as pl
import pytest

from xmem.errors import RefusedError, UnreadableError
from xmem.ingest import event_log
from xmem.ingest.adapter import Notes
from xmem.ingest.event_log_columns import FIRST_MADE_SPAN, column_types
from xmem.schema import tables as schema_tables

HEADER = {"xmem": 1}


def lines(*records: object) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def read(data: bytes, name: str = "x.xmem.jsonl") -> tuple[dict[str, list[dict[str, Any]]], Notes]:
    notes = Notes(filename=name)
    rows: dict[str, list[dict[str, Any]]] = {}
    for batch in event_log.read(io.BytesIO(data), notes):
        rows.setdefault(batch.table, []).extend(batch.columns.to_dicts())
    return rows, notes


def issues(notes: Notes) -> dict[str, tuple[int, int | None, str]]:
    return {code: (issue.count, issue.first_at, issue.detail) for code, issue in notes.issues.items()}


def alloc(address: int, size: int = 512, **more: Any) -> dict[str, Any]:
    return {"action": "alloc", "address": address, "requested_bytes": size} | more


def test_events_with_defaults() -> None:
    rows, notes = read(
        lines(HEADER, alloc(8, ts_ns=5), {"action": "free_requested", "address": 8, "ts_ns": 7, "thread_id": 3})
    )
    common = {"device_type": "cuda", "device_index": 0, "block_bytes": None, "address": 8}
    assert rows["events"] == [
        common | {"ts_ns": 5, "action": "alloc", "requested_bytes": 512, "thread_id": None},
        common | {"ts_ns": 7, "action": "free_requested", "requested_bytes": None, "thread_id": 3},
    ]
    assert issues(notes) == {}
    assert notes.facts == {
        "ordered": True,
        "pairing": "address",
        "time_base": "relative",
        "source_entries": 2,
        "ring_buffer": False,
        "truncated": False,
    }


def test_run_fields() -> None:
    header = HEADER | {
        "torch_version": "2.9.1",
        "rank": 3,
        "time_base": "unix",
        "alloc_conf": "",
        "allocator_settings": {"a": [1, True]},
        "ring_buffer": True,
        "device_type": "cpu",
        "nonsense": 1,
    }
    rows, notes = read(lines(header, alloc(8, ts_ns=1)))
    assert (rows["events"][0]["device_type"], rows["events"][0]["device_index"]) == ("cpu", -1)
    assert notes.rank == 3
    assert notes.facts["torch_version"] == "2.9.1"
    assert notes.facts["alloc_conf"] == ""
    assert notes.facts["allocator_settings"] == '{"a": [1, true]}'
    assert notes.facts["time_base"] == "unix"
    assert notes.facts["ring_buffer"] is True
    assert issues(notes) == {"unknown_field": (1, 1, "run field nonsense")}


def test_what_the_log_knows_passes_through() -> None:
    known = {"alloc_id": 7, "span_id": 4, "step": 2, "phase": "forward", "category": "activation", "inferred": False}
    rows, notes = read(lines(HEADER, alloc(8, ts_ns=1, **known)))
    assert {key: rows["events"][0][key] for key in known} == known
    assert notes.facts["pairing"] == "given"


def test_other_tables_are_rows_of_theirs() -> None:
    frames = [{"name": "f", "filename": "a.py", "line": 3}]
    rows, notes = read(
        lines(
            HEADER,
            {"table": "devices", "name": "A100", "total_bytes": 42},
            {
                "table": "spans",
                "span_id": 7,
                "parent_id": 3,
                "kind": "operator",
                "name": "aten::mm",
                "ts_ns": 9,
                "dur_ns": 4,
            },
            {"table": "spans", "name": "bare", "ts_ns": 9},
            {"table": "stacks", "stack_id": 0, "frames": frames},
            {"table": "segments", "segment_id": 0, "address": 64, "total_bytes": 128},
            {"table": "blocks", "segment_id": 0, "address": 64, "block_bytes": 128},
            {"table": "spans", "ts_ns": 9},
            {"table": "nonsense"},
            {"table": ["x"]},
        )
    )
    assert rows["devices"] == [{"device_type": "cuda", "device_index": 0, "name": "A100", "total_bytes": 42}]
    assert [(span["kind"], span["name"], span["dur_ns"]) for span in rows["spans"]] == [
        ("operator", "aten::mm", 4),
        ("other", "bare", 0),
    ]
    assert rows["spans"][0]["parent_id"] == 3
    assert rows["stacks"] == [{"stack_id": 0, "frames": frames}]
    assert rows["segments"][0] == {
        "segment_id": 0,
        "device_type": "cuda",
        "device_index": 0,
        "address": 64,
        "total_bytes": 128,
        "allocated_bytes": 0,
        "active_bytes": 0,
    }
    assert rows["blocks"] == [{"segment_id": 0, "address": 64, "block_bytes": 128, "state": "active_allocated"}]
    assert issues(notes) == {
        "bad_record": (2, 9, "there is no table 'nonsense'"),
        "missing_field": (1, 3, "spans needs name, ts_ns"),
    }


def test_names_become_spans() -> None:
    rows, _ = read(
        lines(
            HEADER,
            alloc(1, ts_ns=10, thread_id=1, op="aten::mm", module="net.0"),
            alloc(2, ts_ns=11, thread_id=2, op="aten::add"),
            alloc(3, ts_ns=12, thread_id=1, op="aten::mm", module="net.0"),
            alloc(4, ts_ns=13, thread_id=1, op="aten::relu", module="net.0"),
            alloc(5, ts_ns=14, thread_id=1, module="net.1"),
            alloc(6, ts_ns=15, thread_id=1),
            alloc(7, ts_ns=16, thread_id=1, op="aten::mm", span_id=5),
        )
    )
    spans = [(s["kind"], s["name"], s["ts_ns"], s["dur_ns"], s["thread_id"]) for s in rows["spans"]]
    assert spans == [
        ("module", "net.0", 10, 3, 1),
        ("module", "net.1", 14, 0, 1),
        ("operator", "aten::mm", 10, 2, 1),
        ("operator", "aten::relu", 13, 0, 1),
        ("operator", "aten::mm", 16, 0, 1),
        ("operator", "aten::add", 11, 0, 2),
    ]
    first = FIRST_MADE_SPAN
    assert [span["span_id"] for span in rows["spans"]] == list(range(first, first + 6))
    assert [span["parent_id"] for span in rows["spans"]] == [None, None, first, first, None, None]
    assert [event["span_id"] for event in rows["events"]] == [
        first + 2,
        first + 5,
        first + 2,
        first + 3,
        first + 1,
        None,
        5,
    ]
    assert [event["address"] for event in rows["events"]] == [1, 2, 3, 4, 5, 6, 7]
    assert "op" not in rows["events"][0]


def test_times_stand_in() -> None:
    rows, notes = read(lines(HEADER, alloc(1), alloc(2)))
    assert [event["ts_ns"] for event in rows["events"]] == [0, 1]
    assert notes.facts["time_base"] == "index"
    assert issues(notes) == {"no_times": (1, None, "events carry no ts_ns")}
    rows, _ = read(lines(HEADER, alloc(1), alloc(2, ts_ns=9), alloc(3)))
    assert [event["ts_ns"] for event in rows["events"]] == [0, 9, 9]


def test_bad_lines_cost_themselves_only() -> None:
    data = lines(HEADER, alloc(1, ts_ns=1))
    data += b"not json\n[1]\n\n" + b'{"action": "alloc", "address": 2, "requested_bytes": 5, "op": "a\xffb\x01"}\n'
    data += b'{"action": "alloc", "address": ' + b"[" * 5000 + b"]" * 5000 + b"}\n"
    data += lines(
        alloc(3, "6", ts_ns=2.0, weird=1),  # type: ignore[arg-type]
        alloc((1 << 64) + 4, ts_ns=3),
        {"action": "alloc", "ts_ns": 3},
        alloc(5, -1, ts_ns=3),
        {"address": 6, "ts_ns": 3},
        {"action": "zap", "ts_ns": 3},
        alloc(7, ts_ns=3, inferred="yes", device_index=1 << 40, phase=5),
    )
    rows, notes = read(data)
    assert [(e["action"], e["address"], e["requested_bytes"]) for e in rows["events"]] == [
        ("alloc", 1, 512),
        ("alloc", 2, 5),
        ("alloc", 3, 6),
        ("alloc", 4, 512),
        ("zap", None, None),
        ("alloc", 7, 512),
    ]
    assert rows["events"][-1]["phase"] == "5"
    found = issues(notes)
    assert found.pop("bad_record")[:2] == (3, 3)
    assert found.pop("repaired_string")[:2] == (1, 6)
    assert found == {
        "odd_number": (2, 8, "ts_ns: 2.0"),
        "wide_integer": (1, 9, "address has 65 bits"),
        "unknown_field": (1, 8, "events.weird"),
        "missing_field": (3, 12, "an event has no action"),
        "unknown_action": (1, 13, "zap"),
        "odd_value": (2, 14, "device_index is of type int"),
    }


def test_a_log_cut_at_any_byte_keeps_every_whole_line() -> None:
    data = lines(HEADER, *(alloc(number, ts_ns=number, op=f"aten::op{number}") for number in range(4)))
    for cut in range(len(data)):
        whole = data[:cut].count(b"\n")
        if cut and data[cut : cut + 1] == b"\n":
            whole += 1  # all of the line but its end
        if whole == 0:
            with pytest.raises(UnreadableError, match="is no event log"):
                read(data[:cut])
            continue
        rows, notes = read(data[:cut])
        assert [event["address"] for event in rows.get("events", [])] == list(range(whole - 1))
        assert notes.facts["truncated"] is (not data[:cut].endswith((b"\n", b"}")))


def test_what_is_no_log_is_explained() -> None:
    for data in (b"", b"nonsense\n", b"[1]\n", b'{"a": 1}\n', b'{"xmem": "1"}\n', b"[" * 100_000):
        with pytest.raises(UnreadableError) as caught:
            read(data)
        assert caught.value.message == (
            "'x.xmem.jsonl' is no event log: its first line must be an object like {\"xmem\": 1}."
        )
        assert caught.value.hint == "The format is described in docs/event-log.md."


def test_a_newer_version_is_refused() -> None:
    with pytest.raises(UnreadableError) as caught:
        read(lines({"xmem": 2}))
    assert caught.value.message == "'x.xmem.jsonl' is written in version 2 of the event log; this xmem reads version 1."
    assert caught.value.hint == "Install a newer xmem."


def test_an_endless_line_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "_LINE_MOST", 2 << 20)
    with pytest.raises(UnreadableError) as caught:
        read(lines(HEADER) + b"x" * (4 << 20))
    assert caught.value.message == "'x.xmem.jsonl' cannot be read: one of its lines is longer than 2 MiB."


def parquet(frame: pl.DataFrame, header: object = HEADER) -> bytes:
    made = io.BytesIO()
    frame.write_parquet(made, metadata={"xmem": json.dumps(header)})
    return made.getvalue()


def test_parquet_gives_the_same_rows() -> None:
    records = [alloc(1, ts_ns=10, op="aten::mm", module="net.0"), alloc(2, ts_ns=11, op="aten::mm", module="net.0")]
    data = parquet(pl.DataFrame(records).with_columns(weird=1), HEADER | {"torch_version": "2.9.1"})
    assert event_log.sniff(data, "noname")
    rows, notes = read(data)
    expected, _ = read(lines(HEADER, *records))
    assert rows == expected
    assert notes.facts["torch_version"] == "2.9.1"
    assert issues(notes) == {"unknown_field": (1, None, "events.weird")}


def test_parquet_of_others_and_damaged_parquet() -> None:
    made = io.BytesIO()
    pl.DataFrame({"a": [1]}).write_parquet(made)
    with pytest.raises(UnreadableError, match="is no event log"):
        read(made.getvalue())
    data = parquet(pl.DataFrame([alloc(1)]))
    for cut in (4, 50, len(data) - 1):
        with pytest.raises(UnreadableError, match="it is a damaged Parquet file"):
            read(data[:cut])


def test_parquet_that_claims_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = parquet(pl.select(action=pl.repeat("alloc", 5_000_000)))
    with pytest.raises(RefusedError) as caught:
        read(data)
    assert caught.value.message == (
        f"'x.xmem.jsonl' was refused: its {len(data):,} bytes claim to hold 5,000,000 events."
    )


@pytest.mark.parametrize(
    ("head", "name", "ours"),
    [
        (b'{"xmem": 1}\n', "a", True),
        (b'\xef\xbb\xbf{"torch_version": "2.9", "xmem":1}\n{', "a", True),
        (b'{"a": 1}\n{"xmem": 1}\n', "a", False),
        (b'{"traceEvents": []}', "a.json", False),
        (b"PAR1", "a", True),
        (b"damaged", "a.xmem.jsonl", True),
    ],
)
def test_sniff(head: bytes, name: str, ours: bool) -> None:
    assert event_log.sniff(head, name) is ours


def test_a_log_may_fill_every_column_but_those_that_reading_works_out() -> None:
    columns = set(schema_tables()["events"].column_names)
    levels = {"allocated_bytes", "active_bytes", "reserved_bytes", "end_seq"}
    assert columns - set(column_types("events")) == {"run_id", "rank", "seq"} | levels
    assert set(column_types("events")) - columns == {"op", "module", "process_id"}
