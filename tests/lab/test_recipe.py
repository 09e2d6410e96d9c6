from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from attncond.lab.config import Config, RecipeError
from attncond.lab.recipe import list_recipes, load

NAMES = [recipe.name for recipe in list_recipes()]
ARCHITECTURES = ("vit", "deit", "swin", "xcit", "davit")
MODELS = {
    "vit": ("vit_b", "vit_small32"),
    "deit": ("deit_b", "deit_small32"),
    "swin": ("swin_b", "swin_small32"),
    "xcit": ("xcit_m24", "xcit_small32"),
    "davit": ("davit_b", "davit_small32"),
}
MINIMAL = """
name: mine
title: My own
forms:
  small:
    data: {name: cifar10, image_size: 32}
    model: {name: vit_small32}
    optim: {lr: 1e-3}
    schedule: {epochs: 2}
    train: {batch_size: 8}
variants:
  baseline: {}
"""


def written(folder: Path, text: str, name: str = "mine.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


# The recipes that come with the library.


@pytest.mark.parametrize("name", NAMES)
def test_every_form_of_every_variant_can_be_run(name: str) -> None:
    recipe = load(name)
    assert recipe.name == name
    assert recipe.title
    for form in recipe.forms:
        for variant in recipe.variants:
            config = recipe.config(form, variant, 3)
            assert (config.recipe, config.form, config.variant, config.seed) == (
                name,
                form,
                variant,
                3,
            )
            assert Config.model_validate_json(config.model_dump_json()) == config
            assert Config.model_validate(json.loads(config.model_dump_json())) == config


def test_every_experiment_of_the_vision_part_has_a_recipe() -> None:
    told = {table for recipe in list_recipes() for table in recipe.tables}
    for model in ("ViT-B", "DeiT-B", "Swin-B", "XCiT-M", "DaViT-B"):
        assert {f"table1:{model}", f"table7:{model}"} <= told
    assert {f"table{n}" for n in (5, 6, 7, 8, 9)} <= told
    assert {f"figure{n}" for n in (2, 3, *range(5, 13))} <= told
    assert {"figure-pre2", "figure-pre3"} <= told


@pytest.mark.parametrize("name", [n for n in NAMES if n != "digits"])
def test_a_recipe_has_three_forms(name: str) -> None:
    assert list(load(name).forms) == ["paper", "small", "smoke"]


def test_a_newcomer_needs_no_files() -> None:
    recipe = load("digits")
    assert list(recipe.forms) == ["small", "smoke"]
    assert {recipe.config(form).data.name for form in recipe.forms} == {"digits"}


@pytest.mark.parametrize("name", NAMES)
def test_smoke_runs_anywhere(name: str) -> None:
    recipe = load(name)
    for variant in recipe.variants:
        config = recipe.config("smoke", variant)
        config.check_device("cpu")
        assert config.data.name == "digits"
        assert config.train.precision == "fp32"
        assert not config.train.compile
        assert config.data.limit is not None
        assert config.data.limit <= 200
        assert config.schedule.epochs <= 2


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_architecture_is_the_same_in_every_recipe(architecture: str) -> None:
    large, small = MODELS[architecture]
    for name in (f"{architecture}-cifar10", f"{architecture}-tinyimagenet"):
        recipe = load(name)
        assert recipe.config("paper").model.name == large
        assert recipe.config("small").model.name == recipe.config("smoke").model.name == small
    for name in ("layernorm", "theorems", "epochs-to-baseline"):
        recipe, own = load(name), load(f"{architecture}-cifar10")
        for form in ("paper", "small", "smoke"):
            a, b = recipe.config(form, architecture), own.config(form)
            same = {"recipe": "", "variant": ""}
            assert a.model_copy(update=same) == b.model_copy(update=same)


def test_the_small_vit_is_trained_as_the_first_experiment_was() -> None:
    c = load("vit-cifar10").config("small")
    assert (c.schedule.epochs, c.train.batch_size, c.optim.lr, c.optim.weight_decay) == (
        20,
        256,
        1e-3,
        0.05,
    )
    assert (c.optim.clip, c.train.label_smoothing, c.train.precision) == (1.0, 0.1, "bf16")
    assert (c.data.augment.crop, c.data.augment.flip, c.data.validation) == (4, True, 0.1)


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [  # epochs, warm-up, clip, drop path, jitter, repeats, EMA
        ("vit", (300, 5, None, 0.1, 0.3, 3, None)),
        ("deit", (300, 5, None, 0.1, 0.3, 3, 0.99996)),
        ("swin", (300, 20, 5.0, 0.5, 0.4, 1, None)),
        ("xcit", (400, 5, None, 0.15, 0.4, 3, 0.99996)),
        ("davit", (300, 20, None, 0.4, 0.4, 1, None)),
    ],
)
def test_paper_forms_have_the_original_settings(
    architecture: str, expected: tuple[float | None, ...]
) -> None:
    c = load(f"{architecture}-cifar10").config("paper")
    a = c.data.augment
    assert (
        c.schedule.epochs,
        c.schedule.warmup_epochs,
        c.optim.clip,
        c.model.drop_path,
        a.jitter,
        a.repeats,
        c.train.ema,
    ) == expected
    assert (c.train.batch_size, c.optim.lr, c.schedule.min_lr) == (1024, 1e-3, 1e-5)
    assert (a.mixup, a.cutmix, a.erase, c.train.label_smoothing) == (0.8, 1.0, 0.25, 0.1)
    assert (a.randaugment, c.data.name, c.data.image_size) == (
        "rand-m9-mstd0.5-inc1",
        "image_folder",
        224,
    )


def test_table_5_has_each_lambda_of_the_paper_in_both_forms() -> None:
    recipe = load("vit-lambda")
    for lam in (2, 4, 6, 8, 10, 12, 14, 16):
        (literal,) = recipe.config("small", f"lambda-{lam}").conditioners()
        (preserving,) = recipe.config("small", f"norm-lambda-{lam}").conditioners()
        assert (literal.lam, literal.preserve_norm) == (lam, False)
        assert (preserving.lam, preserving.preserve_norm) == (lam, True)
    for kappa in (1.25, 1.5, 2, 3, 5):
        for prefix, preserve in (("", False), ("norm-", True)):
            (method,) = recipe.config("small", f"{prefix}kappa-{kappa:g}").conditioners()
            assert (method.kappa, method.preserve_norm) == (kappa, preserve)
    assert all(recipe.config(form).watch.probe for form in recipe.forms)


def test_table_6_differs_by_layer_norm_alone() -> None:
    recipe = load("layernorm")
    for variant in recipe.variants:
        if not variant.endswith("-noln"):
            a, b = (recipe.config("small", v) for v in (variant, f"{variant}-noln"))
            assert (a.model.norm, b.model.norm) == (True, False)
            same = {"variant": "", "model": None}
            assert a.model_copy(update=same) == b.model_copy(update=same)


# Inheritance.


def test_later_settings_win_key_by_key(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """
name: mine
title: My own
base: vit-cifar10
keep: [baseline, tuned]
common: {optim: {lr: 3e-3, eps: 1e-6}, model: {drop_path: 0.1}}
forms: {small: {optim: {eps: 1e-7}, schedule: {epochs: 30}}}
variants: {tuned: {optim: {betas: [0.9, 0.95]}}, other: {schedule: {epochs: 40}}}
""",
    )
    recipe = load(path)
    assert list(recipe.variants) == ["baseline", "tuned", "other"]
    assert recipe.tables == load("vit-cifar10").tables
    c = recipe.config("small", "tuned", 0, {"optim.clip": "2.5"})
    assert (c.optim.lr, c.optim.eps, c.optim.qkv_lr) == (3e-3, 1e-7, 0.25)
    assert (c.optim.betas, c.optim.clip, c.optim.weight_decay) == ((0.9, 0.95), 2.5, 0.05)
    assert (c.schedule.epochs, recipe.config("small", "other").schedule.epochs) == (30, 40)
    assert recipe.config("paper").optim.eps == 1e-6


def test_main_variants_are_those_of_the_base_or_kept_and_the_own(tmp_path: Path) -> None:
    def main(more: str) -> tuple[str, ...]:
        text = f"name: m\ntitle: M\nbase: vit-cifar10\nvariants: {{own: {{}}, tuned: {{}}}}\n{more}"
        return load(written(tmp_path, text)).main

    ours = load("vit-cifar10")
    assert {"baseline", "tuned", "spectral", "paper"} < set(ours.main) < set(ours.variants)
    assert main("") == (*ours.main, "own")
    assert main("keep: [mimetic, gap]") == ("mimetic", "gap", "own", "tuned")
    assert main("keep: []") == ("own", "tuned")
    assert main("main: [gap, own]") == ("gap", "own")
    assert load(written(tmp_path, MINIMAL)).main == ("baseline",)


def test_another_model_drops_the_arguments_of_the_one_before() -> None:
    smoke = load("vit-cifar10").config("smoke", overrides={"model.name": "swin_small32"})
    assert smoke.model.kwargs == {}
    same = load("vit-cifar10").config("smoke", overrides={"model.name": "vit_small32"})
    assert same.model.kwargs == {"depth": 2, "embed_dim": 48}


def test_a_base_may_be_a_file_beside_the_recipe(tmp_path: Path) -> None:
    written(tmp_path, MINIMAL)
    path = written(
        tmp_path, "name: b\ntitle: B\nbase: mine.yaml\ncommon: {optim: {lr: 5}}\n", "b.yaml"
    )
    assert load(path).config().optim.lr == 5


def test_a_variant_may_start_from_one_of_another_file(tmp_path: Path) -> None:
    written(tmp_path, MINIMAL + "  own: {methods: [gap]}\n")
    (tmp_path / "sub").mkdir()
    start = "{from: ../mine.yaml/own, optim: {lr: 5}}"
    text = f"name: b\ntitle: B\nforms: {{small: {{}}}}\nvariants: {{x: {start}}}"
    below = written(tmp_path, text, "sub/b.yaml")
    config = load(below).config("small", "x")
    assert (config.methods, config.optim.lr) == (("gap",), 5)
    # Inherited, it is still meant from where it was written.
    last = written(tmp_path, "name: c\ntitle: C\nbase: sub/b.yaml\nkeep: [x]\n", "c.yaml")
    assert load(last).config("small", "x").methods == ("gap",)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("none.yaml/own", "from: cannot read the recipe"),
        ("mine.yaml/own", "start from each other: mine/own -> mine/own"),
        ("mine.yaml/other", "from: recipe 'mine' has no variant 'other'"),
    ],
)
def test_files_that_a_variant_cannot_start_from(tmp_path: Path, source: str, words: str) -> None:
    path = written(tmp_path, f"{MINIMAL}  own: {{from: {source}}}\n")
    with pytest.raises(RecipeError, match=words):
        load(path)


def test_rings_are_refused(tmp_path: Path) -> None:
    written(tmp_path, MINIMAL + "base: b.yaml\n")
    path = written(tmp_path, MINIMAL + "base: mine.yaml\n", "b.yaml")
    with pytest.raises(RecipeError, match="in a ring"):
        load(path)


def test_reading_changes_nothing_that_is_shared() -> None:
    recipe = load("vit-cifar10")
    before = json.dumps([recipe.forms, recipe.variants])
    recipe.config("smoke", "spectral", 0, {"model.kwargs.depth": "7", "methods": "gap"})
    assert json.dumps([recipe.forms, recipe.variants]) == before


# --set.

KEYS: dict[str, st.SearchStrategy[Any]] = {
    "optim.lr": st.floats(1e-5, 1.0),
    "optim.betas": st.tuples(st.floats(0, 0.99), st.floats(0, 0.99)).map(list),
    "optim.qkv_lr": st.floats(1e-3, 10),
    "optim.clip": st.none() | st.floats(0.1, 10),
    "schedule.epochs": st.integers(2, 1000),
    "train.batch_size": st.sampled_from([8, 64, 512]),
    "train.compile": st.booleans(),
    "train.precision": st.sampled_from(["fp32", "bf16", "fp16"]),
    "data.validation": st.floats(0, 0.5),
    "data.augment.randaugment": st.none() | st.just("rand-m9-n2"),
    "model.kwargs.depth": st.integers(1, 30),
    "methods": st.lists(st.sampled_from(["spectral", "gap", "precondition"]), unique=True),
    "watch.every": st.integers(0, 10_000),
}


@given(st.dictionaries(st.sampled_from(sorted(KEYS)), st.data(), max_size=6), st.data())
@settings(max_examples=100, deadline=None)
def test_what_is_set_is_what_one_gets(chosen: dict[str, object], data: st.DataObject) -> None:
    values = {key: data.draw(KEYS[key], label=key) for key in chosen}
    texts = {
        k: yaml.safe_dump(v, default_flow_style=True).split("\n...")[0] for k, v in values.items()
    }
    c = load("vit-cifar10").config("small", "baseline", 1, texts).model_dump()
    for key, value in values.items():
        found: Any = c
        for part in key.split("."):
            found = found[part]
        assert found == (tuple(value) if isinstance(value, list) else value)
    as_json = {k: json.dumps(v) for k, v in values.items()}
    assert load("vit-cifar10").config("small", "baseline", 1, as_json).model_dump() == c
    assert load("vit-cifar10").config("small", "baseline", 1, values).model_dump() == c


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
ANYTHING = st.recursive(
    LEAVES,
    lambda x: (
        st.lists(x, max_size=3)
        | st.dictionaries(st.text(max_size=4) | st.integers(), x, max_size=3)
    ),
    max_leaves=5,
)
WORDS = st.sampled_from(
    [
        "optim",
        "lr",
        "data",
        "model",
        "kwargs",
        "methods",
        "train",
        "augment",
        "x",
        "seed",
        "from",
        "",
    ]
)


@given(st.lists(WORDS, min_size=1, max_size=3).map(".".join), ANYTHING | st.text())
@settings(max_examples=300, deadline=None)
def test_whatever_is_set_gives_a_config_or_a_recipe_error(key: str, value: Any) -> None:
    try:
        config = load("vit-cifar10").config("smoke", "spectral", 0, {key: value})
    except RecipeError as error:
        message = str(error)
    else:
        message = json.dumps(config.model_dump(), allow_nan=False)
    assert key.split(".")[0] in message


@given(st.text(max_size=60) | ANYTHING.map(yaml.safe_dump))
@settings(max_examples=200, deadline=None)
def test_no_file_raises_anything_else(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.mktemp("recipe") / "x.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(RecipeError):
        load(path)


def test_one_method_needs_no_brackets() -> None:
    assert load("vit-cifar10").config(overrides={"methods": "gap"}).methods == ("gap",)
    assert load("vit-cifar10").config("small", "spectral", 0, {"methods": "[]"}).methods == ()


# Files and names that are refused.


def test_a_bad_value_is_traced_to_the_file_that_says_it(tmp_path: Path) -> None:
    path = written(tmp_path, MINIMAL.replace("baseline: {}", "baseline: {optim: {lr: high}}"))
    with pytest.raises(RecipeError, match=r"optim.lr must be.*mine.yaml, variants.baseline"):
        load(path)


def test_names_are_guessed() -> None:
    with pytest.raises(RecipeError, match=r"no recipe 'vit-cifar'. Did you mean vit-cifar10"):
        load("vit-cifar")
    with pytest.raises(RecipeError, match=r"no form 'tiny'. There are paper, small, smoke"):
        load("vit-cifar10").config("tiny")
    with pytest.raises(RecipeError, match=r"no variant 'spektral'. Did you mean spectral"):
        load("vit-cifar10").config("small", "spektral")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("title: My own", "titel: x", "a recipe has no key 'titel'. Did you mean title?"),
        ("title: My own", "", "title is missing"),
        ("name: mine", "name: 3", "name is missing; it must be a text"),
        ("name: mine", "name: a/b", "'a/b' cannot name a folder"),
        ("name: mine", "name: mine\ntables: table1", "tables must be a list of texts"),
        ("name: mine", "name: mine\nkeep: [x]", "keep is for the variants of a base, and there is"),
        ("name: mine", "name: mine\nbase: digits\nkeep: [x]", "keep: its base has no 'x'"),
        ("name: mine", "name: mine\nmain: [basline]", "main: there is no variant 'basline'. Did"),
        ("name: mine", "name: mine\nmain: []", "main names no variant; leave it out"),
        ("name: mine", "name: mine\nmain: all", "main must be a list of texts"),
        ("  baseline: {}", "  all: {}", "'all' asks for all of them"),
        ("name: mine", "name: mine\nname: yours", "the key 'name' stands there twice"),
        ("name: mine", "name: mine\nbase: [a]", "base must be the name of a recipe"),
        ("name: mine", "name: mine\nbase: vit-cifar", "base: there is no recipe 'vit-cifar'"),
        ("name: mine", "name: mine\nbase: nowhere.yaml", "base: cannot read the recipe"),
        ("name: mine", "name: [", "line"),
        ("  small:", "  large:", "there is no form 'large'"),
        ("  baseline: {}", "  ../x: {}", "'../x' cannot name a folder"),
        ("  baseline: {}", "  baseline: 3", "variants.baseline must map names to values, not 3"),
        ("variants:\n  baseline: {}", "", "variants is missing"),
        ("  baseline: {}", "  a: {from: 3}", "from must be RECIPE/VARIANT"),
        ("  baseline: {}", "  a: {from: nothing/b}", "from: there is no recipe 'nothing'"),
        ("  baseline: {}", "  a: {from: vit-cifar10/b}", "has no variant 'b'"),
        ("  baseline: {}", "  baseline: {seed: 3}", "baseline: seed is chosen with --seeds"),
        ("    schedule: {epochs: 2}\n", "    form: small\n", "small: form is chosen with --form"),
        ("name: mine", "name: mine\ncommon: {recipe: x}", "common: recipe is chosen with NAME"),
        ("name: mine", "name: mine\ncommon: []", "common must map names to values, not []"),
        ("    schedule: {epochs: 2}\n", "", "schedule is missing"),
        ("    train:", "    trian: {}\n    train:", "there is no key 'trian'. Did you mean train?"),
    ],
)
def test_a_file_that_cannot_be_read_says_why(
    tmp_path: Path, old: str, new: str, words: str
) -> None:
    assert old in MINIMAL
    path = written(tmp_path, MINIMAL.replace(old, new))
    with pytest.raises(RecipeError) as error:
        load(path)
    assert words in str(error.value)
    assert "mine" in str(error.value)


def test_a_file_that_is_not_there_or_not_text_is_told(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="No such file"):
        load(tmp_path / "none.yaml")
    with pytest.raises(RecipeError, match="directory"):
        load(tmp_path)
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match="not UTF-8"):
        load(tmp_path / "b.yaml")
