"""From a CPU run to the requests of a GPU run: named rules in SQL (sql/cpu_to_gpu.sql), and what each one moved."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

from xmem.errors import UsageError
from xmem.simulate.gpu_table import Gpu, Target, gpus

if TYPE_CHECKING:
    import duckdb

#: Threads that a multiprocessor holds, by compute capability (CUDA programming guide).
_THREADS = {"7.5": 1024, "8.6": 1536, "8.7": 1536, "8.9": 1536, "12.0": 1536, "12.1": 1536}
_MOST_THREADS = 2048
#: cuBLAS workspace of torch 2.14.1 by major compute capability; 2.6.0 has the large one on 9 only.
#: Transposing workspaces up to this size are modelled; see docs/accuracy.md for what other limits give.
CUDNN_WORKSPACE_LIMIT = 32 << 20
_CUBLAS_LARGE, _CUBLAS = 33_554_432, 8_519_680


@dataclass(frozen=True)
class GpuFacts:
    """What of a GPU decides how operators allocate; `note` says where the figures come from."""

    multiprocessors: int
    threads_per_multiprocessor: int
    compute_capability: str
    cublas_workspace_bytes: int
    cudnn_workspace_limit: int
    note: str


@dataclass(frozen=True)
class RuleEffect:
    """What one rule did to the requests."""

    rule: str
    description: str
    change: str
    allocations: int
    bytes: int


def gpu_facts(target: Target, torch_version: tuple[int, ...] = (2, 14)) -> GpuFacts:
    """Return the facts of the target; a bare size stands for the table's GPU of the nearest memory."""
    gpu = target.gpu if target.gpu is not None and target.gpu.multiprocessors else _nearest(target.total_bytes)
    major = int(gpu.compute_capability.split(".")[0])
    large = major == 9 or (major in (10, 12) and torch_version >= (2, 9))
    named = target.gpu is gpu
    note = "" if named else f"Operators allocate as on the {gpu.name}, the table's GPU of the nearest memory."
    return GpuFacts(
        multiprocessors=gpu.multiprocessors or 0,
        threads_per_multiprocessor=_THREADS.get(gpu.compute_capability, _MOST_THREADS),
        compute_capability=gpu.compute_capability,
        cublas_workspace_bytes=_CUBLAS_LARGE if large else _CUBLAS,
        cudnn_workspace_limit=CUDNN_WORKSPACE_LIMIT,
        note=note,
    )


def _nearest(total_bytes: int) -> Gpu:
    known = [g for g in gpus() if g.multiprocessors and g.compute_capability >= "8" and "Laptop" not in g.name]
    return min(known, key=lambda gpu: (abs(gpu.bytes - total_bytes), gpu.name))


@cache
def _sql(name: str) -> str:
    return resources.files("xmem.simulate").joinpath(f"sql/{name}.sql").read_text(encoding="utf-8")


@cache
def rule_descriptions() -> dict[str, str]:
    """Return every rule's sentence by its name, as the SQL file states them."""
    pairs = re.findall(r"^-- rule: (\w+)\n((?:-- .*\n)+)", _sql("cpu_to_gpu"), re.MULTILINE)
    return {name: text.replace("-- ", "").replace("\n", " ").strip() for name, text in pairs}


def load_cpu_run(connection: duckdb.DuckDBPyConnection, run_id: str, rank: int, prefix: str = "cpu") -> None:
    """Make the tables PREFIX_allocations and PREFIX_operators from a run of the store."""
    text = (
        _sql("cpu_run").replace("{allocations}", f"{prefix}_allocations").replace("{operators}", f"{prefix}_operators")
    )
    for statement in text.split(";\n"):
        if "SELECT" in statement:
            connection.execute(statement, {"run_id": run_id, "rank": rank})


def extrapolate(
    connection: duckdb.DuckDBPyConnection, runs: tuple[tuple[str, int], tuple[str, int]], wanted: int, rank: int = 0
) -> None:
    """Make the tables of a run with batch size `wanted` from two runs, given as (run id, batch size), smaller first.

    Raises UsageError where the two are not the same program: an operator or a free stands elsewhere.
    """
    (small, small_size), (large, large_size) = runs
    load_cpu_run(connection, small, rank, "small")
    load_cpu_run(connection, large, rank, "large")
    connection.execute(
        "CREATE OR REPLACE TEMP TABLE batches AS SELECT $1::BIGINT AS small, $2::BIGINT AS large, $3::BIGINT AS wanted",
        [small_size, large_size, wanted],
    )
    connection.execute(_sql("extrapolate"))
    count, name = connection.execute("SELECT count(*), arg_min(name, nth) FROM misaligned").fetchone() or (0, "")
    if count:
        raise UsageError(
            f"The profiles with batch sizes {small_size} and {large_size} differ in {count} places, first at {name}.",
            "The job does not grow evenly with the batch: profile the wanted batch size itself (--no-extrapolate).",
        )


def apply_rules(connection: duckdb.DuckDBPyConnection, facts: GpuFacts) -> tuple[RuleEffect, ...]:
    """Make the table `requests` from cpu_allocations and cpu_operators, as the GPU would see it."""
    connection.execute(
        "CREATE OR REPLACE TEMP TABLE gpu AS SELECT $1::BIGINT AS multiprocessors, $2::BIGINT AS"
        " threads_per_multiprocessor, $3::DOUBLE AS compute_capability, $4::BIGINT AS cublas_workspace_bytes,"
        " $5::BIGINT AS cudnn_workspace_limit",
        [
            facts.multiprocessors,
            facts.threads_per_multiprocessor,
            facts.compute_capability,
            facts.cublas_workspace_bytes,
            facts.cudnn_workspace_limit,
        ],
    )
    connection.execute(_sql("cpu_to_gpu"))
    described = rule_descriptions()
    rows = connection.execute("SELECT rule, change, allocations, bytes FROM rule_effects").fetchall()
    return tuple(RuleEffect(rule, described[rule], change, count, size) for rule, change, count, size in rows)
