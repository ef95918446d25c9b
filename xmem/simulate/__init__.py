"""The simulator: requests of a recording, an allocator, a device, and a verdict."""

from xmem.room import make_callable
from xmem.simulate.compare import Comparison, compare_recorded
from xmem.simulate.gpu_table import Gpu, gpus
from xmem.simulate.ops_file import simulate_ops
from xmem.simulate.options import SimulateOptions
from xmem.simulate.recommend import Recommendation, recommend
from xmem.simulate.simulation import simulate
from xmem.simulate.sweep import SweepRow, sweep
from xmem.simulate.verdict import Verdict

__all__ = [
    "Comparison",
    "Gpu",
    "Recommendation",
    "SimulateOptions",
    "SweepRow",
    "Verdict",
    "compare_recorded",
    "gpus",
    "recommend",
    "simulate",
    "simulate_ops",
    "sweep",
]

make_callable(__name__)
