"""Time and memory of `xmem estimate VGG19 -b 130 -o SGD --gpu rtx3060` by each engine, cold and from the cache."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

JOB = ("VGG19", "-b", "130", "-o", "SGD", "--gpu", "rtx3060", "-q")


def run(engine: str, cache: Path) -> tuple[float, int]:
    """Return seconds and the greatest resident memory in MiB so far of one process of one call."""
    started = time.monotonic()
    command = [sys.executable, "-m", "xmem", "estimate", *JOB, "--engine", engine]
    done = subprocess.run(command, env={**os.environ, "XMEM_CACHE": str(cache)}, stdout=subprocess.DEVNULL)
    if done.returncode not in (0, 1):
        raise SystemExit(f"xmem estimate --engine {engine} failed; it needs the extra capture")
    return time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10


def main() -> None:
    """Measure and print."""
    subprocess.run([sys.executable, "-c", "import torch, torchvision, transformers"], check=True)  # from the disk, once
    sys.stdout.write(f"xmem estimate {' '.join(JOB)}\n")
    parts = {"vgpu": "driver built, four runs", "cpu": "three profiles"}
    for engine, what in parts.items():
        with tempfile.TemporaryDirectory() as folder:
            cold, memory = run(engine, Path(folder))
            warm, _ = run(engine, Path(folder))
        sys.stdout.write(f"{engine}: {what}, ingest, simulation: {cold:.1f} s, {memory} MiB in one process at most")
        sys.stdout.write(f" (target: 15 s, 3072 MiB); asked again: {warm:.1f} s (target: 2 s)\n")


if __name__ == "__main__":
    main()
