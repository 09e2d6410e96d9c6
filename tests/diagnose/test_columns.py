"""The columns against what diagnoses measure."""

import math

import pytest
import timm
import torch
from cases import CASES

import attncond as ac
from attncond.diagnose.columns import COLUMNS, IDENTITY, TEXT

OF_TOKENS = {"tokens", "token_stable_rank", "token_residue", "token_rms"}
BOUNDS = {"jacobian_paper_bound", "jacobian_certificate"}


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_every_column_is_measured_and_nothing_else(case):
    report = ac.diagnose(case.make(), case.run, loss="sum")
    for row in report.rows:
        assert set(row.values) <= set(COLUMNS) - set(IDENTITY)
        missing = set(COLUMNS) - set(IDENTITY) - set(row.values)
        allowed = set() if row.head is None else set(OF_TOKENS)
        if row.values["jacobian_path"] != "closed form":
            allowed |= BOUNDS
        roles = {r for r in "qkv" if f"{r}_kappa" not in row.values}
        assert not roles
        assert missing <= allowed, (case.name, row.key, missing)
        for name, value in row.values.items():
            assert isinstance(value, str) == (name in TEXT)
            assert isinstance(value, str) or value is None or not math.isnan(value)


def test_meanings_are_sentences_of_their_own():
    assert all(text and not text.endswith(".") for text in COLUMNS.values())
    assert len(set(COLUMNS.values())) == len(COLUMNS)
    assert set(IDENTITY) < set(COLUMNS)
    assert set(COLUMNS) > TEXT


@pytest.mark.parametrize("methods", [[], ["gap"], ["precondition"], ["gap", "precondition"]])
@pytest.mark.parametrize("fused", [True, False])
def test_outputs_are_those_that_leave_the_head(methods, fused):
    """Caught where the module reshapes them, just before its output projection."""
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=64, depth=2, embed_dim=24, num_heads=3
    ).double()
    for block in model.blocks:
        block.attn.fused_attn = fused
    for name in methods:
        ac.condition(model, ac.RemoveGap() if name == "gap" else ac.Precondition())
    seen = []
    hooks = [
        b.attn.proj.register_forward_pre_hook(lambda _, a: seen.append(a[0].detach()))
        for b in model.blocks
    ]
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    with torch.no_grad():
        model.eval()(x)
    for hook in hooks:
        hook.remove()
    report = ac.diagnose(model, x, jacobian=False)
    for row in report.rows:
        if row.head is None:
            continue
        sigma = torch.linalg.svdvals(seen[row.layer].unflatten(-1, (3, 8))[:, :, row.head])
        want = (sigma[:, 0] / sigma[:, -1]).mean()
        assert row.values["output_kappa"] == pytest.approx(float(want), rel=1e-6)
        assert row.values["output_sigma_max"] == pytest.approx(float(sigma[:, 0].mean()))
        assert row.values["output_sigma_min"] == pytest.approx(float(sigma[:, -1].mean()), rel=1e-6)
