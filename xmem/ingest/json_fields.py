"""Reads the fields of an object that surround a long list, whole or broken."""

from __future__ import annotations

import re

import msgspec

from xmem.ingest.json_repair import REPAIR_LIMIT, find_end, repair_json

_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|(?P<open>[{\[])|(?P<close>[}\]])|(?P<stray>")', re.DOTALL)
_SCALAR = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[^,\]{}\[\s]++', re.DOTALL)
_ERRORS = (msgspec.MsgspecError, RecursionError, ValueError)


def read_fields(text: bytes, known: tuple[str, ...]) -> tuple[dict[str, object], bool]:
    """Read an object; return its fields and whether it was broken.

    What is broken is repaired; where that fails or swallows one of the `known` keys, only those are looked for.
    """
    if not text.strip(b"{} \t\r\n,\0"):
        return {}, False
    try:
        return msgspec.json.decode(text, type=dict[str, object]), False
    except _ERRORS:
        pass
    repaired = repair_json(text) if len(text) <= REPAIR_LIMIT else None
    if repaired is not None and isinstance(repaired[0], dict):
        fields = {str(key): value for key, value in repaired[0].items()}
        if not any(f'"{name}"' in value for value in fields.values() if isinstance(value, str) for name in known):
            return fields, True
    return salvage_fields(text, known), True


def salvage_fields(text: bytes, known: tuple[str, ...]) -> dict[str, object]:
    """Find the values of known keys in a text that is not JSON as a whole."""
    found: dict[str, object] = {}
    for name in known:
        for match in re.finditer(b'"' + re.escape(name.encode()) + rb'"\s*+:\s*+', text):
            end = _end_of_value(text, match.end())
            if end is None:
                continue
            try:
                found[name] = msgspec.json.decode(text[match.end() : end])
                break
            except _ERRORS:
                continue
    return found


def is_top_level(prefix: bytes) -> bool:
    """Say whether the end of `prefix` lies directly in the object that begins it, outside of strings."""
    depth = 0
    for token in _TOKEN.finditer(prefix):
        kind = token.lastgroup
        if kind == "stray":
            return False
        depth += (kind == "open") - (kind == "close")
    return depth == 1


def _end_of_value(text: bytes, start: int) -> int | None:
    if text[start : start + 1] in (b"{", b"["):
        return find_end(text, start)
    scalar = _SCALAR.match(text, start)
    return scalar.end() if scalar and scalar.end() < len(text) else None  # a number at the end may have been cut
