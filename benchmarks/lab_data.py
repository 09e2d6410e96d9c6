"""How fast the lab reads images and makes batches of them.

    python benchmarks/lab_data.py                                   # CPU; data from ATTNCOND_DATA
    python benchmarks/lab_data.py --device cuda --out results/benchmarks/lab_data_cuda.json

Decoding: CIFAR-10's 60,000 images from Parquet, from a cache (mapped, so that its pages are read
when they are used), and from this process's memory; left out where the files are not there.
Batches: images a second through a whole epoch, the drawing of its random numbers included, after
one epoch to warm up; where there is no data, of images of noise, which take as long. The
processor's own time stands beside the clock's, which other programs on the machine make longer.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from _record import write

from attncond.lab.config import Augment, Data
from attncond.lab.data import Batches, DataError, Split, load
from attncond.lab.data import cache as cache_module

DATA = Data(name="cifar10", image_size=32, validation=0.0, workers=0)
RAND = "rand-m9-mstd0.5-inc1"
VARIANTS = {
    "normalise": Augment(),
    "crop, flip": Augment(crop=4, flip=True),
    "crop, flip, jitter": Augment(crop=4, flip=True, jitter=0.4),
    "crop, flip, RandAugment": Augment(crop=4, flip=True, randaugment=RAND),
    "crop, flip, mixup, cutmix": Augment(crop=4, flip=True, mixup=0.8, cutmix=1.0),
    "everything": Augment(
        crop=4, flip=True, randaugment=RAND, mixup=0.8, cutmix=1.0, erase=0.25, repeats=3
    ),
}


def decoding(root: Path | None) -> tuple[dict[str, Any], Split | None]:
    """Seconds for the training and test images, and the training images."""
    seconds: dict[str, Any] = {}
    os.environ.pop("ATTNCOND_CACHE", None)
    with tempfile.TemporaryDirectory() as folder:
        for name, cached, forget in (
            ("decode", "", True),
            ("decode and write the cache", folder, True),
            ("read the cache", folder, True),
            ("same process", folder, False),
        ):
            os.environ["ATTNCOND_CACHE"] = cached
            if forget:
                cache_module._KEPT.clear()
            start, worked = time.perf_counter(), time.process_time()
            try:
                train = load(DATA, root).train
            except DataError as error:
                print(f"decoding left out: {error}")
                return {}, None
            seconds[name] = {
                "wall": round(time.perf_counter() - start, 3),
                "cpu": round(time.process_time() - worked, 3),
            }
            print(f"{name}: {seconds[name]} s", flush=True)
    assert isinstance(train, Split)
    return seconds, train


def noise(count: int) -> Split:
    """Images of noise where there are no others."""
    images = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8)
    return Split(images, torch.arange(count) % 10, (0.5,) * 3, (0.25,) * 3)


def rates(split: Split, args: argparse.Namespace) -> dict[str, Any]:
    """Images a second of every variant, and how long an epoch takes to begin."""
    found = {}
    for name, augment in VARIANTS.items():
        batches = Batches(
            split,
            DATA.model_copy(update={"augment": augment}),
            batch_size=args.batch,
            seed=0,
            device=args.device,
            train=True,
            classes=10,
            smoothing=0.1,
        )
        best, least, begin = 0.0, float("inf"), float("inf")
        for number in range(args.epochs + 1):
            _wait(args.device)
            start, worked = time.perf_counter(), time.process_time()
            epoch = batches.epoch(number)
            next(epoch)
            _wait(args.device)
            first = time.perf_counter()
            count = args.batch * sum(1 for _ in epoch) + args.batch
            _wait(args.device)
            if number:  # the first warms up
                best = max(best, count / (time.perf_counter() - start))
                least = min(least, (time.process_time() - worked) / count)
                begin = min(begin, first - start)
        found[name] = {
            "images_per_second": round(best),
            "cpu_microseconds_per_image": round(1e6 * least, 2),
            "milliseconds_to_first_batch": round(1000 * begin, 1),
        }
        print(f"{name}: {best:,.0f} images/s, first batch after {1000 * begin:.1f} ms", flush=True)
    return found


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--images", type=int, default=50_000, help="of noise, without data")
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/lab_data_cpu.json"))
    args = parser.parse_args()
    load_average = round(os.getloadavg()[0], 1)  # what else ran
    seconds, split = decoding(args.data)
    settings = {"batch": args.batch, "epochs": args.epochs, "device": args.device}
    figures = {
        "settings": {**settings, "images": "noise" if split is None else "CIFAR-10, JPEG copy"},
        "load_average_at_start": load_average,
        "seconds_for_60000_images": seconds,
        "batches": rates(noise(args.images) if split is None else split, args),
    }
    write(args.out, figures)


if __name__ == "__main__":
    main()
