"""Optimizers of local training: PyTorch's own, bit for bit, as a run file names them; a setting has one declaration."""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from same_bits import SETTINGS, finished, fleets, same
from support import Expected, raises
from support.training import make_job, tiny_fleet, train_job
from tiny import plain
from torch.nn import functional as F

import fleetfit as ff
from fleetfit.anatomy import build_module
from fleetfit.config import load_experiment
from fleetfit.config.assemble.levels import plan_levels
from fleetfit.config.assemble.rounds import build_settings
from fleetfit.config.assemble.run import assemble, assemble_fleet
from fleetfit.config.load import complete_experiment, parse_overrides
from fleetfit.config.merge import merge_tables
from fleetfit.core import DataDescription, Local, NodeDescription
from fleetfit.core.local import OPTIMIZERS, LocalSection
from fleetfit.cost import training_memory
from fleetfit.engines.local import local as local_engine
from fleetfit.engines.processes import processes
from fleetfit.errors import ConfigError
from fleetfit.rounds import Settings, run_round, start
from fleetfit.seeds import make_torch_rng
from fleetfit.training.batches import count_steps, iter_epochs
from fleetfit.training.clock import count_planned_passes, count_validation_samples

KINDS: dict[str, Any] = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
VIT = {
    "rounds": 3,
    "data": {"name": "digits", "partition": {"kind": "iid", "clients": 4}},
    "model": {"name": "vit", "hidden": 16, "depth": 2, "attention_heads": 2, "patch": 4},
    "peft": {"name": "lora", "rank": 4},
    "method": {"name": "depthfl"},
    "fleet": {"groups": [{"budget": 1.0}]},
    "cohort": {"fraction": 1.0},
    "local": {"optimizer": "adamw", "lr": 3e-3, "epochs": 1},
    "evaluate": {"every": 0},
}


# ---- one declaration -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_job_has_the_settings_of_the_section(optimizer: Any) -> None:
    """Of a run file's `[local]`, and from `[cohort]` the deadline; each key has one declaration."""
    assert set(Local.model_fields) - set(LocalSection.model_fields) == {"deadline_s", "late"}
    assert set(vars(Local)["__annotations__"]) == {"deadline_s", "late"}
    local = build_settings(load_experiment({"local": {"optimizer": optimizer}})).local
    assert local.at_round(1, 0) == Local(optimizer=optimizer)
    assert local.optimizer_settings == dict(OPTIMIZERS[optimizer])


def has_rate(value: Any, lr: float) -> bool:
    """Return whether a value is this learning rate, or a table of settings with it; a round's report is neither."""
    if not isinstance(value, dict) or "failures" in value:
        return isinstance(value, float) and value == lr
    inner = value.get("local")
    return bool(value.get("lr") == lr or (isinstance(inner, dict) and inner.get("lr") == lr))


def test_the_learning_rate_passes_at_most_seven_modules() -> None:
    """Every module with a function that has it, as a number or in a table, from the run file to the optimizer."""
    lr, modules = 0.0123456, set[str]()

    def note(frame: FrameType, event: str, result: Any) -> None:
        name = frame.f_globals.get("__name__", "")
        is_new = event == "return" and name.startswith("fleetfit.") and name not in modules
        if is_new and any(has_rate(value, lr) for value in (result, *frame.f_locals.values())):
            modules.add(name)

    tables = {"rounds": 1, "data": {"name": "digits", "partition": {"clients": 2}}, "local": {"lr": lr, "epochs": 1}}
    sys.setprofile(note)
    try:
        assembly = assemble(load_experiment({**tables, "cohort": {"count": 1}}))
        assert assembly.simulation is not None
        federation, engine = assembly.federation, local_engine(assembly.simulation)
        run_round(federation, engine, assembly.settings, start(federation))
    finally:
        sys.setprofile(None)
    assert "fleetfit.core.local" in modules and len(modules) <= 7, modules


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_defaults_are_torchs(optimizer: Any) -> None:
    """Of SGD they are those that the first runs had."""
    torch_s = KINDS[optimizer]([torch.nn.Parameter(torch.zeros(1))]).defaults
    own = {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4} if optimizer == "sgd" else {}
    assert dict(OPTIMIZERS[optimizer]) == {key: own.get(key, torch_s[key]) for key in OPTIMIZERS[optimizer]}


def test_all_keys_reach_local() -> None:
    keys = {"optimizer": "adam", "epochs": 2, "batch_size": 7, "lr": 0.02, "betas": [0.8, 0.95], "eps": 1e-5,
             "weight_decay": 0.3, "clip_norm": 1.5, "clip_value": 0.5, "max_steps": 9, "patience": 4, "check_every": 2,
             "compress": "int8", "schedule_in_round": "cosine"}  # fmt: skip
    made_local = build_settings(
        load_experiment({"local": keys, "cohort": {"deadline_s": 3.0, "on_deadline": "stop"}})
    ).local
    assert made_local.at_round(1, 0) == Local(**{**keys, "betas": (0.8, 0.95)}, deadline_s=3.0, late="stop")
    sgd = {"momentum": 0.3, "nesterov": True}
    made_local = build_settings(load_experiment({"local": sgd})).local
    assert (made_local.momentum, made_local.nesterov) == (0.3, True)


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"optimizer": "adamw", "momentum": 0.9}, Expected('"adamw"', "lr, weight_decay, betas", key="local.momentum")),
        ({"optimizer": "adam", "nesterov": False}, Expected('"sgd"', key="local.nesterov")),
        ({"betas": [0.9, 0.99]}, Expected('"adam" and "adamw"', key="local.betas")),
        ({"eps": 1e-6}, Expected('"sgd"', "lr, weight_decay, momentum, nesterov", key="local.eps")),
        ({"nesterov": True, "momentum": 0.0}, Expected("momentum", key="local.nesterov")),
        ({"optimizer": "adamx"}, Expected('"sgd", "adam" or "adamw"', key="local.optimizer")),
        ({"optimizer": "adam", "betas": [0.9, 1.0]}, Expected("[local] betas #2", key="local.betas.1")),
        ({"optimizer": "adam", "eps": 0.0}, Expected("[local] eps", 0, key="local.eps")),
        ({"schedule_in_round": "step"}, Expected('"constant" or "cosine"', key="local.schedule_in_round")),
        ({"check_every": 0}, Expected("[local] check_every", 1, 0, key="local.check_every")),
    ],
)
def test_foreign_optimizer_keys_are_refused(section: dict[str, Any], expected: Expected) -> None:
    with raises(ConfigError, expected):
        load_experiment({"local": section})


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        ({"model": {"name": "cnn"}}, ("sgd", 0.1)),
        ({"model": {"name": "bert"}}, ("adamw", 1e-3)),
        ({"model": {"name": "DeiT-S"}, "local": {"epochs": 2}}, ("adamw", 1e-3)),
        ({"model": {"name": "vim"}, "local": {"lr": 5e-4}}, ("adamw", 5e-4)),
        ({"model": {"name": "char_lstm"}}, ("adamw", 1e-2)),
        ({"model": {"name": "word_lstm"}, "local": {"lr": 0.1}}, ("adamw", 0.1)),
        ({"model": {"name": "bert"}, "local": {"optimizer": "sgd"}}, ("sgd", 0.1)),
        ({"model": {"name": "char_lstm"}, "local": {"lr": 1.5, "momentum": 0.0}}, ("sgd", 1.5)),
        ({"data": {"name": "ag_news"}}, ("adamw", 1e-3)),
        ({"data": {"name": "shakespeare"}}, ("adamw", 1e-2)),
    ],
)
def test_the_default_optimizer_follows_the_model(tables: dict[str, Any], expected: tuple[str, float]) -> None:
    experiment = load_experiment(tables)
    assert (experiment.local.optimizer, experiment.local.lr) == expected
    again = load_experiment(experiment, ["model.name=cnn"])
    assert again.local.optimizer == "sgd"


def test_override_of_optimizer_drops_its_keys() -> None:
    """As those of a method or a data set do; what any optimizer has stays."""
    base = {"local": {"lr": 0.3, "momentum": 0.5, "weight_decay": 0.1, "epochs": 2, "schedule": {"kind": "cosine"}}}
    gone: list[str] = []
    section = complete_experiment(
        merge_tables(base, parse_overrides(["local.optimizer=adamw", "local.eps=1e-6"]), dropped=gone)
    ).local
    assert (section.lr, section.weight_decay, section.eps, section.epochs) == (1e-3, 1e-2, 1e-6, 2)
    assert section.schedule.kind == "cosine" and gone == ["local.lr", "local.momentum", "local.weight_decay"]
    sgd_section = complete_experiment(merge_tables(base, parse_overrides(["local.optimizer=sgd"]))).local
    assert (sgd_section.lr, sgd_section.momentum) == (0.3, 0.5)


# ---- training ------------------------------------------------------------------------------------------------------

CASES: list[dict[str, Any]] = [
    {"optimizer": "adamw"},
    {"optimizer": "adamw", "lr": 0.02, "weight_decay": 0.3, "betas": (0.7, 0.8), "eps": 1e-4},
    {"optimizer": "adam"},
    {"optimizer": "adam", "lr": 0.02, "weight_decay": 0.3, "betas": (0.7, 0.8), "eps": 1e-4},
]


@pytest.mark.parametrize("settings", CASES, ids=str)
def test_optimizers_equal_torch(settings: dict[str, Any]) -> None:
    """Over 12 steps of batches: the fused kernel on one tensor; to an ulp or two also its defaults, tensor by tensor.

    PyTorch's kernels round a few last bits otherwise, as do the ends of tensors; so the layout belongs to the bits.
    """
    federation, simulation = tiny_fleet(norm=False)
    device, local = simulation.device(5), Local(epochs=4, batch_size=8, **settings)
    job = make_job(federation, 5, 2, local=local)
    problem, piece = federation.problem, job.submodel
    modules = [build_module(problem.architecture, problem.layout.full_sizes, piece.exits) for _ in range(2)]
    for module in modules:
        module.load_state_dict(job.state)
    flat = torch.cat([tensor.reshape(-1) for tensor in job.state.values()]).requires_grad_()
    flat.grad, at = torch.zeros_like(flat), 0
    for name, tensor in job.state.items():  # no buffers: there is no norm
        parameter, here = modules[0].get_parameter(name), slice(at, at := at + tensor.numel())
        parameter.data, parameter.grad = flat.data[here].view(tensor.shape), flat.grad[here].view(tensor.shape)
    keys = {key: value for key, value in settings.items() if key != "optimizer"}
    kind = KINDS[local.optimizer]
    fused, default = kind([flat], fused=True, **keys), kind(modules[1].parameters(), **keys)
    rng, steps = make_torch_rng(job.seed, "batches"), 0
    for batch, _ in iter_epochs(device.data.split("train"), local, rng):
        x, y = device.data.batch(batch, rng)
        fused.zero_grad(set_to_none=False)
        default.zero_grad()
        for module, theirs in zip(modules, (fused, default), strict=True):
            F.cross_entropy(module(x)[-1], y).backward()
            theirs.step()
        steps += 1
    update = train_job(job, device)
    assert steps == update.metrics["steps"] >= 12
    for name, tensor in modules[0].state_dict().items():
        if name not in update.untrained:
            assert torch.equal(update.state[name], tensor), name
            assert not torch.equal(update.state[name], job.state[name]), name
    for name, tensor in modules[1].state_dict().items():
        torch.testing.assert_close(update.state[name], tensor, atol=1e-7, rtol=1e-5)
    assert update.untrained, "early heads have no gradient: they are neither moved nor decayed"
    assert all(torch.equal(update.state[name], job.state[name]) for name in update.untrained)


def test_nesterov_equals_torch() -> None:
    federation, simulation = tiny_fleet(norm=False)
    device = simulation.device(5)
    states = []
    for nesterov in (True, False):
        local = Local(lr=0.2, epochs=4, batch_size="all", momentum=0.8, weight_decay=0.0, nesterov=nesterov)
        job = make_job(federation, 5, 2, local=local)
        module = build_module(federation.problem.architecture, federation.problem.layout.full_sizes, (1, 2, 3))
        module.load_state_dict(job.state)
        theirs = torch.optim.SGD(module.parameters(), lr=0.2, momentum=0.8, nesterov=nesterov)
        x, y = device.data.batch(device.data.split("train"))
        for _ in range(4):
            theirs.zero_grad()
            F.cross_entropy(module(x)[-1], y).backward()
            theirs.step()
        states.append(train_job(job, device).state)
        for name, tensor in module.state_dict().items():
            torch.testing.assert_close(states[-1][name], tensor, atol=1e-6, rtol=1e-5)
    assert not torch.allclose(states[0]["stem.weight"], states[1]["stem.weight"], atol=1e-5)


def test_each_job_has_new_optimizer() -> None:
    """The same job twice: what the first left in the optimizer would show in the second."""
    federation, simulation = tiny_fleet()
    job = make_job(federation, 5, 2, local=Local(optimizer="adamw", epochs=2, batch_size=8))
    first, second = (train_job(job, simulation.device(5)).state for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_cosine_covers_all_steps() -> None:
    """lr (1 + cos(pi s / S)) / 2 at step s of S = epochs times batches, or of max_steps where that is less."""
    federation, simulation = tiny_fleet(norm=False)
    device = simulation.device(5)
    n = len(device.data.split("train"))
    for most in (None, 5):
        local = plain(lr=0.5, epochs=3, batch_size=8, schedule_in_round="cosine", max_steps=most)
        job = make_job(federation, 5, 2, local=local)
        module = build_module(federation.problem.architecture, federation.problem.layout.full_sizes, (1, 2, 3))
        module.load_state_dict(job.state)
        sgd = torch.optim.SGD(module.parameters(), lr=0.5)
        batches = -(-n // 8)  # 28 samples: none of one sample
        falling = torch.optim.lr_scheduler.CosineAnnealingLR(sgd, most or 3 * batches)
        rng, done = make_torch_rng(job.seed, "batches"), 0
        for batch, _ in iter_epochs(device.data.split("train"), local, rng):
            if most is not None and done == most:
                break
            x, y = device.data.batch(batch, rng)
            sgd.zero_grad()
            F.cross_entropy(module(x)[-1], y).backward()
            sgd.step()
            falling.step()
            done += 1
        assert done == count_steps(local, n) == (most or 3 * batches)
        assert falling.get_last_lr()[0] == pytest.approx(0.0, abs=1e-9)
        state = train_job(job, device).state
        for name, tensor in module.state_dict().items():
            torch.testing.assert_close(state[name], tensor, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("every", [1, 3, 4, 100])
@pytest.mark.parametrize("most", [None, 5, 6])
def test_planned_checks_equal_checks(every: int, most: int | None) -> None:
    """One before the first step, one after each so many, and one after the last of `max_steps`."""
    federation, simulation = tiny_fleet()
    device = simulation.device(5)
    local = plain(lr=1e-4, epochs=2, batch_size=8, patience=1000, check_every=every, max_steps=most)
    job = make_job(federation, 5, 2, local=local)
    free = plain(lr=1e-4, epochs=2, batch_size=8, max_steps=most)
    without = train_job(make_job(federation, 5, 2, local=free), device)
    update, looked = train_job(job, device), count_validation_samples(device, local)
    n, each = (
        len(device.data.split("train")),
        without.multiply_adds // count_planned_passes(free, without.num_examples, 0),
    )
    steps = range(1, count_steps(local, n) + 1)
    looks = 1 + sum(step % every == 0 or step == most for step in steps)
    assert looked and update.multiply_adds - without.multiply_adds == looks * looked * each
    assert count_planned_passes(local, n, looked) * each == update.multiply_adds


def test_engines_agree_with_adamw_and_a_cosine() -> None:
    settings = Settings(
        2,
        Local(optimizer="adamw", lr=0.01, epochs=2, batch_size=8, clip_norm=1.0, schedule_in_round="cosine"),
        scope=SETTINGS.scope,
    )
    federation, simulation = fleets({"name": "scalefl", "options": {"fedprox": {"mu": 0.1}}})
    expected = finished(federation, local_engine(simulation), settings)
    engine = processes(simulation, workers=2)
    try:
        same(expected, finished(federation, engine, settings))
    finally:
        engine.close()
    sgd = finished(federation, local_engine(simulation), Settings(2, Local(lr=0.01, epochs=2, batch_size=8)))
    assert any(not torch.equal(sgd.server.state[n], t) for n, t in expected.server.state.items())


def test_a_transformer_with_lora_trains_with_adamw(tmp_path: Path) -> None:
    """From a run file, in two ways; what is frozen stays, and the loss falls."""
    text = '[local]\noptimizer = "adamw"\nlr = 3e-3\nepochs = 1\nschedule_in_round = "cosine"\n'
    (tmp_path / "run.toml").write_text(text)
    rest = {key: value for key, value in VIT.items() if key != "local"}
    run = ff.run(tmp_path / "run.toml", out=tmp_path / "here", **rest)
    losses = [line["train"]["loss"] for line in run.metrics]
    assert losses[-1] < losses[0]
    assert 'optimizer = "adamw"' in (run.folder / "config.toml").read_text()
    base = assemble(load_experiment(VIT)).federation.problem.base
    assert base and all(torch.equal(run.assembly.federation.problem.base[name], t) for name, t in base.items())
    again = ff.run(run.folder / "config.toml", out=tmp_path / "again")
    assert all(torch.equal(again.server.state[name], t) for name, t in run.server.state.items())


@pytest.mark.parametrize(
    "local", [{}, {"optimizer": "adamw"}, {"batch_size": 40}, {"optimizer": "adamw", "batch_size": "all"}], ids=str
)
def test_simulation_and_fleet_plan_equal_costs(local: dict[str, Any]) -> None:
    """The same levels cost the same, whoever takes part: what a key of the file does, it does for all three."""
    tables = {"data": {"name": "tiny:tiny_data", "partition": {"kind": "iid", "clients": 2}}, "local": local,
              "model": {"name": "tiny:tiny"}, "cohort": {"fraction": 1.0},
              "fleet": {"cost": "memory_bytes", "groups": [{"budget": 0.8}, {"budget": 1.0}]}}  # fmt: skip
    experiment = load_experiment(tables)
    simulated, planned = assemble(experiment), plan_levels(experiment)
    data, counts = simulated.data, simulated.federation.clients.num_examples
    facts = DataDescription(data.name, data.task, data.sample_shape, data.classes, data.vocabulary, data.padding)
    budgets = [float(b) for b in simulated.fleet.budgets]
    nodes = [NodeDescription(f"{i}", facts, int(n), b) for i, (n, b) in enumerate(zip(counts, budgets, strict=True))]
    tiny_fleet = assemble_fleet(load_experiment({**tables, "data": {}}), nodes)
    levels = [[vars(level) for level in plan_of] for plan_of in (planned.levels, simulated.federation.levels)]
    assert levels[0] == levels[1] == [vars(level) for level in tiny_fleet.federation.levels]
    costs = [planned.cost(level, "memory_bytes") for level in planned.levels]
    assert [level.further["memory_bytes"] for level in simulated.plan.levels] == costs
    assert [level.further["memory_bytes"] for level in tiny_fleet.plan.levels] == costs
    assert tiny_fleet.settings.local == simulated.settings.local


def test_memory_counts_the_moments() -> None:
    """Two numbers a parameter instead of one: 4 bytes more for each."""
    problem = tiny_fleet(norm=False)[0].problem
    sizes, args = problem.layout.full_sizes, ((1, 2, 3), problem.input_shape, 8)
    one, two = (
        training_memory(problem.architecture, sizes, *args, Local(optimizer=o).moments) for o in ("sgd", "adam")
    )
    assert two - one == 4 * sum(t.numel() for t in problem.architecture.build(sizes, (1, 2, 3)).parameters())
    described = {**VIT, "peft": "full", "fleet": {"cost": "memory_bytes", "groups": [{"budget": 1.0}]}}
    plans = [assemble(load_experiment({**described, "local": {"optimizer": o}})).plan for o in ("sgd", "adamw")]
    assert plans[0].levels[-1].further["memory_bytes"] < plans[1].levels[-1].further["memory_bytes"]
