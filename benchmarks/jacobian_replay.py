"""How long κ of a head's Jacobian takes where the module's own code is run again for it.

    OMP_NUM_THREADS=2 python benchmarks/jacobian_replay.py

Heads of real sizes with random weights, 32 sampled tokens each: rotary embeddings and normalised
queries of a Qwen3-8B layer on 512 tokens, a Llama-3-8B layer, timm's EVA-02 and XCiT, Swin V2, and
ViT-B with its gap removed or preconditioned. The time of one head is that of a diagnosis with the
Jacobians of two heads, less one without any, by two; peaks are those of the process so far. Writes
results/benchmarks/jacobian_replay.json.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
import transformers
from _record import write
from torch import nn

import attncond as ac

Case = tuple[nn.Module, Any, list[int] | None]
_LLM = {
    "vocab_size": 1000,
    "hidden_size": 4096,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}


def language(config: Any) -> Case:
    """One layer of a language model, its feed-forward part left small."""
    ids = torch.randperm(1000, generator=torch.Generator().manual_seed(0))[:512]
    return transformers.AutoModel.from_config(config), {"input_ids": ids[None]}, None


def vision(name: str, layer: int, method: Any = None) -> Case:
    """One layer of a model of timm."""
    model = timm.create_model(name)
    if method is not None:
        ac.condition(model, method)
    size = model.pretrained_cfg["input_size"]
    image = torch.randn(1, *size, generator=torch.Generator().manual_seed(0))
    return model, image, [layer]


CASES: dict[str, Callable[[], Case]] = {
    "qwen3_8b": lambda: language(transformers.Qwen3Config(**_LLM)),
    "llama3_8b": lambda: language(transformers.LlamaConfig(**_LLM)),
    "eva02_base": lambda: vision("eva02_base_patch14_224", 0),
    "xcit_small_12": lambda: vision("xcit_small_12_p16_224", 0),
    "swinv2_tiny": lambda: vision("swinv2_tiny_window8_256", 0),
    "vit_b_gap": lambda: vision("vit_base_patch16_224", 0, ac.RemoveGap()),
    "vit_b_precondition": lambda: vision("vit_base_patch16_224", 0, ac.Precondition()),
}


def measured(case: Case) -> dict[str, Any]:
    """Seconds, and what was found for the first of two heads."""
    model, batch, layers = case
    seconds = []
    for jacobian in (False, True):
        start = time.perf_counter()
        report = ac.diagnose(
            model.eval(),
            batch,
            layers=layers,
            heads=[0, 1],
            jacobian=jacobian,
            weights=False,
            progress=False,
        )
        seconds.append(time.perf_counter() - start)
    values = report.rows[1].values
    names = ("path", "status", "kappa", "kappa_error", "rank", "tokens")
    found = {name: values.get(f"jacobian_{name}") for name in names}
    return {
        "seconds_a_head": (seconds[1] - seconds[0]) / 2,
        "peak_bytes_of_the_process": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        **found,
    }


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/jacobian_replay.json"))
    args = parser.parse_args()
    record: dict[str, Any] = {}
    for name in args.cases:
        torch.manual_seed(0)
        record[name] = row = measured(CASES[name]())
        write(args.out, {"heads": record})
        kappa = "unresolved" if row["kappa"] is None else f"κ {row['kappa']:.4g}"
        print(f"{name}: {row['seconds_a_head']:.2f} s a head, {row['path']}, {kappa}", flush=True)


if __name__ == "__main__":
    main()
