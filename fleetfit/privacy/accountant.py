"""What rounds of the subsampled Gaussian mechanism cost: epsilon, by the accountant of Opacus.

Each round draws every client independently with one rate and adds Gaussian noise of standard deviation `noise` times
the largest norm of a contribution. Rounds compose by numerical composition of privacy random variables (Gopi et al.,
NeurIPS 2021), an upper bound; where that would take gigabytes, or promises nothing anyway, by Renyi divergences.

A value is that of Opacus's `PRVAccountant` but for the grid: one round's losses are put on a grid that does for any
number of rounds up to the next power of two, and kept, so that a further round costs a Fourier transform.
"""

import math
import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from fleetfit.errors import ConfigError, import_optional

EPSILON_ERROR = 0.01
"""How far above the truth a value may be."""
_NOTHING = 50.0  # an epsilon that promises nothing
_POINTS = 1 << 20  # of a grid; beyond, it is coarser, and the bound so much larger
_ORDERS = (*np.arange(1.1, 4, 0.2).tolist(), *range(4, 65), 80, 96, 128, 192, 256, 512, 1024)  # whole ones are quick
_LEAST, _MOST = 1e-2, 1e6  # of the noise, that is looked for
_MOST_EPSILON = 1e9


def spent(noise: float, rate: float, rounds: int, delta: float, known: bool = False) -> float:
    """Return the epsilon that rounds cost together.

    Args:
        noise: Standard deviation of the noise as a multiple of the clipping norm.
        rate: Probability with which each client is drawn.
        rounds: How many.
        delta: Of (epsilon, delta).
        known: Whether it is counted as known who was drawn in each round.

    Raises:
        MissingExtra: Opacus is not installed.
    """
    if known and rounds:
        return _known(float(noise), float(rate), int(rounds), float(delta))
    return 0.0 if rounds == 0 else _spent(float(noise), float(rate), int(rounds), float(delta))


@lru_cache(maxsize=4096)
def _spent(noise: float, rate: float, rounds: int, delta: float) -> float:
    bound = _bound(noise, rate, rounds, delta)
    if not bound <= _NOTHING:
        return bound
    prv = _part("prv")
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tails, whose values are not used
        try:
            losses, error = _losses(noise, rate, 1 << (rounds - 1).bit_length(), delta)
            composed = prv.compose_heterogeneous([losses], [rounds])
            return float(composed.compute_epsilon(delta, delta / 1000, error)[2])
        except (RuntimeError, ValueError):  # no grid of this size is fine enough for so small a delta
            return bound


@lru_cache(maxsize=4096)
def _known(noise: float, rate: float, rounds: int, delta: float) -> float:
    """Return the least epsilon, to one in a million, where whoever looks knows each round's cohort.

    A client that was drawn n times took part in n rounds of the Gaussian mechanism, which are one with noise / sqrt(n)
    (Balle and Wang, ICML 2018, Theorem 8): delta is the mean of theirs over n, which is binomial.
    """
    times = np.arange(rounds + 1)
    logs = np.array([math.lgamma(rounds + 1) - math.lgamma(n + 1) - math.lgamma(rounds - n + 1) for n in times])
    with np.errstate(divide="ignore", invalid="ignore"):
        logs += np.where(times, times * np.log(rate), 0.0)
        logs += np.where(rounds - times, (rounds - times) * np.log1p(-rate), 0.0)
    chance = np.exp(logs)

    def above(epsilon: float) -> bool:
        return float(sum(c * _delta(math.sqrt(n) / noise, epsilon) for n, c in enumerate(chance) if n and c)) > delta

    if not above(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while above(high):
        low, high = high, 2 * high
        if high > _MOST_EPSILON:
            return math.inf
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if above(middle) else (low, middle)
    return high


def _delta(shift: float, epsilon: float) -> float:
    """Return the delta of two Gaussians of deviation 1 that lie so far apart."""
    one, other = epsilon / shift - shift / 2, epsilon / shift + shift / 2
    tail = math.erfc(other / math.sqrt(2))
    return 0.5 * (math.erfc(one / math.sqrt(2)) - (math.exp(epsilon + math.log(tail)) if tail else 0.0))


@lru_cache(maxsize=4)  # of up to 8 MiB each
def _losses(noise: float, rate: float, rounds: int, delta: float) -> tuple[Any, float]:
    """Return one round's losses on a grid that does for so many rounds, and how exact epsilon is then."""
    prv, error = _part("prv"), EPSILON_ERROR
    small = delta / 1000
    reach = max(_bound(noise, rate, rounds, small / 4), _bound(noise, rate, 1, small / (8 * rounds)), error) + 3
    step = error / np.sqrt(rounds * np.log(12 / small) / 2)
    coarser = max(1.0, 2 * reach / step / _POINTS)
    domain = prv.Domain.create_aligned(-reach, reach, step * coarser)
    one = prv.TruncatedPrivacyRandomVariable(prv.PoissonSubsampledGaussianPRV(rate, noise), domain.t_min, domain.t_max)
    return prv.discretize(one, domain), error * coarser


def _bound(noise: float, rate: float, rounds: int, delta: float) -> float:
    """Return the bound by Renyi divergences, which is quick, and above."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a further order might bring a lower bound
        found = _part("rdp").get_privacy_spent(orders=_ORDERS, rdp=rounds * _divergences(noise, rate), delta=delta)
    return float(found[0])


@lru_cache(maxsize=64)
def _divergences(noise: float, rate: float) -> Any:
    found = _part("rdp").compute_rdp(q=rate, noise_multiplier=noise, steps=1, orders=_ORDERS)
    return np.where(np.isnan(found), np.inf, found)


def noise_for(epsilon: float, rate: float, rounds: int, delta: float, known: bool = False) -> float:
    """Return the least noise with which rounds cost at most epsilon, to one in 1,000; arguments are `spent`'s.

    Raises:
        ConfigError: No noise is enough.
        MissingExtra: Opacus is not installed.
    """
    low, high = _LEAST, 1.0
    while spent(high, rate, rounds, delta, known) > epsilon:
        low, high = high, 2 * high
        if high > _MOST:
            raise ConfigError(
                f"[privacy] epsilon: no noise makes {rounds} rounds cost {epsilon:g} at delta {delta:g}. Set more.",
                key="privacy.epsilon",
            )
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if spent(middle, rate, rounds, delta, known) <= epsilon else (middle, high)
    return high


def affordable(noise: float, rate: float, delta: float, epsilon: float, most: int, known: bool = False) -> int:
    """Return how many rounds, at most so many, cost no more than epsilon."""
    return _last(lambda rounds: spent(noise, rate, rounds, delta, known) <= epsilon, most)


def _last(holds: Callable[[int], bool], most: int) -> int:
    """Return the largest number up to `most` for which something holds that holds for 0, and for all below one."""
    low, high = 0, 1
    while high <= most and holds(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _part(name: str) -> Any:
    return import_optional(f"opacus.accountants.analysis.{name}", "privacy", "[privacy]: what a round costs")
