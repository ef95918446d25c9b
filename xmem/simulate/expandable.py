"""The native allocator with expandable segments: address ranges that grow in place (see mapping)."""

from __future__ import annotations

from xmem.errors import UsageError
from xmem.simulate.allocator import Memory
from xmem.simulate.conf import KEYS, AllocConf, parse_conf
from xmem.simulate.device import as_device
from xmem.simulate.native import Native
from xmem.simulate.torch_version import parse_version


def make(memory: Memory, conf_text: str = "", torch_version: str | None = None) -> Native:
    """Make the native allocator as `expandable_segments:True` starts it; the text may hold every other setting."""
    version = parse_version(torch_version)
    if version < KEYS["expandable_segments"]:
        raise UsageError(f"torch {torch_version} has no expandable segments.", "They came with torch 2.1.")
    conf = parse_conf(conf_text, torch_version, AllocConf(expandable_segments=True))
    return Native(as_device(memory), conf, version)
