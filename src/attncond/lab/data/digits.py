"""The 1,797 handwritten digits that come with scikit-learn: data for everyone, without a file."""

from __future__ import annotations

import numpy as np
import torch

from attncond.lab.data.source import DataError, Split
from attncond.lab.data.split import hold_out

__all__ = ["MEAN", "NATIVE", "NOTE", "STD", "read_digits"]

NATIVE = 8
TEST_SHARE = 0.2
MEAN, STD = (0.3053,) * 3, (0.3761,) * 3
NOTE = "scikit-learn digits (1,797 images of 8x8), 20% of each class for the test"


def read_digits() -> tuple[Split, Split]:
    """Training and test images (N, 3, 8, 8): grey, three times, so that every model takes them."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError(
            "the digits come with scikit-learn, which is not installed: pip install 'attncond[lab]'"
        ) from error
    bunch = load_digits()
    grey = torch.from_numpy(np.rint(bunch.images * (255 / 16)).astype(np.uint8))
    labels = torch.from_numpy(bunch.target.astype(np.int64))
    everything = Split(grey[:, None].repeat(1, 3, 1, 1), labels, MEAN, STD)
    train, test = hold_out(labels, TEST_SHARE, "digits")
    return everything.take(train), everything.take(test)
