"""Ways to write RemoveGap and Precondition, side by side in one block, kernel by kernel.

    python benchmarks/head_kernels.py                       # CUDA; a few minutes
    python benchmarks/head_kernels.py --batch 2 --length 64 --layers 1 --candidates gap_centre ...

A whole training step (step_time.py) says what a method costs; this says where, and what another way
of writing it would cost. Each candidate is compiled alone, forward and backward, and its time, peak
memory and slowest kernels are written beside those of the stock block. `floor_microseconds` is what
the extra reads and writes of a candidate take at the bandwidth that a plain copy reaches here.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch._dynamo
from _record import write
from torch import Tensor, nn
from torch.nn.functional import gelu
from torch.nn.functional import scaled_dot_product_attention as attend

from attncond import kernels as kernels_of
from attncond.attention_matrices import subtract
from attncond.methods import Precondition
from attncond.methods.gap import centre, visible_mean

Heads = Callable[[Tensor, Tensor, Tensor], Tensor]


class Rows(torch.autograd.Function):
    """Row equilibration with its derivative written out, for fewer passes over the output."""

    @staticmethod
    def forward(ctx, output: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        """The rows divided by their lengths."""
        ctx.save_for_backward(output)
        wide = output.float()
        return (wide * wide.square().sum(-1, keepdim=True).clamp_min(1e-12).rsqrt()).to(
            output.dtype
        )

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        """(g − (g·n) n)/‖row‖ with n the divided row."""
        (output,) = ctx.saved_tensors
        wide, grad = output.float(), grad.float()
        scale = wide.square().sum(-1, keepdim=True).clamp_min(1e-12).rsqrt()
        unit = wide * scale
        along = (grad * unit).sum(-1, keepdim=True)
        return ((grad - along * unit) * scale).to(output.dtype)


def in_memory_order(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Work on (batch, tokens, heads, channels), as the kernels lay their outputs out."""
    return lambda output: function(output.transpose(1, 2)).transpose(1, 2)


def rounded_centre(value: Tensor) -> Tensor:
    """The mean rounded to the values' dtype before it is subtracted."""
    return value - value.mean(-2, keepdim=True)


def norm_and_divide(output: Tensor) -> Tensor:
    """Equilibration as a textbook writes it."""
    wide = output.float()
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).clamp_min(1e-6)
    return (wide / length).to(output.dtype)


_rows = Precondition().equilibrate
# name: (heads, extra passes over one (batch, tokens, width) tensor, forward and backward together)
CANDIDATES: dict[str, tuple[Heads, float]] = {
    "stock": (lambda q, k, v: attend(q, k, v), 0),
    "gap_subtract": (
        lambda q, k, v: subtract(attend(q, k, v), v.mean(-2, keepdim=True, dtype=torch.float32)),
        4,
    ),
    "gap_centre": (lambda q, k, v: attend(q, k, centre(v)), 3),
    "gap_rounded": (lambda q, k, v: attend(q, k, rounded_centre(v)), 3),
    "precondition": (lambda q, k, v: in_memory_order(_rows)(attend(q, k, v)), 5),
    "precondition_divide": (lambda q, k, v: in_memory_order(norm_and_divide)(attend(q, k, v)), 5),
    "precondition_function": (lambda q, k, v: in_memory_order(Rows.apply)(attend(q, k, v)), 5),
    "causal_stock": (lambda q, k, v: attend(q, k, v, is_causal=True), 0),
    "causal_gap": (
        lambda q, k, v: subtract(
            attend(q, k, v, is_causal=True), visible_mean(v, q.shape[-2], causal=True)
        ),
        6,
    ),
    "causal_gap_uniform": (  # the mean as attention with equal logits
        lambda q, k, v: (
            attend(q, k, v, is_causal=True)
            - attend(torch.zeros_like(q), torch.zeros_like(k), v, is_causal=True)
        ),
        6,
    ),
}
kernels_of.load()
if kernels_of.short is not None:
    CANDIDATES["gap_short"] = (
        lambda q, k, v: kernels_of.short_attention(q, k, v, None, True, None),
        1,
    )
    CANDIDATES["precondition_short"] = (
        lambda q, k, v: kernels_of.short_attention(q, k, v, None, False, Precondition()),
        0,
    )
    CANDIDATES["causal_gap_running"] = (
        lambda q, k, v: kernels_of.causal_attention(q, k, v, None),
        7,
    )


class Block(nn.Module):
    """A pre-norm transformer block with the attention of a candidate."""

    def __init__(self, heads: Heads, width: int, count: int) -> None:
        super().__init__()
        self.heads, self.count = heads, count
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) to the same."""
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(batch, tokens, 3, self.count, -1)
        output = self.heads(*qkv.permute(2, 0, 3, 1, 4).unbind(0))
        x = x + self.proj(output.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.fc2(gelu(self.fc1(self.norm2(x))))


def milliseconds(step: Callable[[], None], device: torch.device, steps: int) -> float:
    """Mean time of one step, by the device's own clock where it has one."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(steps):
            step()
        return 1e3 * (time.perf_counter() - start) / steps
    before, after = torch.cuda.Event(True), torch.cuda.Event(True)
    before.record()
    for _ in range(steps):
        step()
    after.record()
    torch.cuda.synchronize()
    return before.elapsed_time(after) / steps


def kernels(step: Callable[[], None], layers: int, steps: int = 4) -> list[tuple[str, float]]:
    """The kernels of a step, slowest first, in microseconds for each layer."""
    return profiled(step, layers, steps)[0]


def profiled(
    step: Callable[[], None], layers: int, steps: int
) -> tuple[list[tuple[str, float]], float]:
    """The same, and the microseconds for each layer in which no kernel runs."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as record:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    rows = sorted(record.key_averages(), key=lambda e: -e.device_time_total)
    on_device = [e for e in record.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    idle, end = 0.0, math.inf
    for time_range in sorted((e.time_range for e in on_device), key=lambda t: t.start):
        idle += max(0.0, time_range.start - end)
        end = time_range.end if end == math.inf else max(end, time_range.end)
    share = steps * layers
    return [(e.key[:110], round(e.device_time_total / share, 2)) for e in rows], idle / share


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second of a large copy, reads and writes counted."""
    source = torch.empty(2**28, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)

    def step() -> None:
        target.copy_(source)

    step()
    return 4 * source.numel() / (milliseconds(step, device, 20) / 1e3)


def measure(name: str, args: argparse.Namespace, device: torch.device) -> dict[str, object]:
    """Time, memory and kernels of one candidate."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    causal = name.startswith("causal")
    batch, length = (args.causal_batch, args.causal_length) if causal else (args.batch, args.length)
    heads, _ = CANDIDATES[name]
    model = nn.Sequential(*[Block(heads, args.width, args.heads) for _ in range(args.layers)])
    model.to(device)
    compiled = torch.compile(model)
    x = torch.randn(batch, length, args.width, device=device, requires_grad=True)
    grad = torch.randn_like(x)

    def step() -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            y = compiled(x)
        y.backward(grad.to(y.dtype))
        model.zero_grad(set_to_none=True)
        x.grad = None

    for _ in range(3):
        step()
    times = [milliseconds(step, device, args.steps) / args.layers for _ in range(args.rounds)]
    row: dict[str, object] = {"milliseconds": times, "median": statistics.median(times)}
    if device.type == "cuda":
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        row["peak_mebibytes"] = (torch.cuda.max_memory_allocated() - held) / 2**20 / args.layers
        row["kernels"] = kernels(step, args.layers)[:40]
    return row


def main() -> None:
    """Measure and write, after each candidate anew: an interrupted run keeps what it has."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--candidates", nargs="+", default=list(CANDIDATES), choices=CANDIDATES)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--length", type=int, default=197)
    parser.add_argument("--causal-batch", type=int, default=16)
    parser.add_argument("--causal-length", type=int, default=1024)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/head_kernels.json"))
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    settings = {k: v for k, v in vars(args).items() if k != "out"}
    bandwidth = copy_bandwidth(device) if device.type == "cuda" else None
    found: dict[str, dict[str, object]] = {}
    for name in args.candidates:
        row = measure(name, args, device)
        if bandwidth:
            causal = name.startswith("causal")
            tokens = args.causal_batch * args.causal_length if causal else args.batch * args.length
            passes = CANDIDATES[name][1]
            row["floor_microseconds"] = 1e6 * passes * tokens * args.width * 2 / bandwidth
        found[name] = row
        print(name, {k: v for k, v in row.items() if k != "kernels"}, flush=True)
        content = {"settings": settings, "copy_bytes_per_second": bandwidth, "candidates": found}
        write(args.out, content)


if __name__ == "__main__":
    main()
