"""The fence round handed-in SQL: what passes, what is refused, and in which words."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import duckdb
import pytest

from xmem.errors import RefusedError, UsageError
from xmem.fence import check_select, lock, run_select


@pytest.fixture
def fenced(tmp_path: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    (tmp_path / "events").mkdir()
    (tmp_path / "secret.txt").write_text("secret")
    with duckdb.connect() as connection:
        connection.execute("CREATE TABLE t AS SELECT range AS a FROM range(3)")
        connection.execute(f"COPY t TO '{tmp_path}/events/t.parquet'")
        lock(connection, [tmp_path / "events"])
        yield connection


def test_a_select_gives_rows(fenced: duckdb.DuckDBPyConnection) -> None:
    assert run_select(fenced, "SELECT sum(a)::BIGINT AS s FROM t; ").to_pylist() == [{"s": 3}]
    assert run_select(fenced, "WITH u AS (FROM t) SELECT count(*) AS n FROM u").to_pylist() == [{"n": 3}]


def test_the_folders_inside_can_be_read(fenced: duckdb.DuckDBPyConnection, tmp_path: Path) -> None:
    sql = f"SELECT count(*) AS n FROM read_parquet('{tmp_path}/events/*.parquet')"
    assert run_select(fenced, sql).to_pylist() == [{"n": 3}]


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("SELECT 1; SELECT 2", "The SQL holds 2 statements; one is allowed."),
        ("COPY t TO 'x.csv'", "The SQL is a COPY statement, not a SELECT."),
        ("ATTACH 'x.db'", "The SQL is a ATTACH statement, not a SELECT."),
        ("SET memory_limit='1GB'", "The SQL is a SET statement, not a SELECT."),
        ("PRAGMA database_list", "The SQL is a PRAGMA statement, not a SELECT."),
        ("INSTALL httpfs", "The SQL is a LOAD statement, not a SELECT."),
        ("EXPORT DATABASE 'x'", "The SQL is a EXPORT statement, not a SELECT."),
        ("CREATE TABLE u AS SELECT 1", "The SQL is a CREATE statement, not a SELECT."),
        ("DELETE FROM t", "The SQL is a DELETE statement, not a SELECT."),
        ("CALL pragma_version()", "The SQL is a CALL statement, not a SELECT."),
    ],
)
def test_what_is_no_single_select_is_refused(fenced: duckdb.DuckDBPyConnection, sql: str, message: str) -> None:
    with pytest.raises(RefusedError) as caught:
        run_select(fenced, sql)
    assert caught.value.message == message
    assert caught.value.exit_code == 4
    assert caught.value.hint.startswith("Only one SELECT")


def test_other_files_are_refused(fenced: duckdb.DuckDBPyConnection, tmp_path: Path) -> None:
    for inner in (f"{tmp_path}/secret.txt", f"{tmp_path}/events/../secret.txt"):
        with pytest.raises(RefusedError, match="Cannot access file"):
            run_select(fenced, f"SELECT * FROM read_text('{inner}')")


def test_settings_are_locked(fenced: duckdb.DuckDBPyConnection) -> None:
    with pytest.raises(RefusedError, match="configuration has been locked"):
        run_select(fenced, "SELECT * FROM enable_logging()")


def test_a_write_hidden_in_a_select_is_refused_and_undone(fenced: duckdb.DuckDBPyConnection) -> None:
    with pytest.raises(RefusedError, match="read-only"):
        run_select(fenced, "WITH x AS (INSERT INTO t VALUES (9) RETURNING *) SELECT * FROM x")
    assert run_select(fenced, "SELECT count(*) AS n FROM t").to_pylist() == [{"n": 3}]


def test_python_variables_are_out_of_reach(fenced: duckdb.DuckDBPyConnection) -> None:
    import polars as pl

    frame = pl.DataFrame({"a": [1]})
    with pytest.raises(UsageError, match="frame does not exist"):
        run_select(fenced, "SELECT * FROM frame")
    assert frame.height == 1


def test_bad_sql_is_wrong_use_with_duckdbs_sentence(fenced: duckdb.DuckDBPyConnection) -> None:
    for sql, words in (("SELECT nope FROM t", 'Referenced column "nope" not found'), ("SELEC 1", "syntax error")):
        with pytest.raises(UsageError, match=words) as caught:
            run_select(fenced, sql)
        assert caught.value.message.startswith("The SQL cannot be run: ")
        assert "\n" not in caught.value.message
        assert caught.value.exit_code == 2


def test_empty_sql_says_what_to_write() -> None:
    with pytest.raises(UsageError) as caught:
        check_select(" -- nothing")
    assert caught.value.message == "The SQL is empty."
    assert caught.value.hint == "Write one SELECT, such as: SELECT count(*) FROM events"


def test_a_slow_query_is_stopped(fenced: duckdb.DuckDBPyConnection) -> None:
    with pytest.raises(UsageError) as caught:
        run_select(fenced, "SELECT count(*) FROM range(10000000) a, range(10000000) b", timeout_s=0.05)
    assert caught.value.message == "The query ran longer than 0.05 s and was stopped."
    assert run_select(fenced, "SELECT 1 AS one").to_pylist() == [{"one": 1}]
