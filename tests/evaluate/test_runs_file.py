"""Files of measured runs: which job a row means, and cells that are broken, empty or written in another way."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from xmem.errors import UnreadableError, UsageError
from xmem.evaluate import measured
from xmem.evaluate.measured import EvaluateOptions, evaluate_measured
from xmem.evaluate.metrics import Summary, summaries
from xmem.evaluate.runs_file import (
    check_row,
    family_of,
    ground_of,
    is_convolutional,
    read_runs,
    torch_of,
    total_bytes_of,
    workload_of,
)

ROW = {
    "model": "VGG16", "optimizer": "SGD", "batch_size": "8", "total_gpu_memory": "8318222336", "ground_bytes": "1000",
    "real_oom": "false", "family": "cnn", "gpu_name": "NVIDIA GeForce RTX 4060",
}  # fmt: skip
TEXT = {**ROW, "model": "gpt2", "family": "transformer", "input_size": "86x86x3"}


def write(path: Path, *rows: dict[str, str]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as text:
        writer = csv.DictWriter(text, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.mark.parametrize(
    ("cells", "field", "value"),
    [
        ({"batch_size": "32.0"}, "batch_size", 32),
        ({"zero_grad_mode": "1.0"}, "zero_grad", "before-backward"),
        ({"zero_grad_mode": "2"}, "zero_grad", "end"),
        ({"zero_grad_mode": "7"}, "zero_grad", "start"),
        ({"zero_grad_mode": "nan"}, "zero_grad", "start"),
        ({"zero_grad_mode": "end"}, "zero_grad", "end"),
        ({"target_iteration": "1.0"}, "iterations", 2),
        ({"target_iteration": ""}, "iterations", 4),
        ({"input_size": "224x224x3"}, "image_size", 224),
        ({"input_size": "3x64x64"}, "image_size", 64),
        ({"input_size": ""}, "image_size", 86),
        ({"fp16": "True"}, "dtype", "float16"),
        ({"fp16": "false"}, "dtype", "float32"),
    ],
)
def test_cells_decide_the_job(cells: dict[str, str], field: str, value: object) -> None:
    assert getattr(workload_of(ROW | cells), field) == value


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ({"batch_size": "x"}, "batch_size is 'x', not a whole number of at least 0."),
        ({"batch_size": ""}, "batch_size is '', not a whole number of at least 0."),
        ({"batch_size": "0"}, "batch_size must be at least 1, not 0."),
        ({"batch_size": "1.5"}, "batch_size is '1.5', not a whole number of at least 0."),
        ({"zero_grad_mode": "x"}, "zero_grad_mode is 'x', not a whole number of at least 0."),
        ({"target_iteration": "-1"}, "target_iteration is '-1', not a whole number of at least 0."),
        ({"input_size": "86x90x3"}, "input_size is '86x90x3', not a square of three colours like 86x86x3."),
        ({"fp16": "half"}, "fp16 is 'half', neither true nor false."),
        ({"real_oom": "maybe"}, "real_oom is 'maybe', neither true nor false."),
        ({"model": ""}, "model is empty."),
        ({"ground_bytes": "inf"}, "ground_bytes is 'inf', not a whole number of at least 0."),
        ({"total_gpu_memory": "0"}, "total_gpu_memory is '0', not a whole number of at least 1."),
        ({"total_gpu_memory": "", "gpu_name": "x"}, "total_gpu_memory is '', not a whole number of at least 1."),
        ({"workload": '{"model": 1, "sise": 2}'}, None),
    ],
)
def test_a_broken_cell_is_said(cells: dict[str, str], message: str | None) -> None:
    with pytest.raises(UsageError) as error:
        check_row(ROW | cells)
    assert message in (error.value.message, None)


def test_what_a_row_leaves_open_is_filled_in() -> None:
    assert total_bytes_of(ROW | {"total_gpu_memory": ""}) > 8_000_000_000
    assert ground_of(ROW | {"ground_bytes": "2.5e9"}) == 2_500_000_000
    assert ground_of(ROW | {"ground_bytes": ""}) is ground_of(ROW | {"ground_bytes": "0"}) is None
    assert (torch_of(ROW), torch_of(ROW | {"torch_version": "2.14.1"})) == ("2.6.0", "2.14.1")
    assert check_row(ROW | {"real_oom": "True", "family": "CNN"})["real_oom"] == "true"
    assert [family_of(ROW | {"family": name}) for name in ("CNN", "", "Large")] == ["cnn", "cnn", "large"]
    assert family_of(TEXT | {"family": ""}) == "transformer"


def test_the_model_says_whether_it_takes_images() -> None:
    assert not is_convolutional(TEXT | {"family": "cnn"})
    assert is_convolutional(ROW | {"family": "transformer", "model": "MobeNetV3Small"})
    assert is_convolutional(ROW | {"model": "own:function"})
    assert not is_convolutional(ROW | {"model": "own:function", "family": "transformer"})


def test_every_transformer_has_the_same_meaningless_input_size() -> None:
    assert workload_of(TEXT | {"input_size": "512"}).image_size == 86


def test_a_file_may_have_a_mark_blanks_and_uneven_rows(tmp_path: Path) -> None:
    file = tmp_path / "runs.csv"
    names = "model, optimizer,batch_size,total_gpu_memory,ground_bytes,real_oom,fp16"
    file.write_text(f"\ufeff{names}\n VGG16 ,SGD,8\na,b,1,2,3,4,5,6\n")
    first, second = read_runs(file)
    assert (first["model"], first["optimizer"], first["real_oom"]) == ("VGG16", "SGD", "")
    assert (second["fp16"], len(second)) == ("5", 7)
    file.write_bytes(b"model,optimizer\xff\n")
    with pytest.raises(UnreadableError, match="is no CSV in UTF-8"):
        read_runs(file)


def test_one_bad_row_stops_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def estimate(job: Any, row: dict[str, str]) -> dict[str, Any]:
        if row["model"] == "boom":
            raise RuntimeError("the model fell over")
        return {
            "estimate_bytes": 900,
            "relative_error": -0.1,
            "relative_error_less_setup": -0.1,
            "predicted_oom": False,
        }

    def prepare(workload: Any, **_: object) -> object:
        if workload.model == "none":
            raise UsageError("The model 'none' is unknown.")
        return workload

    monkeypatch.setattr(measured, "prepare_job", prepare)
    monkeypatch.setattr(measured, "estimate_row", estimate)
    models = ("none", "VGG16", "boom")
    file = write(tmp_path / "runs.csv", *[ROW | {"model": name} for name in models], ROW | {"batch_size": "x"})
    rows = evaluate_measured(file)
    assert [row["trouble"] for row in rows] == [
        "The model 'none' is unknown.",
        None,
        "RuntimeError: the model fell over",
        "batch_size is 'x', not a whole number of at least 0.",
    ]
    assert rows[0]["estimate_bytes"] is None and rows[1]["estimate_bytes"] == 900
    found: Summary = summaries(rows)[0]
    assert (found.rows, found.troubles, found.median_error) == (1, 3, 0.1)
    with pytest.raises(UsageError, match="No row can be estimated; the first: The model 'none'"):
        evaluate_measured(write(tmp_path / "bad.csv", ROW | {"model": "none"}))


def test_small_batches_do_not_stand_in_for_large_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(measured, "prepare_job", lambda workload, **_: asked.append(workload.batch_size))
    monkeypatch.setattr(measured, "estimate_row", lambda job, row: {"relative_error": 0.0})
    file = write(tmp_path / "runs.csv", *[ROW | {"batch_size": size} for size in ("2", "30", "3", "60")])
    evaluate_measured(file, EvaluateOptions())
    assert asked == [2, 30, 3]  # batches above 4 share their profiles
