"""profile, estimate and evaluate on the command line, without torch: what is said, and with which exit code."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Xmem
from tests.paths import EXAMPLES
from xmem.errors import EXIT_OK, EXIT_USAGE


def test_a_missing_extra_is_one_sentence(xmem: Xmem, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("xmem.capture.profile.installed", lambda package: "")
    done = xmem("estimate", "VGG19", "--gpu", "12", "--engine", "cpu", "--cache", str(tmp_path))
    assert done.code == EXIT_USAGE
    assert done.err.splitlines()[-2:] == [
        "error: Profiling needs torch, which is not installed.",
        "hint: Install it with: pip install 'xmem[capture]'",
    ]


def test_a_gpu_must_be_named(xmem: Xmem) -> None:
    done = xmem("estimate", "VGG19")
    assert done.code == EXIT_USAGE
    assert "--gpu" in done.err


def test_measured_runs_must_be_there(xmem: Xmem) -> None:
    assert xmem("evaluate", "measured").code == EXIT_USAGE
    done = xmem("evaluate", "measured", "--runs", "none.csv")
    assert done.code == EXIT_USAGE
    assert "error: There is no file 'none.csv'." in done.err


def test_explain_rules_lists_what_each_rule_moved(xmem: Xmem, tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    xmem("ingest", str(EXAMPLES / "opt_125m_adam_34.xmem.jsonl.gz"), "--store", str(store))
    done = xmem("simulate", "--gpu", "12GB", "--store", str(store), "--explain-rules")
    assert done.code == EXIT_OK
    for rule in ("reduction_staging", "gradient_sum_in_place", "attention_backward_scratch", "cublas_workspace"):
        assert rule in done.out
