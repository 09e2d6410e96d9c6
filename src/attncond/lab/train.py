"""Train one run of a recipe, from its configuration to result.json. Read it from top to bottom.

One process, on whatever device there is:

    python -m attncond.lab.run vit-cifar10 --variants baseline,spectral --seeds 3

Several GPUs of one machine (DDP), and weights sharded over them (FSDP2):

    torchrun --nproc-per-node 8 -m attncond.lab.run vit-cifar10 --variants spectral ...
    accelerate launch --multi_gpu --num_processes 8 -m attncond.lab.run vit-cifar10 ...
    accelerate launch --use_fsdp --fsdp_version 2 --num_processes 8 -m attncond.lab.run ...

Several machines: the same command on each, which torchrun makes one job of (under Slurm as
``srun torchrun ...``, one task for each node, with the first node's name as HOST):

    torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
        -m attncond.lab.run vit-cifar10 --form paper --variants spectral --out /shared/runs ...

The first process writes; the folder of the run has to be one that all of them can read. Whatever
ends a run (Ctrl-C, SIGTERM from a scheduler, kill -9, a power cut), the same command goes on from
its last checkpoint. ``batch_size`` is that of an optimizer step over all processes, so that the
number of processes changes nothing but rounding, the random numbers of drop path, and how many
images a batch norm sees at once (XCiT's), as the number of parts (``accumulate``) does.
"""

from __future__ import annotations

import errno
import math
import shutil
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from attncond.files import plain
from attncond.lab import checkpoint, facts
from attncond.lab.average import Average
from attncond.lab.config import Config
from attncond.lab.data import Batches, load
from attncond.lab.distributed import accelerated, agreed, sharding, together, wrap
from attncond.lab.folder import Interrupted, Result, RunError, RunFolder
from attncond.lab.objective import compile_key, compiled, evaluate, objective
from attncond.lab.optim import parameter_groups
from attncond.lab.progress import Progress, tensorboard
from attncond.lab.state import State
from attncond.lab.timing import WARM_UP, Stop
from attncond.lab.trained import certified, load_teacher, make
from attncond.monitor import Monitor

__all__ = ["cosine", "train"]

LOOK_EVERY = 100  # steps between two looks at the loss, for which the host waits for the device
PROBE = 8  # validation images that the Monitor looks at
_OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)  # full, or broken
DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def train(
    config: Config,
    folder: Path,
    *,
    data: Path | None = None,
    resume: bool = True,
    progress: bool = True,
    test: bool = True,
    deadline: float | None = None,
) -> Result:
    """Train one run in ``folder``, or go on with what is there, and return how it ended.

    Args:
        config: What to train; ``recipe.load(NAME).config(...)`` makes it.
        folder: Where config.json, metrics.jsonl, checkpoints/ and result.json are.
        data: Where the files of the data set are; None: ATTNCOND_DATA, or ``data``.
        resume: Go on from the last checkpoint; False starts over.
        progress: Show it.
        test: Read the test set, once, at the end. False leaves that for later, when settings were
            chosen by what the validation images say.
        deadline: Stop before this time (as ``time.time()`` gives it), with a checkpoint.

    Raises:
        Interrupted: Ctrl-C, SIGTERM or the deadline; the same call goes on.
        RunError: The folder is of other settings or in use, or memory does not suffice.
    """
    try:
        with accelerated(config) as accelerator, Stop(deadline) as stop, ExitStack() as stack:
            with together(accelerator):
                files = RunFolder(folder, main=accelerator.is_main_process)
                stack.enter_context(files)
                if accelerator.is_main_process:
                    files.claim(config, resume)
            with together(accelerator):
                done = files.result()
            if done is None or (test and not done.complete):
                done = _train(config, files, accelerator, stop, data, progress, test)
            if done.complete and accelerator.is_main_process:
                shutil.rmtree(files.checkpoints, ignore_errors=True)
            return done
    except torch.OutOfMemoryError as error:
        raise RunError(
            f"the device's memory does not suffice: {error}\nCompute a batch in more parts "
            "(--set train.accumulate=2), or a smaller one (--set train.batch_size=...)"
        ) from error
    except OSError as error:
        if error.errno not in _OF_DISKS:
            raise
        raise RunError(
            f"{folder} cannot be written: {error}. Make room, and the same command goes on"
        ) from error


def _train(
    config: Config,
    files: RunFolder,
    accelerator: Accelerator,
    stop: Stop,
    data: Path | None,
    progress: bool,
    test: bool,
) -> Result:
    t, dtype, parts = config.train, DTYPES[config.train.precision], config.train.accumulate
    device, main = accelerator.device, accelerator.is_main_process
    rank, world = accelerator.process_index, accelerator.num_processes

    left = facts.begin_memory(device)

    # Data: every batch is a function of seed, epoch and step.
    with together(accelerator):
        source = load(config.data, data, config.seed)
    size = t.batch_size // world

    def batches_of(split: Any, train: bool = False) -> Batches:
        return Batches(
            split,
            config.data,
            batch_size=size if train else 4 * size // parts,  # without gradients, more fits
            seed=config.seed,
            device=device,
            train=train,
            rank=rank,
            world=world,
            smoothing=t.label_smoothing,
            classes=source.classes,
        )

    with together(accelerator):
        batches = batches_of(source.train, train=True)
        held = None if source.validation is None else batches_of(source.validation)
        example = next(iter((held or batches).epoch(0)))[0][:PROBE].clone()
    per_epoch = batches.steps_per_epoch
    steps = per_epoch * config.schedule.epochs

    # Model: the seed decides its weights, the same in all processes; drop path differs.
    set_seed(config.seed)
    with together(accelerator):
        module, handles = make(config, source.classes, example.shape[1])
    model = wrap(accelerator, module)
    set_seed(config.seed, device_specific=True)
    certificates: dict[str, Any] = {"start": certified(handles)}
    if certificates["start"]:
        certificates["lam_over_sigma"] = certificates["start"]["lam_over_sigma"]
    with together(accelerator):
        teacher = None
        if t.teacher:
            teacher = load_teacher(Path(t.teacher), example, source.classes).to(device)
    loss_of = objective
    if t.compile:
        graphs = device.type == "cuda" and world == parts == 1
        loss_of = compiled(compile_key(config), graphs)

    # Optimizer, average, and where the last process left off.
    with together(accelerator):
        groups = parameter_groups(module, config.optim)
    adam = torch.optim.AdamW(
        groups,
        betas=config.optim.betas,
        eps=config.optim.eps,
        fused=device.type == "cuda",
    )
    weights, rates = list(module.parameters()), [group["lr"] for group in adam.param_groups]
    optimizer = accelerator.prepare_optimizer(adam, device_placement=False)
    for handle in handles:
        handle.attach(optimizer)
    average = Average(module, t.ema) if t.ema else None
    state = State(accelerator, module, adam, average, left=left)
    state.load(files)
    rows = files.rewind(state.step) if main else []
    writer = tensorboard(files.path / "tensorboard", state.step) if main else None
    monitor = None
    if config.watch.every:
        probe = config.watch.probe and not sharding()
        monitor = Monitor(
            module,
            config.watch.every,
            at=[steps],
            log=[files.history, *([writer] if writer else [])],
            batch=example if probe else None,
            samples=PROBE,
            tokens=config.watch.tokens if probe else None,
            start=state.step,
            patience=math.inf,  # a history without holes is worth the wait
            gather=sharding(),
        )

    def measured(what: str, split: Batches | None) -> dict[str, float | None]:
        loss, accuracy = None, None
        if split is not None:
            with average.in_place() if average is not None else nullcontext():
                loss, accuracy = evaluate(module, split, accelerator, dtype)
        return {f"{what}_loss": loss, f"{what}_accuracy": accuracy}

    diverged, clock, began = False, state.clock, state.step
    looked = began
    with Progress(str(files.path), steps, progress and main) as shown:
        if began:
            shown.line(f"going on after step {began} of {steps}")
        while state.step < steps and not diverged:
            module.train()
            clock.go()
            for images, targets in batches.epoch(state.step // per_epoch, state.step % per_epoch):
                lr = cosine(config, state.step / per_epoch)
                for group, rate in zip(adam.param_groups, rates, strict=True):
                    group["lr"] = rate * lr / config.optim.lr
                for x, y in zip(images.chunk(parts), targets.chunk(parts), strict=True):
                    with accelerator.accumulate(model):
                        loss = loss_of(model, x, y, t.label_smoothing, dtype, teacher, t.distill)
                        accelerator.backward(loss)
                        if accelerator.sync_gradients and config.optim.clip is not None:
                            accelerator.clip_grad_norm_(weights, config.optim.clip)
                        optimizer.step()  # nothing happens before the last part
                        optimizer.zero_grad()
                    state.add(loss, parts)
                state.step, state.losses = state.step + 1, state.losses + 1
                if average is not None:
                    average.update(state.step)
                if monitor is not None:
                    monitor.step(step=state.step, loss=loss.detach())

                # Nothing above waits for the device. Below, the host does.
                step, epoch = state.step, state.step // per_epoch
                ends, due = step % per_epoch == 0, step % t.checkpoint_every == 0
                reason = agreed(accelerator, stop, step)
                look = step - began == WARM_UP or step % LOOK_EVERY == 0
                if not (look or ends or due or reason):
                    continue
                mean = state.mean_loss()
                state.lap(step - looked)
                looked, diverged = step, not math.isfinite(mean)
                if diverged:
                    break
                shown.at(step, mean)
                if ends and (epoch % t.evaluate_every == 0 or step == steps):
                    row: dict[str, Any] = {"epoch": epoch, "step": step}
                    row |= {"train_loss": mean, "lr": lr}
                    row |= measured("validation", held) | {"seconds": clock.seconds}
                    row |= {"images_per_second": 1000 * t.batch_size / clock.last}
                    rows.append(row)
                    state.forget_losses()
                    if main:
                        files.add(row)
                        shown.evaluation(config.schedule.epochs, row)
                    for name, value in row.items():
                        if writer is not None and value is not None:
                            writer.add_scalar(f"run/{name}", value, step)
                if step < steps and (due or reason):
                    if monitor is not None:
                        monitor.flush()  # what the checkpoint goes on after is on disk before it
                    state.save(files)
                if step < steps and reason:
                    raise Interrupted(reason, f"{files.path}: {reason} at step {step} of {steps}")
                module.train()
                clock.go()

    # The end. The test set is read here, once, and nothing is chosen by it.
    for log in (monitor, writer):
        if log is not None:
            log.close()
    read = test and not diverged
    last = rows[-1] if rows and not diverged else {}
    seen = [r["validation_accuracy"] for r in rows if r["validation_accuracy"] is not None]
    if not diverged:
        certificates["end"] = certified(handles)
    values = {
        "status": "diverged" if diverged else "finished",
        "diverged": diverged,
        "diverged_at_step": state.step if diverged else None,
        "test_read": read,
        **measured("test", batches_of(source.test) if read else None),
        **{k: last.get(k) for k in ("train_loss", "validation_loss", "validation_accuracy")},
        "best_validation_accuracy": max(seen, default=None),
        "epochs": state.step // per_epoch,
        "steps": state.step,
        "seconds": clock.seconds,
        "step_milliseconds": clock.milliseconds,
        "warm_up_seconds": clock.warm_up,
        "peak_memory_bytes": state.memory,
        "parameters": sum(p.numel() for p in weights),
        "classes": source.classes,
        "channels": example.shape[1],
        "data_note": source.note,
        "certificates": certificates,
        **facts.about(device, world),
        "hardware": state.hardware,  # of the steps: the test may be read elsewhere, or later
        "config": config.model_dump(mode="json"),
    }
    with average.in_place() if average is not None else nullcontext():
        tested = checkpoint.whole(module.state_dict())
    if not (read or diverged):
        state.save(files)  # so that the test set can be read later
    if main:
        checkpoint.write_tensors(files.weights, tested)
        files.finish(values)
    accelerator.wait_for_everyone()
    return Result(files.path, plain(values))


def cosine(config: Config, epoch: float) -> float:
    """The learning rate after ``epoch`` epochs, a pure function, so that resuming needs no memory.

    Linear from zero over the warm-up, then half a cosine down to ``min_lr``.
    """
    s, top = config.schedule, config.optim.lr
    if epoch < s.warmup_epochs:
        return top * epoch / s.warmup_epochs
    share = (epoch - s.warmup_epochs) / (s.epochs - s.warmup_epochs)
    return s.min_lr + (top - s.min_lr) * (1 + math.cos(math.pi * min(share, 1.0))) / 2
