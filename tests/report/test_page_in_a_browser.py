"""The page in a real browser, Chromium without a window: what it says to its console, asks of the network, and shows.

`make test-browser` runs these; they skip where there is no Chromium or no driver of it.
"""

import base64
import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from support.browser import DESK, PATIENCE_S, PHONE

import fleetfit as ff
from fleetfit.report.page import write_report
from fleetfit.report.text import format_percent

pytestmark = pytest.mark.browser


def make_settings(**sections: Any) -> dict[str, Any]:
    return {
        "name": "paged", "rounds": 4, "local": {"epochs": 1}, "evaluate": {"every": 2},
        "data": {"name": "digits", "partition": {"kind": "dirichlet", "alpha": 0.5, "clients": 10}},
        "fleet": {"groups": [{"budget": 0.25, "profile": "phone"}, {"budget": 1.0, "profile": "phone"}],
                  "links": {"lost_up": 0.3}},
        "cohort": {"fraction": 0.5}, **sections,
    }  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ff.run(make_settings(), out=tmp_path_factory.mktemp("run") / "run").folder


EVIL = "</script><script>alert(1)</script><img src=x>"
COMPARED = """
rounds = 2
local.epochs = 1
evaluate.every = 1
data = { name = "digits", partition = { kind = "iid", clients = 6 } }
fleet.groups = [{ budget = 0.25 }, { budget = 1.0 }]
cohort.fraction = 0.5
[[compare.row]]
label = "ScaleFL with a longer label"
method.name = "scalefl"
[[compare.row]]
label = "%s"
method.name = "heterofl"
[compare.grid]
seed = [0, 1]
data.partition.clients = [6, 8]
[compare]
columns = ["local", "global", "local_worst_tenth", "ensemble"]
"""


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> ff.Comparison:
    root = tmp_path_factory.mktemp("compared")
    (root / "two.toml").write_text(COMPARED % EVIL)
    return ff.compare(root / "two.toml", out=root / "out")


@pytest.fixture(scope="module")
def private(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the folder of a private run is: see `fleetfit.privacy`."""
    folder = Path(shutil.copytree(finished, tmp_path_factory.mktemp("private") / "run"))
    spending = {"epsilon": 1.5, "delta": 1e-4, "noise_multiplier": 1.0, "clipping_norm": 0.3, "rate": 0.1}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps({**one, "privacy": spending}) + "\n" for one in lines))
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({**summary, "privacy": spending}))
    write_report(folder)
    return folder


@pytest.fixture(scope="module")
def pages(finished: Path, compared: ff.Comparison, private: Path) -> dict[str, Path]:
    several = write_report(finished, compared.folder, out=finished.parent / "several.html")
    return {
        "run": finished / "report.html",
        "comparison": compared.folder / "report.html",
        "private": private / "report.html",
        "several": several,
    }


def open_page(browser: Any, path: Path, width: int = DESK, scheme: str = "light") -> None:
    """Open a page, and wait until its plots are drawn."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width == PHONE}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme_ = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": scheme_})
    browser.get(path.as_uri())
    until = time.monotonic() + PATIENCE_S
    while not browser.execute_script("return document.documentElement.dataset.drawn"):
        assert time.monotonic() < until, f"the plots of {path} are not drawn: {browser.get_log('browser')}"
        time.sleep(0.05)


def get_traces(browser: Any, plot: str) -> list[dict[str, Any]]:
    """Return what a plot was drawn from, as the library has it."""
    traces: list[dict[str, Any]] = browser.execute_script(
        "return document.getElementById('plot-' + arguments[0]).data.map(t => ({name: t.name, x: t.x, y: t.y}))", plot
    )
    return traces


def cells(browser: Any) -> list[list[str]]:
    rows: list[list[str]] = browser.execute_script(
        "return [...document.querySelectorAll('tr')].map(r => [...r.children].map(c => c.innerText.trim()))"
    )
    return rows


@pytest.mark.parametrize("name", ["run", "comparison", "private", "several"])
@pytest.mark.parametrize(("width", "scheme"), [(DESK, "light"), (DESK, "dark"), (PHONE, "light")])
def test_a_page_says_nothing_to_the_console_asks_nobody_and_fits(
    browser: Any, pages: dict[str, Path], name: str, width: int, scheme: str
) -> None:
    browser.get_log("browser"), browser.get_log("performance")
    open_page(browser, pages[name], width, scheme)
    assert [entry["message"] for entry in browser.get_log("browser")] == []
    sent = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    requests = {m["params"]["request"]["url"] for m in sent if m["method"] == "Network.requestWillBeSent"}
    assert {url for url in requests if not url.startswith("data:")} == {pages[name].as_uri()}
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width, "it scrolls sideways"
    empty = "p => !p.querySelector('.main-svg .trace, .main-svg .point')"
    assert (
        browser.execute_script(f"return [...document.querySelectorAll('[data-plot]')].filter({empty}).map(p => p.id)")
        == []
    )
    assert int(browser.execute_script("return document.documentElement.dataset.drawn")) > 0


def test_the_numbers_on_the_page_are_those_of_the_run(browser: Any, finished: Path) -> None:
    open_page(browser, finished / "report.html")
    run = ff.load(finished)
    text = browser.execute_script("return document.body.innerText")
    assert f"{format_percent(run.summary['local'])} %" in text
    assert f"{format_percent(run.summary['global'])} %" in text
    evaluated = {m["round"]: m["evaluate"]["static"] for m in run.metrics if "evaluate" in m}
    (local,) = [one for one in get_traces(browser, "accuracy") if one["name"] == "local"]
    assert local["x"] == [2, 4]
    assert local["y"] == [round(100 * one["local"], 4) for one in evaluated.values()]
    (loss,) = get_traces(browser, "loss")
    assert loss["y"] == pytest.approx([m["train"]["loss"] for m in run.metrics], rel=1e-5)
    for name, level in evaluated[4]["levels"].items():
        exits = [format_percent(share) for share in level["exits"]]
        row = next(
            row for row in cells(browser) if row[:3] == [name, str(level["clients"]), format_percent(level["local"])]
        )
        assert row[3 : 3 + len(exits)] == exits


def test_the_table_on_the_page_is_that_of_the_comparison(browser: Any, compared: ff.Comparison) -> None:
    open_page(browser, compared.folder / "report.html")
    rows = cells(browser)
    for row in (*compared.table.rows, *(compared.difference_table.rows if compared.difference_table else ())):
        assert list(row) in rows
    for number, key in enumerate(dict.fromkeys(setting for _, setting in compared.runs)):
        traces = get_traces(browser, f"accuracy-local-{number}")
        for (_, setting), runs in compared.runs.items():
            curves = [[round(100 * m["evaluate"]["static"]["local"], 4) for m in run.metrics] for run in runs]
            assert setting != key or all(curve in [one["y"] for one in traces] for curve in curves)
    assert browser.execute_script("return document.querySelectorAll('img').length") == 0, "a label is text"
    labels = browser.execute_script("return [...document.querySelectorAll('.legendtext')].map(t => t.textContent)")
    assert EVIL in labels


def test_colors_go_with_the_scheme_also_while_it_is_open(browser: Any, finished: Path) -> None:
    def colors() -> tuple[str, str]:
        script = (
            "return [getComputedStyle(document.body).backgroundColor,"
            " document.querySelector('#plot-accuracy .scatterlayer .js-line').style.stroke]"
        )
        page, line = browser.execute_script(script)
        return page, line

    open_page(browser, finished / "report.html", scheme="light")
    light = colors()
    assert light == ("rgb(255, 255, 255)", "rgb(0, 114, 178)")
    dark = {"media": "", "features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", dark)
    until = time.monotonic() + PATIENCE_S
    while colors()[1] == light[1] and time.monotonic() < until:
        time.sleep(0.05)
    assert colors() == ("rgb(20, 24, 29)", "rgb(86, 180, 233)")


def test_it_prints_in_light_with_all_plots(browser: Any, pages: dict[str, Path]) -> None:
    open_page(browser, pages["run"], scheme="dark")
    before = browser.execute_script("return document.querySelector('#plot-accuracy .main-svg').clientWidth")
    script = """
        window.printed = null;
        window.addEventListener('beforeprint', () => {
          const plots = [...document.querySelectorAll('[data-plot] .main-svg')].map(svg => svg.getAttribute('width'));
          window.printed = [getComputedStyle(document.body).backgroundColor, Math.max(...plots.map(Number))];
        });
    """
    browser.execute_script(script)
    pdf = base64.b64decode(browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})["data"])
    assert pdf.startswith(b"%PDF")
    background, widest = browser.execute_script("return window.printed")
    assert background == "rgb(255, 255, 255)"
    assert widest <= 340, "two plots go side by side on a page"
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        if browser.execute_script("return document.querySelector('#plot-accuracy .main-svg').clientWidth") == before:
            return
        time.sleep(0.05)
    pytest.fail("the plots stay as narrow as they were printed")
