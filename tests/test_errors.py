"""Errors: one class catches all that the library raises on purpose."""

import importlib
import inspect
import pkgutil

import pytest

import attncond
from attncond import errors
from attncond.errors import ConditioningError

NEEDS = ("typer", "rich", "timm", "transformers", "pydantic", "accelerate", "lightning", "triton")


def own_classes():
    """Exceptions that any module of the library defines, where its libraries are installed."""
    for found in pkgutil.walk_packages(attncond.__path__, "attncond."):
        if found.name == "attncond.__main__":
            continue
        try:
            module = importlib.import_module(found.name)
        except ImportError as error:
            if (error.name or "").partition(".")[0] in NEEDS:
                continue
            raise
        for _, value in inspect.getmembers(module, inspect.isclass):
            if issubclass(value, Exception) and value.__module__ == found.name:
                yield value


def test_every_error_is_a_conditioning_error():
    # What is raised and caught inside the library, and turned into one of these on its way out.
    inner = {"Contradiction", "NotCoveredError", "ReplayError", "TokensMixedError", "YamlError"}
    found = set(own_classes())
    assert len(found) > 12
    others = {v.__name__ for v in found if not issubclass(v, ConditioningError | Warning)}
    assert others - inner == set()


@pytest.mark.parametrize("name", [n for n in vars(errors) if n.endswith("Error")])
def test_errors_are_exported_and_explained(name):
    error = getattr(errors, name)
    assert getattr(attncond, name) is error
    assert inspect.getdoc(error) != inspect.getdoc(ConditioningError) or error is ConditioningError
    with pytest.raises(ConditioningError, match=r"^what to do$"):
        raise error("what to do")
