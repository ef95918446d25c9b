"""Many settings of the allocator over the same requests, best first, in parallel processes where that pays."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from xmem.errors import UsageError
from xmem.simulate.conf import AllocConf, parse_conf
from xmem.simulate.ops_file import prepare_ops
from xmem.simulate.options import SimulateOptions
from xmem.simulate.simulation import prepare
from xmem.simulate.trial import UNLIMITED_BYTES, Setup, try_on
from xmem.store import Store

if TYPE_CHECKING:
    import pyarrow as pa

    from xmem.simulate.judge import Case
    from xmem.simulate.replay import Encoded

#: Settings that a sweep tries beside the run's own; those that the torch version does not know are left out.
SETTINGS = (
    "expandable_segments:True",
    "max_split_size_mb:20",
    "max_split_size_mb:32",
    "max_split_size_mb:64",
    "max_split_size_mb:128",
    "max_split_size_mb:256",
    "max_split_size_mb:512",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:8",
    "roundup_power2_divisions:16",
    "large_segment_size_mb:12",
    "large_segment_size_mb:40",
    "per_process_memory_fraction:0.99,garbage_collection_threshold:0.8",
)
#: Below this many requests times settings, starting processes costs more than it saves.
WORTH_PROCESSES = 2_000_000
#: Above this, a plain simulation does not try which settings would have saved it.
WORTH_ADVICE = 4_000_000

_DEFAULTS = SimulateOptions()


@dataclass(frozen=True)
class SweepRow:
    """What one setting gives on the target. Peaks are those of a replay without a limit where it does not fit.

    `unused_bytes` is peak reserved less peak active: what the allocator takes beyond what it serves. `requests_served`
    counts requests up to the first failure. `is_current` marks the setting that the simulation would use by itself.
    """

    allocator: str
    alloc_conf: str
    fits: bool
    peak_reserved_bytes: int
    peak_active_bytes: int
    unused_bytes: int
    num_alloc_retries: int
    num_ooms: int
    requests_served: int
    is_current: bool


def sweep(
    run: str | None = None,
    *,
    gpu: str | int | None = None,
    store: str | Path | None = None,
    options: SimulateOptions = _DEFAULTS,
    settings: Sequence[str] | None = None,
    ops: str | Path | None = None,
) -> tuple[SweepRow, ...]:
    """Replay a run under each of `settings` (None: a built-in list) and return one row each, best first.

    `ops` names an operation file that stands in for the run (see simulate_ops).
    Best is: fits, then least peak reserved, fewest retries, the shorter setting. Raises UsageError where a setting
    that was asked for cannot be parsed.
    """
    from xmem.simulate.replay import encode

    table, case = prepare_either(run, ops, gpu, store, options)
    return sweep_settings(encode(table), case, settings)


def prepare_either(
    run: str | None, ops: str | Path | None, gpu: str | int | None, store: str | Path | None, options: SimulateOptions
) -> tuple[pa.Table, Case]:
    """Return requests and case of an operation file where one is named, else of a run."""
    if ops is not None:
        return prepare_ops(ops, gpu=gpu, options=options)
    return prepare(Store(store), run, gpu, options)


def sweep_settings(encoded: Encoded, case: Case, settings: Sequence[str] | None = None) -> tuple[SweepRow, ...]:
    """Do the sweep for requests that are already encoded."""
    setups = _setups(case.setup, settings)
    work = _Work(encoded, case.target.total_bytes, case.usable_bytes, case.setup)
    return tuple(sorted(_map(work, setups), key=_rank))


def settings_that_fit(encoded: Encoded, case: Case) -> tuple[str, ...] | None:
    """Return the settings of the built-in list that fit where the case does not; None where that takes too long."""
    if len(encoded) * len(SETTINGS) > WORTH_ADVICE:
        return None
    total, usable = case.target.total_bytes, case.usable_bytes
    found = []
    for setup in _setups(case.setup, None)[1:]:
        result = try_on(encoded, setup, total, total - usable)
        if result.fits:
            found.append((result.stats.peak_reserved_bytes, setup.alloc_conf))
    return tuple(conf for _, conf in sorted(found))


def _rank(row: SweepRow) -> tuple[bool, int, int, int, int, str]:
    behind = 0 if row.fits else -row.requests_served
    return not row.fits, row.peak_reserved_bytes, row.num_alloc_retries, behind, len(row.alloc_conf), row.alloc_conf


def _setups(current: Setup, settings: Sequence[str] | None) -> list[Setup]:
    """Return the current setup and one for each setting, without repeats; built-in ones only where torch knows them."""
    setups = [current]
    seen: list[tuple[str, AllocConf]] = [(current.allocator, parse_conf(current.alloc_conf, current.torch_version))]
    if settings is None and current.allocator not in ("native", "expandable"):
        return setups
    for text in ("", *SETTINGS) if settings is None else settings:
        try:
            key = (current.allocator, parse_conf(text, current.torch_version))
        except UsageError:
            if settings is None:
                continue
            raise
        if key not in seen:
            seen.append(key)
            setups.append(replace(current, alloc_conf=text).resolved())
    return setups


@dataclass(frozen=True)
class _Work:
    """What every process needs: the requests, the device and the setting that is in force without a sweep."""

    encoded: Encoded
    total_bytes: int
    usable_bytes: int
    current: Setup

    def row(self, setup: Setup) -> SweepRow:
        """Replay one setting."""
        result = try_on(self.encoded, setup, self.total_bytes, self.total_bytes - self.usable_bytes)
        peaks = result.stats if result.fits else try_on(self.encoded, setup, UNLIMITED_BYTES).stats
        return SweepRow(
            allocator=setup.allocator,
            alloc_conf=setup.alloc_conf,
            fits=result.fits,
            peak_reserved_bytes=peaks.peak_reserved_bytes,
            peak_active_bytes=peaks.peak_active_bytes,
            unused_bytes=peaks.peak_reserved_bytes - peaks.peak_active_bytes,
            num_alloc_retries=result.stats.num_alloc_retries,
            num_ooms=max(result.stats.num_ooms, len(result.failures)),
            requests_served=result.done,
            is_current=setup == self.current,
        )


_work: _Work | None = None


def _receive(work: _Work) -> None:
    global _work
    _work = work


def _row_in_process(setup: Setup) -> SweepRow:
    assert _work is not None
    return _work.row(setup)


def _map(work: _Work, setups: list[Setup]) -> list[SweepRow]:
    """Replay each setup, in fresh processes where that pays and can be done, else one after another."""
    workers = min(os.cpu_count() or 1, len(setups))
    in_child = multiprocessing.parent_process() is not None
    if workers > 1 and not in_child and len(work.encoded) * len(setups) >= WORTH_PROCESSES:
        context = multiprocessing.get_context("spawn")
        start: Callable[[_Work], None] = _receive
        try:
            with ProcessPoolExecutor(workers, context, initializer=start, initargs=(work,)) as pool:
                return list(pool.map(_row_in_process, setups))
        except (BrokenProcessPool, OSError):
            pass  # no processes to be had here (a script without a main guard, a sandbox): do it in this one
    return [work.row(setup) for setup in setups]
