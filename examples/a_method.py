"""FjORD's ordered dropout (Horvath et al., 2021), outside the package.

    fleetfit run --set method.name=examples/a_method.py:fjord

In each round a client trains a random width up to its own. All widths are
prefixes of each other, so all clients train the first channels.

Differs from the paper: the width is drawn for a round, not for each step;
narrow widths do not learn from wide ones.
"""

from functools import partial

import numpy as np

from fleetfit.errors import ConfigError
from fleetfit.method import (
    Federation,
    Method,
    Server,
    Submodel,
    split_levels,
)


def fjord(lean: float = 0.0) -> Method:
    """Make the method.

    Args:
        lean: Level i is drawn in proportion to i ** lean. 0: uniformly, as
            in the paper; large: the client's own level.
    """
    if lean < 0:
        raise ConfigError(f"fjord's lean must be at least 0, got {lean}.")
    return Method(
        make_levels=partial(split_levels, scaling="width"),
        assign=partial(assign_random_level, lean=lean),
    )


def assign_random_level(
    federation: Federation,
    server: Server,
    rng: np.random.Generator,
    lean: float,
) -> list[tuple[int, int, Submodel]]:
    """Give each chosen client its level or a smaller one."""
    slots = []
    choose = federation.method.choose_clients
    for client in choose(federation, server, rng):
        numbers = np.arange(1, federation.level_of[client] + 2)
        odds = (numbers / numbers[-1]) ** lean
        level = int(rng.choice(numbers, p=odds / odds.sum())) - 1
        slots.append((client, level, federation.levels[level].submodel))
    return slots
