"""What inspect() finds, how it is shown, and how a user's own adapters take part."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cases import CASES, Case
from named_modules import holding, named, with_heads
from torch import nn

import attncond as ac
from attncond import adapters
from attncond.inspection import Plan, table


@pytest.fixture(autouse=True)
def _registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it."""
    ac.inspect(nn.Identity())  # loads the adapters of the libraries
    monkeypatch.setattr(adapters, "_REGISTRY", dict(adapters._REGISTRY))


class Own(nn.Module):
    """A user's attention, which nothing but an adapter can read."""

    def __init__(self, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.qkv = heads, nn.Linear(8, 24)


class Child(Own):
    """A subclass of it."""


def read_own(module: Own) -> ac.Site:
    return ac.fused(module.qkv, heads=module.heads)


# What is found ------------------------------------------------------------------------------------


def test_paths_of_sites_and_of_their_parameters() -> None:
    model = nn.ModuleDict({"a": nn.TransformerEncoderLayer(8, 2), "b": nn.Identity()})
    (site,) = ac.inspect(model)
    assert site.path == "a.self_attn"
    assert site.module is model["a"].self_attn
    assert [(p.role, p.path, p.name) for p in site.projections] == [
        (role, "a.self_attn", "in_proj_weight") for role in "qkv"
    ]


def test_a_model_that_is_an_attention_itself() -> None:
    plan = ac.inspect(nn.MultiheadAttention(8, 2))
    assert [s.path for s in plan] == [""]
    assert "(the model)" in str(plan)
    assert plan.to_dict()["sites"][0]["projections"][0]["parameter"] == "in_proj_weight"
    (row,) = ac.inspect(Own()).unsupported
    assert row.path == ""
    assert "(the model)" in str(ac.inspect(Own()))


def test_shared_modules_are_listed_once_under_their_first_path() -> None:
    known, unknown = nn.MultiheadAttention(8, 2), Own()
    plan = ac.inspect(nn.ModuleList([known, unknown, known, nn.ModuleList([known, unknown])]))
    assert [s.path for s in plan] == ["0"]
    assert [u.path for u in plan.unsupported] == ["1"]


def test_a_weight_that_another_module_owns_is_listed_where_it_lives() -> None:
    class Borrower(nn.Module):
        pass

    @ac.register(Borrower)
    def adapter(module: Borrower) -> ac.Site:
        return ac.fused(module.qkv, heads=2)

    shared, first, second = nn.Linear(8, 24), Borrower(), Borrower()
    first.qkv = second.qkv = shared
    sites = ac.inspect(nn.ModuleDict({"x": first, "y": second})).sites
    assert [s.path for s in sites] == ["x", "y"]
    assert {p.path for s in sites for p in s.projections} == {"x.qkv"}


def test_projections_that_two_attentions_share_make_two_sites() -> None:
    first, second = (holding("Attention", inner=nn.Linear(4, 4)) for _ in range(2))
    for name in ("q_proj", "k_proj", "v_proj"):
        shared = nn.Linear(4, 4)
        for module in (first, second):
            setattr(with_heads(module), name, shared)
    assert [s.path for s in ac.inspect(nn.ModuleList([first, second]))] == ["0", "1"]


def test_inspection_changes_nothing() -> None:
    model = nn.TransformerDecoderLayer(8, 2)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    attributes = {n: set(vars(m)) for n, m in model.named_modules()}
    first, second = ac.inspect(model), ac.inspect(model)
    assert str(first) == str(second)
    assert [s.kind for s in first] == ["self", "cross"]
    assert {n: set(vars(m)) for n, m in model.named_modules()} == attributes
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_a_conditioned_model_reads_as_the_stock_one(case: Case) -> None:
    model = case.make()
    before = ac.inspect(model)
    ac.condition(model, ac.Spectral())
    after = ac.inspect(model)
    assert after.to_dict() == before.to_dict()
    for a, b in zip(after, before, strict=True):
        for p, q in zip(a.projections, b.projections, strict=True):
            assert p.raw is q.raw
            assert torch.equal(p.rows, q.rows)


def test_only_modules_are_inspected() -> None:
    with pytest.raises(TypeError, match=r"torch\.nn\.Module, not dict"):
        ac.inspect({})


def test_nothing_is_found_where_nothing_is() -> None:
    plan = ac.inspect(nn.Sequential(nn.Linear(3, 3), nn.Conv2d(3, 3, 3), nn.LSTM(3, 3)))
    assert (len(plan), plan.unsupported) == (0, ())
    assert str(plan) == "0 attention sites, 0 not supported"


def test_unknown_attention_inside_a_known_layer_is_reported() -> None:
    layer = nn.TransformerDecoderLayer(8, 2)
    layer.self_attn = Own()
    for model, prefix in ((layer, ""), (nn.ModuleList([layer]), "0.")):
        plan = ac.inspect(model)
        assert [(s.path, s.kind) for s in plan] == [(f"{prefix}multihead_attn", "cross")]
        assert [u.path for u in plan.unsupported] == [f"{prefix}self_attn"]


def test_parts_of_an_unknown_attention_are_not_reported_again() -> None:
    outer, inner = Own(), Own()
    outer.inner = inner
    assert [u.path for u in ac.inspect(nn.ModuleList([outer])).unsupported] == ["0"]


@pytest.mark.parametrize("prefix", ["", "0."])
def test_unknown_attention_around_a_known_one_is_reported(prefix: str) -> None:
    outer = Own()
    outer.inner = nn.MultiheadAttention(8, 2)
    plan = ac.inspect(nn.ModuleList([outer]) if prefix else outer)
    assert [s.path for s in plan] == [f"{prefix}inner"]
    assert [u.path for u in plan.unsupported] == [prefix.removesuffix(".")]


def test_what_is_settled_does_not_make_its_parent_look_like_attention() -> None:
    parent = nn.Module()
    parent.qkv = nn.MultiheadAttention(8, 2)
    parent.query, parent.key = nn.ModuleList([nn.MultiheadAttention(8, 2)]), nn.Identity()
    plan = ac.inspect(nn.ModuleList([parent]))
    assert [s.path for s in plan] == ["0.qkv", "0.query.0"]
    assert not plan.unsupported


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (named("Attention", "to_qkv_and_mask", "to_out"), "order of rows in 'to_qkv_and_mask'"),
        (named("Block", "img_attn_qkv", "txt_attn_qkv"), "order of rows in 'img_attn_qkv'"),
        (named("Parallel", "to_qkv_mlp_proj", "to_out"), "order of rows in 'to_qkv_mlp_proj'"),
        (named("Conv", "kqv_lin", "out_lin"), "order of rows in 'kqv_lin'"),
        (named("Shared", "toqk", "tov"), "order of rows in 'toqk'"),
        (named("Layer", "linear_kv", "linear_out"), "order of rows in 'linear_kv'"),
        (named("Block", "fused_attn_ff_proj"), "order of rows in 'fused_attn_ff_proj'"),
        (named("Layer", "query_projection", "key_projection"), "were not recognised"),
        (named("Conv", "lin_query", "lin_key"), "were not recognised"),
        (named("ReusedAttention", "to_v", "to_out"), "were not recognised"),
        (holding("DepthAttention", query=nn.Parameter(torch.zeros(4))), "were not recognised"),
        (named("MultiHeadedAttention", "first", "last"), "its class is named as attention"),
        (named("MultiheadSelfAttention", "weight"), "its class is named as attention"),
        (with_heads(named("WindowAttention", "in_proj", "out")), "its class is named as attention"),
    ],
)
def test_what_looks_like_attention_is_reported(module: nn.Module, reason: str) -> None:
    plan = ac.inspect(nn.Sequential(module))
    (row,) = plan.unsupported
    assert reason in row.reason
    assert not plan.sites


@pytest.mark.parametrize(
    "module",
    [
        named("SelfAttentionOutput", "dense"),
        named("RwkvSelfAttention", "receptance", "key", "value"),
        named("Decoder", "query_scale", "query_pos_head"),
        named("SpatialAttention", "conv"),
        holding("RelativeAttentionBias", bias_values=nn.Embedding(9, 2)),
        named("Embeddings", "tok_embeddings"),
        named("MoCo", "encoder_q", "encoder_k"),
        nn.Module(),
    ],
)
def test_what_only_sounds_like_attention_is_not(module: nn.Module) -> None:
    assert not ac.inspect(nn.Sequential(module)).unsupported


@pytest.mark.parametrize("registered", [False, True])
def test_weights_in_a_part_of_an_attention_are_reported(registered: bool) -> None:
    attention = named("Attention", "to_q", "to_k", "to_v")
    attention.heads = 2
    if registered:
        ac.register(type(attention))(lambda m: ac.separate(m.to_q, m.to_k, m.to_v, heads=2))
    attention.processor = named("Processor", "to_k_ip", "to_v_ip")
    for model, prefix in ((attention, ""), (nn.Sequential(attention), "0.")):
        plan = ac.inspect(model)
        assert [s.path for s in plan] == [prefix.removesuffix(".")]
        assert [u.path for u in plan.unsupported] == [f"{prefix}processor"]


# How it is shown ----------------------------------------------------------------------------------


def mixed() -> Plan:
    layers = [nn.MultiheadAttention(8, 2), nn.MultiheadAttention(8, 4, kdim=6), Own()]
    return ac.inspect(nn.ModuleList(layers))


def test_a_plan_is_printed_as_a_table() -> None:
    lines = str(mixed()).splitlines()
    assert lines[0] == "2 attention sites, 1 not supported"
    words = [" ".join(line.split()) for line in lines]
    assert words[2] == "path class kind heads layout q, k, v: heads x head_dim x in"
    assert words[4] == "0 MultiheadAttention self 2 fused qkv, role-major q 2x4x8 k 2x4x8 v 2x4x8"
    assert words[5] == "1 MultiheadAttention cross 4 separate q 4x2x8 k 4x2x6 v 4x2x8"
    starts = {line.index(word) for line, word in ((lines[2], "kind"), (lines[5], "cross"))}
    assert len(starts) == 1
    text = "\n".join(lines[6:])
    own = '@ac.register("test_inspection.Own")'
    for word in ("not supported:", "Own", "qkv", "cannot be guessed", own):
        assert word in text
    assert all(line == line.rstrip() for line in lines)


def test_a_refusal_of_an_adapter_gives_no_lines_and_those_of_another_row_are_shown() -> None:
    ac.register(Child)(refuse)
    plan = ac.inspect(nn.ModuleList([Child(), Own()]))
    assert [bool(u.adapter) for u in plan.unsupported] == [False, True]
    assert '@ac.register("test_inspection.Own")' in str(plan)


def test_a_table_is_as_wide_as_its_widest_cell() -> None:
    assert table(("a", "long head"), [("wide cell", "x"), ("y", "")]).splitlines() == [
        "a          long head",
        "---------  ---------",
        "wide cell  x",
        "y",
    ]


def test_a_plan_is_plain_data() -> None:
    plan = mixed()
    text = json.loads(json.dumps(plan.to_dict()))
    assert [s["path"] for s in text["sites"]] == ["0", "1"]
    assert text["sites"][1] == {
        "path": "1",
        "class": "torch.nn.modules.activation.MultiheadAttention",
        "kind": "cross",
        "heads": 4,
        "layout": "separate",
        "projections": [
            {
                "role": role,
                "parameter": f"1.{role}_proj_weight",
                "heads": 4,
                "head_dim": 2,
                "in_features": columns,
                "transposed": False,
            }
            for role, columns in (("q", 8), ("k", 6), ("v", 8))
        ],
    }
    (row,) = text["unsupported"]
    assert row["path"] == "2"
    assert row["cls"].endswith(".Own")
    assert row["parameters"] == ["qkv"]
    assert "cannot be guessed" in row["reason"]
    assert len(plan) == len(list(plan)) == 2


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_every_plan_survives_json(case: Case) -> None:
    model = case.make()
    data = ac.inspect(model).to_dict()
    assert json.loads(json.dumps(data))["sites"] == data["sites"]
    assert data["unsupported"] == []
    names = dict(model.named_parameters(remove_duplicate=False))
    for site in data["sites"]:
        for p in site["projections"]:
            axis = 1 if p["transposed"] else 0
            assert names[p["parameter"]].shape[axis] >= p["heads"] * p["head_dim"]
            assert names[p["parameter"]].shape[1 - axis] == p["in_features"]


# Adapters of users --------------------------------------------------------------------------------


def test_a_class_is_read_once_it_is_registered() -> None:
    assert ac.inspect(Own()).unsupported
    assert ac.register(Own)(read_own) is read_own
    plan = ac.inspect(nn.ModuleList([Own(4)]))
    assert (len(plan), plan.sites[0].heads, plan.unsupported) == (1, 4, ())


def test_a_class_is_registered_by_its_qualified_name() -> None:
    ac.register(f"{Own.__module__}.{Own.__qualname__}")(read_own)
    assert len(ac.inspect(Own())) == 1


@pytest.mark.parametrize("given", [(), (read_own,), (nn.Identity(),), (Own, None)])
def test_only_classes_are_registered(given: tuple[Any, ...]) -> None:
    # As @ac.register without a class would be: the adapter was taken for one, and forgotten.
    with pytest.raises(TypeError, match=r"@ac\.register\(MyAttention\)"):
        ac.register(*given)


def test_subclasses_inherit_and_the_nearest_class_decides() -> None:
    ac.register(Own)(read_own)
    assert ac.inspect(Child()).sites[0].layout == "fused qkv, role-major"
    ac.register(Child)(lambda m: ac.fused(m.qkv, heads=m.heads, head_major=True))
    assert ac.inspect(Child()).sites[0].layout == "fused qkv, head-major"
    assert ac.inspect(Own()).sites[0].layout == "fused qkv, role-major"


def test_registering_again_replaces() -> None:
    ac.register(Own)(read_own)
    ac.register(Own)(lambda m: ac.fused(m.qkv, "kqv", heads=m.heads))
    assert ac.inspect(Own()).sites[0].layout == "fused kqv, role-major"


@pytest.mark.parametrize("loaded", [True, False])
def test_a_user_wins_over_the_library(loaded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one who registers before the built-in adapters are loaded, which would replace his."""
    if not loaded:
        monkeypatch.setattr(adapters, "_REGISTRY", {})
        monkeypatch.setattr(adapters, "_loaded", False)

        # A module that is imported already registers nothing again: let it do so by hand.
        def import_module(name: str) -> None:
            if name.endswith(".torch"):
                ac.register(nn.MultiheadAttention)(lambda m: pytest.fail("the built-in won"))

        monkeypatch.setattr(adapters.importlib, "import_module", import_module)
    ac.register(nn.MultiheadAttention)(
        lambda m: ac.fused(m, "vkq", heads=m.num_heads, name="in_proj_weight", kind="window")
    )
    (site,) = ac.inspect(nn.MultiheadAttention(8, 2))
    assert (site.layout, site.kind) == ("fused vkq, role-major", "window")
    assert adapters._loaded


def test_a_user_wins_over_names_and_shapes() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_heads = 2
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, 8) for _ in range(3))

    assert [p.role for p in ac.inspect(Named()).sites[0].projections] == ["q", "k", "v"]
    ac.register(Named)(lambda m: ac.separate(m.q_proj, m.v_proj, None, heads=4))
    (site,) = ac.inspect(Named())
    assert [p.role for p in site.projections] == ["q", "k"]
    assert site.projections[1].path == "v_proj"


def refuse(module: Own) -> ac.Site:
    raise ac.UnsupportedAttentionError("for a reason of its own")


def stumble(module: Any) -> ac.Site:
    return ac.fused(module.to_qkv, heads=module.heads)


def misfit(module: Own) -> ac.Site:
    return ac.fused(module.qkv, heads=5)


def late(module: Own) -> Iterator[ac.Site]:
    yield ac.fused(module.qkv, heads=2)
    raise ac.UnsupportedAttentionError("at its second site")


@pytest.mark.parametrize(
    ("adapter", "reason"),
    [
        (refuse, "for a reason of its own"),
        (stumble, "not as its adapter expects it: 'Own' object has no attribute 'to_qkv'"),
        (misfit, "fused weight: 24 rows do not divide into 15 heads"),
        (late, "at its second site"),
    ],
)
def test_an_adapter_that_raises_makes_a_row(adapter: Callable[..., Any], reason: str) -> None:
    ac.register(Own)(adapter)
    plan = ac.inspect(nn.ModuleList([nn.MultiheadAttention(8, 2), Own()]))
    assert [s.path for s in plan] == ["0"]
    (row,) = plan.unsupported
    assert (row.path, row.reason, row.parameters) == ("1", reason, ("qkv",))
    with pytest.raises(ac.UnsupportedAttentionError) as caught:
        ac.condition(nn.ModuleList([Own()]), ac.Spectral())
    assert reason in str(caught.value)


def test_mistakes_of_an_adapter_are_not_hidden() -> None:
    ac.register(Own)(lambda m: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        ac.inspect(Own())


def two_sites(module: Own) -> tuple[ac.Site, ac.Site]:
    first = ac.fused(module.qkv, heads=2, head_dim=2)
    return first, ac.fused(module.qkv, heads=3, start=12, kind="cross")


def generated(module: Own) -> Iterator[ac.Site]:
    yield from two_sites(module)


@pytest.mark.parametrize("adapter", [two_sites, generated])
def test_an_adapter_may_return_several_sites(adapter: Callable[..., Any]) -> None:
    ac.register(Own)(adapter)
    wide = nn.Linear(8, 30)
    model = nn.ModuleList([Own()])
    model[0].qkv = wide
    plan = ac.inspect(model)
    assert [(s.path, s.heads, s.kind) for s in plan] == [("0", 2, "self"), ("0", 3, "cross")]
    handle = ac.condition(model, ac.Spectral(scope="head"))
    numbers = [(c.role, c.head) for c in handle.certificates(exact=False)]
    expected = [(r, h) for heads in (2, 3) for r in "qkv" for h in range(heads)]
    assert numbers == expected


def test_an_adapter_may_say_that_there_is_no_attention() -> None:
    ac.register(Own)(lambda m: ())
    plan = ac.inspect(nn.ModuleList([Own(), nn.MultiheadAttention(8, 2)]))
    assert [s.path for s in plan] == ["1"]
    assert plan.unsupported == ()


def test_an_adapter_may_say_nothing() -> None:
    ac.register(Own)(lambda m: None)
    (row,) = ac.inspect(nn.ModuleList([Own()])).unsupported
    assert row.path == "0"
    assert row.reason.startswith("its adapter returned None; ")


# The default device -------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_the_default_device_does_not_matter(case: Case) -> None:
    model = case.make(dtype=torch.float32)
    before = ac.inspect(model)
    with torch.device("meta"):
        found = ac.inspect(model)
        handle = ac.condition(model, ac.Spectral())
        handle.certificates()
        handle.remove()
        assert all(p.device.type == "cpu" for p in model.parameters())
        on_meta = ac.inspect(case.build())
    assert found.to_dict() == on_meta.to_dict() == before.to_dict()
    for plan in (found, on_meta):
        for a, b in zip(plan, before, strict=True):
            for p, q in zip(a.projections, b.projections, strict=True):
                assert p.rows.device.type == "cpu"
                assert torch.equal(p.rows, q.rows)


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("codegen", {"n_embd": 32, "n_layer": 1, "n_head": 4, "rotary_dim": 4}),
        (
            "falcon",
            {
                "hidden_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
                "num_kv_heads": 2,
                "new_decoder_architecture": True,
            },
        ),
        (
            "qwen3_next",
            {
                "hidden_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "num_experts": 2,
                "moe_intermediate_size": 8,
                "layer_types": ["full_attention"],
            },
        ),
    ],
)
def test_adapters_that_count_rows_themselves(model_type: str, settings: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(model_type, vocab_size=32, **settings)
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config)
        (found,) = ac.inspect(model).sites
    (site,) = ac.inspect(model).sites
    for p, q in zip(found.projections, site.projections, strict=True):
        assert p.rows.device.type == "cpu"
        assert torch.equal(p.rows, q.rows)
    ac.condition(model, ac.Spectral())
    model.to_empty(device="cpu")  # numbers of its own, of which nothing is calibrated yet
    (later,) = ac.inspect(model).sites
    for p, q in zip(later.projections, site.projections, strict=True):
        assert torch.equal(p.rows, q.rows)


def test_scripted_parts_are_passed_over_and_scripted_attention_is_named() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_heads = 2
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(4, 4) for _ in "qkv")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
            return nn.functional.scaled_dot_product_attention(q, k, v)

    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    model = nn.Sequential(Attention(), scripted)
    assert [site.path for site in ac.inspect(model)] == ["0"]
    ac.condition(model, ac.Spectral()).fold()
    traced = torch.jit.trace(Attention(), torch.randn(1, 3, 4))
    (row,) = ac.inspect(nn.Sequential(traced, scripted)).unsupported
    assert row.path == "0"
    assert row.reason == "TorchScript modules cannot be changed; use the eager model"
