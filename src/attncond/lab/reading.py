"""YAML as people write it: 1e-3 is a number, and a key said twice is an error."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import yaml


class YamlError(ValueError):
    """A text that is no YAML, with the line."""


class _Loader(yaml.SafeLoader):
    """YAML 1.1's safe loader, with two of its traps taken out."""


# YAML 1.1 wants a dot and a signed exponent, so that PyYAML reads 1e-3 as a text.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[str] = set()
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            continue
        if key.value in seen:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key '{key.value}' stands there twice", key.start_mark
            )
        seen.add(key.value)
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)


def parse_yaml(text: str) -> Any:
    """The value that a YAML text says.

    >>> parse_yaml("{lr: 1e-3, on: [digits, true]}")
    {'lr': 0.001, True: ['digits', True]}
    """
    with _told():
        return yaml.load(text, _Loader)  # a SafeLoader: builds no objects


def split_values(text: str) -> list[str]:
    """The texts of several YAML values with commas between them.

    >>> split_values("1e-3, [0.9, 0.99], 'spectral:kappa=2,scope=head'")
    ['1e-3', '[0.9, 0.99]', "'spectral:kappa=2,scope=head'"]
    """
    with _told():
        parse_yaml(f"[{text}]")
        whole = yaml.compose(f"[{text}]", _Loader)
    assert isinstance(whole, yaml.SequenceNode)  # the brackets are ours
    return [f"[{text}]"[n.start_mark.index : n.end_mark.index].strip() for n in whole.value]


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        what = getattr(error, "problem", None) or str(error)
        raise YamlError(f"line {mark.line + 1}: {what}" if mark else what) from error
    except (ValueError, TypeError) as error:  # no such date, an int too long, a list as a key
        raise YamlError(str(error)) from error
    except RecursionError as error:
        raise YamlError("nested too deeply") from error
