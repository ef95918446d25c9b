"""Times every named report, the HTML page and some views on a store of ten million allocation events."""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from big_store import make_store

from xmem.query.reports import reports


def main() -> None:
    """Make the store (kept where --store names a folder) and run each report as a user would."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=10_000_000)
    parser.add_argument("--store", type=Path, help="folder to make or reuse")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = arguments.store or Path(folder) / "store"
        if not store.exists():
            make_store(store, events=arguments.events)
        page = Path(folder) / "page.html"
        _time(["report", "html", "-o", str(page), "--store", str(store)], "html")
        sys.stdout.write(f"{'size of the page':24s} {page.stat().st_size:,} bytes\n")
        for one in reports():
            _time(["report", one.name, "--store", str(store), "--json"], one.name)
        _time(["query", "FROM peaks", "--store", str(store)], "query: FROM peaks")
        _time(["diff", "big", "big", "--store", str(store)], "diff")


def _time(arguments: list[str], label: str) -> None:
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, "-m", "xmem", *arguments], check=True, capture_output=True)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    most = f"{after.ru_maxrss >> 10:6,} MiB most so far"
    sys.stdout.write(f"{label:24s} {wall:6.2f} s wall  {cpu:6.2f} s cpu  {most}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
