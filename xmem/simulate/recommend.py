"""The allocator setting to use, as a line ready to paste, and what it saves; or that none helps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from xmem.simulate.conf import variable_names
from xmem.simulate.options import SimulateOptions
from xmem.simulate.sweep import SweepRow, prepare_either, sweep_settings
from xmem.simulate.torch_version import parse_version
from xmem.units import format_bytes

_DEFAULTS = SimulateOptions()
#: A saving below this share of the current peak reserved is not worth a setting.
WORTH_SHARE = 0.01


@dataclass(frozen=True)
class Recommendation:
    """What to set: `line` is ready to paste, None where no setting helps. `sentence` says why.

    `saves_bytes` is the current peak reserved less that of the recommended setting (0 where none helps).
    """

    line: str | None
    alloc_conf: str | None
    saves_bytes: int
    current: SweepRow
    best: SweepRow
    rows: tuple[SweepRow, ...]
    sentence: str


def recommend(
    run: str | None = None,
    *,
    gpu: str | int | None = None,
    store: str | Path | None = None,
    options: SimulateOptions = _DEFAULTS,
    ops: str | Path | None = None,
) -> Recommendation:
    """Sweep the built-in settings over a run, or an operation file, on a GPU and name the one to use."""
    from xmem.simulate.replay import encode

    table, case = prepare_either(run, ops, gpu, store, options)
    return choose(sweep_settings(encode(table), case), case.setup.torch_version)


def choose(rows: tuple[SweepRow, ...], torch_version: str | None) -> Recommendation:
    """Choose from a sweep: a setting that fits where the current one does not, else one that saves at least 1 %."""
    current = next(row for row in rows if row.is_current)
    best = rows[0]
    saves = current.peak_reserved_bytes - best.peak_reserved_bytes
    worth = saves >= max(1, int(current.peak_reserved_bytes * WORTH_SHARE))
    spares_retries = saves >= 0 and best.num_alloc_retries < current.num_alloc_retries
    if best is current or not best.fits or not (not current.fits or worth or spares_retries):
        return Recommendation(None, None, 0, current, best, rows, _no_help(current, best))
    variable = variable_names(parse_version(torch_version))[-1]
    line = f"export {variable}={best.alloc_conf}" if best.alloc_conf else f"unset {variable}"
    return Recommendation(line, best.alloc_conf, saves, current, best, rows, _gain(current, best, saves))


def _gain(current: SweepRow, best: SweepRow, saves: int) -> str:
    peaks = f"{format_bytes(best.peak_reserved_bytes)} instead of {format_bytes(current.peak_reserved_bytes)}"
    change = f"{format_bytes(abs(saves))} {'less' if saves >= 0 else 'more'}"
    if not current.fits:
        return f"With this setting the run fits, without it it does not: peak reserved {peaks} ({change})."
    retries = f", {best.num_alloc_retries} retries instead of {current.num_alloc_retries}"
    return f"Peak reserved {peaks} ({change}){retries if current.num_alloc_retries else ''}."


def _no_help(current: SweepRow, best: SweepRow) -> str:
    if not best.fits:
        need = f"{best.alloc_conf or 'the default'} needs least, {format_bytes(best.peak_reserved_bytes)}"
        return f"No setting helps: none makes the run fit; {need} without a limit."
    unused = f"{format_bytes(current.unused_bytes)} of {format_bytes(current.peak_reserved_bytes)}"
    return (
        f"No setting helps: the run fits as it is, and none lowers its peak reserved by 1 % (unused at most: {unused})."
    )
