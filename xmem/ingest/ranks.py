"""Which files make one run: single files, folders and patterns of ranks; and which rank a file belongs to."""

from __future__ import annotations

import glob
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from xmem.errors import UnreadableError, UsageError

if TYPE_CHECKING:
    from xmem.ingest import IngestOptions

STDIN = "-"
_TRACE_ENDINGS = (".json", ".json.gz", ".jsonl", ".jsonl.gz", ".pickle", ".pkl", ".pt", ".gz", ".parquet")
_STEM_ENDINGS = (".gz", ".json", ".jsonl", ".pickle", ".pkl", ".parquet", ".raw", ".trace", ".pt", ".xmem")

#: Ranks in file names, as torchtitan, Composer, torchtnt and torch's own examples write them.
_RANK_IN_NAME = (
    re.compile(r"rank[-_]?(\d{1,6})", re.IGNORECASE),
    re.compile(r"^snapshot[-_](\d{1,6})\."),
    re.compile(r"^(\d{1,6})_step_\d+"),
)


@dataclass(frozen=True)
class Group:
    """Files that make one run, and files of its folder that look like traces and cannot be read."""

    name: str
    files: tuple[str, ...]
    skipped: tuple[str, ...] = ()


def group_paths(paths: Sequence[str | Path], options: IngestOptions) -> list[Group]:
    """Return the runs that the paths make: a folder or a pattern is one, and so is everything with `as_ranks`."""
    if not paths:
        raise UsageError("No file is given.", "Name a trace or a snapshot: xmem ingest FILE")
    expanded = [_expand(str(path)) for path in paths]
    if options.as_ranks:
        files = tuple(file for group in expanded for file in group.files)
        skipped = tuple(file for group in expanded for file in group.skipped)
        name = expanded[0].name if len(expanded) == 1 else _folder_name(files)
        expanded = [Group(name, files, skipped)]
    for group in expanded:
        if options.rank is not None and len(group.files) > 1:
            raise UsageError(
                f"--rank {options.rank} is for one file, and {group.name!r} holds {len(group.files)}.",
                "Leave --rank out, or ingest the files one by one.",
            )
    if options.name is not None:
        if len(expanded) > 1:
            raise UsageError(f"--name is for one run, and {len(expanded)} are given.", "Ingest them one by one.")
        expanded = [replace(expanded[0], name=options.name)]
    return expanded


def rank_from_name(name: str) -> int | None:
    """Return the rank that a file name states, None where it states none."""
    for pattern in _RANK_IN_NAME:
        match = pattern.search(name)
        if match:
            return int(match[1])
    return None


def check_distinct(ranks: Sequence[tuple[int, str]]) -> None:
    """Raise UsageError where two files of one run have the same rank."""
    seen: dict[int, str] = {}
    for rank, file in ranks:
        if rank in seen:
            raise UsageError(
                f"{seen[rank]!r} and {file!r} are both rank {rank}; they are not merged.",
                "Ingest one of them on its own with --rank N, or keep one of the two in the folder.",
            )
        seen[rank] = file


def readable_stem(file: str) -> str:
    """Return a file's name without its endings: `rank0_trace.json.gz` is `rank0_trace`."""
    name = "stdin" if file == STDIN else Path(file).name
    stem = name
    while True:
        ending = next((end for end in _STEM_ENDINGS if stem.lower().endswith(end) and len(stem) > len(end)), None)
        if ending is None:
            return stem
        stem = stem[: -len(ending)]


def _expand(path: str) -> Group:
    if path == STDIN:
        return Group(readable_stem(path), (path,))
    if Path(path).is_dir():
        return _group_of_folder(Path(path))
    if not Path(path).exists() and glob.has_magic(path):
        files = tuple(sorted(file for file in glob.glob(path) if Path(file).is_file()))
        if not files:
            raise UsageError(f"No file fits the pattern {path!r}.", "Check the folder and the pattern.")
        return Group(_folder_name(files) if len(files) > 1 else readable_stem(files[0]), files)
    return Group(readable_stem(path), (path,))


def _group_of_folder(folder: Path) -> Group:
    """Take the files that an adapter recognises; others that are named like a rank's trace are told of."""
    files = [file for file in sorted(folder.iterdir()) if file.is_file() and not file.name.startswith(".")]
    chosen = tuple(str(file) for file in files if _is_recognised(str(file)))
    if not chosen:
        raise UnreadableError(
            f"The folder {str(folder)!r} holds no trace or snapshot.",
            "Name a folder with one file for each rank, or a file.",
        )
    skipped = [file.name for file in files if str(file) not in chosen and _is_named_like_trace(file.name)]
    return Group(_resolved_name(folder), chosen, tuple(skipped))


def _is_named_like_trace(name: str) -> bool:
    return rank_from_name(name) is not None and name.lower().endswith(_TRACE_ENDINGS)


def _is_recognised(file: str) -> bool:
    from xmem.errors import XmemError
    from xmem.ingest.adapter import find_adapter
    from xmem.ingest.source import open_source

    try:
        with open_source(file) as source:
            return find_adapter(source.head(), source.name) is not None
    except XmemError:
        return False


def _folder_name(files: Sequence[str]) -> str:
    return _resolved_name(Path(files[0]).parent) if files and files[0] != STDIN else "stdin"


def _resolved_name(folder: Path) -> str:
    return folder.resolve().name or "root"
