"""Makes frames of the tables out of a snapshot's columns: events, stacks, segments, blocks, annotations as spans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import polars as pl

    from xmem.ingest.snapshot_process import Message

#: Actions whose entries mean nothing without a size.
_SIZED = ("alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap")
_STATES = {"active_awaiting_free": "active_pending_free"}
#: Limits of the history (max_entries) that people choose are multiples of it.
_ROUND = 1000
#: A time in microseconds beyond this does not fit into nanoseconds.
_TIME_MOST = (1 << 63) // 1000
_NS_PER_US = 1000


class Vocabulary:
    """The words of each column so far, in the order in which their numbers were given."""

    def __init__(self) -> None:
        self._words: dict[str, list[str]] = {}

    def learn(self, words: dict[str, list[str]]) -> None:
        """Take in the new words of a message."""
        for column, fresh in words.items():
            self._words.setdefault(column, []).extend(fresh)

    def known(self, column: str) -> Sequence[str]:
        """Return the words of a column."""
        return self._words.get(column, [])

    def spell(self, column: str, numbers: Any) -> pl.Series:
        """Turn numbers into words, as categoricals: nothing is copied for each row; -1 is null."""
        import polars as pl

        words = pl.Series(column, self._words.get(column) or [None], dtype=pl.String).cast(pl.Categorical)
        return words.gather(pl.Series(numbers).cast(pl.UInt32, strict=False))


def read_columns(message: Message, vocabulary: Vocabulary, texts: Sequence[str]) -> pl.DataFrame:
    """Return the message's columns under their names, `texts` spelled out, what is missing null."""
    import polars as pl

    columns = []
    for name, (values, known) in message.columns.items():
        if name in texts:
            columns.append(vocabulary.spell(name, values).alias(name))
            continue
        series = pl.Series(name, values)
        if known is not None:
            series = pl.select(pl.when(pl.Series(known)).then(series).alias(name)).to_series()
        columns.append(series)
    frame = pl.DataFrame(columns)
    if "late" in message.facts:
        return frame.with_columns(number_late(pl.int_range(pl.len(), dtype=pl.Int64) + message.facts["late"]))
    stack = pl.when(pl.col("stack") >= 0).then(pl.col("stack").cast(pl.Int64)).alias("stack_id")
    return frame.with_columns(stack).drop("stack")


def number_late(entry: pl.Expr) -> pl.Expr:
    """Return the stack ids of entries whose stacks come later: below -1, by number of the entry; see place_late."""
    return (-2 - entry).alias("stack_id")


def make_stacks(message: Message, vocabulary: Sequence[str], first_id: int) -> pl.DataFrame:
    """Return the rows of `stacks`: every distinct stack once, innermost frame first."""
    import numpy as np
    import polars as pl
    import pyarrow as pa

    lengths, flat = message.columns["lengths"][0], message.columns["frames"][0].reshape(-1, 3)
    words = pa.array(vocabulary, pa.string())
    frames = pa.StructArray.from_arrays(
        [words.take(pa.array(flat[:, 0])), words.take(pa.array(flat[:, 1])), pa.array(flat[:, 2])],
        names=["name", "filename", "line"],
    )
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    lists = pa.ListArray.from_arrays(pa.array(offsets), frames)
    ids = pl.int_range(first_id, first_id + len(lengths), dtype=pl.Int64, eager=True)
    return pl.DataFrame({"stack_id": ids, "frames": pl.Series("frames", pl.from_arrow(lists))})


def time_events(frame: pl.DataFrame, first_entry: int, *, indexed: bool, last_us: int) -> pl.DataFrame:
    """Give every entry a time in ns: its own, else that of the entry before it; its number where none has one."""
    import polars as pl

    if indexed:
        entry = pl.int_range(pl.len(), dtype=pl.Int64) + first_entry
        return frame.with_columns(entry.alias("ts_ns")).drop("time_us")
    time = pl.when(pl.col("time_us").is_between(-_TIME_MOST, _TIME_MOST)).then(pl.col("time_us"))
    filled = time.forward_fill().fill_null(last_us)
    return frame.with_columns((filled * _NS_PER_US).alias("ts_ns")).drop("time_us")


def find_faults(frame: pl.DataFrame) -> pl.DataFrame:
    """Add what makes an entry useless: `no_action`, `no_size` and `below_zero`."""
    import polars as pl

    sized = pl.col("action").is_in(_SIZED)
    return frame.with_columns(
        no_action=pl.col("action").is_null(),
        no_size=sized & pl.col("size").is_null(),
        below_zero=(pl.col("size") < 0).fill_null(False),
    )


def make_events(frame: pl.DataFrame, device_type: str, device_index: int) -> pl.DataFrame:
    """Return the rows of `events` of one device."""
    import polars as pl

    category = pl.col("category").cast(pl.String).str.to_lowercase()
    return frame.select(
        "ts_ns",
        pl.lit(device_type, pl.Categorical).alias("device_type"),
        pl.lit(device_index, dtype=pl.Int32).alias("device_index"),
        "action",
        "address",
        pl.col("size").alias("requested_bytes"),
        "stream",
        "pool_id",
        "stack_id",
        pl.when(category != "unknown").then(category).alias("category"),
        "device_free",
        pl.col("user_metadata", "compile_context").cast(pl.String),
    )


def make_segments(segments: pl.DataFrame, blocks: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return the rows of `segments` and `blocks`, numbered in order of device and address.

    What a version of torch does not state is summed up from the blocks, which tile their segment.
    """
    import polars as pl

    states = pl.col("state").cast(pl.String).replace(_STATES).fill_null("inactive")
    blocks = blocks.with_columns(states).filter(pl.col("address").is_not_null() & (pl.col("block_bytes") >= 0))
    blocks = blocks.unique(["segment", "address"], keep="first", maintain_order=True)
    allocated = pl.col("block_bytes").filter(pl.col("state") == "active_allocated").sum()
    active = pl.col("block_bytes").filter(pl.col("state").str.starts_with("active")).sum()
    sums = blocks.group_by("segment").agg(
        first=pl.col("address").min(), tiled=pl.col("block_bytes").sum(), allocated=allocated, active=active
    )
    whole = segments.join(sums, on="segment", how="left").with_columns(
        pl.coalesce("address", "first").alias("address"),
        pl.coalesce("total_bytes", "tiled").alias("total_bytes"),
        pl.coalesce("allocated_bytes", "allocated", 0).alias("allocated_bytes"),
        pl.coalesce("active_bytes", "active", 0).alias("active_bytes"),
        pl.col("is_expandable").cast(pl.Boolean),
    )
    whole = whole.filter(pl.col("address").is_not_null() & (pl.col("total_bytes") >= 0))
    whole = whole.unique(["device_type", "device_index", "address"], keep="first", maintain_order=True)
    whole = whole.sort("device_type", "device_index", "address", "segment", maintain_order=True)
    whole = whole.with_columns(pl.int_range(pl.len(), dtype=pl.Int64).alias("segment_id"))
    blocks = blocks.join(whole.select("segment", "segment_id"), on="segment", how="inner")
    live = pl.col("state") != "inactive"
    blocks = blocks.with_columns(pl.when(live).then(pl.col("requested_bytes")).alias("requested_bytes"))
    return (
        whole.select(*_SEGMENT_COLUMNS),
        blocks.sort("segment_id", "address").select(*_BLOCK_COLUMNS),
    )


def count_untiled(segments: pl.DataFrame, blocks: pl.DataFrame) -> int:
    """Count the segments whose blocks do not add up to them; one without blocks says nothing."""
    import polars as pl

    tiled = blocks.group_by("segment_id").agg(pl.col("block_bytes").sum())
    return segments.join(tiled, on="segment_id").filter(pl.col("block_bytes") != pl.col("total_bytes")).height


_SEGMENT_COLUMNS = (
    "segment_id", "device_type", "device_index", "address", "total_bytes", "allocated_bytes", "active_bytes",
    "requested_bytes", "stream", "segment_type", "pool_id", "is_expandable", "stack_id",
)  # fmt: skip
_BLOCK_COLUMNS = ("segment_id", "address", "block_bytes", "requested_bytes", "state", "stack_id")


def find_overwritten(traced: pl.DataFrame, live: pl.DataFrame) -> str:
    """Say what shows that entries were overwritten by newer ones; empty where nothing does.

    A block from before the recording has no stack, so one with a stack whose allocation is not in the trace was in the
    buffer once. So was the first half of a free whose second half begins the trace. And a trace of exactly 1,000 times
    N entries, with live blocks that it does not know, has reached its max_entries.
    """
    import polars as pl

    device = traced.group_by("device_index").agg(
        entries=pl.len(),
        split=pl.col("action").first() == "free_completed",
        halves=(pl.col("action") == "free_requested").any(),
    )
    allocs = traced.filter(pl.col("action") == "alloc")
    lost = live.join(device, on="device_index").join(allocs, on=["device_index", "address"], how="anti")
    recorded = lost.filter(pl.col("stack_id").is_not_null()).height
    if recorded:
        return f"{recorded} live blocks were recorded, but their allocations are gone"
    if device.filter(pl.col("split") & pl.col("halves")).height:
        return "it begins in a free"
    full = lost.filter(pl.col("entries") % _ROUND == 0)["entries"]
    return f"it has exactly {full[0]:,} entries" if len(full) else ""


def no_blocks() -> pl.DataFrame:
    """Return blocks as the process would send them, none of them."""
    import polars as pl

    schema = {"segment": pl.Int64, "address": pl.UInt64, "block_bytes": pl.Int64, "requested_bytes": pl.Int64}
    return pl.DataFrame(schema=schema | {"state": pl.String, "stack_id": pl.Int64})


def make_spans(annotations: pl.DataFrame, first_us: int, last_us: int) -> tuple[pl.DataFrame, int]:
    """Pair START and END marks into the rows of `spans`; return them and how many marks had no partner.

    A scope whose START or END is not in the recording reaches to its first or last time.
    """
    import polars as pl

    open_marks: dict[tuple[str, int | None], list[int]] = {}
    found: list[tuple[str, int, int]] = []
    alone = 0
    for stage, name, device, time_us in annotations.select("stage", "name", "device", "time_us").iter_rows():
        if name is None or time_us is None or abs(time_us) > _TIME_MOST:
            continue
        begun = open_marks.setdefault((name, device), [])
        if stage == "START":
            begun.append(time_us)
        elif stage == "END":
            alone += not begun
            found.append((name, begun.pop() if begun else min(first_us, time_us), time_us))
    for (name, _), begun in open_marks.items():
        alone += len(begun)
        found += [(name, time_us, max(last_us, time_us)) for time_us in begun]
    frame = pl.DataFrame(found, schema={"name": pl.String, "start": pl.Int64, "end": pl.Int64}, orient="row")
    start, end = pl.col("start") * _NS_PER_US, pl.col("end") * _NS_PER_US
    step = pl.col("name").str.starts_with("ProfilerStep#")
    return (
        frame.sort("start", pl.col("end"), descending=[False, True], maintain_order=True).select(
            pl.when(step).then(pl.lit("step")).otherwise(pl.lit("annotation")).alias("kind"),
            "name",
            start.alias("ts_ns"),
            (end - start).clip(lower_bound=0).alias("dur_ns"),
        ),
        alone,
    )
