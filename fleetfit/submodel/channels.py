"""Which channels to keep: the functions for the `channels` hook of a method."""

from collections.abc import Sequence

import numpy as np

from fleetfit.layout import Axis
from fleetfit.submodel.piece import Channels, tidy


def prefix(axis: Axis, n: int, round: int, client: int | None, rng: np.random.Generator) -> Channels:
    """Keep the first n channels (upper left; ScaleFL's default)."""
    return range(n)


def window(axis: Axis, n: int, round: int, client: int | None, rng: np.random.Generator) -> Channels:
    """Keep n neighbouring channels that start at a granule drawn for each client and round; evaluation: the first n."""
    if client is None:
        return range(n)
    first = int(rng.integers((axis.size - n) // axis.granule + 1)) * axis.granule
    return range(first, first + n)


def rolling(axis: Axis, n: int, round: int, client: int | None, rng: np.random.Generator) -> Channels:
    """Keep n channels from granule `round` on, wrapping around (FedRolex); evaluation: the first n."""
    if client is None or n == axis.size:
        return range(n)
    granules = axis.size // axis.granule
    chosen = sorted((round + i) % granules for i in range(n // axis.granule))
    return _of_granules(chosen, axis.granule)


def random(axis: Axis, n: int, round: int, client: int | None, rng: np.random.Generator) -> Channels:
    """Keep n channels of random granules, drawn for each client and round; evaluation: the first n."""
    if client is None or n == axis.size:
        return range(n)
    chosen = np.sort(rng.choice(axis.size // axis.granule, n // axis.granule, replace=False))
    return _of_granules(chosen.tolist(), axis.granule)


def _of_granules(granules: Sequence[int], granule: int) -> Channels:
    return tidy(g * granule + i for g in granules for i in range(granule))
