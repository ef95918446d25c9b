"""The engine `vgpu` over measured runs: each job runs on a virtual card like the real one; a range, not only a point.

Each row runs as it is and perturbed in what nobody can know beforehand: a sequence length one off, one shorter batch,
cuDNN engines without workspaces. The range goes from the least to the largest peak, and on by what kernels that are
loaded while training were seen to take.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
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
#: Device memory less reserved memory grew by so much while training, on 65 measured transformer runs.
MODULES_BYTES = 40 * MIB
#: Rows that are run in one process: one import of torch for all of them.
ROWS_AT_ONCE = 24
#: Taken off the card for the CUDA context: between the least that is reported (256 MiB) and the commonest (0.4 GiB).
CONTEXT_BYTES = 300 * MIB
#: Share of the card within which a verdict is too close to call: transformers, and convolutions with their engines.
CLOSE_SHARE = {"transformer": 0.05, "cnn": 0.10}
#: Where cuDNN picks another engine than the real card's version did, peaks moved by so much, in the median.
ENGINE_SHARE = 0.03


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
    """Yield the job as it is, then perturbed."""
    card = card_of(row.get("gpu_name", ""))
    base = Run(f"{key}/base", workload, VirtualGpu(card, int(row["total_gpu_memory"]), CONTEXT_BYTES))
    yield base
    if row.get("family") == "cnn":
        yield replace(base, key=f"{key}/no-workspaces", cudnn=False)
        return
    length = workload.sequence_length
    yield replace(base, key=f"{key}/one-token-less", lengths=(length - 1,))
    yield replace(base, key=f"{key}/a-short-batch", lengths=(length, length - length // 8, length, length))


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
    family = row.get("family", "cnn")
    low, high = reach(peaks, family)
    ground, setup, estimate = int(row["ground_bytes"]), base.setup_reserved_bytes, base.peak_reserved_bytes
    usable = int(row["total_gpu_memory"]) - CONTEXT_BYTES
    return {
        "estimate_bytes": estimate,
        "relative_error": (estimate - ground) / ground,
        "predicted_oom": base.oom,
        "setup_bytes": setup,
        "relative_error_less_setup": (estimate - setup - ground) / ground,
        "peak_allocated_bytes": base.peak_allocated_bytes,
        "range_low_bytes": low,
        "range_high_bytes": high,
        "too_close_to_call": too_close(peaks, usable, family),
    }


def reach(peaks: list[Peaks], family: str) -> tuple[int, int]:
    """Return the least and the largest peak that is to be expected."""
    reserved = [one.peak_reserved_bytes for one in peaks]
    low, high = min(reserved), max(reserved) + MODULES_BYTES
    if family == "cnn":
        low, high = round(low * (1 - ENGINE_SHARE)), round(high * (1 + ENGINE_SHARE))
    return low, high


def too_close(peaks: list[Peaks], usable: int, family: str) -> bool:
    """Say whether variants disagree, or one comes so near to the card's capacity that little decides."""
    if len({one.oom for one in peaks}) > 1:
        return True
    return not peaks[0].oom and max(one.peak_reserved_bytes for one in peaks) > usable * (1 - CLOSE_SHARE[family])
