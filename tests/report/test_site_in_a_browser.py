"""The documentation as a site in a real browser: nothing is loaded from elsewhere, nothing fails, the search finds.

The site is that of `make docs`, in build/site; without one these tests skip. `make test-browser` runs them.
"""

import functools
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from support.browser import DESK, PATIENCE_S, PHONE

pytestmark = pytest.mark.browser
SITE = Path(__file__).parents[2] / "build" / "site"
PAGES = ("index", "start", "idea", "which-method", "keys", "verbs", "api", "papers", "results", "notebooks/first-run")


class Quiet(SimpleHTTPRequestHandler):
    """Serves files and says nothing."""

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    if not (SITE / "index.html").is_file():
        pytest.skip("there is no site in build/site: run make docs first")
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(SITE)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def until(find: Callable[[], Any], what: str) -> Any:
    """Wait for something, and return it."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        if value := find():
            return value
        time.sleep(0.1)
    raise AssertionError(f"{what} did not come")


def list_requests(browser: Any) -> set[str]:
    """Return the addresses that were asked for since the last call."""
    messages = [json.loads(line["message"])["message"] for line in browser.get_log("performance")]
    return {m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"}


@pytest.mark.parametrize("page", PAGES)
def test_a_page_loads_nothing_remote_and_logs_no_error(browser: Any, address: str, page: str) -> None:
    list_requests(browser), browser.get_log("browser")
    browser.get(f"{address}/{page}.html")
    until(lambda: browser.execute_script("return document.readyState") == "complete", page)
    until(lambda: browser.execute_script("return document.documentElement.classList.contains('js')"), "its script")
    own = {url for url in list_requests(browser) if not url.startswith(("data:", "blob:", "chrome"))}
    assert own and not {url for url in own if not url.startswith(address)}
    errors = [
        line for line in browser.get_log("browser") if line["level"] == "SEVERE" and "favicon" not in line["message"]
    ]
    assert not errors


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("width", [PHONE, DESK])
def test_a_page_is_no_wider_than_the_window(browser: Any, address: str, page: str, width: int) -> None:
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width == PHONE}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get(f"{address}/{page}.html")
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def open_search(browser: Any) -> None:
    """Open the search as a tap on its sign does, once the site's script has come."""
    until(lambda: browser.execute_script("return typeof component$ != 'undefined'"), "its script")
    browser.execute_script("document.querySelector('label[for=__search]').click()")


@pytest.mark.parametrize("from_disk", [False, True], ids=["served", "from disk"])
def test_the_search_finds(browser: Any, address: str, from_disk: bool) -> None:
    browser.get((SITE / "index.html").as_uri() if from_disk else f"{address}/index.html")
    field = until(lambda: browser.find_elements("css selector", "input.md-search__input"), "the field")[0]
    open_search(browser)
    field.send_keys("quorum")
    links = until(lambda: browser.find_elements("css selector", "a.md-search-result__link"), "a result")
    assert any("devices.html" in link.get_attribute("href") for link in links)


@pytest.mark.parametrize("words", ["seed", "attack", "images"])
def test_the_search_leads_to_pages_for_users_first(browser: Any, address: str, words: str) -> None:
    browser.get(f"{address}/index.html")
    field = until(lambda: browser.find_elements("css selector", "input.md-search__input"), "the field")[0]
    open_search(browser)
    field.send_keys(words)
    links = until(lambda: browser.find_elements("css selector", "a.md-search-result__link"), "a result")
    aside = [any(f"/{part}" in link.get_attribute("href") for part in ("repository/", "adr/")) for link in links]
    assert len(aside) > 3 and not any(aside[:10])


@pytest.mark.parametrize("width", [PHONE, DESK])
def test_code_in_the_tables_of_keys_is_not_broken_within_a_word(browser: Any, address: str, width: int) -> None:
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width == PHONE}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get(f"{address}/keys.html")
    codes = browser.execute_script(
        "return [...document.querySelectorAll('td code')].map(c => [c.textContent, c.getClientRects().length])"
    )
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert len(codes) > 100
    assert not [code for code, lines in codes if lines > 1 and not any(sign in code for sign in " -/")]


def test_dark_is_dark_and_light_is_light(browser: Any, address: str) -> None:
    grounds = {}
    for scheme in ("light", "dark"):
        feature = {"name": "prefers-color-scheme", "value": scheme}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        browser.get(f"{address}/index.html")
        ground = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
        grounds[scheme] = sum(int(part) for part in ground[4:-1].split(",")[:3])
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert grounds["light"] > 700 > 300 > grounds["dark"]
