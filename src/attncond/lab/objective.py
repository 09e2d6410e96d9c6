"""What a step minimises (labels, soft targets, DeiT's two heads), and what an evaluation tells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal

import torch
import torch._dynamo
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F

from attncond.lab.config import Config
from attncond.lab.data import Batches
from attncond.lab.distributed import share_statistics
from attncond.methods import Spectral

__all__ = ["Distillation", "compile_key", "compiled", "evaluate", "objective"]

Distillation = Literal["hard", "soft"] | None

# Touvron et al. 2021, §4: what they call typical for soft distillation.
TEMPERATURE, SOFT_SHARE = 3.0, 0.1


def objective(
    model: nn.Module,
    images: Tensor,
    targets: Tensor,
    smoothing: float = 0.0,
    dtype: torch.dtype | None = None,
    teacher: nn.Module | None = None,
    distill: Distillation = None,
) -> Tensor:
    """The loss of one batch, in float32: the one function of a step that is compiled.

    Args:
        model: Gives logits (n, classes), or a pair of them: those of a DeiT's two heads.
        images: (n, channels, height, width).
        targets: Labels (n,), or shares of classes (n, classes), which are smoothed already.
        smoothing: Of labels.
        dtype: What matrices are multiplied in (autocast); None: in float32.
        teacher: What a DeiT's second head learns from; without one both heads learn the targets.
        distill: "hard": the teacher's decision; "soft": its softened distribution.

    >>> objective(nn.Flatten(), torch.zeros(2, 4, 1, 1), torch.tensor([0, 1])).exp().round()
    tensor(4.)
    """
    kind = images.device.type
    with torch.autocast(kind, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        output = model(images)
        with torch.no_grad():
            guide = None if teacher is None else teacher(images).float()
    if isinstance(output, Tensor):
        return _cross_entropy(output, targets, smoothing)
    first, second = output
    if guide is None:
        losses = [_cross_entropy(head, targets, smoothing) for head in (first, second)]
        return (losses[0] + losses[1]) / 2
    own = _cross_entropy(first, targets, smoothing)
    if distill == "hard":
        return (own + F.cross_entropy(second.float(), guide.argmax(1))) / 2
    student, wanted = (F.log_softmax(x.float() / TEMPERATURE, 1) for x in (second, guide))
    distance = F.kl_div(student, wanted, reduction="batchmean", log_target=True)
    return (1 - SOFT_SHARE) * own + SOFT_SHARE * TEMPERATURE**2 * distance


def _cross_entropy(logits: Tensor, targets: Tensor, smoothing: float) -> Tensor:
    if targets.is_floating_point():
        return F.cross_entropy(logits.float(), targets)
    return F.cross_entropy(logits.float(), targets, label_smoothing=smoothing)


@torch.no_grad()
def evaluate(
    module: nn.Module, batches: Batches, accelerator: Accelerator, dtype: torch.dtype | None
) -> tuple[float, float]:
    """Mean loss and accuracy in per cent over all images, of all processes together."""
    module.eval()
    share_statistics(accelerator, module)
    kind = accelerator.device.type
    sums = torch.zeros(3, dtype=torch.float64, device=accelerator.device)
    for images, labels in batches.epoch(0):
        with torch.autocast(kind, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            logits = module(images).float()
        sums[0] += F.cross_entropy(logits, labels, reduction="sum")
        sums[1] += (logits.argmax(1) == labels).sum()
        sums[2] += len(labels)
    loss, right, count = accelerator.reduce(sums).tolist()
    return loss / count, 100 * right / count


def compile_key(config: Config) -> str:
    """The same for runs whose steps compile to the same code: seeds, learning rates, strengths.

    λ and s are buffers of the model, so that they may differ; what λ is added to may not.
    """
    methods = [
        replace(m, kappa=None, lam=None, preserve_norm=True, gain=1.0)
        if isinstance(m, Spectral)
        else m
        for m in config.conditioners()
    ]
    return repr((config.model, methods, config.data, config.train))


@lru_cache(maxsize=1)
def compiled(key: str, graphs: bool) -> Callable[..., Tensor]:
    """The objective, compiled for what ``key`` describes.

    Runs of one key that follow each other in one process share it. Another key starts over: code
    that is of no use any more would cost memory, and count towards the number of recompilations
    after which torch.compile falls back to eager silently. With ``graphs`` a step is replayed as
    CUDA graphs, for small models are bound by what it costs to launch their kernels.
    """
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 64
    options: dict[str, Any] = {"mode": "reduce-overhead"} if graphs else {}
    found: Callable[..., Tensor] = torch.compile(objective, dynamic=False, **options)
    return found
