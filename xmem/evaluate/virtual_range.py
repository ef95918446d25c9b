"""The range of one job on a virtual card: as it is, and perturbed in what nobody can know beforehand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from xmem.capture.models import is_text_model
from xmem.capture.vgpu.farm import Peaks, run_many
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


def find_range(workload: Workload, gpu: VirtualGpu, roomy: VirtualGpu, folder: Path, key: str) -> PeakRange:
    """Run the variants of a job, or take their peaks from the cache; raises UsageError where it cannot be run.

    Where one runs out of memory on `gpu`, all run on `roomy` too: the range says what the job would reserve.
    """
    is_text = is_text_model(workload.model)
    on_card = _peaks(workload, gpu, is_text, folder / f"vgpu-{key}-range.json")
    usable = gpu.total_bytes - gpu.taken_bytes
    close = too_close(list(on_card.values()), usable, not is_text)
    shown = on_card
    if any(one.oom for one in on_card.values()):
        shown = _peaks(workload, roomy, is_text, folder / f"vgpu-{key}-range-roomy.json")
    return make_range(shown, is_text, close=close)


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


def _peaks(workload: Workload, gpu: VirtualGpu, is_text: bool, kept: Path) -> dict[str, Peaks]:
    if kept.is_file():
        return {name: Peaks(**fields) for name, fields in json.loads(kept.read_text(encoding="utf-8")).items()}
    runs = [replace(run, key=run.key.removeprefix("/")) for run in perturbed("", workload, gpu, is_cnn=not is_text)]
    found = {run.key: peaks for run, peaks in run_many(runs, default_python(), kept.parent)}
    base = found.get("base", "it left without an answer")
    if isinstance(base, str):
        raise UsageError(f"{workload.model} batch {workload.batch_size} cannot be run on the virtual GPU: {base}")
    peaks = {name: one for name, one in found.items() if isinstance(one, Peaks)}
    half = kept.with_suffix(".part")
    half.write_text(json.dumps({name: asdict(one) for name, one in peaks.items()}), encoding="utf-8")
    half.replace(kept)
    return peaks
