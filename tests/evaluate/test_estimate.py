"""What an estimate says beside its verdict; without torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from xmem.capture.workload import Workload
from xmem.evaluate.estimate import Estimate
from xmem.evaluate.outside import outside_lines
from xmem.simulate.options import SimulateOptions, parse_reserve
from xmem.units import MIB

ASSUMED = parse_reserve(SimulateOptions()).non_torch_bytes


def make_estimate(total_bytes: int, needed_bytes: int, non_torch_bytes: int = ASSUMED) -> Estimate:
    verdict: Any = SimpleNamespace(
        total_bytes=total_bytes, non_torch_bytes=non_torch_bytes, smallest_device_bytes=needed_bytes + non_torch_bytes
    )
    return Estimate(cast("Any", verdict), Workload("m"), (2, 3), 0, (), outside_lines(non_torch_bytes))


@pytest.mark.parametrize(
    ("needed", "close"),
    [(1000 - 541, False), (1000 - 540, False), (1000 - 539, True), (1000 - 256, True), (1000 - 255, False)],
)
def test_a_verdict_that_the_context_may_turn_is_too_close_to_call(needed: int, close: bool) -> None:
    assert make_estimate(1000 * MIB, needed * MIB).too_close_to_call is close


def test_memory_that_was_measured_leaves_nothing_open() -> None:
    assert not make_estimate(1000 * MIB, 600 * MIB, 300 * MIB).too_close_to_call
