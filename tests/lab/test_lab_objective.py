"""The loss by hand: labels, smoothing, soft targets, two heads, hard and soft distillation."""

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F

from attncond.lab.objective import SOFT_SHARE, TEMPERATURE, evaluate, objective

N, CLASSES = 6, 5


class Fixed(nn.Module):
    """Logits that are there, whatever the images."""

    def __init__(self, *logits):
        super().__init__()
        self.heads = nn.ParameterList(logits)

    def forward(self, images):
        made = tuple(head + 0 for head in self.heads)
        return made[0] if len(made) == 1 else made


def logits(seed):
    return torch.randn(N, CLASSES, generator=torch.Generator().manual_seed(seed))


IMAGES = torch.zeros(N, 1, 2, 2)
LABELS = torch.tensor([0, 1, 2, 3, 4, 0])


def test_labels_and_smoothing():
    x = logits(0)
    shares = torch.full((N, CLASSES), 0.1 / CLASSES)
    shares[range(N), LABELS] += 0.9
    wanted = -(shares * x.log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(objective(Fixed(x), IMAGES, LABELS, 0.1), wanted)
    torch.testing.assert_close(objective(Fixed(x), IMAGES, shares, 0.1), wanted)  # not twice
    torch.testing.assert_close(objective(Fixed(x), IMAGES, LABELS), F.cross_entropy(x, LABELS))


def test_without_a_teacher_both_heads_learn_the_labels():
    a, b = logits(0), logits(1)
    wanted = (F.cross_entropy(a, LABELS) + F.cross_entropy(b, LABELS)) / 2
    torch.testing.assert_close(objective(Fixed(a, b), IMAGES, LABELS), wanted)


def test_the_second_head_learns_from_the_teacher():
    a, b, guide = logits(0), logits(1), logits(2)
    teacher = Fixed(guide)
    own = F.cross_entropy(a, LABELS)
    hard = objective(Fixed(a, b), IMAGES, LABELS, teacher=teacher, distill="hard")
    torch.testing.assert_close(hard, (own + F.cross_entropy(b, guide.argmax(1))) / 2)
    soft = objective(Fixed(a, b), IMAGES, LABELS, teacher=teacher, distill="soft")
    p, q = ((x / TEMPERATURE).softmax(1) for x in (guide, b))
    kl = (p * (p.log() - q.log())).sum(1).mean()
    wanted = (1 - SOFT_SHARE) * own + SOFT_SHARE * TEMPERATURE**2 * kl
    torch.testing.assert_close(soft, wanted)
    soft.backward()
    assert teacher.heads[0].grad is None


def test_the_loss_is_in_single_precision_under_autocast():
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, CLASSES))
    loss = objective(model, IMAGES, LABELS, dtype=torch.bfloat16)
    assert loss.dtype == torch.float32


class Parts:
    """Batches of unequal size."""

    def epoch(self, number):
        yield IMAGES[:4], LABELS[:4]
        yield IMAGES[4:], LABELS[4:]


def test_an_evaluation_weighs_images_not_batches():
    x = logits(3)

    class Some(nn.Module):
        places = iter((slice(0, 4), slice(4, N)))

        def forward(self, images):
            assert not self.training
            return x[next(self.places)]

    loss, accuracy = evaluate(Some(), Parts(), Accelerator(), None)
    assert loss == pytest.approx(float(F.cross_entropy(x, LABELS)), rel=1e-6)
    assert accuracy == pytest.approx(100 * float((x.argmax(1) == LABELS).float().mean()))
