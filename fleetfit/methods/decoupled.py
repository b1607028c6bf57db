"""Decoupled: one separate model per level, each averaged for itself (baseline of ScaleFL and of AdaptiveFL).

Two things bear this name. In ScaleFL's comparison each level is trained by its own clients only, and the levels are the
width-only ones: the default. In AdaptiveFL's (4.2) the models are S_1, M_1 and L_1 of its pool, and each is trained by
all clients that afford it: `scaling = "pool"` with `trained_by = "able"`. Each model then has a cohort of its own in a
round, as in the authors' code, and a client at most one model: the largest model's cohort is drawn first.

The server keeps the state of level l under `level{l}/` (`fleetfit.hooks.level_tensors`).
"""

from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np

from fleetfit.core import Federation, Level, Problem, Server
from fleetfit.hooks import Method, Slot
from fleetfit.hooks.level_tensors import keep_per_level, select_all
from fleetfit.hooks.levels import split_levels
from fleetfit.methods._pool import make_pool, make_pool_levels
from fleetfit.planner import Targets


def decoupled(
    scaling: Literal["width", "both", "depth", "pool"] | None = None, trained_by: Literal["own", "able"] = "own"
) -> Method:
    """Make the method.

    Args:
        scaling: How the levels' models are cut out of the full one; "pool": S_1, M_1 and L_1 of AdaptiveFL's pool. By
            default as `fleet.scaling` says, else "width".
        trained_by: A level is trained by its "own" clients, or by a cohort of all those that are "able" to.
    """
    levels = (
        make_coarse_pool if scaling == "pool" else partial(split_levels, scaling=scaling, exits="last", default="width")
    )
    method = Method(make_levels=levels, **keep_per_level(select_all))
    if trained_by == "own":
        return method
    return replace(
        method,
        assign=assign_cohorts,
        choose_clients=lambda *arguments: [client for client, _, _ in assign_cohorts(*arguments)],
        unused_hooks=("choose_clients", "choose_channels"),
    )


def make_coarse_pool(problem: Problem, targets: Targets) -> list[Level]:
    """Return S_1, M_1 and L_1, the coarse pool of AdaptiveFL."""
    return make_pool_levels(problem, targets, make_pool(problem.architecture, p=1))


def assign_cohorts(federation: Federation, server: Server, rng: np.random.Generator) -> list[Slot]:
    """Draw a cohort for each level among the clients that afford it and have no model yet, largest level first."""
    free = federation.reachable(server.round)
    slots: list[Slot] = []
    for index in reversed(range(len(federation.levels))):
        able = free[federation.level_of[free] >= index]
        chosen = able[rng.choice(len(able), min(federation.cohort, len(able)), replace=False)]
        free = free[~np.isin(free, chosen)]
        slots += [Slot(int(client), index, federation.levels[index].submodel) for client in chosen]
    return slots
