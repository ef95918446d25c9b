"""The entry point of this room: a run of the store, a GPU, and what happens."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from xmem.errors import RefusedError, UsageError
from xmem.simulate.gpu_table import Target, parse_gpu
from xmem.simulate.options import SimulateOptions, parse_reserve
from xmem.simulate.torch_version import parse_version
from xmem.simulate.verdict import IssueLine, Verdict
from xmem.store import Store

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

    from xmem.simulate.judge import Case
    from xmem.simulate.requests import Source
    from xmem.simulate.rules import RuleEffect
    from xmem.simulate.trial import Setup

_DEFAULTS = SimulateOptions()


def simulate(
    run: str | None = None,
    *,
    gpu: str | int | None = None,
    store: str | Path | None = None,
    options: SimulateOptions = _DEFAULTS,
) -> Verdict:
    """Replay a run's memory requests on a GPU and say whether they fit, what they need and what would fail.

    `run` is an id, a unique prefix or a name (None: the newest); `gpu` a name, "23.6GiB", "24GB" or a bare number
    (None: the device of the recording). Raises UsageError and RefusedError (fenced SQL).
    """
    from xmem.simulate.judge import judge
    from xmem.simulate.results import write_simulation

    opened = Store(store)
    table, case = prepare(opened, run, gpu, options)
    judgement = judge(table, case)
    verdict = judgement.verdict
    if verdict.oom is not None:
        from xmem.simulate.sweep import settings_that_fit

        saved_by = settings_that_fit(judgement.encoded, case)
        verdict = replace(verdict, oom=replace(verdict.oom, saved_by=saved_by))
    if options.keep:
        try:
            write_simulation(opened, case, judgement)
        except RefusedError as error:
            verdict = replace(verdict, notes=(*verdict.notes, f"The replay was not kept: {error.message}"))
    return verdict


def prepare(store: Store, run: str | None, gpu: str | int | None, options: SimulateOptions) -> tuple[pa.Table, Case]:
    """Return the checked requests of a run and the case to judge them by."""
    from xmem.simulate.judge import Case
    from xmem.simulate.requests import find_source, make_recorded_requests, read_requests

    reserve = parse_reserve(options)
    target = None if gpu is None else parse_gpu(gpu)
    chosen = store.find_run(run)
    with closing(store.connect()) as connection:
        source = find_source(connection, chosen, rank=options.rank, device=options.device)
        target = target or _recorded_target(source)
        setup, assumed = make_setup(options, source.torch_version, source.alloc_conf)
        issues = _issues(connection, source)
        notes = _notes(source, options, setup)
        rules: tuple[RuleEffect, ...] = ()
        if source.device_type == "cpu" and options.cpu_to_gpu:
            rules = _make_gpu_requests(connection, source, (target, setup), notes)
        else:
            make_recorded_requests(connection, source)
        table = read_requests(connection, options.requests_sql, store)
    case = Case(
        run_id=source.run_id,
        run_name=source.run_name,
        rank=source.rank,
        device=source.device,
        target=target,
        reserve=reserve,
        setup=setup,
        torch_version_assumed=assumed,
        issues=issues,
        notes=tuple(notes),
        recorded_peak_allocated_bytes=source.peak_allocated_bytes,
        recorded_peak_reserved_bytes=source.peak_reserved_bytes,
        search_smallest=options.smallest,
        requests_sql=options.requests_sql,
        rules=rules,
    )
    return table, case


def _make_gpu_requests(
    connection: duckdb.DuckDBPyConnection, source: Source, onto: tuple[Target, Setup], notes: list[str]
) -> tuple[RuleEffect, ...]:
    """Make the table `requests` of a CPU recording as the target would see it; return what the rules did."""
    from xmem.simulate.rules import apply_rules, gpu_facts, load_cpu_run

    target, setup = onto
    facts = gpu_facts(target, parse_version(setup.torch_version))
    load_cpu_run(connection, source.run_id, source.rank)
    effects = apply_rules(connection, facts)
    shapes = connection.execute(
        "SELECT count(input_shapes) FROM spans WHERE run_id = $1 AND rank = $2", [source.run_id, source.rank]
    ).fetchall()[0][0]
    notes.append(
        "This is a CPU recording, turned into the requests of a GPU by named rules"
        + (
            "."
            if shapes
            else "; it has no input shapes (record_shapes=True), without which most rules find nothing to do."
        )
    )
    if facts.note:
        notes.append(facts.note)
    return effects


def make_setup(
    options: SimulateOptions, torch_version: str | None = None, alloc_conf: str | None = None
) -> tuple[Setup, bool]:
    """Return allocator, settings and version: what the options say, else the run; True where the version is assumed."""
    from xmem.simulate.trial import Setup

    version = options.torch_version or torch_version
    parse_version(version)
    conf = options.alloc_conf if options.alloc_conf is not None else (alloc_conf or "")
    return Setup(options.allocator, conf, version).resolved(), version is None


def _recorded_target(source: Source) -> Target:
    if source.total_bytes is None:
        raise UsageError(
            f"The recording does not say how large its {source.device} is.",
            "Say for which GPU: --gpu 24, --gpu rtx4090 or --gpu 23.6GiB; xmem gpus lists names.",
        )
    name = source.device_name or source.device
    return Target(name, source.total_bytes, f"{name} as recorded: {source.total_bytes} bytes of total memory.")


def _issues(connection: duckdb.DuckDBPyConnection, source: Source) -> tuple[IssueLine, ...]:
    rows = connection.execute(
        "SELECT code, severity, count, detail FROM issues WHERE run_id = $1 AND rank = $2 ORDER BY severity, code",
        [source.run_id, source.rank],
    ).fetchall()
    return tuple(IssueLine(*row) for row in rows)


def _notes(source: Source, options: SimulateOptions, setup: Setup) -> list[str]:
    """Say what was chosen or assumed for the reader."""
    notes = []
    if len(source.chosen_from) > 1:
        others = ", ".join(source.chosen_from[1:9]) + (", ..." if len(source.chosen_from) > 9 else "")
        notes.append(f"Simulated is {source.chosen_from[0]}, which has the largest peak; also recorded: {others}.")
    if source.device_type == "cpu" and not options.cpu_to_gpu:
        notes.append(
            "This is a CPU recording, replayed as if its requests were made on a GPU, without any adjustment:"
            " workspaces and operators that allocate otherwise on a GPU are not accounted for."
        )
    if not source.complete_history:
        notes.append(
            "The recording does not hold the device's first allocation: what was there before is replayed first, in"
            " address order, so reserved memory can differ from the real run's."
        )
    if options.alloc_conf is None and setup.alloc_conf:
        notes.append(f"Allocator settings are those of the recording: {setup.alloc_conf}")
    if options.requests_sql is not None:
        notes.append("The requests are those that --requests selects.")
    return notes
