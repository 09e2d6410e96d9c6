"""The invariants of condition() and its handle, over the table of cases and beyond it."""

import copy
import itertools
import json
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from cases import CASE, CASES, METHODS, same_state, stock_state, train
from torch import Tensor, nn

import attncond as ac

pairs = pytest.mark.parametrize(
    ("case", "method"),
    [pytest.param(c, m, id=f"{c.name}/{name}") for c in CASES for name, m in METHODS.items()],
)
vit = CASE["timm-vit"]


def reference(matrix: Tensor, method: ac.Spectral) -> Tensor:
    """s·(W + C) of one matrix, from the definitions and a float64 SVD."""
    u, sigma, vh = torch.linalg.svd(matrix, full_matrices=False)
    if method.correction == "polar":
        shifted = matrix + sigma[0] * (u @ vh)
    else:
        kappa = method.kappa or 2.0
        lam = method.lam or float(sigma[0]) * (kappa + 1) / (kappa - 1)
        shifted = matrix + lam * torch.eye(*matrix.shape, dtype=matrix.dtype)
    if not method.preserve_norm:
        return method.gain * shifted
    return method.gain * shifted * (sigma[0] / torch.linalg.matrix_norm(shifted, ord=2))


def modify_by_hand(model: nn.Module, method: ac.Spectral) -> None:
    done = set()
    for site in ac.inspect(model):
        for p in site.projections:
            key = (id(p.owner), p.name, p.role)
            if p.role not in method.roles or key in done:
                continue
            done.add(key)
            weight = dict(p.owner.named_parameters())[p.name].detach()
            rows = weight.T if p.axis == 1 else weight
            whole = [p.rows.flatten()] if method.scope == "projection" else list(p.rows)
            for index in whole:
                rows[index] = reference(rows[index], method)


@pairs
def test_invariants(case, method):
    model = case.make()
    by_hand = copy.deepcopy(model)
    state, parameters = stock_state(model), dict(model.named_parameters())
    classes = [type(m) for m in model.modules()]
    stock = case.run(model).detach()

    handle = ac.condition(model, method)

    after = dict(model.named_parameters())
    assert list(after) == list(parameters)
    assert all(after[k] is parameters[k] for k in parameters)
    added = set(model.state_dict()) - set(state)
    assert added
    assert all(".attncond_" in key or key.startswith("attncond_") for key in added)
    assert all(torch.equal(model.state_dict()[k], v) for k, v in state.items())

    conditioned = case.run(model).detach()
    assert not torch.allclose(conditioned, stock)
    modify_by_hand(by_hand, method)
    torch.testing.assert_close(conditioned, case.run(by_hand), rtol=1e-9, atol=1e-9)

    if method.target is not None:
        for row in handle.certificates():
            assert row.kappa <= row.bound * (1 + 1e-12)
            assert row.bound <= method.target * (1 + 1e-9)

    with pytest.raises(ac.AlreadyConditionedError, match="remove"):
        ac.condition(model, ac.Spectral())

    copied = copy.deepcopy(model)
    handle.fold()
    torch.testing.assert_close(case.run(model), conditioned, rtol=1e-12, atol=1e-12)
    assert list(model.state_dict()) == list(state)
    assert [type(m) for m in model.modules()] == classes
    assert all(p is parameters[k] for k, p in model.named_parameters())
    case.make(seed=1).load_state_dict(model.state_dict(), strict=True)
    with pytest.raises(ac.ConditioningError, match="folded"):
        handle.fold()

    other = ac.handle(copied)
    other.remove()
    assert same_state(copied, state)
    assert torch.equal(case.run(copied), stock)
    with pytest.raises(ac.ConditioningError, match="removed"):
        other.remove()


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_every_site_is_affected_and_trained(case):
    model = case.make()
    raw = {id(p.raw): p.raw.detach().clone() for s in ac.inspect(model) for p in s.projections}
    ac.condition(model, ac.Spectral())
    for site in ac.inspect(model):
        for p in site.projections:
            effective = getattr(p.owner, p.name).detach()
            assert not torch.allclose(p.matrix(effective), p.matrix(raw[id(p.raw)]))
    case.run(model).square().sum().backward()
    for site in ac.inspect(model):
        for p in site.projections:
            assert p.raw.grad is not None
            assert p.matrix(p.raw.grad).abs().sum() > 0


def test_by_hand_without_any_of_our_views():
    model = vit.make()
    copied = copy.deepcopy(model)
    ac.condition(model, ac.Spectral(lam=1.5, preserve_norm=False))
    with torch.no_grad():
        for block in copied.blocks:
            q, k, v = block.attn.qkv.weight.chunk(3)
            for part in (q, k, v):
                part += 1.5 * torch.eye(24, dtype=part.dtype)
    torch.testing.assert_close(vit.run(model), vit.run(copied), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["timm-vit", "hf-gpt2", "torch-cross"])
@pytest.mark.parametrize("method", ["default", "paper-svd"])
def test_low_precision(name, dtype, method):
    case = CASE[name]
    model = case.make(dtype=dtype)
    handle = ac.condition(model, METHODS[method])
    output = case.run(model)
    assert output.dtype == dtype
    assert torch.isfinite(output).all()
    slack = {torch.float32: 1e-3, torch.bfloat16: 0.02, torch.float16: 3e-3}[dtype]
    assert max(row.kappa for row in handle.certificates()) <= 2 * (1 + slack)
    assert all(
        b.dtype in (torch.float32, torch.int64, torch.uint8)
        for k, b in model.named_buffers()
        if "attncond_" in k
    )
    handle.fold()
    torch.testing.assert_close(case.run(model), output)


def test_casting_a_conditioned_model_keeps_its_numbers_in_float32():
    model = vit.make(dtype=torch.float32)
    ac.condition(model, ac.Spectral())
    before = {k: b.clone() for k, b in model.named_buffers() if "attncond_" in k}
    model.bfloat16()
    assert model.blocks[0].attn.qkv.get_parameter("weight").dtype == torch.bfloat16
    assert model.blocks[0].attn.qkv.weight.dtype == torch.bfloat16
    for k, b in before.items():
        assert torch.equal(model.get_buffer(k), b)
    model.double()
    assert model.blocks[0].attn.qkv.attncond_weight_scale.dtype == torch.float64


def test_autocast_runs_and_trains():
    model = vit.make(dtype=torch.float32)
    ac.condition(model, ac.Spectral())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = vit.run(model).float().square().mean()
    loss.backward()
    assert torch.isfinite(model.blocks[0].attn.qkv.get_parameter("weight").grad).all()


def test_training_with_a_fixed_correction_equals_training_the_folded_weights():
    """Without weight decay SGD cannot tell C in the forward pass from C in the start (s = 1)."""
    model = vit.make()
    handle = ac.condition(model, ac.Spectral(lam=0.5, preserve_norm=False))
    folded = copy.deepcopy(model)
    ac.handle(folded).fold()
    for m in (model, folded):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9)
        for _ in range(20):
            optimizer.zero_grad()
            vit.run(m).square().mean().backward()
            optimizer.step()
    handle.fold()
    for p, q in zip(model.parameters(), folded.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "method",
    [ac.Spectral(), ac.Spectral.paper_svd(), ac.Spectral(correction="polar", refresh_every=3)],
)
def test_a_checkpoint_resumes_bit_for_bit_and_is_refused_by_a_stock_model(method, tmp_path):
    from safetensors.torch import load_file, save_file

    def start():
        model = vit.make(dtype=torch.float32)
        handle = ac.condition(model, method)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        handle.attach(optimizer)
        return model, handle, optimizer

    generator = torch.Generator().manual_seed(3)
    model, handle, optimizer = start()
    train(model, handle, optimizer, 4, generator)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(handle.config))
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    rng = generator.get_state()
    straight = train(model, handle, optimizer, 5, generator)

    resumed = vit.make(dtype=torch.float32, seed=5)
    handle = ac.condition(resumed, json.loads((tmp_path / "config.json").read_text()))
    assert handle.method == method
    optimizer = torch.optim.AdamW(resumed.parameters(), lr=1e-2)
    handle.attach(optimizer)
    resumed.load_state_dict(load_file(tmp_path / "model.safetensors"))
    optimizer.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    generator.set_state(rng)
    assert train(resumed, handle, optimizer, 5, generator) == straight
    assert same_state(resumed, model.state_dict())

    with pytest.raises(RuntimeError, match="Unexpected key"):
        vit.make(dtype=torch.float32).load_state_dict(load_file(tmp_path / "model.safetensors"))
    with pytest.raises(RuntimeError, match="Missing key"):
        resumed.load_state_dict(vit.make(dtype=torch.float32).state_dict())


def test_shared_modules_and_tied_parameters_are_conditioned_once():
    attention = nn.MultiheadAttention(16, 2, batch_first=True)
    model = nn.ModuleList([attention, attention, nn.MultiheadAttention(16, 2, batch_first=True)])
    model[2].in_proj_weight = attention.in_proj_weight
    x = torch.randn(1, 4, 16)
    raw = attention.in_proj_weight.detach().clone()
    handle = ac.condition(model, ac.Spectral())
    conditioned = [m(x, x, x)[0] for m in model]
    expected = torch.cat([reference(w.double(), ac.Spectral()) for w in raw.chunk(3)]).float()
    torch.testing.assert_close(attention.in_proj_weight.detach().as_subclass(Tensor), expected)
    handle.fold()
    assert model[2].in_proj_weight is attention.in_proj_weight
    torch.testing.assert_close(attention.in_proj_weight.detach(), expected)
    for m, y in zip(model, conditioned, strict=True):
        torch.testing.assert_close(m(x, x, x)[0], y)


@contextmanager
def interrupted(name, error=KeyboardInterrupt):
    """Something goes wrong in the second call of a function that conditioning calls."""
    calls, real = itertools.count(1), getattr(ac.conditioning, name)

    def call(*args):
        if next(calls) == 2:
            raise error("interrupted")
        real(*args)

    with (
        mock.patch.object(ac.conditioning, name, call),
        pytest.raises(error, match="interrupted"),
    ):
        yield


def test_an_interrupted_call_leaves_the_model_untouched():
    model = vit.make()
    state = stock_state(model)
    with interrupted("install"):
        ac.condition(model, ac.Spectral())
    assert same_state(model, state)

    handle = ac.condition(model, ac.Spectral())
    conditioned, output = stock_state(model), vit.run(model)
    with interrupted("uninstall"):
        handle.fold()
    assert same_state(model, conditioned)
    assert torch.equal(vit.run(model), output)
    handle.fold()
    torch.testing.assert_close(vit.run(model), output)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_an_interrupted_calibration_changes_nothing(device):
    with torch.device(device):
        model = vit.build()
    handle = ac.condition(model, ac.Spectral())
    if device == "meta":
        model.to_empty(device="cpu")
    model.load_state_dict(vit.make(seed=3).state_dict(), strict=False)
    before = dict(model.named_buffers())
    with interrupted("install"):
        handle.calibrate()
    assert all(value is before[name] for name, value in model.named_buffers())
    if device == "meta":  # none of them has a λ to run with, the first included
        with pytest.raises(ac.ConditioningError, match="calibrate"):
            model.blocks[0].attn.qkv(torch.zeros(1, 24))
    handle.calibrate()
    assert max(row.kappa for row in handle.certificates()) <= 2


@pytest.mark.parametrize("method", [ac.Spectral, "spectral", None])
def test_a_method_is_an_instance(method):
    with pytest.raises(ac.ConditioningError, match=r"ac\.Spectral\(\)"):
        ac.condition(vit.make(), method)


@pytest.mark.parametrize(
    "config", [{}, {"method": "Other", "parameters": {}}, {"method": "Spectral"}]
)
def test_a_bad_config_is_refused(config):
    with pytest.raises(ac.ConditioningError, match="config"):
        ac.condition(vit.make(), config)
    newer = {"method": "Spectral", "parameters": {"colour": "red"}}
    with pytest.raises(ac.ConditioningError, match="colour"):
        ac.condition(vit.make(), newer)


def test_handles_of_one_model_notice_each_other():
    model = vit.make()
    with pytest.raises(ac.ConditioningError, match="not conditioned"):
        ac.handle(model)
    first = ac.condition(model, ac.Spectral())
    second = ac.handle(model)
    assert second.config == first.config
    second.remove()
    with pytest.raises(ac.ConditioningError, match="overtaken"):
        first.fold()
    assert "overtaken" in repr(first)


def test_parts_conditioned_differently_have_handles_of_their_own():
    model = nn.ModuleList([nn.MultiheadAttention(16, 2) for _ in range(2)])
    ac.condition(model[0], ac.Spectral())
    ac.condition(model[1], ac.Spectral.paper_svd())
    with pytest.raises(ac.ConditioningError, match="each part"):
        ac.handle(model)
    assert ac.handle(model[1]).method == ac.Spectral.paper_svd()
    with pytest.raises(ac.AlreadyConditionedError, match=r"^0 and 1 more"):
        ac.condition(model, ac.Spectral())


@pytest.mark.parametrize("method", [ac.Spectral(), ac.RemoveGap()], ids=["spectral", "gap"])
def test_one_attention_twice_is_told_of_one(method):
    model = nn.MultiheadAttention(16, 2)
    ac.condition(model, method)
    name = type(method).__name__
    said = rf"^the model carries {name} already\. ac\.handle\(model, ac\.{name}\) gives"
    with pytest.raises(ac.AlreadyConditionedError, match=said):
        ac.condition(model, method)


def test_inference_mode_leaves_a_model_that_can_be_trained():
    model = vit.make(dtype=torch.float32)
    with torch.inference_mode():
        handle = ac.condition(model, ac.Spectral())
        handle.calibrate()
    vit.run(model).square().sum().backward()
    assert model.blocks[0].attn.qkv.get_parameter("weight").grad.abs().sum() > 0


def test_calibrate_and_refresh_refuse_what_condition_refuses():
    model = vit.make(dtype=torch.float32)
    handle = ac.condition(model, ac.Spectral.paper_svd())
    state = stock_state(model)
    raw = model.blocks[1].attn.qkv.get_parameter("weight")
    saved = raw.detach().clone()
    with torch.no_grad():
        raw.zero_()
    with pytest.raises(ac.ConditioningError, match="zeros"):
        handle.calibrate()
    with pytest.raises(ac.ConditioningError, match="zero matrix"):
        handle.refresh()
    with torch.no_grad():
        raw.fill_(float("nan"))
    with pytest.raises(ac.ConditioningError, match="NaN"):
        handle.calibrate()
    with pytest.raises(ac.ConditioningError, match="NaN"):
        handle.certificates()
    with torch.no_grad():
        raw.copy_(saved)
    assert list(model.state_dict()) == list(state)


def test_an_uncalibrated_model_is_neither_folded_nor_certified():
    with torch.device("meta"):
        model = vit.build()
    handle = ac.condition(model, ac.Spectral())
    model.to_empty(device="cpu")
    model.load_state_dict(vit.make(dtype=torch.float32).state_dict(), strict=False)
    for act in (handle.fold, handle.certificates):
        with pytest.raises(ac.ConditioningError, match="calibrate"):
            act()


def test_a_checkpoint_of_another_scope_is_not_certified_for_this_one():
    donor, model = vit.make(), vit.make()
    ac.condition(donor, ac.Spectral(scope="head"))
    handle = ac.condition(model, ac.Spectral())
    model.load_state_dict(donor.state_dict())
    assert all(row.bound == float("inf") for row in handle.certificates())


@pytest.mark.parametrize(
    ("method", "dtype"),
    [
        (ac.Spectral(lam=1e39, preserve_norm=False), torch.float32),
        (ac.Spectral(lam=1e39), torch.float32),
        (ac.Spectral(lam=1e5, preserve_norm=False), torch.float16),
    ],
)
def test_a_correction_beyond_the_dtype_is_refused(method, dtype):
    model = vit.make(dtype=dtype)
    state = stock_state(model)
    with pytest.raises(ac.ConditioningError, match="overflows"):
        ac.condition(model, method)
    assert same_state(model, state)


@pytest.mark.parametrize("correction", ["identity", "polar"])
@pytest.mark.parametrize(("gain", "dtype"), [(1e-300, torch.float32), (1e-12, torch.float16)])
def test_a_gain_that_leaves_nothing_of_the_weights_is_refused(correction, gain, dtype):
    model = vit.make(dtype=dtype)
    state = stock_state(model)
    with pytest.raises(ac.ConditioningError, match="gain is too small"):
        ac.condition(model, ac.Spectral(correction=correction, gain=gain))
    assert same_state(model, state)


@pytest.mark.parametrize("correction", ["identity", "polar"])
def test_weights_whose_norm_overflows_are_not_calibrated(correction):
    model = nn.MultiheadAttention(8, 2)
    handle = ac.condition(model, ac.Spectral(correction=correction))
    with torch.no_grad():
        model.get_parameter("in_proj_weight").fill_(3e38)
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(ac.ConditioningError, match="of in_proj_weight overflows"):
        handle.calibrate()
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())


# Several methods on one model ---------------------------------------------------------------------

GAP, PRE = ac.RemoveGap(), ac.Precondition(eps=1e-5)
ALL = (ac.Spectral(kappa=1.5), GAP, PRE)
composed = pytest.mark.parametrize(
    "case",
    [CASE[n] for n in ("timm-vit", "torch-cross", "hf-gpt2", "hf-bloom")],
    ids=lambda c: c.name,
)


def with_methods(case, methods):
    model = case.make()
    for method in methods:
        ac.condition(model, method)
    return model


@composed
def test_methods_compose_in_any_order_of_the_calls(case):
    wanted = case.run(with_methods(case, ALL))
    keys = set(with_methods(case, ALL).state_dict())
    for order in itertools.permutations(ALL):
        model = with_methods(case, order)
        assert torch.equal(case.run(model), wanted)
        assert set(model.state_dict()) == keys
    for left_out in range(3):
        fewer = with_methods(case, [m for i, m in enumerate(ALL) if i != left_out])
        assert not torch.allclose(case.run(fewer), wanted)


@composed
def test_each_handle_removes_its_own_part(case):
    stock = case.run(case.make())
    for order in itertools.permutations(ALL):
        model = case.make()
        state, classes = stock_state(model), [type(m) for m in model.modules()]
        handles = {method: ac.condition(model, method) for method in ALL}
        left = list(ALL)
        for method in order:
            handles[method].remove()
            left.remove(method)
            assert torch.equal(case.run(model), case.run(with_methods(case, left)))
            with pytest.raises(ac.ConditioningError, match="removed"):
                handles[method].remove()
        assert same_state(model, state)
        assert [type(m) for m in model.modules()] == classes
        assert torch.equal(case.run(model), stock)


@composed
def test_the_spectral_part_is_folded_and_the_others_stay(case):
    model = case.make()
    handles = [ac.condition(model, method) for method in (PRE, ac.Spectral(), GAP)]
    wanted, state = case.run(model), stock_state(model)
    for handle in (handles[0], handles[2]):
        with pytest.raises(ac.NotFoldableError, match=type(handle.method).__name__):
            handle.fold()
        assert same_state(model, state)
    handles[1].fold()
    torch.testing.assert_close(case.run(model), wanted, rtol=1e-10, atol=1e-10)
    marks = {key.rpartition(".")[2] for key in model.state_dict() if "attncond" in key}
    assert marks == {"attncond_remove_gap", "attncond_precondition"}
    for handle in (handles[0], handles[2]):
        handle.remove()
    folded = case.make()
    ac.condition(folded, ac.Spectral()).fold()
    assert torch.equal(case.run(model), case.run(folded))


@pytest.mark.parametrize("method", [GAP, PRE], ids=["gap", "precondition"])
def test_the_same_method_twice(method):
    model = vit.make()
    ac.condition(model, ac.Spectral())
    handle = ac.condition(model, method)
    wanted, state = vit.run(model), stock_state(model)
    for again in (method, ac.Precondition() if method is PRE else method):
        with pytest.raises(
            ac.AlreadyConditionedError, match=rf"1 more carry {type(method).__name__}"
        ):
            ac.condition(model, again)
    with pytest.raises(ac.AlreadyConditionedError, match=r"blocks.0.attn and 1 more"):
        ac.condition(model, method)
    assert same_state(model, state)
    assert torch.equal(vit.run(model), wanted)
    handle.remove()
    ac.condition(model, method)
    assert torch.equal(vit.run(model), wanted)


def test_a_handle_is_asked_for_by_method():
    with pytest.raises(TypeError, match=r"handle needs a torch\.nn\.Module, not dict"):
        ac.handle({})
    model = with_methods(vit, (PRE, ac.Spectral()))
    with pytest.raises(ac.ConditioningError, match=r"carries Spectral and Precondition.*say which"):
        ac.handle(model)
    with pytest.raises(
        ac.ConditioningError, match="carries Spectral and Precondition, not RemoveGap"
    ):
        ac.handle(model, ac.RemoveGap)
    assert ac.handle(model, ac.Precondition).method == PRE
    assert ac.handle(model, ac.Spectral).method == ac.Spectral()
    ac.handle(model, ac.Spectral).remove()
    handle = ac.handle(model)
    assert handle.method == PRE
    assert "Precondition" in repr(handle)
    assert "2 modules" in repr(handle)
    other = ac.handle(model, ac.Precondition)
    other.remove()
    with pytest.raises(ac.ConditioningError, match="overtaken"):
        handle.remove()


@pytest.mark.parametrize("method", [GAP, PRE], ids=repr)
def test_a_handle_takes_off_what_no_adapter_reads_any_more(method):
    model, stock = vit.make(), vit.make()
    ac.condition(model, method)
    for each in (model, stock):  # as quantisation and adapters exchange layers
        each.blocks[0].attn.qkv = nn.Sequential(each.blocks[0].attn.qkv)
    assert len(ac.inspect(model).sites) == 1
    handle = ac.handle(model)
    assert "2 modules" in repr(handle)
    handle.remove()
    assert type(model.blocks[0].attn) is type(stock.blocks[0].attn)
    assert model.state_dict().keys() == stock.state_dict().keys()
    assert torch.equal(vit.run(model), vit.run(stock))


@pytest.mark.parametrize("method", [ac.Spectral(), GAP], ids=["Spectral", "RemoveGap"])
@pytest.mark.parametrize("how", ["exchanged", "released"])
def test_a_handle_of_which_a_part_has_gone_says_how_to_get_the_rest(how, method):
    model, stock = vit.make(), vit.make()
    handle = ac.condition(model, method)
    if how == "exchanged":
        model.blocks[1] = copy.deepcopy(stock.blocks[1])
    else:
        ac.handle(model.blocks[1]).remove()
    for call in (handle.remove, handle.fold):
        with pytest.raises(ac.ConditioningError, match=r"1 of the 2 places .* ac\.handle\(model"):
            call()
    ac.handle(model).remove()
    assert torch.equal(vit.run(model), vit.run(stock))
    with pytest.raises(ac.ConditioningError, match=r"overtaken.* stock model again"):
        handle.remove()


def test_parts_with_other_lengths_have_handles_of_their_own():
    model = vit.make()
    ac.condition(model.blocks[0], ac.Precondition(eps=1e-3))
    ac.condition(model.blocks[1], ac.Precondition())
    ac.condition(model.blocks[1], GAP)
    with pytest.raises(ac.ConditioningError, match="each part"):
        ac.handle(model, ac.Precondition)
    assert ac.handle(model.blocks[0]).method.eps == 1e-3
    ac.handle(model, ac.RemoveGap).remove()
    with pytest.raises(ac.AlreadyConditionedError):
        ac.condition(model, PRE)


@pytest.mark.parametrize("method", [GAP, ac.Precondition(eps=1e-3, detach=True)], ids=repr)
def test_a_config_rebuilds_a_method_of_heads(method):
    model, twin = vit.make(), vit.make()
    handle = ac.condition(model, method)
    config = json.loads(json.dumps(handle.config))
    assert ac.condition(twin, config).method == method
    assert torch.equal(vit.run(twin), vit.run(model))
    assert handle.certificates() == []
    assert handle.attach(torch.optim.SGD(model.parameters(), lr=0.1)) is handle
    handle.calibrate()
    handle.refresh()
    assert torch.equal(vit.run(twin), vit.run(model))
    with pytest.raises(ac.ConditioningError, match="does not fit"):
        ac.condition(vit.make(), {"method": type(method).__name__, "parameters": {"colour": 1}})


@pytest.mark.parametrize("before", [(), (ac.Spectral(),), (PRE,), (ac.Spectral(), PRE)], ids=str)
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_call_for_heads_leaves_the_model_untouched(before, error):
    for name in ("timm-vit", "torch-encoder"):
        case = CASE[name]
        model = with_methods(case, before)
        state, wanted = stock_state(model), case.run(model)
        classes = [type(m) for m in model.modules()]
        members = [set(m.__dict__) for m in model.modules()]
        hooks = [dict(m._forward_pre_hooks) for m in model.modules()]
        with interrupted("recast", error):
            ac.condition(model, GAP)
        assert same_state(model, state)
        assert [type(m) for m in model.modules()] == classes
        assert [set(m.__dict__) for m in model.modules()] == members
        assert [dict(m._forward_pre_hooks) for m in model.modules()] == hooks
        assert torch.equal(case.run(model), wanted)
        ac.condition(model, GAP)


def test_a_module_at_two_places_is_conditioned_once():
    attention = nn.MultiheadAttention(8, 2, batch_first=True).double().eval()
    model = nn.ModuleDict({"first": attention, "second": attention})
    x = torch.randn(2, 4, 8, dtype=torch.float64)
    stock = attention(x, x, x)[0]
    handle = ac.condition(model, GAP)
    conditioned = model["second"](x, x, x)[0]
    assert torch.equal(model["first"](x, x, x)[0], conditioned)
    assert not torch.allclose(conditioned, stock)
    handle.remove()
    assert torch.equal(model["second"](x, x, x)[0], stock)


def test_training_all_of_it_moves_every_parameter():
    model = with_methods(vit, ALL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    before = stock_state(model)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = vit.run(model).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert {n for n, _ in model.named_parameters() if "attn" in n} <= moved
