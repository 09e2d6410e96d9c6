"""A batch for a model of the command line: the user's own, files, or noise of the right shape."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attncond.diagnose import images, texts
from attncond.errors import DiagnosisError
from attncond.sources import call

__all__ = ["Inputs", "Wanted", "choose"]

_AUDIO = frozenset({"input_features", "input_values"})
_PATCHES = frozenset({"spatial_shapes", "grid_thw", "pixel_values_videos"})
_IMAGE = 224
_HINT = "Give the input yourself: --batch MODULE:FUNCTION, a function that returns a batch"


@dataclass(frozen=True)
class Wanted:
    """What the user asked the input to be."""

    images: Path | None = None
    text: Path | None = None
    tokenizer: Path | None = None
    batch: str | None = None
    samples: int = 4
    length: int = 128
    seed: int = 0


@dataclass
class Inputs:
    """A batch, what it is in words, and what is worth a note."""

    batch: Any
    words: str
    notes: list[str] = field(default_factory=list)


def choose(model: nn.Module, folder: Path | None, wanted: Wanted) -> Inputs:
    """The batch for ``model``, whose files, if it has any, are in ``folder``.

    Raises:
        DiagnosisError: The files cannot be read or are of the wrong kind, or it is not known what
            the model takes.
    """
    if wanted.batch is not None:
        if wanted.images is not None or wanted.text is not None:
            raise DiagnosisError("give --batch or files (--images, --text), not both")
        return _own(wanted.batch)
    config = getattr(model, "config", None)
    if hasattr(config, "model_type"):
        return _Transformers(model, folder, wanted).inputs()
    if getattr(model, "pretrained_cfg", None):
        return _timm(model, wanted)
    if type(model).__module__.startswith("torchvision."):
        size = getattr(model, "image_size", _IMAGE)
        return _pictures(wanted, (3, size, size))
    raise DiagnosisError(
        f"what {type(model).__name__} takes as its input is not known. {_HINT} (a tensor, a tuple "
        "of arguments or a dict of them); or measure its weights alone with --weights-only"
    )


def _own(where: str) -> Inputs:
    module, colon, function = where.partition(":")
    if not colon or not module or not function:
        raise DiagnosisError(f"--batch takes MODULE:FUNCTION, not '{where}'")
    batch = call(module, function)
    if not isinstance(batch, Tensor | tuple | list | Mapping) and not callable(batch):
        raise DiagnosisError(
            f"{where}() returned {type(batch).__name__}: a batch is a tensor, a tuple of "
            "arguments, a dict of them, or a function of the model"
        )
    return Inputs(batch, f"from {where}")


def _no_text(model: nn.Module, wanted: Wanted) -> None:
    if wanted.text is not None:
        raise DiagnosisError(f"{type(model).__name__} reads images, not text: use --images")


def _timm(model: nn.Module, wanted: Wanted) -> Inputs:
    _no_text(model, wanted)
    if wanted.images is not None:
        batch, notes = images.for_timm(model, wanted.images, wanted.samples)
        return Inputs(batch, f"{len(batch)} images of {wanted.images}", notes)
    import timm.data

    shape = timm.data.resolve_model_data_config(model)["input_size"]
    return _pictures(wanted, shape)


def _pictures(wanted: Wanted, shape: tuple[int, int, int]) -> Inputs:
    if wanted.images is not None:
        found, notes = images.for_transformers(None, wanted.images, wanted.samples, shape)
        count = len(found["pixel_values"])
        return Inputs(found["pixel_values"], f"{count} images of {wanted.images}", notes)
    generator = torch.Generator().manual_seed(wanted.seed)
    batch = torch.randn(wanted.samples, *shape, generator=generator)
    size = "x".join(map(str, batch.shape))
    return Inputs(batch, f"random images {size}, seed {wanted.seed}")


class _Transformers:
    """Finds out by a model's forward and its configuration what it reads."""

    def __init__(self, model: nn.Module, folder: Path | None, wanted: Wanted) -> None:
        self.model, self.folder, self.wanted = model, folder, wanted
        self.config: Any = model.config
        parameters = inspect.signature(model.forward).parameters
        self.names = parameters.keys()
        self.required = {
            p.name
            for p in parameters.values()
            if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        }
        self.generator = torch.Generator().manual_seed(wanted.seed)
        self.words: list[str] = []
        self.notes: list[str] = []

    def inputs(self) -> Inputs:
        """Everything that the forward needs."""
        name, wanted = type(self.model).__name__, self.wanted
        # Models that put images or sounds in place of some tokens run on text alone.
        tokens_only = any(k.endswith(("_token_id", "_token_index")) and v is not None
                          for k, v in vars(self.config).items()
                          if k.startswith(("image", "audio", "video")))  # fmt: skip
        sees = "pixel_values" in self.names and not tokens_only
        reads = bool({"input_ids", "decoder_input_ids"} & self.names)
        main = getattr(self.model, "main_input_name", None)
        odd = (_AUDIO | _PATCHES) & self.names
        need = self.required - {"input_ids", "decoder_input_ids", "pixel_values", "attention_mask"}
        if need or (odd and not tokens_only) or main in _AUDIO or not (sees or reads):
            takes = ", ".join(sorted(odd | need) or list(self.names)[:3]) or "nothing"
            raise DiagnosisError(
                f"{name} takes {takes}, which attncond cannot make. {_HINT} (a dict of {takes})"
            )
        if wanted.images is not None and not sees:
            raise DiagnosisError(f"{name} reads text, not images: use --text")
        if wanted.text is not None and not reads:
            _no_text(self.model, wanted)
        batch: dict[str, Tensor] = {}
        if reads:
            batch |= self._tokens()
        if sees:
            batch |= self._pixels()
        if tokens_only:
            self.notes.append("the input is text alone; --batch may give images or sounds as well")
        return Inputs(batch, " and ".join(self.words), self.notes)

    def _part(self, *names: str) -> Any:
        """The part of the configuration that speaks of one modality, or all of it."""
        found = (getattr(self.config, name, None) for name in names)
        return next((part for part in found if hasattr(part, "to_dict")), self.config)

    def _pixels(self) -> dict[str, Tensor]:
        vision = self._part("vision_config", "image_config", "encoder")
        size = getattr(vision, "image_size", None) or getattr(vision, "input_size", None)
        if size is None:
            size = _IMAGE
            self.notes.append(f"the configuration names no image size: {_IMAGE} was taken")
        height, width = (size, size) if isinstance(size, int) else tuple(size)[:2]
        shape = (int(getattr(vision, "num_channels", 3)), height, width)
        frames = getattr(vision, "num_frames", None)
        if self.wanted.images is not None:
            if frames:
                raise DiagnosisError(f"{type(self.model).__name__} takes videos. {_HINT}")
            found, notes = images.for_transformers(
                self.folder, self.wanted.images, self.wanted.samples, shape
            )
            self.notes += notes
            kept = {k: v for k, v in found.items() if k in self.names and isinstance(v, Tensor)}
            self.words.append(f"{len(found['pixel_values'])} images of {self.wanted.images}")
            return kept
        whole = (self.wanted.samples, *([frames] if frames else []), *shape)
        batch = torch.randn(whole, generator=self.generator)
        size = "x".join(map(str, batch.shape))
        what = "videos" if frames else "images"
        self.words.append(f"random {what} {size}, seed {self.wanted.seed}")
        return {"pixel_values": batch}

    def _tokens(self) -> dict[str, Tensor]:
        text = self._part("text_config", "decoder" if "input_ids" not in self.names else "encoder")
        vocabulary = getattr(text, "vocab_size", None) or getattr(self.config, "vocab_size", None)
        if not isinstance(vocabulary, int):
            raise DiagnosisError(
                f"the configuration of {type(self.model).__name__} names no vocabulary. {_HINT}"
            )
        length = min(self.wanted.length, self._positions(text))
        if self.wanted.text is not None:
            folder = self.wanted.tokenizer or self.folder
            batch, notes = texts.encode(
                self.wanted.text, folder, self.wanted.samples, length, vocabulary
            )
            self.notes += notes
            ids = batch["input_ids"]
            self.words.append(f"{len(ids)} x {ids.shape[1]} tokens of {self.wanted.text}")
        else:
            ids = self._random_ids(text, vocabulary, length)
            batch = {"input_ids": ids}
            shape = f"{len(ids)} x {ids.shape[1]}"
            self.words.append(f"random tokens {shape}, seed {self.wanted.seed}")
        if "decoder_input_ids" in self.names:
            batch["decoder_input_ids"] = self._shifted(ids)
        return {k: v for k, v in batch.items() if k in self.names}

    def _shifted(self, ids: Tensor) -> Tensor:
        """The same tokens behind a start token: what a decoder reads that repeats its input."""
        names = ("decoder_start_token_id", "bos_token_id", "pad_token_id")
        found = (getattr(self.config, name, None) for name in names)
        start = next((int(i) for i in found if isinstance(i, int)), 0)
        return torch.cat([torch.full_like(ids[:, :1], start), ids[:, :-1]], 1)

    def _random_ids(self, text: Any, vocabulary: int, length: int) -> Tensor:
        """Any tokens but special ones; an end where encoder-decoders look for it."""
        special = {
            i
            for config in (text, self.config)
            for name, value in vars(config).items()
            if name.endswith(("token_id", "token_index"))
            for i in (value if isinstance(value, list) else [value])
            if isinstance(i, int)
        }
        usual = torch.tensor([i for i in range(vocabulary) if i not in special] or [0])
        shape = (self.wanted.samples, length)
        ids = usual[torch.randint(len(usual), shape, generator=self.generator)]
        end = getattr(self.config, "eos_token_id", None)
        if "decoder_input_ids" in self.names and isinstance(end, int) and 0 <= end < vocabulary:
            ids[:, -1] = end
        return ids

    def _positions(self, text: Any) -> int:
        """How long a text may be at the most."""
        names = ("max_position_embeddings", "n_positions", "n_ctx", "max_target_positions")
        known = [n for name in names if isinstance(n := getattr(text, name, None), int) and n > 0]
        for path, module in self.model.named_modules():
            # RoBERTa and its kin keep the first positions for padding.
            if isinstance(module, nn.Embedding) and path.endswith(".position_embeddings"):
                kept = 0 if module.padding_idx is None else module.padding_idx + 1
                known.append(module.num_embeddings - kept)
        return min(known, default=self.wanted.length)
