"""Takes sources through reading, ordering, lifetimes and attribution into the store, one run at a time."""

from __future__ import annotations

import gc
import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xmem.errors import UnreadableError
from xmem.ingest.adapter import LATE_STACKS, Adapter, Filters, Notes, find_adapter
from xmem.ingest.bounds import keep_bounds
from xmem.ingest.hta import analyse, first_kernel_ns, require_hta
from xmem.ingest.ranks import STDIN, Group, check_distinct, rank_from_name
from xmem.ingest.source import Source, advise, describe, hash_file, open_source
from xmem.ingest.spool import Spool
from xmem.ingest.summary import describe_stored, fail_if_strict
from xmem.schema import HTA_TABLES
from xmem.store import RunWriter, Store

if TYPE_CHECKING:
    import polars as pl

    from xmem.ingest import Ingested, IngestOptions, Progress
    from xmem.ingest.beginning import Beginning

_ID_LETTERS = 12


@dataclass
class Reading:
    """One source, read: its batches, its notes and what it was."""

    file: str
    adapter: str
    notes: Notes
    spool: Spool
    sha256: str
    disk_bytes: int
    rank: int
    path: Path | None
    compressed: bool
    begun: Beginning | None


def ingest_group(group: Group, options: IngestOptions) -> Ingested:
    """Read the files of one run and commit them together."""
    store = Store(options.store)
    if options.hta:
        require_hta()
    if not options.force:
        there = _find_same(store, group, options)
        if there is not None:
            return describe_stored(store, there, already_there=True)
    with store.writer("pending") as writer:
        readings = [_read(file, options, writer) for file in group.files]
        _require_memory(readings)
        check_distinct([(reading.rank, reading.file) for reading in readings])
        for skipped in group.skipped:
            readings[0].notes.add("unreadable_part", detail=f"{skipped} is no trace that can be read")
        run_id = run_identity([reading.sha256 for reading in readings], options)
        for reading in readings:
            _write(reading, group.name, options, writer)
        if options.strict:
            fail_if_strict([(reading.file, reading.notes) for reading in readings])
        writer.commit(run_id)
    return describe_stored(store, run_id, already_there=False)


def _require_memory(readings: list[Reading]) -> None:
    """Raise UnreadableError where no source says anything of memory; a snapshot of an idle process may be empty."""
    if readings[0].adapter != "cuda_snapshot" and not any(
        reading.spool.rows(table) for reading in readings for table in ("events", "segments", "blocks")
    ):
        lost = sorted({code for reading in readings for code in reading.notes.issues})
        raise UnreadableError(
            f"{readings[0].file!r} holds no memory events" + (f" ({', '.join(lost)})." if lost else "."),
            "Was memory recorded? xmem inspect says what a file is, and how to turn on what is missing.",
        )


def run_identity(hashes: list[str], options: IngestOptions) -> str:
    """Return the id of a run: of its content, and of what was asked for where that is not the whole of it."""
    asked: dict[str, Any] = {}
    if options.filters != Filters():
        asked["filters"] = asdict(options.filters)
    if options.rank is not None:
        asked["rank"] = options.rank
    if len(hashes) == 1 and not asked:
        return hashes[0][:_ID_LETTERS]
    text = json.dumps([sorted(hashes), asked], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_ID_LETTERS]


def _find_same(store: Store, group: Group, options: IngestOptions) -> str | None:
    """Return the id of a run made of the same content and filters, if the store has it."""
    runs = store.runs()
    if not runs or not all(file != STDIN and Path(file).is_file() for file in group.files):  # pipes are read once
        return None
    run_id = run_identity([hash_file(file)[0] for file in group.files], options)
    if options.hta and not any((store.path / table / f"run_id={run_id}").is_dir() for table in HTA_TABLES):
        return None
    return run_id if any(run.run_id == run_id for run in runs) else None


def _read(file: str, options: IngestOptions, writer: RunWriter) -> Reading:
    with open_source(file) as source:
        adapter = adapter_of(source, file)
        notes = Notes(filename=source.name, filters=options.filters)
        spool = Spool(writer.folder)
        begun: Beginning | None = None
        with _no_collection():
            for batch in adapter.read(source, notes):  # type: ignore[arg-type]
                if batch.table == LATE_STACKS and not spool.rows(LATE_STACKS):
                    begun = _begin(spool, notes)
                spool.take(batch.table, keep_bounds(batch, notes).columns)
                _tell(options.progress, source)
        source.finish()
        if source.truncated and "truncated" not in notes.issues:
            notes.add("truncated", detail=source.trouble)
            notes.facts["truncated"] = True
        elif source.trouble and not source.truncated:
            notes.add("unreadable_part", detail=source.trouble)
        rank = _rank_of(source.name, notes, options.rank)
        return Reading(
            file=source.name,
            adapter=adapter.name,
            notes=notes,
            spool=spool,
            sha256=source.sha256,
            disk_bytes=source.disk_bytes,
            rank=rank,
            path=source.path,
            compressed=source.compressed,
            begun=begun,
        )


def _begin(spool: Spool, notes: Notes) -> Beginning | None:
    from xmem.ingest.beginning import begin

    return begin(spool, notes)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector from walking through millions of records that a decoder holds for a moment."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def adapter_of(source: Source, file: str) -> Adapter:
    """Return the adapter that recognises a source; raise UnreadableError where none does."""
    adapter = find_adapter(source.head(), source.name)
    if adapter is None:
        raise UnreadableError(
            f"{file!r} is {describe(source.head())}, not a trace or snapshot that xmem knows.",
            f"{advise(source.head())}It reads torch.profiler traces, CUDA memory snapshots, memory timelines and xmem"
            " event logs.",
        )
    return adapter


def _tell(progress: Progress | None, source: Source) -> None:
    if progress is not None:
        total = source.path.stat().st_size if source.path is not None else None
        progress(source.name, source.disk_bytes, total)


def _rank_of(name: str, notes: Notes, override: int | None) -> int:
    if override is not None:
        return override
    if notes.rank is not None:
        return notes.rank
    named = rank_from_name(name)
    if named is not None:
        notes.add("rank_from_name", detail=f"rank {named} of {name}")
        return named
    notes.add("no_rank")
    return 0


def _write(reading: Reading, name: str, options: IngestOptions, writer: RunWriter) -> None:
    from xmem.ingest.tables import build_tables  # numpy and the like load only once the source is read

    facts = {
        "name": name,
        "source_file": reading.file,
        "source_sha256": reading.sha256,
        "source_bytes": reading.disk_bytes,
        "adapter": reading.adapter,
        "ingested_ns": time.time_ns(),
    }
    if options.filters != Filters():
        whole = asdict(Filters())
        asked = {name: value for name, value in asdict(options.filters).items() if value != whole[name]}
        facts["filters"] = json.dumps(asked)
        reading.notes.add("filtered", detail=json.dumps(asked))
    if options.hta:
        _write_hta(reading, writer)

    def write(table: str, frame: pl.DataFrame, part: int = 0) -> None:
        writer.write(table, reading.rank, frame, part)

    build_tables(reading.spool, reading.notes, facts, write, reading.begun)
    reading.spool.discard()


def _write_hta(reading: Reading, writer: RunWriter) -> None:
    """Write the hta_* tables; what cannot be analysed is an issue."""
    if reading.adapter != "torch_trace" or reading.path is None:
        what = "standard input can be read once" if reading.path is None else f"a {reading.adapter} is no trace"
        reading.notes.add("hta_failed", detail=what)
        return
    offset_ns = int(str(reading.notes.facts.get("ts_offset_ns", 0)))
    first_ns = first_kernel_ns(reading.spool.frames("spans"), offset_ns)
    found = analyse(reading.path, compressed=reading.compressed, first_kernel_ns=first_ns, notes=reading.notes)
    for table, frame in found.items():
        writer.write(table, reading.rank, frame)
