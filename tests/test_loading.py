"""Models that run: the same outputs as a model built by hand, and what a wrong file is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("timm")
pytest.importorskip("transformers")

import timm
import tiny_models
from safetensors.torch import save_file
from torch import Tensor, nn

import attncond as ac
from attncond.checkpoints import CheckpointError
from attncond.diagnose.inputs import Wanted, choose
from attncond.loading import load, restore
from attncond.methods import Spectral
from attncond.sources import SourceError

SMALL = "test_vit"  # timm's own model for tests


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def state(model: nn.Module, prefix: str = "") -> dict[str, Tensor]:
    return {prefix + k: v.contiguous().clone() for k, v in model.state_dict().items()}


def outputs(model: nn.Module, batch: Any) -> list[Tensor]:
    with torch.no_grad():
        found = model.eval()(**batch) if isinstance(batch, dict) else model.eval()(batch)
    parts = found.values() if isinstance(found, dict) else [found]
    return [part for part in parts if isinstance(part, Tensor)]


@pytest.mark.parametrize(
    "name", [n for n in tiny_models.MODELS if n not in ("wav2vec2", "whisper")]
)
def test_a_saved_model_computes_what_it_did(name: str) -> None:
    """Also with buffers that no file holds: rotary frequencies, relative positions, masks."""
    model = tiny_models.save(name, Path(name), seed=3)
    loaded = load(f"hf:{name}")
    assert loaded.weights == f"{name}/model.safetensors"
    assert not loaded.notes
    buffers = dict(loaded.model.named_buffers())
    for key, value in model.named_buffers():
        assert torch.equal(value, buffers[key]), key
    batch = choose(model, None, Wanted(samples=2, length=12)).batch
    for a, b in zip(outputs(model, batch), outputs(loaded.model, batch), strict=True):
        assert torch.equal(a, b)


def test_random_weights_have_a_seed() -> None:
    tiny_models.save("bert", Path("bert"), seed=3)
    first, again = (load("hf:bert", seed=1, random=True) for _ in range(2))
    other = load("hf:bert", seed=2, random=True)
    key = "bert.encoder.layer.0.attention.self.query.weight"
    assert first.weights == "random, seed 1"
    assert torch.equal(first.model.get_parameter(key), again.model.get_parameter(key))
    assert not torch.equal(first.model.get_parameter(key), other.model.get_parameter(key))
    assert not any(p.is_meta for p in [*first.model.parameters(), *first.model.buffers()])


@pytest.mark.parametrize("prefix", ["", "module.", "model._orig_mod."])
@pytest.mark.parametrize("source", [f"timm:{SMALL}", "hf:bert"])
def test_prefixes_are_left_out_and_that_is_said(source: str, prefix: str) -> None:
    torch.manual_seed(5)
    if source == "hf:bert":
        model = tiny_models.save("bert", Path("bert"), seed=5)
        held = {k: v for k, v in state(model, prefix).items() if "cls.predictions.decoder" not in k}
    else:
        model = timm.create_model(SMALL)
        held = state(model, prefix)
    save_file(held, "x.safetensors")
    loaded = load(source, Path("x.safetensors"))
    for key, value in model.state_dict().items():
        assert torch.equal(value, loaded.model.state_dict()[key]), key
    assert bool(loaded.notes) == bool(prefix)
    assert not prefix or "was left out" in loaded.notes[0]


def test_half_precision_is_widened() -> None:
    model = timm.create_model(SMALL)
    save_file({k: v.bfloat16() for k, v in state(model).items()}, "x.safetensors")
    loaded = load(f"timm:{SMALL}", Path("x.safetensors")).model
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    tiny_models.make("llama").bfloat16().save_pretrained("llama")
    assert {p.dtype for p in load("hf:llama").model.parameters()} == {torch.float32}


@pytest.mark.parametrize("classes", [0, 7])
def test_another_number_of_classes_is_taken_over(classes: int) -> None:
    save_file(state(timm.create_model(SMALL, num_classes=classes)), "x.safetensors")
    loaded = load(f"timm:{SMALL}", Path("x.safetensors"))
    assert loaded.model.num_classes == classes
    assert loaded.notes == [f"the checkpoint has {classes} classes, not 1000: so has the model now"]


def test_another_model_is_named_by_what_does_not_fit() -> None:
    save_file(state(timm.create_model("vit_tiny_patch16_224")), "x.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load("timm:vit_small_patch16_224", Path("x.safetensors"))
    said = str(caught.value)
    assert "x.safetensors is not a checkpoint of timm:vit_small_patch16_224" in said
    assert "of another shape: blocks.0.attn.proj.bias is 192 in the file, 384 in the model" in said
    assert "and 14" in said  # not all of them
    assert "It fits timm:vit_tiny_patch16_224" in said


def test_more_layers_or_fewer_are_an_error() -> None:
    model = tiny_models.save("bert", Path("bert"))
    held = {k: v for k, v in state(model).items() if "cls.predictions.decoder" not in k}
    save_file({k: v for k, v in held.items() if "layer.1." not in k}, "less.safetensors")
    with pytest.raises(CheckpointError, match=r"only in the model: bert\.encoder\.layer\.1\."):
        load("hf:bert", Path("less.safetensors"))
    more = {
        k.replace("layer.1.", "layer.2."): v.clone() for k, v in held.items() if "layer.1." in k
    }
    save_file({**held, **more}, "more.safetensors")
    with pytest.raises(CheckpointError, match=r"only in the file: bert\.encoder\.layer\.2\."):
        load("hf:bert", Path("more.safetensors"))
    wide = tiny_models.make("bert")
    wide.resize_token_embeddings(120)
    wide.save_pretrained("wide")
    with pytest.raises(
        CheckpointError, match=r"word_embeddings.weight is 120x32 in the file, 99x32"
    ):
        load("hf:bert", Path("wide"))


def test_heads_that_the_model_has_not_are_left_out_with_a_note() -> None:
    tiny_models.save("bert", Path("bert"))
    config = json.loads(Path("bert/config.json").read_text())
    Path("bert/config.json").write_text(json.dumps({**config, "architectures": None}))
    left_out, untrained = load("hf:bert").notes
    assert "cls.predictions.bias" in left_out
    assert "pooler.dense.bias" in untrained
    tiny_models.save("gpt2", Path("gpt2"))
    config = json.loads(Path("gpt2/config.json").read_text())
    Path("gpt2/config.json").write_text(json.dumps({**config, "architectures": None}))
    assert type(load("hf:gpt2").model).__name__ == "GPT2Model"


def test_a_function_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("their_own.py").write_text(
        "from torch import nn\n"
        "class Tied(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.attn = nn.MultiheadAttention(8, 2)\n"
        "        self.a = nn.Linear(8, 8); self.b = nn.Linear(8, 8)\n"
        "        self.b.weight = self.a.weight\n"
        "def tied(): return Tied()\n"
    )
    monkeypatch.syspath_prepend(".")
    one = load("their_own:tied", seed=4)
    assert one.weights == "as their_own:tied makes them, seed 4"
    held = state(one.model)
    del held["b.weight"]  # as safetensors.torch.save_model does with tied weights
    save_file(held, "x.safetensors")
    again = load("their_own:tied", Path("x.safetensors"), seed=9).model
    assert torch.equal(again.get_parameter("a.weight"), one.model.get_parameter("a.weight"))
    del held["a.weight"]
    save_file(held, "y.safetensors")
    with pytest.raises(CheckpointError, match=r"only in the model: a\.weight, b\.weight"):
        load("their_own:tied", Path("y.safetensors"))


@pytest.mark.parametrize(
    "method", [Spectral(), Spectral(correction="polar"), Spectral(scope="head")]
)
def test_a_conditioned_checkpoint_comes_back(method: Spectral) -> None:
    model = timm.create_model(SMALL)
    handle = ac.condition(model, method)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)  # λ is that of the start, not of these weights
    save_file(state(model), "x.safetensors")
    loaded = load(f"timm:{SMALL}", Path("x.safetensors"))
    assert loaded.corrections
    with pytest.raises(CheckpointError, match=r"--method (spectral|polar).*fold\(\)"):
        restore(loaded.model, loaded.corrections, None, "x")
    ac.condition(loaded.model, method)
    restore(loaded.model, loaded.corrections, method, "x")
    batch = torch.randn(1, 3, 160, 160)
    assert torch.equal(model.eval()(batch), loaded.model.eval()(batch))
    handle.fold()
    save_file(state(model), "folded.safetensors")
    assert not load(f"timm:{SMALL}", Path("folded.safetensors")).corrections


@pytest.mark.parametrize(
    ("saved", "given"),
    [
        (Spectral(), Spectral(scope="head")),
        (Spectral(), Spectral(roles="qk")),
        (Spectral(), Spectral(correction="polar")),
        (Spectral(correction="polar"), Spectral(correction="polar", roles="q")),
    ],
)
def test_another_method_than_the_checkpoints_is_an_error(saved: Spectral, given: Spectral) -> None:
    model = timm.create_model(SMALL)
    ac.condition(model, saved)
    save_file(state(model), "x.safetensors")
    loaded = load(f"timm:{SMALL}", Path("x.safetensors"))
    ac.condition(loaded.model, given)
    with pytest.raises(CheckpointError, match="conditioned in another way than"):
        restore(loaded.model, loaded.corrections, given, "x.safetensors")


def test_a_model_that_does_not_fit_into_memory_is_refused_before_it_is_built() -> None:
    Path("config.json").write_text(
        json.dumps({"model_type": "gpt2", "n_embd": 65536, "n_head": 64, "n_layer": 96})
    )
    with pytest.raises(SourceError, match=r"weights of 2e\+04 GB|weights of 1\.98e\+04 GB"):
        load("hf:.")
