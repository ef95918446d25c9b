"""The schema is documented, and the code's idea of it is the schema's."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from xmem.errors import XmemError
from xmem.ingest.adapter import Notes
from xmem.query import View, query, view_tables, views
from xmem.schema import (
    INGEST_TABLES,
    SIMULATION_TABLES,
    Table,
    arrow_schema,
    enum_comments,
    enums,
    issue_codes,
    layout,
    tables,
)

EVERYTHING = [*tables().values(), *view_tables().values()]


@pytest.mark.parametrize("table", EVERYTHING, ids=lambda table: table.name)
def test_every_table_view_and_column_has_a_comment(table: Table) -> None:
    assert len(table.comment) > 10
    short = [column.name for column in table.columns if len(column.comment) < 6]
    assert short == []


@pytest.mark.parametrize("table", EVERYTHING, ids=lambda table: table.name)
def test_quantities_carry_their_unit_in_the_name(table: Table) -> None:
    for column in table.columns:
        if column.name.endswith("bytes"):
            assert column.type == "BIGINT", column
        if column.name.endswith("_ns") and not column.name.startswith(("mean_", "stddev_")):
            assert column.type == "BIGINT", column
        assert not column.name.endswith(("_us", "_ms", "_mb", "_gb", "_mib", "_gib")), column


@pytest.mark.parametrize("table", EVERYTHING, ids=lambda table: table.name)
def test_no_column_is_wider_than_64_bits(table: Table) -> None:
    wide = [column.name for column in table.columns if "HUGEINT" in column.type or "DECIMAL" in column.type]
    assert wide == []


def test_every_word_list_has_a_comment() -> None:
    assert set(enum_comments()) == set(enums())
    assert all(len(comment) > 10 for comment in enum_comments().values())


def test_the_layout_is_the_tables_without_their_comments() -> None:
    bare = {
        name: replace(table, comment="", columns=tuple(replace(column, comment="") for column in table.columns))
        for name, table in tables().items()
    }
    assert layout() == bare
    assert all(len(table.comment) > 10 for table in tables().values())


def test_every_partitioned_table_starts_with_run_and_rank() -> None:
    for name in (*INGEST_TABLES, *SIMULATION_TABLES):
        assert tables()[name].column_names[:2] == ("run_id", "rank")
        assert arrow_schema(name).names == list(tables()[name].column_names[2:])


def test_the_committed_tables_end_with_the_one_that_makes_a_run_visible() -> None:
    assert INGEST_TABLES[-1] == "runs"


def test_not_null_reaches_the_files() -> None:
    assert not arrow_schema("events").field("seq").nullable
    assert arrow_schema("events").field("address").nullable
    assert str(arrow_schema("events").field("address").type) == "uint64"


def test_issue_codes_use_known_severities_and_say_what_they_mean() -> None:
    for code in issue_codes().values():
        assert code.severity in enums()["severity"], code
        assert code.meaning.endswith("."), code
        assert not code.advice or code.advice.endswith("."), code


def test_an_unknown_issue_code_is_a_fault_of_the_adapter() -> None:
    with pytest.raises(AssertionError, match="unknown issue code 'no_such_code'"):
        Notes().add("no_such_code")


def test_every_view_has_one_file_and_an_example() -> None:
    assert [view.name for view in views()] == sorted(view_tables())
    assert [view.name for view in views() if not view.example.startswith("SELECT ")] == []


def test_errors_carry_their_exit_codes() -> None:
    codes = {kind.__name__: kind.exit_code for kind in XmemError.__subclasses__()}
    assert codes == {"UsageError": 2, "UnreadableError": 3, "RefusedError": 4}
    assert str(XmemError("a", "b")) == "a\nb"


@pytest.mark.parametrize("view", views(), ids=lambda view: view.name)
def test_every_example_runs(view: View, tmp_path: Path) -> None:
    assert query(view.example, store=tmp_path / "none").height == 0


def test_threads_may_ask_at_once() -> None:
    asked: list[Any] = [tables, layout, enums, enum_comments, issue_codes]
    for _ in range(20):
        for function in (*asked, arrow_schema):
            function.cache_clear()
        start = threading.Barrier(len(asked) + 1)

        def ask(function: Any, start: threading.Barrier = start) -> Any:
            start.wait()
            return function()

        with ThreadPoolExecutor(len(asked) + 1) as pool:
            found = list(pool.map(ask, [*asked, lambda: arrow_schema("events")]))
        assert all(len(one) > 0 for one in found)
