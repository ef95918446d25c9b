"""Out-of-memory messages to text: each number with its meaning, then what to try."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from xmem.units import format_bytes

if TYPE_CHECKING:
    from xmem.query.oom_message import OomMessage


def oom_text(messages: Sequence[OomMessage]) -> str:
    """Explain each message in a paragraph of its own."""
    return "\n\n".join(_one(message) for message in messages)


def oom_json(messages: Sequence[OomMessage]) -> list[dict[str, object]]:
    """Return the numbers and the advice as plain data."""
    hidden = ("text", "impossible", "processes")
    return [
        {key: value for key, value in vars(message).items() if key not in hidden}
        | {
            "non_torch_bytes": message.non_torch_bytes,
            "impossible": list(message.impossible),
            "processes": [{"process_id": process, "bytes": size} for process, size in message.processes],
            "advice": message.advice(),
        }
        for message in messages
    ]


def _one(message: OomMessage) -> str:
    device = "" if message.device_index is None else f", device {message.device_index}"
    times = f", {message.count} times" if message.count > 1 else ""
    facts = message.facts()
    width = max((len(label) for label, _, _ in facts), default=0)
    sizes = [format_bytes(size) if size is not None else "unknown" for _, size, _ in facts]
    across = max((len(size) for size in sizes), default=0)
    lines = [f"{message.backend} out of memory{device}{times}"]
    for (label, size, meaning), shown in zip(facts, sizes, strict=True):
        text = meaning if size is not None else f"{meaning}; the message says an impossible number (below zero)"
        lines.append(f"  {label:<{width}}  {shown:>{across}}  {text}")
    return "\n".join([*lines, "What to try:", *(f"  - {sentence}" for sentence in message.advice())])
