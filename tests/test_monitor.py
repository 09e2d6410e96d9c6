"""A Monitor tells the truth, survives what happens in trainings of days, and changes nothing."""

import json
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
import warnings

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from cases import CASE, CASES
from full_disk import Full
from processes import together
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import attncond as ac
from attncond.inspection import inspect
from attncond.monitor import History
from attncond.monitor.sinks import scalars

pytestmark = pytest.mark.filterwarnings("error:attncond.Monitor")


def encoder(dropout=0.1):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=dropout, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


def batches(count=6, width=16):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 5, width, generator=generator) for _ in range(count)]


def train(model, monitor=None, count=6, after=lambda step: None):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for x in batches(count):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if monitor is not None:
            monitor.step(loss=loss)
        losses.append(loss.item())
        after(len(losses))
    return losses


def stepped(monitor, count):
    for _ in range(count):
        monitor.flush()
        monitor.step()
    monitor.flush()


def values(record, layer=0, head=None):
    (found,) = [r.values for r in record.rows if (r.layer, r.head) == (layer, head)]
    return found


def check(found, prefix, matrix):
    """Every number against the singular values of the matrix in float64."""
    sigma = torch.linalg.svdvals(matrix.detach().double())
    close = {"rel": 1e-6}
    assert found[f"{prefix}_sigma_max"] == pytest.approx(sigma[0].item(), **close)
    assert found[f"{prefix}_sigma_min"] == pytest.approx(sigma[-1].item(), **close)
    assert found[f"{prefix}_kappa"] == pytest.approx((sigma[0] / sigma[-1]).item(), **close)
    rank = (sigma.square().sum() / sigma[0] ** 2).item()
    assert found[f"{prefix}_stable_rank"] == pytest.approx(rank, **close)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_the_numbers_are_those_of_an_svd(case, dtype):
    model = case.make(dtype)
    with ac.Monitor(model, heads=True) as monitor:
        pass
    (record,) = monitor.history
    for layer, site in enumerate(inspect(model)):
        for p in site.projections:
            matrix = p.matrix().detach()
            for name in (p.role, f"raw_{p.role}"):
                check(values(record, layer), name, matrix.flatten(0, 1))
                for h in range(site.heads):
                    check(values(record, layer, h), name, matrix[h * p.heads // site.heads])


def test_badly_conditioned_and_singular_matrices():
    model = nn.MultiheadAttention(40, 4)
    u, v = (torch.linalg.qr(torch.randn(40, 40, dtype=torch.float64))[0] for _ in range(2))
    model.double()
    with torch.no_grad():
        for i, least in enumerate((1e-4, 1e-9, 0.0)):
            sigma = torch.linspace(1, 0.5, 40, dtype=torch.float64)
            sigma[-1] = least
            model.in_proj_weight[40 * i : 40 * (i + 1)] = u * sigma @ v
    with ac.Monitor(model) as monitor:
        found = values(monitor.history[0])
    assert found["q_kappa"] == pytest.approx(1e4, rel=1e-6)
    assert found["k_kappa"] == pytest.approx(1e9, rel=1e-6)
    assert found["v_kappa"] == math.inf
    assert json.loads(json.dumps(monitor.history.to_dict(), allow_nan=False))


@pytest.mark.parametrize("method", [ac.Spectral(), ac.Spectral.paper_svd()], ids=str)
def test_raw_and_effective_weights_of_a_conditioned_model(method):
    model = encoder()
    handle = ac.condition(model, method)
    with ac.Monitor(model, every=2, patience=math.inf) as monitor:
        train(model, monitor)
        record = monitor.history[-1]
    attention = model.layers[1].self_attn
    for i, role in enumerate("qkv"):
        rows = slice(16 * i, 16 * (i + 1))
        raw = attention.get_parameter("in_proj_weight")[rows]
        check(values(record, 1), f"raw_{role}", raw)
        check(values(record, 1), role, attention.in_proj_weight.as_subclass(torch.Tensor)[rows])
    names = scalars(record)
    assert names["attncond.q_kappa/layers.1.self_attn"] == values(record, 1)["q_kappa"]
    assert names["attncond.raw_q_kappa/layers.1.self_attn"] == values(record, 1)["raw_q_kappa"]
    handle.remove()
    with ac.Monitor(model) as monitor:
        assert not [name for name in scalars(monitor.history[0]) if "raw" in name]


def test_the_weights_of_the_step_are_measured_not_those_when_it_is_computed(monkeypatch):
    model, waiting = encoder(), threading.Event()
    compute = ac.monitor._record
    monkeypatch.setattr(ac.monitor, "_record", lambda *a: waiting.wait() and compute(*a))
    with ac.Monitor(model) as monitor:
        before = model.layers[0].self_attn.in_proj_weight[:16].detach().clone()
        with torch.no_grad():
            model.layers[0].self_attn.in_proj_weight.mul_(3)
        waiting.set()
        check(values(monitor.history[0]), "q", before)


@pytest.mark.parametrize("probe", [False, True])
@pytest.mark.parametrize("method", [None, ac.Spectral.paper_svd(), ac.RemoveGap()], ids=str)
def test_training_is_the_same_to_the_bit(method, probe):
    outcomes = []
    for watched in (False, True):
        model = encoder()
        if method:
            ac.condition(model, method)
        model.train()
        torch.manual_seed(3)
        monitor = None
        if watched:
            batch = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(5))
            options = {"batch": batch, "tokens": 4} if probe else {}
            monitor = ac.Monitor(model, every=2, heads=True, patience=math.inf, **options)
        losses = train(model, monitor)
        threads = torch.get_num_threads()
        outcomes.append((losses, model.state_dict(), torch.get_rng_state(), model.training))
        if monitor:
            monitor.close()
            assert [r.step for r in monitor.history] == [0, 2, 4, 6]
            assert [r.loss for r in monitor.history] == [None, losses[1], losses[3], losses[5]]
            assert torch.get_num_threads() == threads
    (losses, state, random, mode), (losses_2, state_2, random_2, mode_2) = outcomes
    assert losses == losses_2
    assert all(torch.equal(v, state_2[k]) for k, v in state.items())
    assert torch.equal(random, random_2)
    assert mode
    assert mode_2


def test_threads_that_start_later_keep_their_cores():
    found = []
    torch.set_num_threads(2)
    try:
        with ac.Monitor(encoder()) as monitor:
            monitor.flush()
            other = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
            other.start()
            other.join()
            mine = monitor._pool.submit(torch.get_num_threads).result()
            assert (mine, found[0], torch.get_num_threads()) == (1, 2, 2)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("whole_step", [False, True])
@pytest.mark.parametrize("probe", [False, True])
def test_compiled_training_is_traced_once(probe, whole_step):
    model = encoder(dropout=0.0)
    batch = batches(1)[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    compiled = torch.compile(model, backend="aot_eager")
    monitor = ac.Monitor(compiled, every=2, patience=math.inf, batch=batch if probe else None)

    def step(x):
        loss = compiled(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.step(loss=loss)

    step(batch)
    step(batch)
    if whole_step:
        step = torch.compile(step, backend="aot_eager")
        step(batch)
    frames, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    for x in batches(7):
        step(x)
    monitor.close()
    assert counters["stats"]["unique_graphs"] == frames
    assert sum(counters["graph_break"].values()) == breaks
    if not whole_step:
        assert not breaks
    assert len(monitor.history) >= 5
    assert [row.path for row in monitor.history[0].rows] == [
        "layers.0.self_attn",
        "layers.1.self_attn",
    ]
    torch._dynamo.reset()


def test_a_probe_is_what_diagnose_says():
    model, batch = encoder(), batches(1)[0]
    report = ac.diagnose(model, batch, tokens=4, samples=2)
    with ac.Monitor(model, batch=batch, tokens=4, samples=2, heads=True) as monitor:
        record = monitor.history[0]
    assert len(record.rows) == len(report.rows)
    for row in report.rows:
        found = values(record, row.layer, row.head)
        for name in ("entropy", "saturation", "attention_sigma_2", "jacobian_kappa", "q_kappa"):
            assert found[name] == pytest.approx(row.values[name], rel=1e-9), name
        assert not [name for name, value in found.items() if isinstance(value, str)]
    assert values(record)["token_stable_rank"] > 1
    with ac.Monitor(model, batch=batch) as monitor:
        assert "jacobian_kappa" not in values(monitor.history[0])
        assert "attncond.entropy/layers.0.self_attn" in scalars(monitor.history[0])


def test_a_probe_that_does_not_fit_is_told_at_once_and_later_only_in_a_warning():
    with pytest.raises(ac.DiagnosisError, match="cannot run on this batch"):
        ac.Monitor(encoder(), batch=torch.randn(2, 5, 3))
    model = encoder()
    batch = batches(1)[0]
    monitor = ac.Monitor(model, every=1, batch=lambda m: m(batch), patience=math.inf)
    batch = torch.randn(2, 5, 3)
    with pytest.warns(RuntimeWarning, match="probe failed at step 1"):
        monitor.step()
    assert "entropy" not in values(monitor.history[-1])
    assert values(monitor.history[-1])["q_kappa"] > 1
    monitor.close()


def test_when_it_measures():
    model = encoder()
    with ac.Monitor(model, every=3, at=[1, 7], patience=math.inf) as monitor:
        train(model, monitor, count=8)
        monitor.measure(loss=2.5)
        monitor.measure()
    assert [r.step for r in monitor.history] == [0, 1, 3, 6, 7, 8]
    assert monitor.history[-1].loss == 2.5
    monitor.step(step=9)
    assert len(monitor.history) == 6
    with ac.Monitor(model, every=None, at=[4], patience=math.inf) as monitor:
        for step in range(6):  # counted from 0 by the loop itself
            monitor.step(step=step)
    assert [r.step for r in monitor.history] == [0, 4]


def test_what_it_measures():
    model = encoder()
    with ac.Monitor(model, roles="qv", layers=["*1*"]) as monitor:
        (row,) = monitor.history[0].rows
    assert (row.layer, row.path, row.head) == (1, "layers.1.self_attn", None)
    assert {name.removeprefix("raw_")[0] for name in row.values} == {"q", "v"}
    for wrong in ({"roles": "qx"}, {"roles": ""}, {"every": 0}, {"start": -1}, {"tokens": 4}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            ac.Monitor(model, **wrong)
    with pytest.raises(ac.DiagnosisError, match="none of the model's 2"):
        ac.Monitor(model, layers=[7])
    with pytest.raises(ac.UnsupportedAttentionError, match="no attention to monitor"):
        ac.Monitor(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        ac.Monitor("model")
    with pytest.raises(TypeError, match="log must be"):
        ac.Monitor(model, log=3)
    with pytest.raises(ac.DiagnosisError, match="meta"):
        ac.Monitor(encoder().to("meta"))
    monitor = ac.Monitor(model, every=1, patience=math.inf)
    with pytest.warns(RuntimeWarning, match="one number"):
        monitor.step(loss=torch.zeros(2))
    monitor.close()


def test_steps_that_come_too_soon_are_left_out_and_said_so(monkeypatch):
    waiting, compute = threading.Event(), ac.monitor._record
    monkeypatch.setattr(ac.monitor, "_record", lambda *a: waiting.wait() and compute(*a))
    monitor = ac.Monitor(encoder(), every=1, patience=0.01)
    with pytest.warns(RuntimeWarning, match="step 1 is not measured"):
        monitor.step()
    monitor.step()
    waiting.set()
    monitor.flush()
    monitor.step()
    monitor.close()
    assert [r.step for r in monitor.history] == [0, 3]


def test_weights_that_are_not_finite_are_recorded_and_named_once():
    model = encoder()
    with ac.Monitor(model, every=1, heads=True, patience=math.inf) as monitor:
        monitor.flush()
        with torch.no_grad():
            model.layers[1].self_attn.in_proj_weight[20] = math.nan  # W_K, its first head
        with pytest.warns(RuntimeWarning) as told:
            stepped(monitor, 2)
    (message,) = [str(w.message) for w in told]
    assert "W_K of layers.1.self_attn holds NaN or Inf at step 1" in message
    last = monitor.history[-1]
    assert math.isnan(values(last, 1)["k_kappa"])
    assert math.isnan(values(last, 1, 0)["k_sigma_min"])
    assert values(last, 1, 1)["k_kappa"] > 1
    assert values(last, 1)["q_kappa"] > 1


class Broken:
    def __init__(self):
        self.calls = 0

    def __call__(self, values, step):
        self.calls += 1
        raise ConnectionError("the tracker is down")


def test_loggers_of_all_kinds_and_one_that_fails(tmp_path, caplog):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    class Lightning:
        def log_metrics(self, metrics, step):
            seen.append((metrics, step))

    seen, called, broken = [], [], Broken()
    writer = SummaryWriter(tmp_path)
    logger = logging.getLogger("attncond.test")
    log = [writer, Lightning(), lambda v, s: called.append((v, s)), logger, broken]
    caplog.set_level(logging.INFO)
    monitor = ac.Monitor(encoder(), every=1, log=log)
    with pytest.warns(RuntimeWarning, match="tracker is down") as told:
        stepped(monitor, 2)
    monitor.close()
    writer.close()
    assert len(told) == 1
    assert broken.calls == len(monitor.history) == 3
    assert seen == called
    assert [step for _, step in seen] == [0, 1, 2]
    assert seen[0][0] == scalars(monitor.history[0])
    assert "step 2: κ(W_Q) median" in caplog.messages[-1]
    events = EventAccumulator(str(tmp_path)).Reload()
    curve = events.Scalars("attncond.v_sigma_min/layers.1.self_attn")
    assert [e.step for e in curve] == [0, 1, 2]
    expected = values(monitor.history[2], 1)["v_sigma_min"]
    assert curve[2].value == pytest.approx(expected, rel=1e-6)


def test_history_as_data_table_and_files(tmp_path):
    model = encoder()
    with ac.Monitor(
        model, every=2, log=tmp_path / "a.jsonl", heads=True, patience=math.inf
    ) as monitor:
        train(model, monitor)
    assert ac.Monitor.read(tmp_path / "a.jsonl") == monitor.history
    assert ac.Monitor.read(monitor.to_json(tmp_path / "b.json")) == monitor.history
    data = monitor.history.to_dict()
    assert list(data) == ["schema", "model", "records"]
    assert data["schema"] == "attncond.history/1"
    assert list(data["records"][1]) == ["step", "rows", "loss"]
    assert list(data["records"][1]["rows"][0]) == ["layer", "path", "head", "values"]
    frame = monitor.frame
    assert len(frame) == 4 * 2 * 3
    assert set(frame.columns) - {"step", "loss"} <= set(ac.Report.columns)
    whole = frame[frame["head"].isna() & (frame["layer"] == 1)].set_index("step")
    assert whole.loc[4, "v_kappa"] == values(monitor.history[2], 1)["v_kappa"]


def test_page(tmp_path):
    with ac.Monitor(encoder(), every=1, patience=math.inf) as monitor:
        monitor.step(loss=1.0)
    page = monitor.to_html(tmp_path / "curves.html")
    assert "layers.1.self_attn" in page.read_text(encoding="utf-8")


def test_resuming_goes_on_where_the_checkpoint_was(tmp_path):
    model, path = encoder(), tmp_path / "run.jsonl"
    kept = {}

    def save(step):
        if step == 4:
            kept.update({k: v.clone() for k, v in model.state_dict().items()})

    with ac.Monitor(model, every=2, log=path, patience=math.inf) as monitor:
        train(model, monitor, after=save)
    with pytest.raises(ac.DiagnosisError, match="up to step 6 already"):
        ac.Monitor(model, every=2, log=path)
    model.load_state_dict(kept)
    with ac.Monitor(model, every=2, log=path, start=4, patience=math.inf) as again:
        assert [r.step for r in again.history] == [0, 2, 4]
        for _ in range(4):
            again.step()
    assert [r.step for r in again.history] == [0, 2, 4, 6, 8]
    assert History.read(path) == again.history
    assert again.history[3].rows == again.history[2].rows  # no training this time
    assert again.history[3] != monitor.history[3]
    with pytest.raises(ac.DiagnosisError, match="choose another file"):
        ac.Monitor(nn.MultiheadAttention(8, 2), log=path, start=8)
    with ac.Monitor(model, every=4, start=4) as fresh:  # a checkpoint without a file
        assert [r.step for r in fresh.history] == [4]


def test_a_full_disk_is_survived_and_made_up_for(tmp_path, monkeypatch):
    path = tmp_path / "run.jsonl"
    monitor = ac.Monitor(encoder(), every=1, log=path, patience=math.inf)
    monitor.flush()
    opened = open

    import attncond.monitor.history as module

    monkeypatch.setattr(module, "open", lambda *a: Full(opened(*a)), raising=False)
    with pytest.warns(RuntimeWarning, match="No space left") as told:
        stepped(monitor, 3)
    assert len(told) == 1
    assert [r.step for r in History.read(path)] == [0]
    monkeypatch.undo()
    monitor.step()
    monitor.close()
    assert [r.step for r in History.read(path)] == [0, 1, 2, 3, 4]


KILLED = """
import sys, torch, attncond as ac
from torch import nn
model = nn.TransformerEncoderLayer(32, 4)
monitor = ac.Monitor(model, every=1, log=sys.argv[1], patience=1e9)
while True:
    monitor.step(loss=1.0)
    print(monitor._last, flush=True)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_kill_9_loses_at_most_the_last_record(tmp_path):
    path = tmp_path / "run.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path)],
        stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True,
    )  # fmt: skip
    try:
        for line in process.stdout:
            if int(line) >= 40:
                break
    finally:
        process.kill()
        rest = process.communicate()[0]
    last = int([line, *rest.split("\n")[:-1]][-1])
    steps = [r.step for r in ac.Monitor.read(path)]
    assert steps == list(range(len(steps)))
    assert steps[-1] >= last - 1
    assert steps[-1] <= last + 1


def work(rank, folder):
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        torch.save((ddp(rank, folder), fsdp(folder)), f"{folder}/{rank}.pt")


def ddp(rank, folder):
    model = DistributedDataParallel(encoder(dropout=0.0))
    batch = batches(1)[0]
    # Only one process may step it: there is no collective inside.
    log = f"{folder}/ddp.jsonl"
    monitor = ac.Monitor(model, every=2, log=log, batch=batch, patience=math.inf)
    losses = train(model, monitor if rank == 0 else None)
    monitor.step()
    monitor.close()
    return losses, [r.step for r in monitor.history], monitor._pool is not None


def fsdp(folder):
    case = CASE["timm-vit"]
    model = case.make()
    ac.condition(model, ac.Spectral())
    expected = ac.Monitor(model).history.to_dict() if dist.get_rank() == 0 else None
    # Without a mesh, it goes to a GPU where there is one, whose memory gloo takes for the host's.
    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    said = []
    for options in ({}, {"gather": True, "batch": torch.randn(2, 3, 8, 8)}):
        try:
            ac.Monitor(model, **options)
        except ac.ConditioningError as error:
            said.append(str(error))
    monitor = ac.Monitor(model, every=1, gather=True, log=f"{folder}/fsdp.jsonl")
    found = monitor.history.to_dict()
    for _ in range(3):
        case.run(model)
        monitor.step()
    monitor.close()
    same = expected is None or found["records"] == expected["records"]
    return said, same, [r.step for r in monitor.history]


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
@pytest.mark.xdist_group("distributed")
def test_two_processes(tmp_path):
    together(work, tmp_path)
    (first, first_fsdp), (second, second_fsdp) = (
        torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)
    )
    assert first == (second[0], [0, 2, 4, 6], True)
    assert second[1:] == ([], False)
    assert [r.step for r in History.read(tmp_path / "ddp.jsonl")] == [0, 2, 4, 6]
    for said, same, steps in (first_fsdp, second_fsdp):
        assert "gather=True" in said[0]
        assert "probe" in said[1]
        assert same
        assert steps in ([0, 1, 2, 3], [])
    assert first_fsdp[2] == [0, 1, 2, 3]


def test_the_rank_is_known_before_the_processes_have_met(monkeypatch, tmp_path):
    monkeypatch.setenv("RANK", "1")
    with ac.Monitor(encoder(), every=1, log=tmp_path / "x.jsonl") as monitor:
        monitor.step()
    assert len(monitor.history) == 0
    assert not (tmp_path / "x.jsonl").exists()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_a_gpu_nothing_waits():
    model = encoder().cuda()
    weight = model.layers[0].self_attn.in_proj_weight
    with ac.Monitor(model, every=1, patience=math.inf) as monitor:
        loss = torch.ones((), device="cuda")
        monitor.step(loss=loss)  # memory is pinned once
        monitor.flush()
        before = weight[:16].detach().cpu()
        torch.cuda._sleep(10**9)  # half a second of work ahead
        start = time.perf_counter()
        monitor.step(loss=loss)
        with torch.no_grad():
            weight.zero_()
            loss.zero_()
        assert time.perf_counter() - start < 0.1
        check(values(monitor.history[2]), "q", before)
        assert monitor.history[2].loss == 1.0
