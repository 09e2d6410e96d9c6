"""Train a timm ViT on scikit-learn's digits, fold it, and save a stock checkpoint.

Run: python examples/train_timm.py [folder]
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits
from timm.models.vision_transformer import VisionTransformer
from torch.nn import functional as F

import attncond as ac

torch.manual_seed(0)
digits = load_digits()  # 1,797 real images of 8x8 pixels, part of scikit-learn
images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
labels = torch.tensor(digits.target)
order = torch.randperm(len(labels))
train, test = order[:1280], order[1280:]


def build() -> VisionTransformer:
    return VisionTransformer(
        img_size=8, patch_size=4, in_chans=1, num_classes=10, embed_dim=64, depth=2, num_heads=4
    )


model = build()
handle = ac.condition(model, ac.Spectral())  # the one line
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)

for epoch in range(10):
    model.train()
    for batch in train[torch.randperm(len(train))].view(-1, 64):
        loss = F.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch + 1}: last loss {loss.item():.3f}")

worst = max(row.kappa for row in handle.certificates())
print(f"worst condition number of a projection after training: {worst:.2f}")

handle.fold()  # from here on a stock timm model
folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
save_file(model.state_dict(), folder / "vit-digits.safetensors")

stock = build()
stock.load_state_dict(load_file(folder / "vit-digits.safetensors"), strict=True)
with torch.no_grad():
    right = stock.eval()(images[test]).argmax(1) == labels[test]
print(f"test accuracy of the stock model that loaded it: {100 * right.float().mean():.1f}%")
