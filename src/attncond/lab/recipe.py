"""Recipes: one YAML file per experiment, read, inherited, overridden and checked.

A recipe has ``name``, ``title``, ``tables`` and three kinds of settings: ``common``, ``forms``
(paper, small, smoke) and ``variants`` (what is compared). ``base`` names a recipe to start from and
``keep`` which of its variants stay (all unless said). A variant may start from another recipe's:
``from: swin-cifar10/spectral``. Later settings win, key by key:

    base (or from), common, form, variant, --set

A setting that names another model drops the ``model.kwargs`` that were meant for the one before.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from attncond.errors import ConditioningError
from attncond.lab.config import (
    FORMS,
    Augment,
    Config,
    Contradiction,
    Data,
    Form,
    Model,
    Optim,
    Schedule,
    Section,
    Train,
    Watch,
)
from attncond.lab.reading import YamlError, parse_yaml

__all__ = [
    "FORMS",
    "Augment",
    "Config",
    "Data",
    "Form",
    "Model",
    "Optim",
    "Recipe",
    "RecipeError",
    "Schedule",
    "Train",
    "Watch",
    "list_recipes",
    "load",
]

Tree = dict[str, Any]

_KEYS = ("name", "title", "tables", "base", "keep", "common", "forms", "variants")
_IDENTITY = {"recipe": "NAME", "form": "--form", "variant": "--variants", "seed": "--seeds"}


class RecipeError(ConditioningError):
    """A recipe, or what was set on top of it, cannot be run; the message names the key."""


@dataclass(frozen=True)
class Layer:
    """Settings and where they were written."""

    origin: str
    tree: Tree


@dataclass(frozen=True)
class Recipe:
    """One experiment: three forms of it, and the variants that it compares."""

    name: str
    title: str
    tables: tuple[str, ...]
    origin: str
    layers: Mapping[str, tuple[Layer, ...]] = field(repr=False)
    variant_layers: Mapping[str, tuple[Layer, ...]] = field(repr=False)

    @property
    def forms(self) -> dict[str, Tree]:
        """The settings of each form, without any variant."""
        return {form: _merged(layers) for form, layers in self.layers.items()}

    @property
    def variants(self) -> dict[str, Tree]:
        """What each variant changes."""
        return {name: _merged(layers) for name, layers in self.variant_layers.items()}

    def config(
        self,
        form: str = "small",
        variant: str = "baseline",
        seed: int = 0,
        overrides: Mapping[str, Any] | None = None,
    ) -> Config:
        """The settings of one run. ``overrides`` maps dotted keys to values written as YAML.

        Raises:
            RecipeError: No such form or variant, or settings that cannot be run.

        >>> load("vit-cifar10").config("small", "tuned", overrides={"optim.lr": "5e-4"}).optim.lr
        0.0005
        """
        layers = [*self._layers(form, variant), *_set(overrides or {})]
        identity = {"recipe": self.name, "form": form, "variant": variant, "seed": seed}
        tree = _merged(layers)
        if isinstance(tree.get("methods"), str):  # --set methods=spectral
            tree["methods"] = [tree["methods"]]
        try:
            return Config.model_validate({**tree, **identity})
        except ValidationError as error:
            where = f"recipe '{self.name}', form {form}, variant {variant}"
            raise RecipeError(_explain(error, layers, where)) from error

    def check(self) -> None:
        """Refuse now what any form or variant would refuse when it is run."""
        for form in self.layers:
            for variant in self.variant_layers:
                self.config(form, variant)

    def _layers(self, form: str, variant: str) -> list[Layer]:
        if form not in self.layers:
            raise RecipeError(_unknown(f"recipe '{self.name}' has no form", form, self.layers))
        if variant not in self.variant_layers:
            raise RecipeError(
                _unknown(f"recipe '{self.name}' has no variant", variant, self.variant_layers)
            )
        own = self.variant_layers[variant]
        source = _merged(own).get("from")
        below: list[Layer] = []
        if source is not None:
            if not isinstance(source, str):
                raise RecipeError(f"{own[-1].origin}: from must be RECIPE/VARIANT, not {source!r}")
            name, _, other = source.partition("/")
            below = load(name)._layers(form, other or "baseline")
        without = [Layer(x.origin, {k: v for k, v in x.tree.items() if k != "from"}) for x in own]
        return [*below, *self.layers[form], *without]


def list_recipes() -> list[Recipe]:
    """The recipes that come with the library, by name.

    >>> "vit-cifar10" in [recipe.name for recipe in list_recipes()]
    True
    """
    return [load(name) for name in _names()]


def load(name: str | Path) -> Recipe:
    """A recipe of the library by its name, or a file by its path.

    Raises:
        RecipeError: There is none, or it cannot be read or run.
    """
    text = str(name)
    if isinstance(name, Path) or text.endswith((".yaml", ".yml")) or "/" in text:
        path = Path(name)
        try:
            content = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise RecipeError(f"cannot read the recipe {path}: {reason}") from error
        recipe = _recipe(content, str(path), ())
        recipe.check()
        return recipe
    return _built_in(text, ())


@cache
def _names() -> tuple[str, ...]:
    files = resources.files("attncond.lab") / "recipes"
    return tuple(sorted(f.name[:-5] for f in files.iterdir() if f.name.endswith(".yaml")))


@cache
def _built_in(name: str, trail: tuple[str, ...]) -> Recipe:
    if name not in _names():
        raise RecipeError(
            _unknown("there is no recipe", name, _names())
            + " A recipe of your own is given by its path (ending in .yaml)."
        )
    if name in trail:
        raise RecipeError(f"recipes build on each other in a ring: {' -> '.join((*trail, name))}")
    file = resources.files("attncond.lab") / "recipes" / f"{name}.yaml"
    recipe = _recipe(file.read_text(encoding="utf-8"), f"{name}.yaml", (*trail, name))
    if recipe.name != name:
        raise RecipeError(f"{name}.yaml: name is '{recipe.name}', but the file says '{name}'")
    return recipe


def _recipe(content: str, origin: str, trail: tuple[str, ...]) -> Recipe:
    try:
        tree = parse_yaml(content)
    except YamlError as error:
        raise RecipeError(f"{origin}: {error}") from error
    _mapping(tree, origin, "a recipe")
    for key in tree:
        if key not in _KEYS:
            raise RecipeError(f"{origin}: {_unknown('a recipe has no key', key, _KEYS)}")
    for key in ("name", "title"):
        if not isinstance(tree.get(key), str) or not tree[key].strip():
            raise RecipeError(f"{origin}: {key} is missing; it must be a text")
    tables, keep, base_name = (tree.get(k) for k in ("tables", "keep", "base"))
    for key, value in (("tables", tables), ("keep", keep)):
        if value is not None and not (
            isinstance(value, list) and all(isinstance(x, str) for x in value)
        ):
            raise RecipeError(f"{origin}: {key} must be a list of texts, not {value!r}")
    if base_name is not None and not isinstance(base_name, str):
        raise RecipeError(f"{origin}: base must be the name of a recipe, not {base_name!r}")
    base = _built_in(base_name, trail) if base_name else None
    common = _mapping(tree.get("common") or {}, origin, "common")
    forms = _mapping(tree.get("forms") or {}, origin, "forms")
    for form in forms:
        if form not in FORMS:
            raise RecipeError(f"{origin}: {_unknown('there is no form', form, FORMS)}")
    layers: dict[str, tuple[Layer, ...]] = {}
    for form in FORMS:
        if form not in forms and (base is None or form not in base.layers):
            continue
        own = [Layer(f"{origin} (common)", common)] if common else []
        if settings := _mapping(forms.get(form) or {}, origin, f"forms.{form}"):
            own.append(Layer(f"{origin} (forms.{form})", settings))
        layers[form] = (base.layers.get(form, ()) if base else ()) + tuple(own)
    if not layers:
        raise RecipeError(f"{origin}: forms is missing; there are {', '.join(FORMS)}")
    inherited = dict(base.variant_layers) if base else {}
    for name in keep or ():
        if name not in inherited:
            raise RecipeError(f"{origin}: keep: {_unknown('the base has no', name, inherited)}")
    variants = {k: v for k, v in inherited.items() if keep is None or k in keep}
    for name, changes in _mapping(tree.get("variants") or {}, origin, "variants").items():
        if not isinstance(name, str) or not name or set(name) & set("/\\ \t\n") or name[0] == ".":
            raise RecipeError(f"{origin}: variants: {name!r} cannot name a folder")
        settings = _mapping(changes or {}, origin, f"variants.{name}")
        variants[name] = (
            *variants.get(name, ()),
            Layer(f"{origin} (variants.{name})", settings),
        )
    if not variants:
        raise RecipeError(f"{origin}: variants is missing; at least baseline: {{}}")
    if tables is None:
        tables = base.tables if base else ()
    return Recipe(tree["name"], tree["title"], tuple(tables), origin, layers, variants)


def _mapping(value: Any, origin: str, key: str) -> Tree:
    if not isinstance(value, dict) or not all(isinstance(k, str) for k in value):
        raise RecipeError(f"{origin}: {key} must map keys to values, not {value!r}")
    return value


def _set(overrides: Mapping[str, Any]) -> Iterator[Layer]:
    for key, text in overrides.items():
        origin = f"--set {key}={text}"
        parts = key.split(".")
        if not all(parts):
            raise RecipeError(f"{origin}: '{key}' is no key; write it like optim.lr=1e-3")
        if key in _IDENTITY:
            raise RecipeError(f"{origin}: {key} is chosen with {_IDENTITY[key]}, not with --set")
        try:
            value = parse_yaml(text) if isinstance(text, str) else text
        except YamlError as error:
            raise RecipeError(f"{origin}: {error}") from error
        for part in reversed(parts):
            value = {part: value}
        yield Layer(origin, value)


def _merged(layers: Iterator[Layer] | list[Layer] | tuple[Layer, ...]) -> Tree:
    tree: Tree = {}
    for layer in layers:
        model, above = tree.get("model"), layer.tree.get("model")
        if isinstance(model, dict) and isinstance(above, dict):
            named = above.get("name", model.get("name"))
            if named != model.get("name"):
                tree = {**tree, "model": {k: v for k, v in model.items() if k != "kwargs"}}
        tree = _merge(tree, layer.tree)
    return tree


def _merge(below: Tree, above: Tree) -> Tree:
    both = dict(below)
    for key, value in above.items():
        old = both.get(key)
        both[key] = (
            _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
        )
    return both


def _unknown(what: str, name: Any, known: Any) -> str:
    """'NAME', what it might have meant, and what there is."""
    names = [str(x) for x in known]
    close = difflib.get_close_matches(str(name), names, n=3, cutoff=0.5)
    guess = f" Did you mean {' or '.join(close)}?" if close else ""
    return f"{what} '{name}'.{guess} There are {', '.join(names)}."


def _explain(error: ValidationError, layers: list[Layer], where: str) -> str:
    lines = [_line(dict(problem), layers) for problem in error.errors()]
    return "\n".join([f"{where}:", *(f"  {line}" for line in lines)])


def _line(problem: Tree, layers: list[Layer]) -> str:
    """One problem: the key, what is wrong, and who said so."""
    cause = problem.get("ctx", {}).get("error")
    path = [str(p) for p in problem["loc"]]
    if isinstance(cause, Contradiction):
        path = cause.key.split(".")
    key, value = ".".join(path), problem["input"]
    if problem["type"] == "missing":
        return f"{key} is missing"
    if problem["type"] == "extra_forbidden":
        message = _unknown_key(path)
    elif isinstance(cause, Contradiction):
        message = f"{key}: {cause}"
    else:
        said = problem["msg"].removeprefix("Input ").replace("should be", "must be")
        message = f"{key} {said}, not {value!r}"
    origin = next((x.origin for x in reversed(layers) if _has(x.tree, path)), None)
    return f"{message} ({origin})" if origin else message


def _has(tree: Any, path: list[str]) -> bool:
    for part in path:
        if isinstance(tree, list | tuple):
            return True
        if not isinstance(tree, dict) or part not in tree:
            return False
        tree = tree[part]
    return True


def _unknown_key(path: list[str]) -> str:
    section: type[BaseModel] = Config
    for part in path[:-1]:
        section = _section(section.model_fields[part].annotation) or section
    known = [name for name in section.model_fields if name not in _IDENTITY]
    message = f"there is no key '{'.'.join(path)}'."
    close = difflib.get_close_matches(path[-1], known, n=2, cutoff=0.6)
    prefix = ".".join(path[:-1])
    guesses = [f"{prefix}.{name}" if prefix else name for name in close]
    guesses += [k for k in _all_keys(Config) if k.split(".")[-1] == path[-1] and k not in guesses]
    if guesses:
        message += f" Did you mean {' or '.join(guesses)}?"
    return f"{message} {prefix or 'A config'} has {', '.join(known)}."


def _section(annotation: Any) -> type[Section] | None:
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, Section):
            return kind
    return None


def _all_keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, info in section.model_fields.items():
        inner = _section(info.annotation)
        if inner is not None:
            yield from _all_keys(inner, f"{prefix}{name}.")
        elif prefix or name not in _IDENTITY:
            yield prefix + name
