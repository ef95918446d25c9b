"""Reads the source of xmem and holds the rules of its architecture: imports point down, things stay small and named."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.paths import REPOSITORY

PACKAGE = REPOSITORY / "xmem"
FILES = sorted(PACKAGE.rglob("*.py"))

#: Layer of each module or room; a module may import lower layers and its own room.
LAYERS = {
    "xmem.version": 0,
    "xmem.errors": 0,
    "xmem.units": 1,
    "xmem.disk": 1,
    "xmem.room": 1,
    "xmem.schema": 2,
    "xmem.store": 3,
    "xmem.fence": 3,
    "xmem.ingest": 4,
    "xmem.simulate": 4,
    "xmem.query": 4,
    "xmem.capture": 4,
    "xmem.evaluate": 5,
    "xmem": 6,
    "xmem.render": 6,
    "xmem.render_*": 7,
    "xmem.cli": 8,
    "xmem.__main__": 9,
}
#: Heavy libraries and the only modules that may import them; a trailing dot means everything in the room.
OWNERS = {
    "torch": ("xmem.capture.", "xmem.evaluate."),
    "torchvision": ("xmem.capture.", "xmem.evaluate."),
    "transformers": ("xmem.capture.", "xmem.evaluate."),
    "altair": ("xmem.query.charts", "xmem.evaluate."),
    "vl_convert": ("xmem.query.charts", "xmem.query.html", "xmem.evaluate."),
    "hta": ("xmem.ingest.hta",),
}
#: Modules that never import these at their top, since `xmem --help` and `import xmem` pass through them.
LIGHT = ("xmem", "xmem.cli", "xmem.render", "xmem.render_*", "xmem.units", "xmem.errors")
HEAVY = ("torch", "hta", "altair", "polars", "duckdb", "pyarrow", "numpy", "pandas")
FORBIDDEN_NAMES = re.compile(r"(^|_)(utils?|common|helpers?|managers?|misc)($|_)", re.IGNORECASE)


def module_name(file: Path) -> str:
    parts = file.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room(module: str) -> str:
    """Return the key of LAYERS that a module belongs to."""
    if module in LAYERS:
        return module
    if module.startswith("xmem.render_"):
        return "xmem.render_*"
    parent = ".".join(module.split(".")[:2])
    return parent if parent in LAYERS else module


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno


def typing_only(tree: ast.Module) -> set[int]:
    """Return the lines under `if TYPE_CHECKING:`."""
    return {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def home(imported: str) -> str:
    """Return the room that an imported dotted name belongs to."""
    known = [name for name in LAYERS if imported == name or imported.startswith(name + ".")]
    if imported.startswith("xmem.render_"):
        return "xmem.render_*"
    return max(known, key=len)


def layer_faults(module: str, source: str) -> list[str]:
    """Return what in this module's imports points up, sideways, or to a library that is another's."""
    tree = ast.parse(source)
    own, skipped, faults = room(module), typing_only(tree), []
    for imported, line in imports(tree):
        owners = OWNERS.get(imported.split(".")[0])
        if owners and not any((module + ".").startswith(owner) or module == owner for owner in owners):
            faults.append(f"{module}:{line} imports {imported}, which belongs to {', '.join(owners)}")
        if not imported.startswith("xmem") or line in skipped:
            continue
        target = home(imported)
        if target != own and LAYERS[target] >= LAYERS[own] and not _api(module):
            faults.append(f"{module}:{line} imports {imported}: {target} does not lie below {own}")
    return faults


def _api(module: str) -> bool:
    return module == "xmem"  # the API imports its rooms by name, lazily


@pytest.mark.parametrize("file", FILES, ids=module_name)
def test_imports_point_down(file: Path) -> None:
    assert layer_faults(module_name(file), file.read_text()) == []


def test_every_module_has_a_layer() -> None:
    assert [name for name in map(module_name, FILES) if room(name) not in LAYERS] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("xmem.units", "import xmem.store"),
        ("xmem.ingest.pipeline", "from xmem.query import query"),
        ("xmem.simulate.replay", "def late():\n    from xmem.ingest.adapter import Notes"),
        ("xmem.query.diff", "import torch"),
        ("xmem.ingest.pipeline", "from hta.trace_analysis import TraceAnalysis"),
        ("xmem.query", "import altair"),
        ("xmem.store", "from xmem.cli import main"),
    ],
)
def test_a_wrong_import_is_found(module: str, source: str) -> None:
    assert len(layer_faults(module, source)) == 1


@pytest.mark.parametrize("file", [file for file in FILES if room(module_name(file)) in LIGHT], ids=module_name)
def test_the_help_path_imports_nothing_heavy(file: Path) -> None:
    tree = ast.parse(file.read_text())
    skipped = typing_only(tree)
    top = ast.Module([node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)], [])
    heavy = [name for name, line in imports(top) if name.split(".")[0] in HEAVY and line not in skipped]
    assert heavy == []


@pytest.mark.parametrize("file", FILES, ids=module_name)
def test_sizes_and_docstrings(file: Path) -> None:
    text = file.read_text()
    tree = ast.parse(text)
    assert len(text.splitlines()) <= 400, "a file has up to 400 lines"
    first = (ast.get_docstring(tree) or "").splitlines()
    assert text.startswith('"""') and first and first[0].strip(), "the first line names the module's one job"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= 40, f"{node.name} has {length} lines, 40 are allowed"
            assert parameter_count(node) <= 6, f"{node.name} has {parameter_count(node)} parameters, 6 are allowed"


def parameter_count(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    named = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return len([argument for argument in named if argument.arg not in ("self", "cls")])


@pytest.mark.parametrize("file", FILES, ids=module_name)
def test_names_say_what_things_are(file: Path) -> None:
    tree = ast.parse(file.read_text())
    defined = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    assert [name for name in (file.stem, *defined) if FORBIDDEN_NAMES.search(name)] == []


def test_no_path_of_a_machine_stands_in_the_source() -> None:
    text_files = [
        file
        for folder in ("xmem", "schemas", "examples", "tests", "docs", "benchmarks")
        for file in (REPOSITORY / folder).rglob("*")
        if file.suffix in (".py", ".sql", ".md", ".csv", ".toml", ".txt")
    ]
    text_files += [REPOSITORY / name for name in ("README.md", "Makefile", "pyproject.toml", "CONTRIBUTING.md")]
    machine = re.compile(r"(?<![\w.])/(?:root|work)/\w")
    assert [str(file) for file in text_files if machine.search(file.read_text(encoding="utf-8"))] == []
