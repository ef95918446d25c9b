"""The GPU table and what `--gpu` means: a name, a size with a unit, or a bare number."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources

from xmem.errors import UsageError
from xmem.units import format_bytes, parse_bytes

#: A bare number below this is GiB, from here on bytes.
BARE_BYTES_FROM = 1_000_000
_BARE = re.compile(r"[0-9][0-9_]*(?:\.[0-9]+)?")


@dataclass(frozen=True)
class Figure:
    """One total that torch or the driver reported for a GPU of this name, and where."""

    bytes: int
    source: str


@dataclass(frozen=True)
class Gpu:
    """A GPU: `bytes` is the least of its `figures` (driver, ECC and Windows change them)."""

    name: str
    aliases: tuple[str, ...]
    bytes: int
    memory: str
    compute_capability: str
    multiprocessors: int | None
    figures: tuple[Figure, ...]


@dataclass(frozen=True)
class Target:
    """What `--gpu` stands for: its total in bytes, how it was read, and the table's entry where it is a name."""

    text: str
    total_bytes: int
    note: str
    gpu: Gpu | None = None


@cache
def gpus() -> tuple[Gpu, ...]:
    """Return the GPU table, in its own order."""
    text = resources.files("xmem.simulate").joinpath("gpus.csv").read_text(encoding="utf-8")
    grouped: dict[str, list[dict[str, str]]] = {}
    for row in csv.DictReader(text.splitlines()):
        grouped.setdefault(row["name"], []).append(row)
    return tuple(_gpu(name, rows) for name, rows in grouped.items())


def find_gpu(text: str) -> Gpu | None:
    """Return the GPU of this name or alias; case, blanks, dashes and the maker's name do not matter."""
    return _index().get(_normalise(text))


def parse_gpu(gpu: str | int) -> Target:
    """Read what stands after `--gpu`; raise UsageError with near matches where it means nothing."""
    text = str(gpu).strip()
    if _BARE.fullmatch(text):
        return _bare(text)
    found = find_gpu(text)
    if found is not None:
        return Target(text, found.bytes, _name_note(text, found), found)
    if re.match(r"[0-9.]", text):
        total = parse_bytes(text, what="--gpu")
        return _positive(Target(text, total, f"{text} is {total} bytes of total memory."))
    near = _near(text)
    hint = f"Did you mean {', '.join(near)}? " if near else ""
    raise UsageError(
        f"There is no GPU {text!r} in the table.", f"{hint}xmem gpus lists all; or give its memory: --gpu 23.6GiB."
    )


def _bare(text: str) -> Target:
    if float(text.replace("_", "")) >= BARE_BYTES_FROM:
        total = parse_bytes(text, what="--gpu")
        return Target(text, total, f"{text} is read as bytes of total memory.")
    total = parse_bytes(f"{text}GiB", what="--gpu")
    namesake = [gpu.name for gpu in gpus() if re.search(rf"\b{re.escape(text)}\b", gpu.name)] if len(text) > 3 else []
    also = f" For the card of that number write one of: {', '.join(namesake)}." if namesake else ""
    return _positive(Target(text, total, f"{text} is read as {text} GiB ({total} bytes) of total memory.{also}"))


def _positive(target: Target) -> Target:
    if target.total_bytes <= 0:
        raise UsageError(f"--gpu {target.text!r} is no memory at all.", "Write it like 24, 23.6GiB or rtx4090.")
    return target


def _name_note(text: str, gpu: Gpu) -> str:
    least = min(gpu.figures, key=lambda figure: figure.bytes)
    several = f", the least of {len(gpu.figures)} reported figures" if len(gpu.figures) > 1 else ""
    asked = _normalise(text)
    others = [
        other.aliases[0]
        for other in gpus()
        if other.name != gpu.name and abs(other.bytes - gpu.bytes) > gpu.bytes // 20
        and other.aliases and re.fullmatch(rf"{re.escape(asked)}\d+", _normalise(other.aliases[0]))
    ]  # fmt: skip
    is_alias = bool(gpu.aliases) and _normalise(gpu.aliases[0]) == asked
    also = f" Other kinds: {', '.join(others)}." if others and is_alias else ""
    return f"{text} is {gpu.name}: {gpu.bytes} bytes ({format_bytes(gpu.bytes)}; {least.source}{several}).{also}"


def _near(text: str) -> list[str]:
    from difflib import get_close_matches

    asked = _normalise(text)
    written = {_normalise(alias): alias for gpu in gpus() for alias in (gpu.name, *gpu.aliases[:1])}
    starting = [written[key] for key in written if asked and (key.startswith(asked) or asked.startswith(key))]
    close = [written[key] for key in get_close_matches(asked, written, n=4, cutoff=0.6)]
    return list(dict.fromkeys([*close, *starting]))[:4]


def _normalise(text: str) -> str:
    plain = re.sub(r"[^a-z0-9.]", "", text.lower())
    return re.sub(r"^(nvidia|amd)?(tesla|geforce|quadro|instinct)?", "", plain)


@cache
def _index() -> dict[str, Gpu]:
    return {_normalise(name): gpu for gpu in reversed(gpus()) for name in (*gpu.aliases, gpu.name)}


def _gpu(name: str, rows: list[dict[str, str]]) -> Gpu:
    first = rows[0]
    return Gpu(
        name=name,
        aliases=tuple(alias for alias in first["aliases"].split("|") if alias),
        bytes=min(int(row["bytes"]) for row in rows),
        memory=first["memory"],
        compute_capability=first["compute_capability"],
        multiprocessors=int(first["multiprocessors"]) if first["multiprocessors"] else None,
        figures=tuple(Figure(int(row["bytes"]), row["source"]) for row in rows),
    )
