"""What a Monitor may measure, and in which process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from attncond.errors import ConditioningError, DiagnosisError, UnsupportedAttentionError
from attncond.monitor.checks import chosen, is_first_process, replaced, sharded


def encoder():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3)


def test_attentions_keep_their_numbers():
    model = encoder()
    assert [n for n, _ in chosen(model, None)] == [0, 1, 2]
    found = chosen(model, [2, "*.0.*"])
    assert [(n, site.path) for n, site in found] == [
        (0, "layers.0.self_attn"),
        (2, "layers.2.self_attn"),
    ]
    with pytest.raises(DiagnosisError, match="none of the model's 3"):
        chosen(model, [5])


def test_a_model_without_attention_is_refused_by_its_class():
    with pytest.raises(UnsupportedAttentionError, match="Linear has no attention to monitor"):
        chosen(nn.Linear(2, 2), None)


def test_a_module_that_is_exchanged_is_noticed():
    model = encoder()
    sites = chosen(model, [0, 1])
    assert not replaced(model, sites)
    model.layers[2].self_attn = nn.MultiheadAttention(8, 2)
    model.layers[0].linear1 = nn.Linear(8, 16)
    assert not replaced(model, sites)  # neither is measured
    model.layers[1].self_attn = nn.MultiheadAttention(8, 2)
    assert replaced(model, sites)
    assert not replaced(model, chosen(model, [0, 1]))


class Own(nn.Module):
    """A user's attention, which nothing but an adapter can read."""

    def __init__(self):
        super().__init__()
        self.heads, self.qkv = 2, nn.Linear(8, 24)


def test_an_attention_that_cannot_be_read_is_told():
    with pytest.raises(UnsupportedAttentionError) as caught:
        chosen(nn.ModuleDict({"odd": Own()}), None)
    first, _, table = str(caught.value).partition("\n\n")
    assert first == "ModuleDict has no attention to monitor."
    assert "odd" in table
    assert "Own" in table


def test_weights_without_numbers_are_refused():
    with pytest.raises(DiagnosisError, match="meta device and holds no numbers"):
        sharded(encoder().to("meta"), False, False)


@pytest.fixture
def split():
    """A model with a sharded weight, in the only process there is."""
    if not dist.is_gloo_available():
        pytest.skip("needs gloo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Linear(4, 4)
        mesh = init_device_mesh("cpu", (1,))
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh))
        yield model
    finally:
        dist.destroy_process_group()


def test_sharded_weights_have_to_be_gathered(split):
    assert not sharded(nn.Linear(4, 4), False, True)
    assert sharded(split, gather=True, probe=False)
    with pytest.raises(ConditioningError, match=r"sharded over processes.*gather=True"):
        sharded(split, gather=False, probe=False)
    with pytest.raises(ConditioningError, match=r"probe \(batch=\) cannot run on .* sharded"):
        sharded(split, gather=True, probe=True)


def test_the_first_process_is_known_before_they_have_met(monkeypatch):
    assert not torch.distributed.is_initialized()
    monkeypatch.delenv("RANK", raising=False)
    assert is_first_process()
    monkeypatch.setenv("RANK", "0")
    assert is_first_process()
    monkeypatch.setenv("RANK", "3")
    assert not is_first_process()


def test_processes_that_have_met_know_better_than_the_environment(split, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    assert is_first_process()
