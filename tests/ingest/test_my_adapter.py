"""The example adapter, installed as a package of its own: xmem asks it first and reads through it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import EXAMPLES, REPOSITORY

CSV = "time_us,device,action,address,bytes\n10,0,alloc,4096,2097152\n11,0,alloc,8192,nonsense\n15,0,free,4096,2097152\n"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the example as a stranger would, into a folder of its own."""
    folder = tmp_path_factory.mktemp("plugin")
    source = shutil.copytree(EXAMPLES / "my_adapter", folder / "source")
    target = folder / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--disable-pip-version-check", "--target", target, source], check=True, cwd=folder)
    return target


def run(code: str, site: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(site), str(REPOSITORY)])
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run([sys.executable, "-c", code], env=environment, cwd=cwd, capture_output=True, text=True)


def test_an_installed_adapter_takes_part(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "job.csv").write_text(CSV)
    code = (
        "import json\n"
        "from xmem.ingest import IngestOptions, ingest\n"
        "[run] = ingest('job.csv', options=IngestOptions(store='store'))\n"
        "print(json.dumps([run.adapter, [[i.code, i.count] for i in run.issues if i.code != 'no_rank'],"
        " [[d.device, d.peak_allocated_bytes, d.end_allocated_bytes] for d in run.devices]]))\n"
    )
    done = run(code, installed, tmp_path)
    assert done.returncode == 0, done.stderr
    adapter, found, devices = json.loads(done.stdout)
    assert adapter == "my_csv"
    assert found == [["bad_record", 1]]
    assert devices == [["cuda:0", 2097152, 0]]


def test_a_broken_plug_in_is_named(installed: Path, tmp_path: Path) -> None:
    site = shutil.copytree(installed, tmp_path / "site")
    (site / "my_adapter.py").write_text("raise RuntimeError('half installed')\n")
    code = (
        "from xmem.errors import UsageError\n"
        "from xmem.ingest.adapter import adapters\n"
        "try:\n    adapters()\n"
        "except UsageError as error:\n    print(error)\n"
    )
    done = run(code, site, tmp_path)
    assert done.stdout == (
        "The adapter plug-in 'my_csv' (my_adapter) cannot be imported: half installed\n"
        "Repair or uninstall the package that provides it.\n"
    )
