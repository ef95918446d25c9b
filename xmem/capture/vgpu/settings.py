"""What a run on a virtual card is asked for, and the environment that carries it to the driver and the recorder."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from xmem.capture.vgpu.cards import Card, cudnn_description
from xmem.capture.vgpu.library import DRIVER, NVML
from xmem.capture.vgpu.torch_facts import TorchFacts
from xmem.errors import UsageError
from xmem.units import GIB, MIB

BOOTSTRAP = Path(__file__).parent / "bootstrap"
ADDRESSES = ("down", "up")
#: What `cudnn.benchmark` finds quickest: the first of cuDNN's heuristics, or the engine with the largest workspace.
BENCHMARKS = ("typical", "worst")
#: Outside the allocator, for each communicator of several ranks: reports of 544 MiB with two ranks (nccl#964).
COMMUNICATOR_BYTES = 544 * MIB
DEFAULT_NON_TORCH_BYTES = 4 * GIB // 10
_DRIVER_VERSIONS = {12: 12080, 13: 13000}


@dataclass(frozen=True)
class VirtualGpu:
    """The card, its memory, what of it is never free, and how many there are."""

    card: Card
    total_bytes: int
    taken_bytes: int = DEFAULT_NON_TORCH_BYTES
    devices: int = 1
    addresses: str = "down"
    communicator_bytes: int = COMMUNICATOR_BYTES
    benchmark: str = "typical"

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        if not 1 <= self.devices <= 16:
            raise UsageError(f"There can be 1 to 16 virtual cards, not {self.devices}.")
        if self.addresses not in ADDRESSES:
            raise UsageError(f"Addresses go {' or '.join(ADDRESSES)}, not {self.addresses!r}.")
        if self.benchmark not in BENCHMARKS:
            raise UsageError(f"cudnn.benchmark has a {' or a '.join(BENCHMARKS)} winner, not {self.benchmark!r}.")
        if self.taken_bytes >= self.total_bytes:
            raise UsageError(f"{self.taken_bytes} bytes outside PyTorch leave nothing of {self.total_bytes}.")


@dataclass(frozen=True)
class Recording:
    """Where a run's recording goes and when the run ends."""

    folder: Path
    steps: int = 3
    timeout_s: int = 300
    sandbox: bool = False


def make_environment(
    gpu: VirtualGpu, torch: TorchFacts, library: Path, recording: Recording, base: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the environment of the job's processes; only they see the virtual card."""
    environment = {key: value for key, value in base.items() if not key.startswith("XMEM_VGPU_")}
    environment |= _card_settings(gpu, torch)
    environment |= {
        "XMEM_VGPU_FOLDER": str(recording.folder),
        "XMEM_VGPU_STEPS": str(recording.steps),
        "XMEM_VGPU_DEADLINE": str(time.monotonic() + recording.timeout_s),
        "XMEM_VGPU_RUNNER": str(os.getpid()),
        "XMEM_VGPU_SANDBOX": "1" if recording.sandbox else "",
        "TRITON_LIBCUDA_PATH": str(library),
        "LD_PRELOAD": ":".join([str(library / DRIVER), str(library / NVML), *_kept(environment, "LD_PRELOAD")]),
        "PYTHONPATH": os.pathsep.join([str(BOOTSTRAP), *_kept(environment, "PYTHONPATH")]),
        "CUDA_MODULE_LOADING": "LAZY",
    }
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    return environment


def _kept(environment: Mapping[str, str], name: str) -> list[str]:
    return [environment[name]] if environment.get(name) else []


def _card_settings(gpu: VirtualGpu, torch: TorchFacts) -> dict[str, str]:
    card = gpu.card
    threads, blocks, shared, optin = card.limits
    major, minor = card.compute_capability.split(".")
    settings: dict[str, object] = {
        "NAME": f"NVIDIA {card.name}",
        "BYTES": gpu.total_bytes,
        "TAKEN_BYTES": gpu.taken_bytes,
        "DEVICES": gpu.devices,
        "ADDRESSES": gpu.addresses,
        "BENCHMARK": gpu.benchmark,
        "COMMUNICATOR_BYTES": gpu.communicator_bytes,
        "MAJOR": major,
        "MINOR": minor,
        "MULTIPROCESSORS": card.multiprocessors,
        "SM_CLOCK_KHZ": card.sm_clock_khz,
        "MEMORY_CLOCK_KHZ": card.memory_clock_khz,
        "BUS_BITS": card.bus_bits,
        "L2_BYTES": card.l2_bytes,
        "THREADS_PER_SM": threads,
        "BLOCKS_PER_SM": blocks,
        "SHARED_PER_SM": shared,
        "SHARED_PER_BLOCK_OPTIN": optin,
        "CUDNN": cudnn_description(card, gpu.total_bytes, _DRIVER_VERSIONS[torch.cuda_major]),
    }
    return {f"XMEM_VGPU_{name}": str(value) for name, value in settings.items()}
