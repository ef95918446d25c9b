"""Does a replay make the segments that the recording shows? Equal, or the first difference with a named cause."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from xmem.errors import UsageError
from xmem.simulate.conf import parse_conf
from xmem.simulate.device import Device
from xmem.simulate.options import SimulateOptions
from xmem.simulate.simulation import make_setup
from xmem.simulate.start import rebuild_start
from xmem.simulate.torch_version import parse_version
from xmem.simulate.trial import UNLIMITED_BYTES, Setup, replay_on
from xmem.store import Store

if TYPE_CHECKING:
    import duckdb

    from xmem.simulate.replay import Encoded
    from xmem.simulate.requests import Source

_DEFAULTS = SimulateOptions()
#: One torch version for each rule of choosing between blocks of equal size.
_TIE_RULES = ("2.6", "2.12", "2.13")

#: Why recorded and replayed segments can differ, by name.
CAUSES = {
    "no_segments": "The recording shows no segment events, so there is nothing to compare.",
    "no_history": "The recording shows only the state at its end, no requests, so there is nothing to compare.",
    "missing_history": "The recording does not hold the device's first allocation: the segments that were there before,"
    " and what is free inside them, are not known.",
    "other_version": "The replay is equal under the rules of another torch version.",
    "other_settings": "The replay is equal under other allocator settings than those recorded.",
    "lost_entries": "The recording lost entries (a full ring buffer, a cut file, or filters at ingest).",
    "unexplained": "The cause is not known.",
}


@dataclass(frozen=True)
class SegmentCall:
    """A segment event: before which allocation it happened (`seq`), its action and size."""

    seq: int | None
    action: str
    bytes: int


@dataclass(frozen=True)
class Comparison:
    """Recorded against replayed segment events.

    `equal` means same actions and sizes in the same order, each at the same request. Else `position` is the first
    difference (counted in segment events, from 0), `cause` a key of CAUSES, and `sentence` says it all in words.
    """

    equal: bool
    recorded_count: int
    replayed_count: int
    position: int | None
    recorded: SegmentCall | None
    replayed: SegmentCall | None
    cause: str | None
    sentence: str
    torch_version: str | None
    alloc_conf: str


def compare_recorded(
    run: str | None = None, *, store: str | Path | None = None, options: SimulateOptions = _DEFAULTS
) -> Comparison:
    """Replay a run's requests and compare the segments that the allocator makes with those recorded.

    The device is as large as it must be: unlimited, or, where the recording gave memory back or met out-of-memory
    errors, just the reserved bytes that it reached. What a snapshot shows of the time before is rebuilt first.
    """
    from xmem.simulate.replay import encode
    from xmem.simulate.requests import find_source, make_recorded_requests, read_requests

    opened = Store(store)
    with closing(opened.connect()) as connection:
        chosen = opened.find_run(run)
        source = find_source(connection, chosen, rank=options.rank, device=options.device)
        setup, _ = make_setup(options, source.torch_version, source.alloc_conf)
        recorded, pressed, shows_segments = _recorded(connection, source)
        lossy = _is_lossy(connection, source)
        make_recorded_requests(connection, source)
        table, begin = read_requests(connection), 0
        addresses = _addresses(connection, source)
        rebuilt = rebuild_start(connection, source, table)
        if rebuilt is not None:
            table, begin = rebuilt
    device_bytes = (source.peak_reserved_bytes or UNLIMITED_BYTES) if pressed else UNLIMITED_BYTES
    trial = _Trial(encode(table), table.column("seq").to_pylist(), begin, device_bytes, addresses)
    replayed = trial.calls(setup)
    if not shows_segments or len(trial.encoded) == begin:
        return _result([], [], "no_history" if shows_segments else "no_segments", setup)
    if recorded == replayed:
        return _result(recorded, replayed, None, setup)
    for other in _other_setups(setup):
        if trial.calls(other) == recorded:
            cause = "other_version" if other.torch_version != setup.torch_version else "other_settings"
            return _result(recorded, replayed, cause, other)
    cause = "missing_history" if not source.complete_history else "lost_entries" if lossy else "unexplained"
    return _result(recorded, replayed, cause, setup)


@dataclass(frozen=True)
class _Trial:
    """Requests of which the first `begin` rebuild the state at the start, and the device that they meet.

    `addresses` are those of the recorded segments by size, in order: up to torch 2.11 they decide between equal blocks.
    """

    encoded: Encoded
    seqs: list[int]
    begin: int
    device_bytes: int
    addresses: dict[int, list[int]]

    def calls(self, setup: Setup) -> list[SegmentCall]:
        """Return the segments that the allocator makes and gives back after the start."""
        device = _RecordedDevice(self.device_bytes, self.addresses)
        result = replay_on(self.encoded, setup, device, in_full=False)
        return [
            SegmentCall(self.seqs[index] if _grows(action) else None, action, size)
            for index, action, _, size in result.calls
            if index >= self.begin
        ]


class _RecordedDevice(Device):
    """A device whose cudaMalloc returns the recorded addresses, size by size in order, as far as they reach."""

    def __init__(self, total_bytes: int, addresses: dict[int, list[int]]) -> None:
        super().__init__(total_bytes, address_policy="up", log=[])
        self._recorded = {size: iter(known) for size, known in addresses.items()}

    def _place(self, size: int) -> int:
        known = next(self._recorded.get(size, iter(())), None)
        if known is None or any(known < end and start < known + size for start, end in self._live()):
            return super()._place(size)
        return known

    def _live(self) -> Iterator[tuple[int, int]]:
        return ((address, address + size) for address, size in self._reserved.items())


def _addresses(connection: duckdb.DuckDBPyConnection, source: Source) -> dict[int, list[int]]:
    rows = connection.execute(
        "SELECT requested_bytes, list(address ORDER BY NOT inferred, seq) FROM events WHERE run_id = $1 AND rank = $2"
        " AND device_type = $3 AND device_index = $4 AND action = 'segment_alloc' AND address IS NOT NULL GROUP BY ALL",
        [source.run_id, source.rank, source.device_type, source.device_index],
    ).fetchall()
    return dict(rows)


def _other_setups(setup: Setup) -> list[Setup]:
    """Return the setups that would explain a difference: another version's tie rule, expandable segments turned."""
    mine = parse_version(setup.torch_version)
    turned = "" if "expandable_segments:True" in setup.alloc_conf else "expandable_segments:True"
    tried = [(setup.alloc_conf, text) for text in _TIE_RULES if parse_version(text) != mine]
    return [
        replace(setup, alloc_conf=conf, torch_version=version)
        for conf, version in [*tried, (turned, setup.torch_version)]
        if _is_known(conf, version)
    ]


def _is_known(conf: str, torch_version: str | None) -> bool:
    """Say whether the version knows every key of the settings."""
    try:
        parse_conf(conf, torch_version)
    except UsageError:
        return False
    return True


def _recorded(connection: duckdb.DuckDBPyConnection, source: Source) -> tuple[list[SegmentCall], bool, bool]:
    """Return the recorded segment events, whether memory ran short, and whether the recording shows segments at all.

    A new segment belongs to the next alloc or oom of the recording; released ones stand for themselves.
    """
    rows = connection.execute(
        """
        SELECT
          first_value(CASE WHEN action IN ('alloc', 'oom') THEN seq END IGNORE NULLS) OVER following AS serves,
          action, requested_bytes, inferred
        FROM events
        WHERE run_id = $1 AND rank = $2 AND device_type = $3 AND device_index = $4
        WINDOW following AS (ORDER BY seq ROWS BETWEEN CURRENT ROW AND UNBOUNDED FOLLOWING)
        QUALIFY action IN ('segment_alloc', 'segment_free', 'segment_map', 'segment_unmap', 'oom')
        ORDER BY seq
        """,
        [source.run_id, source.rank, source.device_type, source.device_index],
    ).fetchall()
    segments = [row for row in rows if row[1] != "oom"]
    calls = [
        SegmentCall(serves if _grows(action) else None, action, size)
        for serves, action, size, inferred in segments
        if not inferred
    ]
    pressed = len(segments) < len(rows) or any(not _grows(call.action) for call in calls)
    return calls, pressed, bool(segments)


def _grows(action: str) -> bool:
    return action in ("segment_alloc", "segment_map")


def _is_lossy(connection: duckdb.DuckDBPyConnection, source: Source) -> bool:
    rows = connection.execute(
        "SELECT ring_buffer OR truncated OR filters IS NOT NULL FROM runs WHERE run_id = $1 AND rank = $2",
        [source.run_id, source.rank],
    ).fetchall()
    return bool(rows[0][0])


def _result(recorded: list[SegmentCall], replayed: list[SegmentCall], cause: str | None, setup: Setup) -> Comparison:
    pairs = enumerate(zip(recorded, replayed, strict=False))
    position = next((n for n, (one, other) in pairs if one != other), min(len(recorded), len(replayed)))
    differs = recorded != replayed
    first = recorded[position] if differs and position < len(recorded) else None
    second = replayed[position] if differs and position < len(replayed) else None
    sentence = CAUSES[cause] if cause is not None else f"All {len(recorded)} recorded segment events are reproduced."
    if cause is None and not recorded:
        sentence = "No segment was made or given back, neither in the recording nor in the replay."
    if cause in ("other_version", "other_settings"):
        sentence += f" Equal with torch {setup.torch_version or 'newest'} and settings {setup.alloc_conf or 'none'!r}."
    if differs:
        sentence += f" First difference at segment event {position}: recorded {_text(first)}, replayed {_text(second)}."
    return Comparison(
        equal=cause is None,
        recorded_count=len(recorded),
        replayed_count=len(replayed),
        position=position if differs else None,
        recorded=first,
        replayed=second,
        cause=cause,
        sentence=sentence,
        torch_version=setup.torch_version,
        alloc_conf=setup.alloc_conf,
    )


def _text(call: SegmentCall | None) -> str:
    if call is None:
        return "nothing"
    return f"{call.action} of {call.bytes} bytes" + (f" for seq {call.seq}" if call.seq is not None else "")
