"""What two processes do for test_lab_distributed.py; torchrun starts this, once for all tests."""

import os
import sys
import time
from pathlib import Path

import torch

torch.set_num_threads(1)

from attncond.lab.distributed import SharedError, leave  # noqa: E402
from attncond.lab.folder import Interrupted  # noqa: E402
from attncond.lab.recipe import load  # noqa: E402
from attncond.lab.train import train  # noqa: E402

EVERYTHING = {
    "optim.clip": "0.5",
    "schedule.epochs": "4",
    "train.ema": "0.8",
    "train.accumulate": "2",
    "train.checkpoint_every": "7",
    "data.augment.crop": "1",
    "watch.every": "10",
}
CASES = {
    "baseline": ("vit-cifar10", "baseline", EVERYTHING),
    "spectral": ("digits", "spectral", EVERYTHING),
    "polar": ("digits", "baseline", {**EVERYTHING, "methods": "polar:refresh_every=3"}),
    "heads": ("digits", "baseline", {**EVERYTHING, "methods": "[gap, precondition]"}),
    "mixed": ("digits", "spectral", {**EVERYTHING, "data.augment.mixup": "0.8"}),
}


def config(case):
    recipe, variant, settings = CASES[case]
    return load(recipe).config("smoke", variant, 0, settings)


def normed():
    """A model with batch norms."""
    return load("xcit-cifar10").config("smoke", "baseline", 0, {"train.ema": "0.8"})


def bare():
    """A rate for projections that the model does not have."""
    settings = {"model.name": "resnet18", "model.kwargs": "{}", "optim.output_lr": "0.5"}
    return load("vit-cifar10").config("smoke", "baseline", 0, settings)


def main(root):
    for kind in ("ddp", "fsdp"):
        os.environ["ACCELERATE_USE_FSDP"] = str(kind == "fsdp")
        for case in CASES:
            train(config(case), root / kind / case, progress=False)
        rank = torch.distributed.get_rank()
        # The first process alone sees that the folder is of another run.
        for name, refused in (("mixed", config("polar")), ("bare", bare())):
            try:
                train(refused, root / kind / name, progress=False)
            except SharedError as error:
                (root / kind / f"refused-{name}-{rank}.txt").write_text(str(error))
        for name in ("stopped", "left"):  # the second is gone on with by one process
            try:
                train(config("polar"), root / kind / name, deadline=time.time(), progress=False)
            except Interrupted as error:
                if rank == 0:
                    (root / kind / f"{name}.txt").write_text(str(error))
        train(config("polar"), root / kind / "stopped", progress=False)
        for name in ("tested", "untested"):  # the second is tested by one process
            train(normed(), root / kind / name, test=name == "tested", progress=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    leave(0)
