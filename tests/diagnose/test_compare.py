import json
import math
import sys
from dataclasses import replace

import pytest
import torch
from cases import CASE

import attncond as ac


def test_before_and_after_conditioning():
    case = CASE["timm-vit"]
    model = case.make()
    with torch.no_grad():  # an ill-conditioned W_K
        keys = model.blocks[0].attn.qkv.weight[24:48]
        keys[0] = keys[1] + 1e-5 * keys[0]
    before = ac.diagnose(model, case.run, jacobian=False)
    ac.condition(model, ac.Spectral())
    after = ac.diagnose(model, case.run, jacobian=False)
    found = before.compare(after)
    assert {f.code for f in found.gone} == {"ill-conditioned-weight"}
    assert "ill-conditioned-weight" not in {f.code for f in found.new}
    assert not found.missing
    for change in found.of("k_kappa"):
        assert change.after <= 2 * (1 + 1e-6)
        assert change.difference == change.after - change.before
        assert change.ratio == change.after / change.before
    assert all(c.difference == 0 for c in found.of("raw_k_kappa"))
    assert "gone: layer 0" in str(found)
    frame = found.frame
    assert {"metric", "before", "after", "difference", "ratio"} <= set(frame.columns)
    assert len(frame) == len(found.changes)
    json.dumps(found.to_dict(), allow_nan=False)
    back = after.compare(before)
    assert back.new == found.gone
    assert back.gone == found.new


def test_a_report_does_not_differ_from_itself():
    case = CASE["timm-vit"]
    report = ac.diagnose(case.make(), case.run, jacobian=False)
    found = report.compare(report)
    assert all(c.difference == 0 and c.ratio == 1 for c in found.changes)
    assert str(found) == "no difference"


@pytest.mark.parametrize("wrong", [3, None, {"schema": "attncond.report/1"}, "before.json"])
def test_what_is_no_report_is_named(wrong, tmp_path):
    case = CASE["timm-vit"]
    report = ac.diagnose(case.make(), case.run, jacobian=False)
    said = rf"needs a Report, .*, not {type(wrong).__name__}$"
    with pytest.raises(TypeError, match=f"^compare {said}"):
        report.compare(wrong)
    if wrong is not None:
        with pytest.raises(TypeError, match=rf"^to_html\(before=\.\.\.\) {said}"):
            report.to_html(tmp_path / "page.html", before=wrong)
    assert not list(tmp_path.iterdir())


def test_infinite_values_compare():
    from attncond.diagnose.compare import Change

    same = Change(0, "", 0, None, "x", math.inf, math.inf)
    assert (same.difference, same.ratio) == (0.0, 1.0)
    better = Change(0, "", 0, None, "x", math.inf, 2.0)
    assert (better.difference, better.ratio) == (-math.inf, 0.0)
    assert math.isnan(Change(0, "", 0, None, "x", 0.0, 2.0).ratio)


def test_rows_of_one_report_only_are_named():
    case = CASE["timm-vit"]
    model = case.make()
    whole, part = ac.diagnose(model), ac.diagnose(model, layers=[0])
    assert "blocks.1.attn, run 0" in whole.compare(part).missing
    with pytest.raises(ac.DiagnosisError, match="in common"):
        part.compare(ac.diagnose(model, layers=[1]))


def test_the_median_of_an_even_number_lies_between_the_middle_two():
    row = ac.diagnose(torch.nn.TransformerEncoderLayer(16, 2)).rows[0]

    def report(*kappas):
        rows = (replace(row, path=f"{i}", values={"q_kappa": k}) for i, k in enumerate(kappas))
        return ac.Report(tuple(rows), (), (), {})

    found = report(100.0, 2.0, math.nan).compare(report(1.5, 2.5, 7.0))
    assert found.summary().splitlines()[2].split() == ["q_kappa", "51", "2.5"]
    found = report(100.0, 2.0).compare(report(1.5, math.inf))
    assert found.summary().splitlines()[2].split() == ["q_kappa", "51", "inf"]


def test_without_pandas_its_own_table_is_named(monkeypatch):
    report = ac.diagnose(torch.nn.TransformerEncoderLayer(16, 2))
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"^comparison\.frame .*attncond\[report\].*changes"):
        _ = report.compare(report).frame
