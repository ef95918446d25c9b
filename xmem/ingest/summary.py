"""Says what a run in the store is: facts, devices with peaks, issues, and sentences for a person."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

from xmem.errors import UnreadableError
from xmem.ingest import DeviceFacts, Ingested, IssueFacts, SourceFacts
from xmem.schema import issue_codes

if TYPE_CHECKING:
    from xmem.ingest.adapter import Notes
    from xmem.store import Store

Row = TypeVar("Row")

_SILENT = ("note", "info")

_DEVICES = """
SELECT d.rank, d.device_type || CASE WHEN d.device_index < 0 THEN '' ELSE ':' || d.device_index END AS device,
  d.name, d.total_bytes, d.baseline_bytes, coalesce(e.peak, 0)::BIGINT AS peak_allocated_bytes,
  coalesce(e.final, 0)::BIGINT AS end_allocated_bytes, e.reserved::BIGINT AS peak_reserved_bytes, d.complete_history
FROM devices d LEFT JOIN (
  SELECT rank, device_type, device_index, max(allocated_bytes) AS peak, arg_max(allocated_bytes, seq) AS final,
    max(reserved_bytes) AS reserved
  FROM events WHERE run_id = $1 GROUP BY ALL
) e USING (rank, device_type, device_index)
WHERE d.run_id = $1 ORDER BY d.rank, d.device_type, d.device_index
"""


def describe_stored(store: Store, run_id: str, *, already_there: bool) -> Ingested:
    """Read back what the store says about a run."""
    connection = store.connect()
    sources = _rows(connection, SourceFacts, "SELECT {} FROM runs WHERE run_id = $1 ORDER BY rank", run_id)
    devices = _rows(connection, DeviceFacts, f"SELECT {{}} FROM ({_DEVICES})", run_id)
    issues = _rows(connection, IssueFacts, "SELECT {} FROM issues WHERE run_id = $1 ORDER BY rank, code", run_id)
    name, adapter = connection.execute(
        "SELECT any_value(name), any_value(adapter) FROM runs WHERE run_id = $1", [run_id]
    ).fetchall()[0]
    totals = {
        name: sum(getattr(source, name) for source in sources)
        for name in ("event_count", "memory_event_count", "span_count", "stack_count")
    }
    return Ingested(
        run_id=run_id,
        name=name,
        adapter=adapter,
        already_there=already_there,
        ranks=tuple(source.rank for source in sources),
        **totals,
        sources=tuple(sources),
        devices=tuple(devices),
        issues=tuple(issues),
        warnings=tuple(sentence(issue) for issue in issues if issue.severity not in _SILENT),
    )


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


def _rows(connection: Any, row: type[Row], sql: str, run_id: str) -> list[Row]:
    names = [field.name for field in fields(row)]  # type: ignore[arg-type]
    return [row(*values) for values in connection.execute(sql.format(", ".join(names)), [run_id]).fetchall()]
