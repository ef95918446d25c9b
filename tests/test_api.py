"""The Python API: every promised name is there, lazily, and rooms are verbs too."""

from __future__ import annotations

import ast
import dataclasses
import subprocess
import sys
import types

import pytest

import xmem
from tests.paths import REPOSITORY


@pytest.mark.parametrize("name", xmem.__all__)
def test_every_promised_name_is_there(name: str) -> None:
    assert getattr(xmem, name) is not None
    assert name in dir(xmem)


def test_every_name_for_type_checkers_is_promised_and_the_other_way_round() -> None:
    tree = ast.parse((REPOSITORY / "xmem" / "__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    typed = {alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    plain = {
        alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("xmem.")
        for alias in node.names
    }
    assert typed | plain == set(xmem.__all__)


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="module 'xmem' has no attribute 'nosuch'"):
        _ = xmem.nosuch  # type: ignore[attr-defined]


@pytest.mark.parametrize("room", ["ingest", "query", "simulate"])
def test_a_room_is_a_package_and_a_verb(room: str) -> None:
    module = getattr(xmem, room)
    assert isinstance(module, types.ModuleType) and callable(module)
    assert module.__name__ == f"xmem.{room}"


@pytest.mark.parametrize(
    "code", ["import xmem.query, xmem", "import xmem", "from xmem.store import Store; import xmem"]
)
def test_a_room_can_be_called_however_it_was_imported(code: str) -> None:
    call = f"{code}\nprint(xmem.query('SELECT 40 + 2 AS n', store='/nonexistent').rows())"
    done = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True)
    assert done.stdout == "[(42,)]\n", done.stderr


@pytest.mark.parametrize("name", ["Filters", "IngestOptions", "Ingested", "SimulateOptions", "Verdict"])
def test_results_and_options_are_frozen(name: str) -> None:
    kind = getattr(xmem, name)
    assert dataclasses.is_dataclass(kind)
    assert kind.__dataclass_params__.frozen
