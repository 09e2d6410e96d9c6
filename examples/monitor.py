"""Watch condition numbers in training: a small ViT on digits, stock and conditioned.

Writes stock.jsonl and conditioned.jsonl as it goes, and a page with curves of each.
Run: python examples/monitor.py
"""

import torch
from sklearn.datasets import load_digits
from timm.models.vision_transformer import VisionTransformer
from torch.nn import functional as F

import attncond as ac

digits = load_digits()  # 1,797 real images of 8x8 pixels, part of scikit-learn
images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
labels = torch.tensor(digits.target)
order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
train, test = order[:1280], order[1280:]

for name in ("stock", "conditioned"):
    torch.manual_seed(0)
    model = VisionTransformer(
        img_size=8, patch_size=2, in_chans=1, num_classes=10, embed_dim=48, depth=3, num_heads=3
    )
    if name == "conditioned":
        ac.condition(model, ac.Spectral())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    with ac.Monitor(model, every=50, log=f"{name}.jsonl", batch=images[test[:8]]) as monitor:
        for _ in range(15):
            model.train()
            for batch in train[torch.randperm(len(train))].view(-1, 64):
                loss = F.cross_entropy(model(images[batch]), labels[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                monitor.step(loss=loss)  # the one line
        monitor.measure(loss=loss)
    print(f"\n{name}: step, loss, then κ(W_Q) of the layers and their attention's entropy")
    for record in monitor.history:
        kappas = " ".join(f"{row.values['q_kappa']:8.1f}" for row in record.rows)
        entropies = " ".join(f"{row.values['entropy']:.2f}" for row in record.rows)
        print(f"{record.step:5d} {record.loss or float('nan'):6.3f}  {kappas}   {entropies}")
    monitor.to_html(f"{name}.html")

with torch.no_grad():
    right = model.eval()(images[test]).argmax(1) == labels[test]
print(f"\ntest accuracy (conditioned): {100 * right.float().mean():.1f}%")
