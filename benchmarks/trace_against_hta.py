"""Times a whole ingest of a 270 MB trace beside holistic-trace-analysis's parser, in turn, and of a 2 GB trace.

xmem runs as a command, from the start of the interpreter to the committed store; of the other only the parser's call is
timed, without its imports. Its Python is this one, or the one that HTA_PYTHON names.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

HERE = Path(__file__).resolve().parent
PARSE = (
    "import sys, time\n"
    "from hta.common.trace_parser import parse_trace_dataframe\n"
    "from hta.configs.parser_config import ParserConfig\n"
    "started = time.perf_counter()\n"
    "parse_trace_dataframe(sys.argv[1], ParserConfig.get_default_cfg())\n"
    "print(time.perf_counter() - started)\n"
)


def run(command: list[str]) -> tuple[float, float, str]:
    """Run a command; return its seconds, its peak memory in MiB and what it printed last."""
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    text = process.stdout.read() if process.stdout else ""
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    if status:
        raise SystemExit(f"{command[:4]} failed: {text[-300:]}")
    return seconds, usage.ru_maxrss / 1024, (text.splitlines() or [""])[-1]


def ingest(trace: Path, store: Path) -> tuple[float, float, str]:
    """Ingest a trace with the command."""
    return run([sys.executable, "-m", "xmem", "ingest", str(trace), "--store", str(store), "--force"])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--skip-large", action="store_true", help="leave out the trace of 2 GB")
    arguments = parser.parse_args()
    other = os.environ.get("HTA_PYTHON", sys.executable)
    has_other = subprocess.run([other, "-c", "import hta"], capture_output=True).returncode == 0
    with tempfile.TemporaryDirectory() as folder:
        trace, store = Path(folder) / "trace.json", Path(folder) / "store"
        subprocess.run([sys.executable, str(HERE / "ingest_trace.py"), str(trace)], check=True)
        ours, theirs = [], []
        for _ in range(arguments.rounds):
            ours.append(ingest(trace, store)[:2])
            if has_other:
                _, memory, seconds = run([other, "-c", PARSE, str(trace)])
                theirs.append((float(seconds), memory))
        show(trace, "xmem ingest", ours)
        if has_other:
            show(trace, "HTA's parser", theirs)
            speed, memory = middle(theirs, 0) / middle(ours, 0), middle(ours, 1) / middle(theirs, 1)
            say(f"{speed:.1f} times faster, {memory:.2f} of the memory")
        else:
            say("holistic-trace-analysis is not installed: nothing to compare with")
        if not arguments.skip_large:
            subprocess.run(
                [sys.executable, str(HERE / "ingest_trace.py"), str(trace), "--events", "7200000"], check=True
            )
            show(trace, "xmem ingest", [ingest(trace, store)[:2]])


def middle(runs: list[tuple[float, float]], index: int) -> float:
    """Median of one of the figures."""
    return median(run[index] for run in runs)


def say(line: str) -> None:
    """Print a line."""
    sys.stdout.write(line + "\n")


def show(trace: Path, label: str, runs: list[tuple[float, float]]) -> None:
    """Print one line of medians."""
    size = trace.stat().st_size / 1e6
    say(
        f"{size:,.0f} MB  {label:13} {middle(runs, 0):6.2f} s  {middle(runs, 1):6.0f} MiB peak  (median of {len(runs)})"
    )


if __name__ == "__main__":
    main()
