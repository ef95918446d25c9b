"""Compares two runs, or a run with its prediction: which memory came, which went, by cause."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xmem.errors import UsageError
from xmem.query import connect
from xmem.query.subject import Subject, find_subject
from xmem.units import parse_bytes

if TYPE_CHECKING:
    import duckdb

#: What memory can be compared by: columns of `_AT_PEAK`, and the peak of each step.
KEYS = ("category", "module", "operator", "stack", "step")
_LEVELS = ("peak_allocated_bytes", "peak_active_bytes", "peak_reserved_bytes")


@dataclass(frozen=True)
class Change:
    """One line of a comparison; bytes None where a side does not know."""

    name: str
    a_bytes: int | None
    b_bytes: int | None

    @property
    def change_bytes(self) -> int | None:
        """B less A."""
        return None if self.a_bytes is None or self.b_bytes is None else self.b_bytes - self.a_bytes

    @property
    def change(self) -> float | None:
        """B less A as a share of A; None where A has nothing."""
        return None if self.change_bytes is None or not self.a_bytes else self.change_bytes / self.a_bytes


@dataclass(frozen=True)
class Difference:
    """Two sides compared: their peaks, then what the peaks are made of, by each key."""

    a: str
    b: str
    peaks: tuple[Change, ...]
    parts: dict[str, tuple[Change, ...]]
    predicted: bool = False

    def exceeds(self, limit: str) -> bool:
        """Say whether a peak of B lies above A's by more than `limit`: a share like `2%`, or bytes like `100MiB`.

        A prediction (B) must not lie below what was recorded (A) by more than that either.
        """
        share, size = parse_limit(limit)
        for one in self.peaks:
            if one.change_bytes is None or one.a_bytes is None:
                continue
            change = abs(one.change_bytes) if self.predicted else one.change_bytes
            if change > (size if share is None else share * one.a_bytes):
                return True
        return False


@dataclass(frozen=True)
class DiffOptions:
    """Which device of which rank is compared, by what, and how many lines are wanted of each."""

    rank: int | None = None
    device: str | None = None
    by: tuple[str, ...] = KEYS
    top: int = 10


def parse_limit(text: str) -> tuple[float | None, int]:
    """Read `2%` as a share, anything else as bytes."""
    if not text.endswith("%"):
        return None, parse_bytes(text, what="limit")
    try:
        share = float(text[:-1]) / 100
    except ValueError:
        share = -1.0
    if not 0 <= share < 1e6:
        raise UsageError(f"limit {text!r} is not a percentage.", "Write it like 2% or 0.5%, or in bytes like 100MiB.")
    return share, 0


def diff(a: str, b: str, *, store: str | Path | None = None, options: DiffOptions | None = None) -> Difference:
    """Compare two runs of a store at their peaks."""
    options = options or DiffOptions()
    _check_keys(options.by)
    connection = connect(store)
    sides = [find_subject(connection, store, name, options.rank, options.device) for name in (a, b)]
    peaks = [_peaks(connection, side) for side in sides]
    steps = [dict(connection.execute(_STEPS, side.parameters).fetchall()) for side in sides]
    held = [connection.execute(_AT_PEAK, side.parameters).fetchall() for side in sides]
    parts = {
        key: _compare_steps(steps[0], steps[1])[: options.top]
        if key == "step"
        else _compare(held[0], held[1], key, options.top)
        for key in options.by
    }
    return Difference(_label(sides[0]), _label(sides[1]), _changes(_LEVELS, *peaks), parts)


def diff_predicted(
    run: str | None = None, *, store: str | Path | None = None, options: DiffOptions | None = None
) -> Difference:
    """Compare what a run recorded (A) with the newest replay of it in the store (B)."""
    options = options or DiffOptions()
    connection = connect(store)
    side = find_subject(connection, store, run, options.rank, options.device)
    newest = connection.execute(_NEWEST, side.parameters).fetchall()
    if not newest:
        raise UsageError(
            f"There is no replay of {side.run.name!r} ({side.device.label}) in the store.",
            "Make one: xmem simulate --gpu ...",
        )
    identity, allocator, gpu, *levels = newest[0]
    rows = connection.execute(_PREDICTED_STEPS, {**side.parameters, "simulation": identity}).fetchall()
    label = f"replay {identity}: {allocator} on {gpu}"
    parts = {"step": tuple(Change(f"step {step}", recorded, predicted) for step, recorded, predicted in rows)}
    return Difference(_label(side), label, _changes(_LEVELS, _peaks(connection, side), levels), parts, predicted=True)


_PEAKS = """
SELECT peak_allocated_bytes, peak_active_bytes, peak_reserved_bytes FROM peaks
WHERE run_id = $run AND rank = $rank AND device_type = $device_type AND device_index = $device_index
"""
_AT_PEAK = """
SELECT
  coalesce(p.category, 'unknown') AS category,
  p.module,
  p.op AS operator,
  s.frame || coalesce(' (' || parse_filename(s.filename) || ':' || s.line || ')', '') AS stack,
  CAST(sum(p.bytes) AS BIGINT) AS bytes
FROM at_peak AS p
LEFT JOIN own_frames AS s ON s.run_id = p.run_id AND s.rank = p.rank AND s.stack_id = p.stack_id
WHERE p.run_id = $run AND p.rank = $rank AND p.device_type = $device_type AND p.device_index = $device_index
GROUP BY ALL
"""
_STEPS = """
SELECT step AS name, peak_allocated_bytes FROM steps
WHERE run_id = $run AND rank = $rank AND device_type = $device_type AND device_index = $device_index ORDER BY step
"""
_NEWEST = """
SELECT simulation_id, allocator, gpu, peak_allocated_bytes, peak_active_bytes, peak_reserved_bytes FROM simulations
WHERE run_id = $run AND rank = $rank AND device_type = $device_type AND device_index = $device_index
ORDER BY simulated_ns DESC, simulation_id LIMIT 1
"""
_PREDICTED_STEPS = """
SELECT e.step, max(e.allocated_bytes), max(s.allocated_bytes)
FROM events AS e
JOIN simulation_events AS s ON s.run_id = e.run_id AND s.rank = e.rank AND s.seq = e.seq
WHERE e.run_id = $run AND e.rank = $rank AND e.device_type = $device_type AND e.device_index = $device_index
  AND s.simulation_id = $simulation AND e.step IS NOT NULL
GROUP BY e.step ORDER BY e.step
"""


def _check_keys(keys: Sequence[str]) -> None:
    unknown = [key for key in keys if key not in KEYS]
    if unknown:
        raise UsageError(f"Memory cannot be compared by {unknown[0]!r}.", f"Known: {', '.join(KEYS)}")


def _peaks(connection: duckdb.DuckDBPyConnection, side: Subject) -> list[int | None]:
    (row,) = connection.execute(_PEAKS, side.parameters).fetchall()
    return list(row)


def _changes(names: Sequence[str], a: Sequence[int | None], b: Sequence[int | None]) -> tuple[Change, ...]:
    titles = [name.removesuffix("_bytes").replace("_", " ") for name in names]
    return tuple(Change(*one) for one in zip(titles, a, b, strict=True))


def _compare_steps(a: dict[int, int], b: dict[int, int]) -> tuple[Change, ...]:
    return tuple(Change(f"step {step}", a.get(step), b.get(step)) for step in sorted(a.keys() | b.keys()))


def _compare(a_rows: list[tuple[Any, ...]], b_rows: list[tuple[Any, ...]], key: str, top: int) -> tuple[Change, ...]:
    """Return the lines that changed most, and one line for the rest, so that they add up to the peaks."""
    a, b = (_sums(rows, KEYS.index(key)) for rows in (a_rows, b_rows))
    names = sorted(a.keys() | b.keys(), key=lambda name: (-abs(b.get(name, 0) - a.get(name, 0)), name or ""))
    lines = [Change(_shown(name), a.get(name, 0), b.get(name, 0)) for name in names]
    if len(lines) <= top:
        return tuple(lines)
    rest = lines[top:]
    return (*lines[:top], Change(f"({len(rest)} others)", *(_sum(rest, side) for side in ("a_bytes", "b_bytes"))))


def _sums(rows: list[tuple[Any, ...]], column: int) -> dict[str | None, int]:
    summed: dict[str | None, int] = {}
    for row in rows:
        summed[row[column]] = summed.get(row[column], 0) + row[-1]
    return summed


def _sum(lines: Sequence[Change], side: str) -> int:
    return sum(getattr(line, side) for line in lines)


def _shown(name: Any) -> str:
    return "(not recorded)" if name is None else str(name)


def _label(side: Subject) -> str:
    return f"{side.run.name} ({side.run.run_id}), rank {side.device.rank}, {side.device.label}"
