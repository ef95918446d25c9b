"""Runs training jobs described in words on the virtual card, in the job's own Python: one import, one process for each.

Reads a job as JSON from each line of standard input, writes what the allocator counted as a line of standard output.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import traceback
from typing import Any

from xmem.capture.vgpu.measuring import DeviceMemory
from xmem.capture.workload import Workload
from xmem.errors import XmemError

Counts = dict[str, int]
#: A job that takes longer is ended.
MOST_S = 600
#: More than any job of a few steps asks for.
MOST_REQUESTS = 1 << 22


def main() -> None:
    """Import once, then run every job in a process of its own: the driver's state begins anew in each."""
    import torch  # noqa: F401 - imported before the processes part

    from xmem.capture.models import import_for

    lines = sys.stdin.readlines()
    for model in sorted({json.loads(line)["workload"]["model"] for line in lines}):
        with contextlib.suppress(ImportError, XmemError):  # only jobs that need it fail
            import_for(model)
    for line in lines:
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            signal.alarm(MOST_S)
            _run_and_leave(json.loads(line))
        _, status = os.waitpid(pid, 0)
        if os.WIFSIGNALED(status):
            _answer(json.loads(line), {"error": _ended_by(os.WTERMSIG(status))})


def _ended_by(number: int) -> str:
    return f"it took more than {MOST_S} s" if number == signal.SIGALRM else f"it was ended by signal {number}"


def _answer(job: dict[str, Any], found: dict[str, Any]) -> None:
    sys.stdout.write("\n" + json.dumps({"key": job["key"], **found}) + "\n")
    sys.stdout.flush()


def _run_and_leave(job: dict[str, Any]) -> None:
    os.environ.update(job.get("environment", {}))
    if job.get("record"):
        _answer(job, {"recorded": record(Workload(**job["workload"]))})
        os._exit(0)
    try:
        measured = DeviceMemory() if job.get("measure") else None
        if job.get("requests"):
            record_requests()
        found = run(Workload(**job["workload"]), job.get("lengths"), job.get("batch_sizes"))
        if job.get("requests"):
            found["requests"] = read_requests()
        if measured is not None:
            found["device"] = measured.finish()
    except XmemError as error:
        found = {"error": error.message}
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}"[:500], "trace": traceback.format_exc()[-1500:]}
    _answer(job, found)
    os._exit(0)


def run(workload: Workload, lengths: list[int] | None, batch_sizes: list[int] | None) -> dict[str, Any]:
    """Train on the card; `lengths` and `batch_sizes` give each iteration its own."""
    import torch

    loop = Loop(workload)
    oom = False
    iterations: list[Counts] = []
    try:
        loop.set_up()
        setup = counts()
        for index in range(workload.iterations):
            torch.cuda.reset_peak_memory_stats()
            loop.step(
                lengths[index % len(lengths)] if lengths else workload.sequence_length,
                batch_sizes[index % len(batch_sizes)] if batch_sizes else workload.batch_size,
            )
            iterations.append(counts())
    except torch.OutOfMemoryError:
        oom = True
        setup = counts() if not iterations else setup
        iterations.append(counts())
    return {"oom": oom, "setup": setup, "iterations": iterations}


def record_requests() -> None:
    """Let the allocator keep what is asked of it, without stacks."""
    import torch

    torch.cuda.memory._record_memory_history("all", context=None, stacks="python", max_entries=MOST_REQUESTS)


def read_requests() -> list[int]:
    """Return what was asked of the allocator: the size of each allocation, and -1 - n where the nth is freed."""
    import torch

    requests: list[int] = []
    numbers: dict[int, int] = {}
    count = 0
    for entry in torch.cuda.memory._snapshot()["device_traces"][0]:
        if entry["action"] == "alloc":
            numbers[entry["addr"]] = count
            count += 1
            requests.append(entry["size"])
        elif entry["action"] == "free_completed" and entry["addr"] in numbers:
            requests.append(-1 - numbers.pop(entry["addr"]))
    return requests


def record(workload: Workload) -> str:
    """Train under the recorder; return why it failed, if it did."""
    import torch

    from xmem.capture.vgpu.bootstrap import waiting

    trouble = ""
    waiting.prepare(torch, os.path.dirname(waiting.__file__))
    loop = Loop(workload)
    try:
        loop.set_up()
        for _ in range(workload.iterations):
            loop.step(workload.sequence_length, workload.batch_size)
    except XmemError as error:
        trouble = error.message
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)  # the recorder's
        trouble = f"{type(error).__name__}: {error}"[:500]
    recorder = getattr(sys.modules["xmem_vgpu_recorder"], "recorder", None)
    if recorder is not None:
        recorder.end()
    return trouble


def counts() -> Counts:
    """Return what the real allocator counts now."""
    import torch

    stats = torch.cuda.memory_stats()
    return {
        "peak_reserved_bytes": stats["reserved_bytes.all.peak"],
        "peak_allocated_bytes": stats["allocated_bytes.all.peak"],
        "reserved_bytes": stats["reserved_bytes.all.current"],
        "num_alloc_retries": stats["num_alloc_retries"],
        "num_ooms": stats["num_ooms"],
    }


class Loop:
    """A plain training loop; what Python keeps alive between iterations is what `self` keeps."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.batch: Any = None
        self.outputs: Any = None
        self.loss: Any = None
        self.kept: Any = None

    def set_up(self) -> None:
        """Build model and optimizer and bring the model to the card."""
        import torch

        from xmem.capture.models import build_model
        from xmem.capture.training import make_optimizer

        workload = self.workload
        self.built = build_model(workload.model, classes=workload.classes, attention=workload.attention)
        self.module = self.built.module.to(getattr(torch, workload.dtype)).to("cuda")
        self.module.train()
        if workload.checkpointing:
            self.module.gradient_checkpointing_enable()
        self.optimizer = self.built.optimizer or make_optimizer(workload, self.module)
        self.criterion = torch.nn.CrossEntropyLoss()

    def step(self, length: int, batch_size: int) -> None:
        """Run one optimizer step."""
        import torch

        from xmem.capture.training import _logits

        workload = self.workload
        if workload.zero_grad == "start":
            self._zero_grad()
        for part in range(workload.accumulate):
            with torch.autocast(
                "cuda", getattr(torch, workload.autocast or "bfloat16"), enabled=bool(workload.autocast)
            ):
                self._forward(length, batch_size)
            if workload.zero_grad == "before-backward" and part == 0:
                self._zero_grad()
            self.loss.backward()
        self.optimizer.step()
        if workload.zero_grad == "end":
            self._zero_grad()
        if self.built.inputs == "images":
            self.kept = torch.max(_logits(self.outputs), 1)
        self.loss.item()

    def _zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=self.workload.set_to_none)

    def _forward(self, length: int, batch_size: int) -> None:
        import torch

        from xmem.capture.training import _call, _logits, _loss_of, _map_tensors

        if self.built.inputs == "images":
            edge = self.workload.image_size
            images = torch.empty(batch_size, 3, edge, edge, dtype=getattr(torch, self.workload.dtype))
            labels = torch.zeros(batch_size, dtype=torch.long)
            while self.batch:  # the loop variables hold the next batch on the host before it is copied
                self.batch.pop(0)
            self.batch = [images.to("cuda"), labels.to("cuda")]
            self.outputs = self.module(self.batch[0])
            self.loss = self.criterion(_logits(self.outputs), self.batch[1])
        elif self.built.inputs == "tokens":
            names = ("input_ids", "attention_mask", "labels")
            self.batch = {name: torch.ones(batch_size, length, dtype=torch.long).to("cuda") for name in names}
            self.outputs = self.module(**self.batch)
            self.loss = self.outputs.loss
        else:
            self.batch = _map_tensors(self.built.batch(batch_size), lambda tensor: tensor.to("cuda"))
            self.outputs = _call(self.module, self.batch)
            self.loss = _loss_of(self.outputs)


if __name__ == "__main__":
    main()
