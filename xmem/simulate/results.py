"""A judgement as rows of the store: simulations, simulation_events, simulation_segments."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from xmem.simulate.explain import owners_at
from xmem.simulate.judge import Case, Judgement
from xmem.simulate.peaks import block_sizes
from xmem.simulate.torch_version import NEWEST
from xmem.store import Store

if TYPE_CHECKING:
    import polars as pl

    from xmem.simulate.replay import Integers


def write_simulation(store: Store, case: Case, judgement: Judgement) -> None:
    """Write the replay on the target beside its run; the same simulation again replaces itself."""
    if case.run_id is None:
        return
    name = case.simulation_id
    frames = {
        "simulation_events": simulation_events(judgement),
        "simulation_segments": simulation_segments(judgement),
        "simulations": simulation_row(case, judgement),
    }
    for table, frame in frames.items():
        named = frame.insert_column(0, _constant(name, frame.height))
        store.write_table(table, case.run_id, case.rank, name, named)


def _constant(text: str, height: int) -> pl.Series:
    import polars as pl

    return pl.Series("simulation_id", [text], dtype=pl.String).new_from_index(0, height)


def simulation_row(case: Case, judgement: Judgement) -> pl.DataFrame:
    """Return the one row of `simulations`."""
    import polars as pl

    verdict = judgement.verdict
    device_type, _, index = verdict.device.partition(":")
    return pl.DataFrame(
        {
            "device_type": [device_type],
            "device_index": [int(index) if index else -1],
            "allocator": [verdict.allocator],
            "alloc_conf": [verdict.alloc_conf],
            "torch_version": [case.setup.torch_version or ".".join(map(str, NEWEST))],
            "gpu": [verdict.gpu],
            "usable_bytes": [verdict.usable_bytes],
            "fits": [verdict.fits],
            "peak_requested_bytes": [verdict.peak_requested_bytes],
            "peak_allocated_bytes": [verdict.peak_allocated_bytes],
            "peak_active_bytes": [verdict.peak_active_bytes],
            "peak_reserved_bytes": [verdict.peak_reserved_bytes],
            "num_alloc_retries": [verdict.num_alloc_retries],
            "num_ooms": [verdict.num_ooms],
            "simulated_ns": [time.time_ns()],
        }
    )


def simulation_events(judgement: Judgement) -> pl.DataFrame:
    """Return the state after each request of the replay on the target, with the allocator's own calls between."""
    import polars as pl

    frame = _request_rows(judgement)
    calls = _call_rows(judgement, frame)
    rows = pl.concat([calls, frame.with_columns(pl.lit(1 << 40).alias("part"))], how="diagonal")
    return rows.sort("index", "part").drop("index", "part")


def _request_rows(judgement: Judgement) -> pl.DataFrame:
    """Return the requests up to the one that ended the replay, with the levels after each."""
    import numpy as np
    import polars as pl

    result, encoded = judgement.on_device, judgement.encoded
    levels = _levels_to_the_end(judgement)
    shown = len(levels)
    slots = encoded.slots[:shown]
    sizes = np.append(block_sizes(encoded, levels[:, 0]), 0)[slots]
    columns = judgement.table.slice(0, shown)
    placed = pl.Series(sizes > 0)
    failed = pl.Series([failure.index for failure in result.failures], dtype=pl.Int64)
    index = pl.Series(np.arange(shown, dtype=np.int64))
    action = pl.Series(pl.from_arrow(columns.column("action")))
    addresses = np.array(result.addresses, dtype=np.uint64)[slots]
    return pl.DataFrame(
        {
            "index": index,
            "seq": columns.column("seq").to_numpy(),
            "action": pl.select(
                pl.when(index.is_in(failed.implode())).then(pl.lit("oom")).otherwise(action)
            ).to_series(),
            "alloc_id": pl.from_arrow(columns.column("alloc_id")),
            "address": pl.select(pl.when(pl.Series((sizes > 0) & (addresses > 0))).then(addresses)).to_series(),
            "bytes": pl.from_arrow(columns.column("bytes")),
            "block_bytes": pl.select(pl.when(placed).then(sizes)).to_series(),
            "allocated_bytes": levels[:, 0],
            "active_bytes": levels[:, 1],
            "reserved_bytes": levels[:, 2],
        }
    )


def _levels_to_the_end(judgement: Judgement) -> Integers:
    """Return the logged levels and, where a request ended the replay, a row for that too."""
    import numpy as np

    result = judgement.on_device
    assert result.levels is not None
    if result.done == len(judgement.encoded):
        return result.levels
    last = result.failures[-1].stats
    row = [last.allocated_bytes, last.active_bytes, last.reserved_bytes, last.requested_bytes]
    return np.vstack([result.levels, np.array([row], dtype=np.int64)])


def _call_rows(judgement: Judgement, frame: pl.DataFrame) -> pl.DataFrame:
    """Return the allocator's calls as rows: reserved moves with each, allocated and active stay as they were before."""
    import polars as pl

    calls = judgement.on_device.calls
    schema = {"index": pl.Int64, "action": pl.String, "address": pl.UInt64, "bytes": pl.Int64}
    rows = pl.DataFrame(calls, schema=schema, orient="row").with_row_index("part").cast({"part": pl.Int64})
    sign = pl.when(pl.col("action").is_in(["segment_alloc", "segment_map"])).then(1).otherwise(-1)
    before = frame.select(pl.col("index") + 1, "allocated_bytes", "active_bytes")
    return (
        rows.filter(pl.col("index") < frame.height)
        .with_columns((sign * pl.col("bytes")).cum_sum().alias("reserved_bytes"))
        .join(before, on="index", how="left")
        .join(frame.select("index", "seq"), on="index", how="left")
        .with_columns(pl.col("allocated_bytes", "active_bytes").fill_null(0))
    )


def simulation_segments(judgement: Judgement) -> pl.DataFrame:
    """Return the blocks that the replay ended in, each with its segment."""
    import polars as pl

    result = judgement.on_device
    if result.layout is None:
        return pl.DataFrame(schema={"segment_id": pl.Int64})
    segments = pl.DataFrame(
        {
            "segment_id": pl.Series(range(len(result.layout.segments["address"])), dtype=pl.Int64),
            "segment_address": pl.Series(result.layout.segments["address"], dtype=pl.UInt64),
            "segment_bytes": pl.Series(result.layout.segments["total_bytes"], dtype=pl.Int64),
            "segment_type": pl.Series(result.layout.segments["segment_type"], dtype=pl.String),
            "stream": pl.Series(result.layout.segments["stream"], dtype=pl.Int64),
            "pool_id": pl.Series([f"{a}:{b}" for a, b in result.layout.segments["pool_id"]], dtype=pl.String),
            "is_expandable": pl.Series(result.layout.segments["is_expandable"], dtype=pl.Boolean),
        }
    )
    blocks = pl.DataFrame(
        {
            "segment_id": pl.Series(result.layout.blocks["segment"], dtype=pl.Int64),
            "address": pl.Series(result.layout.blocks["address"], dtype=pl.UInt64),
            "block_bytes": pl.Series(result.layout.blocks["block_bytes"], dtype=pl.Int64),
            "requested_bytes": pl.Series(result.layout.blocks["requested_bytes"], dtype=pl.Int64),
            "state": pl.Series(result.layout.blocks["state"], dtype=pl.String),
        }
    )
    first_failure = result.failures[0].index if result.failures else result.done
    owners = owners_at(judgement.encoded, result, first_failure)
    ids = judgement.table.filter(_is_alloc(judgement)).column("alloc_id").to_pylist()
    owned = pl.DataFrame(
        {"address": list(owners), "alloc_id": [ids[slot] for slot in owners.values()]},
        schema={"address": pl.UInt64, "alloc_id": pl.Int64},
    )
    joined = blocks.join(segments, on="segment_id", how="left").join(owned, on="address", how="left")
    return joined.with_columns(pl.when(pl.col("state") != "inactive").then("alloc_id").alias("alloc_id")).sort(
        "address"
    )


def _is_alloc(judgement: Judgement) -> object:
    import pyarrow.compute as pc

    return pc.equal(judgement.table.column("action"), "alloc")
