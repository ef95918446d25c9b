"""Allocations of one device, checked by hand: pairing, inferred rows, levels, and what is reported."""

from __future__ import annotations

import numpy as np
import polars as pl
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ingest.histories import MIB, counts, device_events, final_state, history_of, levels, shown
from xmem.ingest.matching import Rows, pair_by_key, pair_by_size


def test_address_lives_three_times():
    history, notes = history_of(device_events([("A", 8, 10), ("R", 8, 10)] * 3))
    assert [row[3] for row in shown(history)] == [0, 0, 1, 1, 2, 2]
    assert levels(history) == [10, 0] * 3
    assert history.events["end_row"].to_list() == [1, -1, 3, -1, 5, -1]
    assert counts(notes) == {}
    assert history.start.complete_history


def test_memory_from_before_stands_at_the_start_in_address_order():
    events = device_events([("A", 5, 1), ("R", 9, 4), ("R", 7, 2), ("R", 5, 1)])
    history, notes = history_of(events)
    assert shown(history) == [
        ("A", 7, 2, 0, True),
        ("A", 9, 4, 1, True),
        ("A", 5, 1, 2, False),
        ("R", 9, 4, 1, False),
        ("R", 7, 2, 0, False),
        ("R", 5, 1, 2, False),
    ]
    assert levels(history) == [2, 6, 7, 3, 1, 0]
    assert history.events["ts_ns"].to_list() == [0, 0, 0, 1000, 2000, 3000]
    assert counts(notes) == {"unmatched_free": 2, "preexisting_memory": 2}
    assert notes.issues["preexisting_memory"].detail == "cuda:0: 6 bytes in 2 blocks"
    assert history.start.baseline_bytes == 6
    assert not history.start.complete_history


def test_lost_free_is_closed_before_the_second_alloc():
    history, notes = history_of(device_events([("A", 8, 10), ("A", 3, 1), ("A", 8, 20), ("R", 8, 20)]))
    assert shown(history) == [
        ("A", 8, 10, 0, False),
        ("A", 3, 1, 1, False),
        ("R", 8, 10, 0, True),
        ("A", 8, 20, 2, False),
        ("R", 8, 20, 2, False),
    ]
    assert history.events["ts_ns"].to_list() == [0, 1000, 2000, 2000, 3000]
    assert levels(history) == [10, 11, 1, 21, 1]
    assert counts(notes) == {"lost_free": 1}


def test_lost_free_of_a_snapshot_also_completes():
    rows = [("A", 8, 512), ("R", 8, 512), ("C", 8, 512), ("A", 8, 512), ("A", 8, 1024)]
    history, notes = history_of(device_events(rows, blocks=False), ordered=True)
    assert [row[0] for row in shown(history)] == ["A", "R", "C", "A", "R", "C", "A"]
    assert [row[4] for row in shown(history)] == [False] * 4 + [True, True, False]
    assert levels(history, "active_bytes") == [512, 512, 0, 512, 512, 0, 1024]
    assert counts(notes) == {"lost_free": 1}


def test_lost_alloc_is_opened_just_before_its_free():
    history, notes = history_of(device_events([("A", 8, 1), ("R", 8, 1), ("R", 8, 5)]))
    assert shown(history) == [
        ("A", 8, 1, 0, False),
        ("R", 8, 1, 0, False),
        ("A", 8, 5, 1, True),
        ("R", 8, 5, 1, False),
    ]
    assert levels(history) == [1, 0, 5, 0]
    assert history.start.baseline_bytes == 0
    assert counts(notes) == {"unmatched_free": 1}


def test_free_of_another_size_is_another_allocation():
    history, notes = history_of(device_events([("A", 8, 1), ("R", 8, 5)]))
    assert [row[:3] for row in shown(history)] == [("A", 8, 1), ("R", 8, 1), ("A", 8, 5), ("R", 8, 5)]
    assert counts(notes) == {"lost_free": 1, "unmatched_free": 1}


def test_snapshot_keeps_a_free_of_another_size_and_takes_the_allocs():
    history, _ = history_of(device_events([("A", 8, 1), ("R", 8, 5)], blocks=False), ordered=True)
    assert shown(history) == [("A", 8, 1, 0, False), ("R", 8, 1, 0, False)]


def test_baseline_beyond_what_addresses_tell_is_one_row_without_address():
    history, notes = history_of(device_events([("A", 8, 10, 110), ("R", 9, 30, 80), ("R", 8, 10, 70)]))
    assert shown(history)[:2] == [("A", 9, 30, 0, True), ("A", None, 70, 1, True)]
    assert levels(history) == [30, 100, 110, 80, 70]
    assert history.start.baseline_bytes == 100
    assert counts(notes) == {"unmatched_free": 1, "preexisting_memory": 2}


def test_totals_below_zero_are_shifted():
    history, notes = history_of(device_events([("R", 9, 8, -8), ("A", 8, 2, -6)]))
    assert levels(history) == [8, 0, 2]
    assert counts(notes) == {"negative_total": 2, "unmatched_free": 1, "preexisting_memory": 1}
    assert notes.issues["negative_total"].detail == "cuda:0: shifted up by 8 bytes"


def test_total_that_differs_is_reported_with_its_first_place():
    history, notes = history_of(device_events([("A", 8, 10, 10), ("A", 9, 5, 15), ("R", 8, 10, 6), ("R", 9, 5, 0)]))
    assert levels(history) == [10, 15, 5, 0]
    issue = notes.issues["total_mismatch"]
    assert (issue.count, issue.first_at, issue.first_unit) == (1, 2, "seq")
    assert issue.detail == "cuda:0: recorded 6, events give 5 bytes"


def test_cpu_totals_say_nothing_about_the_start_and_keep_lost_frees():
    rows = [("A", 8, 10, 1010), ("A", 8, 5, 1015), ("R", 8, 5, 1010)]
    history, notes = history_of(device_events(rows, device="cpu"))
    assert levels(history) == [10, 0, 5, 0]
    assert counts(notes) == {"lost_free": 1}
    assert history.start.baseline_bytes == 0


def test_useless_addresses_fall_back_to_sizes_and_totals():
    rows = [("A", 4, 10, 110), ("R", 4, 100, 10), ("R", 4, 10, 0)]
    history, notes = history_of(device_events(rows))
    assert [(row[0], row[2], row[3]) for row in shown(history)] == [
        ("A", 100, 0),
        ("A", 10, 1),
        ("R", 100, 0),
        ("R", 10, 1),
    ]
    assert levels(history) == [100, 110, 10, 0]
    assert counts(notes) == {"useless_addresses": 3, "unmatched_free": 1, "preexisting_memory": 1}


def test_stack_addresses_that_never_match_are_useless():
    rows = [row for place in range(30) for row in (("A", 100 + place, 64), ("R", 500 + place, 64))]
    history, notes = history_of(device_events(rows))
    assert counts(notes) == {"useless_addresses": 60}
    assert levels(history) == [64, 0] * 30


def test_no_addresses_pair_the_newest_of_one_size():
    rows = [("A", None, 4), ("A", None, 4), ("R", None, 4), ("R", None, 8), ("R", None, 4)]
    history, notes = history_of(device_events(rows))
    assert [row[:4] for row in shown(history)] == [
        ("A", None, 8, 0),
        ("A", None, 4, 1),
        ("A", None, 4, 2),
        ("R", None, 4, 2),
        ("R", None, 8, 0),
        ("R", None, 4, 1),
    ]
    assert counts(notes) == {"no_addresses": 5, "unmatched_free": 1, "preexisting_memory": 1}
    assert notes.issues["no_addresses"].detail == "cuda:0: 5 events, and no totals"


def test_source_without_lifetimes_keeps_its_sums():
    history, notes = history_of(device_events([("A", None, 4), ("A", None, 4), ("R", None, 8)]), pairing="none")
    assert levels(history) == [4, 8, 0]
    assert [row[3] for row in shown(history)] == [-1, -1, -1]
    assert counts(notes) == {}


def test_numbers_of_the_source_pair():
    events = device_events([("A", None, 4), ("A", None, 4), ("R", None, 4)]).with_columns(
        alloc_id=pl.Series([17, 3, 17])
    )
    history, notes = history_of(events, pairing="given")
    assert [row[3] for row in shown(history)] == [0, 1, 0]
    assert counts(notes) == {}


def test_final_blocks_that_history_never_names_were_there_before():
    state = final_state(
        (1000, 400, [(1000, 100, "active_allocated"), (1100, 300, "inactive")]),
        (2000, 400, [(2000, 400, "active_allocated")]),
    )
    rows = [("A", 1000, 100), ("R", 1100, 60), ("C", 1100, 60)]
    history, notes = history_of(device_events(rows, blocks=False), ordered=True, **state)
    assert shown(history) == [
        ("SA", 1000, 400, -1, True),
        ("A", 1100, 60, 0, True),
        ("SA", 2000, 400, -1, True),
        ("A", 2000, 400, 1, True),
        ("A", 1000, 100, 2, False),
        ("R", 1100, 60, 0, False),
        ("C", 1100, 60, 0, False),
    ]
    assert levels(history) == [0, 60, 60, 460, 560, 500, 500]
    assert levels(history, "reserved_bytes") == [400, 400, 800, 800, 800, 800, 800]
    assert history.block_groups.tolist() == [0, -1, 2]
    assert history.start.baseline_reserved_bytes == 800
    assert counts(notes) == {"unmatched_free": 1, "preexisting_memory": 2}


def test_block_sizes_come_from_the_end_and_from_rounding():
    state = final_state((0x1000, 4096, [(0x1000, 2048, "active_allocated"), (0x1800, 2048, "inactive")]))
    rows = [("SA", 0x1000, 4096), ("A", 0x1000, 1500), ("A", 0x1800, 700), ("R", 0x1800, 700), ("C", 0x1800, 700)]
    history, _ = history_of(device_events(rows, blocks=False), ordered=True, rounded=True, **state)
    assert history.events["block_bytes"].to_list() == [None, 2048, 1024, 1024, 1024]
    assert history.events["requested_bytes"].to_list() == [4096, 1500, 700, 700, 700]
    assert levels(history) == [0, 2048, 3072, 2048, 2048]
    assert history.start.complete_history


def test_skipped_free_completed_counts_at_the_request():
    state = final_state((8, 20, [(8, 10, "inactive"), (18, 10, "active_allocated")]))
    rows = [("SA", 8, 20), ("A", 8, 10), ("A", 18, 10), ("R", 8, 10)]
    history, notes = history_of(device_events(rows, blocks=False), ordered=True, **state)
    assert levels(history, "active_bytes") == [0, 10, 20, 10]
    assert counts(notes) == {"skipped_actions": 1}
    assert notes.issues["skipped_actions"].detail == "cuda:0: no free_completed"


def test_skipped_free_requested_counts_at_the_completion():
    state = final_state((8, 20, [(8, 20, "inactive")]))
    rows = [("SA", 8, 20), ("A", 8, 10), ("C", 8, 10)]
    history, notes = history_of(device_events(rows, blocks=False), ordered=True, **state)
    assert levels(history) == [0, 10, 0]
    assert counts(notes) == {"skipped_actions": 1}
    assert notes.issues["skipped_actions"].detail == "cuda:0: no free_requested"


def test_pending_block_is_active_and_not_allocated():
    state = final_state((8, 20, [(8, 10, "active_pending_free"), (18, 10, "active_allocated")]))
    rows = [("SA", 8, 20), ("A", 8, 10), ("A", 18, 10), ("R", 8, 10)]
    history, notes = history_of(device_events(rows, blocks=False), ordered=True, **state)
    assert levels(history)[-1] == 10
    assert levels(history, "active_bytes")[-1] == 20
    assert counts(notes) == {"pending_free": 1}


def test_block_that_was_pending_before_the_recording():
    state = final_state((8, 20, [(8, 10, "active_pending_free"), (18, 10, "inactive")]))
    history, _ = history_of(device_events([("X", None, 0)], blocks=False), ordered=True, **state)
    assert [row[0] for row in shown(history)] == ["SA", "A", "R", "X"]
    assert levels(history)[-1] == 0
    assert levels(history, "active_bytes")[-1] == 10


def test_state_that_contradicts_history_is_reported():
    state = final_state((8, 20, [(8, 10, "active_allocated"), (18, 10, "inactive")]))
    rows = [("SA", 8, 20), ("A", 8, 10), ("R", 8, 10), ("C", 8, 10), ("A", 18, 10)]
    history, notes = history_of(device_events(rows, blocks=False), ordered=True, **state)
    assert shown(history)[-1] == ("A", 8, 10, 2, True)
    assert counts(notes)["state_mismatch"] == 2
    assert not history.start.complete_history


def test_ring_buffer_that_begins_between_request_and_completion():
    rows = [("C", 8, 10), ("A", 9, 5), ("R", 9, 5), ("C", 9, 5)]
    history, _ = history_of(device_events(rows, blocks=False), ordered=True)
    assert [(row[0], row[1], row[4]) for row in shown(history)][:3] == [("A", 8, True), ("R", 8, True), ("C", 8, False)]
    assert levels(history) == [10, 0, 0, 5, 0, 0]
    assert levels(history, "active_bytes") == [10, 10, 0, 5, 5, 0]
    assert history.start.baseline_bytes == 0


def test_segments_freed_without_an_alloc_were_there_before():
    rows = [("SF", 100, 50), ("SA", 100, 70), ("SF", 300, 20)]
    history, notes = history_of(device_events(rows, blocks=False), ordered=True)
    assert [row[:3] for row in shown(history)][:2] == [("SA", 100, 50), ("SA", 300, 20)]
    assert levels(history, "reserved_bytes") == [50, 70, 20, 90, 70]
    assert counts(notes) == {}


def test_mapped_ranges_from_before_are_pieced_together():
    state = final_state((0, 40, [(0, 40, "inactive")]), expandable=True)
    rows = [("SU", 40, 20), ("SM", 20, 20), ("SU", 80, 10)]
    history, notes = history_of(device_events(rows, blocks=False), ordered=True, **state)
    assert [row[:3] for row in shown(history)][:3] == [("SM", 0, 20), ("SM", 40, 20), ("SM", 80, 10)]
    assert levels(history, "reserved_bytes") == [20, 40, 50, 30, 50, 40]
    assert counts(notes) == {}


def test_more_than_the_device_has_is_reported():
    history, notes = history_of(device_events([("A", 8, 10), ("A", 9, 10)]), total_bytes=15)
    assert counts(notes) == {"above_device_total": 1}
    assert notes.issues["above_device_total"].detail == "cuda:0: 20 bytes allocated of 15 bytes"
    assert levels(history) == [10, 20]


def test_cache_from_before_makes_a_history_incomplete():
    events = device_events([("A", 8, 512, 512)]).with_columns(total_reserved=pl.lit(64 * MIB))
    assert not history_of(events)[0].start.complete_history
    fresh = device_events([("A", 8, 512, 512)]).with_columns(total_reserved=pl.lit(2 * MIB))
    assert history_of(fresh)[0].start.complete_history


@st.composite
def recordings(draw):
    """Draw true events of a device, and drop some of them."""
    live: dict[int, int] = {}
    rows = []
    for _ in range(draw(st.integers(1, 40))):
        address = draw(st.integers(1, 6))
        if address in live:
            rows.append(("R", address, live.pop(address)))
        else:
            live[address] = draw(st.integers(1, 4))
            rows.append(("A", address, live[address]))
    dropped = draw(st.sets(st.integers(0, len(rows) - 1), max_size=len(rows) - 1))
    return [row for place, row in enumerate(rows) if place not in dropped]


@settings(max_examples=60, deadline=None)
@given(recordings())
def test_whatever_is_lost_levels_hold_and_lives_do_not_overlap(rows):
    history, _ = history_of(device_events(rows, blocks=False), ordered=True)
    live: dict[int, int] = {}
    level = 0
    for (word, address, size, group, _), after in zip(shown(history), levels(history), strict=True):
        if word == "A":
            assert address not in live
            live[address] = group
            level += size
        else:
            assert live.pop(address) == group
            level -= size
        assert level == after >= 0
    assert [row[:2] for row in shown(history) if not row[4]] == [row[:2] for row in rows]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 3)), max_size=40))
def test_pairing_by_size_is_a_stack_for_each_size(rows):
    size = np.array([row[1] for row in rows], dtype=np.int64)
    action = np.array([0 if row[0] else 1 for row in rows], dtype=np.int8)
    none = np.zeros(len(rows), dtype=np.int64)
    pairing = pair_by_size(Rows(action, none, none.astype(bool), size, none), all_rows=True)
    stacks: dict[int, list[int]] = {}
    expected = {}
    for place, (is_alloc, of) in enumerate(rows):
        if is_alloc:
            stacks.setdefault(of, []).append(place)
        elif stacks.get(of):
            expected[place] = stacks[of].pop()
    found = {int(free): int(alloc) for alloc, free in zip(pairing.alloc, pairing.requested, strict=True) if free >= 0}
    assert {free: alloc for free, alloc in found.items() if alloc >= 0} == expected
    assert pairing.before.tolist() == (pairing.alloc < 0).tolist()


def test_pairing_of_no_rows():
    none = np.zeros(0, dtype=np.int64)
    rows = Rows(none.astype(np.int8), none, none.astype(bool), none, none)
    assert pair_by_key(rows, sizes_agree=True).count == 0
    assert pair_by_size(rows, all_rows=True).count == 0
