"""The model of a run: made anew for a training, or with the weights that a training ended with."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.models.deit import VisionTransformerDistilled
from torch import Tensor, nn

from attncond.conditioning import Handle, condition
from attncond.lab.config import Config
from attncond.lab.folder import RunError
from attncond.lab.models import build
from attncond.weights import take

__all__ = ["certified", "load_teacher", "load_trained", "make"]


def make(config: Config, classes: int, channels: int) -> tuple[nn.Module, list[Handle]]:
    """The model that a run starts with, conditioned, on the CPU.

    Raises:
        RunError: A teacher is given, and the model has no head that would learn from it.
    """
    model = build(config.model, classes, config.data.image_size, channels)
    # A name tells little: timm's DeiTs are distilled or not, and DeiT III never is.
    if config.train.teacher and not isinstance(model, VisionTransformerDistilled):
        raise RunError(
            f"train.teacher: '{config.model.name}' (model.name) has no distillation head that "
            "could learn from it; deit_small32, deit_b and timm's deit_*_distilled_* have one"
        )
    return model, [condition(model, method) for method in config.conditioners()]


def certified(handles: list[Handle]) -> dict[str, float | int | None] | None:
    """What is known of the conditioned matrices, in a few numbers; None if there are none.

    Every process has to call it where weights are sharded.
    """
    rows = [row for handle in handles for row in handle.certificates()]
    if not rows:
        return None
    kappas = [row.kappa for row in rows if row.kappa is not None]
    shifts = [
        float(take(weight.buffer("shift"), index)[0])
        for handle in handles
        for weight in handle._weights
        if weight.correction.method.correction == "identity"
        for _, index in weight.correction.matrices()
    ]
    norms = [row.norm for row in rows]
    ratios = [lam / norm for lam, norm in zip(shifts, norms, strict=False) if norm]
    return {
        "matrices": len(rows),
        "kappa_median": statistics.median(kappas),
        "kappa_max": max(kappas),
        "bound_max": max(row.bound for row in rows),
        "sigma_mean": statistics.fmean(norms),
        "lam_over_sigma": statistics.fmean(ratios) if ratios else None,
    }


def load_teacher(folder: Path, example: Tensor, classes: int) -> nn.Module:
    """The model of a finished run that can teach one of these images and classes.

    Raises:
        RunError: There is no finished run, or it has learned other classes or images.
    """
    try:
        model = load_trained(folder)
    except RunError as error:
        raise RunError(f"train.teacher: {error}") from error
    try:
        with torch.no_grad():
            found = model(example[:1].cpu()).shape[-1]
    except (AssertionError, RuntimeError, ValueError) as error:
        raise RunError(
            f"train.teacher: the model in {folder} does not take images of "
            f"{tuple(example.shape[1:])}: {error}"
        ) from error
    if found != classes:
        raise RunError(
            f"train.teacher: the model in {folder} tells {found} classes apart, the data has "
            f"{classes}: it has learned another data set"
        )
    return model


def load_trained(folder: Path) -> nn.Module:
    """The model of a finished run, for a teacher, ``attncond.diagnose`` or use; in eval mode.

    Raises:
        RunError: There is no finished run, it diverged, or its files are not of one run.
    """
    try:
        values = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        weights = load_file(folder / "model.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise RunError(
            f"there is no finished run in {folder} ({error}): it needs result.json and "
            "model.safetensors"
        ) from error
    try:
        config = Config.model_validate_json(json.dumps(values["config"]))
        classes, channels = int(values["classes"]), int(values["channels"])
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(
            f"{folder / 'result.json'} is not that of a run of this version ({error})"
        ) from error
    if values.get("status") == "diverged":
        raise RunError(f"the run in {folder} diverged: what it ended with is no model")
    model, _ = make(config, classes, channels)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise RunError(
            f"{folder / 'model.safetensors'} has other weights than result.json tells of: {error}"
        ) from error
    return model.eval()
