"""The registry of allocators, and the example plug-in: installed as a stranger would, through the same battery."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from tests.paths import EXAMPLES, REPOSITORY
from xmem.errors import UsageError
from xmem.simulate import allocator
from xmem.simulate.allocator import ALLOCATORS, allocator_names, make_allocator
from xmem.simulate.device import Device

MIB = 1 << 20


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the example into a folder of its own, without the package index."""
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("hatchling, which builds the example, is not installed here")
    folder = tmp_path_factory.mktemp("plugin")
    source = shutil.copytree(EXAMPLES / "my_allocator", folder / "source")
    target = folder / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--disable-pip-version-check", "--target", target, source], check=True, cwd=folder)
    return target


def run(code: str, site: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(REPOSITORY)])}
    return subprocess.run([sys.executable, "-c", code], env=environment, cwd=cwd, capture_output=True, text=True)


def test_the_installed_plug_in_passes_the_battery(installed: Path, tmp_path: Path) -> None:
    code = (
        "from tests.simulate.battery import check\n"
        "from xmem.simulate.allocator import allocator_names, make_allocator\n"
        "from xmem.simulate.device import Device\n"
        "check(lambda capacity: make_allocator('power_of_two', Device(capacity)))\n"
        "print(allocator_names())\n"
    )
    done = run(code, installed, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str([*ALLOCATORS, "power_of_two"])


def test_a_broken_plug_in_is_named_with_its_reason(installed: Path, tmp_path: Path) -> None:
    site = shutil.copytree(installed, tmp_path / "site")
    (site / "my_allocator.py").write_text("raise RuntimeError('half installed')\n")
    code = (
        "from xmem.errors import UsageError\n"
        "from xmem.simulate.allocator import make_allocator\n"
        "from xmem.simulate.device import Device\n"
        "try:\n    make_allocator('power_of_two', Device(1 << 30))\n"
        "except UsageError as error:\n    print(error)\n"
    )
    assert run(code, site, tmp_path).stdout == (
        "The allocator plug-in 'power_of_two' (my_allocator:make) cannot be loaded: RuntimeError: half installed\n"
        "Repair or uninstall the package that brings it.\n"
    )


def test_an_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(UsageError, match="There is no allocator 'jemalloc'") as caught:
        make_allocator("jemalloc", Device(MIB))
    assert all(name in caught.value.hint for name in ALLOCATORS)


def plug_in(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    point = EntryPoint(name="mine", value=value, group="xmem.allocators")
    monkeypatch.setattr(allocator, "_plug_ins", lambda: (point,))


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("no_such_module:make", "cannot be loaded: ModuleNotFoundError"),
        ("xmem.simulate.ideal:no_such_name", "cannot be loaded: AttributeError"),
        ("xmem.simulate.allocator:ENTRY_POINT_GROUP", "is not a factory"),
    ],
)
def test_what_can_be_wrong_with_a_plug_in(monkeypatch: pytest.MonkeyPatch, value: str, problem: str) -> None:
    plug_in(monkeypatch, value)
    with pytest.raises(UsageError, match="The allocator plug-in 'mine'") as caught:
        make_allocator("mine", Device(MIB))
    assert problem in caught.value.message and value in caught.value.message


def test_built_ins_and_plug_ins_enter_by_the_same_door(monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch, "xmem.simulate.ideal:make")
    assert allocator_names()[-1] == "mine"
    assert make_allocator("mine", Device(MIB)).stats() == make_allocator("ideal", Device(MIB)).stats()


def test_allocators_import_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from xmem.simulate.allocator import make_allocator\n"
        "from xmem.simulate.device import Device\n"
        f"for name in {list(ALLOCATORS)}:\n    make_allocator(name, Device(1 << 30)).alloc(1000)\n"
        "print(sorted({'numpy', 'polars', 'duckdb', 'pyarrow', 'torch'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
