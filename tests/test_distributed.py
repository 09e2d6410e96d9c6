"""DDP and FSDP2 on two CPU processes train like one process; tensor parallelism is refused."""

import copy

import pytest
import torch
import torch.distributed as dist
from cases import CASE
from processes import WORLD, together
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import attncond as ac

pytestmark = [
    pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo"),
    pytest.mark.xdist_group("distributed"),  # one pair of processes serves all tests here
]

STEPS = 6
METHODS = {
    "identity": ac.Spectral(),
    "polar": ac.Spectral.paper_svd(),
    "head": ac.Spectral(kappa=1.5, scope="head"),
}
MODELS = ("timm-vit", "timm-beit", "torch-encoder", "hf-gpt2")
HEADS = (ac.Precondition(), ac.Spectral(), ac.RemoveGap())  # all at once


def run(rank, folder):
    for key, (job, *args) in jobs().items():
        torch.save(job(*args), f"{folder}/{key}.{rank}.pt")


def jobs():
    """Everything that two processes do, by name; started once, since starting is slow."""
    found = {"mixed": (mixed,), "tensor_parallel": (tensor_parallel,)}
    for name in MODELS:
        for method in METHODS:
            for first in (False, True):
                found[f"ddp-{name}-{method}-{first}"] = (ddp, name, method, first)
                found[f"fsdp-{name}-{method}-{first}"] = (fsdp, name, method, first)
        for kind in ("ddp", "fsdp"):
            for first in (False, True):
                found[f"heads-{kind}-{name}-{first}"] = (heads, name, kind, first)
    return found


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distributed")
    together(run, folder)

    def read(key):
        return [torch.load(folder / f"{key}.{rank}.pt", weights_only=True) for rank in range(WORLD)]

    return read


def inputs(case):
    """Whatever the case feeds its model, as positional arguments, with a batch of two."""
    model, seen = case.make(), {}
    model.register_forward_pre_hook(lambda _, args: seen.update(args=args))
    case.run(model)
    return seen["args"]


def train(model, optimizer, case, rank=None):
    losses = []
    batch = inputs(case)
    for step in range(STEPS):
        part = [t + 0.1 * step if t.is_floating_point() else (t + step) % 30 for t in batch]
        if rank is not None:
            part = [t[rank : rank + 1] for t in part]
        optimizer.zero_grad()
        output = model(*part)
        loss = getattr(output, "last_hidden_state", output).square().mean()
        loss.backward()
        optimizer.step()
        if rank is not None:
            loss = loss.detach().clone()
            dist.all_reduce(loss)
            loss /= WORLD
        losses.append(loss.item())
    return losses


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def alone(name, method):
    case = CASE[name]
    model = case.make()
    handle = ac.condition(model, METHODS[method])
    optimizer = sgd(model)
    handle.attach(optimizer)
    losses = train(model, optimizer, case)
    handle.fold()
    return losses, model.state_dict()


def ddp(name, method, wrap_first):
    case = CASE[name]
    model = case.make()
    if wrap_first:
        wrapped = DistributedDataParallel(model)
        handle = ac.condition(wrapped, METHODS[method])
    else:
        handle = ac.condition(model, METHODS[method])
        wrapped = DistributedDataParallel(model)
    optimizer = sgd(wrapped)
    handle.attach(optimizer)
    losses = train(wrapped, optimizer, case, dist.get_rank())
    handle.fold()
    return losses, model.state_dict()


def shard(model):
    for child in model.modules():
        if type(child).__name__ in ("Block", "TransformerEncoderLayer", "GPT2Block"):
            fully_shard(child)
    return fully_shard(model)


def fsdp(name, method, shard_first):
    case = CASE[name]
    model = case.make()
    if shard_first:
        shard(model)
        handle = ac.condition(model, METHODS[method])
    else:
        handle = ac.condition(model, METHODS[method])
        shard(model)
    optimizer = sgd(model)
    handle.attach(optimizer)
    losses = train(model, optimizer, case, dist.get_rank())
    handle.fold()
    state = {
        k: (v.full_tensor() if isinstance(v, DTensor) else v) for k, v in model.state_dict().items()
    }
    return losses, state


@pytest.mark.parametrize("first", [False, True], ids=["condition-first", "wrap-first"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", MODELS)
def test_two_processes_train_like_one(outcome, name, method, kind, first):
    losses, state = alone(name, method)
    assert losses[0] != losses[-1]
    for other_losses, other_state in outcome(f"{kind}-{name}-{method}-{first}"):
        torch.testing.assert_close(other_losses, losses, rtol=1e-9, atol=1e-9)
        assert list(other_state) == list(state)
        for k, v in state.items():
            torch.testing.assert_close(other_state[k], v, rtol=1e-8, atol=1e-9)


def heads(name, kind, wrap_first):
    """Train with every method on: alone, or as one of the processes of DDP or FSDP2."""
    case = CASE[name]
    model = case.make()
    wrap = {"alone": lambda m: m, "ddp": DistributedDataParallel, "fsdp": shard}[kind]
    wrapped = wrap(model) if wrap_first else model
    handles = [ac.condition(wrapped, method) for method in HEADS]
    wrapped = wrapped if wrap_first else wrap(model)
    losses = train(wrapped, sgd(wrapped), case, None if kind == "alone" else dist.get_rank())
    state = {
        k: (v.full_tensor() if isinstance(v, DTensor) else v) for k, v in model.state_dict().items()
    }
    for handle in handles:
        handle.remove()
    return losses, state, [key for key in model.state_dict() if "attncond" in key]


@pytest.mark.parametrize("first", [False, True], ids=["condition-first", "wrap-first"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", MODELS)
def test_two_processes_train_conditioned_heads_like_one(outcome, name, kind, first):
    losses, state, _ = heads(name, "alone", False)
    assert losses[0] != losses[-1]
    for other_losses, other_state, left in outcome(f"heads-{kind}-{name}-{first}"):
        torch.testing.assert_close(other_losses, losses, rtol=1e-9, atol=1e-9)
        assert set(other_state) == set(state)
        assert any(key.endswith("attncond_remove_gap") for key in state)
        for k, v in state.items():
            torch.testing.assert_close(other_state[k], v, rtol=1e-8, atol=1e-9)
        assert not left


def mixed():
    case = CASE["timm-vit"]
    model = case.make(dtype=torch.float32)
    copied = copy.deepcopy(model)
    handle = ac.condition(model, ac.Spectral())
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    output = model(*[t.float() for t in inputs(case)])
    ac.condition(copied, ac.Spectral())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = copied(*[t.float() for t in inputs(case)])
    rows = handle.certificates()
    return (
        (output.float() - expected.float()).abs().max().item(),
        str(output.dtype),
        max(r.kappa for r in rows),
    )


def test_fsdp_mixed_precision(outcome):
    for difference, dtype, kappa in outcome("mixed"):
        assert dtype == "torch.bfloat16"
        assert difference < 0.1
        assert kappa <= 2


def tensor_parallel():
    case = CASE["timm-vit"]
    mesh = init_device_mesh("cpu", (WORLD,))
    plan = {"blocks.0.attn.qkv": ColwiseParallel(), "blocks.1.attn.qkv": ColwiseParallel()}
    said = []
    model = parallelize_module(case.make(), mesh, plan)
    classes = [type(m) for m in model.modules()]
    try:
        ac.condition(model, ac.Spectral())
    except ac.ConditioningError as error:
        said.append(str(error))
    assert [type(m) for m in model.modules()] == classes
    model = case.make()
    ac.condition(model, ac.Spectral())
    try:
        case.run(parallelize_module(model, mesh, plan))
    except ac.ConditioningError as error:
        said.append(str(error))
    return said


def test_tensor_parallel_weights_are_refused(outcome):
    for before, after in outcome("tensor_parallel"):
        assert "blocks.0.attn.qkv.weight is split by tensor parallelism" in before
        assert "tensor parallelism is not supported" in after
