"""Write the tables of README.md from the committed JSON, so that no figure is typed by hand.

python benchmarks/tables.py            # rewrites the marked sections of README.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def _read(name: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((ROOT / "results" / name).read_text(encoding="utf-8"))
    return record


def _markdown(head: list[str], body: list[list[str]]) -> str:
    rows = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _kappa(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def demo() -> str:
    """Accuracy and κ of the demo's variants."""
    record = _read("demo/results.json")
    body = [
        [
            f"`{row['variant']}`" if "Spectral" in row["variant"] else row["variant"],
            f"{row['accuracy_mean']:.2f} ± {row['accuracy_std']:.2f}",
            f"{_kappa(row['kappa_start_median'])} / {_kappa(row['kappa_start_worst'])}",
            f"{_kappa(row['kappa_trained_median'])} / {_kappa(row['kappa_trained_worst'])}",
            f"{row['seconds_mean']:.1f}",
        ]
        for row in record["summary"]
    ]
    head = ["", "test accuracy %", "κ at start", "κ at end", "seconds a run"]
    return (
        f"`{record['command']}` ({record['data']}; a ViT of width {record['model']['embed_dim']} "
        f"and depth {record['model']['depth']}; {len(record['seeds'])} seeds; κ of the whole "
        "projections, median / worst):\n\n" + _markdown(head, body)
    )


_STEPS = {
    "stock_again": "stock, a second time (the noise)",
    "identity": "`Spectral()`",
    "folded": "`Spectral()`, folded",
    "polar": "`Spectral.paper_svd()`, refreshed every step",
    "polar_every_10": "the same, `refresh_every=10`",
    "polar_scratch": "the same, factor from scratch every step",
    "polar_svd": "the same, by `torch.linalg.svd` every step",
}


def steps() -> str:
    """Step time, memory and κ after training, against stock."""
    record = _read("benchmarks/step_time.json")
    body = []
    for name, label in _STEPS.items():
        row = record["variants"][name]
        kappa = f"{row['kappa_max_float64']:.3f}" if "kappa_max_float64" in row else ""
        spread = f"{row['ratio']:.3f} ({row['ratio_min']:.3f} to {row['ratio_max']:.3f})"
        body.append([label, spread, f"{row['peak_memory_ratio']:.3f}", kappa])
    settings = record["settings"]
    trained = settings["warmup"] + settings["rounds"] * settings["steps"] + 1
    head = ["", "step time / stock", "peak memory / stock", "worst κ afterwards"]
    return (
        f"`benchmarks/step_time.py` on one {record['hardware']['gpu']}, {settings['model']}, batch "
        f"{settings['batch']}, bfloat16, compiled, whole training step (median of "
        f"{settings['rounds']} rounds of {settings['steps']} steps, least to most; 2 rounds of 3 "
        f"for the last two). κ is of weights trained for {trained} steps on one batch of random "
        "images (9 steps for the last two), so it says that the factor is followed, not how a "
        "real training ends:\n\n" + _markdown(head, body)
    )


def cpu() -> str:
    """What condition and inspect cost on a CPU, and how much of timm is read."""
    record, timm = _read("benchmarks/condition_cpu.json"), _read("benchmarks/inspect_timm.json")
    seconds = record["seconds"]
    return (
        f"`benchmarks/condition_cpu.py`, {record['settings']['model']} on "
        f"{record['hardware']['cpu_cores']} CPU cores: `condition` with `Spectral()` takes "
        f"{seconds['identity']:.2f} s, with `Spectral.paper_svd()` {seconds['polar']:.1f} s, "
        f"`inspect` {1e3 * seconds['inspect']:.0f} ms. `benchmarks/inspect_timm.py`: of timm's "
        f"{timm['models']:,} models {timm['models_with_attention']} have attention, and "
        f"{timm['supported']:,} of their {timm['attention_modules']:,} attention modules "
        f"({100 * timm['coverage']:.1f}%) are supported."
    )


SECTIONS: dict[str, Callable[[], str]] = {"demo": demo, "steps": steps, "cpu": cpu}


def render(text: str) -> str:
    """The page with every marked section written anew."""
    for name, make in SECTIONS.items():
        pattern = rf"(<!-- {name}: [^>]*-->\n).*?(<!-- /{name} -->)"
        text, count = re.subn(
            pattern, lambda m, make=make: m[1] + make() + "\n" + m[2], text, flags=re.S
        )
        if count != 1:
            raise ValueError(f"README.md needs one section marked {name}, it has {count}")
    return text


def main() -> None:
    """Rewrite README.md."""
    page = ROOT / "README.md"
    page.write_text(render(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
