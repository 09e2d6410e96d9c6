import builtins
import json
import math
import os

import pytest
import torch
from cases import CASE
from torch import nn

import attncond as ac
from attncond.diagnose.columns import COLUMNS, TEXT
from attncond.diagnose.report import Row, Spectrum


@pytest.fixture(scope="module")
def report():
    case = CASE["timm-vit"]
    return ac.diagnose(case.make(), case.run, loss="sum")


def test_frame_has_the_documented_columns_and_all_of_the_rows(report):
    frame = report.frame
    assert list(frame.columns) == list(COLUMNS) == list(ac.Report.columns)
    assert all(COLUMNS.values())
    assert len(frame) == 2 * (1 + 3)
    assert frame["head"].isna().sum() == 2
    assert all(frame[c].dtype == "float64" for c in COLUMNS if c.endswith("kappa"))
    heads = frame[frame["head"].notna()]
    assert heads.drop(columns=[c for c in COLUMNS if c.startswith("token")]).notna().all().all()


def test_every_value_has_a_column(report):
    assert all(set(r.values) <= set(COLUMNS) for r in report.rows)


def test_json_round_trip(report, tmp_path):
    path = report.to_json(tmp_path / "r.json")
    again = ac.Report.from_json(path)
    assert again == report
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]
    data = json.loads(path.read_text(), parse_constant=lambda c: pytest.fail(c))
    assert data["schema"] == "attncond.report/1"
    assert data["rows"][0]["path"] == "blocks.0.attn"


def test_json_keeps_nan_and_infinity(tmp_path):
    values = {"q_kappa": math.inf, "entropy": math.nan, "jacobian_status": "inf", "heads": 2.0}
    spectra = (Spectrum(0, "a", "q", True, (1,), (math.nan,)),)
    report = ac.Report((Row(0, "a", "b", "self", 0, None, values),), spectra, (), {"x": math.inf})
    again = ac.Report.from_json(report.to_json(tmp_path / "r.json"))
    assert again.rows[0].values["q_kappa"] == math.inf
    assert math.isnan(again.rows[0].values["entropy"])
    assert again.rows[0].values["jacobian_status"] == "inf"
    assert math.isnan(again.spectra[0].values[0])


def test_a_write_that_fails_leaves_the_old_file(report, tmp_path, monkeypatch):
    path = tmp_path / "r.json"
    path.write_text("old")

    def fail(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(KeyboardInterrupt):
        report.to_json(path)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


@pytest.mark.parametrize(
    "text",
    [
        "not json",
        '{"schema": "other"}',
        "[]",
        "\ufeff{}",
        '{"schema": "attncond.report/1", "rows": [{}]}',
        '{"schema": "attncond.report/1", "rows": 3, "spectra": [], "notes": [], "info": {}}',
    ],
)
def test_damaged_files_are_named(text, tmp_path):
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(ac.DiagnosisError):
        ac.Report.from_json(path)


def without(monkeypatch, name):
    original = builtins.__import__

    def fake(module, *args, **kwargs):
        if module.split(".")[0] == name:
            raise ImportError(name)
        return original(module, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", fake)


def test_frame_without_pandas_names_the_extra(report, monkeypatch):
    without(monkeypatch, "pandas")
    with pytest.raises(ImportError, match=r"attncond\[report\]"):
        report.frame


@pytest.mark.parametrize("rich", [True, False])
def test_summary_with_and_without_rich(report, monkeypatch, rich):
    if not rich:
        without(monkeypatch, "rich")
    text = report.summary()
    assert "blocks.0.attn" in text
    assert "κ(W_Q)" in text
    assert ("━" in text) == rich
    assert str(report) == text


def test_summary_prints_markup_in_names_as_it_is():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleDict({"[red]x[/red]": nn.MultiheadAttention(8, 2)})

        def forward(self, x):
            return self.layers["[red]x[/red]"](x, x, x)

    assert "[red]x[/red]" in ac.diagnose(Model(), torch.randn(3, 1, 8)).summary()


def test_spectra_are_of_whole_projections_and_descend(report):
    assert {(s.path, s.role, s.raw) for s in report.spectra} == {
        (f"blocks.{i}.attn", role, raw) for i in (0, 1) for role in "qkv" for raw in (True, False)
    }
    for s in report.spectra:
        assert list(s.values) == sorted(s.values, reverse=True)
        assert len(s.values) == len(s.rank) <= 64


def test_text_columns_are_columns():
    assert set(COLUMNS) >= TEXT
