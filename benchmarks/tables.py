"""Write tables of README, docs and results from committed JSON: no figure is typed by hand.

python benchmarks/tables.py            # rewrites the marked sections of the pages
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
            f"`{row['variant']}`" if "(" in row["variant"] else row["variant"],
            f"{row['accuracy_mean']:.2f} ± {row['accuracy_std']:.2f}",
            f"{_kappa(row['kappa_start_median'])} / {_kappa(row['kappa_start_worst'])}"
            if row["own_start"]
            else "as stock",
            f"{_kappa(row['kappa_trained_median'])} / {_kappa(row['kappa_trained_worst'])}",
        ]
        for row in record["summary"]
    ]
    head = ["", "test accuracy %", "κ at start", "κ at end"]
    return (
        f"`{record['command']}` ({record['data']}; a ViT of width {record['model']['embed_dim']} "
        f"and depth {record['model']['depth']}; {len(record['seeds'])} seeds; κ of the whole "
        "projections, median / worst, which the last two methods leave to the training):\n\n"
        + _markdown(head, body)
    )


_Steps = list[tuple[str, str, str]]  # record, row, label

_STEPS: _Steps = [
    ("step_time", "stock_again", "stock, a second time (the noise)"),
    ("step_time", "identity", "`Spectral()`"),
    ("step_time", "folded", "`Spectral()`, folded"),
    ("step_time", "polar", "`Spectral.paper_svd()`, refreshed every step"),
    ("head_time_plain", "polar_every_10", "the same, `refresh_every=10`"),
    ("step_time", "polar_scratch", "the same, factor from scratch every step"),
    ("step_time", "polar_svd", "the same, by `torch.linalg.svd` every step"),
    ("head_time", "stock_again", "stock, a second time (the noise)"),
    ("head_time", "gap", "`RemoveGap()`"),
    ("head_time", "precondition", "`Precondition()`"),
    ("head_time_gpt2", "stock_again", "GPT-2, stock, a second time (the noise)"),
    ("head_time_gpt2", "gap", "GPT-2, `RemoveGap()`"),
    ("head_time_gpt2_equal", "stock_again", "GPT-2 without a mask, stock again"),
    ("head_time_gpt2_equal", "gap", "GPT-2 without a mask, `RemoveGap()`"),
    ("head_time_gpt2_equal_graphs", "stock_again", "the same in CUDA graphs, stock again"),
    ("head_time_gpt2_equal_graphs", "gap", "the same in CUDA graphs, `RemoveGap()`"),
    ("head_time_gpt2_batch48", "stock_again", "GPT-2 without a mask, batch 48, stock again"),
    ("head_time_gpt2_batch48", "gap", "GPT-2 without a mask, batch 48, `RemoveGap()`"),
]


# What README shows of it.
_COSTS: _Steps = [
    ("step_time", "stock_again", "stock, a second time (the noise)"),
    ("step_time", "identity", "`Spectral()`"),
    ("step_time", "polar", "`Spectral.paper_svd()`"),
    ("head_time", "gap", "`RemoveGap()`"),
    ("head_time", "precondition", "`Precondition()`"),
    ("head_time_gpt2_batch48", "gap", "`RemoveGap()`, GPT-2, batch 48, `is_causal`"),
    ("head_time_gpt2_equal", "gap", "the same, batch 16"),
    ("head_time_gpt2", "gap", "the same with a mask, as transformers has it before torch 2.14"),
]


def _step_records(rows: _Steps) -> tuple[dict[str, dict[str, Any]], str]:
    """The records of some rows, and the one GPU that all of them are of."""
    records = {name: _read(f"benchmarks/{name}.json") for name, _, _ in rows}
    (gpu,) = {record["hardware"]["gpu"] for record in records.values()}
    return records, gpu


def costs() -> str:
    """Step time and memory against stock, in short."""
    records, gpu = _step_records(_COSTS)
    vit, gpt2 = records["step_time"]["settings"], records["head_time_gpt2"]["settings"]
    body = []
    for name, variant, label in _COSTS:
        row = records[name]["variants"][variant]
        body.append([label, f"{row['ratio']:.3f}", f"{row['peak_memory_ratio']:.3f}"])
    return (
        f"A whole training step on one {gpu}, {vit['model']} at batch {vit['batch']} or GPT-2 with "
        f"{gpt2['tokens']:,} tokens, bfloat16, compiled, medians (`benchmarks/step_time.py`):\n\n"
        + _markdown(["", "step time / stock", "peak memory / stock"], body)
    )


def steps() -> str:
    """Step time, memory and κ after training, against stock."""
    records, gpu = _step_records(_STEPS)
    body = []
    for name, variant, label in _STEPS:
        row = records[name]["variants"][variant]
        kappa = f"{row['kappa_max_float64']:.3f}" if "kappa_max_float64" in row else ""
        spread = f"{row['ratio']:.3f} ({row['ratio_min']:.3f} to {row['ratio_max']:.3f})"
        body.append([label, spread, f"{row['peak_memory_ratio']:.3f}", kappa, f"`{name}`"])
    settings = {name: record["settings"] for name, record in records.items()}
    vit, polar, heads, gpt2, equal, _, large = settings.values()
    trained = [s["warmup"] + s["rounds"] * s["steps"] + 1 for s in (vit, polar)]
    head = ["", "step time / stock", "peak memory / stock", "worst κ afterwards", "record"]
    return (
        f"`benchmarks/step_time.py` on one {gpu}, {vit['model']}, batch {vit['batch']} (GPT-2: "
        f"batch {gpt2['batch']} or {large['batch']}, {gpt2['tokens']:,} tokens), bfloat16, "
        f"compiled, whole training step (median of {vit['rounds']} rounds of {vit['steps']} steps, "
        f"{polar['rounds']} in `head_time_plain`, {heads['rounds']} of {heads['steps']} in "
        f"`head_time`, {equal['rounds']} of {equal['steps']} or {large['steps']} for GPT-2 without "
        f"a mask, at learning rate {equal['lr']:g}, least to most; "
        "2 rounds of 3 for the two from scratch and by SVD). κ is of weights trained for "
        f"{trained[0]} steps ({trained[1]} in `head_time_plain`, 9 for those two) on "
        "one batch of random images, so it says that the factor is followed, not how a real "
        "training ends:\n\n" + _markdown(head, body)
    )


_DRAWN = {
    "square_even": "Gaussian 64 × 64, even rows",
    "square_uneven": "Gaussian 64 × 64, uneven rows",
    "tall_even": "Gaussian 197 × 64, even rows",
    "tall_uneven": "Gaussian 197 × 64, uneven rows",
}
_HEADS = {"precondition": "C·PV", "gap": "P⊥V", "both": "C·P⊥V"}


def precondition() -> str:
    """What equilibration and removing the gap do to κ and the stable rank of heads' outputs."""
    record = _read("benchmarks/precondition_kappa.json")
    rows = [(label, record[name]) for name, label in _DRAWN.items()]
    rows += [
        (f"heads of ViT-B/16 at initialisation, {label}", record["vit_b_at_initialisation"][name])
        for name, label in _HEADS.items()
    ]
    body = []
    for label, row in rows:
        kappa, rank = row["kappa"], row.get("stable_rank")
        ranks = f"{rank['before']:.2f} → {rank['after']:.2f}" if rank else ""
        body.append(
            [
                label,
                f"{_kappa(kappa['before'])} → {_kappa(kappa['after'])}",
                f"{kappa['lower']} of {kappa['of']}",
                ranks,
            ]
        )
    head = ["matrix", "κ, median", "κ lower in", "stable rank, median"]
    return (
        f"`{record['command']}`, in float64; the stable rank is that of "
        "`attncond.propagation.stable_rank`, between 1 and 64:\n\n" + _markdown(head, body)
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


def spectra() -> str:
    """The spectra of all projections beside WeightWatcher's."""
    record = _read("benchmarks/spectra_cpu.json")
    took, faster, count = record["seconds"], record["times_faster_than"], record["matrices"]
    body = [["`ac.diagnose(model)`", str(count["attncond"]), f"{took['attncond']:.2f} s", ""]]
    for name, text in (
        ("weightwatcher_model", "WeightWatcher, the model: every layer, Q, K and V as one matrix"),
        ("weightwatcher_same", "WeightWatcher, the same matrices"),
        ("weightwatcher_qkv", "WeightWatcher, the layers of Q, K and V alone"),
    ):
        row = [text, str(count[name]), f"{took[name]:.2f} s", f"{faster[name]:.1f}"]
        body.append(row)
    threads = record["hardware"]["torch_threads"]
    apart = max(record["largest_relative_difference"].values())
    return (
        f"Spectra of ViT-B's projections, whole and by head, beside WeightWatcher's `analyze` with "
        f"{threads} threads (`{record['command']}`; medians of {record['rounds']} rounds; singular "
        f"values differ by {apart:.0e} of themselves at most):\n\n"
        + _markdown(["", "matrices", "time", "of ours"], body)
    )


PAGES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"demo": demo, "costs": costs, "cpu": cpu},
    "docs/methods.md": {"precondition": precondition},
    "docs/diagnose.md": {"spectra": spectra},
    "results/benchmarks/README.md": {"steps": steps},
}


def render(page: str, text: str) -> str:
    """The text of a page with every marked section written anew."""
    for name, make in PAGES[page].items():
        pattern = rf"(<!-- {name}: [^>]*-->\n).*?(<!-- /{name} -->)"
        text, count = re.subn(
            pattern, lambda m, make=make: m[1] + make() + "\n" + m[2], text, flags=re.S
        )
        if count != 1:
            raise ValueError(f"{page} needs one section marked {name}, it has {count}")
    return text


def main() -> None:
    """Rewrite the pages."""
    for name in PAGES:
        page = ROOT / name
        page.write_text(render(name, page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
