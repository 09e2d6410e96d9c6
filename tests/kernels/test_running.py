from __future__ import annotations

import pytest
import torch
from reference import PARTS, RUNNING, causal_errors, compiled_for_hopper, running_errors


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("case", RUNNING)
def test_interpreted_it_is_the_definition(interpreted, case, parts) -> None:
    assert max(interpreted[f"running {case} {parts}"]) < 2e-5


@pytest.mark.parametrize("channels", [16, 64])
def test_it_compiles_for_a_card_that_is_not_here(channels) -> None:
    running = pytest.importorskip("attncond.kernels.running")
    block, width, warps, stages, parts = running.TILE
    for kernel, more in (
        (running._sum_parts, {"SHARES": True}),
        (running._add_mean, {"SIGN": -1.0}),
        (running._less_later, {}),
    ):
        tile = {"B": block, "C": min(width, channels), "PARTS": parts, "STAGES": stages, "EACH": 2}
        assert ".target sm_90" in compiled_for_hopper(kernel, tile | more, warps, stages)


cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
BOUNDS = {torch.bfloat16: 1.5e-2, torch.float16: 2e-3}


@cuda
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("case", [*RUNNING, (2, 12, 1024, 64), (1, 2, 5000, 32)])
def test_on_a_card_its_passes_are_the_definition(case, parts, dtype, monkeypatch) -> None:
    running = pytest.importorskip("attncond.kernels.running")
    monkeypatch.setattr(running, "TILE", running.TILE)  # and back to it
    assert max(running_errors(case, parts, dtype, "cuda")) < BOUNDS[dtype]


@cuda
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(
    "case", [(2, 3, 37, 16), (1, 2, 200, 32), (2, 12, 1024, 64), (1, 1, 65, 128)]
)
def test_on_a_card_causal_attention_is_the_definition(case, dtype) -> None:
    assert max(causal_errors(case, dtype, "cuda")) < 2 * BOUNDS[dtype]
