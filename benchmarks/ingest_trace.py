"""Writes a torch.profiler trace of any size for benchmarks: python benchmarks/ingest_trace.py OUT.json [--events N].

The default, 972,000 events, is about 270 MB; 7,200,000 events are about 2 GB. The file is the same on every run: a
training loop on one GPU in Kineto's layout (torch 2.13), with shapes, stacks, memory events that add up, kernels and
flow arrows. Memory events obey the totals they state, and every step frees what it allocated but the parameters.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

PROCESS, THREAD, STREAM = 4242, 4242, 7
BASE_NS = 1_751_410_836_000_000_000
LAYERS = 48
PARAMETER_BYTES = 8 << 20
HEADER = f"""{{
  "schemaVersion": 1,
  "deviceProperties": [
    {{
      "id": 0, "name": "NVIDIA Synthetic 24GB", "totalGlobalMem": 25438126080,
      "computeMajor": 8, "computeMinor": 9, "numSms": 128
    }}
  ],
  "profile_memory": 1,
  "record_shapes": 1,
  "with_stack": 1,
  "distributedInfo": {{"backend": "nccl", "rank": 0, "world_size": 1}},
  "host_name": "benchmark",
  "displayTimeUnit": "ms",
  "baseTimeNanoseconds": {BASE_NS},
  "traceEvents": [
"""
FOOTER = """
  ],
  "traceName": "benchmark.json"
}
"""
KERNEL = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>,"
    " at::detail::Array<char*, 3> >(int, at::native::CUDAFunctor_add<float>, at::detail::Array<char*, 3>)"
)


class Trace:
    """A running clock, the counters of Kineto, and the device's memory."""

    def __init__(self) -> None:
        self.ns = 1_000_000
        self.event_index = 0
        self.external_id = 0
        self.allocated = 0
        self.address = 0x7F00_0000_0000
        self.free: dict[int, list[int]] = {}

    def tick(self, ns: int) -> str:
        """Move on and return the time in microseconds as Kineto writes it."""
        self.ns += ns
        return micros(self.ns)

    def span(self, category: str, name: str, duration_ns: int, args: str) -> str:
        """One complete event on the host."""
        return (
            f'  {{\n    "ph": "X", "cat": "{category}", "name": "{name}", "pid": {PROCESS}, "tid": {THREAD},\n'
            f'    "ts": {self.tick(137)}, "dur": {micros(duration_ns)},\n    "args": {{\n      {args}\n    }}\n  }}'
        )

    def operator(self, name: str, dims: str, sequence: int, duration_ns: int) -> str:
        """One cpu_op with shapes."""
        self.external_id += 1
        self.event_index += 1
        return self.span(
            "cpu_op", name, duration_ns,
            f'"External id": {self.external_id},"Sequence number": {sequence}, "Fwd thread id": 0,'
            f' "Record function id": 0, "Input Dims": {dims}, "Ev Idx": {self.event_index}',
        )  # fmt: skip

    def python(self, name: str, duration_ns: int) -> str:
        """One python_function."""
        self.event_index += 1
        return self.span(
            "python_function", name, duration_ns,
            f'"Python id": {self.event_index}, "Python parent id": 1, "Ev Idx": {self.event_index}',
        )  # fmt: skip

    def memory(self, address: int, size: int) -> str:
        """One [memory] event; a negative size is a free."""
        self.event_index += 1
        self.allocated += size
        return (
            '  {\n    "ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]",'
            f' "pid": {PROCESS}, "tid": {THREAD},\n    "ts": {self.tick(11)},\n    "args": {{\n'
            f'      "Total Reserved": 17179869184, "Total Allocated": {self.allocated}, "Bytes": {size},'
            f' "Addr": {address}, "Device Id": 0, "Device Type": 1, "Ev Idx": {self.event_index}\n    }}\n  }}'
        )

    def take(self, size: int) -> int:
        """An address for a block of that size, used again after a free."""
        ready = self.free.get(size)
        if ready:
            return ready.pop()
        self.address += size
        return self.address - size

    def give(self, address: int, size: int) -> None:
        """Let an address be used again."""
        self.free.setdefault(size, []).append(address)

    def launch(self) -> Iterator[str]:
        """A runtime call, its kernel and the arrow between them."""
        correlation = self.external_id
        yield self.span(
            "cuda_runtime", "cudaLaunchKernel", 4_321, f'"External id": {correlation}, "cbid": 211,'
            f' "correlation": {correlation}',
        )  # fmt: skip
        start = micros(self.ns + 9_000)
        for phase, place in (("s", f'"pid": {PROCESS}, "tid": {THREAD}'), ("f", f'"pid": 0, "tid": {STREAM}')):
            bind = ', "bp": "e"' if phase == "f" else ""
            yield (
                f'  {{\n    "ph": "{phase}", "id": {correlation}, {place}, "ts": {start},\n'
                f'    "cat": "ac2g", "name": "ac2g"{bind}\n  }}'
            )
        yield (
            f'  {{\n    "ph": "X", "cat": "kernel", "name": "{KERNEL}", "pid": 0, "tid": {STREAM},\n'
            f'    "ts": {start}, "dur": 7.648,\n    "args": {{\n      "External id": {correlation}, "queued": 0,'
            f' "device": 0, "context": 1, "registers per thread": 16, "shared memory": 0,\n'
            f'      "stream": {STREAM}, "correlation": {correlation},'
            ' "grid": [4096, 1, 1], "block": [128, 1, 1]\n    }\n  }'
        )


def micros(ns: int) -> str:
    """Microseconds with three decimals."""
    return f"{ns // 1000}.{ns % 1000:03d}"


def records(trace: Trace) -> Iterator[str]:
    """Yield the records of one training step after another, for ever."""
    for _ in range(2 * LAYERS):
        yield trace.memory(trace.take(PARAMETER_BYTES), PARAMETER_BYTES)
    step = 0
    while True:
        yield trace.span("user_annotation", f"ProfilerStep#{step}", 60_000_000, f'"External id": {step}')
        live: list[tuple[int, int]] = []
        for layer in range(LAYERS):
            yield from forward(trace, layer, step * LAYERS + layer, live)
        for layer in reversed(range(LAYERS)):
            yield from backward(trace, step * LAYERS + layer, live)
        step += 1


def forward(trace: Trace, layer: int, sequence: int, live: list[tuple[int, int]]) -> Iterator[str]:
    """A block of a network: module, Python functions, operators with shapes, allocations, kernels."""
    yield trace.python(f"nn.Module: Block_{layer}", 900_000)
    yield trace.python(f"/opt/model/blocks.py({100 + layer}): forward", 890_000)
    for number in range(6):
        yield trace.python(f"torch/nn/modules/module.py({1700 + number}): _call_impl", 120_000)
        yield trace.operator("aten::linear", "[[8, 512, 1024], [1024, 1024], [1024]]", sequence, 60_000)
        yield trace.operator("aten::addmm", "[[1024], [4096, 1024], [1024, 1024], [], []]", sequence, 50_000)
        size = (number + 1) * (512 << 10)
        address = trace.take(size)
        live.append((address, size))
        yield trace.memory(address, size)
        yield from trace.launch()


def backward(trace: Trace, sequence: int, live: list[tuple[int, int]]) -> Iterator[str]:
    """Operators that free what the forward pass kept, with a temporary each."""
    for _ in range(6):
        yield trace.operator("autograd::engine::evaluate_function: AddmmBackward0", "[[4096, 1024]]", sequence, 80_000)
        yield trace.operator("AddmmBackward0", "[[4096, 1024]]", sequence, 70_000)
        yield trace.operator("aten::mm", "[[4096, 1024], [1024, 1024]]", sequence, 40_000)
        temporary = trace.take(4 << 20)
        yield trace.memory(temporary, 4 << 20)
        yield from trace.launch()
        yield trace.memory(temporary, -(4 << 20))
        trace.give(temporary, 4 << 20)
        address, size = live.pop()
        yield trace.memory(address, -size)
        trace.give(address, size)


def write_trace(path: Path, events: int) -> None:
    """Write a trace of so many events."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(HEADER)
        stream = records(Trace())
        file.write(next(stream))
        left = events - 1
        while left > 0:
            part = list(islice(stream, min(left, 10_000)))
            left -= len(part)
            file.write(",\n" + ",\n".join(part))
        file.write(FOOTER)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("path", type=Path)
    parser.add_argument("--events", type=int, default=972_000)
    arguments = parser.parse_args()
    write_trace(arguments.path, arguments.events)


if __name__ == "__main__":
    main()
