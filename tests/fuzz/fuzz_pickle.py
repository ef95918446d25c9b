"""Fuzzes the snapshot readers with broken and hostile pickles and JSON: python tests/fuzz/fuzz_pickle.py [--seconds N].

With atheris the coverage of safe_pickle, snapshot_forms, snapshot_columns and snapshot_sender guides it; without,
seeds are mutated at random. Every two-hundredth input also goes through the adapter, with its process. What may come
out is rows or an XmemError; anything else stops the run and leaves the input in crash-snapshot.bin.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import os
import pickle
import random
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent.parent
if str(REPOSITORY) not in sys.path:
    sys.path.insert(0, str(REPOSITORY))

from tests.ingest.snapshots import basic, entry, with_trace  # noqa: E402

MEMORY_BYTES = 1 << 30
LONGEST_BYTES = 1 << 14  # shorter than what nested tuples need to exhaust the stack of this process
SLOWEST_S = 20.0


def seeds() -> list[bytes]:
    """Return small inputs of every form, and hostile ones."""
    small = basic()
    made = [pickle.dumps(small, protocol) for protocol in range(6)]
    made += [__import__("json").dumps(small).encode(), pickle.dumps(small["segments"]), pickle.dumps({"a": small})]
    made.append(pickle.dumps(with_trace(entry("oom", None, 5, 1, device_free=7, user_metadata={"a": [1, 2.5, None]}))))
    made.append(pickle.dumps(small | {"external_annotations": [{"stage": "START", "name": "x", "time_us": 1}] * 3}))
    made += [b"cos\nsystem\n(S'true'\ntR.", b"\x80\x04}r\xff\xff\xff\x0f.", b"\x80\x05\x97.", b"\x80\x02\x82\x01."]
    return made


def fuzz_inside(data: bytes) -> None:
    """Read and take apart in this process, as the reading process would; its exceptions are the expected ones."""
    from xmem.ingest import snapshot_forms as forms
    from xmem.ingest import snapshot_sender
    from xmem.ingest.safe_pickle import DamagedDataError, HostileDataError, load_plain

    with contextlib.suppress(HostileDataError, DamagedDataError, forms.ForeignDataError):
        if data.lstrip()[:1] in (b"{", b"["):
            found = forms.read_json(data)
        else:
            try:
                found = forms.arrange(load_plain(io.BytesIO(data)), "pickle")
            except DamagedDataError as damage:
                found = forms.salvage_snapshot(data, damage)
        snapshot_sender.send_snapshot(found, _Counter(len(data)), {"stacks": True, "device": None})  # type: ignore[arg-type]


class _Counter:
    """What send_snapshot needs of a Meter."""

    def __init__(self, count: int) -> None:
        self.count = count


def fuzz_adapter(data: bytes) -> None:
    """Read through the adapter and its process."""
    from xmem.errors import XmemError
    from xmem.ingest import cuda_snapshot
    from xmem.ingest.adapter import Notes

    cuda_snapshot.sniff(data[: 1 << 16], "x")
    with contextlib.suppress(XmemError):
        for batch in cuda_snapshot.read(io.BytesIO(data), Notes(filename="x")):
            assert batch.columns.height >= 0


def make_target() -> Callable[[bytes], None]:
    """Return the function under test; its output goes nowhere, and slow inputs are failures."""
    from xmem.ingest import snapshot_sender

    snapshot_sender._write = lambda parts: None  # type: ignore[assignment]
    count = 0

    def target(data: bytes) -> None:
        nonlocal count
        count += 1
        started = time.monotonic()
        try:
            fuzz_inside(data)
            if count % 200 == 0:
                gc.collect()  # the reader switches the collector off: its own process ends after one file
                fuzz_adapter(data)
            assert time.monotonic() - started < SLOWEST_S, "too slow"
        except BaseException:
            Path("crash-snapshot.bin").write_bytes(data)
            raise

    return target


def mutate(data: bytes, chance: random.Random) -> bytes:
    """Change a few bytes, cut, repeat or splice."""
    changed = bytearray(data)
    for _ in range(chance.randint(1, 8)):
        at = chance.randrange(len(changed) + 1)
        kind = chance.randrange(5)
        if kind == 0:
            changed[at : at + 1] = bytes([chance.randrange(256)])
        elif kind == 1:
            del changed[at : at + chance.randint(1, 40)]
        elif kind == 2:
            part = changed[at : at + chance.randint(1, 60)]
            changed[at:at] = part * chance.randint(1, 20)
        elif kind == 3:
            changed[at:at] = bytes(chance.randrange(256) for _ in range(chance.randint(1, 9)))
        else:
            del changed[at:]
        changed = changed or bytearray(b".")
    return bytes(changed[:LONGEST_BYTES])


def run_at_random(seconds: float, seed: int = 0) -> int:
    """Mutate seeds for so long; return how many inputs were tried."""
    chance, target, pool = random.Random(seed), make_target(), seeds()
    end, count = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        target(mutate(chance.choice(pool), chance))
        count += 1
    return count


def run_guided(seconds: float, atheris: Any) -> None:
    """Let atheris choose the inputs; it ends the process."""
    with atheris.instrument_imports(include=["xmem.ingest"]):
        from xmem.ingest import cuda_snapshot, snapshot_sender  # noqa: F401

    corpus = Path(os.environ.get("TMPDIR", "/tmp")) / f"xmem-fuzz-{os.getpid()}"
    corpus.mkdir()
    for number, seed in enumerate(seeds()):
        (corpus / str(number)).write_bytes(seed)
    options = [f"-max_total_time={int(seconds)}", f"-max_len={LONGEST_BYTES}", "-timeout=20", "-rss_limit_mb=1024"]
    atheris.Setup([sys.argv[0], *options, str(corpus)], make_target())
    atheris.Fuzz()


def main() -> None:
    """Fuzz for some seconds, with atheris where it is installed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--at-random", action="store_true", help="do not use atheris")
    chosen = parser.parse_args()
    soft = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, soft))
    try:
        import atheris
    except ImportError:
        atheris = None
    if atheris is None or chosen.at_random:
        sys.stdout.write(f"{run_at_random(chosen.seconds):,} inputs, no crash\n")
    else:
        run_guided(chosen.seconds, atheris)


if __name__ == "__main__":
    main()
