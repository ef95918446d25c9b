"""Replays held against recordings of the real allocator: every segment, its size, its order and its request."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.paths import SHARED_DATA, needs_shared
from tests.simulate.stores import MIB, event, make_store
from xmem.ingest import IngestOptions, ingest
from xmem.simulate import SimulateOptions, compare_recorded, simulate
from xmem.simulate.compare import CAUSES, SegmentCall

#: Recordings from a device's first allocation on, with the number of segment events in each.
COMPLETE = {
    "snapshots/gpt_small_adamw_b4_a100.pickle": 30,
    "snapshots/gpt_small_adamw_b4_expandable.pickle": 30,
    "snapshots/mobilenet_v3_small_adam_b64_oom.pickle": 25,
    "snapshots/resnet18_sgd_b32_rtx3060.pickle": 44,
    "corpus/shreyansh26-MLSys-Experiments__model_memory_usage__profile_grad.pkl": 7,
    "corpus/silmont2000-assignment2-systems__mem_snapshot.pickle": 9,
}


@needs_shared
@pytest.mark.parametrize("name", COMPLETE)
def test_complete_recordings_are_reproduced(name: str, tmp_path: Path) -> None:
    ingest([SHARED_DATA / name], options=IngestOptions(store=tmp_path))
    comparison = compare_recorded(store=tmp_path)
    assert comparison.equal, comparison.sentence
    assert comparison.recorded_count == comparison.replayed_count == COMPLETE[name]
    assert comparison.sentence == f"All {COMPLETE[name]} recorded segment events are reproduced."


#: Recordings that begin later: what was there before is rebuilt from the snapshot's segments and blocks.
LATER = {
    "Maphsge4-select_n__snapshot.ec5be110.pickle": (1163, "2.1"),
    "MercuryB1-SQAttn__cuda_memory_snapshot.pickle": (840, "2.5"),
    "kkaitlyn111-cs336-a2-systems__memory_2.7b_forward.pickle": (920, "2.6"),
    "kkaitlyn111-cs336-a2-systems__memory_ctx128_fullstep.pickle": (494, "2.6"),
    "Wedsonlin-assignment2-systems__results__medium_128_training_memory_snapshot.pickle": (0, "2.11"),
    "silmont2000-assignment2-systems__memory_forward_bf16_128.pickle": (0, "2.6"),
}


@needs_shared
@pytest.mark.parametrize("name", LATER)
def test_later_recordings_are_reproduced_from_the_state_they_began_in(name: str, tmp_path: Path) -> None:
    count, version = LATER[name]
    ingest([SHARED_DATA / "corpus" / name], options=IngestOptions(store=tmp_path))
    comparison = compare_recorded(store=tmp_path, options=SimulateOptions(torch_version=version))
    assert comparison.equal, comparison.sentence
    assert comparison.recorded_count == count


@needs_shared
def test_a_version_that_is_not_the_recorded_one_is_named(tmp_path: Path) -> None:
    name = "MercuryB1-SQAttn__cuda_memory_snapshot.pickle"
    ingest([SHARED_DATA / "corpus" / name], options=IngestOptions(store=tmp_path))
    comparison = compare_recorded(store=tmp_path, options=SimulateOptions(torch_version="2.14"))
    assert (comparison.equal, comparison.cause, comparison.torch_version) == (False, "other_version", "2.6")
    assert comparison.sentence.startswith(
        "The replay is equal under the rules of another torch version. Equal with torch 2.6 and settings 'none'."
        " First difference at segment event "
    )


@needs_shared
def test_the_versions_that_the_authors_used_give_the_same(tmp_path: Path) -> None:
    name = "corpus/silmont2000-assignment2-systems__mem_snapshot.pickle"
    ingest([SHARED_DATA / name], options=IngestOptions(store=tmp_path))
    assert compare_recorded(store=tmp_path, options=SimulateOptions(torch_version="2.6")).equal


@needs_shared
def test_a_recorded_out_of_memory_error_comes_again_on_the_same_device(tmp_path: Path) -> None:
    """The device held 600 MiB at the most; on that size the first failure is the recorded one, and all 14 follow."""
    ingest([SHARED_DATA / "snapshots/mobilenet_v3_small_adam_b64_oom.pickle"], options=IngestOptions(store=tmp_path))
    verdict = simulate(gpu="600MiB", store=tmp_path, options=SimulateOptions(non_torch=0, keep=False))
    assert not verdict.fits
    assert verdict.num_ooms == 14
    assert verdict.oom is not None
    assert verdict.oom.recorded
    assert verdict.oom.requested_bytes == 14088192
    assert verdict.recorded_peak_reserved_bytes == 600 * MIB


def test_the_first_difference_is_shown_with_its_cause(tmp_path: Path) -> None:
    """By hand: the recording claims a segment of 24 MiB where torch makes one of 20 MiB."""
    events = [event("segment_alloc", None, 24 * MIB), event("alloc", 0, 4 * MIB)]
    comparison = compare_recorded(store=make_store(tmp_path / "a", events).path)
    assert not comparison.equal
    assert (comparison.position, comparison.cause) == (0, "unexplained")
    assert comparison.recorded == SegmentCall(1, "segment_alloc", 24 * MIB)
    assert comparison.replayed == SegmentCall(1, "segment_alloc", 20 * MIB)
    assert comparison.sentence == (
        "The cause is not known. First difference at segment event 0: recorded segment_alloc of 25165824 bytes for"
        " seq 1, replayed segment_alloc of 20971520 bytes for seq 1."
    )
    older = make_store(tmp_path / "b", events, device={"complete_history": False})
    assert compare_recorded(store=older.path).cause == "missing_history"
    cut = make_store(tmp_path / "c", events, run={"truncated": True})
    assert compare_recorded(store=cut.path).cause == "lost_entries"


def test_settings_that_other_versions_do_not_know_are_no_obstacle(tmp_path: Path) -> None:
    events = [event("segment_alloc", None, 24 * MIB), event("alloc", 0, 4 * MIB)]
    options = SimulateOptions(alloc_conf="large_segment_size_mb:40")
    comparison = compare_recorded(store=make_store(tmp_path, events).path, options=options)
    assert (comparison.equal, comparison.cause) == (False, "unexplained")


def test_a_segment_at_another_request_is_a_difference(tmp_path: Path) -> None:
    events = [event("alloc", 0, 4 * MIB), event("segment_alloc", None, 20 * MIB), event("alloc", 1, 4 * MIB)]
    comparison = compare_recorded(store=make_store(tmp_path, events).path)
    assert (comparison.recorded, comparison.replayed) == (
        SegmentCall(2, "segment_alloc", 20 * MIB),
        SegmentCall(0, "segment_alloc", 20 * MIB),
    )


def test_expandable_segments_that_no_setting_mentions_are_found_out(tmp_path: Path) -> None:
    events = [event("segment_map", None, 20 * MIB), event("alloc", 0, 4 * MIB)]
    comparison = compare_recorded(store=make_store(tmp_path, events).path)
    assert (comparison.equal, comparison.cause) == (False, "other_settings")
    assert comparison.alloc_conf == "expandable_segments:True"
    assert comparison.sentence.startswith(CAUSES["other_settings"])


def test_a_recording_without_segments_cannot_be_compared(tmp_path: Path) -> None:
    comparison = compare_recorded(store=make_store(tmp_path, [event("alloc", 0, MIB)]).path)
    assert (comparison.equal, comparison.cause, comparison.position) == (False, "no_segments", None)
    assert comparison.sentence == CAUSES["no_segments"]


@needs_shared
def test_a_state_without_history_cannot_be_compared(tmp_path: Path) -> None:
    ingest([SHARED_DATA / "corpus" / "Maphsge4-select_n__snapshot.pickle"], options=IngestOptions(store=tmp_path))
    comparison = compare_recorded(store=tmp_path)
    assert (comparison.equal, comparison.cause) == (False, "no_history")
    assert comparison.sentence == CAUSES["no_history"]


def test_no_segments_on_either_side_is_said_plainly(tmp_path: Path) -> None:
    events = [
        event("segment_alloc", None, 20 * MIB, inferred=True, address=1 << 30),
        event("alloc", 0, 4 * MIB, inferred=True, address=1 << 30),
        event("alloc", 1, 4 * MIB, address=(1 << 30) + 4 * MIB),
    ]
    store = make_store(tmp_path, events, device={"complete_history": False})
    comparison = compare_recorded(store=store.path)
    assert comparison.equal
    assert comparison.sentence == "No segment was made or given back, neither in the recording nor in the replay."


def test_the_state_at_the_start_is_rebuilt_block_by_block(tmp_path: Path) -> None:
    """By hand: a segment of 20 MiB holds 4 MiB at 8 MiB; 8 MiB fit before it, 8 after it, and then nothing."""
    base = 1 << 30
    events = [
        event("segment_alloc", None, 20 * MIB, inferred=True, address=base),
        event("alloc", 0, 4 * MIB, inferred=True, address=base + 8 * MIB),
        event("alloc", 1, 8 * MIB, address=base),
        event("alloc", 2, 8 * MIB, address=base + 12 * MIB),
        event("segment_alloc", None, 20 * MIB, address=base + 64 * MIB),
        event("alloc", 3, 2 * MIB, address=base + 64 * MIB),
    ]
    store = make_store(tmp_path, events, device={"complete_history": False})
    comparison = compare_recorded(store=store.path)
    assert comparison.equal, comparison.sentence
    assert comparison.recorded_count == 1
