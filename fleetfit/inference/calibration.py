"""A policy chosen on validation samples for a budget, tried on test samples, with its curve over budgets."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

import numpy as np

from fleetfit.errors import RunError
from fleetfit.inference.scores import COSTS, Scores
from fleetfit.inference.stopping import (
    Measure,
    Mode,
    Outcome,
    Policy,
    calibration_error,
    fitted_temperature,
    outcome,
    policy_for,
)
from fleetfit.records.schema import CalibrationRecord


@dataclass(frozen=True, eq=False)
class Calibration:
    """A policy chosen on validation samples, and what it does to test samples.

    Attributes:
        level: Name of the level.
        cost: What costs and budget are meant in: "multiply_adds" or "latency_s".
        costs: Of a sample that leaves at each exit [E].
        budget: In the same unit.
        mode: "budgeted" or "anytime".
        policy: When a sample leaves.
        validation: What it does to the samples that it was chosen on.
        test: What it does to the test samples.
        accuracies: Of each exit on the test samples [E].
        calibration_errors: Of each exit on the test samples, before temperature scaling and after it [E]; without,
            there is no second one.
        curve: For budgets from the first exit's cost to the last one's: budget, and the numbers of `test`.
        exits: Of each exit, its number among all of the model's and the blocks before it, as tables say it [E].
        level_cost: What the level costs by its plan, in the same unit, where that can be told: an early classifier of
            the full model counts for a sample that passes it, and not for the level.
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

    def numbers(self) -> dict[str, Any]:
        """Return all that can be written as JSON."""
        found = {name: getattr(self, name) for name in ("level", "cost", "costs", "budget", "mode", "accuracies",
                                                        "calibration_errors", "curve")}  # fmt: skip
        return found | {
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
    """Choose a policy on validation samples, try it on test samples, and draw up the curve over budgets.

    Args:
        level: Name of the level.
        validation: Logits that the policy is chosen on.
        test: Logits that it is tried on.
        costs: Cost of a sample that leaves at each exit [E].
        budget: In the unit of the costs.
        cost: What they are meant in.
        mode: "budgeted" or "anytime".
        measure: How confidence is measured.
        temperature: Whether each exit's temperature is fitted to the validation samples.
        points: Budgets on the curve.

    Raises:
        ConfigError: The budget does not reach the first exit, or there is no such mode or measure.
    """
    count = len(costs)
    fitted = [fitted_temperature(z, validation.labels) for z in validation.logits] if temperature else []
    before = [calibration_error(z, test.labels) for z in test.logits]
    after: list[float | None] = [None] * count
    if fitted:
        after = [calibration_error(z, test.labels, t) for z, t in zip(test.logits, fitted, strict=True)]

    def chosen(limit: float) -> Policy:
        return policy_for(validation, costs, limit, mode, measure, fitted)

    policy = chosen(budget)
    limits = np.linspace(costs[0], costs[-1], points).tolist() if count > 1 else [costs[0]]
    curve = [{"budget": limit, **outcome(test, chosen(limit), costs).numbers()} for limit in limits]
    return Calibration(
        level, cost, tuple(costs), budget, mode, policy, outcome(validation, policy, costs),
        outcome(test, policy, costs), tuple(test.accuracies), tuple(zip(before, after, strict=True)), tuple(curve),
    )  # fmt: skip


def check_numbers(numbers: Any, exits: int) -> None:
    """Look at what was read of `Calibration.numbers`, with the round beside it.

    Args:
        numbers: As they were read.
        exits: How many the level has.

    Raises:
        ValueError: Something is missing, or not as it should be.
    """
    CalibrationRecord.load(numbers)
    policy = numbers["policy"]
    lists = {key: numbers[key] for key in ("costs", "accuracies", "calibration_errors")}
    lists |= {"policy/thresholds": policy["thresholds"], "test/shares": numbers["test"]["shares"]}
    if policy["temperatures"]:
        lists["policy/temperatures"] = policy["temperatures"]
    for name, found in lists.items():
        if len(found) != exits:
            raise ValueError(f"{name} has {len(found)} entries, and the level {exits} exits")
    if policy["measure"] not in get_args(Measure) or numbers["cost"] not in COSTS:
        raise ValueError(f"{policy['measure']} or {numbers['cost']} is unknown")


def read_policy(numbers: Mapping[str, Any]) -> Policy:
    """Return the policy of `Calibration.numbers`.

    Raises:
        RunError: It is not one.
    """
    try:
        found = numbers["policy"]
        return Policy(
            tuple(map(float, found["thresholds"])), found["measure"], tuple(map(float, found["temperatures"]))
        )
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"the calibration cannot be read: {error}. Calibrate again.", key="calibration") from None
