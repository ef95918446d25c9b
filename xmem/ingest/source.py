"""Opens a source: path or standard input, gzip or not, hashed while it is read, within limits."""

from __future__ import annotations

import hashlib
import io
import os
import stat
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from xmem.errors import RefusedError, UnreadableError, UsageError
from xmem.ingest.adapter import HEAD_BYTES
from xmem.units import GIB, MIB, format_bytes, parse_bytes

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

STDIN = "-"
#: Environment variable that raises (or lowers) how much a compressed source may unpack to.
UNPACKED_LIMIT_VARIABLE = "XMEM_MAX_UNPACKED"

_BLOCK = 1 << 20
_GZIP = b"\x1f\x8b"
_MAGIC = (
    (b"PK\x03\x04", "a ZIP archive"), (b"\x28\xb5\x2f\xfd", "a zstd file"), (b"\xfd7zXZ\x00", "an xz file"),
    (b"BZh", "a bzip2 file"), (b"PAR1", "a Parquet file"), (b"SQLite format 3\x00", "an SQLite database"),
    (b"\x89PNG", "a PNG picture"), (b"%PDF", "a PDF"), (b"\x7fELF", "a program"), (b"\x1f\x8b", "a gzip file"),
    (b"\xff\xfe", "UTF-16 text"), (b"\xfe\xff", "UTF-16 text"), (b"{\0", "UTF-16 text"), (b"[\0", "UTF-16 text"),
)  # fmt: skip
_TAR = (257, b"ustar")
#: What to do with a kind of file that holds or may hold a trace in another form.
_ADVICE = {
    "a ZIP archive": "Unpack it and name the file in it. ",
    "a tar archive": "Unpack it (tar -xf) and name the file in it. ",
    "a zstd file": "Unpack it (zstd -d) first. ",
    "an xz file": "Unpack it (xz -d) first. ",
    "a bzip2 file": "Unpack it (bzip2 -d) first. ",
    "UTF-16 text": "Write it as UTF-8 first (iconv -f UTF-16 -t UTF-8). ",
    "a web page": "Give the .json or .pickle file that the page was made from. ",
}


@dataclass(frozen=True)
class Limits:
    """How far a compressed source may unpack: so many bytes, and beyond a start so many times its size on disk."""

    unpacked_bytes: int = 64 * GIB
    ratio: int = 250
    ratio_from_bytes: int = 64 * MIB

    @staticmethod
    def from_environment() -> Limits:
        """Return the limits, with XMEM_MAX_UNPACKED in place of the built-in ones where it is set."""
        text = os.environ.get(UNPACKED_LIMIT_VARIABLE)
        if not text:
            return Limits()
        size = parse_bytes(text, what=UNPACKED_LIMIT_VARIABLE)
        return Limits(unpacked_bytes=size, ratio_from_bytes=size)


class Source(io.RawIOBase):
    """A decompressed, forward-only stream that knows the hash and size of what lay on disk.

    `truncated` and `trouble` say what was wrong with the compressed stream, as soon as its end was read.
    """

    def __init__(self, raw: BinaryIO, name: str, path: Path | None = None, limits: Limits | None = None) -> None:
        super().__init__()
        self.name = name
        self.path = path
        self.compressed = False
        self.truncated = False
        self.trouble = ""
        self.disk_bytes = 0
        self.unpacked_bytes = 0
        self._raw = raw
        self._hash = hashlib.sha256()
        self._limits = limits or Limits.from_environment()
        self._pending = b""
        self._position = 0
        self._blocks = self._unpacked()

    @property
    def sha256(self) -> str:
        """SHA-256 of the bytes on disk read so far: of the whole source after `finish`."""
        return self._hash.hexdigest()

    def readable(self) -> bool:
        """Say that it can be read."""
        return True

    def head(self, size: int = HEAD_BYTES) -> bytes:
        """Return the first bytes without taking them; fewer where the source is shorter."""
        while len(self._pending) - self._position < size:
            block = next(self._blocks, b"")
            if not block:
                break
            self._pending = self._pending[self._position :] + block
            self._position = 0
        return self._pending[self._position : self._position + size]

    def read1(self, size: int = -1) -> bytes:
        """Return what is at hand, up to `size` bytes; empty at the end only."""
        if self._position >= len(self._pending):
            self._pending, self._position = next(self._blocks, b""), 0
        if self._position == 0 and (size < 0 or size >= len(self._pending)):
            taken, self._pending = self._pending, b""
            return taken
        end = len(self._pending) if size < 0 else self._position + size
        taken = self._pending[self._position : end]
        self._position += len(taken)
        return taken

    def read(self, size: int = -1) -> bytes:
        """Return exactly `size` bytes, fewer at the end only; everything where `size` is negative."""
        parts: list[bytes] = []
        wanted = size
        while wanted:
            part = self.read1(wanted)
            if not part:
                break
            parts.append(part)
            wanted -= len(part) if size >= 0 else 0
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Fill a buffer (for io.BufferedReader)."""
        view = memoryview(buffer).cast("B")
        taken = self.read1(len(view))
        view[: len(taken)] = taken
        return len(taken)

    def finish(self) -> None:
        """Hash what nobody read, so that `sha256` and `disk_bytes` speak of the whole source."""
        for _ in self._on_disk():
            pass

    def close(self) -> None:
        """Close the file; standard input stays open."""
        if not self.closed and self.name != STDIN:
            self._raw.close()
        super().close()

    def _on_disk(self) -> Iterator[bytes]:
        while True:
            try:
                block = self._raw.read(_BLOCK)
            except OSError as error:
                raise UnreadableError(
                    f"{self.name!r} cannot be read after {self.disk_bytes:,} bytes: {error.strerror or error}.",
                    "Check the disk or copy the file again.",
                ) from error
            if not block:
                return
            self._hash.update(block)
            self.disk_bytes += len(block)
            yield block

    def _unpacked(self) -> Iterator[bytes]:
        blocks = self._on_disk()
        first = next(blocks, b"")
        while 0 < len(first) < len(_GZIP):  # a pipe may hand over single bytes
            more = next(blocks, b"")
            if not more:
                break
            first += more
        self.compressed = first.startswith(_GZIP)
        for block in self._gunzip(first, blocks) if self.compressed else _chain(first, blocks):
            self.unpacked_bytes += len(block)
            if self.compressed:
                self._check_limits()
            yield block

    def _gunzip(self, block: bytes, blocks: Iterator[bytes]) -> Iterator[bytes]:
        member = zlib.decompressobj(wbits=31)
        while True:
            before = member.copy()
            try:
                unpacked = member.decompress(block, _BLOCK)
            except zlib.error as error:
                self.truncated = True
                self.trouble = f"the gzip stream is damaged near byte {self.disk_bytes:,} on disk ({error})"
                yield from _salvage(before, block)
                return
            if unpacked:
                yield unpacked
            block = member.unconsumed_tail
            if member.eof:
                block = member.unused_data.lstrip(b"\0") or next(blocks, b"").lstrip(b"\0")
                if not self._next_member(block):
                    return
                member = zlib.decompressobj(wbits=31)
            elif not block and len(unpacked) < _BLOCK:
                block = next(blocks, b"")
                if not block:
                    self.truncated, self.trouble = True, "the gzip stream ends before its end mark"
                    return

    def _next_member(self, block: bytes) -> bool:
        if block and not block.startswith(_GZIP):
            self.trouble = f"bytes behind the gzip stream were ignored (near byte {self.disk_bytes:,} on disk)"
        return block.startswith(_GZIP)

    def _check_limits(self) -> None:
        limits, size = self._limits, self.unpacked_bytes
        ratio = size / max(self.disk_bytes, 1)
        if size > limits.unpacked_bytes or (size > limits.ratio_from_bytes and ratio > limits.ratio):
            raise RefusedError(
                f"{self.name!r} unpacks to more than {format_bytes(size)} from {format_bytes(self.disk_bytes)}"
                f" ({ratio:,.0f} times): it looks like a decompression bomb.",
                f"If you trust it, set {UNPACKED_LIMIT_VARIABLE}, for example to 200GiB.",
            )


def open_source(path: str | Path, limits: Limits | None = None) -> Source:
    """Open a file, or standard input for `-`, and look at its first bytes.

    Raises UsageError (no such file, a folder), UnreadableError (empty, not permitted) and RefusedError (bomb).
    """
    if str(path) == STDIN:
        source = Source(sys.stdin.buffer, STDIN, None, limits)
    else:
        source = Source(_open_file(Path(path)), Path(path).name, Path(path), limits)
    if not source.head():
        shown = "Standard input" if str(path) == STDIN else f"{str(path)!r}"
        said = f" ({source.trouble})" if source.trouble else ""
        source.close()
        raise UnreadableError(
            f"{shown} is empty: there is nothing to read{said}.",
            "Was the export still running, or the disk full? Export the trace again.",
        )
    return source


def hash_file(path: str | Path) -> tuple[str, int]:
    """Return SHA-256 and size of a file's bytes on disk."""
    with Source(_open_file(Path(path)), Path(path).name, Path(path)) as source:
        source.finish()
        return source.sha256, source.disk_bytes


def describe(head: bytes) -> str:
    """Say in a few words what a source looks like: `a ZIP archive`, `a web page`, `binary data`."""
    for magic, kind in _MAGIC:
        if head.startswith(magic):
            return kind
    if head[_TAR[0] :].startswith(_TAR[1]):
        return "a tar archive"
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text[:1] in (b"{", b"["):
        return "JSON"
    if text[:9].lower().startswith((b"<!doctype", b"<html")):
        return "a web page (the HTML form of a memory timeline holds a picture only)"
    if head[:1] == b"\x80" and head[1:2] in b"\2\3\4\5":
        return "a Python pickle"
    if not text:
        return "blank"
    printable = sum(1 for byte in head[:4096] if byte >= 32 or byte in b"\t\n\r")
    return "plain text" if printable >= 0.95 * len(head[:4096]) else "binary data"


def advise(head: bytes) -> str:
    """Say what to do with a source that is none itself; empty where nothing special is known."""
    kind = describe(head).partition(" (")[0]
    return _ADVICE.get(kind, "")


def _open_file(path: Path) -> BinaryIO:
    try:
        if stat.S_ISDIR(path.stat().st_mode):
            raise UsageError(f"{str(path)!r} is a folder, not a file.", "Name the trace or snapshot in it.")
        return open(path, "rb", buffering=0)
    except FileNotFoundError as error:
        raise UsageError(f"There is no file {str(path)!r}.", "Check the path.") from error
    except PermissionError as error:
        raise UnreadableError(f"{str(path)!r} cannot be read: permission denied.", "Check its permissions.") from error
    except (OSError, ValueError) as error:
        said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UsageError(f"{str(path)!r} cannot be opened: {said}.", "Check the path.") from error


def _chain(first: bytes, blocks: Iterator[bytes]) -> Iterator[bytes]:
    if first:
        yield first
    yield from blocks


def _salvage(member: zlib._Decompress, block: bytes) -> Iterator[bytes]:
    """Unpack byte by byte what stands before the damage."""
    part = bytearray()
    try:
        for at in range(len(block)):
            part += member.decompress(block[at : at + 1])
            if len(part) >= _BLOCK:
                yield bytes(part)
                part.clear()
    except zlib.error:
        pass
    if part:
        yield bytes(part)
