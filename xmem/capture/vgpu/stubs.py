"""Answers for the functions that a torch needs and the driver does not define: source text of C stubs."""

from __future__ import annotations

import re
from collections.abc import Iterable

_OURS = re.compile(r"(__cuda|cuda|cublas|cudnn|cufft|cusolver|cusparse|nccl)[A-Z]\w*")
#: These ask a library about itself and are answered by the real one.
_ABOUT_ITSELF = re.compile(r"\w*Get(Version|Property|CudartVersion|ErrorString|LastErrorString|ErrorName|StatusString)")
_HEAD = "extern void xmem_vgpu_note_unmodelled(const char*);\nextern void xmem_vgpu_kernel_ran(void);\n"

#: What "not supported" is called by each library.
_REFUSALS = {
    "cuda": 801,
    "__cuda": 801,
    "cudnn": 3000,
    "cufft": 16,
    "cusolver": 9,
    "cusparse": 10,
    "nccl": 5,
    "cublas": 15,
}


def missing_symbols(needed: Iterable[str], defined: Iterable[str]) -> list[str]:
    """Return what torch needs of CUDA and nobody of ours defines, sorted."""
    known = set(defined)
    return sorted(name for name in set(needed) - known if _OURS.fullmatch(name) and not _ABOUT_ITSELF.fullmatch(name))


def write_stubs(names: Iterable[str]) -> str:
    """Write a C file that defines the names: calculations succeed, questions are refused and noted."""
    return _HEAD + "".join(_stub(name) for name in names)


def _stub(name: str) -> str:
    match = _OURS.fullmatch(name)
    assert match is not None
    family = match[1]
    if family in ("cublas", "cudnn") and not re.search(r"Get|Find|Restore", name):
        return f"int {name}(void) {{ xmem_vgpu_kernel_ran(); return 0; }}\n"
    if family in ("cufft", "cusolver", "cusparse") and "Create" in name:
        return f"int {name}(void** handle) {{ static char place[64]; *handle = place; return 0; }}\n"
    if family in ("cufft", "cusolver", "cusparse") and re.search(r"Destroy|Set", name):
        return f"int {name}(void) {{ return 0; }}\n"
    return f'int {name}(void) {{ xmem_vgpu_note_unmodelled("{name}"); return {_REFUSALS[family]}; }}\n'
