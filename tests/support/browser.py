"""A real Chromium, driven through its own protocol, for pages of runs.

Debian's packages chromium and chromium-driver; `make servers` installs them. Where they are
missing, tests that need a browser are left out with the reason.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.leaks import wait_until

SIZES = {"phone": (390, 844), "tablet": (820, 1180), "desktop": (1440, 900)}
LIMIT_S = 60.0


class Browser:
    """One window. `errors` are what its console complained about."""

    def __init__(self, driver: Any):
        self.driver = driver

    def open(self, url: str) -> None:
        self.driver.get(url)

    def run(self, script: str) -> Any:
        return self.driver.execute_script(script)

    def wait(self, script: str, what: str) -> None:
        """Until a script returns something true."""
        if not wait_until(lambda: bool(self.run(script)), LIMIT_S):
            raise AssertionError(f"{what} did not come; the page says: {self.text()[:2000]}")

    def text(self) -> str:
        return str(self.run("return document.body.innerText"))

    def resize(self, size: tuple[int, int], *, is_dark: bool = False) -> None:
        metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})

    def screenshot(self, path: Path) -> None:
        assert self.driver.save_screenshot(str(path))

    def errors(self) -> list[str]:
        return [f"{entry['level']}: {entry['message']}" for entry in self.driver.get_log("browser")]


def missing() -> str:
    """Why there is no browser; empty if there is one."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not installed"
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        return "chromium and chromium-driver are not installed (make servers)"
    return ""


@contextmanager
def open_browser(scratch: Path) -> Iterator[Browser]:
    if why := missing():
        pytest.skip(why)
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for argument in (
        *("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
        *("--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking"),
        f"--user-data-dir={scratch / 'profile'}",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        yield Browser(driver)
    finally:
        driver.quit()


OpenBrowser = Callable[[], Browser]
