"""A headless Chromium on the playground, with what every test of it needs to find and to wait for."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

from tests.pace import patience

HANG_S = 60.0  # a wait ends by its condition; this long means that it never will
T = TypeVar("T")
# Violations of the policy, collected from the first line of the page on.
WATCH = """
window.violations = [];
document.addEventListener('securitypolicyviolation', (event) => window.violations.push(
  `${event.violatedDirective} ${event.blockedURI} ${event.sourceFile}:${event.lineNumber} ${event.sample}`));
window.hacked = false;
"""


def missing() -> str:
    """Return which program the tests lack; "" if they can run."""
    programs = ("chromium", "chromedriver")
    return ", ".join(name for name in programs if shutil.which(name) is None)


class Browser:
    """One tab.  Texts and names are looked for as a reader finds them: by role, label and content."""

    def __init__(self, driver: Chrome) -> None:
        self.driver = driver

    def open(self, url: str) -> None:
        """Load a page in a tab without history: nothing is stored."""
        self.driver.get(url)
        self.driver.execute_script("sessionStorage.clear(); localStorage.clear()")
        self.driver.get("about:blank")
        self.driver.get(url)
        self.until(lambda: self.all("#message"))

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str) -> WebElement:
        """Return the first element of a selector, as soon as there is one."""
        return self.until(lambda: self.all(selector))[0]

    def button(self, name: str, within: str = "body") -> WebElement:
        """Return the button of this accessible name, as soon as there is one."""
        script = (
            "return [...document.querySelectorAll(arguments[0] + ' button')]"
            ".find((one) => (one.getAttribute('aria-label') ?? one.textContent).trim() === arguments[1])"
        )
        return self.until(lambda: self.driver.execute_script(script, within, name))

    def text(self, selector: str) -> str:
        """Return the text of all elements of a selector, without the marks where an answer paused.

        A machine that stops for a second makes a mark anywhere."""
        script = "return [...document.querySelectorAll(arguments[0])].map((one) => one.innerText).join('\\n')"
        return re.sub(r"paused [\d.]+ s", "", self.driver.execute_script(script, selector))

    def until(self, holds: Callable[[], T]) -> T:
        """Return the first true value of `holds`.  Fails after HANG_S, with what the page shows."""
        deadline = time.monotonic() + patience(HANG_S)
        while True:
            try:
                if found := holds():
                    return found
            except StaleElementReferenceException:
                pass  # drawn anew meanwhile
            assert time.monotonic() < deadline, self.text("body")
            time.sleep(0.02)

    def send(self, text: str, *keys: str) -> None:
        """Type into the composer."""
        self.one("#message").send_keys(text, *keys)

    def script(self, code: str, *args: Any) -> Any:
        return self.driver.execute_script(code, *args)

    def faults(self) -> list[str]:
        """Return, and forget, what went wrong: violations of the policy, script that ran, errors on the console."""
        found: list[str] = self.script("return window.violations.splice(0)")
        if self.script("return window.hacked"):
            found.append("script of the model ran")
        return found + [entry["message"] for entry in self._log() if entry["level"] == "SEVERE"]

    def _log(self) -> list[dict[str, Any]]:
        """Return, and forget, the lines of the console."""
        found: list[dict[str, Any]] = self.driver.get_log("browser")  # type: ignore[no-untyped-call]
        return found


@contextmanager
def chromium(folder: Path) -> Iterator[Browser]:
    """A browser whose profile is in a folder.  It reaches nothing but this machine."""
    options = ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in (
        "--headless=new",
        "--no-sandbox",  # containers have no namespaces to spare
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--disable-component-update",
        "--no-first-run",
        "--window-size=1280,860",
        f"--user-data-dir={folder}",
        "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": WATCH})
        yield Browser(driver)
    finally:
        driver.quit()
