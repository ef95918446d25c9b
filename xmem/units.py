"""Bytes as people write and read them: "24GiB" to an integer and back; the only place that knows units."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

from xmem.errors import UsageError

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

_FACTORS = {
    "": 1, "b": 1,
    "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9, "t": 10**12, "tb": 10**12,
    "kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB,
}  # fmt: skip
_SIZE = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]*)?(?:[eE][+]?[0-9]{1,3})?|\.[0-9]+)\s*([A-Za-z]*)\s*")
_LARGEST = 1 << 63


def parse_bytes(text: str, *, what: str = "size") -> int:
    """Turn `"23.6GiB"`, `"24GB"` (10**9), `"12e9"` or `"1048576"` into bytes.

    A fraction of a byte is cut off. Raises UsageError where the text is no size or is 2**63 bytes and more.
    """
    match = _SIZE.fullmatch(text)
    factor = _FACTORS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise UsageError(
            f"{what} {text!r} is not a number of bytes.",
            "Write it like 23.6GiB, 512MiB, 24GB (10^9) or 25769803776.",
        )
    try:
        size = int(Decimal(match[1].replace("_", "")) * factor)
    except InvalidOperation as error:  # pragma: no cover - the pattern admits only decimals
        raise UsageError(f"{what} {text!r} is not a number of bytes.") from error
    if size >= _LARGEST:
        raise UsageError(f"{what} {text!r} is more than 2^63 bytes.", "Check the unit: GiB is 2^30 bytes.")
    return size


def format_bytes(size: int | None) -> str:
    """Show bytes as PyTorch does: `5.22 GiB`, `512.00 KiB`, `17 bytes`; None is `unknown`."""
    if size is None:
        return "unknown"
    for factor, unit in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(size) >= factor:
            return f"{size / factor:,.2f} {unit}"
    return f"{size} bytes" if abs(size) != 1 else f"{size} byte"


def format_ns(duration: int | None) -> str:
    """Show a duration in nanoseconds with a unit that keeps three digits: `1.23 s`, `45.6 ms`, `7.89 us`."""
    if duration is None:
        return "unknown"
    for factor, unit in ((10**9, "s"), (10**6, "ms"), (10**3, "us")):
        if abs(duration) >= factor:
            return f"{duration / factor:.3g} {unit}"
    return f"{duration} ns"
