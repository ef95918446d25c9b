"""From requests and a target to a verdict: replay, compare, search, explain."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xmem.simulate.explain import explain_failure
from xmem.simulate.gpu_table import Target
from xmem.simulate.options import Reserve
from xmem.simulate.peaks import cycle_peaks, held_at_peak, step_peaks
from xmem.simulate.replay import OOM, Encoded, Replay, encode
from xmem.simulate.torch_version import NEWEST
from xmem.simulate.trial import UNLIMITED_BYTES, Setup, depends_on_device, find_smallest_usable, try_on
from xmem.simulate.verdict import IssueLine, Oom, Verdict

if TYPE_CHECKING:
    import pyarrow as pa

    from xmem.simulate.rules import RuleEffect


@dataclass(frozen=True)
class Case:
    """What is judged besides the requests: where they come from, the target, and how to replay.

    `has_steps` says that steps come from the source; without them cycles stand in (operation files).
    """

    run_id: str | None
    run_name: str
    rank: int
    device: str
    target: Target
    reserve: Reserve
    setup: Setup
    torch_version_assumed: bool = False
    issues: tuple[IssueLine, ...] = ()
    notes: tuple[str, ...] = ()
    recorded_peak_allocated_bytes: int | None = None
    recorded_peak_reserved_bytes: int | None = None
    search_smallest: bool = True
    has_steps: bool = True
    requests_sql: str | None = None
    rules: tuple[RuleEffect, ...] = ()

    @property
    def usable_bytes(self) -> int:
        """What the allocator may reserve on the target."""
        return self.reserve.usable(self.target.total_bytes)

    @property
    def simulation_id(self) -> str:
        """A short stable hash of everything that decides the answer."""
        setup = self.setup
        facts = (
            self.run_id, self.rank, self.device, self.target.total_bytes, self.usable_bytes,
            setup.allocator, setup.alloc_conf, setup.torch_version, self.requests_sql, bool(self.rules),
        )  # fmt: skip
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Judgement:
    """A verdict with what it stands on: the requests, the replay on the target, and one without a limit."""

    verdict: Verdict
    table: pa.Table
    encoded: Encoded
    on_device: Replay
    unlimited: Replay


def judge(table: pa.Table, case: Case) -> Judgement:
    """Replay checked requests (requests.check_requests) for the case and say what it means."""
    encoded = encode(table)
    unlimited, on_device = replay_both(encoded, case.setup, case.target.total_bytes, case.usable_bytes)
    smallest = None
    if case.search_smallest:
        smallest = find_smallest_usable(encoded, case.setup, unlimited, case.reserve)
    oom = explain_failure(encoded, table, on_device)
    verdict = _verdict(table, case, encoded, (unlimited, on_device), (smallest, oom))
    return Judgement(verdict, table, encoded, on_device, unlimited)


def replay_both(encoded: Encoded, setup: Setup, total_bytes: int, usable_bytes: int) -> tuple[Replay, Replay]:
    """Replay in full without a limit and on the device; one replay serves both where they cannot differ."""
    unlimited = try_on(encoded, setup, UNLIMITED_BYTES, in_full=True)
    roomy = unlimited.fits and unlimited.stats.peak_reserved_bytes <= usable_bytes // (2 << 20) * (2 << 20)
    if roomy and not depends_on_device(setup):
        return unlimited, unlimited
    return unlimited, try_on(encoded, setup, total_bytes, total_bytes - usable_bytes, in_full=True)


def _verdict(
    table: pa.Table,
    case: Case,
    encoded: Encoded,
    replays: tuple[Replay, Replay],
    found: tuple[int | None, Oom | None],
) -> Verdict:
    unlimited, on_device = replays
    smallest, oom = found
    shown = on_device if on_device.fits else unlimited
    return Verdict(
        fits=on_device.fits,
        smallest_device_bytes=None if smallest is None else case.reserve.total_for(smallest),
        smallest_usable_bytes=smallest,
        fragmentation=_fragmentation(shown.stats.peak_requested_bytes, smallest),
        num_ooms=max(on_device.stats.num_ooms, len(on_device.failures)),
        num_alloc_retries=on_device.stats.num_alloc_retries,
        oom=oom,
        peaks_on="device" if on_device.fits else "unlimited",
        requests=len(encoded),
        notes=(*case.notes, *_notes(table, encoded, case)),
        **_case_facts(case),
        **_peak_facts(table, case, encoded, shown),
    )


def _case_facts(case: Case) -> dict[str, Any]:
    """Return the fields of a verdict that come from the case alone."""
    return {
        "total_bytes": case.target.total_bytes,
        "non_torch_bytes": case.reserve.non_torch_bytes,
        "usable_bytes": case.usable_bytes,
        "headroom_bytes": case.reserve.headroom(case.target.total_bytes),
        "allocator": case.setup.allocator,
        "alloc_conf": case.setup.alloc_conf,
        "torch_version": case.setup.torch_version or ".".join(map(str, NEWEST)),
        "torch_version_assumed": case.torch_version_assumed,
        "issues": case.issues,
        "run_id": case.run_id,
        "run_name": case.run_name,
        "rank": case.rank,
        "device": case.device,
        "gpu": case.target.text,
        "gpu_note": case.target.note,
        "recorded_peak_allocated_bytes": case.recorded_peak_allocated_bytes,
        "recorded_peak_reserved_bytes": case.recorded_peak_reserved_bytes,
        "simulation_id": case.simulation_id,
        "rules": case.rules,
    }


def _peak_facts(table: pa.Table, case: Case, encoded: Encoded, shown: Replay) -> dict[str, Any]:
    """Return the fields of a verdict that come from the levels of one replay."""
    stats, levels = shown.stats, shown.levels
    assert levels is not None
    allocated = levels[:, 0]
    first, steady = step_peaks(allocated, table) if case.has_steps else cycle_peaks(encoded, allocated)
    fullest = int(levels[:, 2].argmax()) if len(levels) else -1
    return {
        "peak_requested_bytes": stats.peak_requested_bytes,
        "peak_allocated_bytes": stats.peak_allocated_bytes,
        "peak_active_bytes": stats.peak_active_bytes,
        "peak_reserved_bytes": stats.peak_reserved_bytes,
        "first_step_peak_bytes": first,
        "steady_peak_bytes": steady,
        "end_allocated_bytes": stats.allocated_bytes,
        "end_reserved_bytes": stats.reserved_bytes,
        "unused_at_peak_bytes": int(levels[fullest, 2] - levels[fullest, 1]) if len(levels) else 0,
        "at_peak": held_at_peak(encoded, table, allocated, stats.peak_allocated_bytes),
    }


def _fragmentation(peak_requested_bytes: int, smallest_usable_bytes: int | None) -> float | None:
    """Return the share of the smallest sufficient memory that the live bytes do not explain (docs/fragmentation.md)."""
    if not smallest_usable_bytes:
        return None
    return round(1 - peak_requested_bytes / smallest_usable_bytes, 4)


def _notes(table: pa.Table, encoded: Encoded, case: Case) -> list[str]:
    """Say what a reader of the figures must know about the requests themselves."""
    import numpy as np
    import pyarrow.compute as pc

    notes = []
    failed = int(np.count_nonzero(encoded.codes == OOM))
    if failed:
        notes.append(
            f"The recording itself met {failed} out-of-memory error{'s' if failed > 1 else ''}; such a request is tried"
            " and let go again, and what the program would have done with it is not known."
        )
    if encoded.dropped_frees:
        notes.append(f"{encoded.dropped_frees} frees name no live allocation and do nothing.")
    if not len(table):
        return [*notes, "There are no requests at all, so nothing was replayed."]
    steps = table.column("step")
    if case.has_steps and steps.null_count == len(steps):
        notes.append("The recording names no steps, so first-step and steady peak are not told apart.")
    elif case.has_steps and (first := pc.min(steps).as_py()) > 1:
        notes.append(f"The first recorded step is step {first}; what earlier steps took is not in the recording.")
    return notes
