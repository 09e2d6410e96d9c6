"""What is wrong with a recipe, in words: the key, what it may be, what was meant, who said so."""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from attncond.errors import close
from attncond.lab.config import Config, Contradiction, Section

# Keys of a config that are chosen otherwise than by settings.
IDENTITY = {"recipe": "NAME", "form": "--form", "variant": "--variants", "seed": "--seeds"}


@dataclass(frozen=True)
class Layer:
    """Settings and where they were written."""

    origin: str
    tree: dict[str, Any]


def unknown(what: str, name: object, known: Iterable[object]) -> str:
    """``what`` 'NAME', what may have been meant, and what there is.

    >>> unknown("there is no form", "smal", ["small", "smoke"])
    "there is no form 'smal'. Did you mean small? There are small, smoke."
    """
    names = [str(x) for x in known]
    return f"{what} '{name}'.{close(str(name), names, cutoff=0.5)} There are {', '.join(names)}."


def explain(error: ValidationError, layers: Sequence[Layer], where: str) -> str:
    """Every problem of a configuration, a line for each."""
    lines = [_line(dict(problem), layers) for problem in error.errors()]
    return "\n".join([f"{where}:", *(f"  {line}" for line in lines)])


def _line(problem: dict[str, Any], layers: Sequence[Layer]) -> str:
    cause = problem.get("ctx", {}).get("error")
    if isinstance(cause, Contradiction):
        said = (f"{key}: {x}" for key in cause.keys if (x := _origin(key.split("."), layers)))
        return f"{cause.keys[0]}: {cause} ({'; '.join(said)})"
    path = [str(part) for part in problem["loc"]]
    key, value = ".".join(path), reprlib.repr(problem["input"])
    if problem["type"] == "missing":
        origin = _origin(path[:-1], layers) if len(path) > 1 else None
        return f"{key} is missing ({origin})" if origin else f"{key} is missing"
    if problem["type"] == "extra_forbidden":
        message = _unknown_key(path)
    else:
        rule = problem["msg"].removeprefix("Input ").replace("should", "must")
        rule = re.sub(r"a valid (dictionary|tuple|mapping).*", r"a \1", rule)
        rule = rule.replace("a dictionary", "a mapping").replace("a tuple", "a list")
        message = f"{key} {rule}, not {value}"
        if problem["type"] == "literal_error":
            choices = re.findall("'(.*?)'", problem["ctx"]["expected"])
            message += "." + close(str(problem["input"]), choices, cutoff=0.5)
    origin = _origin(path, layers)
    return f"{message.rstrip('.')} ({origin})" if origin else message


def _origin(path: Sequence[str], layers: Sequence[Layer]) -> str | None:
    """Who said the last word about a key."""
    return next((x.origin for x in reversed(layers) if _has(x.tree, path)), None)


def _has(tree: Any, path: Sequence[str]) -> bool:
    for part in path:
        if not isinstance(tree, dict):
            return True  # an item of a list, or what stands where a mapping belongs
        if part not in tree:
            return False
        tree = tree[part]
    return True


def _unknown_key(path: Sequence[str]) -> str:
    section: type[BaseModel] = Config
    for part in path[:-1]:
        section = _section(section.model_fields[part].annotation) or section
    known = [name for name in section.model_fields if name not in IDENTITY]
    prefix = "".join(f"{part}." for part in path[:-1])
    guesses = [prefix + n for n in difflib.get_close_matches(path[-1], known, n=2)]
    guesses += [k for k in _keys(Config) if k.split(".")[-1] == path[-1] and k not in guesses]
    guess = f" Did you mean {' or '.join(guesses)}?" if guesses else ""
    has = f"{prefix[:-1]} has" if prefix else "There are"
    return f"there is no key '{'.'.join(path)}'.{guess} {has} {', '.join(known)}."


def _section(annotation: Any) -> type[Section] | None:
    """The section that a field holds, if it holds one."""
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def _keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, info in section.model_fields.items():
        inner = _section(info.annotation)
        if inner is not None:
            yield from _keys(inner, f"{prefix}{name}.")
        elif prefix or name not in IDENTITY:
            yield prefix + name
