"""Times a whole ingest of a 270 MB trace beside holistic-trace-analysis's parser, in turn, and of a 2 GB trace.

Both are timed as a call, imports done before, and as a process, from the start of the interpreter to its end; xmem
ends with the committed store. Memory is the peak of the larger process: those that read shares have ended by then.
HTA's Python is this one, or the one that HTA_PYTHON names.
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
INGEST = (
    "import sys, time\n"
    "import xmem.ingest as room, xmem.ingest.pipeline, xmem.ingest.tables, xmem.ingest.trace_columns, duckdb, pathlib\n"
    "options = room.IngestOptions(store=pathlib.Path(sys.argv[2]), force=True)\n"
    "started = time.perf_counter()\n"
    "room.ingest(sys.argv[1], options=options)\n"
    "print(time.perf_counter() - started)\n"
)
Times = tuple[float, float, float]


def run(command: list[str]) -> Times:
    """Run a command that prints the seconds of a call; return these, its own seconds and its peak memory in MiB."""
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    text = process.stdout.read() if process.stdout else ""
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    if status:
        raise SystemExit(f"{command[:2]} failed: {text[-300:]}")
    return float(text.splitlines()[-1]), seconds, usage.ru_maxrss / 1024


def ingest(trace: Path, store: Path) -> Times:
    """Ingest a trace."""
    return run([sys.executable, "-c", INGEST, str(trace), str(store)])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--skip-large", action="store_true", help="leave out the trace of 2 GB")
    arguments = parser.parse_args()
    other = os.environ.get("HTA_PYTHON", sys.executable)
    has_other = subprocess.run([other, "-c", "import hta"], capture_output=True).returncode == 0
    with tempfile.TemporaryDirectory() as folder:
        trace, store = Path(folder) / "trace.json", Path(folder) / "store"
        subprocess.run([sys.executable, str(HERE / "ingest_trace.py"), str(trace)], check=True)
        ours, theirs = [], []
        for _ in range(arguments.rounds):
            ours.append(ingest(trace, store))
            if has_other:
                theirs.append(run([other, "-c", PARSE, str(trace)]))
        show(trace, "xmem.ingest", ours)
        if has_other:
            show(trace, "HTA's parser", theirs)
            call, process = (median(their[n] / our[n] for our, their in zip(ours, theirs, strict=True)) for n in (0, 1))
            memory = middle(ours) / middle(theirs)
            say(f"as a call {call:.1f} times faster, as a process {process:.1f}; {memory:.2f} of the memory")
        else:
            say("holistic-trace-analysis is not installed: nothing to compare with")
        if not arguments.skip_large:
            large = ["--events", "7200000"]
            subprocess.run([sys.executable, str(HERE / "ingest_trace.py"), str(trace), *large], check=True)
            show(trace, "xmem.ingest", [ingest(trace, store)])


def middle(runs: list[Times], index: int = 2) -> float:
    """Median of one of the figures: memory, if nothing else is asked for."""
    return median(run[index] for run in runs)


def say(line: str) -> None:
    """Print a line."""
    sys.stdout.write(line + "\n")


def show(trace: Path, label: str, runs: list[Times]) -> None:
    """Print one line of medians."""
    size = trace.stat().st_size / 1e6
    say(
        f"{size:,.0f} MB  {label:12} {middle(runs, 0):6.2f} s as a call {middle(runs, 1):6.2f} s as a process"
        f" {middle(runs):6.0f} MiB peak  (median of {len(runs)})"
    )


if __name__ == "__main__":
    main()
