from __future__ import annotations

import pytest
import torch
from reference import RUNNING, running_errors


@pytest.mark.parametrize("case", RUNNING)
def test_interpreted_it_is_the_definition(interpreted, case) -> None:
    assert max(interpreted[f"running {case}"]) < 2e-5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", [*RUNNING, (2, 12, 1024, 64), (1, 2, 5000, 32)])
def test_on_a_card_it_is_the_definition(case, dtype) -> None:
    bound = 1.5e-2 if dtype == torch.bfloat16 else 2e-3
    assert max(running_errors(case, dtype, "cuda")) < bound
