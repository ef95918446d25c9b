"""PYTORCH_ALLOC_CONF text to settings, with the keys, ranges and quirks of each torch version."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from xmem.errors import UsageError
from xmem.simulate.torch_version import Version, parse_version

MIB = 1 << 20
_SIZE_MAX = (1 << 64) - 1
_TABLE_ENTRIES = 16

#: Keys and the first torch that knows them (2.0 and before: 1.13).
KEYS: dict[str, Version] = {
    "max_split_size_mb": (1, 13),
    "roundup_power2_divisions": (1, 13),
    "garbage_collection_threshold": (1, 13),
    "backend": (2, 0),
    "expandable_segments": (2, 1),
    "release_lock_on_cudamalloc": (2, 3),
    "pinned_use_cuda_host_register": (2, 3),
    "pinned_num_register_threads": (2, 3),
    "max_non_split_rounding_mb": (2, 6),
    "pinned_use_background_threads": (2, 6),
    "graph_capture_record_stream_reuse": (2, 9),
    "per_process_memory_fraction": (2, 10),
    "pinned_reserve_segment_size_mb": (2, 10),
    "large_segment_size_mb": (2, 11),
    "throw_on_cudamalloc_oom": (2, 12),
    "pinned_free_catch_all": (2, 12),
    "pinned_max_round_threshold_mb": (2, 13),
    "pinned_max_cached_size_mb": (2, 13),
}
#: Keys that torch reads in a second pass, after all others were found to be right (2.10 and later).
_SECOND_PASS = frozenset(
    ("backend", "release_lock_on_cudamalloc", "graph_capture_record_stream_reuse", "per_process_memory_fraction")
) | {key for key in KEYS if key.startswith(("pinned_", "throw_"))}
_BOOLEANS = frozenset(
    (
        "expandable_segments",
        "release_lock_on_cudamalloc",
        "graph_capture_record_stream_reuse",
        "throw_on_cudamalloc_oom",
    )
) | {"pinned_use_cuda_host_register", "pinned_use_background_threads", "pinned_free_catch_all"}


@dataclass(frozen=True)
class AllocConf:
    """Settings of the allocator; sizes in bytes, None is unlimited.

    `roundup_power2_divisions` has 16 entries, for sizes from 1 MiB, 2 MiB, ... 32 GiB. `ignored` lists keys that torch
    accepts and that do not change a device's memory (host memory, locks).
    """

    backend: str = "native"
    max_split_size: int | None = None
    max_non_split_rounding_size: int = 20 * MIB
    roundup_power2_divisions: tuple[int, ...] = (0,) * _TABLE_ENTRIES
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
    conf, error = apply_conf(text, parse_version(torch_version), base)
    if error is not None:
        raise error
    return conf


def apply_conf(text: str, version: Version, base: AllocConf | None) -> tuple[AllocConf, UsageError | None]:
    """Parse like `parse_conf`, but return what is in force afterwards: keys before an error stay set."""
    reader = _Reader(_tokens(text, version), version, base or AllocConf())
    try:
        reader.read_all()
    except UsageError as error:
        return reader.conf(), error
    return reader.conf(), None


def variable_names(version: Version) -> tuple[str, ...]:
    """Return the environment variables that set the allocator on a CUDA build; the first that is set counts."""
    if version < (2, 10):
        return ("PYTORCH_CUDA_ALLOC_CONF",)
    return ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def conf_text_from(environment: Mapping[str, str], version: Version) -> str:
    """Return the settings text that torch would read from an environment, "" where none is set."""
    return next((environment[name] for name in variable_names(version) if name in environment), "")


def _tokens(text: str, version: Version) -> list[str]:
    blank = r"\s+" if version >= (2, 10) else " +"
    return re.findall(r"[,:\[\]]|[^,:\[\]]+", re.sub(blank, "", text))


@dataclass
class _Reader:
    """Reads the tokens once (twice from 2.10 on) and collects what they set."""

    tokens: list[str]
    version: Version
    base: AllocConf
    at: int = 0
    values: dict[str, Any] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)

    @property
    def strict(self) -> bool:
        """Up to 2.9 separators are checked."""
        return self.version < (2, 10)

    def conf(self) -> AllocConf:
        """Return the settings in force after what was read, with the reset that every parse begins with."""
        large = self.values.get("large_segment_size", self.base.large_segment_size)
        reset = {
            "max_split_size": None, "max_non_split_rounding_size": large, "garbage_collection_threshold": 0.0,
            "roundup_power2_divisions": (0,) * _TABLE_ENTRIES, "ignored": tuple(dict.fromkeys(self.ignored)),
        }  # fmt: skip
        return replace(self.base, **(reset | self.values))

    def read_all(self) -> None:
        """Read every key in torch's order."""
        if self.version >= (2, 11) and "large_segment_size_mb" in self.tokens:
            self._read_keys(lambda key: key == "large_segment_size_mb", skip_unknown=True)
        if self.strict:
            self._read_keys(lambda key: True)
        else:
            self._read_keys(lambda key: key not in _SECOND_PASS)
            self._read_keys(lambda key: key in _SECOND_PASS)

    def _read_keys(self, wanted: Any, *, skip_unknown: bool = False) -> None:
        self.at = 0
        while self.at < len(self.tokens):
            key = self.tokens[self.at]
            if KEYS.get(key, (99, 0)) > self.version:
                if not skip_unknown:
                    raise self._error(f"torch {_name(self.version)} does not know the key {key!r}")
                self.at += 1
                continue
            self.at += 1
            self._separator(":")
            if wanted(key):
                self._read_value(key)
            else:
                self._skip_value()
            if self.at < len(self.tokens):
                self._separator(",")

    def _read_value(self, key: str) -> None:
        if key == "roundup_power2_divisions":
            self.values[key] = self._divisions()
            return
        text = self._next(key)
        if key in _BOOLEANS:
            self._set_boolean(key, text)
        elif key == "backend":
            self._set_backend(text)
        elif key in ("garbage_collection_threshold", "per_process_memory_fraction"):
            self._set_share(key, self._decimal(key, text))
        else:
            self._set_number(key, self._integer(key, text))

    def _set_boolean(self, key: str, text: str) -> None:
        if text not in ("True", "False"):
            raise self._error(f"{key} takes True or False, not {text!r}")
        if key in AllocConf.__dataclass_fields__:
            self.values[key] = text == "True"
        else:
            self.ignored.append(key)

    def _set_backend(self, text: str) -> None:
        if text not in ("native", "cudaMallocAsync"):
            raise self._error(f"backend is native or cudaMallocAsync, not {text!r}")
        self.values["backend"] = text

    def _set_share(self, key: str, share: float) -> None:
        if key == "garbage_collection_threshold" and not 0.0 < share < 1.0:
            raise self._error(f"{key} must lie between 0 and 1, both excluded; it is {share}")
        if key == "per_process_memory_fraction" and not 0.0 <= share <= 1.0:
            raise self._error(f"{key} must lie between 0 and 1; it is {share}")
        self.values[key] = share

    def _set_number(self, key: str, number: int) -> None:
        large = self.values.get("large_segment_size", self.base.large_segment_size) // MIB
        least = {
            "max_split_size_mb": large + (1 if self.strict else 0),
            "max_non_split_rounding_mb": large + (1 if self.strict else 0),
            "large_segment_size_mb": 11,
            "pinned_reserve_segment_size_mb": 1,
        }.get(key, 0)
        if number < least:
            raise self._error(f"{key} must be at least {least}; it is {number}")
        if key == "pinned_num_register_threads" and (number.bit_count() != 1 or number > 128):
            raise self._error(f"{key} must be a power of two up to 128; it is {number}")
        size = min(number, _SIZE_MAX // MIB) * MIB
        name = {"max_split_size_mb": "max_split_size", "max_non_split_rounding_mb": "max_non_split_rounding_size",
                "large_segment_size_mb": "large_segment_size"}.get(key)  # fmt: skip
        if name is None:
            self.ignored.append(key)
        else:
            self.values[name] = size

    def _divisions(self) -> tuple[int, ...]:
        key = "roundup_power2_divisions"
        text = self._next(key)
        if text != "[":
            count = self._integer(key, text)
            if count.bit_count() != 1:
                raise self._error(f"{key} must be a power of two; it is {count}")
            return (count,) * _TABLE_ENTRIES
        self.values[key] = table = [0] * _TABLE_ENTRIES
        last, first = 0, True
        while (bound := self._next(key)) != "]":
            self._separator(":")
            index = last if bound == ">" else self._index(key, bound)
            count = self._integer(key, self._next(key))
            if count & (count - 1):
                raise self._error(f"{key}: divisions must be 0 or a power of two; one is {count}")
            if bound == ">":  # up to 2.9 this also overwrote the last entry listed
                table[last + (0 if self.strict else 1) :] = [count] * len(table[last + (0 if self.strict else 1) :])
            else:
                for filled in range(0 if first else index, index + 1):
                    table[filled] = count
                last, first = index, False
            if self.at < len(self.tokens) and self.tokens[self.at] != "]":
                self._separator(",")
        return tuple(table)

    def _index(self, key: str, text: str) -> int:
        bound = self._integer(key, text)
        if bound.bit_count() != 1:
            raise self._error(f"{key}: bounds must be powers of two, in MiB; one is {bound}")
        return min(bound.bit_length() - 1, _TABLE_ENTRIES - 1)

    def _next(self, key: str) -> str:
        if self.at >= len(self.tokens):
            raise self._error(f"{key} ends before its value does")
        self.at += 1
        return self.tokens[self.at - 1]

    def _skip_value(self) -> None:
        if self.at < len(self.tokens) and self.tokens[self.at] == "[":
            while self.at < len(self.tokens) and self.tokens[self.at] != "]":
                self.at += 1
        self.at += 1

    def _separator(self, expected: str) -> None:
        if self.strict and (self.at >= len(self.tokens) or self.tokens[self.at] != expected):
            raise self._error(f"expected {expected!r} after {self.tokens[self.at - 1]!r}")
        self.at += 1

    def _integer(self, key: str, text: str) -> int:
        match = re.match(r"[+-]?\d+", text)
        if match is None or abs(int(match[0])) > _SIZE_MAX:
            raise self._error(f"{key} takes a whole number, not {text!r}")
        return int(match[0]) % (1 << 64)  # torch reads an unsigned number, so -1 wraps to the largest

    def _decimal(self, key: str, text: str) -> float:
        match = re.match(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|[+-]?(nan|inf)", text, re.IGNORECASE)
        if match is None:
            raise self._error(f"{key} takes a decimal number, not {text!r}")
        return float(match[0])

    def _error(self, problem: str) -> UsageError:
        known = ", ".join(sorted(key for key, since in KEYS.items() if since <= self.version))
        return UsageError(f"PYTORCH_ALLOC_CONF: {problem}.", f"Keys of torch {_name(self.version)}: {known}.")


def _name(version: Version) -> str:
    return f"{version[0]}.{version[1]}"
