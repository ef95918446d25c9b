"""What a recorder learns from hooks: module calls, optimizer steps, and whose memory it is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from xmem.capture.recorder import Recorder


def watch_modules(recorder: Recorder, names: dict[int, str], root: Any = None) -> list[Any]:
    """Record module calls as spans named after the module's place; `root` is told of every outermost call."""
    from torch.nn.modules import module as nn_module

    depth = [0]

    def enter(module: torch.nn.Module, inputs: Any) -> None:
        if root is not None and depth[0] == 0:
            root(module)
        depth[0] += 1
        name = names.get(id(module), type(module).__name__)
        recorder.modules.append(recorder.open_span("module", f"nn.Module: {name}"))

    def leave(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        depth[0] -= 1
        if recorder.modules:
            recorder.close_span(recorder.modules.pop())

    return [
        nn_module.register_module_forward_pre_hook(enter),
        nn_module.register_module_forward_hook(leave, always_call=True),
    ]


def watch_optimizers(recorder: Recorder, *, count_steps: bool = False) -> list[Any]:
    """Note when any optimizer steps, whose gradients it read and which state it made; `count_steps` numbers steps."""
    from torch.optim import optimizer as optim

    def enter(optimizer: Any, args: Any, kwargs: Any) -> None:
        recorder.in_optimizer += 1
        recorder.adopt(gradients(optimizer), "gradient")

    def leave(optimizer: Any, args: Any, kwargs: Any) -> None:
        recorder.in_optimizer = max(0, recorder.in_optimizer - 1)
        recorder.adopt(state_tensors(optimizer), "optimizer_state")
        if count_steps:
            recorder.step = (recorder.step or 0) + 1

    return [optim.register_optimizer_step_pre_hook(enter), optim.register_optimizer_step_post_hook(leave)]


@contextlib.contextmanager
def watch_loop(recorder: Recorder) -> Iterator[None]:
    """Watch somebody's own loop: models and optimizers are met when they are used."""
    names: dict[int, str] = {}
    met: set[int] = set()

    def meet(module: torch.nn.Module) -> None:
        if id(module) in met:
            return
        met.add(id(module))
        names.update({id(child): name or type(child).__name__ for name, child in module.named_modules()})
        place_on_device(recorder, module)
        recorder.step = recorder.step or 0

    handles = watch_modules(recorder, names, meet) + watch_optimizers(recorder, count_steps=True)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def watch_model(recorder: Recorder, module: torch.nn.Module) -> Iterator[None]:
    """Watch one model whose steps are numbered elsewhere."""
    names = {id(child): name or type(child).__name__ for name, child in module.named_modules()}
    handles = watch_modules(recorder, names) + watch_optimizers(recorder)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def place_on_device(recorder: Recorder, module: torch.nn.Module) -> None:
    """Record parameters and buffers in the order in which `module.to(device)` copies them."""
    for child in module.children():
        place_on_device(recorder, child)
    recorder.adopt((p for p in module._parameters.values() if p is not None), "parameter")
    recorder.adopt((b for b in module._buffers.values() if b is not None), "parameter")


def gradients(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield the gradients that an optimizer reads."""
    return (p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)


def state_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of an optimizer's state that lie on the device; step counters stay on the host."""
    for state in getattr(optimizer, "state", {}).values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and name != "step":
                yield value
