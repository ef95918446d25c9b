"""Generated pages are fresh, and what the prose names exists."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from tests.paths import REPOSITORY
from xmem.cli import VERBS

PROSE = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md")


def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", REPOSITORY / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GENERATED = load_generator().pages()


@pytest.mark.parametrize("path", GENERATED, ids=lambda path: path.name)
def test_generated_pages_are_fresh(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == GENERATED[path], "run `make docs` and commit the pages"


def test_every_command_in_the_prose_exists() -> None:
    named = {
        verb
        for page in PROSE
        for verb in re.findall(r"(?:^|[`$] ?)xmem ([a-z]+)", (REPOSITORY / page).read_text(), re.MULTILINE)
    }
    assert named and named <= set(VERBS)


def test_every_make_target_in_the_prose_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):.*##", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    named = {target for page in PROSE for target in re.findall(r"`make ([a-z]+)`", (REPOSITORY / page).read_text())}
    assert {"demo", "test"} <= named <= targets


def test_every_local_link_in_the_prose_leads_somewhere() -> None:
    for page in PROSE:
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", (REPOSITORY / page).read_text()):
            assert (REPOSITORY / page).parent.joinpath(link).exists(), f"{page} links to {link}"


def test_every_command_stands_in_the_readme() -> None:
    readme = (REPOSITORY / "README.md").read_text()
    assert [verb for verb in VERBS if f"`xmem {verb}" not in readme] == []


def test_the_ci_script_runs_the_test_command_of_the_readme() -> None:
    assert "make test" in (REPOSITORY / "README.md").read_text()
    assert (REPOSITORY / ".ci" / "run").read_text().rstrip().endswith("make test")
