"""The GPU table and every reading of --gpu."""

from __future__ import annotations

import csv
from importlib import resources

import pytest

from xmem.errors import UsageError
from xmem.simulate.gpu_table import find_gpu, gpus, parse_gpu


@pytest.mark.parametrize(
    ("text", "total"),
    [
        ("24", 24 << 30),
        ("23.6", int(23.6 * 10) * (1 << 30) // 10),
        ("999999", 999999 << 30),
        ("1000000", 1000000),
        ("25769803776", 25769803776),
        ("23.6GiB", 25340307046),
        ("24GB", 24 * 10**9),
        ("12e9", 12 * 10**9),
        ("512 MiB", 512 << 20),
    ],
)
def test_sizes(text: str, total: int) -> None:
    assert parse_gpu(text).total_bytes == total
    assert parse_gpu(text).text == text


def test_an_integer_is_read_like_its_text() -> None:
    assert parse_gpu(24) == parse_gpu("24")


@pytest.mark.parametrize(
    ("text", "name", "total"),
    [
        ("rtx4090", "GeForce RTX 4090", 24146083840),
        ("RTX 4090", "GeForce RTX 4090", 24146083840),
        ("NVIDIA GeForce RTX 4090", "GeForce RTX 4090", 24146083840),
        ("a100", "A100-SXM4-40GB", 42298834944),
        ("A100-80", "A100-SXM4-80GB", 84974239744),
        ("h100", "H100 80GB HBM3", 84929216512),
        ("NVIDIA H100 80GB HBM3", "H100 80GB HBM3", 84929216512),
        ("t4", "Tesla T4", 15642329088),
        ("v100-16", "Tesla V100-SXM2-16GB", 16911433728),
        ("mi300x", "Instinct MI300X VF", 205571227648),
        ("AMD Instinct MI300X VF", "Instinct MI300X VF", 205571227648),
        ("rtx 3060", "GeForce RTX 3060", 11938 << 20),
        ("H200", "H200", 143156 << 20),
    ],
)
def test_names_take_the_least_figure(text: str, name: str, total: int) -> None:
    target = parse_gpu(text)
    assert target.gpu is not None
    assert (target.gpu.name, target.total_bytes) == (name, total)


def test_notes_say_how_it_was_read() -> None:
    assert parse_gpu("24").note == "24 is read as 24 GiB (25769803776 bytes) of total memory."
    assert parse_gpu("1000000").note == "1000000 is read as bytes of total memory."
    assert parse_gpu("24GB").note == "24GB is 24000000000 bytes of total memory."
    assert "the least of 4 reported figures" in parse_gpu("rtx4090").note
    assert parse_gpu("a100").note.endswith("Other kinds: a100-80.")
    assert "GeForce RTX 4090" in parse_gpu("4090").note


def test_unknown_names_get_near_matches() -> None:
    with pytest.raises(UsageError) as caught:
        parse_gpu("rtx4091")
    assert caught.value.message == "There is no GPU 'rtx4091' in the table."
    assert caught.value.hint.startswith("Did you mean rtx4090")
    assert caught.value.hint.endswith("xmem gpus lists all; or give its memory: --gpu 23.6GiB.")


def test_nonsense_is_refused_in_words() -> None:
    with pytest.raises(UsageError) as caught:
        parse_gpu("24x")
    assert caught.value.message == "--gpu '24x' is not a number of bytes."
    with pytest.raises(UsageError) as caught:
        parse_gpu("0")
    assert caught.value.message == "--gpu '0' is no memory at all."
    for text in ("", "-5", "nan"):
        with pytest.raises(UsageError, match="There is no GPU"):
            parse_gpu(text)


def test_every_row_of_the_table_counts() -> None:
    text = resources.files("xmem.simulate").joinpath("gpus.csv").read_text(encoding="utf-8")
    rows = list(csv.DictReader(text.splitlines()))
    assert sum(len(gpu.figures) for gpu in gpus()) == len(rows)
    assert all(figure.source and figure.bytes > 1 << 30 for gpu in gpus() for figure in gpu.figures)
    for gpu in gpus():
        assert gpu.bytes == min(figure.bytes for figure in gpu.figures)
        assert gpu.memory
        assert len(gpu.compute_capability.split(".")) == 2
        for name in (gpu.name, *gpu.aliases):
            assert find_gpu(name) is gpu, name
