"""Fuzzes the JSON readers with broken traces and timelines: python tests/fuzz/fuzz_json.py [--seconds N].

With atheris the coverage of the readers guides it; without, seeds are mutated at random. What may come out is rows or
an XmemError; anything else, more than a second an input or more than a gibibyte stops the run and leaves the input in
crash-json.bin.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import importlib.util
import io
import json
import random
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent.parent
if str(REPOSITORY) not in sys.path:
    sys.path.insert(0, str(REPOSITORY))

atheris: Any = importlib.import_module("atheris") if importlib.util.find_spec("atheris") else None
with atheris.instrument_imports(include=["xmem.ingest"]) if atheris else contextlib.nullcontext():
    from tests.ingest.traces import gzipped, memory, span, trace
    from xmem.ingest import adapter, json_stream, memory_timeline, torch_trace  # noqa: F401 - seen by the fuzzer

MEMORY_BYTES = 1 << 30
LONGEST_BYTES = 1 << 16
SLOWEST_S = 5.0
CHUNKS = (64, 1000, 1 << 21)
#: Pieces that break JSON, and pieces that hold it together.
PIECES = (
    b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b"\0", b"\n", b"\xff", b"\xef\xbb\xbf", b"nan", b"-inf", b"1e999",
    b'"traceEvents":[', b'},{"ph":"i","name":"[memory]"', b']}', b"0x7f", b"9" * 400, b"[" * 2000, b'{"a":' * 300,
    b'"\\ud800"', b"null", b'"Addr":', b"-", b"e", b".", b'"ts":', b'"', b"\x1f\x8b",
)  # fmt: skip


def seeds() -> list[bytes]:
    """Return small files of every form."""
    events = [memory(1, 5), span('a "b" {[', args={"list": [{"name": "x"}, {"name": "y"}]}), memory(2, -5)]
    made = [json.dumps(trace(*events), indent=indent).encode() for indent in (None, 1)]
    made += [json.dumps(events).encode(), b"\xef\xbb\xbf\n" + json.dumps(trace(*events)).encode()]
    made.append(json.dumps({"traceEvents": events, "distributedInfo": {"rank": 1}, "x": [{"id": 1}]}).encode())
    made.append(b"[[-1,1,8,0],[5,2,16,4],[6,3,-16,4],[6,3,16,3],[7,4,-16,3]]")
    made.append(b"[[0,1,2],[[0,1,0,0,0,0,0,0,0],[0,1,2,0,0,0,0,0,0],[0,0,0,0,0,0,0,0,9]]]")
    return [*made, gzipped(made[0])]


def read_everything(data: bytes) -> None:
    """Read one input as a source of the kind that it looks like, in chunks of several sizes."""
    from xmem.errors import XmemError
    from xmem.ingest.adapter import Notes, find_adapter
    from xmem.ingest.source import Source

    json_stream.CHUNK_BYTES = CHUNKS[len(data) % len(CHUNKS)]
    with contextlib.suppress(XmemError):
        source = Source(io.BytesIO(data), "fuzz")
        found = find_adapter(source.head(), "fuzz.json")
        if found is not None and found.name in ("torch_trace", "memory_timeline"):
            for _ in found.read(source, Notes(filename="fuzz")):  # type: ignore[arg-type]
                pass


def mutate(order: random.Random, made: list[bytes]) -> bytes:
    """Change one of the seeds in a few places."""
    data = bytearray(order.choice(made))
    for _ in range(order.choice((1, 1, 2, 3, 8))):
        at = order.randrange(len(data) + 1)
        kind = order.randrange(5)
        if kind == 0:
            data[at:at] = order.choice(PIECES)
        elif kind == 1:
            del data[at : at + order.choice((1, 1, 5, 60))]
        elif kind == 2 and at < len(data):
            data[at] = order.randrange(256)
        elif kind == 3:
            other = order.choice(made)
            start = order.randrange(len(other))
            data[at:at] = other[start : start + order.randrange(80)]
        else:
            del data[at:]
    return bytes(data[:LONGEST_BYTES])


def run_guided(seconds: int) -> bool:
    """Let atheris guide, if it is there. It ends the process."""
    if atheris is None:
        return False
    corpus = Path(tempfile.mkdtemp(prefix="xmem-fuzz-"))
    atexit.register(shutil.rmtree, corpus, ignore_errors=True)
    for number, seed in enumerate([*seeds(), *PIECES]):
        (corpus / str(number)).write_bytes(seed)
    options = [f"-max_total_time={seconds}", f"-max_len={LONGEST_BYTES}", f"-rss_limit_mb={MEMORY_BYTES >> 20}"]

    def mutate_some(data: bytes, most: int, seed: int) -> bytes:
        if seed % 2:
            return bytes(atheris.Mutate(data, most))
        return mutate(random.Random(seed), [data or b"[", *seeds()[:2]])[:most]

    atheris.Setup([sys.argv[0], *options, str(corpus)], checked, custom_mutator=mutate_some)
    atheris.Fuzz()
    return True


def run_random(check: Callable[[bytes], None], seconds: int, seed: int) -> int:
    """Mutate seeds until the time is over; return how many inputs were read."""
    order, made, count = random.Random(seed), seeds(), 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        check(mutate(order, made))
        count += 1
    return count


def checked(data: Any) -> None:
    """Read one input; leave it behind where it does harm."""
    data = bytes(data)
    started = time.process_time()
    try:
        read_everything(data)
        took = time.process_time() - started
        if took > SLOWEST_S:
            raise AssertionError(f"one input took {took:.1f} s")
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        if used > MEMORY_BYTES:
            raise AssertionError(f"{used:,} bytes of memory were used")
    except BaseException:
        Path("crash-json.bin").write_bytes(data)
        raise


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if not run_guided(arguments.seconds):
        for data in seeds():
            checked(data)
        count = run_random(checked, arguments.seconds, arguments.seed)
        sys.stdout.write(f"{count:,} inputs in {arguments.seconds} s (atheris is not installed): nothing harmful\n")


if __name__ == "__main__":
    main()
