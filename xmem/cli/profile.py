"""`xmem profile`: a few training steps on the CPU, recorded as the trace of a job."""

from __future__ import annotations

import sys
from typing import Any

import click

from xmem.cli.options import json_option, print_text, verbosity_options
from xmem.cli.workload_options import make_workload, workload_options
from xmem.render import json_text, make_inert


@click.command()
@workload_options
@click.option("--output", metavar="FILE", help="File to write.  [default: MODEL_OPTIMIZER_bN.xmem.jsonl.gz]")
@click.option("--trace", metavar="FILE", help="Also run under torch.profiler and write its trace: .json or .json.gz.")
@click.option("--force", is_flag=True, help="Replace files where they exist.")
@json_option
@verbosity_options
def command(output: str | None, trace: str | None, force: bool, as_json: bool, quiet: bool, **options: Any) -> None:
    """Run a few training steps on the CPU and record what they allocate.

    MODEL is a torchvision name, a Hugging Face name that xmem ships a configuration of, a config.json, a timm name,
    or module:function or script.py:function, a function that returns model, optimizer and batch(size).

    \b
    xmem profile VGG19 -b 130 -o SGD
    xmem profile facebook/opt-125m -b 34 -o Adam
    """
    from xmem.capture.profile import profile

    options.pop("verbose", None)
    workload = make_workload(options)
    told = None if quiet else lambda text: print(make_inert(text), file=sys.stderr)  # noqa: T201
    target = profile(workload, output, trace=trace, force=force, progress=told)
    if as_json:
        print_text(json_text({"file": str(target), "bytes": target.stat().st_size, "trace": trace}))
        return
    if trace is not None:
        print_text(f"{make_inert(trace)} written.")
    print_text(f"{make_inert(str(target))} written.\nnext: xmem ingest {make_inert(str(target))}")
