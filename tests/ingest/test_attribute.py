"""Spans, steps, phases and categories, on small training loops checked by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xmem.ingest import traits
from xmem.ingest.adapter import Notes
from xmem.ingest.nesting import build_forest, innermost, innermost_at, outermost
from xmem.ingest.phases import PHASE_WORDS
from xmem.ingest.spool import Spool
from xmem.ingest.tables import build_tables

STACK = pl.List(pl.Struct({"name": pl.String, "filename": pl.String, "line": pl.Int32}))


def tables_of(
    tmp_path: Any, events: list[dict[str, Any]], spans: list[dict[str, Any]] = (), **facts: Any
) -> dict[str, pl.DataFrame]:
    """Run batches through the whole of the pipeline's middle and return its tables."""
    spool, notes = Spool(tmp_path), Notes(facts={key: value for key, value in facts.items() if key != "stacks"})
    spool.take("events", pl.DataFrame(events, infer_schema_length=None))
    spool.take("spans", pl.DataFrame(spans, infer_schema_length=None))
    if "stacks" in facts:
        spool.take("stacks", pl.DataFrame(facts["stacks"], schema={"stack_id": pl.Int64, "frames": STACK}))
    written: dict[str, pl.DataFrame] = {}

    def write(table: str, frame: pl.DataFrame, part: int = 0) -> None:
        written[table] = pl.concat([written[table], frame]) if table in written else frame

    build_tables(spool, notes, {}, write)
    return written


def event(ts: int, action: str, address: int, size: int = 512, **more: Any) -> dict[str, Any]:
    return {
        "ts_ns": ts,
        "action": action,
        "address": address,
        "block_bytes": size,
        "device_type": "cuda",
        "device_index": 0,
        "thread_id": 1,
        **more,
    }


def span(start: int, end: int, name: str, kind: str = "operator", **more: Any) -> dict[str, Any]:
    return {"ts_ns": start, "dur_ns": end - start, "name": name, "kind": kind, "thread_id": 1, **more}


def training_step(at: int, number: int) -> list[dict[str, Any]]:
    """A step of 1000 ns: input 0-50, forward 100-300, backward 400-600, optimizer 700-800, zero_grad 850-900."""
    return [
        span(at, at + 1000, f"ProfilerStep#{number}", "step"),
        span(at + 10, at + 50, "aten::to"),
        span(at + 100, at + 300, "nn.Module: Net_0", "module"),
        span(at + 110, at + 200, "aten::linear"),
        span(at + 120, at + 190, "aten::addmm"),
        span(at + 210, at + 290, "aten::relu"),
        span(at + 400, at + 500, "autograd::engine::evaluate_function: ReluBackward0", thread_id=2),
        span(at + 510, at + 600, "autograd::engine::evaluate_function: AddmmBackward0", thread_id=2),
        span(at + 520, at + 590, "aten::mm", thread_id=2),
        span(at + 700, at + 800, "Optimizer.step#Adam.step", "annotation"),
        span(at + 710, at + 790, "aten::_foreach_add_"),
        span(at + 850, at + 900, "Optimizer.zero_grad#Adam.zero_grad", "annotation"),
    ]


EVENTS = [
    event(5, "alloc", 1),  # before anything: a parameter, never freed
    event(1020, "alloc", 2),  # input, freed in the next step
    event(1130, "alloc", 3),  # activation
    event(1130, "alloc", 4, 8_519_680),  # workspace
    event(1140, "alloc", 5),  # temporary in addmm
    event(1145, "free_requested", 5),
    event(1220, "alloc", 6),  # activation of relu, freed in backward
    event(1420, "alloc", 7, thread_id=2),  # gradient of an activation: temporary in backward
    event(1450, "free_requested", 6, thread_id=2),
    event(1530, "alloc", 8, thread_id=2),  # gradient of the parameter, until zero_grad
    event(1560, "free_requested", 7, thread_id=2),
    event(1570, "free_requested", 3, thread_id=2),
    event(1720, "alloc", 9),  # Adam's state, never freed
    event(1730, "alloc", 10),  # temporary of the optimizer
    event(1820, "free_requested", 10),
    event(1860, "free_requested", 8),
    event(2020, "alloc", 11),
    event(2060, "free_requested", 2),
]


def test_phases_steps_and_categories_of_a_training_loop(tmp_path):
    found = tables_of(tmp_path, EVENTS, training_step(1000, 7) + training_step(2000, 8))
    events = found["events"].with_columns(pl.col("phase", "category").cast(pl.String))
    allocs = {row["address"]: row for row in events.rows(named=True) if row["action"] == "alloc"}
    assert {address: row["category"] for address, row in allocs.items()} == {
        1: "parameter",
        2: "input",
        3: "activation",
        4: "workspace",
        5: "temporary",
        6: "activation",
        7: "temporary",
        8: "gradient",
        9: "optimizer_state",
        10: "temporary",
        11: "input",
    }
    assert [row["phase"] for row in events.rows(named=True)] == [
        "other", "other", "forward", "forward", "forward", "forward", "forward", "backward", "backward", "backward",
        "backward", "backward", "optimizer", "optimizer", "other", "other", "other", "other",
    ]  # fmt: skip
    assert events["step"].to_list() == [None] + [7] * 15 + [8] * 2
    frees = events.filter(pl.col("action") == "free_requested")
    assert frees["category"].to_list() == [allocs[row["address"]]["category"] for row in frees.rows(named=True)]


def test_spans_know_their_parents_operators_and_modules(tmp_path):
    found = tables_of(tmp_path, EVENTS, training_step(1000, 7))
    spans = found["spans"]
    names = dict(spans.select("span_id", pl.col("name").cast(pl.String)).rows())
    assert sorted(names) == list(range(12))
    rows = {row["name"]: row for row in spans.rows(named=True)}
    above = {name: names.get(row["parent_id"]) for name, row in rows.items()}
    assert above["aten::addmm"] == "aten::linear"
    assert above["aten::linear"] == "nn.Module: Net_0"
    assert above["nn.Module: Net_0"] == "ProfilerStep#7"
    assert above["ProfilerStep#7"] is None
    assert names[rows["aten::addmm"]["op_id"]] == "aten::linear"
    assert names[rows["aten::addmm"]["module_id"]] == "nn.Module: Net_0"
    assert rows["nn.Module: Net_0"]["op_id"] is None
    assert names[rows["aten::mm"]["op_id"]] == "autograd::engine::evaluate_function: AddmmBackward0"
    event_spans = {row["address"]: names.get(row["span_id"]) for row in found["events"].rows(named=True)}
    assert event_spans[5] == "aten::addmm"
    assert event_spans[9] == "aten::_foreach_add_"
    assert event_spans[1] is None


def test_runtime_calls_and_kernels(tmp_path):
    spans = [
        span(100, 200, "aten::mul"),
        span(120, 130, "cudaLaunchKernel", "runtime", correlation_id=5),
        span(300, 400, "mul_kernel", "kernel", thread_id=None, stream=7, device_index=0, correlation_id=5),
    ]
    found = tables_of(tmp_path, EVENTS[:1], spans)["spans"]
    rows = {row["name"]: row for row in found.rows(named=True)}
    assert rows["cudaLaunchKernel"]["parent_id"] == rows["aten::mul"]["span_id"]
    assert rows["cudaLaunchKernel"]["op_id"] == rows["aten::mul"]["span_id"]
    assert rows["mul_kernel"]["parent_id"] is None
    assert rows["mul_kernel"]["correlation_id"] == rows["cudaLaunchKernel"]["correlation_id"] == 5


def test_steps_are_counted_from_the_optimizer(tmp_path):
    spans = [row for at in (1000, 2000) for row in training_step(at, 0) if row["kind"] != "step"]
    found = tables_of(tmp_path, [event(at, "alloc", at) for at in (50, 1150, 1750, 1950, 2150, 2750)], spans)
    assert found["events"]["step"].to_list() == [None, 0, 0, 1, 1, 1]


def test_what_the_source_does_not_tell_stays_unknown(tmp_path):
    found = tables_of(tmp_path, EVENTS[:8], [span(1110, 1200, "aten::linear")])["events"]
    assert found["phase"].null_count() == found.height
    assert found["step"].null_count() == found.height
    categories = dict(found.select("address", pl.col("category").cast(pl.String)).rows())
    assert categories.pop(5) == "temporary"
    assert categories.pop(4) == "workspace"
    assert set(categories.values()) == {"unknown"}


def test_a_step_without_backward_is_forward(tmp_path):
    spans = [span(1000, 2000, "ProfilerStep#3", "step"), span(1100, 1200, "aten::linear")]
    found = tables_of(tmp_path, [event(1150, "alloc", 1), event(1500, "alloc", 2), event(2500, "alloc", 3)], spans)
    assert found["events"]["phase"].cast(pl.String).to_list() == ["forward", "forward", "other"]


def test_what_the_source_gives_is_kept(tmp_path):
    given = {"category": "input", "phase": "optimizer", "step": 40, "span_id": 9, "alloc_id": 70}
    rows = [event(1150, "alloc", 1, **given), event(1160, "alloc", 2)]
    spans = [span(1100, 1200, "aten::linear", span_id=9), span(1120, 1190, "aten::mm", span_id=4, parent_id=9)]
    found = tables_of(tmp_path, rows, spans)
    first = found["events"].rows(named=True)[0]
    assert {name: first[name] for name in given} == given
    assert found["events"].rows(named=True)[1]["span_id"] == 4
    assert found["spans"].select("span_id", "parent_id", "op_id").rows() == [(9, None, 9), (4, 9, 9)]


def frames(*functions: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"name": name, "filename": file, "line": 1} for name, file in functions]


STACKS = {
    "stack_id": [0, 1, 2, 3, 4],
    "frames": [
        frames(
            ("convert", "torch/nn/modules/module.py"), ("to", "torch/nn/modules/module.py"), ("<module>", "train.py")
        ),
        frames(("forward", "net.py"), ("_call_impl", "torch/nn/modules/module.py"), ("<module>", "train.py")),
        [],
        frames(("_init_group", "torch/optim/adam.py"), ("step", "torch/optim/adam.py"), ("<module>", "train.py")),
        frames(("cross_entropy", "torch/nn/functional.py"), ("<module>", "train.py")),
    ],
}


def test_snapshots_tell_phases_by_stacks(tmp_path):
    rows = [
        event(1, "alloc", 1, stack_id=0),  # the model
        event(2, "alloc", 2, stack_id=1),  # forward
        event(3, "alloc", 3, stack_id=4),  # the loss
        event(4, "alloc", 4, stack_id=2),  # autograd's thread has no Python frames
        event(5, "free_requested", 2, stack_id=2),
        event(6, "alloc", 5, stack_id=3),  # Adam's state
        event(7, "free_requested", 4, stack_id=4),
        event(8, "alloc", 6, stack_id=1),
        event(9, "free_requested", 3, stack_id=2),
        event(10, "alloc", 7, stack_id=3),
    ]
    for row in rows:
        row.pop("thread_id")
    found = tables_of(tmp_path, rows, stacks=STACKS, ordered=True)["events"]
    assert found["phase"].cast(pl.String).to_list() == [
        "other", "forward", "forward", "backward", "backward", "optimizer", "other", "forward", "backward", "optimizer",
    ]  # fmt: skip
    assert found["step"].to_list() == [None, 0, 0, 0, 0, 0, 1, 1, 1, 1]
    allocs = found.filter(pl.col("action") == "alloc").select("address", pl.col("category").cast(pl.String)).rows()
    assert dict(allocs) == {
        1: "parameter",
        2: "activation",
        3: "activation",
        4: "gradient",
        5: "optimizer_state",
        6: "activation",
        7: "optimizer_state",
    }


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("autograd::engine::evaluate_function: AddmmBackward0", traits.BACKWARD),
        ("NllLossBackward", traits.BACKWARD),
        ("torch::autograd::AccumulateGrad", traits.BACKWARD),
        ("Optimizer.step#AdamW.step", traits.OPTIMIZER_STEP),
        ("Optimizer.zero_grad#SGD.zero_grad", traits.ZERO_GRAD),
        ("aten::addmm", traits.MATMUL),
        ("aten::mm_like", 0),
        ("aten::to", traits.COPY),
        ("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", traits.LOADER),
        ("aten::convolution_backward", 0),
        ("my Backward pass", 0),
    ],
)
def test_names_that_mean_something(name, flags):
    assert traits.flags_of_name(name) == flags


@pytest.mark.parametrize(
    ("name", "step"), [("ProfilerStep#12", 12), ("ProfilerStep#", -1), ("ProfilerStep#" + "9" * 30, -1)]
)
def test_numbers_of_steps(name, step):
    assert traits.step_of_name(name) == step


def test_phase_words_are_those_of_the_schema():
    from xmem.ingest.categories import WORDS
    from xmem.schema import enums

    assert enums()["phase"] == PHASE_WORDS
    assert set(WORDS) <= set(enums()["category"])


@st.composite
def nested_spans(draw):
    """Draw properly nested spans of one thread as (start, end, parent) in order of start."""
    found: list[list[int]] = []
    stack: list[int] = []
    clock = 0
    for opens in draw(st.lists(st.booleans(), max_size=60)):
        clock += draw(st.integers(3, 9))
        if opens:
            found.append([clock, 0, stack[-1] if stack else -1])
            stack.append(len(found) - 1)
        elif stack:
            found[stack.pop()][1] = clock
    while stack:
        clock += 3
        found[stack.pop()][1] = clock
    return found


@settings(max_examples=100, deadline=None)
@given(nested_spans(), st.randoms())
def test_parents_are_those_of_a_stack(spans, random):
    count = len(spans)
    order = list(range(count))
    random.shuffle(order)
    start, end, parent = (np.array([span[at] for span in spans], dtype=np.int64) for at in range(3))
    thread = np.zeros(count, dtype=np.int32)
    row = np.array(order, dtype=np.int32)
    forest = build_forest(row, thread, start[row], end[row])
    assert forest.row.tolist() == list(range(count))
    assert forest.parent.tolist() == parent.tolist()
    chosen = np.arange(count) % 3 == 0
    for place in range(count):
        chain = [place]
        while parent[chain[-1]] >= 0:
            chain.append(int(parent[chain[-1]]))
        marked = [at for at in chain if chosen[at]]
        assert outermost(forest.parent, chosen)[place] == (marked[-1] if marked else -1)
        assert innermost(forest.parent, chosen)[place] == (marked[0] if marked else -1)
    moments = np.array(range(0, int(end.max(initial=0)) + 3), dtype=np.int64)
    found = innermost_at(forest, np.zeros(len(moments), dtype=np.int32), moments)
    for moment, place in zip(moments.tolist(), found.tolist(), strict=True):
        around = [at for at in range(count) if start[at] <= moment <= end[at]]
        assert place == (max(around, key=lambda at: start[at]) if around else -1)


def test_spans_of_other_threads_hold_nothing():
    thread = np.array([0, 1], dtype=np.int32)
    forest = build_forest(np.arange(2, dtype=np.int32), thread, np.array([0, 5]), np.array([100, 9]))
    assert forest.parent.tolist() == [-1, -1]
    assert innermost_at(forest, np.array([1, 2], dtype=np.int32), np.array([50, 6])).tolist() == [-1, -1]


def test_a_child_may_end_a_microsecond_late_in_files_of_whole_microseconds():
    starts, ends = np.array([1000, 2000]), np.array([9000, 10000])
    forest = build_forest(np.arange(2, dtype=np.int32), np.zeros(2, dtype=np.int32), starts, ends)
    assert forest.parent.tolist() == [-1, 0]
