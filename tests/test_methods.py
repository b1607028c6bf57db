"""Each method's formulas against plain loops: whole rounds, scaler, masks, penalties, warm-up, windows, who takes part.

The network and the optimizer on the plain side are those of `test_train`: no module, no optimizer, float64.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support import Expected, raises
from support.engines import RecordingEngine
from support.states import put_back
from support.training import (
    assert_close,
    batch_moments,
    fail_job,
    last_exit_loss,
    make_job,
    plain_outputs,
    plain_sgd,
    train_job,
)
from tiny import plain, tiny_federation
from torch import Tensor

from fleetfit.config import load_experiment
from fleetfit.config.assemble.run import assemble
from fleetfit.core import Evaluation, Federation, Job, Level, Local, Server, Simulation, Update
from fleetfit.engines.local import local as local_engine
from fleetfit.errors import ConfigError, ModelError
from fleetfit.hooks import build, get_round_submodel
from fleetfit.hooks.level_tensors import get_shared_state
from fleetfit.layout import Axis, State
from fleetfit.methods.heterofl import compute_kept_fractions, find_class_axis, width_loss
from fleetfit.methods.scalefl import exits_loss
from fleetfit.planner import LevelShape, Targets
from fleetfit.rounds import Settings, run_round, start
from fleetfit.seeds import make_numpy_rng
from fleetfit.submodel import extract
from fleetfit.training import get_local_model, run_job

AT_ONCE = Local(lr=0.1, momentum=0.9, weight_decay=1e-3, epochs=3, batch_size="all")


def everybody(federation: Federation, server: Server, rng: np.random.Generator) -> list[int]:
    return list(range(len(federation.clients)))


def only(*clients: int) -> Any:
    def choose(federation: Federation, server: Server, rng: np.random.Generator) -> list[int]:
        return list(clients)

    return choose


def a_round(
    federation: Federation, simulation: Simulation, server: Server, local: Local, rounds: int = 10
) -> tuple[Server, dict[str, Any]]:
    return run_round(federation, local_engine(simulation), Settings(rounds, local), server)


def width_levels(federation: Federation) -> Federation:
    """The same clients with three levels of one exit, cut in width only."""
    problem = federation.problem
    levels = tuple(
        Level(str(i + 1), problem.submodel(w, (3,)), w, n)
        for i, (w, n) in enumerate([(0.5, 0.2), (0.75, 0.5), (1.0, 1.0)])
    )
    return replace(federation, levels=levels)


# ---- a whole round of ScaleFL by plain loops -------------------------------------------------

# level -> (channels of axis a, of axis b, exits), by hand: floor(0.5 * 8) = 4, floor(0.5 * 6) granules of 2 = 6;
# floor(0.75 * 8) = 6, floor(0.75 * 6) = 4 granules = 8
SIZES = {0: (4, 6, (1,)), 1: (6, 8, (1, 2)), 2: (8, 12, (1, 2, 3))}


def corner(name: str, a: int, b: int) -> tuple[slice, ...]:
    """The upper left of a tensor that a sub-model with a and b channels keeps, by its name."""
    layer, kind = name.rsplit(".", 1)
    if layer == "stem":
        out, inn = a, 16
    elif layer.startswith("heads"):
        out, inn = 4, a
    elif layer.endswith(".4"):
        out, inn = a, b
    else:  # blocks.i.0, and the norm blocks.i.1
        out, inn = b, a
    norm = layer.startswith("blocks") and layer.endswith(".1")
    matrix = kind == "weight" and not norm
    return (slice(out), slice(inn)) if matrix else (slice(out),)


def present(name: str, exits: tuple[int, ...]) -> bool:
    part, _, place = name.partition(".")
    number = int(place.split(".")[0]) if place[0].isdigit() else 0
    return {"stem": True, "blocks": number < exits[-1], "heads": number in exits}[part]


def equation_5(beta: float, tau: float) -> Any:
    """sum_i 2i / (l(l+1)) * (CE_i + beta tau^2 sum_c p_l log(p_l / p_i)), written out; no KL for the last exit."""

    def loss(logits: list[Tensor], y: Tensor) -> Tensor:
        exits, total = len(logits), torch.zeros(())
        teacher = torch.softmax(logits[-1].detach() / tau, 1)
        for i, z in enumerate(logits, 1):
            term = -torch.log_softmax(z, 1)[torch.arange(len(y)), y].mean()
            if i < exits:
                student = torch.softmax(z / tau, 1)
                term = term + beta * tau**2 * (teacher * (teacher / student).log()).sum(1).mean()
            total = total + 2 * i / (exits * (exits + 1)) * term
        return total

    return loss


@pytest.mark.parametrize("chosen", [(0, 1, 2, 3, 4, 5), (0, 1, 3, 4), (0,)], ids=str)
def test_a_round_of_scalefl_is_algorithms_1_to_3(chosen: tuple[int, ...]) -> None:
    """Two rounds over clients of three levels: split by hand, train with Eq. 5 by plain SGD, average by counts (Eq.
    2).

    Element j of tensor W becomes (sum of the W_kj of the clients k that have it) / (number of those clients); what no
    chosen client has (block 3 and the outer channels, when level 3 is left out) keeps its value bit for bit. All
    samples are one batch, so that their order does not matter.
    """
    spec = {"name": "scalefl", "beta": 0.3, "temperature": 2.0, "hooks": {"choose_clients": only(*chosen)}}
    federation, simulation = tiny_federation(spec)
    assert [
        (len(v.submodel.channels["a"]), len(v.submodel.channels["b"]), v.submodel.exits) for v in federation.levels
    ] == [SIZES[i] for i in range(3)]
    server = start(federation)
    for _ in range(2):
        before = server.state
        total = {n: torch.zeros_like(t, dtype=torch.float64) for n, t in before.items()}
        count = {n: torch.zeros_like(t) for n, t in before.items()}
        for client in chosen:
            a, b, exits = SIZES[client % 3]
            sent = {n: t[corner(n, a, b)].clone() for n, t in before.items() if present(n, exits)}
            data = simulation.device(client).data
            batch = data.batch(data.split("train"))
            back = plain_sgd(sent, exits, [batch] * AT_ONCE.epochs, equation_5(0.3, 2.0), AT_ONCE)
            for name, tensor in back.items():
                total[name][corner(name, a, b)] += tensor
                count[name][corner(name, a, b)] += 1
        expected = {n: torch.where(count[n] > 0, total[n] / count[n].clamp_min(1), before[n].double()) for n in before}
        server, report = a_round(federation, simulation, server, AT_ONCE)
        assert report["train"]["clients"] == len(chosen) and not report["failures"]
        assert_close(server.state, expected, atol=5e-6)
        for name, tensor in before.items():
            nobody = count[name] == 0
            assert torch.equal(server.state[name][nobody], tensor[nobody]), name
    if 2 not in chosen:
        assert torch.equal(server.state["blocks.2.0.weight"], start(federation).state["blocks.2.0.weight"])


def test_weights_by_samples_are_the_samples() -> None:
    """FedAvg's rule with unequal clients: x <- sum_k n_k x_k / sum_k n_k, here over 4, 8 and 28 samples."""
    federation, simulation = tiny_federation(
        {"name": "all_large", "hooks": {"choose_clients": only(0, 1, 2)}}, norm=False
    )
    level = Level("1", federation.problem.submodel(1.0, (3,)), 1.0, 0.0)
    keep = {0: 4, 1: 8}
    parts = [{**p, "train": p["train"][: keep.get(i, 28)]} for i, p in enumerate(simulation.parts)]
    simulation = replace(simulation, parts=parts)
    federation = replace(federation, levels=(level,))
    server = start(federation)
    sent = extract(federation.problem.layout, server.state, level.submodel)
    total = {n: torch.zeros_like(t, dtype=torch.float64) for n, t in sent.items()}
    for client, n in ((0, 4), (1, 8), (2, 28)):
        data = simulation.device(client).data
        back = plain_sgd(sent, (3,), [data.batch(data.split("train"))] * 3, last_exit_loss, AT_ONCE)
        for name in total:
            total[name] += n * back[name] / 40
    after, report = a_round(federation, simulation, server, AT_ONCE)
    assert report["train"]["samples"] == 40
    assert_close({n: after.state[n] for n in total}, total, atol=5e-6)


def test_warmup_is_without_distillation() -> None:
    """With warmup = 0.3 of 10 rounds, rounds 0, 1, 2 have beta = 0 and round 3 has it."""
    federation, simulation = tiny_federation({"name": "scalefl"})
    data = simulation.device(5).data
    x, y = data.batch(data.split("train"))
    for round in range(5):
        job = make_job(federation, 5, 2, round=round, rounds=10)
        piece = get_local_model(federation.problem, job.submodel, torch.device("cpu"))
        piece.load(job.state)
        piece.module.train()
        loss = exits_loss(job, simulation.device(5), 0.5, 3.0, 0.3, False)
        logits = plain_outputs({n: t.double() for n, t in job.state.items()}, x.double(), (1, 2, 3))
        expected = equation_5(0.0 if round < 3 else 0.5, 3.0)(logits, y)
        assert float(loss(piece.module, x, y).detach()) == pytest.approx(float(expected), rel=1e-5)
    assert float(equation_5(0.5, 3.0)(logits, y)) != pytest.approx(float(equation_5(0.0, 3.0)(logits, y)), rel=1e-3)


REFUSED: list[tuple[dict[str, Any], Expected]] = [
    ({"name": "feddf", "batch_size": 0}, Expected(key="method.batch_size")),
    ({"name": "feddf", "check_every": 0}, Expected(key="method.check_every")),
    ({"name": "feddf", "lr": 0.0}, Expected(key="method.lr")),
    ({"name": "feddf", "patience": 0}, Expected(key="method.patience")),
    ({"name": "feddf", "steps": -1}, Expected(key="method.steps")),
    ({"name": "feddf", "temperature": 0.0}, Expected(0, key="method.temperature")),
    ({"name": "feddropout", "drop": -0.1}, Expected(0, 1, key="method.drop")),
    ({"name": "feddropout", "drop": 1.0}, Expected(0, 1, key="method.drop")),
    ({"name": "inclusivefl", "beta": -0.1}, Expected(0, 1, key="method.beta")),
    ({"name": "inclusivefl", "beta": 1.1}, Expected(0, 1, key="method.beta")),
    ({"name": "scalefl", "beta": -0.1}, Expected(0, 1, key="method.beta")),
    ({"name": "scalefl", "beta": 1.0}, Expected(0, 1, key="method.beta")),
    ({"name": "scalefl", "temperature": 0.0}, Expected(key="method.temperature")),
    ({"name": "scalefl", "warmup": 1.5}, Expected(0, 1, 1.5, key="method.warmup")),
    ({"options": {"fedadam": {"tau": 0.0}}}, Expected(0, key="method.options.fedadam.tau")),
    ({"options": {"fedavgm": {"lr": 0.0}}}, Expected(0, 0.0, key="method.options.fedavgm.lr")),
    ({"options": {"fedavgm": {"momentum": 1.0}}}, Expected(0, 1, 1.0, key="method.options.fedavgm.momentum")),
    ({"options": {"feddyn": {"alpha": 0.0}}}, Expected(0, key="method.options.feddyn.alpha")),
    ({"options": {"fedprox": {"mu": -1.0}}}, Expected(0, key="method.options.fedprox.mu")),
    ({"options": {"fedyogi": {"v0": -1.0}}}, Expected(0, key="method.options.fedyogi.v0")),
    ({"options": {"fedyogi": {"beta2": -0.1}}}, Expected(0, 1, key="method.options.fedyogi.beta2")),
]


@pytest.mark.parametrize(("spec", "expected"), REFUSED, ids=str)
def test_hyperparameters_out_of_range_are_refused(spec: dict[str, Any], expected: Expected) -> None:
    with raises(ConfigError, expected):
        build(spec)


# ---- HeteroFL -------------------------------------------------


def scaled(fraction: float) -> Any:
    """Batch norm whose inputs are divided by the kept fraction: z / f has mean / f and var / f^2."""

    def moments(layer: str, z: Tensor) -> tuple[Tensor, Tensor]:
        mean, var = batch_moments(layer, z / fraction)
        # ((z / f) - mean) / sqrt(var + eps) written for an input z: multiply through by f
        return mean * fraction, (var + 1e-5) * fraction**2 - 1e-5

    return moments


def test_the_scaler_divides_inputs_of_norms() -> None:
    """Level 1 keeps 6 of the 12 channels that are normalized, so each norm layer gets twice its input.

    Batch norm takes a factor back out, except for its eps; weights a hundredth of the usual size make the eps count.
    """
    federation = width_levels(tiny_federation({"name": "heterofl", "scaler": True})[0])
    simulation = tiny_federation({"name": "heterofl"})[1]
    job = make_job(federation, 0, 0)
    assert compute_kept_fractions(job, simulation.device(0)) == {f"blocks.{i}.1": 0.5 for i in range(3)}
    state = {n: t * (0.01 if n.startswith("stem") else 1) for n, t in job.state.items()}
    job = replace(job, state=state)
    data = simulation.device(0).data
    x, y = data.batch(data.split("train"))
    piece = get_local_model(federation.problem, job.submodel, torch.device("cpu"))
    piece.load(state)
    piece.module.train()
    losses = {
        on: float(width_loss(job, simulation.device(0), on, False)(piece.module, x, y).detach()) for on in (True, False)
    }
    double = {n: t.double() for n, t in state.items()}
    for on, moments in ((True, scaled(0.5)), (False, batch_moments)):
        expected = F.cross_entropy(plain_outputs(double, x.double(), (3,), moments)[-1], y)
        assert losses[on] == pytest.approx(float(expected), rel=1e-6)
    assert losses[True] != pytest.approx(losses[False], rel=1e-3)


@pytest.mark.parametrize("peft", ["full", "frozen", "lora"])
def test_norm_layers_that_are_frozen_are_scaled_too(peft: str) -> None:
    """Two norms a block, one of them at the classifier, of a transformer of two blocks; half of the heads are kept."""
    table = {
        "data": {"partition": {"kind": "iid", "clients": 8}}, "peft": {"name": peft},
        "model": {"name": "vit", "patch": 4, "hidden": 16, "depth": 2, "attention_heads": 4},
        "fleet": {"levels": [0.5], "tolerance": 0.5, "groups": [{"budget": 0.5}, {"budget": 1.0}]},
        "method": {"name": "heterofl", "scaler": True},
    }  # fmt: skip
    assembly = assemble(load_experiment(table))
    federation, simulation = assembly.federation, assembly.simulation
    assert simulation is not None
    fractions = compute_kept_fractions(make_job(federation, 0, 0), simulation.device(0))
    piece = get_local_model(federation.problem, federation.levels[0].submodel, torch.device("cpu"))
    norms = {name for name, module in piece.module.named_modules() if isinstance(module, torch.nn.LayerNorm)}
    assert set(fractions) == norms and len(norms) >= 5


def test_the_full_level_is_not_scaled() -> None:
    federation, simulation = tiny_federation({"name": "heterofl", "scaler": True})
    assert compute_kept_fractions(make_job(width_levels(federation), 2, 2), simulation.device(2)) == {}


@pytest.mark.parametrize("kind", ["evaluate", "statistics"])
def test_the_scaler_is_for_training_only(kind: str) -> None:
    """Evaluation and statistics jobs say the same whether the method scales or not; training does not."""
    federation, simulation = tiny_federation({"name": "heterofl"})
    federation = width_levels(federation)
    settings = Evaluation(split="train", norm="batch")
    specs = [{"name": "heterofl", "scaler": on} for on in (False, True)]
    replies = [
        run_job(make_job(federation, 0, 0, kind, method=s, evaluation=settings), simulation.device(0))[0] for s in specs
    ]
    without, with_scaler = replies
    assert isinstance(without, Update) and isinstance(with_scaler, Update)
    assert without.metrics == with_scaler.metrics
    assert all(torch.equal(without.state[n], with_scaler.state[n]) for n in without.state)
    states = [train_job(make_job(federation, 0, 0, method=s, local=AT_ONCE), simulation.device(0)).state for s in specs]
    assert not all(torch.equal(states[0][n], states[1][n]) for n in states[0])


def missing_classes(simulation: Simulation, lacking: Mapping[int, set[int]]) -> Simulation:
    """Take training samples of some classes away from some clients."""
    y = simulation.data.y
    parts = []
    for client, part in enumerate(simulation.parts):
        keep = torch.tensor([int(c) not in lacking.get(client, set()) for c in y[part["train"]]])
        parts.append({**part, "train": part["train"][keep]})
    return replace(simulation, parts=parts)


def test_the_class_axis_is_found() -> None:
    hidden, classes = Axis(8), Axis(4, scaled=False)
    places = Axis(4, scaled=False, ordered=True)
    assert find_class_axis({"places": places, "a": hidden, "labels": classes}) == "labels"
    assert find_class_axis({"tokens": Axis(4, scaled=False), "classes": classes}) == "classes"
    assert find_class_axis({"tokens": Axis(4, scaled=False), "labels": classes}) is None
    assert find_class_axis({"a": hidden}) is None


def test_masking_needs_an_axis_of_the_classes() -> None:
    problem = tiny_federation({"name": "heterofl"})[0].problem
    axes = {name: axis for name, axis in problem.layout.axes.items() if name != "classes"}
    without = replace(problem)
    without.__dict__["layout"] = replace(problem.layout, axes=axes)
    with raises(ConfigError, '"classes"', key="masked"):
        build({"name": "heterofl", "masked": True}).make_levels(without, Targets((1.0,), (0.1,)))


def test_label_masked_averaging_of_the_output_rows() -> None:
    """HeteroFL: the rows of a class are averaged over the clients that have it; class 3, which nobody has, keeps every
    bit.

    Clients 0, 1, 2 (levels 1, 2, 3) lack class 3; client 0 also lacks 0 and client 2 lacks 1. So the bias of class 0
    is the mean of clients 1 and 2, of class 1 that of clients 0 and 1, and of class 2 that of all.
    """
    spec = {"name": "heterofl", "masked": True, "hooks": {"choose_clients": only(0, 1, 2)}}
    federation, simulation = tiny_federation(spec)
    federation = width_levels(federation)
    simulation = missing_classes(simulation, {0: {0, 3}, 1: {3}, 2: {1, 3}})
    server, engine = start(federation), RecordingEngine(simulation)
    after, report = run_round(federation, engine, Settings(1, AT_ONCE), server)
    assert not report["failures"]
    updates = {u.client: u for u in engine.replies if isinstance(u, Update)}
    labels_of = {0: (1, 2), 1: (0, 1, 2), 2: (0, 2)}
    assert {c: tuple(u.submodel.channels["classes"]) for c, u in updates.items()} == labels_of
    for row in range(3):
        have = [c for c in labels_of if row in labels_of[c]]
        bias = sum(float(updates[c].state["heads.3.bias"][labels_of[c].index(row)]) for c in have) / len(have)
        assert float(after.state["heads.3.bias"][row]) == pytest.approx(bias, rel=1e-6)
        corner_4 = sum(updates[c].state["heads.3.weight"][labels_of[c].index(row), :4].double() for c in have) / len(
            have
        )
        torch.testing.assert_close(after.state["heads.3.weight"][row, :4].double(), corner_4, rtol=1e-5, atol=1e-7)
    for name in ("heads.3.weight", "heads.3.bias"):
        assert torch.equal(after.state[name][3], server.state[name][3])
        assert not torch.equal(after.state[name][2], server.state[name][2])
    assert not torch.equal(after.state["stem.weight"], server.state["stem.weight"])


def test_masked_training_zeroes_absent_classes() -> None:
    """One job against the plain loop with the masked cross-entropy; only the rows of its classes come back."""
    federation, simulation = tiny_federation({"name": "heterofl", "masked": True})
    federation = width_levels(federation)
    simulation = missing_classes(simulation, {2: {1, 3}})
    job, device = make_job(federation, 2, 2, local=AT_ONCE), simulation.device(2)

    def masked(logits: list[Tensor], y: Tensor) -> Tensor:
        z = logits[-1] * torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64)
        return -(z[torch.arange(len(y)), y] - z.exp().sum(1).log()).mean()

    expected = plain_sgd(job.state, (3,), [device.data.batch(device.data.split("train"))] * 3, masked, AT_ONCE)
    for name in ("heads.3.weight", "heads.3.bias"):
        expected[name] = expected[name][[0, 2]]
    assert_close(train_job(job, device).state, expected, atol=5e-6)


# ---- FedProx -------------------------------------------------


def test_fedprox_penalty_and_gradient() -> None:
    """mu / 2 * sum (w - w_received)^2 with gradient mu (w - w_received), on moved weights; zero where nothing moved."""
    spec = {"name": "fedavg", "options": {"fedprox": {"mu": 0.3}}}
    federation, simulation = tiny_federation(spec)
    job = make_job(federation, 5, 2)
    penalty = build(spec).make_penalty(job, simulation.device(5))
    assert penalty is not None
    piece = get_local_model(federation.problem, job.submodel, torch.device("cpu"))
    piece.load(job.state)
    assert float(penalty(piece.module).detach()) == 0.0
    rng = torch.Generator().manual_seed(1)
    moved = {n: t + 0.1 * torch.randn(t.shape, generator=rng) for n, t in job.state.items()}
    piece.load(moved)
    piece.grad.zero_()
    value = penalty(piece.module)
    value.backward()
    expected = 0.15 * sum(float(((moved[n] - job.state[n]).double() ** 2).sum()) for n in moved)
    assert float(value.detach()) == pytest.approx(expected, rel=1e-5)
    for name, parameter in piece.module.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, 0.3 * (moved[name] - job.state[name]), rtol=1e-4, atol=1e-6)
    piece.grad.zero_()


def test_fedprox_training_is_plain_sgd_with_the_penalty() -> None:
    spec = {"name": "fedavg", "options": {"fedprox": {"mu": 2.0}}}
    federation, simulation = tiny_federation(spec)
    job, device = make_job(federation, 5, 2, local=AT_ONCE), simulation.device(5)

    def penalty(weights: State) -> Tensor:
        return sum(((w - job.state[n]) ** 2).sum() for n, w in weights.items()) * 1.0  # type: ignore[return-value]

    batches = [device.data.batch(device.data.split("train"))] * 3
    state = train_job(job, device).state
    assert_close(state, plain_sgd(job.state, (1, 2, 3), batches, last_exit_loss, AT_ONCE, penalty), atol=5e-6)
    free = train_job(replace(job, method={"name": "fedavg"}), device).state
    moved = [sum(float(((s[n] - job.state[n]) ** 2).sum()) for n in s) for s in (state, free)]
    assert moved[0] < moved[1]


# ---- Decoupled -------------------------------------------------


def decoupled_fleet(choose: Any = everybody) -> tuple[Federation, Simulation]:
    return tiny_federation({"name": "decoupled", "hooks": {"choose_clients": choose}})


def test_decoupled_levels_never_mix() -> None:
    """Other labels at the clients of levels 2 and 3 change nothing in level 1, over two rounds."""
    federation, simulation = decoupled_fleet()
    y = simulation.data.y.clone()
    for client in (1, 2, 4, 5):
        mine = simulation.parts[client]["train"]
        y[mine] = (y[mine] + 1) % 4
    spoiled = replace(simulation, data=replace(simulation.data, y=y))
    local, states = plain(lr=0.1, batch_size=8), []
    for fleet in (simulation, spoiled):
        server = start(federation)
        for _ in range(2):
            server, _ = a_round(federation, fleet, server, local)
        states.append(server.state)
    for name in states[0]:
        ours = name.startswith("level1/") or not name.startswith("level")
        if ours:
            assert torch.equal(states[0][name], states[1][name]), name
    for level in ("level2/", "level3/"):
        assert not torch.equal(states[0][level + "stem.weight"], states[1][level + "stem.weight"])


def test_tensors_named_like_levels_stay() -> None:
    """They are not those of a level's own model, `level1/...`."""
    tensor = torch.zeros(1)
    state = {"level_embedding": tensor, "levels.0.weight": tensor, "level2/levels.0.weight": tensor}
    assert set(get_shared_state(state)) == {"level_embedding", "levels.0.weight"}


def test_decoupled_averages_each_level_among_its_own() -> None:
    """level2/ is the mean of clients 1 and 4, by samples; the initial model itself never changes."""
    federation, simulation = decoupled_fleet()
    server, engine = start(federation), RecordingEngine(simulation)
    after, _ = run_round(federation, engine, Settings(1, AT_ONCE), server)
    updates = {u.client: u for u in engine.replies if isinstance(u, Update)}
    for level in range(3):
        a, b = updates[level], updates[level + 3]
        n = a.num_examples + b.num_examples
        for name in a.state:
            mean = (a.num_examples * a.state[name].double() + b.num_examples * b.state[name].double()) / n
            torch.testing.assert_close(after.state[f"level{level + 1}/{name}"].double(), mean, rtol=1e-5, atol=1e-7)
        mine = {n.partition("/")[2] for n in after.state if n.startswith(f"level{level + 1}/")}
        assert mine == set(a.state)
    assert all(torch.equal(after.state[n], t) for n, t in server.state.items())


def test_untrained_levels_stay() -> None:
    """Round 0 trains level 1 only, round 1 level 2 only, round 2 level 1 again; each is sent what it had."""
    federation, simulation = decoupled_fleet(only(0, 3))
    first = start(federation)
    one, _ = a_round(federation, simulation, first, AT_ONCE)
    assert {n.partition("/")[0] for n in one.state if "/" in n} == {"level1"}
    federation, _ = decoupled_fleet(only(1, 4))
    engine = RecordingEngine(simulation)
    two, _ = run_round(federation, engine, Settings(3, AT_ONCE), one)
    piece = federation.levels[1].submodel
    sent = extract(federation.problem.layout, first.state, piece)
    assert all(torch.equal(engine.jobs[0].state[n], t) for n, t in sent.items())
    assert all(torch.equal(two.state[n], one.state[n]) for n in one.state)
    federation, _ = decoupled_fleet(only(0, 3))
    engine = RecordingEngine(simulation)
    three, _ = run_round(federation, engine, Settings(3, AT_ONCE), two)
    assert all(torch.equal(engine.jobs[0].state[n], one.state[f"level1/{n}"]) for n in engine.jobs[0].state)
    assert all(torch.equal(three.state[n], t) for n, t in two.state.items() if n.startswith("level2/"))
    assert not torch.equal(three.state["level1/stem.weight"], two.state["level1/stem.weight"])


# ---- FedRolex -------------------------------------------------


def test_fedrolex_windows_by_hand() -> None:
    """Axis a: 8 channels, 4 kept. Axis b: 6 granules of two channels, 3 granules kept. The window moves one granule a
    round.
    """
    federation = width_levels(tiny_federation({"name": "fedrolex"})[0])
    expected = {
        0: ([0, 1, 2, 3], [0, 1, 2, 3, 4, 5]),
        1: ([1, 2, 3, 4], [2, 3, 4, 5, 6, 7]),
        5: ([0, 5, 6, 7], [0, 1, 2, 3, 10, 11]),
        8: ([0, 1, 2, 3], [4, 5, 6, 7, 8, 9]),
    }
    for round, (a, b) in expected.items():
        channels = get_round_submodel(federation, round, 0).channels
        assert (list(channels["a"]), list(channels["b"])) == (a, b)
        assert list(channels["classes"]) == [0, 1, 2, 3]
        assert get_round_submodel(federation, round, 0) == get_round_submodel(federation, round, 3)


def test_channels_that_do_not_rise_are_refused() -> None:
    federation = width_levels(tiny_federation({"name": "fedrolex"})[0])
    method = replace(federation.method, choose_channels=lambda axis, n, round, client, rng: range(n)[::-1])
    with raises(ModelError, '"a"', key="channels"):
        get_round_submodel(replace(federation, method=method), 0, 0)


def test_fedrolex_covers_the_whole_model() -> None:
    """Over lcm(8, 6) = 24 rounds, level 1 alone trains every element; HeteroFL's prefix leaves most of them as they
    were.
    """
    for name, everything in (("fedrolex", True), ("heterofl", False)):
        federation = width_levels(tiny_federation({"name": name})[0])
        layout = federation.problem.layout
        exits = federation.levels[0].submodel.exits
        covered = {n: torch.zeros(s) for n, s in layout.shapes({}, layout.exits).items()}
        for round in range(24):
            piece = get_round_submodel(federation, round, 0)
            ones = {n: torch.ones(s) for n, s in layout.shapes(piece.sizes, piece.exits).items()}
            covered = put_back(layout, covered, piece, ones)
        mine = {n: t for n, t in covered.items() if layout.tensors[n].present(exits)}
        assert all(bool(t.all()) for t in mine.values()) == everything


def test_a_round_of_fedrolex_trains_the_rolled_channels() -> None:
    federation, simulation = tiny_federation({"name": "fedrolex", "hooks": {"choose_clients": only(0, 3)}})
    federation = width_levels(federation)
    server = start(federation)
    server = Server(server.state, round=5)
    after, _ = a_round(federation, simulation, server, AT_ONCE)
    moved = (after.state["stem.bias"] != server.state["stem.bias"]).tolist()
    assert moved == [c in (0, 5, 6, 7) for c in range(8)]


# ---- who takes part -------------------------------------------------


def chosen_over(federation: Federation, rounds: int) -> list[list[int]]:
    server = start(federation)
    return [
        sorted(federation.method.choose_clients(federation, Server(server.state, r), make_numpy_rng(0, r, "choose")))
        for r in range(rounds)
    ]


def planned(name: str, **more: Any) -> tuple[Federation, Simulation]:
    """A fleet with the levels that the method itself asks for."""
    federation, simulation = tiny_federation({"name": name}, **more)
    levels = build({"name": name}).make_levels(federation.problem, Targets((0.25, 0.5, 1.0), (0.2, 0.2, 0.2)))
    return replace(federation, levels=tuple(levels)), simulation


def test_all_large_gives_the_full_model() -> None:
    federation, _ = planned("all_large", clients=9, cohort=4)
    assert federation.able.tolist() == list(range(9))
    seen = chosen_over(federation, 40)
    assert all(len(c) == len(set(c)) == 4 for c in seen)
    assert {c for chosen in seen for c in chosen} == set(range(9))
    (level,) = federation.levels
    assert (level.submodel.sizes["a"], level.submodel.sizes["b"], level.submodel.exits) == (8, 12, (3,))
    for slot in federation.method.assign(federation, start(federation), make_numpy_rng(0)):
        assert slot[1:] == (0, level.submodel)


def test_exclusivefl_selects_full_clients() -> None:
    """Budgets 0.2, 0.5, 1.0 in turn: of nine clients, 2, 5 and 8."""
    federation, _ = planned("exclusivefl", clients=9, cohort=4)
    (level,) = federation.levels
    assert (level.submodel, level.needs) == (federation.problem.submodel(1.0, (3,)), 1.0)
    assert federation.able.tolist() == [2, 5, 8]
    assert all(chosen == [2, 5, 8] for chosen in chosen_over(federation, 5))


def test_exclusivefl_trains_all_exits() -> None:
    """Levels are there to be evaluated; nobody below the full model takes one, and the exits' losses are summed."""
    spec = {"name": "exclusivefl", "exits": "all"}
    federation, simulation = tiny_federation(spec, clients=9, cohort=4)
    needs, exits = (0.25, 0.5, 1.0), [(1,), (1, 2), (1, 2, 3)]
    splits = tuple(LevelShape(e[-1], 1.0, e, s, needs=s) for e, s in zip(exits, needs, strict=True))
    targets = Targets(needs, (0.0,) * 3, splits=splits, fixed="depth")
    federation = replace(federation, levels=tuple(build(spec).make_levels(federation.problem, targets)))
    assert [level.submodel.exits for level in federation.levels] == exits
    assert federation.able.tolist() == [2, 5, 8]
    slots = federation.method.assign(federation, start(federation), make_numpy_rng(0))
    assert sorted((client, level) for client, level, _ in slots) == [(2, 2), (5, 2), (8, 2)]
    torch.manual_seed(0)
    logits, y = [torch.randn(6, 4) for _ in range(3)], torch.tensor([0, 1, 2, 3, 0, 1])
    job = Job("train", 5, 9, 0, 2, slots[0][2], {}, {}, 0)
    loss = federation.method.make_loss(job, simulation.device(2))(lambda x: x, logits, y)  # type: ignore[arg-type]
    torch.testing.assert_close(loss, -sum(z.log_softmax(1)[range(6), y].mean() for z in logits))


@pytest.mark.parametrize("name", ["fedavg", "fedsgd"])
def test_fedavg_uses_the_smallest_width(name: str) -> None:
    federation, _ = planned(name, clients=9)
    (level,) = federation.levels
    assert level.name == "1" and level.submodel.exits == (3,)
    assert level.submodel.sizes["a"] < 8 and level.width < 1
    assert level.needs == pytest.approx(0.25, rel=0.35)
    assert {slot[1] for slot in federation.method.assign(federation, start(federation), make_numpy_rng(0))} == {0}


def test_exits_of_levels_by_method() -> None:
    exits = {
        name: [level.submodel.exits for level in planned(name)[0].levels]
        for name in ("heterofl", "fedrolex", "decoupled", "scalefl")
    }
    assert exits["heterofl"] == exits["fedrolex"] == exits["decoupled"] == [(3,)] * 3
    depths = [e[-1] for e in exits["scalefl"]]
    assert exits["scalefl"] == [tuple(depths[: i + 1]) for i in range(3)]
    assert depths == sorted(set(depths)) and depths[-1] == 3


def test_clients_without_data_are_never_chosen() -> None:
    federation, simulation = tiny_federation({"name": "fedavg"})
    counts = federation.clients.num_examples.copy()
    counts[1] = 0
    federation = replace(federation, clients=replace(federation.clients, num_examples=counts))
    assert 1 not in federation.able.tolist()
    parts = [dict(p) for p in simulation.parts]
    parts[1]["train"] = parts[1]["train"][:0]
    assert "training" in fail_job(make_job(federation, 1, 1), replace(simulation, parts=parts).device(1))
    assert math.isfinite(train_job(make_job(federation, 0, 0), simulation.device(0)).metrics["loss"])


@pytest.mark.parametrize(
    ("method", "key", "allowed", "refused"),
    [
        ("feddropout", "drop", [0.0, 0.99], [-0.1, 1.0]),
        ("feddf", "steps", [0, 9], [-1]),
        ("feddf", "lr", [1e-6, 3.0], [0.0, -1.0]),
        *(("feddf", key, [1, 9], [0]) for key in ("batch_size", "check_every", "patience")),
        ("reefl", "zeta", [0.01, 0.99], [0.0, 1.0]),
        *((method, "ramp", [0, 9], [-1]) for method in ("depthfl", "reefl")),
        *((method, "weight", [0.0, 3.0], [-0.1]) for method in ("depthfl", "reefl")),
        *((method, "temperature", [0.1, 9.0], [0.0, -1.0]) for method in ("depthfl", "feddf", "reefl", "scalefl")),
        ("scalefl", "beta", [0.0, 0.99], [-0.1, 1.0]),
        ("inclusivefl", "beta", [0.0, 1.0], [-0.1, 1.1]),
    ],
)
def test_settings_of_methods_have_ranges(method: str, key: str, allowed: list[float], refused: list[float]) -> None:
    for value in allowed:
        build({"name": method, key: value})
    for value in refused:
        with raises(ConfigError, value, key=f"method.{key}"):
            build({"name": method, key: value})
