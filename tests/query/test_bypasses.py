"""Ways round the fence: none of them writes, reads another file, loads code or reaches the network."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.query import tiny
from xmem.errors import RefusedError, UsageError, XmemError
from xmem.query import connect, query

SECRET = "the secret of another file"
STATEMENTS = (
    "COPY runs TO '{away}'",
    "COPY (SELECT 1) TO '{inside}' (FORMAT parquet)",
    "COPY runs FROM '{secret}'",
    "EXPORT DATABASE '{away}'",
    "IMPORT DATABASE '{away}'",
    "ATTACH '{away}' AS other",
    "ATTACH ':memory:' AS other",
    "DETACH memory",
    "USE memory",
    "INSTALL httpfs",
    "LOAD httpfs",
    "LOAD '{secret}'",
    "SET enable_external_access = true",
    "RESET enable_external_access",
    "PRAGMA enable_external_access=true",
    "PRAGMA database_list",
    "CREATE TABLE mine AS SELECT 1",
    "CREATE VIEW runs2 AS SELECT 1",
    "CREATE MACRO f() AS 1",
    "CREATE SECRET (TYPE s3)",
    "INSERT INTO runs SELECT * FROM runs",
    "DELETE FROM runs",
    "DROP VIEW runs",
    "CHECKPOINT",
    "CALL pragma_version()",
    "BEGIN TRANSACTION",
    "PREPARE p AS SELECT 1",
    "EXECUTE p",
    "SELECT 1; COPY runs TO '{away}'",
    "SELECT 1; SET lock_configuration = false",
    "EXPLAIN ANALYZE COPY runs TO '{away}'",
    "VACUUM",
)
SELECTS = (
    "SELECT * FROM read_text('{secret}')",
    "SELECT * FROM read_blob('{secret}')",
    "SELECT * FROM read_csv('{secret}')",
    "SELECT * FROM read_csv_auto('{secret}')",
    "SELECT * FROM read_json_auto('{secret}')",
    "SELECT * FROM read_parquet('{secret}')",
    "SELECT * FROM '{secret}'",
    "SELECT * FROM '{inside}/../../../../secret.csv'",
    "SELECT * FROM read_text('{inside}/../../../../secret.csv')",
    "SELECT * FROM glob('{folder}/*')",
    "SELECT * FROM sniff_csv('{secret}')",
    "SELECT * FROM parquet_metadata('{secret}')",
    "SELECT * FROM query('SELECT * FROM read_text(''{secret}'')')",
    "SELECT * FROM query_table('{secret}')",
    "WITH x AS (FROM read_text('{secret}')) FROM x",
    "SELECT (SELECT content FROM read_text('{secret}'))",
    "SELECT getenv('HOME')",
    "SELECT * FROM 'https://example.invalid/x.parquet'",
    "SELECT * FROM read_parquet('s3://example/x.parquet')",
    "SELECT * FROM read_csv('https://example.invalid/x.csv')",
    "SELECT * FROM sqlite_scan('{secret}', 't')",
    "SELECT * FROM python_variable",
    "FROM pragma_set('a')",
)


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    store = tiny.write_training(tmp_path / "s").path
    (tmp_path / "secret.csv").write_text(f"a\n{SECRET}\n")
    inside = next((store / "runs").rglob("*.parquet")).parent
    return {
        "store": str(store), "secret": str(tmp_path / "secret.csv"), "away": str(tmp_path / "away"),
        "inside": str(inside), "folder": str(tmp_path),
    }  # fmt: skip


def contents(folder: str) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in sorted(Path(folder).rglob("*")) if file.is_file()}


@pytest.mark.parametrize("sql", STATEMENTS)
def test_statements_are_refused(places: dict[str, str], sql: str) -> None:
    before = contents(places["folder"])
    with pytest.raises((RefusedError, UsageError)):
        query(sql.format(**places), store=places["store"])
    assert contents(places["folder"]) == before


@pytest.mark.parametrize("sql", SELECTS)
def test_selects_see_nothing_else(places: dict[str, str], sql: str) -> None:
    python_variable = [SECRET]
    with pytest.raises(XmemError) as caught:
        query(sql.format(**places), store=places["store"])
    assert SECRET not in str(caught.value) and python_variable


def test_connection_is_fenced_too(places: dict[str, str]) -> None:
    import duckdb

    connection = connect(places["store"])
    for sql in SELECTS:
        with pytest.raises(duckdb.Error):
            connection.execute(sql.format(**places)).fetchall()
    for sql in ("SET enable_external_access = true", "INSTALL httpfs", "ATTACH '{away}'", "COPY runs TO '{away}'"):
        with pytest.raises(duckdb.Error):
            connection.execute(sql.format(**places))
    assert not Path(places["away"]).exists()
    assert connection.execute("SELECT count(*) FROM events").fetchall() == [(23,)]
