"""Reads a large trace in several processes: each takes a share of the file and gives back its columns, in order."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO

from xmem.ingest.adapter import Batch, Filters, Issue, Notes
from xmem.ingest.json_shapes import EVENTS
from xmem.ingest.json_stream import RecordStream
from xmem.ingest.spool import WORDS

if TYPE_CHECKING:
    import polars as pl

    from xmem.ingest.trace_columns import TraceColumns
    from xmem.ingest.trace_records import Record

#: A share smaller than this is not worth a process.
SMALLEST_SHARE_BYTES = 32 << 20
MOST_PROCESSES = 4
#: What the first process takes of an even part: it also hashes the file, and may have to import what columns need.
_FIRST_PART, _FIRST_PART_IMPORTED = 0.85, 1.15
_WINDOW = 1 << 20
#: Chunk after chunk takes the place of the one before: glibc need not give it back in between.
_KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(64 << 20), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}
#: The process finds the modules of this one, and no more.
_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from xmem.ingest.trace_shares import main; main()"


@dataclass
class Share:
    """One part of the file, the process that reads it, and the file that takes its columns."""

    path: Path
    start: int
    process: subprocess.Popen[bytes]
    spool: IO[bytes]


def start_shares(source: BinaryIO, stream: RecordStream[Record], base_ns: int | None) -> list[Share]:
    """Start processes for the later parts of a large plain file, and let `stream` stop where the first part ends."""
    path, size = _plain_file(source)
    rest = size - stream.offset
    count = min(processors(), MOST_PROCESSES, rest // SMALLEST_SHARE_BYTES) if path is not None else 1
    if path is None or count < 2:
        return []
    first = _FIRST_PART_IMPORTED if "polars" in sys.modules else _FIRST_PART
    even = rest / (count - 1 + first)
    wanted = [stream.offset + int(even * (first + index)) for index in range(count - 1)]
    starts = sorted({start for at in wanted if (start := find_start(path, at)) is not None and start > stream.read_to})
    shares: list[Share] = []
    for start, stop in zip(starts, [*starts[1:], None], strict=True):
        job = {
            "path": str(path), "start": start, "stop": stop, "base_ns": base_ns, "name": stream.notes.filename,
            "filters": asdict(stream.notes.filters), "known": stream.known,
        }  # fmt: skip
        shares.append(_start(job))
    stream.stop_at = starts[0] if starts else None
    return shares


def processors() -> int:
    """Number of processors that this process may use."""
    if not hasattr(os, "sched_getaffinity"):
        return 1
    return len(os.sched_getaffinity(0))


def find_start(path: Path, offset: int) -> int | None:
    """Return where the first record behind an offset starts, as far as its text shows."""
    with open(path, "rb") as file:
        file.seek(offset)
        boundary = EVENTS.boundary.search(file.read(_WINDOW))
    return None if boundary is None else offset + boundary.end()


def take_share(share: Share, columns: TraceColumns, stream: RecordStream[Record]) -> Iterator[Batch] | None:
    """Wait for a share; return its batches and add what it says to `columns` and `stream`. None where it failed."""
    with contextlib.suppress(OSError, ValueError):
        text, _ = share.process.communicate()
        said = json.loads(text)
        if share.process.returncode == 0 and (said["at_stop"] or said["whole"]):
            columns.records += said["records"]
            columns.memory_records += said["memory_records"]
            columns.memory_rows += said["memory_rows"]
            columns.oom_rows += said["oom_rows"]
            columns.absolute = columns.absolute or said["absolute"]
            columns.other_devices.update(said["other_devices"])
            columns.add_devices([(kind, index) for kind, index in said["devices"]])
            stream.notes.take({code: Issue(**issue) for code, issue in said["issues"].items()})
            stream.notes.facts.update(said["facts"])
            stream.fields.update(said["fields"])
            stream.at_stop = said["at_stop"]
            return _spooled(share.spool)
    return None


def end_shares(shares: list[Share]) -> None:
    """End what still runs, and let go of its file."""
    for share in shares:
        if share.process.poll() is None:
            share.process.kill()
        with contextlib.suppress(OSError, ValueError):
            share.process.communicate()
        share.spool.close()


def _plain_file(source: Any) -> tuple[Path | None, int]:
    path = getattr(source, "path", None)
    if path is None or getattr(source, "compressed", True) or not path.is_file():
        return None, 0
    return path, path.stat().st_size


def _start(job: dict[str, Any]) -> Share:
    spool = tempfile.TemporaryFile()  # noqa: SIM115 - end_shares closes it
    folders = json.dumps([entry or os.getcwd() for entry in sys.path])
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", _BOOT, folders, str(spool.fileno())],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, pass_fds=[spool.fileno()],
        env={**os.environ, **_KEEP_MEMORY},
    )  # fmt: skip
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(job).encode())
            process.stdin.close()
        process.stdin = None
    return Share(Path(job["path"]), job["start"], process, spool)


def _spooled(spool: IO[bytes]) -> Iterator[Batch]:
    import polars as pl

    spool.seek(0)
    while head := spool.readline():
        table, size = head.split()
        yield Batch(table.decode(), pl.read_ipc_stream(io.BytesIO(spool.read(int(size)))))


# ---------------------------------------------------------------------- in the other process


def main() -> None:
    """Read one share: the job comes on standard input, columns go to a file, counts to standard output."""
    gc.disable()  # records hold no cycles
    job = json.load(sys.stdin)
    with open(int(sys.argv[2]), "wb") as spool:
        said = read_share(job, spool)
    sys.stdout.write(json.dumps(said, default=str))


def read_share(job: dict[str, Any], spool: IO[bytes]) -> dict[str, Any]:
    """Write the batches of a share; return its counts, issues and fields."""
    from xmem.ingest.torch_trace import open_stream
    from xmem.ingest.trace_columns import TraceColumns

    filters = dict(job["filters"])
    filters["steps"] = tuple(filters["steps"]) if filters["steps"] else None
    notes = Notes(filename=job["name"], filters=Filters(**filters))
    with open(job["path"], "rb", buffering=0) as file:
        file.seek(job["start"])
        stream = open_stream(file, notes)
        stream.found, stream.offset, stream.stop_at = True, job["start"], job["stop"]
        columns = TraceColumns(notes, job["base_ns"])
        for records, text in stream:
            columns.add(records, text)
            del records, text  # their memory is for the next chunk
            _spool(columns.take(), spool)
        _spool(columns.take(everything=True), spool)
    return {
        "at_stop": stream.at_stop, "whole": not stream.at_stop, "fields": stream.fields, "facts": notes.facts,
        "issues": {code: asdict(issue) for code, issue in notes.issues.items()},
        "devices": columns.seen_devices(), "other_devices": sorted(columns.other_devices),
        "records": columns.records, "memory_records": columns.memory_records, "absolute": columns.absolute,
        "memory_rows": columns.memory_rows, "oom_rows": columns.oom_rows,
    }  # fmt: skip


def _spool(batches: Iterator[Batch], spool: IO[bytes]) -> None:
    """Append batches to a file, by way of one that polars can open by its path: it is three times as fast."""
    for batch in batches:
        with tempfile.TemporaryFile(buffering=0) as buffer:
            _shorten(batch.columns).write_ipc_stream(f"/dev/fd/{buffer.fileno()}")
            size = buffer.seek(0, os.SEEK_END)
            spool.write(f"{batch.table} {size}\n".encode())
            spool.flush()
            at = 0
            while at < size:
                at += os.sendfile(spool.fileno(), buffer.fileno(), at, size - at)


def _shorten(frame: pl.DataFrame) -> pl.DataFrame:
    """Make words categoricals, as they are held afterwards."""
    import polars as pl

    return frame.with_columns(pl.col(name).cast(pl.Categorical) for name in WORDS if name in frame.columns)
