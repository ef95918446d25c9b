"""Sizes: the block for a request and the segment for a block."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xmem.simulate.rounding import round_size, segment_size

MIB = 1 << 20
NONE = (0,) * 16


@pytest.mark.parametrize(
    ("size", "block"),
    [(1, 512), (511, 512), (512, 512), (513, 1024), (MIB - 1, MIB), (MIB + 1, MIB + 512), (10 * MIB, 10 * MIB)],
)
def test_multiples_of_512(size: int, block: int) -> None:
    assert round_size(size, NONE, (2, 14)) == block


@pytest.mark.parametrize(
    ("size", "count", "block"),
    [
        (1200 * MIB, 4, 1280 * MIB),
        (1024 * MIB, 4, 1024 * MIB),
        (1025 * MIB, 4, 1280 * MIB),
        (1025 * MIB, 16, 1088 * MIB),
        (3000, 4, 3072),
        (2000, 4, 2048),  # not above 512 * 4: the ordinary rule
        (5 * MIB + 1, 1, 5 * MIB + 512),
    ],
)
def test_divisions(size: int, count: int, block: int) -> None:
    assert round_size(size, (count,) * 16, (2, 14)) == block


def test_the_entry_of_a_size() -> None:
    table = tuple(1 << index for index in range(16))
    assert round_size(3 * MIB + 5, table, (2, 14)) == 3 * MIB + MIB * 0 + MIB  # entry 1: two steps of 1 MiB above 2 MiB
    assert (
        round_size(100 * 1024 * MIB + 1, table, (2, 14)) == 100 * 1024 * MIB + 2 * MIB
    )  # the last entry serves all above


def test_a_division_of_1_left_sizes_alone_up_to_2_3() -> None:
    assert round_size(5 * MIB + 1, (1,) * 16, (2, 3)) == 5 * MIB + 1
    assert round_size(5 * MIB + 1, (1,) * 16, (2, 6)) == 5 * MIB + 512


@pytest.mark.parametrize(
    ("block", "segment"),
    [
        (512, 2 * MIB), (MIB, 2 * MIB), (MIB + 512, 20 * MIB), (10 * MIB - 512, 20 * MIB), (10 * MIB, 10 * MIB),
        (10 * MIB + 512, 12 * MIB), (33 * MIB, 34 * MIB),
    ],
)  # fmt: skip
def test_segments(block: int, segment: int) -> None:
    assert segment_size(block, 20 * MIB) == segment


@given(st.integers(1, 1 << 40), st.sampled_from([0, 1, 2, 4, 8, 16, 64]))
def test_a_block_holds_the_request_and_rounding_it_again_changes_nothing(size: int, count: int) -> None:
    block = round_size(size, (count,) * 16, (2, 14))
    assert block >= size and block % 512 == 0
    assert round_size(block, (count,) * 16, (2, 14)) == block
    assert segment_size(block, 20 * MIB) >= block
