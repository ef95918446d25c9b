"""Hostile and damaged pickles: nothing runs, nothing grows, and one sentence says what is wrong."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import struct
import zipfile
from pathlib import Path

import pytest

from tests.ingest.snapshots import basic, entry, issues, read, with_trace
from xmem.errors import RefusedError, UnreadableError
from xmem.ingest import cuda_snapshot
from xmem.ingest.safe_pickle import HostileDataError, Limits, salvage
from xmem.ingest.snapshot_process import read_messages


def stream(body: bytes, protocol: int = 4) -> bytes:
    return bytes([0x80, protocol]) + body + b"."


class Runs:
    """Pickles to a call."""

    def __init__(self, call: object, *arguments: object) -> None:
        self._reduced = call, arguments

    def __reduce__(self) -> object:
        return self._reduced


def nested(depth: int) -> tuple[object, ...]:
    tree: tuple[object, ...] = ()
    for _ in range(depth):
        tree = (tree, tree)
    return tree


LONG = "x" * 60_000

GLOBAL = "'x.pickle' was refused: it asks for the Python object {}, which plain data never need."
PERSISTENT = (
    "'x.pickle' was refused: it refers to an object outside of the file (a persistent id), which plain data never do."
)
BUFFER = "'x.pickle' was refused: it refers to a buffer outside of the file, which plain data never do."
CODE = "'x.pickle' was refused: it asks for a Python object by extension code, which plain data never need."
MEMORY = "'x.pickle' was refused: it asks for far more memory than its size can need."
RECORDS = "'x.pickle' was refused: it names the same records over and over, to more than the file has bytes."
TEXTS = "'x.pickle' was refused: it names the same long text over and over."
CRASH = "'x.pickle' was refused: it crashes the reader (SIGSEGV), as nested data made to exhaust the stack do."

REFUSED = {
    "text global": (b'cos\nsystem\n(S"true"\ntR.', GLOBAL.format("os.system")),
    "stack global": (stream(b"\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R"), GLOBAL.format("os.system")),
    "instance": (b'(S"true"\nios\nsystem\n.', GLOBAL.format("os.system")),
    "harmless class": (pickle.dumps({"segments": [], "at": Path("x")}), GLOBAL.format("pathlib.PosixPath")),
    "hidden deep inside": (
        pickle.dumps(with_trace(entry("alloc", 1, 1, 1, user_metadata=Runs(os.system, "true")))),
        GLOBAL.format("posix.system"),
    ),
    "persistent id": (b"Pabc\n.", PERSISTENT),
    "binary persistent id": (stream(b"K\x01Q", 2), PERSISTENT),
    "extension code": (stream(b"\x82\x01", 2), CODE),
    "out-of-band buffer": (stream(b"\x97", 5), BUFFER),
    "memo of 34 GB": (stream(b"}r" + struct.pack("<I", 0xFFFF_FFF0), 2), MEMORY),
    "bytes of 8 GiB": (stream(b"\x8e" + struct.pack("<Q", 1 << 33)), MEMORY),
    "bytes of 4 EiB": (stream(b"\x8e" + struct.pack("<Q", 1 << 62)), MEMORY),
    "bytearray of 1 TiB": (stream(b"\x96" + struct.pack("<Q", 1 << 40), 5), MEMORY),
    "frame of 16 GiB": (stream(b"\x95" + struct.pack("<Q", 1 << 34) + b"}"), MEMORY),
    "integer of 2 GiB": (stream(b"\x8b" + struct.pack("<i", 0x7FFF_FFFF)), MEMORY),
    "deep tuple as a key": (stream(b"})" + b"\x85" * 2_000_000 + b"K\x01s"), CRASH),
    "one trace, 100,000 times": (
        pickle.dumps({"segments": [], "device_traces": [[entry("alloc", 1, 1, 1)] * 10_000] * 100_000}),
        RECORDS,
    ),
    "one block list, 100,000 times": (
        pickle.dumps({"segments": [{"device": 0, "address": 1, "blocks": [{"size": 1}] * 10_000}] * 100_000}),
        RECORDS,
    ),
    "one long text in 3,000 places": (
        pickle.dumps(with_trace(*[entry("alloc", 1, 1, 1, user_metadata={i: LONG}) for i in range(3000)])),
        TEXTS,
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_hostile_pickles_are_refused_with_the_reason(case: str) -> None:
    data, message = REFUSED[case]
    with pytest.raises(RefusedError) as caught:
        read(data)
    assert caught.value.message == message
    assert caught.value.hint.startswith("A memory snapshot holds plain data only, and xmem ran nothing from this file.")
    assert caught.value.exit_code == 4


UNREADABLE = {
    "class that is a text": (
        stream(b"\x8c\x01a)\x81"),
        "it is damaged (NEWOBJ class argument must be a type, not str)",
    ),
    "state for a dict": (stream(b"}}b"), "it is damaged ('dict' object has no attribute '__dict__')"),
    "integer of negative size": (
        stream(b"\x8b" + struct.pack("<i", -5)),
        "it is damaged (LONG pickle has negative byte count)",
    ),
    "protocol of the future": (b"\x80\x09}.", "it is damaged (unsupported pickle protocol: 9)"),
    "two bytes": (b"\x80\x04", "its end is missing after 2 bytes, and no whole entry stands before it"),
    "other pickle": (
        pickle.dumps({"weights": [1], 7: 0.1}),
        "it is a pickle, but it holds no snapshot (its keys: weights, 7)",
    ),
    "empty dict": (pickle.dumps({}), "it is a pickle, but it holds no snapshot (its keys: none)"),
    "None": (pickle.dumps(None), "it is a pickle, but it holds a NoneType and no snapshot"),
    "empty list": (pickle.dumps([]), "it is a pickle, but it holds an empty list"),
    "list of numbers": (pickle.dumps([1, 2]), "it is a pickle, but it holds a list without any segment"),
    "list of other dicts": (pickle.dumps([{"a": 1}]), "it is a pickle, but its list holds no segments"),
    "entries that are none": (
        pickle.dumps(with_trace(1, "x")),
        "it is made like a memory snapshot, but none of its entries is one",
    ),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_what_is_no_snapshot_is_explained(case: str) -> None:
    data, reason = UNREADABLE[case]
    with pytest.raises(UnreadableError) as caught:
        read(data)
    assert caught.value.message == f"'x.pickle' cannot be read: {reason}."
    assert caught.value.hint
    assert caught.value.exit_code == 3


def test_endless_trees_and_cycles_are_cut_not_walked() -> None:
    cycle: list[object] = []
    cycle.append(cycle)
    tables, notes = read(
        with_trace(
            entry("alloc", 1, 5, 1, user_metadata={"a": nested(60)}, pool_id=nested(60), frames=nested(60)),
            entry("alloc", 2, 5, 2, user_metadata=cycle, pool_id=cycle, frames=cycle),
            allocator_settings={"PYTORCH_CUDA_ALLOC_CONF": "x", "a": nested(60), "c": cycle},
        )
    )
    assert tables["events"]["requested_bytes"].to_list() == [5, 5]
    assert tables["events"]["user_metadata"].str.len_bytes().max() <= 1 << 16
    assert notes.facts["alloc_conf"] == "x"
    assert issues(notes)["odd_value"] == 2  # the two pool ids


def test_an_exponential_tree_as_a_name_is_not_hashed() -> None:
    tables, notes = read(with_trace(entry("alloc", 1, 5, 1), entry(nested(60), 1, 5, 1)))  # type: ignore[arg-type]
    assert tables["events"].height == 1
    assert issues(notes)["odd_value"] == 1


def test_time_is_bounded_by_the_size_of_the_file() -> None:
    exponential_key = stream(b"})" + b"2\x86" * 60 + b"K\x01s")  # a pair of a pair of a pair of the same
    with pytest.raises(RefusedError) as caught:
        list(read_messages(io.BytesIO(exponential_key), "x.pickle", limits=Limits(cpu_s=1, cpu_s_per_mib=0)))
    assert caught.value.message == "'x.pickle' was refused: reading it takes far longer than its size can need."


def test_memory_is_bounded_by_the_size_of_the_file() -> None:
    lists = pickle.dumps([[] for _ in range(1_000_000)])
    tight = Limits(memory_bytes=8 << 20, memory_per_byte=4)
    with pytest.raises(RefusedError, match="asks for far more memory than its size can need"):
        list(read_messages(io.BytesIO(lists), "x.pickle", limits=tight))
    with pytest.raises(UnreadableError, match="holds a list without any segment"):
        list(read_messages(io.BytesIO(lists), "x.pickle"))


def test_a_killed_reading_process_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xmem.ingest.snapshot_process._BOOT", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(UnreadableError) as caught:
        read(basic())
    assert caught.value.message == (
        "'x.pickle' cannot be read: the reading process was killed, probably because the machine ran out of memory."
    )
    assert caught.value.hint == "Read it where more memory is free, or record with fewer entries (max_entries)."


def test_a_reading_process_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xmem.ingest.snapshot_process._BOOT", "raise ValueError('no luck')")
    with pytest.raises(UnreadableError) as caught:
        read(basic())
    assert caught.value.message == ("'x.pickle' cannot be read: the reading process ended early (ValueError: no luck).")


def test_an_error_of_the_source_comes_through() -> None:
    class Failing(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise RefusedError("a bomb")

    with pytest.raises(RefusedError, match="a bomb"):
        list(read_messages(Failing(), "x.pickle"))


def children() -> set[int]:
    """Return the processes that this one started and did not wait for yet."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if int(path.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.add(int(path.parent.name))
    return found


def test_a_reader_that_stops_early_leaves_no_process() -> None:
    before = children()
    messages = read_messages(io.BytesIO(pickle.dumps(basic())), "x.pickle")
    assert next(messages).kind == "facts"
    assert len(children() - before) == 1
    messages.close()  # type: ignore[attr-defined]
    assert children() == before


def test_salvage_resolves_nothing_either() -> None:
    for body in (b"cos\nsystem\n.", stream(b"\x82\x01", 2), b"Pabc\n."):
        with pytest.raises(HostileDataError):
            salvage(body)


def test_a_checkpoint_is_told_from_a_snapshot(tmp_path: Path) -> None:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n.")
    assert cuda_snapshot.sniff(made.getvalue()[:1000], "x.pt")
    with pytest.raises(UnreadableError) as caught:
        read(made.getvalue(), name="x.pt")
    assert caught.value.message == (
        "'x.pt' cannot be read: it is an archive that torch.save wrote, such as a checkpoint, and no memory snapshot."
    )
    assert caught.value.hint == "Write the snapshot with torch.cuda.memory._dump_snapshot(FILE), not with torch.save."


def test_a_snapshot_that_torch_save_wrote_is_read() -> None:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(basic(), 2))
    assert read(made.getvalue())[0]["events"].height == 5
