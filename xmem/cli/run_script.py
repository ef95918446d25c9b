"""`xmem run`: runs an unchanged script on a virtual card, records it, and says whether it fits."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from xmem.cli.options import json_option, print_text, store_option, terminal_width, verbosity_options
from xmem.errors import EXIT_DOES_NOT_FIT, EXIT_OK, EXIT_UNREADABLE
from xmem.render import bytes_text, fact_lines, json_text, make_inert

if TYPE_CHECKING:
    from xmem.capture.vgpu.cards import Card
    from xmem.capture.vgpu.run import Job, Outcome
    from xmem.capture.vgpu.settings import VirtualGpu
    from xmem.ingest import Ingested


_AS_WRITTEN = {"ignore_unknown_options": True, "allow_interspersed_args": False, "show_default": True}


@click.command(context_settings=_AS_WRITTEN)
@click.argument("words", metavar="SCRIPT [ARGS]...", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--gpu", metavar="GPU", required=True, help="A name (xmem gpus), a size, or a card's TOML file.")
@click.option(
    "--also", metavar="GPU", multiple=True,
    help="Another card to answer for: by replay, or by one more run where it would change the requests.",
)  # fmt: skip
@click.option(
    "--steps", type=click.IntRange(min=1), default=3, help="Optimizer steps after which the script is stopped."
)
@click.option(
    "--timeout", "timeout_s", type=click.IntRange(min=1), default=300, help="Seconds after which it is stopped."
)
@click.option("--devices", type=click.IntRange(1, 16), help="Virtual cards.  [default: 1, or torchrun's processes]")
@click.option("--non-torch", metavar="SIZE", help="Memory of the card that is never free.  [default: 0.4GiB]")
@click.option("--addresses", type=click.Choice(("down", "up")), default="down", help="Order of cudaMalloc's addresses.")
@click.option(
    "--benchmark", type=click.Choice(("typical", "worst")), default="typical",
    help="What cudnn.benchmark finds quickest: the first of cuDNN's heuristics, or the largest workspace.",
)  # fmt: skip
@click.option("--sandbox", is_flag=True, help="Write no checkpoints, no files elsewhere, and reach no other machine.")
@click.option(
    "--python",
    metavar="FILE",
    help="Python that has the job's torch.  [default: XMEM_CUDA_PYTHON, else the one that runs xmem]",
)
@click.option("-o", "--output", metavar="FOLDER", default="xmem-run", help="Where recordings go.")
@click.option("--cache", metavar="FOLDER", envvar="XMEM_CACHE", help="Where the driver is kept.  [default: user cache]")
@store_option
@json_option
@verbosity_options
def command(words: tuple[str, ...], as_json: bool, quiet: bool, verbose: bool, **options: Any) -> int:
    """Run a script on a virtual card: the real PyTorch and its real allocator, without a GPU.

    SCRIPT is a Python script, -m MODULE, or torchrun with its words. Needs a CUDA build of torch, x86-64 Linux and,
    once, a C++ compiler. Nothing is computed: only the memory of the run means something. Ends with 1 where it runs
    out of memory, with 3 where the script fails.

    \b
    xmem run --gpu rtx4090 train.py --epochs 1
    xmem run --gpu a100 torchrun --nproc-per-node 2 train.py
    """
    from xmem.capture.vgpu.run import Job, devices_wanted, run_job
    from xmem.capture.vgpu.torch_facts import default_python
    from xmem.cli.run_cards import answer_others, others_text
    from xmem.ingest import IngestOptions, ingest

    told = None if quiet else lambda text: print(make_inert(text), file=sys.stderr)  # noqa: T201
    gpu = _virtual_gpu(options, devices_wanted(words))
    job = Job(
        command=words,
        output=Path(options["output"]),
        cache=_cache(options["cache"]),
        python=options["python"] or default_python(),
        **{name: options[name] for name in ("steps", "timeout_s", "sandbox")},
    )

    def run(job: Job, gpu: VirtualGpu) -> tuple[Outcome, Ingested]:
        outcome = run_job(job, gpu, told, sys.stderr)
        how = IngestOptions(store=options["store"], as_ranks=len(outcome.files) > 1, name=outcome.name)
        return outcome, ingest(outcome.files, options=how)[0]

    outcome, read = run(job, gpu)
    others = [_virtual_gpu({**options, "gpu": name}, gpu.devices, gpu.card) for name in options["also"]]
    answers = answer_others((job, gpu, outcome, read.run_id), others, run, options["store"])
    also = {"also": [asdict(one) for one in answers]} if answers else {}
    table = f"\n\n{others_text(answers, terminal_width())}" if answers else ""
    print_text(json_text({**_facts(outcome, gpu, read), **also}) if as_json else _text(outcome, gpu, read) + table)
    return _exit_code(outcome)


def _cache(folder: str | None) -> Path:
    import os

    if folder is not None:
        return Path(folder)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "xmem"


def _virtual_gpu(options: dict[str, Any], devices: int, stand_in: Card | None = None) -> VirtualGpu:
    """Find the card by name, size or file; where only a size is known, a common card of that size stands in."""
    from xmem.capture.vgpu.cards import OTHERWISE, find_card, read_card
    from xmem.capture.vgpu.settings import DEFAULT_NON_TORCH_BYTES, VirtualGpu
    from xmem.simulate.gpu_table import find_gpu, parse_gpu
    from xmem.units import parse_bytes

    text = options["gpu"]
    if text.endswith(".toml"):
        card = read_card(text)
        total = card.total_bytes
    elif find_gpu(text) is None and find_card(text) is not None:
        card = _shipped(text)
        total = card.total_bytes
    else:
        target = parse_gpu(text)
        known = find_card(target.gpu.name) if target.gpu is not None else stand_in
        card = known or _shipped(OTHERWISE)
        total = target.total_bytes
    taken = options["non_torch"]
    return VirtualGpu(
        card=card,
        total_bytes=total,
        taken_bytes=DEFAULT_NON_TORCH_BYTES if taken is None else parse_bytes(taken, what="--non-torch"),
        devices=options["devices"] or devices,
        addresses=options["addresses"],
        benchmark=options["benchmark"],
    )


def _shipped(name: str) -> Card:
    from xmem.capture.vgpu.cards import find_card

    card = find_card(name)
    assert card is not None
    return card


def _exit_code(outcome: Outcome) -> int:
    if outcome.out_of_memory is not None:
        return EXIT_DOES_NOT_FIT
    return EXIT_UNREADABLE if outcome.failed else EXIT_OK


def _peaks(outcome: Outcome) -> list[dict[str, int]]:
    return [
        {
            "rank": part.rank or 0,
            "device": device,
            "peak_allocated_bytes": stats["allocated_bytes.all.peak"],
            "communicator_bytes": part.communicators.get(device, 0),
            "peak_reserved_bytes": stats["reserved_bytes.all.peak"],
            "num_alloc_retries": stats["num_alloc_retries"],
            "num_ooms": stats["num_ooms"],
        }
        for part in outcome.parts
        for device, stats in part.stats.items()
    ]


def _facts(outcome: Outcome, gpu: VirtualGpu, read: Ingested) -> dict[str, Any]:
    oom = outcome.out_of_memory
    return {
        "fits": None if oom is None and outcome.failed else oom is None,
        "run_id": read.run_id,
        "files": [str(file) for file in outcome.files],
        "status": outcome.status,
        "steps": outcome.steps,
        "virtual_gpu": gpu.card.name,
        "devices": gpu.devices,
        "total_bytes": gpu.total_bytes,
        "non_torch_bytes": gpu.taken_bytes,
        "usable_bytes": gpu.total_bytes - gpu.taken_bytes,
        "peaks": _peaks(outcome),
        "oom": None if oom is None else dict(zip(("rank", "requested_bytes", "device_free_bytes"), oom, strict=True)),
        "seconds": round(outcome.seconds, 3),
        "host_peak_bytes": outcome.host_peak_bytes,
        "notes": list(outcome.notes),
    }


_ENDINGS = {
    "steps": "stopped after the steps that were asked for",
    "timeout": "stopped by --timeout",
    "full": "stopped because it allocated very often without optimizer steps",
    "ended": "ended by itself",
    "killed": "killed, or left without saying so; what was recorded until then is kept",
}


def _text(outcome: Outcome, gpu: VirtualGpu, read: Ingested) -> str:
    oom = outcome.out_of_memory
    if oom is None and outcome.failed:
        head = f"FAILED on a virtual {gpu.card.name}, though not for want of memory: this is no answer."
    elif oom is None:
        head = f"RAN on a virtual {gpu.card.name} without running out of memory."
    else:
        asked, free = bytes_text(oom[1]).strip(), bytes_text(oom[2]).strip()
        head = (
            f"OUT OF MEMORY on a virtual {gpu.card.name}: {asked} asked for by rank {oom[0]}, {free} free on the card."
        )
    ending = _ENDINGS.get(outcome.status, outcome.status.splitlines()[0][:200])
    rows = [
        ("run", f"{make_inert(read.name)} ({read.run_id}), {outcome.steps} optimizer steps; {make_inert(ending)}"),
        ("usable", f"{bytes_text(gpu.total_bytes - gpu.taken_bytes)}  of {bytes_text(gpu.total_bytes).strip()} in all"),
    ]
    for peak in _peaks(outcome):
        where = f"rank {peak['rank']} cuda:{peak['device']}" if len(outcome.files) > 1 else f"cuda:{peak['device']}"
        rows.append((f"{where} allocated", f"{bytes_text(peak['peak_allocated_bytes'])}  peak"))
        rows.append((f"{where} reserved", f"{bytes_text(peak['peak_reserved_bytes'])}  peak"))
        if peak["communicator_bytes"]:
            rows.append((f"{where} NCCL", f"{bytes_text(peak['communicator_bytes'])}  assumed, outside the allocator"))
    notes = [f"note: {make_inert(note)}" for note in outcome.notes]
    return "\n".join([head, "", *fact_lines(rows), "", *notes, f"next: xmem simulate {read.run_id} --gpu 24"])
