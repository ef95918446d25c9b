"""What a recorded CPU run holds: order, sizes, categories, lifetimes; needs torch."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="recording needs torch (pip install 'xmem[capture]')")
pytestmark = pytest.mark.filterwarnings("ignore")

from tests.paths import REPOSITORY  # noqa: E402
from xmem.capture.record import mark, record  # noqa: E402
from xmem.errors import RefusedError, UsageError  # noqa: E402

SCRIPT = """
import torch
def make():
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
    def batch(size):
        return {"input": torch.zeros(size, 64)}
    return model, torch.optim.Adam(model.parameters()), batch
"""


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.open(path, "rt")]


def train(path: Path, steps: int = 2) -> list[dict[str, Any]]:
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Dropout(0.5), torch.nn.Linear(256, 8)
    )
    optimizer = torch.optim.Adam(model.parameters())
    with record(path, device="cpu"):
        for _ in range(steps):
            optimizer.zero_grad()
            with mark("loss"):
                loss = model(torch.ones(4, 64).to("cpu")).sum()
            loss.backward()
            optimizer.step()
    return lines_of(path)


def allocated(lines: list[dict[str, Any]], **wanted: Any) -> list[int]:
    rows = [line for line in lines if line.get("action") == "alloc"]
    return [line["requested_bytes"] for line in rows if all(line.get(key) == value for key, value in wanted.items())]


def test_categories_are_known_by_identity(tmp_path: Path) -> None:
    lines = train(tmp_path / "a.xmem.jsonl.gz")
    parameters = [64 * 256 * 4, 256 * 4, 256 * 8 * 4, 8 * 4]
    assert allocated(lines, category="parameter") == parameters
    assert sorted(allocated(lines, category="gradient", step=0)) == sorted(parameters)
    assert sorted(allocated(lines, category="optimizer_state")) == sorted(parameters * 2)
    assert allocated(lines, category="input") == [4 * 64 * 4] * 2
    assert allocated(lines, category="optimizer_state", step=1) == []


def test_dropout_takes_its_cuda_form_and_foreach_its_temporaries(tmp_path: Path) -> None:
    lines = train(tmp_path / "a.xmem.jsonl.gz")
    names = {line["span_id"]: line["name"] for line in lines if line.get("table") == "spans"}
    made = [
        (names.get(line.get("span_id")), line["requested_bytes"]) for line in lines if line.get("action") == "alloc"
    ]
    assert ("aten::native_dropout", 4 * 256) in made
    assert ("aten::_foreach_sqrt", 64 * 256 * 4) in made
    assert "loss" in names.values()


def test_what_is_freed_was_allocated_before_and_once(tmp_path: Path) -> None:
    live: set[int] = set()
    for line in train(tmp_path / "a.xmem.jsonl.gz"):
        if line.get("action") == "alloc":
            assert line["alloc_id"] not in live
            live.add(line["alloc_id"])
        elif line.get("action") == "free_requested":
            live.remove(line["alloc_id"])


def test_training_gives_the_same_values_recorded_or_not(tmp_path: Path) -> None:
    def run() -> float:
        torch.manual_seed(0)
        query = torch.randn(2, 4, 8, 16, requires_grad=True)
        out = torch.nn.functional.scaled_dot_product_attention(query, query * 2, query * 3, is_causal=True)
        out.square().sum().backward()
        assert query.grad is not None
        return float(query.grad.abs().sum())

    plain = run()
    with record(tmp_path / "a.xmem.jsonl.gz", device="cpu"):
        recorded = run()
    assert recorded == pytest.approx(plain, rel=1e-5)


def operators_of(lines: list[dict[str, Any]]) -> list[str]:
    return [line["name"] for line in lines if line.get("table") == "spans" and line["kind"] == "operator"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_takes_the_same_paths_again(tmp_path: Path, reentrant: bool) -> None:
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    rows = torch.randn(2, 4, 16, requires_grad=True)
    with record(tmp_path / "a.xmem.jsonl.gz", device="cpu"):
        torch.utils.checkpoint.checkpoint(layer, rows, use_reentrant=reentrant).sum().backward()
    names = operators_of(lines_of(tmp_path / "a.xmem.jsonl.gz"))
    assert names.count("aten::_scaled_dot_product_efficient_attention") == 2
    assert names.count("aten::native_dropout") == 6
    assert names.count("aten::_scaled_dot_product_efficient_attention_backward") == 1
    assert not [name for name in names if "for_cpu" in name]


def test_gradients_asked_for_with_grad_take_cuda_paths(tmp_path: Path) -> None:
    rows = torch.randn(4, 16, requires_grad=True)
    with record(tmp_path / "a.xmem.jsonl.gz", device="cpu"):
        out = torch.utils.checkpoint.checkpoint(torch.nn.Dropout(), rows, use_reentrant=False)
        torch.autograd.grad(out.square().sum(), rows)
    assert operators_of(lines_of(tmp_path / "a.xmem.jsonl.gz")).count("aten::native_dropout") == 2
    assert torch.autograd._engine_run_backward.__name__ == "_engine_run_backward"


def test_autocast_casts_what_it_casts_on_cuda(tmp_path: Path) -> None:
    rows, weight = torch.randn(4, 16), torch.randn(16, 16)
    with record(tmp_path / "a.xmem.jsonl.gz", device="cpu"), torch.autocast("cpu", torch.bfloat16):
        logits = rows @ weight
        functional = torch.nn.functional
        types = [
            logits.dtype,
            functional.layer_norm(logits, (16,)).dtype,
            functional.softmax(logits, -1).dtype,
            logits.sum(-1).dtype,
            logits.pow(2).dtype,
            functional.gelu(logits).dtype,
        ]
        loss = functional.cross_entropy(logits, torch.zeros(4, dtype=torch.long))
    assert types == [torch.bfloat16, *[torch.float32] * 4, torch.bfloat16]
    assert loss.dtype is torch.float32
    spans = [line for line in lines_of(tmp_path / "a.xmem.jsonl.gz") if line.get("table") == "spans"]
    log_softmax = next(span for span in spans if span["name"] == "aten::_log_softmax")
    assert json.loads(log_softmax["input_types"])[0] == "bfloat16"  # CUDA leaves the loss's logits alone
    with torch.autocast("cpu", torch.bfloat16):
        assert functional.layer_norm(logits, (16,)).dtype is torch.bfloat16  # as before


def test_tensors_inside_vmap_are_let_through(tmp_path: Path) -> None:
    """transformers 4.53 to 4.57 build their masks so."""
    with record(tmp_path / "run.jsonl", device="cpu"):
        made = torch.vmap(lambda row: (row.to(torch.float64) * 2).to(row.device))(torch.arange(6).reshape(2, 3))
    assert made.tolist() == [[0, 2, 4], [6, 8, 10]]


def test_an_existing_file_and_an_unknown_device_are_refused(tmp_path: Path) -> None:
    target = tmp_path / "a.xmem.jsonl.gz"
    target.write_text("")
    with pytest.raises(RefusedError) as refused, record(target, device="cpu"):
        pass
    assert refused.value.hint == "force=True replaces it."
    with pytest.raises(UsageError, match="Recording on 'tpu' is not supported"), record(target, device="tpu"):
        pass


def estimate_own(tmp_path: Path, batch: int, **more: Any) -> Any:
    from xmem.capture import Workload
    from xmem.evaluate.estimate import EstimateOptions, estimate_on_cpu

    script = tmp_path / "job.py"
    if not script.exists():
        script.write_text(SCRIPT)
    how = EstimateOptions(cache=tmp_path / "cache", **more)
    return estimate_on_cpu(Workload(f"{script}:make", batch), gpu="1", how=how)


def test_an_extrapolated_estimate_equals_a_profiled_one(tmp_path: Path) -> None:
    extrapolated = estimate_own(tmp_path, 50)
    profiled = estimate_own(tmp_path, 50, exact=True)
    assert extrapolated.profiled_batch_sizes == (2, 3)
    assert profiled.profiled_batch_sizes == (50,)
    for name in ("peak_requested_bytes", "peak_allocated_bytes", "peak_reserved_bytes", "requests"):
        assert getattr(extrapolated.verdict, name) == getattr(profiled.verdict, name)


RECURRENT = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.LSTM(16, 32, num_layers=2, batch_first=True)
    def forward(self, rows):
        return self.layers(rows)[0].mean()
def make():
    return Net(), None, lambda size: torch.ones(size, 10, 16)
"""


def test_recurrent_layers_are_estimated_with_a_warning(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(RECURRENT)
    found = estimate_own(tmp_path, 40)
    assert found.profiled_batch_sizes == (2, 3)
    assert any(note.startswith("Recurrent layers run in cuDNN") for note in found.verdict.notes)


def test_the_largest_batch_fits_and_one_more_does_not(tmp_path: Path) -> None:
    found = estimate_own(tmp_path, 8, max_batch=True)
    best = found.max_batch
    assert best is not None
    assert best.batch_size > 1000
    assert estimate_own(tmp_path, best.batch_size).fits
    after = estimate_own(tmp_path, best.batch_size + 1)
    assert not after.fits
    assert after.verdict.peak_reserved_bytes >= found.verdict.peak_reserved_bytes


def test_estimates_grow_with_the_batch(tmp_path: Path) -> None:
    peaks = [estimate_own(tmp_path, size).verdict.peak_allocated_bytes for size in (8, 16, 64, 256, 1024)]
    assert peaks == sorted(peaks)


MODES = """
import torch
class Job(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out = torch.nn.Embedding(32, 256), torch.nn.Linear(256, 256)
    def chosen(self, x):
        near = torch.where(x < 8, x, torch.log(x.float() + 1).to(torch.long))
        return self.out(self.table(near)).relu()
    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.chosen, x, use_reentrant=False).square().mean()
def make():
    model = Job()
    return model, None, lambda size: torch.arange(16).repeat(size, 1)
"""


def test_what_is_run_again_in_backward_has_its_values(tmp_path: Path) -> None:
    from xmem.capture import Workload
    from xmem.capture.training import run_workload

    (tmp_path / "modes.py").write_text(MODES)
    recorder = run_workload(Workload(f"{tmp_path / 'modes.py'}:make", 2000))
    assert [span[3] for span in recorder.spans].count("aten::embedding") == 2 * 4


def test_what_is_not_computed_is_recorded_as_if_it_were(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="Adafactor is transformers'")
    from xmem.capture import Workload, hollow
    from xmem.capture.training import run_workload

    def events(model: str) -> list[tuple[Any, ...]]:
        return [tuple(event[1:]) for event in run_workload(Workload(model, 2, "Adafactor", iterations=2)).events]

    for model in ("mobilenet_v3_small", "T5-small"):
        quick = events(model)
        with monkeypatch.context() as patched:
            patched.setattr(hollow, "_broadcast", lambda *_: hollow.REAL)
            assert events(model) == quick


def test_the_second_question_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = estimate_own(tmp_path, 16)
    monkeypatch.setattr("xmem.evaluate.job.profile", None)
    assert estimate_own(tmp_path, 16).verdict.peak_reserved_bytes == first.verdict.peak_reserved_bytes


def test_torch_profilers_own_trace_of_the_same_steps_is_read(tmp_path: Path) -> None:
    from xmem.capture import Workload
    from xmem.capture.profile import profile
    from xmem.ingest import IngestOptions, ingest

    (tmp_path / "job.py").write_text(SCRIPT)
    trace = tmp_path / "a.json.gz"
    log = profile(Workload(f"{tmp_path / 'job.py'}:make", 8), tmp_path / "a.xmem.jsonl.gz", trace=trace)
    runs = [ingest([file], options=IngestOptions(store=tmp_path / "store"))[0] for file in (log, trace)]
    assert [run.adapter for run in runs] == ["event_log", "torch_trace"]
    with gzip.open(trace, "rt") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {"ProfilerStep#0", "ProfilerStep#3", "Optimizer.step#Adam.step"} <= names
    with pytest.raises(RefusedError, match=r"a\.json\.gz exists already"):
        profile(Workload("VGG19"), tmp_path / "b.xmem.jsonl", trace=trace)
    with pytest.raises(UsageError, match=r"is no name for a torch\.profiler trace"):
        profile(Workload("VGG19"), tmp_path / "b.xmem.jsonl", trace=tmp_path / "b.txt")


PYTEST_FILE = """
import pytest, torch
@pytest.mark.gpu_memory_limit("1GiB")
def test_small():
    torch.nn.Linear(8, 8)(torch.ones(2, 8)).sum().backward()
@pytest.mark.gpu_memory_limit("420MiB")
def test_large():
    torch.nn.Linear(2048, 2048)(torch.ones(2048, 2048)).sum().backward()
@pytest.mark.gpu_memory_limit("rtx9999")
def test_unknown():
    torch.ones(2) + 1
@pytest.mark.gpu_memory_limit()
def test_without_limit():
    pass
@pytest.mark.gpu_memory_limit("1GiB")
def test_nothing():
    pass
"""


def test_a_test_over_its_limit_fails(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    pytester.makepyfile(PYTEST_FILE)
    result = pytester.runpytest_subprocess("-p", "xmem.evaluate.pytest_plugin", "-q")
    result.assert_outcomes(passed=2, failed=3, warnings=1)
    result.stdout.fnmatch_lines(["gpu_memory_limit: There is no GPU 'rtx9999'*"])
    result.stdout.fnmatch_lines(['gpu_memory_limit takes one GPU, like @pytest.mark.gpu_memory_limit("12GiB")'])
    result.stdout.fnmatch_lines(["*gpu_memory_limit: this test allocated nothing on cpu, so nothing was judged."])
    result.stdout.fnmatch_lines(["This test would not fit 420MiB: it needs * reserved of * usable*"])


pytest_plugins = ["pytester"]
