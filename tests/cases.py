"""The table of cases: small models of every layout, and the methods, shared by the invariants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import attncond as ac


@dataclass(frozen=True)
class Case:
    """A model factory and how to run it; ``run`` returns one tensor."""

    name: str
    build: Callable[[], nn.Module]
    run: Callable[[nn.Module], Tensor]

    def make(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        model = self.build().to(dtype).eval()
        # Trained weights are not tiny: give zero-initialised or 0.02-scaled ones some size, so that
        # an effect on the outputs cannot drown in rounding.
        with torch.no_grad():
            for name, p in model.named_parameters():
                if p.ndim >= 2:
                    p.normal_(std=p[0].numel() ** -0.5)
                elif p.ndim == 1:
                    p.normal_(mean=0.0 if "bias" in name else 1.0, std=0.1)
        return model


def _input(model: nn.Module, *shape: int) -> Tensor:
    dtype = next(model.parameters()).dtype
    generator = torch.Generator().manual_seed(7)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def _tokens(*shape: int) -> Tensor:
    return torch.randint(3, 30, shape, generator=torch.Generator().manual_seed(7))


def _vit() -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(
        img_size=8, patch_size=4, in_chans=3, num_classes=5, embed_dim=24, depth=2, num_heads=3
    )


def _timm(name: str, **kwargs: object) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import timm

        return timm.create_model(name, num_classes=4, **kwargs)

    return build


def _hf(model_type: str, **settings: object) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        from transformers import AutoConfig, AutoModel

        return AutoModel.from_config(AutoConfig.for_model(model_type, vocab_size=32, **settings))

    return build


class CrossAttention(nn.Module):
    """MultiheadAttention with keys and values of widths of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(
            24, 4, kdim=20, vdim=12, add_bias_kv=True, batch_first=True
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attn(x, x[..., :20], x[..., :12])[0]
        return out


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(24, 3, dim_feedforward=32, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


def _plain(*shape: int) -> Callable[[nn.Module], Tensor]:
    return lambda m: m(_input(m, *shape))


def _last_hidden(m: nn.Module) -> Tensor:
    out: Tensor = m(_tokens(2, 6)).last_hidden_state
    return out


_TINY = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}

CASES = [
    Case("torch-encoder", _encoder, _plain(2, 5, 24)),
    Case("torch-cross", CrossAttention, _plain(2, 5, 24)),
    Case("timm-vit", _vit, _plain(2, 3, 8, 8)),
    Case(
        "timm-beit",  # reads qkv.weight itself, past the module's forward
        _timm("beit_base_patch16_224", img_size=32, embed_dim=24, depth=2, num_heads=3),
        _plain(2, 3, 32, 32),
    ),
    Case(
        "timm-swinv2",
        _timm(
            "swinv2_tiny_window8_256",
            img_size=32,
            window_size=4,
            embed_dim=12,
            depths=(2,),
            num_heads=(3,),
        ),
        _plain(2, 3, 32, 32),
    ),
    Case(
        "hf-gpt2",  # Conv1D: transposed
        _hf("gpt2", n_embd=32, n_layer=2, n_head=4, n_positions=16),
        _last_hidden,
    ),
    Case(
        "hf-llama",  # grouped-query: rectangular K and V
        _hf("llama", **_TINY, num_key_value_heads=2, intermediate_size=32),
        _last_hidden,
    ),
    Case("hf-bloom", _hf("bloom", hidden_size=32, n_layer=2, n_head=4), _last_hidden),  # head-major
    Case(
        "hf-albert",  # one layer, used three times
        _hf(
            "albert",
            embedding_size=16,
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=32,
        ),
        _last_hidden,
    ),
    Case(
        "hf-t5",  # inner width above the model's: tall projections
        lambda: _hf("t5", d_model=24, d_kv=16, d_ff=32, num_layers=2, num_heads=3)().encoder,
        _last_hidden,
    ),
]
CASE = {case.name: case for case in CASES}

METHODS = {
    "default": ac.Spectral(),
    "kappa-1.5-head": ac.Spectral(kappa=1.5, scope="head"),
    "lam-literal-qk": ac.Spectral(lam=0.7, preserve_norm=False, roles="qk", gain=0.6),
    "paper": ac.Spectral.paper(),
    "paper-svd": ac.Spectral.paper_svd(),
    "polar-head-v": ac.Spectral(correction="polar", scope="head", roles="v"),
}


def stock_state(model: nn.Module) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in model.state_dict().items()}


def same_state(model: nn.Module, state: dict[str, Tensor]) -> bool:
    now = model.state_dict()
    return list(now) == list(state) and all(torch.equal(now[k], v) for k, v in state.items())


def train(model, handle, optimizer, steps, generator):
    losses = []
    for _ in range(steps):
        x = torch.randn(4, 3, 8, 8, generator=generator)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
