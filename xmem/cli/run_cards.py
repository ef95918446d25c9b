"""`xmem run --also`: what one run on a virtual card says of other cards, by replay where that is the same as a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from xmem.render import bytes_text, make_inert, table_text

if TYPE_CHECKING:
    from pathlib import Path

    from xmem.capture.vgpu.run import Job, Outcome
    from xmem.capture.vgpu.settings import VirtualGpu
    from xmem.ingest import Ingested

#: Runs the job on a card and reads its recording into the store.
Run = Callable[["Job", "VirtualGpu"], "tuple[Outcome, Ingested]"]


@dataclass(frozen=True)
class OtherCard:
    """The answer for one more card; `why` says why the job was run anew, or that its requests were replayed."""

    virtual_gpu: str
    fits: bool | None
    peak_reserved_bytes: int
    usable_bytes: int
    run_id: str
    why: str


def answer_others(
    first: tuple[Job, VirtualGpu, Outcome, str], others: Sequence[VirtualGpu], run: Run, store: Path | str | None
) -> list[OtherCard]:
    """Answer for other cards from the first run, or from another one where the card would change its requests."""
    job, own, outcome, run_id = first
    answers = []
    for gpu in others:
        why = reason_to_run(outcome, own, gpu)
        answers.append(_replay(run_id, gpu, store) if why is None else _run_anew(job, gpu, run, why))
    return answers


def reason_to_run(outcome: Outcome, own: VirtualGpu, other: VirtualGpu) -> str | None:
    """Say why a replay would not do: it ended early, another architecture, or cuDNN that chooses by the card."""
    if outcome.out_of_memory is not None or outcome.failed:
        return "run anew: the first run did not come to its end"
    if own.card.compute_capability != other.card.compute_capability:
        return f"run anew: kernels and workspaces of compute capability {other.card.compute_capability}"
    if outcome.cudnn_calls and (own.card != other.card or own.total_bytes != other.total_bytes):
        return "run anew: cuDNN's choice for this card"
    return None


def _replay(run_id: str, gpu: VirtualGpu, store: Path | str | None) -> OtherCard:
    from xmem.simulate import SimulateOptions, simulate

    options = SimulateOptions(non_torch=str(gpu.taken_bytes))
    verdict = simulate(run_id, gpu=gpu.total_bytes, store=store, options=options)
    usable = gpu.total_bytes - gpu.taken_bytes
    return OtherCard(gpu.card.name, verdict.fits, verdict.peak_reserved_bytes, usable, run_id, "replayed")


def _run_anew(job: Job, gpu: VirtualGpu, run: Run, why: str) -> OtherCard:
    folder = "".join(letter if letter.isalnum() else "-" for letter in f"{gpu.card.name} {gpu.total_bytes >> 20}MiB")
    outcome, read = run(replace(job, output=job.output / folder), gpu)
    peak = max((s["reserved_bytes.all.peak"] for part in outcome.parts for s in part.stats.values()), default=0)
    out = outcome.out_of_memory is not None
    fits = None if outcome.failed and not out else not out
    return OtherCard(gpu.card.name, fits, peak, gpu.total_bytes - gpu.taken_bytes, read.run_id, why)


def others_text(answers: Sequence[OtherCard], width: int | None) -> str:
    """Show the answers as a table."""
    verdicts: dict[Any, str] = {True: "fits", False: "OUT OF MEMORY", None: "failed"}
    rows = [
        (
            one.virtual_gpu,
            bytes_text(one.usable_bytes).partition("(")[0].strip(),
            bytes_text(one.peak_reserved_bytes).partition("(")[0].strip(),
            verdicts[one.fits],
            make_inert(one.why),
        )
        for one in answers
    ]
    return table_text(("other card", "usable", "reserved", "verdict", "how"), rows, width=width)
