"""Requests of a run through the allocator of another torch."""

from __future__ import annotations

from xmem.capture.vgpu.farm import Peaks
from xmem.capture.vgpu.settings import VirtualGpu
from xmem.evaluate.other_torch import encode_requests, peaks_under
from xmem.evaluate.virtual import card_of
from xmem.simulate.allocator import ALLOC, FREE
from xmem.units import GIB, MIB

GPU = VirtualGpu(card_of(""), 8 * GIB, GIB)
#: Two free blocks of one size, one of them beside what is freed next; whoever takes it leaves no room for the last.
TIED = [40 * MIB, -1, 20 * MIB, 20 * MIB, 20 * MIB, -3, -4, 12 * MIB, -2, 40 * MIB]


def ran(requests: list[int], *, oom: bool = False) -> Peaks:
    return Peaks(oom, 7 * MIB, 6 * MIB, 5 * MIB, 4 * MIB, 0, requests=requests)


def test_requests_become_columns() -> None:
    encoded = encode_requests([512, 1024, -1, 512, -2])
    assert encoded.codes.tolist() == [ALLOC, ALLOC, FREE, ALLOC, FREE]
    assert encoded.slots.tolist() == [0, 1, 0, 2, 1]
    assert encoded.sizes.tolist() == [512, 1024, 0, 512, 0]
    assert encoded.slot_count == 3


def test_peaks_are_those_of_the_other_allocator() -> None:
    found = peaks_under(ran([30 * MIB, -1, 10 * MIB, 10 * MIB]), GPU, "2.6.0", "down")
    assert (found.oom, found.peak_reserved_bytes, found.peak_allocated_bytes) == (False, 30 * MIB, 30 * MIB)
    assert found.setup_reserved_bytes == 5 * MIB and found.requests == []


def test_which_of_two_equal_blocks_is_taken_depends_on_the_version() -> None:
    peaks = {
        (version, order): peaks_under(ran(TIED), GPU, version, order).peak_reserved_bytes // MIB
        for version in ("2.6.0", "2.14.1")
        for order in ("down", "up")
    }
    assert peaks == {("2.6.0", "down"): 60, ("2.6.0", "up"): 100, ("2.14.1", "down"): 100, ("2.14.1", "up"): 100}


def test_a_card_that_is_too_small_is_out_of_memory_and_shows_what_would_be_reserved() -> None:
    found = peaks_under(ran([6 * GIB, 2 * GIB]), GPU, "2.6.0", "down")
    assert found.oom and found.peak_reserved_bytes == 8 * GIB


def test_a_run_that_ended_early_keeps_its_own_peaks() -> None:
    assert peaks_under(ran([GIB], oom=True), GPU, "2.6.0", "down") == ran([], oom=True)
    assert peaks_under(ran([]), GPU, "2.6.0", "down") == ran([])
