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

from xmem.errors import UsageError, XmemError

_NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
_NOT_FAKED = (UnsupportedFakeTensorException, UnsupportedOperatorException)
_OTHERS = "Use --engine cpu, which has values, or --engine vgpu."
#: A loop that waits for a value reads more often than this; optimizers read twice a parameter and step.
MOST_READS = 50_000


@contextlib.contextmanager
def fake_tensors(model: str) -> Iterator[None]:
    """Make every tensor a fake one; raises UsageError where the job fails on them."""
    types = getattr(optim, "_foreach_supported_types", [])
    types.append(FakeTensor)  # optimizers look at types before they take their foreach form
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    except _NEEDS_VALUES as error:
        raise UsageError(f"{model} cannot run on fake tensors: {error} depends on values.", _OTHERS) from error
    except _NOT_FAKED as error:
        raise UsageError(f"{model} cannot run on fake tensors: {error}", _OTHERS) from error
    except XmemError:
        raise
    except Exception as error:  # the job's own code, which may look at values in many ways
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UsageError(f"{model} cannot run on fake tensors: {said}", _OTHERS) from error
    finally:
        types.remove(FakeTensor)


class FixedValues(TorchDispatchMode):  # type: ignore[misc]
    """Answers what asks for a value: no to a question, 1.0 for a measure (a step, a norm).

    A whole number may be a size, so that none is made up: fake tensors refuse it.
    """

    def __init__(self, model: str) -> None:
        super().__init__()
        self.model = model
        self.reads = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, or answer in its place."""
        if func is torch.ops.aten.equal.default:
            return self._answer(False)
        if func is torch.ops.aten._local_scalar_dense.default:
            kind = args[0].dtype
            if kind is torch.bool or kind.is_floating_point:
                return self._answer(False if kind is torch.bool else 1.0)
        return func(*args, **(kwargs or {}))

    def _answer(self, value: bool | float) -> bool | float:
        self.reads += 1
        if self.reads > MOST_READS:
            raise UsageError(
                f"{self.model} cannot run on fake tensors: it read {MOST_READS} values; does a loop wait for one?",
                _OTHERS,
            )
        return value


def make_fake(module: torch.nn.Module, optimizer: Any, dtype: torch.dtype) -> None:
    """Make parameters and buffers fake and of this type, where `module.to` would have to swap them and may not.

    Shared parameters stay shared, and an optimizer keeps its own.
    """
    changed: dict[int, Any] = {}

    def change(tensor: Any) -> Any:
        wanted = dtype if tensor is not None and tensor.is_floating_point() else None
        if tensor is None or (isinstance(tensor, FakeTensor) and wanted in (None, tensor.dtype)):
            return tensor
        if id(tensor) not in changed:
            cast = tensor.detach() if wanted is None else tensor.detach().to(wanted)
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            changed[id(tensor)] = (tensor, torch.nn.Parameter(cast, tensor.requires_grad) if is_parameter else cast)
        return changed[id(tensor)][1]

    for child in module.modules():
        for held in (child._parameters, child._buffers):
            for name, tensor in held.items():
                held[name] = change(tensor)
    for group in getattr(optimizer, "param_groups", ()):
        group["params"] = [change(tensor) for tensor in group["params"]]
