"""Reads a pickle as plain data: no global is ever resolved, and memory and time are bounded by the file's size.

Runs in a process of its own (see snapshot_process), because a hostile pickle can still crash the C unpickler:
a deeply nested tuple as a key exhausts the C stack. It imports the standard library only, so that it starts fast.
"""

from __future__ import annotations

import _pickle
import gc
import io
import os
from dataclasses import dataclass
from typing import Any, BinaryIO, NoReturn

_MIB = 1 << 20


class HostileDataError(Exception):
    """The data ask for something that plain data never need."""


class DamagedDataError(Exception):
    """The data end too early or are broken; `cut` says that the end is missing."""

    def __init__(self, message: str, *, cut: bool) -> None:
        super().__init__(message)
        self.cut = cut


@dataclass(frozen=True)
class Limits:
    """What reading may use: so much at least, and so much more for each byte of the file.

    The entries of a snapshot take five to eight times their pickled size (torch 2.1 to 2.14).
    """

    memory_bytes: int = 512 * _MIB
    memory_per_byte: int = 24
    cpu_s: int = 10
    cpu_s_per_mib: float = 2.0


class Meter(io.RawIOBase):
    """Reads a file descriptor, keeps what was read, and raises the process's limits as bytes come in."""

    def __init__(self, descriptor: int, limits: Limits) -> None:
        super().__init__()
        self.count = 0
        self._descriptor = descriptor
        self._limits = limits
        self._kept: list[bytes] = []
        self._base_bytes = _address_space_bytes() + limits.memory_bytes
        self._allow()

    def readable(self) -> bool:
        """Say yes: io.BufferedReader asks."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer from the descriptor."""
        chunk = os.read(self._descriptor, len(buffer))
        buffer[: len(chunk)] = chunk
        self._kept.append(chunk)
        self.count += len(chunk)
        self._allow()
        return len(chunk)

    def read_rest(self) -> bytes:
        """Return everything from the first byte on, what was read already included."""
        while chunk := os.read(self._descriptor, _MIB):
            self._kept.append(chunk)
            self.count += len(chunk)
            self._allow()
        return b"".join(self._kept)

    def forget(self) -> None:
        """Drop what was kept."""
        self._kept.clear()

    def _allow(self) -> None:
        limits = self._limits
        _limit("RLIMIT_AS", self._base_bytes + limits.memory_per_byte * self.count)
        _limit("RLIMIT_CPU", limits.cpu_s + int(limits.cpu_s_per_mib * self.count / _MIB))


def _address_space_bytes() -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _limit(name: str, soft: int) -> None:
    try:
        import resource

        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
    except (ImportError, AttributeError, ValueError, OSError):
        return  # a system without such limits


def drop_privileges() -> None:
    """Leave this process nothing but its pipes: no file of any size, no core dump."""
    for name in ("RLIMIT_FSIZE", "RLIMIT_CORE"):
        _limit(name, 0)


def _refuse_global(module: object, name: object) -> NoReturn:
    raise HostileDataError(
        f"it asks for the Python object {str(module)[:100]}.{str(name)[:100]}, which plain data never need"
    )


class _PlainUnpickler(_pickle.Unpickler):
    """The C unpickler without any way out of plain data."""

    def find_class(self, module: str, name: str, /) -> Any:
        _refuse_global(module, name)

    def persistent_load(self, pid: Any) -> Any:
        raise HostileDataError(
            "it refers to an object outside of the file (a persistent id), which plain data never do"
        )


_FOREIGN = {
    "unregistered extension code": "it asks for a Python object by extension code, which plain data never need",
    "out-of-band": "it refers to a buffer outside of the file, which plain data never do",
    "readonly_buffer": "it refers to a buffer outside of the file, which plain data never do",
    "persistent": "it refers to an object outside of the file (a persistent id), which plain data never do",
}


def load_plain(stream: BinaryIO) -> Any:
    """Load a pickle of dict, list, tuple, set, text, bytes and numbers.

    Raises HostileDataError where it asks for anything else or for too much memory, DamagedDataError where it is cut
    or broken.
    """
    gc.disable()  # nothing here is ever garbage, and the collector would double the time
    try:
        return _PlainUnpickler(stream, encoding="utf-8", errors="replace").load()
    except (HostileDataError, DamagedDataError):
        raise
    except MemoryError:
        raise HostileDataError("it asks for far more memory than its size can need") from None
    except Exception as error:
        raise _judge(error) from None


def _judge(error: Exception) -> Exception:
    text = str(error)
    for part, sentence in _FOREIGN.items():
        if part in text:
            return HostileDataError(sentence)
    cut = isinstance(error, EOFError) or "truncated" in text or "exhausted" in text
    return DamagedDataError(text[:100] or type(error).__name__, cut=cut)


def salvage(data: bytes) -> list[Any]:
    """Return what a cut or broken pickle held up to there: the objects that still waited for their container.

    They come in the order in which the file made them, outer containers first. The Python unpickler is slow,
    but unlike the C one it still has its stack after an error.
    """
    import pickle

    class Keeping(pickle._Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            _refuse_global(module, name)

        def persistent_load(self, pid: Any) -> Any:
            raise HostileDataError(
                "it refers to an object outside of the file (a persistent id), which plain data never do"
            )

        def get_extension(self, code: int) -> Any:
            raise HostileDataError(_FOREIGN["unregistered extension code"])

    unpickler = Keeping(io.BytesIO(data), encoding="utf-8", errors="replace")
    try:
        return [unpickler.load()]
    except HostileDataError:
        raise
    except MemoryError:
        raise HostileDataError("it asks for far more memory than its size can need") from None
    except Exception:
        levels = [*getattr(unpickler, "metastack", []), getattr(unpickler, "stack", [])]
        return [item for level in levels for item in level]
