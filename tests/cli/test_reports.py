"""`xmem report`, `diff`, `export` and `explain` as a person runs them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Xmem
from tests.query import tiny


@pytest.fixture
def store(tmp_path: Path) -> str:
    return str(tiny.write_training(tmp_path / "s").path)


def test_report_prints_what_it_is_about_and_units(xmem: Xmem, store: str) -> None:
    done = xmem("report", "--store", store)
    assert done.code == 0 and done.err == ""
    assert done.out.startswith("tiny (tiny), rank 0, cuda:0, NVIDIA T4\nThe answer in five seconds")
    assert "4.50 KiB  step 0, backward, 50 % of the device\n" in done.out
    assert done.out.endswith("Other devices (--rank, --device): rank 0 cpu\n")


def test_report_gives_exact_figures_as_json_csv_and_file(xmem: Xmem, store: str, tmp_path: Path) -> None:
    assert xmem("report", "steps", "--store", store, "--json").json[0]["peak_allocated_bytes"] == 4608
    assert xmem("report", "streams", "tiny", "--store", store, "--csv").out.splitlines()[1].startswith("0,4608,3584,")
    done = xmem("report", "peak", "--store", store, "-o", "peak.json")
    assert (done.code, done.out) == (0, "")
    assert json.loads((tmp_path / "peak.json").read_text())[0]["at_peak_bytes"] == 2048
    again = xmem("report", "peak", "--store", store, "-o", "peak.json")
    assert again.code == 4 and "exists already" in again.err


def test_one_row_is_told_line_by_line_and_nothing_is_said(xmem: Xmem, store: str) -> None:
    assert "  fragmentation             56.2 %\n" in xmem("report", "fragmentation", "--store", store).out
    assert "Nothing to report." in xmem("report", "oom", "--device", "cpu", "--store", store).out


def test_reports_are_listed_with_pictures(xmem: Xmem, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "own.sql").write_text("-- My own.\nSELECT 1")
    out = xmem("report", "--list", "--reports", "mine").out
    assert "  own            My own.\n" in out and "  first-step " in out and "  memory " in out


def test_pictures_are_written_once(xmem: Xmem, store: str, tmp_path: Path) -> None:
    assert xmem("report", "html", "--store", store, "-o", "page.html").code == 0
    assert (tmp_path / "page.html").read_text().startswith("<!DOCTYPE html>")
    assert xmem("report", "html", "--store", store, "-o", "page.html").code == 4
    assert xmem("report", "memory", "--store", store, "-o", "memory.svg").code == 0
    for arguments, message in (
        (("html",), "The page needs a file to be written to."),
        (("html", "-o", "page.pdf"), "The suffix of 'page.pdf' names no format that can be written."),
        (("colour", "-o", "c.png"), "There is no chart 'colour'."),
        (("colour",), "There is no report 'colour'."),
    ):
        done = xmem("report", *arguments, "--store", store)
        assert done.code == 2 and message in done.err


def test_diff_is_a_gate(xmem: Xmem, store: str) -> None:
    smaller = tiny.TRAINING.replace("2048", "1024")
    tiny.write(Path(store), smaller, run_id="b", name="after")
    done = xmem("diff", "after", "tiny", "--store", store, "--fail-above", "2%")
    assert done.code == 1 and done.err == "B is above A by more than 2%.\n"
    assert xmem("diff", "tiny", "after", "--store", store, "--fail-above", "2%").code == 0
    assert xmem("diff", "tiny", "after", "--store", store, "--json").json["peaks"][0]["change_bytes"] == -1024
    assert xmem("diff", "tiny", "--store", store).code == 2
    assert xmem("diff", "tiny", "after", "--store", store, "--fail-above", "much").code == 2


def test_explain_reads_arguments_files_and_standard_input(xmem: Xmem, tmp_path: Path) -> None:
    message = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 1.00 GiB"
    assert "larger than the device" in xmem("explain", message).out
    (tmp_path / "log").write_bytes(b"\xff\n" + message.encode())
    assert xmem("explain", "-f", "log", "--json").json[0]["tried_bytes"] == 2 << 30
    assert xmem("explain", "hello").code == 3
    assert xmem("explain", "-f", "none").code == 2 and xmem("explain").code == 2
