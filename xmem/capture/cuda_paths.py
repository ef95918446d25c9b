"""Lets a CPU run take the paths that the same Python code takes on CUDA (checked against torch 2.14.1 and 2.6.0).

PyTorch chooses some implementations by device: fused dropout, memory-efficient attention, foreach optimizers. Inside
`CudaPaths` a CPU run makes the same choices, so that its operators, outputs and saved tensors are those of a GPU run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own name for it
from torch.overrides import TorchFunctionMode

from xmem.capture.recorder import Recorder

_EFFICIENT = "aten::_scaled_dot_product_efficient_attention"
_ATTENTION_PARAMETERS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
# Their originals: multi_head_attention_forward finds others in their place, see below.
_sdpa, _plain_dropout = F.scaled_dot_product_attention, F.dropout
_FLASH = "aten::_scaled_dot_product_flash_attention"
#: What makes tensors out of nothing: without a device they stay on the host in a GPU run.
FACTORIES = frozenset(
    {torch.rand, torch.randn, torch.randint, torch.randperm, torch.arange, torch.zeros, torch.ones, torch.full}
    | {torch.empty, torch.tensor, torch.linspace, torch.eye}
)
#: Functions of Python that call what chooses by device: where those are looked up, and their names.
#: Checkpointing runs forward again inside backward.
_INNER = {
    torch.Tensor.backward: (torch.autograd, ("_engine_run_backward",)),
    torch.autograd.grad: (torch.autograd, ("_engine_run_backward",)),
    F.multi_head_attention_forward: (F, ("scaled_dot_product_attention", "dropout")),
}


class CudaPaths(TorchFunctionMode):  # type: ignore[misc]
    """Replaces functions that choose by device with what they choose on CUDA; values stay right."""

    def __init__(self, recorder: Recorder, *, values: bool = True) -> None:
        super().__init__()
        self.recorder = recorder
        self.values = values
        self._originals: dict[Any, Any] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the function, or its CUDA counterpart."""
        kwargs = kwargs or {}
        func = self._originals.get(func, func)  # a function of torch.nn.functional looks itself up by its name
        if not self.recorder.paused:
            if func is _plain_dropout:
                return _dropout(*args, **kwargs)
            if func is torch.dropout:
                return _dropout(*args, **kwargs)
            if func is _sdpa:
                return self._attention(*args, **kwargs)
            if func in (torch.Tensor.to, torch.Tensor.cuda) and self.recorder.is_on_host(args[0]):
                return self._to_device(func, args, kwargs)
            if func in FACTORIES and kwargs.get("device") is None:
                return self._on_host(func, args, kwargs)
            if func in _INNER:
                with self._kept_on(*_INNER[func]):
                    return func(*args, **kwargs)
        return func(*args, **kwargs)

    @contextmanager
    def _kept_on(self, place: Any, names: tuple[str, ...]) -> Iterator[None]:
        """Keep this mode, which is off inside what it handles, on for these functions of a module."""
        before = {name: getattr(place, name) for name in names}

        def kept_on(function: Any) -> Any:
            def run(*args: Any, **kwargs: Any) -> Any:
                with self:
                    return function(*args, **kwargs)

            self._originals[run] = function
            return run

        for name, function in before.items():
            setattr(place, name, kept_on(function))
        try:
            yield
        finally:
            for name, function in before.items():
                self._originals.pop(getattr(place, name), None)
                setattr(place, name, function)

    def _on_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.recorder.on_host += 1
        try:
            return func(*args, **kwargs)
        finally:
            self.recorder.on_host -= 1

    def _to_device(self, func: Any, args: Any, kwargs: Any) -> Any:
        with _unseen(self.recorder):
            moved = func(*args, **kwargs) if func is torch.Tensor.to else args[0]
            where = [a for a in (*args[1:], *kwargs.values()) if isinstance(a, (torch.Tensor, torch.device, str))]
            if func is torch.Tensor.to and not where:
                return moved
            copy = moved.clone()
        self.recorder.virtual("aten::_to_copy", (args[0],), (copy,))
        if self.recorder.in_optimizer == 0:
            self.recorder.adopt((copy,), "input")
        return copy

    def _attention(self, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(_ATTENTION_PARAMETERS, args, strict=False)), **kwargs}
        query, key, value = (given[name] for name in _ATTENTION_PARAMETERS[:3])
        attn_mask, enable_gqa = given.get("attn_mask"), given.get("enable_gqa", False)
        dropout_p, is_causal, scale = given.get("dropout_p", 0.0), given.get("is_causal", False), given.get("scale")
        backend = choose_attention(query, key, value, attn_mask, enable_gqa)
        if backend is None:
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                return _sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        options = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), -math.inf)
        return _Attention.apply(query, key, value, attn_mask, (self.recorder, backend, options, self.values))


def choose_attention(query: Any, key: Any, value: Any, attn_mask: Any, enable_gqa: bool) -> str | None:
    """Name the fused operator that CUDA takes (compute capability 8.0 and later), None for the composite path."""
    if query.dim() != 4 or enable_gqa or query.requires_grad != key.requires_grad or query.dtype is torch.float64:
        return None
    width = query.shape[-1]
    if width != value.shape[-1] or width % (4 if query.dtype is torch.float32 else 8):
        return None
    half = query.dtype in (torch.float16, torch.bfloat16)
    return _FLASH if half and attn_mask is None and width <= 256 else _EFFICIENT


def _dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool = True) -> Any:
    if not (training and train) or p == 0 or inplace or p == 1:
        return _plain_dropout(input, p, training and train, inplace)
    return torch.native_dropout(input, p, True)[0]


class _Attention(torch.autograd.Function):  # type: ignore[misc]
    """A fused attention operator: its outputs and saved tensors, computed by the host's own attention."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, mask: Any, how: Any) -> Any:
        recorder, backend, options, values = how
        batch, heads, length, width = query.shape
        with _unseen(recorder):
            seed, offset = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
            out = query.new_zeros(batch, length, heads, width).transpose(1, 2)
            padded = -(-length // 32) * 32 if backend == _EFFICIENT else length
            lse = torch.zeros(batch, heads, padded, dtype=torch.float32)
            ctx.rng = torch.get_rng_state() if values and options["dropout_p"] else None
            if values:
                out.copy_(_sdpa(query, key, value, mask, **options))
        # The order of the outputs is the order in which CUDA allocates them.
        outputs: tuple[Any, ...] = (seed, offset, out, lse) if backend == _EFFICIENT else (out, lse, seed, offset)
        if backend == _EFFICIENT and options["dropout_p"]:
            outputs = (out, lse)  # the generator's seed and offset are numbers on the host then
        recorder.virtual(backend, (query, key, value, mask, options["dropout_p"], options["is_causal"]), outputs)
        ctx.how = how
        ctx.save_for_backward(query, key, value, mask, lse, out, seed, offset)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        recorder, backend, options, values = ctx.how
        query, key, value, mask, lse, out, *_ = ctx.saved_tensors
        with _unseen(recorder):
            grads = _empty_gradients(query, key, value, backend)
            if values:
                _fill_gradients(grads, (query, key, value, mask), grad, options, ctx.rng)
        recorder.virtual(backend + "_backward", (grad, query, key, value, mask, out, lse), grads)
        return (*grads, None, None)


def _empty_gradients(query: Any, key: Any, value: Any, backend: str) -> tuple[Any, ...]:
    """Make the gradients as the kernel lays them out: one chunk where query, key and value share their storage."""
    base = query.untyped_storage()._cdata
    same = [tensor.untyped_storage()._cdata == base for tensor in (key, value)]
    batch, heads, length, width = query.shape
    if backend == _EFFICIENT and all(same) and key.shape == query.shape:
        chunk = query.new_zeros(batch, length, 3, heads, width)
        return tuple(chunk.select(2, index).transpose(1, 2) for index in range(3))
    shapes = [(t.shape[0], t.shape[2], t.shape[1], t.shape[3]) for t in (query, key, value)]
    return tuple(query.new_zeros(shape).transpose(1, 2) for shape in shapes)


def _fill_gradients(grads: Any, inputs: Any, grad: Any, options: Any, rng: Any) -> None:
    leaves = [tensor.detach().requires_grad_() for tensor in inputs[:3]]
    with torch.enable_grad(), torch.random.fork_rng(enabled=rng is not None, devices=[]):
        if rng is not None:
            torch.set_rng_state(rng)
        out = _sdpa(*leaves, inputs[3], **options)
        for made, found in zip(grads, torch.autograd.grad(out, leaves, grad), strict=True):
            made.copy_(found)


@contextmanager
def _unseen(recorder: Recorder) -> Iterator[None]:
    recorder.paused += 1
    try:
        yield
    finally:
        recorder.paused -= 1


@contextmanager
def foreach_as_on_cuda() -> Iterator[None]:
    """Let optimizers and gradient clipping take their foreach form on the CPU, CUDA's default."""
    import torch.optim.optimizer as optimizer
    import torch.utils._foreach_utils as foreach

    name = "_get_foreach_kernels_supported_devices"
    places = [place for place in (optimizer, foreach) if hasattr(place, name)]
    before = [getattr(place, name) for place in places]
    for place, original in zip(places, before, strict=True):
        setattr(place, name, lambda original=original: [*original(), "cpu"])
    try:
        yield
    finally:
        for place, original in zip(places, before, strict=True):
            setattr(place, name, original)


@contextmanager
def without_compiler() -> Iterator[None]:
    """Keep optimizers from importing torch's compiler (seconds of start-up) only to switch it off."""
    optimizer = torch.optim.Optimizer
    names = ("zero_grad", "add_param_group", "state_dict", "load_state_dict")
    plain = [getattr(getattr(optimizer, name), "__wrapped__", None) for name in names]
    marked = [function for function in plain if function is not None and not hasattr(function, "__dynamo_disable")]
    for function in marked:
        setattr(function, "__dynamo_disable", function)
    try:
        yield
    finally:
        for function in marked:
            delattr(function, "__dynamo_disable")
