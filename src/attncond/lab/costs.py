"""Tables 8 and 9: memory and FLOPs of the projections, counted in the models themselves.

Nothing has to be trained for them: models are built without memory (torch's meta device), and
`attncond.accounting` counts. Where there are runs, their measured peak memory stands beside.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from attncond import condition
from attncond.accounting import Accounting, account, count_tokens
from attncond.errors import ConditioningError
from attncond.lab.compare import Study
from attncond.lab.config import Model
from attncond.lab.models import build
from attncond.lab.sheet import Table
from attncond.methods import Spectral

__all__ = ["Counted", "counted", "flops", "memory"]

# The paper's models at the paper's size.
_MODELS = {
    "ViT-B": "vit_b",
    "DeiT-B": "deit_b",
    "Swin-B": "swin_b",
    "XCiT-M": "xcit_m24",
    "DaViT-B": "davit_b",
}
_MEASURE = "attncond lab run vit-cifar10 --form small --variants baseline,spectral"
_TEXTS = frozenset(("model", "paper", "variant", "data"))


@dataclass(frozen=True)
class Counted:
    """A model with its counts for one image; ``corrected`` is with `Spectral.paper`."""

    model: str
    original: Accounting
    corrected: Accounting


def counted(label: str, model: Model, classes: int, size: int) -> Counted:
    """Count one model, without training it or even making its weights."""
    with torch.device("meta"):
        network = build(model, classes, size)
    image = torch.zeros(1, 3, size, size, device="meta")
    network.eval()
    tokens = count_tokens(network, lambda: network(image))
    original = account(network, tokens)
    condition(network, Spectral.paper())
    return Counted(label, original, account(network, tokens))


def memory(study: Study, models: dict[str, str] | None = None) -> Table:
    """Table 8."""
    columns = (
        *("model", "parameters", "gradients", "activations", "paper", "correction, bytes"),
        *("kept for backward", "variant", "peak memory, GB", "/ baseline"),
    )
    rows: list[tuple[str, ...]] = []
    data: list[dict[str, Any]] = []
    for one in _all(models):
        total = one.corrected.total
        numbers = {
            "model": one.model,
            "parameters": total("parameters"),
            "gradients": total("parameters"),
            "activations": total("activations"),
            "correction_bytes": one.corrected.correction_bytes,
            "kept_for_backward": one.corrected.kept_for_backward,
        }
        counts = [f"{numbers[k]:,}" for k in ("parameters", "gradients", "activations")]
        extra = [f"{numbers[k]:,}" for k in ("correction_bytes", "kept_for_backward")]
        rows.append((one.model, *counts, "one scalar, no extra tensor", *extra, "", "", ""))
        data.append(numbers)
    for setting in study:
        for g in setting.groups:
            peak, ratio = g.median("peak_memory_bytes"), setting.ratio(g, "peak_memory_bytes")
            if peak is not None and ratio is not None:
                shown = (f"{peak / 1e9:.2f}", f"{ratio:.3f}")
                model = f"{setting.architecture}, {setting.own}"
                rows.append((model, "", "", "", "", "", "", g.label, *shown))
                data.append(
                    {"model": model, "variant": g.label, "peak_memory_bytes": peak, "ratio": ratio}
                )
    notes: tuple[str, ...] = (
        "Counts are of W_Q, W_K and W_V of the whole model for one image, the same with and "
        "without correction (paper: 3Dd parameters and gradients, 3Nd activations a head). The "
        "paper adds one constant scalar; correction, bytes is what attncond keeps: buffers with λ, "
        "s and their places for each row, which a checkpoint needs.",
        "Kept for backward: numbers in the corrected weight s(W + λI), which autograd keeps beside "
        "W unless a compiler forms it again. Table 8 has no extra tensors there, which is true of "
        "XW + λX only.",
    )
    title = "Table 8: memory of spectral conditioning, counted"
    measured = any(row[-2] for row in rows)
    notes += ("Peak memory is measured on the device, the median of the runs.",) if measured else ()
    missing = () if measured else (("peak memory, measured on a GPU", _MEASURE),)
    return Table(title, columns, tuple(rows), tuple(data), notes, missing, _TEXTS)


def flops() -> Table:
    """Table 9."""
    columns = (
        *("model", "projections, FLOPs", "paper", "XW + λX, added", "share"),
        *("X·s(W + λI), added", "share"),
    )
    rows, data = [], []
    for one in _all():
        found = one.original
        numbers = {
            "model": one.model,
            "flops": found.total("flops"),
            "added_to_output": found.total("flops_added_to_output"),
            "overhead_output": found.overhead_output,
            "added_to_weight": found.total("flops_added_to_weight"),
            "overhead_weight": found.overhead_weight,
        }
        rows.append(
            (
                one.model,
                f"{numbers['flops']:,}",
                "6NDd + 3Nd: 1/(2D)",
                f"{numbers['added_to_output']:,}",
                f"{found.overhead_output:.3%}",
                f"{numbers['added_to_weight']:,}",
                f"{found.overhead_weight:.3%}",
            )
        )
        data.append(numbers)
    notes = (
        "Forward pass of W_Q, W_K and W_V of the whole model, one image. XW + λX is what the paper "
        "counts; X·s(W + λI) is what attncond runs: its cost does not grow with the batch, so that "
        "its share falls as 1/batch.",
        "Measured step times are in Tables 1 and 7.",
    )
    title = "Table 9: FLOPs of the projections, counted"
    return Table(title, columns, tuple(rows), tuple(data), notes, (), _TEXTS)


def _all(models: dict[str, str] | None = None) -> Iterator[Counted]:
    for label, name in (models or _MODELS).items():
        try:
            yield counted(label, Model(name=name), 1000, 224)
        except ConditioningError as error:
            raise ConditioningError(f"{label} ({name}) cannot be counted: {error}") from error
