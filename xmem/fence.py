"""The fence round SQL that a person hands in: one SELECT over the store, within limits on time and memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from xmem.errors import RefusedError, UsageError

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

    from xmem.store import Store

DEFAULT_TIMEOUT_S = 60.0
_HINT = "Only one SELECT over the tables of the store is run here; it cannot write, load or reach other files."


def open_fenced(store: Store) -> duckdb.DuckDBPyConnection:
    """Open the store's tables on a connection that can reach nothing else."""
    connection = store.connect()
    lock(connection, store.folders())
    return connection


def lock(connection: duckdb.DuckDBPyConnection, folders: Sequence[Path]) -> None:
    """Confine a connection to `folders` for good: no other file, no extension, no spilling, no change of settings."""
    allowed = [os.path.abspath(folder) for folder in folders]
    connection.execute("SET allowed_directories = $1", [allowed])
    connection.execute("SET memory_limit = $1", [f"{_half_of_memory() >> 20}MiB"])
    for setting, value in (
        ("autoinstall_known_extensions", "false"),
        ("autoload_known_extensions", "false"),
        ("allow_community_extensions", "false"),
        ("python_enable_replacements", "false"),
        ("temp_directory", "''"),
        ("enable_external_access", "false"),
        ("lock_configuration", "true"),
    ):
        connection.execute(f"SET {setting} = {value}")


def check_select(sql: str) -> str:
    """Return the text of the one SELECT in `sql`; anything else is refused, what cannot be parsed is wrong use."""
    import duckdb

    try:
        statements = duckdb.extract_statements(sql)
    except duckdb.Error as error:
        raise _wrong(error) from error
    if not statements:
        raise UsageError("The SQL is empty.", "Write one SELECT, such as: SELECT count(*) FROM events")
    if len(statements) > 1:
        raise RefusedError(f"The SQL holds {len(statements)} statements; one is allowed.", _HINT)
    if statements[0].type != duckdb.StatementType.SELECT:
        kind = statements[0].type.name.replace("_", " ")
        raise RefusedError(f"The SQL is a {kind} statement, not a SELECT.", _HINT)
    return str(statements[0].query)


def run_select(
    connection: duckdb.DuckDBPyConnection,
    sql: str,
    *,
    parameters: dict[str, object] | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> pa.Table:
    """Run one SELECT on a locked connection, in a read-only transaction, and return its rows as an Arrow table.

    `parameters` are values for `$name` in the SQL; they never become part of its text.
    """
    import duckdb

    text = check_select(sql)
    timer = threading.Timer(timeout_s, connection.interrupt)
    timer.daemon = True
    connection.execute("BEGIN TRANSACTION READ ONLY")
    timer.start()
    try:
        return connection.sql(text, params=parameters or None).to_arrow_table()
    except duckdb.InterruptException as error:
        raise UsageError(f"The query ran longer than {timeout_s:g} s and was stopped.", "Ask for less.") from error
    except duckdb.OutOfMemoryException as error:
        raise UsageError(
            "The query needs more memory than it may use.", "Ask for fewer rows or columns, or aggregate first."
        ) from error
    except (duckdb.PermissionException, duckdb.TransactionException) as error:
        raise RefusedError(_sentence(error), _HINT) from error
    except duckdb.Error as error:
        if "configuration has been locked" in str(error):
            raise RefusedError(_sentence(error), _HINT) from error
        raise _wrong(error) from error
    finally:
        timer.cancel()
        timer.join()  # a thread that is still waking up while Python ends aborts the process
        connection.execute("ROLLBACK")


def _wrong(error: Exception) -> UsageError:
    return UsageError(f"The SQL cannot be run: {_sentence(error)}", "xmem schema lists tables and columns.")


def _sentence(error: Exception) -> str:
    """Return DuckDB's own words without the excerpt of the query that follows them."""
    return " ".join(str(error).split("\n\nLINE")[0].split())


def _half_of_memory() -> int:
    return max(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2, 256 << 20)
