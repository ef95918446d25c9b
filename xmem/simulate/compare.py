"""Does a replay make the segments that the recording shows? Equal, or the first difference with a named cause."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from xmem.simulate.options import SimulateOptions
from xmem.simulate.simulation import make_setup
from xmem.simulate.torch_version import parse_version
from xmem.simulate.trial import UNLIMITED_BYTES, Setup, try_on
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

    The device is as large as it must be: unlimited, or, where the recording met out-of-memory errors, just the
    reserved bytes that it reached.
    """
    from xmem.simulate.replay import encode
    from xmem.simulate.requests import find_source, make_recorded_requests, read_requests

    opened = Store(store)
    with closing(opened.connect()) as connection:
        chosen = opened.find_run(run)
        source = find_source(connection, chosen, rank=options.rank, device=options.device)
        setup, _ = make_setup(options, source.torch_version, source.alloc_conf)
        recorded, failed = _recorded(connection, source)
        lossy = _is_lossy(connection, source)
        make_recorded_requests(connection, source)
        table = read_requests(connection)
    encoded = encode(table)
    device_bytes = (source.peak_reserved_bytes or UNLIMITED_BYTES) if failed else UNLIMITED_BYTES
    seqs = table.column("seq").to_pylist()
    replayed = _replayed(encoded, setup, device_bytes, seqs)
    if recorded == replayed or not recorded:
        return _result(recorded, replayed, None if recorded else "no_segments", setup)
    for other in _other_setups(setup):
        if _replayed(encoded, other, device_bytes, seqs) == recorded:
            cause = "other_version" if other.torch_version != setup.torch_version else "other_settings"
            return _result(recorded, replayed, cause, other)
    cause = "missing_history" if not source.complete_history else "lost_entries" if lossy else "unexplained"
    return _result(recorded, replayed, cause, setup)


def _other_setups(setup: Setup) -> list[Setup]:
    """Return the setups that would explain a difference: another version's tie rule, expandable segments turned."""
    mine = parse_version(setup.torch_version)
    versions = [Setup(setup.allocator, setup.alloc_conf, text) for text in _TIE_RULES if parse_version(text) != mine]
    turned = "" if "expandable_segments:True" in setup.alloc_conf else "expandable_segments:True"
    return [*versions, Setup(setup.allocator, turned, setup.torch_version)]


def _recorded(connection: duckdb.DuckDBPyConnection, source: Source) -> tuple[list[SegmentCall], bool]:
    """Return the recorded segment events, each with the request that it happened in, and whether an oom was met.

    A segment event belongs to the next alloc or oom of the recording; releases of an empty_cache stand for themselves.
    """
    rows = connection.execute(
        """
        SELECT
          first_value(CASE WHEN action IN ('alloc', 'oom') THEN seq END IGNORE NULLS) OVER following AS serves,
          action, requested_bytes
        FROM events
        WHERE run_id = $1 AND rank = $2 AND device_type = $3 AND device_index = $4 AND NOT inferred
        WINDOW following AS (ORDER BY seq ROWS BETWEEN CURRENT ROW AND UNBOUNDED FOLLOWING)
        QUALIFY action IN ('segment_alloc', 'segment_free', 'segment_map', 'segment_unmap', 'oom')
        ORDER BY seq
        """,
        [source.run_id, source.rank, source.device_type, source.device_index],
    ).fetchall()
    calls = [SegmentCall(serves if _grows(action) else None, action, size) for serves, action, size in rows]
    return [call for call in calls if call.action != "oom"], any(call.action == "oom" for call in calls)


def _grows(action: str) -> bool:
    return action in ("segment_alloc", "segment_map")


def _replayed(encoded: Encoded, setup: Setup, device_bytes: int, seqs: list[int]) -> list[SegmentCall]:
    result = try_on(encoded, setup, device_bytes, in_full=True)
    return [
        SegmentCall(seqs[index] if _grows(action) else None, action, size) for index, action, _, size in result.calls
    ]


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
    first = recorded[position] if position < len(recorded) else None
    second = replayed[position] if position < len(replayed) else None
    sentence = f"All {len(recorded)} recorded segment events are reproduced."
    if cause is not None:
        sentence = CAUSES[cause]
        if cause in ("other_version", "other_settings"):
            sentence += (
                f" Equal with torch {setup.torch_version or 'newest'} and settings {setup.alloc_conf or 'none'!r}."
            )
        if differs and recorded:
            sentence += (
                f" First difference at segment event {position}: recorded {_text(first)}, replayed {_text(second)}."
            )
    return Comparison(
        equal=cause is None,
        recorded_count=len(recorded),
        replayed_count=len(replayed),
        position=position if differs else None,
        recorded=first if differs else None,
        replayed=second if differs else None,
        cause=cause,
        sentence=sentence,
        torch_version=setup.torch_version,
        alloc_conf=setup.alloc_conf,
    )


def _text(call: SegmentCall | None) -> str:
    if call is None:
        return "nothing"
    return f"{call.action} of {call.bytes} bytes" + (f" for seq {call.seq}" if call.seq is not None else "")
