"""What a Python's torch is made of, found out without importing it: version, CUDA version, libraries."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from xmem.errors import UsageError

FIRST_TORCH = (2, 6)
CUDA_MAJORS = (12, 13)
INSTALL = "Install a CUDA build of torch (pip install torch on Linux brings one; no GPU is needed), or give --python."
_ASK = (
    "import importlib.util, json; s = importlib.util.find_spec('torch');"
    "print(json.dumps(s.submodule_search_locations[0] if s and s.submodule_search_locations else None))"
)


#: Names the Python that has the CUDA build of torch, where it is not the one that runs xmem.
PYTHON_VARIABLE = "XMEM_CUDA_PYTHON"


def default_python() -> str:
    """Return the Python to run jobs with where none is given."""
    return os.environ.get(PYTHON_VARIABLE) or sys.executable


@dataclass(frozen=True)
class TorchFacts:
    """The torch that a Python would import: where it lies and which CUDA it was built for."""

    python: str
    folder: Path
    version: str
    cuda: str

    @property
    def cuda_major(self) -> int:
        """The major version of its CUDA."""
        return int(self.cuda.split(".")[0])

    @property
    def libraries(self) -> list[Path]:
        """Torch's own libraries that call into CUDA."""
        names = ("libtorch_cuda.so", "libtorch_cuda_linalg.so", "libtorch_python.so", "libc10_cuda.so")
        return [path for name in names if (path := self.folder / "lib" / name).exists()]


def check_platform() -> None:
    """Raise UsageError where the virtual GPU cannot work."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise UsageError(f"The virtual GPU runs on x86-64 Linux only; this is {platform.machine()} {sys.platform}.")


def find_torch(python: str = sys.executable) -> TorchFacts:
    """Find the torch of a Python; raises UsageError where there is none that the virtual GPU can serve."""
    check_platform()
    try:
        asked = subprocess.run([python, "-c", _ASK], capture_output=True, text=True, timeout=60, check=True)
        folder = json.loads(asked.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise UsageError(f"The Python {python!r} cannot be run: {type(error).__name__}.") from error
    if folder is None:
        raise UsageError(f"The Python {python!r} has no torch.", INSTALL)
    return read_torch(python, Path(folder))


def read_torch(python: str, folder: Path) -> TorchFacts:
    """Read what torch says of itself in its version file."""
    text = (folder / "version.py").read_text(encoding="utf-8") if (folder / "version.py").exists() else ""
    version = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)", text, re.MULTILINE)
    cuda = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)", text, re.MULTILINE)
    if version is None:
        raise UsageError(f"The torch in {folder} does not say its version.", INSTALL)
    if cuda is None:
        raise UsageError(f"torch {version[1]} of {python!r} is not built for CUDA.", INSTALL)
    facts = TorchFacts(python, folder, version[1], cuda[1])
    numbers = tuple(int(part) for part in re.findall(r"\d+", facts.version)[:2])
    if numbers < FIRST_TORCH or facts.cuda_major not in CUDA_MAJORS:
        raise UsageError(
            f"torch {facts.version} for CUDA {facts.cuda} is not served by the virtual GPU.",
            "It serves torch 2.6 and later, for CUDA 12 and 13.",
        )
    return facts
