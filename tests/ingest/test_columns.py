"""Fast ways to take columns, order keys and look words up: they give what the plain ways give."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xmem.ingest.matching import _stable_order
from xmem.ingest.snapshot_columns import Rows
from xmem.ingest.words import code_words


@given(st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 40).map(lambda place: 0x7F00_0000_0000 + 512 * place)))
def test_addresses_are_ordered_as_by_a_stable_sort(keys: list[int]) -> None:
    key = np.array(keys, dtype=np.uint64)
    assert _stable_order(key).tolist() == np.argsort(key, kind="stable").tolist()


@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-(2**30), 2**30)))
def test_numbers_below_zero_are_ordered_too(keys: list[int]) -> None:
    key = np.array(keys, dtype=np.int64)
    assert _stable_order(key).tolist() == np.argsort(key, kind="stable").tolist()


@given(st.lists(st.sampled_from(["alloc", "free_requested", "other", None])))
def test_words_get_their_codes(words: list[str | None]) -> None:
    codes = {"alloc": 1, "free_requested": 2}
    for kind in (pl.Categorical, pl.String):
        found = code_words(pl.Series(words, dtype=kind), codes, 7)
        assert found.tolist() == [codes.get(word or "", 7) for word in words]


def test_uniform_records_give_their_columns() -> None:
    rows = Rows([{"addr": 1, "size": 2}, {"size": 4, "addr": 3}])
    assert rows.column(("addr", "address")) == (1, 3)
    assert rows.column(("size",)) == (2, 4)
    assert rows.column(("stream",)) is None


@pytest.mark.parametrize("odd", [{"addr": 3, "stream": 0}, {"addr": 3}, {"addr": 3, "size": 4, "stream": 0}])
def test_records_with_other_keys_are_not_taken_in_one_sweep(odd: dict[str, int]) -> None:
    rows = Rows([{"addr": 1, "size": 2}, odd])
    assert rows.column(("address", "addr")) == [1, 3]
    assert rows.column(("category",)) is None
    if "size" not in odd:
        with pytest.raises(KeyError):
            rows.column(("size",))


def test_adapters_behind_the_one_that_fits_are_not_imported() -> None:
    code = (
        "import sys; from xmem.ingest.adapter import find_adapter;"
        "found = find_adapter(b'\\x80\\x04}', 's.pickle');"
        "print(found.name, 'xmem.ingest.memory_timeline' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["cuda_snapshot", "False"]
