"""transformers' Trainer and a tiny BERT, with the polar correction that follows the optimizer.

The data is synthetic: sequences of random tokens; the label says which of two marks comes first.
Run: python examples/train_trainer.py [folder]
"""

import sys

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer
from transformers import TrainerCallback as Callback
from transformers import TrainingArguments as Arguments

import attncond as ac


class WhichComesFirst(Dataset):
    def __init__(self, size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(3, 20, (size, 12), generator=generator)
        places = torch.rand(size, 12, generator=generator).argsort(1)[:, :2]
        self.tokens.scatter_(1, places, torch.tensor([[1, 2]]).expand(size, 2))
        self.labels = (places[:, 0] < places[:, 1]).long()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[i], "labels": self.labels[i]}


class FollowOptimizer(Callback):
    def on_train_begin(self, args, state, control, *, model, optimizer, **kwargs):
        ac.handle(model).attach(optimizer)  # Trainer makes the optimizer, so it is met here


torch.manual_seed(0)
model = BertForSequenceClassification(
    BertConfig(vocab_size=20, hidden_size=48, num_hidden_layers=2, num_attention_heads=4,
               intermediate_size=96, hidden_dropout_prob=0.0)
)  # fmt: skip
handle = ac.condition(model, ac.Spectral(correction="polar"))  # the one line
folder = sys.argv[1] if len(sys.argv) > 1 else "bert-which-comes-first"
trainer = Trainer(
    model,
    Arguments(folder, num_train_epochs=4, per_device_train_batch_size=64, use_cpu=True,
              learning_rate=2e-3, save_strategy="no", report_to=[], disable_tqdm=True),
    train_dataset=WhichComesFirst(4096, seed=0),
    callbacks=[FollowOptimizer()],
)  # fmt: skip
trainer.train()
print(f"worst condition number: {max(row.kappa for row in handle.certificates()):.2f}")
handle.fold()
found = trainer.predict(WhichComesFirst(1024, seed=1))
print(f"test accuracy: {100 * (found.predictions.argmax(1) == found.label_ids).mean():.1f}%")
model.save_pretrained(folder)  # a stock BERT
