"""What other tools get: structure of their formats, and every byte of the peak."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest
from click.testing import CliRunner

from tests.query import tiny
from xmem.cli.export import command
from xmem.errors import RefusedError, UsageError
from xmem.query import exchange

NASTY = [{"stack_id": 0, "frames": [{"name": "a;b\nc", "filename": "m.py", "line": 1}]}]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tiny.write_training(tmp_path / "s").path


def test_perfetto_counters_follow_every_event(store: Path) -> None:
    trace = json.loads("".join(exchange.perfetto(store=store)))
    assert trace["traceEvents"][0]["ph"] == "M" and trace["displayTimeUnit"] == "ms"
    counters = trace["traceEvents"][1:]
    assert {event["ph"] for event in counters} == {"C"}
    allocated = [event["args"]["bytes"] for event in counters if event["name"] == "cuda:0 allocated"]
    assert len(allocated) == 21 and max(allocated) == 4608 and allocated[-1] == 1792
    activation = [event["args"]["bytes"] for event in counters if event["name"] == "cuda:0 activation"]
    assert activation == [512, 2560, 512, 0, 512, 0]
    reserved = [(event["ts"], event["args"]["bytes"]) for event in counters if event["name"] == "cuda:0 reserved"]
    assert reserved == [(0.0, 4096), (0.04, 8192)]


def test_collapsed_stacks_hold_the_whole_peak(store: Path) -> None:
    lines = list(exchange.collapsed(store=store))
    assert lines[0] == "activation;backward (/site-packages/torch/autograd.py:5) 2048\n"
    assert "temporary;aten::mm 1024\n" in lines and "parameter;(no stack recorded) 1024\n" in lines
    assert sum(int(line.rsplit(" ", 1)[1]) for line in lines) == 4608
    assert sum(int(line.rsplit(" ", 1)[1]) for line in exchange.collapsed(store=store, weight="end")) == 1792
    assert sum(int(line.rsplit(" ", 1)[1]) for line in exchange.collapsed(store=store, weight="total")) == 6912


def test_collapsed_names_keep_the_format_whole(tmp_path: Path) -> None:
    store = tiny.write(tmp_path / "s", "seq action id bytes stack\n0 alloc 0 7 0", stacks=NASTY).path
    assert list(exchange.collapsed(store=store)) == ["unknown;a:b c (m.py:1) 7\n"]


def test_speedscope_profiles_are_whole(store: Path) -> None:
    file = exchange.speedscope(store=store)
    frames = len(file["shared"]["frames"])
    assert [profile["endValue"] for profile in file["profiles"]] == [4608, 6912, 1792]
    for profile in file["profiles"]:
        assert profile["type"] == "sampled" and profile["unit"] == "bytes"
        assert len(profile["samples"]) == len(profile["weights"])
        assert sum(profile["weights"]) == profile["endValue"]
        assert all(0 <= frame < frames for sample in profile["samples"] for frame in sample)


def test_arrow_carries_comments_and_refuses_unknown_tables(store: Path) -> None:
    table = exchange.arrow("peaks", store=store)
    assert table.num_rows == 2 and table.schema.metadata[b"xmem_table"] == b"peaks"
    assert table.schema.field("rank").metadata == {b"comment": b"Rank, see runs."}
    with pytest.raises(UsageError, match="There is no table or view 'peaks; DROP TABLE runs'"):
        exchange.arrow("peaks; DROP TABLE runs", store=store)


def test_files_are_written_whole_and_not_twice(store: Path, tmp_path: Path) -> None:
    def run(*arguments: str) -> object:
        return CliRunner().invoke(command, [*arguments, "--store", str(store)], catch_exceptions=True).exception

    assert run("--perfetto", "-o", str(tmp_path / "c.json.gz")) is None
    assert json.loads(gzip.decompress((tmp_path / "c.json.gz").read_bytes()))["traceEvents"]
    assert run("--arrow", "--table", "steps", "-o", str(tmp_path / "s.arrow")) is None
    with pa.ipc.open_file(tmp_path / "s.arrow") as reader:
        assert reader.read_all().num_rows == 3
    assert run("--parquet", "-o", str(tmp_path / "a.parquet")) is None
    assert pl.read_parquet(tmp_path / "a.parquet").height == 9
    error = run("--parquet", "-o", str(tmp_path / "a.parquet"))
    assert isinstance(error, RefusedError)
    assert str(error) == f"The output file {str(tmp_path / 'a.parquet')!r} exists already.\n--force replaces it."
    assert isinstance(run("nobody", "--collapsed", "-o", str(tmp_path / "n.txt")), UsageError)
    assert not (tmp_path / "n.txt").exists()
