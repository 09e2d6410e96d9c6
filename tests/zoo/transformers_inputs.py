"""Inputs for the tiny models of transformers, one function for each way they want them."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

SEQUENCE = 10
IMAGE = 32
Inputs = dict[str, Any]


def ids(length: int = SEQUENCE, low: int = 3, high: int = 99, batch: int = 3) -> Tensor:
    """Token numbers."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(low, high, (batch, length), generator=generator)


def noise(*shape: int) -> Tensor:
    """Pixels, features or waveforms."""
    generator = torch.Generator().manual_seed(2)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def default(model: nn.Module) -> Inputs:
    """What ``forward`` asks for by name."""
    config: Any = model.config
    names = inspect.signature(model.forward).parameters
    vision = getattr(config, "vision_config", config)
    given: Inputs = {}
    if "pixel_values" in names:
        size = getattr(vision, "image_size", IMAGE)
        height, width = (size, size) if isinstance(size, int) else size
        given["pixel_values"] = noise(3, getattr(vision, "num_channels", 3), height, width)
    if "input_features" in names:
        given["input_features"] = noise(3, 80, 2 * SEQUENCE)
    if "input_values" in names and "pixel_values" not in names:
        given["input_values"] = noise(3, 1600)
    if "input_ids" in names:
        given["input_ids"] = ids()
    if "decoder_input_ids" in names:
        given["decoder_input_ids"] = ids(6)
    return given


def float32(model: nn.Module) -> Inputs:
    """Models whose mask is a float32 constant that float64 cannot hold."""
    model.float()
    return default(model)


def text(model: nn.Module) -> Inputs:
    return {"input_ids": ids()}


def text16(model: nn.Module) -> Inputs:
    return {"input_ids": ids(16)}


def text64(model: nn.Module) -> Inputs:
    return {"input_ids": ids(64)}


def bbox(model: nn.Module) -> Inputs:
    return {"input_ids": ids(), "bbox": torch.tensor([1, 2, 5, 9]).expand(3, 10, 4).clone()}


def bbox_f(model: nn.Module) -> Inputs:
    return {"input_ids": ids(), "bbox": noise(3, 10, 4).abs()}


def layoutlmv3(model: nn.Module) -> Inputs:
    return dict(bbox(model), pixel_values=noise(3, 3, 32, 32))


def longformer(model: nn.Module) -> Inputs:
    g = torch.zeros(3, 12, dtype=torch.long)
    g[:, 0] = 1
    return {"input_ids": ids(12), "global_attention_mask": g}


def led(model: nn.Module) -> Inputs:
    return dict(longformer(model), decoder_input_ids=ids(6))


def s2s16(model: nn.Module) -> Inputs:
    return {"input_ids": ids(16), "decoder_input_ids": ids(6)}


def cross(model: nn.Module) -> Inputs:
    return {"input_ids": ids(), "encoder_hidden_states": noise(3, 7, 64)}


def decision(model: nn.Module) -> Inputs:
    return {
        "states": noise(3, 4, 5),
        "actions": noise(3, 4, 3),
        "rewards": noise(3, 4, 1),
        "returns_to_go": noise(3, 4, 1),
        "timesteps": torch.arange(4).expand(3, 4),
        "attention_mask": torch.ones(3, 4),
    }


def wave(model: nn.Module) -> Inputs:
    return {"input_values": noise(3, 200)}


def feat160(model: nn.Module) -> Inputs:
    return {"input_features": noise(3, 12, 160)}


def whisper(model: nn.Module) -> Inputs:
    return {"input_features": noise(3, 8, 40), "decoder_input_ids": ids(6)}


def s2t(model: nn.Module) -> Inputs:
    return {"input_features": noise(3, 40, 8), "decoder_input_ids": ids(6)}


def ast(model: nn.Module) -> Inputs:
    return {"input_values": noise(3, 24, 16)}


def moonshine(model: nn.Module) -> Inputs:
    return {"input_values": noise(3, 2000), "decoder_input_ids": ids(6)}


def parakeet(model: nn.Module) -> Inputs:
    return {"input_features": noise(3, 64, 16)}


def seggpt(model: nn.Module) -> Inputs:
    return {
        "pixel_values": noise(3, 3, 16, 16),
        "prompt_pixel_values": noise(3, 3, 16, 16),
        "prompt_masks": noise(3, 3, 16, 16),
    }


def video(model: nn.Module) -> Inputs:
    return {"pixel_values": noise(3, 2, 3, 32, 32)}


def video4(model: nn.Module) -> Inputs:
    return {"pixel_values": noise(3, 4, 3, 32, 32)}


def qformer(model: nn.Module) -> Inputs:
    return {"query_embeds": noise(3, 6, 64), "encoder_hidden_states": noise(3, 7, 48)}


def sam(model: nn.Module) -> Inputs:
    return {"pixel_values": noise(3, 3, 32, 32), "input_points": noise(3, 1, 2, 2)}


def pixtral(model: nn.Module) -> Inputs:
    return {"pixel_values": noise(1, 3, 32, 32), "image_sizes": torch.tensor([[32, 32]])}


def siglip2(model: nn.Module) -> Inputs:
    return {
        "pixel_values": noise(3, 16, 3 * 64),
        "pixel_attention_mask": torch.ones(3, 16, dtype=torch.long),
        "spatial_shapes": torch.tensor([[4, 4]] * 3),
    }


def grid(model: nn.Module) -> Inputs:
    c = model.config
    n = getattr(c, "in_channels", 3) * getattr(c, "temporal_patch_size", 1) * c.patch_size**2
    import inspect

    k = (
        "hidden_states"
        if "hidden_states" in inspect.signature(model.forward).parameters
        else "pixel_values"
    )
    return {k: noise(24, n), "grid_thw": torch.tensor([[1, 6, 4]])}


def detr(model: nn.Module) -> Inputs:
    return {"pixel_values": noise(1, 3, 64, 64)}


def perceiver(model: nn.Module) -> Inputs:
    return {"inputs": noise(3, 10, 64)}


def lxmert(model: nn.Module) -> Inputs:
    return {"input_ids": ids(), "visual_feats": noise(3, 5, 12), "visual_pos": noise(3, 5, 4)}


def visual_bert(model: nn.Module) -> Inputs:
    return {"input_ids": ids(), "visual_embeds": noise(3, 5, 12)}


def vilt(model: nn.Module) -> Inputs:
    return {"input_ids": ids(), "pixel_values": noise(3, 3, 32, 32)}


def flava(model: nn.Module) -> Inputs:
    return {"input_ids": ids(), "pixel_values": noise(3, 3, 32, 32)}


def patchtst(model: nn.Module) -> Inputs:
    return {"past_values": noise(3, 16, 2)}


def s2s64(model: nn.Module) -> Inputs:
    return {"input_ids": ids(64), "decoder_input_ids": ids(6)}


def vjepa2(model: nn.Module) -> Inputs:
    return {"pixel_values_videos": noise(2, 4, 3, 32, 32)}


def speecht5(model: nn.Module) -> Inputs:
    return {
        "input_ids": ids(),
        "decoder_input_values": noise(3, 6, 80),
        "speaker_embeddings": noise(3, 512),
    }


def gridimg(model: nn.Module) -> Inputs:
    n = 3 * model.config.patch_size**2
    return {"pixel_values": noise(24, n), "grid_thw": torch.tensor([[1, 6, 4]])}


def g4v(model: nn.Module) -> Inputs:
    c = model.config
    return {
        "pixel_values": noise(2, 18, 3 * c.patch_size**2),
        "pixel_position_ids": torch.stack(
            torch.meshgrid(torch.arange(6), torch.arange(3), indexing="ij"), -1
        )
        .view(1, 18, 2)
        .expand(2, 18, 2),
    }


def granite_speech(model: nn.Module) -> Inputs:
    return {"hidden_states": noise(3, 20, 12)}
