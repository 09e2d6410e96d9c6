from __future__ import annotations

import pytest
import torch
from reference import FORMS, SHORT, compiled_for_hopper, plain_short_errors, short_errors


@pytest.mark.parametrize("case", SHORT)
def test_interpreted_it_is_the_definition(interpreted, case) -> None:
    for form in FORMS:
        assert max(interpreted[f"short {case} {form}"]) < 2e-5, form


@pytest.mark.parametrize("form", [(0, 0, 0), (1, 1, 0), (0, 1, 1)])
def test_it_compiles_for_a_card_that_is_not_here(form) -> None:
    short = pytest.importorskip("attncond.kernels.short")
    gap, rows, fixed = (bool(x) for x in form)
    same = {"D": 64, "SCALE": 0.125, "GAP": gap, "ROWS": rows}
    m, n, warps, stages = short.FORWARD
    forward = {**same, "M": m, "N": n, "T": 16, "FIXED": fixed, "LEAST": 1e-12}
    text = compiled_for_hopper(short._forward, forward, warps, stages)
    assert "wgmma" in text  # tensor cores, not loops
    n, warps, stages = short.BACKWARD
    backward = {**same, "M": 256, "N": n, "T": 16}
    assert "wgmma" in compiled_for_hopper(short._backward, backward, warps, stages)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", [*SHORT, (256, 12, 197, 197, 64)])
def test_on_a_card_it_is_the_definition(case, form, dtype) -> None:
    bound = 1.5e-2 if dtype == torch.bfloat16 else 2e-3
    # Where a gradient cancels (few keys, rows of length 1), half precision knows no better.
    plain = plain_short_errors(case, form, dtype, "cuda")
    for ours, theirs in zip(short_errors(case, form, dtype, "cuda"), plain, strict=True):
        assert ours < max(bound, 1.5 * theirs)
