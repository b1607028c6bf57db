"""A run file becomes an experiment; every mistake in it is a sentence that names its place."""

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from fleetfit.config import Experiment, assemble, load_experiment, to_toml
from fleetfit.config.build.fleet import compute_group_sizes
from fleetfit.config.build.levels import format_ranges
from fleetfit.config.dump import find_object_sections
from fleetfit.config.load import parse_override
from fleetfit.config.merge import merge_tables
from fleetfit.config.schema import Schedule
from fleetfit.data import Data
from fleetfit.errors import ConfigError, DataError, FleetFitError, PlanError
from fleetfit.method import Method
from fleetfit.models.cnn import cnn

SMALL = ("data.partition.clients=8", "rounds=1")


def said(make: Callable[[], Any], kind: type[FleetFitError] = ConfigError) -> str:
    with pytest.raises(kind) as caught:
        make()
    return str(caught.value)


def test_the_empty_file_is_scalefl_on_digits() -> None:
    found = load_experiment()
    assert (found.method.name, found.data.name, found.model.name) == ("scalefl", "digits", "cnn")
    assert found == Experiment()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["local.batch_sise=3"], '[local] batch_sise: unknown key. Did you mean "batch_size"?'),
        (["locl.lr=3"], 'locl: unknown key. Did you mean "local"?'),
        (["batch_size=3"], "batch_size: unknown key. Did you mean [local] batch_size?"),
        (["rounds=two"], "rounds: should be a valid integer, got 'two'."),
        (["rounds=true"], "rounds: should be a valid integer, got True."),
        (["rounds=1.5"], "rounds: should be a valid integer, got 1.5."),
        (["rounds=0"], "rounds: should be greater than or equal to 1, got 0."),
        (["seed=-1"], "seed: should be greater than or equal to 0, got -1."),
        (['local.lr="fast"'], "[local] lr: should be a valid number, got 'fast'."),
        (["local.lr=nan"], "[local] lr: should be a finite number, got nan."),
        (["local=3"], "local: should be a table of keys, got 3."),
        (["local.schedule={at=[1]}"], '[local] schedule: needs a kind, such as kind = "step"'),
        (["local.schedule.kind=stp"], '[local] schedule: there is no kind "stp"'),
        (
            ["local.schedule={kind='step', at=[1], factr=2}"],
            '[local] schedule.factr: unknown key. Did you mean "factor"?',
        ),
        (["local.schedule.kind=step"], "[local] schedule.at: this key is needed."),
        (["fleet.groups=[]"], "[fleet] groups: List should have at least 1 item"),
        (["fleet.groups=[{budgt=1}]"], "[fleet] groups #1.budg"),
        (["fleet.groups=[{budget=0.5},{budget='x'}]"], "[fleet] groups #2.budget: should be a valid number, got 'x'."),
        (
            ["fleet.groups=[{budget=1, profile='laptpo'}]"],
            '[fleet] groups.profile: there is no profile "laptpo"; there are raspberry-pi-4b, jetson-nano,',
        ),
        (["fleet.groups=[{budget=1, profile='laptpo'}]"], 'Did you mean "laptop"?'),
        (["fleet.groups=[{budget=1, profile='phone'},{budget=0.5}]"], "[fleet] groups: #2 have no profile and others"),
        (
            ["fleet.groups=[{budget=1, profile={multiply_adds_per_s=1e9}}]"],
            "[fleet] groups #1.profile.down_bytes_per_s: this key is needed.",
        ),
        (
            [
                "fleet.groups=[{budget=1, profile={multiply_adds_per_s=1.0, down_bytes_per_s=1.0, up_bytes_per_s=1.0, "
                "latency=1}}]"
            ],
            '[fleet] groups #1.profile.latency: unknown key. Did you mean "latency_s"?',
        ),
        (
            ["fleet.groups=[{budget={parameters=-1.0}}]"],
            "[fleet] groups #1.budget.parameters: should be greater than 0",
        ),
        (["fleet.groups=[{budget={parameters='x'}}]"], "[fleet] groups #1.budget.parameters: should be a valid number"),
        (["fleet.drift={jump=2}"], "[fleet] drift.jump: should be less than or equal to 1, got 2."),
        (["cohort.deadline_s=0"], "[cohort] deadline_s: should be greater than 0, got 0."),
        (["cohort.late=deeper"], '[cohort] late: should be "shallower", "stop" or "drop", got \'deeper\'.'),
        (["cohort.fraction=0.1", "cohort.count=3"], "[cohort] takes fraction or count, not both."),
        (["cohort.fraction=2"], "[cohort] fraction: should be less than or equal to 1, got 2"),
        (["evaluate.norms=['batch','layer']"], '[evaluate] norms #2: should be "static" or "batch", got \'layer\'.'),
        (["local.lr"], 'an override is written key=value, such as local.lr=0.03, got "local.lr".'),
        (["=3"], 'an override is written key=value, such as local.lr=0.03, got "=3".'),
    ],
)
def test_a_wrong_key_or_value_is_a_sentence(overrides: list[str], message: str) -> None:
    assert message in said(lambda: load_experiment({}, overrides))


@pytest.mark.parametrize(
    ("overrides", "kind", "message"),
    [
        (["method.betta=1"], ConfigError, '[method] scalefl has no "betta"; it takes beta'),
        (["method.name=scalfl"], ConfigError, 'Did you mean "scalefl"?'),
        (["method.beta=x"], ConfigError, "[method] scalefl: beta: input should be a valid number"),
        (["method.hooks.channels=roling"], ConfigError, 'Did you mean "rolling"?'),
        (["method.hooks.chanels=rolling"], ConfigError, 'Did you mean "channels"?'),
        (["method.plus.fedprx.mu=1"], ConfigError, '"fedprx" is not among the options'),
        (["fleet.reports_budget=false"], ConfigError, "scalefl needs the budgets that clients report to the server"),
        (
            ["cohort.choose={candidates=3}"],
            ConfigError,
            "[cohort] choose: a table needs the name of a way of client selection",
        ),
        (["cohort.choose=sise"], ConfigError, '"sise" is not among the ways of client selection: '),
        (["cohort.choose=a:b", "method.hooks.choose=a:b"], ConfigError, "name the same hook; set one of them"),
        (["model.name=cnnn"], ConfigError, 'Did you mean "cnn"?'),
        (
            ["model.norm=group-norm"],
            ConfigError,
            '[model] cnn: norm: should be "batch" or "group", got \'group-norm\'. Did you mean "group"?',
        ),
        (["engine.speed=fasst"], ConfigError, "got 'fasst'. Did you mean \"fast\"?"),
        (["data.nmae=3"], ConfigError, 'augment. Did you mean "name"?'),
        (["data.pth=3"], ConfigError, 'augment. Did you mean "path"?'),
        (["model.nrm=group"], ConfigError, '[model] cnn has no "nrm"; it takes norm'),
        (["model.classes=3"], ConfigError, '[model] cnn has no "classes"'),
        (["data.name=cifra10"], ConfigError, 'Did you mean "cifar10"?'),
        (["data.augmnt=shift"], ConfigError, '[data] digits has no "augmnt"'),
        (["data.name=../digits"], DataError, "there is no file or folder"),
        (
            ["engine.wrkers=2"],
            ConfigError,
            '[engine] local has no "wrkers"; it takes speed, precision, memory_format, compile, '
            "features_bytes, device, threads.",
        ),
        (["engine.name=cluster"], ConfigError, '"cluster" is not among the engines'),
        (["data.partition.kind=dirichle"], DataError, 'Did you mean "dirichlet"?'),
        (["data.partition.alfa=1"], ConfigError, '[data] partition dirichlet has no "alfa"'),
        (["data.partition.alpha=x"], ConfigError, "[data] partition dirichlet: alpha: input should be a valid number"),
        (["data.partition.kind=natural"], DataError, "digits has no natural groups"),
        (["data.partition.clients=5000"], DataError, "5000 clients are more than"),
        (["data.partition.clients=4", "cohort.count=9"], ConfigError, "9 clients a round are more than the 4 clients"),
        (["fleet.cost=flops"], ConfigError, '"flops"'),
        (["fleet.groups=[{budget=1,share=0.5},{budget=0.5,share=0.4}]"], ConfigError, "the shares add up to 0.9;"),
        (
            ["fleet.groups=[{budget=1,share=1.0},{budget=0.5}]"],
            ConfigError,
            "something left for the groups without a share",
        ),
        (["fleet.levels=clustr"], ConfigError, "[fleet] levels: must be"),
        (["fleet.levels=nowhere.toml"], ConfigError, "nowhere.toml cannot be read; `fleetfit plan --save` writes one."),
        (["fleet.levels={format=99}"], ConfigError, "fleet.levels: a plan of format 99 cannot be read"),
        (["fleet.groups=[{budget=0.01}]", "fleet.levels=[0.5,1]"], PlanError, "no client can take part."),
        (["fleet.groups=[{budget=0.000001}]"], PlanError, "tolerance"),
        (
            ["fleet.groups=[{budget={size_bytes=0.5}}]"],
            ConfigError,
            "budget #1 names size_bytes, and must name parameters",
        ),
        (["fleet.groups=[{budget={parameters=0.5, bytes=0.5}}]"], ConfigError, '"bytes"'),
        (
            ["fleet.groups=[{budget='5 MB'}]"],
            ConfigError,
            "a budget of parameters is a number, or text with a unit (K,",
        ),
    ],
)
def test_what_does_not_fit_together_is_a_sentence(
    overrides: list[str], kind: type[FleetFitError], message: str
) -> None:
    assert message in said(lambda: assemble(load_experiment({}, [*SMALL, *overrides])), kind)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed = \nrounds = 3\n", "is no valid TOML: Invalid value (at line 1"),
        ("[data]\nname = 'a'\nname = 'b'\n\n", "is no valid TOML: Cannot overwrite a value (at line 3"),
    ],
)
def test_a_file_that_is_not_toml_names_the_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "run.toml").write_text(text)
    assert message in said(lambda: load_experiment(tmp_path / "run.toml"))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    assert "there is no file" in said(lambda: load_experiment(tmp_path / "missing.toml"))
    assert "is a folder" in said(lambda: load_experiment(tmp_path))
    assert "is not UTF-8 text" in said(lambda: load_experiment(tmp_path / "binary.toml"))


# ---- merging -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [("a.b=3", 3), ("a.b=0.5", 0.5), ("a.b=true", True), ('a.b="3"', "3"), ("a.b=plain text", "plain text"),
     ("a.b=[1, 2]", [1, 2]), ("a.b={c = 1}", {"c": 1}), ("a.b=x=y", "x=y")],
)  # fmt: skip
def test_an_override_is_toml_or_text(text: str, value: Any) -> None:
    assert parse_override(text) == {"a": {"b": value}}


def test_overrides_win_over_the_file_and_leave_the_rest(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("rounds = 7\n[local]\nlr = 0.5\nepochs = 2\n")
    found = load_experiment(tmp_path / "run.toml", ["local.lr=0.25"], seed=3)
    assert (found.rounds, found.local.lr, found.local.epochs, found.seed) == (7, 0.25, 2, 3)


def test_another_name_drops_the_keys_of_the_old_one() -> None:
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
    found = merge_tables({"method": {"beta": 0.2}}, {"method": {"name": "scalefl"}})
    assert found["method"] == {"name": "scalefl", "beta": 0.2}
    assert merge_tables({"method": {"beta": 0.2}}, {"method": {"name": "fedavg"}})["method"] == {"name": "fedavg"}


def test_paths_are_relative_to_the_run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "deep"
    (folder / "pictures").mkdir(parents=True)
    (folder / "own.py").write_text(
        "from fleetfit.method import Method\n\ndef mine(step: int = 1):\n    return Method()\n"
    )
    (folder / "run.toml").write_text(
        'method.name = "own.py:mine"\nmethod.step = 2\nmethod.hooks.loss = "own.py:loss"\n'
        'fleet.levels = "plan.toml"\ndata.folder = "pictures"\n'
    )
    monkeypatch.chdir(tmp_path)
    found = load_experiment(folder / "run.toml")
    assert found.method.name == f"{(folder / 'own.py').resolve()}:mine"
    assert found.method.hooks["loss"] == f"{(folder / 'own.py').resolve()}:loss"
    assert found.fleet.levels == str((folder / "plan.toml").resolve())
    assert found.data.settings["folder"] == str((folder / "pictures").resolve())
    assert found.method.settings == {"step": 2}


def test_a_folder_that_is_not_beside_the_run_file_is_left_to_the_data_set(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('data.name = "mnist"\ndata.folder = "elsewhere"\n')
    assert load_experiment(tmp_path / "run.toml").data.settings["folder"] == "elsewhere"


# ---- writing -------------------------------------------------------------------------------------------------------


def test_the_resolved_file_shows_every_default_and_reads_back() -> None:
    text = to_toml(load_experiment({}, ["local.schedule={kind='step', at=[3]}", "seed=4"]))
    table = tomllib.loads(text)
    assert table["method"] == {"name": "scalefl", "beta": 0.1, "temperature": 3.0, "split": "both", "warmup": 0.0,
                               "printed": False}  # fmt: skip
    assert table["data"]["partition"]["clients"] == 40
    assert table["data"]["partition"]["seed"] == 4
    assert table["cohort"]["fraction"] == 0.1
    assert table["local"]["schedule"] == {"kind": "step", "at": [3], "factor": 0.1}
    assert "compare" not in table
    again = load_experiment(table)
    assert to_toml(again) == text


@pytest.mark.parametrize(("option", "values"), [("in_time", {}), ("fedadam", {"lr": 0.5}), ("fedprox", {})])
def test_an_option_without_settings_is_there_in_the_resolved_file(option: str, values: dict[str, Any]) -> None:
    """Also one that has nothing to set; and the settings of all others are visible."""
    given = load_experiment({"method": {"name": "fedavg", "plus": {option: values}}})
    again = load_experiment(tomllib.loads(to_toml(given)))
    found = {"in_time": {}, "fedadam": {"lr": 0.5, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3}, "fedprox": {"mu": 0.01}}
    assert again.method.plus == {option: found[option]}


def test_a_setting_may_be_called_as_a_method_of_a_section() -> None:
    """A function's own keys are written as they stand in the file, whatever pydantic has of the same name."""
    keys = {"copy": 1, "json": 2, "settings": 3, "model_fields": 4, "__class__": 5}
    table = tomllib.loads(to_toml(load_experiment({"data": {"name": "digits", **keys}})))
    assert {key: value for key, value in table["data"].items() if key in keys} == keys


def test_the_resolved_file_assembles_to_the_same_run() -> None:
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
    found = assemble(
        load_experiment(
            None,
            ["data.partition.kind=iid", "data.partition.clients=4"],
            model=cnn(classes=3),
            data=data,
            method=Method(),
        )
    )
    assert found.data is data
    assert found.federation.problem.spec is None
    assert find_object_sections(tomllib.loads(to_toml(found.experiment))) == ["data", "model", "method"]


def test_an_importable_function_becomes_its_name() -> None:
    found = load_experiment(None, model=cnn, method={"name": own_method})
    assert found.model.name == "fleetfit.models.cnn:cnn"
    assert callable(found.method.name) or found.method.name.endswith(":own_method")


def own_method() -> Method:
    return Method()


def test_objects_of_the_wrong_kind_are_refused() -> None:
    assert '[data] name: should be a name in quotes, such as "digits", got 3.' in said(
        lambda: assemble(load_experiment(None, data={"name": 3}))
    )
    assert 'must give an Architecture; object lacks "axes"' in said(
        lambda: assemble(load_experiment(None, SMALL, model={"name": object()}))
    )
    assert "an object takes no further keys" in said(
        lambda: assemble(load_experiment(None, SMALL, model={"name": cnn(), "norm": "group"}))
    )


def test_objects_without_an_import_path_run_on_local_only() -> None:
    found = assemble(load_experiment(None, [*SMALL, "engine.name=processes"], model=cnn()))
    assert 'objects made in Python run with engine.name = "local"' in said(found.engine)


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
def test_group_sizes_follow_the_shares_and_leave_nobody_out(
    shares: list[float | None], clients: int, sizes: list[int]
) -> None:
    assert compute_group_sizes(shares, clients) == sizes
    assert sum(sizes) == clients


def test_clients_are_dealt_by_a_seeded_shuffle() -> None:
    first, again, other = (assemble(load_experiment({}, [*SMALL, f"seed={seed}"])).fleet for seed in (0, 0, 1))
    assert (first.group == again.group).all()
    assert (first.group != other.group).any()
    assert first.names == ("1/8", "1/4", "1/2", "1")
    assert (np.bincount(first.group) == 2).all()


def test_who_cannot_take_part_is_named() -> None:
    groups = "fleet.groups=[{budget=0.1, name='tiny'}, {budget=1}]"
    found = assemble(load_experiment({}, [*SMALL, groups, "fleet.levels=[0.5, 1]"]))
    tiny = np.flatnonzero(found.fleet.group == 0)
    assert len(found.notes) == 1
    assert '4 clients of group "tiny" (budget 0.1 of the full model) cannot take part' in found.notes[0]
    assert format_ranges(tiny) in found.notes[0]
    assert found.plan.left_out == tuple(f'{c} (group "tiny")' for c in tiny)
    assert set(found.federation.able) == set(np.flatnonzero(found.fleet.group == 1))


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
    assert "this plan counts parameters" in said(lambda: assemble(load_experiment({}, other)))


def test_the_cohort_is_a_rounded_fraction_of_at_least_one() -> None:
    sizes = [
        assemble(load_experiment({}, [*SMALL, f"cohort.{what}"])).federation.cohort
        for what in ("fraction=0.01", "fraction=0.3", "count=8")
    ]
    assert sizes == [1, 2, 8]  # of 8 clients: max(1, round(0.08)), round(2.4), 8


def test_all_samples_in_one_batch() -> None:
    found = assemble(load_experiment({}, [*SMALL, "local.batch_size=all"]))
    assert found.settings.local.batch_size is None


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
    found = TypeAdapter(Schedule).validate_python(schedule)
    assert [found.factor_at(5, t) for t in range(5)] == pytest.approx(factors, abs=1e-6)


def test_the_schedule_reaches_the_settings() -> None:
    found = assemble(
        load_experiment({}, ["data.partition.clients=8", "rounds=3", "local.schedule={kind='step', at=[2]}"])
    )
    assert [found.settings.schedule(t) for t in range(3)] == [1, 1, 0.1]


# ---- tuning, and levels that are given -------------------------------------------------

VIT = {"name": "vit", "hidden": 16, "depth": 4, "attention_heads": 2, "patch": 4}


def test_another_mode_of_tuning_takes_the_old_one_s_keys_along() -> None:
    base = {"model": VIT, "peft": {"name": "lora", "rank": 8}}
    assert load_experiment(base, ["peft.name=frozen"]).peft.settings == {}
    assert load_experiment(base, ["peft.alpha=3.0"]).peft.settings == {"rank": 8, "alpha": 3.0}
    assert load_experiment(base, peft="ssf").peft.name == "ssf"


def test_the_defaults_of_a_mode_are_written_down() -> None:
    """A resumed run keeps them, whatever a later version's are."""
    written = tomllib.loads(to_toml(load_experiment({"peft": {"name": "lora", "rank": 8}})))
    assert written["peft"] == {"name": "lora", "rank": 8, "alpha": 64.0, "targets": ["*.query", "*.value"]}


def test_a_mode_of_one_s_own_is_found_beside_the_run_file(tmp_path: Path) -> None:
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


def given(levels: list[dict[str, Any]], method: str = "depthfl") -> Any:
    groups = [{"budget": level["budget"]} for level in levels]
    fleet = {"levels": levels, "groups": groups, "tolerance": 0.0}
    return assemble(load_experiment({"model": VIT, "method": {"name": method}, "fleet": fleet}, SMALL)).federation


def test_levels_that_are_given_are_taken_as_they_are() -> None:
    """Depth, exits and width as said; a client gets the level whose budget it has, whatever the level costs."""
    found = given([{"depth": 1, "budget": 0.1}, {"depth": 3, "budget": 0.2}, {"budget": 1.0}])
    assert [level.submodel.exits for level in found.levels] == [(1,), (1, 3), (1, 3, 4)]
    assert [level.needs for level in found.levels] == [0.1, 0.2, 1.0]
    assert sorted(set(found.level_of.tolist())) == [0, 1, 2]
    both = given([{"depth": 2, "width": 0.5, "budget": 0.5}, {"budget": 1.0}], "scalefl")
    assert both.levels[0].submodel.exits == (2,) and both.levels[0].submodel.sizes["hidden"] == 8
    narrow = given([{"width": 0.5, "budget": 0.5}, {"budget": 1.0}], "heterofl")
    assert [level.submodel.exits for level in narrow.levels] == [(4,), (4,)]


@pytest.mark.parametrize(
    ("levels", "message"),
    [
        ([{"depth": 3, "budget": 0.5}, {"depth": 2, "budget": 0.6}, {"budget": 1.0}], "depth grows"),
        ([{"depth": 1, "width": 0.9, "budget": 0.5}, {"depth": 2, "width": 0.5, "budget": 0.6}, {"budget": 1.0}],
         "width does not shrink"),
        ([{"depth": 1, "budget": 0.5}, {"depth": 3, "budget": 1.0}], "with all 4 blocks; got 3"),
        ([{"depth": 1, "budget": 0.5}, {"budget": 0.9}], "a budget of 1"),
        ([{"depth": 1, "budget": 0.5}, {"depth": 2, "budget": 0.4}, {"budget": 1.0}], "strictly ascending"),
    ],
)  # fmt: skip
def test_levels_that_do_not_grow_are_refused(levels: list[dict[str, Any]], message: str) -> None:
    text = said(lambda: given(levels))
    assert text.startswith("[fleet] levels: ") and message in text


def test_a_key_without_a_name_is_a_sentence() -> None:
    with pytest.raises(ConfigError, match="unknown key"):
        load_experiment({"": {"lr": 1}}, [])
    with pytest.raises(ConfigError):
        load_experiment({"rounds": 1}, [".lr=1"])
