"""Reads a file in the form of measured_runs.csv: the job and the card of each row, or what is wrong with it."""

from __future__ import annotations

import csv
import json
import math
import re
from pathlib import Path
from typing import Any

from xmem.capture.models import is_text_model, torchvision_name
from xmem.capture.workload import ZERO_GRAD, Workload
from xmem.errors import UnreadableError, UsageError
from xmem.simulate.gpu_table import find_gpu

Row = dict[str, Any]
NEEDED = ("model", "optimizer", "batch_size", "total_gpu_memory", "ground_bytes", "real_oom")
#: What torch the measured runs had.
MEASURED_TORCH = "2.6.0"
#: CIFAR-10, made larger.
MEASURED_IMAGE_SIZE = 86
#: What an engine says of a row; nothing where the row cannot be estimated.
FIGURES = (
    "estimate_bytes", "relative_error", "predicted_oom", "setup_bytes", "relative_error_less_setup",
    "peak_allocated_bytes",
)  # fmt: skip
_TRUE, _FALSE = ("true", "1", "1.0", "yes"), ("false", "0", "0.0", "no", "")
_BLANK = ("", "nan", "none", "null")


def read_runs(path: str | Path) -> list[Row]:
    """Read a file in the format of measured_runs.csv; a cell that is not there is empty."""
    file = Path(path)
    if not file.is_file():
        raise UsageError(f"There is no file {str(path)!r}.", "Give a CSV of measured runs.")
    try:
        with file.open(newline="", encoding="utf-8-sig") as text:
            reader = csv.DictReader(text, restval="")
            names = [name.strip() for name in reader.fieldnames or []]
            reader.fieldnames = names
            missing = [name for name in NEEDED if name not in names]
            if missing:
                raise UnreadableError(f"{file.name} has no column {missing[0]!r}.", f"Needed are: {', '.join(NEEDED)}.")
            return [{name: row[name].strip() for name in names} for row in reader]
    except (csv.Error, UnicodeDecodeError) as error:
        raise UnreadableError(f"{file.name} is no CSV in UTF-8: {error}.") from error


def workload_of(row: Row) -> Workload:
    """Describe the job that a row measured; `workload`, where there is one, says all of it."""
    if row.get("workload"):
        try:
            return Workload(**json.loads(row["workload"]))
        except (ValueError, TypeError) as error:
            raise UsageError(f"workload is {row['workload'][:80]!r}: {error}.") from error
    for name in ("model", "optimizer"):
        if not row.get(name):
            raise UsageError(f"{name} is empty.")
    return Workload(
        model=row["model"],
        batch_size=_whole(row, "batch_size"),
        optimizer=row["optimizer"],
        dtype="float16" if truth_of(row, "fp16") else "float32",
        zero_grad=_zero_grad(row),
        iterations=_whole(row, "target_iteration", 3) + 1,
        image_size=_image_size(row),
    )


def _zero_grad(row: Row) -> str:
    """Return where gradients are cleared; as in the measured runs, a mode above 2 is 0."""
    text = str(row.get("zero_grad_mode") or "").lower()
    if text in ZERO_GRAD:
        return text
    mode = _whole(row, "zero_grad_mode", 0)
    return ZERO_GRAD[mode] if mode < len(ZERO_GRAD) else ZERO_GRAD[0]


def _image_size(row: Row) -> int:
    text = str(row.get("input_size") or "")
    if not text or is_text_model(row["model"]):  # every transformer's row holds the same meaningless default
        return MEASURED_IMAGE_SIZE
    found = re.fullmatch(r"(?:3x)?(\d+)x(\d+)(?:x3)?", text)
    if found is None or found[1] != found[2]:
        raise UsageError(f"input_size is {text!r}, not a square of three colours like 86x86x3.")
    return int(found[1])


def family_of(row: Row) -> str:
    """Return the family of a row; where it says nothing, what its model is."""
    said = str(row.get("family") or "").lower()
    return said if said not in _BLANK else "transformer" if is_text_model(row["model"]) else "cnn"


def is_convolutional(row: Row) -> bool:
    """Say whether a job takes images: by its model where that is known, else by its family."""
    if is_text_model(row["model"]):
        return False
    return torchvision_name(row["model"]) is not None or family_of(row) == "cnn"


def torch_of(row: Row) -> str:
    """Return the torch that a row was measured with: its own column, else that of the paper's runs."""
    return str(row.get("torch_version") or "") or MEASURED_TORCH


def total_bytes_of(row: Row) -> int:
    """Return the card's memory: the row's own, else what is known of the card."""
    gpu = find_gpu(row.get("gpu_name") or "")
    return _whole(row, "total_gpu_memory", None if gpu is None else gpu.bytes, least=1)


def ground_of(row: Row) -> int | None:
    """Return what was measured; None where nothing was."""
    return _whole(row, "ground_bytes", 0) or None


def truth_of(row: Row, name: str) -> bool:
    """Return a cell that is true or false; an empty one is false."""
    text = str(row.get(name) or "").lower()
    if text not in _TRUE + _FALSE + _BLANK:
        raise UsageError(f"{name} is {text!r}, neither true nor false.")
    return text in _TRUE


def _whole(row: Row, name: str, otherwise: int | None = None, *, least: int = 0) -> int:
    """Return a cell's whole number; tables often hold it as 3.0."""
    text = str(row.get(name) or "").lower()
    if text in _BLANK and otherwise is not None:
        return otherwise
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value.is_integer() or value < least:
        raise UsageError(f"{name} is {text!r}, not a whole number of at least {least}.")
    return int(text) if text.isdigit() else int(value)


def errors_of(ground: int | None, estimate: int, setup: int) -> dict[str, float | None]:
    """Return the errors of an estimate, as given and less set-up memory; None where nothing was measured."""
    if ground is None:
        return {"relative_error": None, "relative_error_less_setup": None}
    return {
        "relative_error": (estimate - ground) / ground,
        "relative_error_less_setup": (estimate - setup - ground) / ground,
    }


def without_answer(row: Row, trouble: str) -> Row:
    """Return a row that cannot be estimated, with why."""
    return {**row, **dict.fromkeys(FIGURES), "trouble": trouble}


def check_row(row: Row) -> Row:
    """Return a row with family and real_oom in plain words; raises UsageError where a cell that is needed is broken."""
    for read in (workload_of, total_bytes_of, ground_of):
        read(row)
    return {**row, "family": family_of(row), "real_oom": str(truth_of(row, "real_oom")).lower()}
