"""Brings the recording of a job home where xmem itself is killed: a process of its own that waits for that."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from xmem.capture.vgpu.recording import read_parts, write_logs

#: The job's processes see within a moment that xmem is gone; no longer than this is waited for them.
MOST_S = 10.0
_ENDED = b"ended"


@contextmanager
def rescued(work: Path, name: str, output: Path, facts: dict[str, Any]) -> Iterator[None]:
    """See to it that event logs are written from the folder `work`, and it is removed, if this process is killed."""
    words = json.dumps({"work": str(work.resolve()), "name": name, "output": str(output.resolve()), "facts": facts})
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH")]))
    helper = subprocess.Popen(
        [sys.executable, "-m", "xmem.capture.vgpu.rescue", words],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        helper.communicate(_ENDED)


def main(words: dict[str, Any]) -> None:
    """Wait for the other process to end; where it did not say that it did, do what it would have done."""
    if sys.stdin.buffer.read() == _ENDED:
        return
    work = Path(words["work"])
    deadline = time.monotonic() + MOST_S
    while _still_runs(work) and time.monotonic() < deadline:
        time.sleep(0.1)
    write_logs(read_parts(work), words["name"], Path(words["output"]), words["facts"])
    shutil.rmtree(work, ignore_errors=True)


def _still_runs(work: Path) -> bool:
    return any(Path("/proc", file.stem.removeprefix("part-")).exists() for file in work.glob("part-*.jsonl"))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
