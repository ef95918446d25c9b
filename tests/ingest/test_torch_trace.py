"""Traces of torch.profiler: exact times, devices, kinds, ranks, odd values, filters, and what is no trace."""

from __future__ import annotations

import json
import random
from decimal import Decimal
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ingest.traces import ADDRESS, MIB, gzipped, memory, read, span, trace
from tests.paths import SHARED_DATA, needs_shared
from xmem.errors import UnreadableError, UsageError
from xmem.ingest import torch_trace
from xmem.ingest.adapter import Filters, Notes, find_adapter
from xmem.ingest.source import open_source
from xmem.ingest.trace_columns import DEVICE_TYPES, InexactTimesError, to_ns
from xmem.schema import tables

BASE = 1_751_410_836_000_000_000
PLAIN = memory(1, MIB)


def test_a_memory_event_becomes_a_row() -> None:
    found = read(trace(memory(1000.5, MIB, Addr=5, **{"Total Allocated": 9}), memory(1001, -MIB, Addr=5)))
    assert found.events.sort("ts_ns").to_dicts() == [
        {
            "ts_ns": 1_000_500 if action == "alloc" else 1_001_000, "order_key": 1, "device_index": 0, "address": 5,
            "thread_id": 8, "process_id": 7, "total_allocated": 9 if action == "alloc" else 0,
            "total_reserved": 64 * MIB, "device_type": "cuda", "action": action, "requested_bytes": None,
            "block_bytes": MIB,
        }
        for action in ("alloc", "free_requested")
    ]  # fmt: skip
    assert found.notes.facts == {
        "source_entries": 2, "memory_event_count": 2, "time_base": "relative",
        "metadata": '{"schemaVersion":1,"profile_memory":1}',
    }  # fmt: skip
    assert found.counts() == {}


def test_columns_are_those_of_the_schema() -> None:
    found = read(
        trace(PLAIN, span("x", args={"Input Dims": [[1]], "Concrete Inputs": ["a"]}), deviceProperties=[{"id": 0}])
    )
    known = {name: set(table.column_names) for name, table in tables().items()}
    assert set(found.events.columns) <= known["events"] | {"order_key", "process_id"}
    assert set(found.spans.columns) <= known["spans"]
    assert set(found.tables["devices"].columns) <= known["devices"]


def test_cpu_knows_requests_and_devices_know_blocks() -> None:
    cpu = memory(1, 100, **{"Device Type": 0, "Device Id": -1})
    assert read(trace(cpu)).events.select("device_type", "device_index", "requested_bytes", "block_bytes").rows() == [
        ("cpu", -1, 100, None)
    ]


@pytest.mark.parametrize(("number", "name"), [*enumerate(DEVICE_TYPES), (21, "unknown21"), (99, "unknown99")])
def test_device_types_are_those_of_c10(number: int, name: str) -> None:
    found = read(trace(memory(1, 1, **{"Device Type": number, "Device Id": 2})))
    assert found.events.select("device_type", "device_index").rows() == [(name, -1 if number == 0 else 2)]
    assert found.counts() == ({"unknown_device_type": 1} if number > 20 else {})
    assert {DEVICE_TYPES[index] for index in (1, 6, 12, 13, 20)} == {"cuda", "hip", "xpu", "mps", "privateuseone"}


def test_it_is_the_name_that_counts() -> None:
    events = [
        PLAIN | {"cat": "memory"},
        PLAIN | {"cat": None},
        PLAIN | {"ph": "I"},
        PLAIN | {"ph": "C"},
        PLAIN | {"ph": "??"},
    ]
    del events[1]["cat"]
    assert read(trace(*events)).sizes() == [MIB] * 5


def test_out_of_memory_is_an_event_of_its_own() -> None:
    oom = memory(2, 1000 * MIB) | {"name": "[OutOfMemory]"}
    del oom["args"]["Addr"]
    found = read(trace(PLAIN, oom))
    row = found.events.row(1, named=True)
    assert {key: row[key] for key in ("action", "requested_bytes", "block_bytes", "address", "total_reserved")} == {
        "action": "oom", "requested_bytes": 1000 * MIB, "block_bytes": None, "address": None, "total_reserved": None,
    }  # fmt: skip
    assert (found.notes.facts["source_entries"], found.notes.facts["memory_event_count"]) == (2, 1)
    assert read(trace(oom)).events.height == 1


# ---------------------------------------------------------------------- times


def test_times_are_exact_whatever_their_form() -> None:
    texts = {
        "4280895488375.657": 4_280_895_488_375_657,
        "7889238000000.001": 7_889_238_000_000_001,
        "1716954500594237": 1_716_954_500_594_237_000,
        "1716954500594237.123": 1_716_954_500_594_237_123,
        "1716954500594237.001": 1_716_954_500_594_237_001,
        '"1716954500594237.999"': 1_716_954_500_594_237_999,
        "1.5e3": 1_500_000,
        "-12.345": -12_345,
        "0.0004": 0,
    }
    for text, expected in texts.items():
        raw = json.dumps(trace(memory("TS", 1), span("x", "TS", 1.001))).replace('"TS"', text)
        found = read(raw)
        assert found.events["ts_ns"].to_list() == [expected], text
        assert found.spans["ts_ns"].to_list() == [expected], text
        assert found.spans["dur_ns"].to_list() == [1001]
        assert found.notes.facts["time_base"] == ("unix" if expected > 10**18 else "relative")


def test_one_inexact_time_makes_the_whole_chunk_exact() -> None:
    times = ["1716954500594237", "1716954500594238.877", "1716954500594239.001"]
    raw = json.dumps(trace(*(memory(f"T{index}", 1) for index in range(3)), span("s", args={"stream": "odd"})))
    for index, text in enumerate(times):
        raw = raw.replace(f'"T{index}"', text)
    assert read(raw).events["ts_ns"].to_list() == [int(Decimal(text) * 1000) for text in times]


@settings(deadline=None)
@given(st.lists(st.integers(0, 7_889_238_000_000_000), min_size=1, max_size=5))
def test_three_decimals_survive_the_float(times: list[int]) -> None:
    texts = [f"{ns // 1000}.{ns % 1000:03d}" for ns in times]
    assert to_ns([float(text) for text in texts]).tolist() == times


def test_floats_that_cannot_hold_a_time_are_refused() -> None:
    with pytest.raises(InexactTimesError):
        to_ns([1716954500594237.1])
    assert to_ns([]).tolist() == []


def test_the_base_is_added_wherever_it_stands() -> None:
    head = read(json.dumps({"baseTimeNanoseconds": BASE, "traceEvents": [memory(1.25, 1), span("x", 2)]}))
    assert head.events["ts_ns"].to_list() == [BASE + 1250]
    assert head.spans["ts_ns"].to_list() == [BASE + 2000]
    tail = read(json.dumps({"traceEvents": [memory(1.25, 1)], "baseTimeNanoseconds": BASE}))
    assert tail.events["ts_ns"].to_list() == [1250]
    assert tail.notes.facts["ts_offset_ns"] == BASE
    assert "ts_offset_ns" not in head.notes.facts
    assert (head.notes.facts["time_base"], tail.notes.facts["time_base"]) == ("unix", "unix")


def test_times_since_1970_need_no_base() -> None:
    found = read(trace(memory(1_716_954_500_594_237, 1), baseTimeNanoseconds=BASE))
    assert found.events["ts_ns"].to_list() == [1_716_954_500_594_237_000]


def test_absurd_times_are_cut_off() -> None:
    found = read(json.dumps(trace(PLAIN, span("x", dur="DUR"))).replace('"DUR"', "1e999"))
    assert found.spans["dur_ns"].to_list() == [4 * 10**18]
    assert found.counts() == {"wide_integer": 1}


# ---------------------------------------------------------------------- odd values


@pytest.mark.parametrize(
    ("written", "bytes_read", "odd"),
    [
        ("1048576", 1048576, 0),
        ("1048576.0", 1048576, 1),
        ("1.048576e6", 1048576, 1),
        ('"1048576"', 1048576, 1),
        ('"0x100000"', 1048576, 1),
        ('" 1048576 "', 1048576, 1),
        ("1048576.75", 1048576, 1),
        ("0x100000", 1048576, 1),
        ('"-1048576"', -1048576, 1),
    ],
)
def test_numbers_in_odd_clothes(written: str, bytes_read: int, odd: int) -> None:
    found = read(json.dumps(trace(memory(1, "SIZE"))).replace('"SIZE"', written))
    assert (found.sizes(), found.counts()) == ([bytes_read], {"odd_number": odd} if odd else {})


@pytest.mark.parametrize(
    ("written", "address"),
    [
        (-1, (1 << 64) - 1),
        (-(1 << 63), 1 << 63),
        ((1 << 64) - 1, (1 << 64) - 1),
        (139637976727552, 139637976727552),
        (0, 0),
        (9007199254740993, 9007199254740993),
    ],
)
def test_addresses_are_unsigned(written: int, address: int) -> None:
    assert read(trace(memory(1, 1, written))).events["address"].to_list() == [address]


def test_integers_past_64_bits_are_left_out() -> None:
    wide = 1 << 70
    found = read(trace(memory(1, 5, wide), span("x", args={"External id": wide, "correlation": 3, "Comms Id": wide})))
    assert found.events["address"].to_list() == [None]
    assert found.spans.select("external_id", "correlation_id").rows() == [(None, 3)]
    assert found.counts() == {"wide_integer": 2}


def test_missing_fields_cost_the_field_or_the_event() -> None:
    bare: dict[str, Any] = {"ph": "i", "name": "[memory]"}
    found = read(
        trace(
            bare | {"ts": 1, "args": {"Bytes": 8, "Addr": 1}},
            bare | {"ts": 2, "args": {"Bytes": -8, "Addr": 1, "Device Type": 1}},
            bare | {"ts": 3, "args": {"Bytes": 8, "Device Type": 0}},
            bare | {"ts": 4, "args": {}},
            bare | {"ts": 5},
            bare | {"args": {"Bytes": 8}},
            bare | {"ts": 6, "args": None},
            bare | {"ts": 7, "args": "text"},
        )
    )
    assert found.events.select("device_type", "device_index", "action").rows() == [
        ("unknown", 0, "alloc"), ("cuda", 0, "free_requested"), ("cpu", -1, "alloc"),
    ]  # fmt: skip
    assert (found.notes.facts["source_entries"], found.notes.facts["memory_event_count"]) == (8, 3)
    assert found.counts() == {"missing_field": 8}


def test_unknown_keys_and_repeated_keys_do_no_harm() -> None:
    raw = json.dumps(trace(memory(1, 5, finished=False, New={"a": [1]}))).replace(
        '"Bytes": 5', '"Bytes": 4, "Bytes": 5'
    )
    assert (read(raw).sizes(), read(raw).counts()) == ([5], {})


def test_ids_may_be_text() -> None:
    events = [memory(1, 1) | {"pid": "Spans", "tid": "25738"}, memory(2, 1) | {"pid": 1 << 80, "tid": -1}]
    found = read(trace(*events, memory(3, 1) | {"pid": [1], "tid": 2.5}))
    assert found.events.select("process_id", "thread_id").rows() == [(None, 25738), (None, -1), (None, 2)]


# ---------------------------------------------------------------------- spans


def test_spans_carry_what_joins_them() -> None:
    args = {
        "External id": 11, "Sequence number": 12, "Fwd thread id": 13, "Ev Idx": 14, "Input Dims": [[2, 3], []],
        "Input Strides": [[3, 1], []], "Input type": ["float", ""], "Concrete Inputs": ["", "[1]"],
    }  # fmt: skip
    kernel = {"device": 1, "stream": 7, "correlation": 99, "External id": 11, "grid": [1, 1, 1]}
    found = read(
        trace(
            PLAIN,
            span("aten::mm", 1, 2, args=args),
            span("k", 3, 4, "kernel", pid=5, tid=6, args=kernel),
            span("cudaLaunchKernel", 2, 1, "cuda_runtime", args={"correlation": 99, "External id": 11}),
        )
    )
    assert [{key: value for key, value in row.items() if value is not None} for row in found.spans.to_dicts()] == [
        {
            "kind": "operator", "name": "aten::mm", "process_id": 7, "thread_id": 8, "external_id": 11,
            "sequence_number": 12, "fwd_thread_id": 13, "ts_ns": 1000, "dur_ns": 2000,
            "input_shapes": "[[2, 3], []]", "input_strides": "[[3, 1], []]", "input_types": '["float", ""]',
            "concrete_inputs": '["", "[1]"]',
        },
        {
            "kind": "kernel", "name": "k", "device_index": 1, "stream": 7, "correlation_id": 99, "external_id": 11,
            "ts_ns": 3000, "dur_ns": 4000,
        },
        {
            "kind": "runtime", "name": "cudaLaunchKernel", "process_id": 7, "thread_id": 8, "correlation_id": 99,
            "external_id": 11, "ts_ns": 2000, "dur_ns": 1000,
        },
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("category", "name", "kind"),
    [
        ("cpu_op", "aten::add", "operator"),
        ("Operator", "aten::add", "operator"),
        ("user_annotation", "mine", "annotation"),
        ("user_annotation", "ProfilerStep#3", "step"),
        ("cpu_op", "ProfilerStep#3", "step"),
        ("Operator", "ProfilerStep#3", "step"),
        ("gpu_user_annotation", "ProfilerStep#3", "gpu_annotation"),
        ("python_function", "nn.Module: Linear_0", "module"),
        ("python_function", "a.py(1): f", "python"),
        ("cuda_runtime", "cudaMalloc", "runtime"),
        ("cuda_driver", "cuLaunchKernel", "runtime"),
        ("xpu_runtime", "x", "runtime"),
        ("Runtime", "cudaMalloc", "runtime"),
        ("kernel", "k", "kernel"),
        ("Kernel", "k", "kernel"),
        ("gpu_memcpy", "Memcpy HtoD", "memcpy"),
        ("Memcpy", "Memcpy HtoD", "memcpy"),
        ("gpu_memset", "Memset", "memset"),
        ("cuda_sync", "Event Sync", "sync"),
        ("overhead", "Unrecognized", "overhead"),
        ("Trace", "PyTorch Profiler (0)", "other"),
        ("something new", "x", "other"),
        (None, "x", "other"),
    ],
)
def test_kinds(category: str | None, name: str, kind: str) -> None:
    assert read(trace(PLAIN, span(name, cat=category))).spans["kind"].to_list() == [kind]  # type: ignore[arg-type]


def test_spellings_of_2021() -> None:
    old = {"device": 0, "stream": 7, "correlation": 5, "external id": 544, "Input dims": [[1]]}
    found = read(
        trace(PLAIN, span("k", cat="Kernel", pid=0, tid="stream 7", args=old), span("new", args={"External id": 3}))
    )
    assert found.spans.select("external_id", "input_shapes", "stream").rows() == [(544, "[[1]]", 7), (3, None, None)]
    assert "external_id_2021" not in found.spans.columns


def test_spans_without_name_duration_or_start() -> None:
    found = read(
        trace(PLAIN, {"ph": "X", "ts": 1}, {"ph": "X", "dur": 1}, {"ph": "X", "ts": 2, "name": None, "dur": None})
    )
    assert found.spans.select("name", "ts_ns", "dur_ns").rows() == [("", 1000, 0), ("", 2000, 0)]
    assert found.counts() == {"missing_field": 1}


# ---------------------------------------------------------------------- the header


def test_devices_are_described() -> None:
    properties = [
        {"id": 0, "name": "NVIDIA X", "totalGlobalMem": 12 << 30, "computeMajor": 8, "computeMinor": 6, "numSms": 28},
        {"id": 1, "name": None, "totalGlobalMem": "x"},
        {"id": 0, "name": "again"},
        {"name": "no id"},
        7,
    ]
    found = read(trace(PLAIN, deviceProperties=properties))
    assert found.tables["devices"].rows() == [
        ("cuda", "NVIDIA X", 0, 12 << 30, 8, 6, 28), ("cuda", None, 1, None, None, None, None),
    ]  # fmt: skip
    hip = read(trace(memory(1, 1, **{"Device Type": 6}), deviceProperties=[{"id": 0}]))
    assert hip.tables["devices"]["device_type"].to_list() == ["hip"]
    cpu = read(trace(memory(1, 1, **{"Device Type": 0}), deviceProperties=[{"id": 0}], hip_runtime_version=6))
    assert cpu.tables["devices"]["device_type"].to_list() == ["hip"]
    assert "devices" not in read(trace(PLAIN, deviceProperties="none")).tables


@pytest.mark.parametrize(
    ("distributed", "rank"),
    [
        ({"rank": 3}, 3),
        ({"rank": "4"}, 4),
        ({"rank": -1}, None),
        ({"rank": True}, None),
        ({}, None),
        ("text", None),
        (None, None),
    ],
)
def test_the_stated_rank(distributed: object, rank: int | None) -> None:
    for separators in ((",", ":"), (", ", ": ")):
        assert read(json.dumps(trace(PLAIN, distributedInfo=distributed), separators=separators)).notes.rank == rank


def test_facts_of_the_header() -> None:
    found = read(trace(PLAIN, torch_version="2.13.0+cu130", host_name="h", deviceProperties=[], big="x" * 70_000))
    assert found.notes.facts["torch_version"] == "2.13.0+cu130"
    assert json.loads(str(found.notes.facts["metadata"])) == {
        "schemaVersion": 1, "profile_memory": 1, "torch_version": "2.13.0+cu130", "host_name": "h",
    }  # fmt: skip


# ---------------------------------------------------------------------- what is not there


def complain(content: Any, filters: Filters | None = None) -> tuple[str, str]:
    with pytest.raises((UnreadableError, UsageError)) as caught:
        read(content, filters=filters)
    return caught.value.message, caught.value.hint


RECORD = "Record with torch.profiler.profile(profile_memory=True, record_shapes=True, with_stack=True)."


def test_profile_memory_was_off() -> None:
    message, hint = complain({"schemaVersion": 1, "traceEvents": [span("x")]})
    assert message == (
        "t.json has 1 record, but no [memory] or [OutOfMemory] event: it was recorded without profile_memory=True."
    )
    assert hint == RECORD


def test_profile_memory_was_on_and_nothing_came() -> None:
    for header in (
        {"profile_memory": 1},
        {"metadata": {"profiler": {"torch_profiler_kwargs": {"profile_memory": True}}}},
    ):
        message, hint = complain({**header, "traceEvents": [span("x"), span("y")]})
        assert message == (
            "t.json has 2 records, but no [memory] or [OutOfMemory] event, although it was recorded with"
            " profile_memory=True: nothing was allocated or freed while the profiler recorded, or the events were lost"
            " in the export."
        )
        assert hint.startswith("Record at least one whole training step; if there still are none, ingest a memory")


def test_memory_events_without_content() -> None:
    message, hint = complain(trace({"ph": "i", "name": "[memory]", "ts": 1, "args": {}}))
    assert message == "t.json has 1 [memory] events, but none of them has Bytes and ts."
    assert hint == RECORD


def test_no_record_can_be_read() -> None:
    assert complain(b'{"traceEvents":[]}') == ("t.json holds no trace records that can be read.", RECORD)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (
            {"schemaVersion": 1, "deviceProperties": []},
            "It is a JSON object with the keys 'schemaVersion', 'deviceProperties'",
        ),
        ({}, "It is JSON"),
        (b"{ broken", "It looks like JSON but cannot be read as such"),
    ],
)
def test_what_is_no_trace(content: Any, what: str) -> None:
    message, hint = complain(content)
    assert message == f"t.json is no torch.profiler trace: {what}, without a list traceEvents."
    assert hint == (
        f"xmem reads torch.profiler traces, CUDA memory snapshots, memory timelines and its own event logs. {RECORD}"
    )


def test_sniffing_takes_json_that_nobody_else_wants() -> None:
    for head in (b'{"traceEvents"', b'\xef\xbb\xbf\n [{"ph"', b"{}", b"\0\0{"):
        assert torch_trace.sniff(head, "x.pickle")
    for head in (b"", b"PK\x03\x04", b"\x80\x04", b"text"):
        assert not torch_trace.sniff(head, "x.json")


# ---------------------------------------------------------------------- filters


SPANS = [
    span("ProfilerStep#1", 10, 80, "user_annotation"),
    span("a.py(1): f", 20, 10, "python_function"),
    span("nn.Module: L_0", 20, 10, "python_function"),
    span("aten::mm", 40, 5),
    span("k0", 45, 5, "kernel", args={"device": 0}),
    span("k1", 60, 5, "kernel", args={"device": 1}),
]
MEMORY = [memory(41, 1), memory(42, 2, **{"Device Id": 1}), memory(43, 3, **{"Device Type": 0, "Device Id": -1})]


@pytest.mark.parametrize(
    ("filters", "spans", "sizes"),
    [
        (Filters(), [0, 1, 2, 3, 4, 5], [1, 2, 3]),
        (Filters(stacks=False), [0, 2, 3, 4, 5], [1, 2, 3]),
        (Filters(spans=False), [], [1, 2, 3]),
        (Filters(spans=False, steps=(1, 1)), [0], [1, 2, 3]),
        (Filters(device="cuda:1"), [0, 1, 2, 3, 5], [2]),
        (Filters(device="cuda"), [0, 1, 2, 3, 4, 5], [1, 2]),
        (Filters(device="cpu"), [0, 1, 2, 3, 4, 5], [3]),
        (Filters(since_ns=BASE + 45_000), [0, 3, 4, 5], [1, 2, 3]),
        (Filters(until_ns=BASE + 20_000), [0, 1, 2], [1, 2, 3]),
        (Filters(since_ns=BASE + 31_000, until_ns=BASE + 44_000), [0, 3], [1, 2, 3]),
    ],
)
def test_filters_drop_what_is_surely_not_wanted(filters: Filters, spans: list[int], sizes: list[int]) -> None:
    found = read(trace(*SPANS, *MEMORY, baseTimeNanoseconds=BASE), filters=filters)
    names = found.spans["name"].to_list() if found.spans.height else []
    assert names == [SPANS[index]["name"] for index in spans]
    assert found.sizes() == sizes


def test_times_are_not_filtered_before_the_base_is_known() -> None:
    content = {"traceEvents": [*SPANS, *MEMORY], "baseTimeNanoseconds": BASE}
    assert read(json.dumps(content), filters=Filters(since_ns=BASE + 45_000)).spans.height == 6


def test_a_device_that_is_not_there() -> None:
    message, hint = complain(trace(*MEMORY), Filters(device="cuda:7"))
    assert message == "t.json has no memory events of the device 'cuda:7'."
    assert hint == "It has: cpu, cuda:0, cuda:1."


# ---------------------------------------------------------------------- whole files


def test_batches_are_large_and_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xmem.ingest.trace_columns.BATCH_ROWS", 100)
    monkeypatch.setattr("xmem.ingest.json_stream.CHUNK_BYTES", 4000)
    order = random.Random(5)
    records = [memory(n, n + 1) if order.random() < 0.5 else span(f"s{n}", n) for n in range(1000)]
    found = read(trace(*records))
    assert found.sizes() == [record["args"]["Bytes"] for record in records if record["ph"] == "i"]
    assert found.spans["name"].to_list() == [record["name"] for record in records if record["ph"] == "X"]


def test_cut_gzip_keeps_every_whole_event(tmp_path: Any) -> None:
    order = random.Random(6)
    records = [memory(n, order.randrange(1, 1 << 40), order.randrange(1 << 47)) for n in range(60)]
    whole = gzipped(json.dumps(trace(*records)).encode())
    for cut in range(200, len(whole), 97):
        (tmp_path / "t.json.gz").write_bytes(whole[:cut])
        with open_source(tmp_path / "t.json.gz") as source:
            text = source.read()
        complete = text.count(b"}}")
        if complete:
            assert read(text).sizes() == [record["args"]["Bytes"] for record in records[:complete]]


@needs_shared
@pytest.mark.parametrize(
    ("file", "rows"),
    [
        ("TraceLens__tests__traces__h100__Qwen", {"cuda:0": 2250, "cpu": 200}),
        ("TraceLens__tests__traces__h100__gaunernst", {"cuda:0": 218, "cpu": 18}),
        ("TraceLens__tests__traces__mi300__gaunernst", {"hip:0": 234, "cpu": 2}),
        ("df_index_resolver", {"cuda:1": 26770, "cpu": 1240}),
        ("SwitchTransformers", {"cpu": 787}),
        ("unsloth_puzzels", {"cpu": 20}),
        ("kineto__tb_plugin__samples__resnet50", {"cuda:0": 8220, "cpu": 4618}),
    ],
)
def test_traces_from_the_field(file: str, rows: dict[str, int]) -> None:
    (path,) = (SHARED_DATA / "corpus").glob(f"*{file}*.json.gz")
    with open_source(path) as source:
        assert find_adapter(source.head(), source.name) is torch_trace
        notes = Notes(filename=source.name)
        frames = [batch.columns for batch in torch_trace.read(source, notes) if batch.table == "events"]  # type: ignore[arg-type]
    events = pl.concat(frames).sort("ts_ns", "order_key", maintain_order=True)
    size = pl.coalesce("block_bytes", "requested_bytes")
    level = pl.when(pl.col("action") == "alloc").then(size).otherwise(-size).cum_sum()
    for (kind, index), device in events.group_by("device_type", "device_index", maintain_order=True):
        assert rows.pop(kind if kind == "cpu" else f"{kind}:{index}") == device.height
        differences = device.select((pl.col("total_allocated") - level).alias("difference"))["difference"]
        assert differences.n_unique() == 1  # one constant: what was there before
    assert rows == {}
    assert not notes.issues


def test_the_address_of_these_tests() -> None:
    assert read(trace(PLAIN)).events["address"].to_list() == [ADDRESS]
