"""The bytes in which the place of λ is stored, and checkpoints that are older than they."""

import pytest
import torch
from torch import nn

import attncond as ac
from attncond.diagonal import decode, encode, with_code


def test_columns_are_coded_and_decoded():
    columns = torch.cat([torch.arange(-1, 5000), torch.tensor([16**5 - 2])])
    code = encode(columns)
    assert code.dtype == torch.uint8
    for off in (-8, 0, 7):
        assert torch.equal(decode(code + off), columns)


def test_only_plain_columns_get_a_code():
    columns = torch.tensor([0, 1, -1])
    code = with_code("attncond_weight_diagonal", columns)
    assert torch.equal(decode(code), columns)
    assert with_code("attncond_weight_diagonal", code) is code
    assert with_code("attncond_weight_scale", columns) is columns


@pytest.mark.parametrize("decay", [0.9, 0.9999, 0.99999])
def test_averaging_buffers_keeps_the_diagonal(decay):
    model = nn.MultiheadAttention(96, 4)
    ac.condition(model, ac.Spectral())
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(decay), use_buffers=True
    )
    for _ in range(50):
        average.update_parameters(model)
    torch.testing.assert_close(average.module.in_proj_weight, model.in_proj_weight)


def test_a_checkpoint_with_plain_columns_still_loads():
    model, other = nn.MultiheadAttention(8, 2), nn.MultiheadAttention(8, 2)
    for each in (model, other):
        ac.condition(each, ac.Spectral())
    state = model.state_dict()
    key = "attncond_in_proj_weight_diagonal"
    other.load_state_dict({**state, key: decode(state[key])})
    assert torch.equal(other.in_proj_weight, model.in_proj_weight)
