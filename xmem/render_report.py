"""Reports to text: bytes and times with units, one fact a line where there is one row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from xmem.render import cell_text, fact_lines, make_inert, table_text
from xmem.units import format_bytes, format_ns

if TYPE_CHECKING:
    from xmem.query.reports import Report

_TIMES = ("duration_ns", "busy_ns", "idle_ns", "dur_ns")


def report_text(report: Report, *, width: int | None = None) -> str:
    """Lay a report out under a line that says what it is about."""
    subject = report.subject
    device = subject.device
    about = f"{subject.run.name} ({subject.run.run_id}), rank {device.rank}, {device.label}"
    if device.name:
        about += f", {device.name}"
    lines = [make_inert(about), make_inert(report.help), ""]
    rows = report.rows()
    names = report.columns
    if not rows:
        lines.append("Nothing to report.")
    elif len(rows) == 1:
        lines += fact_lines((_title(name), _value(name, value)) for name, value in zip(names, rows[0], strict=True))
    else:
        shown = [[_value(name, value) for name, value in zip(names, row, strict=True)] for row in rows]
        lines.append(aligned_table([_title(name) for name in names], shown, names, width=width))
    if subject.others:
        others = ", ".join(dict.fromkeys(f"rank {one.rank} {one.label}" for one in subject.others[:8]))
        lines += ["", f"Other devices (--rank, --device): {make_inert(others)}"]
    return "\n".join(lines)


def aligned_table(
    titles: Sequence[str], rows: Sequence[Sequence[str]], names: Sequence[str], *, width: int | None
) -> str:
    """Lay texts out with measures to the right."""
    right = [_is_measure(name) for name in names]
    sizes = [max([len(titles[i]), *(len(row[i]) for row in rows)]) for i in range(len(titles))]
    padded = [[cell.rjust(sizes[i]) if right[i] else cell for i, cell in enumerate(row)] for row in rows]
    heads = [title.rjust(sizes[i]) if right[i] else title for i, title in enumerate(titles)]
    return table_text(heads, padded, width=width)


def _is_measure(name: str) -> bool:
    return name.endswith(("bytes", "_ns", "share", "fragmentation", "allocations", "launches", "steps", "line", "step"))


def _title(name: str) -> str:
    for ending in ("_bytes", "_ns"):
        name = name.removesuffix(ending)
    return name.replace("_", " ")


def _value(name: str, value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, int) and not isinstance(value, bool):
        if name == "bytes" or name.endswith("_bytes"):
            return format_bytes(value)
        if name in _TIMES:
            return format_ns(value)
        return f"{value:,}" if name.endswith(("allocations", "launches")) else str(value)
    if isinstance(value, float) and name in ("share", "fragmentation", "change"):
        return f"{100 * value:.1f} %"
    return cell_text(value)
