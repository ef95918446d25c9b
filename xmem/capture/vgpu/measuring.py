"""Measures what a job takes of its card from outside PyTorch: NVML's count of the device, sampled while it runs."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

#: Between two samples.
_PAUSE_S = 0.002
_LIBRARY = "libnvidia-ml.so.1"


class _MemoryInfo(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class DeviceMemory:
    """Samples the memory in use on the current card; the first sample is taken when the context is there."""

    def __init__(self) -> None:
        import torch

        torch.empty(1, device="cuda")
        torch.cuda.empty_cache()
        self.about = torch.cuda.get_device_properties(torch.cuda.current_device())
        self.library = ctypes.CDLL(_LIBRARY)
        self.handle = ctypes.c_void_p()
        place = f"{self.about.pci_domain_id:08x}:{self.about.pci_bus_id:02x}:{self.about.pci_device_id:02x}.0"
        self._check(self.library.nvmlInit_v2())
        self._check(self.library.nvmlDeviceGetHandleByPciBusId_v2(place.encode(), ctypes.byref(self.handle)))
        self.first_bytes = self.peak_bytes = self.sample()
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._go_on, daemon=True)
        self.thread.start()

    def _check(self, status: int) -> None:
        if status:
            raise RuntimeError(f"NVML cannot be asked for the card's memory (status {status})")

    def sample(self) -> int:
        """Return the bytes in use on the whole card now."""
        info = _MemoryInfo()
        self._check(self.library.nvmlDeviceGetMemoryInfo(self.handle, ctypes.byref(info)))
        return int(info.used)

    def _go_on(self) -> None:
        while not self.over.wait(_PAUSE_S):
            self.peak_bytes = max(self.peak_bytes, self.sample())

    def finish(self) -> dict[str, Any]:
        """Take the last sample and return what was measured, with what the card and torch say of themselves."""
        import torch

        self.over.set()
        self.thread.join()
        return {
            "gpu_name": self.about.name,
            "total_gpu_memory": self.about.total_memory,
            "first_sample_bytes": self.first_bytes,
            "peak_bytes": max(self.peak_bytes, self.sample()),
            "torch_version": str(torch.__version__),
            "cudnn_version": torch.backends.cudnn.version(),
        }
