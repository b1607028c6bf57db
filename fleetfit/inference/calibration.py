"""Choose a policy of early stopping on validation samples for a budget, and evaluate it on test samples."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

import numpy as np
from pydantic import Field

from fleetfit.inference.scores import COSTS, Scores
from fleetfit.inference.stopping import (
    Measure,
    Mode,
    Outcome,
    Policy,
    apply_policy,
    calibration_error,
    choose_policy,
    fit_temperature,
)
from fleetfit.runs.schema import Count, Full, List, Number, Record, Share


@dataclass(frozen=True, eq=False)
class Calibration:
    """A policy chosen on validation samples, and its outcome on test samples.

    Attributes:
        level: Name of the level.
        cost: The unit of costs and budget: "multiply_adds" or "latency_s".
        costs: Cost of a sample that stops at each exit [E].
        budget: Budget in the same unit.
        mode: "budgeted" or "anytime".
        policy: The policy of early stopping.
        validation: Its outcome on the validation samples.
        test: Its outcome on the test samples.
        accuracies: Accuracy of each exit on the test samples [E].
        calibration_errors: Error of each exit on the test samples, before and (if used) after temperature scaling [E].
        curve: For budgets from the first exit's cost to the last one's: budget, and the numbers of `test`.
        exits: Name of each exit in tables: its number among all exits of the model, and the blocks before it [E].
        level_cost: The level's planned cost in the same unit, if known. It does not include early classifiers of the
            full model, but the cost of a sample that passes them does.
        file: Where it is saved; None for that of one client, which is not saved.
    """

    level: str
    cost: str
    costs: tuple[float, ...]
    budget: float
    mode: Mode
    policy: Policy
    validation: Outcome
    test: Outcome
    accuracies: tuple[float, ...]
    calibration_errors: tuple[tuple[float, float | None], ...]
    curve: tuple[Mapping[str, Any], ...]
    exits: tuple[str, ...] = ()
    level_cost: float | None = None
    file: Path | None = None

    def __repr__(self) -> str:
        """Return level, budget and the outcome on test samples, with that of the last exit alone."""
        outcome = self.test.numbers()
        return (
            f"Calibration(level {self.level}, {self.mode}, budget {self.budget:.4g} {self.cost}: accuracy "
            f"{outcome['accuracy']:.1%} at {outcome['cost']:.4g} a sample; the last exit has "
            f"{self.accuracies[-1]:.1%} at {self.costs[-1]:.4g})"
        )

    def numbers(self) -> dict[str, Any]:
        """Return the calibration as JSON values."""
        names = ("level", "cost", "costs", "budget", "mode", "accuracies", "calibration_errors", "curve")
        return {name: getattr(self, name) for name in names} | {
            "policy": asdict(self.policy),
            "validation": self.validation.numbers(),
            "test": self.test.numbers(),
        }


def calibrate(
    level: str,
    validation: Scores,
    test: Scores,
    costs: Sequence[float],
    budget: float,
    cost: str = "multiply_adds",
    mode: Mode = "budgeted",
    measure: Measure = "max",
    temperature: bool = False,
    points: int = 20,
) -> Calibration:
    """Choose a policy on validation samples, apply it to test samples, and compute the curve over budgets.

    Args:
        level: Name of the level.
        validation: Logits of the validation samples.
        test: Logits of the test samples.
        costs: Cost of a sample that stops at each exit [E].
        budget: Budget in the unit of the costs.
        cost: The unit of the costs.
        mode: "budgeted" or "anytime".
        measure: The measure of confidence.
        temperature: Whether to fit each exit's temperature on the validation samples.
        points: Number of budgets on the curve.

    Raises:
        ConfigError: The budget does not reach the first exit, or the mode or measure is unknown.
    """
    count = len(costs)
    temperatures = [fit_temperature(z, validation.labels) for z in validation.logits] if temperature else []
    before = [calibration_error(z, test.labels) for z in test.logits]
    after: list[float | None] = [None] * count
    if temperatures:
        after = [calibration_error(z, test.labels, t) for z, t in zip(test.logits, temperatures, strict=True)]

    def choose(limit: float) -> Policy:
        return choose_policy(validation, costs, limit, mode, measure, temperatures)

    policy = choose(budget)
    limits = np.linspace(costs[0], costs[-1], points).tolist() if count > 1 else [costs[0]]
    curve = [{"budget": limit, **apply_policy(test, choose(limit), costs).numbers()} for limit in limits]
    return Calibration(
        level, cost, tuple(costs), budget, mode, policy, apply_policy(validation, policy, costs),
        apply_policy(test, policy, costs), tuple(test.accuracies), tuple(zip(before, after, strict=True)), tuple(curve),
    )  # fmt: skip


class OutcomeRecord(Record):
    """The outcome of a policy: shares by exit, accuracy, cost of a sample."""

    shares: Full[Share]
    accuracy: Share
    cost: Number


class TestOutcomeRecord(OutcomeRecord):
    """The outcome on test samples, with the accuracy of the last exit."""

    full: Share


class CurveRecord(OutcomeRecord):
    """A point of the curve over budgets."""

    budget: Number


class PolicyRecord(Record):
    """A policy of early stopping."""

    thresholds: Full[Number]
    measure: str
    temperatures: List[Annotated[Number, Field(gt=0)]]


class CalibrationRecord(Record):
    """A calibration of one level as its file has it: `Calibration.numbers`, and the round."""

    round: Count
    level: str
    cost: str
    costs: Full[Annotated[Number, Field(gt=0)]]
    budget: Number
    mode: str
    accuracies: Full[Share]
    calibration_errors: Full[Annotated[list[Number | None], Field(min_length=2)]]
    curve: List[CurveRecord]
    test: TestOutcomeRecord
    policy: PolicyRecord


def check_calibration(numbers: Any, exits: int) -> None:
    """Check the content of a calibration's file: `Calibration.numbers`, and the round.

    Args:
        numbers: The content.
        exits: Number of exits of the level.

    Raises:
        ValueError: A number is missing or invalid.
    """
    CalibrationRecord.load(numbers)
    policy = numbers["policy"]
    lists = {key: numbers[key] for key in ("costs", "accuracies", "calibration_errors")}
    lists |= {"policy/thresholds": policy["thresholds"], "test/shares": numbers["test"]["shares"]}
    if policy["temperatures"]:
        lists["policy/temperatures"] = policy["temperatures"]
    for name, values in lists.items():
        if len(values) != exits:
            raise ValueError(f"{name} has {len(values)} entries, but the level has {exits} exits")
    if policy["measure"] not in get_args(Measure) or numbers["cost"] not in COSTS:
        raise ValueError(f"{policy['measure']} or {numbers['cost']} is unknown")


def read_policy(numbers: Mapping[str, Any]) -> Policy:
    """Return the policy of `Calibration.numbers`, which `check_calibration` has checked."""
    policy = numbers["policy"]
    return Policy(tuple(map(float, policy["thresholds"])), policy["measure"], tuple(map(float, policy["temperatures"])))
