"""What a simulation says, as text that is read in five seconds: the answer first, then one fact a line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from xmem.render import bytes_text, fact_lines, make_inert, table_text
from xmem.units import format_bytes

if TYPE_CHECKING:
    from xmem.simulate import Recommendation, SweepRow, Verdict
    from xmem.simulate.verdict import HeldBy, Oom

_HOLDERS_SHOWN = 6
#: Measured CUDA contexts of CUDA 12 and newer lie between 0.25 and 0.5 GiB, so a margin below this proves little.
_CLOSE_BYTES = 256 << 20
_CLOSE_CALL = "This is a close call: CUDA contexts alone vary between 0.25 and 0.5 GiB. Measure yours (--non-torch)."


def verdict_text(verdict: Verdict, *, width: int | None = None, explain: bool = False) -> str:
    """Say whether the run fits, what it needs, what holds the memory, and where a request failed."""
    blocks = [headline(verdict), "\n".join(fact_lines(_facts(verdict)))]
    if verdict.oom is not None:
        blocks.append(_failure_text(verdict.oom, width=width, explain=explain))
    if verdict.oom is None or explain:
        blocks.append(_holders_text("memory at the peak", verdict.at_peak, width=width))
    if explain:
        blocks.append(_rules_text(verdict, width))
    blocks.append("\n".join(_notes(verdict)))
    return "\n\n".join(block for block in blocks if block)


def headline(verdict: Verdict) -> str:
    """Answer in one sentence."""
    gpu = _gpu(verdict)
    if verdict.fits:
        spare = _spare(verdict)
        share = f" ({spare / verdict.usable_bytes:.1%} of usable memory)" if verdict.usable_bytes else ""
        return f"FITS on {gpu}, with {format_bytes(spare)} to spare{share}."
    oom = verdict.oom
    failed = f": {_request(oom)} fails" if oom else ""
    needs = f" The smallest GPU on which it runs has {format_bytes(verdict.smallest_device_bytes)}."
    return f"DOES NOT FIT on {gpu}{failed}.{needs if verdict.smallest_device_bytes is not None else ''}"


def _spare(verdict: Verdict) -> int:
    return verdict.usable_bytes - verdict.peak_reserved_bytes


def _gpu(verdict: Verdict) -> str:
    total = format_bytes(verdict.total_bytes)
    name = make_inert(verdict.gpu)
    return total if name.replace(".", "").replace("_", "").isdigit() else f"{name} ({total})"


def _request(oom: Oom) -> str:
    where = f" in {make_inert(oom.op)}" if oom.op else ""
    return f"allocating {format_bytes(oom.requested_bytes)}{where}{_when(oom)}"


def _when(oom: Oom) -> str:
    parts = [f"step {oom.step}"] if oom.step is not None else []
    parts += [oom.phase] if oom.phase else []
    return f" ({', '.join(parts)})" if parts else ""


def _facts(verdict: Verdict) -> list[tuple[str, str]]:
    unlimited = "" if verdict.peaks_on == "device" else "  if memory had no limit"
    facts = [
        ("run", _run_fact(verdict)),
        ("allocated", bytes_text(verdict.peak_allocated_bytes) + "  peak" + unlimited),
        ("active", bytes_text(verdict.peak_active_bytes) + "  peak" + unlimited),
        ("reserved", bytes_text(verdict.peak_reserved_bytes) + "  peak" + unlimited),
        (
            "non-torch",
            bytes_text(verdict.non_torch_bytes) + "  CUDA context and what else no allocator sees (--non-torch)",
        ),
        ("headroom", bytes_text(verdict.headroom_bytes) + "  kept free (--headroom)"),
        ("usable", f"{bytes_text(verdict.usable_bytes)}  of {format_bytes(verdict.total_bytes)} in all"),
        ("smallest GPU", _smallest_fact(verdict)),
        ("first step", _step_fact(verdict.first_step_peak_bytes)),
        ("later steps", _step_fact(verdict.steady_peak_bytes)),
        ("allocator", _allocator_fact(verdict)),
    ]
    if verdict.rules:
        touched = sum(effect.allocations for effect in verdict.rules)
        rules = f"{len(verdict.rules)} rule{'s' if len(verdict.rules) > 1 else ''} on {touched:,} allocations"
        facts.append(("CPU to GPU", f"{rules} (--explain lists them, --raw-cpu leaves them out)"))
    if verdict.num_alloc_retries:
        facts.append(("retries", f"{verdict.num_alloc_retries:,}  allocations that first emptied the cache"))
    return facts


def _run_fact(verdict: Verdict) -> str:
    run_id = f" ({verdict.run_id})" if verdict.run_id else ""
    return (
        f"{make_inert(verdict.run_name)}{run_id}, rank {verdict.rank}, {verdict.device}, {verdict.requests:,} requests"
    )


def _step_fact(peak_bytes: int | None) -> str:
    return "unknown" if peak_bytes is None else bytes_text(peak_bytes) + "  peak allocated"


def _smallest_fact(verdict: Verdict) -> str:
    if verdict.smallest_device_bytes is None:
        return "not searched"
    return bytes_text(verdict.smallest_device_bytes) + "  the least in all on which it runs"


def _allocator_fact(verdict: Verdict) -> str:
    assumed = ", assumed (--torch)" if verdict.torch_version_assumed else ""
    conf = f", {make_inert(verdict.alloc_conf)}" if verdict.alloc_conf else ""
    return f"{verdict.allocator}, torch {make_inert(verdict.torch_version)}{assumed}{conf}"


def _failure_text(oom: Oom, *, width: int | None, explain: bool) -> str:
    facts = [
        ("request", f"{bytes_text(oom.requested_bytes)}, rounded to {bytes_text(oom.rounded_bytes)}"),
        ("operator", make_inert(oom.op) if oom.op else "unknown"),
        ("step", _when(oom).strip(" ()") or "unknown"),
        ("for", make_inert(oom.category) if oom.category else "unknown"),
        ("allocated", bytes_text(oom.allocated_bytes)),
        ("reserved", bytes_text(oom.reserved_bytes)),
        ("free on GPU", bytes_text(oom.device_free_bytes)),
        ("free in cache", bytes_text(oom.free_in_cache_bytes)),
        ("largest piece", bytes_text(oom.largest_usable_block_bytes) + "  that the request could have used"),
    ]  # fmt: skip
    facts += [(name, bytes_text(size)) for name, size in _elsewhere(oom) if size]
    if oom.saved_by is not None:
        facts.append(("would fit with", "; ".join(map(make_inert, oom.saved_by)) or "no setting that was tried"))
    recorded = " (it failed in the recording too)" if oom.recorded else ""
    blocks = ["\n".join([f"what failed, at event {oom.seq:,}{recorded}", *fact_lines(facts)])]
    blocks.append(_holders_text("memory when it failed", oom.held_by, width=width))
    if explain:
        blocks += [_segments_text(oom, width), _pins_text(oom, width)]
    return "\n\n".join(block for block in blocks if block)


def _elsewhere(oom: Oom) -> list[tuple[str, int]]:
    return [
        ("pending", oom.pending_bytes),
        ("private pools", oom.private_pool_free_bytes),
        ("other streams", oom.other_stream_free_bytes),
    ]


def _holders_text(title: str, holders: Sequence[HeldBy], *, width: int | None) -> str:
    if not holders:
        return ""
    total = sum(holder.bytes for holder in holders)
    ordered = sorted(holders, key=lambda holder: -holder.bytes)
    rows = [_holder_row(holder, total) for holder in ordered[:_HOLDERS_SHOWN]]
    rest = ordered[_HOLDERS_SHOWN:]
    if rest:
        size, count = sum(holder.bytes for holder in rest), sum(holder.count for holder in rest)
        rows.append((format_bytes(size), _share(size, total), count, f"{len(rest)} more kinds", ""))
    columns = ("size", "share", "blocks", "category", "operator")
    return f"{title}: {format_bytes(total)}\n" + _indent(table_text(columns, rows, width=width and width - 2))


def _holder_row(holder: HeldBy, total: int) -> tuple[object, ...]:
    share = _share(holder.bytes, total)
    return format_bytes(holder.bytes), share, holder.count, holder.category or "unknown", holder.op or "unknown"


def _share(size: int, total: int) -> str:
    return f"{size / total:.1%}" if total else ""


def _segments_text(oom: Oom, width: int | None) -> str:
    rows = [
        (f"{use.address:#x}", format_bytes(use.bytes), use.segment_type, format_bytes(use.free_bytes),
         format_bytes(use.largest_free_bytes), use.live_blocks, use.stream, use.pool_id)
        for use in oom.segments
    ]  # fmt: skip
    if not rows:
        return ""
    columns = ("segment", "size", "type", "free", "largest piece", "live blocks", "stream", "pool")
    return "segments with most free memory\n" + _indent(table_text(columns, rows, width=width and width - 2))


def _pins_text(oom: Oom, width: int | None) -> str:
    rows = [
        (f"{pin.segment_address:#x}", format_bytes(pin.free_bytes), format_bytes(block.bytes),
         block.category or "unknown", block.op or "unknown", block.step)
        for pin in oom.pins
        for block in pin.oldest
    ]  # fmt: skip
    if not rows:
        return ""
    columns = ("segment", "free in it", "block", "category", "operator", "since step")
    title = "blocks that keep half-empty segments from being given back"
    return f"{title}\n" + _indent(table_text(columns, rows, width=width and width - 2))


def _rules_text(verdict: Verdict, width: int | None) -> str:
    rows = [
        (effect.rule, effect.change, effect.allocations, format_bytes(effect.bytes), effect.description)
        for effect in verdict.rules
    ]
    if not rows:
        return ""
    columns = ("rule", "change", "allocations", "size", "why")
    table = table_text(columns, rows, width=width and width - 2, wrap=True)
    return "rules that turned the CPU recording into a GPU's requests\n" + _indent(table)


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def _notes(verdict: Verdict) -> list[str]:
    texts = [verdict.gpu_note, *verdict.notes]
    if verdict.fits and verdict.non_torch_bytes and _spare(verdict) < _CLOSE_BYTES:
        texts.insert(0, _CLOSE_CALL)
    lines = [f"note: {make_inert(text)}" for text in texts if text]
    serious = [issue for issue in verdict.issues if issue.severity in ("warning", "data_loss", "error")]
    lines += [
        f"issue: {issue.code} {issue.count:,} ({issue.severity}; see xmem schema issue_codes)" for issue in serious
    ]
    return lines


def sweep_text(rows: Sequence[SweepRow], *, width: int | None = None) -> str:
    """Lay out a sweep, best first."""
    cells = [
        ("*" if row.is_current else "", "yes" if row.fits else "NO", format_bytes(row.peak_reserved_bytes),
         format_bytes(row.unused_bytes), row.num_alloc_retries, row.allocator, row.alloc_conf or "(default settings)")
        for row in rows
    ]  # fmt: skip
    columns = ("", "fits", "peak reserved", "unused", "retries", "allocator", "settings")
    text = table_text(columns, cells, width=width)
    return text + "\n\n* what `xmem simulate` uses by itself; peaks without a limit where it does not fit"


def recommendation_text(advice: Recommendation, *, width: int | None = None) -> str:
    """Name the setting to use, ready to paste, and what it saves."""
    lines = [make_inert(advice.line)] if advice.line else []
    lines += [make_inert(advice.sentence), "", sweep_text(advice.rows, width=width)]
    return "\n".join(lines)
