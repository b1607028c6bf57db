"""Early stopping by confidence: who leaves at which exit, for an average cost (ScaleFL, appendix 6.3).

As in MSDNet (Huang et al., ICLR 2018, 4.2): with a budget for a whole batch, a sample leaves at the first exit whose
confidence reaches that exit's threshold. The share of samples that reach exit k and leave there would be the same q at
every exit, so that shares fall, or rise, geometrically: s_k = p^k / sum_i p^i. The thresholds are those at which the
validation samples leave in these shares, and p is the largest for which their average cost is within the budget.
With a budget for each sample ("anytime") there is nothing to choose: a sample's prediction is that of the deepest exit
which the budget affords.

Differs from MSDNet: p is found on the cost that the validation samples really have, so equal confidences cannot push it
above the budget; entropy and margin can stand for the highest probability, and exits may have temperatures.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fleetfit.errors import ConfigError
from fleetfit.inference.confidence import Measure, confidence
from fleetfit.inference.scores import Scores

Mode = Literal["budgeted", "anytime"]
"""Whether the samples share a budget, or each has its own."""
NEVER = 2.0
"""A threshold that no confidence reaches."""
_STEPS = 60


@dataclass(frozen=True)
class Policy:
    """When a sample leaves.

    Attributes:
        thresholds: At each exit, a sample leaves if its confidence is at least this much [E]; 0: everybody does.
        measure: How confidence is measured.
        temperatures: What the logits of each exit are divided by before [E].
    """

    thresholds: tuple[float, ...]
    measure: Measure = "max"
    temperatures: tuple[float, ...] = ()

    def leaves(self, exit: int, logits: Tensor) -> Tensor:
        """Return which samples leave at an exit (from 0), bool [B], by its logits [B, classes]."""
        temperature = self.temperatures[exit] if self.temperatures else 1.0
        return confidence(logits, self.measure, temperature) >= self.thresholds[exit]


@dataclass(frozen=True, eq=False)
class Outcome:
    """What came of a policy on labelled samples.

    Attributes:
        exits: Where each sample left, from 0, int64 [N].
        right: Whether its prediction was right, bool [N].
        shares: Share of the samples that left at each exit [E].
        accuracy: From 0 to 1.
        cost: Average over the samples, in the unit of the exits' costs.
        full: Accuracy of the last exit, which everybody would reach without a policy.
    """

    exits: Tensor
    right: Tensor
    shares: tuple[float, ...]
    accuracy: float
    cost: float
    full: float

    def numbers(self) -> dict[str, Any]:
        """Return shares, accuracy and cost, as they are written down."""
        return {"shares": list(self.shares), "accuracy": self.accuracy, "cost": self.cost, "full": self.full}


def outcome(found: Scores, policy: Policy, costs: Sequence[float]) -> Outcome:
    """Apply a policy to samples that all exits have scored.

    Args:
        found: The samples' logits.
        policy: When they leave.
        costs: Cost of a sample that leaves at each exit [E].
    """
    count = len(found.logits)
    leaves = torch.stack([policy.leaves(i, found.logits[i]) for i in range(count)])
    leaves[-1] = True
    exits = leaves.int().argmax(0)
    predicted = found.logits.argmax(-1)
    right = predicted.gather(0, exits[None])[0] == found.labels
    shares = torch.bincount(exits, minlength=count).double() / len(exits)
    return Outcome(
        exits,
        right,
        tuple(shares.tolist()),
        float(right.double().mean()),
        float(np.dot(shares.numpy(), np.asarray(costs))),
        found.accuracies[-1],
    )


# ---- choosing a policy ---------------------------------------------------------------------------------------------


def policy_for(
    found: Scores,
    costs: Sequence[float],
    budget: float,
    mode: Mode = "budgeted",
    measure: Measure = "max",
    temperatures: Sequence[float] = (),
) -> Policy:
    """Choose the policy for a budget on validation samples.

    Args:
        found: The validation samples' logits.
        costs: Cost of a sample that leaves at each exit [E], ascending.
        budget: In the unit of the costs; of the average sample, or with "anytime" of each.
        mode: "budgeted" or "anytime".
        measure: How confidence is measured.
        temperatures: What the logits of each exit are divided by before [E]; () for none.

    Raises:
        ConfigError: The budget does not even reach the first exit, or there is no such mode or measure.
    """
    if mode not in ("budgeted", "anytime"):
        raise ConfigError(f'there is no mode "{mode}"; there are budgeted (samples share the budget) and anytime.')
    if not budget >= costs[0] * (1 - 1e-9):
        raise ConfigError(
            f"a sample that leaves at the first exit costs {costs[0]:g} already, {costs[0] / costs[-1]:.3f} of what "
            f"the last exit costs; the budget is {budget:g}."
        )
    count, given = len(costs), tuple(temperatures)
    if mode == "anytime":
        deepest = max(i for i in range(count) if costs[i] <= budget * (1 + 1e-9))
        return Policy(tuple(NEVER if i < deepest else 0.0 for i in range(count)), measure, given)
    sure = torch.stack([confidence(z, measure, given[i] if given else 1.0) for i, z in enumerate(found.logits)])
    whole = Policy((*[NEVER] * (count - 1), 0.0), measure, given)
    if budget >= costs[-1]:
        return whole

    def at(log_p: float) -> Policy:
        return Policy(_thresholds(sure, _geometric(log_p, count)), measure, given)

    def affordable(log_p: float) -> bool:
        return outcome(found, at(log_p), costs).cost <= budget * (1 + 1e-9)

    low, high = -30.0, 30.0  # everybody leaves at the first exit; nobody before the last
    if affordable(high):
        return at(high)
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if affordable(middle) else (low, middle)
    return at(low)


def _geometric(log_p: float, count: int) -> np.ndarray:
    """Return shares in proportion to p^k that add up to one."""
    powers = log_p * np.arange(count)
    shares: np.ndarray = np.exp(powers - powers.max())
    return shares / shares.sum()


def _thresholds(sure: Tensor, shares: np.ndarray) -> tuple[float, ...]:
    """Return the thresholds at which samples leave in these shares, by their confidence [E, N]."""
    left = torch.ones(sure.shape[1], dtype=torch.bool)
    found = []
    for i, share in enumerate(shares[:-1]):
        wanted = round(float(share) * sure.shape[1])
        here = sure[i][left].sort(descending=True).values
        if wanted == 0 or not len(here):
            found.append(NEVER)
            continue
        found.append(float(here[min(wanted, len(here)) - 1]))
        left &= sure[i] < found[-1]
    return (*found, 0.0)
