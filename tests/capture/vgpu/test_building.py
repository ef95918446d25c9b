"""What the driver is built from: the torch that is served, the symbols that get stubs, and what is said otherwise."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from xmem.capture.vgpu import library, torch_facts
from xmem.capture.vgpu.library import build_library, find_compiler
from xmem.capture.vgpu.run import devices_wanted, make_command
from xmem.capture.vgpu.stubs import missing_symbols, write_stubs
from xmem.capture.vgpu.torch_facts import TorchFacts, find_torch, read_torch
from xmem.errors import UsageError


def torch_folder(tmp_path: Path, version: str, cuda: str | None) -> Path:
    folder = tmp_path / "torch"
    (folder / "lib").mkdir(parents=True)
    (folder / "version.py").write_text(f"__version__ = {version!r}\ncuda: Optional[str] = {cuda!r}\n")
    return folder


def test_torch_is_read_without_importing_it(tmp_path: Path) -> None:
    facts = read_torch("python", torch_folder(tmp_path, "2.6.0+cu124", "12.4"))
    assert (facts.version, facts.cuda, facts.cuda_major, facts.libraries) == ("2.6.0+cu124", "12.4", 12, [])


@pytest.mark.parametrize(
    ("version", "cuda", "message"),
    [
        ("2.14.1+cpu", None, "torch 2.14.1+cpu of 'python' is not built for CUDA."),
        ("2.5.1+cu124", "12.4", "torch 2.5.1+cu124 for CUDA 12.4 is not served by the virtual GPU."),
        ("2.6.0+cu118", "11.8", "torch 2.6.0+cu118 for CUDA 11.8 is not served by the virtual GPU."),
    ],
)
def test_what_is_not_served_is_said(tmp_path: Path, version: str, cuda: str | None, message: str) -> None:
    with pytest.raises(UsageError) as error:
        read_torch("python", torch_folder(tmp_path, version, cuda))
    assert error.value.message == message and error.value.hint


def test_a_python_without_torch_or_none_at_all(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be run: FileNotFoundError"):
        find_torch(str(tmp_path / "python"))
    with pytest.raises(UsageError, match="does not say its version"):
        read_torch("python", tmp_path)


def test_another_machine_gets_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_facts.platform, "machine", lambda: "aarch64")
    with pytest.raises(UsageError) as error:
        find_torch(sys.executable)
    assert error.value.message == "The virtual GPU runs on x86-64 Linux only; this is aarch64 linux."


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library.shutil, "which", lambda name: None)
    with pytest.raises(UsageError) as error:
        find_compiler()
    assert error.value.message == (
        "The virtual GPU is built once by a C++ compiler, and there is none: g++, c++, clang++ were looked for."
    )
    torch = TorchFacts("python", torch_folder(tmp_path, "2.14.1", "13.0"), "2.14.1", "13.0")
    with pytest.raises(UsageError):
        build_library(torch, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_failed_build_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "find_compiler", lambda: "false")
    torch = TorchFacts("python", torch_folder(tmp_path, "2.14.1", "13.0"), "2.14.1", "13.0")
    with pytest.raises(UsageError, match="The virtual GPU could not be built"):
        build_library(torch, tmp_path / "cache")
    assert list((tmp_path / "cache" / "vgpu").iterdir()) == []


def test_only_what_is_missing_of_cuda_gets_a_stub() -> None:
    needed = ["cudaMalloc", "cudaNewThing", "malloc", "cudnnGetVersion", "cublasSgemm_v2", "nvrtcVersion", "ncclSend"]
    assert missing_symbols(needed, ["cudaMalloc", "ncclSend"]) == ["cublasSgemm_v2", "cudaNewThing"]


def test_stubs_calculate_nothing_and_refuse_questions() -> None:
    text = write_stubs(["cublasSgemm_v2", "cudaNewThing", "cudnnGetThing", "cusolverDnCreate", "cusparseSetStream"])
    lines = {line.split("(")[0]: line for line in text.splitlines()}
    assert "xmem_vgpu_kernel_ran(); return 0;" in lines["int cublasSgemm_v2"]
    assert 'note_unmodelled("cudaNewThing"); return 801;' in lines["int cudaNewThing"]
    assert "return 3000;" in lines["int cudnnGetThing"]
    assert "*handle = place; return 0;" in lines["int cusolverDnCreate"]
    assert lines["int cusparseSetStream"].endswith("{ return 0; }")


def test_words_become_a_command(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    assert make_command([str(script), "--lr", "1"], "py") == ["py", str(script), "--lr", "1"]
    assert make_command(["python", "train.py"], "py") == ["py", "train.py"]
    assert make_command(["-m", "job"], "py") == ["py", "-m", "job"]
    assert make_command(["torchrun", "train.py"], "py") == ["py", "-m", "torch.distributed.run", "train.py"]
    with pytest.raises(UsageError, match=r"There is no script 'none\.py'\."):
        make_command(["none.py"], "py")
    with pytest.raises(UsageError, match="There is nothing to run"):
        make_command([], "py")


def test_torchrun_says_how_many_cards() -> None:
    assert devices_wanted(["torchrun", "--nproc-per-node", "2", "t.py"]) == 2
    assert devices_wanted(["torchrun", "--nproc_per_node=4", "t.py"]) == 4
    assert devices_wanted(["t.py"]) == 1
