"""`xmem run` on real scripts: how runs end, what is kept of them, and that nothing else stays behind."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.capture.vgpu.conftest import JOBS, PYTHON, small_card
from tests.paths import REPOSITORY
from xmem.capture.vgpu.library import build_library
from xmem.capture.vgpu.run import Job, Outcome, run_job
from xmem.capture.vgpu.settings import VirtualGpu
from xmem.capture.vgpu.torch_facts import TorchFacts
from xmem.cli import run as run_xmem
from xmem.errors import UnreadableError

pytestmark = [pytest.mark.cuda_wheel, pytest.mark.slow]

Run = Callable[..., Outcome]
TRAIN = """
    import torch
    model = torch.nn.Linear(1024, 1024).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    def step():
        model(torch.zeros(64, 1024).cuda()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        file = tmp_path / "train.py"
        file.write_text(textwrap.dedent(TRAIN) + textwrap.dedent(text))
        return str(file)

    return write


def peak(outcome: Outcome) -> int:
    return outcome.parts[0].stats[0]["allocated_bytes.all.peak"]


def own_processes() -> set[str]:
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    return set(children.read_text().split()) if children.exists() else set()


def places_of(driver_cache: Path, tmp_path: Path) -> list[str]:
    """Return the options that keep a run of the command within the test's own folders."""
    places = {"--python": PYTHON, "--cache": driver_cache, "--store": tmp_path / "s", "-o": tmp_path / "o"}
    return [str(word) for pair in places.items() for word in pair]


def test_stops_after_the_steps_and_leaves_nothing(
    run_on_card: Run, script: Callable[[str], str], tmp_path: Path
) -> None:
    before = own_processes()
    text = "import subprocess\nsubprocess.Popen(['sleep', '600'], start_new_session=True)\nwhile True: step()\n"
    outcome = run_on_card(script(text), steps=4)
    assert (outcome.status, outcome.steps, outcome.exit_code) == ("steps", 4, 0)
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["train.xmem.jsonl.gz"]
    assert own_processes() <= before


def test_a_loop_that_never_steps_is_ended_by_its_timeout(run_on_card: Run, script: Callable[[str], str]) -> None:
    loop = "while model(torch.zeros(1, 1024).cuda()).sum().item() == 0: time.sleep(0.05)"
    outcome = run_on_card(script(f"import time\nstep()\n{loop}"), timeout_s=30)
    assert (outcome.status, outcome.steps) == ("timeout", 1)


def test_values_read_back_are_zero_or_what_was_written(run_on_card: Run, script: Callable[[str], str]) -> None:
    text = """
        assert model(torch.ones(1, 1024).cuda()).sum().item() == 0
        assert torch.tensor([7, 8]).cuda().tolist() == [7, 8]
        assert torch.nonzero(torch.ones(5).cuda()).shape == (0, 1)
        assert torch.cuda.get_device_properties(0).total_memory == 2**33
        assert torch.cuda.mem_get_info() == (2**33 - 22 * 2**20, 2**33)
        step()
    """
    assert run_on_card(script(text)).status == "ended"


@pytest.mark.parametrize(
    "ending", ["raise ValueError('broken')", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]
)
def test_a_crash_leaves_a_recording(run_on_card: Run, script: Callable[[str], str], ending: str) -> None:
    outcome = run_on_card(script(f"step()\nstep()\n{ending}"))
    assert outcome.exit_code != 0 and outcome.steps == 2 and peak(outcome) > 4 * 4096 * 1024
    assert outcome.status == ("error: ValueError: broken" if "raise" in ending else "killed")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_what_was_recorded_is_kept_where_xmem_is_killed(
    cuda_torch: TorchFacts, driver_cache: Path, tmp_path: Path, script: Callable[[str], str], number: int
) -> None:
    build_library(cuda_torch, driver_cache)
    told, out = tmp_path / "told", tmp_path / "out"
    file = script(f"step()\nopen({str(told)!r}, 'w').close()\nimport time; time.sleep(100)")
    words = ["run", "--gpu", "8", "--python", PYTHON, "--cache", str(driver_cache), "-o", str(out), file]
    started = subprocess.Popen([sys.executable, "-m", "xmem", *words], cwd=REPOSITORY, stderr=subprocess.DEVNULL)
    until(told.exists)
    started.send_signal(number)
    started.wait()
    until(lambda: [file.name for file in out.iterdir()] == ["train.xmem.jsonl.gz"])
    with gzip.open(out / "train.xmem.jsonl.gz", "rt") as lines:
        events = [json.loads(line) for line in lines]
    assert any(event.get("category") == "optimizer_state" for event in events)
    assert not any(str(out) in environment for environment in environments())


def until(true: Callable[[], bool]) -> None:
    """Wait for something to become true."""
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def environments() -> Iterator[str]:
    """Yield the environment of every process that can be seen."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            yield (process / "environ").read_text(errors="replace")


def test_a_script_without_a_gpu_is_told(run_on_card: Run, tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("print('hello')")
    with pytest.raises(UnreadableError, match=r"asked for no memory on the GPU \(exit code 0\)"):
        run_on_card(str(tmp_path / "plain.py"))


def test_the_sandbox_writes_no_checkpoint(run_on_card: Run, script: Callable[[str], str], tmp_path: Path) -> None:
    text = f"""
        step()
        torch.save(model.state_dict(), {str(tmp_path / "weights.pt")!r})
        try:
            open({str(tmp_path / "log.txt")!r}, "w")
        except PermissionError as error:
            assert "is not written" in str(error)
            step()
    """
    outcome = run_on_card(script(text), sandbox=True)
    assert (outcome.status, outcome.steps) == ("ended", 2)
    assert not (tmp_path / "weights.pt").exists() and not (tmp_path / "log.txt").exists()


def test_a_model_that_fills_a_large_card_takes_little_of_the_host(run_on_card: Run, tmp_path: Path) -> None:
    (tmp_path / "large.py").write_text(
        textwrap.dedent("""
        import torch
        layers = [torch.nn.Linear(16384, 16384, bias=False) for _ in range(38)]
        model = torch.nn.Sequential(*layers).cuda()
        torch.optim.SGD(model.parameters()).step()
        """)
    )
    outcome = run_on_card(str(tmp_path / "large.py"), gib=40)
    assert peak(outcome) == 38 << 30
    assert outcome.host_peak_bytes < 6 << 30


def test_several_cards_by_torchrun(run_on_card: Run, tmp_path: Path) -> None:
    (tmp_path / "ddp.py").write_text(
        textwrap.dedent("""
        import os, torch
        from torch.distributed.fsdp import fully_shard
        torch.distributed.init_process_group("nccl")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(4)]).cuda()
        for layer in model: fully_shard(layer)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        while True:
            model(torch.zeros(8, 1024).cuda()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        """)
    )
    words = ("torchrun", "--nproc-per-node", "2", str(tmp_path / "ddp.py"))
    outcome = run_on_card(*words, devices=2)
    assert [file.name for file in outcome.files] == ["ddp-rank0.xmem.jsonl.gz", "ddp-rank1.xmem.jsonl.gz"]
    assert [list(part.stats) for part in outcome.parts] == [[0], [1]]
    assert [part.communicators for part in outcome.parts] == [{0: 544 << 20}, {1: 544 << 20}]


def test_the_command_says_what_ran_out(
    cuda_torch: TorchFacts, driver_cache: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    common = places_of(driver_cache, tmp_path)
    code = run_xmem(["run", "--gpu", "0.15", "--non-torch", "0", *common, "--json", str(JOBS), "gpt-adam"])
    found = json.loads(capfd.readouterr().out)
    assert code == 1 and found["fits"] is False and found["oom"]["requested_bytes"] > 0
    assert found["peaks"][0]["num_ooms"] == 1 and "mean nothing" in found["notes"][0]
    code = run_xmem(["run", "--gpu", "rtx4090", "-q", *common, str(JOBS), "gpt-adam"])
    out = capfd.readouterr().out
    assert code == 0 and out.startswith("RAN on a virtual GeForce RTX 4090 without running out of memory.")
    assert "3 optimizer steps; stopped after the steps that were asked for" in out and "next: xmem simulate" in out


def test_a_loop_that_only_allocates_is_ended_soon(run_on_card: Run, script: Callable[[str], str]) -> None:
    loop = "while torch.rand(1, device='cuda').item() < 0.5: torch.empty(1024, device='cuda')"
    outcome = run_on_card(script(f"step()\n{loop}"))
    assert (outcome.status, outcome.steps) == ("full", 1)
    assert len(outcome.parts[0].entries[0]) < 2_000_000


BENCHMARK = """
    import torch, torchvision
    torch.backends.cudnn.benchmark = True
    model = torchvision.models.resnet18().cuda()
    optimizer = torch.optim.SGD(model.parameters())
    while True:
        model(torch.zeros(8, 3, 96, 96).cuda()).sum().backward()
        optimizer.step()
"""


def test_the_winner_of_a_benchmark_is_chosen(
    run_on_card: Run, cuda_torch: TorchFacts, driver_cache: Path, tmp_path: Path
) -> None:
    file = tmp_path / "train.py"
    file.write_text(textwrap.dedent(BENCHMARK))
    peaks = {}
    for benchmark in ("typical", "worst", "typical"):
        gpu = VirtualGpu(small_card(), 8 << 30, 0, benchmark=benchmark)
        outcome = run_job(Job((str(file),), tmp_path / "out", driver_cache, PYTHON, timeout_s=120), gpu)
        assert outcome.status == "steps" and outcome.cudnn_calls > 0
        assert peaks.setdefault(benchmark, peak(outcome)) == peak(outcome)
    assert peaks["worst"] > peaks["typical"]


def test_generated_text_ends_at_its_greatest_length(run_on_card: Run, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "generate.py").write_text(
        textwrap.dedent("""
        import torch
        from transformers import GPT2Config, GPT2LMHeadModel
        model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=512)).cuda().eval()
        import sys
        recording = sys.modules["xmem_vgpu_recorder"]
        recording.MOST_IDLE = 400  # more than one word takes, fewer than a text
        for sample in (False, True):
            words = torch.ones(2, 8, dtype=torch.long, device="cuda")
            found = model.generate(words, max_new_tokens=24, do_sample=sample)
            assert found.shape == (2, 32)
            assert recording.recorder.position(0) > 1000 and not recording.recorder._is_full()
        """)
    )
    assert run_on_card(str(tmp_path / "generate.py")).status == "ended"


def test_a_failed_script_is_no_answer(
    cuda_torch: TorchFacts, driver_cache: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fails.py").write_text("import torch\ntorch.nn.LSTM(8, 8).cuda()\n")
    places = places_of(driver_cache, tmp_path)
    words = ["run", "--gpu", "rtx4090", "-q", *places]
    assert run_xmem([*words, str(tmp_path / "fails.py")]) == 3
    out = capfd.readouterr().out
    assert out.startswith("FAILED on a virtual GeForce RTX 4090, though not for want of memory: this is no answer.")
    assert "torch.backends.cudnn.enabled = False" in out
    assert run_xmem([*words, "--json", str(tmp_path / "fails.py")]) == 3
    assert json.loads(capfd.readouterr().out)["fits"] is None


def test_one_run_answers_for_other_cards(
    cuda_torch: TorchFacts, driver_cache: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    places = places_of(driver_cache, tmp_path)
    cards = ["--gpu", "rtx4090", "--also", "l4", "--also", "0.55", "--also", "t4"]
    assert run_xmem(["run", *cards, *places, "-q", "--json", str(JOBS), "gpt-adam"]) == 0
    found = json.loads(capfd.readouterr().out)
    l4, small, t4 = found["also"]
    assert (l4["virtual_gpu"], l4["why"], l4["run_id"]) == ("L4", "replayed", found["run_id"])
    assert l4["fits"] is True and l4["peak_reserved_bytes"] == found["peaks"][0]["peak_reserved_bytes"]
    assert (small["virtual_gpu"], small["why"], small["fits"]) == ("GeForce RTX 4090", "replayed", False)
    assert t4["why"] == "run anew: kernels and workspaces of compute capability 7.5" and t4["run_id"] != found["run_id"]
