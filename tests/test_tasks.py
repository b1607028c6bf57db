"""Tasks against plain loops, and every method on every task."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from sampling import one_of_each, some_quick
from support import raises
from tiny import plain, spec_of, tiny, tiny_data, tiny_parts
from torch import Tensor, nn

from fleetfit import names
from fleetfit.anatomy import Architecture, Axis, ExitModel
from fleetfit.core import Clients, DeviceResources, Evaluation, Federation, Level, Problem, Simulation
from fleetfit.core.tasks import get_task, multi_label, next_token, regression
from fleetfit.data import Data, drop_labels
from fleetfit.engines.local import local as local_engine
from fleetfit.errors import ConfigError, ModelError
from fleetfit.evaluation import EvaluationScope
from fleetfit.hooks import build
from fleetfit.hooks.losses import self_distillation
from fleetfit.planner import Targets
from fleetfit.rounds import Settings, run, start

# ---- formulas ----------------------------------------------------------------------------------------------------


def softmax(z: list[float]) -> list[float]:
    e = [math.exp(v) for v in z]
    return [v / sum(e) for v in e]


def make_logits(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_next_token_scores_positions_with_successors() -> None:
    """Two samples of three positions, two of the six padded: the mean over the other four, by hand."""
    logits, y = make_logits(2, 3, 5), torch.tensor([[1, 4, -100], [0, -100, 2]])
    scored = [(0, 0), (0, 1), (1, 0), (1, 2)]
    losses = [-math.log(softmax(logits[b, t].tolist())[int(y[b, t])]) for b, t in scored]
    assert float(next_token.loss(logits, y)) == pytest.approx(sum(losses) / 4, rel=1e-5)
    hits = [max(range(5), key=lambda v: float(logits[b, t, v])) == int(y[b, t]) for b, t in scored]
    assert next_token.hits(logits, y).tolist() == hits
    teacher, tau = make_logits(2, 3, 5, seed=1), 3.0
    kls = []
    for b, t in scored:
        p, q = softmax((teacher[b, t] / tau).tolist()), softmax((logits[b, t] / tau).tolist())
        kls.append(tau**2 * sum(a * math.log(a / c) for a, c in zip(p, q, strict=True)))
    assert float(next_token.divergence(teacher, logits, tau, y)) == pytest.approx(sum(kls) / 4, rel=1e-4)


def test_a_batch_of_padding_alone_costs_nothing() -> None:
    logits, y = make_logits(2, 3, 5).requires_grad_(), torch.full((2, 3), -100)
    loss = next_token.loss(logits, y) + next_token.divergence(make_logits(2, 3, 5, seed=1), logits, 3.0, y)
    loss.backward()
    assert loss.item() == 0 and float(logits.grad.abs().sum()) == 0  # type: ignore[union-attr]


def test_regression_is_explained_variance() -> None:
    """R2 = 1 - SSE / SST; with targets of variance one and mean zero, SST is their number."""
    y = make_logits(400, 2)
    y = (y - y.mean(0)) / y.std(0, correction=0)
    guess = y + 0.5 * make_logits(400, 2, seed=1)
    sse = sum((float(a) - float(b)) ** 2 for a, b in zip(guess.flatten(), y.flatten(), strict=True))
    sst = sum(float(b) ** 2 for b in y.flatten())
    assert float(regression.hits(guess, y).mean()) == pytest.approx(1 - sse / sst, rel=1e-4)
    assert float(regression.loss(guess, y)) == pytest.approx(sse / 800, rel=1e-5)
    assert float(regression.divergence(y, guess, 3.0, y)) == pytest.approx(sse / 800, rel=1e-5)


@pytest.mark.parametrize(("outputs", "targets"), [((8, 1), (8, 2)), ((8,), (8, 1)), ((8, 2), (8, 1))])
def test_a_regression_refuses_outputs_that_would_be_stretched(outputs: Any, targets: Any) -> None:
    with raises(ModelError, *outputs, *targets):
        regression.loss(torch.ones(outputs), torch.ones(targets))


def test_multi_label_treats_each_label_as_a_coin() -> None:
    logits, teacher, y, tau = make_logits(3, 4), make_logits(3, 4, seed=1), (make_logits(3, 4, seed=2) > 0).float(), 2.0

    def p(z: float) -> float:
        return 1 / (1 + math.exp(-z))

    pairs = list(zip(logits.flatten().tolist(), teacher.flatten().tolist(), y.flatten().tolist(), strict=True))
    loss = [-(t * math.log(p(z)) + (1 - t) * math.log(1 - p(z))) for z, _, t in pairs]
    assert float(multi_label.loss(logits, y)) == pytest.approx(sum(loss) / 12, rel=1e-5)
    coins = [(p(a / tau), p(z / tau)) for z, a, _ in pairs]
    kl = [a * math.log(a / z) + (1 - a) * math.log((1 - a) / (1 - z)) for a, z in coins]
    assert float(multi_label.divergence(teacher, logits, tau, y)) == pytest.approx(tau**2 * sum(kl) / 12, rel=1e-4)
    assert multi_label.hits(logits, y).tolist() == [(p(z) > 0.5) == (t == 1) for z, _, t in pairs]
    assert torch.equal(multi_label.hits(multi_label.scores(logits), y), multi_label.hits(logits, y))


@pytest.mark.parametrize("name", ["classification", "next_token", "regression", "multi_label"])
def test_no_gradient_reaches_the_teacher(name: str) -> None:
    task = get_task(name)
    shape = (2, 3, 4) if name == "next_token" else (2, 4)
    teacher, student = make_logits(*shape).requires_grad_(), make_logits(*shape, seed=1).requires_grad_()
    y = torch.zeros(shape[:-1], dtype=torch.int64) if name in ("classification", "next_token") else torch.zeros(shape)
    task.divergence(teacher, student, 3.0, y).backward()
    assert teacher.grad is None and student.grad is not None
    assert task.divergence(student, student, 3.0, y).item() == pytest.approx(0, abs=1e-6)
    assert bool(torch.isfinite(self_distillation([student, teacher], y, task, 0.1, 3.0)))


def test_an_unknown_task_is_a_sentence() -> None:
    with raises(ConfigError, '"regresion"', '"regression"', key="task"):
        get_task("regresion")


# ---- every method on every task ----------------------------------------------------------------------------------


class Words(ExitModel):
    """An embedding, linear blocks, and logits at every position."""

    def __init__(self, sizes: Mapping[str, int], exits: tuple[int, ...]) -> None:
        super().__init__()
        hidden = sizes["a"]
        self.exits = exits
        self.stem = nn.Embedding(7, hidden)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU()) for _ in range(exits[-1]))
        self.heads = nn.ModuleDict({str(e): nn.Linear(hidden, sizes["classes"]) for e in exits})

    def start(self, x: Tensor) -> Tensor:
        return self.stem(x)


@dataclass(frozen=True)
class WordFamily(Architecture):
    tokens: int = 7

    @property
    def axes(self) -> Mapping[str, Axis]:
        return {"a": Axis(8), "classes": Axis(7, scaled=False)}

    @property
    def blocks(self) -> int:
        return 3

    def build(self, axes: Mapping[str, int], exits: tuple[int, ...]) -> nn.Module:
        return Words(axes, exits)


def counting_words(n: int = 120) -> Data:
    """Each token is followed by the next larger one; the last position of every other sample is padded."""
    x = (torch.arange(n)[:, None] + torch.arange(5)) % 6
    y = (x + 1) % 6
    x[::2, -1], y[::2, -1] = 6, -100
    splits = dict(zip(("train", "validation", "test"), torch.arange(n).split([80, 16, 24]), strict=True))
    return Data("counting", x, y, splits, 7, task="next_token", vocabulary=7, padding=6)


def with_labels(task: str) -> Data:
    data = tiny_data()
    y = nn.functional.one_hot(data.y, 4)
    return replace(data, y=y if task == "multi_label" else 3 + y.float() * 5, task=task)


def make_fleet(task: str, spec: Mapping[str, Any]) -> tuple[Federation, Simulation]:
    data = counting_words() if task == "next_token" else with_labels(task)
    problem = Problem(WordFamily() if task == "next_token" else tiny(), data.sample_shape, get_task(task), (1, 2, 3))
    levels = (
        Level("1", problem.submodel(0.5, (1,)), 0.5, 0.3),
        Level("2", problem.submodel(1.0, (1, 2, 3)), 1.0, 1.0),
    )
    method, parts, reported = build(spec), tiny_parts(data, 6), np.array([0.3, 1.0] * 3)
    if not method.needs_budgets:
        levels = tuple(method.make_levels(problem, Targets((1.0,), (0.1,))))
    simulation = Simulation(
        problem, data, parts, DeviceResources({"parameters": reported}), unlabeled=drop_labels(data)
    )
    clients = Clients(np.array([len(p["train"]) for p in parts]), reported if method.needs_budgets else None)
    return Federation(problem, clients, levels, 4, method, spec, 0, simulation.device(None)), simulation


PAIRS = [(name, task) for name in names.list_names("methods") for task in ("next_token", "regression", "multi_label")]


@pytest.mark.parametrize(("name", "task"), some_quick(PAIRS, one_of_each(PAIRS)))
def test_every_method_learns_every_task(name: str, task: str) -> None:
    """Better than the constant answer after a few rounds, which two rounds of noise would not be."""
    federation, simulation = make_fleet(task, spec_of(name))
    scope = EvaluationScope(Evaluation(batch_size=64), statistics_samples=200)
    rounds = 12 if name == "feddropout" else 8  # each client trains a part
    settings = Settings(rounds, plain(lr=0.1, epochs=3, batch_size=8, momentum=0.9), scope=scope)
    if name == "fedsgd":
        settings = replace(settings, rounds=40, local=plain(lr=0.5))
    *_, last = run(federation, local_engine(simulation), settings, start(federation))
    assert not last.report["failures"]
    columns = last.report["evaluate"]["static"]
    constant = {"next_token": 1 / 6, "regression": 0.0, "multi_label": 0.75}[task]
    best = columns["global"] if name != "decoupled" else max(columns["test_levels"].values())
    assert constant < best <= 1
    assert len(columns["test_exits"]) == len(federation.levels[-1].submodel.exits)


def test_masked_cross_entropy_is_for_classes() -> None:
    federation, _ = make_fleet("regression", {"name": "heterofl", "masked": True})
    with raises(ConfigError, "masked = true", key="masked"):
        federation.method.make_levels(federation.problem, Targets((0.5, 1.0), (0.3, 0.3)))
