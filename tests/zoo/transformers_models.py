"""Tiny random models of transformers, built offline from their configuration classes.

A model type's own defaults are shrunk by attribute name; what a type needs beyond that stands in
transformers_configs.py. Sizes differ from each other wherever the library lets them, so that a
mistaken axis or a wrong order of rows cannot go unseen.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, AutoModel
from transformers.configuration_utils import PreTrainedConfig
from transformers_inputs import IMAGE

# Applied to whatever a configuration class has of these, also in its parts.
SHRINK: dict[str, Any] = {
    "vocab_size": 99,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "hidden_size": 64,
    "d_model": 64,
    "n_embd": 64,
    "dim": 64,
    "emb_dim": 64,
    "embed_dim": 64,
    "embedding_size": 64,
    "intermediate_size": 40,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 40,
    "ffn_dim": 40,
    "d_ff": 40,
    "n_inner": 40,
    "hidden_dim": 40,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "num_decoder_layers": 1,
    "n_layer": 2,
    "n_layers": 2,
    "num_attention_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "d_kv": 16,
    "max_position_embeddings": 64,
    "max_source_positions": 64,
    "max_target_positions": 64,
    "n_positions": 64,
    "type_vocab_size": 2,
    "image_size": IMAGE,
    "patch_size": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "projection_dim": 16,
    "sliding_window": 16,
    "rotary_dim": 4,
    "use_cache": False,
}


def tiny(model_type: str, **overrides: Any) -> PreTrainedConfig:
    """The configuration of a model type, shrunk; ``part__name`` reaches into its parts."""
    return _shrunk(CONFIG_MAPPING[model_type], overrides)


def _shrunk(cls: type[PreTrainedConfig], overrides: dict[str, Any]) -> PreTrainedConfig:
    known = set(cls().to_dict()) | set(inspect.signature(cls.__init__).parameters)
    known |= set(cls.attribute_map)
    values = {k: v for k, v in SHRINK.items() if k in known}
    own = {k: v for k, v in overrides.items() if "__" not in k}
    values = {k: v for k, v in values.items() if cls.attribute_map.get(k) not in own}
    for part, sub in cls.sub_configs.items():
        below = {k.split("__", 1)[1]: v for k, v in overrides.items() if k.startswith(f"{part}__")}
        if hasattr(sub, "sub_configs") and sub is not PreTrainedConfig and part not in own:
            try:
                values[part] = _shrunk(sub, below)
            except (TypeError, ValueError, KeyError):
                continue
    return cls(**(values | own))


def build(model_type: str, overrides: dict[str, Any], head: str | None = None) -> nn.Module:
    """A model with random weights: the type's base model, or the class named by ``head``."""
    torch.manual_seed(0)
    config = tiny(model_type, **overrides)
    if head is None:
        # grouped_mm, the default for experts, has no float64
        return AutoModel.from_config(config, experts_implementation="eager")
    cls = getattr(transformers, head)
    if not isinstance(config, cls.config_class):  # a part of a larger model
        parts = [getattr(config, name) for name in config.sub_configs]
        config = next(p for p in parts if isinstance(p, cls.config_class))
    return cls(config)
