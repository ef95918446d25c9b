"""Which files make one run, which rank each is, and what is asked about instead of merged."""

from __future__ import annotations

import json

import pytest

from tests.ingest.traces import memory, trace
from xmem.errors import UnreadableError, UsageError
from xmem.ingest import IngestOptions, ingest
from xmem.ingest.ranks import group_paths, rank_from_name, readable_stem
from xmem.store import Store


def write_rank(folder, name, size, **fields):
    file = folder / name
    file.write_text(json.dumps(trace(memory(1, size), **fields)))
    return file


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("rank2_trace.json.gz", 2),
        ("rank-0.json.gz", 0),
        ("rank7.3.pt.trace.json", 7),
        ("Rank_11.json", 11),
        ("snapshot_3.pickle", 3),
        ("snapshot_oom_rank-5.pickle", 5),
        ("000012_step_40.pickle", 12),
        ("snapshot.pickle", None),
        ("worker0.1623143089861.pt.trace.json", None),
    ],
)
def test_rank_from_name(name, rank):
    assert rank_from_name(name) == rank


@pytest.mark.parametrize(
    ("file", "stem"),
    [
        ("a/rank0_trace.json.gz", "rank0_trace"),
        ("x.pt.trace.json", "x"),
        ("t.raw.json.gz", "t"),
        ("snapshot.pickle", "snapshot"),
        (".json", ".json"),
        ("-", "stdin"),
        ("log.xmem.jsonl.gz", "log"),
    ],
)
def test_readable_stem(file, stem):
    assert readable_stem(file) == stem


def test_folder_is_one_run_with_ranks(tmp_path):
    folder = tmp_path / "job"
    folder.mkdir()
    write_rank(folder, "a.json", 512, distributedInfo={"rank": 1})
    write_rank(folder, "b.json", 1024, distributedInfo={"rank": 0})
    write_rank(folder, "rank2.json", 2048)
    (folder / "README.md").write_text("not a trace")
    (folder / ".hidden.json").write_text("{")
    (run,) = ingest(folder, options=IngestOptions(store=tmp_path / "store"))
    assert (run.name, run.ranks) == ("job", (0, 1, 2))
    assert [(source.rank, source.source_file) for source in run.sources] == [
        (0, "b.json"),
        (1, "a.json"),
        (2, "rank2.json"),
    ]
    assert [device.peak_allocated_bytes for device in run.devices] == [1024, 512, 2048]
    assert [(issue.rank, issue.code) for issue in run.issues if "rank" in issue.code] == [(2, "rank_from_name")]
    files = sorted(str(file.relative_to(tmp_path / "store")) for file in (tmp_path / "store/events").rglob("*.parquet"))
    assert files == [f"events/run_id={run.run_id}/rank={rank}/part-00000.parquet" for rank in range(3)]


def test_pattern_is_one_run(tmp_path):
    for rank in range(2):
        write_rank(tmp_path, f"rank{rank}.json", 512 + 512 * rank)
    (run,) = ingest(str(tmp_path / "rank*.json"), options=IngestOptions(store=tmp_path / "store"))
    assert run.ranks == (0, 1)
    assert run.name == tmp_path.name


def test_files_are_runs_of_their_own_unless_asked_otherwise(tmp_path):
    files = [write_rank(tmp_path, f"rank{rank}.json", 512 + 512 * rank) for rank in range(2)]
    runs = ingest(files, options=IngestOptions(store=tmp_path / "store"))
    assert [(run.name, run.ranks) for run in runs] == [("rank0", (0,)), ("rank1", (1,))]
    (run,) = ingest(files, options=IngestOptions(store=tmp_path / "store", as_ranks=True))
    assert run.ranks == (0, 1)
    assert len(Store(tmp_path / "store").runs()) == 3


def test_two_files_with_one_rank_are_asked_about(tmp_path):
    files = [write_rank(tmp_path, name, 512, distributedInfo={"rank": 3}) for name in ("a.json", "b.json")]
    with pytest.raises(UsageError) as caught:
        ingest(files, options=IngestOptions(store=tmp_path / "store", as_ranks=True))
    assert caught.value.message == "'a.json' and 'b.json' are both rank 3; they are not merged."
    assert caught.value.hint == ("Ingest one of them on its own with --rank N, or keep one of the two in the folder.")
    assert Store(tmp_path / "store").runs() == []


def test_rank_is_overridden(tmp_path):
    file = write_rank(tmp_path, "rank1.json", 512, distributedInfo={"rank": 3})
    options = IngestOptions(store=tmp_path / "store", rank=9)
    (run,) = ingest(file, options=options)
    assert run.ranks == (9,)
    assert not any("rank" in issue.code for issue in run.issues)
    (again,) = ingest(file, options=options)
    assert again.already_there
    assert again.run_id == run.run_id


def test_no_rank_is_said(tmp_path):
    (run,) = ingest(write_rank(tmp_path, "x.json", 512), options=IngestOptions(store=tmp_path / "store"))
    assert run.ranks == (0,)
    assert [issue.severity for issue in run.issues if issue.code == "no_rank"] == ["note"]


def test_a_rank_that_cannot_be_read_is_told_of(tmp_path):
    folder = tmp_path / "job"
    folder.mkdir()
    write_rank(folder, "rank0.json", 512)
    (folder / "rank1.json").write_text("")
    (run,) = ingest(folder, options=IngestOptions(store=tmp_path / "store"))
    assert run.ranks == (0,)
    assert any("rank1.json is no trace that can be read" in warning for warning in run.warnings)


def test_wrong_use_is_said(tmp_path):
    def said(*paths, **options):
        with pytest.raises((UsageError, UnreadableError)) as caught:
            group_paths(list(paths), IngestOptions(**options))
        return caught.value.message, caught.value.hint, caught.value.exit_code

    assert said() == ("No file is given.", "Name a trace or a snapshot: xmem ingest FILE", 2)
    pattern = str(tmp_path / "rank*.json")
    assert said(pattern) == (f"No file fits the pattern {pattern!r}.", "Check the folder and the pattern.", 2)
    assert said(tmp_path) == (
        f"The folder {str(tmp_path)!r} holds no trace or snapshot.",
        "Name a folder with one file for each rank, or a file.",
        3,
    )
    write_rank(tmp_path, "rank0.json", 512)
    write_rank(tmp_path, "rank1.json", 512)
    assert said(pattern, rank=1) == (
        f"--rank 1 is for one file, and {tmp_path.name!r} holds 2.",
        "Leave --rank out, or ingest the files one by one.",
        2,
    )
    assert said("a.json", "b.json", name="x") == (
        "--name is for one run, and 2 are given.",
        "Ingest them one by one.",
        2,
    )
