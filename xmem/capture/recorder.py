"""Watches a training loop: every operator, every storage it makes, and the moment each storage dies."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from xmem.capture.hollow import REAL, run_hollow

#: Operators that hold a Python number in memory; the number stays on the host in a GPU run.
HOST_LITERALS = frozenset({"aten::lift_fresh"})

#: Nodes that sum gradients stand outside the sequence; their number is the largest there is.
_NO_SEQUENCE = 1 << 62

#: What one recorded event holds, in order.
EVENT_COLUMNS = ("ts_ns", "action", "alloc_id", "requested_bytes", "span_id", "step", "phase")
#: What one recorded span holds, in order.
SPAN_COLUMNS = (
    "span_id", "parent_id", "kind", "name", "ts_ns", "dur_ns", "sequence_number",
    "input_shapes", "input_strides", "input_types", "concrete_inputs", "phase", "step",
)  # fmt: skip


class Recorder(TorchDispatchMode):  # type: ignore[misc]
    """Collects events and spans below autograd, where operators are what a device really runs.

    What a kernel allocates and frees inside itself is never seen: only storages that outlive their operator are.
    A storage is followed by identity: a weak reference says when the last tensor on it is gone, also where autograd
    holds it. `device_type` names the device whose storages are recorded.
    """

    def __init__(self, device_type: str = "cpu", *, hollow: bool = False) -> None:
        super().__init__()
        self.device_type = device_type
        self.hollow = hollow
        self.events: list[tuple[Any, ...]] = []
        self.spans: list[list[Any]] = []
        self.categories: dict[int, str] = {}
        self.step: int | None = None
        self.modules: list[int] = []
        self.in_optimizer = 0
        self.paused = 0
        self.on_host = 0
        self._host: dict[int, weakref.ref[Any]] = {}
        self.closed = False
        self.recurrent = False
        self._live: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._allocations = 0
        self._op: int | None = None
        self._last_ts = 0
        self._known: dict[Any, tuple[str, bool]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from importing its compiler for every mode; nothing is compiled under this one."""
        return False

    def now(self) -> int:
        """Give the time in nanoseconds, never the same twice."""
        self._last_ts = max(time.time_ns(), self._last_ts + 1)
        return self._last_ts

    def phase(self) -> str:
        """Name the part of the training step that runs now."""
        if self.in_optimizer:
            return "optimizer"
        if torch._C._current_graph_task_id() != -1:
            return "backward"
        return "forward" if self.modules or self._op is not None else "other"

    def adopt(self, tensors: Iterable[torch.Tensor], category: str) -> None:
        """Note that the storages of these tensors are of this category; unseen ones are recorded as they stand."""
        for tensor in tensors:
            alloc_id = self._track(tensor, None)
            if alloc_id is not None:
                self.categories[alloc_id] = category

    def forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """Leave out storages that stay on the host in a GPU run."""
        for tensor in tensors:
            found = self._live.pop(tensor.untyped_storage()._cdata, None)
            if found is not None:
                self.categories[found[1]] = "host"

    def open_span(self, kind: str, name: str) -> int:
        """Start a span that is no operator: a module call, a step, a mark."""
        span_id = len(self.spans)
        parent = self.modules[-1] if self.modules else None
        nothing = [None] * 5
        self.spans.append([span_id, parent, kind, name, self.now(), 0, *nothing, self.phase(), self.step])
        return span_id

    def close_span(self, span_id: int) -> None:
        """End a span."""
        self.spans[span_id][5] = self.now() - self.spans[span_id][4]

    def close(self) -> None:
        """Stop following storages; what is still alive stays alive in the recording."""
        self.closed = True
        self._live.clear()

    def virtual(self, name: str, inputs: tuple[Any, ...], outputs: tuple[torch.Tensor, ...]) -> None:
        """Record an operator that the device would run in place of what the host ran unseen."""
        span_id = self._open_operator(name, inputs, {})
        for tensor in outputs:
            self._track(tensor, span_id)
        self.close_span(span_id)
        self._op = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and record what it made."""
        kwargs = kwargs or {}
        if self.paused or self.closed:
            return func(*args, **kwargs)
        name, skippable = self._describe(func)
        span_id = self._open_operator(name, args, kwargs)
        made = 0
        try:
            # Checkpointing runs forward again in backward, with its choices.
            free = self.hollow and self.phase() in ("backward", "optimizer") and not torch.is_grad_enabled()
            out = run_hollow(name, args, kwargs, free_of_choices=free) if self.hollow else REAL
            if out is REAL:
                out = func(*args, **kwargs)
            on_host = self.on_host > 0 or name in HOST_LITERALS or self._all_on_host((args, kwargs))
            for tensor in _tensors_of(out):
                if on_host:
                    self._keep_on_host(tensor)
                else:
                    made += self._track(tensor, span_id) is not None
        finally:
            self.close_span(span_id)
            self._op = None
        if skippable and not made and span_id == len(self.spans) - 1 and self._unused(span_id):
            self.spans.pop()
        return out

    def _own_storage(self, tensor: Any) -> str:
        """Name the allocation under a tensor that is no view: autograd may add into it."""
        if not isinstance(tensor, torch.Tensor) or tensor._is_view():
            return ""
        known = self._live.get(tensor.untyped_storage()._cdata)
        return "" if known is None else str(known[1])

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        """Tell whether this tensor would stay on the host in a GPU run; one inside vmap has no storage to tell by."""
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return False
        return tensor.device.type == self.device_type and tensor.untyped_storage()._cdata in self._host

    def _all_on_host(self, inputs: Any) -> bool:
        found = [tensor.untyped_storage()._cdata in self._host for tensor in _tensors_of(inputs)]
        return bool(found) and all(found)

    def _keep_on_host(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._live and key not in self._host:
            self._host[key] = weakref.ref(storage, lambda _: self._host.pop(key, None))

    def _unused(self, span_id: int) -> bool:
        return not self.events or self.events[-1][4] != span_id

    def _describe(self, func: Any) -> tuple[str, bool]:
        found = self._known.get(func)
        if found is None:
            schema = func._schema
            view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
            found = (schema.name, view or not schema.name.startswith("aten::"))
            self._known[func] = found
        return found

    def _open_operator(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        span_id = len(self.spans)
        shapes, strides, types, concrete = _describe_inputs((*args, *kwargs.values()))
        parent = self.modules[-1] if self.modules else None
        if name == "aten::add" and args and torch._C._current_graph_task_id() != -1:
            concrete[0] = self._own_storage(args[0])
        start, sequence = self.now(), _sequence_number()
        self._op = span_id
        place = (self.phase(), self.step)
        self.spans.append(
            [span_id, parent, "operator", name, start, 0, sequence, shapes, strides, types, concrete, *place]
        )
        return span_id

    def _track(self, tensor: torch.Tensor, span_id: int | None) -> int | None:
        """Follow the storage of a tensor; return its number, None where it was known or is not of this device."""
        if tensor.device.type != self.device_type or tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._live.get(key)
        if known is not None and known[0]() is storage:
            return known[1] if span_id is None else None
        size = storage.nbytes()
        if size == 0:
            return None
        alloc_id = self._allocations
        self._allocations += 1
        self._live[key] = (weakref.ref(storage, self._on_death(key, alloc_id, size)), alloc_id)
        self.events.append((self.now(), "alloc", alloc_id, size, span_id, self.step, self.phase()))
        return alloc_id

    def _on_death(self, key: int, alloc_id: int, size: int) -> Any:
        def died(reference: Any) -> None:
            found = self._live.get(key)
            if not self.closed and found is not None and found[0] is reference:
                del self._live[key]
                phase = self.phase()
                self.events.append((self.now(), "free_requested", alloc_id, size, self._op, self.step, phase))

        return died


def _sequence_number() -> int | None:
    if torch._C._current_graph_task_id() != -1:
        node = torch._C._current_autograd_node()
        number = int(node._sequence_nr()) if node is not None else _NO_SEQUENCE
        return number if number < _NO_SEQUENCE else None
    return int(torch.autograd._get_sequence_nr()) - 1 if torch.is_grad_enabled() else None


def _tensors_of(out: Any) -> Iterable[torch.Tensor]:
    if isinstance(out, torch.Tensor):
        yield out
    elif isinstance(out, (tuple, list)):
        for item in out:
            yield from _tensors_of(item)
    elif isinstance(out, dict):
        yield from _tensors_of(tuple(out.values()))


def _describe_inputs(inputs: tuple[Any, ...]) -> tuple[list[Any], list[Any], list[str], list[str]]:
    shapes: list[Any] = []
    strides: list[Any] = []
    types: list[str] = []
    concrete: list[str] = []
    for value in inputs:
        tensor = isinstance(value, torch.Tensor)
        several = not tensor and isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor)
        shapes.append(list(value.shape) if tensor else [])
        strides.append(list(value.stride()) if tensor else [])
        types.append(str(value.dtype).removeprefix("torch.") if tensor else "TensorList" if several else "")
        concrete.append("" if tensor or several else str(value))
    return shapes, strides, types, concrete
