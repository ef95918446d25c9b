"""Results as text, JSON and CSV: they fit, they are exact, and no name acts on the terminal."""

from __future__ import annotations

import csv
import datetime
import decimal
import io
import json
import unicodedata
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xmem.render import bytes_text, cell_text, csv_rows, fact_lines, json_rows, json_text, make_inert, table_text

HOSTILE = "a\x1b[31mred\x07\r\nb\u202egnp\u2028\x9b2J\ud800"


def test_control_characters_are_shown_not_sent() -> None:
    assert make_inert(HOSTILE) == "a\\x1b[31mred\\x07\\r\\nb\\u202egnp\\u2028\\x9b2J\\ud800"
    assert make_inert("aten::conv2d <b> 'x' 日本 é") == "aten::conv2d <b> 'x' 日本 é"


@given(st.text())
def test_inert_text_never_holds_a_control_character(text: str) -> None:
    shown = make_inert(text)
    assert [letter for letter in shown if unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Zl", "Zp")] == []


def test_a_table_is_laid_out_under_its_names() -> None:
    assert table_text(("op", "bytes"), [("aten::mm", 1024), (None, 7)]) == (
        "op        bytes\n"
        "--------  -----\n"
        "aten::mm   1024\n"
        "null          7"
    )  # fmt: skip


def test_quantities_stand_to_the_right() -> None:
    assert table_text(("size", "name"), [("5.22 GiB", "7 GPUs"), ("17 bytes", "b"), (None, "c")]) == (
        "    size  name\n"
        "--------  ------\n"
        "5.22 GiB  7 GPUs\n"
        "17 bytes  b\n"
        "    null  c"
    )  # fmt: skip


def test_an_empty_table_shows_its_columns() -> None:
    assert table_text(("a", "b"), []) == "a  b\n-  -"


def test_a_table_cuts_text_to_the_width() -> None:
    text = table_text(("name", "bytes"), [("x" * 50, 1)], width=30)
    assert text.splitlines()[2] == "x" * 22 + "…" + " " * 6 + "1"
    assert max(map(len, text.splitlines())) == 30


def test_a_table_can_wrap_its_last_column() -> None:
    text = table_text(
        ("name", "meaning"), [("a", "one two three four five six seven eight nine"), ("b", "ten")], width=30, wrap=True
    )
    assert text == (
        "name  meaning\n"
        "----  ------------------------\n"
        "a     one two three four five\n"
        "      six seven eight nine\n"
        "b     ten"
    )  # fmt: skip


def test_a_table_leaves_last_columns_out_where_even_narrow_ones_do_not_fit() -> None:
    text = table_text(("first", "second", "third"), [("a" * 40, "b" * 40, "c" * 40)], width=30)
    assert text.splitlines()[-1] == "(not shown for want of width: third; use --json or --csv)"
    assert all(len(line) <= 30 for line in text.splitlines()[:-1])


@given(
    st.integers(min_value=1, max_value=200),
    st.lists(st.tuples(st.text(), st.integers(), st.floats(), st.text(max_size=3)), max_size=5),
)
def test_a_table_never_passes_the_width_but_for_its_note(width: int, rows: list[tuple[object, ...]]) -> None:
    lines = table_text(("alpha", "beta", "gamma", "d"), rows, width=max(width, 12)).splitlines()
    wide = sum(1 for line in lines if display_width(line) > max(width, 12) and not line.startswith("(not shown"))
    assert wide == 0
    assert len(lines) in (len(rows) + 2, len(rows) + 3)


def display_width(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 0 if unicodedata.combining(c) else 1 for c in text)


def test_a_hostile_name_stays_in_its_row() -> None:
    text = table_text(("name",), [(HOSTILE,)])
    assert len(text.splitlines()) == 3
    assert "\x1b" not in text and "\r" not in text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "null"), (True, "true"), (1 << 60, "1152921504606846976"), (0.1 + 0.2, "0.3"), ([1, None], "[1, null]"),
     ({"a": 1}, '{"a": 1}'), (b"ab", '"YWI="'), (decimal.Decimal("1.50"), "1.50")],
)  # fmt: skip
def test_cells(value: object, text: str) -> None:
    assert cell_text(value) == text


@dataclass(frozen=True)
class Point:
    x: int
    y: float


def test_json_holds_exact_integers_and_no_nan() -> None:
    value = {"big": (1 << 64) - 1, "nan": float("nan"), "inf": float("inf"), "point": Point(1, 0.5),
             "when": datetime.date(2026, 1, 2), "sum": decimal.Decimal(10), "raw": b"ab", "name": HOSTILE}  # fmt: skip
    text = json_text(value)
    assert text.isascii() and "\x1b" not in text
    assert json.loads(text) == {
        "big": (1 << 64) - 1, "nan": None, "inf": None, "point": {"x": 1, "y": 0.5},
        "when": "2026-01-02", "sum": 10, "raw": "YWI=", "name": HOSTILE,
    }  # fmt: skip


@pytest.mark.parametrize("rows", [[], [(1, "a")], [(1, "a"), (2, None)]])
def test_json_rows_are_one_array(rows: list[tuple[object, ...]]) -> None:
    expected = [{"n": row[0], "s": row[1]} for row in rows]
    assert json.loads("".join(json_rows(("n", "s"), rows))) == expected


def test_csv_reads_back() -> None:
    rows = [(1, 'a "quoted", name'), (None, HOSTILE.replace("\ud800", "")), (True, [1, 2])]
    text = "".join(csv_rows(("n", "s"), rows))
    read = list(csv.reader(io.StringIO(text, newline="")))
    assert read == [["n", "s"], ["1", 'a "quoted", name'], ["", HOSTILE.replace("\ud800", "")], ["true", "[1, 2]"]]


def test_csv_for_a_terminal_is_inert() -> None:
    text = "".join(csv_rows(("n",), [(HOSTILE,)], inert=True))
    assert text == f"n\n{make_inert(HOSTILE)}\n"


def test_csv_of_many_rows_comes_in_pieces() -> None:
    pieces = list(csv_rows(("n",), ((i,) for i in range(50_000))))
    assert len(pieces) > 1
    assert "".join(pieces).splitlines()[1:] == [str(i) for i in range(50_000)]


def test_facts_stand_in_one_column() -> None:
    assert fact_lines([("a", "1"), ("long", "2")]) == ["  a     1", "  long  2"]
    assert fact_lines([]) == []


def test_bytes_for_a_person_keep_the_exact_figure() -> None:
    assert bytes_text(5_604_638_720) == "5.22 GiB (5,604,638,720)"
    assert bytes_text(512) == "512 bytes"
    assert bytes_text(None) == "unknown"
