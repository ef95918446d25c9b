"""Runs the reading process of a snapshot, feeds it the source, and hands on the columns that it sends back."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO, cast

from xmem.errors import RefusedError, UnreadableError
from xmem.ingest.safe_pickle import Limits

if TYPE_CHECKING:
    import numpy as np

_BLOCK = 1 << 20
#: From the second block on: who waits for the interpreter's lock each time should bring much.
_LARGE_BLOCK = 8 << 20
#: A message has up to 65,536 rows, a few MiB.
_WAITING_MESSAGES = 32
_PACKAGE = Path(__file__).parent.parent
#: The process gets the standard library and the folder of this package, but not what `import xmem` would bring.
_BOOT = """
import json, sys, types
for name, folder in (("xmem", sys.argv[1]), ("xmem.ingest", sys.argv[1] + "/ingest")):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [folder]
from xmem.ingest.snapshot_sender import main
main(json.loads(sys.argv[2]))
"""
_HOSTILE_HINT = (
    "A memory snapshot holds plain data only, and xmem ran nothing from this file."
    " Do not open it with pickle.load or torch.load; ask for a fresh one from torch.cuda.memory._dump_snapshot()."
)


@dataclass(frozen=True)
class Message:
    """What the reading process sent: a kind, facts, new words by column, and the columns as (values, known or None)."""

    kind: str
    facts: dict[str, Any]
    columns: dict[str, tuple[np.ndarray[Any, Any], np.ndarray[Any, Any] | None]]


def read_messages(
    source: BinaryIO, name: str, *, stacks: bool = True, device: int | None = None, limits: Limits | None = None
) -> Iterator[Message]:
    """Yield what a process of its own makes of the source; the last message is of kind `end`.

    It reads a plain file by itself, anything else is fed to it. The libraries that the columns need are imported while
    it is busy with its first part.

    Raises RefusedError where the file is hostile, UnreadableError where it cannot be read or holds no snapshot.
    """
    options = {"stacks": stacks, "device": device, "limits": asdict(limits or Limits())}
    command = [sys.executable, "-I", "-S", "-c", _BOOT, str(_PACKAGE), json.dumps(options)]
    with _plain_file(source) as file:
        given = subprocess.PIPE if file is None else file
        process = subprocess.Popen(command, stdin=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    for pipe in filter(None, (process.stdin, process.stdout)):
        _widen(pipe)
    pump = _Pump(source, process)
    mailbox = _Mailbox(cast(IO[bytes], process.stdout), name)
    pump.start()
    mailbox.start()
    try:
        _warm_up()
        yield from mailbox.empty()
        pump.join()
        if pump.error is not None:
            raise pump.error
    except _LostError:
        pump.join(timeout=10)
        if pump.error is not None:
            raise pump.error from None
        raise _explain_loss(process, name) from None
    finally:
        process.kill()
        process.wait()
        mailbox.stop()
        pump.join(timeout=10)
        mailbox.join(timeout=10)
        for end in (process.stdout, process.stderr):
            cast(IO[bytes], end).close()


def _plain_file(source: BinaryIO) -> AbstractContextManager[BinaryIO | None]:
    """Open the file behind a source once more, if there is one whose bytes are those of the source."""
    path = getattr(source, "path", None)
    if path is None or getattr(source, "compressed", True) or not path.is_file():
        return nullcontext()
    return cast(AbstractContextManager[BinaryIO], open(path, "rb", buffering=0))


def _widen(pipe: IO[bytes]) -> None:
    """Let a pipe hold a block, where the system can: its ends wait for each other less often."""
    with suppress(ImportError, AttributeError, OSError):
        import fcntl

        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _BLOCK)


def _warm_up() -> None:
    """Import and look up what columns and their tables need later: the reading process is busy for longer anyway."""
    import polars  # noqa: F401
    import pyarrow.compute
    import pyarrow.parquet  # noqa: F401

    import xmem.ingest.tables  # noqa: F401
    from xmem.schema import INGEST_TABLES, arrow_schema, enums, issue_codes

    enums(), issue_codes()
    for table in INGEST_TABLES:
        arrow_schema(table)


class _LostError(Exception):
    """The process ended without a last word."""


class _Pump(threading.Thread):
    """Copies the source to the process, or where that reads by itself only through, for its hash.

    An error of the source ends the process and waits in `error`.
    """

    def __init__(self, source: BinaryIO, process: subprocess.Popen[bytes]) -> None:
        super().__init__(daemon=True)
        self.error: BaseException | None = None
        self._source = source
        self._process = process

    def run(self) -> None:
        """Copy until the source ends or the process does not want more."""
        pipe = self._process.stdin
        size = _BLOCK
        try:
            while block := self._source.read(size):
                if pipe is not None:
                    pipe.write(block)
                size = _LARGE_BLOCK
            if pipe is not None:
                pipe.close()
        except BrokenPipeError:
            return
        except BaseException as error:
            self.error = error
            self._process.kill()


class _Mailbox(threading.Thread):
    """Takes messages in as they come, so that the process need not wait while the last one is worked on."""

    def __init__(self, pipe: IO[bytes], name: str) -> None:
        super().__init__(daemon=True)
        self._messages: queue.Queue[Message | Exception] = queue.Queue(_WAITING_MESSAGES)
        self._received = _receive(pipe, name)
        self._stopped = threading.Event()

    def run(self) -> None:
        """Put messages in until the last one, an error, or `stop`."""
        try:
            for message in self._received:
                self._put(message)
        except Exception as error:
            self._put(error)

    def _put(self, message: Message | Exception) -> None:
        while not self._stopped.is_set():
            try:
                self._messages.put(message, timeout=0.1)
                return
            except queue.Full:
                continue

    def empty(self) -> Iterator[Message]:
        """Yield the messages in order, the last one included; raise what went wrong."""
        while True:
            message = self._messages.get()
            if isinstance(message, Exception):
                raise message
            yield message
            if message.kind == "end":
                return

    def stop(self) -> None:
        """Take nothing more in."""
        self._stopped.set()


def _receive(pipe: IO[bytes], name: str) -> Iterator[Message]:
    import numpy as np

    types = {"Q": np.uint64, "q": np.int64, "i": np.int32}

    def take(typecode: Any, rows: int) -> np.ndarray[Any, Any]:
        size = rows * np.dtype(typecode).itemsize
        data = pipe.read(size)
        if len(data) < size:
            raise _LostError
        return np.frombuffer(data, typecode)

    while line := pipe.readline():
        if not line.endswith(b"\n"):
            break
        facts = json.loads(line)
        kind = facts["kind"]
        columns: dict[str, tuple[np.ndarray[Any, Any], np.ndarray[Any, Any] | None]] = {}
        if kind == "failure":
            raise _explain_failure(facts, name)
        if kind == "stacks":
            columns["lengths"] = take(np.int32, facts["rows"]), None
            columns["frames"] = take(np.int32, facts["parts"]), None
        for column, typecode, partial in facts.get("columns", ()):
            values = take(types[typecode], facts["rows"])
            columns[column] = values, take(np.bool_, facts["rows"]) if partial else None
        yield Message(kind, facts, columns)
        if kind == "end":
            return
    raise _LostError


def _explain_failure(facts: dict[str, Any], name: str) -> RefusedError | UnreadableError:
    said = facts["text"]
    if facts["why"] == "HostileDataError":
        return RefusedError(f"{name!r} was refused: {said[0]}.", _HOSTILE_HINT)
    if facts["why"] == "ForeignDataError":
        hint = said[1] if len(said) > 1 else "Write a snapshot with torch.cuda.memory._dump_snapshot(FILE)."
        return UnreadableError(f"{name!r} cannot be read: {said[0]}.", hint)
    if facts["cut"]:
        return UnreadableError(
            f"{name!r} cannot be read: its end is missing after {facts['bytes']:,} bytes,"
            " and no whole entry stands before it.",
            "Copy the file again, or let the job finish writing it.",
        )
    return UnreadableError(
        f"{name!r} cannot be read: it is damaged ({said[0]}).",
        "Copy the file again, or dump a fresh snapshot.",
    )


def _explain_loss(process: subprocess.Popen[bytes], name: str) -> RefusedError | UnreadableError:
    status = process.wait()
    if status == -signal.SIGXCPU:
        return RefusedError(f"{name!r} was refused: reading it takes far longer than its size can need.", _HOSTILE_HINT)
    if status == -signal.SIGKILL:
        return UnreadableError(
            f"{name!r} cannot be read: the reading process was killed, probably because the machine ran out of memory.",
            "Read it where more memory is free, or record with fewer entries (max_entries).",
        )
    if status < 0:
        return RefusedError(
            f"{name!r} was refused: it crashes the reader ({signal.Signals(-status).name}),"
            " as nested data made to exhaust the stack do.",
            _HOSTILE_HINT,
        )
    said = cast(IO[bytes], process.stderr).read(1 << 16).decode("utf-8", "replace").strip().splitlines()
    return UnreadableError(
        f"{name!r} cannot be read: the reading process ended early ({said[-1][:200] if said else f'status {status}'}).",
        "Please report this with the file, if it may be shared.",
    )
