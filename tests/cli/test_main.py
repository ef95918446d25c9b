"""The command line as a whole: help, versions, exit codes, and how it takes trouble."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import xmem.cli
from tests.cli.conftest import Xmem
from tests.test_docs import load_generator
from xmem.cli import VERBS, run
from xmem.store import Store
from xmem.version import __version__


def test_the_help_page_names_every_command_and_the_exit_codes(xmem: Xmem) -> None:
    done = xmem("--help")
    assert done.code == 0
    listed = done.out.split("Commands:")[1].split("Exit codes:")[0]
    assert [line.split()[0] for line in listed.splitlines() if line[:2] == "  " and line[2:3].strip()] == list(VERBS)
    assert "0 fits, or done. 1 does not fit. 2 wrong use. 3 unreadable input. 4 refused." in " ".join(done.out.split())


@pytest.mark.parametrize("path", [path for path, _ in load_generator().commands()])
def test_every_command_has_help_and_json(xmem: Xmem, path: str) -> None:
    done = xmem(*path.split(), "--help")
    assert done.code == 0
    assert "--json" in done.out or "COMMAND [ARGS]..." in done.out
    assert all(len(line) <= 80 for line in done.out.splitlines())


def test_the_version(xmem: Xmem) -> None:
    assert xmem("--version").out == f"xmem {__version__}\n"


def test_no_command_shows_help_and_is_wrong_use(xmem: Xmem) -> None:
    done = xmem()
    assert done.code == 2
    assert "Usage: xmem" in done.out + done.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "No such command 'nonsense'."),
        (["runs", "--nonsense"], "No such option '--nonsense'."),
        (["ingest"], "Missing argument 'FILE...'."),
        (["query"], "Give the SQL as one argument, as - for standard input, or with -f FILE."),
        (["query", "FROM runs", "-f", "q.sql"], "Give the SQL as one argument, as - for standard input, or"),
        (["query", "SELECT 1", "--json", "--csv"], "--json and --csv exclude each other."),
        (["simulate", "--sweep", "--recommend"], "--sweep and --recommend exclude each other."),
        (["simulate", "run", "--ops", "x.json"], "--ops replays a file instead of a run; leave RUN and --compare out."),
        (["simulate", "--ops", "x.json", "--compare"], "leave RUN and --compare out."),
        (["ingest", "x", "--steps", "5-3"], "'5-3' ends before it begins."),
        (["ingest", "x", "--steps", "few"], "'few' is no step and no range of steps; write 3 or 3-5."),
    ],
)  # fmt: skip
def test_wrong_use_ends_with_2_and_a_sentence(xmem: Xmem, arguments: list[str], message: str) -> None:
    done = xmem(*arguments)
    assert done.code == 2
    assert message in done.err
    assert "Traceback" not in done.err
    assert done.out == ""


def test_an_option_can_come_from_the_environment(
    xmem: Xmem, tiny_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XMEM_QUERY_ROWS", "1")
    done = xmem("query", "SELECT seq FROM events ORDER BY seq")
    assert done.out.splitlines() == ["seq", "---", "  0"]


def test_the_store_can_come_from_the_environment(
    xmem: Xmem, tiny_store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert xmem("runs", "--json").json == []
    monkeypatch.setenv("XMEM_STORE", str(tmp_path / ".xmem"))
    assert [found["run_id"] for found in xmem("runs", "--json").json] == ["abc123"]


def raise_in_runs(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("xmem.store.Store.runs", fail)


def test_a_fault_of_xmem_is_one_sentence_and_exit_70(xmem: Xmem, monkeypatch: pytest.MonkeyPatch) -> None:
    raise_in_runs(monkeypatch, ValueError("odd\x1b[2J"))
    done = xmem("runs")
    assert done.code == 70
    assert done.err == (
        "error: xmem failed in a way that it should not: ValueError: odd\\x1b[2J\n"
        "hint: This is a fault of xmem, not of your input. XMEM_DEBUG=1 shows where it happened.\n"
    )


def test_xmem_debug_shows_where(xmem: Xmem, monkeypatch: pytest.MonkeyPatch) -> None:
    raise_in_runs(monkeypatch, ValueError("odd"))
    monkeypatch.setenv("XMEM_DEBUG", "1")
    assert "Traceback (most recent call last)" in xmem("runs").err


def test_control_c_ends_with_130_and_no_traceback(xmem: Xmem, monkeypatch: pytest.MonkeyPatch) -> None:
    raise_in_runs(monkeypatch, KeyboardInterrupt())
    done = xmem("runs")
    assert done.code == 130
    assert "Traceback" not in done.err


def test_a_reader_that_goes_away_is_no_error(tiny_store: Store) -> None:
    command = (
        f"{sys.executable} -m xmem query 'SELECT * FROM range(1000000)' --csv | head -n 1; echo ${{PIPESTATUS[0]}}"
    )
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout == "range\n141\n"
    assert done.stderr == ""


def test_python_m_xmem_is_the_command(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "xmem", "runs", "--json"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[]\n")


def test_shell_completion_is_there() -> None:
    environment = {**os.environ, "_XMEM_COMPLETE": "bash_source"}
    code = "from xmem.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert "complete" in done.stdout
    assert done.returncode == 0


def test_no_escape_sequence_is_printed_to_a_pipe(xmem: Xmem, tiny_store: Store) -> None:
    assert "\x1b" not in xmem("runs").out + xmem("--help").out


def test_exit_codes_that_are_not_answers_do_not_collide() -> None:
    codes = {0, 1, 2, 3, 4, xmem_codes()[0], *xmem_codes()[1:]}
    assert len(codes) == 8


def xmem_codes() -> tuple[int, int, int]:
    return xmem.cli.EXIT_INTERNAL, xmem.cli.EXIT_INTERRUPTED, xmem.cli.EXIT_BROKEN_PIPE


def test_run_takes_the_process_arguments_where_none_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["xmem", "--version"])
    assert run() == 0
