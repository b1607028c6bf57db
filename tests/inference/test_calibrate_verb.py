"""`calibrate` says where its result is, which budgets work, and which levels can stop early."""

import json
import shlex
from pathlib import Path

import pytest
from run_folders import TINY
from support import raises, run_verb

import fleetfit as ff
from fleetfit.api.inference import find_budget_cost, parse_budget
from fleetfit.cli.predict import make_calibration_tables
from fleetfit.errors import ConfigError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ff.run({**TINY, "rounds": 1}, out=tmp_path_factory.mktemp("calibrate") / "a run").folder


def test_the_file_is_named_with_a_command_that_reads_it(folder: Path) -> None:
    file = folder / "inference/level-3.json"
    out = run_verb("calibrate", folder, "--budget", "0.9", code=0).out
    assert str(file) in out and file.is_file()
    run_verb(*shlex.split(out.splitlines()[-1])[1:], code=0)
    assert json.loads(run_verb("calibrate", folder, "--json", code=0).out)["file"] == str(file)


def test_the_thresholds_of_one_client_are_not_saved_and_it_says_so(folder: Path) -> None:
    run_verb("calibrate", folder, code=0)
    before = (folder / "inference/level-3.json").read_bytes()
    out = run_verb("calibrate", folder, "--budget", "0.9", "--client", 1, code=0).out
    assert "Not saved" in out and "level-3.json" not in out
    assert json.loads(run_verb("calibrate", folder, "--client", 1, "--json", code=0).out)["file"] is None
    assert (folder / "inference/level-3.json").read_bytes() == before


def test_a_level_with_one_exit_cannot_stop_early(tmp_path: Path) -> None:
    run = ff.run({**TINY, "rounds": 1, "method": {"name": "heterofl"}}, out=tmp_path / "run")
    for verb in (["predict", run.folder, "--stop"], ["calibrate", run.folder]):
        error = run_verb(*verb, "--level", 1, code=2).err
        assert "level 1" in error and "fleetfit calibrate" not in error
    with raises(ConfigError, "level 2", key="level"):
        run.calibrate(2)


MULTIPLY_ADDS, SECONDS = [345_840.0, 845_569.0], [2.56e-4, 7.12e-4]


@pytest.mark.parametrize(
    ("budget", "cost", "mentions", "works"),
    [
        (0.1, "multiply_adds", ("0.1", "0.410"), 0.410),
        (75.0, "multiply_adds", ("345840", "845569", "0.75"), 345_840),
        (1e9, "multiply_adds", ("345840", "845569"), 845_569),
        ("20 M", "multiply_adds", ("20 M", "0.346", "0.845 M"), "0.346 M"),
        ("20 K", "multiply_adds", ("20 K", "346", "845 K"), "845 K"),
        ("0.1 ms", "latency_s", ("0.1 ms", "0.360", "0.256", "0.712 ms"), "0.256 ms"),
        (2.0, "latency_s", ("0.000256", "0.000712 s"), 1),
        ("75%", "multiply_adds", ("75%", "0.75"), 0.75),
    ],
)
def test_a_budget_that_cannot_be_met_names_those_that_can(
    budget: float | str, cost: str, mentions: tuple[str, ...], works: float | str
) -> None:
    costs = SECONDS if cost == "latency_s" else MULTIPLY_ADDS
    with raises(ConfigError, *mentions, key="budget"):
        parse_budget(budget, cost, costs)
    assert costs[0] <= parse_budget(works, cost, costs) * (1 + 1e-9) and parse_budget(works, cost, costs) <= costs[-1]


def test_a_budget_in_words_of_its_error_is_accepted() -> None:
    for budget in ("400000 multiply-adds", "400 K multiply-adds", "400 K"):
        assert find_budget_cost(budget) == "multiply_adds"
        assert parse_budget(budget, "multiply_adds", MULTIPLY_ADDS) == 400_000
    assert [find_budget_cost(budget) for budget in ("0.5 ms", "300us", "1e-3 s ")] == ["latency_s"] * 3


def test_the_curve_ends_at_the_full_budget(folder: Path) -> None:
    calibration = ff.load(folder).calibrate()
    *_, curve = make_calibration_tables(calibration)
    shown = [curve.rows[i][0] for i in (0, -1)]
    assert shown == [f"{calibration.curve[i]['budget']:,.0f}" for i in (0, -1)]


def test_a_budget_above_the_model_keeps_the_calibration(folder: Path) -> None:
    run_verb("calibrate", folder, code=0)
    before = (folder / "inference/level-3.json").read_bytes()
    run_verb("calibrate", folder, "--budget", "20 G", code=2)
    assert (folder / "inference/level-3.json").read_bytes() == before


def test_a_folder_without_files_is_named_with_its_option(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.rst").touch()
    for place in ("empty", "notes.rst"):
        error = run_verb("predict", folder, "--data", tmp_path / place, code=2).err
        assert "--data" in error and place in error and "data.path" not in error
