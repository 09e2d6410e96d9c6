"""How much of timm's attention inspect reads, and how long it takes, over every registered model.

    python benchmarks/inspect_timm.py

Models are built on the meta device without initial values, which no layout depends on.
Writes results/benchmarks/inspect_timm.json.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import timm
import torch
from timm.layers import weight_init
from torch import nn

from attncond.inspection import inspect

RESULT = Path(__file__).parents[1] / "results" / "benchmarks" / "inspect_timm.json"


@contextmanager
def without_initial_values() -> Iterator[None]:
    """Skip weight initialisation: on the meta device it is most of the time and changes nothing."""

    def leave(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return tensor

    with ExitStack() as stack:
        for name in dir(nn.init):
            if name.endswith("_") and not name.startswith("_"):
                stack.enter_context(mock.patch.object(nn.init, name, leave))
        stack.enter_context(mock.patch.object(weight_init, "_trunc_normal_", leave))
        yield


def build(name: str) -> nn.Module:
    """The model on the meta device."""
    with warnings.catch_warnings(), without_initial_values(), torch.device("meta"):
        warnings.simplefilter("ignore")
        return timm.create_model(name)


def sweep(names: Iterable[str]) -> dict[str, Any]:
    """Inspect every model; attention modules are counted once however many sites they have."""
    supported: Counter[str] = Counter()
    unsupported: Counter[str] = Counter()
    reasons: dict[str, str] = {}
    refused_models: list[str] = []
    failed: dict[str, str] = {}
    models = with_attention = sites = 0
    build_seconds = inspect_seconds = 0.0
    for name in names:
        start = time.perf_counter()
        try:
            model = build(name)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
            continue
        built = time.perf_counter()
        plan = inspect(model)
        inspect_seconds += time.perf_counter() - built
        build_seconds += built - start
        models += 1
        with_attention += bool(plan.sites or plan.unsupported)
        sites += len(plan.sites)
        supported.update({id(s.module): s.cls for s in plan.sites}.values())
        unsupported.update(u.cls for u in plan.unsupported)
        reasons.update({u.cls: u.reason for u in plan.unsupported})
        if plan.unsupported:
            refused_models.append(name)
    total = supported.total() + unsupported.total()
    return {
        "models": models,
        "models_with_attention": with_attention,
        "models_with_unsupported_attention": refused_models,
        "models_that_do_not_build": failed,
        "attention_modules": total,
        "supported": supported.total(),
        "coverage": supported.total() / total if total else 1.0,
        "sites": sites,
        "seconds": {"build": round(build_seconds, 2), "inspect": round(inspect_seconds, 2)},
        "supported_classes": dict(supported.most_common()),
        "unsupported_classes": {
            cls: {"modules": count, "reason": reasons[cls]}
            for cls, count in unsupported.most_common()
        },
    }


def main() -> None:
    """Run the sweep, print its figures and write them down."""
    from _record import write  # beside this file, which the tests load by its path

    result = sweep(timm.list_models())
    write(RESULT, result)
    print(
        f"{result['models']} models, {result['models_with_attention']} with attention: "
        f"{result['supported']} of {result['attention_modules']} attention modules read "
        f"({result['coverage']:.2%}), inspect {result['seconds']['inspect']} s, "
        f"build {result['seconds']['build']} s"
    )
    for cls, row in result["unsupported_classes"].items():
        print(f"{row['modules']:5d}  {cls}: {row['reason']}")


if __name__ == "__main__":
    main()
