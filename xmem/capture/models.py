"""Builds the model that a name means: torchvision, a configuration, timm, or the user's own function."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from xmem.errors import UsageError

CONFIGS = Path(__file__).parent / "configs"
INSTALL = "Install it with: pip install 'xmem[capture]'"

#: Spellings of the paper's experiments for torchvision's names, and the classes that its runs used.
PAPER_NAMES = {
    "mobenetv3small": ("mobilenet_v3_small", 10), "mobenetv3large": ("mobilenet_v3_large", 10),
    "mobilenetv3small": ("mobilenet_v3_small", 10), "mobilenetv3large": ("mobilenet_v3_large", 10),
    "mnasnet": ("mnasnet1_0", 10), "mobilenetv2": ("mobilenet_v2", None), "convnexttiny": ("convnext_tiny", None),
    "convnextbase": ("convnext_base", None), "regnetx400mf": ("regnet_x_400mf", None),
    "regnety400mf": ("regnet_y_400mf", None),
}  # fmt: skip


@dataclass(frozen=True)
class Built:
    """A model on the host with how to make a batch: `images`, `tokens` or the user's own."""

    module: Any
    inputs: str
    classes: int = 1000
    optimizer: Any = None
    batch: Any = None


def require(module: str, what: str) -> Any:
    """Import an optional package, or say in one sentence what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if error.name is not None and error.name.split(".")[0] != module.split(".")[0]:
            raise
        raise UsageError(f"{what} needs {module}, which is not installed.", INSTALL) from error


@cache
def shipped_configs() -> dict[str, dict[str, Any]]:
    """Return every shipped configuration by each of its names, in lower case."""
    found: dict[str, dict[str, Any]] = {}
    for file in sorted(CONFIGS.glob("*.json")):
        entry = json.loads(file.read_text(encoding="utf-8"))
        for name in (*entry["names"], *(name.split("/")[-1] for name in entry["names"])):
            found[name.lower()] = entry["config"]
    return found


def plain_name(name: str) -> str:
    """Take case, dashes and underscores out of a name."""
    return name.lower().replace("-", "").replace("_", "").replace(" ", "")


def torchvision_name(name: str) -> tuple[str, int | None] | None:
    """Return torchvision's name and the paper's number of classes (None: the model's default)."""
    known = PAPER_NAMES.get(plain_name(name))
    if known is not None:
        return known
    try:
        models = importlib.import_module("torchvision.models")
    except ImportError:
        return None
    plain = {plain_name(found): found for found in models.list_models(module=models)}
    found = plain.get(plain_name(name))
    return None if found is None else (found, None)


def build_model(name: str, *, classes: int | None = None, attention: str = "", values: bool = False) -> Built:
    """Build the model; parameters stay uninitialised unless `values`, since memory does not depend on them."""
    require("torch", "Running a model")
    if is_own_function(name):
        return _own_function(name)
    config = _find_config(name)
    if config is not None:
        require("transformers", "A Hugging Face model")
    with _no_initialisation(skip=not values):
        if config is not None:
            return Built(_from_config(config, attention), "tokens")
        vision = torchvision_name(name)
        if vision is not None:
            models = require("torchvision.models", f"The model {name}")
            count = classes or vision[1] or 1000
            return Built(getattr(models, vision[0])(weights=None, num_classes=count), "images", count)
        built = _from_timm(name, classes)
    if built is not None:
        return built
    require("torchvision.models", f"The model {name}")
    raise UsageError(f"The model {name!r} is unknown.", _advice(name))


def is_own_function(name: str) -> bool:
    """Say whether a name means the user's own function, not a model that is known."""
    return ":" in name and not name.startswith("timm:")


def _advice(name: str) -> str:
    import difflib

    known = [*shipped_configs(), *PAPER_NAMES]
    close = difflib.get_close_matches(name.lower(), known, n=3)
    meant = f"Did you mean {', '.join(close)}? " if close else ""
    return f"{meant}Give a torchvision name, a config.json, a timm name, or module:function."


def _find_config(name: str) -> dict[str, Any] | None:
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix == ".json":
        if not path.is_file():
            raise UsageError(f"There is no configuration {name}.")
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UsageError(f"{name} is not JSON: {error}") from error
        if not isinstance(found, dict) or "model_type" not in found:
            raise UsageError(f"{name} names no model_type.", "Give the config.json of a Hugging Face model.")
        return found
    return shipped_configs().get(name.lower())


def is_text_model(name: str) -> bool:
    """Say whether a name or file is that of a Hugging Face model, whose batches are rows of tokens."""
    return _find_config(name) is not None


def import_for(name: str) -> None:
    """Import what building this model and its optimizer will need, so that processes can share it."""
    importlib.import_module("torch._dynamo")
    config = None if ":" in name else _find_config(name)
    if config is None:
        importlib.import_module("torchvision.models")
        return
    transformers = importlib.import_module("transformers")
    for architecture in config.get("architectures") or []:
        getattr(transformers, architecture, None)


def _from_config(config: dict[str, Any], attention: str) -> Any:
    transformers = require("transformers", "A Hugging Face model")
    fields = {key: value for key, value in config.items() if key not in ("model_type", "architectures")}
    try:
        made = transformers.CONFIG_MAPPING[config["model_type"]](**fields)
    except KeyError as error:
        raise UsageError(
            f"transformers {transformers.__version__} knows no model_type {config['model_type']!r}."
        ) from error
    options = {"attn_implementation": attention} if attention else {}
    names = [name for name in config.get("architectures") or [] if hasattr(transformers, name)]
    if names:
        model = getattr(transformers, names[0])._from_config(made, **options)
        model.tie_weights()  # skipping initialisation skips this too
        return model
    for family in ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM"):
        if type(made) in getattr(transformers, family)._model_mapping:
            return getattr(transformers, family).from_config(made, **options)
    raise UsageError(f"model_type {config['model_type']!r} has no language-model head that xmem can train.")


def _from_timm(name: str, classes: int | None) -> Built | None:
    try:
        timm = importlib.import_module("timm")
    except ImportError:
        return None
    plain = name.removeprefix("timm:")
    if not timm.is_model(plain):
        return None
    return Built(timm.create_model(plain, pretrained=False, num_classes=classes or 1000), "images", classes or 1000)


def load_function(name: str) -> Callable[..., Any]:
    """Return the function that `package.module:function` or `script.py:function` means."""
    place, _, function = name.rpartition(":")
    _look_in(Path(place).parent if place.endswith(".py") else Path())
    try:
        if place.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(place).stem, place)
            if spec is None or spec.loader is None or not Path(place).is_file():
                raise UsageError(f"There is no script {place}.")
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
    except ImportError as error:
        raise UsageError(f"{place} cannot be imported: {error}", "Run from the folder that holds it.") from error
    found = getattr(module, function, None)
    if not callable(found):
        raise UsageError(f"{place} has no function {function!r}.")
    return found  # type: ignore[no-any-return]


def _look_in(folder: Path) -> None:
    """Let the user's modules be imported as if Python had been started in this folder."""
    if str(folder.absolute()) not in sys.path:
        sys.path.insert(0, str(folder.absolute()))


def find_source(name: str) -> Path | None:
    """Return the file of `package.module:function` or `script.py:function`, importing no more than parent packages."""
    place = name.rpartition(":")[0]
    if place.endswith(".py"):
        return Path(place)
    _look_in(Path())
    try:
        spec = importlib.util.find_spec(place)
    except (ImportError, ValueError):
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin)


def _own_function(name: str) -> Built:
    made = load_function(name)()
    if not isinstance(made, tuple) or len(made) != 3:
        raise UsageError(
            f"{name} returned {type(made).__name__}, not (model, optimizer, batch).",
            "Return a tuple: the module, an optimizer or None, and a function batch(batch_size) -> inputs.",
        )
    return Built(made[0], "own", optimizer=made[1], batch=made[2])


@contextmanager
def _no_initialisation(*, skip: bool) -> Iterator[None]:
    """Leave parameters as allocated: pages that nothing touches cost no memory on the host."""
    if not skip:
        yield
        return
    import torch

    names = [name for name in dir(torch.nn.init) if name.endswith("_") and not name.startswith("_")]
    before = {name: getattr(torch.nn.init, name) for name in names}
    for name in names:
        setattr(torch.nn.init, name, lambda tensor, *args, **kwargs: tensor)
    try:
        with _transformers_without_weights():
            yield
    finally:
        for name, function in before.items():
            setattr(torch.nn.init, name, function)


def _transformers_without_weights() -> Any:
    import contextlib

    if "transformers" not in sys.modules:
        return contextlib.nullcontext()
    modeling = importlib.import_module("transformers.modeling_utils")
    skip = getattr(modeling, "no_init_weights", None)
    return skip() if skip is not None else contextlib.nullcontext()
