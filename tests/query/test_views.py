"""Every view on one hand-checked run: the events stand in tiny.TRAINING, SQL and its rows stand here."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from tests.query import tiny
from xmem.query import query, views

CASES = {
    "allocations": (
        "SELECT alloc_id, bytes, op, leaf_op, module, step, phase, category, start_seq, end_seq, end_ns, completed_ns"
        " FROM allocations WHERE device_type = 'cuda' ORDER BY alloc_id",
        """\
        alloc_id,bytes,op,leaf_op,module,step,phase,category,start_seq,end_seq,end_ns,completed_ns
        0,1024,,,,,,parameter,1,,,
        1,512,aten::linear,aten::linear,nn.Module: Linear_0,0,forward,activation,2,12,120,140
        2,2048,aten::linear,aten::empty,nn.Module: Linear_0,0,forward,activation,3,9,90,100
        3,1024,aten::mm,aten::mm,,0,backward,temporary,5,6,60,70
        4,1024,aten::mm,aten::mm,,0,backward,gradient,8,16,160,170
        5,512,Optimizer.step#Adam.step,,,0,optimizer,optimizer_state,11,,,
        6,512,aten::linear,aten::linear,,1,forward,activation,13,18,180,190
        7,256,aten::linear,aten::linear,,1,forward,unknown,15,,,""",
    ),
    "lifetimes": (
        "SELECT device_type, alloc_id, bytes, start_seq, end_seq, preexisting FROM lifetimes"
        " WHERE alloc_id IN (0, 1, 8) ORDER BY alloc_id",
        """\
        device_type,alloc_id,bytes,start_seq,end_seq,preexisting
        cuda,0,1024,1,,true
        cuda,1,512,2,12,false
        cpu,8,100,21,22,false""",
    ),
    "places": (
        "SELECT span_id, op, leaf_op, module FROM places WHERE span_id IN (1, 3, 5) ORDER BY span_id",
        """\
        span_id,op,leaf_op,module
        1,nn.Module: Linear_0,,
        3,aten::linear,aten::empty,nn.Module: Linear_0
        5,Optimizer.step#Adam.step,,""",
    ),
    "timeline": (
        "SELECT seq, allocated_bytes, active_bytes, reserved_bytes FROM timeline WHERE seq IN (5, 8, 12, 14, 19, 22)"
        " ORDER BY seq",
        """\
        seq,allocated_bytes,active_bytes,reserved_bytes
        5,4608,4608,8192
        8,4608,4608,8192
        12,2560,3072,8192
        14,3072,3072,8192
        19,1792,1792,8192
        22,0,0,""",
    ),
    "peaks": (  # seq 8 reaches 4608 again: the first time counts, and both never add up
        "SELECT device_type, peak_allocated_bytes, peak_allocated_seq, peak_allocated_step AS step,"
        " peak_allocated_phase AS phase, peak_reserved_bytes, peak_reserved_seq, end_allocated_bytes"
        " FROM peaks ORDER BY device_type",
        """\
        device_type,peak_allocated_bytes,peak_allocated_seq,step,phase,peak_reserved_bytes,peak_reserved_seq,end_allocated_bytes
        cpu,100,21,1,backward,,,0
        cuda,4608,5,0,backward,8192,4,1792""",
    ),
    "at_peak": (
        "SELECT alloc_id, bytes, op, category FROM at_peak WHERE device_type = 'cuda' ORDER BY alloc_id",
        """\
        alloc_id,bytes,op,category
        0,1024,,parameter
        1,512,aten::linear,activation
        2,2048,aten::linear,activation
        3,1024,aten::mm,temporary""",
    ),
    "steps": (
        "SELECT step, first_seq, last_seq, start_allocated_bytes AS before, end_allocated_bytes AS after,"
        " growth_bytes AS growth, peak_allocated_bytes AS peak, peak_seq, peak_phase, allocations,"
        " allocated_in_step_bytes AS made FROM steps WHERE device_type = 'cuda' ORDER BY step",
        """\
        step,first_seq,last_seq,before,after,growth,peak,peak_seq,peak_phase,allocations,made
        0,2,12,1024,2560,1536,4608,5,backward,5,5120
        1,13,20,2560,1792,-768,3328,15,forward,2,768""",
    ),
    "categories": (
        "SELECT category, allocations AS n, total_bytes AS total, at_peak_bytes AS peak, at_end_bytes AS at_end"
        " FROM categories WHERE device_type = 'cuda' ORDER BY category",
        """\
        category,n,total,peak,at_end
        activation,3,3072,2560,0
        gradient,1,1024,0,0
        optimizer_state,1,512,0,512
        parameter,1,1024,1024,1024
        temporary,1,1024,1024,0
        unknown,1,256,0,256""",
    ),
    "operators": (
        "SELECT op, allocations AS n, total_bytes AS total, largest_bytes AS largest, at_peak_bytes AS peak,"
        " at_end_allocations AS kept FROM operators WHERE device_type = 'cuda' ORDER BY op NULLS FIRST",
        """\
        op,n,total,largest,peak,kept
        ,1,1024,1024,1024,1
        Optimizer.step#Adam.step,1,512,512,0,1
        aten::linear,4,3328,2048,2560,1
        aten::mm,2,2048,1024,1024,0""",
    ),
    "modules": (
        "SELECT module, total_bytes AS total, at_peak_bytes AS peak, at_peak_allocations AS n FROM modules"
        " WHERE device_type = 'cuda' ORDER BY module",
        """\
        module,total,peak,n
        nn.Module: Linear_0,2560,2560,2
        ,4352,2048,2""",
    ),
    "streams": (  # stream 0: 1024+512+2048 = 3584, then 1024 more at seq 8
        "SELECT stream, peak_bytes, at_peak_bytes, at_end_bytes, reserved_end_bytes, unused_end_bytes FROM streams"
        " WHERE device_type = 'cuda' ORDER BY stream",
        """\
        stream,peak_bytes,at_peak_bytes,at_end_bytes,reserved_end_bytes,unused_end_bytes
        0,4608,3584,1792,4096,2304
        7,1024,1024,0,4096,4096""",
    ),
    "pools": (
        "SELECT device_type, pool_id, at_peak_bytes, reserved_end_bytes FROM pools ORDER BY device_type, pool_id",
        """\
        device_type,pool_id,at_peak_bytes,reserved_end_bytes
        cpu,,100,
        cuda,0:0,0,8192
        cuda,,4608,""",
    ),
    "own_frames": (
        "SELECT stack_id, frame, filename, line FROM own_frames ORDER BY stack_id",
        """\
        stack_id,frame,filename,line
        0,encode,/home/me/model.py,12
        1,backward,/site-packages/torch/autograd.py,5
        2,remember,train.py,40""",
    ),
    "stack_bytes": (
        "SELECT stack_id, frame, at_peak_bytes AS peak, total_bytes AS total, at_end_bytes AS at_end,"
        " len(frames) AS depth FROM stack_bytes WHERE device_type = 'cuda' ORDER BY stack_id",
        """\
        stack_id,frame,peak,total,at_end,depth
        0,encode,512,1024,0,3
        1,backward,2048,3072,0,1
        2,remember,0,256,256,1
        ,,2048,2560,1536,""",
    ),
    "growth": (
        "SELECT step, category, op, left_bytes, kept_bytes FROM growth WHERE device_type = 'cuda' ORDER BY ALL",
        """\
        step,category,op,left_bytes,kept_bytes
        0,gradient,aten::mm,1024,0
        0,optimizer_state,Optimizer.step#Adam.step,512,512
        1,unknown,aten::linear,256,256""",
    ),
    "segments_over_time": (
        "SELECT seq, action, bytes, reserved_bytes, unused_bytes, end_seq, preexisting FROM segments_over_time"
        " ORDER BY seq",
        """\
        seq,action,bytes,reserved_bytes,unused_bytes,end_seq,preexisting
        0,segment_alloc,4096,4096,4096,,true
        4,segment_alloc,4096,8192,4608,,false""",
    ),
    "fragmentation": (  # at seq 4: 8192 reserved, 3584 active; 512 lay free before, less than the 4096 asked for
        "SELECT peak_reserved_bytes AS peak, active_at_peak_bytes AS active, unused_bytes AS unused, fragmentation,"
        " segment_allocs AS n, avoidable_segment_allocs AS avoidable, free_end_blocks, largest_free_end_bytes"
        " FROM fragmentation",
        """\
        peak,active,unused,fragmentation,n,avoidable,free_end_blocks,largest_free_end_bytes
        8192,3584,4608,0.5625,1,0,2,4096""",
    ),
    "kernels": (
        "SELECT name, kind, op, dur_ns, launched_ns, at_peak FROM kernels ORDER BY ts_ns",
        """\
        name,kind,op,dur_ns,launched_ns,at_peak
        gemm<float>,kernel,aten::mm,20,40,true
        late,kernel,,20,,false
        Memcpy HtoD,memcpy,,10,,false""",
    ),
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_training(tmp_path_factory.mktemp("store") / "s").path


@pytest.mark.parametrize("name", CASES)
def test_view_has_the_rows_counted_by_hand(store: Path, name: str) -> None:
    sql, expected = CASES[name]
    assert tiny.as_csv(query(sql, store=store)) == dedent(expected)


def test_every_view_is_counted_by_hand() -> None:
    assert sorted(view.name for view in views()) == sorted(CASES)


@pytest.mark.parametrize("view", [view.name for view in views()])
def test_example_runs_and_view_is_empty_on_an_empty_store(tmp_path: Path, view: str) -> None:
    example = next(one.example for one in views() if one.name == view)
    assert query(example, store=tmp_path / "none").height == 0


def test_ranks_and_devices_stay_apart(tmp_path: Path) -> None:
    events = """
    rank seq action id bytes device index category step
    0    0   alloc  0  100   cuda   0     input    0
    0    1   alloc  1  200   cuda   1     input    0
    1    0   alloc  0  300   cuda   0     input    0
    """
    store = tiny.write(tmp_path / "s", events.strip())
    for sql in (
        "SELECT rank, device_index, peak_allocated_bytes AS bytes FROM peaks ORDER BY ALL",
        "SELECT rank, device_index, at_peak_bytes AS bytes FROM categories ORDER BY ALL",
        "SELECT rank, device_index, bytes FROM at_peak ORDER BY ALL",
        "SELECT rank, device_index, left_bytes AS bytes FROM growth ORDER BY ALL",
        "SELECT rank, device_index, end_allocated_bytes AS bytes FROM steps ORDER BY ALL",
        "SELECT rank, device_index, peak_bytes AS bytes FROM streams ORDER BY ALL",
    ):
        rows = tiny.as_csv(query(sql, store=store.path))
        assert rows == "rank,device_index,bytes\n0,0,100\n0,1,200\n1,0,300", sql
