"""Lets a job run on fake tensors, by torch's FakeTensorMode: shapes and lifetimes without memory or arithmetic."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.optim.optimizer as optim
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode

from xmem.errors import UsageError

_NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
_NOT_FAKED = (UnsupportedFakeTensorException, UnsupportedOperatorException)
_OTHERS = "Use --engine cpu, which has values, or --engine vgpu."


@contextlib.contextmanager
def fake_tensors(model: str) -> Iterator[None]:
    """Make every tensor a fake one; a value that is read is no, 0 or 1.0 (torch 2.6 to 2.14).

    Raises UsageError where the job needs values, or an operator that cannot be faked.
    """
    types = getattr(optim, "_foreach_supported_types", [])
    types.append(FakeTensor)  # optimizers look at types before they take their foreach form
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), _FixedValues():
            yield
    except _NEEDS_VALUES as error:
        raise UsageError(f"{model} cannot run on fake tensors: {error} depends on values.", _OTHERS) from error
    except _NOT_FAKED as error:
        raise UsageError(f"{model} cannot run on fake tensors: {error}", _OTHERS) from error
    finally:
        types.remove(FakeTensor)


class _FixedValues(TorchDispatchMode):  # type: ignore[misc]
    """Answers what asks for a value: no to a question, 0 for a count, 1.0 for a measure (a step, a norm)."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, or answer in its place."""
        if func is torch.ops.aten._local_scalar_dense.default:
            kind = args[0].dtype
            return False if kind is torch.bool else 1.0 if kind.is_floating_point else 0
        if func is torch.ops.aten.equal.default:
            return False
        return func(*args, **(kwargs or {}))


def to_dtype(module: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Do what `module.to(dtype)` does, which would swap fake tensors and may not; shared parameters stay shared."""
    changed: dict[int, Any] = {}

    def change(tensor: Any) -> Any:
        if tensor is None or not tensor.is_floating_point() or tensor.dtype is dtype:
            return tensor
        if id(tensor) not in changed:
            cast = tensor.detach().to(dtype)
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            changed[id(tensor)] = (tensor, torch.nn.Parameter(cast, tensor.requires_grad) if is_parameter else cast)
        return changed[id(tensor)][1]

    for child in module.modules():
        for held in (child._parameters, child._buffers):
            for name, tensor in held.items():
                held[name] = change(tensor)
    return module
