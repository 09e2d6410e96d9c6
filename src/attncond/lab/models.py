"""The papers' vision models from timm, and small ones of the same classes for 32×32 images.

``build`` makes a model from a recipe's ``model`` section. The seed of torch's global generator
decides every weight, and nothing is ever downloaded.

The small models keep the classes of the large ones and shrink depth, width and strides:

- ``vit_small32``, ``deit_small32``: patch 4, 9 layers, width 192, 3 heads.
- ``swin_small32``: patch 2, three stages of 2-6-2 layers, widths 64-128-256, window 4: windows of
  16, 8 and 4 patches a side, shifted in the first two stages as in Swin-B.
- ``xcit_small32``: 8 + 2 layers, width 192, 4 heads. timm has stems for patches of 8 and 16 only;
  with the first two strides of the latter's four convolutions set to 1 a patch is 4 pixels.
- ``davit_small32``: three stages of 1-3-1 pairs (window and channel attention), widths 64-128-256,
  window 4; the stem's convolution has stride 2 instead of 4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import timm
import torch
from timm.models.davit import DaVit, WindowAttention
from timm.models.deit import VisionTransformerDistilled
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from timm.models.xcit import Xcit
from torch import nn

from attncond.conditioning import condition
from attncond.errors import ConditioningError, close
from attncond.lab.config import Model
from attncond.lab.initial import STARTS
from attncond.methods.parse import parse_method

__all__ = ["MODELS", "ModelError", "build", "check", "remove_layer_norms"]


class ModelError(ConditioningError):
    """A model cannot be built from these settings."""


def _timm(name: str, sized: bool = True) -> Callable[..., nn.Module]:
    def make(*, img_size: int, **kwargs: Any) -> nn.Module:
        given = {"img_size": img_size, **kwargs} if sized else kwargs
        # One takes any size, another has no stochastic depth that could be switched off.
        needless = {"img_size"} if given.get("drop_path_rate") else {"img_size", "drop_path_rate"}
        while True:
            try:
                model: nn.Module = timm.create_model(name, pretrained=False, **given)
                return model
            except TypeError as error:
                refused = {k for k in needless & given.keys() if f"'{k}'" in str(error)}
                if not refused:
                    raise
                given = {k: v for k, v in given.items() if k not in refused}

    return make


_VIT = {"patch_size": 4, "embed_dim": 192, "depth": 9, "num_heads": 3}
_STAGES = {"num_heads": (2, 4, 8), "window_size": 4}


def _vit_small32(**kwargs: Any) -> nn.Module:
    model: nn.Module = VisionTransformer(**{**_VIT, **kwargs})
    return model


def _deit_small32(**kwargs: Any) -> nn.Module:
    model: nn.Module = VisionTransformerDistilled(**{**_VIT, **kwargs})
    return model


def _swin_small32(**kwargs: Any) -> nn.Module:
    own = {"patch_size": 2, "embed_dim": 64, "depths": (2, 6, 2), **_STAGES}
    model: nn.Module = SwinTransformer(**{**own, **kwargs})
    return model


def _xcit_small32(**kwargs: Any) -> nn.Module:
    # eta=1 is timm's LayerScale for XCiTs of 12 layers; 1e-5 is for 24.
    own = {"embed_dim": 192, "depth": 8, "num_heads": 4, "eta": 1.0, "tokens_norm": True}
    model = Xcit(patch_size=16, **{**own, **kwargs})
    convolutions = [m for m in model.patch_embed.modules() if isinstance(m, nn.Conv2d)]
    for convolution in convolutions[:2]:
        convolution.stride = (1, 1)
    made: nn.Module = model
    return made


def _davit_small32(*, img_size: int, **kwargs: Any) -> nn.Module:
    own = {"embed_dims": (64, 128, 256), "depths": (1, 3, 1), **_STAGES}
    model = DaVit(**{**own, **kwargs})
    model.stem.conv.stride = model.stem.stride = (2, 2)
    for module in model.modules():
        if isinstance(module, WindowAttention):
            # Fused kernels are made for longer rows than the 16 keys of a window.
            module.fused_attn = False
    made: nn.Module = model
    return made


MODELS: dict[str, Callable[..., nn.Module]] = {
    "vit_b": _timm("vit_base_patch16_224"),
    "deit_b": _timm("deit_base_distilled_patch16_224"),
    "swin_b": _timm("swin_base_patch4_window7_224"),
    "xcit_m24": _timm("xcit_medium_24_p16_224"),
    "davit_b": _timm("davit_base", sized=False),
    "vit_small32": _vit_small32,
    "deit_small32": _deit_small32,
    "swin_small32": _swin_small32,
    "xcit_small32": _xcit_small32,
    "davit_small32": _davit_small32,
}


def build(model: Model, num_classes: int, image_size: int, channels: int = 3) -> nn.Module:
    """The network that a recipe asks for, initialised, on the CPU, in float32.

    A DeiT gives its two heads' logits ``(cls, dist)`` in training and their mean in evaluation.

    Raises:
        ModelError: No such model, or arguments or an initialisation that it does not take.

    >>> net = build(Model(name="vit_small32", kwargs={"depth": 1}), num_classes=10, image_size=32)
    >>> sum(p.numel() for p in net.parameters())
    469258
    """
    make = MODELS.get(model.name)
    if make is None:
        if not timm.is_model(model.name):
            guess = close(model.name, [*MODELS, *timm.list_models()])
            raise ModelError(
                f"model.name: '{model.name}' is no model.{guess} There are {', '.join(MODELS)} and "
                "every name of timm.list_models()."
            )
        native = timm.get_pretrained_cfg(model.name)
        # Models that take any size have no such argument, so that it is only given where needed.
        sized = native is None or native.input_size[-1] != image_size
        make = _timm(model.name, sized=sized)
    # Always given: timm's Swin has a rate of 0.1 of its own.
    arguments = {**model.kwargs, "drop_path_rate": model.drop_path}
    try:
        net = make(img_size=image_size, num_classes=num_classes, in_chans=channels, **arguments)
    except Exception as error:  # of timm, for arguments of any kind
        raise ModelError(
            f"model '{model.name}' cannot be built for images of {image_size} pixels with "
            f"{arguments}: {error or type(error).__name__}"
        ) from error
    if isinstance(net, VisionTransformerDistilled):
        net.set_distilled_training(True)
    if not model.norm:
        remove_layer_norms(net)
    for text in model.parts():
        try:
            if text in STARTS:
                STARTS[text](net)
            else:
                condition(net, parse_method(text)).fold()
        except ConditioningError as error:
            raise ModelError(f"model.init '{text}' of '{model.name}': {error}") from error
    return net


@torch.no_grad()
def check(model: Model, image_size: int) -> None:
    """See that a model can be built, and takes images of this size for logits of their classes.

    Raises:
        ModelError: It cannot, or gives something else.
    """
    classes = 10
    net = build(model, classes, image_size).eval()
    said = f"model.name '{model.name}' with data.image_size {image_size} and {model.kwargs}"
    try:
        found = net(torch.zeros(1, 3, image_size, image_size))
    except Exception as error:  # of any kind of layer
        raise ModelError(f"{said} cannot read an image: {error}") from error
    shape = getattr(found, "shape", None)
    if shape != (1, classes):
        what = "no tensor" if shape is None else f"a tensor of shape {tuple(shape)}"
        raise ModelError(
            f"{said} gives {what} for one image of {classes} classes, where one row of logits is "
            "needed: it is no classifier as it is"
        )


def remove_layer_norms(model: nn.Module) -> None:
    """Put an identity in the place of every LayerNorm, as Table 6 does ("without layer norm").

    Every one goes: those before attention and MLP, the last one before the classifier, those of
    patch embeddings and of downsampling between stages, over channels (DaViT's stem) as well as
    over features. Their weights and biases go with them. Nothing is put in their place, neither a
    scale nor another initialisation, and everything else stays: LayerScale, XCiT's batch norms in
    the local patch interaction and the stem, and its normalisation of queries and keys. The paper
    does not say more than "without layer norm"; this is its literal reading.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.LayerNorm):
                setattr(parent, name, nn.Identity())
