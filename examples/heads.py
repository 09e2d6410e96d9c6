"""Condition heads as well as weights: no spectral gap, rows of equal length, κ ≤ 2 at the start.

A timm ViT reads digits; a small Llama learns to count in steps of 1, 2 or 3 and goes on counting,
with a KV cache and without.
Run: python examples/heads.py
"""

import torch
from sklearn.datasets import load_digits
from timm.models.vision_transformer import VisionTransformer
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import attncond as ac


def condition(model: torch.nn.Module) -> torch.optim.Optimizer:
    # In any order: the weights act first, then the gap goes, then the rows are equilibrated.
    for method in (ac.Spectral(), ac.RemoveGap(), ac.Precondition()):
        ac.condition(model, method)
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def step(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


torch.manual_seed(0)
digits = load_digits()  # 1,797 real images of 8x8 pixels, part of scikit-learn
images, labels = torch.tensor(digits.images)[:, None].float() / 8 - 1, torch.tensor(digits.target)
train, test = torch.randperm(len(labels)).split([1280, 517])
vit = VisionTransformer(8, 4, in_chans=1, num_classes=10, embed_dim=64, depth=2, num_heads=4)
optimizer = condition(vit)
for _ in range(200):
    batch = train[torch.randint(len(train), (64,))]
    step(optimizer, F.cross_entropy(vit(images[batch]), labels[batch]))
right = vit.eval()(images[test]).argmax(1) == labels[test]
print(f"test accuracy of the ViT: {100 * right.float().mean():.1f}%")

config = LlamaConfig(vocab_size=17, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                     num_attention_heads=4, num_key_value_heads=2, bos_token_id=None,
                     eos_token_id=None, pad_token_id=16)  # fmt: skip
llama = LlamaForCausalLM(config)
optimizer = condition(llama)
for _ in range(200):
    steps = torch.randint(1, 4, (64, 1))
    rows = (torch.randint(16, (64, 1)) + steps * torch.arange(12)) % 16
    step(optimizer, llama(rows, labels=rows).loss)
start = {"inputs": rows[:, :4], "max_new_tokens": 8, "do_sample": False}
cached, anew = (llama.eval().generate(**start, use_cache=use) for use in (True, False))
assert torch.equal(cached, anew)
print(f"numbers counted on rightly, cached or not: {100 * (cached == rows).float().mean():.1f}%")

ac.handle(llama, ac.Spectral).fold()  # weights fold; what heads do to their outputs does not
