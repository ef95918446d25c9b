"""Charts of a device's memory as Vega-Lite; the only module that imports altair."""

from __future__ import annotations

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
PHASES = {"forward": "#4477aa", "backward": "#cc6677", "optimizer": "#44aa99", "other": "#8a8f98"}
LEVELS = {
    "reserved": "#ee8866", "active": "#88ccee", "allocated": "#4477aa",
    "predicted reserved": "#aa4499", "predicted allocated": "#44aa99",
}  # fmt: skip
_MOST_MARKS = 24


@dataclass(frozen=True)
class Picture:
    """Everything that charts are drawn from."""

    subject: Subject
    curve: Curve
    steps: list[dict[str, Any]]
    predicted: list[dict[str, Any]]
    time_base: str

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
    spec = specs(draw(connection, subject))[name] | {"width": 900, "height": 360, "background": "white", "padding": 12}
    spec["title"] = {"text": CHARTS[name], "subtitle": title, "anchor": "start"}
    if path.suffix.lower() == ".svg":
        path.write_text(vl_convert.vegalite_to_svg(spec), encoding="utf-8")
    else:
        path.write_bytes(vl_convert.vegalite_to_png(spec, scale=2))


def specs(picture: Picture) -> dict[str, dict[str, Any]]:
    """Return the Vega-Lite specification of every chart."""
    import altair as alt

    with alt.data_transformers.enable("default", max_rows=None):
        charts = {
            "memory": _memory(picture),
            "levels": _levels(picture),
            "categories": _categories(picture),
            "steps": _steps(picture),
        }
        return {name: chart.to_dict() for name, chart in charts.items() if chart is not None}


def curve_rows(picture: Picture) -> list[dict[str, Any]]:
    """Return the points for a chart: `t` in the time unit, `e` the event, levels in the memory unit."""
    points, (_, size), (_, tick) = picture.curve.points, picture.unit, picture.time_unit
    first_ns, first_seq = int(points["ts_ns"].min()), int(points["seq"][0])  # type: ignore[arg-type]
    predicted = {row["seq"]: row for row in picture.predicted}
    rows = []
    for point in points.iter_rows(named=True):
        row = {"t": round((point["ts_ns"] - first_ns) / tick, 4), "e": point["seq"] - first_seq}
        levels = {name: point[name] for name in picture.curve.categories}
        levels |= {name: point[f"{name}_bytes"] for name in ("allocated", "active", "reserved")}
        if point["seq"] in predicted:
            levels["predicted allocated"] = predicted[point["seq"]]["allocated_bytes"]
            levels["predicted reserved"] = predicted[point["seq"]]["reserved_bytes"]
        row |= {name: round(level / size, 4) for name, level in levels.items() if level is not None}
        rows.append(row)
    return rows


def _x(picture: Picture, field: str = "t") -> alt.X:
    import altair as alt

    unit, _ = picture.time_unit
    title = "event" if unit == "event" else f"time since the first event, {unit}"
    return alt.X(
        f"{field}:Q", title=title, axis=alt.Axis(grid=False, tickCount=8), scale=alt.Scale(nice=False, zero=False)
    )


def _memory(picture: Picture) -> alt.LayerChart:
    import altair as alt

    unit, _ = picture.unit
    names = list(picture.curve.categories)
    curve = alt.Chart(alt.Data(values=curve_rows(picture), name="curve"))
    area = (
        curve.transform_fold(names, as_=["category", "level"])
        .mark_area(interpolate="step-after", opacity=0.9)
        .encode(
            x=_x(picture),
            y=alt.Y("level:Q", stack="zero", title=f"allocated, {unit}"),
            color=alt.Color(
                "category:N",
                scale=alt.Scale(domain=names, range=[COLOURS.get(name, "#8a8f98") for name in names]),
                legend=alt.Legend(orient="top", title=None, direction="horizontal", symbolType="square"),
                sort=names,
            ),
            order=alt.Order("place:Q"),
        )
        .transform_calculate(place=alt.expr.indexof(names, alt.datum.category))
    )
    layers = [area, *_marks(picture), _cursor(picture)]
    return alt.layer(*layers).resolve_scale(color="independent")


def _marks(picture: Picture) -> list[alt.Chart]:
    """Steps as rules with numbers, phases as a strip along the top."""
    import altair as alt

    layers = []
    phases = phase_rows(picture)
    if phases:
        layers.append(
            alt.Chart(alt.Data(values=phases))
            .mark_rect(opacity=0.85)
            .encode(
                x=_x(picture),
                x2="t2:Q",
                y=alt.value(0),
                y2=alt.value(6),
                color=alt.Color(
                    "phase:N",
                    scale=alt.Scale(domain=list(PHASES), range=list(PHASES.values())),
                    legend=alt.Legend(orient="bottom", title="phase (strip along the top)", direction="horizontal"),
                ),
                tooltip=["phase:N", "t:Q", "t2:Q"],
            )
        )
    steps = step_rows(picture)
    if steps:
        marks = alt.Chart(alt.Data(values=steps))
        layers.append(marks.mark_rule(strokeDash=[3, 3], opacity=0.55).encode(x=_x(picture)))
        layers.append(
            marks.mark_text(align="left", dx=4, dy=16, fontSize=11, opacity=0.8).encode(
                x=_x(picture), y=alt.value(0), text="label:N"
            )
        )
    return layers


def _cursor(picture: Picture) -> alt.Chart:
    import altair as alt

    row = curve_rows(picture)[picture.curve.peak]
    return (
        alt.Chart(alt.Data(values=[{"t": row["t"], "e": row["e"]}], name="cursor"))
        .mark_rule(strokeWidth=2, color="#d1242f")
        .encode(x=_x(picture))
    )


def phase_rows(picture: Picture) -> list[dict[str, Any]]:
    """Return stretches of one phase, from point to point."""
    rows = curve_rows(picture)
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
            "t": round((step["start_ns"] - first_ns) / tick, 4),
            "e": step["first_seq"] - first_seq,
            "label": f"step {step['step']}",
        }
        for step in picture.steps[::every]
    ]


def _levels(picture: Picture) -> alt.LayerChart:
    import altair as alt

    unit, size = picture.unit
    rows = curve_rows(picture)
    names = [name for name in LEVELS if any(name in row for row in rows)]
    curve = alt.Chart(alt.Data(values=rows, name="curve")).transform_fold(names, as_=["level", "size"])
    line = (
        curve.transform_filter("isValid(datum.size)")
        .mark_line(interpolate="step-after", strokeWidth=1.6)
        .encode(
            x=_x(picture),
            y=alt.Y("size:Q", title=f"memory, {unit}"),
            color=alt.Color(
                "level:N",
                scale=alt.Scale(domain=names, range=[LEVELS[name] for name in names]),
                legend=alt.Legend(orient="top", title=None, direction="horizontal", symbolType="stroke"),
            ),
        )
    )
    total = picture.subject.device.total_bytes
    highest = max((row.get("reserved") or row.get("allocated") or 0 for row in rows), default=0)
    layers: list[Any] = [line]
    if total and total / size < 1.6 * highest:
        limit = alt.Chart(alt.Data(values=[{"y": total / size, "label": "device total"}]))
        layers += [
            limit.mark_rule(strokeDash=[6, 3], color="#d1242f").encode(y="y:Q"),
            limit.mark_text(align="left", dy=-6, dx=4, color="#d1242f").encode(x=alt.value(0), y="y:Q", text="label:N"),
        ]
    return alt.layer(*layers, _cursor(picture))


def _categories(picture: Picture) -> alt.LayerChart:
    import altair as alt

    unit, size = picture.unit
    peak = picture.curve.points.row(picture.curve.peak, named=True)
    whole = max(peak["allocated_bytes"], 1)
    rows = [
        {"category": name, "size": round(peak[name] / size, 4), "share": f"{100 * peak[name] / whole:.1f} %"}
        for name in picture.curve.categories
        if peak[name] > 0
    ]
    names = [row["category"] for row in sorted(rows, key=lambda row: -float(str(row["size"])))]
    base = alt.Chart(alt.Data(values=rows)).encode(
        y=alt.Y("category:N", sort=names, title=None), x=alt.X("size:Q", title=f"at the peak, {unit}")
    )
    colours = alt.Scale(domain=names, range=[COLOURS.get(name, "#8a8f98") for name in names])
    bars = base.mark_bar().encode(color=alt.Color("category:N", scale=colours, legend=None))
    return alt.layer(bars, base.mark_text(align="left", dx=4).encode(text="share:N"))


def _steps(picture: Picture) -> alt.LayerChart | None:
    import altair as alt

    if len(picture.steps) < 2:
        return None
    unit, size = picture.unit
    every = -(-len(picture.steps) // 400)
    rows = [
        {
            "step": step["step"],
            "peak": round(step["peak_allocated_bytes"] / size, 4),
            "after": round(step["end_allocated_bytes"] / size, 4),
        }
        for start in range(0, len(picture.steps), every)
        for step in [max(picture.steps[start : start + every], key=lambda one: one["peak_allocated_bytes"])]
    ]
    base = alt.Chart(alt.Data(values=rows)).transform_fold(["peak", "after"], as_=["what", "size"])
    encoded = base.encode(
        x=alt.X("step:Q", title="step", axis=alt.Axis(tickMinStep=1, grid=False), scale=alt.Scale(zero=False)),
        y=alt.Y("size:Q", title=f"allocated, {unit}"),
        color=alt.Color(
            "what:N",
            scale=alt.Scale(domain=["peak", "after"], range=["#cc6677", "#4477aa"]),
            legend=alt.Legend(orient="top", title=None, direction="horizontal"),
        ),
    )
    return alt.layer(encoded.mark_line(strokeWidth=1.6), encoded.mark_point(filled=True, size=30))
