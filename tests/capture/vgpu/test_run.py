"""`xmem run` on real scripts: how runs end, what is kept of them, and that nothing else stays behind."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.capture.vgpu.conftest import JOBS, PYTHON
from xmem.capture.vgpu.run import Outcome
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
    common = [
        "--python",
        PYTHON,
        "--cache",
        str(driver_cache),
        "--store",
        str(tmp_path / "s"),
        "-o",
        str(tmp_path / "o"),
    ]
    code = run_xmem(["run", "--gpu", "0.15", "--non-torch", "0", *common, "--json", str(JOBS), "gpt-adam"])
    found = json.loads(capfd.readouterr().out)
    assert code == 1 and found["fits"] is False and found["oom"]["requested_bytes"] > 0
    assert found["peaks"][0]["num_ooms"] == 1 and "mean nothing" in found["notes"][0]
    code = run_xmem(["run", "--gpu", "rtx4090", "-q", *common, str(JOBS), "gpt-adam"])
    out = capfd.readouterr().out
    assert code == 0 and out.startswith("RAN on a virtual GeForce RTX 4090 without running out of memory.")
    assert "3 optimizer steps; stopped after the steps that were asked for" in out and "next: xmem simulate" in out
