"""Waits until a process imports torch and until it first uses CUDA; hands on to the recorder then."""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any

#: Tensors on the host from this many elements on are left as they are by initialisers: their values mean nothing.
SKIPPED_FROM = 1 << 16
_RANDOM_METHODS = ("normal_", "uniform_", "random_", "bernoulli_", "exponential_", "trunc_normal_")


class ImportWaiter(importlib.abc.MetaPathFinder):
    """Finds a module as usual and hands it on once it is imported."""

    def __init__(self, name: str, then: Callable[[Any], None]) -> None:
        self.name = name
        self.then = then

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """Wrap the loader of the one module; leave every other alone."""
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            self.then(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def wait_for_torch(folder: str) -> None:
    """Begin to wait."""
    generation = "transformers.generation."
    sys.meta_path[:0] = [
        ImportWaiter("torch", lambda torch: prepare(torch, folder)),
        ImportWaiter(f"{generation}stopping_criteria", lambda module: notice_length(module.MaxLengthCriteria)),
        ImportWaiter(f"{generation}utils", lambda module: end_at_length(module.GenerationMixin)),
    ]


def prepare(torch: Any, folder: str) -> None:
    """Leave large initial values out, and start the recorder when CUDA starts."""
    skip_initial_values(torch)
    spec = importlib.util.spec_from_file_location("xmem_vgpu_recorder", os.path.join(folder, "recorder.py"))
    if spec is None or spec.loader is None:
        return
    recorder = importlib.util.module_from_spec(spec)
    sys.modules["xmem_vgpu_recorder"] = recorder
    spec.loader.exec_module(recorder)
    if os.environ.get("XMEM_VGPU_SANDBOX"):
        recorder.fence_off(torch)
    torch.cuda._lazy_call(lambda: recorder.start(torch))


def skip_initial_values(torch: Any) -> None:
    """Make initialisers leave large tensors on the host untouched, so that their pages are never taken."""
    init = torch.nn.init
    for name in dir(init):
        if name.endswith("_") and not name.startswith("_"):
            setattr(init, name, _skipping(getattr(init, name)))
    for name in _RANDOM_METHODS:
        if hasattr(torch.Tensor, name):
            setattr(torch.Tensor, name, _skipping(getattr(torch.Tensor, name)))


def _skipping(function: Any) -> Any:
    def initialise(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if tensor.device.type == "cpu" and tensor.numel() >= SKIPPED_FROM:
            return tensor
        return function(tensor, *args, **kwargs)

    initialise.__name__ = getattr(function, "__name__", "initialise")
    initialise.__doc__ = getattr(function, "__doc__", None)
    return initialise


# ------------------------------------------------------------------ text generation
#: Whether the text that transformers generates has its full length; known on the host, asked of the card.
_reached = {"length": False}


def notice_length(criteria: Any) -> None:
    """Keep what the criterion of the greatest length finds before it becomes a tensor, which reads as zeros."""
    ask = criteria.__call__

    def call(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        _reached["length"] = input_ids.shape[-1] >= self.max_length
        recorder = getattr(sys.modules.get("xmem_vgpu_recorder"), "recorder", None)
        if recorder is not None:
            recorder.advance()
        return ask(self, input_ids, *args, **kwargs)

    criteria.__call__ = call


def end_at_length(mixin: Any) -> None:
    """End `generate` at its greatest length: tokens on the card never say that a text is finished."""
    ask = mixin._has_unfinished_sequences

    def has_unfinished(self: Any, *args: Any, **kwargs: Any) -> Any:
        full, _reached["length"] = _reached["length"], False
        return False if full else ask(self, *args, **kwargs)

    mixin._has_unfinished_sequences = has_unfinished
