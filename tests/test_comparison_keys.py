"""Precedence in a comparison, and that none of its keys is ignored: rows, settings, lists of values, and `--set`."""

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support import compare_text, raises, run_verb

import fleetfit as ff
from fleetfit.api.comparison.plan import plan_comparison
from fleetfit.errors import ConfigError, RunError
from fleetfit.report.page.blocks import Sheet
from fleetfit.report.page.comparison_page import make_runs_page
from fleetfit.report.page.run_set import group_runs
from fleetfit.runs.folder import RunFolder

HEAD = """
rounds = 2
data = { name = "tiny:tiny_data", partition = { kind = "iid", clients = 6 } }
model.name = "tiny:tiny"
fleet = { groups = [{ budget = 0.4 }, { budget = 1.0 }], tolerance = 0.5 }
local.epochs = 1
cohort.count = 2
evaluate.every = 0
"""
ROWS = """
[[compare.row]]
label = "Scale"
method.name = "scalefl"
method.beta = 0.2
rounds = 3
[[compare.row]]
method.name = "fedavg"
"""
SETTINGS = """
[[compare.setting]]
label = "many"
cohort.count = 4
[[compare.setting]]
label = "few"
cohort.count = 2
"""


def run_comparison(tmp_path: Path, text: str, *overrides: str) -> ff.Comparison:
    return compare_text(tmp_path, HEAD + text, "two.toml", overrides=overrides)


def check_refused(tmp_path: Path, text: str, overrides: Sequence[str], key: str | None, *mentions: str) -> None:
    with raises(ConfigError, *mentions, **({} if key is None else {"key": key})):
        run_comparison(tmp_path, text, *overrides)
    assert not (tmp_path / "out").exists(), "nothing runs before everything is checked"


def configs(comparison: ff.Comparison) -> dict[tuple[str, str], dict[str, Any]]:
    return {key: tomllib.loads((group[0].folder / "config.toml").read_text()) for key, group in comparison.runs.items()}


# ---- who wins ----------------------------------------------------------------------------------------------------


def test_an_override_of_shared_keys_is_noted_in_the_table(tmp_path: Path) -> None:
    comparison = run_comparison(tmp_path, ROWS + SETTINGS, "rounds=1", "local.lr=0.05")
    rounds = {row: table["rounds"] for (row, _), table in configs(comparison).items()}
    assert rounds == {"Scale": 3, "fedavg": 1}, "a row keeps its own value"
    assert {table["local"]["lr"] for table in configs(comparison).values()} == {0.05}
    assert {row: len(group[0].metrics) for (row, _), group in comparison.runs.items()} == rounds
    (note,) = (note for note in comparison.table.notes if note.startswith("Changed"))
    assert "rounds = 1, local.lr = 0.05" in note


def test_an_override_of_a_name_keeps_rows_what_their_labels_say(tmp_path: Path) -> None:
    """Rows that name their method keep it, with its keys; a row without a name gets the override's."""
    comparison = run_comparison(
        tmp_path, ROWS + "[[compare.row]]\nlocal.lr = 0.3\n", "method.name=heterofl", "rounds=1"
    )
    methods = {row: table["method"] for (row, _), table in configs(comparison).items()}
    assert {row: method["name"] for row, method in methods.items()} == {
        "Scale": "scalefl", "fedavg": "fedavg", "heterofl": "heterofl"
    }  # fmt: skip
    assert methods["Scale"]["beta"] == 0.2


def test_a_setting_wins_over_a_row_and_a_row_over_the_file(tmp_path: Path) -> None:
    few = SETTINGS.partition('[[compare.setting]]\nlabel = "few"')[0]
    text = ROWS.replace("rounds = 3", "rounds = 1\ncohort.count = 5") + few + '[[compare.setting]]\nlabel = "as-is"\n'
    tables = configs(run_comparison(tmp_path, text))
    assert {key: (table["rounds"], table["cohort"]["count"]) for key, table in tables.items()} == {
        ("Scale", "many"): (1, 4),
        ("Scale", "as-is"): (1, 5),
        ("fedavg", "many"): (2, 4),
        ("fedavg", "as-is"): (2, 2),
    }
    assert not any("Changed" in note for note in run_comparison(tmp_path, text).table.notes)


def test_an_override_of_the_comparison_itself(tmp_path: Path) -> None:
    comparison = run_comparison(tmp_path, ROWS, "compare.columns=['full']", "seed=3", "rounds=1")
    assert comparison.table.columns == ("method", "full")
    assert {group[0].experiment.seed for group in comparison.runs.values()} == {3}


def test_options_and_hooks_that_all_rows_share_reach_every_row(tmp_path: Path) -> None:
    """A row that names its method keeps the file's `plus` and `hooks`; they used to go with the file's method."""
    tables = configs(
        run_comparison(tmp_path, "method.options.fedprox.mu = 0.3\nmethod.hooks.choose_channels = 'rolling'\n" + ROWS)
    )
    for table in tables.values():
        assert table["method"]["options"] == {"fedprox": {"mu": 0.3}}
        assert table["method"]["hooks"] == {"choose_channels": "rolling"}


# ---- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "key", "mention"),
    [
        ("evaluate.batch_norm=['static']", "compare.columns", 'evaluate.batch_norm = ["static", "batch"]'),
        ("compare.target_on='global, batch'", "compare.columns", "global, batch"),
    ],
)
def test_a_column_of_batch_statistics_needs_them(tmp_path: Path, override: str, key: str, mention: str) -> None:
    overrides = ["compare.columns=['global, batch']", "compare.target=0.5", override]
    check_refused(tmp_path, ROWS, overrides, key, mention)


@pytest.mark.parametrize("text", ["evaluate.between.clients = 3\n" + ROWS, ROWS + "evaluate.between.clients = 3\n"])
def test_rounds_to_a_target_need_complete_evaluations(tmp_path: Path, text: str) -> None:
    check_refused(tmp_path, text, ["compare.target=0.5", "evaluate.every=1"], "evaluate.between", "compare.target")


@pytest.mark.parametrize(
    ("text", "overrides", "key", "mention"),
    [
        ("[compare.grid]\nlocal.lr = [0.1, 0.2]\n", ["local.lr=0.3"], "local.lr", "--set local.lr"),
        ("[compare.grid]\nseed = [0, 1]\n", ["seed=3"], "seed", "--set seed"),
        ("[compare.tune]\nlocal.lr = [0.1, 0.2]\n", ["local.lr=0.3"], "local.lr", "--set local.lr"),
        (ROWS, ["method.name=heterofl"], "method.name", "--set method.name"),
        (ROWS, ["method.beta=0.3"], "method.beta", "--set method.beta"),
        ("[[compare.row]]\nlabel='a'\nrounds = 1\n[[compare.row]]\nlabel='b'\nrounds = 2\n",
         ["rounds=3", "compare.smallest_baseline=false"],
         "rounds", "--set rounds"),
        (SETTINGS, ["cohort.count=3"], "cohort.count", "--set cohort.count"),
        (ROWS, ["cohort.on_deadline=drop"], "cohort.on_deadline", "deadline_s"),
        (ROWS.replace("rounds = 3", "seed = 3"), [], "compare.row.0.seed", "row #1 seed"),
        (ROWS.replace("rounds = 3", 'name = "x"'), [], "compare.row.0.name", "row #1 name"),
        (ROWS.replace("rounds = 3", "compare.target = 0.5"), [], "compare.row.0.compare", "row #1 compare"),
        (SETTINGS.replace("cohort.count = 4", "seed = 4"), [], "compare.setting.0.seed", "setting #1 seed"),
        ("[compare.grid]\nname = ['a', 'b']\n", [], "compare.grid.name", "[compare.grid] name"),
        ("[compare.tune]\nseed = [0, 1]\n", [], "compare.tune.seed", "[compare.tune] seed"),
        ("[compare.grid]\nlabel = ['a']\n", [], "compare.grid.label", "[compare.grid] label"),
        ("[compare.grid]\nlocal.lr = [0.1]\n[compare.tune]\nlocal.lr = [0.2]\n", [],
         "compare.grid.local.lr", "[compare.tune]"),
        (ROWS + "[compare.grid]\nrounds = [1, 2]\n", [], "compare.row.0.rounds", "[compare.grid]"),
        (SETTINGS + "[compare.tune]\ncohort.count = [1, 2]\n", [], "compare.setting.0.cohort.count",
         "[compare.tune]"),
        (ROWS.replace("rounds = 3", "cohort.count = 3") + SETTINGS, [], "compare.row.0.cohort.count",
         "row #1 cohort.count"),
        (ROWS.replace("rounds = 3", 'cohort.on_deadline = "drop"'), [],
         "compare.row.0.cohort.on_deadline", "deadline_s"),
        (ROWS.replace("method.beta = 0.2", "method.beta = 0\nmethod.temperature = 5"), [],
         "compare.row.0.method.temperature", "beta = 0"),
        (ROWS + SETTINGS.replace("cohort.count = 4", 'cohort.on_deadline = "drop"'), [],
         "compare.setting.0.cohort.on_deadline", "deadline_s"),
        (ROWS + '[compare.grid]\ncohort.on_deadline = ["drop", "stop"]\n', [],
         "compare.grid.cohort.on_deadline", "deadline_s"),
        (ROWS + '[compare.tune]\ncohort.on_deadline = ["drop", "stop"]\n', [],
         "compare.tune.cohort.on_deadline", "deadline_s"),
        ('[[compare.row]]\nmethod = { name = "adaptivefl", hooks = { choose_clients = "uniform" } }\n', [],
         "compare.row.0.method.hooks.choose_clients", "adaptivefl"),
    ],
)  # fmt: skip
def test_what_would_be_ignored_is_refused_before_anything_runs(
    tmp_path: Path, text: str, overrides: list[str], key: str | None, mention: str
) -> None:
    check_refused(tmp_path, text, overrides, key, mention)


def test_a_key_that_one_run_uses_is_used(tmp_path: Path) -> None:
    """`temperature` beside `beta = 0` in one row; the other has the distillation. What none uses is a note."""
    rows = "[[compare.row]]\nlabel = 'on'\n[[compare.row]]\nlabel = 'off'\nmethod.beta = 0.0\n"
    comparison = run_comparison(tmp_path, "method.temperature = 5.0\ncohort.on_deadline = 'drop'\n" + rows)
    (note,) = (note for note in comparison.table.notes if note.startswith("["))
    assert note.startswith("[cohort] on_deadline ") and "deadline_s" in note
    for (row, _), (run,) in comparison.runs.items():
        assert note in run.summary["notes"], row


def test_keys_of_a_method_that_no_row_has_are_a_note(tmp_path: Path) -> None:
    rows = "[[compare.row]]\nmethod.name = 'fedavg'\n[[compare.row]]\nmethod.name = 'heterofl'\n"
    comparison = run_comparison(tmp_path, "method.beta = 0.3\n" + rows)
    assert any(note.startswith("method.beta ") for note in comparison.table.notes)


def test_another_comparison_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    run_comparison(tmp_path, ROWS, "cohort.count=3")
    folder = tmp_path / "out" / "scale" / "seed-0"
    with raises(RunError, "cohort.count is 3 there and 2 here", "local.lr is 0.1 there and 0.05 here", path=folder):
        run_comparison(tmp_path, ROWS, "local.lr=0.05")


# ---- other verbs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", [ROWS, SETTINGS, "[compare.grid]\nseed = [0, 1]\n", "[compare.tune]\nlocal.lr = [1]\n",
                                  "[compare]\nnote = 'x'\n"])  # fmt: skip
@pytest.mark.parametrize("verb", ["run", "profile"])
def test_verbs_for_one_run_refuse_a_comparison(tmp_path: Path, part: str, verb: str) -> None:
    (tmp_path / "two.toml").write_text(HEAD + part)
    message = run_verb(verb, tmp_path / "two.toml", "--out", tmp_path / "out", code=2).err
    assert "Use `fleetfit compare`" in message and "compare" in message.partition(":")[2].partition("]")[0]
    assert not (tmp_path / "out").exists()


def test_plan_shows_each_row_that_has_another_plan(tmp_path: Path) -> None:
    third = '[[compare.row]]\nlabel = "Adaptive"\nmethod = { name = "adaptivefl", p = 1 }\n'
    third += 'model.name = "cnn"\ndata.name = "digits"\n'
    second = '[[compare.row]]\nlabel = "Scale too"\nmethod.name = "scalefl"\nlocal.lr = 0.2\n'
    (tmp_path / "two.toml").write_text(HEAD + ROWS + second + third)
    output = run_verb("plan", tmp_path / "two.toml", code=0).out
    for rows, parts in {"Scale, Scale too": ("scalefl", "tiny", "6 clients"), "fedavg": ("fedavg", "tiny"),
                        "Adaptive": ("adaptivefl", "digits")}.items():  # fmt: skip
        (line,) = (line for line in output.splitlines() if line.strip().startswith(f"{rows}: "))
        assert all(part in line for part in parts)
    err = run_verb("plan", tmp_path / "two.toml", "--save", tmp_path / "plan.toml", code=2).err
    assert "--save" in err
    assert not (tmp_path / "plan.toml").exists()
    (tmp_path / "one.toml").write_text(
        HEAD + '[[compare.row]]\nlabel = "a"\n[[compare.row]]\nlabel = "b"\nlocal.lr = 1.0\n'
    )
    run_verb("plan", tmp_path / "one.toml", "--save", tmp_path / "plan.toml", code=0)
    assert (tmp_path / "plan.toml").is_file()


def test_a_run_says_what_it_does_not_use(tmp_path: Path) -> None:
    """In front of the rounds and in the summary; and what went with the file's method."""
    (tmp_path / "run.toml").write_text(HEAD + 'cohort.on_deadline = "drop"\nmethod.beta = 0.3\n')
    file, out = tmp_path / "run.toml", tmp_path / "out"
    output = run_verb("run", file, "--set", "method.name=heterofl", "--set", "rounds=1", "--out", out, code=0).out
    assert "Note: [cohort] on_deadline " in output and "Note: [method] beta " in output
    assert any(
        note.startswith("[cohort] on_deadline ") for note in json.loads((out / "summary.json").read_text())["notes"]
    )


def test_data_are_loaded_once_for_rows_that_have_the_same(tmp_path: Path) -> None:
    """For the check and for the runs; other settings are other data, and another comparison loads again."""
    (tmp_path / "counted.py").write_text(
        "from pathlib import Path\nfrom tiny import tiny_data\n\n\ndef counted(log: str, seed: int = 0):\n"
        "    with open(log, 'a') as file:\n        file.write(f'{seed}\\n')\n    return tiny_data(seed=seed)\n"
    )
    log, source = tmp_path / "loads", f"{tmp_path / 'counted.py'}:counted"
    text = f"""
rounds = 1
data = {{ name = "{source}", log = "{log}", partition = {{ kind = "iid", clients = 6 }} }}
model.name = "tiny:tiny"
fleet = {{ groups = [{{ budget = 0.4 }}, {{ budget = 1.0 }}], tolerance = 0.5 }}
local.epochs = 1
evaluate.every = 0
[[compare.row]]
method.name = "scalefl"
[[compare.row]]
method.name = "fedavg"
[[compare.row]]
label = "other parts"
method.name = "fedavg"
data.partition.clients = 5
[[compare.row]]
label = "other data"
method.name = "fedavg"
data.seed = 1
"""
    (tmp_path / "file.toml").write_text(text)
    comparison = ff.compare(tmp_path / "file.toml", out=tmp_path / "out")
    assert log.read_text().split() == ["0", "1"]
    again = ff.compare(tmp_path / "file.toml", out=tmp_path / "again")
    assert log.read_text().split() == ["0", "1"] * 2
    alone = ff.run(next(iter(comparison.runs.values()))[0].folder / "config.toml", out=tmp_path / "alone")
    first = next(iter(again.runs.values()))[0]
    assert all(torch.equal(alone.server.state[name], t) for name, t in first.server.state.items())


# ---- on which data -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("split", "words"), [("test", "test"), ("validation", "validation"), ("train", "training")])
def test_the_table_says_on_which_data_it_was_measured(tmp_path: Path, split: str, words: str) -> None:
    comparison = run_comparison(tmp_path, ROWS, f"evaluate.split={split}", "rounds=1")
    note = f"Accuracy in percent on {words} data; 1 seed."
    assert comparison.table.notes[0] == note and note in (tmp_path / "out" / "table.md").read_text()
    several = make_runs_page(
        group_runs([RunFolder.open(group[0].folder) for group in comparison.runs.values()]), tmp_path / "page"
    )
    sheets = [one.table for section in several.sections for one in section.blocks if isinstance(one, Sheet)]
    assert sheets[0].notes[0] == note


def test_runs_on_different_data_are_told_as_such_on_one_page(tmp_path: Path) -> None:
    places = [compare_text(tmp_path, HEAD + ROWS, out=split, overrides=["rounds=1", f"evaluate.split={split}"])
              for split in ("validation", "test")]  # fmt: skip
    runs = [RunFolder.open(next(iter(comparison.runs.values()))[0].folder) for comparison in places]
    several = make_runs_page(group_runs(runs), tmp_path / "page")
    sheets = [one.table for section in several.sections for one in section.blocks if isinstance(one, Sheet)]
    assert " test or validation " in sheets[0].notes[0] and "1 seed" in sheets[0].notes[0]
    assert any(" evaluate" in note for note in sheets[0].notes)


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ('evaluate = { split = "train" }\n', "compare.row.1.evaluate.split"),
        (SETTINGS + 'evaluate.split = "validation"\n', "compare.setting.1.evaluate.split"),
        ('[compare.grid]\nevaluate.split = ["validation", "test"]\n', "compare.grid.evaluate.split"),
        ('[compare.tune]\nevaluate.split = ["validation", "test"]\n', "compare.tune.evaluate.split"),
        ('[compare.tune]\nevaluate = [{ split = "validation" }, { split = "test" }]\n', "compare.tune.evaluate.split"),
    ],
)
def test_rows_and_settings_have_the_split_of_the_file(tmp_path: Path, more: str, key: str) -> None:
    check_refused(tmp_path, ROWS + more, (), key)


# ---- folders -------------------------------------------------------------------------------------------------------


def test_labels_become_safe_folder_names(tmp_path: Path) -> None:
    labels = [
        "..",
        "...",
        ".hidden",
        "hidden",
        "Tune",
        "results.json",
        "plots",
        "ü" * 200,
        "ü" * 199 + "u",
        "!!",
        "Scale FL, v1.0",
    ]
    rows = "".join(f'[[compare.row]]\nlabel = "{label}"\nmethod.name = "fedavg"\n' for label in labels)
    comparison = run_comparison(tmp_path, rows, "rounds=1")
    places = [runs[0].folder.relative_to(tmp_path / "out").parts for runs in comparison.runs.values()]
    assert len(set(places)) == len(labels) and all(len(parts) == 2 for parts in places)
    names = [parts[0] for parts in places]
    assert not any(name.startswith(".") or name in ("tune", "plots", "results.json") for name in names)
    assert all(len(name.encode()) < 255 for name in names)
    assert (names[3], names[10]) == ("hidden", "scale-fl-v1.0")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "two.toml"], "nothing lies elsewhere"
    children = next(one for one in ff.list_runs(tmp_path) if one.kind == "comparison").children
    assert len(children) == len(labels) and len(ff.load_comparison(tmp_path / "out").runs) == len(labels)


def test_a_row_without_a_label_is_called_after_its_method(tmp_path: Path) -> None:
    rows = "[[compare.row]]\nlocal.lr = 0.2\n[[compare.row]]\nmethod.name = 'fedavg'\n"
    (tmp_path / "two.toml").write_text(HEAD + rows)
    entries = plan_comparison(tmp_path / "two.toml").runs
    assert [entry.row for entry in entries] == [entry.experiment.method.name for entry in entries]


def test_a_row_called_tune_keeps_apart_from_the_runs_that_tune(tmp_path: Path) -> None:
    rows = '[[compare.row]]\nlabel = "tune"\nmethod.name = "fedavg"\n[[compare.row]]\nmethod.name = "scalefl"\n'
    comparison = run_comparison(tmp_path, rows + "[compare.tune]\nlocal.lr = [0.1, 0.05]\n", "rounds=1")
    assert len(list((tmp_path / "out" / "tune").rglob("summary.json"))) == 4
    assert len(ff.load_comparison(tmp_path / "out").runs) == len(comparison.runs) == 2
    one = next(one for one in ff.list_runs(tmp_path) if one.kind == "comparison")
    assert (one.rounds, one.asked, len(one.children)) == (2, 2, 6)


def test_long_settings_have_folders_and_pictures(tmp_path: Path, runs_draw: None) -> None:
    """Lists of tables make labels that no file system takes."""
    long = f'[{{ budget = 0.4, name = "{"small " * 30}" }}, {{ budget = 1.0, name = "{"large " * 30}" }}]'
    grid = f"[compare.grid]\nfleet.groups = [{long}, {long.replace('0.4', '0.5')}]\n"
    comparison = run_comparison(tmp_path, ROWS + grid, "rounds=1", "evaluate.every=1")
    assert len({runs[0].folder for runs in comparison.runs.values()}) == 4
    assert len(list((tmp_path / "out" / "plots").glob("accuracy-*.png"))) == 2


def test_a_name_leads_to_no_other_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "two.toml").write_text(HEAD + ROWS)
    for name in ("../../elsewhere", "ö" * 190, "Two Rows"):
        folder = ff.compare("two.toml", rounds=1, name=name).folder
        assert folder.parent == Path("runs") and folder.is_dir(), name
    assert folder.name.startswith("compare-Two Rows-")


@pytest.mark.parametrize(
    ("text", "key"),
    [("seeds = [0, 1]\n", "seeds"), ("seed = [0, 1]\n", "seed"), ("[compare]\nseeds = [0, 1]\n", "compare.seeds"),
     ("[compare]\nseed = [0, 1]\n", "compare.seed")],
)  # fmt: skip
def test_seeds_in_the_wrong_place_lead_to_the_grid(tmp_path: Path, text: str, key: str) -> None:
    (tmp_path / "run.toml").write_text(text + ROWS)
    with raises(ConfigError, "[compare.grid]", key=key):
        ff.compare(tmp_path / "run.toml", out=tmp_path / "out")


def test_a_row_may_give_what_the_file_s_method_needs(tmp_path: Path) -> None:
    """The file alone is no run; a row without the hyperparameter is refused by its key."""
    (tmp_path / "own.py").write_text(
        "from fleetfit.method import Method\n\n\ndef mine(beta: float) -> Method:\n    return Method()\n"
    )
    table = {"data": "digits", "method": f"{tmp_path / 'own.py'}:mine"}
    rows = [{"label": "a", "method": {"beta": 0.1}}, {"label": "b", "method": {"beta": 0.2}}]
    runs = plan_comparison({**table, "compare": {"smallest_baseline": False, "row": rows}}).runs
    assert [run.experiment.method.settings for run in runs] == [{"beta": 0.1}, {"beta": 0.2}]
    with raises(ConfigError, '"beta"', key="method.beta"):
        plan_comparison({**table, "compare": {"smallest_baseline": False, "row": [rows[0], {"label": "c"}]}})


@pytest.mark.parametrize("section", [["fleetfit", "heterofl"], {"row": ["fleetfit", "heterofl"]}])
def test_names_in_place_of_rows_lead_to_rows(section: Any) -> None:
    with raises(ConfigError, '{"row": [{"method": '):
        ff.compare(compare=section)
