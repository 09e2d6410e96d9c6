"""Run folders without training: what the lab writes, as its readers are entitled to find it.

runs/RECIPE/FORM/VARIANT/seed0/
    config.json     Config.model_dump(): recipe, form, variant, seed, data, model, methods, optim,
                    schedule, train, watch
    metrics.jsonl   a line for each evaluation: epoch, step, train_loss, validation_loss,
                    validation_accuracy (percent), lr, seconds, images_per_second
    history.jsonl   the Monitor's (attncond.monitor.history)
    result.json     last, and only if the run has ended: status ("finished" or "diverged"),
                    test_accuracy and validation_accuracy (percent, None where unknown), epochs,
                    steps, seconds, step_milliseconds, peak_memory_bytes, versions, hardware, git,
                    command, data_note, config, ...

The numbers are made up. They are realistic so that tables and figures can be judged by eye.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NOTE = "CIFAR-10 (JPEG copy)"
STEPS = 176  # in an epoch


@dataclass
class Fake:
    """One run to be written."""

    variant: str = "baseline"
    seed: int = 0
    accuracy: float | None = 75.0
    recipe: str = "vit-cifar10"
    form: str = "small"
    model: str = "vit_small32"
    methods: tuple[str, ...] = ()
    epochs: int = 20
    speed: float = 1.0  # above 1: learns in fewer epochs
    milliseconds: float = 20.0
    memory: float = 4e9
    state: str = "finished"  # or diverged, stopped
    watch: bool = False
    lam: float = 3.0  # over σ_max; 0 without correction
    keeps_norm: bool = True
    hardware: dict[str, Any] = field(default_factory=lambda: {"device": "cuda", "name": "H200"})
    changes: dict[str, Any] = field(default_factory=dict)  # dotted keys of the configuration

    @property
    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = {
            "recipe": self.recipe,
            "form": self.form,
            "variant": self.variant,
            "seed": self.seed,
            "data": {"name": "cifar10", "image_size": 32, "validation": 0.1, "limit": None}
            | {"augment": {"crop": 4, "flip": True}, "workers": 4},
            "model": {"name": self.model, "kwargs": {}, "drop_path": 0.0, "norm": True}
            | {"init": "default"},
            "methods": list(self.methods),
            "optim": {"lr": 1e-3, "weight_decay": 0.05, "qkv_lr": 1.0, "clip": 1.0},
            "schedule": {"epochs": self.epochs, "warmup_epochs": 1.0, "min_lr": 0.0},
            "train": {"batch_size": 256, "precision": "bf16", "compile": True},
            "watch": {"every": 176 if self.watch else 0, "probe": self.watch, "tokens": 64},
        }
        for key, value in self.changes.items():
            section, _, name = key.partition(".")
            config[section][name] = value
        return config

    def write(self, root: Path) -> Path:
        folder = root / self.recipe / self.form / self.variant / f"seed{self.seed}"
        folder.mkdir(parents=True)
        dump(folder / "config.json", self.config)
        points = self.metrics()
        (folder / "metrics.jsonl").write_text("".join(json.dumps(p) + "\n" for p in points))
        if self.watch:
            history = [{"schema": "attncond.history/1", "model": "timm.VisionTransformer"}]
            history += [self.record(epoch) for epoch in range(self.epochs + 1)]
            (folder / "history.jsonl").write_text("".join(json.dumps(r) + "\n" for r in history))
        if self.state != "stopped":
            dump(folder / "result.json", self.result(points))
        return folder

    def metrics(self) -> list[dict[str, Any]]:
        noise = random.Random(f"{self.variant}{self.seed}{self.model}")
        last = self.epochs if self.state != "stopped" else self.epochs // 2
        points = []
        for epoch in range(1, last + 1):
            share = min(1.0, self.speed * epoch / self.epochs)
            accuracy = (self.accuracy or 10.0) * (0.45 + 0.55 * math.sin(share * math.pi / 2))
            accuracy += noise.gauss(0, 0.25) if epoch < self.epochs else 0.0
            failed = self.state == "diverged" and epoch > 3
            points.append(
                {"epoch": epoch, "step": epoch * STEPS}
                | {"train_loss": None if failed else 2.3 - share, "validation_loss": 2.2 - share}
                | {"validation_accuracy": 10.0 if failed else accuracy}
                | {"lr": 1e-3, "seconds": 3.5 * epoch, "images_per_second": 12000.0}
            )
            if failed:
                break
        return points

    def result(self, points: list[dict[str, Any]]) -> dict[str, Any]:
        diverged = self.state == "diverged"
        last = points[-1]
        return {
            "status": self.state,
            "test_accuracy": None if diverged else self.accuracy,
            "test_loss": None if diverged else 1.0,
            "validation_accuracy": None if diverged else last["validation_accuracy"],
            "best_validation_accuracy": max(p["validation_accuracy"] for p in points),
            "epochs": last["epoch"],
            "steps": last["step"],
            "seconds": 80.0,
            "step_milliseconds": self.milliseconds,
            "peak_memory_bytes": int(self.memory),
            "parameters": 4_000_000,
            "versions": {"attncond": "0.1.0", "python": "3.12", "torch": "2.11"},
            "hardware": self.hardware,
            "git": {"commit": "0" * 40, "dirty": False},
            "command": f"attncond lab run {self.recipe} --form {self.form} --seeds 5",
            "data_note": NOTE,
            "finished": "2026-01-01T00:00:00+00:00",
            "config": self.config,
        }

    def record(self, epoch: int) -> dict[str, Any]:
        noise = random.Random(f"{self.variant}{self.seed}{epoch}")
        rows = []
        for layer in range(3):
            values: dict[str, Any] = {}
            for place, role in enumerate("qkv"):
                top = 0.55 + 0.06 * place + 0.05 * epoch * math.exp(noise.gauss(0, 0.05))
                low = 0.002 * (1 + place + 0.3 * layer) * math.exp(noise.gauss(0, 0.25))
                first = 0.55 + 0.06 * place
                shift = self.lam * first
                scale = first / (first + shift) if self.keeps_norm else 1.0
                high = scale * (top + shift)
                least = scale * (shift - 0.8 * top) if shift > top else low
                values |= {f"raw_{role}_sigma_max": top, f"raw_{role}_sigma_min": low}
                values |= {f"raw_{role}_kappa": top / low}
                values |= {f"{role}_sigma_max": high, f"{role}_sigma_min": least}
                values |= {f"{role}_kappa": high / least}
            kappa = 4e4 * math.exp(noise.gauss(0, 0.2)) / (1 + self.lam) * (1 + 0.1 * epoch)
            softer = 1.0 if self.keeps_norm else 1 / (1 + 0.2 * self.lam**2)
            values |= {"entropy": 4.1 * softer - 0.05 * epoch * softer, "saturation": 1 - softer}
            values |= {"output_kappa": kappa / 20, "jacobian_kappa": kappa}
            values |= {"jacobian_paper_bound": 80 * kappa, "jacobian_certificate": 3 * kappa}
            if layer == 2 and epoch == 4:
                values["jacobian_certificate"] = "inf"  # as Record.to_dict writes it
            path = f"blocks.{layer}.attn"
            rows.append({"layer": layer, "path": path, "head": None, "values": values})
        return {"step": epoch * STEPS, "rows": rows, "loss": 2.3 - 0.05 * epoch}


def dump(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, allow_nan=False))


_VARIANTS = {  # gain, speed, milliseconds; what is done
    "baseline": (0.0, 1.0, 20.0, {}),
    "tuned": (1.2, 1.05, 20.0, {"changes": {"optim.qkv_lr": 0.35}}),
    "spectral": (2.5, 1.25, 20.04, {"methods": ("spectral",)}),
    "paper": (-44.6, 1.0, 20.03, {"methods": ("paper",), "keeps_norm": False, "lam": 17.0}),
    "polar": (-8.0, 1.0, 20.9, {"methods": ("paper-svd",)}),
    "precondition": (-1.3, 1.0, 19.8, {"methods": ("precondition",)}),
    "gap": (-0.5, 1.0, 19.8, {"methods": ("gap",)}),
}
_MODELS = {
    "vit-cifar10": ("vit_small32", 75.0),
    "deit-cifar10": ("deit_small32", 76.0),
    "swin-cifar10": ("swin_small32", 84.0),
    "xcit-cifar10": ("xcit_small32", 83.0),
    "davit-cifar10": ("davit_small32", 85.0),
}


def study(root: Path, recipes: tuple[str, ...] = tuple(_MODELS), seeds: int = 5) -> Path:
    """Every variant of some of the five models; one seed of Swin's `paper` diverged."""
    for recipe in recipes:
        model, level = _MODELS[recipe]
        for variant, (gain, speed, milliseconds, rest) in _VARIANTS.items():
            for seed in range(seeds if variant in ("baseline", "tuned", "spectral") else 3):
                spread = random.Random(f"{recipe}{variant}{seed}").gauss(0, 0.25)
                watch = variant in ("baseline", "spectral", "precondition") and seed < 3
                fields = {"lam": 0.0, **rest} if variant != "spectral" else rest
                failed = recipe == "swin-cifar10" and variant == "paper" and seed == 1
                Fake(
                    variant, seed, level + gain + spread, recipe, model=model, speed=speed,
                    milliseconds=milliseconds + 0.02 * seed, watch=watch,
                    state="diverged" if failed else "finished", **fields,
                ).write(root)  # fmt: skip
    return root


def sweep(root: Path, seeds: int = 3) -> Path:
    """λ literally and norm-preserving, with baselines, all watched."""
    best = {False: 1.5, True: 3.5}
    for seed in range(seeds):
        common = {"recipe": "vit-lambda", "watch": True, "seed": seed}
        wobble = random.Random(seed).gauss(0, 0.2)
        Fake("baseline", accuracy=75 + wobble, lam=0.0, **common).write(root)
        Fake(
            "tuned", accuracy=76.2 + wobble, lam=0.0, changes={"optim.qkv_lr": 0.35}, **common
        ).write(root)
        for keeps in (False, True):
            for lam in (0.1, 0.5, 1, 2, 4, 10):
                ratio = lam / 0.61
                loss = 0.9 if keeps else 9.0
                gain = (2.6 if keeps else 0.4) - loss * math.log10(ratio / best[keeps]) ** 2
                gain = gain if ratio > best[keeps] or keeps else gain * 0.1
                word = str(keeps).lower()
                Fake(
                    f"lam{lam}-{'kept' if keeps else 'literal'}",
                    accuracy=75 + gain + random.Random(f"{seed}{lam}").gauss(0, 0.25),
                    methods=(f"spectral:lam={lam},preserve_norm={word}",),
                    lam=ratio, keeps_norm=keeps, **common,
                ).write(root)  # fmt: skip
    return root
