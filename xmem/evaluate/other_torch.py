"""What a run would have reserved under another torch: its requests, once more, through that version's allocator.

Up to torch 2.11 the free block of least address is taken among those of equal size, from 2.13 on that whose segment was
made first. The same requests may therefore lead to other peaks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from xmem.simulate.device import AddressPolicy
from xmem.simulate.options import SimulateOptions

if TYPE_CHECKING:
    from xmem.capture.vgpu.farm import Peaks
    from xmem.capture.vgpu.settings import VirtualGpu
    from xmem.simulate.replay import Encoded


def encode_requests(requests: list[int]) -> Encoded:
    """Turn requests as a run counts them (a size, or -1 - n where the nth is freed) into a replay's columns."""
    import numpy as np

    from xmem.simulate.allocator import ALLOC, DEFAULT_POOL, FREE
    from xmem.simulate.replay import Encoded

    numbers = np.asarray(requests, dtype=np.int64)
    is_alloc = numbers >= 0
    slots = np.where(is_alloc, np.cumsum(is_alloc) - 1, -1 - numbers)
    nowhere = np.zeros(len(numbers), dtype=np.int64)
    codes = np.where(is_alloc, ALLOC, FREE)
    sizes = np.where(is_alloc, numbers, 0)
    return Encoded(codes, slots, sizes, nowhere, nowhere, (DEFAULT_POOL,), int(is_alloc.sum()), 0)


def peaks_under(peaks: Peaks, gpu: VirtualGpu, torch_version: str, addresses: AddressPolicy) -> Peaks:
    """Return the peaks that the requests of a run lead to under another torch.

    A run that ran out of memory has asked for less than the whole job: its own peaks stand.
    """
    from xmem.simulate.simulation import make_setup
    from xmem.simulate.trial import UNLIMITED_BYTES, try_on

    if peaks.oom or not peaks.requests:
        return replace(peaks, requests=[])
    setup, _ = make_setup(SimulateOptions(torch_version=torch_version), torch_version)
    setup = replace(setup, address_policy=addresses)
    encoded = encode_requests(peaks.requests)
    on_device = try_on(encoded, setup, gpu.total_bytes, gpu.taken_bytes)
    stats = (on_device if on_device.fits else try_on(encoded, setup, UNLIMITED_BYTES)).stats
    return replace(
        peaks,
        oom=not on_device.fits,
        peak_reserved_bytes=stats.peak_reserved_bytes,
        peak_allocated_bytes=stats.peak_allocated_bytes,
        num_alloc_retries=stats.num_alloc_retries,
        requests=[],
    )
