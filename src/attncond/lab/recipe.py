"""Recipes: one YAML file per experiment, read, inherited, overridden and checked.

A recipe has ``name``, ``title``, ``tables`` and three kinds of settings: ``common``, ``forms``
(paper, small, smoke) and ``variants`` (what is compared). ``base`` names a recipe to start from,
one of the library's or a file beside it, and ``keep`` which of its variants stay (all unless said).
``main`` names the variants that are run where none are asked for: unless said, those of the base
(or those that are kept) and the recipe's own.
A variant may start from another recipe's: ``from: swin-cifar10/spectral``, ``from: mine.yaml/own``.
Later settings win, key by key, lists as a whole:

    base (or from), common, form, variant, --set

A setting that names another model drops the ``model.kwargs`` that were meant for the one before.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from attncond.lab.complaints import IDENTITY, Layer, explain, unknown
from attncond.lab.config import FORMS, Config, RecipeError
from attncond.lab.reading import YamlError, parse_yaml

__all__ = ["Recipe", "list_recipes", "load"]

Tree = dict[str, Any]
Layers = tuple[Layer, ...]

_FROM_FILE = re.compile(r"(.+\.ya?ml)(/(.*))?")  # a file, and one of its variants
_KEYS = ("name", "title", "tables", "base", "keep", "common", "forms", "variants", "main")


@dataclass(frozen=True)
class Recipe:
    """One experiment: its forms, and the variants that it compares."""

    name: str
    title: str
    tables: tuple[str, ...]
    origin: str
    form_layers: Mapping[str, Layers] = field(repr=False)
    variant_layers: Mapping[str, Layers] = field(repr=False)
    main: tuple[str, ...]

    @property
    def forms(self) -> dict[str, Tree]:
        """The settings of each form, without any variant."""
        return {form: _merged(layers) for form, layers in self.form_layers.items()}

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
        point: Mapping[str, Any] | None = None,
    ) -> Config:
        """The settings of one run. ``overrides`` maps dotted keys to values written as YAML.

        ``point``, one of a grid, is more of them.

        Raises:
            RecipeError: No such form or variant, or settings that cannot be run.

        >>> load("vit-cifar10").config("small", "tuned", overrides={"optim.lr": "5e-4"}).optim.lr
        0.0005
        """
        said = (*_set(overrides or {}, "--set"), *_set(point or {}, "--grid"))
        layers = [*self._layers(form, variant, ()), *said]
        tree = _merged(layers)
        if isinstance(tree.get("methods"), str):  # --set methods=spectral
            tree["methods"] = [tree["methods"]]
        identity = {"recipe": self.name, "form": form, "variant": variant, "seed": seed}
        try:
            return Config.model_validate({**tree, **identity})
        except ValidationError as error:
            where = f"recipe '{self.name}', form {form}, variant {variant}"
            raise RecipeError(explain(error, layers, where)) from error

    def check(self) -> None:
        """Refuse now what any form or variant would refuse when it is run."""
        for form in self.form_layers:
            for variant in self.variant_layers:
                self.config(form, variant)

    def _layers(self, form: str, variant: str, trail: tuple[str, ...]) -> Layers:
        if form not in self.form_layers:
            raise RecipeError(unknown(f"recipe '{self.name}' has no form", form, self.form_layers))
        if variant not in self.variant_layers:
            raise RecipeError(
                unknown(f"recipe '{self.name}' has no variant", variant, self.variant_layers)
            )
        here = f"{self.name}/{variant}"
        if here in trail:
            raise RecipeError(f"variants start from each other: {' -> '.join((*trail, here))}")
        own = self.variant_layers[variant]
        source = _merged(own).get("from")
        below: Layers = ()
        if source is not None:
            if not isinstance(source, str):
                raise RecipeError(f"{own[-1].origin}: from must be RECIPE/VARIANT, not {source!r}")
            file = _FROM_FILE.fullmatch(source)
            name, _, other = file.groups() if file else source.partition("/")
            try:
                start = _file(Path(name), ()) if file else _built_in(name, ())
                below = start._layers(form, other or "baseline", (*trail, here))
            except RecipeError as error:
                raise RecipeError(f"{own[-1].origin}: from: {error}") from error
        stated = [Layer(x.origin, {k: v for k, v in x.tree.items() if k != "from"}) for x in own]
        return (*below, *self.form_layers[form], *stated)


def list_recipes() -> list[Recipe]:
    """The recipes that come with the library, by name.

    >>> "vit-cifar10" in [recipe.name for recipe in list_recipes()]
    True
    """
    return [load(name) for name in _names()]


def load(name: str | Path) -> Recipe:
    """A recipe of the library by its name, or a file by its path; a file is checked at once.

    Raises:
        RecipeError: There is none, or it cannot be read or run.
    """
    if isinstance(name, Path) or name.endswith((".yaml", ".yml")) or "/" in name:
        recipe = _file(Path(name), ())
        recipe.check()
        return recipe
    return _built_in(name, ())


@cache
def _names() -> tuple[str, ...]:
    files = (resources.files("attncond.lab") / "recipes").iterdir()
    return tuple(sorted(f.name[:-5] for f in files if f.name.endswith(".yaml")))


@cache
def _built_in(name: str, trail: tuple[str, ...]) -> Recipe:
    if name not in _names():
        raise RecipeError(
            unknown("there is no recipe", name, _names())
            + " A recipe of your own is given by its path (ending in .yaml)."
        )
    file = resources.files("attncond.lab") / "recipes" / f"{name}.yaml"
    return _recipe(file.read_text(encoding="utf-8"), f"{name}.yaml", None, _longer(trail, name))


def _file(path: Path, trail: tuple[str, ...]) -> Recipe:
    trail = _longer(trail, str(path.resolve()))
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise RecipeError(f"cannot read the recipe {path}: {reason}") from error
    return _recipe(text, str(path), path.parent, trail)


def _longer(trail: tuple[str, ...], name: str) -> tuple[str, ...]:
    if name in trail:
        raise RecipeError(f"recipes build on each other in a ring: {' -> '.join((*trail, name))}")
    return (*trail, name)


def _recipe(text: str, origin: str, folder: Path | None, trail: tuple[str, ...]) -> Recipe:
    """The recipe that a text says; ``folder`` is where a base that is a file is looked for."""
    try:
        tree = _mapping(parse_yaml(text), origin, "a recipe")
    except YamlError as error:
        raise RecipeError(f"{origin}: {error}") from error
    for key in tree:
        if key not in _KEYS:
            raise RecipeError(f"{origin}: {unknown('a recipe has no key', key, _KEYS)}")
    for key in ("name", "title"):
        if not isinstance(tree.get(key), str) or not tree[key].strip():
            raise RecipeError(f"{origin}: {key} is missing; it must be a text")
    _folder_name(tree["name"], origin, "name")
    base = _base(tree.get("base"), origin, folder, trail)
    tables = _texts(tree.get("tables"), origin, "tables")
    if tables is None:
        tables = base.tables if base else ()
    forms = _forms(tree, origin, base.form_layers if base else {})
    variants = _variants(tree, origin, folder, base.variant_layers if base else {})
    main = _main(tree, origin, base, variants)
    return Recipe(tree["name"], tree["title"], tables, origin, forms, variants, main)


def _base(name: Any, origin: str, folder: Path | None, trail: tuple[str, ...]) -> Recipe | None:
    if name is None:
        return None
    if not isinstance(name, str):
        raise RecipeError(f"{origin}: base must be the name of a recipe, not {name!r}")
    try:
        if folder is not None and name.endswith((".yaml", ".yml")):
            return _file(folder / name, trail)
        return _built_in(name, trail)
    except RecipeError as error:
        raise RecipeError(f"{origin}: base: {error}") from error


def _forms(tree: Tree, origin: str, inherited: Mapping[str, Layers]) -> dict[str, Layers]:
    common = _settings(tree.get("common"), origin, "common")
    forms = _mapping(tree.get("forms") or {}, origin, "forms")
    for form in forms:
        if form not in FORMS:
            raise RecipeError(f"{origin}: {unknown('there is no form', form, FORMS)}")
    layers: dict[str, Layers] = {}
    for form in FORMS:
        if form in forms or form in inherited:
            settings = _settings(forms.get(form), origin, f"forms.{form}")
            layers[form] = (
                *inherited.get(form, ()),
                Layer(f"{origin}, common", common),
                Layer(f"{origin}, forms.{form}", settings),
            )
    if not layers:
        raise RecipeError(f"{origin}: forms is missing; there are {', '.join(FORMS)}")
    return layers


def _variants(
    tree: Tree, origin: str, folder: Path | None, inherited: Mapping[str, Layers]
) -> dict[str, Layers]:
    keep = _texts(tree.get("keep"), origin, "keep")
    if keep and not inherited:
        raise RecipeError(f"{origin}: keep is for the variants of a base, and there is no base")
    for name in keep or ():
        if name not in inherited:
            raise RecipeError(f"{origin}: keep: {unknown('its base has no', name, inherited)}")
    layers = {k: v for k, v in inherited.items() if keep is None or k in keep}
    for name, changes in _mapping(tree.get("variants") or {}, origin, "variants").items():
        _folder_name(name, origin, "variants")
        if name == "all":
            raise RecipeError(f"{origin}: variants: 'all' asks for all of them and can name none")
        settings = _settings(changes, origin, f"variants.{name}")
        source = settings.get("from")
        if folder is not None and isinstance(source, str) and _FROM_FILE.fullmatch(source):
            settings = {**settings, "from": str(folder / source)}  # as it is meant by this file
        layers[name] = (*layers.get(name, ()), Layer(f"{origin}, variants.{name}", settings))
    if not layers:
        raise RecipeError(f"{origin}: variants is missing; at least baseline: {{}}")
    return layers


def _main(
    tree: Tree, origin: str, base: Recipe | None, variants: Mapping[str, Layers]
) -> tuple[str, ...]:
    stated = _texts(tree.get("main"), origin, "main")
    if stated is None:
        keep = _texts(tree.get("keep"), origin, "keep")
        inherited = keep if keep is not None else base.main if base else ()
        return tuple(dict.fromkeys((*inherited, *(tree.get("variants") or ()))))
    for name in stated:
        if name not in variants:
            raise RecipeError(f"{origin}: main: {unknown('there is no variant', name, variants)}")
    if not stated:
        raise RecipeError(f"{origin}: main names no variant; leave it out, or name some")
    return stated


def _settings(value: Any, origin: str, key: str) -> Tree:
    found = _mapping({} if value is None else value, origin, key)
    for name in found:
        if name in IDENTITY:
            raise RecipeError(f"{origin}: {key}: {name} is chosen with {IDENTITY[name]}")
    return found


def _mapping(value: Any, origin: str, key: str) -> Tree:
    if not isinstance(value, dict) or not all(isinstance(k, str) for k in value):
        raise RecipeError(f"{origin}: {key} must map names to values, not {value!r}")
    return value


def _texts(value: Any, origin: str, key: str) -> tuple[str, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(x, str) for x in value):
        raise RecipeError(f"{origin}: {key} must be a list of texts, not {value!r}")
    return tuple(value)


def _folder_name(name: str, origin: str, key: str) -> None:
    """Runs are kept in folders of these names."""
    if not name.isprintable() or not name or set(name) & set('/\\ :*?"<>|') or name[0] in ".-":
        raise RecipeError(f"{origin}: {key}: {name!r} cannot name a folder")


def _set(overrides: Mapping[str, Any], option: str) -> Iterator[Layer]:
    for key, text in overrides.items():
        origin = f"{option} {key}={text}"
        parts = key.split(".")
        if not all(part.strip() for part in parts):
            raise RecipeError(f"{origin}: '{key}' is no key; write it like optim.lr=1e-3")
        if parts[0] in IDENTITY:
            raise RecipeError(
                f"{origin}: {key} is chosen with {IDENTITY[parts[0]]}, not with {option}"
            )
        try:
            value = parse_yaml(text) if isinstance(text, str) else text
        except YamlError as error:
            raise RecipeError(f"{origin}: {error}") from error
        for part in reversed(parts):
            value = {part: value}
        yield Layer(origin, value)


def _merged(layers: Iterable[Layer]) -> Tree:
    tree: Tree = {}
    for layer in layers:
        model, above = tree.get("model"), layer.tree.get("model")
        if isinstance(model, dict) and isinstance(above, dict):
            renamed = above.get("name", model.get("name")) != model.get("name")
            if renamed and "name" in model:
                tree = {**tree, "model": {k: v for k, v in model.items() if k != "kwargs"}}
        tree = _merge(tree, layer.tree)
    return tree


def _merge(below: Tree, above: Tree) -> Tree:
    both = dict(below)
    for key, value in above.items():
        old = both.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            value = _merge(old, value)
        both[key] = value
    return both
