"""What a simulation can be told besides the run and the GPU."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

from xmem.errors import UsageError
from xmem.units import parse_bytes

#: CUDA context and kernels of CUDA 12 and newer take about 0.3 to 0.5 GiB that no allocator sees.
DEFAULT_NON_TORCH = "0.4GiB"


@dataclass(frozen=True)
class SimulateOptions:
    """Options of `simulate`; None means what the run itself says, else the default.

    `non_torch` and `headroom` are bytes or text such as "0.4GiB"; `headroom` may be a share of the total, "5%".
    `device` is written like "cuda:0". `cpu_to_gpu` turns a CPU recording into the requests of a GPU by named rules.
    `smallest` searches the smallest device that runs. `keep` writes the simulation_* tables into the store.
    """

    non_torch: str | int | None = None
    headroom: str | int = 0
    allocator: str = "native"
    alloc_conf: str | None = None
    torch_version: str | None = None
    device: str | None = None
    rank: int | None = None
    requests_sql: str | None = None
    cpu_to_gpu: bool = True
    smallest: bool = True
    keep: bool = True


@dataclass(frozen=True)
class Reserve:
    """Memory of a GPU that the allocator cannot have: non-torch memory, and headroom in bytes or in per cent."""

    non_torch_bytes: int
    headroom_bytes: int = 0
    headroom_percent: Decimal = Decimal(0)

    def headroom(self, total_bytes: int) -> int:
        """Return the headroom on a device of `total_bytes`; a share is rounded up to whole bytes."""
        share = self.headroom_percent * total_bytes / 100
        return self.headroom_bytes + int(share.to_integral_value(rounding="ROUND_CEILING"))

    def usable(self, total_bytes: int) -> int:
        """Return what the allocator may reserve on a device of `total_bytes`, never below 0."""
        return max(0, total_bytes - self.non_torch_bytes - self.headroom(total_bytes))

    def total_for(self, usable_bytes: int) -> int:
        """Return the smallest total that leaves `usable_bytes` usable."""
        rest = usable_bytes + self.non_torch_bytes + self.headroom_bytes
        total = int(Decimal(rest) / (1 - self.headroom_percent / 100))
        while self.usable(total) < usable_bytes:
            total += 1
        return total


def parse_reserve(options: SimulateOptions, default_non_torch: str = DEFAULT_NON_TORCH) -> Reserve:
    """Read `non_torch` and `headroom` of the options; raise UsageError where they are not sizes."""
    non_torch = default_non_torch if options.non_torch is None else options.non_torch
    headroom = str(options.headroom).strip()
    if not headroom.endswith("%"):
        return Reserve(parse_bytes(str(non_torch), what="--non-torch"), parse_bytes(headroom, what="--headroom"))
    try:
        percent = Decimal(headroom[:-1].strip())
    except InvalidOperation:
        percent = Decimal(-1)
    if not 0 <= percent < 100:
        raise UsageError(f"--headroom {headroom!r} is not a share of the GPU.", "Write it like 5% or 1GiB.")
    return Reserve(parse_bytes(str(non_torch), what="--non-torch"), headroom_percent=percent)
