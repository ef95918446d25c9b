"""xmem: will this deep-learning job fit on that GPU, where does its memory go, and what would make it fit?"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from xmem.errors import RefusedError, UnreadableError, UsageError, XmemError
from xmem.version import __version__

if TYPE_CHECKING:
    from xmem.capture import Workload
    from xmem.capture.profile import profile
    from xmem.capture.record import mark, record
    from xmem.evaluate.engines import estimate
    from xmem.evaluate.estimate import Estimate, EstimateOptions
    from xmem.ingest import Filters, Ingested, IngestOptions, ingest
    from xmem.ingest.inspect import Inspection, inspect
    from xmem.query import connect, query, runs
    from xmem.simulate import (
        SimulateOptions,
        Verdict,
        gpus,
        recommend,
        simulate,
        simulate_ops,
        sweep,
    )

#: Where each name of the API lives; a name is imported when it is first used, so `import xmem` costs nothing.
_HOMES = {
    "Estimate": "xmem.evaluate.estimate",
    "EstimateOptions": "xmem.evaluate.estimate",
    "Filters": "xmem.ingest",
    "IngestOptions": "xmem.ingest",
    "Ingested": "xmem.ingest",
    "Inspection": "xmem.ingest.inspect",
    "SimulateOptions": "xmem.simulate",
    "Verdict": "xmem.simulate",
    "Workload": "xmem.capture",
    "connect": "xmem.query",
    "estimate": "xmem.evaluate.engines",
    "gpus": "xmem.simulate",
    "inspect": "xmem.ingest.inspect",
    "mark": "xmem.capture.record",
    "profile": "xmem.capture.profile",
    "recommend": "xmem.simulate",
    "record": "xmem.capture.record",
    "runs": "xmem.query",
    "simulate_ops": "xmem.simulate",
    "sweep": "xmem.simulate",
}
#: Rooms that are verbs too: `xmem.ingest("trace.json")`.
_ROOMS = ("ingest", "query", "simulate")

__all__ = [
    "Estimate",
    "EstimateOptions",
    "Filters",
    "IngestOptions",
    "Ingested",
    "Inspection",
    "RefusedError",
    "SimulateOptions",
    "UnreadableError",
    "UsageError",
    "Verdict",
    "Workload",
    "XmemError",
    "__version__",
    "connect",
    "estimate",
    "gpus",
    "ingest",
    "inspect",
    "mark",
    "profile",
    "query",
    "recommend",
    "record",
    "runs",
    "simulate",
    "simulate_ops",
    "sweep",
]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"xmem.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'xmem' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
