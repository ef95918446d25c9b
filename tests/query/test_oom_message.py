"""Out-of-memory messages of every torch generation, number by number."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.paths import SHARED_DATA, needs_shared
from xmem.errors import UnreadableError
from xmem.query.oom_message import OomMessage, read_messages
from xmem.render_oom import oom_json, oom_text

MIB, GIB = 1 << 20, 1 << 30


def numbers(message: OomMessage) -> dict[str, int]:
    return {name: value for name, value in vars(message).items() if name.endswith("_bytes") and value is not None}


@needs_shared
def test_shared_messages() -> None:
    found = read_messages((SHARED_DATA / "bug_inputs" / "70-oom-messages.txt").read_text())
    expected = json.loads((SHARED_DATA / "bug_inputs" / "expected.json").read_text())["70-oom-messages.txt"]
    assert len(found) == expected["messages"]
    assert [(one.backend, one.device_index) for one in found] == [
        ("CUDA", 0), ("CUDA", 1), ("CUDA", 0), ("CUDA", 0), ("HIP", 0), ("XPU", 0),
    ]  # fmt: skip
    assert numbers(found[0]) == {
        "tried_bytes": 250 * MIB, "total_bytes": 47 * GIB // 2, "free_bytes": 104 * MIB,
        "process_bytes": int(23.39 * GIB), "allocated_bytes": 19 * GIB, "private_pool_bytes": 64 * MIB,
        "unused_bytes": 15 * GIB // 4, "reserved_bytes": 19 * GIB + 15 * GIB // 4,
    }  # fmt: skip
    assert found[0].non_torch_bytes == int(23.39 * GIB) - 19 * GIB - 15 * GIB // 4
    assert numbers(found[1]) == {
        "tried_bytes": 3 * GIB // 2, "total_bytes": int(7.79 * GIB), "free_bytes": 512 * MIB,
        "allocated_bytes": 4 * GIB, "reserved_bytes": 13 * GIB // 2, "unused_bytes": 5 * GIB // 2,
    }  # fmt: skip
    assert found[2].unused_bytes == 179 << 10 and found[2].reserved_bytes == 4 * GIB + (179 << 10)
    assert found[3].process_bytes is None and found[3].impossible == ("process_bytes",)
    assert found[3].total_bytes == int(15.99 * GIB) and found[3].non_torch_bytes is None
    assert found[4].unused_bytes == 5 * GIB // 2 and found[5].free_bytes is None
    advice = [" ".join(one.advice()) for one in found]
    assert "expandable_segments:True" in advice[0] and "PYTORCH_HIP_ALLOC_CONF" in advice[4]
    assert "larger than the device" in advice[2] and "Windows" in advice[3] and "smaller batch" in advice[5]


def test_other_processes_and_a_limit() -> None:
    (found,) = read_messages(
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 3 has a total capacity of 79.15 GiB of which 1.00 MiB is"
        " free. Process 11 has 70.00 GiB memory in use. Process 12 has 512.00 MiB memory in use. Including non-PyTorch"
        " memory, this process has 8.00 GiB memory in use. 40.00 GiB allowed; Of the allocated memory 4.00 GiB is"
        " allocated by PyTorch, and 10.00 MiB is reserved by PyTorch but unallocated."
    )
    assert found.processes == ((11, 70 * GIB), (12, 512 * MIB)) and found.allowed_bytes == 40 * GIB
    assert found.advice()[0].startswith("Other processes hold 70.50 GiB of the device (process 11, 12)")
    assert found.advice()[1].startswith("3.99 GiB of this process lies outside of torch's allocator")


@pytest.mark.parametrize(
    ("text", "backend", "tried", "advice"),
    [
        ("MPS backend out of memory (MPS allocated: 8.00 GB, other allocations: 1.25 GB, max allowed: 9.07 GB)."
         " Tried to allocate 256 bytes on shared pool.", "MPS", 256, "1.25 GiB of this process lies outside"),
        ("RuntimeError: [enforce fail at alloc_cpu.cpp:75] err == 0. DefaultCPUAllocator: can't allocate memory: you"
         " tried to allocate 4096000000 bytes. Error code 12", "CPU", 4096000000, "The host's memory ran out"),
        ("RuntimeError: CUDA error: out of memory", "CUDA", None, "The message carries no numbers"),
        ("cuda runtime error (2) : out of memory at /pytorch/THCStorage.cu:58", "CUDA", None, "The message carries"),
    ],
)  # fmt: skip
def test_other_words(text: str, backend: str, tried: int | None, advice: str) -> None:
    (found,) = read_messages(text)
    assert (found.backend, found.tried_bytes) == (backend, tried)
    assert found.advice()[0].startswith(advice)


def test_noise_breaks_and_repeats() -> None:
    noise = (
        '[rank0]: Traceback\n  File "x.py"\n\x1b[31mtorch.OutOfMemoryError: CUDA out of memory. Tried to\n allocate'
        " 2.00 GiB. GPU 0 has a total capacity of 4.00 GiB of which\n 1.00 GiB is free.\n\nepoch 2 done\n"
    )
    (found,) = read_messages(noise + noise)
    assert (found.count, found.tried_bytes, found.free_bytes) == (2, 2 * GIB, GIB)
    assert oom_text([found]).startswith("CUDA out of memory, device 0, 2 times\n  tried to allocate  2.00 GiB  ")
    assert oom_json([found])[0]["tried_bytes"] == 2 * GIB


def test_what_is_no_message_is_said() -> None:
    with pytest.raises(UnreadableError):
        read_messages("hello")
    with pytest.raises(UnreadableError) as caught:
        read_messages("all is well; CUDA out of memory is a sad thing")
    assert str(caught.value) == (
        "There is no out-of-memory message in this text.\n"
        "Paste the line that begins like: CUDA out of memory. Tried to allocate 250.00 MiB. GPU 0 has ..."
    )


@given(st.text(), st.integers(0, 10**30), st.sampled_from(["bytes", "KiB", "GiB", "TiB"]))
def test_any_number_is_read_or_unknown(noise: str, number: int, unit: str) -> None:
    (found, *_) = read_messages(f"CUDA out of memory. Tried to allocate {number} {unit}. {noise}")
    factor = {"bytes": 1, "KiB": 1 << 10, "GiB": GIB, "TiB": 1 << 40}[unit]
    assert found.tried_bytes == (number * factor if number * factor < 1 << 53 else found.tried_bytes)
    assert found.tried_bytes is None or found.tried_bytes < 1 << 62
    assert oom_text([found])
