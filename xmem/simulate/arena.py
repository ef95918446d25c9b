"""One growing pool with best fit, as the BFC arenas of TensorFlow and XLA behave.

Rules from TensorFlow's bfc_allocator.cc and .h (as of 2.4): sizes in units of 256 bytes; the smallest free chunk that
fits, the lowest address first; a rest is split off where it is as big as the request, or 128 MiB; a new region of 2 MiB
or more, doubled for each next one; once, where the device refuses, regions shrink by a tenth until it does not; before
an error, unused regions go back (TF_ENABLE_GPU_GARBAGE_COLLECTION). Without allow_growth the first region is all.
"""

from __future__ import annotations

from xmem.errors import UsageError
from xmem.simulate.allocator import DEFAULT_POOL, Memory, OutOfMemory, PoolId, Stats
from xmem.simulate.device import as_device
from xmem.simulate.regions import Regions

UNIT = 256
FIRST_REGION = 2 << 20
SHRINK = 0.9
_KEYS = ("allow_growth", "memory_fraction", "garbage_collection")


def make(memory: Memory, conf_text: str = "", torch_version: str | None = None) -> Arena:
    """Make an arena; settings are `allow_growth:True,memory_fraction:1.0,garbage_collection:True` (the defaults)."""
    del torch_version  # no torch in it
    return Arena(memory, *_parse(conf_text))


class Arena:
    """The allocator. Streams share it: a chunk may be reused as soon as it is freed."""

    def __init__(self, memory: Memory, allow_growth: bool, fraction: float, garbage_collection: bool) -> None:
        self._regions = Regions(memory)
        self._limit = int(as_device(memory).free_bytes * fraction) // UNIT * UNIT
        self._next_region = _round(min(self._limit, FIRST_REGION)) if allow_growth else self._limit
        self._collects = garbage_collection
        self._shrunk = False
        self.levels = self._regions.levels

    def alloc(self, size: int, *, stream: int = 0, pool: PoolId = DEFAULT_POOL) -> int:
        """Return the address of a chunk of `size` bytes or more, 0 for size 0; raise OutOfMemory."""
        del stream, pool
        if size == 0:
            return 0
        rounded = _round(size)
        address = self._regions.take(rounded, size, None)
        if address is None and (self._extend(rounded) or (self._collect(rounded) and self._extend(rounded))):
            address = self._regions.take(rounded, size, None)
        if address is None:
            self._regions.num_ooms += 1
            free = self._limit - self._regions.reserved_bytes
            raise OutOfMemory(size, rounded_bytes=rounded, device_free_bytes=free, limit_bytes=self._limit)
        return address

    def free_requested(self, address: int) -> None:
        """Free the chunk at `address`; 0 is ignored."""
        if address:
            self._regions.give(address)

    def free_completed(self, address: int) -> None:
        """Do nothing: a free is complete at once."""

    def record_stream(self, address: int, stream: int) -> None:
        """Do nothing: all streams share the arena."""

    def empty_cache(self) -> None:
        """Give regions without a live chunk back."""
        self._regions.release_unused()

    def stats(self) -> Stats:
        """What is held now, and the peaks."""
        return self._regions.stats()

    def _extend(self, rounded: int) -> bool:
        available = self._limit - self._regions.reserved_bytes
        if rounded > available:
            return False
        doubled = False
        while rounded > self._next_region:
            self._next_region *= 2
            doubled = True
        if not self._add(min(self._next_region, available)) and not self._shrink(rounded, available):
            return False
        if not doubled:
            self._next_region *= 2
        return True

    def _shrink(self, rounded: int, available: int) -> bool:
        """Try ever smaller regions; only the first refusal of the device leads here."""
        size, self._shrunk = 0 if self._shrunk else _round(int(min(self._next_region, available) * SHRINK)), True
        while size >= rounded:
            if self._add(size):
                return True
            size = min(_round(int(size * SHRINK)), size - UNIT)
        return False

    def _add(self, size: int) -> bool:
        try:
            self._regions.add(size)
        except OutOfMemory:
            return False
        return True

    def _collect(self, rounded: int) -> bool:
        unused = self._regions.unused_bytes
        if not self._collects or unused == 0 or rounded > self._limit - self._regions.reserved_bytes + unused:
            return False
        self._regions.release_unused()
        return True


def _round(size: int) -> int:
    return -(-size // UNIT) * UNIT


def _parse(text: str) -> tuple[bool, float, bool]:
    values = {"allow_growth": "True", "memory_fraction": "1.0", "garbage_collection": "True"}
    for part in filter(None, text.replace(" ", "").split(",")):
        key, _, value = part.partition(":")
        if key not in values:
            raise UsageError(f"The arena has no setting {key!r}.", f"Its settings: {', '.join(_KEYS)}.")
        values[key] = value
    for key in ("allow_growth", "garbage_collection"):
        if values[key] not in ("True", "False"):
            raise UsageError(f"{key} takes True or False, not {values[key]!r}.")
    try:
        fraction = float(values["memory_fraction"])
    except ValueError:
        fraction = 0.0
    if not 0.0 < fraction <= 1.0:
        raise UsageError(f"memory_fraction lies between 0 and 1; {values['memory_fraction']!r} does not.")
    return values["allow_growth"] == "True", fraction, values["garbage_collection"] == "True"
