"""Kinds of odd inputs, made in the test: what is read, what is said, and what is refused."""

from __future__ import annotations

import copy
import gzip
import io
import json
import os
import pickle
import tarfile
import threading

import polars as pl
import pytest

from tests.ingest.snapshots import BASE, basic, entry
from tests.ingest.traces import MIB, memory, span, trace
from xmem.errors import UnreadableError
from xmem.ingest import IngestOptions, ingest
from xmem.store import Store

LOOP = [
    memory(10, 1 * MIB, 1 * MIB, **{"Total Allocated": 1 * MIB, "Ev Idx": 1}),
    memory(20, 2 * MIB, 8 * MIB, **{"Total Allocated": 3 * MIB, "Ev Idx": 2}),
    memory(30, -1 * MIB, 1 * MIB, **{"Total Allocated": 2 * MIB, "Ev Idx": 3}),
]
LEVELS = "SELECT max(allocated_bytes), arg_max(allocated_bytes, seq), count(*)::INT FROM events"
RANK = {"distributedInfo": {"rank": 0}}


@pytest.fixture
def take(tmp_path):
    """Ingest content under a name; return (peak, end, rows) and what was said."""

    def taken(content, name="t.json"):
        file, store = tmp_path / name, tmp_path / f"store-{name}"
        if not isinstance(content, (bytes, str)):
            content = pickle.dumps(content) if name.endswith(".pickle") else json.dumps(content)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        ingest(file, options=IngestOptions(store=store))
        connection = Store(store).connect()
        said = connection.execute("SELECT code, detail FROM issues").fetchall()
        return connection.execute(LEVELS).fetchone(), {code: detail for code, detail in said if code != "no_spans"}

    return taken


def refusal(take, content, name):
    with pytest.raises(UnreadableError) as caught:
        take(content, name)
    return caught.value.message, caught.value.hint


WHOLE = (3 * MIB, 2 * MIB, 3)


def test_a_named_pipe_is_read_once_also_into_a_store_that_has_runs(tmp_path):
    pipe, options = tmp_path / "t.json", IngestOptions(store=tmp_path / "store")
    os.mkfifo(pipe)
    found = []
    for _ in range(2):
        writer = threading.Thread(target=pipe.write_text, args=(json.dumps(trace(*LOOP, **RANK)),), daemon=True)
        writer.start()
        found += [run.run_id for run in ingest(pipe, options=options)]
        writer.join(timeout=10)
    assert len(set(found)) == 1 and len(found) == 2


def test_a_device_number_wider_than_its_column_costs_no_event(take):
    records = [{**record, "args": {**record["args"], "Device Id": 1 << 40}} for record in LOOP]
    assert take(trace(*records, **RANK)) == (WHOLE, {"wide_integer": "device_index: 1099511627776"})


def test_a_size_that_no_memory_has_is_left_out(take):
    absurd = [memory(31 + at, 1 << 62, (64 + at) * MIB, **{"Total Allocated": 2 * MIB}) for at in range(2)]
    levels, said = take(trace(*LOOP, *absurd, **RANK))
    assert levels == WHOLE
    assert said["bad_record"] == "block_bytes of 4611686018427387904 is more than 262,144.00 GiB"


def test_a_free_written_without_a_sign_is_a_free(take):
    freed = memory(30, (1 << 64) - MIB, 1 * MIB, **{"Total Allocated": 2 * MIB, "Ev Idx": 3})
    levels, said = take(trace(*LOOP[:2], freed, **RANK))
    assert levels == WHOLE
    assert said == {"odd_number": f"Bytes: {(1 << 64) - MIB} is a free written without a sign"}


def test_a_second_list_of_events_is_said(take):
    text = json.dumps(trace(*LOOP, **RANK))[:-1] + ', "traceEvents": [{"ph": "i"}]}'
    levels, said = take(text)
    assert levels == WHOLE
    assert said["unreadable_part"] == "behind the list stands a second traceEvents"


@pytest.mark.parametrize(
    "decoy", ['"a": "traceEvents": [1],', '"a": {"traceEvents": [1]},', '"a": "x"traceEvents": [",']
)
def test_the_list_that_holds_records_is_taken(take, decoy):
    levels, _ = take("{" + decoy + json.dumps(trace(*LOOP, **RANK))[1:])
    assert levels == WHOLE


def test_bytes_behind_gzip_are_an_issue(take):
    levels, said = take(gzip.compress(json.dumps(trace(*LOOP, **RANK)).encode()) + b"more", "t.json.gz")
    assert levels == WHOLE
    assert said["unreadable_part"].startswith("bytes behind the gzip stream were ignored (near byte ")


def test_a_handful_of_frees_at_other_addresses_is_told_by_the_totals(take):
    """Stack addresses: each event has its own, and the totals say that nothing was there before."""
    changes = [(1, 1), (2, 3), (4, 7), (-2, 5), (-1, 4), (-4, 0)]
    records = [
        memory(at, size * MIB, (1 << 40) + 64 * at, **{"Total Allocated": total * MIB, "Ev Idx": at})
        for at, (size, total) in enumerate(changes, 1)
    ]
    levels, said = take(trace(*records, **RANK))
    assert levels == (7 * MIB, 0, 6)
    assert said == {"useless_addresses": "cuda:0: paired by size instead"}


def test_frees_that_the_totals_explain_stay_unmatched(take):
    records = [
        memory(10, 1 * MIB, 1 * MIB, **{"Total Allocated": 3 * MIB, "Ev Idx": 1}),
        memory(20, -1 * MIB, 8 * MIB, **{"Total Allocated": 2 * MIB, "Ev Idx": 2}),
    ]
    levels, said = take(trace(*records, **RANK))
    assert levels == (3 * MIB, 2 * MIB, 4)  # one known block and one remainder of 1 MiB were there before
    assert set(said) == {"unmatched_free", "preexisting_memory"}


def test_a_trace_of_another_program_is_named_as_such(take):
    message, hint = refusal(take, {"displayTimeUnit": "ns", "traceEvents": [span("fusion.1")]}, "tf.json")
    assert message == (
        "tf.json has 1 record, but no [memory] or [OutOfMemory] event: it has no schemaVersion,"
        " so another program than torch.profiler wrote it."
    )
    assert hint.startswith("xmem needs the allocations and frees themselves. Record with torch.profiler.profile(")


def _tar() -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("t.json"))
    return made.getvalue()


@pytest.mark.parametrize(
    ("content", "kind", "advice"),
    [
        (_tar(), "a tar archive", "Unpack it (tar -xf) and name the file in it. "),
        (b"\xfd7zXZ\x00more", "an xz file", "Unpack it (xz -d) first. "),
        ('{"traceEvents": []}'.encode("utf-16"), "UTF-16 text", "Write it as UTF-8 first (iconv -f UTF-16 -t UTF-8). "),
        ("[1]".encode("utf-16-le"), "UTF-16 text", "Write it as UTF-8 first (iconv -f UTF-16 -t UTF-8). "),
        (
            b"<html>", "a web page (the HTML form of a memory timeline holds a picture only)",
            "Give the .json or .pickle file that the page was made from. ",
        ),
    ],
)  # fmt: skip
def test_what_can_be_turned_into_a_trace_says_how(take, tmp_path, content, kind, advice):
    assert refusal(take, content, "x.json") == (
        f"{str(tmp_path / 'x.json')!r} is {kind}, not a trace or snapshot that xmem knows.",
        f"{advice}It reads torch.profiler traces, CUDA memory snapshots, memory timelines and xmem event logs.",
    )


SNAPSHOT = (12 * MIB, 8 * MIB, 5)


def changed(change):
    snapshot = copy.deepcopy(basic())
    for entries in snapshot["device_traces"]:
        for at, made in enumerate(entries):
            made["time_us"] = at + 1
    change(snapshot)
    return snapshot


def test_a_block_without_a_state_is_free(take):
    levels, said = take(changed(lambda made: made["segments"][0]["blocks"][2].pop("state")), "x.pickle")
    assert (levels[1], said) == (take(changed(lambda made: None), "y.pickle")[0][1], {"no_rank": None})


def test_a_segment_that_stands_twice_counts_once(take):
    def double(made):
        made["segments"].append(copy.deepcopy(made["segments"][0]))

    plain, _ = take(changed(lambda made: None), "y.pickle")
    levels, said = take(changed(double), "x.pickle")
    assert levels == plain
    assert said == {"no_rank": None, "missing_field": "a segment has no address or no size, or stands twice"}


def test_a_segment_of_a_device_without_end_is_kept(take):
    _, said = take(changed(lambda made: made["segments"][0].update(device=1 << 40)), "x.pickle")
    assert said == {"no_rank": None, "wide_integer": "device_index: 1099511627776"}


def test_an_entry_of_impossible_size_is_left_out(take):
    plain, _ = take(changed(lambda made: None), "y.pickle")
    absurd = [entry("alloc", BASE + (12 + at) * MIB, 1 << 62, 20) for at in range(2)]
    levels, said = take(changed(lambda made: made["device_traces"][0].extend(absurd)), "x.pickle")
    assert levels == plain
    assert said["bad_record"] == "requested_bytes of 4611686018427387904 is more than 262,144.00 GiB"


def test_traces_under_device_numbers_are_read(take):
    plain, _ = take(changed(lambda made: None), "y.pickle")
    levels, said = take(changed(lambda made: made.update(device_traces={0: made["device_traces"][0]})), "x.pickle")
    assert (levels, said) == (plain, {"no_rank": None})


def test_parts_of_another_type_are_said_or_explained(take):
    plain, _ = take(changed(lambda made: made.pop("segments")), "y.pickle")
    levels, said = take(changed(lambda made: made.update(segments={"a": 1})), "x.pickle")
    assert levels == plain
    assert said["unreadable_part"] == "segments is a dict, not a list"
    message, _ = refusal(take, {"segments": {"a": 1}, "device_traces": 5}, "z.pickle")
    assert message == "'z.pickle' cannot be read: it is a pickle, but its segments is a dict, not a list."


def test_bytes_behind_a_pickle_are_an_issue(take):
    twice = pickle.dumps(changed(lambda made: None)) * 2
    assert take(twice, "x.pickle")[1]["unreadable_part"] == "bytes stand behind the end of the pickle"


EVENTS = pl.DataFrame({"ts_ns": [1, 2], "action": ["alloc", "alloc"], "address": [64, 128], "block_bytes": [100, 10]})


def parquet(frame: pl.DataFrame) -> bytes:
    made = io.BytesIO()
    frame.write_parquet(made)
    return made.getvalue()


def test_parquet_of_other_tools_is_read_by_its_columns(take):
    assert take(parquet(EVENTS), "x.parquet") == ((110, 110, 2), {"no_rank": None})


def test_parquet_columns_of_wrong_types_are_said(take):
    wrong = EVENTS.with_columns(address=pl.Series([[64], [128]]))
    levels, said = take(parquet(wrong), "x.parquet")
    assert levels == (110, 110, 2)
    assert said["odd_value"] == "address is of type List(Int64)"


def test_parquet_without_actions_is_explained(take):
    assert refusal(take, parquet(EVENTS.drop("action")), "x.parquet") == (
        "'x.parquet' is no event log: it is a Parquet file without a column action.",
        "The format is described in docs/event-log.md.",
    )


@pytest.mark.parametrize("rank", [-5, 1 << 40, "x"])
def test_a_rank_that_cannot_be_is_not_taken(take, rank):
    lines = [{"xmem": 1, "rank": rank}, {"ts_ns": 1, "action": "alloc", "address": 64, "block_bytes": 100}]
    levels, said = take("\n".join(map(json.dumps, lines)), "x.xmem.jsonl")
    assert levels == (100, 100, 1)
    assert said == {"no_rank": None, "odd_value": f"rank: {rank}"}


def test_one_odd_row_does_not_change_the_kind_of_a_timeline(take):
    rows = "[[-1, 1, 100, 0], [NaN, 2, 50, 4], [6000, 2, 10, 7]]"
    levels, said = take(rows, "t.raw.json")
    assert levels == (110, 110, 2)
    assert "bad_record" in said


@pytest.mark.parametrize("between", ["\n", ",\n", "\n\n"])
def test_records_in_lines_without_a_list_are_read(take, between):
    found, said = take(between.join(map(json.dumps, LOOP)) + "\n")
    assert found == WHOLE
    assert said == {"no_rank": None, "repaired_syntax": "records without a list"}


def test_a_single_record_without_a_list_is_read(take):
    assert take(json.dumps(LOOP[0])) == (
        (1 * MIB, 1 * MIB, 1),
        {"no_rank": None, "repaired_syntax": "records without a list"},
    )


def test_a_header_that_begins_like_a_record_is_a_header(take):
    whole = json.dumps({"name": "a run", **trace(*LOOP, **RANK)})
    assert take(whole) == (WHOLE, {})


def test_a_device_type_is_read_by_its_name(take, tmp_path):
    named = [{**record, "args": {**record["args"], "Device Type": "CUDA"}} for record in LOOP]
    found, said = take(trace(*named, **RANK))
    assert (found, said) == (WHOLE, {"odd_number": "Device Type: 'CUDA'"})
    devices = Store(tmp_path / "store-t.json").connect().execute("SELECT DISTINCT device_type FROM events").fetchall()
    assert devices == [("cuda",)]


def test_a_time_without_bounds_costs_no_event(take):
    found, said = take(json.dumps(trace(*LOOP, **RANK)).replace('"ts": 30', '"ts": 1e400'))
    assert found == WHOLE
    assert said["wide_integer"] == "a time was cut off"


def test_sizes_below_zero_of_a_timeline_are_zero(take):
    sizes = [[0, 7, 0, 0, 0, 0, 0, 0, 0], [0, 7, -50, 0, 0, 0, 0, 0, 0], [0, 5, 0, 0, 0, 0, 0, 0, 0]]
    found, said = take([[0, 1, 2], sizes], "m.json")
    assert found[:2] == (7, 5)
    assert said["negative_total"] == "-50: sizes below zero are 0"


def test_a_short_row_of_a_timeline_is_said(take):
    found, said = take([[0, 1, 2], [[0, 7, 9], [0, 8, 9, 1, 0, 0, 0, 0, 0], [0, 5]]], "m.json")
    assert found[:2] == (18, 5)
    assert said["missing_field"] == "a row of less than 9 sizes: the rest are 0"


def test_a_comma_too_many_in_a_snapshot_as_json_is_repaired(take):
    text = json.dumps(basic()).replace("}]", "},]").replace('"model.py"', '"a,]}.py"')
    found, said = take(text, "s.json")
    assert found[0] == 12 * MIB
    assert said == {"no_rank": None, "repaired_syntax": "a comma before a closing bracket"}


def test_blocks_that_do_not_fill_their_segment_are_said(take):
    snapshot = basic()
    snapshot["segments"][0]["blocks"][0]["size"] -= 512
    assert take(snapshot, "s.pickle")[1]["state_mismatch"] == "the blocks of a segment do not add up to its size"
