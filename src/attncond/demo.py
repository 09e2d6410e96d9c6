"""The demo: a small ViT learns to read digits, stock and conditioned, from the same start.

Everything but the method is the same for each variant at a given seed: initial weights, order of
the data, number of steps. A method changes how far a step goes, so each variant has the learning
rate that suits it: benchmarks/demo_rates.py chose them in the same way for all, on a part of the
training images and with seeds that are not the demo's (results/demo/README.md has the outcomes with
one rate for all). The accuracy reported is the last epoch's, never the best one's.
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attncond._version import __version__
from attncond.conditioning import condition
from attncond.diagnose import Report, diagnose
from attncond.errors import ConditioningError, installed
from attncond.files import plain, write_bytes
from attncond.inspection import inspect
from attncond.methods import Method, Precondition, RemoveGap, Spectral

VARIANTS: dict[str, Method | None] = {
    "stock": None,
    "Spectral()": Spectral(),
    "Spectral.paper()": Spectral.paper(),
    "Precondition()": Precondition(),
    "RemoveGap()": RemoveGap(),
}
MODEL = {"patch_size": 2, "embed_dim": 64, "depth": 4, "num_heads": 4, "mlp_ratio": 2}
RATES = {
    "stock": 2e-3,
    "Spectral()": 8e-3,
    "Spectral.paper()": 4e-3,
    "Precondition()": 4e-3,
    "RemoveGap()": 4e-3,
}
TRAINING = {"batch_size": 64, "weight_decay": 0.05, "warmup": 0.1, "smoothing": 0.1}
SPLIT_SEED = 0
PAGE = ("stock", "Spectral()")  # before and after on the page
_DIAGNOSED = 4

Run = dict[str, Any]


class DemoError(ConditioningError):
    """The demo cannot run here: something is not installed, or the folder cannot be written."""


@dataclass(frozen=True)
class Digits:
    """Images (n, 1, 8, 8) in [-1, 1] and labels (n,); the split never changes."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def _require(module: str) -> Any:
    return installed(module, "the demo needs", "demo", DemoError)


def load_digits() -> Digits:
    """scikit-learn's copy of the UCI digits: 1,797 real images, no download."""
    datasets, selection = _require("sklearn.datasets"), _require("sklearn.model_selection")
    raw = datasets.load_digits()
    images = torch.tensor(raw.images, dtype=torch.float32)[:, None] / 8 - 1
    labels = torch.tensor(raw.target)
    train, test = selection.train_test_split(
        range(len(labels)), test_size=0.3, random_state=SPLIT_SEED, stratify=raw.target
    )
    return Digits(images[train], labels[train], images[test], labels[test])


def build_model(seed: int) -> nn.Module:
    """A ViT of 4 layers for (n, 1, 8, 8) images; the seed decides every weight."""
    vit = _require("timm.models.vision_transformer")
    torch.manual_seed(seed)
    model: nn.Module = vit.VisionTransformer(img_size=8, in_chans=1, num_classes=10, **MODEL)
    return model


@torch.no_grad()
def condition_numbers(model: nn.Module) -> list[float]:
    """κ of every whole projection as the forward pass sees it, in float64.

    >>> len(condition_numbers(nn.MultiheadAttention(8, 2)))  # W_Q, W_K and W_V
    3
    """
    kappas = []
    for site in inspect(model):
        for p in site.projections:
            matrix = p.matrix(getattr(p.owner, p.name)).flatten(0, 1).double()
            diverged = not bool(torch.isfinite(matrix).all())
            kappas.append(math.nan if diverged else float(torch.linalg.cond(matrix)))
    return kappas


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Per cent of ``images`` (n, 1, 8, 8) that are read right."""
    model.eval()
    right = int((model(images).argmax(1) == labels).sum())
    return 100 * right / len(labels)


def train(
    variant: str,
    seed: int,
    epochs: int,
    data: Digits,
    on_epoch: Callable[[int, float], None] = lambda epoch, accuracy: None,
    rate: float | None = None,
    on_end: Callable[[nn.Module], None] = lambda model: None,
) -> Run:
    """Train one variant from the weights and in the order that ``seed`` decides.

    ``on_end`` gets the trained model.
    """
    rate = RATES[variant] if rate is None else rate
    start = time.perf_counter()
    model = build_model(seed)
    method = VARIANTS[variant]
    before = condition_numbers(model)
    handle = condition(model, method) if method else None
    at_start = condition_numbers(model)
    size = int(TRAINING["batch_size"])
    order = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=rate, weight_decay=TRAINING["weight_decay"]
    )
    if handle:
        handle.attach(optimizer)
    batches = len(data.train_labels) // size
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, rate, total_steps=epochs * batches, pct_start=TRAINING["warmup"]
    )
    losses: list[float] = []
    accuracies: list[float] = []
    for epoch in range(1, epochs + 1):
        model.train()
        total = 0.0
        shuffled = torch.randperm(len(data.train_labels), generator=order)
        for batch in shuffled[: batches * size].view(batches, size):
            logits = model(data.train_images[batch])
            loss = F.cross_entropy(
                logits, data.train_labels[batch], label_smoothing=TRAINING["smoothing"]
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item()
        losses.append(total / batches)
        accuracies.append(accuracy(model, data.test_images, data.test_labels))
        on_epoch(epoch, accuracies[-1])
    seconds = time.perf_counter() - start
    on_end(model)
    return {
        "variant": variant,
        "method": handle.config if handle else None,
        "seed": seed,
        "learning_rate": rate,
        "accuracy": accuracies[-1],
        "test_accuracy_by_epoch": accuracies,
        "train_loss_by_epoch": losses,
        "kappa_stock": before,
        "kappa_start": at_start,
        "kappa_trained": condition_numbers(model),
        "seconds": seconds,
    }


@dataclass
class Demo:
    """All runs of the demo and the folder they are written to, each as soon as it is done."""

    out: Path
    seeds: int = 3
    epochs: int = 25
    command: str = "attncond demo"
    runs: list[Run] = field(default_factory=list)
    reports: dict[str, Report] = field(default_factory=dict)

    def prepare(self) -> None:
        """Refuse before the first epoch what would fail after the last."""
        for module in ("timm", "sklearn", "matplotlib"):
            _require(module)
        try:
            self.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(self.out, error) from error
        probe = self.out / ".attncond-probe"
        replace_file(probe, b"")
        probe.unlink()

    def run(self, on_epoch: Callable[[str, int, int, float], None]) -> None:
        """Train every variant with every seed; ``on_epoch(variant, seed, epoch, accuracy)``."""
        data = load_digits()
        threads = torch.get_num_threads()
        # The matrices are tiny: threads would mostly wait for each other, on a busy machine for
        # minutes.
        torch.set_num_threads(1)
        try:
            # Seed by seed, so that an interrupted demo can still compare the variants.
            for seed in range(self.seeds):
                for variant in VARIANTS:

                    def report(
                        epoch: int, value: float, variant: str = variant, seed: int = seed
                    ) -> None:
                        on_epoch(variant, seed, epoch, value)

                    def end(model: nn.Module, variant: str = variant, seed: int = seed) -> None:
                        if seed == 0 and variant in PAGE:
                            self.reports[variant] = _diagnosed(model, variant, self.epochs, data)

                    run = train(variant, seed, self.epochs, data, report, on_end=end)
                    self.runs.append(run)
                    self.write()
        finally:
            torch.set_num_threads(threads)

    def write_page(self) -> Path | None:
        """report.html: the conditioned model beside the stock one, once both are trained."""
        before, after = (self.reports.get(variant) for variant in PAGE)
        if before is None or after is None:
            return None
        path = self.out / "report.html"
        try:
            return after.to_html(path, before=before)
        except OSError as error:
            raise _unwritable(path, error) from error

    @property
    def complete(self) -> bool:
        """Whether every run is there."""
        return len(self.runs) == self.seeds * len(VARIANTS)

    def write(self) -> None:
        """results.json, whole at any moment: a reader never meets half of it."""
        text = json.dumps(self.to_dict(), indent=1, allow_nan=False)
        replace_file(self.out / "results.json", text.encode())

    def to_dict(self) -> dict[str, Any]:
        """Everything that was done and found, as plain data."""
        facts = {
            "command": self.command,
            "complete": self.complete,
            "data": "scikit-learn digits, 8x8; 1,257 to train, 540 to test, fixed split",
            "model": {"class": "timm VisionTransformer", "img_size": 8, **MODEL},
            "training": {"optimizer": "AdamW", "epochs": self.epochs, "lr": RATES, **TRAINING},
            "seeds": list(range(self.seeds)),
            "versions": _versions(),
            "hardware": {
                "machine": platform.machine(),
                "system": platform.system(),
                "cores": os.cpu_count(),
                "threads": 1,
                "device": "cpu",
            },
            "summary": self.summary(),
            "runs": self.runs,
        }
        found: dict[str, Any] = plain(facts)
        return found

    def summary(self) -> list[dict[str, Any]]:
        """One row for each variant that has a run; κ over all projections of all seeds.

        Precondition and RemoveGap change heads, not weights: their κ at the start is that of stock,
        and ``own_start`` is False.
        """
        rows = []
        for variant in VARIANTS:
            runs = [r for r in self.runs if r["variant"] == variant]
            if not runs:
                continue
            values = [r["accuracy"] for r in runs]
            row: dict[str, Any] = {
                "variant": variant,
                "seeds": len(runs),
                "own_start": isinstance(VARIANTS[variant], Spectral | None),
                "accuracy_mean": statistics.fmean(values),
                "accuracy_std": statistics.stdev(values) if len(values) > 1 else None,
                "seconds_mean": statistics.fmean(r["seconds"] for r in runs),
            }
            for when in ("stock", "start", "trained"):
                kappas = [k for r in runs for k in r[f"kappa_{when}"]]
                row[f"kappa_{when}_median"] = statistics.median(kappas)
                row[f"kappa_{when}_worst"] = max(kappas)
            rows.append(row)
        return rows

    def verdict(self) -> str:
        """What the runs say about each method, and how little that proves."""
        by_seed = {(r["variant"], r["seed"]): r["accuracy"] for r in self.runs}
        lines = []
        for variant in list(VARIANTS)[1:]:
            pairs = [
                value - by_seed["stock", seed]
                for (name, seed), value in by_seed.items()
                if name == variant and ("stock", seed) in by_seed
            ]
            if not pairs:
                continue
            mean, wins = statistics.fmean(pairs), sum(d > 0 for d in pairs)
            line = (
                f"{variant}: {mean:+.2f} points against stock on average, "
                f"ahead with {wins} of {len(pairs)} {'seed' if len(pairs) == 1 else 'seeds'}"
            )
            if len(pairs) > 1 and abs(mean) < statistics.stdev(pairs):
                line += "; less than the seeds differ, so no difference was shown"
            lines.append(line + ".")
        if not lines:
            return "Nothing to compare yet."
        lines.append(
            "One small model, one schedule, 540 test images: an illustration, not evidence."
        )
        return "\n".join(lines)


def _diagnosed(model: nn.Module, variant: str, epochs: int, data: Digits) -> Report:
    """What a trained variant's attention does with the first test images."""
    found = diagnose(model, data.test_images[:_DIAGNOSED], tokens=None, progress=False)
    facts = {
        "source": "attncond demo",
        "weights": f"trained for {epochs} epochs, seed 0",
        "input": f"the first {_DIAGNOSED} test images",
        "method": None if VARIANTS[variant] is None else variant,
    }
    return replace(found, info={**found.info, **facts})


def replace_file(path: Path, content: bytes) -> None:
    """Write a file in one piece; what is wrong with its folder is told."""
    try:
        write_bytes(path, content)
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> DemoError:
    what = f"cannot write {path}: {error.strerror}" if error.strerror else str(error)
    return DemoError(f"{what}. Choose another folder with --out.")


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {"attncond": __version__, "python": platform.python_version()}
    for name in ("torch", "timm", "scikit-learn", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "unknown"
    return found
