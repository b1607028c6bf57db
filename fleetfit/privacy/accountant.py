"""The epsilon of rounds of the subsampled Gaussian mechanism, by the accountant of Opacus.

Each round draws every client independently with one rate and adds Gaussian noise of standard deviation `noise` times
the largest norm of a contribution. Rounds compose by numerical composition of privacy random variables (Gopi et al.,
NeurIPS 2021), an upper bound; if that would take gigabytes, or epsilon is above 50 anyway, by Renyi divergences
(Mironov, CSF 2017).

A value is that of Opacus's `PRVAccountant` but for the grid: one round's losses are put on a grid that is fine enough
for any number of rounds up to the next power of two, and cached, so that a further round costs a Fourier transform.
"""

import math
import warnings
from functools import lru_cache
from typing import Any

import numpy as np

from fleetfit.errors import ConfigError, import_optional

EPSILON_ERROR = 0.01
"""The largest difference of a value to the true epsilon, from above."""
_LARGEST_EPSILON = 50.0  # above it, the Renyi bound is taken
_POINTS = 1 << 20  # of a grid; beyond, it is coarser, and the bound larger
_ORDERS = (*np.arange(1.1, 4, 0.2).tolist(), *range(4, 65), 80, 96, 128, 192, 256, 512, 1024)  # whole ones are quick
_LEAST_NOISE, _MAX_NOISE = 1e-2, 1e6
_MAX_EPSILON = 1e9


def compute_epsilon(noise: float, rate: float, rounds: int, delta: float, known_cohorts: bool = False) -> float:
    """Return the epsilon that rounds cost together.

    Args:
        noise: Standard deviation of the noise as a multiple of the clipping norm.
        rate: Probability with which each client is drawn.
        rounds: The number of rounds.
        delta: Of (epsilon, delta).
        known_cohorts: Whether the cohort of each round counts as known.

    Raises:
        MissingExtra: Opacus is not installed.
    """
    if rounds == 0:
        return 0.0
    compute = _compute_for_known_cohorts if known_cohorts else _compose
    return compute(float(noise), float(rate), int(rounds), float(delta))


@lru_cache(maxsize=4096)
def _compose(noise: float, rate: float, rounds: int, delta: float) -> float:
    bound = _bound(noise, rate, rounds, delta)
    if not bound <= _LARGEST_EPSILON:
        return bound
    prv = _import_analysis("prv")
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about tails, whose values are not used
        try:
            losses, error = _discretize_losses(noise, rate, 1 << (rounds - 1).bit_length(), delta)
            composed = prv.compose_heterogeneous([losses], [rounds])
            return float(composed.compute_epsilon(delta, delta / 1000, error)[2])
        except (RuntimeError, ValueError):  # no grid of this size is fine enough for so small a delta
            return bound


@lru_cache(maxsize=4096)
def _compute_for_known_cohorts(noise: float, rate: float, rounds: int, delta: float) -> float:
    """Return the least epsilon, to one in a million, if each round's cohort is known.

    A client that was drawn n times took part in n rounds of the Gaussian mechanism, which equal one with noise /
    sqrt(n) (Balle and Wang, ICML 2018, Theorem 8): delta is the mean of theirs over n, which is binomial.
    """
    draws = np.arange(rounds + 1)
    logs = np.array([math.lgamma(rounds + 1) - math.lgamma(n + 1) - math.lgamma(rounds - n + 1) for n in draws])
    with np.errstate(divide="ignore", invalid="ignore"):
        logs += np.where(draws, draws * np.log(rate), 0.0)
        logs += np.where(rounds - draws, (rounds - draws) * np.log1p(-rate), 0.0)
    probabilities = np.exp(logs)

    def exceeds_delta(epsilon: float) -> bool:
        deltas = (p * _compute_delta(math.sqrt(n) / noise, epsilon) for n, p in enumerate(probabilities) if n and p)
        return float(sum(deltas)) > delta

    if not exceeds_delta(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while exceeds_delta(high):
        low, high = high, 2 * high
        if high > _MAX_EPSILON:
            return math.inf
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if exceeds_delta(middle) else (low, middle)
    return high


def _compute_delta(shift: float, epsilon: float) -> float:
    """Return the delta of two Gaussians of deviation 1 whose means differ by `shift` (Balle and Wang, Theorem 8)."""
    lower, upper = epsilon / shift - shift / 2, epsilon / shift + shift / 2
    tail = math.erfc(upper / math.sqrt(2))
    return 0.5 * (math.erfc(lower / math.sqrt(2)) - (math.exp(epsilon + math.log(tail)) if tail else 0.0))


@lru_cache(maxsize=4)  # of up to 8 MiB each
def _discretize_losses(noise: float, rate: float, rounds: int, delta: float) -> tuple[Any, float]:
    """Return one round's privacy losses on a grid for up to `rounds` rounds, and the error of epsilon on it.

    The grid's width and step are those of Gopi et al. (NeurIPS 2021, section 5), as in Opacus.
    """
    prv, error = _import_analysis("prv"), EPSILON_ERROR
    delta_error = delta / 1000
    tails = _bound(noise, rate, rounds, delta_error / 4), _bound(noise, rate, 1, delta_error / (8 * rounds))
    width = max(*tails, error) + 3
    step = error / np.sqrt(rounds * np.log(12 / delta_error) / 2)
    coarsening = max(1.0, 2 * width / step / _POINTS)
    domain = prv.Domain.create_aligned(-width, width, step * coarsening)
    losses = prv.TruncatedPrivacyRandomVariable(
        prv.PoissonSubsampledGaussianPRV(rate, noise), domain.t_min, domain.t_max
    )
    return prv.discretize(losses, domain), error * coarsening


def _bound(noise: float, rate: float, rounds: int, delta: float) -> float:
    """Return the upper bound by Renyi divergences, which is quick."""
    rdp = rounds * _compute_divergences(noise, rate)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about further orders, which might give a lower bound
        return float(_import_analysis("rdp").get_privacy_spent(orders=_ORDERS, rdp=rdp, delta=delta)[0])


@lru_cache(maxsize=64)
def _compute_divergences(noise: float, rate: float) -> Any:
    rdp = _import_analysis("rdp").compute_rdp(q=rate, noise_multiplier=noise, steps=1, orders=_ORDERS)
    return np.where(np.isnan(rdp), np.inf, rdp)


def find_noise(epsilon: float, rate: float, rounds: int, delta: float, known_cohorts: bool = False) -> float:
    """Return the least noise with which rounds cost at most epsilon, to one in 1,000; see `compute_epsilon`.

    Raises:
        ConfigError: The least possible noise is above 10^6.
        MissingExtra: Opacus is not installed.
    """
    low, high = _LEAST_NOISE, 1.0
    while compute_epsilon(high, rate, rounds, delta, known_cohorts) > epsilon:
        low, high = high, 2 * high
        if high > _MAX_NOISE:
            raise ConfigError(
                f"[privacy] epsilon: no noise makes {rounds} rounds cost {epsilon:g} at delta {delta:g}. Set more.",
                key="privacy.epsilon",
            )
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        is_enough = compute_epsilon(middle, rate, rounds, delta, known_cohorts) <= epsilon
        low, high = (low, middle) if is_enough else (middle, high)
    return high


def max_rounds(noise: float, rate: float, delta: float, epsilon: float, limit: int, known_cohorts: bool = False) -> int:
    """Return the largest number of rounds up to a limit that cost at most epsilon."""

    def is_within(rounds: int) -> bool:
        return compute_epsilon(noise, rate, rounds, delta, known_cohorts) <= epsilon

    low, high = 0, 1
    while high <= limit and is_within(high):
        low, high = high, 2 * high
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_within(middle) else (low, middle)
    return low


def _import_analysis(name: str) -> Any:
    return import_optional(f"opacus.accountants.analysis.{name}", "privacy", "[privacy]: the cost of rounds")
