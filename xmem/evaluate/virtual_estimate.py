"""`estimate --engine vgpu`: the job runs on a virtual card like the target, and its recorded requests are judged."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from xmem.capture.vgpu import recording, workloads
from xmem.capture.vgpu.farm import Peaks, Run, run_many
from xmem.capture.vgpu.library import library_key
from xmem.capture.vgpu.recording import SUFFIX, Part, read_parts, write_log
from xmem.capture.vgpu.run import OUT_OF_MEMORY
from xmem.capture.vgpu.settings import BOOTSTRAP, Recording, VirtualGpu
from xmem.capture.vgpu.torch_facts import default_python, find_torch
from xmem.capture.workload import Workload
from xmem.errors import UnreadableError, UsageError
from xmem.evaluate.estimate import ADDRESS_POLICY, Estimate, EstimateOptions, setup_reserved
from xmem.evaluate.job import cache_folder
from xmem.evaluate.outside import outside_lines
from xmem.evaluate.virtual import card_of
from xmem.evaluate.virtual_range import find_range, keep_peaks, range_file, variants_of
from xmem.simulate.options import SimulateOptions, parse_reserve
from xmem.store import Store

if TYPE_CHECKING:
    from xmem.simulate.gpu_table import Target
    from xmem.simulate.judge import Judgement

#: Where the job does not fit, this much more memory shows what it would have asked for.
ROOMY = 16
#: A job that takes longer is ended.
MOST_S = 300


def estimate_virtually(
    workload: Workload, *, gpu: str | int, options: SimulateOptions, how: EstimateOptions
) -> Estimate:
    """Estimate a training job's memory by running it on a virtual card; raises UsageError."""
    from xmem.simulate.gpu_table import parse_gpu

    if how.max_batch:
        raise UsageError("The engine vgpu runs one batch size; it looks for no largest one.", "Use --engine cpu.")
    target = parse_gpu(gpu)
    taken = target.total_bytes - parse_reserve(options).usable(target.total_bytes)
    own = VirtualGpu(card_of(target.gpu.name if target.gpu else ""), target.total_bytes, taken)
    roomy = replace(own, total_bytes=ROOMY * target.total_bytes)
    folder = cache_folder(how.cache)
    log, fits = record(workload, own, options, how, folder)
    if not fits:
        log, _ = record(workload, roomy, options, how, folder)
    judgement = judge_log(log, workload, target, options, Store(folder / "store"))
    kept = [range_file(folder, record_key(workload, gpu, options)) for gpu in (own, roomy)]
    return Estimate(
        verdict=judgement.verdict,
        workload=workload,
        profiled_batch_sizes=(workload.batch_size,),
        setup_reserved_bytes=setup_reserved(judgement.table, judgement.unlimited.levels),
        rules=(),
        outside=outside_lines(judgement.verdict.non_torch_bytes),
        engine="vgpu",
        peak_range=None if options.alloc_conf else find_range(workload, (own, kept[0]), (roomy, kept[1])),
    )


def record_key(workload: Workload, gpu: VirtualGpu, options: SimulateOptions) -> str:
    """Return the key of a job's recording on a card; what records it counts too."""
    torch = find_torch(default_python())
    content = hashlib.sha256()
    for file in (*sorted(BOOTSTRAP.glob("*.py")), Path(workloads.__file__), Path(recording.__file__)):
        content.update(file.read_bytes())
    return workload.key(library_key(torch), content.hexdigest(), json.dumps(asdict(gpu)), options.alloc_conf or "")


def record(
    workload: Workload, gpu: VirtualGpu, options: SimulateOptions, how: EstimateOptions, folder: Path
) -> tuple[Path, bool]:
    """Run the job on the card where the cache does not hold its recording; say whether it ran to its end.

    The variants that make the range run in the same process, after one import of torch.
    """
    key = record_key(workload, gpu, options)
    kept, failed = folder / f"vgpu-{key}{SUFFIX}", folder / f"vgpu-{key}-oom{SUFFIX}"
    for log in (kept, failed):
        if log.exists():
            return log, log == kept
    if how.progress is not None:
        how.progress(f"running {workload.model} on a virtual {gpu.card.name}")
    folder.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".running-", dir=folder))
    try:
        part = _run(workload, gpu, options, range_file(folder, key), work)
        facts = {"virtual_gpu": gpu.card.name, "total_bytes": gpu.total_bytes, "non_torch_bytes": gpu.taken_bytes}
        ran_out = part.status.startswith(OUT_OF_MEMORY) and bool(part.out_of_memory)
        return write_log(part, failed if ran_out else kept, {**facts, **workload.describe()}), not ran_out
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _run(workload: Workload, gpu: VirtualGpu, options: SimulateOptions, peaks_file: Path, work: Path) -> Part:
    """Record the job, and keep the peaks of its variants; raises UnreadableError where it fails."""
    recorded = Run("recorded", workload, gpu, recording=Recording(work, workload.iterations + 1, MOST_S))
    recorded = replace(recorded, alloc_conf=options.alloc_conf or "")
    others = [] if options.alloc_conf else variants_of(workload, gpu)
    found = {run.key: peaks for run, peaks in run_many([recorded, *others], default_python(), peaks_file.parent)}
    trouble = str(found.pop("recorded", "it left without an answer"))
    parts = read_parts(work)
    ran_out = bool(parts) and parts[0].status.startswith(OUT_OF_MEMORY) and bool(parts[0].out_of_memory)
    if not parts or (trouble and not ran_out):
        raise UnreadableError(f"The job failed on the virtual GPU: {trouble or 'it asked for no memory'}")
    if isinstance(found.get("base"), Peaks):
        keep_peaks(found, peaks_file)
    return parts[0]


def judge_log(log: Path, workload: Workload, target: Target, options: SimulateOptions, store: Store) -> Judgement:
    """Judge the recorded requests on the target."""
    from xmem.ingest import IngestOptions, ingest
    from xmem.simulate.judge import Case, judge
    from xmem.simulate.requests import find_source, make_recorded_requests, read_requests
    from xmem.simulate.simulation import make_setup

    run = ingest([log], options=IngestOptions(store=store.path))[0]
    with closing(store.connect()) as connection:
        source = find_source(connection, store.find_run(run.run_id))
        make_recorded_requests(connection, source)
        table = read_requests(connection, None, store)
    setup, _ = make_setup(options, options.torch_version or source.torch_version)
    case = Case(
        run_id=run.run_id,
        run_name=f"{workload.model} {workload.optimizer} batch {workload.batch_size}",
        rank=0,
        device="cuda:0, virtual",
        target=target,
        reserve=parse_reserve(options),
        setup=replace(setup, address_policy=ADDRESS_POLICY),
        notes=("The job ran on a virtual card: the real allocator and library heuristics, kernels that do nothing.",),
        search_smallest=options.smallest,
    )
    return judge(table, case)
