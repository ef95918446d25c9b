"""A training job ready to be asked for any batch size: its CPU profiles, in a store, and the requests they lead to."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from xmem.capture.profile import SUFFIX, check_installed, profile, profile_key
from xmem.capture.workload import Workload
from xmem.errors import UsageError
from xmem.store import Store

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

    from xmem.simulate.rules import GpuFacts, RuleEffect

Progress = Callable[[str], None]
CACHE_VARIABLE = "XMEM_CACHE"
#: Batch sizes of the small profiles that carry the line, and of the one that checks it.
SMALL, LARGE, CHECK = 2, 3, 4


@dataclass(frozen=True)
class Profile:
    """One CPU run of the job in the store."""

    batch_size: int
    run_id: str
    run_name: str


@dataclass(frozen=True)
class Job:
    """A workload with its profiles: one of the wanted batch size, or two that are extrapolated."""

    workload: Workload
    store: Store
    profiles: tuple[Profile, ...]
    torch_version: str | None
    recurrent: bool = False
    fake: bool = False

    def requests(self, batch_size: int, facts: GpuFacts) -> tuple[pa.Table, tuple[RuleEffect, ...]]:
        """Return the requests of a GPU run with this batch size, and what each rule moved."""
        from xmem.simulate.requests import read_requests
        from xmem.simulate.rules import apply_rules

        with closing(self.store.connect()) as connection:
            load_batch(connection, self.profiles, batch_size)
            effects = apply_rules(connection, facts)
            return read_requests(connection, None, self.store), effects


def load_batch(connection: duckdb.DuckDBPyConnection, profiles: tuple[Profile, ...], batch_size: int) -> None:
    """Make the CPU tables of this batch size from a profile of it, else from the two smallest by extrapolation."""
    from xmem.simulate.rules import extrapolate, load_cpu_run

    exact = [profile for profile in profiles if profile.batch_size == batch_size]
    if exact:
        load_cpu_run(connection, exact[0].run_id, 0)
        return
    if len(profiles) < 2:
        raise UsageError(f"There is no profile from which batch size {batch_size} could be estimated.")
    small, large = profiles[0], profiles[1]
    extrapolate(connection, ((small.run_id, small.batch_size), (large.run_id, large.batch_size)), batch_size)


def cache_folder(folder: str | Path | None = None) -> Path:
    """Return where profiles are kept: the argument, else XMEM_CACHE, else the user's cache folder."""
    if folder is not None or os.environ.get(CACHE_VARIABLE):
        return Path(folder or os.environ[CACHE_VARIABLE])
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "xmem"


def prepare_job(
    workload: Workload,
    *,
    cache: str | Path | None = None,
    exact: bool = False,
    check: bool = True,
    fake: bool = False,
    progress: Progress | None = None,
) -> Job:
    """Profile the job where the cache does not hold it; `exact` runs the wanted batch size itself.

    With `fake` it runs on fake tensors.
    `check` runs a third batch size and raises UsageError where extrapolation misses it by a byte.
    """
    folder = cache_folder(cache)
    folder.mkdir(parents=True, exist_ok=True)
    store = Store(folder / "store")
    direct = exact or workload.batch_size <= CHECK
    sizes = (workload.batch_size,) if direct else (SMALL, LARGE, CHECK) if check else (SMALL, LARGE)
    found = tuple(_profile(workload.with_batch(size), folder, store, progress, fake=fake) for size in sizes)
    job = Job(
        workload, store, found, store.find_run(found[0].run_id).torch_version, _is_recurrent(store, found[0]), fake
    )
    if not direct and check:
        check_line(job)
        return replace(job, profiles=found[:2])
    return job


def _is_recurrent(store: Store, found: Profile) -> bool:
    query = "SELECT coalesce(bool_or((metadata->>'$.recurrent')::BOOLEAN), false) FROM runs WHERE run_id = $1"
    with closing(store.connect()) as connection:
        return bool((connection.execute(query, [found.run_id]).fetchone() or (False,))[0])


def _profile(
    workload: Workload, folder: Path, store: Store, progress: Progress | None, *, fake: bool = False
) -> Profile:
    from xmem.ingest import IngestOptions, ingest

    check_installed()
    target = folder / f"{profile_key(workload, fake=fake)}{SUFFIX}"
    if not target.exists():
        if progress is not None:
            where = "fake tensors" if fake else "the CPU"
            progress(f"profiling {workload.model} with batch size {workload.batch_size} on {where}")
        profile(workload, target, fake=fake, progress=progress)
    done = ingest([target], options=IngestOptions(store=store.path))[0]
    return Profile(workload.batch_size, done.run_id, done.name)


def check_line(job: Job) -> None:
    """Compare the extrapolation with a profile of a third batch size, allocation by allocation."""
    wanted = job.profiles[2]
    # A recurrent layer's workspace is rounded up to pages of the host.
    query = (
        "SELECT CASE WHEN o.name = 'aten::mkldnn_rnn_layer' THEN NULL ELSE a.bytes END, a.category, a.phase, a.step"
        " FROM cpu_allocations a LEFT JOIN cpu_operators o USING (span_id) ORDER BY a.from_seq"
    )
    with closing(job.store.connect()) as connection:
        load_batch(connection, job.profiles[:2], wanted.batch_size)
        guessed = connection.execute(query).fetchall()
        load_batch(connection, job.profiles[2:], wanted.batch_size)
        real = connection.execute(query).fetchall()
    if guessed == real:
        return
    where = next((n for n, pair in enumerate(zip(guessed, real, strict=False)) if pair[0] != pair[1]), len(guessed))
    raise UsageError(
        f"A profile with batch size {wanted.batch_size} differs from its extrapolation, first at allocation {where}.",
        "The job does not grow evenly with the batch: estimate it with --no-extrapolate.",
    )
