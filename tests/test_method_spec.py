"""From a spec to a method: hyperparameters, options, single hooks, who wins; and what runs without an import path."""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import Expected, raises
from support.training import make_job
from tiny import plain, tiny_federation
from torch import Tensor, nn

from fleetfit.config import load_experiment, to_table
from fleetfit.config.load import restore_experiment
from fleetfit.core import Device, Job, Server, Update
from fleetfit.engines.local import local as local_engine
from fleetfit.engines.processes import processes
from fleetfit.errors import ConfigError
from fleetfit.hooks import (
    FEDAVG,
    Method,
    build,
    choose_uniformly,
    is_portable,
    keep_prefix,
    weigh_by_samples,
    weigh_equally,
)
from fleetfit.hooks.build import _add_option
from fleetfit.methods.scalefl import scalefl
from fleetfit.rounds import Settings, run, run_round, start
from fleetfit.submodel import Submodel, random, rolling, window

# ---- parts, named as `test_method_spec:...` -------------------------------------------------


def counted() -> Method:
    return Method(weigh=weigh_equally)


def first_weight(update: Update) -> float:
    return 1.0


def second_weight(update: Update) -> float:
    return 2.0


def weighing_first() -> Method:
    return Method(weigh=first_weight)


def weighing_second() -> Method:
    return Method(weigh=second_weight)


def shifted(by: int, seen: list[int] | None = None) -> Callable[[Job, Device], Job | None]:
    def adapt(job: Job, device: Device) -> Job:
        return replace(job, seed=job.seed * 10 + by)

    return adapt


def adapting_a() -> Method:
    return Method(adapt_job=shifted(1))


def adapting_b() -> Method:
    return Method(adapt_job=shifted(2))


def noting_a() -> Method:
    return Method(annotate=lambda federation, server, update: {"a": update.client, "both": "a"})


def noting_b() -> Method:
    return Method(annotate=lambda federation, server, update: {"b": update.level, "both": "b"})


def remembering(key: str) -> Method:
    def remember(job: Job, device: Device, result: Any) -> Any:
        memory = dict(device.memory or {})
        return {**memory, key: memory.get(key, 0) + 1}

    return Method(update_client_memory=remember)


def remembering_a() -> Method:
    return remembering("a")


def remembering_b() -> Method:
    return remembering("b")


def adapting_c() -> Method:
    return Method(adapt_job=shifted(3))


def declining() -> Method:
    return Method(adapt_job=lambda job, device: None)


def costing(value: float) -> Method:
    def penalty(job: Job, device: Device) -> Callable[[nn.Module], Tensor]:
        classes = device.data.classes
        return lambda module: torch.tensor(value if (job.client, classes) == (5, 4) else 0.0)

    return Method(make_penalty=penalty)


def costing_nothing() -> Method:
    return Method(make_penalty=lambda job, device: None)


def no_method() -> int:
    return 3


HERE = "test_method_spec"


# ---- hyperparameters -------------------------------------------------


def test_the_empty_spec_is_fedavg() -> None:
    assert build({}).weigh is weigh_by_samples
    assert build({"name": "exclusivefl"}) == FEDAVG


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"name": "scalefl", "beta": "much"}, Expected("[method] scalefl: beta", "'much'", key="method.beta")),
        ({"name": "scalefl", "beta": True}, Expected("[method] scalefl: beta", "True", key="method.beta")),
        ({"name": "scalefl", "printed": "yes"}, Expected("[method] scalefl: printed", "'yes'", key="method.printed")),
        (
            {"name": "scalefl", "scaling": "depht"},
            Expected("[method] scalefl: scaling", '"depth"?', key="method.scaling"),
        ),
        ({"name": "scalefl", "temprature": 2.0}, Expected('"temprature"', '"temperature"?', key="method.temprature")),
        ({"name": "fedavg", "beta": 0.1}, Expected("fedavg", '"beta"', "nothing", key="method.beta")),
        ({"name": "scalfl"}, Expected('"scalefl"?', key="method.name")),
        ({"name": 3}, Expected("methods", 3, key="method.name")),
        ({"name": f"{HERE}:no_method"}, Expected(f"{HERE}:no_method", "Method", "int", key="method")),
        ({"name": f"{HERE}:no_such"}, Expected('"no_such"', key="method.name")),
        ({"name": "fedavg", "options": {"fedprocks": {}}}, Expected('"fedprocks"', '"fedprox"?', key="method.options")),
        (
            {"name": "fedavg", "options": {"fedprox": {"my": 1.0}}},
            Expected("[method.options.fedprox]", '"my"', '"mu"?', key="method.options.fedprox.my"),
        ),
        (
            {"name": "fedavg", "options": {"fedprox": {"mu": "a lot"}}},
            Expected("[method.options.fedprox] fedprox: mu", "'a lot'", key="method.options.fedprox.mu"),
        ),
        (
            {"name": "fedavg", "hooks": {"choose_chanels": "rolling"}},
            Expected('"choose_chanels"', '"choose_channels"?', key="method.hooks.choose_chanels"),
        ),
        (
            {"name": "fedavg", "hooks": {"choose_channels": "roling"}},
            Expected("prefix", '"rolling"?', key="method.hooks.choose_channels"),
        ),
        (
            {"name": "fedavg", "hooks": {"make_loss": "something"}},
            Expected('"module:function"', "'something'", key="method.hooks.make_loss"),
        ),
        ({"name": "fedavg", "hooks": {"weigh": 3}}, Expected("by_samples, by_count", 3, key="method.hooks.weigh")),
        ({"name": "fedavg", "hooks": {"weigh": f"{HERE}:missing"}}, Expected('"missing"')),
    ],
    ids=lambda v: str(v)[:60],
)
def test_wrong_updates_are_named(spec: dict[str, Any], expected: Expected) -> None:
    for _ in range(2):  # what failed is not kept
        with raises(ConfigError, expected):
            build(spec)


@pytest.mark.parametrize(
    ("bad", "key"),
    [
        ({"options": ["fedprox"]}, "method.options"),
        ({"options": {"fedprox": 0.1}}, "method.options.fedprox"),
        ({"hooks": ["rolling"]}, "method.hooks"),
        ({"options": "fedprox"}, "method.options"),
    ],
    ids=str,
)
def test_tables_that_are_none_are_refused(bad: dict[str, Any], key: str) -> None:
    with raises(ConfigError, f"[method] {key.removeprefix('method.')}", key=key):
        load_experiment({"method": {"name": "fedavg", **bad}})


def test_equal_specs_are_built_once() -> None:
    assert build({"name": "scalefl", "beta": 0.2, "warmup": 0.1}) is build(
        {"warmup": 0.1, "beta": 0.2, "name": "scalefl"}
    )
    assert build({"name": "scalefl", "beta": 0.2}) is not build({"name": "scalefl", "beta": 0.3})


# ---- single hooks -------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "function"), [("prefix", keep_prefix), ("window", window), ("rolling", rolling), ("random", random)]
)
def test_named_channels(kind: str, function: Any) -> None:
    method = build({"name": "scalefl", "hooks": {"choose_channels": kind}})
    assert method.choose_channels is function
    assert method.weigh is weigh_equally  # the rest stays


def test_other_hooks_by_name() -> None:
    assert (
        build({"name": "scalefl", "hooks": {"weigh": "by_samples", "choose_clients": "uniform"}}).weigh
        is weigh_by_samples
    )
    assert build({"name": "scalefl", "hooks": {"choose_clients": "uniform"}}).choose_clients is choose_uniformly
    assert build({"name": "fedavg", "hooks": {"weigh": f"{HERE}:first_weight"}}).weigh(None) == 1.0  # type: ignore[arg-type]


def test_a_hook_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "heavy.py"
    path.write_text("def heavy(update):\n    return 3.0\n")
    assert build({"name": "fedavg", "hooks": {"weigh": f"{path}:heavy"}}).weigh(None) == 3.0  # type: ignore[arg-type]


# ---- options -------------------------------------------------


def with_options(*options: str, name: str = "fedavg", **hooks: Any) -> dict[str, Any]:
    return {"name": name, "options": {f"{HERE}:{o}": {} for o in options}} | ({"hooks": hooks} if hooks else {})


def test_options_fill_free_hooks() -> None:
    assert build(with_options("counted")).weigh is weigh_equally


def test_a_hook_set_twice_is_refused() -> None:
    with raises(ConfigError, f'"{HERE}:weighing_first"', '"weigh"', "method.hooks.weigh = "):
        build(with_options("weighing_first", name="scalefl"))
    with raises(ConfigError, f'"{HERE}:weighing_second"', '"weigh"'):
        build(with_options("weighing_first", "weighing_second"))


def test_hooks_name_the_winner() -> None:
    for winner, expected in (("first_weight", 1.0), ("second_weight", 2.0)):
        spec = with_options("weighing_first", "weighing_second", weigh=f"{HERE}:{winner}")
        assert build(spec).weigh(None) == expected  # type: ignore[arg-type]
    assert build(with_options("weighing_first", name="scalefl", weigh="by_samples")).weigh is weigh_by_samples


def test_adapts_chain() -> None:
    """seed -> 10 seed + i for option i: 0 -> 1 -> 12 -> 123; the method's own (fedsgd's) comes first."""
    federation, simulation = tiny_federation({"name": "fedavg"})
    job, device = make_job(federation, 5, 2, seed=0), simulation.device(5)

    def adapted(*options: str, name: str = "fedavg") -> Job | None:
        return build(with_options(*options, name=name)).adapt_job(job, device)

    log = adapted("adapting_a", "adapting_b", "adapting_c")
    assert log is not None and log.seed == 123
    log = adapted("adapting_b", name="fedsgd")
    assert log is not None and (log.seed, log.local.batch_size) == (2, "all")
    assert adapted("adapting_a", "declining", "adapting_b") is None
    assert adapted("declining", "adapting_b") is None


def adapting_to_the_client() -> Method:
    return Method(adapt_job=lambda job, device: replace(job, seed=1000 * job.seed + len(device.memory)))


def observing(place: list[Any]) -> Method:
    def observe(federation: Any, server: Server, *arguments: Any) -> Server:
        place.append(arguments)
        return replace(server, round=server.round + 1)

    return Method(update_server_memory=observe)


def test_each_of_a_chain_has_the_device() -> None:
    federation, simulation = tiny_federation({"name": "fedavg"})
    job, device = make_job(federation, 5, 2, seed=0), replace(simulation.device(5), memory={"kept": 1})
    two = {"a": adapting_to_the_client(), "b": adapting_to_the_client()}
    method = functools.reduce(lambda one, name: _add_option(one, two[name], name, set()), two, Method())
    adapted_job = method.adapt_job(job, device)
    assert adapted_job is not None and adapted_job.seed == 1001


def test_observers_are_chained() -> None:
    federation, _ = tiny_federation({"name": "fedavg"})
    first: list[Any] = []
    second: list[Any] = []
    method = _add_option(_add_option(Method(), observing(first), "a", set()), observing(second), "b", set())
    server = start(federation)
    assert method.update_server_memory(federation, server, ["jobs"], ["updates"]).round == server.round + 2  # type: ignore[call-arg,arg-type]
    assert first == second == [(["jobs"], ["updates"])]


@pytest.mark.parametrize("order", [("adapting_a", "adapting_c"), ("adapting_c", "adapting_a")], ids=str)
def test_the_order_of_a_chain_is_that_of_the_options(order: tuple[str, str]) -> None:
    """A function in place of a name, which makes the spec one that cannot travel, must not turn the options around."""
    federation, simulation = tiny_federation({"name": "fedavg"})
    job, device = make_job(federation, 5, 2, seed=0), simulation.device(5)
    by_name = build(with_options(*order, weigh="by_count")).adapt_job(job, device)
    by_object = build(with_options(*order, weigh=weigh_equally)).adapt_job(job, device)
    assert by_name is not None and by_object is not None
    assert by_name.seed == by_object.seed


def costing_1() -> Method:
    return costing(1.0)


def costing_20() -> Method:
    return costing(20.0)


def costing_300() -> Method:
    return costing(300.0)


def test_notes_of_two_parts_are_both_in_the_report() -> None:
    """The later part has the last word on a key that both have."""
    method = build({"name": "test_method_spec:noting_a", "options": {"test_method_spec:noting_b": {}}})
    piece = Submodel({}, (1,))
    update = Update(0, 0, 7, 2, piece, piece, {}, 5, {})
    federation, _ = tiny_federation({"name": "fedavg"})
    assert method.annotate(federation, start(federation), update) == {"a": 7, "b": 2, "both": "b"}


def test_both_parts_remember_and_find_their_own_again() -> None:
    spec = {"name": "test_method_spec:remembering_a", "options": {"test_method_spec:remembering_b": {}}}
    federation, simulation = tiny_federation(spec, clients=3, cohort=3)
    engine = local_engine(simulation)
    *_, _ = run(federation, engine, Settings(3, plain(lr=0.1, batch_size=8)), start(federation))
    memories = [memories["memory"] for memories in engine.dump_memories().values()]
    assert len(memories) == 3 and all(memory == {"a": 3, "b": 3} for memory in memories)


def test_feddyn_and_reefl_remember_side_by_side() -> None:
    """Two built-in parts keep something at the client, each under its own name, and none loses the other's."""
    spec = {"name": "reefl", "estimate": "kept", "options": {"feddyn": {}}}
    federation, simulation = tiny_federation(spec, clients=3, cohort=3)
    engine, settings = local_engine(simulation), Settings(2, plain(lr=0.1, batch_size=8))
    stored = []
    for done in run(federation, engine, settings, start(federation)):
        assert not done.report["failures"]
        stored.append({client: one["memory"] for client, one in engine.dump_memories().items()})
    for client in ("0", "1", "2"):
        first, second = (memories[client] for memories in stored)
        assert first.keys() == second.keys() == {"exit_losses", "gradient"}
        assert not torch.equal(first["exit_losses"]["losses"], second["exit_losses"]["losses"])
        before, after = (next(iter(memory["gradient"]["state"].values())) for memory in (first, second))
        assert not torch.equal(before, after) and not torch.equal(before, torch.zeros_like(before))


def test_penalties_add_up() -> None:
    federation, simulation = tiny_federation({"name": "fedavg"})
    job, device = make_job(federation, 5, 2), simulation.device(5)

    def total(*options: str, **plus: Any) -> float | None:
        spec = with_options(*options)
        spec["options"] |= plus
        penalty = build(spec).make_penalty(job, device)
        return None if penalty is None else float(penalty(nn.Linear(1, 1)))

    assert total() is None
    assert total("costing_1") == 1.0
    assert total("costing_1", "costing_20") == 21.0
    assert total("costing_1", "costing_20", "costing_300") == 321.0
    assert total("costing_nothing", "costing_20") == 20.0
    assert total("costing_20", "costing_nothing") == 20.0
    assert total("costing_nothing") is None


# ---- functions without an import path -------------------------------------------------


def test_is_portable() -> None:
    assert is_portable({"name": "scalefl", "beta": 0.1, "hooks": {"choose_channels": "rolling"}})
    assert not is_portable({"name": scalefl})
    assert not is_portable({"name": "fedavg", "hooks": {"weigh": weigh_equally}})
    assert not is_portable({"name": "fedavg", "options": {"fedprox": {"mu": torch.ones(1)}}})


def test_objects_stand_in_for_names() -> None:
    method = Method(weigh=weigh_equally)
    assert build({"name": method}) is method or build({"name": method}) == method
    assert build({"name": scalefl, "beta": 0.0}).weigh is weigh_equally
    assert build({"name": lambda pull=1: method, "pull": 2}) == method
    with raises(ConfigError, '"pul"', '"pull"?', key="method.pul"):
        build({"name": lambda pull=1: method, "pul": 2})
    assert build({"name": "fedavg", "hooks": {"weigh": lambda update: 4.0}}).weigh(None) == 4.0  # type: ignore[arg-type]


def test_functions_without_an_import_path_work_on_local() -> None:
    """A lambda as weight, and a Method made by hand: the same bits as by their names."""
    states = []
    for spec in (
        {"name": "fedavg", "hooks": {"weigh": lambda update: 1.0}},
        {"name": Method(weigh=weigh_equally)},
        {"name": "exclusivefl", "hooks": {"weigh": "by_count"}},
    ):
        federation, simulation = tiny_federation(spec)
        *_, last = run(federation, local_engine(simulation), Settings(2, plain(lr=0.1)), start(federation))
        assert not last.report["failures"]
        states.append(last.server.state)
    assert all(torch.equal(states[0][n], s[n]) for s in states[1:] for n in s)


def test_they_are_refused_where_they_cannot_be_rebuilt() -> None:
    federation, simulation = tiny_federation({"name": "fedavg", "hooks": {"weigh": lambda update: 1.0}})
    engine = processes(simulation, workers=1)
    try:
        with raises(ConfigError, 'engine.name = "local"'):
            run_round(federation, engine, Settings(1, plain()), start(federation))
    finally:
        engine.close()


# ---- a method's own defaults of keys --------------------------------------------------------------------------------


def with_defaults() -> Method:
    return Method(
        defaults={"local.optimizer": "adam", "local.lr": 0.5, "cohort.fraction": 0.5, "evaluate.batch_norm": ["batch"]}
    )


def with_wrong_default() -> Method:
    return Method(defaults={"local.learning_rate": 0.5})


def test_given_keys_override_a_method_s_defaults() -> None:
    own = {"method": f"{HERE}:with_defaults"}
    experiment = load_experiment(own)
    assert (experiment.local.optimizer, experiment.local.lr, experiment.local.eps) == ("adam", 0.5, 1e-8)
    assert experiment.cohort.fraction == 0.5 and experiment.evaluate.batch_norm == ["batch"]
    assert load_experiment({**own, "local": {"lr": 0.25}}, ["evaluate.batch_norm=['static']"]).local.lr == 0.25
    assert load_experiment(own, ["local.optimizer=sgd"]).local.momentum == 0.9
    assert load_experiment(own, cohort={"count": 3}).cohort.fraction is None, "a run takes one of the two"
    assert load_experiment({"method": "fedavg"}).local.optimizer == "sgd"


def test_defaults_of_a_method_go_with_it() -> None:
    """Another method named by an override has its own; a run folder holds every value and takes none anew."""
    experiment = load_experiment({"method": f"{HERE}:with_defaults"})
    assert load_experiment(experiment, ["method.name=fedavg"]).local.optimizer == "sgd"
    table = {**to_table(experiment), "local": {"lr": 0.25}}
    assert restore_experiment(table).local.optimizer == "sgd"


def test_a_default_that_no_run_file_has_is_refused() -> None:
    with raises(ConfigError, "learning_rate"):
        load_experiment({"method": f"{HERE}:with_wrong_default"})


def test_options_add_their_declarations() -> None:
    option = Method(unused_hooks=("weigh",), fixed_keys=("epochs",), defaults={"local.lr": 0.1})
    method = _add_option(Method(defaults={"local.lr": 0.2, "rounds": 5}), option, "a", set())
    assert method.unused_hooks == ("weigh",) and method.fixed_keys == ("epochs",)
    assert method.defaults == {"local.lr": 0.1, "rounds": 5}
