"""Conditioned heads in whole modules and models, under everything PyTorch does to them."""

import copy
import io
import pickle
import threading
from unittest import mock

import pytest
import torch
import torch._dynamo
from attention_forms import GAP, METHODS, PRE, methods
from cases import CASE, CASES, Case, _hf, _plain, _timm, _tokens, same_state, stock_state
from naive import attention
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.utils.checkpoint import checkpoint

import attncond as ac

vit = CASE["timm-vit"]

_SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
SWIN = Case(
    "timm-swin",  # the second block's windows are shifted
    _timm(
        "swin_tiny_patch4_window7_224",
        img_size=32,
        window_size=4,
        embed_dim=12,
        depths=(2,),
        num_heads=(3,),
    ),
    _plain(2, 3, 32, 32),
)
XCIT = Case(
    "timm-xcit",
    _timm(
        "xcit_nano_12_p16_224", img_size=64, embed_dim=16, depth=1, num_heads=2, cls_attn_layers=1
    ),
    _plain(2, 3, 64, 64),
)


def _padded(model):
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    output = model(_tokens(2, 6), attention_mask=mask).last_hidden_state
    return output * mask[:, :, None]


BERT = Case("hf-bert", _hf("bert", **_SMALL, intermediate_size=32), _padded)
EVERY = [*CASES, SWIN, XCIT, BERT]
cases = pytest.mark.parametrize("case", EVERY, ids=lambda c: c.name)


def condition(model, on):
    return [ac.condition(model, method) for method in on]


def make(case, on, **kwargs):
    model = case.make(**kwargs)
    condition(model, on)
    return model


# Whole models -------------------------------------------------------------------------------------


def naive_sdpa(on):
    """scaled_dot_product_attention with conditioned heads, matrices formed in loops."""

    def sdpa(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        assert not dropout_p
        if scale is not None:
            q = q * (scale * q.shape[-1] ** 0.5)
        visible, bias = None, None
        if is_causal:
            visible = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
        elif attn_mask is not None:
            visible = attn_mask if attn_mask.dtype == torch.bool else attn_mask > -50
            bias = None if attn_mask.dtype == torch.bool else attn_mask
        return attention(q, k, v, on, visible, bias)

    return mock.patch("torch.nn.functional.scaled_dot_product_attention", sdpa)


FUSED = ("torch-encoder", "timm-vit", "timm-beit", "hf-gpt2", "hf-llama")


@methods
@pytest.mark.parametrize("case", [*(CASE[n] for n in FUSED), SWIN, BERT], ids=lambda c: c.name)
def test_a_model_with_naive_heads(case, on):
    stock, model = case.make(), case.make()
    condition(model, on)
    for module in stock.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = True  # Swin writes its attention out, the naive one is a call
    with naive_sdpa(on):
        wanted = case.run(stock)
        wanted.square().sum().backward()
    output = case.run(model)
    torch.testing.assert_close(output, wanted, rtol=1e-9, atol=1e-9)
    with torch.no_grad():
        torch.testing.assert_close(case.run(model), wanted, rtol=1e-9, atol=1e-9)
    output.square().sum().backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    for name, p in stock.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(gradients[name], p.grad, rtol=1e-7, atol=1e-7)


@cases
@methods
def test_invariants(case, on):
    model = case.make()
    state, parameters = stock_state(model), dict(model.named_parameters())
    modules = list(model.modules())
    classes = [type(m) for m in modules]
    members = [set(m.__dict__) for m in modules]
    hooks = [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in modules]
    stock = case.run(model).detach()

    handles = condition(model, on)

    after = dict(model.named_parameters())
    assert list(after) == list(parameters)
    assert all(after[k] is parameters[k] for k in parameters)
    added = set(model.state_dict()) - set(state)
    sites = {id(s.module) for s in ac.inspect(model)}
    assert len(added) == len(sites) * len(on)
    assert all("attncond_" in key for key in added)

    conditioned = case.run(model)
    assert torch.isfinite(conditioned).all()
    assert not torch.allclose(conditioned, stock)
    conditioned.square().sum().backward()
    for p in model.parameters():
        assert p.grad is None or torch.isfinite(p.grad).all()
    conditioned = conditioned.detach()

    with pytest.raises(RuntimeError, match="attncond_"):
        case.make().load_state_dict(model.state_dict(), strict=True)
    with pytest.raises(RuntimeError, match="attncond_"):
        model.load_state_dict(state, strict=True)
    other = make(case, on, seed=1)
    other.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(case.run(other), conditioned)

    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    twins = (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(file, weights_only=False),
    )
    for twin in twins:
        assert torch.equal(case.run(twin), conditioned)
        for method in on:
            assert ac.handle(twin, type(method)).method == method
            ac.handle(twin, type(method)).remove()
        assert torch.equal(case.run(twin), stock)
        assert same_state(twin, state)
    assert torch.equal(case.run(model), conditioned)

    for handle in handles:
        handle.remove()
    assert same_state(model, state)
    assert [type(m) for m in modules] == classes
    assert [set(m.__dict__) for m in modules] == members
    assert [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in modules] == hooks
    assert torch.equal(case.run(model), stock)
    with pytest.raises(ac.ConditioningError, match="removed"):
        handles[0].remove()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", [vit, SWIN, BERT, CASE["hf-gpt2"]], ids=lambda c: c.name)
def test_casting(case, dtype):
    model = make(case, METHODS["both"])
    wanted = case.run(model)
    model.to(dtype)
    output = case.run(model)
    assert output.dtype == dtype
    assert torch.isfinite(output).all()
    assert (output - wanted).abs().mean() < 0.1 * wanted.abs().mean()
    marks = [b for n, b in model.named_buffers() if "attncond_" in n]
    assert marks
    assert all(b.dtype == torch.uint8 and b == 1 for b in marks)
    model.to(torch.float64)
    assert torch.isfinite(case.run(model)).all()


@methods
def test_meta_models_are_conditioned_before_their_weights_come(on):
    with torch.device("meta"):
        model = vit.build()
    condition(model, on)
    donor = make(vit, on, dtype=torch.float32)
    model.to_empty(device="cpu")
    model.load_state_dict(donor.state_dict(), strict=True)
    torch.testing.assert_close(vit.run(model.eval()), vit.run(donor))


@methods
def test_autocast(on):
    model = make(vit, on, dtype=torch.float32)
    wanted = vit.run(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = vit.run(model)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), wanted, rtol=0.1, atol=0.1)
    output.float().square().sum().backward()
    for p in model.parameters():
        assert p.grad is None or torch.isfinite(p.grad).all()


@methods
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["timm-vit", "torch-cross", "hf-bloom"])
def test_gradient_checkpointing(name, reentrant, on):
    case = CASE[name]
    model = make(case, on).train()
    seen = {}
    hook = model.register_forward_pre_hook(lambda _, args: seen.update(args=args))
    case.run(model)
    hook.remove()
    (x,) = seen["args"]
    anchor = torch.zeros((), dtype=torch.float64, requires_grad=True)  # reentrant needs a leaf

    def run(x, anchor):
        output = model(x)
        return getattr(output, "last_hidden_state", output) + anchor

    gradients = []
    for recompute in (False, True):
        model.zero_grad()
        torch.manual_seed(4)
        if recompute:
            output = checkpoint(run, x, anchor, use_reentrant=reentrant)
        else:
            output = run(x, anchor)
        output.square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert gradients[0]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


def test_models_and_threads_do_not_disturb_each_other():
    stock, model = vit.make(), make(vit, METHODS["both"])
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    wanted = {"stock": stock(x).detach(), "conditioned": model(x).detach()}
    assert not torch.allclose(*wanted.values())
    wrong, start = [], threading.Barrier(4)

    def repeat(name, module):
        start.wait()
        for _ in range(30):
            if not torch.equal(module(x), wanted[name]):
                wrong.append(name)

    threads = [
        threading.Thread(target=repeat, args=pair)
        for pair in (("stock", stock), ("conditioned", model)) * 2
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_conditioned_model_inside_of_the_forward_of_another():
    """A teacher that is called while a student's attention runs keeps to itself."""
    teacher = nn.MultiheadAttention(8, 2, batch_first=True).double()
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    stock = teacher(x, x, x, need_weights=False)[0]
    student = nn.MultiheadAttention(8, 2, batch_first=True).double()
    ac.condition(student, GAP)
    wanted = student(x, x, x, need_weights=False)[0]
    said = []
    student.out_proj.register_forward_pre_hook(lambda *_: None)
    ac.condition(teacher, PRE)
    preconditioned = teacher(x, x, x, need_weights=False)[0]
    assert not torch.allclose(preconditioned, stock)
    teacher.register_forward_pre_hook(
        lambda *_: said.append(student(x, x, x, need_weights=False)[0])
    )
    torch.testing.assert_close(teacher(x, x, x, need_weights=False)[0], preconditioned)
    torch.testing.assert_close(said[0], wanted)


# MultiheadAttention ------------------------------------------------------------------------------

FORMS = {
    "plain": {},
    "tokens first": {"batch_first": False},
    "other widths": {"kdim": 6, "vdim": 10},
    "bias_kv": {"add_bias_kv": True},
    "zero token": {"add_zero_attn": True},
    "both tokens, no bias": {"add_bias_kv": True, "add_zero_attn": True, "bias": False},
}


def calls(b, h, q, k):
    """Arguments of MultiheadAttention.forward, and which keys they leave visible or shift."""
    padding = torch.zeros(b, k, dtype=torch.bool)
    padding[0, -1] = padding[-1, 1:] = True
    blind = padding.clone()
    blind[-1] = True
    hidden = torch.rand(q, k, generator=torch.Generator().manual_seed(1)) < 0.4
    hidden[:, 0] = False
    heads = torch.rand(b * h, q, k, generator=torch.Generator().manual_seed(2)) < 0.4
    heads[..., 1] = False
    bias = torch.randn(q, k, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    low = torch.zeros(b, k, dtype=torch.float64).masked_fill(padding, float("-inf"))
    ahead = torch.ones(q, k, dtype=torch.bool).triu(1)
    seen, per_head = (lambda m: ~m[:, None, None]), ~heads.view(b, h, q, k)
    return {
        "nothing": ({}, None, None),
        "padding": ({"key_padding_mask": padding}, seen(padding), None),
        "padding, additive": ({"key_padding_mask": low, "attn_mask": bias}, seen(padding), bias),
        "all padding": ({"key_padding_mask": blind}, seen(blind), None),
        "mask": ({"attn_mask": hidden}, ~hidden, None),
        "mask of each head": ({"attn_mask": heads}, per_head, None),
        "bias": ({"attn_mask": bias}, None, bias),
        "mask and padding": (
            {"attn_mask": hidden, "key_padding_mask": padding},
            ~hidden & seen(padding),
            None,
        ),
        "causal": ({"attn_mask": ahead, "is_causal": True}, ~ahead, None),
    }


def naive_mha(m, q, k, v, on, visible, bias):
    """(batch, tokens, width) to the same, from the module's raw parameters."""
    if m._qkv_same_embed_dim:
        weights = m._parameters["in_proj_weight"].chunk(3)
    else:
        weights = (m.q_proj_weight, m.k_proj_weight, m.v_proj_weight)
    biases = (None,) * 3 if m.in_proj_bias is None else m.in_proj_bias.chunk(3)
    q, k, v = (
        nn.functional.linear(t, w, b) for t, w, b in zip((q, k, v), weights, biases, strict=True)
    )
    b, n, s = len(q), q.shape[1], k.shape[1]
    full = torch.ones(b, m.num_heads, n, s, dtype=torch.bool)
    visible = full if visible is None else full & visible
    shift = torch.zeros(b, m.num_heads, n, s, dtype=q.dtype) + (0 if bias is None else bias)
    extra = []
    if m.bias_k is not None:
        extra.append((m.bias_k.expand(b, 1, -1), m.bias_v.expand(b, 1, -1)))
    if m.add_zero_attn:
        extra.append((torch.zeros(b, 1, k.shape[-1]).to(k), torch.zeros(b, 1, v.shape[-1]).to(v)))
    for more_k, more_v in extra:
        k, v = torch.cat([k, more_k], 1), torch.cat([v, more_v], 1)
        visible = torch.cat([visible, full[..., :1]], -1)
        shift = torch.cat([shift, torch.zeros_like(shift[..., :1])], -1)
    q, k, v = (t.unflatten(-1, (m.num_heads, -1)).transpose(1, 2) for t in (q, k, v))
    output = attention(q, k, v, on, visible, shift).transpose(1, 2).flatten(2)
    return nn.functional.linear(output, m.out_proj.weight, m.out_proj.bias)


def randomised(module):
    with torch.no_grad():
        for p in module.parameters():
            p.normal_(std=0.5)
    return module


@methods
@pytest.mark.parametrize("form", FORMS)
def test_multihead_attention(form, on):
    kwargs = {"batch_first": True, **FORMS[form]}
    module = randomised(nn.MultiheadAttention(8, 2, dropout=0.3, **kwargs).double()).eval()
    stock = copy.deepcopy(module)
    condition(module, on)
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(3, n, c or 8, generator=generator, dtype=torch.float64)
        for n, c in ((3, 8), (4, module.kdim), (4, module.vdim))
    )
    given = [t if kwargs["batch_first"] else t.transpose(0, 1) for t in (q, k, v)]
    for name, (call, visible, bias) in calls(3, 2, 3, 4).items():
        if name == "causal" and (module.bias_k is not None or module.add_zero_attn):
            continue  # torch itself: without weights the flag also hides the tokens appended
        wanted = naive_mha(stock, q, k, v, on, visible, bias)
        for weights in ({"need_weights": False}, {}, {"average_attn_weights": False}):
            for grad in (True, False):
                with torch.set_grad_enabled(grad):
                    output, got = module(*given, **call, **weights)
                output = output if kwargs["batch_first"] else output.transpose(0, 1)
                torch.testing.assert_close(
                    output, wanted, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}"
                )
            if not weights.get("need_weights", True):
                assert got is None
                continue
            before = stock(*given, **call, **weights)[1]
            seen = ~before.isnan()
            torch.testing.assert_close(got[seen], before[seen])
            assert not got[~seen].any()


@methods
def test_multihead_attention_without_a_batch_and_with_one_query(on):
    module = randomised(nn.MultiheadAttention(8, 2, batch_first=True).double()).eval()
    stock = copy.deepcopy(module)
    condition(module, on)
    q, k = torch.randn(1, 8, dtype=torch.float64), torch.randn(4, 8, dtype=torch.float64)
    padding = torch.tensor([False, False, True, False])
    wanted = naive_mha(stock, q[None], k[None], k[None], on, ~padding, None)[0]
    for grad in (True, False):
        for need in (True, False):
            with torch.set_grad_enabled(grad):
                output = module(q, k, k, key_padding_mask=padding, need_weights=need)[0]
            torch.testing.assert_close(output, wanted, rtol=1e-9, atol=1e-9)


@methods
def test_multihead_attention_drops_weights_in_training_alone(on):
    module = randomised(nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True).double())
    condition(module, on)
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    outputs = []
    for need in (True, False):
        torch.manual_seed(1)
        first, other = (module(x, x, x, need_weights=need)[0] for _ in range(2))
        assert not torch.allclose(first, other)
        outputs.append(first)
    module.eval()
    assert torch.equal(module(x, x, x)[0], module(x, x, x)[0])
    torch.testing.assert_close(module(x, x, x)[0], module(x, x, x, need_weights=False)[0])


SPIED = (
    *("_transformer_encoder_layer_fwd", "_native_multi_head_attention"),
    "_nested_tensor_from_mask",
)


def calls_of(run):
    """How often torch takes its fused inference kernels, and nested tensors for padded batches."""
    patches = {n: mock.patch.object(torch, n, wraps=getattr(torch, n)) for n in SPIED}
    spies = {n: patch.start() for n, patch in patches.items()}
    try:
        with torch.no_grad():
            output = run()
    finally:
        for patch in patches.values():
            patch.stop()
    return output, {n: spy.call_count for n, spy in spies.items()}


def naive_layer(layer, x, on, visible):
    """A TransformerEncoderLayer in eval, from its definition."""

    def attend(x):
        return naive_mha(layer.self_attn, x, x, x, on, visible, None)

    def feed(x):
        return layer.linear2(torch.relu(layer.linear1(x)))

    if layer.norm_first:
        x = x + attend(layer.norm1(x))
        return x + feed(layer.norm2(x))
    x = layer.norm1(x + attend(x))
    return layer.norm2(x + feed(x))


@methods
@pytest.mark.parametrize("norm_first", [False, True])
def test_the_fused_inference_path_is_off_for_conditioned_layers_alone(norm_first, on):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=norm_first)
    stock = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first).double().eval()
    randomised(stock)
    model = copy.deepcopy(stock)
    handles = condition(model, on)
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    padding = torch.tensor([[0, 0, 0, 0, 0], [0, 0, 0, 1, 1], [0, 0, 0, 0, 1]], dtype=torch.bool)

    for mask in (None, padding):
        wanted = x
        for part in stock.layers:
            wanted = naive_layer(part, wanted, on, None if mask is None else ~mask[:, None, None])
        shown = torch.ones_like(padding) if mask is None else ~mask
        for twin in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            output, count = calls_of(lambda m=mask, t=twin: t(x, src_key_padding_mask=m))
            torch.testing.assert_close(output[shown], wanted[shown], rtol=1e-9, atol=1e-9)
            assert not any(count.values())
        torch.testing.assert_close(
            model(x, src_key_padding_mask=mask)[shown], wanted[shown], rtol=1e-9, atol=1e-9
        )
        before, count = calls_of(lambda m=mask: stock(x, src_key_padding_mask=m))
        assert count["_transformer_encoder_layer_fwd"] == 2
        assert count["_nested_tensor_from_mask"] == (mask is not None and not norm_first)
        assert not torch.allclose(before[shown], wanted[shown])

    for handle in handles:
        handle.remove()
    after, count = calls_of(lambda: model(x, src_key_padding_mask=padding))
    assert torch.equal(after, before)
    assert count["_transformer_encoder_layer_fwd"] == 2


@pytest.mark.parametrize("training", [True, False])
def test_weights_of_multihead_attention_stay_parameters(training):
    module = nn.MultiheadAttention(8, 2).train(training)
    stock = dict(module.named_parameters())
    condition(module, (GAP, PRE))
    tokens = torch.randn(5, 2, 8)
    module(tokens, tokens, tokens)[0].sum().backward()
    for name in ("in_proj_weight", "in_proj_bias"):
        assert getattr(module, name) is module.get_parameter(name) is stock[name]
        assert getattr(module, name).grad is not None
    torch.optim.SGD([module.in_proj_weight], lr=0.1)
    twin = nn.MultiheadAttention(8, 2)
    twin.in_proj_weight = module.in_proj_weight  # tied
    prune.identity(module, "in_proj_weight")
    assert module.in_proj_weight_orig is stock["in_proj_weight"]


class Halved(nn.Module):
    def forward(self, weight):
        return weight / 2


@methods
@pytest.mark.parametrize("training", [True, False])
def test_weights_of_multihead_attention_are_parametrized(training, on):
    layer = nn.TransformerEncoderLayer(8, 2, 9, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 1).train(training)
    stock = copy.deepcopy(model)
    with torch.no_grad():
        stock.layers[0].self_attn.in_proj_weight /= 2
    handles, others = condition(model, on), condition(stock, on)
    attention = model.layers[0].self_attn
    parametrize.register_parametrization(attention, "in_proj_weight", Halved())
    tokens, padding = torch.randn(2, 5, 8), torch.arange(5).expand(2, 5) > 3
    for mask in (None, padding):
        wanted = stock(tokens, src_key_padding_mask=mask)
        torch.testing.assert_close(model(tokens, src_key_padding_mask=mask), wanted)
    if not training:
        with torch.no_grad(), pytest.raises(ac.ConditioningError, match="enable_nested_tensor"):
            model(tokens, src_key_padding_mask=padding)
    for handle in (*handles, *others):
        handle.remove()
    parametrize.remove_parametrizations(attention, "in_proj_weight")
    assert type(attention) is nn.MultiheadAttention
    torch.testing.assert_close(model(tokens), stock(tokens))


@pytest.mark.parametrize("training", [True, False])
def test_a_replica_of_data_parallel_has_conditioned_heads_too(training):
    """What nn.DataParallel does on several devices: plain tensors in the place of parameters."""
    layer = nn.TransformerEncoderLayer(8, 2, 9, batch_first=True, dropout=0.0).train(training)
    ac.condition(layer, ac.RemoveGap())
    replicas = {module: module._replicate_for_data_parallel() for module in layer.modules()}
    for module, replica in replicas.items():
        for name, child in module._modules.items():
            setattr(replica, name, replicas[child])
        for name, parameter in module._parameters.items():
            if parameter is None:
                replica._parameters[name] = None
            else:
                setattr(replica, name, 2 * parameter)
    tokens = torch.randn(2, 5, 8)
    output = replicas[layer](tokens)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter *= 2
    assert torch.equal(output, layer(tokens))


def test_one_conditioned_layer_among_stock_ones():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = randomised(nn.TransformerEncoder(layer, 3)).double().eval()
    stock = copy.deepcopy(model)
    ac.condition(model.layers[1], GAP)
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    wanted = naive_layer(stock.layers[0], x, (), None)
    wanted = naive_layer(stock.layers[1], wanted, (GAP,), None)
    wanted = naive_layer(stock.layers[2], wanted, (), None)
    output, count = calls_of(lambda: model(x))
    torch.testing.assert_close(output, wanted, rtol=1e-9, atol=1e-9)
    assert count["_transformer_encoder_layer_fwd"] == 2


def test_compiled_inference_is_off_the_fused_path_too():
    """There the type of a weight tells nothing, and no conditioned forward would be called."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = randomised(nn.TransformerEncoder(layer, 2)).double().eval()
    stock = copy.deepcopy(model)
    condition(model, METHODS["both"])
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    padding = torch.tensor([[0, 0, 0, 0, 0], [0, 0, 0, 1, 1], [0, 0, 0, 0, 1]], dtype=torch.bool)
    with torch.no_grad():
        for kwargs in ({}, {"src_key_padding_mask": padding}):
            wanted = model(x, **kwargs)
            assert not torch.allclose(wanted[0], stock(x, **kwargs)[0])
            graph = compiled(model, backend="eager")
            torch.testing.assert_close(graph(x, **kwargs), wanted)
            program = torch.export.export(model, (x,), kwargs)
            torch.testing.assert_close(program.module()(x, **kwargs), wanted)


@methods
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused_by_name(layout, on):
    """The stock layer takes them in its fused inference path alone, which is off."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    rows = [torch.randn(3, 8), torch.randn(5, 8)]
    nested = torch.nested.nested_tensor(rows, layout=layout)
    condition(layer, on)
    with pytest.raises(ac.ConditioningError, match="nested tensors in the attention of self_attn"):
        layer(nested)
    with pytest.raises(ac.ConditioningError, match="nested tensors"):
        layer.self_attn(query=nested, key=nested, value=nested)


@methods
def test_a_decoder_layer(on):
    layer = nn.TransformerDecoderLayer(8, 2, 16, batch_first=True).double().eval()
    randomised(layer)
    stock = copy.deepcopy(layer)
    condition(layer, on)
    x, memory = (torch.randn(2, n, 8, dtype=torch.float64) for n in (4, 6))
    ahead = nn.Transformer.generate_square_subsequent_mask(4).double()
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 4:] = True

    def attend(part, q, k, visible):
        return naive_mha(part, q, k, k, on, visible, None)

    wanted = stock.norm1(x + attend(stock.self_attn, x, x, ahead == 0))
    cross = attend(stock.multihead_attn, wanted, memory, ~padding[:, None, None])
    wanted = stock.norm2(wanted + cross)
    wanted = stock.norm3(wanted + stock.linear2(torch.relu(stock.linear1(wanted))))
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            output = layer(
                x, memory, tgt_mask=ahead, memory_key_padding_mask=padding, tgt_is_causal=True
            )
        torch.testing.assert_close(output, wanted, rtol=1e-9, atol=1e-9)


# Language models ----------------------------------------------------------------------------------


def causal_lm(name, attention="sdpa", **settings):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    small = {
        "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32},
        "llama": {**_SMALL, "num_key_value_heads": 2, "intermediate_size": 32},
        "mistral": {
            **_SMALL,
            **{"num_key_value_heads": 2, "intermediate_size": 32, "sliding_window": 4},
        },
    }[name]
    config = AutoConfig.for_model(
        name, vocab_size=40, bos_token_id=0, eos_token_id=39, pad_token_id=0, **small, **settings
    )
    config._attn_implementation = attention
    model = AutoModelForCausalLM.from_config(config).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim >= 2:  # or all tokens are alike, and nothing is told apart
                p.normal_(std=1.5 * p.shape[-1] ** -0.5)
    return model


SPECTRAL = {"gap": (GAP,), "precondition": (PRE,), "all": (PRE, ac.Spectral(), GAP)}
LANGUAGE = pytest.mark.parametrize("name", ["gpt2", "llama", "mistral"])


@pytest.mark.parametrize("on", SPECTRAL.values(), ids=SPECTRAL.keys())
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@LANGUAGE
def test_causal_models_never_look_ahead(name, attention, on):
    model = causal_lm(name, attention)
    condition(model, on)
    tokens = _tokens(2, 9)
    before = model(tokens).logits
    changed = tokens.clone()
    changed[:, 6] = 35 - changed[:, 6]
    after = model(changed).logits
    torch.testing.assert_close(after[:, :6], before[:, :6], rtol=1e-12, atol=1e-12)
    assert (after[:, 6:] - before[:, 6:]).abs().amax((0, 2)).min() > 1e-6
    other = causal_lm(name, "eager" if attention == "sdpa" else "sdpa")
    condition(other, on)
    # transformers takes an eager softmax in float32, whatever the model's dtype.
    torch.testing.assert_close(other(tokens).logits, before, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("on", SPECTRAL.values(), ids=SPECTRAL.keys())
@LANGUAGE
def test_the_cache_changes_no_token(name, on):
    model = causal_lm(name)
    stock = model.generate(_tokens(2, 5), max_new_tokens=10, do_sample=False)
    condition(model, on)
    tokens = _tokens(2, 5)
    padded = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    for mask in (torch.ones_like(padded), padded):
        kwargs = {"attention_mask": mask, "max_new_tokens": 10, "do_sample": False}
        with_cache = model.generate(tokens, use_cache=True, **kwargs)
        without = model.generate(tokens, use_cache=False, **kwargs)
        assert torch.equal(with_cache, without)
        if name == "llama":
            static = model.generate(tokens, cache_implementation="static", **kwargs)
            assert torch.equal(static, without)
        if mask.all():
            assert not torch.equal(with_cache, stock)


@methods
def test_the_cache_changes_no_logit(on):
    model = causal_lm("llama")
    condition(model, on)
    tokens = _tokens(2, 8)
    wanted = model(tokens).logits
    cache, parts = None, []
    for piece in tokens.split([3, 1, 2, 1, 1], dim=1):
        output = model(piece, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        parts.append(output.logits)
    torch.testing.assert_close(torch.cat(parts, 1), wanted, rtol=1e-9, atol=1e-9)


@methods
def test_padding_on_the_left_leaves_the_others_as_they_are(on):
    model = causal_lm("llama")
    condition(model, on)
    tokens = _tokens(1, 6)
    alone = model(tokens[:, 2:]).logits
    mask = torch.tensor([[0, 0, 1, 1, 1, 1]])
    positions = torch.tensor([[0, 0, 0, 1, 2, 3]])
    padded = model(tokens, attention_mask=mask, position_ids=positions).logits
    assert torch.isfinite(padded).all()  # the padding itself sees nothing
    torch.testing.assert_close(padded[:, 2:], alone, rtol=1e-9, atol=1e-9)
    model.zero_grad()
    padded.square().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_returned_attention_weights_stay_probabilities():
    model = causal_lm("llama", "eager")
    condition(model, METHODS["both"])
    weights = model(_tokens(2, 6), output_attentions=True).attentions
    assert len(weights) == 2
    for w in weights:
        assert (w >= 0).all()
        torch.testing.assert_close(w.sum(-1), torch.ones(2, 4, 6).double(), rtol=1e-5, atol=1e-5)


# Compiled and exported ----------------------------------------------------------------------------


def compiled(model, **kwargs):
    torch._dynamo.reset()
    return torch.compile(model, fullgraph=True, **{"backend": "aot_eager", **kwargs})


NAMES = ("torch-encoder", "torch-cross", "timm-vit", "hf-gpt2", "hf-llama")
GRAPHS = [*(CASE[name] for name in NAMES), SWIN, XCIT, BERT]
STRICT = [CASE["torch-cross"], vit, SWIN, CASE["hf-llama"]]  # by dynamo, as compile


@pytest.mark.parametrize("case", GRAPHS, ids=lambda c: c.name)
def test_compile_in_one_graph(case):
    model = make(case, METHODS["both"])
    model.train(case is not SWIN and case is not XCIT)  # they drop paths at random
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
        if isinstance(dropped := getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0 * dropped
    expected = case.run(model)
    expected.square().sum().backward()
    wanted = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    output = case.run(compiled(model))
    torch.testing.assert_close(output, expected, rtol=1e-8, atol=1e-8)
    output.square().sum().backward()
    for name, p in model.named_parameters():
        if name in wanted:
            torch.testing.assert_close(p.grad, wanted[name], rtol=1e-6, atol=1e-6)


def test_inductor_gives_the_same_numbers():
    model = make(vit, METHODS["both"], dtype=torch.float32)
    expected = vit.run(model)
    graph = compiled(model, backend="inductor")
    torch.testing.assert_close(vit.run(graph), expected, rtol=1e-4, atol=1e-5)


def test_a_model_compiled_before_is_conditioned_and_released():
    model = vit.make(dtype=torch.float32)
    stock = vit.run(model)
    graph = compiled(model, backend="eager")
    torch.testing.assert_close(vit.run(graph), stock, rtol=1e-4, atol=1e-5)
    handles = [ac.condition(graph, method) for method in METHODS["both"]]
    expected = vit.run(model)
    assert not torch.allclose(expected, stock)
    torch.testing.assert_close(vit.run(graph), expected, rtol=1e-4, atol=1e-5)
    handles[1].remove()
    expected = vit.run(model)
    assert not torch.allclose(expected, stock)
    torch.testing.assert_close(vit.run(graph), expected, rtol=1e-4, atol=1e-5)
    handles[0].remove()
    torch.testing.assert_close(vit.run(graph), stock, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_compile_for_all_lengths(name):
    if name == "bert":
        model = make(BERT, METHODS["both"])
    else:
        model = causal_lm(name).model
        condition(model, METHODS["both"])
    graph = compiled(model, dynamic=True, backend="eager")
    for batch, n in ((2, 6), (3, 9), (4, 5)):
        tokens = _tokens(batch, n)
        mask = torch.ones(batch, n, dtype=torch.long)
        mask[0, -2:] = 0
        kwargs = {"attention_mask": mask} if name == "bert" else {"use_cache": False}
        wanted = model(tokens, **kwargs).last_hidden_state
        output = graph(tokens, **kwargs).last_hidden_state
        torch.testing.assert_close(output, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("case", "strict"),
    [
        *[pytest.param(case, False, id=case.name) for case in GRAPHS],
        *[pytest.param(case, True, id=f"{case.name}-strict") for case in STRICT],
    ],
)
def test_export(case, strict):
    model = make(case, METHODS["both"])
    expected = case.run(model)
    captured = {}
    hook = model.register_forward_pre_hook(
        lambda _, args, kwargs: captured.update(args=args, kwargs=kwargs), with_kwargs=True
    )
    case.run(model)
    hook.remove()
    args, kwargs = captured["args"], dict(captured["kwargs"])
    if case.name in ("hf-gpt2", "hf-llama"):
        kwargs["use_cache"] = False
    program = torch.export.export(model, args, kwargs, strict=strict)
    output = program.module()(*args, **kwargs)
    output = getattr(output, "last_hidden_state", output)
    if case is BERT:
        output = output * kwargs["attention_mask"][:, :, None]
    torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-9)


class Block(nn.Module):
    """A residual block around an attention."""

    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x, padding):
        first = self.attn(x, x, x, need_weights=False)[0]
        return x + self.attn(first, x, x, key_padding_mask=padding)[0]


@pytest.mark.parametrize("strict", [False, True])
def test_export_for_all_lengths(strict):
    if not strict and torch.__version__ < "2.12":
        pytest.skip("torch 2.11 does not export the stock module so either")
    model = Block().double().eval()
    condition(model, METHODS["both"])

    def batch(b, n):
        padding = torch.zeros(b, n, dtype=torch.bool)
        padding[0, -1] = True
        return torch.randn(b, n, 8, dtype=torch.float64), padding

    shape = {0: torch.export.Dim("b", min=2, max=64), 1: torch.export.Dim("n", min=2, max=64)}
    program = torch.export.export(
        model, batch(2, 5), dynamic_shapes={"x": shape, "padding": shape}, strict=strict
    )
    longer = batch(3, 9)
    torch.testing.assert_close(program.module()(*longer), model(*longer))


def test_torchscript_trace():
    model = make(vit, METHODS["both"])
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    traced = torch.jit.trace(model, x)
    torch.testing.assert_close(traced(x), model(x))
