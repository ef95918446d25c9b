"""PYTORCH_ALLOC_CONF text to settings, with the keys, ranges and quirks of each torch version."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True)
class AllocConf:
    """Settings of the allocator; sizes in bytes, None is unlimited.

    `roundup_power2_divisions` has 16 entries, for sizes from 1 MiB, 2 MiB, ... 32 GiB. `ignored` lists keys that torch
    accepts and that do not change a device's memory (host memory, locks).
    """

    backend: str = "native"
    max_split_size: int | None = None
    max_non_split_rounding_size: int = 20 * MIB
    roundup_power2_divisions: tuple[int, ...] = (0,) * 16
    garbage_collection_threshold: float = 0.0
    expandable_segments: bool = False
    large_segment_size: int = 20 * MIB
    per_process_memory_fraction: float = 1.0
    throw_on_cudamalloc_oom: bool = False
    graph_capture_record_stream_reuse: bool = False
    ignored: tuple[str, ...] = ()


def parse_conf(text: str, torch_version: str | None = None, base: AllocConf | None = None) -> AllocConf:
    """Parse `key:value,key:[a:1,b:2]` as the given torch does (default: the newest known).

    `base` is what was in force before, for a change at run time. Raises UsageError with torch's meaning and the valid
    keys.
    """
    raise NotImplementedError
