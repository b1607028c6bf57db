"""What was renamed is still read, from wherever it may come; a line says the new name; both together are refused."""

import inspect
import logging
import tomllib
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import tomli_w

import fleetfit as ff
from fleetfit import names, renamed
from fleetfit.cli import main
from fleetfit.config import experiment_of, read_experiment
from fleetfit.config.reading import value_at
from fleetfit.engines.flower.settings import read_settings
from fleetfit.errors import ConfigError
from fleetfit.method import Method, build

VALUES: Mapping[str, Any] = {
    "engine.over_selection": 0.5,
    "engine.quorum": 0.5,
    "fleet.told": True,
    "fleet.tells_labels": True,
    "tuning": {"name": "frozen"},
    "tell_budget": False,
    "tell_labels": True,
}
"""For each old key a value that is not its default."""
RUN_KEYS, NODE_KEYS = sorted(renamed.RUN_FILE), sorted(renamed.NODE_FILE)
NODE = {"name": "pi", "data": {"name": "digits"}}


def tables(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return dict(value)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "is called" in record.getMessage()]


def said(old: str, new: str) -> list[str]:
    return [f'"{old}" is called "{new}" now; the old name is still read.']


@pytest.fixture(autouse=True)
def heard(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Everything that the package logs is kept, and nothing was said before."""
    renamed._once.cache_clear()
    with caplog.at_level(logging.WARNING, "fleetfit"):
        yield


def test_every_row_has_a_value_here() -> None:
    assert VALUES.keys() == renamed.RUN_FILE.keys() | renamed.NODE_FILE.keys()


@pytest.mark.parametrize("way", ["file", "override", "keyword", "tables"])
@pytest.mark.parametrize("old", RUN_KEYS)
def test_an_old_key_of_a_run_file_says_the_same(
    old: str, way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    new, value = renamed.RUN_FILE[old], VALUES[old]
    expected = experiment_of(tables(new, value))
    assert expected != experiment_of() and not lines(caplog)
    if way == "file":
        (tmp_path / "run.toml").write_text(tomli_w.dumps(tables(old, value)))
        found = read_experiment(tmp_path / "run.toml")
    elif way == "override":
        text = tomli_w.dumps({"value": value["name"] if isinstance(value, dict) else value}).strip()
        found = experiment_of({}, [f"{old}{'.name' if isinstance(value, dict) else ''}={text.partition(' = ')[2]}"])
        assert [key.startswith(new) for key in found.asked.keys] == [True]
    elif way == "keyword":
        section, _, key = old.partition(".")
        found = experiment_of({}, **{section: {key: value} if key else value["name"]})
    else:
        found = experiment_of(tables(old, value))
    assert found == expected
    assert lines(caplog) == said(old, new)


@pytest.mark.parametrize("old", RUN_KEYS)
def test_in_the_parts_of_a_comparison(old: str, caplog: pytest.LogCaptureFixture) -> None:
    def compared(key: str) -> dict[str, Any]:
        change, (leaf, value) = tables(key, VALUES[old]), (key, VALUES[old])
        if isinstance(value, dict):
            leaf, value = f"{key}.name", value["name"]
        rows = [{"label": "a"}, {"label": "b", **change}]
        settings = [{"label": "c"}, {"label": "d", **change}]
        return {"compare": {"row": rows, "setting": settings, "grid": {leaf: [value]}, "tune": tables(leaf, [value])}}

    new = renamed.RUN_FILE[old]
    found = experiment_of(compared(old))
    assert lines(caplog) == said(old, new)
    assert found == experiment_of(compared(new))


@pytest.mark.parametrize("old", RUN_KEYS)
def test_the_old_and_the_new_key_together_are_refused(old: str) -> None:
    new, value = renamed.RUN_FILE[old], VALUES[old]
    both = experiment_table(old, new, value)
    with pytest.raises(ConfigError, match=f'"{old}" is the old name of "{new}", and both are given'):
        experiment_of(both)


def experiment_table(old: str, new: str, value: Any) -> dict[str, Any]:
    """Tables with both keys."""
    if "." not in old:
        return {old: value, new: value}
    found = tables(old, value)
    section, _, key = new.rpartition(".")
    return {**found, section: {**found.get(section, {}), key: value}}


def test_an_override_by_the_new_name_wins_over_the_file_s_old_one(caplog: pytest.LogCaptureFixture) -> None:
    found = experiment_of({"tuning": {"name": "lora", "rank": 4}}, ["peft.name=frozen"])
    assert (found.peft.name, found.peft.settings) == ("frozen", {})
    found = experiment_of({"fleet": {"reports_budget": True}}, ["fleet.told=false"])
    assert found.fleet.reports_budget is False


@pytest.mark.parametrize("key", ["fleet.tolds", "tunings.name", "fleet.tell_budget", "local.told"])
def test_what_never_was_a_key_is_refused_as_before(key: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match="unknown key"):
        experiment_of({}, [f"{key}=true"])
    assert not lines(caplog)


def test_what_was_given_stays_as_it_is() -> None:
    given = {"tuning": {"name": "lora"}, "fleet": {"told": True}, "compare": {"row": [{"tuning": {"name": "full"}}]}}
    before = repr(given)
    assert renamed.renewed(given, say=renamed.silently)["peft"] == {"name": "lora"}
    assert repr(given) == before


# ---- a node's file -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("old", NODE_KEYS)
def test_an_old_key_of_a_node_says_the_same(old: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    new, file = renamed.NODE_FILE[old], tmp_path / "node.toml"
    file.write_text(tomli_w.dumps({**NODE, new: VALUES[old]}))
    expected = read_settings(file)
    assert value_at(vars(expected), new) == (VALUES[old],) and not lines(caplog)
    file.write_text(tomli_w.dumps({**NODE, old: VALUES[old]}))
    assert read_settings(file) == expected
    assert lines(caplog) == said(old, new)
    file.write_text(tomli_w.dumps({**NODE, old: VALUES[old], new: VALUES[old]}))
    with pytest.raises(ConfigError, match=f'"{old}" is the old name of "{new}", and both are given'):
        read_settings(file)


def test_a_node_allows_by_the_old_place_what_a_server_names_by_the_new_one(tmp_path: Path) -> None:
    (tmp_path / "node.toml").write_text(tomli_w.dumps({**NODE, "allow": ["fleetfit.choices.loss:loss"]}))
    assert read_settings(tmp_path / "node.toml").allow == ["fleetfit.selection.loss:loss"]


# ---- a run folder --------------------------------------------------------------------------------------------------


def test_a_saved_run_is_opened_in_silence_and_not_as_something_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A run folder and a comparison's, as they were written when the keys had their old names."""
    small = {"rounds": 1, "data": {"partition": {"clients": 4}}, "local": {"epochs": 1}}
    small |= {"peft": {"name": "frozen"}, "fleet": {"reports_budget": True, "reports_labels": True}}
    (tmp_path / "compare.toml").write_text(tomli_w.dumps({**small, "compare": {"row": [{"label": "a"}]}}))
    first = ff.compare(tmp_path / "compare.toml", out=tmp_path / "out")
    (folder,) = {path.parent for path in (tmp_path / "out").rglob("config.toml")}
    table = tomllib.loads((folder / "config.toml").read_text())
    table["tuning"] = table.pop("peft")
    for new, old in (("reports_budget", "told"), ("reports_labels", "tells_labels")):
        table["fleet"][old] = table["fleet"].pop(new)
    (folder / "config.toml").write_text(tomli_w.dumps(table))
    run = ff.load(folder)
    assert run.experiment.peft.name == "frozen" and run.experiment.fleet.reports_labels
    assert ff.compare(tmp_path / "compare.toml", out=tmp_path / "out").table == first.table
    assert not lines(caplog)  # only that the file has changed is said


# ---- plug-ins ------------------------------------------------------------------------------------------------------


def public_of(module: str) -> str:
    """The name of a function that a module has."""
    found = vars(__import__(module, fromlist=["_"]))
    return next(name for name, value in sorted(found.items()) if inspect.isfunction(value) and not name.startswith("_"))


@pytest.mark.parametrize("old", sorted(renamed.MODULES))
def test_an_old_place_of_a_plug_in_names_the_same_function(old: str, caplog: pytest.LogCaptureFixture) -> None:
    new = renamed.MODULES[old]
    below = {"fleetfit.choices": ".loss", "fleetfit.tuning": ".lora"}.get(old, "")  # packages that hold one each
    name = public_of(new + below)
    was, now = f"{old}{below}:{name}", f"{new}{below}:{name}"
    assert names.resolve("methods", was) is names.resolve("methods", now)
    assert names.resolve("methods", was) is names.resolve("methods", now)
    assert lines(caplog) == said(was, now)
    caplog.clear()
    hooks = {"method": {"hooks": {"channels": was}, "plus": {was: {}}}, "cohort": {"choose": was}}
    found = experiment_of(hooks)
    assert found.cohort.choose == found.method.hooks["channels"] == now and [*found.method.plus] == [now]
    assert lines(caplog) == said(was, now)


@pytest.mark.parametrize("name", ["fleetfit.trainers:f", "mine.train:f", "fleetfit.train", "loss", "train.py:f"])
def test_other_names_stay(name: str) -> None:
    assert renamed.place(name) == name


def test_a_method_by_its_old_field() -> None:
    """`Method(told=False)` of somebody's own is understood; what is said is Python's to say."""
    with pytest.warns(DeprecationWarning, match="needs_budgets"):
        method = Method(told=False)  # type: ignore[call-arg]
    assert not method.needs_budgets
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert build({"name": "adaptivefl"}).needs_budgets is False


# ---- the command line ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("old", sorted(renamed.KINDS))
def test_an_old_kind_is_listed(old: str, capsys: pytest.CaptureFixture[str]) -> None:
    new = renamed.KINDS[old]
    with pytest.raises(SystemExit, match="0"):
        main(["list", new])
    expected = capsys.readouterr()
    with pytest.raises(SystemExit, match="0"):
        main(["list", old])
    found = capsys.readouterr()
    assert found.out == expected.out and expected.out
    assert " ".join(found.err.split()) == f"fleetfit: {said(old, new)[0]}" and not expected.err


def test_what_is_no_kind_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["list", "selektion"])
    assert 'Did you mean "selection"?' in capsys.readouterr().err
