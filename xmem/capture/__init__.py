"""Makes traces: a hook round your own loop, and CPU runs of training jobs described in words."""

from __future__ import annotations

from xmem.capture.workload import Workload

__all__ = ["Workload"]
