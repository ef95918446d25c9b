"""What the file system says, as sentences: full disk, read-only store, a file in the way; and writing for good."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from xmem.errors import RefusedError, UsageError


def fsync(path: Path) -> None:
    """Wait until a file's or folder's content is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn what the file system says into sentences: full disk, read-only store, a file in the way."""
    try:
        yield
    except OSError as error:
        where, number = f"The store {str(path)!r}", _error_number(error)
        if number in _NO_SPACE:
            raise RefusedError(
                f"{where} cannot be written: {_NO_SPACE[number]}. The store is as it was.",
                "Free some space or name another folder with --store.",
            ) from error
        if number in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise RefusedError(
                f"{where} cannot be written: it is read-only for you. The store is as it was.",
                "Name a folder of your own with --store or XMEM_STORE.",
            ) from error
        if number in (errno.EEXIST, errno.ENOTDIR):
            raise UsageError(f"{where} is not a folder.", "Name a folder with --store or XMEM_STORE.") from error
        raise


_NO_SPACE = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "your disk quota is used up",
    errno.EFBIG: "files may not become this large here",
}


def _error_number(error: OSError) -> int | None:
    """Return errno; polars states it in its text only: `No space left on device (os error 28)`."""
    stated = re.search(r"\(os error (\d+)\)", str(error))
    return error.errno or (int(stated[1]) if stated else None)
