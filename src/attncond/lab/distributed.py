"""One process or many: accelerate's setup, DDP or FSDP2, and who stops or fails when."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from accelerate.utils import GradientAccumulationPlugin, gather_object
from torch import nn
from torch.distributed import broadcast, destroy_process_group, is_initialized
from torch.distributed.fsdp import fully_shard
from torch.nn.modules.batchnorm import _BatchNorm

from attncond.errors import ConditioningError
from attncond.inspection import inspect
from attncond.lab.config import Config
from attncond.lab.folder import RunError
from attncond.lab.timing import Stop

__all__ = ["SharedError", "accelerated", "agreed", "blocks", "leave", "share_statistics"]
__all__ += ["sharding", "together", "wrap"]

AGREE_EVERY = 10


class SharedError(RunError):
    """What kept one process from going on, raised in all of them."""


def sharding() -> bool:
    """Whether weights are to be sharded: ``accelerate launch --use_fsdp`` says so."""
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() in ("1", "true", "yes")


@contextmanager
def accelerated(config: Config) -> Iterator[Accelerator]:
    """An Accelerator for one run; the next run of this process may have other settings."""
    precision = {"fp32": "no"}.get(config.train.precision, config.train.precision)
    try:
        accelerator = Accelerator(
            mixed_precision=precision,
            cpu=not torch.accelerator.is_available(),  # else each process would be the only one
            # As a plugin: ACCELERATE_GRADIENT_ACCUMULATION_STEPS in the environment beats a number.
            gradient_accumulation_plugin=GradientAccumulationPlugin(config.train.accumulate),
            fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2) if sharding() else None,
        )
        world, parts = accelerator.num_processes, config.train.accumulate
        with together(accelerator):
            if config.train.batch_size % (world * parts):
                raise RunError(
                    f"train.batch_size = {config.train.batch_size} cannot be shared out evenly to "
                    f"{world} processes in {parts} parts (train.accumulate) each"
                )
            config.check_device(accelerator.device.type)
        yield accelerator
        accelerator.free_memory()
    finally:
        AcceleratorState._reset_state()


@contextmanager
def together(accelerator: Accelerator) -> Iterator[None]:
    """What fails in one process fails in all, or the others would wait for it for ever.

    Every process has to come here, and none may wait for another inside.
    """
    failed: ConditioningError | None = None
    try:
        yield
    except ConditioningError as error:
        if accelerator.num_processes == 1:
            raise
        failed = error
    if accelerator.num_processes == 1:
        return
    texts: list[str | None] = gather_object([None if failed is None else str(failed)])
    told = [f"process {n}: {text}" for n, text in enumerate(texts) if text is not None]
    if told:  # by the first where it failed itself: most often all have the same to say
        raise SharedError(texts[0] or "; ".join(told)) from failed


def wrap(accelerator: Accelerator, module: nn.Module) -> nn.Module:
    """The module itself, in DDP, or sharded in place by FSDP2, block by block.

    accelerate would shard on GPUs only; this way it is the same, and tested, everywhere. The
    parameters stay in float32 and are cast where they are used, as they are in one process.
    """
    module.to(accelerator.device)
    if accelerator.num_processes == 1:
        return module
    if not sharding():
        wrapped: nn.Module = accelerator.prepare_model(module)
        return wrapped
    for block in blocks(module):
        fully_shard(block)
    fully_shard(module)
    return module


def blocks(module: nn.Module) -> list[nn.Module]:
    """The modules around each attention: a transformer's blocks."""
    paths = dict.fromkeys(site.path.rpartition(".")[0] for site in inspect(module))
    return [module.get_submodule(path) for path in paths if path]


def share_statistics(accelerator: Accelerator, module: nn.Module) -> None:
    """Give all processes what the first one's batch norms have counted: it is what is saved.

    Each counts its own images, so that the model that is tested would be another in each.
    """
    if accelerator.num_processes > 1:
        for norm in module.modules():
            if isinstance(norm, _BatchNorm):
                for buffer in norm.buffers(recurse=False):
                    broadcast(buffer, src=0)


def agreed(accelerator: Accelerator, stop: Stop, step: int) -> str | None:
    """Why to stop after this step, the same in all processes; None: go on.

    Alone, a process may stop at any step. Several ask each other every few steps, for one that
    stops alone would leave the others waiting for ever.
    """
    if accelerator.num_processes == 1:
        return stop.reason
    if step % AGREE_EVERY:
        return None
    if stop.reason:
        accelerator.set_trigger()
    return (stop.reason or "another process's wish") if accelerator.check_trigger() else None


def leave(code: int) -> NoReturn:
    """End one of several processes, whose work is on disk, without finalizing the interpreter.

    A thread of gloo may still let go of a tensor then, which aborts the process: the launcher would
    report a failure of what has succeeded (github.com/pytorch/pytorch/pull/179291 tells the same).
    """
    if is_initialized() and code in (0, 1):  # any other code may be this process's alone
        destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
