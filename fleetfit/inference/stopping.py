"""Early stopping by confidence: who leaves at which exit, for an average cost (ScaleFL, appendix 6.3).

As in MSDNet (Huang et al., ICLR 2018, 4.2): with a budget for a whole batch, a sample leaves at the first exit whose
confidence reaches that exit's threshold. The share of samples that reach exit k and leave there would be the same q at
every exit, so that shares fall, or rise, geometrically: s_k = p^k / sum_i p^i. The thresholds are those at which the
validation samples leave in these shares, and p is the largest for which their average cost is within the budget.
With a budget for each sample ("anytime") there is nothing to choose: a sample's prediction is that of the deepest exit
which the budget affords.

Confidence lies between 0 and 1. The highest probability is that of MSDNet (Huang et al., ICLR 2018), which ScaleFL's
appendix 6.3 follows; entropy is BranchyNet's (Teerapittayanon et al., ICPR 2016), turned round and scaled so that 1 is
certain. Temperature scaling and the expected calibration error with 15 bins of equal width are those of Guo et al.,
ICML 2017.

Differs from MSDNet: p is found on the cost that the validation samples really have, so equal confidences cannot push it
above the budget; entropy and margin can stand for the highest probability, and exits may have temperatures.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fleetfit.errors import ConfigError, RunError, did_you_mean
from fleetfit.inference.scores import Scores
from fleetfit.layout import with_segments

# ---- how sure a prediction is ----------------------------------------------------------------------------------------

Measure = Literal["max", "entropy", "margin"]
"""Highest probability; one minus the entropy over its largest value; lead of the first class over the second."""
_BINS = 15
_COLDEST, _HOTTEST = 0.05, 20.0


def confidence(logits: Tensor, measure: Measure = "max", temperature: float = 1.0) -> Tensor:
    """Return how sure predictions are, from 0 to 1, [...] of logits [..., classes].

    Args:
        logits: Of one exit or of several.
        measure: "max", "entropy" or "margin".
        temperature: Logits are divided by it.

    Raises:
        ConfigError: There is no such measure.
    """
    if measure not in get_args(Measure):
        known = get_args(Measure)
        raise ConfigError(f'unknown confidence "{measure}"; choose one of {", ".join(known)}.'
                          f"{did_you_mean(measure, known)}", key="measure")  # fmt: skip
    logs = F.log_softmax(logits.float() / temperature, dim=-1)
    if measure == "max":
        return logs.amax(-1).exp()
    if logits.shape[-1] < 2:
        return torch.ones(logits.shape[:-1])
    if measure == "entropy":
        return (1 + (logs.exp() * logs).sum(-1) / math.log(logits.shape[-1])).clamp(0, 1)
    first, second = logs.exp().topk(2, dim=-1).values.unbind(-1)
    return first - second


def fitted_temperature(logits: Tensor, labels: Tensor) -> float:
    """Return the temperature at which the predictions' mean log-likelihood is highest, between 0.05 and 20.

    Args:
        logits: [N, classes].
        labels: int64 [N].
    """
    from scipy.optimize import minimize_scalar

    logits = logits.double()

    def loss(log_temperature: float) -> float:
        return float(F.cross_entropy(logits / math.exp(log_temperature), labels))

    bounds = math.log(_COLDEST), math.log(_HOTTEST)
    found = minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-4})
    return math.exp(float(found.x))


def calibration_error(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> float:
    """Return the expected calibration error: the mean gap between confidence and accuracy over 15 bins, by samples.

    Args:
        logits: [N, classes].
        labels: int64 [N].
        temperature: Logits are divided by it.
    """
    sure = confidence(logits, "max", temperature).double()
    right = (logits.argmax(-1) == labels).double()
    place = (sure * _BINS).ceil().long().clamp(1, _BINS) - 1  # bins are open below, closed above
    gaps = torch.zeros(_BINS, dtype=torch.float64).index_add_(0, place, sure - right)
    return float(gaps.abs().sum() / max(1, len(labels)))


# ---- who leaves where ------------------------------------------------------------------------------------------------

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
        raise ConfigError(
            f'there is no mode "{mode}"; there are budgeted (samples share the budget) and anytime.', key="mode"
        )
    if not budget >= costs[0] * (1 - 1e-9):
        raise ConfigError(
            f"a sample that leaves at the first exit costs {costs[0]:g} already, {costs[0] / costs[-1]:.3f} of what "
            f"the last exit costs; the budget is {budget:g}.",
            key="budget",
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


# ---- running ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Stopped:
    """Predictions of samples that left as soon as they could.

    Attributes:
        logits: Of the exit where each left [B, classes].
        exits: Which exit that was, from 0, int64 [B].
    """

    logits: Tensor
    exits: Tensor


@torch.no_grad()
def stop_early(module: nn.Module, x: Tensor, policy: Policy) -> Stopped:
    """Run a batch segment by segment, and go on with those samples only that do not leave.

    Args:
        module: In eval mode, with `start`, `segment` and `head`.
        x: Samples [B, ...].
        policy: When a sample leaves; one threshold for each exit.

    Raises:
        ModelError: The module cannot be run segment by segment.
        ConfigError: The policy is for another number of exits.
    """
    parts = with_segments(module)
    last = len(parts.exits) - 1
    if len(policy.thresholds) != last + 1:
        raise ConfigError(
            f"the policy has {len(policy.thresholds)} thresholds, and the model {last + 1} exits.", key="policy"
        )
    carry = parts.start(x)
    here = torch.arange(len(x), device=x.device)
    logits, exits = None, torch.full((len(x),), last, device=x.device)
    for i in range(last + 1):
        carry = parts.segment(i, carry)
        z = parts.head(i, carry)
        logits = z.new_empty(len(x), z.shape[-1]) if logits is None else logits
        logits[here] = z
        leaves = policy.leaves(i, z) if i < last else torch.ones(len(z), dtype=torch.bool, device=z.device)
        exits[here[leaves]] = i
        stays = ~leaves
        if not bool(stays.any()):
            break
        here, carry = here[stays], tree_map(_kept(stays, len(z)), carry)
    if logits is None:
        raise RunError("the model has no exits.", key="model")
    return Stopped(logits, exits)


def _kept(stays: Tensor, count: int) -> Callable[[Any], Any]:
    def kept(part: Any) -> Any:
        return part[stays] if isinstance(part, Tensor) and part.dim() and len(part) == count else part

    return kept
