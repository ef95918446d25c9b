"""Measures the native allocator: a million requests, every statistic on, and the memory it takes.

Its input are the recorded training cases where the shared data lies beside the repository, else a training loop made
here. Each case is repeated on one allocator; what is live at the end of a repeat is freed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from xmem.simulate.allocator import ALLOC, FREE, OutOfMemory  # noqa: E402 - a script finds its own repository
from xmem.simulate.device import Device  # noqa: E402
from xmem.simulate.native import Native, make  # noqa: E402

CASES = REPOSITORY.parent / "shared" / "data" / "oracle" / "train"
EMPTY_CACHE = -1
GIB = 1 << 30


@dataclass(frozen=True)
class Case:
    """Requests as columns, and what they run on."""

    name: str
    device_bytes: int
    conf: str
    codes: list[int]
    slots: list[int]
    sizes: list[int]


def recorded() -> list[Case]:
    """Read the recorded cases."""
    return [_case(path.stem, json.loads(path.read_bytes())) for path in sorted(CASES.glob("*.json"))]


def made_up() -> list[Case]:
    """Make a training loop with Adam: parameters, activations and gradients of 24 layers, temporaries between."""
    ops: list[dict[str, Any]] = []
    names = iter(range(1 << 30))

    def alloc(size: int) -> int:
        ops.append({"op": "alloc", "id": (name := next(names)), "size": size})
        return name

    def free(name: int) -> None:
        ops.append({"op": "free", "id": name})

    sizes = [size for width in (768, 1024, 512) for size in (4 * width * width, 4 * width, 16 * width * width)] * 8
    state = [alloc(size) for size in sizes for _ in range(3)]
    for _ in range(4):
        kept = []
        for size in sizes:
            temporary = alloc(size // 3 + 100)
            kept.append(alloc(size // 2 + 512))
            free(temporary)
        gradients = []
        for size, activation in zip(reversed(sizes), reversed(kept), strict=True):
            gradients.append(alloc(size))
            free(activation)
        for gradient in gradients:
            free(gradient)
    for name in state:
        free(name)
    return [_case("made_up", {"settings": {"device_bytes": 24 * GIB}, "ops": ops})]


def _case(name: str, case: dict[str, Any]) -> Case:
    codes, slots, sizes, live = [], [], [], {}
    for op in case["ops"]:
        if op["op"] == "alloc":
            live[op["id"]] = slot = len(codes)
            row = (ALLOC, slot, op["size"])
        elif op["op"] == "free":
            if op["id"] not in live:
                continue
            row = (FREE, live.pop(op["id"]), 0)
        else:
            row = (EMPTY_CACHE, 0, 0)
        for column, value in zip((codes, slots, sizes), row, strict=True):
            column.append(value)
    for slot in live.values():
        codes.append(FREE)
        slots.append(slot)
        sizes.append(0)
    settings = case["settings"]
    return Case(name, settings.get("device_bytes", 24 * GIB), settings.get("alloc_conf") or "", codes, slots, sizes)


def chunks(case: Case, count: int, size: int = 1 << 16) -> Iterator[tuple[list[int], list[int], list[int]]]:
    """Repeat a case to `count` requests, in columns of about `size`."""
    at_once = max(1, size // len(case.codes))
    codes, sizes = case.codes * at_once, case.sizes * at_once
    step = len(case.codes)
    slots = [slot + repeat * step for repeat in range(at_once) for slot in case.slots]
    while count > 0:
        yield codes[:count], slots[:count], sizes[:count]
        count -= len(codes)


Columns = list[tuple[list[int], list[int], list[int]]]


def run(case: Case, columns: Columns) -> tuple[float, float]:
    """Serve columns; return wall and processor seconds."""
    allocator = make(Device(case.device_bytes), case.conf)
    addresses = [0] * (max(len(column[0]) for column in columns) + len(case.codes))
    wall, processor = time.perf_counter(), time.process_time()
    for codes, slots, sizes in columns:
        serve(allocator, codes, slots, sizes, addresses)
    allocator.memory_stats()
    return time.perf_counter() - wall, time.process_time() - processor


def serve(allocator: Native, codes: list[int], slots: list[int], sizes: list[int], addresses: list[int]) -> None:
    """Serve one set of columns; requests that fail are left out, as a program that catches the error would."""
    done = 0
    while done < len(codes):
        served = allocator.serve(codes, slots, sizes, addresses, start=done)
        done = served.done
        if served.error is not None:
            addresses[slots[done]] = 0
            done += 1
        elif done < len(codes):
            allocator.empty_cache()
            done += 1


def one_by_one(case: Case, columns: Columns) -> float:
    """Serve the requests by one call each, as a protocol-only replay does; return wall seconds."""
    allocator = make(Device(case.device_bytes), case.conf)
    addresses = [0] * (max(len(column[0]) for column in columns) + len(case.codes))
    start = time.perf_counter()
    for codes, slots, sizes in columns:
        for code, slot, size in zip(codes, slots, sizes, strict=True):
            if code == ALLOC:
                try:
                    addresses[slot] = allocator.alloc(size)
                except OutOfMemory:
                    addresses[slot] = 0
            elif code == FREE:
                allocator.free_requested(addresses[slot])
            else:
                allocator.empty_cache()
    allocator.memory_stats()
    return time.perf_counter() - start


def peak_bytes(case: Case, count: int) -> int:
    """Return the most memory that serving `count` requests took beside its input."""
    columns = list(chunks(case, count))
    tracemalloc.start()
    run(case, columns)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    cases = recorded() or made_up()
    each = arguments.requests // len(cases)
    total = each * len(cases)
    show = sys.stdout.write
    show(f"{total:,} requests, {len(cases)} cases ({'recorded training' if len(cases) > 1 else 'made up'})\n")
    inputs = [(case, list(chunks(case, each))) for case in cases]
    run(cases[0], list(chunks(cases[0], 1000)))
    rates: list[tuple[float, float]] = []
    for _ in range(arguments.runs):
        times = [run(*given) for given in inputs]
        rates.append((total / sum(wall for wall, _ in times), total / sum(cpu for _, cpu in times)))
    show(f"in columns:           {median(r[0] for r in rates):>10,.0f} requests/s (median of {arguments.runs})\n")
    show(f"  by processor time:  {median(r[1] for r in rates):>10,.0f} requests/s\n")
    calls = median(total / sum(one_by_one(*given) for given in inputs) for _ in range(min(3, arguments.runs)))
    show(f"by a call a request:  {calls:>10,.0f} requests/s\n")
    few, many = peak_bytes(cases[0], 100_000), peak_bytes(cases[0], 800_000)
    show(f"memory beside input:  {few / 1e6:.1f} MB for 100,000 requests, {many / 1e6:.1f} MB for 800,000\n")


if __name__ == "__main__":
    main()
