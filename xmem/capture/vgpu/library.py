"""Builds the virtual driver with the system's compiler, once for each torch, and keeps it."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from xmem.capture.vgpu.stubs import missing_symbols, write_stubs
from xmem.capture.vgpu.torch_facts import TorchFacts, check_platform
from xmem.errors import UsageError

SOURCES = Path(__file__).parent / "driver"
COMPILERS = ("g++", "c++", "clang++")
#: Names that programs look for; preloading libraries of these names answers them.
DRIVER, NVML = "libcuda.so.1", "libnvidia-ml.so.1"
_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden")


def find_compiler() -> str:
    """Return the system's C++ compiler."""
    for name in COMPILERS:
        found = shutil.which(os.environ.get("CXX") or name)
        if found is not None:
            return found
    raise UsageError(
        f"The virtual GPU is built once by a C++ compiler, and there is none: {', '.join(COMPILERS)} were looked for.",
        "Install one, such as the package g++ or build-essential.",
    )


def library_key(torch: TorchFacts) -> str:
    """Return a hash of everything that the built library depends on."""
    content = hashlib.sha256()
    generator = Path(__file__).with_name("stubs.py")
    for file in (*sorted(SOURCES.iterdir()), generator, Path(__file__)):
        content.update(file.name.encode() + b"\0" + file.read_bytes())
    content.update(f"{torch.version} {torch.cuda}".encode())
    for library in torch.libraries:
        content.update(f"{library.name} {library.stat().st_size}".encode())
    return content.hexdigest()[:20]


def is_built(torch: TorchFacts, cache: Path) -> bool:
    """Say whether the cache holds the driver for this torch."""
    return (cache / "vgpu" / library_key(torch)).is_dir()


def build_library(torch: TorchFacts, cache: Path, progress: Callable[[str], None] | None = None) -> Path:
    """Return the folder with the driver for this torch, building it where the cache does not hold it."""
    check_platform()
    folder = cache / "vgpu" / library_key(torch)
    if folder.is_dir():
        return folder
    compiler = find_compiler()
    if progress is not None:
        progress(f"building the virtual driver for torch {torch.version}, once")
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="building-", dir=folder.parent))
    try:
        _build(compiler, torch, work)
        os.rename(work, folder)
    except OSError:
        if not folder.is_dir():  # otherwise another process was faster
            raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def _build(compiler: str, torch: TorchFacts, work: Path) -> None:
    define = f"-DCUDA_MAJOR={torch.cuda_major}"
    sources = sorted(SOURCES.glob("*.cpp"))
    objects = [work / f"{source.stem}.o" for source in sources]
    pairs = zip(sources, objects, strict=True)
    commands = [[compiler, *_FLAGS, define, "-c", str(source), "-o", str(target)] for source, target in pairs]
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as threads:
        list(threads.map(_run, commands))
    nvml = objects.pop([o.stem for o in objects].index("nvml"))
    missing = missing_symbols(_symbols(torch.libraries, "--undefined-only", "-D"), _symbols(objects, "--defined-only"))
    stubs = work / "stubs.c"
    stubs.write_text(write_stubs(missing), encoding="utf-8")
    objects.append(work / "stubs.o")
    _run([compiler, "-x", "c", "-O1", "-fPIC", "-w", "-c", str(stubs), "-o", str(objects[-1])])
    link = [compiler, "-shared", "-o"]
    _run([*link, str(work / DRIVER), *map(str, objects), f"-Wl,-soname,{DRIVER}", "-ldl", "-lpthread"])
    _run([*link, str(work / NVML), str(nvml), f"-Wl,-soname,{NVML}", f"-L{work}", f"-l:{DRIVER}"])
    for file in (*objects, nvml, stubs):
        file.unlink()


def _symbols(files: Iterable[Path], *options: str) -> list[str]:
    lines = _run(["nm", *options, *map(str, files)]).splitlines()
    return [line.split()[-1].split("@")[0] for line in lines if " " in line.strip()]


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise UsageError(f"The virtual GPU could not be built: {command[0]}: {error.strerror}.") from error
    if done.returncode != 0:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:300])
        raise UsageError(f"The virtual GPU could not be built: {first.strip()}")
    return done.stdout
