"""Charts of a device's memory as Vega-Lite; the only module that imports altair."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xmem.errors import UsageError
from xmem.query import connect
from xmem.query.curve import Curve, thin_curve
from xmem.query.subject import Subject, find_subject
from xmem.units import GIB, KIB, MIB

if TYPE_CHECKING:
    import altair as alt
    import duckdb

    from xmem.query.reports import ReportOptions

CHARTS = {
    "memory": "Memory over time, stacked by what it is for, with steps and phases.",
    "levels": "Reserved against allocated memory, and predicted memory where there is a replay.",
    "categories": "What the peak is made of.",
    "steps": "Peak and rest of each training step.",
}
#: Colours that stay apart in dark and light, and for most colour-blind readers (Tol's bright and muted sets).
COLOURS = {
    "parameter": "#4477aa", "gradient": "#ee8866", "optimizer_state": "#44aa99", "activation": "#cc6677",
    "input": "#ddcc77", "temporary": "#88ccee", "workspace": "#aa4499", "autograd_detail": "#997700",
    "unknown": "#8a8f98",
}  # fmt: skip
#: From the ground up: what stays lies below what comes and goes.
GROUND_UP = (
    "unknown", "parameter", "optimizer_state", "gradient", "workspace", "input", "autograd_detail", "activation",
    "temporary",
)  # fmt: skip
PHASES = {"forward": "#4477aa", "backward": "#cc6677", "optimizer": "#44aa99", "other": "#8a8f98"}
LEVELS = {
    "reserved": "#ee8866", "active": "#88ccee", "allocated": "#4477aa",
    "predicted reserved": "#aa4499", "predicted allocated": "#44aa99",
}  # fmt: skip
_MOST_MARKS, _MOST_STEPS = 12, 400


@dataclass(frozen=True)
class Picture:
    """Everything that charts are drawn from."""

    subject: Subject
    curve: Curve
    steps: list[dict[str, Any]]
    predicted: list[dict[str, Any]]
    time_base: str

    @property
    def categories(self) -> list[str]:
        """Categories from the top of the stack down."""
        known = {name: place for place, name in enumerate(GROUND_UP)}
        return sorted(self.curve.categories, key=lambda name: (-known.get(name, -1), name))

    @property
    def unit(self) -> tuple[str, int]:
        """Unit of the memory axis and its bytes."""
        peak = max(int(self.curve.points["allocated_bytes"].max() or 0), 1)  # type: ignore[arg-type]
        return ("GiB", GIB) if peak >= 2 * GIB else ("MiB", MIB) if peak >= 2 * MIB else ("KiB", KIB)

    @property
    def time_unit(self) -> tuple[str, int]:
        """Unit of the time axis and its nanoseconds (events, where the source has no times)."""
        if self.time_base == "index":
            return "event", 1
        times = self.curve.points["ts_ns"]
        span = int(times.max()) - int(times.min())  # type: ignore[arg-type]
        return next(((name, size) for name, size in (("s", 10**9), ("ms", 10**6)) if span >= 2 * size), ("us", 1000))

    @property
    def axis(self) -> str:
        """Field of the horizontal axis: `t`, time; `e`, events, where most of the time nothing happens."""
        if self.time_base == "index":
            return "e"
        times = self.curve.points["ts_ns"]
        span = max(int(times.max()) - int(times.min()), 1)  # type: ignore[arg-type]
        used = ((times - times.min()) * 100 // span).n_unique()
        return "t" if used > 40 or self.curve.points.height < 40 else "e"


_STEPS = """
SELECT step, start_ns, end_ns, first_seq, last_seq, start_allocated_bytes, end_allocated_bytes, growth_bytes,
  peak_allocated_bytes, peak_reserved_bytes, peak_phase, allocations FROM steps
WHERE run_id = $run AND rank = $rank AND device_type = $device_type AND device_index = $device_index ORDER BY step
"""
_PREDICTED = """
WITH newest AS (
  SELECT simulation_id FROM simulations
  WHERE run_id = $run AND rank = $rank AND device_type = $device_type AND device_index = $device_index
  ORDER BY simulated_ns DESC, simulation_id LIMIT 1
)
SELECT seq, max(allocated_bytes) AS allocated_bytes, max(reserved_bytes) AS reserved_bytes
FROM simulation_events
WHERE run_id = $run AND rank = $rank AND simulation_id = (SELECT simulation_id FROM newest)
  AND seq IN (SELECT unnest($seqs))
GROUP BY seq ORDER BY seq
"""


def draw(connection: duckdb.DuckDBPyConnection, subject: Subject) -> Picture:
    """Read what charts need, thinned to what a picture can show."""
    curve = thin_curve(connection, subject)
    values = subject.parameters
    seqs = curve.points["seq"].to_list()
    base = connection.execute(
        "SELECT time_base FROM runs WHERE run_id = $run AND rank = $rank",
        {"run": subject.run.run_id, "rank": subject.device.rank},
    ).fetchall()
    return Picture(
        subject=subject,
        curve=curve,
        steps=_rows(connection, _STEPS, values),
        predicted=_rows(connection, _PREDICTED, {**values, "seqs": seqs}),
        time_base=base[0][0],
    )


def _rows(connection: duckdb.DuckDBPyConnection, sql: str, values: dict[str, object]) -> list[dict[str, Any]]:
    return connection.sql(sql, params=values).to_arrow_table().to_pylist()  # type: ignore[no-any-return]


def write_chart(
    name: str,
    path: Path,
    run: str | None = None,
    *,
    store: str | Path | None = None,
    options: ReportOptions | None = None,
) -> None:
    """Write one chart as PNG or SVG."""
    import vl_convert

    if name not in CHARTS:
        raise UsageError(f"There is no chart {name!r}.", f"Charts: {', '.join(CHARTS)}")
    connection = connect(store)
    rank, device = (options.rank, options.device) if options else (None, None)
    subject = find_subject(connection, store, run, rank, device)
    title = f"{subject.run.name}, rank {subject.device.rank}, {subject.device.label}"
    picture = draw(connection, subject)
    spec = specs(picture, picture.axis).get(name)
    if spec is None:
        raise UsageError(f"There is nothing to draw for {name!r} in this run.", "It has fewer than two steps.")
    spec |= {"width": 900, "height": 360, "background": "white", "padding": 12, "datasets": datasets(picture)}
    spec["title"] = {"text": CHARTS[name], "subtitle": title, "anchor": "start"}
    if path.suffix.lower() == ".svg":
        path.write_text(vl_convert.vegalite_to_svg(spec), encoding="utf-8")
    else:
        path.write_bytes(vl_convert.vegalite_to_png(spec, scale=2))


def specs(picture: Picture, axis: str) -> dict[str, dict[str, Any]]:
    """Return the Vega-Lite specification of every chart; its data are `datasets` by name."""
    charts = {
        "memory": _memory(picture, axis),
        "levels": _levels(picture, axis),
        "categories": _categories(picture),
        "steps": _steps(picture),
    }
    return {name: chart.to_dict() for name, chart in charts.items() if chart is not None}


def datasets(picture: Picture) -> dict[str, list[dict[str, Any]]]:
    """Return the rows that the charts draw."""
    curve = curve_rows(picture)
    peak = curve[picture.curve.peak]
    return {
        "curve": curve,
        "cursor": [{"t": peak["t"], "e": peak["e"]}],
        "phases": phase_rows(picture, curve),
        "marks": step_rows(picture),
        "categories": category_rows(picture),
        "steps": peak_rows(picture),
        "limit": [{"y": (picture.subject.device.total_bytes or 0) / picture.unit[1], "label": "device total"}],
    }


def curve_rows(picture: Picture) -> list[dict[str, Any]]:
    """Return the points for a chart: `t` in the time unit, `e` the event, upper edges and levels in the memory unit."""
    points, (_, size), (_, tick) = picture.curve.points, picture.unit, picture.time_unit
    first_ns, first_seq = int(points["ts_ns"].min()), int(points["seq"][0])  # type: ignore[arg-type]
    predicted = {row["seq"]: row for row in picture.predicted}
    rows = []
    for point in points.iter_rows(named=True):
        row = {"t": round((point["ts_ns"] - first_ns) / tick, 6), "e": point["seq"] - first_seq}
        top = 0
        levels = {}
        for place, name in reversed(list(enumerate(picture.categories))):
            top += point[name]
            levels[f"c{place}"] = top  # the category's upper edge: levels at equal times must not add up
        levels |= {name: point[f"{name}_bytes"] for name in ("allocated", "active", "reserved")}
        if point["seq"] in predicted:
            levels["predicted allocated"] = predicted[point["seq"]]["allocated_bytes"]
            levels["predicted reserved"] = predicted[point["seq"]]["reserved_bytes"]
        row |= {name: round(level / size, 4) for name, level in levels.items() if level is not None}
        rows.append(row)
    return rows


def _x(picture: Picture, axis: str) -> alt.X:
    import altair as alt

    unit, _ = picture.time_unit
    title = "events since the first" if axis == "e" else f"time since the first event, {unit}"
    shown = alt.Axis(grid=False, tickCount=8)
    return alt.X(f"{axis}:Q", title=title, axis=shown, scale=alt.Scale(nice=False, zero=False))


def _memory(picture: Picture, axis: str) -> Any:
    """Areas from the ground up to each category's upper edge, the highest first, so that lower ones lie before it."""
    import altair as alt

    unit, _ = picture.unit
    names = picture.categories
    colours = alt.Scale(domain=names, range=[COLOURS.get(name, "#8a8f98") for name in names])
    legend = alt.Legend(orient="top", title=None, direction="horizontal", symbolType="square")
    areas = [
        alt.Chart(alt.NamedData("curve"))
        .transform_calculate(category=json.dumps(name))
        .mark_area(interpolate="step-after")
        .encode(
            x=_x(picture, axis),
            y=alt.Y(f"c{place}:Q", title=f"allocated, {unit}", stack=None),
            color=alt.Color("category:N", scale=colours, legend=legend),
        )
        for place, name in enumerate(names)
    ]
    return alt.layer(alt.layer(*areas), *_marks(picture, axis), _cursor(picture, axis)).resolve_scale(
        color="independent"
    )


def _marks(picture: Picture, axis: str) -> list[Any]:
    """Steps as rules with numbers, phases as a strip along the top; nothing for what the source does not say."""
    import altair as alt

    layers: list[Any] = []
    if phase_rows(picture, curve_rows(picture)):
        colours = alt.Scale(domain=list(PHASES), range=list(PHASES.values()))
        legend = alt.Legend(orient="bottom", title="strip along the top", titleOrient="left", direction="horizontal")
        strip = alt.Chart(alt.NamedData("phases")).mark_rect()
        color = alt.Color("phase:N", scale=colours, legend=legend)
        layers.append(strip.encode(x=_x(picture, axis), x2=f"{axis}2:Q", y=alt.value(0), y2=alt.value(7), color=color))
    if picture.steps:
        marks = alt.Chart(alt.NamedData("marks"))
        layers.append(marks.mark_rule(strokeDash=[3, 3], opacity=0.6).encode(x=_x(picture, axis)))
        text = marks.mark_text(align="left", dx=4, dy=18, fontSize=11)
        layers.append(text.encode(x=_x(picture, axis), y=alt.value(0), text="label:N"))
    return layers


def _cursor(picture: Picture, axis: str) -> Any:
    import altair as alt

    rule = alt.Chart(alt.NamedData("cursor")).mark_rule(strokeWidth=1.5, opacity=0.85, color="#d1242f")
    return rule.encode(x=_x(picture, axis))


def phase_rows(picture: Picture, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return stretches of one phase, from point to point."""
    phases = picture.curve.points["phase"].to_list()
    found: list[dict[str, Any]] = []
    for row, phase in zip(rows, phases, strict=True):
        if found:
            found[-1]["t2"], found[-1]["e2"] = row["t"], row["e"]
        if not found or found[-1]["phase"] != phase:
            found.append({"phase": phase, "t": row["t"], "e": row["e"], "t2": row["t"], "e2": row["e"]})
    return [row for row in found if row["phase"] is not None and row["e2"] > row["e"]]


def step_rows(picture: Picture) -> list[dict[str, Any]]:
    """Return where steps begin; of many, evenly chosen ones."""
    points, (_, tick) = picture.curve.points, picture.time_unit
    first_ns, first_seq = int(points["ts_ns"].min()), int(points["seq"][0])  # type: ignore[arg-type]
    every = -(-len(picture.steps) // _MOST_MARKS) if picture.steps else 1
    return [
        {
            "t": round((step["start_ns"] - first_ns) / tick, 6),
            "e": step["first_seq"] - first_seq,
            "label": f"step {step['step']}",
        }
        for step in picture.steps[::every]
    ]


def category_rows(picture: Picture) -> list[dict[str, Any]]:
    """Return what the peak is made of."""
    _, size = picture.unit
    peak = picture.curve.points.row(picture.curve.peak, named=True)
    whole = max(peak["allocated_bytes"], 1)
    held = sorted((name for name in picture.curve.categories if peak[name] > 0), key=lambda name: -int(peak[name]))
    return [
        {"category": name, "size": round(peak[name] / size, 4), "share": f"{100 * peak[name] / whole:.1f} %"}
        for name in held
    ]


def peak_rows(picture: Picture) -> list[dict[str, Any]]:
    """Return the peak of each step and what was left after it; of many steps the highest of each bunch."""
    _, size = picture.unit
    every = max(-(-len(picture.steps) // _MOST_STEPS), 1)
    bunches = [picture.steps[start : start + every] for start in range(0, len(picture.steps), every)]
    return [
        {
            "step": step["step"],
            "peak": round(step["peak_allocated_bytes"] / size, 4),
            "after": round(step["end_allocated_bytes"] / size, 4),
        }
        for step in (max(bunch, key=lambda one: int(one["peak_allocated_bytes"])) for bunch in bunches)
    ]


def _levels(picture: Picture, axis: str) -> Any:
    import altair as alt

    unit, _ = picture.unit
    names = [name for name in LEVELS if picture.predicted or not name.startswith("predicted")]
    if picture.curve.points["reserved_bytes"].null_count() == picture.curve.points.height:
        names = [name for name in names if name != "reserved"]
    colours = alt.Scale(domain=names, range=[LEVELS[name] for name in names])
    legend = alt.Legend(orient="top", title=None, direction="horizontal", symbolType="stroke")
    layers: list[Any] = [
        alt.Chart(alt.NamedData("curve"))
        .transform_filter(f"isValid(datum['{name}'])")
        .transform_calculate(level=json.dumps(name))
        .mark_line(interpolate="step-after", strokeWidth=1.8, strokeDash=[5, 3] if "predicted" in name else [1, 0])
        .encode(
            x=_x(picture, axis),
            y=alt.Y(f"{name}:Q", title=f"memory, {unit}"),
            color=alt.Color("level:N", scale=colours, legend=legend),
        )
        for name in names
    ]
    total = picture.subject.device.total_bytes
    highest = picture.curve.points.select("allocated_bytes", "reserved_bytes").max().row(0)
    if total and total < 1.6 * max(level or 0 for level in highest):
        limit = alt.Chart(alt.NamedData("limit"))
        layers.append(limit.mark_rule(strokeDash=[6, 3], color="#d1242f").encode(y="y:Q"))
        text = limit.mark_text(align="left", dy=-6, dx=4, color="#d1242f")
        layers.append(text.encode(x=alt.value(0), y="y:Q", text="label:N"))
    return alt.layer(*layers, _cursor(picture, axis))


def _categories(picture: Picture) -> Any:
    import altair as alt

    unit, _ = picture.unit
    names = [row["category"] for row in category_rows(picture)]
    base = alt.Chart(alt.NamedData("categories")).encode(
        y=alt.Y("category:N", sort=names, title=None), x=alt.X("size:Q", title=f"at the peak, {unit}")
    )
    colours = alt.Scale(domain=names, range=[COLOURS.get(name, "#8a8f98") for name in names])
    bars = base.mark_bar().encode(color=alt.Color("category:N", scale=colours, legend=None))
    return alt.layer(bars, base.mark_text(align="left", dx=4).encode(text="share:N"))


def _steps(picture: Picture) -> Any:
    import altair as alt

    if len(picture.steps) < 2:
        return None
    unit, _ = picture.unit
    names = {"peak": "#cc6677", "after": "#4477aa"}
    numbers = [row["step"] for row in peak_rows(picture)]
    shown = numbers[:: -(-len(numbers) // 16)]
    colours = alt.Scale(domain=list(names), range=list(names.values()))
    encoded = (
        alt.Chart(alt.NamedData("steps"))
        .transform_fold(list(names), as_=["what", "size"])
        .encode(
            x=alt.X(
                "step:Q",
                title="step",
                axis=alt.Axis(values=shown, format="d", grid=False),
                scale=alt.Scale(zero=False),
            ),
            y=alt.Y("size:Q", title=f"allocated, {unit}"),
            color=alt.Color("what:N", scale=colours, legend=alt.Legend(orient="top", title=None)),
        )
    )
    return alt.layer(encoded.mark_line(strokeWidth=1.6), encoded.mark_point(filled=True, size=30))
