"""The prototype's quick examples, from the profiles that ship: what fits, and to the byte what they need."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.paths import EXAMPLES
from xmem.ingest import IngestOptions, ingest
from xmem.simulate import SimulateOptions, Verdict, simulate


def judge(tmp_path: Path, name: str, gpu: str) -> Verdict:
    ingest([EXAMPLES / f"{name}.xmem.jsonl.gz"], options=IngestOptions(store=tmp_path))
    return simulate(gpu=gpu, store=tmp_path, options=SimulateOptions(keep=False, smallest=False))


@pytest.mark.parametrize(("gpu", "fits"), [("4GB", False), ("8GB", True)])
def test_convnext_base_with_130_images_needs_more_than_4_gb_and_less_than_8(
    tmp_path: Path, gpu: str, fits: bool
) -> None:
    verdict = judge(tmp_path, "convnext_base_sgd_130", gpu)
    assert verdict.fits is fits
    assert verdict.peak_reserved_bytes == pytest.approx(4_689_231_872, rel=0.002)  # torch's CUDA code, virtual GPU
    assert verdict.peak_allocated_bytes == 4_430_414_336


def test_opt_125m_with_34_rows_fits_12_gb(tmp_path: Path) -> None:
    verdict = judge(tmp_path, "opt_125m_adam_34", "12GB")
    assert verdict.fits
    assert verdict.peak_reserved_bytes == pytest.approx(7_996_440_576, rel=0.002)  # torch's CUDA code, virtual GPU
    assert verdict.peak_reserved_bytes == pytest.approx(7.70e9, rel=0.05)
    assert verdict.peak_allocated_bytes == pytest.approx(6.86e9, rel=0.05)
