"""The tolerant reader: what is broken costs at most its own record, and every repair is told."""

from __future__ import annotations

import io
import json
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.ingest.traces import MIB, memory, read, span, trace
from xmem.errors import UnreadableError
from xmem.ingest import json_stream
from xmem.ingest.adapter import Notes
from xmem.ingest.json_fields import salvage_fields
from xmem.ingest.json_repair import DEPTH_LIMIT, find_end, repair_json
from xmem.ingest.json_shapes import ROWS
from xmem.ingest.json_stream import RecordStream
from xmem.ingest.trace_records import decode_exact, rescue_event

CHUNKS = (1 << 20, 700, 64)


@pytest.fixture(params=CHUNKS, autouse=True)
def chunk_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Every test runs with the real chunk and with chunks that are smaller than a record."""
    monkeypatch.setattr(json_stream, "CHUNK_BYTES", request.param)
    return int(request.param)


def write(*records: str, head: str = '{"profile_memory":1,"traceEvents":[', tail: str = "]}") -> bytes:
    return (head + ",".join(records) + tail).encode()


A, B, C = (json.dumps(memory(at, at * MIB)) for at in (1, 2, 3))
BROKEN = {
    "lone backslashes": (r'{"ph":"X","name":"torch\cuda\__init__.py(2): f","pid":1,"ts":1}', "repaired_string", 1),
    "two strings": (r'{"ph":"X","cat":"a\c","name":"a\d","pid":1,"tid":1,"ts":1,"dur":1}', "repaired_string", 2),
    "bare quotes": ('{"ph":"X","name":"<eval "a", line 2>","pid":1,"tid":1,"ts":1,"dur":1}', "repaired_string", 1),
    "one bare quote": ('{"ph":"X","name":"5" disk","pid":1,"tid":1,"ts":1,"dur":1}', "repaired_string", 1),
    "quote at the end": ('{"ph":"X","name":"say "hi"","pid":1,"tid":1,"ts":1,"dur":1}', "repaired_string", 1),
    "path with a last backslash": (r'{"ph":"X","name":"C:\dir\","pid":1,"tid":1,"ts":1,"dur":1}', "repaired_string", 1),
    "control characters": ('{"ph":"X","name":"a\x01\n\tb","pid":1,"tid":1,"ts":1,"dur":1}', "repaired_string", 1),
    "half a surrogate": (r'{"ph":"X","name":"\ud800","pid":1,"tid":1,"ts":1,"dur":1}', "repaired_string", 1),
    "inf and nan": ('{"ph":"X","ts":1,"args":{"x":inf,"y":-nan,"z":[NaN,-Infinity]}}', "non_finite_number", 4),
    "nan of Microsoft": ('{"ph":"X","name":"c","ts":1,"args":{"x":-1.#IND,"y":1.#QNAN}}', "non_finite_number", 2),
    "trailing comma": ('{"ph":"X","name":"c","ts":1,"dur":1,}', "repaired_syntax", 1),
    "missing value": ('{"ph":"X","name":"c","cat":,"ts":1,"dur":1}', "repaired_syntax", 1),
    "missing comma": ('{"ph":"X","name":"c" "ts":1,"dur":1}', "repaired_syntax", 1),
    "words of Python": ('{"ph":"X","name":"c","ts":1,"dur":1,"args":{"a":None,"b":True}}', "repaired_syntax", 2),
    "deep nesting": ('{"ph":"X","ts":1,"args":{"a":' + "[" * 5000 + "]" * 5000 + "}}", "repaired_syntax", 1),
    "text for numbers": ('{"ph":"X","name":"c","ts":"1","dur":1}', "odd_number", 1),
}  # fmt: skip


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_a_broken_record_is_repaired_wherever_it_stands(kind: str, place: int) -> None:
    text, code, count = BROKEN[kind]
    records = [A, B, C]
    records.insert(place, text)
    found = read(write(*records))
    assert found.sizes() == [MIB, 2 * MIB, 3 * MIB]
    assert found.spans.height == 1
    assert found.counts() == {code: count}
    issue = found.notes.issues[code]
    assert (issue.first_at, issue.first_unit) == (write(*records).index(text.encode()), "byte")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (BROKEN["lone backslashes"][0], r"torch\cuda\__init__.py(2): f"),
        (BROKEN["bare quotes"][0], '<eval "a", line 2>'),
        (BROKEN["quote at the end"][0], 'say "hi"'),
        (BROKEN["path with a last backslash"][0], "C:\\dir\\"),
        (BROKEN["control characters"][0], "a\x01\n\tb"),
        (BROKEN["half a surrogate"][0], "\ufffd"),
        (r'{"ph":"X","name":"C:\new\_x","ts":1,"dur":1}', r"C:\new\_x"),
    ],
)
def test_repaired_names_stay_as_they_stand(text: str, name: str) -> None:
    assert read(write(A, text)).spans["name"].to_list() == [name]


def test_bytes_that_are_not_utf8_are_replaced() -> None:
    found = read(write(A, B).replace(b'"pid": 7', b'"x":1,"pid": 7') + b"").sizes()
    assert found == [MIB, 2 * MIB]
    broken = json.dumps(span("NAME")).encode().replace(b"NAME", b"caf\xe9 \xff")
    found_broken = read(write(A).replace(b"]}", b"," + broken + b"]}"))
    assert found_broken.spans["name"].to_list() == ["caf\ufffd \ufffd"]
    assert found_broken.counts() == {"invalid_utf8": 1}


@pytest.mark.parametrize("foreign", ["null", "17", '"text"', "[1, [2]]", "{", '{"ph":"X","name":"a', "}", "@"])
@pytest.mark.parametrize("place", [0, 1, 3])
def test_what_is_no_record_costs_only_itself(foreign: str, place: int) -> None:
    records = [A, B, C]
    records.insert(place, foreign)
    found = read(write(*records))
    lost = 1 if foreign in ("{", '{"ph":"X","name":"a') and place < 3 else 0  # it swallows its neighbour at most
    assert len(found.sizes()) >= 3 - lost
    assert set(found.counts()) <= {"bad_record", "truncated", "repaired_syntax", "repaired_string", "missing_field"}
    assert found.counts()


def test_records_need_no_commas_between_them() -> None:
    assert read(write(A + B, C)).sizes() == [MIB, 2 * MIB, 3 * MIB]


@pytest.mark.parametrize("gap", [",", " ,\n ", ",\r\n\t", ",,", "\0,\0"])
def test_any_gap_between_records(gap: str) -> None:
    assert read(('{"traceEvents":[' + gap.join([A, B, C]) + "]}").encode()).sizes() == [MIB, 2 * MIB, 3 * MIB]


def test_a_trailing_comma_is_told() -> None:
    found = read(write(A, B, tail=",]}"))
    assert (found.sizes(), found.counts()) == ([MIB, 2 * MIB], {"repaired_syntax": 1})


def test_strings_that_look_like_records_do_not_part_one() -> None:
    name = '},{"ph":"X","name":"[memory]"},{"ph":'
    found = read(write(A, json.dumps(span(name)), B))
    assert (found.sizes(), found.spans["name"].to_list(), found.counts()) == ([MIB, 2 * MIB], [name], {})


def test_nested_lists_of_records_do_not_part_one() -> None:
    inner = span("outer", args={"list": [memory(9, 9), memory(9, 8)], "deep": {"traceEvents": [memory(9, 7)]}})
    found = read(write(A, json.dumps(inner), B))
    assert (found.sizes(), found.spans["name"].to_list(), found.counts()) == ([MIB, 2 * MIB], ["outer"], {})


def test_a_broken_record_with_nested_records_is_repaired_too() -> None:
    inner = json.dumps(span("outer", args={"x": "NAN", "list": [span("n"), span("m")]})).replace('"NAN"', "nan")
    found = read(write(A, inner, B))
    assert (found.sizes(), found.spans["name"].to_list()) == ([MIB, 2 * MIB], ["outer"])
    assert found.counts() == {"non_finite_number": 1}


# ---------------------------------------------------------------------- what stands around the records


@pytest.mark.parametrize("start", ["\ufeff", "\ufeff\n\n", "\n\n \t", "\0\0", " " * 2000])
def test_marks_and_blanks_before_the_file(start: str) -> None:
    found = read(start.encode() + write(A))
    assert found.sizes() == [MIB]
    assert found.counts() == ({"byte_order_mark": 1} if start.startswith("\ufeff") else {})


def test_a_bare_list_need_not_be_closed() -> None:
    for tail in ("]", "", ",", ",\n"):
        found = read(write(A, B, head="[", tail=tail))
        assert (found.sizes(), found.counts()) == ([MIB, 2 * MIB], {})
    assert read(write(A, B, head="[", tail=",]")).counts() == {"repaired_syntax": 1}
    assert read(write(A, B, head="[", tail=',{"ph":"i')).counts() == {"truncated": 1}


@pytest.mark.parametrize("position", ["first", "middle", "last"])
def test_keys_stand_in_any_order(position: str) -> None:
    fields: dict[str, Any] = {"distributedInfo": {"rank": 3}, "baseTimeNanoseconds": 10**18, "x": [{"name": "y"}]}
    events = {"traceEvents": [memory(1, MIB), memory(2, -MIB)]}
    order = {"first": events | fields, "last": fields | events, "middle": {"a": 1} | events | fields}[position]
    found = read(json.dumps(order))
    assert (found.sizes(), found.notes.rank, found.counts()) == ([MIB, -MIB], 3, {})
    offset = found.notes.facts.get("ts_offset_ns", 0)
    assert isinstance(offset, int)
    assert (found.events["ts_ns"] + offset).to_list() == [10**18 + 1000, 10**18 + 2000]


def test_a_list_of_that_name_elsewhere_is_not_taken() -> None:
    decoy = {"metadata": {"traceEvents": [memory(9, 9)]}, "note": '"traceEvents": [', **trace(memory(1, MIB))}
    assert read(json.dumps(decoy)).sizes() == [MIB]


BROKEN_HEADERS = [
    '"note": this is raw text,',
    '"note": "say "hi" {[ to all",',
    '"note": "a\\path",',
    '"note": "line one\nline two",',
    '"note": {"a": [1, 2,',
    '"note": "never ends,',
    '"note": "x"y"z"",',
    "raw text without a key,",
]


@pytest.mark.parametrize("raw", BROKEN_HEADERS)
def test_a_broken_header_does_not_hide_the_records(raw: str) -> None:
    head = (
        '{"distributedInfo":{"rank":2},'
        + raw
        + '"baseTimeNanoseconds":1000000000000000000,"profile_memory":1,"traceEvents":['
    )
    found = read(write(A, B, head=head))
    assert found.sizes() == [MIB, 2 * MIB]
    assert found.counts() == {"broken_header": 1}
    assert found.notes.rank == 2
    assert found.events["ts_ns"][0] + found.notes.facts.get("ts_offset_ns", 0) == 10**18 + 1000


@pytest.mark.parametrize("raw", BROKEN_HEADERS)
def test_a_broken_tail_costs_no_record(raw: str) -> None:
    tail = "]," + raw + '"distributedInfo":{"rank":2}}'
    found = read(write(A, B, tail=tail))
    assert found.sizes() == [MIB, 2 * MIB]
    assert found.notes.rank == 2
    assert {"broken_header", "truncated"} & set(found.counts())


def test_what_stands_behind_the_file_is_told() -> None:
    found = read(write(A) + b'{"more": 1}')
    assert (found.sizes(), found.counts()) == ([MIB], {"unreadable_part": 1})


def test_a_header_past_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_stream, "RECORD_LIMIT", 3000)
    head = json.dumps({"distributedInfo": {"rank": 4}, "stackFrames": ["x" * 50] * 200})[:-1] + ',"traceEvents":['
    found = read(write(A, B, head=head))
    assert (found.sizes(), found.notes.rank) == ([MIB, 2 * MIB], 4)
    assert found.counts() == ({} if len(head) < json_stream.CHUNK_BYTES else {"broken_header": 1})


def test_a_record_past_the_limit_costs_only_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_stream, "RECORD_LIMIT", 3000)
    found = read(write(A, json.dumps(span("x" * 20_000)), B, C))
    assert found.sizes() == [MIB, 2 * MIB, 3 * MIB]
    if found.counts():  # with chunks larger than the limit the record is simply read
        assert found.counts() == {"bad_record": 1}


def test_a_file_without_records_says_so() -> None:
    for text in (b"{}", b'{"traceEvents": null}', b'{"traceEvents"', b'{"a": 1'):
        with pytest.raises(UnreadableError, match=r"t\.json is no torch\.profiler trace"):
            read(text)


# ---------------------------------------------------------------------- cuts

FORMS = {
    "compact": lambda value: json.dumps(value, separators=(",", ":")),
    "indented": lambda value: json.dumps(value, indent=1),
    "plain": json.dumps,
}
HOSTILE = [
    memory(1, MIB),
    span('a "quoted" \\ {[}] name', args={"list": [{"name": "}],"}, {"name": '"'}], "x": [[], {}]}),
    memory(2, 2 * MIB),
    {"name": "process_name", "ph": "M", "ts": 1, "pid": 1, "args": {"name": "python"}},
    memory(3, -MIB),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bare", [False, True])
def test_cut_at_any_byte_keeps_every_whole_record(form: str, bare: bool) -> None:
    whole = FORMS[form](HOSTILE if bare else trace(*HOSTILE) | {"traceName": "x"})
    ends = record_ends(whole)
    for cut in range(len(whole)):
        kept = [record["name"] for record, end in zip(HOSTILE, ends, strict=True) if end <= cut]
        names, issues, found = stream_names(whole[:cut].encode())
        assert names == kept
        if found and not (bare and issues == {}):
            assert issues == {"truncated": 1}


def stream_names(text: bytes) -> tuple[list[str | None], dict[str, int], bool]:
    """Read records without making columns of them."""
    notes = Notes()
    stream: RecordStream[Any] = RecordStream(
        io.BytesIO(text), notes, decode_exact, decode_exact, lambda value, at: rescue_event(value, at, notes)
    )
    found = stream.start()
    names = [record.name for records, _ in stream for record in records]
    return names, {code: issue.count for code, issue in notes.issues.items()}, found


def record_ends(text: str) -> list[int]:
    """Where each record of HOSTILE ends, told by decoding."""
    decoder = json.JSONDecoder()
    at = text.index("[", 0 if text.startswith("[") else text.index('"traceEvents"')) + 1
    ends = []
    for _ in HOSTILE:
        at = text.index("{", at)
        at = decoder.raw_decode(text, at)[1]
        ends.append(at)
    return ends


# ---------------------------------------------------------------------- properties

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**25), 10**25) | st.floats(-1e300, 1e300) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
records = st.fixed_dictionaries({"ph": st.sampled_from(["X", "i", "M", "s"]), "name": st.text(max_size=20)}) | (
    st.dictionaries(st.sampled_from(["ph", "name", "cat", "pid", "tid", "ts", "dur", "args", "zz"]), values)
)


@pytest.mark.parametrize("chunk", range(60, 70))
def test_brackets_in_a_text_that_a_chunk_cuts_are_no_end(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xmem.ingest.json_stream.CHUNK_BYTES", chunk)
    odd = {"ph": "X", "name": "\x1f\r\U00010000\U00010000]}", "ts": 1, "dur": 1}
    found = read(json.dumps(trace(odd, memory(5, MIB), memory(6, -MIB)), indent=1))
    assert [size for size in found.sizes() if size in (MIB, -MIB)] == [MIB, -MIB]
    assert not found.counts()


@settings(deadline=None, max_examples=60)
@given(st.lists(records, max_size=8), st.integers(0, 8), st.sampled_from([None, 1, "\t"]))
def test_any_valid_json_is_read_without_loss(others: list[Any], place: int, indent: Any) -> None:
    content = [*others[:place], memory(5, MIB), *others[place:], memory(6, -MIB)]
    found = read(json.dumps(trace(*content), indent=indent))
    assert [size for size in found.sizes() if size in (MIB, -MIB)] == [MIB, -MIB]
    assert not {"bad_record", "truncated", "repaired_string", "repaired_syntax"} & set(found.counts())


@settings(deadline=None, max_examples=150)
@given(st.binary(max_size=60), st.integers(0, 1), st.integers(0, 40))
def test_junk_inside_costs_at_most_its_neighbour(junk: bytes, place: int, shift: int) -> None:
    assume(b"]" not in junk)  # that may end the list
    records = [json.dumps(memory(at, at)).encode() for at in range(1, 8)]
    position = 2 if place == 0 else 3
    records[position] = records[position][:shift] + junk + records[position][shift:]
    found = read(b'{"traceEvents":[' + b",".join(records) + b"]}")
    expected = {1, 2, 3, 4, 5, 6, 7} - {position + 1, position + 2}
    assert expected <= set(found.sizes())


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=200))
def test_no_bytes_do_harm(text: bytes) -> None:
    for start in (b"", b"[", b'{"traceEvents":[', b'{"ph":"i",'):
        try:
            read(start + text)
        except UnreadableError:
            continue


# ---------------------------------------------------------------------- parts


def test_the_repairer_never_adds_an_end() -> None:
    whole = rb'{"a":"x\c","b":[1,{"c":"d"}]}'
    assert repair_json(whole) == ({"a": "x\\c", "b": [1, {"c": "d"}]}, {"repaired_string": 1})
    for cut in range(len(whole)):
        assert repair_json(whole[:cut]) is None


def test_the_repairer_takes_one_value_only() -> None:
    assert repair_json(b'{"a":1}{"b":2}') is None
    assert repair_json(b'{"a":1}]') is None
    assert repair_json(b"{]") is None


def test_nesting_past_the_limit_is_left_out() -> None:
    deep = b"[" * (DEPTH_LIMIT + 9) + b"]" * (DEPTH_LIMIT + 9)
    repaired = repair_json(b'{"a":' + deep + b',"b":1}')
    assert repaired is not None
    assert isinstance(repaired[0], dict)
    assert repaired[0]["b"] == 1


def test_find_end_sees_strings() -> None:
    assert find_end(b'x{"a":"}\\"}"}y', 1) == 13
    assert find_end('{"é":[1,2]}', 0) == 11
    assert find_end(b'{"a":1', 0) is None
    assert find_end(b"}", 0) is None


def test_known_fields_are_found_in_rubble() -> None:
    text = b'{"a": b "c, "rank": {"x": [1]}, "n": 12, "s": "t", "n": 13'
    assert salvage_fields(text, ("rank", "n", "s", "zz")) == {"rank": {"x": [1]}, "n": 12, "s": "t"}


def test_rows_are_read_like_records() -> None:
    notes = Notes()
    decode = msgspec.json.Decoder(list[tuple[int, int]]).decode
    stream: RecordStream[Any] = RecordStream(
        io.BytesIO(b"[[1,2],[3,4],[nan,5],\n[6,7"), notes, decode, decode, lambda value, at: value, shape=ROWS
    )
    assert stream.start()
    assert [row for rows, _ in stream for row in rows] == [(1, 2), (3, 4), [None, 5]]
    assert {code: issue.count for code, issue in notes.issues.items()} == {"non_finite_number": 1, "truncated": 1}
