"""Shared by all tests; its presence puts this folder on the path, for cases.py and oracle.py."""

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
