"""Joint attention of two streams, in a small class that has diffusers' names and its arithmetic."""

from __future__ import annotations

from typing import Any

import oracle
import pytest
import torch
from torch import Tensor, nn

import attncond as ac

CLASSES = (
    "attention_processor.Attention",
    "transformers.transformer_bria.BriaAttention",
    "transformers.transformer_bria_fibo.BriaFiboAttention",
    "transformers.transformer_flux.FluxAttention",
    "transformers.transformer_flux2.Flux2Attention",
    "transformers.transformer_longcat_image.LongCatImageAttention",
    "transformers.transformer_ovis_image.OvisImageAttention",
)


class Joint(nn.Module):
    """As FluxAttention and its processor, and as Attention with JointAttnProcessor2_0."""

    def __init__(self, width: int, text: int | None, heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads, inner = heads, heads * head_dim
        self.to_q, self.to_k, self.to_v = (nn.Linear(width, inner) for _ in "qkv")
        self.norm_q, self.norm_k = nn.RMSNorm(head_dim), nn.RMSNorm(head_dim)
        if text is not None:
            self.add_q_proj, self.add_k_proj, self.add_v_proj = (
                nn.Linear(text, inner) for _ in "qkv"
            )
            self.norm_added_q, self.norm_added_k = nn.RMSNorm(head_dim), nn.RMSNorm(head_dim)
        self.to_out = nn.ModuleList([nn.Linear(inner, width), nn.Dropout(0.0)])

    def forward(self, image: Tensor, text: Tensor | None = None) -> Tensor:
        def split(x: Tensor) -> Tensor:
            return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        q, k, v = (split(f(image)) for f in (self.to_q, self.to_k, self.to_v))
        q, k = self.norm_q(q), self.norm_k(k)
        if text is not None:
            eq, ek, ev = (
                split(f(text)) for f in (self.add_q_proj, self.add_k_proj, self.add_v_proj)
            )
            q = torch.cat((self.norm_added_q(eq), q), 2)
            k, v = torch.cat((self.norm_added_k(ek), k), 2), torch.cat((ev, v), 2)
        out = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.to_out[0](out)


def joint(name: str = CLASSES[0], text: int | None = 10) -> Any:
    module, _, cls = f"diffusers.models.{name}".rpartition(".")
    torch.manual_seed(0)
    return type(cls, (Joint,), {"__module__": module, "__qualname__": cls})(16, text, 2, 6)


IMAGE, TEXT = torch.randn(2, 5, 16, dtype=torch.float64), torch.randn(2, 3, 10, dtype=torch.float64)


@pytest.mark.parametrize("name", CLASSES)
def test_both_streams_reach_the_product(name: str) -> None:
    model = oracle.prepare(joint(name))
    image, text = ac.inspect(model).sites
    assert [p.path for p in (*image.projections, *text.projections)] == [
        *("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj")
    ]
    joined = dict(zip("qkv", ("0.q", "0.k", "0.v"), strict=True))
    verdicts = oracle.check(
        model,
        lambda: model(IMAGE, TEXT),
        transformed="qkv",
        pieces={type(model).__name__: (joined, joined)},
    )
    assert len(verdicts) == 2
    (call,) = oracle.record([image, text], lambda: model(IMAGE, TEXT))
    parts = zip((text, image), (TEXT, IMAGE), strict=True)
    rows = [
        torch.einsum("bti,hci->bhtc", x, p.matrix()) + p.owner.bias.view(p.heads, 1, -1)
        for site, x in parts
        if (p := site.projection("v")) is not None
    ]
    torch.testing.assert_close(call.triples[0][2], torch.cat(rows, 2))


@pytest.mark.parametrize("method", [ac.Spectral(), ac.RemoveGap(), ac.Precondition()])
def test_both_streams_are_conditioned_and_let_go(method: Any) -> None:
    model = joint().double()
    before = model(IMAGE, TEXT)
    handle = ac.condition(model, method)
    conditioned = model(IMAGE, TEXT)
    assert not torch.allclose(conditioned, before)
    if isinstance(method, ac.Spectral):
        names = {c.parameter for c in handle.certificates()}
        assert {"to_q.weight", "add_q_proj.weight"} <= names
        handle.fold()
        torch.testing.assert_close(model(IMAGE, TEXT), conditioned)
    else:
        handle.remove()
        assert torch.equal(model(IMAGE, TEXT), before)


def test_a_diagnosis_has_the_weights_of_both_and_the_attention_once() -> None:
    model = joint().double()
    rows = [row for row in ac.diagnose(model, (IMAGE, TEXT)).rows if row.head is None]
    assert all("q_kappa" in row.values for row in rows)
    assert ["entropy" in row.values for row in rows] == [True, False]


def test_one_stream_is_read_by_its_names() -> None:
    model = oracle.prepare(joint(CLASSES[3], text=None))
    (verdict,) = oracle.check(model, lambda: model(IMAGE), transformed="qk")
    assert verdict.levels["v"] == "values"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: setattr(m, "to_qkv", nn.Linear(16, 36)), "to_qkv beside to_q"),
        (lambda m: delattr(m, "add_q_proj"), "has add_k_proj, add_v_proj beside to_q"),
        (lambda m: setattr(m, "heads", 5), "do not divide into 5 heads"),
    ],
)
def test_what_is_not_two_whole_sets_is_refused(change: Any, reason: str) -> None:
    model = joint(CLASSES[3])
    change(model)
    (row,) = ac.inspect(model).unsupported
    assert reason in row.reason


def test_a_processor_with_weights_is_reported() -> None:
    """IP-adapters attend to images with keys and values that the processor holds."""
    model = joint(text=None)
    model.processor = nn.Module()
    model.processor.to_k_ip = model.processor.to_v_ip = nn.ModuleList([nn.Linear(10, 12)])
    plan = ac.inspect(model)
    assert [site.path for site in plan] == [""]
    assert [row.path for row in plan.unsupported] == ["processor"]


def test_an_unknown_class_with_two_sets_is_refused() -> None:
    (row,) = ac.inspect(joint("transformers.transformer_new.NewAttention")).unsupported
    assert "add_q_proj, add_k_proj, add_v_proj beside to_q" in row.reason
