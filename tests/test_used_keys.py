"""Every key that a user gives is used or refused: made-up ones by name, known ones where nothing reads them.

The second half gives every key of the schema to every method, option, choice and engine: the run that is assembled
holds something else than without the key, or the key is refused, or the run says that it is not used.
"""

import inspect
import itertools
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pydantic
import pytest
import tomli_w
import torch
from support import raises
from support.same import is_same

import fleetfit as ff
from fleetfit import names
from fleetfit.api.run import prepare
from fleetfit.config import Assembly, Experiment, load_experiment
from fleetfit.config.assemble.run import assemble
from fleetfit.config.keys import dump_section
from fleetfit.config.schema import LevelSection, ProfileSection
from fleetfit.core.local import Cosine, Exponential, Step
from fleetfit.core.tasks import get_task
from fleetfit.data import Data
from fleetfit.errors import ConfigError, FleetFitError
from fleetfit.factories import find_unused_parameters
from fleetfit.fleet.settings import read_settings
from fleetfit.hooks import FEDAVG, HOOKS, CoverageMean, Method, find_unused_parts
from fleetfit.methods.scalefl import scalefl
from fleetfit.planner import Plan

TINY: dict[str, Any] = {
    "rounds": 3,
    "data": {"name": "tiny:tiny_data", "partition": {"kind": "iid", "clients": 6}},
    "model": {"name": "tiny:tiny"},
    "fleet": {"groups": [{"budget": 0.4}, {"budget": 1.0}], "tolerance": 0.5},
    "local": {"epochs": 1},
}
MADE_UP = "zzyzx"


def get_message(make: Any) -> str:
    with pytest.raises(FleetFitError) as caught:
        make()
    return str(caught.value)


# ---- made-up keys ------------------------------------------------------------------------------------------------

PLACES = {
    "": {},
    "data": {},
    "data.partition": {},
    "data.server": {"data.server.name": "tiny:tiny_data"},
    "model": {},
    "model.derive": {},
    "peft": {},
    "method": {},
    "method.hooks": {},
    "method.options": {},
    "method.options.fedprox": {"method.options.fedprox.mu": 0.1},
    "fleet": {},
    "recorded": {},
    "recorded.latencies": {},
    "fleet.drift": {"fleet.drift.sd": 0.1},
    "fleet.slow": {"fleet.slow.fraction": 0.1},
    "fleet.availability": {"fleet.availability.online": 0.5},
    "fleet.links": {"fleet.links.lost_up": 0.5},
    "local": {},
    "local.schedule": {"local.schedule.kind": "cosine"},
    "cohort": {},
    "cohort.selection": {"cohort.selection": {"name": "loss"}},
    "attack": {"attack.kind": "sign_flip"},
    "secure": {"secure.min_clients": 2},
    "privacy": {},
    "engine": {},
    "evaluate": {},
    "evaluate.between": {"evaluate.between.clients": 2},
    "checkpoint": {},
    "compare": {},
}
LISTS = {
    "fleet.groups": [{"budget": 1.0, MADE_UP: 1}],
    "fleet.groups profile": [
        {"budget": 1.0, "profile": {**dict.fromkeys(list(ProfileSection.model_fields), 1.0), MADE_UP: 1}}
    ],
    "fleet.groups budget": [{"budget": {"parameters": 1.0, MADE_UP: 1.0}}],
    "fleet.levels": [{"budget": 1.0, MADE_UP: 1}],
}


def make_table(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def merge_tables(*tables: Mapping[str, Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for table in tables:
        for key, value in table.items():
            both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
            merged[key] = merge_tables(merged[key], value) if both else value
    return merged


def make_tables_with_made_up(place: str) -> dict[str, Any]:
    """Return tables with a made-up key at a place."""
    if place in LISTS:
        return make_table(place.partition(" ")[0], LISTS[place])
    inner = make_table(f"{place}.{MADE_UP}" if place else MADE_UP, 1)
    return merge_tables(*(make_table(key, value) for key, value in PLACES[place].items()), inner)


def every_section(schema: type[pydantic.BaseModel], place: str = "") -> Iterator[str]:
    yield place
    for key, field in schema.model_fields.items():
        for inner in sections_in(field.annotation):
            yield from every_section(inner, f"{place}.{key}".lstrip("."))


def sections_in(annotation: Any) -> Iterator[type[pydantic.BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        yield annotation
    for inner in getattr(annotation, "__args__", ()):
        yield from sections_in(inner)


def test_the_places_are_all_that_the_schema_has() -> None:
    places = {*PLACES, *LISTS, "fleet.groups.profile"}
    assert set(every_section(Experiment)) <= places


@pytest.mark.parametrize("place", [*PLACES, *LISTS])
def test_a_made_up_key_is_refused_by_name(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a file, by `--set`, as a keyword, and in a row, a setting, a grid and the tuned values of a comparison."""
    monkeypatch.chdir(tmp_path)
    made_up = make_tables_with_made_up(place)
    file = tmp_path / "run.toml"
    file.write_text(tomli_w.dumps(merge_tables(TINY, made_up)))
    section = place.partition(".")[0].partition(" ")[0]
    messages = [get_message(lambda: prepare(load_experiment(file))), get_message(lambda: ff.run(TINY, **made_up))]
    if place in PLACES:
        flat = [f"{key}={tomli_w.dumps({'x': value})[4:].strip()}" for key, value in PLACES[place].items()
                if not isinstance(value, dict)]  # fmt: skip
        if len(flat) == len(PLACES[place]):
            key = f"{place}.{MADE_UP}" if place else MADE_UP
            messages.append(get_message(lambda: ff.run(load_experiment(TINY, [*flat, f"{key}=1"]))))
    for message in messages:
        assert MADE_UP in message and section in message, message
    if place == "compare":
        return
    row, setting = {"compare": {"row": [made_up]}}, {"compare": {"setting": [{"label": "a", **made_up}]}}
    lists = wrap_values_in_lists(made_up)
    for table in (row, setting, {"compare": {"grid": lists}}, {"compare": {"tune": lists}}):
        file.write_text(tomli_w.dumps(merge_tables(TINY, table)))
        message = get_message(lambda: ff.compare(file, out=tmp_path / "out"))
        assert MADE_UP in message, message
    assert not (tmp_path / "out").exists()


def wrap_values_in_lists(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables with a list of one value for each value."""
    return {k: wrap_values_in_lists(v) if isinstance(v, Mapping) else [v] for k, v in table.items()}


@pytest.mark.parametrize("where", ["", "compare.row", "compare.setting", "compare.grid", "compare.tune"])
def test_made_up_sections_and_parts_of_a_comparison(where: str, tmp_path: Path) -> None:
    inner: Any = {MADE_UP: {"a": 1}}
    if where in ("compare.row", "compare.setting"):
        inner = [{"label": "a", **inner}]
    elif where:
        inner = {MADE_UP: {"a": [1]}}
    (tmp_path / "x.toml").write_text(tomli_w.dumps(merge_tables(TINY, make_table(where, inner) if where else inner)))
    assert MADE_UP in get_message(lambda: ff.compare(tmp_path / "x.toml", out=tmp_path / "out"))


def test_made_up_keys_of_files_that_a_run_file_names(tmp_path: Path) -> None:
    """Budget files, saved plans by path and in place, and the files of nodes."""
    budget = tmp_path / "budget.toml"
    budget.write_text(f"budget = 1.0\n{MADE_UP} = 1\n")
    message = get_message(lambda: load_experiment({}, [f"fleet.groups=[{{budget='{budget}'}}]"]))
    assert MADE_UP in message and str(budget) in message
    plan = tomllib.loads(assemble(load_experiment(TINY)).plan.to_toml())
    for bad in ({**plan, MADE_UP: 1}, {**plan, "level": [{**level, MADE_UP: 1} for level in plan["level"]]}):
        (tmp_path / "plan.toml").write_text(tomli_w.dumps(bad))
        assert MADE_UP in get_message(
            lambda: assemble(load_experiment(TINY, [f"fleet.levels={tmp_path / 'plan.toml'}"]))
        )
        assert MADE_UP in get_message(lambda bad=bad: assemble(load_experiment(TINY, fleet={"levels": bad})))  # type: ignore[misc]
    node = {"name": "a", "data": {"name": "digits"}}
    for bad in (
        {**node, MADE_UP: 1},
        merge_tables(node, {"data": {"partition": {"clients": 2, MADE_UP: 1}, "client": 0}}),
    ):
        (tmp_path / "node.toml").write_text(tomli_w.dumps(bad))

        def loaded() -> None:
            from fleetfit.fleet.settings import load_data

            load_data(read_settings(tmp_path / "node.toml"))

        message = get_message(loaded)
        assert MADE_UP in message, message


# ---- known keys --------------------------------------------------------------------------------------------------

VALUES: dict[str, Any] = {
    "name": "other",
    "seed": 5,
    "rounds": 4,
    "init_from": "nowhere",
    "callbacks": ["tensorboard"],
    "data.name": "digits",
    "data.partition.kind": "shards",
    "data.partition.clients": 7,
    "data.partition.seed": 9,
    "data.server.name": "tiny:tiny_server_data",
    "data.transform": "nowhere",
    "model.name": "mlp_2nn",
    "model.derive.exits": ["blocks.0"],
    "model.derive.heads": "own",
    "model.derive.head": "new",
    "model.derive.weights": "new",
    "model.derive.axes": {"stem": "whole"},
    "peft.name": "frozen",
    "fleet.cost": "multiply_adds",
    "fleet.tolerance": 0.8,
    "fleet.levels": [0.5, 1.0],
    "fleet.scaling": "depth",
    "fleet.reports_budget": True,
    "fleet.drift.sd": 0.3,
    "fleet.drift.jump": 0.2,
    "fleet.drift.low": 0.6,
    "fleet.slow.fraction": 0.6,
    "fleet.slow.factor": 3.0,
    "fleet.slow.link": 3.0,
    "fleet.jitter": 0.4,
    "fleet.availability.online": 0.6,
    "fleet.availability.spread": 0.5,
    "fleet.availability.rounds": 6.0,
    "fleet.availability.day": 9.0,
    "fleet.availability.leave": 0.3,
    "fleet.availability.trace": "nowhere.csv",
    "fleet.links.lost_down": 0.2,
    "fleet.links.lost_up": 0.3,
    "fleet.links.repeated": 0.4,
    "fleet.reports_labels": True,
    "fleet.groups": [{"budget": 0.4, "fraction": 0.2, "tolerance": 0.2, "name": "a"}, {"budget": 1.0, "name": "b"}],
    "method.name": "heterofl",
    "method.options": {"fedprox": {"mu": 0.2}},
    "method.hooks": {"choose_channels": "random"},
    "local.optimizer": "adamw",
    "local.epochs": 2,
    "local.batch_size": 9,
    "local.lr": 0.05,
    "local.momentum": 0.4,
    "local.nesterov": True,
    "local.betas": [0.8, 0.9],
    "local.eps": 1e-4,
    "local.weight_decay": 0.02,
    "local.clip_norm": 2.0,
    "local.clip_value": 2.0,
    "local.max_steps": 3,
    "local.patience": 2,
    "local.check_every": 3,
    "local.schedule_in_round": "cosine",
    "local.compress": "int8",
    "local.schedule.at": [1],
    "local.schedule.factor": 0.3,
    "local.schedule.minimum": 0.2,
    "local.schedule.kind": "cosine",
    "cohort.selection": "size",
    "cohort.fraction": 0.7,
    "cohort.count": 3,
    "cohort.deadline_s": 40.0,
    "cohort.on_deadline": "drop",
    "cohort.quorum": 0.5,
    "cohort.over_selection": 0.5,
    "attack.kind": "sign_flip",
    "attack.fraction": 0.5,
    "attack.among": "each",
    "secure.min_clients": 4,
    "secure.reconstruction_threshold": 0.8,
    "secure.clipping_range": 0.5,
    "secure.bits": 16,
    "privacy.clipping_norm": 0.5,
    "privacy.noise_multiplier": 1.5,
    "privacy.epsilon": 3.0,
    "privacy.delta": 1e-3,
    "privacy.key_file": "run.key",
    "engine.name": "processes",
    "engine.feature_cache_bytes": 1e6,
    "engine.speed": "fast",
    "engine.precision": "bf16",
    "engine.memory_format": "channels_last",
    "engine.compile": True,
    "evaluate.every": 2,
    "evaluate.between.clients": 2,
    "evaluate.between.client_samples": 5,
    "evaluate.between.samples": 9,
    "evaluate.between.statistics_samples": 33,
    "evaluate.batch_size": 17,
    "evaluate.split": "validation",
    "evaluate.patience": 1,
    "evaluate.batch_norm": ["batch"],
    "evaluate.statistics_samples": 33,
    "evaluate.clients": 2,
    "evaluate.samples": 9,
    "evaluate.whole_test_set": True,
    "evaluate.metrics": ["own_metric:share"],
    "evaluate.personal": "own",
    "checkpoint.every": 2,
    "checkpoint.keep": 5,
}
"""A value for every key of the schema, unlike its default."""

PROFILE = {"multiply_adds_per_s": 1e9, "down_bytes_per_s": 1e6, "up_bytes_per_s": 1e6}
RICH = merge_tables(
    TINY,
    {
        "fleet": {
            "groups": [{"budget": 0.4, "profile": PROFILE}, {"budget": 1.0, "profile": PROFILE}],
            "drift": {"jump": 0.1},
            "slow": {"fraction": 0.5},
            "availability": {"online": 0.7},
        },
        "cohort": {"deadline_s": 30.0},
        "local": {"schedule": {"kind": "step", "at": [2]}},
        "data": {"server": {"name": "tiny:tiny_server_data"}},
    },
)
"""The same run with everything that further keys need."""

ENGINE_KEYS = {"device": "cuda", "threads": 3, "workers": 2, "gpus": 0.5, "cpus": 0.5, "address": "x:1", "nodes": 3,
               "wait_s": 4.0, "deadline_s": 5.0}  # fmt: skip


def every_key(schema: type[pydantic.BaseModel], place: str = "") -> Iterator[str]:
    for key, field in schema.model_fields.items():
        inner = [s for s in sections_in(field.annotation) if s is not LevelSection]
        if inner and key not in ("groups", "levels"):
            for section in inner:
                yield from every_key(section, f"{place}{key}.")
        else:
            yield f"{place}{key}"


def test_every_key_of_the_schema_has_a_value_here() -> None:
    keys = {key for key in every_key(Experiment) if not key.startswith(("compare.", "recorded."))}
    assert keys == set(VALUES)
    assert {key for schedule in (Step, Cosine, Exponential) for key in schedule.model_fields} <= {
        key.rpartition(".")[2] for key in VALUES
    }


def describe_assembly(assembly: Assembly) -> dict[str, Any]:
    """Return all that a run holds when it is assembled, as values that can be compared."""
    a, f, s = assembly, assembly.federation, assembly.settings
    assert a.simulation is not None
    resources, experiment = a.simulation.resources, a.experiment
    return {
        "settings": (
            s.rounds,
            [s.local.at_round(s.rounds, r) for r in range(s.rounds)],
            s.evaluate_every,
            s.scope,
            s.between,
        ),
        "way": (s.links, s.quorum),
        "levels": (f.levels, f.cohort, f.seed, a.plan),
        "clients": {field.name: plain(getattr(f.clients, field.name)) for field in fields(f.clients)},
        "data": (a.data.name, plain(a.data.x), [plain(dict(part)) for part in a.simulation.parts]),
        "unlabeled": a.simulation.unlabeled is not None,
        "problem": (repr(f.problem.architecture), f.problem.init_from, plain(dict(f.problem.base))),
        "resources": {
            field.name: plain(getattr(resources, field.name))
            for field in fields(resources)
            if field.name not in ("availability", "conditions")
        },
        "availability": plain(resources.payload["availability"]),
        "attackers": a.attackers and a.attackers.clients,
        "secure": s.secure and (s.secure.rules, s.secure.grid),
        "conditions": (resources.conditions.batch_size, dict(resources.conditions.measured)),
        "run": (
            experiment.name,
            experiment.callbacks,
            dump_section(experiment.engine),
            dump_section(experiment.checkpoint),
        ),
    }


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    return value


def is_same_assembly(one: Assembly, other: Assembly) -> bool:
    a, b = one.federation.method, other.federation.method
    called = set(HOOKS) - (set(a.unused_hooks) & set(b.unused_hooks))
    compared = (*called, "needs_budgets", "needs_server_data", "fixed_keys")
    return describe_assembly(one) == describe_assembly(other) and all(
        is_same(getattr(a, n), getattr(b, n)) for n in compared
    )


def outcome(base: Mapping[str, Any], change: Mapping[str, Any], key: str, without: Assembly) -> str:
    """Return what becomes of a key: "used", "said", "refused", or "ignored"."""
    last = key.rpartition(".")[2]
    try:
        assembly = assemble(load_experiment(merge_tables(base, change)))
    except FleetFitError as error:
        named = {last, *key.split("."), str(get_value(change, key))}
        return "refused" if any(word in str(error) for word in named) else f"refused by another name: {error}"
    if any(one.key == key or one.key.startswith(f"{key}.") or key.startswith(f"{one.key}.") for one in assembly.unused):
        assert all(str(one) in assembly.notes for one in assembly.unused)
        return "said"
    return "ignored" if is_same_assembly(assembly, without) else "used"


def get_value(table: Any, key: str) -> Any:
    for part in key.split("."):
        table = table[part]
    return table


METHODS = names.list_names("methods")
QUICK = (("scalefl", "tiny"), ("adaptivefl", "tiny"), ("fedsgd", "rich"))
UNFIT = {"reefl", "feddf"}  # a vision transformer only; server data for every run


def check(base: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, str]:
    without = assemble(load_experiment(base))
    outcomes = {}
    for key, value in keys.items():
        if not is_given(base, key, value):
            outcomes[key] = outcome(base, make_table(key, value), key, without)
    assert set(outcomes.values()) <= {"used", "said", "refused"}, outcomes
    return outcomes


def is_given(base: Any, key: str, value: Any) -> bool:
    for part in key.split("."):
        if not isinstance(base, Mapping) or part not in base:
            return False
        base = base[part]
    return bool(base == value)


@pytest.mark.parametrize(
    ("method", "context"),
    [
        pytest.param(m, c, marks=() if (m, c) in QUICK else pytest.mark.slow)
        for m in METHODS
        if m not in UNFIT
        for c in ("tiny", "rich")
    ],
)
def test_every_key_beside_every_method(method: str, context: str) -> None:
    base = merge_tables(TINY if context == "tiny" else RICH, {"method": {"name": method}})
    outcomes = check(base, {key: value for key, value in VALUES.items() if key not in ("init_from", "data.name")})
    assert outcomes["local.lr"] == outcomes["rounds"] == outcomes["seed"] == "used"
    assert outcomes["cohort.on_deadline"] == ("said" if context == "tiny" else "used")
    assert outcomes["cohort.selection"] == ("refused" if method == "adaptivefl" else "used")
    once = "said" if method == "fedsgd" else "used"  # one step
    assert outcomes["local.epochs"] == outcomes["local.momentum"] == outcomes["local.max_steps"] == once
    assert outcomes["local.optimizer"] == "used" and outcomes["local.betas"] == "refused", (
        "its keys go with an optimizer"
    )
    assert outcomes["local.check_every"] == "said", "patience is not set"


@pytest.mark.parametrize("kind", ["options", "selection"])
def test_every_option_and_choice_beside_every_method(kind: str) -> None:
    """An option changes the method, or is refused, or the run says that it does nothing."""
    place = "method.options" if kind == "options" else "cohort.selection"
    for method in METHODS:
        if method in UNFIT:
            continue
        base = merge_tables(TINY, {"method": {"name": method}})
        without = assemble(load_experiment(base))
        for name in names.list_names(kind):
            change = make_table(f"{place}.{name}", {}) if kind == "options" else make_table(place, {"name": name})
            if kind == "selection" and name == "uniform":
                continue  # which is the default
            key = f"{place}.{name}" if kind == "options" else place
            try:
                assembly = assemble(load_experiment(merge_tables(base, change)))
            except FleetFitError as error:
                message = str(error)
                named = name in message or name.rpartition("_")[2] in message
            else:
                named = any(one.key == key for one in assembly.unused) or not is_same_assembly(assembly, without)
            assert named or name == "in_time", (method, name)  # which acts in rounds with a deadline


def test_a_default_that_is_written_as_a_list_is_no_unused_key() -> None:
    """As every other default that a file, or the record of a run, spells out: TOML has no tuples."""
    method = {"name": "adaptivefl", "p": 1, "widths": [0.4, 0.66]}
    assert not assemble(load_experiment(merge_tables(TINY, {"method": method}))).unused


@pytest.mark.parametrize("engine", names.list_names("engines"))
@pytest.mark.parametrize("key", ENGINE_KEYS)
def test_a_key_of_another_engine_is_refused(engine: str, key: str) -> None:
    takes = inspect.signature(names.resolve("engines", engine)).parameters
    base = merge_tables(TINY, {"engine": {"name": engine, key: ENGINE_KEYS[key]}})
    if key in takes:
        if engine != "flower":
            assert assemble(load_experiment(base)).experiment.engine.settings[key] == ENGINE_KEYS[key]
        return
    assert f'[engine] {engine} has no "{key}"' in get_message(lambda: assemble(load_experiment(base)))


def test_every_hyperparameter_that_another_switches_off_says_so() -> None:
    """For each method whose first switch is off, the parameters that only it needs are named, and no other is."""
    off = {
        "scalefl": ({"beta": 0.0}, {"temperature": 5.0, "warmup": 0.5}, {"printed": True}),
        "depthfl": ({"weight": 0.0}, {"temperature": 5.0, "ramp": 9}, {"alpha": 0.3}),
        "inclusivefl": ({"beta": 0.0}, {"damped": True}, {}),
        "feddf": ({"steps": 0}, {"temperature": 5.0, "lr": 0.1, "check_every": 7}, {}),
    }
    for name, (switch, idle, acting) in off.items():
        assembly = assemble(load_experiment(merge_tables(TINY, {"method": {"name": name, **switch, **idle, **acting}})))
        assert {one.key for one in assembly.unused} == {f"method.{key}" for key in idle}, name


SOFTENED = [
    name
    for name in names.list_names("methods")
    if "temperature" in inspect.signature(names.resolve("methods", name)).parameters
]
TASKS = ("classification", "next_token", "regression", "multi_label")


@pytest.mark.parametrize("task", TASKS)
def test_a_temperature_without_effect_in_a_task_is_named(task: str) -> None:
    """Two samples of two outputs: the divergence of a regression alone is the same at each temperature."""
    teacher, student = torch.tensor([[2.0, -1.0], [0.5, 0.0]]), torch.tensor([[0.0, 1.0], [3.0, -2.0]])
    y = torch.zeros(2, dtype=torch.int64)
    cold, warm = (get_task(task).divergence(teacher, student, temperature, y) for temperature in (1.0, 5.0))
    expected = {"temperature"} if bool(cold == warm) else set()
    assert expected == ({"temperature"} if task == "regression" else set())
    for name in SOFTENED:
        factory = names.resolve("methods", name)
        assert find_unused_parameters(factory, {"temperature": 5.0}, task).keys() == expected, name


@pytest.mark.parametrize("name", ["fleetfit", "scalefl"])
def test_a_run_names_a_temperature_of_a_regression(name: str, tmp_path: Path) -> None:
    x = torch.randn(60, 5, generator=torch.Generator().manual_seed(0))
    splits = {"train": torch.arange(48), "test": torch.arange(48, 60)}
    table: dict[str, Any] = {
        "rounds": 1,
        "model": {"name": "mlp"},
        "local": {"epochs": 1},
        "data": {"name": Data("lines", x, x[:, :2], splits, 2, task="regression"),
                 "partition": {"kind": "iid", "clients": 4}},
    }  # fmt: skip
    softened = {"name": name, "temperature": 5.0}
    assembly = assemble(load_experiment({**table, "method": softened}))
    assert [one.key for one in assembly.unused] == ["method.temperature"]
    with raises(ConfigError, key="method.temperature"):
        ff.run(table, method=softened, out=tmp_path / "run")


def test_a_part_without_effect_is_named_with_its_reason() -> None:
    """A method may be a function, too: its parameter with its default value is no mistake."""
    shuffled = {"name": "adaptivefl", "hooks": {"choose_clients": "uniform"}}
    said_of = {
        "method.hooks.choose_clients": (shuffled, "adaptivefl never calls it: it chooses clients in a way of its own"),
        "method.options.fedadam": (
            {"name": "fedavg", "options": {"fedadam": {"lr": 0.1}}, "hooks": {"step": "fleetfit.hooks:take_mean"}},
            "method.hooks.step takes the place of all that it would do",
        ),
        "method.beta": (
            {"name": scalefl, "beta": 0.3, "hooks": {"make_loss": "fleetfit.hooks.fedavg:last_exit_loss"}},
            "method.hooks.make_loss takes the place of all that it would do",
        ),
    }
    for key, (spec, why) in said_of.items():
        assert find_unused_parts(spec) == {key: why}
    assert not find_unused_parts({"name": scalefl, "beta": 0.1})


def test_weights_that_no_average_asks_for_are_named() -> None:
    """A method that declares to average without weights; with another aggregator than its own they count again."""

    class Unweighted(CoverageMean):
        def add(self, update: Any, weight: float) -> None:
            super().add(update, 1.0)

    def unweighted() -> Method:
        return Method(make_aggregator=Unweighted, unused_hooks=("weigh",))

    def find(name: Any, **hooks: Any) -> dict[str, str]:
        return find_unused_parts({"name": name, "hooks": {"weigh": lambda update: 3.0, **hooks}})

    ((part, reason),) = find(unweighted).items()
    assert part == "method.hooks.weigh" and "unweighted" in reason
    assert not find("fedavg") and not find(unweighted, make_aggregator=FEDAVG.make_aggregator)


def test_a_method_replaces_only_what_another_hook_calls() -> None:
    with raises(ConfigError, "choose_clients, choose_channels, weigh", "make_loss"):
        Method(unused_hooks=("make_loss",))


def assign_first(federation: Any, server: Any, rng: Any) -> Any:
    return [(0, 0, federation.levels[0].submodel)]


def undeclared() -> Method:
    return Method(assign=assign_first)


def declared() -> Method:
    return Method(assign=assign_first, unused_hooks=("choose_clients", "choose_channels"))


def test_a_plug_in_that_declares_nothing_uses_every_key() -> None:
    """The exception: no code is read to find whether its `assign` calls `choose_clients`; what is declared is found."""
    for method, unused in (
        ("undeclared", set()),
        ("declared", {"method.hooks.choose_clients", "method.hooks.choose_channels"}),
    ):
        spec = {
            "name": f"test_used_keys:{method}",
            "hooks": {"choose_clients": "uniform", "choose_channels": "rolling"},
        }
        assert set(find_unused_parts(spec)) == unused


def test_reefl_without_ree_names_what_only_ree_needs() -> None:
    model = {"name": "vit", "hidden": 8, "depth": 2, "attention_heads": 2, "patch": 2}
    idle = {"modulate": False, "at": "exits", "queue": "original", "heads": 2, "bottleneck": 4, "mlp": 1.0}
    method = {"name": "reefl", "ree": False, "zeta": 0.3, **idle}
    assembly = assemble(load_experiment({**TINY, "model": model, "method": method}))
    assert {one.key for one in assembly.unused} == {f"method.{key}" for key in idle}


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["method.name=adaptivefl", "method.hooks.choose_clients=uniform"], "method.hooks.choose_clients"),
        (["method.name=adaptivefl", "method.hooks.choose_channels=rolling"], "method.hooks.choose_channels"),
        (["method.name=adaptivefl", "fleet.levels=halving"], "fleet.levels"),
        (["method.name=all_large", "fleet.levels=halving"], "fleet.levels"),
        (["method.options.fedadam.lr=0.1", "method.hooks.step=fleetfit.hooks:take_mean"], "method.options.fedadam"),
        (["method.beta=0.3", "method.hooks.make_loss=fleetfit.hooks.fedavg:last_exit_loss"], "method.beta"),
        (["data.server.name=tiny:tiny_server_data"], "data.server"),
        (["cohort.on_deadline=drop"], "cohort.on_deadline"),
        (["evaluate.batch_norm=['batch']", "evaluate.statistics_samples=9"], "evaluate.statistics_samples"),
        (["fleet.drift.jump=0.0", "fleet.drift.low=0.5"], "fleet.drift.low"),
        (["model.name=cnn", "data.name=digits", "model.group=4"], "model.group"),
    ],
)
def test_what_is_asked_for_and_not_used_is_refused(overrides: list[str], key: str, tmp_path: Path) -> None:
    """From `--set` it is refused; from a file it is a note, but for what contradicts the method of the same file."""
    message = get_message(lambda: ff.run(load_experiment(TINY, overrides), out=tmp_path / "run"))
    section, _, inner = key.partition(".")
    assert f"[{section}] {inner} " in message
    assert not (tmp_path / "run").exists()
    table = merge_tables(TINY, *(merge_tables({}, parse_tables(text)) for text in overrides))
    if key.startswith(("method.hooks", "method.options")):
        assert f"[{section}] {inner} " in get_message(lambda: ff.run(table, out=tmp_path / "run"))
    else:
        prepared = prepare(load_experiment(table), tmp_path / "run")
        assert any(note.startswith(f"[{section}] {inner} ") for note in prepared.notes)
        again = ff.load(tmp_path / "run")
        assert again.notes == prepared.notes  # so that a resumed run's summary is that of an unbroken one
        prepared._take_engine().close()


def parse_tables(text: str) -> dict[str, Any]:
    from fleetfit.config.load import parse_override

    return parse_override(text)


def test_a_key_that_says_what_is_so_anyway_is_no_mistake(tmp_path: Path) -> None:
    """The file that a run writes, with every default in it, is a run file without a complaint."""
    first = assemble(load_experiment(TINY))
    assert not first.unused
    from fleetfit.config import to_toml

    (tmp_path / "config.toml").write_text(to_toml(first.experiment))
    assert not assemble(load_experiment(tmp_path / "config.toml")).unused


# ---- order and names ---------------------------------------------------------------------------------------------


def test_the_order_of_overrides_does_not_matter() -> None:
    texts = ["method.name=fedavg", "method.hooks.choose_channels=rolling", "method.options.fedprox.mu=0.3"]
    methods = [load_experiment(TINY, order).method for order in itertools.permutations(texts)]
    assert all(one == methods[0] for one in methods)
    assert methods[0].hooks == {"choose_channels": "rolling"} and methods[0].options == {"fedprox": {"mu": 0.3}}
    assert '"beta"' in get_message(lambda: assemble(load_experiment(TINY, ["method.beta=0.3", "method.name=fedavg"])))


def test_options_and_hooks_survive_an_override_of_the_method() -> None:
    base = merge_tables(TINY, {"method": {"name": "scalefl", "beta": 0.2, "hooks": {"choose_channels": "rolling"},
                                  "options": {"fedprox": {"mu": 0.3}}}})  # fmt: skip
    for experiment in (load_experiment(base, ["method.name=fedavg"]), load_experiment(base, method="fedavg")):
        assert experiment.method.hooks == {"choose_channels": "rolling"} and experiment.method.options == {
            "fedprox": {"mu": 0.3}
        }
        assert experiment.method.settings == {} and experiment.request.dropped == ("method.beta",)


def test_plans_know_their_keys() -> None:
    assert " formt" in get_message(lambda: Plan.from_table({"format": 3, "formt": 1}))


def test_a_single_hook_that_is_no_text_is_a_sentence() -> None:
    for value in ([1], {"a": 1}, 5, None):
        with raises(ConfigError, "prefix", value, key="method.hooks.choose_channels"):
            assemble(load_experiment(TINY, method={"name": "fedavg", "hooks": {"choose_channels": value}}))
