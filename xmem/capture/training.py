"""Runs the training loop of a workload on the CPU, as the paper's experiments do, under a recorder."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from xmem.capture.cuda_autocast import autocast_as_on_cuda
from xmem.capture.cuda_paths import CudaPaths, foreach_as_on_cuda, without_compiler
from xmem.capture.models import Built, build_model, is_own_function, require
from xmem.capture.recorder import Recorder
from xmem.capture.watching import gradients, place_on_device, state_tensors, watch_model
from xmem.capture.workload import Workload
from xmem.errors import UsageError

#: Where transformers' class is meant, as in the paper, because it takes relative_step.
_TRANSFORMERS_ADAFACTOR = {"relative_step": False}
PAD_SHARE = 0.25


def run_workload(workload: Workload, progress: Callable[[int], None] | None = None, *, fake: bool = False) -> Recorder:
    """Train a few steps on the CPU and return what was recorded; values are not computed where none depends on them.

    On `fake` tensors nothing is computed, and nothing is held either.
    """
    if not fake:
        return _record(workload, *_build(workload), progress)
    from xmem.capture.fake import FixedValues, fake_tensors, make_fake

    # Values may decide how wide a named model is (RegNet); its weights stay untouched. A user's function may fill them.
    built = None if is_own_function(workload.model) else _find(workload)
    with fake_tensors(workload.model):
        built = built or _find(workload)
        if _is_recurrent(built.module):
            raise UsageError(
                f"{workload.model} has recurrent layers, which fake tensors take apart in a way of their own.",
                "Use --engine cpu or --engine vgpu.",
            )
        make_fake(built.module, built.optimizer, getattr(torch, workload.dtype))
        with FixedValues(workload.model):
            return _record(workload, built, _prepare(workload, built.module), progress)


def _is_recurrent(module: torch.nn.Module) -> bool:
    return any(isinstance(child, torch.nn.RNNBase) for child in module.modules())


def _record(workload: Workload, built: Built, module: Any, progress: Callable[[int], None] | None) -> Recorder:
    recorder = Recorder(hollow=True)
    recorder.recurrent = _is_recurrent(module)
    context = contextlib.ExitStack()
    for part in (_one_thread(), without_compiler(), foreach_as_on_cuda(), watch_model(recorder, module)):
        context.enter_context(part)
    if workload.autocast:
        context.enter_context(autocast_as_on_cuda())
    with context, CudaPaths(recorder, values=False), recorder:
        place_on_device(recorder, module)
        optimizer = built.optimizer or make_optimizer(workload, module)
        recorder.adopt(state_tensors(optimizer), "optimizer_state")
        _loop(workload, built, optimizer, recorder, progress)
    return recorder


def trace_workload(workload: Workload, path: Path, progress: Callable[[int], None] | None = None) -> None:
    """Train the same steps under torch.profiler, with all arithmetic, and write its trace to `path`."""

    def told(step: int) -> None:
        profiler.step()
        if progress is not None:
            progress(step)

    profiler = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=lambda _: torch.profiler.ProfilerAction.RECORD,
        profile_memory=True,
        record_shapes=True,
    )
    with profiler:
        built, module = _build(workload)
        _loop(workload, built, built.optimizer or make_optimizer(workload, module), Recorder(), told)
    profiler.export_chrome_trace(str(path))


def _build(workload: Workload) -> tuple[Built, Any]:
    built = _find(workload)
    return built, _prepare(workload, built.module.to(getattr(torch, workload.dtype)))


def _find(workload: Workload) -> Built:
    return build_model(workload.model, classes=workload.classes, attention=workload.attention)


def _prepare(workload: Workload, module: Any) -> Any:
    module.train()
    if workload.checkpointing:
        _switch_on_checkpointing(module)
    return module


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread: what is left to compute is too little to share."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def make_optimizer(workload: Workload, module: torch.nn.Module) -> Any:
    """Build the optimizer by its class name in torch.optim; Adafactor is transformers' class, as in the paper."""
    arguments = {"lr": 0.001, **json.loads(workload.optimizer_args)}
    by_name = {name.lower(): name for name in dir(torch.optim) if name[0].isupper()}
    name = by_name.get(workload.optimizer.lower(), workload.optimizer)
    found = getattr(torch.optim, name, None)
    if name == "Adafactor" and not {"foreach", "beta2_decay", "d"} & arguments.keys():
        found = require("transformers.optimization", "Adafactor").Adafactor
        arguments = {**_TRANSFORMERS_ADAFACTOR, **arguments}
    if not (isinstance(found, type) and hasattr(found, "zero_grad")):
        known = sorted(name for name in dir(torch.optim) if name[0].isupper() and name != "Optimizer")
        raise UsageError(f"torch.optim has no optimizer {workload.optimizer!r}.", f"Choose from {', '.join(known)}.")
    try:
        return found(module.parameters(), **arguments)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{workload.optimizer} refuses its arguments: {error}") from error


def _loop(
    workload: Workload, built: Built, optimizer: Any, recorder: Recorder, progress: Callable[[int], None] | None
) -> None:
    step = _Step(workload, built, optimizer, recorder)
    for index in range(workload.iterations):
        recorder.step = index
        span = recorder.open_span("step", f"ProfilerStep#{index}")
        step.run()
        recorder.close_span(span)
        if progress is not None:
            progress(index + 1)
    recorder.close()


class _Step:
    """One iteration of the loop; what Python keeps alive between iterations is what `self` keeps."""

    def __init__(self, workload: Workload, built: Built, optimizer: Any, recorder: Recorder) -> None:
        self.workload, self.built, self.optimizer, self.recorder = workload, built, optimizer, recorder
        self.criterion = torch.nn.CrossEntropyLoss()
        self.batch: Any = None
        self.outputs: Any = None
        self.loss: Any = None
        self.kept: Any = None

    def run(self) -> None:
        """Run forward, backward and the optimizer's step."""
        workload = self.workload
        if workload.zero_grad == "start":
            self._zero_grad()
        for part in range(workload.accumulate):
            with _autocast(workload):
                self._forward()
            if workload.zero_grad == "before-backward" and part == 0:
                self._zero_grad()
            self.loss.backward()
        self.recorder.adopt(gradients(self.optimizer), "gradient")
        self.optimizer.step()
        self.recorder.adopt(state_tensors(self.optimizer), "optimizer_state")
        if workload.zero_grad == "end":
            self._zero_grad()
        if self.built.inputs == "images":
            self.kept = torch.max(_logits(self.outputs), 1)

    def _zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=self.workload.set_to_none)

    def _forward(self) -> None:
        kind = self.built.inputs
        host = self._host_batch()
        if kind == "images":
            images, labels = host
            while self.batch:  # the loop variables hold the next batch on the host before it is copied
                self.batch.pop(0)
            self.batch = [self._to_device(images), self._to_device(labels)]
            self.outputs = self.built.module(self.batch[0])
            self.loss = self.criterion(_logits(self.outputs), self.batch[1])
        elif kind == "tokens":
            self.batch = {name: self._to_device(tensor) for name, tensor in host.items()}
            self.outputs = self.built.module(**self.batch)
            self.loss = self.outputs.loss
        else:
            self.batch = _map_tensors(host, self._to_device)
            self.outputs = _call(self.built.module, self.batch)
            self.loss = _loss_of(self.outputs)

    def _host_batch(self) -> Any:
        self.recorder.paused += 1
        try:
            size = self.workload.batch_size
            if self.built.inputs == "images":
                edge = self.workload.image_size
                images = torch.zeros(size, 3, edge, edge, dtype=getattr(torch, self.workload.dtype))
                return images, torch.zeros(size, dtype=torch.long)
            if self.built.inputs == "tokens":
                return token_batch(size, self.workload.sequence_length)
            return self.built.batch(size)
        finally:
            self.recorder.paused -= 1

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        self.recorder.paused += 1
        copy = tensor.clone()
        self.recorder.paused -= 1
        self.recorder.virtual("aten::_to_copy", (tensor,), (copy,))
        self.recorder.adopt((copy,), "input")
        return copy


def token_batch(size: int, length: int) -> dict[str, torch.Tensor]:
    """Make a padded batch: real batches hold shorter rows, and models treat masks with zeros in another way."""
    mask = torch.ones(size, length, dtype=torch.long)
    mask[1:, int(length * (1 - PAD_SHARE)) :] = 0
    tokens = torch.ones(size, length, dtype=torch.long)
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.clone()}


def _logits(outputs: Any) -> Any:
    if isinstance(outputs, torch.Tensor):
        return outputs
    return outputs[0] if isinstance(outputs, tuple) else outputs.logits


def _loss_of(outputs: Any) -> Any:
    if isinstance(outputs, torch.Tensor):
        return outputs if outputs.dim() == 0 else outputs.float().mean()
    if isinstance(outputs, dict) and "loss" in outputs:
        return outputs["loss"]
    return outputs.loss if hasattr(outputs, "loss") else _loss_of(outputs[0])


def _call(module: Any, batch: Any) -> Any:
    if isinstance(batch, dict):
        return module(**batch)
    return module(*batch) if isinstance(batch, (tuple, list)) else module(batch)


def _map_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: _map_tensors(item, function) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_map_tensors(item, function) for item in value)
    return value


def _autocast(workload: Workload) -> Any:
    if not workload.autocast:
        return contextlib.nullcontext()
    return torch.autocast("cpu", dtype=getattr(torch, workload.autocast))


def _switch_on_checkpointing(module: Any) -> None:
    if not hasattr(module, "gradient_checkpointing_enable"):
        raise UsageError("This model has no gradient_checkpointing_enable(), so checkpointing cannot be switched on.")
    module.gradient_checkpointing_enable()
