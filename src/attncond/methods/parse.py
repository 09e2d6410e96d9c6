"""Methods as short texts, for command lines and recipes: ``spectral:kappa=1.5,scope=head``."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields, replace
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from attncond.errors import ConditioningError, close
from attncond.methods import METHODS, Method, RemoveGap, Spectral

__all__ = ["method_name", "parse_method"]


def _kebab(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", name).lower()


# Every class by its own name; the names of presets come after those that they are presets of.
_NAMES: dict[str, Callable[[], Method]] = {
    **{_kebab(name): cls for name, cls in METHODS.items()},
    "gap": RemoveGap,
    "polar": lambda: Spectral(correction="polar"),
    "paper": Spectral.paper,
    "paper-svd": Spectral.paper_svd,
}


def parse_method(text: str) -> Method:
    """The method that a text names: NAME or NAME:FIELD=VALUE,FIELD=VALUE.

    Names are ``spectral``, ``paper``, ``paper-svd``, ``polar``, ``precondition`` and ``gap``;
    fields are those of the class of the method.

    Raises:
        ConditioningError: No such method, no such field, or a value that does not suit it.

    >>> parse_method("spectral:kappa=1.5,scope=head").scope
    'head'
    """
    name, colon, rest = text.strip().partition(":")
    key = _kebab(name.strip()).removesuffix("()").replace("_", "-").replace(".", "-")
    key = key.removeprefix("spectral-")  # Spectral.paper(), as Python writes it
    if key not in _NAMES:
        guess = close(key, _NAMES, n=1)
        raise ConditioningError(f"'{name}' is no method.{guess} There are {', '.join(_NAMES)}.")
    method = _NAMES[key]()
    if not colon:
        return method
    values: dict[str, Any] = {}
    kinds = get_type_hints(type(method))
    known = [f.name for f in fields(method)]
    for part in rest.split(","):
        field, equals, value = (piece.strip() for piece in part.partition("="))
        if field not in known:
            guess = close(field, known, n=1)
            have = f"it has {', '.join(known)}" if known else "it has none"
            raise ConditioningError(f"'{text}': {name} has no field '{field}'; {have}.{guess}")
        if not equals or not value:
            raise ConditioningError(f"'{text}': {field} needs a value: {field}=...")
        if field in values:
            raise ConditioningError(f"'{text}' says {field} twice")
        values[field] = _value(text, field, value, kinds[field])
    try:
        return replace(method, **values)
    except ConditioningError as error:
        raise ConditioningError(f"'{text}': {error}") from error


def method_name(method: Method) -> str:
    """The shortest text that :func:`parse_method` reads as this method.

    >>> method_name(Spectral(kappa=1.5)), method_name(Spectral.paper())
    ('spectral:kappa=1.5', 'paper')
    """
    for name in reversed(_NAMES):
        if _NAMES[name]() == method:
            return name
    default = type(method)()
    changed = [
        f.name for f in fields(method) if getattr(method, f.name) != getattr(default, f.name)
    ]
    written = (f"{name}={_text(getattr(method, name))}" for name in changed)
    return f"{_kebab(type(method).__name__)}:{','.join(written)}"


def _text(value: object) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _value(text: str, field: str, value: str, kind: Any) -> Any:
    """A value as the type of its field asks for it."""
    choices = [a for k in (get_args(kind) or (kind,)) for a in (k, *get_args(k))]
    if get_origin(kind) is Literal:
        choices = [str]
    if NoneType in choices and value.lower() == "none":
        return None
    if bool in choices and value.lower() in ("true", "false"):
        return value.lower() == "true"
    for number in (int, float):
        if number in choices:
            try:
                return number(value)
            except ValueError:
                continue
    if str in choices:
        return value
    wanted = "true or false" if bool in choices else "a number"
    raise ConditioningError(f"'{text}': {field} must be {wanted}, not '{value}'")
