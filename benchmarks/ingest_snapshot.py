"""Compares `xmem ingest` of a snapshot with a plain pickle.load: python benchmarks/ingest_snapshot.py [--entries N].

The snapshot is made on the spot, 1,000,000 entries as torch 2.14 writes them: nine keys each, Python stacks, a list of
frames that an allocation shares with its frees, frames that all stacks share. Both run in fresh processes, in turn; the
best of some rounds counts. "Stored" means what the command does: read, paired, attributed, in Parquet, committed.
"""

from __future__ import annotations

import argparse
import json
import pickle
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MIB = 1 << 20
BASE, SPACING = 0x7F00_0000_0000, 2 * MIB
FRAMES, STACKS, DEPTH, LIVE = 400, 300, 6, 1000
GOAL = 1.5

PLAIN = """
import pickle, resource, sys, time
start = time.perf_counter()
with open(sys.argv[1], "rb") as file:
    snapshot = pickle.load(file)
print(time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
import os; sys.stdout.flush(); os._exit(0)
"""
INGEST = """
import resource, sys, time
start = time.perf_counter()
from xmem.ingest import IngestOptions, ingest
[run] = ingest(sys.argv[1], options=IngestOptions(store=sys.argv[2], force=True))
took = time.perf_counter() - start
assert run.event_count >= int(sys.argv[3]), run
peaks = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
print(took, max(peaks))
"""


def write_snapshot(path: Path, entries: int) -> None:
    """Write a snapshot with so many entries; the same one every time."""
    chance = random.Random(1)
    frames = [
        {
            "name": f"forward_{number % 40}",
            "filename": f"site-packages/torch/nn/modules/m{number % 25}.py",
            "line": number,
        }
        for number in range(FRAMES)
    ]
    stacks = [[chance.choice(frames) for _ in range(DEPTH)] for _ in range(STACKS)]
    trace: list[dict[str, Any]] = []
    live: list[tuple[int, int, list[Any]]] = []
    free: list[int] = []
    time_us = 1_796_093_712_206_412

    def add(action: str, address: int, size: int, stack: list[Any]) -> None:
        nonlocal time_us
        time_us += chance.randrange(5)
        fixed = {"stream": 0, "time_us": time_us, "compile_context": "N/A", "user_metadata": ""}
        pool: tuple[int, ...] = tuple([0, 0])  # a new one each, as torch makes them
        trace.append({"action": action, "addr": address, "size": size, **fixed, "frames": stack, "pool_id": pool})

    add("segment_alloc", BASE, 2 * LIVE * SPACING, stacks[0])
    while len(trace) < entries:
        if len(live) > LIVE or (live and chance.random() < 0.45):
            address, size, stack = live.pop(chance.randrange(len(live)))
            add("free_requested", address, size, stack)
            add("free_completed", address, size, stack)
            free.append(address)
        else:
            address = free.pop() if free else BASE + (len(live) + len(free)) * SPACING
            live.append((address, chance.randrange(1, MIB), list(chance.choice(stacks))))
            add("alloc", *live[-1])
    with open(path, "wb") as file:
        pickle.dump({"segments": [make_segment(live)], "device_traces": [trace], "external_annotations": []}, file)


def make_segment(live: list[tuple[int, int, list[Any]]]) -> dict[str, Any]:
    """Make the segment with what lives at the end, and what is free between."""
    blocks: list[dict[str, Any]] = []
    for address, size, stack in sorted(live, key=lambda block: block[0]):
        rounded = -(-size // 512) * 512
        blocks.append({"address": address, "size": rounded, "requested_size": size, "state": "active_allocated"})
        blocks[-1]["frames"] = stack
        rest = {"address": address + rounded, "size": SPACING - rounded, "requested_size": 0, "state": "inactive"}
        blocks.append(rest | {"frames": []})
    used = sum(block["size"] for block in blocks if block["state"] != "inactive")
    sizes = {"total_size": 2 * LIVE * SPACING, "allocated_size": used, "active_size": used, "requested_size": used}
    where = {"device": 0, "address": BASE, "stream": 0, "segment_type": "large", "segment_pool_id": (0, 0)}
    return {**where, **sizes, "is_expandable": False, "frames": [], "blocks": blocks}


def measure(code: str, *arguments: str) -> tuple[float, float]:
    """Run in a fresh process; return seconds and the peak of its memory in MiB."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True, text=True)
    seconds, peak_kib = done.stdout.split()
    return float(seconds), float(peak_kib) / 1024


def compare(entries: int, rounds: int) -> dict[str, float]:
    """Make the snapshot, measure both ways in turn, and return the best of each."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "snapshot.pickle"
        write_snapshot(path, entries)
        plain, stored = [], []
        for number in range(rounds):
            plain.append(measure(PLAIN, str(path)))
            stored.append(measure(INGEST, str(path), f"{folder}/store{number}", str(entries)))
        return {
            "entries": entries,
            "file_mib": path.stat().st_size / MIB,
            "plain_s": min(plain)[0],
            "plain_mib": min(plain)[1],
            "stored_s": min(stored)[0],
            "stored_mib": min(stored)[1],
            "ratio": min(stored)[0] / min(plain)[0],
        }


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    found = compare(chosen.entries, chosen.rounds)
    if chosen.json:
        sys.stdout.write(json.dumps(found) + "\n")
        return
    sys.stdout.write(
        f"snapshot of {found['entries']:,} entries, {found['file_mib']:.0f} MiB\n"
        f"pickle.load: {found['plain_s']:.2f} s, {found['plain_mib']:.0f} MiB\n"
        f"stored:      {found['stored_s']:.2f} s, {found['stored_mib']:.0f} MiB in the larger process\n"
        f"ratio:       {found['ratio']:.2f} (goal: at most {GOAL})\n"
    )


if __name__ == "__main__":
    main()
