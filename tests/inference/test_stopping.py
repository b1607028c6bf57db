"""Early stopping: confidence, temperatures, thresholds for a budget, and following them; against plain loops."""

import itertools
import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from support import raises
from tiny import tiny_federation
from torch import Tensor, nn

from fleetfit.errors import ConfigError
from fleetfit.evaluation import build_level_module
from fleetfit.inference import (
    Policy,
    Scores,
    apply_policy,
    calibrate,
    calibration_error,
    choose_policy,
    confidence,
    exit_costs,
    fit_temperature,
    measure_exit_latencies,
    read_policy,
    stop_early,
)
from fleetfit.rounds import start

COSTS = [1.0, 2.5, 4.0]


def make_scores(n: int = 400, seed: int = 0, classes: int = 5) -> Scores:
    """Three exits, each better and surer than the one before."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(classes, size=n)
    logits = rng.normal(size=(3, n, classes))
    for i, lead in enumerate((1.0, 2.0, 3.0)):
        logits[i, np.arange(n), labels] += lead * rng.uniform(0, 2, size=n)
    return Scores(torch.tensor(logits, dtype=torch.float32), torch.tensor(labels), torch.arange(n))


# ---- confidence --------------------------------------------------------------------------------------------------


def test_confidence_by_hand() -> None:
    """Of probabilities (0.5, 0.3, 0.2)."""
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    entropy = -sum(p * math.log(p) for p in (0.5, 0.3, 0.2)) / math.log(3)
    for measure, expected in (("max", 0.5), ("margin", 0.2), ("entropy", 1 - entropy)):
        assert float(confidence(logits, measure)) == pytest.approx(expected, abs=1e-6)
    squared = [p**2 / (0.25 + 0.09 + 0.04) for p in (0.5, 0.3, 0.2)]  # temperature 1/2 squares probabilities
    assert float(confidence(logits, "max", 0.5)) == pytest.approx(squared[0], abs=1e-6)
    with raises(ConfigError, '"margin"', key="measure"):
        confidence(logits, "margins")  # type: ignore[arg-type]


@given(st.lists(st.floats(-40, 40), min_size=2, max_size=6))
def test_confidence_lies_between_0_and_1(row: list[float]) -> None:
    for measure in ("max", "entropy", "margin"):
        assert 0 <= float(confidence(torch.tensor([row]), measure)) <= 1 + 1e-6


def test_the_calibration_error_against_a_loop() -> None:
    scores = make_scores()
    for logits in scores.logits:
        p = torch.softmax(logits.double(), -1).numpy()
        total = 0.0
        for b in range(15):
            inside = [i for i in range(len(p)) if b / 15 < p[i].max() <= (b + 1) / 15]
            if inside:
                sure = sum(p[i].max() for i in inside) / len(inside)
                right = sum(int(p[i].argmax()) == int(scores.labels[i]) for i in inside) / len(inside)
                total += len(inside) / len(p) * abs(sure - right)
        assert calibration_error(logits, scores.labels) == pytest.approx(total, abs=1e-6)


def test_the_temperature_maximizes_the_likelihood() -> None:
    """Labels drawn from softmax(z / 2.5): the temperature is found again, and the calibration error falls."""
    rng = torch.Generator().manual_seed(0)
    logits = 6 * torch.randn(20000, 4, generator=rng)
    labels = torch.multinomial(torch.softmax(logits / 2.5, -1), 1, generator=rng)[:, 0]
    fitted = fit_temperature(logits, labels)
    assert fitted == pytest.approx(2.5, rel=0.05)
    assert calibration_error(logits, labels, fitted) < 0.02 < calibration_error(logits, labels)
    grid = [(float(nn.functional.cross_entropy(logits / t, labels)), t) for t in np.linspace(1.5, 4, 101)]
    assert fitted == pytest.approx(min(grid)[1], abs=0.03)


# ---- policies ----------------------------------------------------------------------------------------------------


def walked(scores: Scores, policy: Policy) -> tuple[list[int], list[bool]]:
    """Follow a policy sample by sample."""
    exits, right = [], []
    for n in range(scores.logits.shape[1]):
        for i in range(len(scores.logits)):
            z = scores.logits[i, n] / (policy.temperatures[i] if policy.temperatures else 1.0)
            if i == len(scores.logits) - 1 or float(confidence(z, policy.measure)) >= policy.thresholds[i]:
                exits.append(i)
                right.append(int(z.argmax()) == int(scores.labels[n]))
                break
    return exits, right


@pytest.mark.parametrize("measure", ["max", "entropy", "margin"])
@pytest.mark.parametrize("temperatures", [(), (0.5, 2.0, 1.0)])
def test_an_outcome_against_a_walk(measure: Any, temperatures: tuple[float, ...]) -> None:
    scores = make_scores(120)
    policy = Policy((0.6, 0.5, 0.0), measure, temperatures)
    exits, right = walked(scores, policy)
    result = apply_policy(scores, policy, COSTS)
    assert result.exits.tolist() == exits
    assert result.shares == pytest.approx([exits.count(i) / 120 for i in range(3)])
    assert result.cost == pytest.approx(sum(COSTS[e] for e in exits) / 120)
    assert result.accuracy == pytest.approx(sum(right) / 120)


@settings(max_examples=40, deadline=None)
@given(st.floats(1.0, 4.0), st.sampled_from(["max", "entropy", "margin"]), st.integers(0, 5))
def test_validation_samples_use_the_budget(budget: float, measure: Any, seed: int) -> None:
    scores = make_scores(seed=seed)
    result = apply_policy(scores, choose_policy(scores, COSTS, budget, measure=measure), COSTS)
    assert result.cost <= budget * (1 + 1e-9)
    assert result.cost >= budget - 0.05  # 400 samples: a few of them, at 1.5 a step


def test_shares_of_exits_are_geometric() -> None:
    scores = make_scores(1000)
    policy = choose_policy(scores, COSTS, 2.0)
    shares = apply_policy(scores, policy, COSTS).shares
    assert shares[1] / shares[0] == pytest.approx(shares[2] / shares[1], rel=0.02)
    sure = confidence(scores.logits[0])
    leaving = round(shares[0] * 1000)
    assert policy.thresholds[0] == pytest.approx(float(sure.sort(descending=True).values[leaving - 1]))


def test_the_ends_of_the_budget() -> None:
    scores = make_scores()
    assert apply_policy(scores, choose_policy(scores, COSTS, 4.0), COSTS).shares == (0, 0, 1)
    assert apply_policy(scores, choose_policy(scores, COSTS, 1e9), COSTS).accuracy == scores.accuracies[-1]
    least = apply_policy(scores, choose_policy(scores, COSTS, 1.0), COSTS)
    assert least.shares == (1, 0, 0) and least.accuracy == scores.accuracies[0]
    with raises(ConfigError, 1, "0.250", 0.9, key="budget"):
        choose_policy(scores, COSTS, 0.9)
    with raises(ConfigError, '"later"', key="mode"):
        choose_policy(scores, COSTS, 2, mode="later")  # type: ignore[arg-type]


@pytest.mark.parametrize(("budget", "exit"), [(1.0, 0), (2.49, 0), (2.5, 1), (3.9, 1), (4.0, 2), (9.0, 2)])
def test_anytime_takes_the_deepest_affordable_exit(budget: float, exit: int) -> None:
    scores = make_scores()
    result = apply_policy(scores, choose_policy(scores, COSTS, budget, mode="anytime"), COSTS)
    assert result.shares[exit] == 1 and result.accuracy == pytest.approx(scores.accuracies[exit])


def test_equal_confidences_cost_no_more_than_the_budget() -> None:
    """All samples are equally sure at the first exit: none can leave there without the others."""
    logits = torch.zeros(2, 50, 3)
    logits[:, :, 0] = 2.0
    scores = Scores(logits, torch.zeros(50, dtype=torch.int64), torch.arange(50))
    assert apply_policy(scores, choose_policy(scores, [1.0, 2.0], 1.5), [1.0, 2.0]).cost == 1.0


def test_a_calibration_is_written_and_read(tmp_path: Any) -> None:
    calibration = calibrate("2", make_scores(), make_scores(seed=1), COSTS, 2.0, temperature=True, points=5)
    again = json.loads(json.dumps(calibration.numbers(), allow_nan=False))
    assert read_policy(again) == calibration.policy and len(calibration.policy.temperatures) == 3
    assert [p["budget"] for p in calibration.curve] == pytest.approx([1, 1.75, 2.5, 3.25, 4])
    assert calibration.curve[-1]["accuracy"] == calibration.test.full


# ---- following a policy --------------------------------------------------------------------------------------------


@pytest.fixture
def module() -> nn.Module:
    federation, _ = tiny_federation({"name": "scalefl"}, norm=False)
    return build_level_module(federation, start(federation), 2, None)


class Sizes:
    """Notes with how many samples each segment was run."""

    def __init__(self, module: Any) -> None:
        self.module, self.exits, self.sizes = module, module.exits, []

    def start(self, x: Tensor) -> Any:
        return self.module.start(x)

    def segment(self, i: int, carry: Tensor) -> Any:
        self.sizes.append(len(carry))
        return self.module.segment(i, carry)

    def head(self, i: int, carry: Tensor) -> Tensor:
        logits: Tensor = self.module.head(i, carry)
        return logits


@pytest.mark.parametrize("thresholds", [(0.3, 0.28, 0.0), (0.0, 0.0, 0.0), (2.0, 2.0, 0.0), (2.0, 0.0, 0.0)])
def test_stopped_samples_are_not_computed(module: Any, thresholds: tuple[float, ...]) -> None:
    x = torch.randn(40, 1, 4, 4) * 3
    policy = Policy(thresholds)
    with torch.no_grad():
        logits = torch.stack(module(x))
    scores = Scores(logits, torch.zeros(40, dtype=torch.int64), torch.arange(40))
    expected = apply_policy(scores, policy, COSTS).exits
    counting: Any = Sizes(module)
    stopped = stop_early(counting, x, policy)
    assert torch.equal(stopped.exits, expected)
    assert torch.allclose(stopped.logits, logits[expected, torch.arange(40)], atol=1e-6)
    reached = [int((expected >= i).sum()) for i in range(3)]
    assert counting.sizes == [n for n in reached if n]


def test_a_policy_of_other_exits_is_refused(module: nn.Module) -> None:
    with raises(ConfigError, 2, 3, key="policy"):
        stop_early(module, torch.zeros(1, 1, 4, 4), Policy((0.5, 0.0)))


def test_costs_of_exits() -> None:
    """Of the tiny model by hand: stem 16*8; a block 2 * 8*12; a classifier 8*4."""
    federation, _ = tiny_federation({"name": "scalefl"})
    problem = federation.problem
    costs = exit_costs(problem.architecture, problem.layout.full_sizes, (1, 2, 3), (1, 4, 4))
    assert costs == [128 + 192 + 32, 128 + 2 * 192 + 2 * 32, 128 + 3 * 192 + 3 * 32]


def test_latencies_rise_from_exit_to_exit(module: nn.Module) -> None:
    latencies = measure_exit_latencies(module, torch.rand(1, 1, 4, 4), passes=5)
    assert len(latencies) == 3 and all(0 < a <= b for a, b in itertools.pairwise(latencies))
