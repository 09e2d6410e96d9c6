"""The Monitor as a callback of Lightning's Trainer, under both of its names."""

import importlib
import math

import pytest
import torch
from torch import nn

import attncond as ac
from attncond.integrations.lightning import MonitorCallback


@pytest.fixture(params=["lightning.pytorch", "pytorch_lightning"])
def library(request):
    return importlib.import_module(request.param)


def build(library):
    class Module(library.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.model = nn.TransformerEncoderLayer(16, 2, 16, batch_first=True)

        def training_step(self, batch, index):
            return self.model(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    return Module()


def data():
    x = torch.randn(24, 5, 16, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=2)


def fit(library, folder, callbacks=(), checkpoint=None, logger=False, steps=6, **options):
    module = build(library)
    trainer = library.Trainer(
        max_steps=steps, accumulate_grad_batches=2, callbacks=list(callbacks), logger=logger,
        accelerator="cpu", enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, **{"enable_checkpointing": False, **options},
    )  # fmt: skip
    torch.manual_seed(2)
    trainer.fit(module, data(), ckpt_path=checkpoint)
    return trainer, module


class Metrics:
    """A logger that keeps what it gets."""

    def __init__(self, library):
        base = importlib.import_module(f"{library.__name__}.loggers.logger").Logger

        class Kept(base):
            name = version = "kept"

            def log_metrics(self, metrics, step=None):
                kept.append((metrics, step))

            def log_hyperparams(self, *args, **kwargs):
                pass

        kept = self.kept = []
        self.logger = Kept()


def test_steps_loggers_and_the_same_training(library, tmp_path):
    _, stock = fit(library, tmp_path)
    metrics = Metrics(library)
    callback = MonitorCallback(every=4, patience=math.inf)
    trainer, watched = fit(library, tmp_path, [callback], logger=metrics.logger)
    expected = stock.state_dict()
    assert all(torch.equal(v, expected[k]) for k, v in watched.state_dict().items())
    history = callback.monitor.history
    assert [r.step for r in history] == [0, 4, 6]
    assert [step for _, step in metrics.kept if step is not None][-1] == 6
    logged = {
        step: values
        for values, step in metrics.kept
        if "attncond.q_kappa/model.self_attn" in values
    }
    assert list(logged) == [0, 4, 6]
    name = "attncond.q_kappa/model.self_attn"
    assert logged[4][name] == history[1].rows[0].values["q_kappa"]
    assert history[0].loss is None
    assert history[-1].loss > 0
    weight = watched.model.self_attn.in_proj_weight[:16].detach().double()
    sigma = torch.linalg.svdvals(weight)
    kappa = history[-1].rows[0].values["q_kappa"]
    assert kappa == pytest.approx((sigma[0] / sigma[-1]).item(), rel=1e-6)
    assert trainer.global_step == 6


def test_a_resumed_run_goes_on_with_its_file(library, tmp_path):
    path = tmp_path / "curves.jsonl"
    options = {"every": 2, "log": path, "patience": math.inf}
    trainer, _ = fit(library, tmp_path, [MonitorCallback(**options)], steps=4)
    trainer.save_checkpoint(tmp_path / "at4.ckpt")
    fit(library, tmp_path, [MonitorCallback(**options)], checkpoint=tmp_path / "at4.ckpt", steps=8)
    assert [r.step for r in ac.Monitor.read(path)] == [0, 2, 4, 6, 8]


def test_what_was_measured_before_an_error_is_kept(library, tmp_path):
    class Failing(library.Callback):
        def on_train_batch_start(self, trainer, module, batch, index):
            if index == 5:
                raise FloatingPointError("diverged")

    callback = MonitorCallback(every=1, log=tmp_path / "x.jsonl", patience=math.inf)
    with pytest.raises(FloatingPointError, match="diverged"):
        fit(library, tmp_path, [callback, Failing()])
    assert [r.step for r in ac.Monitor.read(tmp_path / "x.jsonl")] == [0, 1, 2]
