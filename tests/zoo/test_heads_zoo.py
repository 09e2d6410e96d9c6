"""Condition the heads of every tiny model, and hold them to what must be true of any attention.

For each attention, with the inputs that it has in its model (see head_properties.py):

- exact: RemoveGap subtracts what the stock module itself gives when its attention is made uniform
  over the keys that it sees, whatever its masks are. Hence stock − conditioned knows nothing of
  queries and keys.
- shift: RemoveGap does not see what is added to all values alike.
- length: Precondition does not see how long the values are.
- unit: where all keys have the same value, Precondition gives what the stock module gives for that
  value divided by its length, head by head.

Then the whole model: all methods together, forwards and backwards; both of a library's ways to
attend give the same; and taking the methods off leaves no trace.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest

timm = pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")
pytest.importorskip("torchvision")

import head_properties as heads  # noqa: E402
import oracle  # noqa: E402
import torch  # noqa: E402
import transformers_inputs  # noqa: E402
from head_properties import Call, distance  # noqa: E402
from packaging.version import Version  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from transformers_configs import CASES  # noqa: E402
from transformers_models import build  # noqa: E402
from zoo_models import TIMM, TIMM_NAMES, adapter_cases, enliven, tensors, timm_model  # noqa: E402

import attncond as ac  # noqa: E402
from attncond.inspection import Plan  # noqa: E402
from attncond.sites import HIDDEN  # noqa: E402

TORCHVISION = adapter_cases("torchvision")
TRANSFORMERS = adapter_cases("transformers")

_LINEAR = "linear attention"
_SUM = "a head's output is a sum of products"
_DIFFERENCE = "a head's output is the difference of two attentions"

# class: how the reason begins why neither method, or Precondition, is possible
OPAQUE = {
    "timm.layers.lambda_layer.LambdaLayer": _LINEAR,
    "timm.layers.other_pool.SimPool2d": "gamma makes it a power mean",
    "timm.models.coat.FactorAttnConvRelPosEnc": _LINEAR,
    "timm.models.convit.GPSA": "its attention matrix is a gated sum",
    "timm.models.efficientvit_mit.LiteMLA": _LINEAR,
    "transformers.models.reformer.modeling_reformer.LocalSelfAttention": "its softmax is written",
    **{
        f"transformers.models.{name}MHAttentionMap": "the softmax is the output itself"
        for name in (
            "conditional_detr.modeling_conditional_detr.ConditionalDetr",
            "dab_detr.modeling_dab_detr.DabDetr",
            "detr.modeling_detr.Detr",
            "maskformer.modeling_maskformer.MaskFormerDetr",
        )
    },
}
SCATTERED = {
    "timm.layers.diff_attention.DiffAttention": _DIFFERENCE,
    "timm.models.vision_transformer.DiffParallelScalingBlock": _DIFFERENCE,
    "transformers.models.big_bird.modeling_big_bird.BigBirdAttention": _SUM,
    "transformers.models.bigbird_pegasus.modeling_bigbird_pegasus."
    "BigBirdPegasusEncoderAttention": _SUM,
    "transformers.models.led.modeling_led.LEDEncoderSelfAttention": _SUM,
    "transformers.models.longformer.modeling_longformer.LongformerSelfAttention": _SUM,
    "transformers.models.nystromformer.modeling_nystromformer.NystromformerSelfAttention": (
        "its attention matrix is a product of three"
    ),
    "transformers.models.pegasus_x.modeling_pegasus_x.PegasusXGlobalLocalAttention": _SUM,
    "transformers.models.vits.modeling_vits.VitsAttention": _SUM,
}

# The cases of such classes that are possible.
POSSIBLE = ("big_bird-full", "bigbird_pegasus", "nystromformer-exact")

# Stock models of transformers before 5.22 that differ with sdpa and eager attention.
APART = ("doge", "gemma2", "moshi", "t5gemma", "vaultgemma")

# What stands beside the heads' outputs or attention matrices, of which no method knows: taken out.
BESIDE = {
    "timm.models.cait.TalkingHeadAttn": ("proj_w.bias",),  # added to the matrix after the softmax
    "timm.models.eva.EvaAttention": ("v_bias",),  # added after the projection: no part of W_V
    "timm.models.efficientformer_v2.Attention2d": ("v_local.conv.weight", "talking_head2.bias"),
    "timm.models.efficientformer_v2.Attention2dDownsample": (
        "v_local.conv.weight",
        "talking_head2.bias",
    ),
    "transformers.models.deberta.modeling_deberta.DisentangledSelfAttention": ("v_bias",),
    "transformers.models.layoutlmv2.modeling_layoutlmv2.LayoutLMv2SelfAttention": ("v_bias",),
    "transformers.models.nystromformer.modeling_nystromformer.NystromformerSelfAttention": (
        "conv.weight",
    ),
}

# case, or its class: the properties that do not hold, and have to fail
NORMALISED = {"shift", "length", "unit"}  # values are normalised after their projection
FOLLOWED = {"exact"}  # an activation, a norm or an MLP follows the heads
EXCEPTIONS: dict[str, set[str]] = {
    "timm.layers.attention_pool.AttentionPoolLatent": FOLLOWED,
    "timm.layers.diff_attention.DiffAttention": FOLLOWED,
    "timm.layers.halo_attn.HaloAttn": {"shift", "unit"},  # sees zeros beyond the border
    "timm.models.cait.TalkingHeadAttn": {"unit"},  # mixes heads after the softmax
    "timm.models.efficientformer_v2.Attention2d": FOLLOWED | {"unit"},  # so does this
    "timm.models.efficientformer_v2.Attention2dDownsample": FOLLOWED,
    "timm.models.efficientvit_msra.CascadedGroupAttention": FOLLOWED,
    "timm.models.gemma4_vit.Gemma4Attention": NORMALISED,
    "timm.models.iformer.SHMA": {"shift", "length", "unit"},  # values pass through a sigmoid
    "timm.models.levit.Attention": FOLLOWED,
    "timm.models.levit.AttentionDownsample": FOLLOWED,
    "timm.models.mvitv2.MultiScaleAttention": NORMALISED,
    "timm.models.shvit.SHSA": FOLLOWED,
    "timm.models.vision_transformer.DiffParallelScalingBlock": FOLLOWED,
    "transformers.models.big_bird.modeling_big_bird.BigBirdAttention": FOLLOWED,
    "qk and scale norm": FOLLOWED,
    "albert": FOLLOWED,
    "bitnet": FOLLOWED,
    "diffusion_gemma.DiffusionGemmaDecoderTextAttention sliding_attention": NORMALISED,
    "diffusion_gemma.DiffusionGemmaEncoderTextAttention sliding_attention": NORMALISED,
    "doge": {"shift", "length"},  # values decide which keys are seen
    "funnel": FOLLOWED,
    "gemma3n_text": NORMALISED,
    "gemma4.Gemma4AudioAttention": {
        "shift",
        "unit",
    },  # sees zeros before the first frame, without a mask
    "gemma4_text": NORMALISED,
    "gemma4_unified_text": NORMALISED,
    "gemma4_vision": NORMALISED,
    "gpt_oss": FOLLOWED | {"unit"},  # by what the sink leaves, which depends on queries and keys
    "levit (transformers)": FOLLOWED,
    "nystromformer": FOLLOWED,  # by two more matrices, whose rows sum to one only nearly
}


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> None:
    transformers.logging.set_verbosity_error()


def properties(call: Call) -> dict[str, float]:
    """How far an attention is from each of the properties; those that do not apply are left out."""
    triple = heads.scale(3.0)
    found: dict[str, float] = {}
    stock = call()
    if refused(call.module, ac.RemoveGap()):
        return found
    values = call.has_values
    if values:
        tripled, uniform = call(triple), call(uniform=True)
        uniform_tripled = call(triple, uniform=True)
    with heads.conditioned(call.module, ac.RemoveGap()):
        output = call()
        assert distance(output, stock) > 1e-4, "RemoveGap does nothing"
        if values:
            found["shift"] = distance(call(heads.shift(call)), output, stock)
            rest, rest_tripled = output - stock + uniform, call(triple) - tripled + uniform_tripled
            found["exact"] = distance(rest_tripled, rest, stock)
    if refused(call.module, ac.Precondition()):
        return found
    with heads.conditioned(call.module, ac.Precondition()):
        output = call()
        assert distance(output, stock) > 1e-4, "Precondition does nothing"
        if values:
            found["length"] = distance(call(triple), output)
        if values and not call.over_channels:
            output = call(heads.same(unit=False))
    if values and not call.over_channels:
        found["unit"] = distance(output, call(heads.same(unit=True)))
    return found


def refused(module: nn.Module, method: Any) -> str:
    """Why a module's heads cannot be conditioned, if so."""
    try:
        ac.condition(module, method).remove()
    except ac.UnsupportedAttentionError as error:
        return str(error)
    return ""


def without(call: Call) -> None:
    """Take out what stands beside the heads."""
    with torch.no_grad():
        for name in BESIDE.get(call.sites[0].cls, ()):
            parameter = dict(call.module.named_parameters()).get(name)
            if parameter is not None:
                parameter.zero_()


def identify_norms(model: nn.Module) -> None:
    """Fresh batch norms multiply by 1/√(1 + eps): make that one."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eps = 1e-30


def check_properties(case: str, model: nn.Module, run: Callable[[], Any], tolerance: float) -> None:
    calls = heads.record(model, run)
    assert calls
    worst: dict[tuple[str, str], float] = defaultdict(float)
    for call in calls:
        without(call)
        cls = call.sites[0].cls
        for name, far in properties(call).items():
            worst[cls, name] = max(worst[cls, name], far)
    for (cls, name), far in worst.items():
        excepted = name in EXCEPTIONS.get(cls, EXCEPTIONS.get(case, ()))
        assert (far > tolerance) == excepted, f"{cls}, {name}: {far:.1e}"


def check_refusals(case: str, model: nn.Module) -> None:
    """The classes named above are refused with the reason, before anything runs, and no others."""
    for method, table in ((ac.RemoveGap(), OPAQUE), (ac.Precondition(), OPAQUE | SCATTERED)):
        for site in ac.inspect(model):
            reason = "" if case in POSSIBLE else table.get(site.cls, "")
            text = refused(site.module, method)
            assert bool(text) == bool(reason), f"{site.cls}: {text}"
            assert reason in text


def output_of(run: Callable[[], Any]) -> list[Tensor]:
    """All numbers of a run, its softmaxes in the precision of the model."""
    heads.seed()
    with heads.Precise():
        return list(tensors(run()))


def furthest(got: list[Tensor], wanted: list[Tensor]) -> float:
    return max(distance(a, b) for a, b in zip(got, wanted, strict=True) if a.numel())


def check_life(model: nn.Module, run: Callable[[], Any], silent: bool) -> list[ac.Handle]:
    """All three methods: finite outputs that differ, finite gradients."""
    stock = output_of(run)
    handles = []
    for method in (ac.Precondition(), ac.Spectral(), ac.RemoveGap()):
        try:
            handles.append(ac.condition(model, method, skip_unsupported=True))
        except ac.UnsupportedAttentionError:  # all of it; which, check_refusals knows
            assert {s.cls for s in ac.inspect(model)} <= OPAQUE.keys() | SCATTERED.keys()
    output = output_of(run)
    assert silent or furthest(output, stock) > 1e-6
    loss = torch.zeros((), dtype=torch.float64)
    for t in output:
        if t.requires_grad:
            loss = loss + t.double().square().sum()
    if not silent:
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        assert gradients
        assert all(g.isfinite().all() for g in gradients)
    return handles


def check_removal(
    model: nn.Module, run: Callable[[], Any], handles: list[ac.Handle], before: Any
) -> None:
    for handle in handles:
        handle.remove()
    assert fingerprint(model, run) == before


def fingerprint(model: nn.Module, run: Callable[[], Any]) -> Any:
    """Everything that conditioning may leave behind: classes, keys, and outputs bit for bit."""
    outputs = [(t.shape, t.detach().numpy().tobytes()) for t in output_of(run)]
    return [type(m) for m in model.modules()], list(model.state_dict()), outputs


def check_both_ways(
    case: str,
    model: nn.Module,
    run: Callable[[], Any],
    switch: Callable[[bool], bool],
    tolerance: float,
) -> None:
    """``switch`` turns fused kernels off, if there are any; written out, attention is the same."""
    fused = outputs(model, run)
    if not switch(False):
        return
    written_out = outputs(model, run)
    if furthest(written_out.pop("stock"), fused.pop("stock")) > tolerance:
        assert case in APART
        return
    for method in fused:
        assert furthest(written_out[method], fused[method]) <= tolerance, method


def outputs(model: nn.Module, run: Callable[[], Any]) -> dict[str, list[Tensor]]:
    """What a model gives as it is, and with each method."""
    with torch.no_grad():
        found = {"stock": output_of(run)}
        for method in (ac.RemoveGap(), ac.Precondition()):
            try:
                handle = ac.condition(model, method, skip_unsupported=True)
            except ac.UnsupportedAttentionError:
                continue
            found[type(method).__name__] = output_of(run)
            handle.remove()
    return found


def whole_check(
    case: str,
    model: nn.Module,
    run: Callable[[], Any],
    switch: Callable[[bool], bool],
    *,
    silent: bool = False,
    tolerance: float = 1e-9,
) -> None:
    enliven(model)
    identify_norms(model)
    check_refusals(case, model)
    before = fingerprint(model, run)
    handles = check_life(model, run, silent)
    check_removal(model, run, handles, before)
    check_properties(case, model, run, tolerance)
    if not silent:
        check_both_ways(case, model, run, switch, max(tolerance, 1e-7))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.sites])
def test_transformers(name: str) -> None:
    case = CASES[name]
    if Version(transformers.__version__) < Version(case.since):
        pytest.skip(f"came with transformers {case.since}")
    model = oracle.prepare(build(case.type or name, dict(case.config), case.head))
    given = case.inputs(model)
    fused = model.config._attn_implementation == "sdpa"

    def switch(on: bool) -> bool:
        if fused:
            model.set_attn_implementation("sdpa" if on else "eager")
        return fused

    whole_check(
        "levit (transformers)" if name == "levit" else name,
        model,
        (lambda: case.run(model)) if case.run else (lambda: model(**given)),
        switch,
        silent=case.run is not None,  # such a run returns nothing, only its attention does
        tolerance=1e-4 if case.inputs is transformers_inputs.float32 else 1e-9,
    )


@pytest.mark.parametrize("name", TIMM_NAMES)
def test_timm(name: str) -> None:
    model, x = timm_model(name)
    whole_check(name, model, lambda: model(x), partial(TIMM.set_fused, model))


@pytest.mark.parametrize("name", TORCHVISION.MODELS)
def test_torchvision(name: str) -> None:
    model, x = TORCHVISION.make(name)
    whole_check(name, model, lambda: model(x), lambda on: False)


@pytest.mark.parametrize("name", TRANSFORMERS.PARTS)
def test_attention_classes_that_no_tiny_model_has(name: str) -> None:
    make, run, _ = TRANSFORMERS.PARTS[name]
    if not (TRANSFORMERS.MODELS / name.partition(".")[0]).exists():
        pytest.skip("this version of transformers lacks the model")
    module = oracle.prepare(make())
    enliven(module)
    identify_norms(module)
    check_refusals(name, module)
    run(module)  # which makes some float32
    single = next(module.parameters()).dtype == torch.float32
    check_properties(name, module, lambda: run(module), 1e-4 if single else 1e-9)


@pytest.mark.parametrize("name", ["longformer", "led"])
def test_longformer_does_without_global_tokens(name: str) -> None:
    case = CASES[name]
    model = oracle.prepare(build(name, dict(case.config), case.head))
    enliven(model)
    given = case.inputs(model)
    del given["global_attention_mask"]
    check_properties(name, model, lambda: model(**given), 1e-9)
    ac.condition(model, ac.RemoveGap())
    assert all(t.isfinite().all() for t in tensors(model(**given)))


class Clap(nn.Module):
    """The attention of CLAP's audio encoder, with two halves of a window that do not mix."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.ClapAudioConfig(qkv_bias=True)
        self.attention = TRANSFORMERS.load("clap.ClapAudioSelfAttention")(config, 8, 2, 4)

    def forward(self, x: Tensor) -> Tensor:
        half = torch.arange(16) < 8
        mask = torch.where(half[:, None] == half, 0.0, -100.0).double()
        return self.attention(x, mask.expand(2, 16, 16))[0]


def windows(name: str, fused: bool) -> list[Call]:
    """The attentions of a Swin, every second of which shifts its windows."""
    library, name = name.split(" ", 1)
    if library == "torchvision":
        model, x = TORCHVISION.make(name)
    elif library == "timm":
        make, size, *_ = TIMM.MODELS[name]
        model = TIMM.build(make)
        x = torch.randn(2, 3, size, size, dtype=torch.float64)
        TIMM.set_fused(model, fused)
    elif name == "clap":
        model, x = oracle.prepare(Clap()), torch.randn(4, 16, 8, dtype=torch.float64)
    else:
        case = CASES[name]
        model = oracle.prepare(build(name, {**case.config, "depths": [2, 2]}))
        x = case.inputs(model)["pixel_values"]
        if fused != (model.config._attn_implementation == "sdpa"):
            model.set_attn_implementation("sdpa" if fused else "eager")
    enliven(model)
    return heads.record(model, lambda: model(x))


@pytest.mark.parametrize(
    ("name", "fused"),
    [
        ("timm swin", True),
        ("timm swin", False),
        ("timm swinv2", False),
        ("timm swinv2 cr", False),
        ("torchvision swin", False),
        ("torchvision swin-v2", False),
        ("torchvision swin-3d", False),
        ("transformers swin", True),
        ("transformers swin", False),
        ("transformers swinv2", False),
        ("transformers swin2sr", False),
        ("transformers donut-swin", False),
        ("transformers maskformer-swin", False),
        ("transformers clap", False),
    ],
)
def test_masked_neighbours_of_shifted_windows_stay_out_of_the_mean(name: str, fused: bool) -> None:
    """Their masks are only -100, and are found all the same; at the usual limit they are not."""

    def unaware(module: nn.Module) -> Plan:
        sites = ac.inspect(module).sites
        return Plan(tuple(dataclasses.replace(s, hidden=HIDDEN) for s in sites), ())

    calls = windows(name, fused)
    assert max(properties(call)["exact"] for call in calls) < 1e-9
    with mock.patch("attncond.conditioning.inspect", unaware):
        assert max(properties(call)["exact"] for call in calls) > 1e-2


class Sinking(nn.Module):
    """Attention with a sink: a logit that takes weight, as gpt-oss and as Granite write it."""

    def __init__(self, gate: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.num_heads, self.gate = 2, gate
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, 8) for _ in range(3))
        self.sinks = nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor) -> Tensor:
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (p(x).unflatten(-1, (2, 4)).transpose(1, 2) for p in projections)
        logits = q @ k.transpose(-2, -1)
        sinks = self.sinks.view(1, 2, 1, 1).expand(*logits.shape[:-1], 1)
        if self.gate:
            left = torch.sigmoid(torch.logsumexp(logits, -1, keepdim=True) - sinks)
            return (logits.softmax(-1) @ v) * left
        logits = torch.cat([logits, sinks], dim=-1)
        logits = logits - logits.max(dim=-1, keepdim=True).values
        return logits.softmax(-1)[..., :-1] @ v


def test_sinks_are_no_keys_however_they_are_written() -> None:
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    gate, column = Sinking(True).double(), Sinking(False).double()
    assert distance(column(x), gate(x)) < 1e-12
    ac.condition(gate, ac.RemoveGap())
    ac.condition(column, ac.RemoveGap())
    assert distance(column(x), gate(x)) < 1e-12
