"""Sizes and durations: what people write is what is computed, to the byte."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xmem.errors import UsageError
from xmem.units import format_bytes, format_ns, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1048576", 1 << 20),
        ("1_048_576", 1 << 20),
        ("512 B", 512),
        ("1KiB", 1024),
        ("1kb", 1000),
        ("20MiB", 20 << 20),
        ("20 mb", 20_000_000),
        ("24GiB", 24 << 30),
        ("24GB", 24_000_000_000),
        ("24g", 24_000_000_000),
        ("23.6GiB", 25_340_307_046),
        ("0.4GiB", 429_496_729),
        (".5KiB", 512),
        ("12e9", 12_000_000_000),
        ("1.5e3", 1500),
        ("2TiB", 2 << 40),
        ("9223372036854775807", (1 << 63) - 1),
    ],
)
def test_sizes_are_read_to_the_byte(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 PiB", "1.2.3", "0x10", "1e", "nan", "inf", "24 GiB more", "1e-3"])
def test_what_is_no_size_is_refused_with_the_way_out(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_bytes(text, what="--headroom")
    assert caught.value.message == f"--headroom {text!r} is not a number of bytes."
    assert caught.value.hint == "Write it like 23.6GiB, 512MiB, 24GB (10^9) or 25769803776."


def test_a_size_past_63_bits_is_refused() -> None:
    with pytest.raises(UsageError) as caught:
        parse_bytes("9223372036854775808")
    assert caught.value.message == "size '9223372036854775808' is more than 2^63 bytes."
    assert caught.value.hint == "Check the unit: GiB is 2^30 bytes."


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (None, "unknown"),
        (0, "0 bytes"),
        (1, "1 byte"),
        (-1, "-1 byte"),
        (1023, "1023 bytes"),
        (1024, "1.00 KiB"),
        (512 << 10, "512.00 KiB"),
        (1 << 20, "1.00 MiB"),
        (25_769_803_776, "24.00 GiB"),
        (-(1 << 30), "-1.00 GiB"),
        (1 << 43, "8,192.00 GiB"),
    ],
)
def test_bytes_are_shown_as_pytorch_shows_them(size: int | None, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("duration", "text"),
    [
        (None, "unknown"),
        (0, "0 ns"),
        (999, "999 ns"),
        (7_890, "7.89 us"),
        (45_600_000, "45.6 ms"),
        (1_230_000_000, "1.23 s"),
    ],
)
def test_durations_are_shown_with_three_digits(duration: int | None, text: str) -> None:
    assert format_ns(duration) == text


@given(st.integers(min_value=0, max_value=(1 << 63) - 1))
def test_an_integer_reads_back_as_itself(size: int) -> None:
    assert parse_bytes(str(size)) == size


@given(st.integers(min_value=0, max_value=1 << 33))
def test_whole_kibibytes_read_back_as_themselves(kibibytes: int) -> None:
    assert parse_bytes(f"{kibibytes}KiB") == kibibytes * 1024
