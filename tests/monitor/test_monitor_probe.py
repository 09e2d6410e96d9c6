"""A probe's Jacobians, solved beside the training: those of the step, and without a trace in it."""

import math
import threading

import pytest
import torch
from cases import CASE

import attncond as ac
from attncond.diagnose import jacobians, replayed
from attncond.methods import Precondition, RemoveGap, Spectral

pytestmark = pytest.mark.filterwarnings("error:attncond.Monitor")


def xcit():
    import timm

    torch.manual_seed(0)
    model = timm.create_model(
        "xcit_nano_12_p16_224",
        img_size=32,
        depth=1,
        embed_dim=16,
        num_heads=2,
        cls_attn_layers=1,
        num_classes=4,
    )
    return model, torch.randn(2, 3, 32, 32)


def made(case, *methods):
    model, batch = CASE[case].make(torch.float32), CASE[case].run
    for method in methods:
        ac.condition(model, method)
    return model, batch


MODELS = {
    "plain": lambda: made("timm-vit"),
    "spectral": lambda: made("timm-vit", Spectral()),
    "gap": lambda: made("timm-vit", RemoveGap()),
    "precondition": lambda: made("timm-vit", Precondition()),
    "all": lambda: made("timm-vit", Spectral.paper_svd(), RemoveGap(), Precondition()),
    "grouped": lambda: made("hf-llama"),
    "several-runs": lambda: made("hf-albert"),
    "bias-of-positions": lambda: made("hf-bloom"),
    "xcit": xcit,
}


@pytest.fixture(params=MODELS)
def model_and_batch(request):
    return MODELS[request.param]()


@pytest.fixture
def gate(monkeypatch):
    """The worker waits until this is set."""
    event, compute = threading.Event(), ac.monitor._record
    monkeypatch.setattr(ac.monitor, "_record", lambda *a: event.wait(60) and compute(*a))
    yield event
    event.set()


def numbers(values):
    return {k: v for k, v in values.items() if not isinstance(v, str)}


def check(record, report):
    """All that a record has of a probe is what a report has of it."""
    rows = {(r.layer, r.head): r.values for r in record.rows}
    want = {(r.layer, r.head): numbers(r.values) for r in report.rows if r.call == 0}
    assert rows.keys() == want.keys()
    for key, values in want.items():
        assert rows[key].keys() == values.keys()
        for name, value in values.items():
            # The error's estimate is of the size of what rounding leaves, and as random.
            rel = 10 if name == "jacobian_kappa_error" else 1e-6
            assert rows[key][name] == pytest.approx(value, rel=rel), (key, name)
    assert any("jacobian_kappa" in values for values in want.values())


def test_numbers_are_those_of_diagnose(model_and_batch):
    model, batch = model_and_batch
    report = ac.diagnose(model, batch, tokens=4)
    with ac.Monitor(model, batch=batch, tokens=4, heads=True) as monitor:
        check(monitor.history[0], report)


def test_what_training_changes_meanwhile_does_not_count(model_and_batch, gate):
    model, batch = model_and_batch
    report = ac.diagnose(model, batch, tokens=4)
    with ac.Monitor(model, batch=batch, tokens=4, heads=True) as monitor:
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.zero_()
            if torch.is_tensor(batch):
                batch.zero_()
        gate.set()
        check(monitor.history[0], report)


def test_nothing_waits_for_the_worker(gate):
    model, batch = made("timm-vit")
    with ac.Monitor(model, every=1, batch=batch, tokens=4, patience=0.0) as monitor:
        with pytest.warns(RuntimeWarning, match=r"step 1 is not measured.*tokens="):
            monitor.step()
        gate.set()
    assert [r.step for r in monitor.history] == [0]


def settings():
    cuda, matmul = torch.backends.cuda, torch.backends.mkldnn.matmul
    return [
        torch.get_rng_state().tolist(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.mha.get_fastpath_enabled(),
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.matmul.fp32_precision,
        matmul.fp32_precision,
        ac.kernels.ENABLED,
        torch._dynamo.eval_frame._stance.stance,
    ]


def test_the_worker_touches_no_setting(model_and_batch, gate, monkeypatch):
    model, batch = model_and_batch
    seen, main = [], threading.get_ident()

    def look(method):
        real = method.solve

        def solve(job):
            assert threading.get_ident() != main
            seen.append(settings())
            found = real(job)
            seen.append(settings())
            return found

        monkeypatch.setattr(method, "solve", solve)

    for method in (jacobians.Job, replayed._Matrix):
        look(method)
    with ac.Monitor(model, batch=batch, tokens=4) as monitor:
        before, classes = settings(), [type(m) for m in model.modules()]
        gate.set()
        monitor.flush()
        assert settings() == before
        assert [type(m) for m in model.modules()] == classes
    assert seen
    assert all(s[0] == before[0] and s[4:] == before[4:] for s in seen)


def test_one_jacobian_that_fails_is_told_and_the_rest_is_kept(monkeypatch):
    model, batch = made("timm-vit")
    real = jacobians.Job.solve

    def solve(job):
        if job.head == 1:
            raise RuntimeError("no convergence")
        return real(job)

    monkeypatch.setattr(jacobians.Job, "solve", solve)
    with (
        pytest.warns(RuntimeWarning, match=r"head 1 of blocks\.0\.attn.*no convergence") as told,
        ac.Monitor(model, every=1, batch=batch, tokens=4, heads=True, patience=math.inf) as monitor,
    ):
        monitor.step()
    assert len(told) == 1
    assert len(monitor.history) == 2
    for record in monitor.history:
        found = {(r.layer, r.head): r.values for r in record.rows}
        assert "jacobian_kappa" not in found[0, 1]
        assert found[0, 1]["entropy"] > 0
        assert found[0, 1]["q_kappa"] > 1
        assert found[0, 0]["jacobian_kappa"] > 1
        assert found[0, None]["jacobian_kappa"] > 1


def test_modules_that_are_exchanged_are_followed():
    model, batch = made("timm-vit")
    other, _ = made("timm-vit")
    with torch.no_grad():
        other.blocks[0].attn.qkv.weight.mul_(3)
    with ac.Monitor(model, every=1, batch=batch, tokens=4, patience=math.inf) as monitor:
        model.blocks[0].attn = other.blocks[0].attn
        monitor.step()
        model.blocks[1].attn.qkv = other.blocks[0].attn.qkv  # a part alone
        monitor.step()
    tops = [[row.values["q_sigma_max"] for row in record.rows] for record in monitor.history]
    assert tops[1] == pytest.approx([3 * tops[0][0], tops[0][1]])
    assert tops[2] == pytest.approx([3 * tops[0][0]] * 2)
    report = ac.diagnose(model, batch, tokens=4)
    last = [row.values["jacobian_kappa"] for row in monitor.history[-1].rows]
    assert last == pytest.approx(
        [r.values["jacobian_kappa"] for r in report.rows if r.head is None]
    )


@pytest.mark.parametrize("layers", [1, "blocks.1*", iter([-1])], ids=["number", "path", "once"])
def test_layers_are_chosen_anew_in_the_same_way(layers):
    model, _ = made("timm-vit")
    with ac.Monitor(model, every=1, layers=layers, patience=math.inf) as monitor:
        model.blocks[1].attn = made("timm-vit")[0].blocks[1].attn
        monitor.step()
    assert [[row.layer for row in record.rows] for record in monitor.history] == [[1], [1]]


def test_an_attention_that_is_gone_is_told_and_training_goes_on():
    model, _ = made("timm-vit")
    with ac.Monitor(model, every=1, layers=[1], patience=math.inf) as monitor:
        model.blocks[1].attn = torch.nn.Identity()
        with pytest.warns(RuntimeWarning, match="step 1 could not be measured.*none of the"):
            monitor.step()
        monitor.step()
    assert [record.step for record in monitor.history] == [0]


@pytest.mark.parametrize("wrong", ["samples", "tokens"])
def test_a_number_that_makes_no_sense_is_told_at_once(wrong):
    model, batch = made("timm-vit")
    with pytest.raises(ValueError, match=f"{wrong} must be above 0"):
        ac.Monitor(model, batch=batch, **{wrong: 0})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", ["plain", "all", "xcit"])
def test_from_a_gpu(name, gate):
    model, batch = MODELS[name]()
    batch = batch if torch.is_tensor(batch) else torch.randn(2, 3, 8, 8)
    model.cuda()
    report = ac.diagnose(model, batch, tokens=4)
    with ac.Monitor(model, batch=batch, tokens=4, heads=True) as monitor:
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.zero_()
        gate.set()
        check(monitor.history[0], report)
