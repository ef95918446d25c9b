"""Lets autocast on the CPU cast what it casts on CUDA: the two differ in which operators run in float32."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map

_KEY = "AutocastCPU"
_LOW = (torch.float16, torch.bfloat16)

# The lists are those of torch 2.14.1; names that another torch lacks are passed over.

#: Run in float32 on CUDA and have no rule on the CPU.
FLOAT32 = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt",
    "sinh", "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm",
    "native_layer_norm", "group_norm", "rms_norm", "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim",
    "cosine_similarity", "dist", "pdist", "renorm", "logsumexp", "upsample_nearest1d",
    "_upsample_nearest_exact1d", "upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_nearest3d",
    "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d", "_upsample_bilinear2d_aa",
    "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bicubic2d_aa",
)  # fmt: skip
#: Give float32 on CUDA unless the call names a type.
FLOAT32_OUTPUT = ("cumprod", "cumsum", "linalg_vector_norm", "sum", "sum.dim_IntList", "softmax.int", "log_softmax.int")
#: Have a rule on the CPU and none on CUDA.
PLAIN = (
    "cross_entropy_loss", "avg_pool3d", "adaptive_avg_pool3d", "adaptive_max_pool3d", "max_pool3d",
    "fractional_max_pool2d", "fractional_max_pool3d", "max_unpool2d", "max_unpool3d", "reflection_pad1d",
    "reflection_pad2d", "replication_pad1d", "replication_pad2d", "replication_pad3d", "ctc_loss.IntList",
    "ctc_loss.Tensor", "trace", "stft.center",
)  # fmt: skip


@contextlib.contextmanager
def autocast_as_on_cuda() -> Iterator[None]:
    """Give autocast on the CPU CUDA's rules while this is on; without autocast nothing changes."""
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # replacing the CPU's own rules is meant
            for names, make in ((FLOAT32, _in_float32), (FLOAT32_OUTPUT, _to_float32), (PLAIN, _as_it_is)):
                for name, operator in _found(names):
                    library.impl(name, make(operator), _KEY)
        yield
    finally:
        library._destroy()


def _found(names: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    for name in names:
        base, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
        if operator is not None:
            yield name, operator


def _without_autocast() -> Any:
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))


def _in_float32(operator: Any) -> Callable[..., Any]:
    def widen(value: Any) -> Any:
        return value.float() if isinstance(value, torch.Tensor) and value.dtype in _LOW else value

    def run(*args: Any, **kwargs: Any) -> Any:
        with _without_autocast():
            return operator(*tree_map(widen, args), **tree_map(widen, kwargs))

    return run


def _to_float32(operator: Any) -> Callable[..., Any]:
    names = [argument.name for argument in operator._schema.arguments]

    def run(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if (
            given["self"].is_floating_point()
            and given["self"].dtype is not torch.float64
            and given.get("dtype") is None
        ):
            given["dtype"] = torch.float32
        first = given.pop("self")
        with _without_autocast():
            return operator(first, **given)

    return run


def _as_it_is(operator: Any) -> Any:
    return torch.library.fallthrough_kernel
