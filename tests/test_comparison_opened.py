"""`ff.load_comparison`: a comparison is opened again from its folder, finished or not."""

import json
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from support import compare_text, raises, run_verb

import fleetfit as ff
from fleetfit.errors import MissingExtra

TINY = Path(__file__).parent / "tiny.py"
TEXT = f"""
name = "two ways"
rounds = 2
data = {{ name = "{TINY}:tiny_data", partition = {{ kind = "iid", clients = 4 }} }}
model.name = "{TINY}:tiny"
fleet = {{ groups = [{{ budget = 0.4 }}, {{ budget = 1.0 }}], tolerance = 0.5 }}
local.epochs = 1
cohort.count = 2
[compare]
columns = ["local", "global", "rounds"]
target = 0.3
[compare.grid]
seed = [0, 1]
[compare.tune]
local.lr = [0.05, 0.1]
[[compare.row]]
method.name = "scalefl"
paper = [70.0, 60.0, "-"]
[[compare.row]]
method.name = "fedavg"
"""


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> ff.Comparison:
    return compare_text(tmp_path_factory.mktemp("opened"), TEXT)


@pytest.fixture
def own(comparison: ff.Comparison, tmp_path: Path) -> Path:
    shutil.copytree(comparison.folder, tmp_path / "own")
    return tmp_path / "own"


def test_a_finished_comparison_is_opened_as_it_was(comparison: ff.Comparison) -> None:
    again = ff.load_comparison(comparison.folder)
    assert again.finished and again.table == comparison.table
    assert again.difference_table == comparison.difference_table and again.differences == comparison.differences
    assert (again.tuned, again.tuning, again.results) == (comparison.tuned, comparison.tuning, comparison.results)
    assert again.tuning_table is not None and again.tuning_table.rows == (comparison.tuning_table or again.table).rows
    folders = {key: [run.folder for run in runs] for key, runs in comparison.runs.items()}
    assert {key: [run.folder for run in runs] for key, runs in again.runs.items()} == folders
    assert "two ways" in again._repr_html_() and "<table" in again._repr_html_()


def test_the_runs_are_a_data_frame(comparison: ff.Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    frame = comparison.to_frame()
    assert frame[["row", "setting", "seed"]].values.tolist() == [
        [row, setting, run.experiment.seed] for (row, setting), runs in comparison.runs.items() for run in runs
    ]
    expected = [run.accuracy("local") for runs in comparison.runs.values() for run in runs]
    assert frame["local"].tolist() == pytest.approx(expected, abs=1e-6)
    assert (frame["rounds"] == 2).all() and (frame["seconds"] > 0).all()
    monkeypatch.setitem(sys.modules, "pandas", None)
    with raises(MissingExtra, extra="tables"):
        comparison.to_frame()


def test_a_verb_on_one_run_names_a_run_of_it(own: Path) -> None:
    for verb in ("eval", "resume"):
        error = run_verb(verb, own, code=2).err
        assert ("command" in error) is (verb == "resume")
        run = Path(error.splitlines()[-1].strip())
        assert own in run.parents and (run / "config.toml").is_file()
    run_verb("eval", run, code=0)


def test_compare_ends_with_a_command_that_works(comparison: ff.Comparison) -> None:
    lines = run_verb(
        "compare", comparison.folder.parent / "file.toml", "--out", comparison.folder, code=0
    ).out.splitlines()
    [command] = [line for line in lines if line.strip().startswith("fleetfit ")]
    run_verb(*shlex.split(command)[1:], code=0)


def test_of_an_unfinished_one_there_is_what_is_finished(own: Path) -> None:
    results = json.loads((own / "results.json").read_text())
    results["runs"] = [one for one in results["runs"] if one["row"] == "scalefl"]
    (own / "results.json").write_text(json.dumps(results))
    for name in ("table.md", "table.csv"):
        (own / name).unlink()
    unfinished = ff.load_comparison(own)
    assert not unfinished.finished and [row[0] for row in unfinished.table.rows][0::2] == ["scalefl"]
    assert len(unfinished.table.notes) == 1 and "2 of 4 runs" in unfinished.table.notes[0]
    assert list(unfinished.runs) == [("scalefl", "")] and len(unfinished.runs["scalefl", ""]) == 2
    (own / "results.json").unlink()
    with raises(ff.RunError, str(own)):
        ff.load_comparison(own)


def test_what_is_withheld_stays_withheld(own: Path) -> None:
    private: dict[str, Any] = {
        "epsilon": 1.5,
        "delta": 1e-4,
        "noise_multiplier": 1.0,
        "clipping_norm": 0.3,
        "rate": 0.1,
    }
    for folder in [path.parent for path in own.glob("*/**/summary.json")]:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        (folder / "metrics.jsonl").write_text(
            "".join(json.dumps({**json.loads(x), "privacy": private}) + "\n" for x in lines)
        )
        summary = json.loads((folder / "summary.json").read_text())
        (folder / "summary.json").write_text(json.dumps({**summary, "privacy": private}))
    reopened = ff.load_comparison(own)
    ours = next(row for row in reopened.table.rows if row[0] == "fedavg")
    shown = dict(zip(reopened.table.columns, ours, strict=True))
    assert shown["local"] == shown["global"] == "withheld" and shown["rounds to 30%"] != "-"


def test_who_takes_one_for_the_other_is_told(comparison: ff.Comparison, own: Path, tmp_path: Path) -> None:
    with raises(ff.RunError, "load_comparison"):
        ff.load(comparison.folder)
    run = comparison.runs["fedavg", ""][0].folder
    with raises(ff.RunError, "fleetfit.load", path=run):
        ff.load_comparison(run)
    with raises(ff.RunError, "results.json", path=tmp_path):
        ff.load_comparison(tmp_path)
    with raises(ff.RunError, path=tmp_path / "nothing"):
        ff.load_comparison(tmp_path / "nothing")
    (own / "results.json").write_text('{"row": "fedavg"}')
    with raises(ff.RunError, path=own / "results.json"):
        ff.load_comparison(own)
