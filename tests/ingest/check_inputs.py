"""Checks a folder of inputs against its expected.json, through the command line: python check_inputs.py FOLDER."""

from __future__ import annotations

import argparse
import json
import os
import pickletools
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]

#: One query a file: every figure that a key may ask for, as rows (what, rank, device, value).
FIGURES = """
WITH named AS (
  SELECT *, device_type || CASE WHEN device_index < 0 THEN '' ELSE ':' || device_index END AS device FROM events
), levels AS (
  SELECT rank, device, max(allocated_bytes) AS peak_allocated, arg_max(allocated_bytes, seq) AS end_allocated,
    arg_max(active_bytes, seq) AS end_active, max(reserved_bytes) AS peak_reserved,
    arg_max(reserved_bytes, seq) FILTER (reserved_bytes IS NOT NULL) AS end_reserved
  FROM named GROUP BY ALL
)
SELECT what, rank, device, value::VARCHAR AS value FROM levels
  UNPIVOT (value FOR what IN (peak_allocated, end_allocated, end_active, peak_reserved, end_reserved))
UNION ALL SELECT 'reserved', rank, NULL, sum(total_bytes)::VARCHAR FROM segments GROUP BY rank
UNION ALL SELECT 'private_pool_reserved', rank, NULL, sum(total_bytes)::VARCHAR FROM segments
  WHERE pool_id <> '0:0' GROUP BY rank
UNION ALL SELECT 'allocations', NULL, NULL, count(*)::VARCHAR FROM allocations
UNION ALL SELECT 'device', rank, device, device FROM named GROUP BY ALL
UNION ALL SELECT 'issue:' || code, rank, NULL, count::VARCHAR FROM issues
UNION ALL SELECT 'run', rank, adapter, to_json({
  'preexisting_bytes': baseline_bytes, 'memory_events': memory_event_count, 'trace_entries': source_entries,
  'truncated': truncated})::VARCHAR FROM runs
UNION ALL SELECT 'oom_requested', rank, device, requested_bytes::VARCHAR FROM named WHERE action = 'oom'
UNION ALL SELECT 'device_free', rank, device, device_free::VARCHAR FROM named WHERE action = 'oom'
"""

#: Options of `xmem simulate --ops` for the keys of operation files, and the figure of its answer.
SETTINGS = {
    "reserved_default": [],
    "reserved": [],
    "reserved_max_split_size_mb_20": ["--alloc-conf", "max_split_size_mb:20"],
    "reserved_expandable": ["--alloc-conf", "expandable_segments:True"],
}
OPS_KEYS = {*SETTINGS, "allocated", "steady_peak", "peak_allocated", "note"}


@dataclass
class Outcome:
    """What `xmem ingest` and the query gave for one input."""

    exit: int
    said: str
    stored: bool
    rows: list[dict[str, Any]] = field(default_factory=list)
    issues: list[dict[str, Any]] = field(default_factory=list)

    def values(self, what: str) -> list[int]:
        """Return every value of a figure as integers."""
        return [int(row["value"]) for row in self.rows if row["what"] == what and row["value"] is not None]

    def runs(self) -> list[dict[str, Any]]:
        """Return the facts of each rank's source."""
        return [json.loads(row["value"]) for row in self.rows if row["what"] == "run"]

    def by(self, column: str, what: str) -> dict[str, int]:
        """Return a figure for each rank or device; of several devices in a rank the highest."""
        found: dict[str, int] = {}
        for row in self.rows:
            if row["what"] == what:
                key = str(row[column]).rpartition(":")[2]
                found[key] = max(found.get(key, 0), int(row["value"]))
        return found

    def main_device(self, what: str) -> int | None:
        """Return a figure of the device in question: the accelerator, of several the one with the highest peak."""
        peaks = {row["device"]: int(row["value"]) for row in self.rows if row["what"] == "peak_allocated"}
        devices = {name: peak for name, peak in peaks.items() if name != "cpu"} or peaks
        if not devices:
            return None
        chosen = max(devices, key=lambda name: devices[name])
        return next((int(row["value"]) for row in self.rows if row["what"] == what and row["device"] == chosen), None)


def run_xmem(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line of this checkout."""
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "xmem", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "PYTHONPATH": path, "NO_COLOR": "1"},
        stdin=subprocess.DEVNULL,
    )


def read_input(file: Path, store: str) -> Outcome:
    """Ingest one file or folder into a store of its own and ask for every figure."""
    ingested = run_xmem("ingest", str(file), "--store", store, "--json")
    stored = any(Path(store).glob("runs/run_id=*"))
    outcome = Outcome(ingested.returncode, ingested.stderr, stored)
    if not stored:
        return outcome
    asked = run_xmem("query", FIGURES, "--store", store, "--json")
    if asked.returncode:
        raise AssertionError(f"the query failed: {asked.stderr}")
    outcome.rows = json.loads(asked.stdout)
    outcome.issues = [issue for run in json.loads(ingested.stdout) for issue in run["issues"]]
    return outcome


def _issue(code: str) -> Callable[[Outcome], int]:
    return lambda outcome: sum(outcome.values(f"issue:{code}"))


def _reserved(outcome: Outcome) -> int | None:
    """Reserved at the end: the final segments, else the level; where both are known they must agree."""
    segments, level = outcome.values("reserved"), outcome.main_device("end_reserved")
    if segments and len(outcome.values("end_reserved")) == 1 and sum(segments) != level:
        raise AssertionError(f"segments sum up to {sum(segments)}, events to {level}")
    return sum(segments) if segments else level


#: How each key is read off; the answer must equal the expected value.
EQUAL: dict[str, Callable[[Outcome], Any]] = {
    "exit": lambda outcome: outcome.exit,
    "memory_events": lambda outcome: sum(run["memory_events"] for run in outcome.runs()),
    "trace_entries": lambda outcome: sum(run["trace_entries"] for run in outcome.runs()),
    "preexisting_bytes": lambda outcome: sum(run["preexisting_bytes"] for run in outcome.runs()),
    "truncated": lambda outcome: any(run["truncated"] for run in outcome.runs()) and _tells_of_end(outcome),
    "allocations": lambda outcome: sum(outcome.values("allocations")),
    "unmatched_frees": _issue("unmatched_free"),
    "repaired_strings": _issue("repaired_string"),
    "reserved": _reserved,
    "private_pool_reserved": lambda outcome: sum(outcome.values("private_pool_reserved")),
    "ranks": lambda outcome: sorted({row["rank"] for row in outcome.rows if row["what"] == "run"}),
    "devices": lambda outcome: sorted({row["value"] for row in outcome.rows if row["what"] == "device"}),
    "device_free": lambda outcome: next(iter(outcome.values("device_free")), None),
    "oom_requested": lambda outcome: next(iter(outcome.values("oom_requested")), None),
    **{
        name: (lambda outcome, name=name: outcome.main_device(name))
        for name in ("peak_allocated", "end_allocated", "end_active", "peak_reserved")
    },
    **{
        f"{name}_by_{column}": (lambda outcome, name=name, column=column: outcome.by(column, name))
        for name in ("peak_allocated", "end_allocated", "peak_reserved")
        for column in ("rank", "device")
    },
}


def _tells_of_end(outcome: Outcome) -> bool:
    return bool(re.search(r"end .*missing|truncated", outcome.said, re.IGNORECASE))


def check_explained(outcome: Outcome) -> str | None:
    """One sentence says what is wrong and what to do; nothing is stored."""
    if outcome.stored:
        return "must_explain: something was stored"
    if "Traceback" in outcome.said or len(outcome.said.strip()) < 20:
        return f"must_explain: no sentence, but {outcome.said[-300:]!r}"
    return None


def check_warned(outcome: Outcome) -> str | None:
    """Stored, with an issue above info and a sentence."""
    if outcome.exit or not outcome.stored:
        return f"must_warn: exit {outcome.exit}, stored {outcome.stored}"
    if not any(issue["severity"] in ("warning", "data_loss", "error") for issue in outcome.issues):
        return f"must_warn: no such issue among {[issue['code'] for issue in outcome.issues]}"
    return None if len(outcome.said.strip()) > 20 else f"must_warn: no sentence, but {outcome.said!r}"


def check_refused(outcome: Outcome, file: Path) -> str | None:
    """Refused, the offending name is shown, nothing is stored."""
    if outcome.stored or outcome.exit != 4 or "Traceback" in outcome.said:
        return f"must_refuse: exit {outcome.exit}, stored {outcome.stored}: {outcome.said[-300:]!r}"
    names = names_of_pickle(file)
    if names and not any(name in outcome.said for name in names):
        return f"must_refuse: none of {sorted(names)} is named in {outcome.said!r}"
    return None


def names_of_pickle(file: Path) -> set[str]:
    """Return the names that a pickle asks for, read without loading it; empty where it is no pickle."""
    names: set[str] = set()
    texts: list[str] = []
    try:
        for opcode, argument, _ in pickletools.genops(file.read_bytes()):
            if opcode.name in ("GLOBAL", "INST"):
                names.add(str(argument).replace(" ", "."))
            elif opcode.name == "STACK_GLOBAL":
                names.add(".".join(texts[-2:]))
            elif "UNICODE" in opcode.name or "STRING" in opcode.name:
                texts.append(str(argument))
    except (ValueError, OSError, IndexError):
        pass  # a broken or other file: what was found before counts
    return names


def compare(expected: dict[str, Any], outcome: Outcome, file: Path) -> list[str]:
    """Return what is wrong, one line a figure."""
    wrong: list[str | None] = []
    for key, value in {"exit": 0, **expected}.items():
        if key == "must_explain":
            wrong.append(check_explained(outcome))
        elif key == "must_warn":
            wrong.append(check_warned(outcome))
        elif key == "must_refuse":
            wrong.append(check_refused(outcome, file))
        elif key == "memory_events_at_least":
            found = EQUAL["memory_events"](outcome)
            wrong.append(None if found >= value else f"{key}: {found}, at least {value} expected")
        elif key == "bad_events_at_most":
            found = _issue("bad_record")(outcome)
            wrong.append(None if found <= value else f"{key}: {found}, at most {value} expected")
        elif key in EQUAL:
            found = EQUAL[key](outcome)
            wrong.append(None if found == value else f"{key}: {found!r}, expected {value!r}")
        elif key != "note":
            wrong.append(f"{key}: this key is not known")
    return [line for line in wrong if line]


def check_ops(file: Path, expected: dict[str, Any], store: str) -> list[str]:
    """Check a file of operations through `xmem simulate --ops`."""
    wrong = [f"{key}: this key is not known" for key in expected if key not in OPS_KEYS]
    answers: dict[tuple[str, ...], dict[str, Any]] = {}

    def answer(options: list[str]) -> dict[str, Any]:
        if tuple(options) not in answers:
            done = run_xmem("simulate", "--ops", str(file), "--json", "--store", store, *options)
            if done.returncode not in (0, 1):
                raise AssertionError(f"xmem simulate ended with {done.returncode}: {done.stderr[-300:]}")
            answers[tuple(options)] = json.loads(done.stdout)
        return answers[tuple(options)]

    for key, options in SETTINGS.items():
        if key in expected:
            given = answer(options)
            reserved = {given["end_reserved_bytes"], given["peak_reserved_bytes"]}
            if expected[key] not in reserved:
                wrong.append(f"{key}: {sorted(reserved)}, expected {expected[key]}")
    for key, names in (
        ("allocated", ("end_allocated_bytes", "peak_allocated_bytes")),
        ("peak_allocated", ("peak_allocated_bytes",)),
        ("steady_peak", ("steady_peak_bytes",)),
    ):
        if key in expected:
            found = [answer([])[name] for name in names]
            if expected[key] not in found:
                wrong.append(f"{key}: {found}, expected {expected[key]}")
    return wrong


def check_messages(file: Path, expected: dict[str, Any]) -> list[str]:
    """Check a file of out-of-memory messages through `xmem explain`."""
    done = run_xmem("explain", "--file", str(file), "--json")
    if done.returncode:
        return [f"messages: xmem explain ended with {done.returncode}: {done.stderr[-300:]}"]
    answer = json.loads(done.stdout)
    found = len(answer if isinstance(answer, list) else answer.get("messages", [answer]))
    return [] if found == expected["messages"] else [f"messages: {found}, expected {expected['messages']}"]


def check_file(folder: Path, name: str, expected: dict[str, Any]) -> list[str]:
    """Return what is wrong with one input."""
    file = folder / name
    if not file.exists():
        return ["the file is missing"]
    with tempfile.TemporaryDirectory() as store:
        try:
            if "messages" in expected:
                return check_messages(file, expected)
            if file.suffix == ".json" and {"allocated", *SETTINGS, "steady_peak"} & set(expected) and _is_ops(file):
                return check_ops(file, expected, store)
            return compare(expected, read_input(file, f"{store}/store"), file)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            return [str(error)]


def _is_ops(file: Path) -> bool:
    try:
        return set(json.loads(file.read_text())) == {"capacity", "ops"}
    except ValueError:
        return False


def check_folder(folder: Path, *, only: str = "", jobs: int = 2) -> dict[str, list[str]]:
    """Return what is wrong for each input of a folder, in the order of its expected.json."""
    expected = json.loads((folder / "expected.json").read_text(encoding="utf-8"))
    chosen = {name: wanted for name, wanted in expected.items() if only in name}
    with ThreadPoolExecutor(jobs) as pool:
        results = pool.map(lambda name: check_file(folder, name, chosen[name]), chosen)
        return dict(zip(chosen, results, strict=True))


def main() -> int:
    """Print a line for each input, and what is wrong in full."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="check inputs whose name holds this")
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    if not (arguments.folder / "expected.json").is_file():
        parser.error(f"{arguments.folder} holds no expected.json")
    results = check_folder(arguments.folder, only=arguments.only, jobs=arguments.jobs)
    for name, wrong in results.items():
        print(f"{'wrong' if wrong else 'right'}  {name}")
        for line in wrong:
            print(f"       {line}")
    failed = sum(bool(wrong) for wrong in results.values())
    print(f"{len(results) - failed} of {len(results)} are right")
    return 1 if failed or not results else 0


if __name__ == "__main__":
    sys.exit(main())
