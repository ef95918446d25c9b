"""The time-side analyses of holistic-trace-analysis as tables beside memory; imported only for `--hta`."""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xmem.errors import UsageError

if TYPE_CHECKING:
    import polars as pl

    from xmem.ingest.adapter import Notes

_US = 1000
#: Kernel names that are listed on their own: all of them.
_ALL_KERNELS = 1_000_000


def require_hta() -> None:
    """Raise UsageError where holistic-trace-analysis is not installed."""
    if find_spec("hta") is None:
        raise UsageError(
            "--hta needs holistic-trace-analysis, which is not installed.", "Install it: pip install 'xmem[hta]'"
        )


def analyse(path: Path, *, compressed: bool, first_kernel_ns: int | None, notes: Notes) -> dict[str, pl.DataFrame]:
    """Return the hta_* tables of a trace; what fails is an issue and its table is left out.

    `first_kernel_ns` is when the first device activity starts, so that both tell the same time.
    """
    with tempfile.TemporaryDirectory() as folder, _silence():
        link = Path(folder) / ("trace.json.gz" if compressed else "trace.json")
        link.symlink_to(path.resolve())
        try:
            from hta.trace_analysis import TraceAnalysis

            analysis = TraceAnalysis({0: str(link)}, folder, include_last_profiler_step=True)
            zero_ns = _zero(analysis, first_kernel_ns)
        except (Exception, SystemExit) as error:
            notes.add("hta_failed", detail=f"reading: {_said(error)}")
            return {}
        tables = {}
        for table, build in _TABLES.items():
            try:
                tables[table] = build(analysis, zero_ns)
            except (Exception, SystemExit) as error:
                notes.add("hta_failed", detail=f"{table}: {_said(error)}")
        return tables


def first_kernel_ns(spans: Iterator[pl.DataFrame], offset_ns: int) -> int | None:
    """Return when the first device activity on a stream starts."""
    starts = [
        frame.filter(frame["stream"].is_not_null())["ts_ns"].min() for frame in spans if "stream" in frame.columns
    ]
    found = [int(str(start)) for start in starts if start is not None]
    return min(found) + offset_ns if found else None


def _said(error: BaseException) -> str:
    return f"{type(error).__name__} {error}".strip().replace("\n", " ")


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keep what the analyses print and log away from the user's terminal."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def _zero(analysis: Any, first_ns: int | None) -> int:
    """Return the time that the analyses call zero: they count from the trace's first event."""
    trace = analysis.t.get_trace(0)
    kernels = trace.loc[trace["stream"] >= 0, "ts"]
    if first_ns is None or len(kernels) == 0:
        raise ValueError("the trace holds no device activity")
    return first_ns - int(kernels.min()) * _US


def _frame(rows: Any) -> pl.DataFrame:
    import polars as pl

    return pl.DataFrame({str(name): rows[name].to_list() for name in rows.columns}, strict=False)


def _ns(name: str) -> pl.Expr:
    """A duration in microseconds as whole nanoseconds."""
    import polars as pl

    return (pl.col(name).cast(pl.Float64) * _US).round().cast(pl.Int64)


def _temporal(analysis: Any, zero_ns: int) -> pl.DataFrame:
    rows = _frame(analysis.get_temporal_breakdown(visualize=False))
    names = ("idle", "compute", "non_compute", "kernel")
    return rows.select(_ns(f"{name}_time(us)").alias(f"{name}_ns") for name in names)


def _kernel_types(analysis: Any, zero_ns: int) -> pl.DataFrame:
    import polars as pl

    rows = _frame(analysis.get_gpu_kernel_breakdown(visualize=False)[0])
    return rows.select("kernel_type", total_ns=_ns("sum"), share=pl.col("percentage") / 100)


def _kernels(analysis: Any, zero_ns: int) -> pl.DataFrame:
    import polars as pl

    rows = _frame(
        analysis.get_gpu_kernel_breakdown(
            visualize=False, duration_ratio=1.0, num_kernels=_ALL_KERNELS, include_memory_kernels=True
        )[1]
    )
    return rows.select(
        "name",
        "kernel_type",
        total_ns=_ns("sum (us)"),
        min_ns=_ns("min (us)"),
        max_ns=_ns("max (us)"),
        mean_ns=pl.col("mean (us)").cast(pl.Float64) * _US,
        stddev_ns=pl.col("stddev").cast(pl.Float64).fill_nan(None) * _US,
    )


def _idle_time(analysis: Any, zero_ns: int) -> pl.DataFrame:
    import polars as pl

    rows = _frame(analysis.get_idle_time_breakdown(ranks=[0], visualize=False)[0])
    return rows.select(
        pl.col("stream").cast(pl.Int64), "idle_category", idle_ns=_ns("idle_time"), share=pl.col("idle_time_ratio")
    )


def _overlap(analysis: Any, zero_ns: int) -> pl.DataFrame:
    import polars as pl

    rows = _frame(analysis.get_comm_comp_overlap(visualize=False))
    return rows.select(overlap_share=pl.col("comp_comm_overlap_pctg").cast(pl.Float64).fill_nan(None) / 100)


def _bandwidth(analysis: Any, zero_ns: int) -> pl.DataFrame:
    import polars as pl

    rows = _frame(analysis.get_memory_bw_time_series()[0])
    return rows.select(
        ts_ns=_ns("ts") + zero_ns, name="name", gigabytes_per_second=pl.col("memory_bw_gbps").cast(pl.Float64)
    ).sort("ts_ns")


def _queue_length(analysis: Any, zero_ns: int) -> pl.DataFrame:
    import polars as pl

    rows = _frame(analysis.get_queue_length_time_series()[0])
    return rows.select(
        ts_ns=_ns("ts") + zero_ns,
        stream=pl.col("stream").cast(pl.Int64),
        queue_length=pl.col("queue_length").cast(pl.Int64),
    ).sort("ts_ns", maintain_order=True)


_TABLES: dict[str, Callable[[Any, int], pl.DataFrame]] = {
    "hta_temporal": _temporal,
    "hta_kernel_types": _kernel_types,
    "hta_kernels": _kernels,
    "hta_idle_time": _idle_time,
    "hta_overlap": _overlap,
    "hta_bandwidth": _bandwidth,
    "hta_queue_length": _queue_length,
}
