"""The page in a real Chromium, from disk: it draws what the data say."""

from __future__ import annotations

import math
from statistics import median

import pytest
from pages import heads, history, known, made_up, several_calls, weights_only, wholes
from torch import nn

import attncond as ac

pytestmark = pytest.mark.xdist_group("browser")


def test_every_part_of_a_real_report_is_drawn(browser, reports):
    before, report = reports
    browser.open(report, before, history())
    sections = browser.js("return [...document.querySelectorAll('section')].map((s) => s.id)")
    assert sections == [
        *("findings", "change", "heads", "spectra", "jacobians", "depth", "history", "table")
    ]
    assert browser.js("return [...document.querySelectorAll('nav a')].map((a) => a.hash)") == [
        f"#{s}" for s in sections
    ]
    for canvas in ("heat", "spectra-chart", "jacobian-chart", "change-chart", "history-chart"):
        assert browser.count(f"#{canvas} svg.chart") == 1
    assert browser.count("#loss-chart path.mark") == 1
    assert browser.text("h1") == report.info["model"]
    assert report.info["torch"] in browser.text(".facts")
    browser.check()


def test_the_head_of_the_heat_map_fits_beside_short_names(browser):
    model = nn.Sequential(nn.MultiheadAttention(8, 2))
    browser.open(ac.diagnose(model))
    name = "document.querySelector('#heat text.name')"
    left = f"{name}.getBoundingClientRect().left - {name}.ownerSVGElement"
    assert browser.js(f"return {left}.getBoundingClientRect().left") >= 0
    browser.check()


@pytest.mark.parametrize("build", ["real", made_up, several_calls, weights_only])
def test_the_heat_map_has_a_cell_for_each_head_and_number(browser, reports, build):
    report = reports[1] if build == "real" else build()
    browser.open(report)
    options = browser.js(
        "return [...document.querySelectorAll('#heat-quantity option')].map(o=>o.value)"
    )
    names = {n for r in heads(report) for n in r.values if r.number(n) is not None} - {"heads"}
    assert set(options) == names
    for name in options:
        browser.choose("#heat-quantity", name)
        assert browser.count("#heat .mark") == len(heads(report))
        values = [r.number(name) for r in heads(report)]
        assert browser.count("#heat .mark.none") == sum(v is None for v in values)
        present = [v for v in values if v is not None]
        assert browser.count("#heat .mark.nan") == sum(map(math.isnan, present))
        assert browser.count("#heat .mark.inf") == sum(v == math.inf for v in present)
        assert browser.count("#heat-legend svg.chart") == any(map(math.isfinite, present))
    browser.check()


def test_spectra_show_stored_and_effective_weights(browser, reports):
    _, report = reports
    browser.open(report)
    assert browser.count("#spectra-chart path.mark") == 6
    browser.choose("[data-control=spectra-role]", "k")
    assert browser.count("#spectra-chart path.mark") == 2
    browser.choose("[data-control=spectra-layer]", "all")
    assert browser.count("#spectra-chart path.mark") == 4
    browser.open(reports[0])  # stock: one line for both
    assert browser.count("#spectra-chart path.mark") == 3
    browser.check()


def test_jacobians_stand_beside_their_bounds(browser):
    report = made_up()
    rows = known(heads(report), "jacobian_kappa")
    browser.open(report)
    names = ("jacobian_kappa", "jacobian_paper_bound", "jacobian_certificate")
    assert browser.count("#jacobian-chart .mark") == sum(len(known(rows, n)) for n in names)
    above = sum(r.number(names[0]) > r.number(names[1]) for r in rows)
    assert f"in {above} of {len(rows)} heads" in browser.text("#jacobians p")
    for box in (1, 2):
        browser.js(f"document.querySelectorAll('#jacobians .check input')[{box - 1}].click()")
    assert browser.count("#jacobian-chart .mark") == len(rows)
    browser.check()


def test_profiles_have_a_dot_for_each_attention(browser, reports):
    report = reports[1]
    browser.open(report)
    names = ["token_stable_rank", "token_residue", "entropy_relative", "saturation"]
    names += ["attention_sigma_2", "logit_max", "token_rms", "jacobian_kappa"]
    names += [f"{r}_{n}" for r in "qkv" for n in ("kappa", "sigma_max", "grad_norm")]
    assert browser.count("#profiles .mark") == sum(len(known(wholes(report), n)) for n in names)
    browser.check()


def test_changes_are_drawn_and_listed(browser, reports):
    before, report = reports
    browser.open(report, before)
    for metric in ("q_kappa", "v_sigma_min"):
        browser.choose("[data-control=change-quantity]", metric)
        assert browser.count("#change-chart .mark") == 2 * len(before.compare(report).of(metric))
    change = before.compare(report)
    assert browser.count("#change .change li") == len(change.gone) + len(change.new)
    changed = {c.metric for c in change.changes if c.head is None and c.before != c.after}
    listed = browser.js(
        "return [...document.querySelectorAll('#medians .link')].map(b => b.innerText)"
    )
    assert "κ(W_Q)" in listed
    assert len(listed) <= len(changed)
    rows = browser.js("return [...document.querySelectorAll('#medians tr')].map(r => r.innerText)")
    shown = next(row.split() for row in rows if row.startswith("κ(W_Q)"))
    found = change.of("q_kappa")
    assert float(shown[1]) == pytest.approx(median(c.before for c in found), rel=1e-3)
    assert float(shown[2]) == pytest.approx(median(c.after for c in found), rel=1e-3)
    browser.open(report, report)
    assert "are equal" in browser.text("#change")
    browser.check()


def test_a_history_opens_with_the_weights_and_the_loss_below_on_the_same_steps(browser):
    record = history()
    for entry in record["records"]:
        entry["loss"] = entry["loss"] if entry["step"] else None  # none before the first step
        for row in entry["rows"]:
            row["values"] = {"entropy_relative": 0.9, **row["values"]}  # a probe's
    browser.open(record=record)
    quantity = "return document.querySelector('[data-control=history-quantity]').value"
    assert browser.js(quantity) == "q_kappa"
    steps = [
        browser.js(
            f"return [...document.querySelectorAll('#{chart} text.tick[text-anchor=middle]')]"
            ".map((t) => t.textContent)"
        )
        for chart in ("history-chart", "loss-chart")
    ]
    assert steps[0] == steps[1]
    assert steps[0][0] == "0"
    browser.check()


def test_a_history_has_a_line_for_each_layer(browser):
    browser.open(record=history())
    assert browser.count("section") == 1
    assert browser.count("#history-chart path.mark") == 5
    assert browser.count("#history-chart circle:not(.cursor)") == 5 * 6 - 1
    browser.choose("[data-control=history-over]", "max")
    assert browser.count("#history-chart path.mark") == 5
    browser.choose("[data-control=history-quantity]", "entropy")
    assert browser.count("#history-chart circle:not(.cursor)") == 5 * 5 - 1
    browser.click("[data-control=history-log]")
    browser.choose("[data-control=history-quantity]", "made_up")
    assert "6 values without a place" in browser.text("#history")
    browser.check()
