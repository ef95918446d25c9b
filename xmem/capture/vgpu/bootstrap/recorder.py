"""Records one process of a job on a virtual card: the real allocator's history, phases, steps, and what tensors are.

Runs inside the job's process and needs nothing but torch. Each flush appends one line of JSON, so a process that is
killed leaves all that was written before. A position is the number of allocations and frees that a device has seen.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import sys
import threading
import time
from collections.abc import Iterable
from typing import Any

#: Between flushes lie at least so many seconds, and so many times what the last one took.
FLUSH_EVERY_S, FLUSH_SHARE = 5.0, 20.0
#: A script is ended when it has allocated and freed so often since its last step or backward pass, or since it began.
MOST_IDLE, MOST_IN_ALL = 150_000, 1_000_000
_FIRST_CUDNN = 90800


def start(torch: Any) -> None:
    """Start the recorder of this process."""
    recorder = Recorder(torch)
    sys.modules[__name__].recorder = recorder  # type: ignore[attr-defined]
    recorder.begin()


class Recorder:
    """What is known of the process so far, and what of it is written."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self.steps_wanted = int(os.environ.get("XMEM_VGPU_STEPS") or 3)
        self.deadline = float(os.environ.get("XMEM_VGPU_DEADLINE") or time.monotonic() + 300)
        self.lock = threading.RLock()
        self.steps: dict[int, int] = {}
        self.marks: list[Any] = []
        self.stacks: dict[Any, int] = {}
        self.written: dict[int, int] = {}
        self.status = "running"
        self.depth = 0
        self.trained_at: dict[int, int] = {}
        path = os.path.join(os.environ["XMEM_VGPU_FOLDER"], f"part-{os.getpid()}.jsonl")
        self.file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - open as long as the process lives

    def begin(self) -> None:
        """Switch the history on and hook into optimizers, backward passes and out-of-memory errors."""
        torch = self.torch
        torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python", max_entries=2 * MOST_IN_ALL)
        self._write(self._header())
        from torch.optim import optimizer

        optimizer.register_optimizer_step_pre_hook(self._before_step)
        optimizer.register_optimizer_step_post_hook(self._after_step)
        self._watch_backward()
        torch._C._cuda_attach_out_of_memory_observer(self._out_of_memory)
        self.hook = sys.excepthook
        sys.excepthook = self._failed
        atexit.register(self.end)
        os.register_at_fork(after_in_child=self._forked)
        self.owner = os.getpid()
        threading.Thread(target=self._watch_time, daemon=True).start()

    def _header(self) -> dict[str, Any]:
        torch = self.torch
        driver = ctypes.CDLL("libcuda.so.1")
        cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
        return {
            "torch_version": torch.__version__,
            "alloc_conf": os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF"),
            "pid": os.getpid(),
            "argv": sys.argv,
            "cudnn_version": cudnn,
            "asks_cudnn": bool(driver.xmem_vgpu_asks_cudnn()) if cudnn and cudnn >= _FIRST_CUDNN else False,
            "device_name": torch.cuda.get_device_name(0),
            "devices": torch.cuda.device_count(),
        }

    # ------------------------------------------------------------------ marks
    def position(self, device: int) -> int:
        """Count the allocations and frees of a device so far."""
        counts = self.torch._C._cuda_memoryStats(device)["allocation"]["all"]
        return int(counts["allocated"]) + int(counts["freed"])

    def mark(self, kind: str, value: Any = None) -> None:
        """Note that something begins or ends now, on every device in use."""
        with self.lock:
            for device in range(self.torch.cuda.device_count()):
                position = self.position(device)
                if position:
                    self.marks.append([device, position, kind, value])

    def own(self, category: str, tensors: Iterable[Any]) -> None:
        """Note what the tensors are that now lie at these addresses."""
        found: dict[int, list[int]] = {}
        for tensor in tensors:
            place = _place(tensor)
            if place is not None:
                found.setdefault(place[0], []).append(place[1])
        with self.lock:
            for device, addresses in found.items():
                self.marks.append([device, self.position(device), "own", [category, addresses]])

    def own_models(self) -> None:
        """Find every module of the process; its parameters and buffers are parameters."""
        module_type = self.torch.nn.Module
        for module in [found for found in gc.get_objects() if issubclass(type(found), module_type)]:
            held = getattr(module, "__dict__", {})
            for tensors in (held.get("_parameters"), held.get("_buffers")):
                self.own("parameter", (t for t in (tensors or {}).values() if t is not None))

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if not self.steps:
            self.own_models()
        self.own("parameter", parameters)
        self.own("gradient", (p.grad for p in parameters if p.grad is not None))
        self.mark("optimizer")

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.own("optimizer_state", _tensors_of(optimizer.state.values()))
        self.steps[id(optimizer)] = self.steps.get(id(optimizer), 0) + 1
        self.mark("step", max(self.steps.values()))
        self.trained_at = self._positions()
        enough = min(self.steps.values()) >= self.steps_wanted or max(self.steps.values()) >= 2 * self.steps_wanted
        if enough:
            self.stop("steps")
        self.flush()

    def _watch_backward(self) -> None:
        graph, autograd = self.torch.autograd.graph, self.torch.autograd
        run = graph._engine_run_backward

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            if self.depth == 0:
                self.mark("backward")
            self.depth += 1
            try:
                return run(*args, **kwargs)
            finally:
                self.depth -= 1
                if self.depth == 0:
                    self.mark("after_backward")
                    self.trained_at = self._positions()

        graph._engine_run_backward = run_backward
        if hasattr(autograd, "_engine_run_backward"):
            autograd._engine_run_backward = run_backward

    def _out_of_memory(self, device: int, asked: int, allocated: int, free: int) -> None:
        with self.lock:
            self.own_models()
            self.marks.append([device, self.position(device), "oom", [asked, allocated, free]])
            self.flush()

    # ------------------------------------------------------------------ the end
    def stop(self, status: str, code: int = 0) -> None:
        """Write all and leave the process at once: nothing of the script runs any more."""
        self.status = status
        self.flush()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)

    def _failed(self, kind: Any, error: Any, trace: Any) -> None:
        self.status = f"error: {kind.__name__}: {str(error)[:2000]}"
        self.hook(kind, error, trace)

    def end(self) -> None:
        """Write all that is left; what tensors are alive is the last that is noted."""
        if os.getpid() == self.owner:
            self.status = "ended" if self.status == "running" else self.status
            self.own_models()
            self.flush()

    def _forked(self) -> None:
        self.steps_wanted = 1 << 60
        self.owner = -1

    def _watch_time(self) -> None:
        """Flush now and then; end the process in time, when its history is full, or when xmem itself is gone."""
        runner = int(os.environ.get("XMEM_VGPU_RUNNER") or 0)
        due = time.monotonic() + FLUSH_EVERY_S
        while True:
            time.sleep(0.2)
            now = time.monotonic()
            if now >= self.deadline:
                self.stop("timeout")
            if runner and not os.path.exists(f"/proc/{runner}"):
                os._exit(1)
            if self._is_full():
                self.stop("full")
            if now >= due:
                self.flush()
                due = time.monotonic() + max(FLUSH_EVERY_S, FLUSH_SHARE * (time.monotonic() - now))

    def _is_full(self) -> bool:
        """Say whether the process has allocated so often that it need not go on; asks only counters."""
        return any(
            now > MOST_IN_ALL or now - self.trained_at.get(device, 0) > MOST_IDLE
            for device, now in self._positions().items()
        )

    def advance(self) -> None:
        """Note that the script came one step nearer to an end that it has, such as the length of a text."""
        self.trained_at = self._positions()

    def _positions(self) -> dict[int, int]:
        return {device: self.position(device) for device in range(self.torch.cuda.device_count())}

    # ------------------------------------------------------------------ writing
    def flush(self) -> None:
        """Append what is new: allocator history, stacks, marks and the allocator's own statistics."""
        if os.getpid() != self.owner:
            return
        with self.lock:
            snapshot = self.torch.cuda.memory._snapshot()
            traces = snapshot["device_traces"]
            used = [n for n, trace in enumerate(traces) if n in self.written or _has_allocations(trace)]
            news = {device: self._entries(device, traces[device]) for device in used}
            marks, self.marks = self.marks, []
            self._write(
                {
                    "rank": _rank(self.torch),
                    "status": self.status,
                    "entries": news,
                    "stacks": self._new_stacks(),
                    "marks": marks,
                    "stats": {device: self._statistics(device) for device in news},
                    "unmodelled": _unmodelled(),
                    "cudnn_calls": _cudnn_calls(),
                    "communicators": {device: _communicators(device) for device in news},
                }
            )

    def _entries(self, device: int, trace: list[Any]) -> list[Any]:
        first = self.written.get(device, 0)
        self.written[device] = len(trace)
        rows, seen = [], {}
        for entry in trace[first:]:
            frames = entry.get("frames")
            stack = None
            if frames:
                key = tuple(map(id, frames))
                if key not in seen:
                    seen[key] = self._stack(frames)
                stack = seen[key]
            pool = entry.get("segment_pool_id") or entry.get("pool_id") or (0, 0)
            address = entry.get("addr", entry.get("address"))
            row = [entry["action"], address, entry["size"], entry["stream"], stack, f"{pool[0]}:{pool[1]}"]
            rows.append([*row, entry["device_free"]] if "device_free" in entry else row)
        return rows

    def _stack(self, frames: list[Any]) -> int:
        key = tuple((f["name"], f["filename"], f["line"]) for f in frames)
        return self.stacks.setdefault(key, len(self.stacks))

    def _new_stacks(self) -> list[Any]:
        first = self.written.get(-1, 0)
        self.written[-1] = len(self.stacks)
        return [[number, *frames] for frames, number in list(self.stacks.items())[first:]]

    def _statistics(self, device: int) -> dict[str, Any]:
        own = self.torch.cuda.memory_stats(device)
        return {name: value for name, value in own.items() if ".all." in name or "." not in name}

    def _write(self, line: dict[str, Any]) -> None:
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()


def _rank(torch: Any) -> int | None:
    distributed = getattr(torch, "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    text = os.environ.get("RANK", "")
    return int(text) if text.isdigit() else None


def _has_allocations(trace: list[Any]) -> bool:
    return any(entry["action"] == "alloc" for entry in trace)


def _unmodelled() -> list[str]:
    text = ctypes.create_string_buffer(1 << 16)
    ctypes.CDLL("libcuda.so.1").xmem_vgpu_unmodelled(text, len(text))
    return sorted(filter(None, text.value.decode().split("\n")))


def _cudnn_calls() -> int:
    function = ctypes.CDLL("libcuda.so.1").xmem_vgpu_cudnn_calls
    function.restype = ctypes.c_uint64
    return int(function())


def _communicators(device: int) -> int:
    function = ctypes.CDLL("libcuda.so.1").xmem_vgpu_communicators
    function.restype = ctypes.c_uint64
    return int(function(device))


def _place(tensor: Any) -> tuple[int, int] | None:
    """Return device and address of a tensor's storage on a virtual card."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    try:
        if tensor.device.type != "cuda":
            return None
        address = tensor.untyped_storage().data_ptr()
        return (tensor.device.index or 0, address) if address else None
    except (AttributeError, RuntimeError, NotImplementedError):
        return None


def _tensors_of(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        if isinstance(value, dict):
            yield from _tensors_of(value.values())
        elif isinstance(value, (list, tuple)):
            yield from _tensors_of(value)
        elif hasattr(value, "untyped_storage"):
            yield value


# ------------------------------------------------------------------ the sandbox
def fence_off(torch: Any) -> None:
    """Write no checkpoint, and refuse to write files outside the recording's folder or to reach another machine."""
    folders = [os.path.realpath(os.environ["XMEM_VGPU_FOLDER"]), "/dev", "/proc"]
    torch.save = lambda *args, **kwargs: None

    def refuse(event: str, args: Any) -> None:
        if event == "open" and isinstance(args[0], (str, bytes)) and _writes(args[1], args[2]):
            path = os.path.realpath(os.fsdecode(args[0]))
            if not any(path == folder or path.startswith(folder + "/") for folder in folders):
                raise PermissionError(f"xmem run --sandbox: {path} is not written")
        elif event == "socket.connect" and isinstance(args[1], tuple) and not _is_here(str(args[1][0])):
            raise PermissionError(f"xmem run --sandbox: {args[1][0]} is not reached")

    sys.addaudithook(refuse)


def _writes(mode: Any, flags: Any) -> bool:
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def _is_here(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")
