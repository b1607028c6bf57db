"""Federated Dropout: clients train random channels (Caldas et al., 2018).

Differs from the paper: it drops one share for all clients, here `drop`
counts from the width of each client's level. Each element is averaged over
the clients that trained it. Messages are not compressed.
"""

from functools import partial

import numpy as np

from fleetfit.errors import check_range
from fleetfit.hooks import Method
from fleetfit.hooks.levels import split_levels
from fleetfit.layout import Axis
from fleetfit.submodel import Channels, random


def feddropout(drop: float = 0.25) -> Method:
    """Make the method.

    Args:
        drop: Share of its level's channels that a client leaves out in a
            round, in [0, 1).
    """
    check_range("drop", drop, 0, 1, closed=True)
    return Method(
        make_levels=partial(split_levels, scaling="width"),
        choose_channels=partial(select_channels, drop=drop),
    )


def select_channels(
    axis: Axis,
    n: int,
    round: int,
    client: int | None,
    rng: np.random.Generator,
    drop: float,
) -> Channels:
    """Keep (1 - drop) n random channels; evaluation: the first n.

    Channels are kept in whole granules, at least one.
    """
    if client is None:
        return range(n)
    # 0.7 * 10 may be 6.999..., and means 7.
    granules = max(1, int((1 - drop) * n / axis.granule + 1e-9))
    return random(axis, granules * axis.granule, round, client, rng)
