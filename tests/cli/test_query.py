"""`xmem query`: one SELECT in, rows out, in every form; everything else is refused."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path

import polars as pl
import pytest

import xmem as api
from tests.cli.conftest import MIB, Xmem, write_tiny_run
from xmem.store import Store

SQL = "SELECT category, sum(requested_bytes) AS bytes FROM events WHERE action = 'alloc' GROUP BY 1 ORDER BY 1"
ROWS = [("activation", 8 * MIB), ("gradient", 6 * MIB), ("parameter", 4 * MIB)]


def test_a_table_is_printed(xmem: Xmem, tiny_store: Store) -> None:
    done = xmem("query", SQL)
    assert done.code == 0
    assert done.out == (
        "category      bytes\n"
        "----------  -------\n"
        "activation  8388608\n"
        "gradient    6291456\n"
        "parameter   4194304\n"
    )  # fmt: skip


def test_json_csv_and_files_hold_the_same_rows(xmem: Xmem, tiny_store: Store, tmp_path: Path) -> None:
    as_objects = [{"category": name, "bytes": size} for name, size in ROWS]
    assert xmem("query", SQL, "--json").json == as_objects
    assert list(csv.reader(io.StringIO(xmem("query", SQL, "--csv").out)))[1:] == [[n, str(s)] for n, s in ROWS]
    for suffix in ("parquet", "csv", "json"):
        done = xmem("query", SQL, "-o", f"out.{suffix}")
        assert (done.code, done.out, done.err) == (0, "", f"3 rows written to out.{suffix}\n")
    assert pl.read_parquet("out.parquet").rows() == ROWS
    assert pl.read_csv("out.csv").rows() == ROWS
    assert json.loads(Path("out.json").read_text()) == as_objects
    assert sorted(path.name for path in tmp_path.iterdir()) == [".xmem", "out.csv", "out.json", "out.parquet"]


def test_sql_comes_from_a_file_or_from_standard_input(
    xmem: Xmem, tiny_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("q.sql").write_text("-- how many\nSELECT count(*) AS n FROM events;\n")
    assert xmem("query", "-f", "q.sql", "--json").json == [{"n": 6}]
    monkeypatch.setattr(sys, "stdin", io.StringIO("SELECT 1 AS one"))
    assert xmem("query", "-", "--json").json == [{"one": 1}]


def test_rows_that_are_left_out_are_counted(xmem: Xmem, tiny_store: Store) -> None:
    done = xmem("query", "SELECT * FROM range(500) t(n)", "--rows", "2")
    assert done.out.splitlines() == ["n", "-", "0", "1"]
    assert done.err == "(498 more rows; --rows 0, --csv, --json and -o give all)\n"
    assert len(xmem("query", "SELECT * FROM range(500) t(n)", "--rows", "0").out.splitlines()) == 502


def test_no_rows_are_no_error(xmem: Xmem, tiny_store: Store) -> None:
    assert xmem("query", "SELECT seq FROM events WHERE false").out == "seq\n---\n"
    assert xmem("query", "SELECT seq FROM events WHERE false", "--json").out == "[]\n"
    assert xmem("query", "SELECT seq FROM events WHERE false", "--csv").out == "seq\n"


def test_an_empty_store_answers_with_nothing(xmem: Xmem, tmp_path: Path) -> None:
    assert xmem("query", "SELECT count(*) AS n FROM allocations", "--json").json == [{"n": 0}]
    assert list(tmp_path.iterdir()) == []


def test_from_may_come_first(xmem: Xmem, tiny_store: Store) -> None:
    (peak,) = xmem("query", "FROM peaks", "--json").json
    assert (peak["peak_allocated_bytes"], peak["peak_reserved_bytes"]) == (12 * MIB, 20 * MIB)
    assert (peak["peak_allocated_seq"], peak["peak_allocated_step"]) == (2, 0)


@pytest.mark.parametrize(
    ("sql", "code", "start"),
    [
        ("SELEC 1", 2, "error: The SQL cannot be run: Parser Error: syntax error at or near \"SELEC\""),
        ("SELECT nothing FROM events", 2, "error: The SQL cannot be run: Binder Error:"),
        ("SELECT * FROM no_such_table", 2, "error: The SQL cannot be run: Catalog Error:"),
        ("", 2, "error: The SQL is empty."),
        ("SELECT 1; SELECT 2", 4, "error: The SQL holds 2 statements; one is allowed."),
        ("DELETE FROM events", 4, "error: The SQL is a DELETE statement, not a SELECT."),
        ("COPY events TO 'stolen.csv'", 4, "error: The SQL is a COPY statement, not a SELECT."),
        ("ATTACH 'other.db'", 4, "error: The SQL is a ATTACH statement, not a SELECT."),
        ("SELECT * FROM read_text('/etc/passwd')", 4, "error: "),
        ("SELECT * FROM 'other.parquet'", 4, "error: "),
    ],
)  # fmt: skip
def test_bad_and_fenced_sql(xmem: Xmem, tiny_store: Store, tmp_path: Path, sql: str, code: int, start: str) -> None:
    done = xmem("query", sql)
    assert (done.code, done.out) == (code, "")
    assert done.err.startswith(start)
    assert done.err.count("\n") == 2 and "\nhint: " in done.err
    assert [path.name for path in tmp_path.iterdir()] == [".xmem"]


def test_a_query_that_takes_too_long_is_stopped(xmem: Xmem, tiny_store: Store) -> None:
    done = xmem("query", "SELECT count(*) FROM range(100000000000) a, range(1000) b", "--timeout", "0.2")
    assert done.code == 2
    assert done.err.startswith("error: The query ran longer than 0.2 s and was stopped.\nhint: ")


def test_the_sql_file_must_be_readable(xmem: Xmem, tiny_store: Store) -> None:
    done = xmem("query", "-f", "missing.sql")
    assert done.code == 2
    assert done.err == (
        "error: The SQL file 'missing.sql' cannot be read: No such file or directory.\nhint: Check the path.\n"
    )
    Path("binary.sql").write_bytes(b"\xff\xfe")
    assert "cannot be read: it is not UTF-8 text." in xmem("query", "-f", "binary.sql").err


def test_an_output_file_is_not_replaced_unasked(xmem: Xmem, tiny_store: Store) -> None:
    Path("out.csv").write_text("mine")
    done = xmem("query", SQL, "-o", "out.csv")
    assert (done.code, done.out) == (4, "")
    assert done.err == "error: The output file 'out.csv' exists already.\nhint: --force replaces it.\n"
    assert Path("out.csv").read_text() == "mine"
    assert xmem("query", SQL, "-o", "out.csv", "--force").code == 0
    assert Path("out.csv").read_text().startswith("category,bytes\n")


@pytest.mark.parametrize(
    ("target", "message", "hint"),
    [
        ("out.xlsx", "The suffix of 'out.xlsx' names no format that can be written.", "Known: .parquet, .csv, .json"),
        ("no/out.csv", "The folder 'no' of the output file is not there.", "Make it first."),
        ("folder.csv", "The output file 'folder.csv' is a folder.", "Name a file in it."),
    ],
)
def test_an_output_that_cannot_be_written(xmem: Xmem, tiny_store: Store, target: str, message: str, hint: str) -> None:
    Path("folder.csv").mkdir()
    done = xmem("query", SQL, "-o", target)
    assert (done.code, done.err) == (2, f"error: {message}\nhint: {hint}\n")


def test_bad_sql_writes_no_file(xmem: Xmem, tiny_store: Store, tmp_path: Path) -> None:
    assert xmem("query", "SELECT nothing FROM events", "-o", "out.csv").code == 2
    assert [path.name for path in tmp_path.iterdir()] == [".xmem"]


def test_names_that_hold_escapes_stay_inert(xmem: Xmem, tmp_path: Path) -> None:
    store = Store(".xmem")
    name = "evil\x1b]0;title\x07\nFITS on everything'; DROP TABLE events; --"
    write_tiny_run(store, name=name)
    for verb in (["runs"], ["query", "SELECT name FROM runs"]):
        done = xmem(*verb)
        assert "\x1b" not in done.out and len(done.out.splitlines()) == 3
    assert xmem("query", "SELECT name FROM runs", "--json").json == [{"name": name}]


def test_sums_are_integers_in_python_too(tiny_store: Store) -> None:
    frame = api.query(SQL)
    assert frame.schema["bytes"] == pl.Int64
    assert frame.rows() == ROWS
    large = api.query("SELECT sum(x) AS s FROM (VALUES (10000000000000000000000000000::HUGEINT)) t(x)")
    assert large.rows() == [(10**28,)]


def test_a_connection_gives_frames_of_every_kind_and_stays_fenced(tiny_store: Store) -> None:
    connection = api.connect()
    assert connection.sql("FROM allocations").pl().height == 3
    assert connection.sql("FROM allocations").to_arrow_table().num_rows == 3
    with pytest.raises(Exception, match="disabled by configuration"):
        connection.sql("SELECT * FROM read_text('/etc/passwd')").fetchall()
