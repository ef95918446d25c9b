"""Replays recorded allocator cases through `native` and prints the first difference: replay_oracle.py FILE…"""

from __future__ import annotations

import gzip
import json
import sys
from bisect import bisect_right
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a script: the repository is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from xmem.errors import UsageError
from xmem.simulate.allocator import DEFAULT_POOL, OutOfMemory, PoolId
from xmem.simulate.conf import parse_conf
from xmem.simulate.device import GRANULARITY, MALLOC_BASE, VIRTUAL_BASE, Device
from xmem.simulate.native import Native, make

#: The recorder writes addresses relative to its own arenas: cudaMalloc from 0, virtual ranges from 2**50.
RECORDED_VIRTUAL = 1 << 50
STREAMS_IN_POOL = 32
GZIP = b"\x1f\x8b"
STATES = {"active_allocated": "A", "active_pending_free": "P", "inactive": "I"}
STAT_OF_FIELD = {
    "allocated": "allocated_bytes", "reserved": "reserved_bytes", "active": "active_bytes",
    "inactive_split": "inactive_split_bytes", "requested": "requested_bytes", "segments": "segments",
    "blocks_active": "active_blocks", "num_alloc_retries": "num_alloc_retries", "num_ooms": "num_ooms",
}  # fmt: skip
MERGED_KINDS = ("create", "release", "map", "unmap")


class BrokenCaseError(Exception):
    """The file is no case of this format."""


class DifferenceError(Exception):
    """The replay and the recording part here."""

    def __init__(self, field: str, expected: Any, got: Any, index: int | None = None, op: Any = None) -> None:
        where = "final" if index is None else f"op {index}: {json.dumps(op)}"
        super().__init__(f"  {where}\n  field    {field}\n  expected {expected}\n  got      {got}")
        self.field, self.expected, self.got, self.index = field, expected, got, index


class Places:
    """Names an address by the segment it lies in (how many were made before) and the offset, not by its number."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.ends: dict[int, int] = {}
        self.ordinals: dict[int, str] = {}
        self.counts = {"malloc": 0, "reserve": 0}

    def add(self, kind: str, address: int, size: int) -> str:
        self.counts[kind] += 1
        end = address + -(-size // GRANULARITY) * GRANULARITY
        index = bisect_right(self.starts, address)
        if address % GRANULARITY or self._inside(address) or (index < len(self.starts) and self.starts[index] < end):
            return f"{address} (no place for a segment)"
        self.starts.insert(index, address)
        self.ends[address] = end
        self.ordinals[address] = f"{kind} {self.counts[kind]}"
        return self.ordinals[address]

    def remove(self, address: int) -> str:
        if address not in self.ends:
            return f"{address} (no segment starts there)"
        self.starts.remove(address)
        del self.ends[address]
        return self.ordinals.pop(address)

    def name(self, address: int | None) -> str | None:
        if address is None:
            return None
        start = self._inside(address)
        return f"{address} (in no segment)" if start is None else f"{self.ordinals[start]} + {address - start}"

    def _inside(self, address: int) -> int | None:
        index = bisect_right(self.starts, address) - 1
        return self.starts[index] if index >= 0 and address < self.ends[self.starts[index]] else None

    def name_calls(self, calls: list[list[Any]]) -> list[list[Any]]:
        return [self._name_call(*call) for call in calls]

    def _name_call(self, kind: str, address: int | None = None, size: int = 0, *count: int) -> list[Any]:
        named: Any = address
        if address is not None and kind not in ("create", "release"):
            if kind in ("malloc", "reserve"):
                named = self.add(kind, address, size)
            elif kind in ("free", "addrfree"):
                named = self.remove(address)
            else:
                named = self.name(address)
        return [kind, named, size, *count]


class Replay:
    """One case through one allocator, compared after every op."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.case = case
        settings = case["settings"]
        self.calls: list[list[Any]] = []
        self.device = Device(
            settings.get("device_bytes", 24 << 30),
            other_bytes=settings.get("context_bytes", 0),
            address_policy=settings.get("addr_policy", "first"),
            log=self.calls,
        )
        self.allocator: Native = make(self.device, settings.get("alloc_conf") or "", case.get("torch"))
        if settings.get("memory_fraction") is not None:
            self.allocator.set_memory_fraction(settings["memory_fraction"])
        self.expected_places, self.places = Places(), Places()
        self.streams: dict[int, int] = {0: 0}
        self.stream_names: dict[int, int] = {0: 0}
        self.live: dict[Any, int] = {}
        self.external: dict[Any, int] = {}
        self.pools: dict[Any, PoolId] = {}
        self.graphs: dict[Any, PoolId] = {}
        self.ended: set[Any] = set()
        self.pool_names: dict[PoolId, Any] = {}
        self.current_stream = 0
        self.stream_before_capture: int | None = None

    def run(self) -> None:
        for index, (op, expected) in enumerate(zip(self.case["ops"], self.case["results"], strict=True)):
            try:
                self.step(index, op, expected)
            except (KeyError, TypeError, AttributeError) as error:
                raise BrokenCaseError(f"op {index} {json.dumps(op)}: {type(error).__name__}: {error}") from error
        self.compare_final()

    def step(self, index: int, op: dict[str, Any], expected: dict[str, Any]) -> None:
        got: dict[str, Any] = {}
        try:
            getattr(self, f"do_{op['op']}", self.unknown_op)(op, got)
        except OutOfMemory:
            got["oom"] = True
        except UsageError as error:
            got["error"] = str(error).splitlines()[0]

        def check(field: str, wanted: Any, found: Any) -> None:
            if wanted != found:
                raise DifferenceError(field, wanted, found, index, op)

        stats = self.allocator.stats()
        for name, value in zip(self.case["fields"], expected["s"], strict=True):
            check(f"s.{name}", value, getattr(stats, STAT_OF_FIELD[name]))
        for flag in ("oom", "skipped", "error"):
            check(flag, flag in expected, flag in got)
        check("err", expected.get("err"), got.get("err"))
        calls = compact([self.relative(call) for call in self.calls])
        self.calls.clear()
        wanted = self.expected_places.name_calls(expected.get("d", []))
        found = self.places.name_calls(calls)
        for number, (one, other) in enumerate(zip(wanted, found, strict=False)):
            check(f"d[{number}]", one, other)
        check("number of driver calls (d)", len(wanted), len(found))
        if "a" in expected or "a" in got:
            check("a", self.expected_places.name(expected.get("a")), self.places.name(got.get("a")))

    def compare_final(self) -> None:
        final = self.case["final"]
        self.device.hold_events = False
        self.device.complete_events()
        stats = self.allocator.memory_stats()
        for name in sorted({*final["stats"], *stats}):
            if final["stats"].get(name) != stats.get(name):
                raise DifferenceError(f"final.stats[{name!r}]", final["stats"].get(name), stats.get(name))
        used = self.device.used_bytes
        others: dict[str, Any] = {
            "max_memory_allocated": stats["allocated_bytes.all.peak"],
            "max_memory_reserved": stats["reserved_bytes.all.peak"],
            "mem_get_info": [self.device.free_bytes, self.device.total_bytes],
            "driver_used": used,
        }
        for name, value in others.items():
            if name in final and final[name] != value:
                raise DifferenceError(f"final.{name}", final[name], value)
        wanted = sorted(final["segments"], key=lambda s: str(self.expected_places.name(s["a"])))
        found = sorted(self.segments(), key=lambda s: str(self.places.name(s["a"])))
        for number, (one, other) in enumerate(zip(wanted, found, strict=False)):
            self.compare_segment(number, one, other)
        if len(wanted) != len(found):
            raise DifferenceError("number of final.segments", len(wanted), len(found))

    def compare_segment(self, number: int, wanted: dict[str, Any], found: dict[str, Any]) -> None:
        where = f"final.segments[a={wanted['a']}]"
        one, other = self.expected_places.name(wanted["a"]), self.places.name(found["a"])
        if one != other:
            raise DifferenceError(f"{where}.a", one, other)
        for name in ("size", "alloc", "active", "req", "stream", "type", "exp", "pool"):
            if name in wanted and wanted[name] != found[name]:
                raise DifferenceError(f"{where}.{name}", wanted[name], found[name])
        blocks = [[block[0] - wanted["a"], *block[1:]] for block in wanted["blocks"]]
        got = [[block[0] - found["a"], *block[1:]] for block in found["blocks"]]
        if blocks != got:
            pairs = (pair for pair in zip(blocks, got, strict=False) if pair[0] != pair[1])
            raise DifferenceError(
                f"{where}.blocks [offset, size, requested, state]", *next(pairs, (len(blocks), len(got)))
            )

    def segments(self) -> list[dict[str, Any]]:
        layout = self.allocator.segments()
        rows: list[dict[str, Any]] = []
        for row in zip(*layout.segments.values(), strict=True):
            address, size, allocated, active, requested, stream, pool, kind, expandable = row
            rows.append(
                {
                    "a": relative_address(address), "size": size, "alloc": allocated, "active": active,
                    "req": requested, "stream": self.stream_names.get(stream, stream), "type": kind,
                    "exp": expandable, "blocks": [],
                    "pool": 0 if pool == DEFAULT_POOL else self.pool_names.get(pool, list(pool)),
                }
            )  # fmt: skip
        for segment, address, size, requested, state in zip(*layout.blocks.values(), strict=True):
            rows[segment]["blocks"].append([relative_address(address), size, requested or 0, STATES[state]])
        return rows

    def relative(self, call: list[Any]) -> list[Any]:
        if len(call) < 2 or call[1] is None or call[0] in ("create", "release"):
            return list(call)
        return [call[0], relative_address(call[1]), *call[2:]]

    def stream(self, number: int) -> int:
        if number not in self.streams:
            handle = 1 + (len(self.streams) - 1) % STREAMS_IN_POOL
            self.streams[number] = handle
            self.stream_names[handle] = number
        return self.streams[number]

    # -- the ops, as the recorder does them

    def unknown_op(self, op: dict[str, Any], got: dict[str, Any]) -> None:
        raise BrokenCaseError(f"unknown op {op['op']!r}")

    def do_alloc(self, op: dict[str, Any], got: dict[str, Any]) -> None:
        pool = DEFAULT_POOL if op.get("pool") is None else self.pools[op["pool"]]
        stream = self.current_stream
        if op.get("stream", 0) and self.stream_before_capture is None:
            stream = self.stream(op["stream"])
        address = self.allocator.alloc(op["size"], stream=stream, pool=pool)
        if op["id"] in self.live:
            self.allocator.free_requested(self.live.pop(op["id"]))
        self.live[op["id"]] = address
        got["a"] = relative_address(address) if address else None

    def do_free(self, op: dict[str, Any], got: dict[str, Any]) -> None:
        if op["id"] in self.live:
            self.allocator.free_requested(self.live.pop(op["id"]))
        else:
            got["skipped"] = True

    def do_record_stream(self, op: dict[str, Any], got: dict[str, Any]) -> None:
        if op["id"] in self.live:
            self.allocator.record_stream(self.live[op["id"]], self.stream(op["stream"]))
        else:
            got["skipped"] = True

    def do_empty_cache(self, op: dict[str, Any], got: dict[str, Any]) -> None:
        self.allocator.empty_cache()

    def do_hold_events(self, op: dict[str, Any], got: dict[str, Any]) -> None:
        self.device.hold_events = bool(op.get("on", True))
        self.device.complete_events()

    def do_complete_events(self, op: dict[str, Any], got: dict[str, Any]) -> None:
        self.device.complete_events()

    def do_synchronize(self, op: dict[str, Any], got: dict[str, Any]) -> None:
        self.device.synchronize()

    def do_set_fraction(self, op: dict[str, Any], got: dict[str, Any]) -> None:
        self.allocator.set_memory_fraction(op["value"])

    def do_set_conf(self, op: dict[str, Any], got: dict[str, Any]) -> None:
        self.allocator.set_conf(op["conf"])

    def do_reset_peak(self, op: dict[str, Any], got: dict[str, Any]) -> None:
        self.allocator.reset_peak_stats()

    def do_reset_accumulated(self, op: dict[str, Any], got: dict[str, Any]) -> None:
        self.allocator.reset_accumulated_stats()

    def do_gc(self, op: dict[str, Any], got: dict[str, Any]) -> None:
        """Python's own collection: nothing of the allocator's."""

    def do_ext_malloc(self, op: dict[str, Any], got: dict[str, Any]) -> None:
        try:
            self.external[op["id"]] = self.device.ext_malloc(op["size"])
        except OutOfMemory:
            got["err"] = 2

    def do_ext_free(self, op: dict[str, Any], got: dict[str, Any]) -> None:
        if op["id"] in self.external:
            self.device.ext_free(self.external.pop(op["id"]))

    def do_pool_create(self, op: dict[str, Any], got: dict[str, Any]) -> None:
        before = self.pools.get(op["pool"])
        pool = self.allocator.create_pool(use_on_oom=bool(op.get("use_on_oom")), no_split=bool(op.get("no_split")))
        self.pools[op["pool"]] = pool
        self.pool_names[pool] = op["pool"]
        if before is not None:
            self.allocator.delete_pool(before)

    def do_pool_delete(self, op: dict[str, Any], got: dict[str, Any]) -> None:
        self.allocator.delete_pool(self.pools.pop(op["pool"]))

    def do_capture_begin(self, op: dict[str, Any], got: dict[str, Any]) -> None:
        key = op.get("graph", 0)
        share = None if op.get("share") is None else self.graphs[op["share"]]
        self.drop_graph(key)
        stream = self.stream(op.get("stream", 1))
        self.stream_before_capture, self.current_stream = self.current_stream, stream
        self.graphs[key] = self.allocator.begin_capture(stream, share)

    def do_capture_end(self, op: dict[str, Any], got: dict[str, Any]) -> None:
        key = op.get("graph", 0)
        self.allocator.end_capture(self.graphs[key])
        self.ended.add(key)
        self.pool_names.setdefault(self.graphs[key], f"graph{key}")
        self.current_stream, self.stream_before_capture = self.stream_before_capture or 0, None

    def do_graph_delete(self, op: dict[str, Any], got: dict[str, Any]) -> None:
        if op["graph"] not in self.graphs:
            raise BrokenCaseError(f"graph {op['graph']!r} was not captured")
        self.drop_graph(op["graph"])

    def drop_graph(self, key: Any) -> None:
        pool = self.graphs.pop(key, None)
        if pool is not None and key in self.ended:
            self.ended.discard(key)
            self.allocator.delete_graph(pool)


def relative_address(address: int) -> int:
    return address - VIRTUAL_BASE + RECORDED_VIRTUAL if address >= VIRTUAL_BASE else address - MALLOC_BASE


def compact(calls: list[list[Any]]) -> list[list[Any]]:
    """Merge runs of equal calls on neighbours, as the recorder does: [kind, address, size, count]."""
    merged: list[list[Any]] = []
    for call in calls:
        last = merged[-1] if merged else None
        if last and call[0] in MERGED_KINDS and last[0] == call[0] and last[2] == call[2] and len(call) == 3:
            count = last[3] if len(last) > 3 else 1
            step = call[2] if call[0] in ("map", "unmap") else 1
            if call[1] == last[1] + count * step:
                last[3:] = [count + 1]
                continue
        merged.append(list(call))
    return merged


def read_case(path: Path) -> dict[str, Any]:
    """Read a case file; raise BrokenCaseError with the reason where it is none."""
    try:
        content = path.read_bytes()
        case = json.loads(gzip.decompress(content) if content[:2] == GZIP else content)
    except (OSError, EOFError, ValueError) as error:
        raise BrokenCaseError(f"cannot be read: {error}") from error
    if not isinstance(case, dict):
        raise BrokenCaseError("the top level is not an object")
    for name, kind in {"ops": list, "results": list, "fields": list, "final": dict}.items():
        if not isinstance(case.get(name), kind):
            raise BrokenCaseError(f"{name!r} is missing or is not a {kind.__name__}")
    case.setdefault("settings", {})
    for name, kind in {"stats": dict, "segments": list}.items():
        if not isinstance(case["final"].get(name), kind):
            raise BrokenCaseError(f"'final.{name}' is missing or is not a {kind.__name__}")
    if len(case["ops"]) != len(case["results"]):
        raise BrokenCaseError(f"{len(case['ops'])} ops but {len(case['results'])} results")
    unknown = [name for name in case["fields"] if name not in STAT_OF_FIELD]
    if unknown:
        raise BrokenCaseError(f"unknown fields {unknown}")
    for index, result in enumerate(case["results"]):
        if len(result.get("s", ())) != len(case["fields"]):
            raise BrokenCaseError(f"result {index} has {len(result.get('s', ()))} of {len(case['fields'])} fields")
    parse_conf(case["settings"].get("alloc_conf") or "", case.get("torch"))
    return case


def main(paths: list[str]) -> int:
    if not paths:
        print(__doc__)
        return 2
    worst = equal = 0
    for path in paths:
        try:
            Replay(read_case(Path(path))).run()
            equal += 1
        except DifferenceError as difference:
            print(f"{path}: differs\n{difference}")
            worst = max(worst, 1)
        except (BrokenCaseError, UsageError) as error:
            print(f"{path}: broken case: {error}")
            worst = 2
    print(f"{equal} of {len(paths)} equal")
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
