"""Writes docs/accuracy.md, with its chart, from an evaluation."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

from xmem.evaluate.metrics import Summary, by_model, ours, ours_less_setup, ran_out, summaries

Row = dict[str, Any]


def write_page(rows: list[Row], page: str | Path) -> None:
    """Write the page and, beside it, its chart as SVG."""
    target = Path(page)
    chart = target.with_suffix(".svg")
    draw_chart(rows).save(str(chart))
    target.write_text(page_text(rows, chart.name), encoding="utf-8")


def page_text(rows: list[Row], chart: str) -> str:
    """Return the page's Markdown."""
    text = resources.files("xmem.evaluate").joinpath("accuracy_page.md").read_text(encoding="utf-8")
    parts = {"summaries": _table(summaries(rows)), "models": _table(by_model(rows)), "chart": chart}
    for name, part in parts.items():
        text = text.replace("{" + name + "}", part)
    return text


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
        {"model": row["model"].split("/")[-1], "error %": 100 * error(row), "against": name}
        for row in rows
        if not ran_out(row)
        for name, error in (("ground as given", ours), ("less set-up (CNN)", ours_less_setup))
    ]
    return (
        alt.Chart(alt.Data(values=points))
        .mark_point(opacity=0.6)
        .encode(x=alt.X("error %:Q"), y=alt.Y("model:N", title=None), color=alt.Color("against:N", title=None))
        .properties(width=560, height=380)
    )
