"""Models named on the command line: timm:NAME, hf:FOLDER, MODULE:FUNCTION."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attncond.errors import ConditioningError

_FORMS = "timm:NAME, hf:FOLDER or MODULE:FUNCTION"


class SourceError(ConditioningError):
    """The model that was asked for cannot be built, and why."""


def build(source: str) -> nn.Module:
    """The model behind ``source``; weights are not loaded, nothing is downloaded.

    >>> build("timm:vit_tiny_patch16_224").num_classes  # doctest: +SKIP
    1000
    """
    prefix, colon, rest = source.partition(":")
    if not colon or not rest or not prefix:
        hint = f" Did you mean {source}:FUNCTION, or timm:{source}?" if source and not colon else ""
        raise SourceError(f"'{source}' is not a model: give {_FORMS}.{hint}")
    if prefix == "timm":
        return _from_timm(rest)
    if prefix == "hf":
        return _from_config(Path(rest))
    return _from_function(prefix, rest)


def _close(name: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(name, list(known), n=3, cutoff=0.6)
    return f" Did you mean {', '.join(found)}?" if found else ""


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise SourceError(f"{name} is not installed: pip install 'attncond[{name}]'") from None


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
        raise SourceError(f"{what} cannot be built: {_one_line(error)}") from error


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # Validators announce in the first line what the second one says.
    text = " ".join(lines[:2] if lines and lines[0].endswith(":") else lines[:1])
    return f"{type(error).__name__}: {text or 'no message'}"


def _from_timm(name: str) -> nn.Module:
    timm = _library("timm")
    if not timm.is_model(name.split(".")[0]):
        raise SourceError(
            f"timm {timm.__version__} has no model '{name}'."
            + _close(name, timm.list_models())
            + " timm.list_models() lists them all."
        )
    return _without_memory(lambda: timm.create_model(name, pretrained=False), f"timm:{name}")


def _from_config(path: Path) -> nn.Module:
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
    transformers = _library("transformers")
    if kind not in transformers.CONFIG_MAPPING:
        own = " Its own code is not run here (trust_remote_code is never on)."
        raise SourceError(
            f"transformers {transformers.__version__} has no model type '{kind}'."
            + (own if "auto_map" in content else _close(kind, transformers.CONFIG_MAPPING.keys()))
        )
    try:
        config = transformers.AutoConfig.from_pretrained(
            str(file), trust_remote_code=False, local_files_only=True
        )
    except Exception as error:
        raise SourceError(
            f"{file} is not a valid {kind} configuration: {_one_line(error)}"
        ) from error

    def create() -> nn.Module:
        for name in config.architectures or ():
            if isinstance(cls := getattr(transformers, str(name), None), type):
                model: nn.Module = cls(config)
                return model
        model = transformers.AutoModel.from_config(config, trust_remote_code=False)
        return model

    return _without_memory(create, f"hf:{path}")


def _from_function(module_name: str, function_name: str) -> nn.Module:
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
        raise SourceError(f"no module named '{module_name}': {_one_line(error)}") from error
    if spec is None:
        files = [p.stem for p in Path(here).glob("*.py")]
        raise SourceError(
            f"no module named '{module_name}' in the current directory or installed."
            + _close(module_name, [*files, "timm", "hf"])
            + f" A model is {_FORMS}."
        )
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise SourceError(
            f"importing {module_name} failed with {_one_line(error)} (--debug shows where)"
        ) from error
    factory = getattr(module, function_name, None)
    if factory is None:
        names = [n for n, value in vars(module).items() if callable(value)]
        raise SourceError(f"{module_name} has no '{function_name}'." + _close(function_name, names))
    if not callable(factory):
        raise SourceError(f"{where} is not a function but of type {type(factory).__name__}")
    try:
        model = factory()
    except (Exception, SystemExit) as error:
        raise SourceError(
            f"{where}() failed with {_one_line(error)} (--debug shows where)"
        ) from error
    if not isinstance(model, nn.Module):
        raise SourceError(
            f"{where}() returned no torch.nn.Module but a value of type {type(model).__name__}"
        )
    return model
