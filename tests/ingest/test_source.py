"""Opening a source: files and standard input, gzip by content, hashes, limits, and a sentence for all that fails."""

from __future__ import annotations

import gzip
import hashlib
import io
import sys
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ingest.traces import gzipped
from xmem.errors import RefusedError, UnreadableError, UsageError
from xmem.ingest.adapter import HEAD_BYTES
from xmem.ingest.source import Limits, Source, describe, hash_file, open_source

TEXT = b'{"traceEvents": []}\n' * 500


def from_bytes(content: bytes, limits: Limits | None = None) -> Source:
    return Source(io.BytesIO(content), "t", None, limits or Limits())


@pytest.mark.parametrize("pack", [bytes, gzipped])
@pytest.mark.parametrize("suffix", [".json", ".json.gz", ".pickle", ""])
def test_content_decides_not_the_suffix(tmp_path: Path, pack: object, suffix: str) -> None:
    content = gzipped(TEXT) if pack is gzipped else TEXT
    path = tmp_path / f"trace{suffix}"
    path.write_bytes(content)
    with open_source(path) as source:
        assert source.head(10) == TEXT[:10]
        assert source.read() == TEXT
        source.finish()
        assert (source.name, source.path) == (path.name, path)
        assert source.compressed == (pack is gzipped)
        assert source.sha256 == hashlib.sha256(content).hexdigest()
        assert source.disk_bytes == len(content)
        assert (source.truncated, source.trouble) == (False, "")
    assert hash_file(path) == (hashlib.sha256(content).hexdigest(), len(content))


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stdin:
        buffer = io.BytesIO(gzipped(TEXT))

    monkeypatch.setattr(sys, "stdin", Stdin)
    with open_source("-") as source:
        assert (source.name, source.path, source.read()) == ("-", None, TEXT)
    assert not Stdin.buffer.closed


def test_the_hash_is_of_the_whole_file_even_if_nobody_reads_it() -> None:
    source = from_bytes(TEXT * 1000)
    assert source.read(5) == TEXT[:5]
    source.finish()
    assert source.sha256 == hashlib.sha256(TEXT * 1000).hexdigest()


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 5000), max_size=20), st.booleans())
def test_reads_of_any_size_give_the_same_bytes(sizes: list[int], compressed: bool) -> None:
    source = from_bytes(gzipped(TEXT) if compressed else TEXT)
    source.head(3)
    taken = b""
    for size in sizes:
        part = source.read(size)
        assert len(part) == min(size, len(TEXT) - len(taken))
        taken += part
    assert taken + source.read() == TEXT
    assert source.read() == source.read1() == b""


def test_it_serves_a_buffered_reader() -> None:
    assert io.BufferedReader(from_bytes(gzipped(TEXT)), 64).readline() == b'{"traceEvents": []}\n'


def test_the_head_is_bounded() -> None:
    source = from_bytes(b"x" * (HEAD_BYTES * 3))
    assert len(source.head()) == HEAD_BYTES
    assert len(source.read()) == HEAD_BYTES * 3


# ---------------------------------------------------------------------- gzip


def test_members_follow_each_other() -> None:
    source = from_bytes(gzipped(b"one ") + gzipped(b"two ") + gzipped(b"") + gzipped(b"three") + b"\0" * 700)
    assert (source.read(), source.truncated, source.trouble) == (b"one two three", False, "")


def test_bytes_behind_gzip_are_told() -> None:
    source = from_bytes(gzipped(TEXT) + b"garbage")
    assert (source.read(), source.truncated) == (TEXT, False)
    assert source.trouble.startswith("bytes behind the gzip stream were ignored")


def test_cut_gzip_gives_all_that_unpacks() -> None:
    whole = gzipped(bytes(range(256)) * 8 + TEXT)
    for cut in range(3, len(whole)):
        expected = zlib.decompressobj(wbits=31).decompress(whole[:cut])
        source = from_bytes(whole[:cut])
        assert source.read() == expected
        assert source.truncated
        assert source.trouble == "the gzip stream ends before its end mark"
        source.finish()
        assert source.disk_bytes == cut


def test_damaged_gzip_gives_what_stands_before_the_damage() -> None:
    content = bytes(zlib.adler32(bytes([n % 251, n >> 8])) % 256 for n in range(60_000))
    whole = bytearray(gzipped(content))
    whole[len(whole) // 2 : len(whole) // 2 + 40] = b"\xff" * 40
    source = from_bytes(bytes(whole))
    got = source.read()
    assert source.truncated
    assert source.trouble.startswith("the gzip stream is damaged near byte")
    assert len(got) > 20_000
    assert content.startswith(got[:20_000])


def test_a_wrong_checksum_costs_nothing_but_is_told() -> None:
    whole = bytearray(gzipped(TEXT))
    whole[-8] ^= 1
    source = from_bytes(bytes(whole))
    assert (source.read(), source.truncated) == (TEXT, True)


def test_a_bomb_is_refused_early() -> None:
    bomb = gzip.compress(b"\0" * (300 << 20), 9, mtime=0)
    source = from_bytes(bomb)
    with pytest.raises(RefusedError) as caught:
        while source.read1():
            pass
    assert caught.value.message.startswith("'t' unpacks to more than 73.00 MiB from 298.61 KiB (250 ")
    assert caught.value.message.endswith("times): it looks like a decompression bomb.")
    assert caught.value.hint == "If you trust it, set XMEM_MAX_UNPACKED, for example to 200GiB."
    assert source.unpacked_bytes < 80 << 20


def test_a_bomb_of_members_is_refused_too() -> None:
    member = gzip.compress(b" " * (8 << 20), 9, mtime=0)
    source = from_bytes(member * 20)
    with pytest.raises(RefusedError, match="decompression bomb"):
        source.read()


def test_the_absolute_limit_holds_for_mild_ratios() -> None:
    noise = bytes(zlib.crc32(n.to_bytes(4, "little")) % 256 for n in range(100_000))
    with pytest.raises(RefusedError, match="decompression bomb"):
        from_bytes(gzipped(noise), Limits(unpacked_bytes=50_000)).read()
    assert from_bytes(noise, Limits(unpacked_bytes=50_000)).read() == noise  # what is not packed has its size


def test_the_limit_can_be_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XMEM_MAX_UNPACKED", "1GiB")
    assert Limits.from_environment() == Limits(unpacked_bytes=1 << 30, ratio_from_bytes=1 << 30)
    size = sum(len(block) for block in iter(from_bytes_by_environment().read1, b""))
    assert size == 80 << 20
    monkeypatch.setenv("XMEM_MAX_UNPACKED", "much")
    with pytest.raises(UsageError, match="XMEM_MAX_UNPACKED 'much' is not a number of bytes"):
        from_bytes_by_environment()


def from_bytes_by_environment() -> Source:
    return Source(io.BytesIO(gzip.compress(b"\0" * (80 << 20), mtime=0)), "t")


# ---------------------------------------------------------------------- what cannot be opened


@pytest.mark.parametrize("content", [b"", gzipped(b"")])
def test_an_empty_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "empty.json"
    path.write_bytes(content)
    with pytest.raises(UnreadableError) as caught:
        open_source(path)
    assert caught.value.message == f"{str(path)!r} is empty: there is nothing to read."
    assert caught.value.hint == "Was the export still running, or the disk full? Export the trace again."


def test_gzip_without_a_single_byte_of_content(tmp_path: Path) -> None:
    path = tmp_path / "cut.json.gz"
    path.write_bytes(gzipped(TEXT)[:11])
    with pytest.raises(UnreadableError) as caught:
        open_source(path)
    assert caught.value.message == (
        f"{str(path)!r} is empty: there is nothing to read (the gzip stream ends before its end mark)."
    )


def test_a_missing_file_a_folder_and_an_odd_name(tmp_path: Path) -> None:
    for path, message in (
        (tmp_path / "none.json", f"There is no file {str(tmp_path / 'none.json')!r}."),
        (tmp_path, f"{str(tmp_path)!r} is a folder, not a file."),
        (Path("a\0b"), "'a\\x00b' cannot be opened: embedded null byte."),
        (Path("x" * 5000), f"{'x' * 5000!r} cannot be opened: File name too long."),
    ):
        with pytest.raises(UsageError) as caught:
            open_source(path)
        assert caught.value.message == message
        assert caught.value.hint


def test_names_cannot_write_on_the_terminal(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        open_source(tmp_path / "\x1b[31mred\n")
    assert "\x1b" not in caught.value.message
    assert "\n" not in caught.value.message


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret.json"
    path.write_bytes(TEXT)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(UnreadableError) as caught:
        open_source(path)
    assert caught.value.message == f"{str(path)!r} cannot be read: permission denied."


def test_a_disk_that_fails() -> None:
    class Failing(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise OSError(5, "Input/output error")

    with pytest.raises(UnreadableError) as caught:
        Source(Failing(), "t").read()
    assert caught.value.message == "'t' cannot be read after 0 bytes: Input/output error."
    assert caught.value.hint == "Check the disk or copy the file again."


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (b"PK\x03\x04....", "a ZIP archive"),
        (b"\x28\xb5\x2f\xfd", "a zstd file"),
        (b"\xef\xbb\xbf {", "JSON"),
        (b"\n [1]", "JSON"),
        (b"<!DOCTYPE html>", "a web page (the HTML form of a memory timeline holds a picture only)"),
        (b"\x80\x04\x95", "a Python pickle"),
        (b" \n", "blank"),
        (b"hello there", "plain text"),
        (b"\0\1\2\3", "binary data"),
    ],
)
def test_a_source_is_described(head: bytes, kind: str) -> None:
    assert describe(head) == kind
