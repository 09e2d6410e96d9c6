"""The page in a real Chromium, from disk: it draws what the data say, and can be used by anyone."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from pathlib import Path

import pytest
from cases import CASE
from pages import HOSTILE, history, made_up, several_calls, weights_only

import attncond as ac
from attncond.diagnose import page

pytestmark = pytest.mark.xdist_group("browser")

CATCH = """
window.caught = [];
addEventListener("error", (e) => caught.push(String(e.message)));
addEventListener("unhandledrejection", (e) => caught.push(String(e.reason)));
addEventListener("securitypolicyviolation", (e) => caught.push("policy: " + e.blockedURI));
"""
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


class Browser:
    """A page at a time; what went wrong in it fails the test that opened it."""

    def __init__(self, driver, folder: Path) -> None:
        self.driver, self.folder = driver, folder

    def open(self, report=None, before=None, record=None, *, width=1200, scheme="light", js=True):
        path = page.write(self.folder / "page.html", report, before, record)
        driver = self.driver
        self.tell("Emulation.setScriptExecutionDisabled", value=not js)
        self.tell(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        media = [{"name": "prefers-color-scheme", "value": scheme}]
        self.tell("Emulation.setEmulatedMedia", features=media)
        driver.get("about:blank")
        driver.get_log("performance")
        driver.get(path.as_uri())
        return self

    def tell(self, command, **arguments):
        return self.driver.execute_cdp_cmd(command, arguments)

    def js(self, code, *arguments):
        return self.driver.execute_script(code, *arguments)

    def count(self, selector):
        return self.js("return document.querySelectorAll(arguments[0]).length", selector)

    def text(self, selector):
        return self.js("return document.querySelector(arguments[0]).innerText", selector)

    def click(self, selector):
        self.js("document.querySelector(arguments[0]).click()", selector)

    def choose(self, selector, value):
        self.js(
            "const s = document.querySelector(arguments[0]); s.value = arguments[1];"
            "s.dispatchEvent(new Event(s.tagName === 'INPUT' ? 'input' : 'change'));",
            selector,
            value,
        )

    def press(self, *keys):
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    def rows(self):
        """The keys of the table's rows as they stand."""
        found = self.js("return [...document.querySelectorAll('#rows tr')].map(r => r.dataset.key)")
        return [tuple(json.loads(key)) for key in found]

    def check(self):
        """No error, no refusal, no request but the file itself."""
        assert self.js("return window.caught") == []
        log = [e for e in self.driver.get_log("browser") if e["level"] in ("SEVERE", "WARNING")]
        assert log == []
        messages = [json.loads(e["message"])["message"] for e in self.driver.get_log("performance")]
        asked = [
            m["params"]["request"]["url"]
            for m in messages
            if m["method"] == "Network.requestWillBeSent"
        ]
        assert [a for a in asked if not a.startswith(("file://", "data:,"))] == []
        assert len([a for a in asked if a.startswith("file://")]) == 1


def no_browser(reason: str) -> None:
    """Skip; but where CI is set, a browser that is missing is a failure."""
    if os.environ.get("CI"):
        pytest.fail(f"CI needs the browser tests: {reason}")
    pytest.skip(reason)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    try:
        from selenium import webdriver
        from selenium.common.exceptions import WebDriverException
        from selenium.webdriver.chrome.service import Service
    except ImportError:
        no_browser("selenium is not installed: pip install selenium")
    binary = next((p for name in CHROMIUM if (p := shutil.which(name))), None)
    driver_path = shutil.which("chromedriver")
    if binary is None or driver_path is None:
        no_browser("there is no Chromium: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "disable-gpu"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    try:
        driver = webdriver.Chrome(options=options, service=Service(driver_path))
    except WebDriverException as error:
        no_browser(f"Chromium does not start: {error}")
    driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": CATCH})
    yield Browser(driver, tmp_path_factory.mktemp("pages"))
    driver.quit()


@pytest.fixture(scope="module")
def reports():
    """A real model, stock and conditioned."""
    case = CASE["timm-vit"]
    model = case.make()
    before = ac.diagnose(model, case.run, loss="sum")
    ac.condition(model, ac.Spectral())
    return before, ac.diagnose(model, case.run, loss="sum")


def known(rows, name):
    return [r for r in rows if r.number(name) is not None]


def heads(report):
    return [r for r in report.rows if r.head is not None]


def wholes(report):
    return [r for r in report.rows if r.head is None]


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
    browser.open(report, report)
    assert "are equal" in browser.text("#change")
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
    import csv

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
