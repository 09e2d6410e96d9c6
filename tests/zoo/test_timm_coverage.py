"""Every model of timm, on the meta device: what is read, what is refused, and no false alarms."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from attncond import adapters

timm = pytest.importorskip("timm")

# The only attention of timm that is refused, and a part of the reason.
REFUSED = {
    "timm.models.csatv2.SpatialTransformerBlock": "single numbers",
    "timm.models.mobilevit.LinearSelfAttention": "separable attention",
    "timm.models.swiftformer.EfficientAdditiveAttention": "additive attention",
    "timm.models.volo.OutlookAttention": "no queries and keys",
}
# timm 1.0.29 has fewer models, and cannot build some of its own on the meta device.
CURRENT = timm.is_model("iformer_t")
META_FAILS = {"csatv2", "gemma4", "regnetv", "regnetx", "regnety", "regnetz"}
if not CURRENT:
    del REFUSED["timm.models.csatv2.SpatialTransformerBlock"]
# Families without a query in them. `eca_halonext` and `lambda_resnet` are not of these.
CONVNETS = ("convnext", "densenet", "efficientnet", "mixer", "mobilenetv3", "poolformer", "regnet")
CONVNETS += ("convmixer", "dla", "ese_vovnet", "gmixer", "hrnet", "resnet1", "resnext", "vgg")


@pytest.fixture(scope="module")
def swept() -> dict[str, Any]:
    path = Path(__file__).parents[2] / "benchmarks" / "inspect_timm.py"
    spec = importlib.util.spec_from_file_location("inspect_timm", path)
    assert spec is not None
    assert spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    result = benchmark.sweep(timm.list_models())
    convnets = [n for n in timm.list_models() if n.startswith(CONVNETS)]
    return result | {"convnets": benchmark.sweep(convnets[::6])}


def test_all_models_build(swept: dict[str, Any]) -> None:
    failed = swept["models_that_do_not_build"]
    families = {name.split("_")[0] for name in failed}
    assert families <= (set() if CURRENT else META_FAILS)
    assert swept["models"] + len(failed) == len(timm.list_models())
    assert swept["models_with_attention"] > (670 if CURRENT else 640)


def test_coverage(swept: dict[str, Any]) -> None:
    assert swept["attention_modules"] > (13_000 if CURRENT else 12_400)
    assert swept["coverage"] >= 0.97


def test_refused_classes_and_reasons(swept: dict[str, Any]) -> None:
    refused = swept["unsupported_classes"]
    assert set(refused) == set(REFUSED)
    for cls, part in REFUSED.items():
        assert part in refused[cls]["reason"]


def test_sites_come_from_registered_classes_only(swept: dict[str, Any]) -> None:
    """Names and shapes alone decide nothing in timm: every class was read and tested."""
    assert set(swept["supported_classes"]) <= set(adapters._REGISTRY)


def test_no_false_alarm_in_convnets(swept: dict[str, Any]) -> None:
    assert swept["convnets"]["models"] > 20
    assert swept["convnets"]["attention_modules"] == 0
