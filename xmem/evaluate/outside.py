"""Memory of a GPU that no allocator of PyTorch sees: lines of their own, each with a range and a source."""

from __future__ import annotations

from dataclasses import dataclass

from xmem.units import MIB


@dataclass(frozen=True)
class OutsideLine:
    """One kind of memory outside the allocator, bytes from least to most, and where the range comes from.

    `always` says that any job on one GPU has it.
    """

    name: str
    least_bytes: int
    most_bytes: int
    source: str
    always: bool = False


def outside_lines(non_torch_bytes: int) -> tuple[OutsideLine, ...]:
    """Return what an estimate for one GPU leaves outside reserved; `non_torch_bytes` is what the verdict takes off."""
    return (
        OutsideLine(
            "CUDA context and kernels",
            256 * MIB,
            500 * MIB,
            "reports for CUDA 12 and later: 256 MiB (RTX 3090), 426 MiB (RTX 6000 Ada); older ones up to 1 GiB",
            always=True,
        ),
        OutsideLine(
            "kernel modules loaded while training",
            0,
            40 * MIB,
            "device memory less reserved memory, on 65 measured runs of transformers",
            always=True,
        ),
        OutsideLine(
            "communication buffers (NCCL), only with several GPUs",
            0,
            688 * MIB,
            "reports of 544 MiB with two ranks and 688 MiB with more, for each communicator",
        ),
        OutsideLine("taken off the GPU in this verdict", non_torch_bytes, non_torch_bytes, "--non-torch"),
    )
