"""κ of heads that no closed form covers, against jacrev and an SVD of heads written by hand."""

import math

import pytest
import timm
import torch
import transformers
from timm.models.eva import EvaAttention
from timm.models.xcit import XCA
from torch import nn
from torch.nn import functional as F

import attncond as ac

SMALL = {
    "vocab_size": 64,
    "hidden_size": 40,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
}


def kappa(head, weights, rank):
    """By jacrev of a function of W_Q, W_K, W_V, and one SVD."""
    parts = torch.func.jacrev(head, argnums=(0, 1, 2))(*weights)
    rows = parts[0].ndim - weights[0].ndim
    wide = torch.cat([p.flatten(0, rows - 1).flatten(1) for p in parts], 1)
    sigma = torch.linalg.svdvals(wide.detach())
    assert rank == int((sigma > 1e-12 * sigma[0]).sum()), sigma
    return float(sigma[0] / sigma[rank - 1])


def check(report, row, head, weights, rel=1e-8, path="dense"):
    values = report.rows[row].values
    assert values["jacobian_path"] == path, values["jacobian_status"]
    assert values["jacobian_status"] == path
    want = kappa(head, [w.detach() for w in weights], int(values["jacobian_rank"]))
    assert values["jacobian_kappa"] == pytest.approx(want, rel=rel)
    assert values["jacobian_kappa_error"] < 1e-6 * want


def inputs_of(model, module, run):
    """What the module was called with."""
    seen = []
    hook = module.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append((args, kwargs)), with_kwargs=True
    )
    with torch.no_grad():
        run(model)
    hook.remove()
    return seen[0]


def rotated(x, cos, sin):
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[:, half:], x[:, :half]], 1) * sin


def rms(x, weight, eps):
    return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def causal(n):
    return torch.full((n, n), -math.inf, dtype=torch.float64).triu(1)


def decoder(config, **kwargs):
    torch.manual_seed(0)
    return transformers.AutoModel.from_config(config, **kwargs).double().eval()


@pytest.mark.parametrize("how", ["sdpa", "eager"])
@pytest.mark.parametrize("tokens", [None, 5])
@pytest.mark.parametrize("normed", [False, True], ids=["llama", "qwen3"])
def test_rotary_and_normalised_queries(how, tokens, normed):
    cls = transformers.Qwen3Config if normed else transformers.LlamaConfig
    model = decoder(cls(**SMALL), attn_implementation=how)
    attention = model.layers[0].self_attn
    if normed:
        with torch.no_grad():
            attention.q_norm.weight.uniform_(0.5, 2)
            attention.k_norm.weight.uniform_(0.5, 2)
    ids = torch.randperm(64)[:18].view(2, 9)
    args, kwargs = inputs_of(model, attention, lambda m: m(ids))
    hidden = kwargs.get("hidden_states", args[0] if args else None)
    cos, sin = kwargs["position_embeddings"]
    rows = list(range(9)) if tokens is None else [0, 2, 4, 6, 8]
    x, cos, sin = hidden[0, rows], cos[0, rows].double(), sin[0, rows].double()
    report = ac.diagnose(model, {"input_ids": ids}, tokens=tokens)
    for h in range(4):

        def head(w_q, w_k, w_v):
            q, k, v = x @ w_q.T, x @ w_k.T, x @ w_v.T
            if normed:
                q = rms(q, attention.q_norm.weight, attention.q_norm.variance_epsilon)
                k = rms(k, attention.k_norm.weight, attention.k_norm.variance_epsilon)
            logits = rotated(q, cos, sin) @ rotated(k, cos, sin).T / math.sqrt(6)
            return torch.softmax(logits + causal(len(x)), -1) @ v

        q, kv = slice(6 * h, 6 * h + 6), slice(6 * (h // 2), 6 * (h // 2) + 6)
        weights = (attention.q_proj.weight[q], attention.k_proj.weight[kv])
        check(report, 1 + h, head, (*weights, attention.v_proj.weight[kv]))
        assert report.rows[1 + h].values["jacobian_tokens"] == len(rows)


def test_float32_is_differentiated_in_float64():
    model = decoder(transformers.Qwen3Config(**SMALL))
    ids = torch.randperm(64)[:8].view(1, 8)
    want = ac.diagnose(model, {"input_ids": ids}).rows[1].values["jacobian_kappa"]
    got = ac.diagnose(model.float(), {"input_ids": ids}).rows[1].values
    # Its norm asks for float32 by name; rounding of its input alone changes little.
    assert got["jacobian_kappa"] == pytest.approx(want, rel=1e-4)
    assert got["jacobian_kappa_error"] < 1e-8 * want


def test_sinks_stay_when_keys_are_sampled():
    config = transformers.GptOssConfig(**SMALL, num_local_experts=2, num_experts_per_tok=1)
    model = decoder(config, attn_implementation="eager").float()  # its experts know no float64
    attention = model.layers[0].self_attn
    with torch.no_grad():
        attention.sinks.normal_()
        for part in (attention.q_proj, attention.k_proj, attention.v_proj):
            part.weight.normal_(0, 0.3)
            part.bias.normal_(0, 0.3)
    ids = torch.randperm(64)[:9].view(1, 9)
    args, kwargs = inputs_of(model, attention, lambda m: m(ids))
    hidden = kwargs.get("hidden_states", args[0] if args else None)
    cos, sin = (t[0, [0, 4, 8]].double().repeat(1, 2) for t in kwargs["position_embeddings"])
    x = hidden[0, [0, 4, 8]].double()

    def head(w_q, w_k, w_v):
        q, k, v = (
            x @ w.T + p.bias[:6]
            for w, p in zip(
                (w_q, w_k, w_v), (attention.q_proj, attention.k_proj, attention.v_proj), strict=True
            )
        )
        logits = rotated(q, cos, sin) @ rotated(k, cos, sin).T * attention.scaling + causal(3)
        joined = torch.cat([logits, attention.sinks[0].expand(3, 1)], 1)
        return torch.softmax(joined, -1)[:, :3] @ v

    report = ac.diagnose(model, {"input_ids": ids}, tokens=3)
    parts = (attention.q_proj, attention.k_proj, attention.v_proj)
    check(report, 1, head, [p.weight[:6].double() for p in parts])


def test_rotary_of_timm_skips_the_class_token():
    torch.manual_seed(0)
    model = EvaAttention(24, 3, num_prefix_tokens=1, scale_norm=False).double().eval()
    x = torch.randn(2, 8, 24, dtype=torch.float64)
    rope = torch.randn(7, 16, dtype=torch.float64)  # sin and cos, as one table
    report = ac.diagnose(model, lambda m: m(x, rope=rope), tokens=4)
    rows = [0, 2, 5, 7]
    sin, cos = rope.chunk(2, 1)

    def turned(t):
        pairs = torch.stack([-t[:, 1::2], t[:, ::2]], -1).flatten(1)
        moved = t * F.pad(cos, (0, 0, 1, 0), value=1)[rows]
        return moved + pairs * F.pad(sin, (0, 0, 1, 0))[rows]

    zero = torch.zeros_like(model.q_bias)
    biases = torch.cat([model.q_bias, zero, model.v_bias]).view(3, 3, 8)
    for h in range(3):

        def head(w_q, w_k, w_v, h=h):
            q, k, v = (
                x[0, rows] @ w.T + b for w, b in zip((w_q, w_k, w_v), biases[:, h], strict=True)
            )
            return torch.softmax(turned(q) @ turned(k).T / math.sqrt(8), -1) @ v

        check(report, 1 + h, head, model.qkv.weight.view(3, 3, 8, 24)[:, h])


@pytest.mark.parametrize("method", [None, ac.RemoveGap(), ac.Precondition()], ids=repr)
def test_cross_covariance(method):
    torch.manual_seed(0)
    model = XCA(24, 3, qkv_bias=True).double().eval()
    with torch.no_grad():
        model.temperature.uniform_(0.5, 2)
    x = torch.randn(2, 9, 24, dtype=torch.float64)
    if method is not None:
        ac.condition(model, method)
    report = ac.diagnose(model, x, tokens=5)
    biases = model.qkv.bias.detach().view(3, 3, 8)

    def head(w_q, w_k, w_v):
        q, k, v = (x[0] @ w.T + b for w, b in zip((w_q, w_k, w_v), biases[:, 1], strict=True))
        logits = F.normalize(q, dim=0).T @ F.normalize(k, dim=0) * model.temperature[1].detach()
        p = torch.softmax(logits, -1)
        p = p - 1 / 8 if isinstance(method, ac.RemoveGap) else p
        out = p @ v.T
        if isinstance(method, ac.Precondition):
            out = out / out.norm(dim=1, keepdim=True)
        return out[:, [0, 2, 4, 6, 8]]

    check(report, 2, head, model.qkv.weight.detach().view(3, 3, 8, 24)[:, 1])


@pytest.mark.parametrize(
    "methods",
    [[ac.RemoveGap()], [ac.Precondition()], [ac.RemoveGap(), ac.Precondition()], [ac.Spectral()]],
    ids=repr,
)
@pytest.mark.parametrize("fused", [True, False])
def test_conditioned_heads_of_a_vit(methods, fused):
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=48, depth=1, embed_dim=24, num_heads=3
    ).double()
    attention = model.blocks[0].attn
    attention.fused_attn = fused
    ac.condition(model, ac.Spectral())  # effective weights are the variables
    for method in methods:
        if not isinstance(method, ac.Spectral):
            ac.condition(model, method)
    image = torch.randn(2, 3, 48, 48, dtype=torch.float64)
    (tokens,), _ = inputs_of(model.eval(), attention, lambda m: m(image))
    report = ac.diagnose(model, image, tokens=6)
    rows = [0, 2, 4, 5, 7, 9]
    x = tokens[0, rows]
    biases = attention.qkv.bias.detach().view(3, 3, 8)

    def head(w_q, w_k, w_v):
        q, k, v = (x @ w.T + b for w, b in zip((w_q, w_k, w_v), biases[:, 2], strict=True))
        p = torch.softmax(q @ k.T / math.sqrt(8), -1)
        out = (p - 1 / 6 if ac.RemoveGap() in methods else p) @ v
        if ac.Precondition() in methods:
            out = out / out.norm(dim=1, keepdim=True)
        return out

    weights = attention.qkv.weight.detach().as_subclass(torch.Tensor).view(3, 3, 8, 24)[:, 2]
    closed = fused or methods == [ac.Spectral()]
    check(report, 3, head, weights, path="closed form" if closed else "dense")
    bounded = "jacobian_paper_bound" in report.rows[3].values
    assert bounded == (methods == [ac.Spectral()])


def test_nystrom():
    config = transformers.NystromformerConfig(
        vocab_size=64,
        hidden_size=20,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        num_landmarks=3,
        segment_means_seq_len=9,
        max_position_embeddings=32,
        conv_kernel_size=3,
        pad_token_id=0,
    )
    model = decoder(config)
    attention = next(m for m in model.modules() if type(m).__name__ == "NystromformerSelfAttention")
    ids = torch.arange(1, 10)[None]
    args, _ = inputs_of(model, attention, lambda m: m(ids))
    x = args[0][0]
    report = ac.diagnose(model, {"input_ids": ids}, tokens=4)

    def head(w_q, w_k, w_v):
        parts = (attention.query, attention.key, attention.value)
        q, k, v = (x @ w.T + p.bias[10:] for w, p in zip((w_q, w_k, w_v), parts, strict=True))
        q, k = q / 10**0.25, k / 10**0.25
        q_few, k_few = q.view(3, 3, 10).mean(1), k.view(3, 3, 10).mean(1)
        one, two, three = (
            torch.softmax(a @ b.T, -1) for a, b in ((q, k_few), (q_few, k_few), (q_few, k))
        )
        inverse = two.T / norm(two)
        for _ in range(6):
            step = two @ inverse
            eye = torch.eye(3, dtype=torch.float64)
            inverse = 0.25 * inverse @ (13 * eye - step @ (15 * eye - step @ (7 * eye - step)))
        kernel = attention.conv.weight[1, 0, :, 0]
        padded = F.pad(v, (0, 0, 1, 1))
        local = sum(kernel[i] * padded[i : i + 9] for i in range(3))
        return ((one @ inverse) @ (three @ v) + local)[[0, 3, 5, 8]]

    def norm(two):
        """Of both heads' K2, which scales the first guess of the inverse; the other is fixed."""
        q, k = (
            ((x @ p.weight[:10].T + p.bias[:10]) / 10**0.25).detach().view(3, 3, 10).mean(1)
            for p in (attention.query, attention.key)
        )
        return torch.stack([torch.softmax(q @ k.T, -1), two]).sum(-2).max()

    parts = (attention.query, attention.key, attention.value)
    check(report, 2, head, [p.weight[10:] for p in parts])


class Mixed(nn.Module):
    """Pools its keys: no query, key or value is a token's own."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(12, 24)

    def forward(self, x, mask=None):
        q, k, v = self.qkv(x).view(len(x), -1, 3, 2, 4).permute(2, 0, 3, 1, 4)
        k = F.avg_pool1d(k.flatten(0, 1).mT, 3, 1, 1).mT.view_as(k)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


ac.register(Mixed)(lambda m: ac.fused(m.qkv, heads=2))


@pytest.mark.parametrize("tokens", [None, 4])
def test_tokens_that_are_mixed_before_attention(tokens):
    torch.manual_seed(0)
    model = Mixed().double()
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    bias = torch.randn(2, 1, 7, 7, dtype=torch.float64)
    report = ac.diagnose(model, (x, bias), tokens=tokens)
    rows = list(range(7)) if tokens is None else [0, 2, 4, 6]
    biases = model.qkv.bias.detach().view(3, 2, 4)

    def head(w_q, w_k, w_v):
        q, k, v = (x[0] @ w.T + b for w, b in zip((w_q, w_k, w_v), biases[:, 1], strict=True))
        k = F.avg_pool1d(k.T[None], 3, 1, 1)[0].T
        logits = (q @ k.T / 2 + bias[0, 0])[rows][:, rows]
        return torch.softmax(logits, -1) @ v[rows]

    check(report, 2, head, model.qkv.weight.detach().view(3, 2, 4, 12)[:, 1])


def test_nothing_of_the_model_changes(monkeypatch):
    model = decoder(transformers.LlamaConfig(**SMALL)).float()
    model.train()
    ac.condition(model, ac.Spectral())
    ac.condition(model, ac.Precondition())
    model.layers[0].self_attn.q_proj.get_parameter("weight").requires_grad_(False)
    ids = torch.randint(0, 64, (2, 6))

    def state():
        return (
            [(n, p.data_ptr(), p.requires_grad, p.grad, p._version) for n, p in
             model.named_parameters()],
            [(n, b.data_ptr(), b._version) for n, b in model.named_buffers()],
            [(type(m), m.training, sorted(m.__dict__)) for m in model.modules()],
            torch.get_rng_state().tolist(),
            torch.is_grad_enabled(),
        )  # fmt: skip

    before = state()
    assert ac.diagnose(model, {"input_ids": ids}).rows[1].values["jacobian_path"] == "dense"
    assert state() == before

    def interrupted(*_):
        raise KeyboardInterrupt

    from attncond.diagnose import replay

    monkeypatch.setattr(replay._Run, "_compare", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ac.diagnose(model, {"input_ids": ids})
    assert state() == before


class Forgetful(Mixed):
    """Answers another way each time it is asked."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x * self.calls)


class Loose(Mixed):
    """Its weight goes through a product that nobody follows."""

    def forward(self, x):
        y = torch.einsum("bti,oi->bto", x, self.qkv.weight)
        q, k, v = y.view(len(x), -1, 3, 2, 4).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v)


for _cls in (Forgetful, Loose):
    ac.register(_cls)(lambda m: ac.fused(m.qkv, heads=2))


@pytest.mark.parametrize(("cls", "why"), [(Forgetful, "are others"), (Loose, "was not found")])
def test_what_cannot_be_repeated_says_why(cls, why):
    values = ac.diagnose(cls(), torch.randn(2, 6, 12)).rows[1].values
    assert values["jacobian_status"].startswith("not covered: ")
    assert why in values["jacobian_status"]
    assert "jacobian_kappa" not in values
