"""Makes the CPU trace and the memory timeline of this folder: four steps of a small network, profiled by torch.

Run it where torch is installed: python examples/make_cpu_trace.py [FOLDER]
"""

from __future__ import annotations

import gzip
import os
import random
import sys
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

STEPS = 4
BATCH = 16


class SmallNet(nn.Module):
    """Two convolutions and two linear layers: enough for parameters, activations and Adam's states to show."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        self.head = nn.Sequential(
            nn.Flatten(), nn.Linear(64 * 8 * 8, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 10)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return one score for each class."""
        return self.head(self.features(images))


def train(steps: int, profiler: profile) -> None:
    """Train on random images, the whole training inside of the recording."""
    model = SmallNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(steps):
        images = torch.rand(BATCH, 3, 32, 32)
        labels = torch.randint(0, 10, (BATCH,))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        profiler.step()


def record(folder: Path) -> None:
    """Write cpu_training.json.gz and cpu_training.timeline.raw.json.gz."""
    torch.manual_seed(0)
    random.seed(0)
    torch.set_num_threads(1)
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=0, active=STEPS, repeat=1),
        profile_memory=True,
        record_shapes=True,
        with_stack=True,  # nn.Module spans come with the stacks
    ) as profiler:
        train(STEPS, profiler)
    os.chdir(folder)  # the trace holds the name that it is exported to
    profiler.export_chrome_trace("cpu_training.json")
    Path("cpu_training.json.gz").write_bytes(gzip.compress(Path("cpu_training.json").read_bytes(), 9, mtime=0))
    Path("cpu_training.json").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the export is marked as deprecated from torch 2.13 on
        profiler.export_memory_timeline("cpu_training.timeline.raw.json.gz", device="cpu")


if __name__ == "__main__":
    record(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
