"""Options that describe a training job, shared by `profile` and `estimate`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from xmem.errors import UsageError

if TYPE_CHECKING:
    from xmem.capture.workload import Workload

Function = TypeVar("Function", bound=Callable[..., Any])

_OPTIONS: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (("-b", "--batch-size"), {"type": click.IntRange(min=1), "default": 1, "help": "Samples in a batch."}),
    (("-o", "--optimizer"), {"default": "SGD", "help": "A class of torch.optim, or Adafactor."}),
    (("--optimizer-arg",), {"multiple": True, "metavar": "NAME=VALUE", "help": "An argument of it: momentum=0.9."}),
    (("--dtype",), {"default": "float32", "help": "Type of the parameters."}),
    (("--autocast",), {"default": "", "metavar": "DTYPE", "help": "Run forward under autocast: bfloat16."}),
    (("--image-size",), {"type": click.IntRange(min=1), "default": 86, "help": "Edge of square images, pixels."}),
    (("--sequence-length",), {"type": click.IntRange(min=1), "default": 128, "help": "Tokens in a row."}),
    (("--classes",), {"type": click.IntRange(min=1), "help": "Classes of the classifier."}),
    (("--accumulate",), {"type": click.IntRange(min=1), "default": 1, "help": "Batches before an optimizer step."}),
    (("--checkpointing",), {"is_flag": True, "help": "Recompute activations in backward."}),
    (
        ("--zero-grad",),
        {"type": click.Choice(["start", "before-backward", "end"]), "default": "start", "help": "Where it is called."},
    ),
    (("--set-to-none/--set-to-zero",), {"default": True, "help": "What zero_grad does."}),
    (("--attention",), {"default": "", "metavar": "NAME", "help": "transformers' attn_implementation: eager, sdpa."}),
    (("--iterations",), {"type": click.IntRange(min=1), "default": 4, "help": "Steps to run."}),
)


def workload_options(function: Function) -> Function:
    """Add MODEL and every option of a training job."""
    for names, settings in reversed(_OPTIONS):
        function = click.option(*names, show_default=settings.get("default") not in (None, ""), **settings)(function)
    return click.argument("model")(function)


def make_workload(options: dict[str, Any]) -> Workload:
    """Take the job out of a command's options."""
    from xmem.capture.workload import Workload

    names = (
        "model", "batch_size", "optimizer", "dtype", "autocast", "image_size", "sequence_length", "classes",
        "accumulate", "checkpointing", "zero_grad", "set_to_none", "attention", "iterations",
    )  # fmt: skip
    chosen = {name: options.pop(name) for name in names}
    arguments = dict(_argument(text) for text in options.pop("optimizer_arg"))
    return Workload(**chosen, optimizer_args=json.dumps(arguments, sort_keys=True))


def _argument(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise UsageError(f"--optimizer-arg {text!r} is not NAME=VALUE.", "Write it like momentum=0.9.")
    try:
        return name, json.loads(value.lower() if value in ("True", "False") else value)
    except ValueError:
        return name, value
