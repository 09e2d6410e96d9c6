"""Models named on the command line: timm:NAME, hf:FOLDER, MODULE:FUNCTION."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attncond.errors import ConditioningError, close

_FORMS = "timm:NAME, hf:FOLDER or MODULE:FUNCTION"


class SourceError(ConditioningError):
    """The model that was asked for cannot be built, and why."""


def build(source: str, *, real: bool = False) -> nn.Module:
    """The model behind ``source``; weights are not loaded, nothing is downloaded.

    ``real`` builds it on the CPU with the values that its constructor gives to weights and buffers;
    otherwise it is on the meta device where that is possible.

    >>> build("timm:vit_tiny_patch16_224").num_classes  # doctest: +SKIP
    1000
    """
    prefix, rest = split(source)
    if prefix == "timm":
        create = _from_timm(rest)
    elif prefix == "hf":
        create = _from_config(Path(rest))
    else:
        return _from_function(prefix, rest)
    model = _without_memory(create, source)
    return _for_real(create, model, source) if real else model


def split(source: str) -> tuple[str, str]:
    """What stands before and after the colon."""
    prefix, colon, rest = source.partition(":")
    if not colon or not rest or not prefix:
        hint = f" Did you mean {source}:FUNCTION, or timm:{source}?" if source and not colon else ""
        raise SourceError(f"'{source}' is not a model: give {_FORMS}.{hint}")
    return prefix, rest


def library(name: str) -> Any:
    """Import what a model needs; nothing is ever downloaded through it."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when the libraries are imported
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = name.partition(".")[0]
        if error.name not in (name, missing):
            raise
        wanted = {"timm": "attncond[timm]", "transformers": "attncond[transformers]"}
        wanted["PIL"] = "pillow"
        raise SourceError(
            f"{missing} is not installed: pip install '{wanted.get(missing, missing)}'"
        ) from None


def _without_memory(create: Callable[[], nn.Module], what: str) -> nn.Module:
    """On the meta device, where a model of any size takes no memory; on the CPU where it cannot."""
    try:
        with torch.device("meta"):
            return create()
    except Exception:
        pass  # some constructors compute with the values of their tensors
    try:
        return create()
    except Exception as error:
        raise SourceError(f"{what} cannot be built: {one_line(error)}") from error


def _for_real(create: Callable[[], nn.Module], sketch: nn.Module, what: str) -> nn.Module:
    """Once more on the CPU: buffers that no checkpoint holds get their values in constructors."""
    tensors = [*sketch.parameters(), *sketch.buffers()]
    if not any(t.is_meta for t in tensors):
        return sketch
    need, free = sum(t.numel() * 4 for t in tensors), _free_memory()
    if free is not None and need > free:
        raise SourceError(
            f"{what} has weights of {need / 1e9:.3g} GB in float32, and {free / 1e9:.3g} GB of "
            "memory are free here. attncond inspect reads a model of any size."
        )
    try:
        return create()
    except Exception as error:
        raise SourceError(f"{what} cannot be built: {one_line(error)}") from error


def _free_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # only Linux tells
        return None
    return next((int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable:")), None)


def one_line(error: BaseException) -> str:
    """An error of somebody else's code, short enough to be a part of ours."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # Validators announce in the first line what the second one says.
    text = " ".join(lines[:2] if lines and lines[0].endswith(":") else lines[:1])
    return f"{type(error).__name__}: {text or 'no message'}"


def _from_timm(name: str) -> Callable[[], nn.Module]:
    timm = library("timm")
    if not timm.is_model(name.split(".")[0]):
        raise SourceError(
            f"timm {timm.__version__} has no model '{name}'."
            + close(name, timm.list_models())
            + " timm.list_models() lists them all."
        )

    def create() -> nn.Module:
        model: nn.Module = timm.create_model(name, pretrained=False)
        return model

    return create


def _from_config(path: Path) -> Callable[[], nn.Module]:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise SourceError(
            f"there is no {file}. hf: takes a local folder with a config.json, or the file itself; "
            "models are never downloaded here."
        )
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise SourceError(f"{file} cannot be read as JSON: {error}") from error
    kind = content.get("model_type") if isinstance(content, dict) else None
    if not isinstance(kind, str):
        raise SourceError(
            f"{file} has no model_type: is it the config.json of a transformers model?"
        )
    transformers = library("transformers")
    if kind not in transformers.CONFIG_MAPPING:
        own = " Its own code is not run here (trust_remote_code is never on)."
        raise SourceError(
            f"transformers {transformers.__version__} has no model type '{kind}'."
            + (own if "auto_map" in content else close(kind, transformers.CONFIG_MAPPING.keys()))
        )
    try:
        config = transformers.AutoConfig.from_pretrained(
            str(file), trust_remote_code=False, local_files_only=True
        )
    except Exception as error:
        raise SourceError(
            f"{file} is not a valid {kind} configuration: {one_line(error)}"
        ) from error

    if getattr(config, "use_pretrained_backbone", False):
        config.use_pretrained_backbone = False  # its constructor would download one

    def create() -> nn.Module:
        for name in config.architectures or ():
            if isinstance(cls := getattr(transformers, str(name), None), type):
                model: nn.Module = cls(config)
                return model
        model = transformers.AutoModel.from_config(config, trust_remote_code=False)
        return model

    return create


def _from_function(module_name: str, function_name: str) -> nn.Module:
    model = call(module_name, function_name, f" A model is {_FORMS}.")
    if not isinstance(model, nn.Module):
        raise SourceError(
            f"{module_name}:{function_name}() returned no torch.nn.Module but a value of type "
            f"{type(model).__name__}"
        )
    return model


def _elsewhere(module_name: str, function_name: str) -> str:
    """Libraries keep their models one level down: torchvision:vit_b_16 is torchvision.models'."""
    try:
        models = importlib.import_module(f"{module_name}.models")
    except Exception:  # a guess for a message; whatever is wrong there is not what was asked for
        return ""
    found = callable(getattr(models, function_name, None))
    return f" Did you mean {module_name}.models:{function_name}?" if found else ""


def call(module_name: str, function_name: str, hint: str = "") -> Any:
    """What a function of the user's returns; its module is imported from here or installed."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    where = f"{module_name}:{function_name}"
    if "/" in module_name or module_name.endswith(".py"):
        name = ".".join(Path(module_name).with_suffix("").parts).lstrip(".")
        raise SourceError(
            f"'{module_name}' is a file; give the name that Python imports it by, from the folder "
            f"it is in: {name.rpartition('.')[2]}:{function_name}"
        )
    try:
        spec = importlib.util.find_spec(module_name)
    except (ImportError, ValueError) as error:
        raise SourceError(f"no module named '{module_name}': {one_line(error)}") from error
    if spec is None:
        files = [p.stem for p in Path(here).glob("*.py")]
        raise SourceError(
            f"no module named '{module_name}' in the current directory or installed."
            + close(module_name, [*files, "timm", "hf"])
            + hint
        )
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise SourceError(
            f"importing {module_name} failed with {one_line(error)} (--debug shows where)"
        ) from error
    factory = getattr(module, function_name, None)
    if factory is None:
        names = [n for n, value in vars(module).items() if callable(value)]
        near = close(function_name, names) or _elsewhere(module_name, function_name)
        raise SourceError(f"{module_name} has no '{function_name}'." + near)
    if not callable(factory) or isinstance(factory, nn.Module):
        raise SourceError(
            f"{where} is not a function but of type {type(factory).__name__}; name one that "
            "returns it"
        )
    try:
        return factory()
    except (Exception, SystemExit) as error:
        raise SourceError(
            f"{where}() failed with {one_line(error)} (--debug shows where)"
        ) from error
