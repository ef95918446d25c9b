"""What `xmem ingest` and `xmem inspect` found, as text."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from xmem.render import fact_lines, make_inert
from xmem.units import format_bytes, format_ns

if TYPE_CHECKING:
    from xmem.ingest import DeviceFacts, Ingested, IssueFacts
    from xmem.ingest.inspect import Inspection


def ingested_text(ingested: Sequence[Ingested], *, verbose: bool = False) -> str:
    """Say for each run what it is and how much of it there is."""
    return "\n".join(line for one in ingested for line in _run_lines(one, verbose))


def next_step(one: Ingested) -> str:
    """Name the command that most people run next."""
    return f"next: xmem simulate {one.run_id} --gpu 24"


def _run_lines(one: Ingested, verbose: bool) -> list[str]:
    kept = " (in the store already; --force reads it again)" if one.already_there else ""
    facts = [
        ("source", _source(one)),
        ("events", f"{one.event_count:,} rows, {one.memory_event_count:,} allocations and frees recorded"),
        ("spans", f"{one.span_count:,}; {one.stack_count:,} stacks"),
    ]
    is_least = one.adapter == "cuda_snapshot"  # it tells the sizes of blocks only where they are alive at its end
    facts += [(_device_label(one, device), _device_facts(device, is_least)) for device in one.devices]
    facts += _issue_facts(one, verbose)
    return [f"{make_inert(one.name)}: run {one.run_id}{kept}", *fact_lines(facts)]


def _source(one: Ingested) -> str:
    versions = sorted({source.torch_version for source in one.sources if source.torch_version})
    parts = [one.adapter]
    if versions:
        parts.append("torch " + make_inert(", ".join(versions)))
    if len(one.ranks) > 1:
        parts.append(f"{len(one.ranks)} ranks ({', '.join(map(str, one.ranks))})")
    parts.append(format_bytes(sum(source.source_bytes for source in one.sources)))
    for label in ("ring_buffer", "truncated"):
        if any(getattr(source, label) for source in one.sources):
            parts.append(label.replace("_", " "))
    return ", ".join(parts)


def _device_label(one: Ingested, device: DeviceFacts) -> str:
    name = make_inert(device.device)
    return f"{name} of rank {device.rank}" if len(one.ranks) > 1 else name


def _device_facts(device: DeviceFacts, is_least: bool) -> str:
    peak = f"peak {format_bytes(device.peak_allocated_bytes)} allocated"
    peak += " (at least; xmem simulate counts whole blocks)" if is_least else ""
    if device.peak_reserved_bytes is not None:
        peak += f", {format_bytes(device.peak_reserved_bytes)} reserved"
    parts = [peak, f"{format_bytes(device.end_allocated_bytes)} at the end"]
    if device.baseline_bytes:
        parts.append(f"{format_bytes(device.baseline_bytes)} there before")
    known = [make_inert(device.name)] if device.name else []
    known += [f"{format_bytes(device.total_bytes)} in all"] if device.total_bytes else []
    return "; ".join([*parts, ", ".join(known)] if known else parts)


def _issue_facts(one: Ingested, verbose: bool) -> list[tuple[str, str]]:
    if not one.issues:
        return [("issues", "none")]
    if not verbose:
        counts = Counter[str]()
        for issue in one.issues:
            counts[issue.code] += issue.count
        return [("issues", ", ".join(f"{code} {count:,}" for code, count in counts.items()))]
    return [
        (
            "issue",
            f"{issue.code} {issue.count:,} ({issue.severity}){_place(issue)} {make_inert(issue.detail or '')}".rstrip(),
        )
        for issue in one.issues
    ]


def _place(issue: IssueFacts) -> str:
    return f", first at {issue.first_unit} {issue.first_at:,}" if issue.first_at is not None else ""


def inspection_text(inspection: Inspection) -> str:
    """Say what a file is: one fact a line, then what could be recorded better."""
    about = "about " if inspection.estimated else ""
    per_entry = f", {format_bytes(inspection.bytes_per_entry)} each" if inspection.bytes_per_entry else ""
    packed = ", gzip" if inspection.compressed else ""
    facts = [
        ("kind", make_inert(inspection.kind)),
        ("size", f"{format_bytes(inspection.source_bytes)}{packed}"),
        ("torch", make_inert(inspection.torch_version or "not stated")),
        ("rank", "not stated" if inspection.rank is None else str(inspection.rank)),
        ("devices", make_inert(", ".join(inspection.devices)) or "none seen"),
        ("entries", f"{about}{inspection.entries:,}{per_entry}"),
        ("spans", f"{about}{inspection.spans:,}"),
        ("stacks", f"{about}{inspection.stacks:,}"),
        ("time", _time_fact(inspection)),
        ("history", _history_fact(inspection)),
    ]
    if inspection.switches:
        facts.append(
            ("switches", ", ".join(f"{name} {'on' if on else 'OFF'}" for name, on in inspection.switches.items()))
        )
    if inspection.issues:
        facts.append(("issues", ", ".join(f"{code} {count:,}" for code, count in inspection.issues.items())))
    head = make_inert(inspection.file) + (
        ": the beginning was read, counts are estimates" if inspection.estimated else ""
    )
    return "\n".join([head, *fact_lines(facts), *(f"advice: {make_inert(text)}" for text in inspection.advice)])


def _time_fact(inspection: Inspection) -> str:
    first, last = inspection.first_ts_ns, inspection.last_ts_ns
    if first is None or last is None:
        return "unknown"
    if inspection.time_base == "index":
        return "not recorded: the order of entries stands in"
    span = f"{format_ns(last - first)}{' so far' if inspection.estimated else ''}"
    if inspection.time_base != "unix":
        return span
    begin = datetime.datetime.fromtimestamp(first // 10**9, tz=datetime.UTC)
    return f"{span} from {begin:%Y-%m-%d %H:%M:%S} UTC"


def _history_fact(inspection: Inspection) -> str:
    parts = ["a ring buffer that lost its oldest entries"] if inspection.ring_buffer else []
    parts += ["the end of the file is missing"] if inspection.truncated else []
    return ", ".join(parts) or "no ring buffer, whole"
