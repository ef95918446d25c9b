"""Writes docs/accuracy.md, with its chart, from an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from xmem.evaluate.metrics import Summary, by_family, by_model, ours, ours_less_setup, ran_out, summaries
from xmem.evaluate.virtual import range_summaries

Row = dict[str, Any]


def write_page(rows: list[Row], page: str | Path, virtual: Sequence[Row] = ()) -> None:
    """Write the page and, beside it, its chart as SVG; `virtual` are rows of the engine vgpu."""
    target = Path(page)
    chart = target.with_suffix(".svg")
    draw_chart(rows).save(str(chart))
    target.write_text(page_text(rows, chart.name, virtual), encoding="utf-8")


def page_text(rows: list[Row], chart: str, virtual: Sequence[Row] = ()) -> str:
    """Return the page's Markdown."""
    text = resources.files("xmem.evaluate").joinpath("accuracy_page.md").read_text(encoding="utf-8")
    same = [row for row in virtual if row.get("family") in {row.get("family") for row in rows}]
    beside = [replace(one, name=one.name.replace("ours", "ours, virtual GPU")) for one in summaries(same)[:2]]
    ours_here, published = summaries(rows)[:2], summaries(rows)[2:]
    parts = {
        "summaries": _table([*ours_here, *(beside if same else []), *published]),
        "virtual": _virtual_text(list(virtual)) if virtual else "",
        "models": _table(by_model(rows)),
        "chart": chart,
    }
    for name, part in parts.items():
        text = text.replace("{" + name + "}", part)
    return text


def _virtual_text(rows: list[Row]) -> str:
    ranges = [
        f"- {one.name}: {one.held} of {one.rows} measured peaks lie in their range{one.less_text},"
        f" which is {_share(one.median_width)} wide in the median."
        for one in range_summaries(rows)
    ]
    return (
        "## On a virtual GPU\n\n`--engine vgpu` runs each job's CUDA code on a [virtual card](vgpu.md), here with torch"
        " 2.14.1, replays what it asked for with the allocator of 2.6.0, and answers with a range.\n\n"
        + _table(by_family(rows))
        + "\n\n"
        + "\n".join(ranges)
        + "\n\n"
    )


def _table(found: list[Summary]) -> str:
    lines = [
        "| | rows | median error | 90th percentile | worst | median, signed | OOM caught | false alarms |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for each in found:
        figures = (_share(each.median_error), _share(each.p90_error), _signed(each.worst_error))
        verdict = f"{each.ooms_caught} of {each.ooms} | {each.false_alarms}"
        lines.append(
            f"| {each.name} | {each.rows} | {' | '.join(figures)} | {_signed(each.median_signed)} | {verdict} |"
        )
    return "\n".join(lines)


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.2%}"


def _signed(value: float | None) -> str:
    return "" if value is None else f"{value:+.2%}"


def draw_chart(rows: list[Row]) -> Any:
    """Draw every row's signed error by model, ground as given and less set-up."""
    import altair as alt

    points = [
        {"model": row["model"].split("/")[-1], "error %": 100 * value, "against": name}
        for row in rows
        if not ran_out(row)
        for name, error in (("ground as given", ours), ("less set-up (CNN)", ours_less_setup))
        if (value := error(row)) is not None
    ]
    return (
        alt.Chart(alt.Data(values=points))
        .mark_point(opacity=0.6)
        .encode(x=alt.X("error %:Q"), y=alt.Y("model:N", title=None), color=alt.Color("against:N", title=None))
        .properties(width=560, height=380)
    )
