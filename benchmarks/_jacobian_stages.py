"""Where the time of one head's spectrum goes, and what other ways to take each step would cost."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from attncond.head_inputs import Inputs
from attncond.jacobian import attention_jacobian
from attncond.lanczos import largest
from attncond.rank import reduce_tokens

Head = tuple[Tensor, dict[str, Tensor]]


def seconds(job: Callable[[], object], device: str) -> float:
    """Wall time of a job that may run on a GPU."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    job()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def agreement(device: str) -> dict[str, Any]:
    """σ_max and σ_min on a device and on the CPU, over sizes that take each way through the code.

    The sizes: one SVD, J of full row rank, of full column rank with what the weights can do in
    vain, causal, biased, and a rank in between (all eigenvalues).
    """
    cases: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
        "svd": ((8, 16, 4), {}),
        "rows": ((40, 64, 16), {}),
        "columns": ((160, 24, 8), {}),
        "stacked": ((40, 64, 16), {"convention": "stacked"}),
        "causal": ((40, 64, 16), {"causal": True}),
        "biased": ((96, 24, 8), {"bias_q": 0.3}),
    }
    rows: dict[str, Any] = {}
    for name, ((n, width, d), details) in cases.items():
        generator = torch.Generator().manual_seed(len(rows))
        x = torch.randn(n, width, generator=generator, dtype=torch.float64)
        w = torch.randn(3, d, width, generator=generator, dtype=torch.float64) / math.sqrt(width)
        options = dict(details)
        if "bias_q" in options:
            options["bias_q"] = torch.randn(d, generator=generator, dtype=torch.float64)
        there = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in options.items()}
        here = attention_jacobian(x, *w, **options)
        other = attention_jacobian(x.to(device), *w.to(device), **there)
        row: dict[str, Any] = {"rank": (here.rank, other.rank), "kappa": here.kappa}
        row["sigma_max"] = abs(other.sigma_max / here.sigma_max - 1)
        if here.sigma_min and other.sigma_min:
            row["sigma_min"] = abs(other.sigma_min / here.sigma_min - 1)
        rows[name] = row
    worst = max(max(r["sigma_max"], r.get("sigma_min", 0.0)) for r in rows.values())
    return {"worst_relative_difference": worst, "cases": rows}


def stages(head: Head, device: str) -> Iterator[tuple[str, float]]:
    """Seconds of each step of a head of full row rank, then those of the alternatives.

    Every one runs twice and the second counts: the first loads what it needs.
    """

    def twice(job: Callable[[], object]) -> float:
        job()
        return seconds(job, device)

    x, parts = head
    with torch.no_grad():
        inputs = Inputs.of(x, **parts)
        yield "inputs", twice(lambda: Inputs.of(x, **parts))
        yield "distinct", twice(inputs.distinct)
        yield "tokens", twice(lambda: reduce_tokens(inputs.x_q, inputs.rtol))
        yield "closed form, tokens included", twice(inputs.jacobian)
        operator, _ = inputs.jacobian()
        size = operator.shape[0]

        def top() -> object:
            return largest(lambda u: operator.forward(operator.adjoint(u)), size, device)

        yield "largest", twice(top)
        yield "gram", twice(lambda: operator.gram("rows"))
        gram = operator.gram("rows")
        yield "cholesky", twice(lambda: torch.linalg.cholesky_ex(gram))
        factor = torch.linalg.cholesky_ex(gram)[0]
        if device != "cuda":
            return
        yield "inverse", twice(lambda: torch.cholesky_inverse(factor))
        inverse = torch.cholesky_inverse(factor)
        yield "smallest", twice(lambda: largest(lambda v: inverse @ v, size, device, 1e-12))
        # From here on: other ways.
        yield "tokens on the device", twice(lambda: torch.linalg.svd(inputs.x_q, False))

        def solve(v: Tensor) -> Tensor:
            half = torch.linalg.solve_triangular(factor, v[:, None], upper=False)
            whole: Tensor = torch.linalg.solve_triangular(factor.mT, half, upper=True)
            return whole[:, 0]

        v = gram[0].clone()
        yield "one solve with the factor", twice(lambda: solve(v))
        yield "one cholesky_solve", twice(lambda: torch.cholesky_solve(v[:, None], factor))
        eye = torch.eye(size, dtype=torch.float64, device=device)
        yield (
            "inverse of the factor alone",
            twice(lambda: torch.linalg.solve_triangular(factor, eye, upper=False)),
        )
        yield "one product with the inverse", twice(lambda: gram @ v)
        product = gram[:8192, :8192].contiguous()
        yield "one product of 8192³", twice(lambda: product @ product)
        for library in ("cusolver", "magma"):
            before = torch.backends.cuda.preferred_linalg_library()
            try:
                torch.backends.cuda.preferred_linalg_library(library)
                yield f"cholesky by {library}", twice(lambda: torch.linalg.cholesky_ex(gram))
            except RuntimeError as error:
                print(f"  {library}: {str(error).splitlines()[0]}", flush=True)
            finally:
                torch.backends.cuda.preferred_linalg_library(before)
        whole = gram.tril() + gram.tril(-1).mT
        yield "all eigenvalues, once", seconds(lambda: torch.linalg.eigvalsh(whole), device)
