"""A training job in words: model, batch, optimizer and the shape of its loop."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass

from xmem.errors import UsageError

ZERO_GRAD = ("start", "before-backward", "end")


@dataclass(frozen=True)
class Workload:
    """Everything that decides which memory a training job asks for; equal workloads have equal traces."""

    model: str
    batch_size: int = 1
    optimizer: str = "SGD"
    optimizer_args: str = "{}"  # JSON; lr 0.001 unless given
    dtype: str = "float32"
    autocast: str = ""
    image_size: int = 86
    sequence_length: int = 128
    classes: int | None = None
    accumulate: int = 1
    checkpointing: bool = False
    zero_grad: str = "start"
    set_to_none: bool = True
    attention: str = ""
    iterations: int = 4

    def __post_init__(self) -> None:
        """Refuse what cannot be run."""
        if self.zero_grad not in ZERO_GRAD:
            raise UsageError(
                f"zero_grad position {self.zero_grad!r} is unknown.", f"Choose from {', '.join(ZERO_GRAD)}."
            )
        for name in ("batch_size", "image_size", "sequence_length", "accumulate", "iterations"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, not {getattr(self, name)}.")
        try:
            arguments = json.loads(self.optimizer_args)
        except ValueError as error:
            raise UsageError(f"The optimizer's arguments are not JSON: {error}") from error
        if not isinstance(arguments, dict):
            raise UsageError("The optimizer's arguments are not a JSON object.", 'Write them like {"momentum": 0.9}.')

    def with_batch(self, batch_size: int) -> Workload:
        """Give the same job with another batch size."""
        return dataclasses.replace(self, batch_size=batch_size)

    def describe(self) -> dict[str, object]:
        """Return the job's fields, as the profile's metadata."""
        return {"workload": dataclasses.asdict(self)}

    def key(self, *facts: str) -> str:
        """Give a short hash of the job and of what else decides its trace (versions, content of files)."""
        text = json.dumps([dataclasses.asdict(self), facts], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]
