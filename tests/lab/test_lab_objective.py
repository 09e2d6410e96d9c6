"""The loss by hand: labels, smoothing, soft targets, two heads, hard and soft distillation."""

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F

from attncond.lab.objective import SOFT_SHARE, TEMPERATURE, compile_key, evaluate, objective
from attncond.lab.recipe import list_recipes, load

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


def key(methods=(), seed=0, recipe="digits", **settings):
    named = {k.replace("__", "."): str(v) for k, v in settings.items()} | {"methods": [*methods]}
    return compile_key(load(recipe).config("smoke", "baseline", seed, named))


def test_code_is_shared_where_only_numbers_differ():
    assert key(seed=0) == key(seed=5)
    assert key(optim__lr=1e-3) == key(optim__lr=2e-3, optim__qkv_lr=0.3, optim__weight_decay=0.0)
    assert key(schedule__epochs=3) == key()
    spectral = key(["spectral"])
    for same in (
        "kappa=1.5",
        "lam=0.5",
        "gain=2",
        "preserve_norm=false",
        "lam=10,preserve_norm=false",
    ):
        assert key([f"spectral:{same}"]) == spectral, same
    assert key(["paper"]) == spectral
    assert key(["polar"]) == key(["paper-svd"])  # which keep the norm, and do not


@pytest.mark.parametrize(
    "other",
    [
        {"methods": ["spectral:roles=qk"]},
        {"methods": ["spectral:scope=head"]},
        {"methods": ["polar"]},
        {"methods": ["gap"]},
        {"methods": ["precondition"]},
        {"methods": ["spectral", "gap"]},
        {"methods": []},
        {"model__kwargs__depth": 3},
        {"model__drop_path": 0.1},
        {"model__name": "deit_small32"},
        {"train__batch_size": 16},
        {"train__precision": "bf16"},
        {"train__label_smoothing": 0.2},
    ],
    ids=str,
)
def test_code_is_not_shared_where_the_computation_differs(other):
    assert key(**{"methods": ["spectral"], **other}) != key(["spectral"])


def test_every_variant_has_a_key_that_its_seeds_share():
    methods = set()
    for recipe in list_recipes():
        for form in recipe.forms:
            for variant in recipe.variants:
                first, second = (recipe.config(form, variant, seed) for seed in (0, 3))
                assert compile_key(first) == compile_key(second), (recipe.name, form, variant)
                methods.update(method.partition(":")[0] for method in first.methods)
    assert {"spectral", "paper", "polar", "paper-svd"} <= methods
