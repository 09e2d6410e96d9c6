"""The adapters of transformers: layouts row by row, refusals, classes the zoo cannot run whole."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

import oracle  # noqa: E402
import torch  # noqa: E402
from packaging.version import Version  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from transformers import CONFIG_MAPPING, AutoModel  # noqa: E402

import attncond as ac  # noqa: E402
from attncond import adapters  # noqa: E402
from attncond.adapters import _transformers_refused, structural  # noqa: E402
from attncond.adapters._transformers_names import qualified  # noqa: E402
from attncond.adapters.naming import roles  # noqa: E402
from attncond.errors import UnsupportedAttentionError  # noqa: E402
from attncond.inspection import inspect  # noqa: E402

MODELS = Path(transformers.__file__).parent / "models"


def load(name: str) -> Any:
    module, _, cls = qualified(name).rpartition(".")
    return getattr(importlib.import_module(module), cls)


def site(model: nn.Module) -> Any:
    (found,) = inspect(model).sites
    return found


def rows(found: Any, role: str) -> list[list[int]]:
    return found.projection(role).rows.tolist()


def tiny(model_type: str, **values: Any) -> nn.Module:
    return AutoModel.from_config(CONFIG_MAPPING[model_type](**values))


# Layouts, in numbers written by hand ---------------------------------------------------------


def test_gpt2_is_transposed():
    found = site(tiny("gpt2", n_embd=4, n_head=2, n_layer=1, vocab_size=5))
    assert rows(found, "k") == [[4, 5], [6, 7]]
    assert found.projection("k").axis == 1
    weight = found.projection("k").raw
    assert torch.equal(found.projection("k").matrix()[1], weight[:, 6:8].T)


def test_bloom_goes_head_by_head():
    found = site(tiny("bloom", hidden_size=4, n_head=2, n_layer=1, vocab_size=5))
    assert rows(found, "q") == [[0, 1], [6, 7]]
    assert rows(found, "k") == [[2, 3], [8, 9]]
    assert rows(found, "v") == [[4, 5], [10, 11]]


@pytest.mark.parametrize(
    ("flags", "q", "k", "v"),
    [
        (
            {"new_decoder_architecture": True, "num_kv_heads": 2},
            [[0, 1], [2, 3], [8, 9], [10, 11]],
            [[4, 5], [12, 13]],
            [[6, 7], [14, 15]],
        ),
        ({"multi_query": True}, [[0, 1], [2, 3], [4, 5], [6, 7]], [[8, 9]], [[10, 11]]),
        (
            {"multi_query": False},
            [[0, 1], [6, 7], [12, 13], [18, 19]],
            [[2, 3], [8, 9], [14, 15], [20, 21]],
            [[4, 5], [10, 11], [16, 17], [22, 23]],
        ),
    ],
)
def test_falcon_has_three_layouts(flags, q, k, v):
    sizes = {"hidden_size": 8, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 5}
    found = site(tiny("falcon", **sizes, **flags))
    assert [rows(found, r) for r in "qkv"] == [q, k, v]


def test_codegen_has_four_blocks_of_query_value_key():
    found = site(tiny("codegen", n_embd=8, n_head=4, n_layer=1, vocab_size=5, rotary_dim=2))
    assert rows(found, "q") == [[0, 1], [6, 7], [12, 13], [18, 19]]
    assert rows(found, "v") == [[2, 3], [8, 9], [14, 15], [20, 21]]
    assert rows(found, "k") == [[4, 5], [10, 11], [16, 17], [22, 23]]


def test_phi3_has_fewer_keys_than_queries():
    sizes = {"hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2}
    more = {"num_hidden_layers": 1, "vocab_size": 5, "pad_token_id": 0, "intermediate_size": 4}
    found = site(tiny("phi3", **sizes, **more))
    assert rows(found, "q") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert rows(found, "k") == [[8, 9], [10, 11]]
    assert rows(found, "v") == [[12, 13], [14, 15]]


def test_qwen3_next_leaves_the_gate_out():
    config = _namespace(head_dim=2, hidden_size=8, num_attention_heads=2, num_key_value_heads=1)
    found = site(load("qwen3_next.Qwen3NextAttention")(config, 0))
    assert rows(found, "q") == [[0, 1], [4, 5]]
    assert rows(found, "k") == [[0, 1]]


@pytest.mark.parametrize("multi_query", [True, False])
def test_gpt_bigcode_follows_its_flag(multi_query):
    found = site(
        tiny("gpt_bigcode", n_embd=4, n_head=2, n_layer=1, vocab_size=5, multi_query=multi_query)
    )
    assert rows(found, "k") == ([[4, 5]] if multi_query else [[2, 3], [8, 9]])


# Classes whose whole model is too large, or needs what is not installed -------------------------


def _namespace(**values: Any) -> SimpleNamespace:
    common: dict[str, Any] = {
        "hidden_size": 64,
        "embed_dim": 64,
        "num_heads": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "qkv_bias": True,
        "attention_bias": True,
        "attention_dropout": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "rms_norm_eps": 1e-6,
        "image_size": 32,
        "patch_size": 8,
        "use_rel_pos": True,
        "_attn_implementation": "eager",
    }
    return SimpleNamespace(**(common | values))


def noise(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _turns(tokens: int) -> tuple[Tensor, Tensor]:
    angle = noise(tokens, 16)
    return angle.cos(), angle.sin()


def _causal(x: Tensor) -> dict[str, Any]:
    cos, sin = _turns(x.shape[1])
    return {"position_embeddings": (cos[None], sin[None]), "attention_mask": None}


def _packed(module: nn.Module) -> Any:
    cu_seqlens = torch.tensor([0, 10, 24])
    return module(noise(24, 64), cu_seqlens=cu_seqlens, position_embeddings=_turns(24))


def _tokens(module: nn.Module) -> Any:
    return module(noise(3, 10, 64))


def _image(module: nn.Module) -> Any:
    return module(noise(3, 4, 4, 64))


def _decoder(module: nn.Module) -> Any:
    return module(noise(3, 10, 64), **_causal(noise(3, 10, 64)))


class _SelectAll(nn.Module):
    """Stands for the indexer of sparse attention: every token is selected.

    transformers before 5.23 adds what it says to the mask, which then shifts all logits alike.
    """

    def forward(self, x: Tensor, position: Any, mask: Tensor, past: Any) -> Tensor:
        return torch.ones_like(mask, dtype=torch.bool)


def _sparse() -> nn.Module:
    sizes = {"n_heads": 2, "kv_heads": 1, "head_dim": 16, "budget": 4, "compress_ratio": 2}
    config = _namespace(**{f"indexer_{name}": size for name, size in sizes.items()})
    module = load("qwen4_exp.Qwen4ExpTextAttention")(config, 0)
    module.indexer = _SelectAll()
    return module


def _selected(module: nn.Module) -> Any:
    mask = torch.zeros(3, 1, 10, 10, dtype=torch.float64)
    return module(noise(3, 10, 64), **_causal(noise(3, 10, 64)) | {"attention_mask": mask})


def _florence() -> SimpleNamespace:
    return _namespace(embed_dim=[64], num_heads=[4], num_groups=[4], window_size=2)


def _layout(fast: bool) -> SimpleNamespace:
    return _namespace(
        fast_qkv=fast, has_relative_attention_bias=False, has_spatial_attention_bias=False
    )


def _masked(module: nn.Module) -> Any:
    module.float()  # fills float32 logits with the smallest number of their own type
    return module(noise(3, 10, 64).float(), attention_mask=torch.zeros(3, 1, 1, 10))


def _gemma4_audio() -> nn.Module:
    config = _namespace(
        attention_logit_cap=50.0,
        attention_chunk_size=4,
        attention_context_left=3,
        attention_context_right=0,
        attention_invalid_logits_value=-1e9,
        use_clipped_linears=False,
    )
    return load("gemma4.Gemma4AudioAttention")(config, 0)


def _chunks(module: nn.Module) -> Any:
    module.float()  # casts to float32 inside
    return module(noise(3, 12, 64).float(), position_embeddings=noise(1, 7, 64).float())


def _granite() -> SimpleNamespace:
    return _namespace(dim_head=16, max_pos_emb=8, context_size=8, hidden_dim=64, dropout=0.0)


def _distances(module: nn.Module) -> Any:
    steps = torch.arange(8)
    return module(noise(3, 20, 64), attention_dists=(steps[:, None] - steps).clamp(-8, 8) + 8)


def _compress(module: nn.Module) -> Any:
    return module(noise(3, 7, 64), noise(3, 5, 64), torch.ones(3, 12, dtype=torch.float64))


def _maps(module: nn.Module) -> Any:
    return module(noise(3, 5, 64), noise(3, 64, 3, 7))


def _sam(name: str) -> Any:
    return load(name)(_namespace(), 0)


def _vision(name: str) -> Any:
    return load(name)(_namespace())


def _text(name: str) -> Any:
    return load(name)(_namespace(), 0)


def _diffusion(name: str, kind: str) -> Any:
    layer = SimpleNamespace(head_dim=16, num_key_value_heads=2)
    config = _namespace(
        use_bidirectional_attention="all",
        layer_types=[kind],
        sliding_window=8,
        per_layer_config=[layer],
    )
    return load(name)(config, 0)


PARTS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any], dict[str, Any]]] = {
    **{
        name: (lambda name=name: _sam(name), _image, {})
        for name in (
            "deepseek_ocr2.DeepseekOcr2SamVisionAttention",
            "got_ocr2.GotOcr2VisionAttention",
            "pp_formulanet.PPFormulaNetVisionAttention",
            "slanext.SLANeXtVisionAttention",
            "unlimited_ocr.UnlimitedOcrSamVisionAttention",
        )
    },
    **{
        name: (lambda name=name: _vision(name), _packed, {"first_of": 2, "transformed": "qk"})
        for name in (
            "ernie4_5_vl_moe.Ernie4_5_VLMoeVisionAttention",
            "glm5_next.Glm5NextVisionAttention",
            "qwen2_vl.VisionAttention",
            "qwen3_omni_moe.Qwen3OmniMoeVisionAttention",
            "qwen4_exp.Qwen4ExpVisionAttention",
        )
    },
    "dots3_note.Dots3NoteVisionAttention": (
        lambda: _vision("dots3_note.Dots3NoteVisionAttention"),
        _packed,
        {"first_of": 2, "transformed": "qk", "since": "5.23"},
    ),
    **{
        name: (lambda name=name: _vision(name), _tokens, {})
        for name in (
            "instructblipvideo.InstructBlipVideoAttention",
            "pp_ocrv5_mobile_rec.PPOCRV5MobileRecAttention",
            "pp_ocrv5_server_rec.PPOCRV5ServerRecAttention",
            "pp_ocrv6_small_rec.PPOCRV6SmallRecAttention",
        )
    },
    **{
        name: (lambda name=name: _text(name), _decoder, {"transformed": "qk"})
        for name in (
            "phi4_multimodal.Phi4MultimodalAttention",
            "qwen3_5_moe.Qwen3_5MoeAttention",
        )
    },
    **{
        f"{name} {kind}": (
            lambda name=name, kind=kind: _diffusion(name, kind),
            _decoder,
            {"transformed": "qkv"},
        )
        for name in (
            "diffusion_gemma.DiffusionGemmaEncoderTextAttention",
            "diffusion_gemma.DiffusionGemmaDecoderTextAttention",
        )
        for kind in ("sliding_attention", "full_attention")
    },
    **{
        name: (
            lambda name=name: load(name)(64, 4),
            _maps,
            {"pieces": ({"q": "0.left", "k": "0.right"},)},
        )
        for name in (
            "conditional_detr.ConditionalDetrMHAttentionMap",
            "detr.DetrMHAttentionMap",
            "maskformer.MaskFormerDetrMHAttentionMap",
        )
    },
    "dab_detr.DabDetrMHAttentionMap": (
        lambda: load("dab_detr.DabDetrMHAttentionMap")(64, 64, 4),
        _maps,
        {"pieces": ({"q": "0.left", "k": "0.right"},)},
    ),
    "florence2.Florence2VisionWindowAttention": (
        lambda: load("florence2.Florence2VisionWindowAttention")(_florence(), 0),
        _image,
        {},
    ),
    "florence2.Florence2VisionChannelAttention": (
        lambda: load("florence2.Florence2VisionChannelAttention")(_florence(), 0),
        _tokens,
        {},
    ),
    "layoutlmv2.LayoutLMv2SelfAttention fast": (
        lambda: load("layoutlmv2.LayoutLMv2SelfAttention")(_layout(True)),
        _masked,
        {"transformed": "qv"},
    ),
    "layoutlmv2.LayoutLMv2SelfAttention": (
        lambda: load("layoutlmv2.LayoutLMv2SelfAttention")(_layout(False)),
        _masked,
        {},
    ),
    "qwen4_exp.Qwen4ExpTextAttention": (_sparse, _selected, {"transformed": "qk"}),
    **{
        name: (lambda name=name: load(name)(64), lambda module: module(noise(3, 64, 3, 7)), {})
        for name in ("chameleon.ChameleonVQVAEEncoderAttnBlock", "janus.JanusVQVAEAttnBlock")
    },
    "kyutai_speech_to_text.KyutaiSpeechToTextAttention": (
        lambda: load("kyutai_speech_to_text.KyutaiSpeechToTextAttention")(
            _namespace(num_codebooks=2, max_position_embeddings=16, rope_parameters=None),
            0,
            use_rope=False,
        ),
        _tokens,
        {},
    ),
    "gemma4.Gemma4AudioAttention": (_gemma4_audio, _chunks, {"transformed": "q"}),
    "esm.esmfold:EsmFoldSelfAttention": (
        lambda: load("esm.esmfold:EsmFoldSelfAttention")(64, 4, 16),
        _tokens,
        {},
    ),
    "evolla.EvollaSequenceCompressorAttention": (
        lambda: load("evolla.EvollaSequenceCompressorAttention")(64, 16, 4),
        _compress,
        {},
    ),
    "granite_speech_plus.GraniteSpeechPlusConformerAttention": (
        lambda: load("granite_speech_plus.GraniteSpeechPlusConformerAttention")(_granite()),
        _distances,
        {},
    ),
}


@pytest.mark.parametrize("name", PARTS)
def test_attention_class(name):
    make, run, options = PARTS[name]
    if not (MODELS / name.partition(".")[0]).exists():
        since = Version(options.get("since", "5.22"))
        assert Version(transformers.__version__) < since, "the model is gone"
        pytest.skip("this version of transformers lacks the model")
    torch.manual_seed(0)
    module = oracle.prepare(make())
    cls = type(module).__name__
    pieces = {cls: options["pieces"]} if "pieces" in options else None
    if "first_of" in options:  # several packed sequences are so many products of one attention
        pieces = {cls: ({r: f"0.{r}" for r in "qkv"},)}
    levels = oracle.check(
        module,
        lambda: run(module),
        transformed=options.get("transformed", ""),
        pieces=pieces,
    )[0].levels
    assert levels
    for role, level in levels.items():
        assert (level == "values") == (role not in options.get("transformed", "")), levels


# Refusals ---------------------------------------------------------------------------------------


class Stub(nn.Module):
    """Has the weights that structural matching would accept."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2
        self.q_proj = self.k_proj = self.v_proj = nn.Linear(8, 8)


@pytest.mark.parametrize(
    ("name", "reason"),
    [(n, r) for r, names in _transformers_refused.REFUSED.items() for n in names],
)
def test_refused_by_class(name, reason):
    cls = type("Child", (Stub,), {})
    cls.__module__, cls.__qualname__ = qualified(name).rsplit(".", 1)
    plan = inspect(nn.Sequential(cls()))
    assert not plan.sites
    (row,) = plan.unsupported
    assert row.reason == reason
    assert row.path == "0"


@pytest.mark.parametrize("tokens", [16, 64], ids=["exchanged", "blocks"])
def test_bigbird_keeps_its_conditioning_when_it_exchanges_its_attention(tokens):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    sizes |= {"vocab_size": 20, "num_attention_heads": 2, "block_size": 4, "num_random_blocks": 1}
    special = {"sep_token_id": 1, "bos_token_id": 1, "eos_token_id": 2}
    model = AutoModel.from_config(CONFIG_MAPPING["big_bird"](**sizes, **special)).eval()
    ids = torch.arange(tokens)[None] % 20
    handle = ac.condition(model, ac.RemoveGap())
    without = model(ids).last_hidden_state
    inside = type(model.encoder.layer[0].attention.self).__name__
    assert inside == ("BigBirdSelfAttention" if tokens == 16 else "BigBirdBlockSparseAttention")
    assert [s.path for s in inspect(model)] == ["encoder.layer.0.attention"]
    handle.remove()
    assert not torch.allclose(model(ids).last_hidden_state, without)


@pytest.mark.parametrize(
    ("name", "sizes", "reason"),
    [
        ("informer.InformerProbSparseAttention", (8, 2), "get the mean of the values"),
        ("autoformer.AutoformerAttention", (8, 2), "no matrix of queries and keys"),
        (
            "visual_bert.VisualBertRegionToPhraseAttention",
            (
                SimpleNamespace(
                    hidden_size=8, num_attention_heads=2, attention_probs_dropout_prob=0
                ),
            ),
            "values are not used",
        ),
    ],
)
def test_attention_without_a_matrix_for_every_query(name, sizes, reason):
    """Their weights are conditioned as any; their heads are refused before anything is run."""
    module = load(name)(*sizes)
    for method in (ac.RemoveGap(), ac.Precondition()):
        with pytest.raises(UnsupportedAttentionError, match=reason):
            ac.condition(module, method)
    ac.condition(module, ac.Spectral())


def test_projections_before_those_of_a_multihead_attention():
    """Aria's queries are projected twice, and attention is what the second ones go into."""
    vision = SimpleNamespace(hidden_size=8, num_attention_heads=2)
    text = SimpleNamespace(hidden_size=12)
    config = SimpleNamespace(vision_config=vision, text_config=text)
    module = load("aria.AriaCrossAttention")(config).double().eval()
    plan = inspect(module)
    assert [s.path for s in plan] == ["multihead_attn"]
    assert not plan.unsupported
    image, queries = noise(2, 5, 8), noise(2, 3, 8)
    stock = module(image, queries)
    handle = ac.condition(module, ac.RemoveGap())
    v = module.v_proj(module.layer_norm_kv(image))
    attention = module.multihead_attn
    values = nn.functional.linear(v, attention.in_proj_weight[16:], attention.in_proj_bias[16:])
    mean = values.mean(1, keepdim=True) @ attention.out_proj.weight.T @ module.linear.weight.T
    torch.testing.assert_close(module(image, queries), stock - mean)
    handle.remove()


def test_gpt_bigcode_cross_attention_is_refused():
    attention = load("gpt_bigcode.GPTBigCodeAttention")
    config = CONFIG_MAPPING["gpt_bigcode"](n_embd=8, n_head=2, multi_query=False)
    (row,) = inspect(attention(config, is_cross_attention=True)).unsupported
    assert "cross attention" in row.reason


def test_codegen_with_heads_that_four_does_not_divide():
    module = load("codegen.CodeGenAttention")(
        CONFIG_MAPPING["codegen"](n_embd=12, n_head=6, rotary_dim=2), layer_idx=0
    )
    (row,) = inspect(module).unsupported
    assert "by 4" in row.reason


def test_moshi_depth_decoder_is_refused():
    config = CONFIG_MAPPING["moshi"](hidden_size=8, num_attention_heads=2, head_dim=4)
    attention = load("moshi.MoshiAttention")
    (row,) = inspect(attention(config, 0, use_flexible_linear=True)).unsupported
    assert "codebook" in row.reason


@pytest.mark.parametrize("adapted", [False, True])
def test_zamba2_is_refused_with_adapters_between_its_projections_and_the_product(adapted):
    config = CONFIG_MAPPING["zamba2"](
        hidden_size=8, num_attention_heads=2, use_shared_attention_adapter=adapted, adapter_rank=2
    )
    attention = load("zamba2.Zamba2Attention")
    plan = inspect(attention(config, num_fwd_mem_blocks=2, block_id=0))
    assert len(plan.sites) == (not adapted)
    assert ["adapter" in row.reason for row in plan.unsupported] == [True] * adapted


def test_scoring_heads_are_no_attention():
    config = CONFIG_MAPPING["bros"](hidden_size=8, n_relations=1)
    plan = inspect(nn.Sequential(load("bros.BrosRelationExtractor")(config)))
    assert not plan.sites
    assert not plan.unsupported


# Nothing of the library is unknown ----------------------------------------------------------------


def _classes() -> Iterator[tuple[str, set[str]]]:
    """Every class of the library's models, with the names its __init__ gives to parts."""
    for path in sorted(MODELS.glob("*/modeling_*.py")):
        source = path.read_text(encoding="utf-8")
        if not re.search(r"self\.\w*(qkv|kv|c_attn|att_proj|query_key)", source):
            continue
        for node in ast.parse(source).body:
            if not isinstance(node, ast.ClassDef):
                continue
            names = {
                target.attr
                for statement in ast.walk(node)
                if isinstance(statement, ast.Assign)
                and re.match(r"^[\w.]*[A-Z]\w*\(", ast.unparse(statement.value))
                for target in statement.targets
                if isinstance(target, ast.Attribute)
            }
            module = f"transformers.models.{path.parent.name}.{path.stem}"
            yield f"{module}.{node.name}", names


def test_every_fused_class_is_read_or_refused():
    adapters.find_adapter(nn.Identity())
    # Parts of an attention that is refused as a whole; and what pools or multiplies, unweighted.
    inside = re.compile(r"Indexer$|Compressor$|CCAProjection$|AggregationLayer$|SqueezeBertSelf")
    unknown = [
        name
        for name, parts in _classes()
        if any(len(roles(p)) > 1 for p in parts)
        and name not in adapters._REGISTRY
        and not any(structural._LATENT.match(p) for p in parts)
        and not inside.search(name)
    ]
    # The flash and SDPA variants inherit the adapter of their base.
    unknown = [n for n in unknown if _adapter_of(n) is None]
    assert unknown == []


def _adapter_of(name: str) -> Any:
    module, _, cls = name.rpartition(".")
    found = getattr(importlib.import_module(module), cls)
    bases = [f"{c.__module__}.{c.__qualname__}" for c in found.__mro__]
    return next((adapters._REGISTRY[b] for b in bases if b in adapters._REGISTRY), None)


def test_every_registered_class_exists():
    adapters.find_adapter(nn.Identity())
    missing = [
        name
        for name in adapters._REGISTRY
        if name.startswith("transformers.models.")
        and not (MODELS / name.split(".")[2] / f"{name.split('.')[3]}.py").exists()
    ]
    # A model that an older version lacks is no mistake, a misspelt class is.
    for name in adapters._REGISTRY:
        if name.startswith("transformers.models.") and name not in missing:
            module, _, cls = name.rpartition(".")
            assert hasattr(importlib.import_module(module), cls), name


def test_transformers_is_not_imported():
    code = (
        "import sys, torch, attncond; attncond.inspect(torch.nn.MultiheadAttention(8, 2));"
        "sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_no_heads_to_be_found():
    module = type("Blind", (nn.Module,), {})()
    module.qkv = nn.Linear(4, 12)
    with pytest.raises(UnsupportedAttentionError, match="number of heads"):
        adapters._REGISTRY[qualified("vitdet.VitDetAttention")](module)
