"""What each allocation is for, by named rules; where none applies it stays unknown."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import polars as pl


def categorise(
    events: pl.DataFrame,
    place: npt.NDArray[np.int32],
    operators: npt.NDArray[np.int32],
    flags: npt.NDArray[np.uint8],
) -> pl.DataFrame:
    """Fill category of allocations where the source has not given it."""
    return events
