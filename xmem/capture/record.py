"""`record` and `mark`: a hook round your own training loop, on any device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xmem.capture.models import require
from xmem.errors import RefusedError, UsageError

if TYPE_CHECKING:
    from xmem.capture.recorder import Recorder

_DEVICES = ("cpu", "cuda")
#: Recorders that are on now, innermost last; `mark` writes into the last.
_active: list[Recorder] = []


@contextlib.contextmanager
def record(output: str | Path, *, device: str | None = None, force: bool = False) -> Iterator[None]:
    """Record the memory of the code inside; also a decorator.

    On the CPU the event log of a GPU run of the same code is written to `output`: categories by identity (parameters,
    gradients, optimizer state), module and phase. On CUDA a memory snapshot with history is dumped to `output`, also
    when memory runs out. `device` is "cpu" or "cuda" (None: cuda where there is one).
    """
    torch = require("torch", "Recording")
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind not in _DEVICES:
        raise UsageError(f"Recording on {kind!r} is not supported.", f"Choose from {', '.join(_DEVICES)}.")
    target = Path(output)
    if target.exists() and not force:
        raise RefusedError(f"{target} exists already.", "force=True replaces it.")
    with _record_cuda(torch, target) if kind == "cuda" else _record_cpu(torch, target):
        yield


@contextlib.contextmanager
def _record_cpu(torch: Any, target: Path) -> Iterator[None]:
    from xmem.capture.cuda_autocast import autocast_as_on_cuda
    from xmem.capture.cuda_paths import CudaPaths, foreach_as_on_cuda
    from xmem.capture.log import write_log
    from xmem.capture.recorder import Recorder
    from xmem.capture.watching import watch_loop

    recorder = Recorder()
    _active.append(recorder)
    try:
        with watch_loop(recorder), foreach_as_on_cuda(), autocast_as_on_cuda(), CudaPaths(recorder), recorder:
            yield
    finally:
        recorder.close()
        _active.remove(recorder)
        write_log(recorder, target, {"torch_version": str(torch.__version__)})


@contextlib.contextmanager
def _record_cuda(torch: Any, target: Path) -> Iterator[None]:
    torch.cuda.memory._record_memory_history(stacks="python")  # frames of C++ cost six times as much
    try:
        yield
    finally:  # out of memory too: the snapshot then holds the failed request
        torch.cuda.memory._dump_snapshot(str(target))
        torch.cuda.memory._record_memory_history(enabled=None)


@contextlib.contextmanager
def _span(name: str) -> Iterator[None]:
    recorder = _active[-1]
    span_id = recorder.open_span("annotation", name)
    recorder.modules.append(span_id)
    try:
        yield
    finally:
        recorder.modules.remove(span_id)
        recorder.close_span(span_id)


def mark(name: str) -> contextlib.AbstractContextManager[Any]:
    """Annotate what runs inside: `with xmem.mark("validation"): ...`; without a recording it does nothing but that.

    On CUDA the mark is a `record_function`, which snapshots keep as an external annotation.
    """
    if _active:
        return _span(name)
    torch = require("torch", "Marking")
    return torch.profiler.record_function(name)  # type: ignore[no-any-return]
