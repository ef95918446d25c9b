"""Writes one HTML page about a run: whole in itself, offline, every name escaped."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from xmem.errors import RefusedError
from xmem.query import connect
from xmem.query.alive import Alive, find_alive
from xmem.query.charts import COLOURS, Picture, datasets, draw, specs
from xmem.query.reports import Report, find_report, run_report
from xmem.query.segment_map import find_segments
from xmem.query.subject import Subject, find_subject
from xmem.units import format_bytes, format_ns
from xmem.version import __version__

if TYPE_CHECKING:
    import duckdb

    from xmem.query.reports import ReportOptions

_FOLDER = Path(__file__).parent / "page"
_TIMES = ("duration_ns", "busy_ns", "idle_ns")
_TABLE_ROWS = 50
_LONG = 90


def write_page(
    path: Path, run: str | None = None, *, store: str | Path | None = None, options: ReportOptions | None = None
) -> None:
    """Write the page of a run's device (the one with the highest peak, where none is named)."""
    text = page(run, store=store, options=options)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        reason = error.strerror or str(error)
        raise RefusedError(f"The page {str(path)!r} cannot be written: {reason}.", "Name another file.") from error
    finally:
        temporary.unlink(missing_ok=True)


def page(run: str | None = None, *, store: str | Path | None = None, options: ReportOptions | None = None) -> str:
    """Return the page as text."""
    import vl_convert

    connection = connect(store)
    rank, device = (options.rank, options.device) if options else (None, None)
    subject = find_subject(connection, store, run, rank, device)
    picture = draw(connection, subject)
    alive = find_alive(connection, subject, picture.curve)
    reports = {
        name: run_report(connection, find_report(name), subject, _TABLE_ROWS)
        for name in ("summary", "peak", "steps", "operators", "modules", "kernels", "time", "idle")
    }
    segments = find_segments(connection, subject, int(picture.curve.points["seq"][picture.curve.peak]))
    facts = _facts(connection, subject)
    # the bundle is big enough to close a script early if a newer one ever held such a text
    bundle = vl_convert.javascript_bundle().replace("</script", "<\\/script")
    script = (_FOLDER / "page.js").read_text(encoding="utf-8")
    filled = {
        "title": html.escape(f"Memory of {subject.run.name}"),
        "about": html.escape(_about(subject, facts)),
        "device": html.escape(subject.device.label),
        "source": html.escape(str(facts["source_file"])),
        "version": html.escape(__version__),
        "cards": _cards(reports["summary"], subject),
        "advice": _advice(reports["summary"]),
        "peak_rows": _peak_rows(reports["peak"]),
        "against_predicted": ", recorded against predicted" if picture.predicted else "",
        "sections": "\n".join(_sections(connection, picture, reports, segments)),
        "style": (_FOLDER / "page.css").read_text(encoding="utf-8"),
        "data": embed_json(_data(picture, alive, segments)),
        "bundle": bundle,
        "script": script,
        "script_hashes": " ".join(_hash(code) for code in (bundle, script)),
    }
    return Template((_FOLDER / "page.html").read_text(encoding="utf-8")).substitute(filled)


def embed_json(value: object) -> str:
    """Return JSON that no HTML or script parser can be led out of."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _hash(code: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()}'"


_FACTS = """
SELECT source_file, adapter, torch_version, alloc_conf, event_count, ring_buffer, truncated, time_base
FROM runs WHERE run_id = $run AND rank = $rank
"""


def _facts(connection: duckdb.DuckDBPyConnection, subject: Subject) -> dict[str, Any]:
    return _rows(connection, _FACTS, subject)[0]


def _rows(connection: duckdb.DuckDBPyConnection, sql: str, subject: Subject) -> list[dict[str, Any]]:
    """Run a query with those of the subject's parameters that it names."""
    values = {name: value for name, value in subject.parameters.items() if f"${name}" in sql}
    rows: list[dict[str, Any]] = connection.sql(sql, params=values).to_arrow_table().to_pylist()
    return rows


def _about(subject: Subject, facts: dict[str, Any]) -> str:
    device = subject.device
    parts = [f"run {subject.run.run_id}", f"rank {device.rank}", device.label]
    if device.name:
        parts.append(device.name)
    if device.total_bytes:
        parts.append(f"{format_bytes(device.total_bytes)} in all")
    if facts["torch_version"]:
        parts.append(f"torch {facts['torch_version']}")
    if facts["alloc_conf"]:
        parts.append(str(facts["alloc_conf"]))
    parts.append(f"{facts['event_count']:,} events read by {facts['adapter']}")
    return " · ".join(parts)


def _cards(summary: Report, subject: Subject) -> str:
    rows = [row for row in summary.rows() if row[0] in ("peak allocated", "peak reserved", "first step", "later steps")]
    rows += [row for row in summary.rows() if row[0] == "out of memory"]
    largest = next((row for row in summary.rows() if row[0] in COLOURS), None)
    cards = [(what, size, detail) for what, size, detail in rows]
    if largest:
        cards.append((f"most of it: {largest[0]}", largest[1], largest[2]))
    return "\n".join(_card(*card) for card in cards)


def _card(what: str, size: int | None, detail: str | None) -> str:
    return (
        f'<div class="card"><span class="what">{html.escape(what)}</span>'
        f'<data class="much" value="{size if size is not None else ""}">{html.escape(format_bytes(size))}</data>'
        f'<span class="detail">{html.escape(detail or "")}</span></div>'
    )


def _advice(summary: Report) -> str:
    rows = [row for row in summary.rows() if row[0] == "would help"]
    if not rows:
        return ""
    items = "".join(f"<li>{html.escape(str(row[2]))} ({html.escape(format_bytes(row[1]))})</li>" for row in rows)
    return f'<section class="advice" aria-label="Advice"><h2>What would help</h2><ul>{items}</ul></section>'


def _peak_rows(peak: Report) -> str:
    """Rows of the peak for readers without JavaScript; the script puts its own in their place."""
    shown = []
    for row in peak.rows():
        named = dict(zip(peak.columns, row, strict=True))
        cause = " · ".join(str(part) for part in (named["category"], named["code"] or named["op"]) if part)
        shown.append([cause, named["at_peak_bytes"], named["share"], named["allocations"]])
    return _body(["cause", "bytes", "share", "allocations"], shown)


def _sections(
    connection: duckdb.DuckDBPyConnection, picture: Picture, reports: dict[str, Report], segments: Sequence[Any]
) -> Iterable[str]:
    subject = picture.subject
    yield _segment_section(segments, picture)
    if len(picture.steps) > 1:
        chart = '<div class="chart low" id="chart-steps" role="img" aria-label="Peak of each step"></div>'
        yield _section(
            "Steps", "Memory at the peak of each training step, and what was left after it.", chart, reports["steps"]
        )
    yield _table_section(
        "What if", "The same requests replayed through other allocators and settings.", _WHAT_IF, connection, subject
    )
    yield _section(
        "Operators", "What the program called, by the memory that it held at the peak.", "", reports["operators"]
    )
    if any(row[0] is not None for row in reports["modules"].rows()):
        yield _section("Modules", "By the memory that each module held at the peak.", "", reports["modules"])
    if reports["kernels"].rows():
        yield _section(
            "Kernels", "Device time by kernel; those marked ran while memory was highest.", "", reports["kernels"]
        )
    if reports["time"].rows() and reports["kernels"].rows():
        yield _section(
            "Time beside memory", "How long each step took and how long the device worked.", "", reports["time"]
        )
    if reports["idle"].rows():
        text = "Why each stream was idle, by holistic-trace-analysis."
        yield _section("Idle time", text, "", reports["idle"])
    yield _table_section(
        "Found while reading",
        "What was repaired, inferred or lost; nothing is repaired silently.",
        _ISSUES,
        connection,
        subject,
    )


_WHAT_IF = """
SELECT allocator, alloc_conf AS settings, gpu, fits, peak_reserved_bytes, peak_allocated_bytes, usable_bytes,
  num_alloc_retries AS retries, num_ooms AS ooms, torch_version AS torch
FROM simulations
WHERE run_id = $run AND rank = $rank AND device_type = $device_type AND device_index = $device_index
ORDER BY fits DESC, peak_reserved_bytes, allocator, alloc_conf
"""
_ISSUES = """
SELECT i.severity, i.code, i.count, coalesce(c.meaning, '') AS meaning, coalesce(i.detail, '') AS detail,
  coalesce(c.advice, '') AS advice
FROM issues AS i LEFT JOIN issue_codes AS c USING (code)
WHERE i.run_id = $run AND i.rank = $rank
ORDER BY list_position(['error', 'data_loss', 'warning', 'info'], i.severity), i.count DESC, i.code
"""


def _segment_section(segments: Sequence[Any], picture: Picture) -> str:
    if not segments:
        return _frame(
            "Segments at the peak",
            "The source names no segments; a CUDA memory snapshot does (torch.cuda.memory._dump_snapshot).",
            "",
        )
    reserved = sum(segment["bytes"] for segment in segments)
    held = sum(block[1] for segment in segments for block in segment["blocks"])
    names = sorted(
        {block[2] for segment in segments for block in segment["blocks"]}, key=lambda name: (name not in COLOURS, name)
    )
    legend = "".join(
        f'<span><span class="swatch" style="background:{_colour(name)}"></span>{html.escape(name)}</span>'
        for name in names
    )
    free = '<span><span class="swatch" style="background:#8a8f9866"></span>free</span>'
    text = (
        f"{len(segments)} segments of {format_bytes(reserved)} in all, largest first; coloured blocks are alive "
        f"({format_bytes(held)}), grey is free."
    )
    svg = '<svg class="segments" id="segments" role="img" aria-label="Segments and the blocks in them"></svg>'
    return _frame("Segments at the peak", text, f'<div class="legend">{legend}{free}</div>{svg}')


def _colour(category: str) -> str:
    return COLOURS.get(category, COLOURS["unknown"])


def _section(title: str, text: str, chart: str, report: Report) -> str:
    return _frame(title, text, chart + _table(report.columns, report.rows()))


def _table_section(title: str, text: str, sql: str, connection: duckdb.DuckDBPyConnection, subject: Subject) -> str:
    rows = _rows(connection, sql, subject)
    if not rows:
        nothing = {"What if": "No replay yet: xmem simulate --gpu 24 adds one, xmem simulate --sweep many."}
        return _frame(title, nothing.get(title, "Nothing."), "")
    return _frame(title, text, _table(list(rows[0]), [list(row.values()) for row in rows]))


def _frame(title: str, text: str, inside: str) -> str:
    name = html.escape(title.lower().replace(" ", "-"))
    return (
        f'<section aria-labelledby="h-{name}"><h2 id="h-{name}">{html.escape(title)}</h2>'
        f'<p class="hint">{html.escape(text)}</p>{inside}</section>'
    )


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    heads = "".join(f'<th scope="col"{_number_class(name)}>{html.escape(_title(name))}</th>' for name in columns)
    return (
        f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{_body(columns, rows)}</tbody></table></div>'
    )


def _body(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    return "\n".join(
        f"<tr>{''.join(_cell(name, value) for name, value in zip(columns, row, strict=True))}</tr>" for row in rows
    )


def _title(name: str) -> str:
    return name.removesuffix("_bytes").removesuffix("_ns").replace("_", " ")


def _number_class(name: str) -> str:
    numbers = ("bytes", "_ns", "share", "allocations", "launches", "count", "step", "retries", "ooms")
    return ' class="number"' if name.endswith(numbers) else ""


def _cell(name: str, value: Any) -> str:
    if value is None:
        return f"<td{_number_class(name)}>–</td>"
    if name == "fits":
        return f'<td class="{"fits" if value else "fails"}">{"fits" if value else "does not fit"}</td>'
    if name == "severity":
        return f'<td class="severity-{html.escape(str(value))}">{html.escape(str(value))}</td>'
    if name.endswith("bytes"):
        return (
            f'<td class="number" data-bytes="{value}" title="{value:,} bytes">{html.escape(format_bytes(value))}</td>'
        )
    if name in _TIMES:
        return f'<td class="number" data-ns="{value}">{html.escape(format_ns(value))}</td>'
    if name == "share":
        return f'<td class="number">{100 * value:.1f} %</td>'
    if isinstance(value, bool):
        return f"<td>{'yes' if value else ''}</td>"
    text = f"{value:,}" if isinstance(value, int) and name != "step" else str(value)
    if len(text) > _LONG:
        return f'<td title="{html.escape(text)}"><div class="clamp">{html.escape(text)}</div></td>'
    return f"<td{_number_class(name)}>{html.escape(text)}</td>"


def _data(picture: Picture, alive: Alive, segments: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what the script reads; texts stand once and are named by their place."""
    texts: dict[str, int] = {}

    def place(text: str | None) -> int | None:
        return None if text is None else texts.setdefault(text, len(texts))

    groups = [
        [
            *(place(group[name]) for name in ("category", "phase", "op", "leaf_op", "module")),
            [place(frame) for frame in group["frames"]],
        ]
        for group in alive.groups
    ]
    drawn = [
        {
            "address": f"{segment['address']:x}",
            "bytes": segment["bytes"],
            "stream": segment["stream"],
            "blocks": [[offset, size, place(category)] for offset, size, category in segment["blocks"]],
        }
        for segment in segments
    ]
    return {
        "axis": picture.axis,
        "timeUnit": picture.time_unit[0],
        "specs": {axis: specs(picture, axis) for axis in ("t", "e")},
        "datasets": datasets(picture),
        "moments": list(picture.curve.moments),
        "peak": picture.curve.moments.index(picture.curve.peak),
        "groups": groups,
        "changes": alive.changes,
        "segments": drawn,
        "colours": COLOURS,
        "texts": list(texts),
    }
