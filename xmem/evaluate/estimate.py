"""The engine `cpu`: profile, ingest and simulate in one call; does a job fit on a GPU, and up to which batch?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xmem.capture.workload import Workload
from xmem.evaluate.job import Job, prepare_job
from xmem.evaluate.outside import OutsideLine, outside_lines
from xmem.simulate.device import AddressPolicy
from xmem.simulate.options import SimulateOptions, parse_reserve
from xmem.simulate.rules import RuleEffect, gpu_facts

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

    from xmem.evaluate.virtual_range import PeakRange
    from xmem.simulate.gpu_table import Target
    from xmem.simulate.judge import Case, Judgement
    from xmem.simulate.verdict import Verdict

Progress = Callable[[str], None]
_DEFAULTS = SimulateOptions()
RECURRENT = (
    "Recurrent layers run in cuDNN on a GPU; how much it reserves for backward is not known,"
    " what the CPU keeps stands in for it: take activations as uncertain."
)
FAKE = (
    "Recorded on fake tensors: shapes and lifetimes are torch's own, a value that the program reads is no, or 1.0;"
    " what kernels allocate inside comes from rules, and the peak has no range."
)
#: No job is asked for a larger batch than this.
LARGEST_BATCH = 1 << 20
#: cudaMalloc hands out descending addresses in most public snapshots of real GPUs (4 of the 6 that show it).
ADDRESS_POLICY: AddressPolicy = "down"


@dataclass(frozen=True)
class MaxBatch:
    """The largest batch size that fits, and what the next one needs; 0 where not even one sample fits."""

    batch_size: int
    peak_reserved_bytes: int
    next_peak_reserved_bytes: int | None
    replays: int


@dataclass(frozen=True)
class Estimate:
    """The verdict with what it stands on: profiles, rules, set-up memory, memory outside the allocator."""

    verdict: Verdict
    workload: Workload
    profiled_batch_sizes: tuple[int, ...]
    setup_reserved_bytes: int
    rules: tuple[RuleEffect, ...]
    outside: tuple[OutsideLine, ...]
    max_batch: MaxBatch | None = None
    peak_range: PeakRange | None = None
    engine: str = "cpu"

    @property
    def too_close_to_call(self) -> bool:
        """Say whether the verdict changes within a range: of the peak on a virtual card, else of what is outside.

        Memory outside the allocator counts where it is assumed, not given.
        """
        if self.peak_range is not None:
            return self.peak_range.too_close
        smallest, assumed = self.verdict.smallest_device_bytes, self.verdict.non_torch_bytes
        if smallest is None or assumed != parse_reserve(_DEFAULTS).non_torch_bytes:
            return False
        always = [line for line in self.outside if line.always]
        least, most = (sum(line.least_bytes for line in always), sum(line.most_bytes for line in always))
        return bool(smallest - assumed + least <= self.verdict.total_bytes < smallest - assumed + most)

    @property
    def fits(self) -> bool:
        """Say whether the job fits; with max_batch, whether any batch does."""
        return self.verdict.fits if self.max_batch is None else self.max_batch.batch_size > 0

    def to_dict(self) -> dict[str, Any]:
        """Return the keys of the JSON answer: those of a verdict, and the estimate's own."""
        ranged = self.peak_range
        own = {
            "engine": self.engine,
            "workload": asdict(self.workload),
            "profiled_batch_sizes": self.profiled_batch_sizes,
            "estimate_bytes": self.verdict.peak_reserved_bytes if ranged is None else ranged.estimate_bytes,
            "range_low_bytes": None if ranged is None else ranged.low_bytes,
            "range_high_bytes": None if ranged is None else ranged.high_bytes,
            "stable": None if ranged is None else ranged.stable,
            "unstable": [] if ranged is None else ranged.unstable,
            "setup_reserved_bytes": self.setup_reserved_bytes,
            "rules": [asdict(rule) for rule in self.rules],
            "too_close_to_call": self.too_close_to_call,
            "outside": [asdict(line) for line in self.outside],
            "max_batch": None if self.max_batch is None else asdict(self.max_batch),
        }
        return {**self.verdict.to_dict(), **own}


@dataclass(frozen=True)
class EstimateOptions:
    """How to estimate: where profiles are kept, whether to extrapolate and check, to search a batch, to tell rules."""

    cache: str | Path | None = None
    exact: bool = False
    check: bool = True
    max_batch: bool = False
    fake: bool = False
    explain_rules: bool = False
    progress: Progress | None = None


def estimate_on_cpu(
    workload: Workload,
    *,
    gpu: str | int,
    options: SimulateOptions = _DEFAULTS,
    how: EstimateOptions = EstimateOptions(),
) -> Estimate:
    """Estimate a training job's memory on a GPU from CPU runs of small batches; raises UsageError."""
    from xmem.simulate.gpu_table import parse_gpu

    target = parse_gpu(gpu)
    wanted = workload.with_batch(max(workload.batch_size, 8)) if how.max_batch else workload
    job = prepare_job(
        wanted, cache=how.cache, exact=(how.exact or how.fake) and not how.max_batch, check=how.check, fake=how.fake,
        progress=how.progress,
    )  # fmt: skip
    best = find_max_batch(job, target, options, how.progress) if how.max_batch else None
    size = workload.batch_size if best is None else max(best.batch_size, 1)
    judgement, effects = judge_batch(job, size, target, options)
    return Estimate(
        verdict=judgement.verdict,
        workload=workload.with_batch(size),
        profiled_batch_sizes=tuple(profile.batch_size for profile in job.profiles),
        setup_reserved_bytes=setup_reserved(judgement.table, judgement.unlimited.levels),
        rules=effects,
        outside=outside_lines(judgement.verdict.non_torch_bytes),
        max_batch=best,
        engine="fake" if how.fake else "cpu",
    )


def estimate_on_fakes(
    workload: Workload,
    *,
    gpu: str | int,
    options: SimulateOptions = _DEFAULTS,
    how: EstimateOptions = EstimateOptions(),
) -> Estimate:
    """Estimate from a run of the wanted batch size on fake tensors; raises UsageError where the job needs values."""
    return estimate_on_cpu(workload, gpu=gpu, options=options, how=replace(how, fake=True))


def judge_batch(
    job: Job, batch_size: int, target: Target, options: SimulateOptions
) -> tuple[Judgement, tuple[RuleEffect, ...]]:
    """Replay one batch size on the target and say what it means."""
    from xmem.simulate.judge import judge

    facts = gpu_facts(target)
    table, effects = job.requests(batch_size, facts)
    case = make_case(job, batch_size, target, options, facts.note)
    return judge(table, case), effects


def make_case(job: Job, batch_size: int, target: Target, options: SimulateOptions, note: str = "") -> Case:
    """Describe what is judged: the job at one batch size on the target."""
    from xmem.simulate.judge import Case
    from xmem.simulate.simulation import make_setup

    setup, _ = make_setup(options, options.torch_version or job.torch_version)
    setup = replace(setup, address_policy=ADDRESS_POLICY)
    how = "profiled" if any(p.batch_size == batch_size for p in job.profiles) else "extrapolated from profiles with"
    sizes = " and ".join(str(p.batch_size) for p in job.profiles)
    where = "fake tensors" if job.fake else "the CPU"
    notes = [f"Batch size {batch_size} is {how} batch size {sizes} on {where}." if how != "profiled" else "", note]
    notes += [RECURRENT] if job.recurrent else []
    notes += [FAKE] if job.fake else []
    return Case(
        run_id=job.profiles[0].run_id,
        run_name=f"{job.workload.model} {job.workload.optimizer} batch {batch_size}",
        rank=0,
        device="cuda:0, estimated",
        target=target,
        reserve=parse_reserve(options),
        setup=setup,
        notes=tuple(text for text in notes if text),
        search_smallest=options.smallest,
    )


def setup_reserved(table: pa.Table, levels: np.ndarray[Any, Any] | None) -> int:
    """Return what is reserved once the model and the optimizer stand, before the first step."""
    import pyarrow.compute as pc

    before = pc.index(table.column("step").is_null(), False).as_py()
    count = len(table) if before < 0 else before
    return 0 if levels is None or count == 0 else int(levels[:count, 2].max())


def find_max_batch(job: Job, target: Target, options: SimulateOptions, progress: Progress | None = None) -> MaxBatch:
    """Find a batch size that fits while one more does not, both by replay; doubling first, then bisection."""
    from xmem.simulate.replay import encode
    from xmem.simulate.trial import UNLIMITED_BYTES, try_on

    facts = gpu_facts(target)
    reserve, tried = parse_reserve(options), {}

    def peak(size: int) -> int | None:
        if progress is not None:
            progress(f"trying batch size {size}")
        case = make_case(job, size, target, options)
        encoded = encode(job.requests(size, facts)[0])
        total, usable = target.total_bytes, reserve.usable(target.total_bytes)
        on_device = try_on(encoded, case.setup, total, total - usable)
        tried[size] = on_device.stats.peak_reserved_bytes if on_device.fits else None
        if not on_device.fits:
            tried[-size] = try_on(encoded, case.setup, UNLIMITED_BYTES).stats.peak_reserved_bytes
        return tried[size]

    fits, fails = 0, 1
    while fails < LARGEST_BATCH and peak(fails) is not None:
        fits, fails = fails, fails * 2
    while fails - fits > 1:
        middle = (fits + fails) // 2
        if peak(middle) is None:
            fails = middle
        else:
            fits = middle
    return MaxBatch(fits, tried.get(fits) or 0, tried.get(-fails), len([size for size in tried if size > 0]))
