"""Heavy operators without their arithmetic: outputs of the right size, zero pages that nothing has touched.

Memory does not depend on values, so matrix products and optimizer updates need not be computed to be recorded.
"""

from __future__ import annotations

from typing import Any

import torch

#: Says that an operator has no hollow form here.
REAL = object()


#: From this many elements on, an elementwise operator costs more than its bookkeeping.
LARGE = 1 << 14
#: Standard deviation with which transformers' models draw their weights.
TYPICAL_WEIGHT = 0.02

#: Operators whose output looks like their first input, in its layout.
_LIKE_FIRST = frozenset(
    "aten::" + name
    for name in (
        "gelu",
        "relu",
        "tanh",
        "silu",
        "sigmoid",
        "hardswish",
        "hardsigmoid",
        "hardtanh",
        "exp",
        "neg",
        "pow",
        "sqrt",
        "rsqrt",
        "clone",
        "zeros_like",
        "gelu_backward",
        "threshold_backward",
        "tanh_backward",
        "silu_backward",
        "hardswish_backward",
        "hardsigmoid_backward",
        "hardtanh_backward",
        "native_dropout_backward",
    )
)
#: Operators whose output is as large as their first input and contiguous.
_CONTIGUOUS = frozenset(
    ("aten::_softmax", "aten::_log_softmax", "aten::_softmax_backward_data", "aten::_log_softmax_backward_data")
)
_BINARY = frozenset(("aten::add", "aten::sub", "aten::mul", "aten::div"))
_IN_PLACE = frozenset(
    "aten::" + name + "_"
    for name in [
        "add",
        "sub",
        "mul",
        "div",
        "addcmul",
        "addcdiv",
        "lerp",
        "copy",
        "fill",
        "zero",
        "relu",
        "hardtanh",
        "hardswish",
        "silu",
        "bernoulli",
        "sqrt",
    ]
)


def run_hollow(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, free_of_choices: bool) -> Any:
    """Give the outputs of a heavy operator without computing them, or `REAL` where it must really run.

    `free_of_choices` says that no value made here is looked at: true in backward and in the optimizer.
    """
    if name in ("aten::mm", "aten::bmm"):
        return args[0].new_empty((*args[0].shape[:-1], args[1].shape[-1]))
    if name in ("aten::addmm", "aten::baddbmm"):
        return args[1].new_empty((*args[1].shape[:-1], args[2].shape[-1]))
    if name == "aten::convolution":
        return _convolution(args)
    if name == "aten::convolution_backward":
        return _convolution_backward(args)
    if name == "aten::embedding_dense_backward":
        return args[0].new_empty((args[2], args[0].shape[-1]))
    if name == "aten::native_batch_norm" and args[5]:
        return torch.empty_like(args[0]), args[0].new_empty(args[0].shape[1]), args[0].new_empty(args[0].shape[1])
    if name in ("aten::native_batch_norm_backward", "aten::native_layer_norm_backward"):
        return _norm_backward(name, args)
    if name.startswith("aten::_foreach_"):
        return _foreach(name, args[0])
    if name == "aten::linalg_vector_norm" and free_of_choices and len(args) < 3 and "dim" not in kwargs:
        # Adafactor compares a norm with a constant: give what weights of the usual scale have.
        return args[0].new_full((), TYPICAL_WEIGHT * args[0].numel() ** 0.5)
    first = args[0] if args else None
    if not isinstance(first, torch.Tensor) or not first.is_floating_point():
        return REAL
    wide = _broadcast(name, args, kwargs) if free_of_choices else REAL
    return _large(name, first, args, kwargs, free_of_choices=free_of_choices) if wide is REAL else wide


def _large(
    name: str, first: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], *, free_of_choices: bool
) -> Any:
    if first.numel() < LARGE:
        return REAL
    if not any(isinstance(a, torch.Tensor) and a.requires_grad for a in args) and not free_of_choices:
        return REAL  # positions and masks decide what a model does next
    return _elementwise(name, first, args, kwargs)


def _elementwise(name: str, first: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if name in _IN_PLACE:
        return first
    if name == "aten::zeros_like" and set(kwargs) <= {"memory_format", "pin_memory"}:
        return torch.empty_like(first)
    if name == "aten::native_dropout":
        return torch.empty_like(first), torch.empty_like(first, dtype=torch.bool)
    if kwargs or any(isinstance(a, torch.Tensor) and a.dtype not in (first.dtype, torch.bool) for a in args):
        return REAL
    if name in _LIKE_FIRST:
        return torch.empty_like(first)
    if name in _CONTIGUOUS:
        return first.new_empty(first.shape)
    if name in _BINARY:
        other = args[1]
        same = isinstance(other, (int, float)) or (other.shape == first.shape and other.stride() == first.stride())
        return torch.empty_like(first) if same else REAL
    if name == "aten::native_layer_norm":
        rows = first.shape[: first.dim() - len(args[1])] + (1,) * len(args[1])
        return first.new_empty(first.shape), first.new_empty(rows), first.new_empty(rows)
    return REAL


def _broadcast(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Answer Adafactor's factors: a column times a row, and means of rows and columns of a matrix."""
    if name not in ("aten::mul", "aten::mean") or kwargs or len(args) != 2 or not args[0].is_contiguous():
        return REAL
    first, second = args
    if name == "aten::mul" and isinstance(second, torch.Tensor):
        alike = second.dtype == first.dtype and second.is_contiguous() and second.shape != first.shape
        shape = torch.broadcast_shapes(first.shape, second.shape)
        return first.new_empty(shape) if alike and shape.numel() >= LARGE else REAL
    if name == "aten::mean" and isinstance(second, list) and len(second) == 1 and first.numel() >= LARGE:
        axis = second[0] % first.dim()
        return first.new_empty([size for index, size in enumerate(first.shape) if index != axis])
    return REAL


def _convolution(args: tuple[Any, ...]) -> Any:
    if args[6]:  # transposed
        return REAL
    image, weight = args[0], args[1]
    edges = [
        (size + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1
        for size, kernel, stride, pad, dilation in zip(
            image.shape[2:], weight.shape[2:], args[3], args[4], args[5], strict=True
        )
    ]
    return _laid_out(image, (image.shape[0], weight.shape[0], *edges), _layout(image, weight))


def _convolution_backward(args: tuple[Any, ...]) -> Any:
    grad, image, weight, mask = args[0], args[1], args[2], args[10]
    layout = _layout(image, weight)
    return (
        _laid_out(image, image.shape, layout) if mask[0] else None,
        _laid_out(weight, weight.shape, layout) if mask[1] else None,
        weight.new_empty(grad.shape[1]) if mask[2] else None,
    )


def _norm_backward(name: str, args: tuple[Any, ...]) -> Any:
    """Gradients of input, weight and bias; batch norm's looks like its input, layer norm's is contiguous."""
    image, weight = args[1], args[2] if name == "aten::native_batch_norm_backward" else args[5]
    first = torch.empty_like(image) if "batch" in name else image.new_empty(image.shape)
    return tuple(
        (first if index == 0 else torch.empty_like(weight)) if wanted else None for index, wanted in enumerate(args[-1])
    )


def _laid_out(like: torch.Tensor, shape: Any, layout: torch.memory_format) -> torch.Tensor:
    return torch.empty(shape, dtype=like.dtype, memory_format=layout)


def _layout(image: torch.Tensor, weight: torch.Tensor) -> torch.memory_format:
    """Choose the layout as cuDNN's convolutions do: channels last where either operand is stored so."""
    last = _is_channels_last(image) or _is_channels_last(weight)
    return torch.channels_last if last else torch.contiguous_format


def _is_channels_last(tensor: torch.Tensor) -> bool:
    """Tell by strides, where a size of one leaves a choice NCHW wins, as in PyTorch's suggest_memory_format."""
    if tensor.dim() != 4 or tensor.stride(1) == 0:
        return False
    least = 0
    for axis in (1, 3, 2, 0):
        size, stride = tensor.shape[axis], tensor.stride(axis)
        if size == 0 or stride < least or (axis == 0 and least == tensor.stride(1)):
            return False
        least = stride * max(size, 1)
    return True


def _foreach(name: str, tensors: Any) -> Any:
    if name.endswith("_"):
        return None if tensors[0].dim() else REAL  # counters of steps are read back
    if name in ("aten::_foreach_norm", "aten::_foreach_max"):
        return REAL
    return [torch.empty_like(tensor) for tensor in tensors]
