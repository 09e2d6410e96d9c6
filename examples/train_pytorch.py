"""Plain PyTorch: an nn.TransformerEncoder reads digits row by row.

Run: python examples/train_pytorch.py
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import attncond as ac

torch.manual_seed(0)
digits = load_digits()  # 1,797 real images of 8x8 pixels, part of scikit-learn
images = torch.tensor(digits.images, dtype=torch.float32) / 8 - 1  # 8 tokens of 8 pixels
labels = torch.tensor(digits.target)
order = torch.randperm(len(labels))
train, test = order[:1280], order[1280:]


class Reader(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.position = nn.Parameter(0.02 * torch.randn(8, width))
        layer = nn.TransformerEncoderLayer(width, 4, 128, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:  # (batch, 8, 8) -> (batch, 10)
        return self.head(self.encoder(self.embed(x) + self.position).mean(1))


model = Reader()
print(ac.inspect(model))
handle = ac.condition(model, ac.Spectral())  # the one line
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

for epoch in range(10):
    model.train()
    for batch in train[torch.randperm(len(train))].view(-1, 64):
        loss = F.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch + 1}: last loss {loss.item():.3f}")

handle.fold()  # inference needs no attncond
with torch.no_grad():
    right = model.eval()(images[test]).argmax(1) == labels[test]
print(f"test accuracy: {100 * right.float().mean():.1f}%")
