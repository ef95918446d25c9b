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
    pairs = pl.DataFrame({"code": physical, "word": words}).unique("code").with_columns(pl.col("word").cast(pl.String))
    table = np.full(int(str(physical.max() or 0)) + 2, default, dtype=np.int8)
    for code, word in pairs.iter_rows():
        if code is not None:
            table[code] = codes.get(word, default)
    table[-1] = default
    found: Codes = table[physical.fill_null(len(table) - 1).to_numpy()]
    return found
