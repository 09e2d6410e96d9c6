"""A Chromium for the tests of the page, and a real report to draw."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from cases import CASE

import attncond as ac
from attncond.diagnose import page

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


@pytest.fixture(scope="session")
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


@pytest.fixture(scope="session")
def reports():
    """A real model, stock and conditioned."""
    case = CASE["timm-vit"]
    model = case.make()
    before = ac.diagnose(model, case.run, loss="sum")
    ac.condition(model, ac.Spectral())
    return before, ac.diagnose(model, case.run, loss="sum")
