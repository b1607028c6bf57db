"""Early stopping by confidence: choose the exit of each sample, for an average cost (ScaleFL, appendix 6.3).

As in MSDNet (Huang et al., ICLR 2018, 4.2): with a budget for a whole batch, a sample stops at the first exit whose
confidence reaches the exit's threshold. The fraction q of samples that stop at an exit among those that reach it is
assumed equal for all exits, so shares fall or rise geometrically: s_k = p^k / sum_i p^i. The thresholds give these
shares on the validation samples, and p is the largest whose average cost is within the budget. With a budget for each
sample ("anytime") a sample's prediction is that of the deepest exit within the budget.

Confidence is between 0 and 1. The highest probability is that of MSDNet (Huang et al., ICLR 2018), which ScaleFL's
appendix 6.3 follows; entropy is BranchyNet's (Teerapittayanon et al., ICPR 2016), turned round and scaled so that 1 is
certain. Temperature scaling and the expected calibration error with 15 bins of equal width are those of Guo et al.,
ICML 2017.

Differs from MSDNet: p is found with the actual cost of the validation samples, so equal confidences cannot push it
above the budget. Entropy and margin may replace the highest probability, and exits may have temperatures.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fleetfit.anatomy import VisitsExits, require_segments
from fleetfit.errors import ConfigError, did_you_mean
from fleetfit.inference.scores import Scores

# ---- confidence ------------------------------------------------------------------------------------------------------

Measure = Literal["max", "entropy", "margin"]
"""Highest probability; one minus the entropy over its largest value; lead of the first class over the second."""
_BINS = 15
_COLDEST, _HOTTEST = 0.05, 20.0


def confidence(logits: Tensor, measure: Measure = "max", temperature: float = 1.0) -> Tensor:
    """Return the confidence of predictions, from 0 to 1, float64 [...] of logits [..., classes].

    Args:
        logits: Logits of one or several exits.
        measure: "max", "entropy" or "margin".
        temperature: Divisor of the logits.

    Raises:
        ConfigError: The measure is unknown.
    """
    if measure not in get_args(Measure):
        measures = get_args(Measure)
        raise ConfigError(
            f'unknown confidence "{measure}". Choose one of {", ".join(measures)}.{did_you_mean(measure, measures)}',
            key="measure",
        )
    logs = F.log_softmax(logits.double() / temperature, dim=-1)
    if measure == "max":
        return logs.amax(-1).exp()
    if logits.shape[-1] < 2:
        return torch.ones(logits.shape[:-1], dtype=torch.float64)
    if measure == "entropy":
        return (1 + (logs.exp() * logs).sum(-1) / math.log(logits.shape[-1])).clamp(0, 1)
    first, second = logs.exp().topk(2, dim=-1).values.unbind(-1)
    return first - second


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """Return the temperature (0.05 to 20) with the highest mean log-likelihood of the predictions.

    Args:
        logits: [N, classes].
        labels: int64 [N].
    """
    from scipy.optimize import minimize_scalar

    logits = logits.double()

    def loss(log_temperature: float) -> float:
        return float(F.cross_entropy(logits / math.exp(log_temperature), labels))

    bounds = math.log(_COLDEST), math.log(_HOTTEST)
    result = minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-4})
    return math.exp(float(result.x))


def calibration_error(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> float:
    """Return the expected calibration error: the mean gap between confidence and accuracy over 15 bins, by samples.

    Args:
        logits: [N, classes].
        labels: int64 [N].
        temperature: Divisor of the logits.
    """
    confidences = confidence(logits, "max", temperature).double()
    is_right = (logits.argmax(-1) == labels).double()
    bins = (confidences * _BINS).ceil().long().clamp(1, _BINS) - 1  # open below, closed above
    gaps = torch.zeros(_BINS, dtype=torch.float64).index_add_(0, bins, confidences - is_right)
    return float(gaps.abs().sum() / max(1, len(labels)))


# ---- policies --------------------------------------------------------------------------------------------------------

Mode = Literal["budgeted", "anytime"]
"""Whether the budget is an average over samples, or for each sample."""
NEVER = 2.0
"""A threshold that no confidence reaches."""
_STEPS = 60


@dataclass(frozen=True)
class Policy:
    """A policy of early stopping.

    Attributes:
        thresholds: A sample stops at an exit if its confidence is at least the threshold [E]; 0: every sample stops.
        measure: The measure of confidence.
        temperatures: Divisors of the logits of each exit [E]; () for none.
    """

    thresholds: tuple[float, ...]
    measure: Measure = "max"
    temperatures: tuple[float, ...] = ()

    def leaves(self, exit: int, logits: Tensor) -> Tensor:
        """Return whether samples stop at an exit (from 0), bool [B], by its logits [B, classes]."""
        temperature = self.temperatures[exit] if self.temperatures else 1.0
        return confidence(logits, self.measure, temperature) >= self.thresholds[exit]


@dataclass(frozen=True, eq=False)
class Outcome:
    """The outcome of a policy on labeled samples.

    Attributes:
        exits: The exit where each sample stopped, from 0, int64 [N].
        shares: Share of the samples that stopped at each exit [E].
        accuracy: Accuracy from 0 to 1.
        cost: Average cost of a sample, in the unit of the exits' costs.
        full: Accuracy of the last exit for all samples.
    """

    exits: Tensor
    shares: tuple[float, ...]
    accuracy: float
    cost: float
    full: float

    def numbers(self) -> dict[str, Any]:
        """Return shares, accuracy and cost as JSON values."""
        return {"shares": list(self.shares), "accuracy": self.accuracy, "cost": self.cost, "full": self.full}


def apply_policy(scores: Scores, policy: Policy, costs: Sequence[float]) -> Outcome:
    """Apply a policy to samples with logits of all exits.

    Args:
        scores: The samples' logits.
        policy: The policy.
        costs: Cost of a sample that stops at each exit [E].
    """
    count = len(scores.logits)
    leaves = torch.stack([policy.leaves(i, scores.logits[i]) for i in range(count)])
    leaves[-1] = True
    exits = leaves.int().argmax(0)
    right = scores.logits.argmax(-1).gather(0, exits[None])[0] == scores.labels
    shares = torch.bincount(exits, minlength=count).double() / len(exits)
    return Outcome(
        exits,
        tuple(shares.tolist()),
        float(right.double().mean()),
        float(np.dot(shares.numpy(), np.asarray(costs))),
        scores.accuracies[-1],
    )


# ---- choosing a policy -----------------------------------------------------------------------------------------------


def choose_policy(
    scores: Scores,
    costs: Sequence[float],
    budget: float,
    mode: Mode = "budgeted",
    measure: Measure = "max",
    temperatures: Sequence[float] = (),
) -> Policy:
    """Choose the policy for a budget on validation samples.

    Args:
        scores: The validation samples' logits.
        costs: Cost of a sample that stops at each exit [E], ascending.
        budget: Budget in the unit of the costs, of the average sample, or with "anytime" of each sample.
        mode: "budgeted" or "anytime".
        measure: The measure of confidence.
        temperatures: Divisors of the logits of each exit [E]; () for none.

    Raises:
        ConfigError: The budget does not reach the first exit, or the mode or measure is unknown.
    """
    if mode not in ("budgeted", "anytime"):
        raise ConfigError(
            f'no such mode: "{mode}". The modes are budgeted (an average over samples) and anytime (for each sample).',
            key="mode",
        )
    if not budget >= costs[0] * (1 - 1e-9):
        raise ConfigError(
            f"a sample that stops at the first exit costs {costs[0]:g}, {costs[0] / costs[-1]:.3f} of the last exit's "
            f"cost; the budget is {budget:g}.",
            key="budget",
        )
    count, temperatures = len(costs), tuple(temperatures)
    if mode == "anytime" or budget >= costs[-1]:
        deepest = max(i for i in range(count) if costs[i] <= budget * (1 + 1e-9))
        return Policy(tuple(NEVER if i < deepest else 0.0 for i in range(count)), measure, temperatures)
    divisors = temperatures or (1.0,) * count
    confidences = torch.stack([confidence(z, measure, t) for z, t in zip(scores.logits, divisors, strict=True)])

    def make_policy(log_p: float) -> Policy:
        return Policy(_find_thresholds(confidences, _compute_geometric_shares(log_p, count)), measure, temperatures)

    def is_affordable(log_p: float) -> bool:
        return apply_policy(scores, make_policy(log_p), costs).cost <= budget * (1 + 1e-9)

    low, high = -30.0, 30.0  # all samples stop at the first exit; all at the last
    if is_affordable(high):
        return make_policy(high)
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_affordable(middle) else (low, middle)
    return make_policy(low)


def _compute_geometric_shares(log_p: float, count: int) -> np.ndarray:
    """Return shares in proportion to p^k that add up to one."""
    powers = log_p * np.arange(count)
    shares: np.ndarray = np.exp(powers - powers.max())
    return shares / shares.sum()


def _find_thresholds(confidences: Tensor, shares: np.ndarray) -> tuple[float, ...]:
    """Return the thresholds for these shares, by the samples' confidences [E, N]."""
    stays = torch.ones(confidences.shape[1], dtype=torch.bool)
    thresholds = []
    for share, row in zip(shares[:-1], confidences, strict=False):
        count = round(float(share) * len(row))
        highest = row[stays].sort(descending=True).values
        if count == 0 or not len(highest):
            thresholds.append(NEVER)
            continue
        thresholds.append(float(highest[min(count, len(highest)) - 1]))
        stays &= row < thresholds[-1]
    return (*thresholds, 0.0)


# ---- running ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class EarlyPredictions:
    """Predictions of samples with early stopping.

    Attributes:
        logits: Logits at each sample's exit [B, classes].
        exits: Exit of each sample, from 0, int64 [B].
    """

    logits: Tensor
    exits: Tensor


@torch.no_grad()
def stop_early(module: nn.Module, x: Tensor, policy: Policy) -> EarlyPredictions:
    """Run a batch exit by exit, until every sample has stopped.

    A segment runs on the samples that have not stopped. A module with `visit_exits` instead runs on the whole batch, so
    only a batch whose samples all stop early saves time: that of one sample does.

    Args:
        module: In eval mode, with `start`, `segment` and `head`, or with `visit_exits`.
        x: Samples [B, ...].
        policy: The policy, with one threshold per exit.

    Raises:
        ModelError: The module cannot be run exit by exit.
        ConfigError: The policy is for another number of exits.
    """
    model = module if isinstance(module, VisitsExits) else require_segments(module)
    last = len(model.exits) - 1
    if len(policy.thresholds) != last + 1:
        raise ConfigError(
            f"the policy has {len(policy.thresholds)} thresholds, but the model has {last + 1} exits.", key="policy"
        )
    batch = _StoppingBatch(x, policy, last)
    if isinstance(model, VisitsExits):
        model.visit_exits(x, lambda i, z: bool(batch.stop(i, z[batch.rows]).all()))
    else:
        carry = model.start(x)
        for i in range(last + 1):
            carry = model.segment(i, carry)
            leaves = batch.stop(i, model.head(i, carry))
            if bool(leaves.all()):
                break
            carry = tree_map(partial(_select_rows, mask=~leaves), carry)
    assert batch.logits is not None
    return EarlyPredictions(batch.logits, batch.exits)


class _StoppingBatch:
    """The samples of a batch: which have not stopped, and the logits and exits of the others."""

    def __init__(self, x: Tensor, policy: Policy, last: int) -> None:
        self._policy, self._last = policy, last
        self.rows = torch.arange(len(x), device=x.device)  # samples that have not stopped
        self.logits: Tensor | None = None
        self.exits = torch.full((len(x),), last, device=x.device)

    def stop(self, exit: int, z: Tensor) -> Tensor:
        """Return which of the remaining samples stop at an exit, by their logits [rows, classes]."""
        if self.logits is None:
            self.logits = z.new_empty(len(self.exits), z.shape[-1])
        self.logits[self.rows] = z
        is_last = exit == self._last
        leaves = torch.ones(len(z), dtype=torch.bool, device=z.device) if is_last else self._policy.leaves(exit, z)
        self.exits[self.rows[leaves]] = exit
        self.rows = self.rows[~leaves]
        return leaves


def _select_rows(leaf: Any, mask: Tensor) -> Any:
    """Return the rows of a part of a carry; parts without one row per sample stay whole."""
    return leaf[mask] if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == len(mask) else leaf
