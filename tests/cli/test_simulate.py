"""`xmem simulate`: the answer first, every figure a line, exit codes that a script can trust."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import xmem as api
from tests.cli.conftest import MIB, Xmem
from xmem.store import Store

#: JSON keys that scripts rely on: keys are only ever added.
PROMISED = [
    "fits",
    "total_bytes",
    "non_torch_bytes",
    "usable_bytes",
    "headroom_bytes",
    "peak_requested_bytes",
    "peak_allocated_bytes",
    "peak_active_bytes",
    "peak_reserved_bytes",
    "first_step_peak_bytes",
    "steady_peak_bytes",
    "smallest_device_bytes",
    "num_ooms",
    "num_alloc_retries",
    "oom",
    "allocator",
    "alloc_conf",
    "torch_version",
    "torch_version_assumed",
    "issues",
]


def test_a_verdict_is_read_from_the_top(xmem: Xmem, tiny_store: Store) -> None:
    done = xmem("simulate", "--gpu", "24")
    assert done.code == 0
    assert done.err == ""
    assert done.out == (
        "FITS on 24.00 GiB, with 23.58 GiB to spare (99.9% of usable memory).\n"
        "\n"
        "  run           tiny (abc123), rank 0, cuda:0, 4 requests\n"
        "  allocated     12.00 MiB (12,582,912)  peak\n"
        "  active        12.00 MiB (12,582,912)  peak\n"
        "  reserved      20.00 MiB (20,971,520)  peak\n"
        "  non-torch     409.60 MiB (429,496,729)  CUDA context and what else no allocator sees (--non-torch)\n"
        "  headroom      0 bytes  kept free (--headroom)\n"
        "  usable        23.60 GiB (25,340,307,047)  of 24.00 GiB in all\n"
        "  smallest GPU  429.60 MiB (450,468,249)  the least in all on which it runs\n"
        "  first step    12.00 MiB (12,582,912)  peak allocated\n"
        "  later steps   10.00 MiB (10,485,760)  peak allocated\n"
        "  allocator     native, torch 2.14.1\n"
        "\n"
        "memory at the peak: 12.00 MiB\n"
        "      size  share  blocks  category    operator\n"
        "  --------  -----  ------  ----------  ------------\n"
        "  8.00 MiB  66.7%       1  activation  aten::conv2d\n"
        "  4.00 MiB  33.3%       1  parameter   aten::empty\n"
        "\n"
        "note: 24 is read as 24 GiB (25769803776 bytes) of total memory.\n"
    )


def test_json_holds_the_promised_keys_in_bytes(xmem: Xmem, tiny_store: Store) -> None:
    done = xmem("simulate", "--gpu", "24", "--json")
    assert done.code == 0
    assert [key for key in PROMISED if key not in done.json] == []
    assert list(done.json)[: len(PROMISED)] == PROMISED
    assert (done.json["fits"], done.json["peak_reserved_bytes"], done.json["oom"]) == (True, 20 * MIB, None)
    assert done.json["usable_bytes"] == (24 << 30) - done.json["non_torch_bytes"]


def test_a_run_that_does_not_fit_ends_with_1_and_says_what_failed(xmem: Xmem, tiny_store: Store) -> None:
    done = xmem("simulate", "--gpu", "10MiB", "--non-torch", "0")
    assert done.code == 1
    first, _, rest = done.out.partition("\n")
    assert first == (
        "DOES NOT FIT on 10MiB (10.00 MiB): allocating 4.00 MiB in aten::empty (step 0, forward) fails."
        " The smallest GPU on which it runs has 20.00 MiB."
    )
    for line in (
        "  reserved      20.00 MiB (20,971,520)  peak  if memory had no limit",
        "what failed, at event 1",
        "  request         4.00 MiB (4,194,304), rounded to 4.00 MiB (4,194,304)",
        "  operator        aten::empty",
        "  step            step 0, forward",
        "  for             parameter",
        "  free on GPU     10.00 MiB (10,485,760)",
    ):
        assert line in rest.splitlines()


def test_a_failure_in_json_names_operator_step_and_holders(xmem: Xmem, tiny_store: Store) -> None:
    sql = "SELECT * REPLACE (bytes * 3 AS bytes) FROM requests"
    done = xmem("simulate", "--gpu", "30MiB", "--non-torch", "0", "--requests", sql, "--json")
    assert (done.code, done.json["fits"]) == (1, False)
    oom = done.json["oom"]
    assert (oom["op"], oom["step"], oom["phase"], oom["category"]) == ("aten::conv2d", 0, "forward", "activation")
    assert (oom["requested_bytes"], oom["allocated_bytes"]) == (24 * MIB, 12 * MIB)
    assert [(held["category"], held["bytes"]) for held in oom["held_by"]] == [("parameter", 12 * MIB)]


@pytest.mark.parametrize(
    ("gpu", "total"),
    [
        ("24", 24 << 30),
        ("0.5", 1 << 29),
        ("25769803776", 25769803776),
        ("1000000", 1_000_000),
        ("23.6GiB", 25340307046),
        ("24GB", 24 * 10**9),
        ("rtx4090", 24146083840),
        ("RTX 4090", 24146083840),
    ],
)
def test_what_gpu_means(xmem: Xmem, tiny_store: Store, gpu: str, total: int) -> None:
    assert xmem("simulate", "--gpu", gpu, "--json").json["total_bytes"] == total


def test_without_gpu_it_is_the_recorded_one(xmem: Xmem, tiny_store: Store) -> None:
    done = xmem("simulate")
    assert done.code == 0
    assert done.out.startswith("FITS on Tiny GPU (1.00 GiB), with 594.40 MiB to spare")


@pytest.mark.parametrize(("arguments", "close"), [(["--gpu", "500MiB"], True), (["--gpu", "1"], False)])
def test_a_close_call_is_called_one(xmem: Xmem, tiny_store: Store, arguments: list[str], close: bool) -> None:
    done = xmem("simulate", *arguments)
    assert done.code == 0
    assert ("note: This is a close call: CUDA contexts alone vary between 0.25 and 0.5 GiB." in done.out) is close


def test_headroom_is_taken_off(xmem: Xmem, tiny_store: Store) -> None:
    answer = xmem("simulate", "--gpu", "1", "--non-torch", "0", "--headroom", "25%", "--json").json
    assert (answer["headroom_bytes"], answer["usable_bytes"]) == (1 << 28, 3 << 28)
    answer = xmem("simulate", "--gpu", "1", "--non-torch", "1MiB", "--headroom", "1MiB", "--json").json
    assert answer["usable_bytes"] == (1 << 30) - 2 * MIB


def test_a_sweep_is_best_first(xmem: Xmem, tiny_store: Store) -> None:
    done = xmem("simulate", "--gpu", "1", "--sweep")
    assert done.code == 0
    header, _, best = done.out.splitlines()[:3]
    assert header.split() == ["fits", "peak", "reserved", "unused", "retries", "allocator", "settings"]
    assert best.split()[0] == "yes"
    peaks = [row["peak_reserved_bytes"] for row in xmem("simulate", "--gpu", "1", "--sweep", "--json").json]
    assert peaks == sorted(peaks) and len(peaks) > 5


def test_a_sweep_in_which_nothing_fits_ends_with_1(xmem: Xmem, tiny_store: Store) -> None:
    assert xmem("simulate", "--gpu", "4MiB", "--non-torch", "0", "--sweep").code == 1


def test_a_recommendation_is_ready_to_paste(xmem: Xmem, tiny_store: Store) -> None:
    done = xmem("simulate", "--gpu", "1", "--recommend")
    assert done.code == 0
    assert done.out.splitlines()[:2] == [
        "export PYTORCH_ALLOC_CONF=large_segment_size_mb:12",
        "Peak reserved 12.00 MiB instead of 20.00 MiB (8.00 MiB less).",
    ]


def test_a_replay_is_compared_with_the_recording(xmem: Xmem, tiny_store: Store) -> None:
    done = xmem("simulate", "--compare")
    assert (done.code, done.out) == (0, "All 1 recorded segment events are reproduced.\n")
    other = xmem("simulate", "--compare", "--alloc-conf", "expandable_segments:True")
    assert other.code == 1
    assert other.out != done.out


def test_a_file_of_operations_is_replayed(xmem: Xmem) -> None:
    ops = [["alloc", "a", 10 * MIB], ["free", "a"]]
    Path("ops.json").write_text(json.dumps({"capacity": 64 * MIB, "ops": ops}))
    done = xmem("simulate", "--ops", "ops.json", "--json")
    assert done.code == 0, done.err
    assert (done.json["total_bytes"], done.json["peak_allocated_bytes"]) == (64 * MIB, 10 * MIB)
    assert xmem("simulate", "--ops", "ops.json", "--sweep").code == 0
    assert xmem("simulate", "--ops", "ops.json", "--recommend").code == 0


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["--gpu", "rtx9999"], "There is no GPU 'rtx9999' in the table.", "xmem gpus lists all"),
        (["--gpu", "24", "--headroom", "x"], "--headroom 'x' is not a number of bytes.", "Write it like 23.6GiB"),
        (["--gpu", "24", "--allocator", "x"], "There is no allocator 'x'.", "Choose one of: native,"),
        (["--gpu", "24", "--alloc-conf", "x:1"], "torch 2.14 does not know the key 'x'.", "Keys of"),
        (["--gpu", "24", "--torch", "x"], "'x' is not a torch version.", "Write it like 2.6"),
        (["--gpu", "24", "--device", "cuda:7"], "has no memory requests on 'cuda:7'.", "It has: rank 0 cuda:0."),
        (["--gpu", "24", "--rank", "7"], "has no memory requests on rank 7.", "It has: rank 0 cuda:0."),
        (["--gpu", "24", "nosuch"], "There is no run 'nosuch' in the store '.xmem'.", "Runs there: abc123 (tiny)"),
        (["--gpu", "24", "--requests", "SELECT 1"], "The result of --requests lacks the column seq", "It needs seq"),
        (["--gpu", "24", "--requests", "SELEC"], "The SQL cannot be run: Parser Error", "xmem schema lists"),
        (["--ops", "nosuch.json"], "There is no file 'nosuch.json'.", ""),
    ],
)  # fmt: skip
def test_wrong_use_says_what_to_do(
    xmem: Xmem, tiny_store: Store, arguments: list[str], message: str, hint: str
) -> None:
    done = xmem("simulate", *arguments)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: ") and message in done.err
    assert hint in done.err


def test_fenced_requests_are_refused(xmem: Xmem, tiny_store: Store) -> None:
    done = xmem("simulate", "--gpu", "24", "--requests", "DELETE FROM requests")
    assert done.code == 4
    assert done.err.startswith("error: The SQL is a DELETE statement, not a SELECT.\n")


def test_no_run_yet(xmem: Xmem, tmp_path: Path) -> None:
    done = xmem("simulate", "--gpu", "24")
    assert done.code == 2
    assert done.err == "error: There is no run yet in the store '.xmem'.\nhint: Make one: xmem ingest FILE\n"
    assert list(tmp_path.iterdir()) == []


def test_the_python_twin_gives_the_same(xmem: Xmem, tiny_store: Store) -> None:
    verdict = api.simulate("tiny", gpu=24)
    assert verdict.to_dict() == api.simulate(gpu="24").to_dict()
    assert verdict.peak_reserved_bytes == 20 * MIB
    assert json.loads(json.dumps(verdict.to_dict())) == xmem("simulate", "--gpu", "24", "--json").json


def test_a_read_only_store_still_answers(xmem: Xmem, tiny_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("xmem.store.Store._create", refuse)
    done = xmem("simulate", "--gpu", "24")
    assert done.code == 0
    assert "note: The replay was not kept: " in done.out


def test_a_hostile_name_cannot_fake_an_answer(xmem: Xmem, tmp_path: Path) -> None:
    from tests.cli.conftest import write_tiny_run

    write_tiny_run(Store(".xmem"), name="x\x1b[2J\nFITS on everything")
    done = xmem("simulate", "--gpu", "10MiB", "--non-torch", "0")
    assert "\x1b" not in done.out
    assert [line for line in done.out.splitlines() if line.startswith("FITS")] == []
