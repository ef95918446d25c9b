"""Comparisons to text and plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from xmem.render import make_inert, table_text
from xmem.units import format_bytes

if TYPE_CHECKING:
    from xmem.query.diff import Change, Difference


def diff_text(difference: Difference, *, width: int | None = None) -> str:
    """Show both sides beside each other, key by key; the largest changes first."""
    lines = [
        f"A  {make_inert(difference.a)}",
        f"B  {make_inert(difference.b)}",
        "",
        _table("", difference.peaks, width),
    ]
    for key, changes in difference.parts.items():
        if changes:
            title = "peak of each step" if key == "step" else f"at the peak, by {key}"
            lines += ["", _table(title, changes, width)]
    return "\n".join(lines)


def diff_json(difference: Difference) -> dict[str, object]:
    """Return a comparison as plain data."""
    return {
        "a": difference.a,
        "b": difference.b,
        "peaks": [_plain(one) for one in difference.peaks],
        "parts": {key: [_plain(one) for one in changes] for key, changes in difference.parts.items()},
    }


def _plain(one: Change) -> dict[str, object]:
    return {
        "name": one.name,
        "a_bytes": one.a_bytes,
        "b_bytes": one.b_bytes,
        "change_bytes": one.change_bytes,
        "change": one.change,
    }


def _table(title: str, changes: Sequence[Change], width: int | None) -> str:
    rows = [[one.name, format_bytes(one.a_bytes), format_bytes(one.b_bytes), *_change(one)] for one in changes]
    heads = [title, "A", "B", "B - A", "change"]
    widths = [max(len(heads[i]), *(len(row[i]) for row in rows)) for i in range(len(heads))]
    aligned = [[row[0], *(row[i].rjust(widths[i]) for i in range(1, 5))] for row in rows]
    return table_text([heads[0], *(heads[i].rjust(widths[i]) for i in range(1, 5))], aligned, width=width)


def _change(one: Change) -> tuple[str, str]:
    if one.change_bytes is None:
        return "unknown", ""
    sign = "+" if one.change_bytes > 0 else ""
    share = "new" if one.change is None and one.change_bytes else "" if one.change is None else f"{one.change:+.1%}"
    return f"{sign}{format_bytes(one.change_bytes)}", "gone" if one.b_bytes == 0 and one.a_bytes else share
