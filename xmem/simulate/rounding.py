"""From the bytes asked for to the size of a block and of a new segment."""

from __future__ import annotations

from xmem.simulate.torch_version import Version

MIB = 1 << 20
MIN_BLOCK = 512
#: Largest size that the small pool serves, and the size of its segments.
SMALL_SIZE = MIB
SMALL_SEGMENT = 2 * MIB
#: From here on a request gets a segment of its own, rounded up to LARGE_ROUNDING.
DIRECT_SIZE = 10 * MIB
LARGE_ROUNDING = 2 * MIB
#: Requests from here on fail without any search.
IMPOSSIBLE_SIZE = 1 << 60


def round_size(size: int, divisions: tuple[int, ...], version: Version) -> int:
    """Return the block size for a request; `divisions` is the table of roundup_power2_divisions."""
    if size < MIN_BLOCK:
        return MIN_BLOCK
    count = divisions[min(max(size.bit_length() - 21, 0), 15)]
    if count == 1 and version <= (2, 3):
        return size  # the table's 1 meant "as asked for", not even a multiple of 512 (seen in 2.3.1, gone in 2.6.0)
    if count > 1 and size > MIN_BLOCK * count:
        return _round_to_division(size, count)
    return -(-size // MIN_BLOCK) * MIN_BLOCK


def segment_size(rounded: int, large_segment: int) -> int:
    """Return the size of the segment that a block of `rounded` bytes is cut from."""
    if rounded <= SMALL_SIZE:
        return SMALL_SEGMENT
    if rounded < DIRECT_SIZE:
        return large_segment
    return -(-rounded // LARGE_ROUNDING) * LARGE_ROUNDING


def _round_to_division(size: int, count: int) -> int:
    power = 1 << (size.bit_length() - 1)
    if power == size:
        return size
    step = power >> (count.bit_length() - 1)
    return -(-size // step) * step if step else 2 * power
