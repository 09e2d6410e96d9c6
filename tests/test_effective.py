"""The effective weight under everything PyTorch does to modules."""

import copy
import inspect
import io
import pickle

import pytest
import torch
import torch._dynamo.testing
from cases import CASE, CASES, METHODS
from torch import nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._subclasses import FakeTensorMode
from torch.func import functional_call, grad, jacrev, vmap
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import attncond as ac
from attncond.readonly import EffectiveWeight

vit = CASE["timm-vit"]


@pytest.fixture
def linear():
    """The qkv of a conditioned ViT: an owner with a property in place of its weight."""
    model = vit.make(dtype=torch.float32)
    ac.condition(model, ac.Spectral())
    return model.blocks[0].attn.qkv


def test_the_parameter_can_still_be_written_and_replaced(linear):
    with torch.no_grad():
        linear.get_parameter("weight").zero_()
    assert linear.weight.detach().abs().sum() == pytest.approx(
        float((linear.attncond_weight_scale * linear.attncond_weight_shift).sum()), rel=1e-5
    )
    fresh = nn.Parameter(torch.ones(72, 24))
    linear.weight = fresh
    assert dict(linear.named_parameters())["weight"] is fresh
    assert isinstance(linear.weight, EffectiveWeight)


def test_the_parameter_is_found_by_its_path():
    model = vit.make()
    raw = dict(model.named_parameters())
    ac.condition(model, ac.Spectral())
    for name in raw:
        assert model.get_parameter(name) is raw[name]
        with FakeTensorMode():
            assert model.get_parameter(name) is raw[name]


def test_classes_that_register_their_subclasses_do_not_see_the_conditioned_one():
    register = {}

    class Registered(nn.MultiheadAttention):
        def __init_subclass__(cls, key):
            register[key] = cls

    class Attention(Registered, key="own"):
        pass

    model = Attention(8, 2)
    for method in (ac.Spectral(), ac.RemoveGap()):
        ac.condition(model, method)
    assert type(model) is not Attention
    assert register == {"own": Attention}


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "wrap",
    [
        nn.utils.parametrizations.weight_norm,
        nn.utils.parametrizations.spectral_norm,
        nn.utils.weight_norm,
        nn.utils.spectral_norm,
        lambda module: prune.l1_unstructured(module, "weight", 0.5),
        lambda module: prune.random_structured(module, "weight", 0.5, 0),
    ],
)
def test_parametrising_a_conditioned_module_is_refused_before_it_breaks(linear, wrap):
    before, weight = dict(linear.named_parameters()), linear.weight.detach()
    attributes, state = set(vars(linear)), list(linear.state_dict())
    with pytest.raises(ac.ConditioningError, match=r"^'weight' of a conditioned .* cannot be"):
        wrap(linear)
    after = dict(linear.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert set(vars(linear)) == attributes
    assert list(linear.state_dict()) == state
    assert not linear._forward_pre_hooks
    assert isinstance(linear.weight, EffectiveWeight)
    assert torch.equal(linear.weight, weight)


def test_pruning_many_modules_at_once_is_refused_before_any_is_pruned(linear):
    stock = nn.Linear(4, 4)
    with pytest.raises(ac.ConditioningError, match="cannot be deleted or parametrised"):
        prune.global_unstructured(
            [(stock, "weight"), (linear, "weight")], prune.L1Unstructured, amount=0.5
        )
    assert not prune.is_pruned(stock)
    assert not prune.is_pruned(linear)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
def test_what_is_not_conditioned_may_be_parametrised():
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    ac.condition(model, ac.Spectral())
    x = torch.randn(2, 3, 8)
    before = model(x, x, x)[0]
    nn.utils.weight_norm(model.out_proj)
    torch.testing.assert_close(model(x, x, x)[0], before)


class Twice(nn.Module):
    def forward(self, x):
        return 2 * x


@pytest.mark.parametrize(
    "change",
    [
        lambda module: nn.utils.parametrize.register_parametrization(module, "bias", Twice()),
        lambda module: prune.l1_unstructured(module, "bias", 0.5),
    ],
)
@pytest.mark.parametrize("before", [True, False])
def test_a_linear_adds_the_bias_that_it_reads_as(change, before):
    model = vit.make(dtype=torch.float32)
    linear = model.blocks[0].attn.qkv
    if before:
        change(linear)
    ac.condition(model, ac.Spectral())
    if not before:
        change(linear)
    x = torch.randn(2, 24)
    assert not torch.equal(linear.bias, vit.make(dtype=torch.float32).blocks[0].attn.qkv.bias)
    torch.testing.assert_close(linear(x), nn.functional.linear(x, linear.weight, linear.bias))


def test_a_forward_that_others_put_into_linear_is_called(linear, monkeypatch):
    x, stock = torch.randn(2, 24), nn.Linear.forward
    before = linear(x)
    monkeypatch.setattr(nn.Linear, "forward", lambda self, input: 2 * stock(self, input))
    torch.testing.assert_close(linear(x), 2 * before)


def test_replicas_of_data_parallel_are_refused(linear):
    replica = linear._replicate_for_data_parallel()
    with pytest.raises(ac.ConditioningError, match="use DistributedDataParallel"):
        replica.weight = torch.zeros(72, 24)


def test_what_others_derived_from_the_class_survives_folding():
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    handle = ac.condition(model, ac.Spectral())
    nn.utils.parametrize.register_parametrization(model, "in_proj_bias", Twice())
    x = torch.randn(2, 3, 8)
    before = model(x, x, x)[0]
    ac.condition(model, ac.RemoveGap()).remove()
    torch.testing.assert_close(model(x, x, x)[0], before)
    handle.fold()
    assert type(model).__name__ == "ParametrizedMultiheadAttention"
    assert type(model).__bases__ == (nn.MultiheadAttention,)
    torch.testing.assert_close(model(x, x, x)[0], before)
    nn.utils.parametrize.remove_parametrizations(model, "in_proj_bias")
    assert type(model) is nn.MultiheadAttention


def test_feature_extraction_sees_a_conditioned_linear_as_a_leaf():
    from torchvision.models.feature_extraction import create_feature_extractor

    model = vit.make(dtype=torch.float32)
    stock_nodes = list(create_feature_extractor(model, ["fc_norm"]).graph.nodes)
    ac.condition(model, ac.Spectral())
    extractor = create_feature_extractor(model, ["fc_norm"])
    assert [n.name for n in extractor.graph.nodes] == [n.name for n in stock_nodes]
    x = torch.randn(2, 3, 8, 8)
    wanted = model.fc_norm(model.pool(model.forward_features(x)))
    torch.testing.assert_close(extractor(x)["fc_norm"], wanted)


def test_feature_extraction_refuses_to_freeze_an_effective_weight():
    """Whoever reads the weight and is no leaf would have it as a constant of the graph."""
    from torchvision.models import SwinTransformer
    from torchvision.models.feature_extraction import create_feature_extractor

    model = SwinTransformer([4, 4], 12, [2], [3], [4, 4], num_classes=2)
    handle = ac.condition(model, ac.Spectral())
    with pytest.raises(ac.ConditioningError, match=r"into its graph as a constant.* fold\(\)"):
        create_feature_extractor(model, ["norm"])
    site = ac.inspect(model).sites[0]
    leaves = {"leaf_modules": [type(site.module)]}
    extractor = create_feature_extractor(model, ["norm"], tracer_kwargs=leaves)
    for _ in range(2):
        extractor(torch.randn(2, 3, 32, 32))["norm"].sum().backward()
    assert site.projections[0].raw.grad.any()
    handle.fold()
    create_feature_extractor(model, ["norm"])


@pytest.mark.parametrize("method", [ac.RemoveGap(), ac.Precondition()], ids=["gap", "rows"])
def test_feature_extraction_takes_conditioned_heads_as_leaves_alone(method):
    """Whoever looks into them has no attention to condition there, but proxies."""
    from torchvision.models import SwinTransformer
    from torchvision.models.feature_extraction import create_feature_extractor

    model = SwinTransformer([4, 4], 12, [2], [3], [4, 4], num_classes=2).eval()
    ac.condition(model, method)
    with pytest.raises(ac.ConditioningError, match=r"ShiftedWindowAttention.* for a leaf"):
        create_feature_extractor(copy.deepcopy(model), ["norm"])
    leaves = {"leaf_modules": [type(ac.inspect(model).sites[0].module)]}
    extractor = create_feature_extractor(model, ["norm"], tracer_kwargs=leaves)
    x = torch.randn(2, 3, 32, 32)
    wanted = model.norm(model.features(x))
    torch.testing.assert_close(extractor(x)["norm"], wanted)


def test_a_linear_that_fx_traces_through_is_not_frozen():
    class Own(nn.Linear):
        """Of another module than torch.nn, and so no leaf."""

    model = vit.make(dtype=torch.float32)
    model.blocks[0].attn.qkv = Own(24, 72)
    ac.condition(model, ac.Spectral())
    with pytest.raises(ac.ConditioningError, match="into its graph as a constant"):
        torch.fx.symbolic_trace(model.blocks[0].attn.qkv)


def test_isinstance_and_names_survive(linear):
    assert isinstance(linear, nn.Linear)
    assert "Linear(in_features=24" in repr(linear)
    assert linear.in_features == 24


@pytest.mark.parametrize("method", [ac.Spectral(), ac.RemoveGap()], ids=["weights", "heads"])
@pytest.mark.parametrize("strict", [False, True])
def test_the_signature_of_forward_survives(method: object, strict: bool) -> None:
    """By which torch.export takes the shapes of what a conditioned module itself is called with."""
    model = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    stock = inspect.signature(model.forward)
    ac.condition(model, method)
    assert inspect.signature(model.forward) == stock
    shape = {1: torch.export.Dim("n", min=2, max=64)}
    shapes = dict.fromkeys(("query", "key", "value"), shape)
    x = torch.randn(2, 5, 8)
    if strict or torch.__version__ >= "2.12":
        program = torch.export.export(model, (x, x, x), dynamic_shapes=shapes, strict=strict)
        x = torch.randn(2, 9, 8)
        torch.testing.assert_close(program.module()(x, x, x), model(x, x, x))


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
@pytest.mark.parametrize("method", ["default", "paper-svd"])
def test_compile_in_one_graph(case, method):
    model = case.make(dtype=torch.float32)
    ac.condition(model, METHODS[method])
    expected = case.run(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    output = case.run(compiled)
    torch.testing.assert_close(output, expected, rtol=2e-4, atol=2e-5)
    expected.square().sum().backward()
    wanted = {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    output.square().sum().backward()
    for k, p in model.named_parameters():
        if k in wanted:
            torch.testing.assert_close(p.grad, wanted[k], rtol=1e-3, atol=1e-3)


def test_inductor_gives_the_same_numbers():
    model = vit.make(dtype=torch.float32)
    ac.condition(model, ac.Spectral())
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)
    torch.testing.assert_close(vit.run(compiled), vit.run(model), rtol=1e-4, atol=1e-5)


def test_a_model_compiled_before_is_conditioned_and_released():
    model = vit.make(dtype=torch.float32)
    stock = vit.run(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(vit.run(compiled), stock, rtol=1e-4, atol=1e-5)
    handle = ac.condition(compiled, ac.Spectral())
    expected = vit.run(model)
    assert not torch.allclose(expected, stock)
    torch.testing.assert_close(vit.run(compiled), expected, rtol=1e-4, atol=1e-5)
    handle.remove()
    torch.testing.assert_close(vit.run(compiled), stock, rtol=1e-4, atol=1e-5)


def test_a_refresh_needs_no_new_graph():
    model = vit.make(dtype=torch.float32)
    handle = ac.condition(model, ac.Spectral.paper_svd())
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for _ in range(3):
        vit.run(compiled)
        with torch.no_grad():
            model.blocks[0].attn.qkv.get_parameter("weight").mul_(1.01)
        handle.refresh()
    assert counter.frame_count == 1
    torch.testing.assert_close(vit.run(compiled), vit.run(model), rtol=1e-4, atol=1e-5)


def skipped_guards(node):
    """Where Dynamo compares dictionaries in place of all guards below."""
    sides = getattr(node, "get_key_value_managers", dict)().values()
    below = [*node.get_child_managers(), *(side for pair in sides for side in pair if side)]
    own = [node.get_source()] if node.is_tag_safe_root() else []
    return own + [source for child in below for source in skipped_guards(child)]


def test_a_compiled_call_checks_conditioned_linears_as_fast_as_stock_ones():
    """Small models take so short a step that guards checked one by one are a part of it."""
    inputs, skipped = [], []

    def backend(graph, given):
        inputs.append(len(given))
        return graph.forward

    model = vit.make(dtype=torch.float32)
    for condition in (lambda: None, lambda: ac.condition(model, ac.Spectral())):
        condition()
        torch._dynamo.reset()
        with torch._dynamo.config.patch(use_recursive_dict_tags_for_guards=True):
            vit.run(torch.compile(model, fullgraph=True, backend=backend))
        (entry,) = _debug_get_cache_entry_list(type(model).forward.__code__)
        skipped.append(skipped_guards(entry.guard_manager.root))
    assert skipped[1] == skipped[0] != []
    # scale, shift and diagonal of each weight
    assert inputs[1] == inputs[0] + 3 * len(model.blocks)


@pytest.mark.parametrize("name", ["timm-vit", "timm-beit", "torch-cross", "hf-gpt2"])
@pytest.mark.parametrize("strict", [False, True])
def test_export(name, strict):
    case = CASE[name]
    model = case.make(dtype=torch.float32)
    ac.condition(model, ac.Spectral())
    expected = case.run(model)
    captured = {}
    hook = model.register_forward_pre_hook(lambda _, args: captured.update(args=args))
    case.run(model)
    hook.remove()
    kwargs = {"use_cache": False} if name.startswith("hf") else {}
    program = torch.export.export(model, captured["args"], kwargs, strict=strict)
    output = program.module()(*captured["args"], **kwargs)
    output = getattr(output, "last_hidden_state", output)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", [ac.Spectral(), ac.RemoveGap()], ids=["spectral", "gap"])
def test_torchscript_script_is_refused_by_name(method):
    model = nn.TransformerEncoderLayer(16, 2).eval()
    handle = ac.condition(model, method)
    with pytest.raises(ac.ConditioningError, match=r"jit\.script .*MultiheadAttention: fold\(\)"):
        torch.jit.script(model)
    handle.remove()
    torch.jit.script(model)


def test_torchscript_trace():
    model = vit.make(dtype=torch.float32)
    ac.condition(model, ac.Spectral())
    x = torch.randn(2, 3, 8, 8)
    traced = torch.jit.trace(model, x)
    torch.testing.assert_close(traced(x), model(x))


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
@pytest.mark.parametrize("method", ["default", "paper-svd"])
def test_deepcopy_and_pickle(case, method):
    model = case.make()
    ac.condition(model, METHODS[method])
    expected = case.run(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(case.run(twin), expected)
        ac.handle(twin).fold()
        torch.testing.assert_close(case.run(twin), expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(case.run(model), expected)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(case.run(torch.load(file, weights_only=False)), expected)


def test_functional_call_and_functorch():
    model = vit.make()
    stock = dict(copy.deepcopy(model).named_parameters())
    ac.condition(model, ac.Spectral())
    x = torch.randn(3, 3, 8, 8, dtype=torch.float64)
    doubled = {k: (2 * p if "qkv.weight" in k else p).detach() for k, p in stock.items()}
    by_hand = copy.deepcopy(model)
    with torch.no_grad():
        for k, p in by_hand.named_parameters():
            p.copy_(doubled[k])
    torch.testing.assert_close(functional_call(model, doubled, (x,)), by_hand(x))

    def loss(params, x):
        return functional_call(model, params, (x[None],)).square().sum()

    params = {k: p.detach() for k, p in model.named_parameters()}
    per_sample = vmap(grad(loss), in_dims=(None, 0))(params, x)
    model.zero_grad()
    model(x[:1]).square().sum().backward()
    torch.testing.assert_close(
        per_sample["blocks.0.attn.qkv.weight"][0],
        model.blocks[0].attn.qkv.get_parameter("weight").grad,
    )
    key = "blocks.1.attn.qkv.weight"
    jacobian = jacrev(lambda w: functional_call(model, {**params, key: w}, (x[:1],)))(params[key])
    assert jacobian.shape == (1, 5, 72, 24)
    assert jacobian.abs().sum() > 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_and_accumulation(reentrant):
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64, requires_grad=True)

    def gradients(recompute, pieces):
        model = vit.make()
        handle = ac.condition(model, ac.Spectral.paper_svd())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle.attach(optimizer)
        for _ in range(2):
            optimizer.zero_grad()
            for part in x.chunk(pieces):
                if recompute:
                    out = checkpoint(model, part, use_reentrant=reentrant)
                else:
                    out = model(part)
                out.square().sum().backward()
            optimizer.step()
        return model.state_dict()

    plain = gradients(False, 1)
    for other in (gradients(True, 1), gradients(True, 2)):
        for k, v in plain.items():
            torch.testing.assert_close(other[k], v, rtol=1e-9, atol=1e-9)


def test_timm_and_transformers_checkpointing():
    for name, switch in (
        ("timm-vit", lambda m: m.set_grad_checkpointing()),
        ("hf-llama", lambda m: m.gradient_checkpointing_enable()),
    ):
        case = CASE[name]
        model = case.make()
        ac.condition(model, ac.Spectral())
        model.train()
        case.run(model).square().sum().backward()
        wanted = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        switch(model)
        case.run(model).square().sum().backward()
        for p, w in zip(model.parameters(), wanted, strict=True):
            torch.testing.assert_close(p.grad, w)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_the_fused_inference_path_gives_the_same_outputs(batch_first, norm_first):
    layer = nn.TransformerEncoderLayer(
        16, 2, dim_feedforward=32, batch_first=batch_first, norm_first=norm_first
    )
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first and batch_first)
    handle = ac.condition(model, ac.Spectral())
    x = torch.randn(3, 5, 16) if batch_first else torch.randn(5, 3, 16)
    padding = torch.tensor([[0, 0, 0, 0, 0], [0, 0, 0, 1, 1], [0, 0, 0, 0, 1]], dtype=torch.bool)
    model.eval()
    slow = model(x, src_key_padding_mask=padding)
    with torch.no_grad():
        fast = model(x, src_key_padding_mask=padding)
    handle.fold()
    folded = model(x, src_key_padding_mask=padding)
    seen = ~padding if batch_first else ~padding.T
    torch.testing.assert_close(fast[seen], slow[seen], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(folded[seen], slow[seen], rtol=1e-4, atol=1e-5)


def test_a_conditioned_model_holds_no_tensor_that_the_optimizer_does_not_see():
    model = vit.make()
    before = {id(p) for p in model.parameters()}
    ac.condition(model, ac.Spectral.paper_svd())
    assert {id(p) for p in model.parameters()} == before
    assert not any(b.requires_grad for b in model.buffers())


@pytest.mark.parametrize("method", [ac.Spectral(), ac.RemoveGap()], ids=lambda m: type(m).__name__)
def test_hooks_that_hold_on_to_a_forward_survive_removal(method: object) -> None:
    """accelerate keeps the bound method it found; it runs as the stock one once that is gone."""
    from accelerate.hooks import ModelHook, add_hook_to_module

    case = CASE["torch-encoder"]
    model = case.make()
    stock = case.run(model)
    handle = ac.condition(model, method)
    for site in ac.inspect(model):
        add_hook_to_module(site.module, ModelHook())
    assert not torch.equal(case.run(model), stock)
    handle.remove()
    assert torch.allclose(case.run(model), stock, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["torch-encoder", "timm-vit", "timm-beit", "hf-gpt2"])
def test_accelerate_moves_the_stored_weight(name, monkeypatch):
    """It reads what it puts on another device by name, and stores what it has read."""
    import accelerate

    case = CASE[name]
    model = case.make()
    ac.condition(model, ac.Spectral())
    output, state = case.run(model), {k: v.clone() for k, v in model.state_dict().items()}
    with monkeypatch.context() as patch:  # as if cpu:0 were another device
        patch.setattr(accelerate.utils.modeling, "check_device_same", lambda *_: False)
        for path, _ in model.named_parameters():
            accelerate.utils.set_module_tensor_to_device(model, path, "cpu:0")
    torch.testing.assert_close(case.run(model), output)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


def test_accelerate_offloads_a_conditioned_model():
    import accelerate

    model = vit.make()
    handle = ac.condition(model, ac.Spectral())
    output = vit.run(model)
    accelerate.cpu_offload(model, torch.device("cpu"))
    assert model.blocks[0].attn.qkv.get_parameter("weight").is_meta
    torch.testing.assert_close(vit.run(model), output)
    with pytest.raises(ac.ConditioningError, match="meta device cannot be folded"):
        handle.fold()
    accelerate.hooks.remove_hook_from_module(model, recurse=True)
    handle.fold()
    torch.testing.assert_close(vit.run(model), output)
