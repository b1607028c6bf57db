"""Curves: means over seeds by hand, units, and what private runs leave out."""

import random
from pathlib import Path
from typing import Any

import pytest
from support.runs import make_run_record

from fleetfit.report.curves import Point, Series, choose_unit, fit_unit
from fleetfit.report.page.blocks import Page, Plots
from fleetfit.report.page.run_page import make_run_page
from fleetfit.runs.comparison import RowRecord
from fleetfit.runs.folder import RunFolder

SIZES = {"blocks": 4, "parameters": 100, "multiply_adds": 1000, "clients": 2, "local": None}
LEVELS = [
    {"level": "1", "width": 0.5, "depth": 2, "exits": [2], **SIZES},
    {"level": "2", "width": 1.0, "depth": 4, "exits": [2, 4], **SIZES},
]
SUMMARY = {
    "method": "scalefl", "model": "cnn", "data": "digits", "norm": "static", "rounds": 5, "levels": LEVELS,
    "global": 0.8, "local": 0.5, "evaluate": {}, "bytes_down": 1, "bytes_up": 1, "waste": 0.0, "failures": 0,
    "seconds": 4.0, "notes": [],
}  # fmt: skip


def make_run(seed: int) -> RunFolder:
    """Return a run of five rounds with random numbers, of which every second round was evaluated."""
    rng = random.Random(seed)
    reports = []
    for number in range(1, 6):
        levels = {name: {"local": rng.random(), "clients": 2} for name in ("1", "2")}
        accuracies = {"global": rng.random(), "local": rng.random(), "levels": levels, "exits": [0.5, rng.random()]}
        costs = {"simulated_s": 60 * rng.random(), "multiply_adds": int(1e9 * rng.random())}
        report: dict[str, Any] = {
            "round": number, "train": {"loss": rng.random(), "clients": 2}, "failures": [], "seconds": 1.0, **costs,
            "bytes_down": rng.randrange(10**6), "bytes_up": rng.randrange(10**6),
        }  # fmt: skip
        reports.append(report | ({"evaluate": {"static": accuracies}} if number % 2 else {}))
    return make_run_record(SUMMARY | {"seed": seed}, reports)


def plots_of(page: Page) -> dict[str, dict[str, tuple[list[float], list[float]]]]:
    """Return x and y of the lines of each plot of a page, by label."""
    blocks = [block for section in page.sections for block in section.blocks if isinstance(block, Plots)]
    return {
        plot.name: {trace["name"]: (list(trace["x"]), list(trace["y"])) for trace in plot.traces if "name" in trace}
        for block in blocks
        for plot in block.plots
    }


def test_a_mean_is_over_rounds_that_all_seeds_with_a_curve_have() -> None:
    """10 and 20 after round 1; 30 and 50 after round 3, of deviation sqrt(2) * 10; round 2 is measured once."""
    first = [Point(1, 1, 10.0), Point(2, 2, 99.0), Point(3, 3, 30.0)]
    second = [Point(1, 2, 20.0), Point(3, 5, 50.0)]
    mean = Series("a", {0: first, 1: second, 2: []}).mean
    assert [point[:3] for point in mean] == [(1, 1.5, 15.0), (3, 4, 40.0)]
    assert mean[1].deviation == pytest.approx(14.142136)
    assert [point[1:] for point in Series("a", {0: second}).mean] == [(2, 20.0, 0.0), (5, 50.0, 0.0)]
    assert Series("a", {0: []}).mean == []


@pytest.mark.parametrize(
    ("cost", "total", "unit"),
    [("bytes", 1.9e9, "MB"), ("bytes", 2e9, "GB"), ("bytes", 5, "kB"), ("multiply_adds", 3e15, "P"),
     ("simulated_s", 119, "s"), ("simulated_s", 7200, "h")],
)  # fmt: skip
def test_a_unit_is_the_largest_of_which_there_are_two(cost: str, total: float, unit: str) -> None:
    assert fit_unit(cost, total).name == unit


def test_the_unit_fits_the_largest_run() -> None:
    run = make_run(0)
    assert choose_unit([RowRecord("a", "", [(0, run)])], "multiply_adds").name == "G"
    assert choose_unit([], "simulated_s").name == "s"


def test_private_runs_have_no_curves_of_clients(tmp_path: Path) -> None:
    privacy = {"epsilon": 1.0, "delta": 0.001, "noise_multiplier": 1.0, "clipping_norm": 0.3, "rate": 0.1}
    reports = [report.dump() | {"privacy": privacy} for report in make_run(0).rounds]
    run = make_run_record(SUMMARY, reports)
    assert plots_of(make_run_page(run, tmp_path / "report.html")) == {}
