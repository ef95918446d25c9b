"""The engine vgpu: ranges and verdicts from variants, and real runs of measured rows on virtual cards."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from xmem.capture.vgpu.farm import Peaks
from xmem.capture.vgpu.settings import VirtualGpu
from xmem.capture.vgpu.torch_facts import default_python, find_torch
from xmem.cli import run as run_xmem
from xmem.errors import UsageError
from xmem.evaluate.virtual import (
    CONTEXT_BYTES,
    RangeSummary,
    as_measured,
    card_of,
    figures,
    range_summaries,
    reach,
    too_close,
    variants,
)
from xmem.units import GIB, MIB


def peaks(reserved: int, *, oom: bool = False, setup: int = 100 * MIB) -> Peaks:
    return Peaks(oom, reserved, reserved - MIB, setup, reserved, 0)


ROW = {
    "model": "m",
    "family": "transformer",
    "batch_size": "4",
    "total_gpu_memory": str(8 * GIB),
    "ground_bytes": str(GIB),
}


def test_a_row_gets_a_point_and_a_range() -> None:
    found = {"base": peaks(1000 * MIB), "one-token-less": peaks(900 * MIB)}
    row = figures(ROW, found)
    assert row["estimate_bytes"] == 1000 * MIB and row["relative_error"] == -24 / 1024
    assert row["relative_error_less_setup"] == -124 / 1024
    assert (row["range_low_bytes"], row["range_high_bytes"]) == (887 * MIB, round(1050.4 * MIB))
    assert (row["predicted_oom"], row["too_close_to_call"]) == (False, False)


def test_engines_widen_the_range_of_convolutions() -> None:
    assert reach([peaks(1000 * MIB), peaks(1100 * MIB)], True) == (
        round(1000 * MIB * 0.9725) - 4 * MIB,
        round(1140 * MIB * 1.0275),
    )
    found = {"base": peaks(1200 * MIB), "small-workspaces": peaks(1000 * MIB), "no-workspaces": peaks(900 * MIB)}
    row = figures(ROW | {"family": "cnn"}, found)
    assert row["estimate_bytes"] == 1000 * MIB and row["setup_bytes"] == 100 * MIB


def test_what_another_cudnn_picks_and_what_ground_leaves_out_shape_the_range_of_measured_rows() -> None:
    found = {"base": peaks(1200 * MIB), "small-workspaces": peaks(1000 * MIB), "no-workspaces": peaks(900 * MIB)}
    row = figures(ROW | {"family": "cnn"}, found)
    assert row["range_low_bytes"] == round(800 * MIB * 0.9725) - 4 * MIB
    assert row["range_high_bytes"] == round(1040 * MIB * 1.0275)
    own = figures(ROW | {"family": "cnn", "torch_version": "2.14.1"}, found)
    assert (own["range_low_bytes"], own["range_high_bytes"]) == reach(
        [one for one in found.values() if isinstance(one, Peaks)], True
    )


def test_a_replay_that_runs_out_of_memory_is_no_proof_for_convolutions() -> None:
    gpu = VirtualGpu(card_of(""), 8 * GIB, GIB)
    ran = Peaks(False, 7 * GIB, 6 * GIB, 0, 7 * GIB, 1, requests=[6 * GIB, 2 * GIB])
    assert as_measured(ROW, ran, gpu, "down").oom
    images = as_measured(ROW | {"family": "cnn"}, ran, gpu, "down")
    assert (images.oom, images.peak_reserved_bytes, images.requests) == (False, 7 * GIB, [])


def test_a_row_without_ground_has_a_range_and_no_error() -> None:
    row = figures(ROW | {"ground_bytes": ""}, {"base": peaks(GIB)})
    assert row["relative_error"] is row["relative_error_less_setup"] is None
    assert row["range_high_bytes"] > GIB
    assert range_summaries([{**ROW, **row, "ground_bytes": "", "real_oom": "false"}]) == []


def test_ranges_are_summed_up() -> None:
    row = {**ROW, "real_oom": "false", "range_low_bytes": GIB, "range_high_bytes": 2 * GIB, "setup_bytes": GIB}
    out, oom = {**row, "ground_bytes": str(3 * GIB)}, {**row, "real_oom": "true"}
    assert range_summaries([row, out, oom]) == [RangeSummary("transformer", 2, 1, None, (1 + 1 / 3) / 2)]
    images = [{**one, "family": "cnn"} for one in (row, {**row, "ground_bytes": str(GIB + 1)})]
    assert range_summaries(images) == [RangeSummary("cnn", 2, 2, 1, pytest.approx(1.0))]
    assert [one.less_text for one in range_summaries([*images, out])] == [" (1 less set-up)", ""]


def test_what_is_near_the_capacity_is_too_close_to_call() -> None:
    usable = 8 * GIB - CONTEXT_BYTES
    assert too_close([peaks(usable - 10 * MIB)], usable, False)
    assert too_close([peaks(GIB), peaks(GIB, oom=True)], usable, False)
    assert not too_close([peaks(usable, oom=True)] * 2, usable, True)
    assert not too_close([peaks(GIB)], usable, True)


def test_a_job_that_cannot_run_is_said() -> None:
    with pytest.raises(UsageError, match="m batch 4 cannot be run on the virtual GPU: KeyError: 'm'"):
        figures(ROW, {"base": "KeyError: 'm'"})


def test_variants_perturb_what_nobody_knows() -> None:
    job = ROW | {"model": "gpt2", "optimizer": "SGD", "gpu_name": "NVIDIA GeForce RTX 3060", "family": "cnn"}
    runs = variants("7", job)
    assert [run.key for run in runs] == ["7/base", "7/one-token-less", "7/one-token-more"]
    assert all(run.requests for run in runs) and [run.lengths for run in runs] == [(), (127,), (129,)]
    names = [run.key for run in variants("8", job | {"model": "VGG16", "family": ""})]
    assert names == ["8/base", "8/small-workspaces", "8/no-workspaces"]
    assert card_of("NVIDIA GeForce RTX 3060").compute_capability == "8.6"
    assert card_of("something").name == "A100-SXM4-80GB"


@pytest.mark.cuda_wheel
@pytest.mark.slow
def test_measured_rows_run_on_virtual_cards(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    try:
        find_torch(default_python())
    except UsageError as error:
        pytest.skip(f"no CUDA build of torch: {error.message}")
    fields = {"gpu_name": "NVIDIA GeForce RTX 3060", "total_gpu_memory": "12622168064", "real_oom": "false"}
    rows = [
        {
            **fields,
            "family": "cnn",
            "model": "MobileNetV2",
            "optimizer": "SGD",
            "batch_size": "8",
            "ground_bytes": str(GIB),
        },
        {
            **fields,
            "family": "cnn",
            "model": "VGG16",
            "optimizer": "Adam",
            "batch_size": "4000",
            "ground_bytes": str(GIB),
        },
    ]
    (tmp_path / "gone.py").write_text("import os\n\n\ndef make():\n    os.kill(os.getpid(), 9)\n")
    rows.insert(1, rows[0] | {"model": f"{tmp_path / 'gone.py'}:make"})
    rows.append(rows[0] | {"model": "NoSuchNet"})
    file = tmp_path / "runs.csv"
    with file.open("w", newline="") as text:
        writer = csv.DictWriter(text, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    words = ["evaluate", "measured", "--runs", str(file), "--engine", "vgpu", "--cache", str(tmp_path / "c"), "--json"]
    assert run_xmem(words) == 0
    small, gone, large, unknown = json.loads(capfd.readouterr().out)["rows"]
    assert gone["trouble"].endswith("cannot be run on the virtual GPU: it was ended by signal 9")
    assert unknown["trouble"].endswith("cannot be run on the virtual GPU: The model 'NoSuchNet' is unknown.")
    assert small["trouble"] is large["trouble"] is None
    assert small["predicted_oom"] is False and large["predicted_oom"] is True
    assert 100 * MIB < small["estimate_bytes"] < GIB
    assert small["range_low_bytes"] <= small["estimate_bytes"] <= small["range_high_bytes"]
