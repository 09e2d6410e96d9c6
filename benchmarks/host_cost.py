"""What a compiled training step costs the host before and between its kernels, beside stock.

    python benchmarks/host_cost.py

The graphs are the real ones of the lab's small models, forward and backward, but compute nothing:
each returns tensors that were made before. What is left is what PyTorch does around them: Dynamo's
guards, fetching parameters and buffers, AOTAutograd and autograd. Inductor's own checks of its
inputs and the launch of CUDA graphs are not in it. Turns alternate with those of two stock models,
which show the noise; the time given is that of the fastest turn, since what others do on the
machine takes time and never gives any.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm  # noqa: F401  (its version is recorded)
import torch
import torch._dynamo
from _record import write
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._functorch.partitioners import min_cut_rematerialization_partition

import attncond as ac
from attncond.lab.config import Model
from attncond.lab.models import build

Job = Callable[[], object]


def nothing(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """A compiled graph that computes nothing, and returns tensors of the right shapes."""
    (output,) = graph.graph.find_nodes(op="output")
    fakes = [None if node is None else node.meta["val"] for node in output.args[0]]
    made: list[Any] = []

    def run(args: list[Any]) -> list[Any]:
        args.clear()
        if not made:  # not while compiling, when tensors are fakes
            made.extend(
                torch.zeros(f.shape, dtype=f.dtype) if isinstance(f, Tensor) else f for f in fakes
            )
        return [m.detach() if isinstance(m, Tensor) else m for m in made]

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def model_of(name: str, conditioned: bool) -> nn.Module:
    """One of the lab's models."""
    torch.manual_seed(0)
    model = build(Model(name=name), num_classes=10, image_size=32)
    if conditioned:
        ac.condition(model, ac.Spectral())
    return model


def jobs(model: nn.Module, image: Tensor) -> dict[str, Job]:
    """What is timed of one model: its loss, and a training step."""
    partition = functools.partial(min_cut_rematerialization_partition, compiler="inductor")
    backend = aot_autograd(fw_compiler=nothing, bw_compiler=nothing, partition_fn=partition)

    def loss() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output: Tensor = model(image)
        return output.sum()

    loss.__code__ = loss.__code__.replace()  # its own: what is compiled for others is not tried
    compiled = torch.compile(loss, backend=backend, fullgraph=True)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        compiled().backward()

    return {"forward": compiled, "step": step}


def guards(model: nn.Module, image: Tensor) -> tuple[dict[str, int], Job]:
    """How much Dynamo checks before each call, and how many tensors it fetches; the check alone."""
    torch._dynamo.reset()
    inputs: list[int] = []

    def backend(graph: torch.fx.GraphModule, given: list[Tensor]) -> Callable[..., Any]:
        inputs.append(len(given))
        return graph.forward

    torch.compile(model, backend=backend, fullgraph=True)(image)
    (entry,) = _debug_get_cache_entry_list(type(model).forward.__code__)
    root = entry.guard_manager.root
    arguments = {"self": model, "x": image, "attn_mask": None, "is_causal": False}
    if not root.check(arguments):
        raise RuntimeError(str(root.check_verbose(arguments)))
    return {"guards": count(root), "inputs": inputs[0]}, lambda: root.check(arguments)


def count(node: Any) -> int:
    """All guards of a tree of them."""
    sides = getattr(node, "get_key_value_managers", dict)().values()
    below = [*node.get_child_managers(), *(side for pair in sides for side in pair if side)]
    return len(node.get_leaf_guards()) + sum(map(count, below))


def microseconds(job: Job, repeats: int) -> float:
    """Mean time of one call."""
    start = time.perf_counter()
    for _ in range(repeats):
        job()
    return 1e6 * (time.perf_counter() - start) / repeats


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["vit_small32", "swin_small32"])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/host_cost.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    image = torch.randn(1, 3, 32, 32)
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for name in args.models:
        figures[name] = {}
        models = {v: model_of(name, v == "spectral") for v in ("stock", "stock_again", "spectral")}
        for variant, model in models.items():
            counts, check = guards(model, image)
            check_time = min(microseconds(check, 10 * args.calls) for _ in range(args.rounds))
            figures[name][variant] = {**counts, "guards_microseconds": check_time}
        torch._dynamo.reset()
        timed = {variant: jobs(model, image) for variant, model in models.items()}
        for _ in range(args.rounds):
            for variant, own in timed.items():
                for what, job in own.items():
                    job()
                    key = f"{what}_microseconds"
                    taken = microseconds(job, args.calls)
                    row = figures[name][variant]
                    row[key] = min(row.get(key, taken), taken)
        for variant, row in figures[name].items():
            print(name, variant, {k: round(x, 1) for k, x in row.items()}, flush=True)
    settings = {k: x for k, x in vars(args).items() if k != "out"}
    write(args.out, {"settings": settings, "models": figures})


if __name__ == "__main__":
    main()
