"""Keys that are no method's idea: a comparison lists where rows differ; `same_recipe` gives all rows the first's."""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support import compare_text, run_verb

import fleetfit as ff
from fleetfit.api.comparison import plan_comparison
from fleetfit.api.comparison.plan import PlannedRun
from fleetfit.api.comparison.recipe import describe_costs, describe_recipes
from fleetfit.config import load_experiment
from fleetfit.config.assemble.method import build_method_spec
from fleetfit.hooks import FEDAVG, build
from fleetfit.runs.schema import SummaryRecord

SMALL: dict[str, Any] = {
    "rounds": 2,
    "data": {"name": "digits", "partition": {"kind": "iid", "clients": 6}},
    "model": {"name": "mlp", "hidden": 8},
    "local": {"max_steps": 2, "batch_size": 16},
    "cohort": {"count": 2},
}


def plan_rows(*rows: dict[str, Any], overrides: tuple[str, ...] = (), **compare: Any) -> dict[str, PlannedRun]:
    compare = {"same_recipe": True, "smallest_baseline": False, "row": list(rows), **compare}
    return {run.row: run for run in plan_comparison({**SMALL, "compare": compare}, overrides).first_runs}


def get_factors(run: PlannedRun) -> list[float]:
    """Return the factors on the learning rate of four rounds."""
    schedule = run.experiment.local.schedule
    return [schedule.factor_at(4, round) for round in range(4)]


def get_step(run: PlannedRun) -> tuple[str, dict[str, Any]]:
    """Return the name of the function that steps the server, and its arguments."""
    step = build(build_method_spec(run.experiment)).step
    assert callable(step)
    return (step.func.__module__, step.keywords) if isinstance(step, partial) else (step.__module__, {})


COSINE = [0.01 + 0.99 * (1 + math.cos(math.pi * round / 3)) / 2 for round in range(4)]
"""From 1 to 0.01 along half a cosine."""
EXPERIMENTS = Path(__file__).parents[1] / "experiments"
MOMENTUM = ("fleetfit.options.fedavgm", {"momentum": 0.5, "lr": 1.0})


@pytest.mark.parametrize(
    "name", ["heterofl", "scalefl", "adaptivefl", "fedrolex", "fjord", "nefl", "fedavg", "exclusivefl"]
)
def test_rows_get_schedule_and_momentum_of_the_first(name: str) -> None:
    rows = plan_rows({"method": {"name": "fleetfit"}}, {"method": {"name": name}})
    assert [get_step(run) for run in rows.values()] == [MOMENTUM, MOMENTUM]
    first, other = map(get_factors, rows.values())
    assert first == other == pytest.approx([1.0, *COSINE[1:]])
    plain = plan_rows({"method": {"name": "fleetfit"}}, {"method": {"name": name}}, same_recipe=False)[name]
    assert get_factors(plain) == [1.0] * 4 and get_step(plain) == (FEDAVG.step.__module__, {})


def test_the_smallest_model_gets_them_too() -> None:
    rows = plan_rows(
        {"method": {"name": "fleetfit", "momentum": 0.8}}, {"method": {"name": "heterofl"}}, smallest_baseline=True
    )
    assert {run.experiment.method.name for run in rows.values()} == {"fleetfit", "heterofl", "fedavg"}
    assert [get_step(run)[1]["momentum"] for run in rows.values()] == [0.8, 0.8, 0.8]


def test_a_method_with_momentum_of_its_own_loses_it_where_the_first_has_none() -> None:
    rows = plan_rows({"method": {"name": "scalefl"}}, {"method": {"name": "fleetfit"}})
    assert get_step(rows["fleetfit"]) == get_step(rows["scalefl"]) == (FEDAVG.step.__module__, {})
    assert get_factors(rows["fleetfit"]) == [1.0] * 4


@pytest.mark.parametrize(
    ("option", "keys"), [("fedadam", {"lr": 0.03}), ("fedyogi", {"beta1": 0.5}), ("fedavgm", {"lr": 0.7})]
)
def test_another_server_optimizer_is_given_too(option: str, keys: dict[str, float]) -> None:
    first = {"label": "first", "method": {"name": "heterofl", "options": {option: keys}}}
    rows = plan_rows(first, {"method": {"name": "fleetfit"}}, {"method": {"name": "scalefl"}})
    steps = [get_step(run) for run in rows.values()]
    assert (
        steps[0] == steps[1] == steps[2]
        and steps[0][1].items() >= {key: value for key, value in keys.items() if key in steps[0][1]}.items()
    )


def test_a_row_keeps_what_it_sets_itself_and_a_step_of_another_kind() -> None:
    own = {"label": "own", "method": {"name": "heterofl", "options": {"fedavgm": {"momentum": 0.3}}}}
    constant = {"label": "constant", "method": {"name": "heterofl"}, "local": {"schedule": {"kind": "constant"}}}
    dyn = {"label": "dyn", "method": {"name": "scalefl", "options": {"feddyn": {}}}}
    rows = plan_rows({"method": {"name": "fleetfit"}}, own, constant, dyn, {"method": {"name": "depthfl"}})
    assert get_step(rows["own"])[1]["momentum"] == 0.3 and get_factors(rows["own"]) == get_factors(rows["fleetfit"])
    assert get_step(rows["constant"]) == MOMENTUM and get_factors(rows["constant"]) == [1.0] * 4
    for row in ("dyn", "depthfl"):
        assert get_step(rows[row])[0] == "fleetfit.options.feddyn"
        assert get_factors(rows[row]) == get_factors(rows["fleetfit"])


def test_settings_and_overrides_of_the_first_row_count() -> None:
    settings = [{"label": "step", "local": {"schedule": {"kind": "exponential", "factor": 0.5}}}, {"label": "as is"}]
    compare = {"row": [{"method": {"name": "heterofl"}}, {"method": {"name": "scalefl"}}], "setting": settings}
    plan = plan_comparison(
        {**SMALL, "compare": {**compare, "same_recipe": True, "smallest_baseline": False}},
        ["method.options.fedavgm.momentum=0.25"],
    )
    assert [get_factors(run) for run in plan.first_runs] == [[1, 0.5, 0.25, 0.125], [1, 1, 1, 1]] * 2
    assert {get_step(run)[1]["momentum"] for run in plan.first_runs} == {0.25}


ROWS = """
[[compare.row]]
label = "ours"
method.name = "fleetfit"
[[compare.row]]
label = "theirs"
method.name = "heterofl"
local.lr = 0.07
[[compare.row]]
label = "dyn"
method = { name = "scalefl", options = { feddyn = {} } }
"""
HEAD = """
rounds = 2
[data]
name = "digits"
partition = { kind = "iid", clients = 6 }
[model]
name = "mlp"
hidden = 8
[local]
max_steps = 2
[cohort]
count = 2
"""


def read_notes(comparison: ff.Comparison) -> str:
    """Return the lines below the first table, which all files and pages have."""
    notes = "\n".join(comparison.table.notes)
    text = (comparison.folder / "table.md").read_text()
    assert all(note in text for note in comparison.table.notes)
    page = (comparison.folder / "report.html").read_text()
    assert all(note.partition("'")[0] in page for note in comparison.table.notes)
    return notes


def test_the_lines_below_the_table_have_the_keys_that_differ_and_the_costs(tmp_path: Path) -> None:
    comparison = compare_text(tmp_path, f"{HEAD}[compare]\nsmallest_baseline = false\n{ROWS}")
    notes = read_notes(comparison)
    assert "local.schedule (cosine minimum=0.01 " in notes
    assert "server momentum (0.5 in ours; 0 in theirs; feddyn " in notes
    assert "local.lr (0.1 in ours, dyn; 0.07 in theirs)" in notes
    assert "local.epochs" not in notes and "cohort." not in notes
    totals = {}
    for (row, _), (run,) in comparison.runs.items():
        lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
        totals[row] = (
            sum(line["multiply_adds"] for line in lines),
            sum(line["bytes_down"] + line["bytes_up"] for line in lines),
        )
    shares = [[totals[row][i] / totals["ours"][i] for row in ("theirs", "dyn")] for i in (0, 1)]
    for name, (theirs, dyn) in zip(("multiply-adds", "bytes"), shares, strict=True):
        assert f"{name} {theirs:.2f} in theirs, {dyn:.2f} in dyn" in notes
    assert comparison.difference_table is not None
    assert not any("interval" in column for column in comparison.difference_table.columns), "one seed"


def test_costs_are_of_runs_that_all_rows_have() -> None:
    """The seed 1 of b failed; with its two other seeds against three of a the share would be 2 / 3."""
    runs = {("", seed): SummaryRecord.model_construct(multiply_adds=100, bytes_down=1, bytes_up=1) for seed in range(3)}
    rest = {key: run for key, run in runs.items() if key != ("", 1)}
    assert describe_costs({"a": runs, "b": rest}) == []
    triple = {key: run.model_copy(update={"multiply_adds": 300}) for key, run in rest.items()}
    (sentence,) = describe_costs({"a": runs, "b": triple})
    assert "3.00 in b" in sentence


def test_a_comparison_with_one_recipe_says_so_and_what_is_left(tmp_path: Path) -> None:
    keys = "same_recipe = true\nsmallest_baseline = false\ngrid.seed = [0, 1]"
    comparison = compare_text(tmp_path, f"{HEAD}[compare]\n{keys}\n{ROWS}")
    notes = read_notes(comparison)
    assert "compare.same_recipe" in notes and "of ours" in notes
    assert "local.schedule" not in notes
    assert "server momentum (0.5 in ours, theirs; feddyn " in notes, "feddyn has another step"
    assert comparison.difference_table is not None and "interval" in comparison.difference_table.columns[-1]
    for (row, _), runs in comparison.runs.items():
        assert {run.experiment.local.schedule.kind for run in runs} == {"cosine"}
        assert all("same_recipe" not in (run.folder / "config.toml").read_text() for run in runs), row


def test_equal_rows_are_said_to_be_equal(tmp_path: Path) -> None:
    rows = ROWS.partition('[[compare.row]]\nlabel = "theirs"')[0] + '[[compare.row]]\nlabel = "tau"\nmethod.tau = 0.5\n'
    notes = compare_text(tmp_path, f"{HEAD}[compare]\nsmallest_baseline = false\n{rows}").table.notes
    assert any(note.startswith("All rows") for note in notes) and not any(note.startswith("Cost") for note in notes)


def test_the_demo_has_one_recipe() -> None:
    from fleetfit.cli.run import DEMO

    runs = plan_comparison(DEMO).first_runs
    assert [get_step(run) for run in runs] == [MOMENTUM] * 4
    assert {tuple(get_factors(run)) for run in runs} == {tuple(get_factors(runs[0]))}
    assert load_experiment(DEMO).compare.same_recipe


@pytest.mark.parametrize("name", ["cifar10", "femnist", "shakespeare"])
def test_experiments_on_our_method_have_one_recipe(name: str) -> None:
    runs = plan_comparison(EXPERIMENTS / "small" / f"fleetfit-{name}.toml").first_runs
    assert [get_step(run) for run in runs] == [MOMENTUM] * len(runs)
    assert {tuple(get_factors(run)) for run in runs} == {tuple(get_factors(runs[0]))}
    assert get_factors(runs[0])[-1] == pytest.approx(0.01)


def test_the_terminal_prints_the_table_first_and_what_its_accuracies_are(tmp_path: Path) -> None:
    (tmp_path / "file.toml").write_text(f"{HEAD}[compare]\nsmallest_baseline = false\n{ROWS}")
    printed = run_verb("compare", tmp_path / "file.toml", "--out", tmp_path / "out", code=0).out
    order = ("method ", "local is ", "global is ", "Differences from ours", "multiply-adds ┃", "Results: ", "Page: ")
    places = [printed.index(word) for word in order]
    assert places == sorted(places)
    assert "[95%" not in printed, "one seed has no interval"


def test_other_steps_on_the_server_are_named() -> None:
    """Those of options take the place of a method's momentum."""
    fednova = {"options": {"fednova": {"momentum": 0.6}}}
    methods = {"base": {}, "nova": fednova, "ours": {"name": "fleetfit", **fednova}, "depthfl": {"name": "depthfl"}}
    rows = {label: load_experiment(data="digits", method={"name": "heterofl", **m}) for label, m in methods.items()}
    notes = describe_recipes([rows])
    assert "(0 in base; fednova momentum=0.6 in nova, ours; " in notes and " in depthfl)" in notes


def test_rows_with_different_classifiers_are_named() -> None:
    rows = [{"method": {"name": "scalefl"}}, {"label": "own", "method": {"name": "reefl"}, "model": {"head": "norm"}}]
    plan = plan_comparison({"model": {"name": "bert_tiny"}, "compare": {"smallest_baseline": False, "row": rows}})
    notes = describe_recipes([{run.row: run.experiment for run in plan.runs}])
    assert "model.head (pooler in scalefl; norm in own)" in notes
