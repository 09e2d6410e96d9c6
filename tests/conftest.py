"""Shared by all tests; its presence puts this folder on the path, for cases.py and oracle.py."""

import signal
import threading

import pytest
import torch

torch.set_num_threads(1)
# Shells start background jobs with Ctrl-C ignored, and nohup ignores a closed terminal, which all
# processes below would inherit.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
