"""Summaries of an evaluation, by hand-made rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from xmem.cli import run as run_xmem
from xmem.errors import UnreadableError, UsageError
from xmem.evaluate import measured
from xmem.evaluate.accuracy_page import page_text
from xmem.evaluate.measured import EvaluateOptions, evaluate_measured, read_runs, workload_of
from xmem.evaluate.metrics import by_model, percentile, summaries

HEADER = "model,optimizer,batch_size,total_gpu_memory,ground_bytes,real_oom,family,zero_grad_mode"


def row(model: str, error: float, *, real: bool = False, predicted: bool = False, **more: Any) -> dict[str, Any]:
    return {
        "model": model, "family": "cnn", "ground_bytes": "1000", "real_oom": str(real).lower(),
        "relative_error": error, "relative_error_less_setup": error - 0.1, "predicted_oom": predicted,
        "runtime_s": 2.0, "xmem_bytes": "1100", "xmem_oom": "false", **more,
    }  # fmt: skip


ROWS = [
    row("VGG16", 0.02),
    row("VGG16", -0.04),
    row("gpt2", 0.06, family="transformer", predicted=True),
    row("gpt2", 9.0, real=True, predicted=True, family="transformer"),
]


def test_percentiles_are_interpolated() -> None:
    assert percentile([4, 1, 3, 2], 0.5) == 2.5
    assert percentile(range(11), 0.9) == 9
    assert percentile([], 0.5) is None


def test_summaries_leave_out_rows_that_ran_out_and_count_verdicts() -> None:
    given, less, published = summaries(ROWS)
    assert (given.rows, given.median_error, given.median_signed) == (3, 0.04, 0.02)
    assert (given.ooms, given.ooms_caught, given.false_alarms) == (1, 1, 1)
    assert given.worst_error == 0.06
    assert less.median_signed == pytest.approx(-0.08)
    assert (published.name, published.rows, published.median_error) == ("xmem (published)", 3, 0.1)
    assert published.median_runtime_s is None


def test_models_are_summarised_apart() -> None:
    assert [(each.name, each.rows) for each in by_model(ROWS)] == [("gpt2", 1), ("VGG16", 2)]


def test_the_page_holds_both_tables_and_names_its_chart() -> None:
    text = page_text(ROWS, "accuracy.svg")
    assert "| ours, ground as given | 3 | 4.00% |" in text
    assert "| VGG16 | 2 |" in text
    assert "![errors by model](accuracy.svg)" in text
    assert "{" not in text


def test_the_virtual_gpu_stands_beside_on_the_page() -> None:
    reach = {"range_low_bytes": 900, "range_high_bytes": 1100, "setup_bytes": 300}
    large = row("big", 0.5, family="large", **reach)
    text = page_text(ROWS, "accuracy.svg", [row("VGG16", 0.01, **reach), large])
    assert "| ours, virtual GPU, ground as given | 1 | 1.00% |" in text
    assert "| large | 1 | 50.00% |" in text
    assert (
        "- cnn: 1 of 1 measured peaks lie in their range (0 less set-up), which is 20.00% wide in the median." in text
    )


def test_what_stands_beside_must_be_an_evaluation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "other.json"
    file.write_text("[]")
    for beside, said in ((file, "is no JSON answer of xmem evaluate measured."), (tmp_path / "none", "cannot be read")):
        assert run_xmem(["evaluate", "measured", "--runs", "none.csv", "--beside", str(beside)]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(("installed", "other"), [("4.51.0", None), ("4.57.6", "4.57.6"), ("5.1", "5.1")])
def test_another_transformers_is_said(monkeypatch: pytest.MonkeyPatch, installed: str, other: str | None) -> None:
    monkeypatch.setattr(measured, "version", lambda _: installed)
    assert measured.other_transformers() == other


def test_a_row_describes_its_job() -> None:
    job = workload_of({"model": "VGG19", "optimizer": "Adam", "batch_size": "130", "zero_grad_mode": "2"})
    assert (job.batch_size, job.zero_grad, job.iterations, job.image_size) == (130, "end", 4, 86)


def test_a_missing_file_and_a_missing_column_are_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="There is no file"):
        read_runs(tmp_path / "none.csv")
    file = tmp_path / "runs.csv"
    file.write_text("model,optimizer\nVGG16,SGD\n")
    with pytest.raises(UnreadableError) as error:
        read_runs(file)
    assert error.value.message == "runs.csv has no column 'batch_size'."


def test_an_unknown_engine_is_said(tmp_path: Path) -> None:
    file = tmp_path / "runs.csv"
    file.write_text(HEADER + "\n")
    with pytest.raises(UsageError) as error:
        evaluate_measured(file, EvaluateOptions(engine="magic"))
    assert error.value.message == "The engine 'magic' is unknown."
    assert evaluate_measured(file) == []
