"""Lets a room be called like its main verb: `xmem.ingest(...)` is `xmem.ingest.ingest(...)`."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _CallableRoom(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:
        verb = self.__dict__[self.__name__.rpartition(".")[2]]
        return verb(*args, **options)


def make_callable(room: str) -> None:
    """Make a package callable; it must hold a function of its own name."""
    sys.modules[room].__class__ = _CallableRoom
