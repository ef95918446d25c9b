"""The range of one job on a virtual card: as it is, and perturbed in what nobody can know beforehand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from xmem.capture.models import is_text_model
from xmem.capture.vgpu.farm import Peaks, Run, run_many
from xmem.capture.vgpu.settings import VirtualGpu
from xmem.capture.vgpu.torch_facts import default_python
from xmem.capture.workload import Workload
from xmem.errors import UsageError
from xmem.evaluate.virtual import middle_of, perturbed, reach, too_close
from xmem.units import MIB

#: A variant whose peak is further than this from the estimate makes the answer unstable.
STABLE_SHARE, STABLE_SHARE_TEXT = 0.10, 0.05
WORDS = {
    "base": "the engines that cuDNN picks",
    "small-workspaces": "engines with workspaces of up to 32 MiB",
    "no-workspaces": "engines without workspaces",
    "one-token-less": "one token less",
    "one-token-more": "one token more",
}


@dataclass(frozen=True)
class PeakRange:
    """Peaks of reserved memory, bytes: the estimate, the least and the most to expect, and what moves them."""

    estimate_bytes: int
    low_bytes: int
    high_bytes: int
    unstable: tuple[str, ...]
    too_close: bool

    @property
    def stable(self) -> bool:
        """Say whether no perturbation moves the peak far."""
        return not self.unstable


#: A card, and where the peaks of a job's variants on it are kept.
Kept = tuple[VirtualGpu, Path]


def find_range(workload: Workload, on_card: Kept, on_roomy: Kept) -> PeakRange:
    """Run the variants of a job, or take their peaks from where they are kept; raises UsageError if it cannot be run.

    Where one runs out of memory on the card, all run on the roomy one too: the range says what the job would reserve.
    """
    is_text = is_text_model(workload.model)
    found = _peaks(workload, on_card)
    usable = on_card[0].total_bytes - on_card[0].taken_bytes
    close = too_close(list(found.values()), usable, not is_text)
    if any(one.oom for one in found.values()):
        found = _peaks(workload, on_roomy)
    return make_range(found, is_text, close=close)


def range_file(folder: Path, key: str) -> Path:
    """Return where the peaks of the variants of a job on a card are kept."""
    return folder / f"vgpu-{key}-range.json"


def make_range(peaks: dict[str, Peaks], is_text: bool, *, close: bool) -> PeakRange:
    """Sum variants up, by name; the first one is the job as it is."""
    found = list(peaks.values())
    estimate = (found[0] if is_text else middle_of(found)).peak_reserved_bytes
    low, high = reach(found, not is_text)
    share = STABLE_SHARE_TEXT if is_text else STABLE_SHARE
    return PeakRange(estimate, low, high, tuple(_movers(peaks, estimate, share)), close)


def _movers(peaks: dict[str, Peaks], estimate: int, share: float) -> Sequence[str]:
    return [
        f"with {WORDS[name]} the peak is {one.peak_reserved_bytes / MIB:,.0f} MiB, not {estimate / MIB:,.0f} MiB"
        for name, one in peaks.items()
        if abs(one.peak_reserved_bytes - estimate) > share * estimate
    ]


def variants_of(workload: Workload, gpu: VirtualGpu) -> list[Run]:
    """Return the runs whose peaks make the range, keyed by name."""
    runs = perturbed("", workload, gpu, is_cnn=not is_text_model(workload.model))
    return [replace(run, key=run.key.removeprefix("/")) for run in runs]


def keep_peaks(found: Mapping[str, Peaks | str], kept: Path) -> dict[str, Peaks]:
    """Keep the peaks of variants that could be run; the file is complete or not there."""
    peaks = {name: one for name, one in found.items() if isinstance(one, Peaks)}
    half = kept.with_suffix(".part")
    half.write_text(json.dumps({name: asdict(one) for name, one in peaks.items()}), encoding="utf-8")
    half.replace(kept)
    return peaks


def _peaks(workload: Workload, where: Kept) -> dict[str, Peaks]:
    gpu, kept = where
    if kept.is_file():
        return {name: Peaks(**fields) for name, fields in json.loads(kept.read_text(encoding="utf-8")).items()}
    found = {run.key: peaks for run, peaks in run_many(variants_of(workload, gpu), default_python(), kept.parent)}
    base = found.get("base", "it left without an answer")
    if isinstance(base, str):
        raise UsageError(f"{workload.model} batch {workload.batch_size} cannot be run on the virtual GPU: {base}")
    return keep_peaks(found, kept)
