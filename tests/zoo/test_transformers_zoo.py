"""Every tiny model of transformers, held against a real forward pass."""

from __future__ import annotations

import pytest

transformers = pytest.importorskip("transformers")

import oracle  # noqa: E402
import torch  # noqa: E402
from packaging.version import Version  # noqa: E402
from transformers_configs import CASES, Case  # noqa: E402
from transformers_models import build  # noqa: E402

from attncond.inspection import inspect  # noqa: E402


@pytest.fixture(autouse=True, scope="module")
def _quiet():
    transformers.logging.set_verbosity_error()


def _model(name: str) -> tuple[Case, torch.nn.Module]:
    case = CASES[name]
    if Version(transformers.__version__) < Version(case.since):
        pytest.skip(f"came with transformers {case.since}")
    return case, oracle.prepare(build(case.type or name, dict(case.config), case.head))


@pytest.mark.parametrize("name", CASES)
def test_model(name: str) -> None:
    case, model = _model(name)
    plan = inspect(model)
    assert len(plan.sites) == case.sites, str(plan)
    refused = {u.cls.rpartition(".")[2]: u.reason for u in plan.unsupported}
    assert refused.keys() == case.refused.keys(), str(plan)
    for cls, reason in case.refused.items():
        assert refused[cls].startswith(reason)
    given = case.inputs(model)
    run = (lambda: case.run(model)) if case.run else (lambda: model(**given))
    if not plan.sites:
        with torch.no_grad():
            run()  # it has to be a working model of which nothing was found
        return
    verdicts = oracle.check(
        model,
        run,
        transformed=case.transformed,
        mixed=case.mixed,
        unused=case.unused,
        pieces=case.pieces,
    )
    assert len(verdicts) == case.sites - len(case.unused)


def test_the_zoo_is_wide() -> None:
    proven = {case.type or name for name, case in CASES.items() if case.sites}
    assert len(proven) >= 245
