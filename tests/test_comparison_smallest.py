"""The row "smallest model": which comparisons have it, what it trains, and what it leaves alone."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from support import raises, run_verb
from support.comparisons import compare_text

import fleetfit as ff
from fleetfit.api.comparison import load_comparison, plan_comparison
from fleetfit.api.comparison.plan import SMALLEST
from fleetfit.runs.comparison import list_planned_runs

HEAD = """
rounds = 2
data = { name = "tiny:tiny_data", partition = { kind = "iid", clients = 6 } }
model.name = "tiny:tiny"
fleet = { groups = [{ budget = 0.4 }, { budget = 1.0 }], tolerance = 0.5 }
local = { epochs = 1, lr = 0.05 }
evaluate.every = 0
"""
ROWS = """
[[compare.row]]
label = "A"
method = { name = "scalefl", beta = 0.2 }
[[compare.row]]
label = "B"
method.name = "heterofl"
local.lr = 0.01
"""
WITHOUT = "compare.smallest_baseline = false\n"
WITH = "compare.smallest_baseline = true\n"


def planned(folder: Path, text: str, overrides: Sequence[str] = ()) -> Any:
    (folder / "file.toml").write_text(text)
    return plan_comparison(folder / "file.toml", overrides)


@pytest.mark.parametrize(
    ("text", "has_row"),
    [
        (HEAD + ROWS, True),
        (HEAD + WITHOUT + ROWS, False),
        (HEAD + ROWS + '[[compare.row]]\nmethod.name = "fedavg"\nlocal.lr = 0.2\n', False),
        (HEAD + ROWS + '[[compare.row]]\nmethod.name = "fedavg"\nfleet.groups = [{ budget = 1.0 }]\n', True),
        (HEAD + ROWS + f'[[compare.row]]\nlabel = "{SMALLEST}"\nmethod.name = "depthfl"\n', False),
        (HEAD + ROWS + '[[compare.row]]\nlabel = "C"\nmodel.name = "cnn"\ndata.name = "digits"\n', False),
        (HEAD + "[compare.grid]\nlocal.lr = [0.1, 0.2]\n", False),
        (HEAD + WITH + "[compare.grid]\nlocal.lr = [0.1, 0.2]\n", True),
        (HEAD + WITH, True),
    ],
)
def test_rows_of_one_data_set_and_model_have_it_unless_one_is_such_a_row(
    text: str, has_row: bool, tmp_path: Path
) -> None:
    plan = planned(tmp_path, text)
    assert (plan.smallest == SMALLEST == list(plan.rows)[-1]) if has_row else not plan.smallest


def test_it_is_plain_fedavg_with_the_sections_that_rows_share(tmp_path: Path) -> None:
    """Method keys of the file, of settings and overrides are for the other rows; all other keys are for all."""
    base = HEAD + 'method = { name = "scalefl", options.fedavgm.momentum = 0.5 }\n'
    settings = '[[compare.setting]]\nlabel = "s"\nmethod.options.fedprox.mu = 0.1\nlocal.momentum = 0.3\n'
    plan = planned(
        tmp_path, base + ROWS + settings, overrides=["method.options.fedavgm.momentum=0.4", "local.epochs=3"]
    )
    (run,) = (run for run in plan.runs if run.row == SMALLEST)
    method, local = run.experiment.method, run.experiment.local
    assert (method.name, method.settings, method.options) == ("fedavg", {}, {})
    assert (local.lr, local.momentum, local.epochs) == (0.05, 0.3, 3)


@pytest.mark.parametrize("place", ["the file", "a setting", "an override"])
def test_it_does_without_the_split_of_the_other_rows(place: str, tmp_path: Path) -> None:
    """FedAvg refuses `fleet.scaling`; all other keys of the fleet are for all rows."""
    rows = ROWS.replace("heterofl", "fleetfit")
    text = HEAD.replace("tolerance", 'scaling = "both", tolerance') if place == "the file" else HEAD
    setting = '[[compare.setting]]\nlabel = "s"\nfleet.scaling = "both"\n' if place == "a setting" else ""
    comparison = compare_text(
        tmp_path, text + rows + setting, overrides=["fleet.scaling=both"] * (place == "an override")
    )
    fleets = {row: run[0].experiment.fleet for (row, _), run in comparison.runs.items()}
    assert {row: fleet.scaling for row, fleet in fleets.items()} == {"A": "both", "B": "both", SMALLEST: None}
    assert {fleet.tolerance for fleet in fleets.values()} == {0.5}


def test_the_folder_of_a_comparison_does_not_depend_on_it(tmp_path: Path) -> None:
    names = {planned(tmp_path, HEAD + key + ROWS).fingerprint for key in ("", WITH, WITHOUT)}
    assert len(names) == 1


def test_a_row_of_its_label_and_the_key_contradict_each_other(tmp_path: Path) -> None:
    row = f'[[compare.row]]\nlabel = "{SMALLEST}"\nmethod.name = "depthfl"\n'
    with raises(ff.errors.ConfigError, SMALLEST, key="compare.smallest_baseline"):
        planned(tmp_path, HEAD + WITH + row)


def finals(comparison: ff.Comparison) -> Mapping[str, Any]:
    results = json.loads((comparison.folder / "results.json").read_text())
    return {run["row"]: run for run in results["runs"]}


def test_the_row_is_beside_the_others_and_outside_of_the_differences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    comparison = compare_text(tmp_path, HEAD + ROWS + "[compare.grid]\nseed = [0, 1]\n")
    assert "smallest_baseline = false" in capsys.readouterr().err, "the key that leaves it out"
    assert [row for row, *_ in comparison.table.rows] == ["A", "B", SMALLEST]
    assert {one.row for one in comparison.differences} == {"B"}
    assert finals(comparison)[SMALLEST]["overrides"] == {"method.name": "fedavg"}
    run = comparison.runs[SMALLEST, ""][0]
    assert len(run.plan.levels) == 1 and run.plan.levels[0].depth == run.plan.blocks
    again = load_comparison(comparison.folder)
    assert again.table.rows == comparison.table.rows and again.differences == comparison.differences
    as_reference = compare_text(tmp_path, HEAD + ROWS + "[compare.grid]\nseed = [0, 1]\n", against=SMALLEST)
    assert {one.row for one in as_reference.differences} == {"A", "B"}


def test_the_page_says_where_it_is_as_good(tmp_path: Path) -> None:
    """Without training all rows have the same accuracy up to their initial states; B is FedAvg at the same size."""
    text = HEAD + WITH + '[[compare.row]]\nlabel = "B"\nmethod.name = "fedavg"\n[compare.grid]\nseed = [0, 1]\n'
    comparison = compare_text(tmp_path, text)
    (note,) = (note for note in comparison.table.notes if note.startswith("The smallest model"))
    assert "+0.00 in local (B) and +0.00 in global (B)" in note
    assert note.partition(":")[0] in (comparison.folder / "report.html").read_text()
    without = compare_text(tmp_path, text.replace(WITH, WITHOUT), out="without")
    assert not any("mallest model" in note for note in without.table.notes)


def test_the_key_decides_also_in_a_folder_that_has_runs(tmp_path: Path) -> None:
    before = finals(compare_text(tmp_path, HEAD + WITHOUT + ROWS))
    digests = {row: run["digest"] for row, run in before.items()}
    assert set(digests) == {"A", "B"}
    for key in (WITH, ""):
        after = {row: run["digest"] for row, run in finals(compare_text(tmp_path, HEAD + key + ROWS)).items()}
        assert after.items() > digests.items() and SMALLEST in after


def test_an_interrupted_comparison_goes_on_with_it(tmp_path: Path) -> None:
    class Stopped(Exception):
        pass

    def stop(*args: Any) -> Any:
        raise Stopped

    with pytest.raises(Stopped):
        compare_text(tmp_path, HEAD + ROWS, on_run=stop)
    assert [run.title for run in list_planned_runs(tmp_path / "out")][-1] == f"{SMALLEST}, seed 0"
    assert SMALLEST in finals(compare_text(tmp_path, HEAD + ROWS))


TUNED = """
[[compare.row]]
label = "A"
method.name = "scalefl"
[[compare.row]]
label = "B"
method.name = "scalefl"
local.lr = 0.01
[compare.tune]
method.beta = [0.1, 0.2]
"""


def test_only_the_key_refuses_a_comparison_for_it(tmp_path: Path) -> None:
    comparison = compare_text(tmp_path, HEAD + TUNED)
    assert [row for row, *_ in comparison.table.rows] == ["A", "B"]
    assert any(SMALLEST in note and "beta" in note for note in comparison.table.notes)
    with raises(ff.errors.ConfigError, SMALLEST, key="method.beta"):
        compare_text(tmp_path, HEAD + WITH + TUNED, out="explicit")


def test_plan_saves_the_levels_that_the_rows_of_a_file_share(tmp_path: Path) -> None:
    (tmp_path / "file.toml").write_text(HEAD + ROWS.replace("heterofl", "scalefl"))
    run_verb("plan", tmp_path / "file.toml", "--save", tmp_path / "plan.toml", code=0)
    assert (tmp_path / "plan.toml").is_file()
