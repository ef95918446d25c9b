"""`xmem runs`, `xmem gpus`, `xmem schema`: what there is."""

from __future__ import annotations

import pytest

from tests.cli.conftest import Xmem, write_tiny_run
from xmem.query import view_tables
from xmem.schema import enums, tables
from xmem.store import Store


def test_no_runs_yet_is_no_error(xmem: Xmem) -> None:
    done = xmem("runs")
    assert (done.code, done.out, done.err) == (0, "", "no runs yet; make one: xmem ingest FILE\n")
    assert xmem("runs", "--json").out == "[]\n"


def test_runs_are_listed_oldest_first(xmem: Xmem) -> None:
    store = Store(".xmem")
    write_tiny_run(store, "bbb", "later", 2 * 10**18)
    write_tiny_run(store, "aaa", "earlier", 10**18)
    lines = xmem("runs").out.splitlines()
    assert lines[0].split() == ["run_id", "name", "adapter", "torch", "ranks", "events", "ingested"]
    assert [line.split()[:5] for line in lines[2:]] == [
        ["aaa", "earlier", "cuda_snapshot", "2.14.1", "1"],
        ["bbb", "later", "cuda_snapshot", "2.14.1", "1"],
    ]
    (first, _) = xmem("runs", "--json").json
    assert list(first) == [
        "run_id", "name", "ranks", "adapter", "torch_version", "ingested_ns", "event_count", "memory_event_count",
        "sources",
    ]  # fmt: skip


def test_gpus_are_found_by_a_part_of_their_name(xmem: Xmem) -> None:
    done = xmem("gpus", "4090")
    assert done.code == 0
    assert "rtx4090" in done.out and "24146083840" in done.out and "A100" not in done.out
    assert len(xmem("gpus").out.splitlines()) > 30
    for gpu in xmem("gpus", "--json").json:
        assert gpu["bytes"] == min(figure["bytes"] for figure in gpu["figures"]), gpu["name"]


def test_no_gpu_of_that_name(xmem: Xmem) -> None:
    done = xmem("gpus", "abacus")
    assert (done.code, done.out) == (0, "")
    assert done.err == "no GPU's name holds 'abacus'; --gpu also takes a size, such as 23.6GiB\n"
    assert xmem("gpus", "abacus", "--json").json == []


def test_every_gpu_can_be_asked_for(xmem: Xmem) -> None:
    from xmem.simulate.gpu_table import parse_gpu

    for gpu in xmem("gpus", "--json").json:
        for name in (gpu["name"], *gpu["aliases"]):
            assert parse_gpu(name).total_bytes == gpu["bytes"]


def test_the_schema_lists_tables_and_views(xmem: Xmem) -> None:
    listed = [line.split()[:2] for line in xmem("schema").out.splitlines()[2:]]
    assert listed == sorted([["table", name] for name in tables()] + [["view", name] for name in view_tables()])


@pytest.mark.parametrize("name", ["events", "allocations"])
def test_the_schema_of_one(xmem: Xmem, name: str) -> None:
    described = {**tables(), **view_tables()}[name]
    done = xmem("schema", name)
    assert done.out.startswith(f"{name}: {described.comment}\n\n")
    assert [line.split()[0] for line in done.out.splitlines()[4:]] == list(described.column_names)
    assert xmem("schema", name, "--json").json["columns"][0] == {
        "name": "run_id", "type": "VARCHAR", "nullable": described.columns[0].nullable, "comment": "Run, see runs.",
    }  # fmt: skip


def test_the_schema_of_a_type(xmem: Xmem) -> None:
    assert xmem("schema", "phase").out.split() == list(enums()["phase"])
    assert xmem("schema", "phase", "--json").json == list(enums()["phase"])


def test_nothing_of_that_name(xmem: Xmem) -> None:
    done = xmem("schema", "nosuch")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: There is no table, view or type 'nosuch'.\nhint: Known: action, allocations, ")
