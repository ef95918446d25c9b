"""What the names of spans and the frames of stacks say about training: backward, optimizer, copies, workspaces."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import polars as pl

Flags = npt.NDArray[np.uint8]

#: Bits of what a name means.
BACKWARD, OPTIMIZER_STEP, ZERO_GRAD, MATMUL, COPY, LOADER = 1, 2, 4, 8, 16, 32

#: torch 1.9 to 2.14 wrap each autograd node in evaluate_function; older ones show the node's own name.
_NAMES = (
    (BACKWARD, re.compile(r"autograd::engine::evaluate_function|(torch::autograd::.*|\w*Backward\d*)$")),
    (OPTIMIZER_STEP, re.compile(r"Optimizer\.step#")),
    (ZERO_GRAD, re.compile(r"Optimizer\.zero_grad#")),
    (MATMUL, re.compile(r"aten::(mm|addmm|bmm|baddbmm|addbmm|matmul|linear|_addmm_activation|_scaled_mm|addmv|mv)$")),
    (COPY, re.compile(r"aten::(to|_to_copy|copy_|pin_memory|_pin_memory)$")),
    (LOADER, re.compile(r"enumerate\(DataLoader\)#")),
)
_STEP = re.compile(r"ProfilerStep#(\d+)")

#: What a stack says: nothing, code of a backward pass, of zero_grad, of an optimizer, of a model that runs, of one
#: that is made or moved, a thread of the autograd engine (it has no Python frames), other Python code. Of several
#: frames the lowest code counts: a model runs inside of a backward pass that recomputes, never the other way round.
NO_STACK, IN_BACKWARD, IN_ZERO_GRAD, IN_OPTIMIZER, IN_FORWARD, IN_MODULE, IN_ENGINE, IN_PYTHON = range(8)

#: Patterns over `function@file`, as torch 2.0 to 2.14 names them.
_FRAMES = (
    (
        IN_BACKWARD,
        r"torch::autograd::Engine::|torch::autograd::python::PythonEngine::|^_engine_run_backward@"
        r"|^backward@.*torch/(_tensor|autograd/__init__)\.py",
    ),
    (IN_ZERO_GRAD, r"^zero_grad@"),
    (IN_OPTIMIZER, r"^step@.*optim|@.*torch/optim/"),
    (IN_FORWARD, r"^(_call_impl|_wrapped_call_impl)@.*torch/nn/modules/module\.py|^forward@"),
    (IN_MODULE, r"^(_apply|convert|to|cuda|to_empty)@.*torch/nn/modules/module\.py|^__init__@.*torch/nn/modules/"),
)


def flags_of_name(name: str) -> int:
    """Return the bits that a span's name stands for."""
    return sum(bit for bit, pattern in _NAMES if pattern.match(name))


def step_of_name(name: str) -> int:
    """Return N of `ProfilerStep#N`, -1 for any other name."""
    match = _STEP.match(name)
    return int(match[1]) if match and len(match[1]) < 10 else -1


class NameTable:
    """Remembers what each distinct name means, so that a name is looked at once."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}

    def flags(self, names: pl.Series) -> Flags:
        """Return the bits of every name in a column."""
        import polars as pl

        codes = names.cast(pl.Categorical) if names.dtype != pl.Categorical else names
        physical = codes.to_physical()
        distinct = physical.unique()
        both = pl.DataFrame({"code": physical, "name": codes})
        texts = both.unique("code").with_columns(pl.col("name").cast(pl.String))
        table = np.zeros(int(str(distinct.max() or 0)) + 1 if len(distinct) else 0, dtype=np.uint8)
        for code, name in texts.iter_rows():
            if name not in self._known:
                self._known[name] = flags_of_name(name)
            table[code] = self._known[name]
        return table[physical.fill_null(0).to_numpy()] if len(table) else np.zeros(len(names), dtype=np.uint8)


def codes_of_stacks(stacks: pl.DataFrame) -> pl.DataFrame:
    """Return stack_id and `code`, what the stack says, for each stack; its frames are innermost first."""
    import polars as pl

    frame = pl.element().struct.field("name") + "@" + pl.element().struct.field("filename").fill_null("")
    frames = (
        stacks.filter(pl.col("frames").list.len() > 0)
        .select("stack_id", frame=pl.col("frames").list.eval(frame))
        .explode("frame")
        .with_columns(pl.col("frame").cast(pl.Categorical))
    )
    distinct = frames.select(pl.col("frame").drop_nulls().unique())
    code = pl.lit(IN_PYTHON)
    for word, pattern in reversed(_FRAMES):
        code = pl.when(pl.col("frame").cast(pl.String).str.contains(pattern)).then(word).otherwise(code)
    coded = frames.join(distinct.with_columns(code=code.cast(pl.Int8)), on="frame", how="left")
    told = coded.group_by("stack_id").agg(pl.col("code").fill_null(IN_PYTHON).min())
    return stacks.select("stack_id").join(told, on="stack_id", how="left").fill_null(IN_ENGINE)
