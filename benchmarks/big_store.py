"""Makes a store of many allocation events without reading a trace: training steps that repeat, in columns."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import polars as pl

from xmem.store import RunWriter, Store

_START_NS = 1_700_000_000_000_000_000
_CATEGORIES = ("activation", "gradient", "temporary", "workspace", "unknown")
_STATIC, _STACKS, _CHUNK = 300, 2000, 50


def make_store(path: Path, *, events: int = 10_000_000, per_step: int = 5000) -> Store:
    """Write run `big`: `events` alloc and free rows on one device, steps of `per_step` allocations."""
    store = Store(path)
    steps = max(1, events // (2 * per_step))
    with store.writer("big") as writer:
        template = _step_template(per_step)
        static = _static_frame()
        writer.write("events", 0, static)
        level = int(static["allocated_bytes"][-1])
        for first in range(0, steps, _CHUNK):
            writer.write("events", 0, _events(template, range(first, min(first + _CHUNK, steps)), level))
        _write_spans(writer, steps, per_step)
        _write_facts(writer, steps, _STATIC + 2 * per_step * steps)
        writer.commit()
    return store


def _step_template(count: int) -> pl.DataFrame:
    """Return one step: allocations interleaved with their frees, everything freed at its end."""
    random = np.random.default_rng(1)
    sizes = (2 ** random.uniform(9, 24, count)).astype(np.int64) // 512 * 512 + 512
    number = np.arange(count)
    freed = np.minimum(number * 2 + random.integers(1, count // 2, count) * 2 + 1, 2 * count + number * 1e-4)
    order = np.argsort(np.concatenate([number * 2.0, freed]), kind="stable")
    which, is_free = order % count, order >= count
    place = np.arange(2 * count)
    stacks, categories = random.integers(0, _STACKS, count), random.integers(0, len(_CATEGORIES), count)
    return pl.DataFrame(
        {
            "alloc": which,
            "action": pl.Series(["alloc", "free_requested"])[is_free.astype(int)],
            "block_bytes": sizes[which],
            "delta": np.where(is_free, -sizes[which], sizes[which]),
            "stack_id": stacks[which],
            "category": pl.Series(_CATEGORIES)[categories[which]],
            "phase": pl.Series(["forward", "backward", "optimizer"])[np.minimum(place * 20 // (18 * count), 2)],
            "slot": place,
            "end_slot": np.where(is_free, -1, _place_of_free(which, is_free)[which]),
        }
    )


def _place_of_free(which: np.ndarray, is_free: np.ndarray) -> np.ndarray:
    found = np.empty(len(which) // 2, dtype=np.int64)
    found[which[is_free]] = np.flatnonzero(is_free)
    return found


def _device(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.with_columns(
        device_type=pl.lit("cuda"), device_index=pl.lit(0), stream=pl.lit(0), inferred=pl.lit(False),
        reserved_bytes=(pl.col("allocated_bytes").cum_max() // (2 << 20) + 1) * (2 << 20),
        active_bytes=pl.col("allocated_bytes"),
    )  # fmt: skip


def _static_frame() -> pl.DataFrame:
    sizes = (2 ** np.random.default_rng(2).uniform(20, 26, _STATIC)).astype(np.int64) // 512 * 512
    number = np.arange(_STATIC)
    return _device(
        pl.DataFrame(
            {
                "seq": number,
                "ts_ns": np.full(_STATIC, _START_NS),
                "action": ["alloc"] * _STATIC,
                "alloc_id": number,
                "address": (0x7F0000000000 + number * 2**27).astype(np.uint64),
                "block_bytes": sizes,
                "allocated_bytes": sizes.cumsum(),
                "category": ["parameter"] * _STATIC,
                "stack_id": number % _STACKS,
            }
        )
    )


def _events(template: pl.DataFrame, steps: range, level: int) -> pl.DataFrame:
    rows = template.height
    step = pl.DataFrame({"step": np.arange(steps.start, steps.stop)})
    place = _STATIC + pl.col("step") * rows + pl.col("slot")
    frame = step.join(template, how="cross").select(
        "step", "action", "block_bytes", "stack_id", "category", "phase",
        seq=place,
        end_seq=pl.when(pl.col("end_slot") >= 0).then(place - pl.col("slot") + pl.col("end_slot")),
        ts_ns=_START_NS + place * 1000,
        alloc_id=_STATIC + pl.col("step") * (rows // 2) + pl.col("alloc"),
        address=(0x7F8000000000 + pl.col("alloc") * 2**25).cast(pl.UInt64),
        span_id=pl.col("step") * 2001 + 1 + pl.col("slot") * 2000 // rows,
        allocated_bytes=level + pl.col("delta").cum_sum(),
    )  # fmt: skip
    return _device(frame)


def _write_spans(writer: RunWriter, steps: int, per_step: int) -> None:
    """Write 2000 operators a step below a ProfilerStep, in modules of 40 operators."""
    length = 2 * per_step * 1000
    number = np.arange(2000)
    for first in range(0, steps, _CHUNK):
        chosen = pl.DataFrame({"step": np.arange(first, min(first + _CHUNK, steps))})
        begin = _START_NS + _STATIC * 1000 + pl.col("step") * length
        root = pl.col("step") * 2001
        marks = chosen.select(
            span_id=root, kind=pl.lit("step"), name=pl.format("ProfilerStep#{}", "step"), ts_ns=begin,
            dur_ns=pl.lit(length), thread_id=pl.lit(1), parent_id=pl.lit(None, pl.Int64), op_id=pl.lit(None, pl.Int64),
        )  # fmt: skip
        template = pl.DataFrame({"number": number, "name": [f"aten::op{item % 150}" for item in number]})
        operators = chosen.join(template, how="cross").select(
            span_id=root + 1 + pl.col("number"), kind=pl.lit("operator"), name="name",
            ts_ns=begin + pl.col("number") * (length // 2000), dur_ns=pl.lit(length // 2000), thread_id=pl.lit(1),
            parent_id=root, op_id=root + 1 + pl.col("number"),
        )  # fmt: skip
        writer.write("spans", 0, pl.concat([marks, operators.select(marks.columns)], how="vertical_relaxed"))


def _write_facts(writer: RunWriter, steps: int, events: int) -> None:
    part = "/src/model/part_{}.py"
    frames = [
        [{"name": f"function_{(7 * n + d) % 97}", "filename": part.format(d), "line": n % 13} for d in range(12)]
        for n in range(_STACKS)
    ]  # fmt: skip
    writer.write("stacks", 0, pl.DataFrame({"stack_id": range(_STACKS), "frames": frames}))
    device = {"device_type": "cuda", "device_index": 0, "name": "NVIDIA A100-SXM4-80GB", "total_bytes": 85_100_068_864}
    writer.write("devices", 0, pl.DataFrame([{**device, "baseline_bytes": 0, "complete_history": True}]))
    run = {
        "name": "big", "source_file": "big.json", "source_sha256": "0" * 64, "source_bytes": 1,
        "adapter": "torch_trace", "schema_version": 1, "xmem_version": "0", "ingested_ns": time.time_ns(),
        "time_base": "unix", "first_ts_ns": _START_NS, "last_ts_ns": _START_NS + events * 1000, "baseline_bytes": 0,
        "ring_buffer": False, "truncated": False, "source_entries": events, "event_count": events,
        "memory_event_count": events, "span_count": steps * 2001, "stack_count": _STACKS,
    }  # fmt: skip
    writer.write("runs", 0, pl.DataFrame([run]))
