"""Turns what the recorder wrote in a job's processes into event logs, one for each process that used a virtual card."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Line = dict[str, Any]
SUFFIX = ".xmem.jsonl.gz"
_OPTIMIZER, _BACKWARD, _FORWARD = "optimizer", "backward", "forward"
#: The frame of a module's call, in a file of this end.
_MODULE_CALL, _MODULE_FILE = "_call_impl", "torch/nn/modules/module.py"
#: Phase from a mark on.
_PHASES = {"optimizer": _OPTIMIZER, "backward": _BACKWARD, "after_backward": _FORWARD, "step": _FORWARD}


@dataclass
class Part:
    """All lines that one process wrote, put together."""

    header: Line
    rank: int | None = None
    status: str = "killed"
    entries: dict[int, list[Any]] = field(default_factory=dict)
    stacks: list[Any] = field(default_factory=list)
    marks: list[Any] = field(default_factory=list)
    stats: dict[int, dict[str, int]] = field(default_factory=dict)
    unmodelled: list[str] = field(default_factory=list)
    communicators: dict[int, int] = field(default_factory=dict)
    cudnn_calls: int = 0

    def add(self, line: Line) -> None:
        """Take one more line."""
        self.rank = line["rank"] if line["rank"] is not None else self.rank
        self.status = "killed" if line["status"] == "running" else line["status"]
        for device, rows in line["entries"].items():
            self.entries.setdefault(int(device), []).extend(rows)
        self.stacks += line["stacks"]
        self.marks += line["marks"]
        self.stats |= {int(device): stats for device, stats in line["stats"].items()}
        self.unmodelled = line["unmodelled"]
        self.cudnn_calls = line.get("cudnn_calls", 0)
        for device, size in line["communicators"].items():
            self.communicators[int(device)] = max(size, self.communicators.get(int(device), 0))

    @property
    def steps(self) -> int:
        """Optimizer steps that were taken."""
        return max((value for _, _, kind, value in self.marks if kind == "step"), default=0)

    @property
    def out_of_memory(self) -> list[tuple[int, int, int]]:
        """Device, bytes asked for and bytes free of each out-of-memory error."""
        return [(device, value[0], value[2]) for device, _, kind, value in self.marks if kind == "oom"]


def read_parts(folder: Path) -> list[Part]:
    """Read what every process wrote, in order of rank; a line that is cut off costs that line."""
    parts = []
    for file in sorted(folder.glob("part-*.jsonl")):
        lines = list(_lines(file))
        if lines:
            part = Part(lines[0])
            for line in lines[1:]:
                part.add(line)
            parts.append(part)
    parts = [part for part in parts if any(part.entries.values())]
    return sorted(parts, key=lambda part: (part.rank is None, part.rank or 0, part.header["pid"]))


def _lines(file: Path) -> Iterator[Line]:
    with file.open(encoding="utf-8", errors="replace") as text:
        for line in text:
            try:
                yield json.loads(line)
            except ValueError:
                return


def write_log(part: Part, target: Path, facts: Line) -> Path:
    """Write the event log of one process; `facts` goes into its metadata. The file is complete or not there."""
    temporary = target.with_name(f".{target.name}.part")
    with temporary.open("wb") as file, gzip.GzipFile("", "wb", compresslevel=4, fileobj=file, mtime=0) as packed:
        for line in log_lines(part, facts):
            packed.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
    os.replace(temporary, target)
    return target


def write_logs(parts: list[Part], name: str, folder: Path, facts: Line) -> tuple[Path, ...]:
    """Write an event log for each process into a folder; several are told apart by their rank."""
    for number, part in enumerate(parts):
        if part.rank is None and len(parts) > 1:
            part.rank = number
    names = [name if len(parts) == 1 else f"{name}-rank{part.rank}" for part in parts]
    return tuple(write_log(part, folder / f"{own}{SUFFIX}", facts) for part, own in zip(parts, names, strict=True))


def log_lines(part: Part, facts: Line) -> Iterable[Line]:
    """Yield the lines of the event log."""
    metadata = {**facts, "status": part.status, "cudnn_version": part.header["cudnn_version"], "statistics": part.stats}
    metadata["communicator_bytes"] = part.communicators
    yield {
        "xmem": 1,
        "torch_version": part.header["torch_version"],
        "alloc_conf": part.header["alloc_conf"],
        "rank": part.rank or 0,
        "time_base": "index",
        "device_type": "cuda",
        "metadata": metadata,
    }
    for device in sorted(part.entries):
        named = {"name": part.header["device_name"], "total_bytes": facts["total_bytes"]}
        yield {"table": "devices", "device_type": "cuda", "device_index": device, **named}
    for number, *frames in part.stacks:
        named_frames = [{"name": name, "filename": file, "line": line} for name, file, line in frames]
        yield {"table": "stacks", "stack_id": number, "frames": named_frames}
    for device in sorted(part.entries):
        yield from _events(device, part)


def _events(device: int, part: Part) -> Iterator[Line]:
    """Write entries as events, with phase, step and category where marks tell them."""
    in_module = {number for number, *frames in part.stacks if any(map(_calls_module, frames))}
    timeline = _Timeline(sorted((mark[1:] for mark in part.marks if mark[0] == device), key=_position), in_module)
    events = [timeline.take(row) for row in part.entries[device]]
    timeline.finish()
    for event in events:
        event["device_index"] = device
        yield {key: value for key, value in event.items() if value is not None}


def _calls_module(frame: list[Any]) -> bool:
    return bool(frame[0] == _MODULE_CALL and frame[1].endswith(_MODULE_FILE))


def _position(mark: list[Any]) -> int:
    return int(mark[0])


class _Timeline:
    """Walks entries and marks together; what lives where is known at every mark."""

    def __init__(self, marks: list[Any], in_module: set[int]) -> None:
        self.marks = marks
        self.in_module = in_module
        self.next = 0
        self.position = 0
        self.phase: str | None = None
        self.step: int | None = None
        self.live: dict[int, Line] = {}
        self.known: set[int] = set()

    def take(self, row: list[Any]) -> Line:
        """Turn an entry into an event."""
        action, address, size, stream, stack, pool = row[:6]
        if action in ("alloc", "free_requested"):
            self._pass_marks()
            self.position += 1
            if self.step is None and stack in self.in_module:  # the first step begins with the first call of a module
                self.phase, self.step = _FORWARD, 0
        free = row[6] if len(row) > 6 else None
        event: Line = {"action": action, "address": address, "requested_bytes": size, "stream": stream}
        event |= {"pool_id": pool, "stack_id": stack, "phase": self.phase, "step": self.step, "device_free": free}
        if action == "alloc":
            self.live[address] = event
        elif action == "free_requested":
            self._freed(self.live.pop(address, None))
        elif action == "oom":
            event["address"] = None
        return event

    def finish(self) -> None:
        """Take the marks that stand after the last entry."""
        self._pass_marks()

    def _freed(self, event: Line | None) -> None:
        """What came and went within one backward pass is temporary, as far as nobody knows better."""
        if event is not None and event["phase"] == _BACKWARD == self.phase and event["step"] == self.step:
            event.setdefault("category", "temporary")

    def _pass_marks(self) -> None:
        while self.next < len(self.marks) and self.marks[self.next][0] <= self.position:
            _, kind, value = self.marks[self.next]
            self.next += 1
            if kind == "own":
                self._own(*value)
            elif kind in _PHASES:
                if kind == "backward":
                    self._saved_for_backward()
                self.phase = _PHASES[kind]
                self.step = value if kind == "step" else self.step or 0

    def _own(self, category: str, addresses: list[int]) -> None:
        """What a tensor is by identity stands above what was concluded."""
        for event in (self.live[address] for address in addresses if address in self.live):
            if id(event) not in self.known:
                self.known.add(id(event))
                event["category"] = category

    def _saved_for_backward(self) -> None:
        """What a module's forward pass of this step allocated and kept is an activation."""
        for event in self.live.values():
            if (
                event["stack_id"] in self.in_module
                and event["phase"] in (None, _FORWARD)
                and event["step"] == self.step
            ):
                event.setdefault("category", "activation")
