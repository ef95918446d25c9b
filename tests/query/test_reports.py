"""Every named report on one hand-checked run, and the door to one's own reports."""
# ruff: noqa: E501 (the rows stand as they are printed)

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from tests.query import tiny
from xmem.errors import RefusedError, UnreadableError, UsageError
from xmem.query.reports import ReportOptions, find_report, report, reports

CASES = {
    "summary": """\
        what,bytes,detail
        peak allocated,4608,"step 0, backward, 50 % of the device"
        peak reserved,8192,56 % of it unused when it was reached
        first step,4608,peak of step 0
        later steps,3328,highest peak of the 1 after it
        out of memory,6144,1 in all; the largest request (xmem report oom)
        activation,2560,"55.6 % of the peak, 2 allocations"
        parameter,1024,"22.2 % of the peak, 1 allocations"
        temporary,1024,"22.2 % of the peak, 1 allocations"
        in aten::linear,2560,55.6 % of the peak
        in aten::mm,1024,22.2 % of the peak
        would help,2560,"activation checkpointing, a smaller batch or shorter sequences: activations lead"
        would help,1280,"the first step needs more than the rest: cudnn.benchmark=False, or warm up with a small batch (xmem report first-step)\"""",
    "peak": """\
        category,op,module,phase,code,at_peak_bytes,share,allocations
        activation,aten::linear,nn.Module: Linear_0,forward,backward (autograd.py:5),2048,0.4444444444444444,1
        parameter,,,,,1024,0.2222222222222222,1
        temporary,aten::mm,,backward,,1024,0.2222222222222222,1
        activation,aten::linear,nn.Module: Linear_0,forward,encode (model.py:12),512,0.1111111111111111,1""",
    "categories": """\
        category,at_peak_bytes,share,at_peak_allocations,at_end_bytes,total_bytes,allocations,largest_bytes
        activation,2560,0.5555555555555556,2,0,3072,3,2048
        parameter,1024,0.2222222222222222,1,1024,1024,1,1024
        temporary,1024,0.2222222222222222,1,0,1024,1,1024
        gradient,0,0.0,0,0,1024,1,1024
        optimizer_state,0,0.0,0,512,512,1,512
        unknown,0,0.0,0,256,256,1,256""",
    "operators": """\
        op,at_peak_bytes,share,at_peak_allocations,at_end_bytes,total_bytes,allocations,largest_bytes
        aten::linear,2560,0.5555555555555556,2,256,3328,4,2048
        aten::mm,1024,0.2222222222222222,1,0,2048,2,1024
        ,1024,0.2222222222222222,1,1024,1024,1,1024
        Optimizer.step#Adam.step,0,0.0,0,512,512,1,512""",
    "modules": """\
        module,at_peak_bytes,share,at_peak_allocations,at_end_bytes,total_bytes,allocations,largest_bytes
        nn.Module: Linear_0,2560,0.5555555555555556,2,0,2560,2,2048
        ,2048,0.4444444444444444,2,1792,4352,6,1024""",
    "steps": """\
        step,start_allocated_bytes,peak_allocated_bytes,peak_phase,end_allocated_bytes,growth_bytes,peak_reserved_bytes,allocations,allocated_in_step_bytes,duration_ns
        0,1024,4608,backward,2560,1536,8192,5,5120,100
        1,2560,3328,forward,1792,-768,8192,2,768,70""",
    "leaks": """\
        steps,category,op,module,code,kept_bytes,per_step_bytes,first_step,last_step
        1,optimizer_state,Optimizer.step#Adam.step,,,512,512,0,0""",
    "fragmentation": """\
        peak_reserved_bytes,peak_allocated_bytes,active_at_peak_bytes,unused_bytes,fragmentation,cache_bytes,segment_allocs,avoidable_segment_allocs,avoidable_bytes,free_end_bytes,free_end_blocks,largest_free_end_bytes
        8192,4608,3584,4608,0.5625,3584,1,0,0,6400,2,4096""",
    "streams": """\
        stream,peak_bytes,at_peak_bytes,at_end_bytes,reserved_end_bytes,unused_end_bytes,allocations,total_bytes
        0,4608,3584,1792,4096,2304,7,5888
        7,1024,1024,0,4096,4096,1,1024""",
    "oom": """\
        seq,step,phase,op,code,requested_bytes,device_free_bytes,allocated_bytes,reserved_bytes,unused_bytes,pending_bytes,reason
        20,1,backward,aten::cat,backward (autograd.py:5),6144,,1792,8192,6400,0,"enough lay unused, in pieces that did not fit: try expandable_segments:True\"""",
    "first-step": """\
        what,first_step_bytes,steady_bytes,difference_bytes
        peak allocated,4608,3328,1280
        peak reserved,8192,8192,0
        gradient,0,1024,-1024
        parameter,1024,1024,0
        activation,2560,512,2048
        optimizer_state,0,512,-512
        unknown,0,256,-256
        temporary,1024,0,1024""",
    "stacks": """\
        frame,file,line,at_peak_bytes,share,at_peak_allocations,at_end_bytes,total_bytes,allocations,stack_id
        backward,autograd.py,5,2048,0.4444444444444444,1,0,3072,2,1
        ,,,2048,0.4444444444444444,2,1536,2560,3,
        encode,model.py,12,512,0.1111111111111111,1,0,1024,2,0
        remember,train.py,40,0,0.0,0,256,256,1,2""",
    "idle": """\
        stream,idle_category,idle_ns,share,busy_ns,launches,peak_allocated_bytes
        7,host_wait,60,0.75,50,3,4608
        7,kernel_wait,20,0.25,50,3,4608""",
    "kernels": """\
        name,kind,op,launches,duration_ns,share,at_peak
        gemm<float>,kernel,aten::mm,1,20,0.4,true
        late,kernel,,1,20,0.4,false
        Memcpy HtoD,memcpy,,1,10,0.2,false""",
    "time": """\
        step,duration_ns,busy_ns,idle_ns,peak_allocated_bytes,peak_reserved_bytes
        0,110,35,75,4608,8192
        1,90,10,80,3328,8192""",
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_training(tmp_path_factory.mktemp("store") / "s").path


@pytest.mark.parametrize("name", CASES)
def test_report_has_the_rows_counted_by_hand(store: Path, name: str) -> None:
    assert tiny.as_csv(report(name, store=store).pl()) == dedent(CASES[name])


def test_every_report_is_counted_by_hand_and_has_help() -> None:
    assert sorted(one.name for one in reports()) == sorted(CASES)
    assert all(one.help.endswith(".") and len(one.help) > 20 for one in reports())


def test_rows_beyond_top_are_summed_up_so_that_the_peak_is_whole(store: Path) -> None:
    rows = report("peak", store=store, options=ReportOptions(top=1)).pl()
    assert rows["at_peak_bytes"].to_list() == [2048, 2560] and rows["category"].to_list() == ["activation", "(others)"]


def test_device_and_rank_are_chosen(store: Path) -> None:
    found = report("categories", store=store, options=ReportOptions(device="CPU", rank=0))
    assert found.rows() == [("input", 100, 1.0, 1, 0, 100, 1, 100)]
    assert found.subject.device.label == "cpu" and [one.label for one in found.subject.others] == ["cuda:0"]


def test_own_reports_join_and_replace_the_built_in_ones(store: Path, tmp_path: Path) -> None:
    (tmp_path / "largest.sql").write_text(
        "-- Largest block.\nSELECT max(bytes) AS b FROM allocations WHERE run_id = $run"
    )
    (tmp_path / "peak.sql").write_text("-- Mine.\nSELECT $rank AS rank")
    assert report("largest", store=store, options=ReportOptions(folder=tmp_path)).rows() == [(2048,)]
    assert find_report("peak", tmp_path).help == "Mine."
    assert report("peak", store=store).help != "Mine."


def test_own_reports_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.sql").write_text("SELECT 1")
    monkeypatch.setenv("XMEM_REPORTS", str(tmp_path))
    assert find_report("mine").help == ""


@pytest.mark.parametrize(
    ("sql", "error", "message"),
    [
        ("COPY runs TO 'x'", RefusedError, "The SQL is a COPY statement, not a SELECT."),
        ("SELECT 1; SELECT 2", RefusedError, "The SQL holds 2 statements; one is allowed."),
        ("SELECT $colour", UsageError, "The report 'own' asks for $colour."),
        ("SELECT * FROM read_text('/etc/passwd')", RefusedError, "Permission Error"),
    ],
)
def test_own_reports_stand_behind_the_fence(
    store: Path, tmp_path: Path, sql: str, error: type[Exception], message: str
) -> None:
    (tmp_path / "own.sql").write_text(sql)
    with pytest.raises(error) as caught:
        report("own", store=store, options=ReportOptions(folder=tmp_path))
    assert str(caught.value).startswith(message)


def test_what_is_not_there_is_said(store: Path, tmp_path: Path) -> None:
    def message(*arguments: object, options: ReportOptions | None = None, **more: object) -> str:
        with pytest.raises((UsageError, UnreadableError)) as caught:
            report(*arguments, **{"store": store, "options": options, **more})  # type: ignore[arg-type]
        return str(caught.value)

    assert message("nothing").startswith("There is no report 'nothing'.\nReports: categories, first-step, ")
    assert message("peak", "nobody").startswith("There is no run 'nobody' in the store")
    assert message("peak", options=ReportOptions(rank=3)) == "The run 'tiny' has no rank 3.\nRanks: 0"
    assert (
        message("peak", options=ReportOptions(device="cuda:9"))
        == "The run 'tiny' has no device 'cuda:9'.\nDevices: cpu, cuda:0"
    )
    assert (
        message("peak", options=ReportOptions(folder=tmp_path / "none"))
        == f"The folder of reports {str(tmp_path / 'none')!r} is not there.\nGive --reports a folder of .sql files."
    )
    empty = tiny.write(tmp_path / "e", "seq action id\n0 annotate -").path
    assert message("peak", store=empty).startswith("The run 'tiny' holds no memory events.\n")


def test_names_reach_sql_as_values(tmp_path: Path) -> None:
    nasty = "x'); DROP TABLE runs; --"
    store = tiny.write(tmp_path / "s", tiny.TRAINING, name=nasty).path
    assert report("peak", nasty, store=store).subject.run.name == nasty
