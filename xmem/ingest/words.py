"""Words in categorical columns as small codes, looked up once for each distinct word."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import polars as pl

Codes = npt.NDArray[np.int8]


def code_words(column: pl.Series, codes: Mapping[str, int], default: int) -> Codes:
    """Return the code of each row's word; `default` for null and for any other word."""
    import polars as pl

    if len(column) == 0:
        return np.zeros(0, dtype=np.int8)
    words = column if column.dtype == pl.Categorical else column.cast(pl.String).cast(pl.Categorical)
    physical = words.to_physical()
    absent = int(str(physical.max() or 0)) + 1
    code = physical.fill_null(absent).to_numpy()
    place = np.full(absent + 1, -1, dtype=np.int64)
    place[code] = np.arange(len(code))  # one row of each word
    used = np.flatnonzero(place[:absent] >= 0)
    table = np.full(absent + 1, default, dtype=np.int8)
    table[used] = [codes.get(word, default) for word in words.gather(place[used]).cast(pl.String)]
    found: Codes = table[code]
    return found
