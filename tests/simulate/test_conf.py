"""PYTORCH_ALLOC_CONF text by torch version: what 2.14 was seen to do with it, and the rules of older versions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from xmem.errors import UsageError
from xmem.simulate.conf import KEYS, AllocConf, apply_conf, conf_text_from, parse_conf, variable_names
from xmem.simulate.torch_version import NEWEST, parse_version

MIB = 1 << 20


def test_what_torch_2_14_did_with_each_text_in_turn() -> None:
    """Each line: text, kind of error, then max_split_size, threshold, expandable, divisions as torch had them after."""
    conf = AllocConf()
    for line in Path(__file__).with_name("conf_2_14.jsonl").read_text().splitlines():
        text, failed, max_split, threshold, expandable, divisions = json.loads(line)
        conf, error = apply_conf(text, (2, 14), conf)
        if "backend:cudaMallocAsync" in text:  # refused at run time, where the allocator says so
            error, conf = error or UsageError(""), conf
        size = -1 if conf.max_split_size is None else conf.max_split_size
        assert bool(failed) == (error is not None), text
        assert (size - (1 << 64) if size >= 1 << 63 else size) == max_split, text
        assert conf.garbage_collection_threshold == threshold, text
        assert conf.expandable_segments == expandable, text
        assert list(conf.roundup_power2_divisions) == divisions, text


def test_everything_at_once() -> None:
    text = (
        "max_split_size_mb:64, roundup_power2_divisions:[256:1,512:2,>:8], garbage_collection_threshold:0.8,"
        "expandable_segments:True,max_non_split_rounding_mb:30,large_segment_size_mb:24,per_process_memory_fraction:0.9,"
        "throw_on_cudamalloc_oom:True,graph_capture_record_stream_reuse:True,backend:native,pinned_num_register_threads:8"
    )
    assert parse_conf(text) == AllocConf(
        max_split_size=64 * MIB,
        max_non_split_rounding_size=30 * MIB,
        roundup_power2_divisions=(1,) * 9 + (2,) + (8,) * 6,
        garbage_collection_threshold=0.8,
        expandable_segments=True,
        large_segment_size=24 * MIB,
        per_process_memory_fraction=0.9,
        throw_on_cudamalloc_oom=True,
        graph_capture_record_stream_reuse=True,
        ignored=("pinned_num_register_threads",),
    )


def test_a_parse_resets_what_it_does_not_name_and_keeps_the_rest() -> None:
    before = parse_conf(
        "max_split_size_mb:64,garbage_collection_threshold:0.5,roundup_power2_divisions:4,expandable_segments:True,"
        "large_segment_size_mb:40,max_non_split_rounding_mb:50,per_process_memory_fraction:0.5"
    )
    after = parse_conf("", base=before)
    assert (after.max_split_size, after.garbage_collection_threshold) == (None, 0.0)
    assert after.roundup_power2_divisions == (0,) * 16
    assert after.max_non_split_rounding_size == after.large_segment_size == 40 * MIB
    assert after.expandable_segments
    assert after.per_process_memory_fraction == 0.5


def test_the_last_value_of_a_key_counts() -> None:
    assert parse_conf("max_split_size_mb:30,max_split_size_mb:40").max_split_size == 40 * MIB


@pytest.mark.parametrize(("version", "first"), [("2.9.1", 21), ("2.10", 20), ("2.14", 20)], ids=["2.9", "2.10", "2.14"])
def test_smallest_max_split_size(version: str, first: int) -> None:
    assert parse_conf(f"max_split_size_mb:{first}", version).max_split_size == first * MIB
    with pytest.raises(UsageError, match=f"must be at least {first}"):
        parse_conf(f"max_split_size_mb:{first - 1}", version)


def test_the_open_interval_of_a_list_took_the_last_entry_too_up_to_2_9() -> None:
    text = "roundup_power2_divisions:[64:8,256:4,1024:4,>:1]"
    assert parse_conf(text, "2.10").roundup_power2_divisions == (8,) * 7 + (0, 4, 0, 4) + (1,) * 5
    assert parse_conf(text, "2.9.1").roundup_power2_divisions == (8,) * 7 + (0, 4, 0) + (1,) * 6


@pytest.mark.parametrize("key", sorted(KEYS))
def test_a_key_is_unknown_before_its_version(key: str) -> None:
    value = {"backend": "native", "roundup_power2_divisions": "4", "garbage_collection_threshold": "0.5"}.get(key)
    if value is None:
        value = "0.5" if "fraction" in key else "64" if key.endswith(("_mb", "register_threads")) else "True"
    since = KEYS[key]
    parse_conf(f"{key}:{value}", f"{since[0]}.{since[1]}")
    parse_conf(f"{key}:{value}")
    if since > (2, 0):
        with pytest.raises(UsageError, match="does not know the key") as caught:
            parse_conf(f"{key}:{value}", f"{since[0]}.{since[1] - 1}")
        assert "max_split_size_mb" in caught.value.hint
        assert key not in caught.value.hint


@pytest.mark.parametrize("text", ["max_split_size_mb:30;expandable_segments:True", "max_split_size_mb,30"])
def test_separators_were_checked_up_to_2_9(text: str) -> None:
    with pytest.raises(UsageError, match="expected"):
        parse_conf(text, "2.9")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("max_split_size_mb:1", "max_split_size_mb must be at least 20; it is 1"),
        ("max_split_size_mb:many", "takes a whole number, not 'many'"),
        ("max_split_size_mb:", "ends before its value does"),
        ("garbage_collection_threshold:1.0", "between 0 and 1, both excluded; it is 1.0"),
        ("garbage_collection_threshold:much", "takes a decimal number, not 'much'"),
        ("expandable_segments:true", "takes True or False, not 'true'"),
        ("roundup_power2_divisions:3", "must be a power of two; it is 3"),
        ("roundup_power2_divisions:[3:4]", "bounds must be powers of two, in MiB; one is 3"),
        ("roundup_power2_divisions:[64:3]", "divisions must be 0 or a power of two; one is 3"),
        ("roundup_power2_divisions:[64:8", "ends before its value does"),
        ("per_process_memory_fraction:1.5", "between 0 and 1; it is 1.5"),
        ("backend:jemalloc", "backend is native or cudaMallocAsync, not 'jemalloc'"),
        ("pinned_num_register_threads:3", "must be a power of two up to 128; it is 3"),
        ("max_spilt_size_mb:64", "torch 2.14 does not know the key 'max_spilt_size_mb'"),
    ],
)
def test_errors_say_what_is_wrong_and_which_keys_there_are(text: str, problem: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_conf(text)
    assert caught.value.message.startswith("PYTORCH_ALLOC_CONF: ")
    assert problem in caught.value.message
    assert "expandable_segments" in caught.value.hint


def test_which_variable_counts() -> None:
    environment = {"PYTORCH_ALLOC_CONF": "new", "PYTORCH_HIP_ALLOC_CONF": "hip", "PYTORCH_CUDA_ALLOC_CONF": "old"}
    assert conf_text_from(environment, (2, 13)) == "old"
    del environment["PYTORCH_CUDA_ALLOC_CONF"]
    assert conf_text_from(environment, (2, 13)) == "hip"
    assert conf_text_from(environment, (2, 9)) == ""
    assert conf_text_from({"PYTORCH_ALLOC_CONF": "new"}, (2, 10)) == "new"
    assert variable_names((2, 6)) == ("PYTORCH_CUDA_ALLOC_CONF",)


@pytest.mark.parametrize(
    ("text", "version"),
    [("2.6", (2, 6)), ("2.13.0", (2, 13)), ("2.14.1+cu130", (2, 14)), (" v2.0.1a0 ", (2, 0)), (None, NEWEST)],
)
def test_versions(text: str | None, version: tuple[int, int]) -> None:
    assert parse_version(text) == version


@pytest.mark.parametrize("text", ["", "2", "newest", "2.x"])
def test_what_is_no_version(text: str) -> None:
    with pytest.raises(UsageError, match="is not a torch version"):
        parse_version(text)
