"""What rows of an evaluation say together: medians, percentiles, bias, out-of-memory errors caught and invented."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
#: Published estimators whose answers a file of measured runs may hold.
PUBLISHED = ("xmem", "dnnmem", "schedtune", "llmem")


@dataclass(frozen=True)
class Summary:
    """Errors over rows that did not run out of memory, as shares; verdicts over all rows.

    `troubles` counts rows that could not be estimated: they have no error, and their OOM counts as not caught.
    """

    name: str
    rows: int
    median_error: float | None
    p90_error: float | None
    worst_error: float | None
    median_signed: float | None
    ooms: int
    ooms_caught: int
    false_alarms: int
    median_runtime_s: float | None
    troubles: int = 0


def percentile(values: Iterable[float], share: float) -> float | None:
    """Return the linearly interpolated percentile, None of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summarise(name: str, rows: list[Row], error: Callable[[Row], float | None], oom: Callable[[Row], bool]) -> Summary:
    """Summarise rows by a signed error and a verdict."""
    calm = [row for row in rows if not ran_out(row)]
    signed = [value for row in calm if (value := error(row)) is not None]
    sizes = [abs(value) for value in signed]
    stormy = [row for row in rows if ran_out(row)]
    runtimes = [float(row["runtime_s"]) for row in rows if "runtime_s" in row]
    return Summary(
        name=name,
        rows=len(signed),
        median_error=percentile(sizes, 0.5),
        p90_error=percentile(sizes, 0.9),
        worst_error=max(signed, key=abs, default=None),
        median_signed=percentile(signed, 0.5),
        ooms=len(stormy),
        ooms_caught=sum(oom(row) for row in stormy),
        false_alarms=sum(oom(row) for row in calm),
        median_runtime_s=percentile(runtimes, 0.5),
        troubles=sum(bool(row.get("trouble")) for row in rows),
    )


def ran_out(row: Row) -> bool:
    """Tell whether the real run ran out of memory."""
    return str(row["real_oom"]).lower() == "true"


def ours(row: Row) -> float | None:
    """Our signed error against ground as given; None where there is no ground or no estimate."""
    return _number(row["relative_error"])


def ours_less_setup(row: Row) -> float | None:
    """Our signed error where ground leaves out what was on the card at the first sample: CNN rows, less set-up."""
    return _number(row["relative_error_less_setup"] if row.get("family") == "cnn" else row["relative_error"])


def _number(cell: Any) -> float | None:
    """Return the number in a cell; None where there is none."""
    try:
        value = math.nan if cell is None else float(cell)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def predicted(row: Row) -> bool:
    """Our verdict."""
    return bool(row["predicted_oom"])


def published_error(name: str) -> Callable[[Row], float | None]:
    """Give the signed error of a published estimator from the file's own columns; None where it has no answer."""

    def error(row: Row) -> float | None:
        found, ground = _number(row.get(f"{name}_bytes")), _number(row["ground_bytes"])
        if not found or found < 0 or not ground or str(row.get(f"{name}_oom")).lower() == "true":
            return None
        return (found - ground) / ground

    return error


def published_verdict(name: str) -> Callable[[Row], bool]:
    """Give the verdict of a published estimator from the file's own columns."""
    return lambda row: str(row.get(f"{name}_oom")).lower() == "true"


def summaries(rows: list[Row]) -> list[Summary]:
    """Summarise all rows: ours both ways, then every published estimator that the file holds."""
    found = [
        summarise("ours, ground as given", rows, ours, predicted),
        summarise("ours, CNN rows less set-up", rows, ours_less_setup, predicted),
    ]
    for name in PUBLISHED:
        if any(row.get(f"{name}_bytes") for row in rows):
            found.append(summarise(f"{name} (published)", rows, published_error(name), published_verdict(name)))
    return [*found[:2], *(_without_runtime(summary) for summary in found[2:])]


def by_model(rows: list[Row]) -> list[Summary]:
    """Summarise each model's rows."""
    models = sorted({str(row["model"]) for row in rows}, key=str.lower)
    return [
        summarise(model, [row for row in rows if row["model"] == model], ours_less_setup, predicted) for model in models
    ]


def by_family(rows: list[Row]) -> list[Summary]:
    """Summarise each family's rows, convolutional ones both ways."""
    found = []
    for family in sorted({str(row.get("family", "cnn")) for row in rows}):
        own = [row for row in rows if row.get("family", "cnn") == family]
        found.append(summarise(family or "no family", own, ours, predicted))
        if family == "cnn":
            found.append(summarise("cnn, less set-up", own, ours_less_setup, predicted))
    return found


def _without_runtime(summary: Summary) -> Summary:
    from dataclasses import replace

    return replace(summary, median_runtime_s=None, troubles=0)
