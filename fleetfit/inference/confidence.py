"""How sure a prediction is: measures of confidence, temperature scaling, calibration error.

Confidence lies between 0 and 1. The highest probability is that of MSDNet (Huang et al., ICLR 2018), which ScaleFL's
appendix 6.3 follows; entropy is BranchyNet's (Teerapittayanon et al., ICPR 2016), turned round and scaled so that 1 is
certain. Temperature scaling and the expected calibration error with 15 bins of equal width are those of Guo et al.,
ICML 2017.
"""

import math
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from fleetfit.errors import ConfigError, did_you_mean

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
        raise ConfigError(f'there is no confidence "{measure}"; there are {", ".join(known)}.'
                          f"{did_you_mean(measure, known)}")  # fmt: skip
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
