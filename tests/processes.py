"""Two processes that do the same work, joined by gloo."""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WORLD = 2


def together(work, folder):
    """Call ``work(rank, folder)`` in two processes; what they find, they write to the folder."""
    mp.spawn(_run, (work, str(folder)), nprocs=WORLD)


def _run(rank, work, folder):
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD)
    work(rank, folder)
    dist.destroy_process_group()
    # Not by the interpreter's end: a thread of gloo that lets go of a tensor then aborts it.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
