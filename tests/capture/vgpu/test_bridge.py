"""The real allocator's statistics in a virtual run equal, byte for byte, what a replay of its requests computes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from tests.capture.vgpu.conftest import JOBS
from xmem.capture.vgpu.run import Outcome
from xmem.ingest import IngestOptions, ingest
from xmem.simulate.allocator import Stats
from xmem.simulate.replay import encode
from xmem.simulate.requests import find_source, make_recorded_requests, read_requests
from xmem.simulate.trial import Setup, try_on
from xmem.store import Store

pytestmark = pytest.mark.cuda_wheel

#: What both sides count, by torch's names.
STATISTICS = {
    "allocated_bytes.all.current": "allocated_bytes",
    "active_bytes.all.current": "active_bytes",
    "reserved_bytes.all.current": "reserved_bytes",
    "requested_bytes.all.current": "requested_bytes",
    "inactive_split_bytes.all.current": "inactive_split_bytes",
    "segment.all.current": "segments",
    "active.all.current": "active_blocks",
    "allocated_bytes.all.peak": "peak_allocated_bytes",
    "active_bytes.all.peak": "peak_active_bytes",
    "reserved_bytes.all.peak": "peak_reserved_bytes",
    "requested_bytes.all.peak": "peak_requested_bytes",
    "num_alloc_retries": "num_alloc_retries",
    "num_ooms": "num_ooms",
}
EXPANDABLE = "expandable_segments:True"
CASES = [
    ("resnet18-sgd", 8.0, ""), ("vgg11-adam", 8.0, ""), ("mobilenet-rmsprop", 8.0, ""), ("convnext-adamw", 8.0, ""),
    ("densenet-adagrad", 8.0, ""), ("gpt-adam", 8.0, ""), ("gpt-adamw-bf16", 8.0, ""), ("gpt-sgd-fp16", 8.0, ""),
    ("gpt-checkpointing", 8.0, ""), ("gpt-lengths", 8.0, ""), ("streams", 8.0, ""), ("inference", 8.0, ""),
    ("resnet18-sgd", 8.0, EXPANDABLE), ("gpt-lengths", 8.0, EXPANDABLE), ("gpt-adam", 8.0, "max_split_size_mb:32"),
    ("resnet18-sgd", 0.30, ""), ("gpt-adam", 0.12, ""), ("gpt-lengths", 0.2, EXPANDABLE),
]  # fmt: skip


def replay_of(outcome: Outcome, conf: str, total_bytes: int, store: Path) -> Stats:
    run = ingest(outcome.files, options=IngestOptions(store=store))[0]
    kept = Store(store)
    with closing(kept.connect()) as connection:
        source = find_source(connection, kept.find_run(run.run_id))
        make_recorded_requests(connection, source)
        table = read_requests(connection, None, kept)
    return try_on(encode(table), Setup("native", conf, source.torch_version, "down"), total_bytes).stats


@pytest.mark.slow
@pytest.mark.parametrize(("name", "gib", "conf"), CASES, ids=lambda value: str(value))
def test_replay_equals_the_real_allocator(
    name: str, gib: float, conf: str, run_on_card: Callable[..., Outcome], tmp_path: Path
) -> None:
    outcome = run_on_card(str(JOBS), name, gib=gib, conf=conf)
    (part,) = outcome.parts
    real = {ours: part.stats[0][theirs] for theirs, ours in STATISTICS.items()}
    assert (real["num_ooms"] > 0) == (gib < 1)
    stats = replay_of(outcome, conf, int(gib * (1 << 30)), tmp_path / "store")
    assert {ours: getattr(stats, ours) for ours in STATISTICS.values()} == real
