"""Folders of tiny transformers models, tokenizers and images, as a user has them on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as hf

SIZES: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
TEXT = {**SIZES, "vocab_size": 99, "intermediate_size": 40, "bos_token_id": 1, "eos_token_id": 2}
VISION = {**SIZES, "intermediate_size": 40, "image_size": 32, "patch_size": 8}

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", "BertConfig", TEXT),
    "roberta": ("RobertaModel", "RobertaConfig", {**TEXT, "max_position_embeddings": 40}),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 24,
         "bos_token_id": 1, "eos_token_id": 2},
    ),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**TEXT, "num_key_value_heads": 2}),
    "mixtral": (  # its checkpoint has other keys than the model
        "MixtralForCausalLM",
        "MixtralConfig",
        {**TEXT, "num_key_value_heads": 2, "num_local_experts": 2},
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 4},
    ),
    "bart": (
        "BartForSequenceClassification",
        "BartConfig",
        {"vocab_size": 99, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1,
         "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 40,
         "decoder_ffn_dim": 40, "max_position_embeddings": 40},
    ),
    "vit": ("ViTForImageClassification", "ViTConfig", VISION),
    "dinov2": ("Dinov2Model", "Dinov2Config", VISION),
    "beit": ("BeitModel", "BeitConfig", {**VISION, "use_relative_position_bias": True}),
    "swin": (
        "SwinModel",
        "SwinConfig",
        {"image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 4],
         "window_size": 4},
    ),
    "videomae": ("VideoMAEModel", "VideoMAEConfig", {**VISION, "num_frames": 4}),
    "clip": (
        "CLIPModel",
        "CLIPConfig",
        {"text_config": {**TEXT, "max_position_embeddings": 20}, "vision_config": VISION,
         "projection_dim": 16},
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {"vocab_size": 99, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1,
         "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_mel_bins": 8,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "wav2vec2": (
        "Wav2Vec2Model",
        "Wav2Vec2Config",
        {**SIZES, "intermediate_size": 40, "conv_dim": [8], "conv_kernel": [4],
         "conv_stride": [2], "num_feat_extract_layers": 1, "num_conv_pos_embeddings": 4,
         "num_conv_pos_embedding_groups": 2},
    ),
}  # fmt: skip


def make(name: str, seed: int = 0) -> Any:
    """One of the models, in eval mode."""
    model, config, values = MODELS[name]
    torch.manual_seed(seed)
    return getattr(hf, model)(getattr(hf, config)(**values)).eval()


def save(name: str, folder: Path, seed: int = 0) -> Any:
    """Save one of them as ``save_pretrained`` does; returns it."""
    model = make(name, seed)
    model.save_pretrained(folder)
    return model


def save_tokenizer(folder: Path, size: int = 99) -> None:
    """A tokenizer of single characters, with one special token at each end."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    letters = [chr(code) for code in range(32, 127)]
    words = ["<pad>", "<s>", "</s>", "<unk>", *letters][:size]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    whole = hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", bos_token="<s>",
        eos_token="</s>",
    )  # fmt: skip
    whole.save_pretrained(folder)


def save_images(folder: Path, count: int = 3, size: tuple[int, int] = (40, 30)) -> None:
    """Images of noise, called 0.png, 1.png, ..."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        generator = torch.Generator().manual_seed(i)
        pixels = torch.randint(256, (size[1], size[0], 3), generator=generator, dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(folder / f"{i}.png")
