"""Says what a run in the store is: facts, devices with peaks, issues, and sentences for a person."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from xmem.errors import UnreadableError
from xmem.ingest import DeviceFacts, Ingested, IssueFacts, SourceFacts
from xmem.schema import issue_codes, layout

if TYPE_CHECKING:
    import polars as pl

    from xmem.ingest.adapter import Notes
    from xmem.store import Store

_SILENT = ("note", "info")


def describe_stored(store: Store, run_id: str, *, already_there: bool) -> Ingested:
    """Read back what the store says about a run."""
    runs = _table(store, "runs", run_id).sort("rank")
    sources = [SourceFacts(**row) for row in _chosen(runs, SourceFacts)]
    issues = [IssueFacts(**row) for row in _chosen(_table(store, "issues", run_id).sort("rank", "code"), IssueFacts)]
    totals = {
        name: sum(getattr(source, name) for source in sources)
        for name in ("event_count", "memory_event_count", "span_count", "stack_count")
    }
    return Ingested(
        run_id=run_id,
        name=runs["name"][0],
        adapter=runs["adapter"][0],
        already_there=already_there,
        ranks=tuple(source.rank for source in sources),
        **totals,
        sources=tuple(sources),
        devices=tuple(_devices(store, run_id)),
        issues=tuple(issues),
        warnings=tuple(sentence(issue) for issue in issues if issue.severity not in _SILENT),
    )


def _table(store: Store, table: str, run_id: str) -> pl.DataFrame:
    """Return a table of a run with its rank; without rows where the run has none."""
    import polars as pl

    folder = store.path / table / f"run_id={run_id}"
    if not folder.is_dir():
        names = [column.name for column in layout()[table].columns]
        return pl.DataFrame(schema={name: pl.Null for name in names})
    return pl.read_parquet(folder, hive_partitioning=True)


def _devices(store: Store, run_id: str) -> list[DeviceFacts]:
    import polars as pl

    keys = ["rank", "device_type", "device_index"]
    devices = _table(store, "devices", run_id)
    folder = store.path / "events" / f"run_id={run_id}"
    if folder.is_dir():
        levels = (
            pl.scan_parquet(folder, hive_partitioning=True)
            .group_by(keys)
            .agg(
                peak_allocated_bytes=pl.col("allocated_bytes").max(),
                end_allocated_bytes=pl.col("allocated_bytes").sort_by("seq").last(),
                peak_reserved_bytes=pl.col("reserved_bytes").max(),
            )
        )
        devices = devices.join(levels.collect(), on=keys, how="left")
    index = pl.col("device_index")
    number = pl.when(index < 0).then(pl.lit("")).otherwise(pl.lit(":") + index.cast(pl.String))
    shown = devices.sort(keys).with_columns(device=pl.col("device_type") + number)
    return [DeviceFacts(**row) for row in _chosen(shown, DeviceFacts)]


def _chosen(frame: pl.DataFrame, row: type[Any]) -> list[dict[str, Any]]:
    """Return rows as dictionaries with the fields of a dataclass."""
    names = [field.name for field in fields(row)]
    return frame.select(names).rows(named=True) if frame.height else []


def sentence(issue: IssueFacts) -> str:
    """Say what an issue means, where and how often it happened, and what to do."""
    code = issue_codes()[issue.code]
    times = f" ({issue.count} times)" if issue.count > 1 else ""
    place = f" at {issue.first_unit} {issue.first_at}" if issue.first_at is not None else ""
    detail = f" First{place}: {issue.detail}." if issue.detail else (f" First{place}." if place else "")
    return f"{code.meaning.rstrip('.')}{times}.{detail} {code.advice}".strip()


def fail_if_strict(sources: list[tuple[str, Notes]]) -> None:
    """Raise UnreadableError where a source has an issue that is more than a note."""
    codes = issue_codes()
    found = [
        f"{file}: {', '.join(sorted(serious))}"
        for file, notes in sources
        if (serious := [code for code in notes.issues if codes[code].severity != "note"])
    ]
    if found:
        raise UnreadableError(
            f"Nothing was stored, as --strict asks: {'; '.join(found)}.",
            "Read it without --strict to keep what is whole; `xmem query` on the table issues tells the rest.",
        )
