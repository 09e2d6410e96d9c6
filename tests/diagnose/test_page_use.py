"""The page in a real Chromium, in use: sorted, filtered, by keyboard, on a phone, under attack."""

from __future__ import annotations

import csv
import json
import math
import re

import pytest
from pages import HOSTILE, history, made_up, several_calls, weights_only, wholes

import attncond as ac

pytestmark = pytest.mark.xdist_group("browser")


def natural(text: str) -> list[object]:
    return [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", text)]


def python_order(report, name, down):
    """Numbers as asked, then NaN, then what is missing; equal ones stay as they were."""
    rows = list(report.rows)
    if name == "path":
        return sorted(rows, key=lambda r: natural(r.path), reverse=down)
    numbers = [r for r in rows if r.number(name) is not None and not math.isnan(r.number(name))]
    nans = [r for r in rows if r.number(name) is not None and math.isnan(r.number(name))]
    missing = [r for r in rows if r.number(name) is None]
    return [*sorted(numbers, key=lambda r: r.number(name), reverse=down), *nans, *missing]


@pytest.mark.parametrize(
    "name", ["q_kappa", "k_kappa", "jacobian_kappa", "made_up_column", "entropy"]
)
def test_the_table_sorts_as_python_does(browser, name):
    report = made_up(layers=12)
    browser.open(report)
    for group in ("attention", "other"):
        browser.click(f"[data-group='{group}']")
    for down, state in ((True, "descending"), (False, "ascending"), (None, "none")):
        browser.click(f"th[data-column='{name}'] button")
        cell = f"th[data-column='{name}']"
        assert browser.js("return document.querySelector(arguments[0]).ariaSort", cell) == state
        wanted = report.rows if down is None else python_order(report, name, down)
        # sorted(reverse=True) keeps equal rows in their order, as the page does
        assert browser.rows() == [r.key for r in wanted]
        assert browser.js("return document.activeElement.id") == f"sort-{name}"
    browser.check()


def test_paths_sort_by_their_numbers(browser):
    report = made_up(layers=12)
    browser.open(report)
    browser.click("#sort-path")
    assert browser.rows() == [r.key for r in python_order(report, "path", False)]
    browser.click("#sort-path")
    assert browser.rows()[0][1] == "model.layers.11"
    browser.check()


def test_the_table_filters(browser):
    report = made_up(layers=12)
    browser.open(report)
    browser.choose("#filter", "Layers.1 head 2")
    wanted = [r.key for r in report.rows if "layers.1" in r.path and r.head == 2]
    assert browser.rows() == wanted
    assert browser.text("#count") == f"{len(wanted)} of {len(report.rows)} rows"
    browser.choose("#scope", "whole")
    browser.choose("#filter", "")
    assert browser.rows() == [r.key for r in wholes(report)]
    browser.choose("#filter", "no such thing")
    assert browser.rows() == []
    browser.check()


def test_a_finding_leads_to_its_row(browser):
    report = made_up(layers=12)
    browser.open(report)
    browser.choose("#filter", "no such thing")
    finding = report.findings[0]
    assert browser.text(".finding .badge").lower() == finding.severity
    browser.click(".finding a")
    found = browser.js("return document.activeElement.parentElement.dataset.key")
    assert json.loads(found) == [finding.layer, finding.path, finding.call, finding.head]
    codes = browser.js(
        "return [...document.querySelectorAll('.finding')].map((d) => d.dataset.code)"
    )
    assert set(codes) == {f.code for f in report.findings}
    for more in range(browser.count(".more")):
        browser.click(".more")
        assert more < 10
    assert browser.count(".findings li") == len(report.findings)
    browser.check()


def test_a_large_report_is_drawn_piece_by_piece(browser):
    report = made_up(layers=48, heads=25)
    browser.open(report)
    assert browser.count("#heat .mark") == 48 * 25
    assert browser.count("#rows tr") == 200
    for _ in range(12):
        browser.js("const b = document.getElementById('table-box'); b.scrollTop = b.scrollHeight")
        browser.js(
            "return new Promise((done) => requestAnimationFrame(() => setTimeout(done, 20)))"
        )
    assert browser.count("#rows tr") == len(report.rows) == 48 * 26
    browser.check()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_follow_the_system_and_the_button(browser, reports, scheme):
    browser.open(reports[1], reports[0], history(), scheme=scheme)
    paper = "return getComputedStyle(document.body).backgroundColor"
    shades = {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 28)"}
    other = "dark" if scheme == "light" else "light"
    assert browser.js(paper) == shades[scheme]
    lines = "return document.querySelector('#history-chart path.mark').getAttribute('stroke')"
    colour = browser.js(lines)
    browser.click("#theme")
    assert browser.js(paper) == shades[other]
    assert browser.js(lines) != colour
    browser.click("#theme")
    assert browser.js(paper) == shades[scheme]
    browser.check()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast(browser, scheme):
    browser.open(made_up(), made_up(layers=3), history(), scheme=scheme)
    ratios = browser.js("""
      const shade = (c) => { const [r, g, b] = c.match(/[\\d.]+/g).slice(0, 3)
        .map((v) => v / 255).map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
      const solid = (n) => { while (n) { const c = getComputedStyle(n).backgroundColor;
        if (!/, 0\\)$/.test(c)) return c; n = n.parentElement; } };
      const found = [];
      for (const n of document.querySelectorAll(
        "p, h1, h2, a, dt, dd, th, td, summary span, code, .tick, label, li")) {
        if (!n.textContent.trim() || !n.getClientRects().length) continue;
        const style = getComputedStyle(n);
        const [a, b] = [shade(n instanceof SVGElement ? style.fill : style.color), shade(solid(n))];
        const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        found.push([ratio, n.textContent.slice(0, 20)]);
      }
      return found;""")
    assert len(ratios) > 100
    assert [r for r in ratios if r[0] < 4.5] == []
    browser.check()


@pytest.mark.parametrize("width", [360, 768])
def test_nothing_sticks_out_of_a_small_screen(browser, reports, width):
    wide = made_up(layers=30, heads=80, name="a.very.long_name." * 12)
    for report, before in ((reports[1], reports[0]), (wide, None), (made_up(name=HOSTILE), None)):
        browser.open(report, before, history(), width=width)
        for group in ("attention", "W_Q"):
            browser.click(f"[data-group='{group}']")
        assert browser.js("return document.documentElement.scrollWidth") <= width
        assert browser.js("return document.body.getBoundingClientRect().right") <= width
        stuck = browser.js("""
          const boxed = (n) => n.closest(".scroll, nav, .unseen, .skip, .tip, .canvas");
          const out = (n) => !boxed(n) && n.getBoundingClientRect().right > innerWidth + 1;
          const all = [...document.querySelectorAll("body *")];
          return all.filter(out).map((n) => n.outerHTML.slice(0, 80))""")
        assert stuck == []
        charts = "svg.chart:not(#heat svg)"
        assert browser.js(
            "return [...document.querySelectorAll(arguments[0])].every("
            "(c) => c.getBoundingClientRect().right <= innerWidth)",
            charts,
        )
        browser.check()


def test_everything_is_reached_by_keyboard(browser, reports):
    from selenium.webdriver.common.keys import Keys

    browser.open(reports[1], reports[0], history())
    wanted = browser.js("""
      const kinds = "a, button, select, input, summary, [tabindex='0']";
      const open = (n) => n.getClientRects().length && n.tabIndex >= 0;
      window.stops = [...document.querySelectorAll(kinds)].filter(open);
      return stops.length""")
    reached = set()
    for _ in range(wanted + 5):
        browser.press(Keys.TAB)
        at, visible = browser.js("""
          const n = document.activeElement, s = getComputedStyle(n);
          const seen = s.outlineStyle !== "none" && parseFloat(s.outlineWidth) >= 1;
          return [stops.indexOf(n), seen]""")
        if at >= 0:
            reached.add(at)
            assert visible, browser.js("return document.activeElement.outerHTML.slice(0, 100)")
    assert reached == set(range(wanted))
    browser.check()


def test_arrows_walk_through_the_heat_map(browser, reports):
    from selenium.webdriver.common.keys import Keys

    report = reports[1]
    browser.open(report)
    browser.press(Keys.TAB)  # a key first, so that the browser shows focus
    browser.js("document.querySelector('#heat svg').focus()")
    browser.press(Keys.ARROW_DOWN, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_LEFT)
    (row,) = [r for r in report.rows if r.layer == 1 and r.head == 1]
    for text in (browser.js("return spoken.textContent"), browser.text(".tip")):
        place, value = text.split("\n")
        assert place == "layer 1, blocks.1.attn, head 1"
        assert float(value.split(" = ")[1]) == row.number("jacobian_kappa")  # exact
    browser.press(Keys.END)
    assert "head 2" in browser.js("return spoken.textContent")
    browser.press(Keys.ENTER)
    assert json.loads(browser.js("return document.querySelector('tr.found').dataset.key"))[3] == 2
    browser.check()


def test_hostile_names_are_only_text(browser):
    report = made_up(name=HOSTILE)
    browser.open(report, made_up(layers=2, name=HOSTILE), history(name=HOSTILE))
    browser.click(".finding a")
    assert browser.js("return window.hacked") is None
    assert browser.count("img, iframe, main script") == 0
    shown = browser.js("return document.querySelector('h1').textContent")
    assert shown == HOSTILE
    assert browser.js("return document.title").startswith("</script><script>")
    keys = [list(k) for k in browser.rows()]
    assert keys == [list(r.key) for r in report.rows]
    browser.check()


@pytest.mark.parametrize("build", [weights_only, several_calls, lambda: ac.Report(())])
def test_small_reports_look_decent(browser, build):
    report = build()
    browser.open(report, width=360)
    assert browser.count("#rows tr") == len(report.rows)
    assert browser.js("return document.documentElement.scrollWidth") == 360
    assert "NaN" not in browser.text("body")
    assert "undefined" not in browser.text("body")
    browser.check()


def test_downloads_hold_the_rows(browser, tmp_path):
    report = made_up()
    browser.tell("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    browser.open(report)
    browser.choose("#scope", "whole")
    browser.js("for (const b of document.querySelectorAll('#table .buttons button')) b.click()")
    for _ in range(100):
        if {p.name for p in tmp_path.iterdir()} >= {"report.csv", "report.json"}:
            break
        browser.js("return new Promise((done) => setTimeout(done, 50))")
    assert json.loads((tmp_path / "report.json").read_text("utf-8")) == report.to_dict()
    with open(tmp_path / "report.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [r["path"] for r in rows] == [r.path for r in wholes(report)]
    assert [float(r["q_kappa"]) for r in rows] == [r.number("q_kappa") for r in wholes(report)]
    assert {float(r["token_rms"]) for r in rows} == {-math.inf}


def test_without_scripts_the_findings_are_there(browser):
    report = made_up(name=HOSTILE)
    browser.open(report, js=False)
    try:
        text = browser.tell(
            "Runtime.evaluate", expression="document.body.innerText", returnByValue=True
        )["result"]["value"]
    finally:
        browser.tell("Emulation.setScriptExecutionDisabled", value=False)
    assert all(" ".join(f.message.split())[:40] in " ".join(text.split()) for f in report.findings)
