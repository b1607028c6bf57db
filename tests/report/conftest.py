"""A headless Chromium for tests of pages."""

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

BINARIES = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    driver, binary = shutil.which("chromedriver"), next(filter(None, map(shutil.which, BINARIES)), None)
    if driver is None or binary is None:
        pytest.skip("no Chromium with its driver is installed (Debian: apt-get install chromium chromium-driver)")
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed (extra `dev`)")
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = binary
    home = tmp_path_factory.mktemp("chromium")
    for argument in ("headless=new", "disable-gpu", "disable-dev-shm-usage", "disable-background-networking",
                     "no-first-run", f"user-data-dir={home}"):  # fmt: skip
        options.add_argument(f"--{argument}")
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    session = webdriver.Chrome(options=options, service=Service(driver))
    yield session
    session.quit()
