"""FedAvg: one model for all clients, of the smallest level's size, averaged by samples (McMahan et al., 2017).

Differs from the paper: the paper's clients all afford the full model. As in ScaleFL's Table 3, the one model here is
the full model narrowed to level 1, so that all data are used; its `local` accuracy equals its `global` one.
"""

from fleetfit.hooks import Method
from fleetfit.hooks.levels import smallest_width


def fedavg() -> Method:
    """Make the method."""
    return Method(make_levels=smallest_width)
