"""What a report is about: one device of one rank of one run; several are never added up."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from xmem.errors import UnreadableError, UsageError
from xmem.store import Run, Store

if TYPE_CHECKING:
    import duckdb


@dataclass(frozen=True)
class Device:
    """A device of a rank, with the highest memory that it held."""

    rank: int
    device_type: str
    device_index: int
    peak_allocated_bytes: int
    name: str | None = None
    total_bytes: int | None = None

    @property
    def label(self) -> str:
        """Name as PyTorch writes it: cuda:0, cpu."""
        return self.device_type if self.device_index < 0 else f"{self.device_type}:{self.device_index}"


@dataclass(frozen=True)
class Subject:
    """One device of a run, and the others that it has."""

    run: Run
    device: Device
    others: tuple[Device, ...] = ()

    @property
    def parameters(self) -> dict[str, object]:
        """Values for `$run`, `$rank`, `$device_type` and `$device_index`."""
        device = self.device
        return {
            "run": self.run.run_id,
            "rank": device.rank,
            "device_type": device.device_type,
            "device_index": device.device_index,
        }


_DEVICES = """
SELECT e.rank, e.device_type, e.device_index, max(e.allocated_bytes) AS peak
FROM events AS e WHERE e.run_id = $run GROUP BY ALL
HAVING count(*) FILTER (WHERE e.action IN ('alloc', 'segment_alloc', 'segment_map', 'oom')) > 0
ORDER BY e.rank, e.device_type, e.device_index
"""
_FACTS = "SELECT rank, device_type, device_index, name, total_bytes FROM devices WHERE run_id = $run"


def find_subject(
    connection: duckdb.DuckDBPyConnection,
    store: str | Path | None,
    run: str | None,
    rank: int | None,
    device: str | None,
) -> Subject:
    """Return the device that is meant: as named, else the accelerator with the highest peak, else the CPU.

    Raises UsageError for a run, rank or device that is not there, UnreadableError for a run without memory events.
    """
    found = Store(store).find_run(run)
    devices = devices_of(connection, found)
    if not devices:
        raise UnreadableError(
            f"The run {found.name!r} holds no memory events.", "Record with profile_memory=True, or take a snapshot."
        )
    fitting = [one for one in devices if rank is None or one.rank == rank]
    if not fitting:
        raise UsageError(
            f"The run {found.name!r} has no rank {rank}.", f"Ranks: {_listing(one.rank for one in devices)}"
        )
    named = [one for one in fitting if device is None or one.label == device.lower()]
    if not named:
        raise UsageError(
            f"The run {found.name!r} has no device {device!r}.", f"Devices: {_listing(one.label for one in fitting)}"
        )
    chosen = max(named, key=lambda one: (one.device_type != "cpu", one.peak_allocated_bytes, -one.rank))
    return Subject(found, chosen, tuple(one for one in devices if one is not chosen))


def devices_of(connection: duckdb.DuckDBPyConnection, run: Run) -> list[Device]:
    """Return the devices of a run that have events, by rank."""
    facts = {tuple(row[:3]): row[3:] for row in connection.execute(_FACTS, {"run": run.run_id}).fetchall()}
    rows = connection.execute(_DEVICES, {"run": run.run_id}).fetchall()
    found = []
    for rank, kind, index, peak in rows:
        name, total = facts.get((rank, kind, index), (None, None))
        found.append(Device(rank, kind, index, peak or 0, name, total))
    return found


def _listing(values: object) -> str:
    return ", ".join(dict.fromkeys(str(value) for value in values))  # type: ignore[attr-defined]
