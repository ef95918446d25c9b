"""Reads a pasted out-of-memory message of any torch generation: what each number means and what to try."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from xmem.errors import UnreadableError
from xmem.units import format_bytes

_UNITS = {"bytes": 1, "byte": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
#: MPS writes GB, MB and KB, and means powers of 1024 (torch 2.x, MPSAllocator).
_UNITS |= {"KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}
_SIZE = r"([0-9][0-9,]*(?:\.[0-9]+)?(?:e\+?[0-9]+)?) ?(bytes?|B|[KMGT]i?B)\b"
#: Differences of unsigned integers that fell below zero come out just under 2**64 bytes: the number is unknown.
_UNDERFLOW = 1 << 62
_LONGEST = 2000

_HEADS = re.compile(
    rf"\b(?P<backend>CUDA|HIP|XPU|MPS backend|PrivateUse1|[A-Z][A-Za-z0-9]{{1,15}}) out of memory\b"
    rf"|(?P<cpu>DefaultCPUAllocator: (?:not enough memory|can't allocate memory): you tried to allocate {_SIZE})"
    r"|(?P<bare>CUDA error: out of memory|cuda runtime error \(2\) ?: ?out of memory|CUDA_ERROR_OUT_OF_MEMORY)"
)
#: Each number, in the words of the generations that print it: torch 0.4 to 2.14 (c10/cuda, c10/xpu, aten/mps).
_NUMBERS = {
    "tried_bytes": (rf"Tried to allocate {_SIZE}", rf"you tried to allocate {_SIZE}"),
    "total_bytes": (rf"total capac[a-z]*ty of {_SIZE}", rf"{_SIZE} total capac[a-z]*ty"),
    "free_bytes": (rf"of which {_SIZE} is free", rf"[;(] {_SIZE} free"),
    "allowed_bytes": (rf"max allowed: {_SIZE}", rf"{_SIZE} allowed"),
    "process_bytes": (rf"this process has {_SIZE} memory in use",),
    "allocated_bytes": (
        rf"{_SIZE} is allocated by PyTorch", rf"{_SIZE} already allocated", rf"MPS allocated: {_SIZE}",
    ),
    "private_pool_bytes": (rf"{_SIZE} allocated in private pools",),
    "reserved_bytes": (rf"{_SIZE} reserved in total by PyTorch",),
    # up to torch 1.3 `cached` is the cache beyond what is allocated
    "unused_bytes": (rf"{_SIZE} is reserved by PyTorch but unallocated", rf"{_SIZE} cached"),
    "other_bytes": (rf"other allocations: {_SIZE}",),
}  # fmt: skip
_DEVICE = re.compile(r"\bGPU ([0-9]+)\b")
_PROCESS = re.compile(rf"Process ([0-9]+) has {_SIZE} memory in use")


@dataclass(frozen=True)
class OomMessage:
    """The numbers of one message, bytes; None where it does not say, or says a number that cannot be."""

    backend: str
    device_index: int | None = None
    tried_bytes: int | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    allowed_bytes: int | None = None
    process_bytes: int | None = None
    allocated_bytes: int | None = None
    private_pool_bytes: int | None = None
    reserved_bytes: int | None = None
    unused_bytes: int | None = None
    other_bytes: int | None = None
    impossible: tuple[str, ...] = ()
    processes: tuple[tuple[int, int | None], ...] = ()
    count: int = 1
    text: str = field(default="", repr=False)

    @property
    def non_torch_bytes(self) -> int | None:
        """What the process holds outside of torch's allocator: context, communication buffers, other libraries."""
        if self.process_bytes is None or self.reserved_bytes is None:
            return self.other_bytes
        return max(self.process_bytes - self.reserved_bytes, 0)

    def facts(self) -> list[tuple[str, int | None, str]]:
        """Return each number with its meaning, in the order of the story."""
        return [
            (label, getattr(self, name), meaning)
            for name, label, meaning in _MEANINGS
            if getattr(self, name) is not None or name in self.impossible
        ]

    def advice(self) -> list[str]:
        """Return what to try, the most promising first."""
        return [sentence for rule in _RULES if (sentence := rule(self))] or [_fallback(self)]


_MEANINGS = (
    ("tried_bytes", "tried to allocate", "the one request that failed (already rounded by the allocator)"),
    ("total_bytes", "device total", "what the driver says the device has; less than its name promises"),
    ("allowed_bytes", "allowed", "the limit set for this process (memory fraction, or the MPS watermark)"),
    ("free_bytes", "device free", "what nobody held at that moment, all processes counted"),
    ("process_bytes", "this process", "everything this process held, torch or not"),
    ("reserved_bytes", "reserved", "what torch's allocator took from the device: allocated plus its cache"),
    ("allocated_bytes", "allocated", "tensors that were alive (in whole blocks)"),
    ("private_pool_bytes", "private pools", "part of allocated: CUDA graphs and other pools that do not share"),
    ("unused_bytes", "reserved, unallocated", "the cache: free inside torch, in pieces that did not fit the request"),
    ("non_torch_bytes", "outside of torch", "context, NCCL, cuDNN and other libraries in this process"),
)


def read_messages(text: str) -> tuple[OomMessage, ...]:
    """Find every out-of-memory message in a log or a pasted text; a repeated one is counted.

    Raises UnreadableError where there is none.
    """
    flat = " ".join(text.split())
    heads = list(_HEADS.finditer(flat))
    ends = [*(head.start() for head in heads[1:]), len(flat)]
    found: dict[str, OomMessage] = {}
    for head, end in zip(heads, ends, strict=False):  # without a head there is one end too many
        body = flat[head.start() : min(end, head.start() + _LONGEST)]
        message = _read(head, body)
        if not (head["bare"] or message.tried_bytes is not None or "tried_bytes" in message.impossible):
            continue
        key = repr(message)
        earlier = found.get(key)
        found[key] = message if earlier is None else OomMessage(**{**vars(earlier), "count": earlier.count + 1})
    if not found:
        raise UnreadableError(
            "There is no out-of-memory message in this text.",
            "Paste the line that begins like: CUDA out of memory. Tried to allocate 250.00 MiB. GPU 0 has ...",
        )
    return tuple(found.values())


def _read(head: re.Match[str], body: str) -> OomMessage:
    numbers: dict[str, int | None] = {}
    impossible = []
    for name, patterns in _NUMBERS.items():
        match = next((match for pattern in patterns if (match := re.search(pattern, body))), None)
        if match:
            numbers[name] = _bytes(match[1], match[2])
            if numbers[name] is None:
                impossible.append(name)
    allocated, reserved, unused = (numbers.get(name) for name in ("allocated_bytes", "reserved_bytes", "unused_bytes"))
    if reserved is None and allocated is not None and unused is not None:
        numbers["reserved_bytes"] = allocated + unused
    elif unused is None and allocated is not None and reserved is not None:
        numbers["unused_bytes"] = max(reserved - allocated, 0)
    device = _DEVICE.search(body)
    backend = "CPU" if head["cpu"] else "CUDA" if head["bare"] else head["backend"].removesuffix(" backend")
    return OomMessage(
        backend=backend,
        device_index=int(device[1]) if device else None,
        impossible=tuple(impossible),
        processes=tuple((int(match[1]), _bytes(match[2], match[3])) for match in _PROCESS.finditer(body)),
        text=body,
        **numbers,  # type: ignore[arg-type]
    )


def _bytes(number: str, unit: str) -> int | None:
    size = int(float(number.replace(",", "")) * _UNITS[unit])
    return None if size >= _UNDERFLOW else size


def _too_big(message: OomMessage) -> str:
    tried, total = message.tried_bytes, message.allowed_bytes or message.total_bytes
    if tried is None or total is None or tried <= total:
        return ""
    return (
        f"The request alone ({format_bytes(tried)}) is larger than the device ({format_bytes(total)}): "
        "look at the shape that asks for it; no setting helps."
    )


def _in_pieces(message: OomMessage) -> str:
    tried, unused = message.tried_bytes, message.unused_bytes
    if tried is None or unused is None or unused < tried or message.backend in ("CPU", "MPS"):
        return ""
    variable = {"HIP": "PYTORCH_HIP_ALLOC_CONF"}.get(message.backend, "PYTORCH_CUDA_ALLOC_CONF")
    return (
        f"Fragmentation: {format_bytes(unused)} lay free in the cache, more than the {format_bytes(tried)} asked for. "
        f"Try PYTORCH_ALLOC_CONF=expandable_segments:True (before torch 2.10: {variable})."
    )


def _nearly(message: OomMessage) -> str:
    tried, unused, free = message.tried_bytes, message.unused_bytes, message.free_bytes
    if tried is None or unused is None or free is None or unused >= tried or unused + free < tried:
        return ""
    return (
        f"Cache and free memory together ({format_bytes(unused + free)}) would have been enough: "
        "expandable_segments:True joins them."
    )


def _crowded(message: OomMessage) -> str:
    if message.processes:
        held = sum(size or 0 for _, size in message.processes)
        listed = ", ".join(str(process) for process, _ in message.processes)
        return f"Other processes hold {format_bytes(held)} of the device (process {listed}): end or move them."
    if message.total_bytes is None or message.free_bytes is None:
        return ""
    own = message.process_bytes if message.process_bytes is not None else message.reserved_bytes
    if own is None or "process_bytes" in message.impossible:
        return ""
    rest = message.total_bytes - message.free_bytes - own
    if rest < 1 << 30:
        return ""
    what = (
        "other processes" if message.process_bytes is not None else "other processes, or outside of torch in this one"
    )
    return f"{format_bytes(rest)} of the device is held by {what}: look at nvidia-smi (rocm-smi, xpu-smi)."


def _outside(message: OomMessage) -> str:
    outside = message.non_torch_bytes
    if outside is None or outside < 1 << 30:
        return ""
    return (
        f"{format_bytes(outside)} of this process lies outside of torch's allocator: NCCL buffers, CUDA graphs, "
        "other libraries. Fewer process groups and torch.cuda.empty_cache() before they start leave them room."
    )


def _pools(message: OomMessage) -> str:
    pools = message.private_pool_bytes
    if not pools or pools < 512 << 20:
        return ""
    return f"{format_bytes(pools)} sits in private pools: capture fewer CUDA graphs, or let them share a pool."


def _spilled(message: OomMessage) -> str:
    if message.allocated_bytes is None or message.total_bytes is None or message.allocated_bytes <= message.total_bytes:
        return ""
    return (
        "More is allocated than the device has: the driver (Windows, WSL) had moved memory to the host, which is slow. "
        "Treat the device's total as the limit."
    )


_RULES = (_too_big, _in_pieces, _nearly, _crowded, _outside, _pools, _spilled)


def _fallback(message: OomMessage) -> str:
    if message.tried_bytes is None:
        return (
            "The message carries no numbers: the driver itself ran out, often before torch's allocator was asked "
            "(context, another process). Look at nvidia-smi."
        )
    if message.backend == "CPU":
        return "The host's memory ran out: fewer data loader workers, smaller batches, or more memory."
    return (
        "The device was full of live tensors: a smaller batch, activation checkpointing, or an optimizer with less "
        "state. A memory snapshot shows what holds them: xmem report peak."
    )
