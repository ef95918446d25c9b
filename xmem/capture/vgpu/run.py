"""Runs an unchanged script on a virtual card and brings its recording home; nothing else stays behind."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from xmem.capture.vgpu.library import build_library
from xmem.capture.vgpu.recording import Part, read_parts, write_logs
from xmem.capture.vgpu.rescue import rescued
from xmem.capture.vgpu.settings import Recording, VirtualGpu, make_environment
from xmem.capture.vgpu.torch_facts import find_torch
from xmem.errors import UnreadableError, UsageError

Progress = Callable[[str], None]
MEANINGLESS = "Nothing was computed: losses, metrics and weights of this run mean nothing, only its memory does."
#: How the status of a process begins that an out-of-memory error ended.
OUT_OF_MEMORY = ("error: OutOfMemoryError", "error: AcceleratorError")
#: The job's own clock ends it; this much later it is killed.
_GRACE_S = 20
_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Job:
    """What to run: the words after `xmem run`, the Python to run them with, and where recordings go."""

    command: tuple[str, ...]
    output: Path
    cache: Path
    python: str = sys.executable
    steps: int = 3
    timeout_s: int = 300
    sandbox: bool = False
    own_modules: bool = False  # the job's Python also finds xmem
    alloc_conf: str = ""

    @property
    def name(self) -> str:
        """The script's name without its ending: what recordings and the run are called."""
        script = next((word for word in self.command if word.endswith(".py")), None)
        return Path(script).stem if script else next((w for w in self.command if not w.startswith("-")), "run")


@dataclass(frozen=True)
class Outcome:
    """What came of it: an event log for each process that used a card, and how it ended."""

    name: str
    files: tuple[Path, ...]
    parts: tuple[Part, ...]
    exit_code: int
    status: str
    steps: int
    seconds: float
    host_peak_bytes: int
    notes: tuple[str, ...]

    @property
    def failed(self) -> bool:
        """Say whether the script ended by an error or was killed."""
        return self.status.startswith("error") or self.status == "killed"

    @property
    def cudnn_calls(self) -> int:
        """Engines of cuDNN that were run: the card decides which, and their workspaces."""
        return sum(part.cudnn_calls for part in self.parts)

    @property
    def out_of_memory(self) -> tuple[int, int, int] | None:
        """Rank, bytes asked for and bytes free of the out-of-memory error that ended a process."""
        for part in self.parts:
            if part.status.startswith(OUT_OF_MEMORY) and part.out_of_memory:
                _, asked, free = part.out_of_memory[-1]
                return part.rank or 0, asked, free
        return None


def run_job(job: Job, gpu: VirtualGpu, progress: Progress | None = None, to: IO[Any] | None = None) -> Outcome:
    """Run the job on the card; raises UsageError where it cannot start, UnreadableError where it used no card."""
    torch = find_torch(job.python)
    command = make_command(job.command, job.python)
    library = build_library(torch, job.cache, progress)
    job.output.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".running-", dir=job.output))
    kept = (job.name, job.output, _log_facts(job, gpu))
    try:
        recording = Recording(work, job.steps, job.timeout_s, job.sandbox)
        environment = _with_caches(make_environment(gpu, torch, library, recording, _base(job)), work)
        if progress is not None:
            progress(f"running {job.name} on a virtual {gpu.card.name}")
        started = time.monotonic()
        with rescued(work, *kept):
            code = _run(command, environment, job.timeout_s + _GRACE_S, to)
        seconds = time.monotonic() - started
        parts = read_parts(work)
        if not parts:
            raise UnreadableError(
                f"The script asked for no memory on the GPU (exit code {code}).", "Its own messages stand above."
            )
        files = write_logs(parts, *kept)
    except KeyboardInterrupt:  # what was recorded until then is kept
        write_logs(read_parts(work), *kept)
        raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return _outcome(job, parts, files, (code, seconds))


def make_command(words: Sequence[str], python: str) -> list[str]:
    """Turn the words into a command of this Python: a script, `-m module`, `python …` or `torchrun …`."""
    if not words:
        raise UsageError("There is nothing to run.", "Write it like: xmem run --gpu rtx4090 train.py --epochs 1")
    first, rest = words[0], list(words[1:])
    if Path(first).name in ("python", "python3"):
        return [python, *rest]
    if Path(first).name == "torchrun":
        return [python, "-m", "torch.distributed.run", *rest]
    if first == "-m":
        return [python, first, *rest]
    if not Path(first).is_file():
        raise UsageError(
            f"There is no script {first!r}.", "Give a Python script, -m module, or torchrun and its words."
        )
    return [python, first, *rest]


def devices_wanted(words: Sequence[str]) -> int:
    """Return how many cards torchrun's words ask for; 1 where they ask for none."""
    text = " ".join(words)
    found = re.search(r"--nproc[-_]per[-_]node[ =](\d+)", text)
    return int(found[1]) if found else 1


def _base(job: Job) -> dict[str, str]:
    """Return the environment that the job would have without a virtual card."""
    base = dict(os.environ)
    if job.own_modules:
        base["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parents[3]), base.get("PYTHONPATH")]))
    if job.alloc_conf:
        base["PYTORCH_CUDA_ALLOC_CONF"] = job.alloc_conf
    return base


def _with_caches(environment: dict[str, str], work: Path) -> dict[str, str]:
    """Keep what compilers write inside the folder that is removed afterwards."""
    places = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "TMPDIR": "tmp"}
    for name in places.values():
        (work / name).mkdir()
    return environment | {variable: str(work / name) for variable, name in places.items()}


def _run(command: list[str], environment: dict[str, str], limit_s: float, to: IO[Any] | None) -> int:
    """Run to the end or to the limit, then end every process that came of it."""
    _adopt_orphans()
    before = (
        signal.signal(signal.SIGTERM, _interrupt) if threading.current_thread() is threading.main_thread() else None
    )
    child = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=to, start_new_session=True)
    descendants: set[int] = set()
    try:
        deadline = time.monotonic() + limit_s
        while child.poll() is None and time.monotonic() < deadline:
            descendants |= _descendants(child.pid)
            time.sleep(0.05)
    finally:
        _end(descendants | _descendants(child.pid) | {child.pid})
        child.wait()
        if before is not None:
            signal.signal(signal.SIGTERM, before)
    return child.returncode


def _interrupt(number: int, frame: Any) -> None:
    """End like ctrl-C where somebody ends xmem, so that nothing is left behind."""
    raise KeyboardInterrupt


def _adopt_orphans() -> None:
    """Become the parent of processes whose own parent dies, so that they can be found and ended."""
    ctypes.CDLL(None).prctl(_CHILD_SUBREAPER, 1, 0, 0, 0)


def _descendants(root: int) -> set[int]:
    """Return the living processes below a process."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            parent = _parent(int(entry))
            if parent is not None:
                children.setdefault(parent, []).append(int(entry))
    found: set[int] = set()
    waiting = [root]
    while waiting:
        for pid in children.get(waiting.pop(), []):
            if pid not in found:
                found.add(pid)
                waiting.append(pid)
    return found


def _parent(pid: int) -> int | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    return int(text.rpartition(")")[2].split()[1])


def _end(pids: set[int]) -> None:
    """Kill those of these processes that still are descendants of this one."""
    own = _descendants(os.getpid())
    for pid in pids & own:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    for pid in pids & own:
        try:
            os.waitpid(pid, 0)
        except ChildProcessError:
            continue


def _log_facts(job: Job, gpu: VirtualGpu) -> dict[str, Any]:
    return {
        "virtual_gpu": gpu.card.name,
        "total_bytes": gpu.total_bytes,
        "non_torch_bytes": gpu.taken_bytes,
        "command": list(job.command),
    }


def _outcome(job: Job, parts: list[Part], files: tuple[Path, ...], ending: tuple[int, float]) -> Outcome:
    statuses = {part.status for part in parts}
    worst = next((s for s in sorted(statuses) if s.startswith("error")), None)
    status = worst or next((s for s in ("killed", "timeout", "full", "steps", "ended") if s in statuses), "ended")
    return Outcome(
        name=job.name,
        files=files,
        parts=tuple(parts),
        exit_code=ending[0],
        status=status,
        steps=max(part.steps for part in parts),
        seconds=ending[1],
        host_peak_bytes=resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
        notes=tuple(_notes(parts)),
    )


def _notes(parts: list[Part]) -> list[str]:
    notes = [MEANINGLESS]
    cudnn = parts[0].header["cudnn_version"]
    if cudnn and not parts[0].header["asks_cudnn"]:
        notes.append(
            f"cuDNN {cudnn} cannot be asked without a device (9.8 and later can): its workspaces are left out."
        )
    survived = sum(len(part.out_of_memory) for part in parts if not part.status.startswith(OUT_OF_MEMORY))
    if survived:
        notes.append(
            f"{survived} requests failed for want of memory and the program went on without them,"
            " such as larger workspaces that cuDNN would have liked."
        )
    unmodelled = sorted({name for part in parts for name in part.unmodelled})
    if unmodelled:
        notes.append(f"Answered with 'not supported': {', '.join(unmodelled)}.")
    if any(name.startswith(("cudnnGetRNN", "cudnnRNN")) for name in unmodelled):
        notes.append(
            "torch.backends.cudnn.enabled = False in the script runs recurrent networks by torch's own kernels."
        )
    return notes
