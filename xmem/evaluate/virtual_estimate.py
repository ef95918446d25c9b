"""`estimate --engine vgpu`: the job runs on a virtual card like the target, and its recorded requests are judged."""

from __future__ import annotations

import hashlib
import json
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from xmem.capture.vgpu import recording, workloads
from xmem.capture.vgpu.farm import MODULE
from xmem.capture.vgpu.library import library_key
from xmem.capture.vgpu.run import SUFFIX, Job, run_job
from xmem.capture.vgpu.settings import BOOTSTRAP, VirtualGpu
from xmem.capture.vgpu.torch_facts import default_python, find_torch
from xmem.capture.workload import Workload
from xmem.errors import UnreadableError, UsageError
from xmem.evaluate.estimate import ADDRESS_POLICY, Estimate, EstimateOptions, setup_reserved
from xmem.evaluate.job import cache_folder
from xmem.evaluate.outside import outside_lines
from xmem.evaluate.virtual import card_of
from xmem.evaluate.virtual_range import find_range
from xmem.simulate.options import SimulateOptions, parse_reserve
from xmem.store import Store

if TYPE_CHECKING:
    from xmem.simulate.gpu_table import Target
    from xmem.simulate.judge import Judgement

#: Where the job does not fit, this much more memory shows what it would have asked for.
ROOMY = 16


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
    folder = cache_folder(how.cache)
    log, fits = record(workload, own, options, how, folder)
    roomy = replace(own, total_bytes=ROOMY * target.total_bytes)
    if not fits:
        log, _ = record(workload, roomy, options, how, folder)
    key = record_key(workload, own, options)
    judgement = judge_log(log, workload, target, options, Store(folder / "store"))
    return Estimate(
        verdict=judgement.verdict,
        workload=workload,
        profiled_batch_sizes=(workload.batch_size,),
        setup_reserved_bytes=setup_reserved(judgement.table, judgement.unlimited.levels),
        rules=(),
        outside=outside_lines(judgement.verdict.non_torch_bytes),
        peak_range=None if options.alloc_conf else find_range(workload, own, roomy, folder, key),
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
    """Run the job on the card where the cache does not hold its recording; say whether it ran to its end."""
    torch = find_torch(default_python())
    conf = options.alloc_conf or ""
    key = record_key(workload, gpu, options)
    kept, failed = folder / f"vgpu-{key}{SUFFIX}", folder / f"vgpu-{key}-oom{SUFFIX}"
    for log in (kept, failed):
        if log.exists():
            return log, log == kept
    words = ("-m", MODULE, json.dumps(asdict(workload)))
    job = Job(words, folder, folder, torch.python, steps=workload.iterations, own_modules=True, alloc_conf=conf)
    outcome = run_job(job, gpu, how.progress)
    if outcome.status.startswith("error") and outcome.out_of_memory is None:
        raise UnreadableError(f"The job failed on the virtual GPU: {outcome.status.removeprefix('error: ')[:300]}")
    fits = outcome.out_of_memory is None
    return outcome.files[0].rename(kept if fits else failed), fits


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
