"""What removing the gap and equilibrating rows do to heads' outputs, by κ and by stable rank.

    OMP_NUM_THREADS=1 python benchmarks/precondition_kappa.py     # about a minute

Four kinds of matrix in float64: Gaussian ones (square like a head of 64 tokens, tall like one of
197) with rows of one scale and with uneven rows (log-normal scales), and the outputs PV of all 144
heads of ViT-B/16 as timm initialises it, for a random image. Writes
results/benchmarks/precondition_kappa.json.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import timm
import torch
from _record import write
from torch import Tensor

import attncond as ac
from attncond.methods.gap import centre
from attncond.propagation import stable_rank

DRAWS = 500
SHAPES = {"square": (64, 64), "tall": (197, 64)}
OUT = Path(__file__).parents[1] / "results" / "benchmarks" / "precondition_kappa.json"


def kappa(a: Tensor) -> float:
    """σ_max over σ_min."""
    sigma = torch.linalg.svdvals(a)
    return float(sigma[0] / sigma[-1])


def compare(before: list[float], after: list[float]) -> dict[str, Any]:
    """How a figure changes over all draws."""
    return {
        "before": statistics.median(before),
        "after": statistics.median(after),
        "of": len(before),
        "lower": sum(a < b for a, b in zip(after, before, strict=True)),
    }


def draw(shape: tuple[int, int], spread: float) -> dict[str, Any]:
    """Gaussian matrices whose rows have scales exp(spread · N(0, 1))."""
    generator = torch.Generator().manual_seed(0)
    before, after = [], []
    for _ in range(DRAWS):
        m = torch.randn(shape, generator=generator, dtype=torch.float64)
        scale = torch.randn(shape[0], 1, generator=generator, dtype=torch.float64)
        m = m * (spread * scale).exp()
        before.append(kappa(m))
        after.append(kappa(ac.Precondition().equilibrate(m)))
    return {"shape": shape, "spread": spread, "kappa": compare(before, after)}


@torch.no_grad()
def vit_heads() -> Iterator[tuple[Tensor, Tensor]]:
    """P (197 × 197) and V (197 × 64) of every head of ViT-B/16 at initialisation."""
    torch.manual_seed(0)
    model = timm.create_model("vit_base_patch16_224").eval().double()
    fused: list[Tensor] = []
    for site in ac.inspect(model):
        site.projections[0].owner.register_forward_hook(lambda _, __, out: fused.append(out[0]))
    model(torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(1)).double())
    for out in fused:
        q, k, v = out.reshape(len(out), 3, 12, 64).permute(1, 2, 0, 3)
        yield from zip((q @ k.mT / 8).softmax(-1), v, strict=True)


def vit() -> dict[str, Any]:
    """Each method, and both in the order in which they act, on the same P and V."""
    equilibrate = ac.Precondition().equilibrate
    outputs: dict[str, list[Tensor]] = {"stock": [], "precondition": [], "gap": [], "both": []}
    for p, v in vit_heads():
        output, without_gap = p @ v, p @ centre(v)
        outputs["stock"].append(output)
        outputs["precondition"].append(equilibrate(output))
        outputs["gap"].append(without_gap)
        outputs["both"].append(equilibrate(without_gap))
    kappas = {name: [kappa(a) for a in found] for name, found in outputs.items()}
    ranks = {name: [stable_rank(a)[0] for a in found] for name, found in outputs.items()}
    return {
        name: {
            "shape": tuple(found[0].shape),
            "kappa": compare(kappas["stock"], kappas[name]),
            "stable_rank": compare(ranks["stock"], ranks[name]),
        }
        for name, found in outputs.items()
        if name != "stock"
    }


def main() -> None:
    """Draw and write."""
    figures: dict[str, Any] = {
        f"{shape}_{rows}": draw(SHAPES[shape], spread)
        for shape in SHAPES
        for rows, spread in (("even", 0.0), ("uneven", 1.0))
    }
    figures["vit_b_at_initialisation"] = vit()
    for name, row in figures.items():
        print(name, row)
    write(OUT, figures)


if __name__ == "__main__":
    main()
