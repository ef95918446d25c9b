"""Cards: what is shipped is complete, a user's own is checked field by field, and cuDNN gets the right description."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from xmem.capture.vgpu.cards import LIMITS, Card, cards, cudnn_description, find_card, make_card, read_card
from xmem.capture.vgpu.settings import Recording, VirtualGpu, make_environment
from xmem.capture.vgpu.torch_facts import TorchFacts
from xmem.errors import UsageError
from xmem.simulate.gpu_table import find_gpu

GOOD = {
    "name": "Mine", "total_bytes": 8 << 30, "compute_capability": "8.6", "multiprocessors": 10, "sm_clock_khz": 1,
    "memory_clock_khz": 1, "l2_bytes": 1, "bus_bits": 1, "source": "me",
}  # fmt: skip


def test_the_cards_of_the_field_are_there() -> None:
    wanted = "t4 v100 a10 l4 rtx3060 rtx3090 rtx4060 rtx4090 rtx5090 a100 a100-80 l40s h100 h200 b200"
    assert [name for name in wanted.split() if find_card(name) is None] == []
    assert len(cards()) == 15


@pytest.mark.parametrize("card", cards(), ids=lambda card: card.name)
def test_every_card_has_a_source_and_agrees_with_the_gpu_table(card: Card) -> None:
    assert card.source and card.compute_capability in LIMITS
    gpu = find_gpu(card.name)
    if gpu is not None:
        assert card.total_bytes in [figure.bytes for figure in gpu.figures] or card.name in ("H200",)
        assert (card.compute_capability, card.multiprocessors) == (gpu.compute_capability, gpu.multiprocessors)


def test_names_are_found_however_they_are_written() -> None:
    assert find_card("NVIDIA GeForce RTX 4090") == find_card("rtx4090") == find_card("GeForce RTX-4090")
    assert find_card("Tesla V100-SXM2-32GB") == find_card("v100")
    assert find_card("rtx9090") is None


def test_cudnn_description() -> None:
    card = find_card("rtx3060")
    assert card is not None
    told = json.loads(cudnn_description(card, 12_000_000_000, 13000))
    assert told["deviceVer"] == 860 and told["multiProcessorCount"] == 28 and told["totalGlobalMem"] == 12_000_000_000
    assert told["maxSharedMemoryPerBlockOptin"] == 101376 and told["reservedSharedMemoryPerBlock"] == 1024
    assert told["driverVer"] == 13000 and told["deviceName"] == "NVIDIA GeForce RTX 3060"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": None}, "The card c.toml has no name."),
        ({"total_bytes": "8"}, "The card c.toml has '8' as total_bytes."),
        ({"l2_bytes": 0}, "The card c.toml has 0 as l2_bytes."),
        ({"colour": "red"}, "The card c.toml has the unknown field 'colour'."),
        ({"compute_capability": "3.5"}, "The card c.toml has compute capability '3.5'."),
    ],
)
def test_a_wrong_card_is_refused(change: dict, message: str) -> None:
    found = {key: value for key, value in {**GOOD, **change}.items() if value is not None}
    with pytest.raises(UsageError) as error:
        make_card(found, "c.toml")
    assert error.value.message == message


def test_a_card_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("\n".join(f"{key} = {json.dumps(value)}" for key, value in GOOD.items()))
    assert read_card(file).multiprocessors == 10
    file.write_text("name = ")
    with pytest.raises(UsageError, match=r"The card c\.toml is not TOML"):
        read_card(file)
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_card(tmp_path / "none.toml")


def test_impossible_virtual_gpus_are_refused() -> None:
    card = make_card(GOOD, "c.toml")
    for change, message in (
        ({"devices": 17}, "There can be 1 to 16 virtual cards, not 17."),
        ({"addresses": "left"}, "Addresses go down or up, not 'left'."),
        ({"taken_bytes": 9 << 30}, "9663676416 bytes outside PyTorch leave nothing of 8589934592."),
    ):
        with pytest.raises(UsageError) as error:
            VirtualGpu(card, **{"total_bytes": 8 << 30, **change})
        assert error.value.message == message


def test_the_environment_reaches_the_jobs_processes_only(tmp_path: Path) -> None:
    torch = TorchFacts("python", tmp_path, "2.14.1", "13.0")
    base = {"LD_PRELOAD": "/lib/mine.so", "PYTHONPATH": "/lib/py", "CUDA_VISIBLE_DEVICES": "", "XMEM_VGPU_NAME": "old"}
    gpu = VirtualGpu(make_card(GOOD, "c.toml"), 8 << 30, taken_bytes=1 << 20, devices=2)
    found = make_environment(gpu, torch, tmp_path, Recording(tmp_path, 5, 60, True), base)
    assert found["LD_PRELOAD"].split(":") == [
        f"{tmp_path}/libcuda.so.1",
        f"{tmp_path}/libnvidia-ml.so.1",
        "/lib/mine.so",
    ]
    assert found["PYTHONPATH"].endswith(":/lib/py") and "CUDA_VISIBLE_DEVICES" not in found
    wanted = {"NAME": "NVIDIA Mine", "BYTES": "8589934592", "TAKEN_BYTES": "1048576", "DEVICES": "2", "STEPS": "5"}
    assert {name: found[f"XMEM_VGPU_{name}"] for name in wanted} == wanted
    assert (found["XMEM_VGPU_MAJOR"], found["XMEM_VGPU_MINOR"], found["XMEM_VGPU_SANDBOX"]) == ("8", "6", "1")
