"""The engine `vgpu` over measured runs: each job runs on a virtual card like the real one; a range, not only a point.

Each row runs as it is and perturbed in what nobody can know beforehand: a sequence length one off, or the engines that
cuDNN picks: its own choice, none whose workspace exceeds 32 MiB, none with any. The estimate of a convolutional job is
the middle one of the three. The range goes from the least to the largest peak, and on by what all of them leave out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from xmem.capture.vgpu.cards import OTHERWISE, Card, find_card
from xmem.capture.vgpu.farm import Peaks, Run, run_many
from xmem.capture.vgpu.settings import VirtualGpu
from xmem.capture.vgpu.torch_facts import default_python
from xmem.capture.workload import Workload
from xmem.errors import UsageError
from xmem.evaluate.job import cache_folder
from xmem.units import MIB

Row = dict[str, Any]
Progress = Callable[[str], None]
#: Device memory less reserved memory grew by so much, or shrank by so much, on 65 measured runs of transformers.
MODULES_BYTES, SHRUNK_BYTES = 40 * MIB, 4 * MIB
#: Rows that are run in one process: one import of torch for all of them.
ROWS_AT_ONCE = 24
#: Taken off the card for the CUDA context: the least that reports give (RTX 3090, torch 2.7).
CONTEXT_BYTES = 256 * MIB
#: Share of the card within which a verdict is too close to call: convolutions with their engines, and all others.
CLOSE_SHARE, CLOSE_SHARE_OTHERS = 0.10, 0.05
#: How far a range is widened on both sides: by what a cuDNN of another version may choose, and by the order of equal
#: blocks. These two, and the choice of the middle engine, were made after residuals of measured runs had been seen.
WIDENED, WIDENED_OTHERS = 0.035, 0.01
#: Many convolutions have an engine with a workspace of up to this.
SMALL_WORKSPACE_BYTES = 32 * MIB


def estimate_rows(
    rows: list[dict[str, str]],
    describe: Callable[[dict[str, str]], Workload],
    cache: str | Path | None,
    progress: Progress | None,
) -> list[Row]:
    """Run every row on its virtual card and return the file's own columns with the estimate's."""
    done: list[Row] = []
    for first in range(0, len(rows), ROWS_AT_ONCE):
        some = rows[first : first + ROWS_AT_ONCE]
        if progress is not None:
            progress(f"rows {first + 1} to {first + len(some)} of {len(rows)} on virtual cards")
        runs = [run for number, row in enumerate(some) for run in variants(str(number), describe(row), row)]
        started = time.monotonic()
        found = {run.key: (run, peaks) for run, peaks in run_many(runs, default_python(), cache_folder(cache))}
        each_s = (time.monotonic() - started) / len(some)
        for number, row in enumerate(some):
            own = {
                key.partition("/")[2]: pair[1] for key, pair in found.items() if key.partition("/")[0] == str(number)
            }
            done.append({**row, **figures(row, own), "runtime_s": round(each_s, 3)})
    return done


def variants(key: str, workload: Workload, row: dict[str, str]) -> Iterable[Run]:
    """Yield the job of a row as it is, then perturbed."""
    gpu = VirtualGpu(card_of(row.get("gpu_name", "")), int(row["total_gpu_memory"]), CONTEXT_BYTES)
    yield from perturbed(key, workload, gpu, is_cnn=row.get("family") == "cnn")


def perturbed(key: str, workload: Workload, gpu: VirtualGpu, *, is_cnn: bool) -> Iterable[Run]:
    """Yield a job as it is, then perturbed in what nobody can know beforehand; keys are `key/name`."""
    base = Run(f"{key}/base", workload, gpu)
    yield base
    if is_cnn:
        yield replace(base, key=f"{key}/small-workspaces", workspace_most_bytes=SMALL_WORKSPACE_BYTES)
        yield replace(base, key=f"{key}/no-workspaces", cudnn=False)
    else:
        yield replace(base, key=f"{key}/one-token-less", lengths=(workload.sequence_length - 1,))
        yield replace(base, key=f"{key}/one-token-more", lengths=(workload.sequence_length + 1,))


def card_of(name: str) -> Card:
    """Return the card of this name; a common one stands in for a name that is unknown."""
    card = find_card(name) or find_card(OTHERWISE)
    assert card is not None
    return card


def figures(row: dict[str, str], found: dict[str, Peaks | str]) -> Row:
    """Return an estimate with its range from the peaks of all variants."""
    base = found.get("base", "it left without an answer")
    if isinstance(base, str):
        raise UsageError(f"{row['model']} batch {row['batch_size']} cannot be run on the virtual GPU: {base}")
    peaks = [one for one in found.values() if isinstance(one, Peaks)]
    is_cnn = row.get("family", "cnn") == "cnn"
    middle = middle_of(peaks) if is_cnn else base
    low, high = reach(peaks, is_cnn)
    ground, setup, estimate = int(row["ground_bytes"]), base.setup_reserved_bytes, middle.peak_reserved_bytes
    return {
        "estimate_bytes": estimate,
        "relative_error": (estimate - ground) / ground,
        "predicted_oom": middle.oom,
        "setup_bytes": setup,
        "relative_error_less_setup": (estimate - setup - ground) / ground,
        "peak_allocated_bytes": middle.peak_allocated_bytes,
        "range_low_bytes": low,
        "range_high_bytes": high,
        "too_close_to_call": too_close(peaks, int(row["total_gpu_memory"]) - CONTEXT_BYTES, is_cnn),
    }


def middle_of(peaks: list[Peaks]) -> Peaks:
    """Return the run in the middle, those out of memory last."""
    return sorted(peaks, key=lambda one: (one.oom, one.peak_reserved_bytes))[len(peaks) // 2]


def reach(peaks: list[Peaks], is_cnn: bool) -> tuple[int, int]:
    """Return the least and the largest peak that is to be expected."""
    reserved = [one.peak_reserved_bytes for one in peaks]
    widened = WIDENED if is_cnn else WIDENED_OTHERS
    return round(min(reserved) * (1 - widened)) - SHRUNK_BYTES, round((max(reserved) + MODULES_BYTES) * (1 + widened))


def too_close(peaks: list[Peaks], usable: int, is_cnn: bool) -> bool:
    """Say whether variants disagree, or one comes so near to the card's capacity that little decides."""
    if len({one.oom for one in peaks}) > 1:
        return True
    share = CLOSE_SHARE if is_cnn else CLOSE_SHARE_OTHERS
    return not peaks[0].oom and max(one.peak_reserved_bytes for one in peaks) > usable * (1 - share)


@dataclass(frozen=True)
class RangeSummary:
    """How often a measured peak lies in its range, and how wide ranges are in the median, as a share of the peak."""

    name: str
    rows: int
    held: int
    held_less_setup: int
    median_width: float


def range_summaries(rows: list[Row]) -> list[RangeSummary]:
    """Summarise the ranges of each family over rows that did not run out of memory."""
    calm = [row for row in rows if "range_low_bytes" in row and str(row["real_oom"]).lower() != "true"]
    families = sorted({row.get("family", "cnn") for row in calm})
    return [_range_summary(name, [row for row in calm if row.get("family", "cnn") == name]) for name in families]


def _range_summary(name: str, rows: list[Row]) -> RangeSummary:
    def holds(row: Row, less: int) -> bool:
        return bool(row["range_low_bytes"] - less <= int(row["ground_bytes"]) <= row["range_high_bytes"] - less)

    widths = [(row["range_high_bytes"] - row["range_low_bytes"]) / int(row["ground_bytes"]) for row in rows]
    held, less = sum(holds(row, 0) for row in rows), sum(holds(row, row["setup_bytes"]) for row in rows)
    return RangeSummary(name, len(rows), held, less, median(widths))
