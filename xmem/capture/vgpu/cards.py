"""Cards as data: what a virtual GPU says of itself, and the description of it that cuDNN's heuristics take."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from xmem.errors import UsageError

FOLDER = Path(__file__).parent / "cards"
#: Stands in where only a size is known: its architecture is the commonest of the measured ones.
OTHERWISE = "A100-SXM4-80GB"
_KIB = 1024
#: Threads, blocks and shared memory of a multiprocessor, and shared memory that one block may ask for, in KiB, by
#: compute capability (CUDA C++ Programming Guide, technical specifications per compute capability).
LIMITS = {
    "7.0": (2048, 32, 96, 96), "7.5": (1024, 16, 64, 64), "8.0": (2048, 32, 164, 163), "8.6": (1536, 16, 100, 99),
    "8.7": (1536, 16, 164, 163), "8.9": (1536, 24, 100, 99), "9.0": (2048, 32, 228, 227),
    "10.0": (2048, 32, 228, 227), "10.3": (2048, 32, 228, 227), "12.0": (1536, 24, 100, 99),
}  # fmt: skip


@dataclass(frozen=True)
class Card:
    """One card: memory, compute capability, multiprocessors, clocks, caches, and where the figures come from."""

    name: str
    total_bytes: int
    compute_capability: str
    multiprocessors: int
    sm_clock_khz: int
    memory_clock_khz: int
    l2_bytes: int
    bus_bits: int
    source: str
    aliases: tuple[str, ...] = ()

    @property
    def limits(self) -> tuple[int, int, int, int]:
        """Threads and blocks of a multiprocessor, its shared bytes, and those one block may have."""
        threads, blocks, shared, optin = LIMITS[self.compute_capability]
        return threads, blocks, shared * _KIB, optin * _KIB


@cache
def cards() -> tuple[Card, ...]:
    """Return the cards that xmem ships, by name."""
    return tuple(sorted((read_card(file) for file in FOLDER.glob("*.toml")), key=lambda card: card.name))


def find_card(name: str) -> Card | None:
    """Return the card of this name; case, blanks, dashes and the maker's name do not matter."""
    asked = _plain(name)
    return next((card for card in cards() if asked in map(_plain, (card.name, *card.aliases))), None)


def read_card(path: str | Path) -> Card:
    """Read a card from TOML; raises UsageError that names the field in question."""
    return make_card(read_toml(path, "card"), Path(path).name)


def read_toml(path: str | Path, what: str, hint: str = "") -> dict[str, Any]:
    """Read a file that a person wrote; raises UsageError that says what it was meant to be."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"The {what} {str(path)!r} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"The {what} {Path(path).name} is not TOML: {error}.", hint) from error


def make_card(found: dict[str, Any], where: str) -> Card:
    """Check the fields of a card and make it."""
    kinds = {field.name: field.type for field in fields(Card)}
    for name, kind in kinds.items():
        value = found.get(name, [] if name == "aliases" else None)
        if value is None:
            raise UsageError(f"The card {where} has no {name}.", f"A card needs: {', '.join(kinds)}.")
        wanted = {"str": str, "int": int}.get(str(kind), list)
        if type(value) is not wanted or (isinstance(value, int) and value <= 0):
            raise UsageError(f"The card {where} has {value!r} as {name}.", f"Needed is {wanted.__name__}.")
    unknown = sorted(found.keys() - kinds.keys())
    if unknown:
        raise UsageError(f"The card {where} has the unknown field {unknown[0]!r}.", f"Known are: {', '.join(kinds)}.")
    if found["compute_capability"] not in LIMITS:
        raise UsageError(
            f"The card {where} has compute capability {found['compute_capability']!r}.",
            f"Known are: {', '.join(LIMITS)}.",
        )
    return Card(**{**found, "aliases": tuple(map(str, found.get("aliases", [])))})


def cudnn_description(card: Card, total_bytes: int, driver_version: int) -> str:
    """Describe the card as JSON in the words of cuDNN's device properties (cuDNN 9.8 and later)."""
    threads, blocks, shared, optin = card.limits
    description = {
        "maxGridSize": [2147483647, 65535, 65535],
        "maxBlockSize": [1024, 1024, 64],
        "regsPerBlock": 65536,
        "multiProcessorCount": card.multiprocessors,
        "warpSize": 32,
        "maxSharedMemoryPerBlock": 48 * _KIB,
        "maxSharedMemoryPerBlockOptin": optin,
        "reservedSharedMemoryPerBlock": shared - optin,
        "maxRegistersPerSM": 65536,
        "maxCtasPerSM": blocks,
        "maxThreadsPerBlock": 1024,
        "maxThreadsPerSM": threads,
        "pciDeviceId": 0,
        "isTccDriver": 0,
        "supportCoopLaunch": 1,
        "totalGlobalMem": total_bytes,
        "smClockRateKHz": card.sm_clock_khz,
        "memClockRateKHz": card.memory_clock_khz,
        "l2CacheSize": card.l2_bytes,
        "cudaDeviceId": 0,
        "deviceVer": int(card.compute_capability.replace(".", "")) * 10,
        "driverVer": driver_version,
        "deviceName": f"NVIDIA {card.name}",
    }
    return json.dumps(description)


def _plain(text: str) -> str:
    plain = re.sub(r"[^a-z0-9.]", "", text.lower())
    return re.sub(r"^(nvidia)?(tesla|geforce|quadro)?", "", plain)
