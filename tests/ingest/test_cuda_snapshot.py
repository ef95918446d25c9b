"""Snapshots of every version and form, whole and broken, with the rows that they must become."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ingest.snapshots import BASE, FORWARD, MIB, basic, entry, issues, read, with_trace
from tests.paths import SHARED_DATA, needs_shared
from xmem.errors import RefusedError, UnreadableError
from xmem.ingest import cuda_snapshot
from xmem.ingest.adapter import Filters
from xmem.ingest.safe_pickle import DamagedDataError
from xmem.ingest.snapshot_forms import read_json, salvage_snapshot

EVENTS = {
    "ts_ns": [10_000, 11_000, 12_000, 13_000, 13_000],
    "device_type": ["cuda"] * 5,
    "device_index": [0] * 5,
    "action": ["segment_alloc", "alloc", "alloc", "free_requested", "free_completed"],
    "address": [BASE, BASE, BASE + 4 * MIB, BASE, BASE],
    "requested_bytes": [20 * MIB, 4 * MIB, 8 * MIB - 100, 4 * MIB, 4 * MIB],
    "stream": [0] * 5,
    "pool_id": ["0:0"] * 5,
    "stack_id": [0] * 5,
    "category": [None] * 5,
    "device_free": [None] * 5,
    "user_metadata": [None] * 5,
    "compile_context": [None] * 5,
}
NOT_INACTIVE = [None, 8 * MIB - 100, None]


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_every_protocol_gives_the_same_rows(protocol: int) -> None:
    data = pickle.dumps(basic(), protocol)
    assert cuda_snapshot.sniff(data, "noname")
    tables, notes = read(data)
    assert tables["events"].to_dict(as_series=False) == EVENTS
    assert tables["stacks"]["frames"].to_list() == [FORWARD, []]
    assert tables["segments"].to_dicts() == [
        {
            "segment_id": 0,
            "device_type": "cuda",
            "device_index": 0,
            "address": BASE,
            "total_bytes": 20 * MIB,
            "allocated_bytes": 8 * MIB,
            "active_bytes": 8 * MIB,
            "requested_bytes": 8 * MIB - 100,
            "stream": 0,
            "segment_type": "large",
            "pool_id": "0:0",
            "is_expandable": False,
            "stack_id": None,
        }
    ]
    assert tables["blocks"].to_dict(as_series=False) == {
        "segment_id": [0, 0, 0],
        "address": [BASE, BASE + 4 * MIB, BASE + 12 * MIB],
        "block_bytes": [4 * MIB, 8 * MIB, 8 * MIB],
        "requested_bytes": NOT_INACTIVE,
        "state": ["inactive", "active_allocated", "inactive"],
        "stack_id": [None, 0, None],
    }
    assert issues(notes) == {}
    assert notes.facts == {
        "ordered": True,
        "source_entries": 5,
        "time_base": "unix",
        "ring_buffer": False,
        "truncated": False,
        "alloc_conf": "max_split_size_mb:64",
        "allocator_settings": '{"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64", "expandable_segments": false}',
    }


@pytest.mark.parametrize("prefix", [b"", b"\xef\xbb\xbf", b" \n"])
def test_a_json_dump_gives_the_same_rows(prefix: bytes) -> None:
    data = prefix + json.dumps(basic()).encode()
    assert cuda_snapshot.sniff(data, "noname")
    assert read(data)[0]["events"].to_dict(as_series=False) == EVENTS


def test_a_bare_list_of_segments_has_no_history() -> None:
    tables, notes = read(basic()["segments"])
    assert "events" not in tables
    assert tables["blocks"]["requested_bytes"].to_list() == NOT_INACTIVE
    assert issues(notes) == {"no_history": 1}
    assert notes.facts["alloc_conf"] is None


def test_a_bare_list_of_entries_and_a_wrapped_snapshot_are_found() -> None:
    assert read(basic()["device_traces"][0])[0]["events"].to_dict(as_series=False) == EVENTS
    assert read({"rank": 3, "snapshot": basic()})[0]["events"].to_dict(as_series=False) == EVENTS


def old_form() -> dict[str, Any]:
    """Make the basic snapshot as torch 2.0 wrote it."""
    old = basic()
    del old["allocator_settings"], old["external_annotations"]
    for one in old["device_traces"][0]:
        del one["time_us"], one["pool_id"]
    for segment in old["segments"]:
        for key in ("segment_pool_id", "is_expandable", "requested_size", "allocated_size", "active_size"):
            del segment[key]
        for block in segment["blocks"]:
            block["history"] = [{"addr": 0, "real_size": block["requested_size"], "frames": block["frames"]}]
            del block["address"], block["requested_size"], block["frames"]
    return old


def test_torch_2_0_has_no_times_pools_or_block_addresses() -> None:
    tables, notes = read(old_form())
    assert tables["events"]["ts_ns"].to_list() == [0, 1, 2, 3, 4]
    assert tables["events"]["pool_id"].to_list() == [None] * 5
    assert tables["events"]["requested_bytes"].to_list() == EVENTS["requested_bytes"]
    assert tables["blocks"]["address"].to_list() == [BASE, BASE + 4 * MIB, BASE + 12 * MIB]
    assert tables["blocks"]["requested_bytes"].to_list() == NOT_INACTIVE
    assert tables["blocks"]["stack_id"].to_list() == [None, 0, None]
    assert tables["segments"].select("allocated_bytes", "active_bytes", "requested_bytes").row(0) == (
        8 * MIB,
        8 * MIB,
        None,
    )
    assert notes.facts["time_base"] == "index"
    assert issues(notes) == {"no_times": 5}


def test_states_in_both_spellings() -> None:
    for spelling in ("active_pending_free", "active_awaiting_free"):
        snapshot = basic()
        snapshot["segments"][0]["blocks"][0]["state"] = spelling
        del snapshot["segments"][0]["active_size"]
        tables, _ = read(snapshot)
        assert tables["blocks"]["state"][0] == "active_pending_free"
        assert tables["segments"].select("allocated_bytes", "active_bytes").row(0) == (8 * MIB, 12 * MIB)


def test_pools_in_both_spellings() -> None:
    tables, _ = read(with_trace(entry("alloc", 1, 1, 1, pool_id=(1, 0)), entry("alloc", 2, 1, 2, pool_id=[0, 7])))
    assert tables["events"]["pool_id"].to_list() == ["1:0", "0:7"]
    first = {**entry("alloc", 1, 1, 1), "segment_pool_id": (2, 3)}
    del first["pool_id"]
    assert read(with_trace(first))[0]["events"]["pool_id"].to_list() == ["2:3"]


def test_out_of_memory_keeps_what_the_device_had_free() -> None:
    oom = entry("oom", None, 1000 * MIB, 20, device_free=104 * MIB)
    events = read(with_trace(entry("alloc", BASE, MIB, 1), oom))[0]["events"]
    assert events["device_free"].to_list() == [None, 104 * MIB]
    assert events["requested_bytes"].to_list() == [MIB, 1000 * MIB]
    assert events["address"].to_list() == [BASE, None]


def test_unknown_actions_are_kept_and_counted() -> None:
    trace = [entry("user_defined", 0, 0, 1), entry("alloc", 1, 1, 2), entry("annotate", 1, 1, 3, user_metadata="saved")]
    tables, notes = read(with_trace(*trace, entry("defragment", 1, None, 4)))
    assert tables["events"]["action"].to_list() == ["user_defined", "alloc", "annotate", "defragment"]
    assert tables["events"]["user_metadata"].to_list() == [None, None, "saved", None]
    assert issues(notes) == {"unknown_action": 2}
    assert (notes.issues["unknown_action"].first_at, notes.issues["unknown_action"].detail) == (0, "user_defined")
    assert notes.facts["source_entries"] == 4


def test_metadata_as_text_dict_and_context() -> None:
    trace = [
        entry("alloc", 1, 1, 1, user_metadata="", compile_context="N/A"),
        entry("alloc", 2, 1, 1, user_metadata="phase=forward", compile_context="0/0"),
        entry("alloc", 3, 1, 1, user_metadata={"step": 7, "at": [1.5, None, True]}, compile_context="1/0_1"),
    ]
    events = read(with_trace(*trace))[0]["events"]
    assert events["user_metadata"].to_list() == [None, "phase=forward", '{"step": 7, "at": [1.5, null, true]}']
    assert events["compile_context"].to_list() == [None, "0/0", "1/0_1"]


def test_devices_are_kept_apart_and_filtered() -> None:
    snapshot = {"segments": [], "device_traces": [[], [entry("alloc", 1, 5, 1)], [entry("alloc", 1, 7, 1)]]}
    events = read(snapshot)[0]["events"]
    assert events.select("device_index", "requested_bytes").rows() == [(1, 5), (2, 7)]
    tables, notes = read(snapshot, filters=Filters(device="cuda:2"))
    assert tables["events"].select("device_index", "requested_bytes").rows() == [(2, 7)]
    assert notes.facts["source_entries"] == 2


def test_pinned_host_memory_is_the_cpus() -> None:
    snapshot = basic() | {
        "host_traces": [[entry("alloc", 64, 4096, 5)]],
        "host_segments": [{"device": -1, "address": 64, "total_size": 4096, "blocks": [{"address": 64, "size": 4096}]}],
    }
    tables, notes = read(snapshot)
    assert tables["events"]["device_type"].to_list() == ["cuda"] * 5 + ["cpu"]
    assert tables["events"]["device_index"][-1] == -1
    assert tables["segments"].select("device_type", "device_index", "address").rows() == [
        ("cpu", -1, 64),
        ("cuda", 0, BASE),
    ]
    assert tables["blocks"].group_by("segment_id", maintain_order=True).len().rows() == [(0, 1), (1, 3)]
    assert notes.facts["source_entries"] == 5


@pytest.mark.parametrize(
    ("frame", "device_type"),
    [
        ({"name": "c10::xpu::XPUCachingAllocator::malloc", "filename": "??", "line": 0}, "xpu"),
        ({"name": "f", "filename": "site-packages/torch/xpu/memory.py", "line": 1}, "xpu"),
        ({"name": "c10::hip::HIPCachingAllocator::malloc", "filename": "??", "line": 0}, "hip"),
        ({"name": "c10::cuda::CUDACachingAllocator::malloc", "filename": "??", "line": 0}, "cuda"),
    ],
)
def test_the_backend_is_read_from_the_stacks(frame: dict[str, Any], device_type: str) -> None:
    assert read(with_trace(entry("alloc", 1, 1, 1, frames=[frame])))[0]["events"]["device_type"].to_list() == [
        device_type
    ]


def test_stacks_are_numbered_by_content() -> None:
    other = [{"name": "backward", "filename": "model.py", "line": 11, "fx_node_op": "output"}]
    trace = [
        entry("alloc", 1, 1, 1),
        entry("alloc", 2, 1, 1, frames=other),
        entry("alloc", 3, 1, 1, frames=copy.deepcopy(FORWARD)),
        entry("alloc", 4, 1, 1, frames=[]),
        entry("alloc", 5, 1, 1, frames=["at::empty", {"line": -5}, None]),
    ]
    del (bare := entry("alloc", 6, 1, 1))["frames"]
    tables, _ = read(with_trace(*trace, bare))
    assert tables["events"]["stack_id"].to_list() == [0, 1, 0, 2, 3, None]
    nameless = {"name": "", "filename": "", "line": 0}
    assert tables["stacks"]["frames"].to_list() == [
        FORWARD,
        [{"name": "backward", "filename": "model.py", "line": 11}],
        [],
        [nameless | {"name": "at::empty"}, nameless, nameless],
    ]


def test_stacks_can_be_left_out_and_their_absence_is_said() -> None:
    tables, notes = read(basic(), filters=Filters(stacks=False))
    assert "stacks" not in tables
    assert tables["events"]["stack_id"].to_list() == [None] * 5
    assert issues(notes) == {}
    assert issues(read(with_trace(entry("alloc", 1, 1, 1, frames=[])))[1]) == {"no_stacks": 1}


def test_numbers_of_every_kind() -> None:
    trace = [
        entry("alloc", (1 << 64) - 512, 5, 1),
        entry("alloc", -512, 5, 1),
        entry("alloc", (1 << 64) + 512, 5, 1, stream=(1 << 64) - 16),
        entry("alloc", "0x400", "6", 1),  # type: ignore[arg-type]
        entry("alloc", 512, 7.0, 1),  # type: ignore[arg-type]
        entry("alloc", 1024, 1 << 70, 1),
        entry("alloc", 1024, float("nan"), 1),  # type: ignore[arg-type]
        entry("alloc", 1024, -1, 1),
        entry("alloc", 1024, 0, 1),
    ]
    tables, notes = read(with_trace(*trace))
    events = tables["events"]
    assert events["address"].to_list() == [(1 << 64) - 512, (1 << 64) - 512, 512, 1024, 512, 1024]
    assert events["requested_bytes"].to_list() == [5, 5, 5, 6, 7, 0]
    assert events["stream"].to_list() == [0, 0, -16, 0, 0, 0]
    # wide: an address, a stream and a size; odd: two texts and a fraction; without a size: 2^70 and nan
    assert issues(notes) == {"wide_integer": 2, "odd_number": 3, "missing_field": 2, "bad_record": 1, "odd_value": 1}
    assert notes.issues["wide_integer"].detail == "addr has 65 bits"
    assert (notes.issues["bad_record"].first_at, notes.issues["bad_record"].detail) == (
        7,
        "an entry has a negative size",
    )


def test_entries_that_differ_and_entries_that_are_none() -> None:
    trace = [
        None,
        entry("alloc", 1, 1, 5),
        "text",
        {"action": "alloc", "size": 2},
        {"size": 3},
        entry("alloc", 4, 1, None),
    ]
    tables, notes = read(with_trace(*trace))
    assert tables["events"].select("address", "requested_bytes", "ts_ns", "stack_id").rows() == [
        (1, 1, 5000, 0),
        (None, 2, 5000, None),
        (4, 1, 5000, 0),
    ]
    assert issues(notes) == {"bad_record": 2, "missing_field": 1, "no_times": 3}


def test_segments_without_numbers_are_summed_up_or_named() -> None:
    segment = {
        "device": 1,
        "blocks": [{"address": 64, "size": 8, "state": "active_allocated"}, {"address": 72, "size": 4}],
    }
    viewer_made = {"address": None, "total_size": 12, "blocks": [{"size": 12, "state": "inactive"}]}
    tables, notes = read({"segments": [segment, viewer_made, 7]})
    row = tables["segments"].select("device_index", "address", "total_bytes", "allocated_bytes", "active_bytes").row(0)
    assert row == (1, 64, 12, 8, 8)
    assert tables["segments"].height == 1
    assert notes.issues["missing_field"].detail == "a segment has no address or no size, or stands twice"


def test_annotations_become_spans() -> None:
    marks = [
        ("END", "begun before", 11),
        ("START", "ProfilerStep#3", 10),
        ("START", "Optimizer.step#AdamW.step", 11),
        ("END", "Optimizer.step#AdamW.step", 12),
        ("START", "never ends", 12),
        ("END", "ProfilerStep#3", 13),
    ]
    annotations = [{"stage": stage, "name": name, "device": 0, "time_us": time} for stage, name, time in marks]
    spans = read(basic() | {"external_annotations": annotations})[0]["spans"]
    assert spans.rows() == [
        ("step", "ProfilerStep#3", 10_000, 3_000),
        ("annotation", "begun before", 10_000, 1_000),
        ("annotation", "Optimizer.step#AdamW.step", 11_000, 1_000),
        ("annotation", "never ends", 12_000, 1_000),
    ]


def test_viewer_made_categories_are_kept() -> None:
    trace = [entry("alloc", 1, 1, 1, category="parameter"), entry("alloc", 2, 1, 2, category="unknown")]
    assert read(with_trace(*trace))[0]["events"]["category"].to_list() == ["parameter", None]


def test_an_overwritten_history_is_a_ring_buffer() -> None:
    overwritten = basic()
    overwritten["device_traces"][0] = overwritten["device_traces"][0][3:]
    _, notes = read(overwritten)
    assert notes.facts["ring_buffer"] is True
    assert notes.issues["ring_buffer"].detail == "1 live blocks were recorded, but their allocations are gone"
    tables, notes = read(overwritten, filters=Filters(stacks=False))
    assert notes.facts["ring_buffer"] is True
    assert "stack_id" not in tables["blocks"].columns
    late = copy.deepcopy(overwritten)
    late["segments"][0]["blocks"][1]["frames"] = []  # there before the recording began: no stack
    assert read(late)[1].facts["ring_buffer"] is False
    between = with_trace(entry("free_completed", 1, 1, 1), entry("alloc", 1, 1, 2), entry("free_requested", 1, 1, 3))
    _, notes = read(between | {"segments": late["segments"]})
    assert notes.issues["ring_buffer"].detail == "it begins in a free"
    for count, ring in ((999, False), (1000, True), (2000, True)):
        late["device_traces"] = [[entry("free_requested", number, 1, number) for number in range(count)]]
        _, notes = read(late)
        assert notes.facts["ring_buffer"] is ring
    assert notes.issues["ring_buffer"].detail == "it has exactly 2,000 entries"


def test_hostile_names_stay_data() -> None:
    name = "'; DROP TABLE events; --<script>\x1b[31m\n\x00\udcff../../etc"
    tables, _ = read(with_trace(entry("alloc", 1, 1, 1, user_metadata=name, frames=[{"name": name, "filename": name}])))
    clean = name.replace("\udcff", "\ufffd" * 3)
    assert tables["events"]["user_metadata"].to_list() == [clean]
    assert tables["stacks"]["frames"].to_list() == [[{"name": clean, "filename": clean, "line": 0}]]


def test_many_entries_come_in_batches_with_one_numbering() -> None:
    frames = [[{"name": f"f{number}", "filename": "a.py", "line": number}] for number in range(20_000)]
    trace = [entry("alloc", number, 1, number, frames=frames[number % 20_000]) for number in range(70_000)]
    tables, _ = read(with_trace(*trace))
    assert tables["events"]["address"].to_list() == list(range(70_000))
    own, late = tables["events"]["stack_id"].to_list(), tables["late_stacks"]["stack_id"].to_list()
    assert own == [number % 20_000 for number in range(65_536)] + [-2 - number for number in range(70_000 - 65_536)]
    assert late == [number % 20_000 for number in range(65_536, 70_000)]
    assert tables["stacks"].height == 20_000


# ---------------------------------------------------------------- cut and broken files

DATA = pickle.dumps(basic(), 4)


def whole_entries(data: bytes) -> int:
    """Return how many entries a cut pickle still gives; they are always the first ones, unchanged."""
    try:
        found = salvage_snapshot(data, DamagedDataError("cut", cut=True))
    except DamagedDataError:
        return 0
    entries = [one for _, trace in found.traces for one in trace]
    assert entries == basic()["device_traces"][0][: len(entries)]
    assert found.segments == basic()["segments"][: len(found.segments)]
    return len(entries)


@pytest.mark.parametrize("protocol", [1, 2, 4])
def test_a_pickle_cut_at_any_byte_keeps_every_whole_entry(protocol: int) -> None:
    data = pickle.dumps(basic(), protocol)
    counts = [whole_entries(data[:cut]) for cut in range(len(data))]
    assert counts == sorted(counts)
    assert counts[-1] == 5
    for number in range(1, 5):  # an entry counts as soon as the byte that completes it is there
        completes = counts.index(number)
        assert data[completes - 1 : completes] in (b"u", b"s")


def test_a_json_dump_cut_at_any_byte_keeps_every_whole_entry() -> None:
    snapshot = json.loads(json.dumps(basic()))
    data = json.dumps(snapshot).encode()
    counts = []
    for cut in range(1, len(data)):
        try:
            found = read_json(data[:cut])
        except DamagedDataError:
            counts.append(0)
            continue
        entries = [one for _, trace in found.traces for one in trace]
        assert entries == snapshot["device_traces"][0][: len(entries)]
        assert found.segments == snapshot["segments"][: len(found.segments)]
        assert found.cut
        counts.append(len(entries))
    assert counts == sorted(counts)
    assert counts[-1] == 5
    for number in range(1, 6):
        assert data[counts.index(number) : counts.index(number) + 1] == b"}"


@settings(max_examples=25, deadline=None)
@given(st.integers(min_value=1, max_value=len(DATA) - 1))
def test_a_cut_pickle_is_read_or_explained(cut: int) -> None:
    try:
        tables, notes = read(DATA[:cut])
    except UnreadableError as error:
        assert error.message == (
            f"'x.pickle' cannot be read: its end is missing after {cut} bytes, and no whole entry stands before it."
        )
        assert error.hint == "Copy the file again, or let the job finish writing it."
        return
    assert notes.facts["truncated"] is True
    assert (notes.issues["truncated"].first_at, notes.issues["truncated"].first_unit) == (cut, "byte")
    assert tables["segments"].height == 1


@settings(max_examples=40, deadline=None)
@given(st.integers(min_value=0, max_value=len(DATA) - 1), st.integers(min_value=0, max_value=255))
def test_a_broken_byte_is_survived(at: int, byte: int) -> None:
    broken = DATA[:at] + bytes([byte]) + DATA[at + 1 :]
    try:
        tables, _ = read(broken)
    except (UnreadableError, RefusedError) as error:
        assert error.message.startswith("'x.pickle' ")
        assert error.hint
    else:
        assert all(isinstance(frame, pl.DataFrame) for frame in tables.values())


def test_a_broken_pickle_keeps_what_is_before_the_fault() -> None:
    at = DATA.index(b"allocator_settings")
    tables, notes = read(DATA[: at + 18] + b"\xff" + DATA[at + 19 :])
    assert tables["events"].height == 5
    assert issues(notes) == {"unreadable_part": 1}
    assert notes.facts["truncated"] is False


def test_a_cut_json_dump_says_so() -> None:
    data = json.dumps(basic()).encode()
    tables, notes = read(data[: data.index(b'"free_completed"')])
    assert tables["events"]["action"].to_list() == ["segment_alloc", "alloc", "alloc", "free_requested"]
    assert issues(notes) == {"truncated": 1}


def test_json_that_is_no_snapshot() -> None:
    with pytest.raises(UnreadableError, match=r"it is a JSON file, but it holds no snapshot \(its keys: a\)"):
        read(b'{"a": 1}')
    with pytest.raises(UnreadableError, match="its end is missing after 100,000 bytes"):
        read(b"[" * 100_000)
    with pytest.raises(UnreadableError, match="it is damaged"):
        read(b'{"segments": nonsense, "device_traces": []}')


@pytest.mark.parametrize(
    ("head", "name", "ours"),
    [
        (b'{"schemaVersion": 1, "traceEvents": [', "x.json", False),
        (b'{"traceEvents": [], "segments": [', "x.json", False),
        (b'{"segments": [', "x.json", True),
        (b'[{"device": 0, "total_size": 5, "stream": 0, "blocks": [', "x.json", True),
        (b"\x80\x02}", "noname", True),
        (b"cos\nsystem\n(S'x'", "noname", True),
        (b"case\nfoo\nbar", "notes.txt", False),
        (b"hello", "x.pickle", True),
        (b"hello", "x.txt", False),
        (b"PAR1", "x.bin", False),
        (b"", "x.json", False),
    ],
)
def test_sniff(head: bytes, name: str, ours: bool) -> None:
    assert cuda_snapshot.sniff(head, name) is ours


@needs_shared
def test_real_snapshots_cut_in_the_middle() -> None:
    data = (SHARED_DATA / "snapshots" / "mobilenet_v3_small_adam_b64_oom.pickle").read_bytes()
    whole, _ = read(data)
    half, notes = read(data[: len(data) * 3 // 4])
    assert 0 < half["events"].height < whole["events"].height
    assert half["events"].equals(whole["events"].head(half["events"].height))
    assert issues(notes)["truncated"] == 1
