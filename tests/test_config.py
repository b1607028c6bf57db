"""A run file becomes an experiment; every mistake in it is a sentence that names its place."""

import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from support import Expected, raises

import fleetfit as ff
from fleetfit import names
from fleetfit.api.run import run
from fleetfit.cli.listing import read_catalogue
from fleetfit.config import Experiment, load, load_experiment, to_table, to_toml
from fleetfit.config.assemble.fleet import compute_group_sizes
from fleetfit.config.assemble.run import assemble
from fleetfit.config.dump import find_object_sections, make_plain
from fleetfit.config.keys import get_value, replace_key
from fleetfit.config.load import parse_override, resolve_tables
from fleetfit.config.merge import merge_tables
from fleetfit.config.parse import find_keys, parse_experiment
from fleetfit.core.local import Schedule
from fleetfit.data import Data
from fleetfit.errors import ConfigError, DataError, PlanError, format_ranges
from fleetfit.factories import list_parameters
from fleetfit.hooks import Method, rebuild_problem
from fleetfit.models.cnn import cnn

SMALL = ("data.partition.clients=8", "rounds=1")


@pytest.mark.parametrize(
    ("line", "quoted"),
    [
        (r'[data]path = "C:\Users\me\photos"', r"path = 'C:\Users\me\photos'"),
        (r'init_from = "runs\first"', None),
        (r'[data]path = "D:\train\new"', None),
        (r'[model]name = "D:\nets\xception.py:Net"', r"name = 'D:\nets\xception.py:Net'"),
        (r'[data]path = "\\\\nas\\backup\photos"', r"path = '\\\\nas\\backup\photos'"),
        (r'[fleet]levels = "plans\big.toml"', None),
    ],
)
def test_a_path_of_windows_leads_to_single_quotes(line: str, quoted: str | None, tmp_path: Path) -> None:
    """TOML refuses unknown escapes; tabs and line feeds in a path are refused, too. Single quotes take every path."""
    file = tmp_path / "run.toml"
    file.write_text("seed = 1\n" + line.replace("]", "]\n"))
    number = 3 if line.startswith("[") else 2
    with raises(ConfigError, *([quoted, f"line {number}"] if quoted else ["'"]), path=file):
        load_experiment(file)
    with raises(ConfigError):
        load_experiment(None, [line.replace("[", "").replace("]", ".")])
    assert load_experiment(None, ["data.name=digits", r"name='D:\train'"]).name == r"D:\train"


@pytest.mark.parametrize(
    ("word", "keys"),
    [
        ("rounds", ["rounds"]),
        ("lr", ["local.lr"]),
        ("learning_rate", ["local.lr"]),
        ("method.mu", ["method.mu"]),
        ("clients", ["data.partition.clients"]),
        ("epoch", ["local.epochs"]),
        ("batch_size", ["local.batch_size", "evaluate.batch_size"]),
        ("frobnicate", []),
    ],
)
def test_words_lead_to_keys(word: str, keys: list[str]) -> None:
    assert find_keys(word) == keys


@pytest.mark.parametrize(
    ("sections", "right"),
    [
        ({"learning_rate": 1.0}, 'local={"lr": ...}'),
        ({"strategy": "fedavg"}, "[method] name"),
        ({"label": "churn"}, 'data={"name": frame, "label": ...}'),
        ({"n_clients": 4}, 'data={"partition": {"clients": ...}}'),
        ({"output_dir": "runs"}, "out="),
        ({"num_rounds": 3}, '"rounds"'),
        ({"local": {"max_grad_norm": 1.0}}, '"clip_norm"'),
        ({"privacy": {"max_grad_norm": 1.0}}, '"clipping_norm"'),
        ({"cohort": {"clients": 3}}, '"count"'),
        ({"data": {"num_partitions": 3}}, "[data] partition.clients"),
        ({"data": {"partition": {"self_balancing": True}}}, '"balance"'),
        ({"method": {"name": "fedavg", "proximal_mu": 1.0}}, "[method] options.fedprox.mu"),
        ({"method": {"options": {"fedadam": {"eta": 1.0}}}}, '"lr"'),
        ({"peft": {"name": "lora", "lora_alpha": 8.0}}, '"alpha"'),
    ],
)
def test_names_of_other_libraries_lead_to_keys(sections: dict[str, Any], right: str) -> None:
    with raises(ConfigError, right):
        assemble(load_experiment(**sections))


@pytest.mark.parametrize(
    ("sections", "wrong"),
    [
        ({"engine": {"num_workers": 2}}, "[engine] workers"),
        ({"data": {"name": "digits", "image_size": 8}}, "[data] size"),
        ({"peft": {"name": "full", "r": 3}}, "[peft] rank"),
    ],
)
def test_no_hint_leads_to_a_key_that_is_refused(sections: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ConfigError) as caught:
        assemble(load_experiment(**sections))
    assert wrong not in str(caught.value)


@pytest.mark.parametrize("kind", ["attacks", "methods", "engines"])
def test_another_component_keeps_the_keys_that_fit_all(kind: str) -> None:
    row = names.KINDS[kind]
    section, _, chooser = row.keys[0].partition(".")
    first, second = names.list_names(kind)[:2]
    values = {key: f"value of {key}" for key in row.shared}
    merged = merge_tables({section: {chooser: first, "own": 1, **values}}, {section: {chooser: second}})
    assert row.shared and merged == {section: {chooser: second, **values}}
    fields = type(getattr(Experiment(), section)).model_fields
    plug_ins = [list_parameters(names.resolve(kind, name)) for name in names.list_names(kind)]
    for key in row.shared:
        assert key in fields or any(key in keys for keys in plug_ins), key


def test_all_unknown_keys_of_sections_are_named_at_once() -> None:
    unknown = {"local": {"epoch": 1, "batchsize": 3}, "fleet": {"budgets": [0.5, 1.0]}}
    hints = ('"epochs"', '"batch_size"', "groups = [{ budget = 0.25 }, { budget = 1.0 }]")
    with raises(ConfigError, "[local] epoch", "[local] batchsize", "[fleet] budgets", *hints, key="fleet.budgets"):
        load_experiment(**unknown)


def test_all_unknown_keys_of_a_component_are_named_at_once() -> None:
    with raises(ConfigError, '"nrm"', '"norm"', '"dpth"', "it takes", key="model.nrm") as caught:
        assemble(load_experiment(model={"name": "cnn", "nrm": "group", "dpth": 3}))
    assert str(caught.value).count("it takes") == 1


@pytest.mark.parametrize(("fleet", "key"), [([0.5, 1.0], "fleet"), ({"groups": [0.5]}, "fleet.groups.0")])
def test_budgets_in_another_form_lead_to_groups(fleet: Any, key: str) -> None:
    with raises(ConfigError, "groups = [{ budget = 0.25 }, { budget = 1.0 }]", key=key):
        load_experiment(fleet=fleet)


def test_every_name_of_another_library_leads_to_a_key() -> None:
    page = (Path(__file__).parents[1] / "docs/keys.md").read_text()
    plug_ins = {key for kind in read_catalogue().values() for entry in kind.values() for key, *_ in entry["keys"]}
    keys = {*re.findall(r"^\| `(\w+)`", page, re.MULTILINE), *names.list_names("options"), *plug_ins, "path"}
    for word, key in names.OTHER_NAMES.items():
        if key not in ("out", "progress"):
            assert key.partition(".")[0] in Experiment.model_fields and key.rpartition(".")[2] in keys, (word, key)
        assert word not in Experiment.model_fields, word


def test_the_empty_file_is_fleetfit_on_digits() -> None:
    experiment = load_experiment()
    assert (experiment.method.name, experiment.data.name, experiment.model.name) == ("fleetfit", "digits", "cnn")
    assert experiment == load_experiment(Experiment())
    assert experiment.local.schedule.kind == "cosine" and experiment.method.settings["beta"] == 0.5, (
        "the method's defaults"
    )


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["local.batch_sise=3"], Expected('"batch_size"', key="local.batch_sise")),
        (["local.learning_rate=3"], Expected('"lr"', key="local.learning_rate")),
        (["learning_rate=3"], Expected("[local] lr", key="learning_rate")),
        (["locl.lr=3"], Expected('"local"', key="locl")),
        (["batch_size=3"], Expected("[local] batch_size", key="batch_size")),
        (["rounds=two"], Expected("rounds", "'two'", key="rounds")),
        (["rounds=true"], Expected("True", key="rounds")),
        (["rounds=1.5"], Expected(1.5, key="rounds")),
        (["rounds=0"], Expected(1, 0, key="rounds")),
        (["seed=-1"], Expected(0, "-1", key="seed")),
        (['local.lr="fast"'], Expected("[local] lr", "'fast'", key="local.lr")),
        (["local.lr=nan"], Expected("[local] lr", "nan", key="local.lr")),
        (["local=3"], Expected("local", 3, key="local")),
        (
            ["method.name=fedavg", "local.schedule={at=[1]}"],
            Expected("[local] schedule", 'kind = "step"', key="local.schedule"),
        ),
        (["local.schedule.kind=stp"], Expected('"stp"', "cosine", '"step"', key="local.schedule")),
        (
            ["local.schedule={kind='step', at=[1], factr=2}"],
            Expected("[local] schedule.factr", '"factor"', key="local.schedule.factr"),
        ),
        (["local.schedule.kind=step"], Expected("[local] schedule.at", key="local.schedule.at")),
        (["fleet.groups=[]"], Expected("[fleet] groups", 1, key="fleet.groups")),
        (["fleet.groups=[{budgt=1}]"], Expected("[fleet] groups #1.budg", key="fleet.groups.0.budgt")),
        (
            ["fleet.groups=[{budget=0.5},{budget='x'}]"],
            Expected("[fleet] groups #2.budget", 0.5, "'x'", key="fleet.groups.1.budget"),
        ),
        (
            ["fleet.groups=[{budget=1, profile='laptpo'}]"],
            Expected('"laptpo"', "raspberry-pi-4b", "jetson-nano", '"laptop"', key="fleet.groups.0.profile"),
        ),
        (
            ["fleet.groups=[{budget=1, profile='phone'},{budget=0.5}]"],
            Expected("[fleet] groups", "#2", key="fleet.groups.1.profile"),
        ),
        (
            ["fleet.groups=[{budget=1, profile={multiply_adds_per_s=1e9}}]"],
            Expected("[fleet] groups #1.profile.down_bytes_per_s", key="fleet.groups.0.profile.down_bytes_per_s"),
        ),
        (
            [
                "fleet.groups=[{budget=1, profile={multiply_adds_per_s=1.0, down_bytes_per_s=1.0, up_bytes_per_s=1.0, "
                "latency=1}}]"
            ],
            Expected("[fleet] groups #1.profile.latency", '"latency_s"', key="fleet.groups.0.profile.latency"),
        ),
        (
            ["fleet.groups=[{budget={parameters=-1.0}}]"],
            Expected("[fleet] groups #1.budget.parameters", 0, "-1.0", key="fleet.groups.0.budget.parameters"),
        ),
        (
            ["fleet.groups=[{budget={parameters='x'}}]"],
            Expected("[fleet] groups #1.budget.parameters", "'x'", key="fleet.groups.0.budget.parameters"),
        ),
        (["fleet.drift={jump=2}"], Expected("[fleet] drift.jump", 1, 2, key="fleet.drift.jump")),
        (["cohort.deadline_s=0"], Expected("[cohort] deadline_s", 0, key="cohort.deadline_s")),
        (
            ["cohort.on_deadline=deeper"],
            Expected('"shallower", "stop" or "drop"', "'deeper'", key="cohort.on_deadline"),
        ),
        (["cohort.fraction=0.1", "cohort.count=3"], Expected("fraction", "count", key="cohort.count")),
        (["cohort.fraction=2"], Expected("[cohort] fraction", 1, 2, key="cohort.fraction")),
        (
            ["evaluate.batch_norm=['batch','layer']"],
            Expected("[evaluate] batch_norm #2", '"static" or "batch"', "'layer'", key="evaluate.batch_norm.1"),
        ),
        (["local.lr"], Expected("local.lr=0.03", '"local.lr"', key=None)),
        (["=3"], Expected("local.lr=0.03", '"=3"', key=None)),
    ],
)
def test_wrong_keys_and_values(overrides: list[str], expected: Expected) -> None:
    with raises(ConfigError, expected):
        load_experiment({}, overrides)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["attack.scale=5"], Expected("[attack] scale", "fleetfit list attacks", key="attack.scale")),
        (["attack.name=noise"], Expected("[attack] name", key="attack.name")),
        (["method.betta=1"], Expected('"betta"', "beta", key="method.betta")),
        (["method.name=scalfl"], Expected('"scalefl"')),
        (["method.beta=x"], Expected("[method] fleetfit: beta", key="method.beta")),
        (["method.hooks.choose_channels=roling"], Expected('"rolling"', key="method.hooks.choose_channels")),
        (["method.hooks.choose_chanels=rolling"], Expected('"choose_channels"', key="method.hooks.choose_chanels")),
        (["method.options.fedprx.mu=1"], Expected('"fedprx"', "fedprox")),
        (["fleet.reports_budget=false"], Expected("fleetfit", "adaptivefl", key="fleet.reports_budget")),
        (["cohort.selection={candidates=3}"], Expected("[cohort] selection", key="cohort.selection.name")),
        (["cohort.selection=sise"], Expected('"sise"', "size")),
        (
            ["cohort.selection=a:b", "method.hooks.choose_clients=a:b"],
            Expected("method.hooks.choose_clients", key="cohort.selection"),
        ),
        (["model.name=cnnn"], Expected('"cnn"', key="model.name")),
        (["model.norm=group-norm"], Expected('"batch" or "group"', "'group-norm'", '"group"?', key="model.norm")),
        (["engine.speed=fasst"], Expected("'fasst'", '"fast"?', key="engine.speed")),
        (["data.nmae=3"], Expected("augment", '"name"', key="data.nmae")),
        (
            ["data.name=images", "data.folder=photos", "data.paht=photos"],
            Expected("takes path, folder", '"path"?', key="data.paht"),
        ),
        (["data.pth=3"], Expected("augment", '"path"', key="data.pth")),
        (["model.nrm=group"], Expected("[model] cnn", '"nrm"', "norm", key="model.nrm")),
        (["model.classes=3"], Expected("[model] cnn", '"classes"', key="model.classes")),
        (["data.name=cifra10"], Expected('"cifar10"', key="data.name")),
        (["data.augmnt=shift"], Expected("[data] digits", '"augmnt"', key="data.augmnt")),
        (["data.name=../digits"], Expected("digits", kind=DataError)),
        (
            ["engine.wrkers=2"],
            Expected(
                '[engine] local has no "wrkers"; it takes speed, precision, memory_format, compile, '
                "feature_cache_bytes, "
                "device, threads.",
                key="engine.wrkers",
            ),
        ),
        (["engine.name=cluster"], Expected('"cluster"', "processes", key="engine.name")),
        (["data.partition.kind=dirichle"], Expected('"dirichlet"', key="data.partition.kind")),
        (["data.partition.alfa=1"], Expected("dirichlet", '"alfa"', key="data.partition.alfa")),
        (["data.partition.alpha=x"], Expected("dirichlet: alpha", key="data.partition.alpha")),
        (["data.partition.kind=natural"], Expected("digits", key="data.partition.kind", kind=DataError)),
        (["data.partition.clients=5000"], Expected(5000, key="data.partition.clients", kind=DataError)),
        (["data.partition.clients=4", "cohort.count=9"], Expected(9, 4, key="cohort.count")),
        (["fleet.cost=flops"], Expected('"flops"', key="fleet.cost")),
        (
            ["fleet.groups=[{budget=1,fraction=0.5},{budget=0.5,fraction=0.4}]"],
            Expected("add up to 0.9;", key="fleet.groups"),
        ),
        (["fleet.groups=[{budget=1,fraction=1.0},{budget=0.5}]"], Expected("add up to 1;", key="fleet.groups")),
        (["fleet.levels=clustr"], Expected('"cluster", "halving"', '"clustr"', key="fleet.levels")),
        (
            ["fleet.levels=nowhere.toml"],
            Expected("`fleetfit plan --save`", key="fleet.levels", path="nowhere.toml"),
        ),
        (["fleet.levels={format=99}"], Expected("fleet.levels", 99, key="fleet.levels")),
        (
            ["fleet.groups=[{budget=0.01}]", "fleet.levels=[0.5,1]"],
            Expected("no client", key="fleet.groups", kind=PlanError),
        ),
        (["fleet.groups=[{budget=0.000001}]", "method.name=scalefl"], Expected("tolerance", kind=PlanError)),
        (["fleet.groups=[{budget=0.000001}]"], Expected("an amount, not a share", kind=PlanError)),
        (["fleet.groups=[{budget=3}]"], Expected(3, "parameters", kind=PlanError)),
        (
            ["fleet.groups=[{budget={size_bytes=0.5}}]"],
            Expected("budget #1", "size_bytes", "parameters", key="fleet.groups"),
        ),
        (["fleet.groups=[{budget={parameters=0.5, bytes=0.5}}]"], Expected('"bytes"', key="fleet.groups")),
        (["fleet.groups=[{budget='5 MB'}]"], Expected("parameters", "(K,", key="fleet.groups")),
    ],
)
def test_contradicting_keys(overrides: list[str], expected: Expected) -> None:
    with raises(expected.kind or ConfigError, expected):
        assemble(load_experiment({}, [*SMALL, *overrides]))


@pytest.mark.parametrize(
    ("text", "line"),
    [("seed = \nrounds = 3\n", "(at line 1"), ("[data]\nname = 'a'\nname = 'b'\n\n", "(at line 3")],
)
def test_toml_error_has_the_line(tmp_path: Path, text: str, line: str) -> None:
    (tmp_path / "run.toml").write_text(text)
    with raises(ConfigError, "run.toml", line, path=tmp_path / "run.toml"):
        load_experiment(tmp_path / "run.toml")


def test_unreadable_files(tmp_path: Path) -> None:
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    for path, mention in (("missing.toml", "missing.toml"), (".", "folder"), ("binary.toml", "UTF-8")):
        with raises(ConfigError, mention, path=tmp_path / path):
            load_experiment(tmp_path / path)


# ---- merging -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [("a.b=3", 3), ("a.b=0.5", 0.5), ("a.b=true", True), ('a.b="3"', "3"), ("a.b=plain text", "plain text"),
     ("a.b=[1, 2]", [1, 2]), ("a.b={c = 1}", {"c": 1}), ("a.b=x=y", "x=y")],
)  # fmt: skip
def test_an_override_is_toml_or_text(text: str, value: Any) -> None:
    assert parse_override(text) == {"a": {"b": value}}


def test_overrides_win_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("rounds = 7\n[local]\nlr = 0.5\nepochs = 2\n")
    experiment = load_experiment(tmp_path / "run.toml", ["local.lr=0.25"], seed=3)
    assert (experiment.rounds, experiment.local.lr, experiment.local.epochs, experiment.seed) == (7, 0.25, 2, 3)


def test_new_name_drops_old_keys() -> None:
    base = {
        "method": {"name": "scalefl", "beta": 0.2},
        "data": {"name": "mnist", "folder": "x", "partition": {"clients": 3}},
    }
    other = merge_tables(base, {"method": {"name": "heterofl"}, "data": {"name": "digits"}})
    assert other["method"] == {"name": "heterofl"}
    assert other["data"] == {"name": "digits", "partition": {"clients": 3}}
    same = merge_tables(base, {"method": {"name": "scalefl", "temperature": 2.0}})
    assert same["method"] == {"name": "scalefl", "beta": 0.2, "temperature": 2.0}


def test_the_default_name_counts_as_a_name() -> None:
    merged = merge_tables({"method": {"beta": 0.2}}, {"method": {"name": "fleetfit"}})
    assert merged["method"] == {"name": "fleetfit", "beta": 0.2}
    assert merge_tables({"method": {"beta": 0.2}}, {"method": {"name": "fedavg"}})["method"] == {"name": "fedavg"}


def test_paths_are_relative_to_the_run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "deep"
    (folder / "pictures").mkdir(parents=True)
    (folder / "own.py").write_text(
        "from fleetfit.hooks import Method\n\ndef mine(step: int = 1):\n    return Method()\n\n"
        "def loss(job, device):\n    return None\n"
    )
    (folder / "run.toml").write_text(
        'method.name = "own.py:mine"\nmethod.step = 2\nmethod.hooks.make_loss = "own.py:loss"\n'
        'fleet.levels = "plan.toml"\ndata.folder = "pictures"\n'
    )
    monkeypatch.chdir(tmp_path)
    experiment = load_experiment(folder / "run.toml")
    assert experiment.method.name == f"{(folder / 'own.py').resolve()}:mine"
    assert experiment.method.hooks["make_loss"] == f"{(folder / 'own.py').resolve()}:loss"
    assert experiment.fleet.levels == str((folder / "plan.toml").resolve())
    assert experiment.data.settings["folder"] == str((folder / "pictures").resolve())
    assert experiment.method.settings == {"step": 2}


def test_missing_data_folder_stays_relative(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('data.name = "mnist"\ndata.folder = "elsewhere"\n')
    assert load_experiment(tmp_path / "run.toml").data.settings["folder"] == "elsewhere"


# ---- writing -------------------------------------------------------------------------------------------------------


def test_dump_has_every_default_and_loads() -> None:
    text = to_toml(load_experiment({}, ["local.schedule={kind='step', at=[3]}", "seed=4"]))
    table = tomllib.loads(text)
    assert table["method"] == {"name": "fleetfit", "tau": 1.0, "momentum": 0.5, "beta": 0.5, "temperature": 3.0}
    assert table["data"]["partition"]["clients"] == 40
    assert table["data"]["partition"]["seed"] == 4
    assert "fraction" not in table["cohort"]
    assert table["local"]["schedule"] == {"kind": "step", "at": [3], "factor": 0.1}
    assert "compare" not in table
    again = load_experiment(table)
    assert to_toml(again) == text


@pytest.mark.parametrize(("option", "values"), [("in_time", {}), ("fedadam", {"lr": 0.5}), ("fedprox", {})])
def test_options_without_settings_are_dumped(option: str, values: dict[str, Any]) -> None:
    """Also one that has nothing to set; and the settings of all others are visible."""
    experiment = load_experiment({"method": {"name": "fedavg", "options": {option: values}}})
    again = load_experiment(tomllib.loads(to_toml(experiment)))
    settings = {
        "in_time": {},
        "fedadam": {"lr": 0.5, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3},
        "fedprox": {"mu": 0.01},
    }
    assert again.method.options == {option: settings[option]}


def test_own_options_get_their_defaults(tmp_path: Path) -> None:
    (tmp_path / "own.part.py").write_text(
        "from fleetfit.method import Method\n\n\ndef option(mu: float = 0.5, keep: int = 2) -> Method:\n"
        "    return Method()\n"
    )
    name = f"{tmp_path}/own.part.py:option"
    experiment = load_experiment({"method": {"name": "fedavg", "options": {name: {"keep": 3}}}})
    assert experiment.method.options == {name: {"keep": 3, "mu": 0.5}}
    table = replace_key({}, f"method.options.{name}.mu", 1.0)
    assert table == {"method": {"options": {name: {"mu": 1.0}}}}
    assert get_value(table, f"method.options.{name}.mu") == 1.0


def test_keys_may_have_names_of_methods() -> None:
    """A function's own keys are written as they stand in the file, whatever pydantic has of the same name."""
    keys = {"copy": 1, "json": 2, "settings": 3, "model_fields": 4, "__class__": 5}
    table = tomllib.loads(to_toml(load_experiment({"data": {"name": "digits", **keys}})))
    assert {key: value for key, value in table["data"].items() if key in keys} == keys


def test_dump_assembles_to_the_same_run() -> None:
    first = assemble(load_experiment({}, SMALL))
    second = assemble(load_experiment(tomllib.loads(to_toml(first.experiment))))
    assert first.plan == second.plan
    assert torch.equal(first.simulation.parts[0]["train"], second.simulation.parts[0]["train"])
    assert first.settings.local == second.settings.local


# ---- objects instead of names --------------------------------------------------------------------------------------


def own_data() -> Data:
    x = torch.rand(60, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    y = torch.arange(60) % 3
    return Data("own", x, y, {"train": torch.arange(40), "test": torch.arange(40, 60)}, 3)


def test_objects_stand_in_for_names() -> None:
    data = own_data()
    assembly = assemble(
        load_experiment(
            None,
            ["data.partition.kind=iid", "data.partition.clients=4"],
            model=cnn(classes=3),
            data=data,
            method=Method(),
        )
    )
    assert assembly.data is data
    assert assembly.federation.problem.spec is None
    assert find_object_sections(tomllib.loads(to_toml(assembly.experiment))) == ["data", "model", "method"]


def test_an_importable_function_becomes_its_name() -> None:
    experiment = load_experiment(None, model=cnn, method={"name": own_method})
    assert experiment.model.name == "fleetfit.models.cnn:cnn"
    assert callable(experiment.method.name) or experiment.method.name.endswith(":own_method")


def own_method() -> Method:
    return Method()


def test_objects_of_the_wrong_kind_are_refused() -> None:
    with raises(ConfigError, "[data] name", '"digits"', 3, key="data.name"):
        assemble(load_experiment(None, data={"name": 3}))
    with raises(ConfigError, '"axes"', key="model.name"):
        assemble(load_experiment(None, SMALL, model={"name": object()}))
    with raises(ConfigError, "[model] norm", key="model.norm"):
        assemble(load_experiment(None, SMALL, model={"name": cnn(), "norm": "group"}))


def test_objects_without_an_import_path_run_on_local_only() -> None:
    assembly = assemble(load_experiment(None, [*SMALL, "engine.name=processes"], model=cnn()))
    with raises(ConfigError, 'engine.name = "local"'):
        assembly.engine()


# ---- the fleet -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shares", "clients", "sizes"),
    [
        ([None] * 4, 40, [10, 10, 10, 10]),
        ([None] * 4, 50, [13, 13, 12, 12]),  # the leftover clients go to the first of equal remainders
        ([0.4, 0.3, 0.3], 10, [4, 3, 3]),
        ([0.5, None, None], 7, [3, 2, 2]),  # 3.5, 1.75, 1.75
        ([None, None, None], 2, [1, 1, 0]),
    ],
)
def test_group_sizes_follow_the_shares(shares: list[float | None], clients: int, sizes: list[int]) -> None:
    assert compute_group_sizes(shares, clients) == sizes
    assert sum(sizes) == clients


def test_clients_are_dealt_by_a_seeded_shuffle() -> None:
    first, again, other = (assemble(load_experiment({}, [*SMALL, f"seed={seed}"])).fleet for seed in (0, 0, 1))
    assert (first.group == again.group).all()
    assert (first.group != other.group).any()
    assert first.names == ("1/8", "1/4", "1/2", "1")
    assert (np.bincount(first.group) == 2).all()


def test_absent_clients_are_listed() -> None:
    groups = "fleet.groups=[{budget=0.1, name='tiny'}, {budget=1}]"
    assembly = assemble(load_experiment({}, [*SMALL, groups, "fleet.levels=[0.5, 1]"]))
    tiny = np.flatnonzero(assembly.fleet.group == 0)
    assert sum("tiny" in note for note in assembly.notes) == 1
    assert all(value in assembly.notes[0] for value in ("4 clients", '"tiny"', "0.1 "))
    assert format_ranges(tiny) in assembly.notes[0]
    assert assembly.plan.left_out == tuple(f'{c} (group "tiny")' for c in tiny)
    assert set(assembly.federation.able) == set(np.flatnonzero(assembly.fleet.group == 1))


def test_ranges_are_short() -> None:
    assert format_ranges([3, 7, 8, 9, 11]) == "3, 7-9, 11"


def test_a_saved_plan_is_used_as_it_is(tmp_path: Path) -> None:
    first = assemble(load_experiment({}, SMALL))
    (tmp_path / "plan.toml").write_text(first.plan.to_toml())
    used = assemble(load_experiment({}, [*SMALL, f"fleet.levels={tmp_path / 'plan.toml'}"]))
    assert used.plan.levels == first.plan.levels
    inline = assemble(load_experiment({"fleet": {"levels": tomllib.loads(first.plan.to_toml())}}, SMALL))
    assert inline.plan.levels == first.plan.levels
    other = [*SMALL, f"fleet.levels={tmp_path / 'plan.toml'}", "fleet.cost=multiply_adds"]
    with raises(ConfigError, "parameters", '"multiply_adds"', key="fleet.cost", path=tmp_path / "plan.toml"):
        assemble(load_experiment({}, other))


def test_cohort_is_a_rounded_fraction() -> None:
    sizes = [
        assemble(load_experiment({}, [*SMALL, f"cohort.{what}"])).federation.cohort
        for what in ("fraction=0.01", "fraction=0.3", "count=8")
    ]
    assert sizes == [1, 2, 8]  # of 8 clients: max(1, round(0.08)), round(2.4), 8


def test_all_samples_in_one_batch() -> None:
    assembly = assemble(load_experiment({}, [*SMALL, "local.batch_size=all"]))
    assert assembly.settings.local.batch_size == "all"


# ---- schedules -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        ({"kind": "constant"}, [1, 1, 1, 1, 1]),
        ({"kind": "step", "at": [2, 4], "factor": 0.1}, [1, 1, 0.1, 0.1, 0.01]),
        ({"kind": "exponential", "factor": 0.5}, [1, 0.5, 0.25, 0.125, 0.0625]),
        # 0.2 + 0.8 * (1 + cos(pi * t / 4)) / 2 with cos = 1, 0.7071, 0, -0.7071, -1
        ({"kind": "cosine", "minimum": 0.2}, [1, 0.882843, 0.6, 0.317157, 0.2]),
    ],
)
def test_schedules(schedule: dict[str, Any], factors: list[float]) -> None:
    parsed = TypeAdapter(Schedule).validate_python(schedule)
    assert [parsed.factor_at(5, t) for t in range(5)] == pytest.approx(factors, abs=1e-6)


def test_the_schedule_reaches_the_settings() -> None:
    assembly = assemble(
        load_experiment({}, ["data.partition.clients=8", "rounds=3", "local.schedule={kind='step', at=[2]}"])
    )
    assert [assembly.settings.local.at_round(3, t).lr for t in range(3)] == pytest.approx([0.1, 0.1, 0.01])


# ---- tuning, and levels that are given -------------------------------------------------

VIT = {"name": "vit", "hidden": 16, "depth": 4, "attention_heads": 2, "patch": 4}


def test_new_mode_drops_old_keys() -> None:
    base = {"model": VIT, "peft": {"name": "lora", "rank": 8}}
    assert load_experiment(base, ["peft.name=frozen"]).peft.settings == {}
    changed = load_experiment(base, ["peft.alpha=3.0"]).peft.settings
    assert (changed["rank"], changed["alpha"]) == (8, 3.0)
    assert load_experiment(base, peft="ssf").peft.name == "ssf"


def test_defaults_of_a_mode_are_dumped() -> None:
    """A resumed run keeps them, whatever a later version's are."""
    written = tomllib.loads(to_toml(load_experiment({"peft": {"name": "lora", "rank": 8}})))
    assert written["peft"] == {"name": "lora", "rank": 8, "alpha": 64.0}  # targets follow from the model


def test_own_mode_next_to_the_run_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from fleetfit.peft.serial_adapter import serial_adapter\n\n\n"
        "def mine(architecture, features: int = 2):\n"
        "    return serial_adapter(architecture, rank=features)\n"
    )
    (tmp_path / "run.toml").write_text(
        "rounds = 1\n[peft]\nname = 'mine.py:mine'\n[method]\nname = 'depthfl'\n"
        "[model]\nname = 'vit'\nhidden = 16\ndepth = 4\nattention_heads = 2\npatch = 4\n[fleet]\ntolerance = 0.5\n"
        "levels = [{ depth = 2, budget = 0.5 }, { budget = 1.0 }]\ngroups = [{ budget = 0.5 }, { budget = 1.0 }]\n"
    )
    assembly = assemble(load_experiment(tmp_path / "run.toml"))
    shapes = assembly.federation.problem.layout.shapes({}, (4,))
    assert shapes["blocks.0.mlp.tuning.down.weight"] == (2, 16)


def assemble_levels(levels: list[dict[str, Any]], method: str = "depthfl") -> Any:
    groups = [{"budget": level["budget"]} for level in levels]
    fleet = {"levels": levels, "groups": groups, "tolerance": 0.0}
    return assemble(load_experiment({"model": VIT, "method": {"name": method}, "fleet": fleet}, SMALL)).federation


def test_listed_levels_are_not_searched() -> None:
    """Depth, exits and width as said; a client gets the level whose budget it has, whatever the level costs."""
    federation = assemble_levels([{"depth": 1, "budget": 0.1}, {"depth": 3, "budget": 0.2}, {"budget": 1.0}])
    assert [level.submodel.exits for level in federation.levels] == [(1,), (1, 3), (1, 3, 4)]
    assert [level.needs for level in federation.levels] == [0.1, 0.2, 1.0]
    assert sorted(set(federation.level_of.tolist())) == [0, 1, 2]
    both = assemble_levels([{"depth": 2, "width": 0.5, "budget": 0.5}, {"budget": 1.0}], "scalefl")
    assert both.levels[0].submodel.exits == (2,) and both.levels[0].submodel.sizes["hidden"] == 8
    narrow = assemble_levels([{"width": 0.5, "budget": 0.5}, {"budget": 1.0}], "heterofl")
    assert [level.submodel.exits for level in narrow.levels] == [(4,), (4,)]


@pytest.mark.parametrize(
    ("levels", "mention"),
    [
        ([{"depth": 3, "budget": 0.5}, {"depth": 2, "budget": 0.6}, {"budget": 1.0}], "depth"),
        ([{"depth": 1, "width": 0.9, "budget": 0.5}, {"depth": 2, "width": 0.5, "budget": 0.6}, {"budget": 1.0}],
         "width"),
        ([{"depth": 1, "budget": 0.5}, {"depth": 3, "budget": 1.0}], "all 4 blocks; got 3"),
        ([{"depth": 1, "budget": 0.5}, {"budget": 0.9}], "a budget of 1"),
        ([{"depth": 1, "budget": 0.5}, {"depth": 2, "budget": 0.4}, {"budget": 1.0}], "strictly ascending"),
    ],
)  # fmt: skip
def test_levels_must_grow(levels: list[dict[str, Any]], mention: str) -> None:
    with raises(ConfigError, "[fleet] levels: ", mention, key="fleet.levels"):
        assemble_levels(levels)


def test_empty_keys() -> None:
    with raises(ConfigError, key=""):
        load_experiment({"": {"lr": 1}}, [])
    with raises(ConfigError, '".lr=1"'):
        load_experiment({"rounds": 1}, [".lr=1"])


def test_the_problem_of_a_run_has_its_levels_here_and_rebuilt() -> None:
    federation = assemble(load_experiment()).federation
    assert len(federation.levels) > 1
    problem = federation.problem
    assert problem.spec is not None
    for levels in (problem.levels, rebuild_problem(problem.spec).levels):
        assert [(piece.sizes, piece.exits) for piece in levels] == [
            (level.submodel.sizes, level.submodel.exits) for level in federation.levels
        ]


@pytest.mark.parametrize(
    "body", ["raise ValueError(f'lr of {7}')", "return 7", "return Method(unused_hooks=('make_penalty',))"]
)
def test_a_broken_method_fails_while_loading(body: str, tmp_path: Path) -> None:
    """A method that cannot be built would lose the defaults that it declares, and train with other values."""
    file = tmp_path / "broken_method.py"
    file.write_text(f"from fleetfit.method import Method\ndef broken():\n    {body}\n")
    with raises(ConfigError, "penalty" if "penalty" in body else file):
        load_experiment({"method": f"{file}:broken"})


def test_parsing_opens_no_data(tmp_path: Path) -> None:
    """The data at a path are looked at when defaults are filled in, and not where tables are resolved and validated."""
    tables = resolve_tables({"data": {"path": "gone.zip"}, "method": "fedavg"}, tmp_path)
    assert parse_experiment(tables).data.name == "gone.zip"
    with raises(DataError, "gone.zip"):
        load_experiment(tables)


def test_a_run_validates_its_configuration_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(load, "parse_experiment", lambda table: calls.append(table) or parse_experiment(table))
    (tmp_path / "own.py").write_text("def follow(report):\n    pass\n")
    changes = {"data": {"partition": {"clients": 4}}, "rounds": 1, "local": {"max_steps": 1}}
    finished = run(changes, out=tmp_path / "run", callbacks=[f"{tmp_path / 'own.py'}:follow"], progress=False)
    assert sum("data" in table for table in calls) == 1, "the other call is of the sections that make the method"
    written = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert written == to_table(finished.experiment) and len(written["callbacks"]) == 1


def test_a_changed_experiment_has_the_defaults_of_the_change() -> None:
    """What the user wrote stays; what FleetFit filled in for the old method, model and seed goes."""
    first = load_experiment({"method": {"name": "fleetfit", "beta": 0.2}, "local": {"epochs": 3}, "seed": 1})
    changed = load_experiment(first, method="scalefl", model="char_lstm", seed=2)
    assert changed == load_experiment({"method": "scalefl", "model": "char_lstm", "local": {"epochs": 3}, "seed": 2})
    assert (changed.local.optimizer, changed.data.partition.seed) == ("adamw", 2)
    assert load_experiment(first) is first


@pytest.mark.parametrize(("options", "key"), [({load_experiment: {}}, ""), ({"mine": load_experiment}, ".mine")])
def test_options_that_are_functions_are_to_be_named(options: Any, key: str) -> None:
    with raises(ConfigError, '"file.py:function"', key=f"method.options{key}"):
        load_experiment(method={"name": "fedavg", "options": options})


@pytest.mark.parametrize("options", [["krum"], "krum"])
def test_options_that_are_no_table_show_one(options: object) -> None:
    with raises(ConfigError, "scaffold", key="method.options"):
        load_experiment({"method": {"name": "fedavg", "options": options}})


OWN = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, widths=(16, 16), most=float("inf"), classes=10, channels=1):
        super().__init__()
        sizes = (64, *widths) + (classes,)
        self.most, self.layers = most, nn.ModuleList(map(nn.Linear, sizes, sizes[1:]))
        assert isinstance(widths, tuple)

    def forward(self, x):
        x = x.flatten(1)
        for layer in self.layers[:-1]:
            x = layer(x).relu().clamp(max=self.most)
        return self.layers[-1](x)

def small_lstm(classes=10):
    return Net(classes=classes)
"""


def test_defaults_of_an_own_model_stay_as_they_are(tmp_path: Path) -> None:
    """Also of a run that is opened again: a tuple is no list, and what TOML cannot hold is left to the model."""
    (tmp_path / "own.py").write_text(OWN)
    local = {"max_steps": 1, "epochs": 1}
    run = ff.run(model=f"{tmp_path / 'own.py'}:Net", data="digits", rounds=1, local=local, out=tmp_path / "run",
                 progress=False)  # fmt: skip
    assert ff.load(run.folder).model()(torch.zeros(2, 1, 8, 8))[-1].shape == (2, 10)


def test_an_own_model_is_not_taken_for_a_built_in_one(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    experiments = [
        load_experiment({"model": {"name": f"{tmp_path / 'own.py'}:{one}"}}) for one in ("small_lstm", "Net")
    ]
    assert experiments[0].local == experiments[1].local


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    """As in a loop over np.arange; a path is its text."""
    table = {"model": {"name": "mlp", "hidden": np.int64(32)}, "cohort": {"count": np.int32(3)}}
    experiment = load_experiment({**table, "local": {"lr": np.float64(0.5)}})
    values = experiment.model.settings["hidden"], experiment.cohort.count, experiment.local.lr
    assert values == (32, 3, 0.5) and [type(value) for value in values] == [int, int, float]
    assert make_plain({"weights": tmp_path}) == {"weights": str(tmp_path)}
