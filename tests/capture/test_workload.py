"""Jobs in words, and what is said where they cannot be run; without torch."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from xmem.capture import models
from xmem.capture.profile import check_installed, default_name, profile, profile_key
from xmem.capture.workload import Workload
from xmem.cli.workload_options import make_workload
from xmem.errors import RefusedError, UsageError

OPTIONS = {
    "model": "VGG19", "batch_size": 4, "optimizer": "SGD", "dtype": "float32", "autocast": "", "image_size": 86,
    "sequence_length": 128, "classes": None, "accumulate": 1, "checkpointing": False, "zero_grad": "start",
    "set_to_none": True, "attention": "", "iterations": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("zero_grad", "never", "zero_grad position 'never' is unknown."),
        ("batch_size", 0, "batch_size must be at least 1, not 0."),
        ("optimizer_args", "[]", "The optimizer's arguments are not a JSON object."),
        ("optimizer_args", "{", "The optimizer's arguments are not JSON: "),
    ],
)
def test_a_wrong_field_is_said(field: str, value: object, message: str) -> None:
    with pytest.raises(UsageError) as error:
        Workload(**{"model": "VGG19", field: value})  # type: ignore[arg-type]
    assert error.value.message.startswith(message)


def test_equal_jobs_share_a_key_and_others_do_not() -> None:
    assert profile_key(Workload("VGG19")) == profile_key(Workload("VGG19"))
    keys = {profile_key(job) for job in (Workload("VGG19"), Workload("VGG16"), Workload("VGG19", 2))}
    assert len(keys) == 3


def test_a_changed_script_is_another_job(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text("1")
    before = profile_key(Workload(f"{script}:make"))
    script.write_text("2")
    assert profile_key(Workload(f"{script}:make")) != before


def test_a_module_in_the_working_directory_is_found_and_its_changes_are_another_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    script = tmp_path / "my_own_job.py"
    script.write_text("def make():\n    return 1\n")
    before = profile_key(Workload("my_own_job:make"))
    assert models.load_function("my_own_job:make")() == 1
    script.write_text("def make():\n    return 22\n")
    assert profile_key(Workload("my_own_job:make")) != before
    assert models.find_source("none.such:make") is None


def test_a_script_imports_its_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    (tmp_path / "my_own_neighbour.py").write_text("answer = 42\n")
    (tmp_path / "job.py").write_text("from my_own_neighbour import answer\ndef make():\n    return answer\n")
    assert models.load_function(f"{tmp_path / 'job.py'}:make")() == 42


def test_profiles_are_named_after_their_job() -> None:
    assert default_name(Workload("facebook/opt-125m", 34, "Adam")) == "opt-125m_adam_b34.xmem.jsonl.gz"


def test_arguments_of_the_optimizer_are_read() -> None:
    made = make_workload({**OPTIONS, "optimizer_arg": ("momentum=0.9", "nesterov=True", "name=x")})
    assert made.optimizer_args == '{"momentum": 0.9, "name": "x", "nesterov": true}'
    with pytest.raises(UsageError) as error:
        make_workload({**OPTIONS, "optimizer_arg": ("momentum",)})
    assert error.value.message == "--optimizer-arg 'momentum' is not NAME=VALUE."


def test_a_missing_extra_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ImportError(name=name)

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(UsageError) as error:
        models.require("torch", "Profiling")
    assert error.value.message == "Profiling needs torch, which is not installed."
    assert error.value.hint == "Install it with: pip install 'xmem[capture]'"


def test_estimates_without_torch_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xmem.capture.profile.installed", lambda package: "")
    with pytest.raises(UsageError, match="Profiling needs torch, which is not installed"):
        check_installed()


def test_a_profile_is_not_overwritten_and_needs_its_suffix(tmp_path: Path) -> None:
    there = tmp_path / "a.xmem.jsonl"
    there.write_text("")
    with pytest.raises(RefusedError) as refused:
        profile(Workload("VGG19"), there)
    assert refused.value.hint == "--force replaces it."
    with pytest.raises(UsageError, match="is no name for an event log"):
        profile(Workload("VGG19"), tmp_path / "a.txt")
    with pytest.raises(UsageError, match=r"The folder .* is not there"):
        profile(Workload("VGG19"), tmp_path / "none" / "a.xmem.jsonl")


def test_every_model_of_the_paper_has_a_configuration() -> None:
    shipped = models.shipped_configs()
    names = (
        "gpt2 distilgpt2 EleutherAI/gpt-neo-125M facebook/opt-125m facebook/opt-350m"
        " cerebras/Cerebras-GPT-111M T5-small T5-base"
        " EleutherAI/pythia-1b Qwen/Qwen3-0.6B Qwen/Qwen3-4B deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"
        " google/gemma-2-2b-it meta-llama/Llama-3.2-3B-Instruct distilbert/distilgpt2 openai-community/gpt2"
        " meta-llama/Llama-3.2-1B meta-llama/Llama-3.2-3B Salesforce/codet5-small Salesforce/codet5-base"
        " microsoft/codebert-base microsoft/deberta-v3-base"
    )
    assert [name for name in names.split() if name.lower() not in shipped] == []


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("meta-llama/Llama-3.2-1B", 1_235_814_400),
        ("EleutherAI/pythia-410m", 405_334_016),
        ("facebook/opt-1.3b", 1_315_758_080),
        ("Salesforce/codet5-base", 222_882_048),
        ("google/flan-t5-small", 76_961_152),
        ("microsoft/codebert-base", 124_697_433),
        ("Qwen/Qwen2.5-0.5B", 494_032_768),
    ],
)
def test_configurations_have_the_published_number_of_parameters(name: str, parameters: int) -> None:
    torch = pytest.importorskip("torch", reason="models need torch")
    pytest.importorskip("transformers", reason="configurations need transformers")
    with torch.device("meta"):
        module = models.build_model(name).module
    assert sum(parameter.numel() for parameter in module.parameters()) == parameters


def test_an_optimizer_is_found_in_any_case() -> None:
    torch = pytest.importorskip("torch", reason="optimizers are torch's")
    from xmem.capture.training import make_optimizer

    module = torch.nn.Linear(2, 2)
    assert type(make_optimizer(Workload("VGG19", optimizer="adamw"), module)) is torch.optim.AdamW
    assert type(make_optimizer(Workload("VGG19", optimizer="Rprop"), module)) is torch.optim.Rprop
    with pytest.raises(UsageError, match=r"torch.optim has no optimizer 'Lion'\."):
        make_optimizer(Workload("VGG19", optimizer="Lion"), module)


def test_spellings_of_the_paper_mean_torchvision_models() -> None:
    assert models.torchvision_name("MobeNetV3Small") == ("mobilenet_v3_small", 10)
    assert models.torchvision_name("RegNetX400MF") == ("regnet_x_400mf", None)


def test_a_broken_configuration_is_said(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="models need torch")
    file = tmp_path / "config.json"
    file.write_text("{")
    with pytest.raises(UsageError, match="is not JSON"):
        models.build_model(str(file))
    file.write_text("{}")
    with pytest.raises(UsageError, match="names no model_type"):
        models.build_model(str(file))
    with pytest.raises(UsageError, match="There is no configuration"):
        models.build_model(str(tmp_path / "other.json"))
