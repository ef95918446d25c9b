"""What is worked out before spans and stacks are needed: events in order, and the history of each device."""

from __future__ import annotations

import json
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from xmem.ingest.adapter import Notes
from xmem.ingest.lifetimes import DeviceHistory, DeviceSource, build_history
from xmem.ingest.ordering import check_device, device_name, of_device, order_events, used_devices
from xmem.ingest.spool import Spool, complete
from xmem.ingest.words import code_words

if TYPE_CHECKING:
    import polars as pl

_MEMORY_ACTIONS = {"alloc": 1, "free_requested": 1, "free_completed": 1}
#: Sources of more events are not worked on while they are read: both at once would take much memory.
_MOST_EVENTS = 4_000_000


@dataclass(frozen=True)
class FinalState:
    """Segments and blocks of a snapshot; blocks carry the device, stream and pool of their segment."""

    segments: pl.DataFrame
    blocks: pl.DataFrame


@dataclass(frozen=True)
class Ordered:
    """Events in true order, the final state, the devices, and what was counted for the `runs` row."""

    events: pl.DataFrame
    state: FinalState
    devices: pl.DataFrame
    recorded: dict[str, object]


@dataclass(frozen=True)
class Beginning:
    """Histories that are being built while the source is read on; `notes` are theirs until `join`."""

    ordered: Ordered
    building: Future[list[DeviceHistory]]
    notes: Notes

    def join(self, notes: Notes) -> list[DeviceHistory]:
        """Wait for the histories, and add to `notes` what they noted."""
        histories = self.building.result()
        notes.take(self.notes.issues)
        return histories


def begin(spool: Spool, notes: Notes) -> Beginning | None:
    """Start on the histories of what was read, of which only stacks are still to come; None where that is too much."""
    if spool.rows("events") > _MOST_EVENTS:
        return None
    spool.settle()
    ordered = take_ordered(spool, notes, int(str(notes.facts.get("ts_offset_ns", 0))))
    own = Notes(notes.filename, notes.filters, notes.rank, notes.facts)
    worker = ThreadPoolExecutor(1)
    building = worker.submit(build_histories, ordered, own)
    worker.shutdown(wait=False)
    return Beginning(ordered, building, own)


def take_ordered(spool: Spool, notes: Notes, offset_ns: int) -> Ordered:
    """Take events, segments, blocks and devices out of the spool; raises UsageError where the device is not there."""
    recorded_events = complete("events", spool.take_all("events"))
    state = _final_state(spool, recorded_events, notes.filters.device)
    devices = complete("devices", spool.take_all("devices"))
    events = order_events(recorded_events, notes, offset_ns)
    return Ordered(events, state, devices, _recorded_facts(events, notes))


def _final_state(spool: Spool, events: pl.DataFrame, device: str | None) -> FinalState:
    segments = complete("segments", spool.take_all("segments"))
    check_device(device, events, segments)
    segments = of_device(segments, device)
    blocks = complete("blocks", spool.take_all("blocks"))
    holder = segments.select("segment_id", "device_type", "device_index", "stream", "pool_id")
    held = blocks.join(holder, on="segment_id", maintain_order="left")
    return FinalState(segments, held.with_row_index("block_row"))


def build_histories(ordered: Ordered, notes: Notes) -> list[DeviceHistory]:
    """Build the history of each device that has rows, in order of device."""
    events, state = ordered.events, ordered.state
    found = []
    first_seq = 0
    last_ns = int(events["ts_ns"].max() or 0) if events.height else 0  # type: ignore[arg-type]
    used = used_devices(events, state.segments)
    for device_type, device_index in used:
        of_device = {"device_type": device_type, "device_index": device_index}
        about = ordered.devices.filter(**of_device)
        source = DeviceSource(
            device_type=device_type,
            device_index=device_index,
            events=events if len(used) == 1 else events.filter(**of_device),
            segments=state.segments.filter(**of_device),
            blocks=state.blocks.filter(**of_device),
            pairing="given" if notes.facts.get("paired") else str(notes.facts.get("pairing", "address")),
            ordered=bool(notes.facts.get("ordered", False)),
            total_bytes=about["total_bytes"][0] if about.height else None,
            default_ts_ns=last_ns,
            first_seq=first_seq,
            rounded=device_type in ("cuda", "hip") and state.segments.height > 0 and not _rounds_further(notes),
        )
        history = build_history(source, notes)
        first_seq += history.events.height
        found.append(history)
    if len(used) > 1:
        names = ", ".join(device_name(*device) for device in used)
        notes.add("several_devices", count=len(used), detail=names)
    return found


def _rounds_further(notes: Notes) -> bool:
    """Say whether the recording's settings round requests to parts of powers of two."""
    if "roundup_power2_divisions" in str(notes.facts.get("alloc_conf") or ""):
        return True
    settings = json.loads(str(notes.facts.get("allocator_settings") or "{}"))
    divisions = settings.get("roundup_power2_divisions") if isinstance(settings, dict) else None
    return any(divisions.values()) if isinstance(divisions, dict) else bool(divisions)


def _recorded_facts(events: pl.DataFrame, notes: Notes) -> dict[str, object]:
    """Count what the source held, where the adapter did not."""
    memory = int((code_words(events["action"], _MEMORY_ACTIONS, 0) > 0).sum())
    return {
        "first_ts_ns": events["ts_ns"].min(),
        "last_ts_ns": events["ts_ns"].max(),
        "source_entries": notes.facts.get("source_entries", events.height),
        "memory_event_count": notes.facts.get("memory_event_count", memory),
    }
