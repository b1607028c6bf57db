"""`results.json`: what a comparison leaves to be committed; format 1, read back, after each run, kept elsewhere."""

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from support import compare_text, raises, run_verb

import fleetfit as ff
from fleetfit.api.comparison import ComparisonResults, read_results
from fleetfit.errors import ConfigError, RunError
from fleetfit.report import figures

HEAD = """
rounds = 3
data = { name = "tiny:tiny_data", partition = { kind = "iid", clients = 6 } }
model.name = "tiny:tiny"
fleet = { groups = [{ budget = 0.4 }, { budget = 1.0 }], tolerance = 0.5 }
local.epochs = 1
cohort.count = 2
evaluate.every = 1
[[compare.row]]
label = "Scale"
method = { name = "scalefl", beta = 0.2 }
[[compare.row]]
method.name = "fedavg"
"""
SETTINGS = """
[[compare.setting]]
label = "many"
cohort.count = 4
[compare.grid]
local.lr = [0.1, 0.05]
seed = [0, 1]
"""


def run_comparison(place: Path, text: str, **more: Any) -> ff.Comparison:
    return compare_text(place, HEAD + text, "two.toml", **more)


def read_stored_results(place: Path) -> Any:
    return json.loads((place / "out" / "results.json").read_text())


class Stop(Exception):
    pass


# ---- what stands in it -----------------------------------------------------------------------------------------------


def test_each_run_has_its_numbers_in_percent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    comparison = run_comparison(tmp_path, SETTINGS + "[compare]\ntarget = 0.2\n")
    text = (tmp_path / "out" / "results.json").read_text()
    document = json.loads(text)
    assert (document["format"], document["name"], document["file"], document["against"]) == (
        1,
        "two",
        "two.toml",
        "Scale",
    )
    assert set(document["versions"]) == {"fleetfit", "torch", "python"}
    assert document["versions"]["fleetfit"] == ff.__version__
    assert isinstance(document["machine"]["processor"], str) and document["machine"]["cores"] >= 1
    assert document["settings_of_file"]["local"]["epochs"] == 1
    assert document["settings_of_file"]["cohort"]["count"] == 2
    assert [(run["row"], run["setting"], run["seed"]) for run in document["runs"]] == [
        (row, f"many, lr = {lr}", seed) for row in ("Scale", "fedavg") for lr in (0.1, 0.05) for seed in (0, 1)
    ]
    for run, done in zip(document["runs"], [one for group in comparison.runs.values() for one in group], strict=True):
        columns, summary = done.columns["static"], done.summary
        assert run["final"]["local"] == round(100 * done.accuracy("local"), 4)
        assert run["final"]["full"] == round(100 * columns["full"], 4)
        assert run["final"]["bytes_up"] == summary["bytes_up"]
        assert run["per_level"] == {name: round(100 * one["local"], 4) for name, one in columns["levels"].items()}
        assert run["per_exit"] == {str(i): round(100 * a, 4) for i, a in enumerate(columns["exits"], 1)}
        assert run["rounds"] == 3 and run["speed"] == "exact" and run["tuned"] == {}
        assert run["seconds"] >= run["training_seconds"] > 0
        assert run["digest"] == sha256((done.folder / "config.toml").read_bytes()).hexdigest()
        curves = run["curves"]
        assert curves["round"] == [1, 2, 3]
        assert curves["global"] == [round(100 * m["evaluate"]["static"]["global"], 2) for m in done.metrics]
        assert curves["loss"] == [round(m["train"]["loss"], 3) for m in done.metrics]
        last = {str(i): [round(100 * a, 1)] for i, a in enumerate(columns["exits"], 1)}
        assert {name: series[2:] for name, series in curves["per_exit"].items()} == last
    (first,) = [done.summary["levels"] for done in comparison.runs["fedavg", "many, lr = 0.1"][:1]]
    names = ("level", "width", "depth", "blocks", "parameters", "multiply_adds")
    assert [one for one in document["levels"] if (one["row"], one["setting"]) == ("fedavg", "many, lr = 0.1")] == [
        {"row": "fedavg", "setting": "many, lr = 0.1"} | {name: level[name] for name in names} for level in first
    ], "once for all seeds"
    assert {one["row"] for one in document["levels"]} == {"Scale", "fedavg"}
    assert document["runs"][0]["overrides"] == {
        "method.name": "scalefl", "method.beta": 0.2, "cohort.count": 4, "local.lr": 0.1
    }  # fmt: skip
    lines = [line for line in text.splitlines() if line.startswith('{"row":"')]
    assert len(lines) == 8, "one line for each run"
    assert all(json.loads(line.rstrip(",")) for line in lines)
    assert str(tmp_path) not in text, "paths of a machine do not belong into what is committed"


def test_rounds_to_a_reached_target_are_stored(tmp_path: Path) -> None:
    run_comparison(tmp_path, "[compare]\ntarget = [0.01, 1.0]\n")
    for run in read_stored_results(tmp_path)["runs"]:
        assert run["final"]["rounds_to_1"] == 1.0
        assert "rounds_to_100" not in run["final"], "absent, not a number that stands for none"


def test_paths_are_as_the_file_has_them(tmp_path: Path) -> None:
    """Of a plug-in beside the file, in its tables and in a row: nothing of the machine's folders is committed."""
    (tmp_path / "own.py").write_text("from tiny import tiny, tiny_data\n")
    text = HEAD.replace('"tiny:tiny_data"', '"own.py:tiny_data"').replace("cohort.count = 2", "cohort.count = 1")
    (tmp_path / "two.toml").write_text(text.replace("rounds = 3", "rounds = 1") + 'model.name = "own.py:tiny"\n')
    ff.compare(tmp_path / "two.toml", out=tmp_path / "out")
    document = read_stored_results(tmp_path)
    assert document["settings_of_file"]["data"]["name"] == "own.py:tiny_data"
    assert document["runs"][1]["overrides"] == {"method.name": "fedavg", "model.name": "own.py:tiny"}
    assert str(tmp_path) not in (tmp_path / "out" / "results.json").read_text()


def test_it_reads_back_as_it_was(tmp_path: Path) -> None:
    run_comparison(tmp_path, SETTINGS)
    results = read_results(tmp_path / "out" / "results.json")
    document = read_stored_results(tmp_path)
    assert isinstance(results, ComparisonResults)
    assert [run.final for run in results.runs] == [run["final"] for run in document["runs"]]
    assert [(run.row, run.setting, run.seed) for run in results.runs] == [
        (run["row"], run["setting"], run["seed"]) for run in document["runs"]
    ]
    assert results.settings == document["settings_of_file"] and results.commit == document["commit"]
    assert results.runs[0].curves.dump() == document["runs"][0]["curves"]


# ---- when it is written ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_what_is_interrupted_has_what_is_finished(tmp_path: Path, jobs: int) -> None:
    """The third run stops; the file then has those that had ended, and all four after the same command."""

    def stopping(title: str, number: int, count: int, run: ff.Run) -> Any:
        def stop(report: Any) -> None:
            raise Stop

        return stop if number == 3 else None

    with pytest.raises(Stop):
        run_comparison(tmp_path, "[compare.grid]\nseed = [0, 1]\n", jobs=jobs, on_run=stopping)
    done = [(run["row"], run["seed"]) for run in read_stored_results(tmp_path)["runs"]]
    first = [("Scale", 0), ("Scale", 1)]  # two at a time: the third begins when either has ended
    assert done and set(done) <= set(first) and (done == first or jobs == 2)
    seen: list[int] = []

    def counting(title: str, number: int, count: int, run: ff.Run) -> None:
        seen.append(len(read_stored_results(tmp_path)["runs"]))

    run_comparison(tmp_path, "[compare.grid]\nseed = [0, 1]\n", on_run=counting)
    assert seen == ([2, 2, 2, 3] if jobs == 1 else seen), "never fewer than before"
    assert min(seen) >= len(done)
    assert [(run["row"], run["seed"]) for run in read_stored_results(tmp_path)["runs"]] == [
        ("Scale", 0), ("Scale", 1), ("fedavg", 0), ("fedavg", 1)
    ]  # fmt: skip


def test_a_finished_comparison_is_only_written_anew(tmp_path: Path) -> None:
    """With another reference row; the run folders stay as they are, to the byte and the second."""
    run_comparison(tmp_path, "")
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("seed-0/**/*") if p.is_file()}
    text = (tmp_path / "out" / "results.json").read_text()
    run_comparison(tmp_path, "", against="fedavg")
    assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("seed-0/**/*") if p.is_file()}
    again = (tmp_path / "out" / "results.json").read_text()
    assert again == text.replace('"against": "Scale"', '"against": "fedavg"') != text


def test_only_the_comparison_draws_and_with_all_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs_draw: None
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(figures, "draw_run", lambda run: drawn.append(run) or {})
    monkeypatch.setattr(figures, "draw_comparison", lambda record: drawn.append(record.rows) or {})
    comparison = run_comparison(tmp_path, "[compare.grid]\nseed = [0, 1]\n")
    (rows,) = drawn
    assert {(row.row, row.setting): [seed for seed, _ in row.runs] for row in rows} == {
        ("Scale", ""): [0, 1], ("fedavg", ""): [0, 1]
    }  # fmt: skip
    for run, record in zip(comparison.runs["Scale", ""], rows[0].records, strict=True):
        assert [report.dump() for report in record.rounds] == run.metrics


# ---- the copy that is kept -------------------------------------------------------------------------------------------


def test_a_copy_is_kept_under_the_name_of_the_file(tmp_path: Path) -> None:
    folder = tmp_path / "experiments" / "results"
    run_comparison(tmp_path, "", record=folder)
    assert [path.name for path in folder.iterdir()] == ["two.json"]
    assert (folder / "two.json").read_text() == (tmp_path / "out" / "results.json").read_text()
    run_comparison(tmp_path, "", record=folder, against="fedavg")
    assert read_results(folder / "two.json").against == "fedavg", "and written anew"


def test_what_is_no_record_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "two.json").write_text('{"mine": 1}')
    with raises(ConfigError, "name", key="record", path=tmp_path / "two.json"):
        run_comparison(tmp_path, "", record=tmp_path)
    assert (tmp_path / "two.json").read_text() == '{"mine": 1}'
    assert not (tmp_path / "out").exists(), "and it is said before anything is trained"


def test_the_command_line_keeps_a_copy(tmp_path: Path) -> None:
    (tmp_path / "two.toml").write_text(HEAD)
    arguments = ["compare", tmp_path / "two.toml", "--out", tmp_path / "out", "--record", tmp_path / "kept"]
    out = run_verb(*arguments, "--against", "fedavg", code=0).out
    assert read_results(tmp_path / "kept" / "two.json").against == "fedavg"
    assert f"Results: {tmp_path / 'kept' / 'two.json'}" in out


# ---- what is not read ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["config.toml", "notes.txt"])
def test_a_folder_of_something_else_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("")
    with raises(RunError, path=tmp_path / "out"):
        run_comparison(tmp_path, "")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [name]


def test_a_reference_row_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with raises(ConfigError, '"fedavgg"', '"fedavg"', key="against"):
        run_comparison(tmp_path, "", against="fedavgg")
    with raises(ConfigError, '"x"', "Scale, fedavg", key="compare.against"):
        run_comparison(tmp_path, '[compare]\nagainst = "x"\n')
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("sound")
    (place / "two.toml").write_text(HEAD)
    return ff.compare(place / "two.toml", out=place / "out").folder / "results.json"


@pytest.mark.parametrize(
    ("change", "mentions"),
    [
        ({"format": 2}, ("format 2", "format 1")),
        ({"runs": {}}, ("runs", "a dict")),
        ({"runs": [{}]}, ("runs.0.row",)),
        ({"versions": 3}, ("versions", 3)),
    ],
)
def test_what_is_no_results_file_is_a_sentence(
    tmp_path: Path, sound: Path, change: Any, mentions: tuple[str, ...]
) -> None:
    (tmp_path / "bad.json").write_text(json.dumps(json.loads(sound.read_text()) | change))
    with raises(RunError, tmp_path / "bad.json", *mentions):
        read_results(tmp_path / "bad.json")


def test_curves_of_different_lengths_are_refused(tmp_path: Path, sound: Path) -> None:
    document = json.loads(sound.read_text())
    document["runs"][1]["curves"]["local"].pop()
    (tmp_path / "bad.json").write_text(json.dumps(document))
    with raises(RunError, "local", key="runs.1.curves"):
        read_results(tmp_path / "bad.json")


@pytest.mark.parametrize("text", ["", "[" * 100_000, "not json"])
def test_what_is_no_json_is_a_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.json").write_text(text)
    with raises(RunError, path=tmp_path / "bad.json"):
        read_results(tmp_path / "bad.json")
    with raises(RunError, path=tmp_path / "none.json"):
        read_results(tmp_path / "none.json")
