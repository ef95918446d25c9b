"""Time and memory of `xmem estimate VGG19 -b 130 -o SGD --gpu rtx3060`, cold, warm, and of the simulation alone."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

JOB = ("VGG19", "-b", "130", "-o", "SGD", "--gpu", "rtx3060", "-q")


def run(cache: Path) -> tuple[float, int]:
    """Return seconds and the greatest resident memory in MiB so far of one call in a process of its own."""
    started = time.monotonic()
    command = [sys.executable, "-m", "xmem", "estimate", *JOB]
    done = subprocess.run(command, env={**os.environ, "XMEM_CACHE": str(cache)}, stdout=subprocess.DEVNULL)
    if done.returncode not in (0, 1):
        raise SystemExit("xmem estimate failed; it needs the extra capture")
    return time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10


def main() -> None:
    """Measure and print."""
    subprocess.run([sys.executable, "-c", "import torch, torchvision, transformers"], check=True)  # from the disk, once
    with tempfile.TemporaryDirectory() as folder:
        cold, memory = run(Path(folder))
        warm, _ = run(Path(folder))
    sys.stdout.write(f"xmem estimate {' '.join(JOB)}\n")
    sys.stdout.write(f"three profiles, ingest, simulation: {cold:.1f} s, {memory} MiB (target: 15 s, 3072 MiB)\n")
    sys.stdout.write(f"profiles already there:             {warm:.1f} s (target for simulation and query: 2 s)\n")


if __name__ == "__main__":
    main()
