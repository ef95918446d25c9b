"""The engine `vgpu` over measured runs: each job runs on a virtual card like the real one; a range, not only a point.

Each row runs as it is and perturbed in what nobody can know beforehand: a sequence length one off, or the engines that
cuDNN picks: its own choice, none whose workspace exceeds 32 MiB, none with any. The estimate of a convolutional job is
the middle one of the three. What was asked of the allocator then goes through that of the torch that was measured. The
range goes from the least to the largest peak, and on by what all of them leave out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from xmem.capture.vgpu.cards import OTHERWISE, Card, find_card
from xmem.capture.vgpu.farm import Peaks, Run, run_many
from xmem.capture.vgpu.settings import VirtualGpu
from xmem.capture.vgpu.torch_facts import default_python
from xmem.capture.workload import Workload
from xmem.errors import UsageError
from xmem.evaluate.estimate import ADDRESS_POLICY
from xmem.evaluate.job import cache_folder
from xmem.evaluate.metrics import ran_out
from xmem.evaluate.other_torch import peaks_under
from xmem.evaluate.runs_file import (
    Row,
    errors_of,
    ground_of,
    is_convolutional,
    torch_of,
    total_bytes_of,
    without_answer,
    workload_of,
)
from xmem.simulate.device import AddressPolicy
from xmem.units import MIB

Progress = Callable[[str], None]
#: Device memory less reserved memory grew by so much, or shrank by so much, on 65 measured runs of transformers.
MODULES_BYTES, SHRUNK_BYTES = 40 * MIB, 4 * MIB
#: Rows that are run in one process: one import of torch for all of them.
ROWS_AT_ONCE = 24
#: Taken off the card for the CUDA context: the least that reports give (RTX 3090, torch 2.7).
CONTEXT_BYTES = 256 * MIB
#: In which cudaMalloc may hand out addresses: the likelier first; the order decides between free blocks of equal size.
ORDERS: tuple[AddressPolicy, ...] = (ADDRESS_POLICY, "up")
#: Share of the card within which a verdict is too close to call: convolutions with their engines, and all others.
CLOSE_SHARE, CLOSE_SHARE_OTHERS = 0.10, 0.05
#: How far a range is widened on both sides: convolutions with their engines, and all others. These two, and the choice
#: of the middle engine, were made after residuals of measured runs had been seen.
WIDENED, WIDENED_OTHERS = 0.0275, 0.01
#: Many convolutions have an engine with a workspace of up to this.
SMALL_WORKSPACE_BYTES = 32 * MIB


def estimate_rows(rows: list[Row], cache: str | Path | None, progress: Progress | None) -> list[Row]:
    """Run every row on its virtual card and return the file's own columns with the estimate's."""
    done: list[Row] = []
    for first in range(0, len(rows), ROWS_AT_ONCE):
        some = rows[first : first + ROWS_AT_ONCE]
        if progress is not None:
            progress(f"rows {first + 1} to {first + len(some)} of {len(rows)} on virtual cards")
        started = time.monotonic()
        found = _peaks(some, cache)
        answers = [_answer(row, own) for row, own in zip(some, found, strict=True)]
        each_s = (time.monotonic() - started) / len(some)
        done += [answer if answer["trouble"] else {**answer, "runtime_s": round(each_s, 3)} for answer in answers]
    return done


def _peaks(rows: list[Row], cache: str | Path | None) -> list[dict[str, Peaks | str]]:
    """Run all variants of some rows; return their peaks by name, under the torch that a row was measured with."""
    found: list[dict[str, Peaks | str]] = [{} for _ in rows]
    runs: list[Run] = []
    for number, row in enumerate(rows):
        try:
            runs += variants(str(number), row)
        except UsageError as error:
            found[number]["base"] = error.message
    for run, peaks in run_many(runs, default_python(), cache_folder(cache)) if runs else ():
        place, _, name = run.key.partition("/")
        row = rows[int(place)]
        for addresses in ORDERS[: 1 if is_convolutional(row) else 2]:
            key = name if addresses == ADDRESS_POLICY else f"{name}, addresses {addresses}"
            found[int(place)][key] = as_measured(row, peaks, run.gpu, addresses) if isinstance(peaks, Peaks) else peaks
    return found


def as_measured(row: Row, peaks: Peaks, gpu: VirtualGpu, addresses: AddressPolicy) -> Peaks:
    """Return the peaks of a run under the torch of the row.

    Convolutions do without a workspace that cannot be had, and their run may have; a replay asks for all that the run
    got. Where only the replay runs out of memory, the run's peaks stand.
    """
    found = peaks_under(peaks, gpu, torch_of(row), addresses)
    return replace(peaks, requests=[]) if found.oom and is_convolutional(row) else found


def _answer(row: Row, found: dict[str, Peaks | str]) -> Row:
    try:
        return {**row, **figures(row, found)}
    except UsageError as error:
        return without_answer(row, error.message)


def variants(key: str, row: Row) -> list[Run]:
    """Return the job of a row as it is, then perturbed, each with what it asks of the allocator."""
    gpu = VirtualGpu(card_of(row.get("gpu_name") or ""), total_bytes_of(row), CONTEXT_BYTES)
    runs = perturbed(key, workload_of(row), gpu, is_cnn=is_convolutional(row))
    return [replace(run, requests=True) for run in runs]


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


def figures(row: Row, found: dict[str, Peaks | str]) -> Row:
    """Return an estimate with its range from the peaks of all variants."""
    base = found.get("base", "it left without an answer")
    if isinstance(base, str):
        raise UsageError(f"{row['model']} batch {row['batch_size']} cannot be run on the virtual GPU: {base}")
    peaks = [one for one in found.values() if isinstance(one, Peaks)]
    is_cnn = is_convolutional(row)
    middle = middle_of(peaks) if is_cnn else base
    low, high = reach_measured(row, found) if is_cnn else reach(peaks, is_cnn)
    setup, estimate = base.setup_reserved_bytes, middle.peak_reserved_bytes
    return {
        "estimate_bytes": estimate,
        "predicted_oom": middle.oom,
        "setup_bytes": setup,
        "peak_allocated_bytes": middle.peak_allocated_bytes,
        "range_low_bytes": low,
        "range_high_bytes": high,
        "too_close_to_call": too_close(peaks, total_bytes_of(row) - CONTEXT_BYTES, is_cnn),
        **errors_of(ground_of(row), estimate, setup),
    }


def middle_of(peaks: list[Peaks]) -> Peaks:
    """Return the run in the middle, those out of memory last."""
    return sorted(peaks, key=lambda one: (one.oom, one.peak_reserved_bytes))[len(peaks) // 2]


def reach(peaks: list[Peaks], is_cnn: bool, left_out_bytes: int = 0) -> tuple[int, int]:
    """Return the least and the largest peak that is to be expected; the least may leave out some bytes."""
    reserved = [one.peak_reserved_bytes for one in peaks]
    widened = WIDENED if is_cnn else WIDENED_OTHERS
    low = round((min(reserved) - left_out_bytes) * (1 - widened)) - SHRUNK_BYTES
    return low, round((max(reserved) + MODULES_BYTES) * (1 + widened))


def reach_measured(row: Row, found: dict[str, Peaks | str]) -> tuple[int, int]:
    """Return the range of what a convolutional row of the paper's runs measured.

    The first sample raced with the model's copy to the card, so that ground leaves out something between nothing and
    all of set-up. cuDNN was 9.1 there: what another one picks freely is no bound for it, engines bounded by workspace
    are. A row that names its torch (evaluate local) was measured after the context only, with the cuDNN that runs here.
    """
    peaks = {name: one for name, one in found.items() if isinstance(one, Peaks)}
    if row.get("torch_version"):
        return reach(list(peaks.values()), True)
    bounded = [one for name, one in peaks.items() if name != "base"] or list(peaks.values())
    return reach(bounded, True, peaks["base"].setup_reserved_bytes)


def too_close(peaks: list[Peaks], usable: int, is_cnn: bool) -> bool:
    """Say whether variants disagree, or one comes so near to the card's capacity that little decides."""
    if len({one.oom for one in peaks}) > 1:
        return True
    share = CLOSE_SHARE if is_cnn else CLOSE_SHARE_OTHERS
    return not peaks[0].oom and max(one.peak_reserved_bytes for one in peaks) > usable * (1 - share)


@dataclass(frozen=True)
class RangeSummary:
    """How often a measured peak lies in its range, and how wide ranges are in the median, as a share of the peak.

    Only ground of convolutional rows leaves set-up out: of others nothing is said less set-up.
    """

    name: str
    rows: int
    held: int
    held_less_setup: int | None
    median_width: float

    @property
    def less_text(self) -> str:
        """Say how many hold less set-up, where that means something."""
        return "" if self.held_less_setup is None else f" ({self.held_less_setup} less set-up)"


def range_summaries(rows: list[Row]) -> list[RangeSummary]:
    """Summarise the ranges of each family over rows that did not run out of memory."""
    told = [row for row in rows if row.get("range_low_bytes") and ground_of(row)]
    calm = [row for row in told if not ran_out(row)]
    families = sorted({row.get("family", "cnn") for row in calm})
    return [_range_summary(name, [row for row in calm if row.get("family", "cnn") == name]) for name in families]


def _range_summary(name: str, rows: list[Row]) -> RangeSummary:
    def holds(row: Row, less: int) -> bool:
        return bool(row["range_low_bytes"] - less <= (ground_of(row) or 0) <= row["range_high_bytes"] - less)

    widths = [(row["range_high_bytes"] - row["range_low_bytes"]) / (ground_of(row) or 1) for row in rows]
    held = sum(holds(row, 0) for row in rows)
    less = sum(holds(row, row["setup_bytes"]) for row in rows) if name == "cnn" else None
    return RangeSummary(name, len(rows), held, less, median(widths))
