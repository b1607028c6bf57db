"""Decoupled: one separate model per level, each averaged for itself (baseline of ScaleFL and of AdaptiveFL).

Two things bear this name. In ScaleFL's comparison each level is trained by its own clients only, and the levels are the
width-only ones: the default. In AdaptiveFL's (4.2) the models are S_1, M_1 and L_1 of its pool, and each is trained by
all clients that afford it: `split = "pool"` with `trained_by = "able"`. Each model then has a cohort of its own in a
round, as in the authors' code, and a client at most one model: the largest model's cohort is drawn first.

The server keeps the state of level l under `level{l}/`, from the round on in which a client first trained it; until
then it is a part of the initial model.
"""

from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np

from fleetfit.aggregate import Aggregate, Mean
from fleetfit.layout import State
from fleetfit.levels import split_levels
from fleetfit.method import Method, Slot
from fleetfit.methods._pool import make_pool, make_pool_levels
from fleetfit.planner import Targets
from fleetfit.submodel import Submodel, extract, find_positions, narrow_layout
from fleetfit.training.start import LEVEL_PREFIX
from fleetfit.values import Federation, Level, Problem, Server, Update


def decoupled(
    split: Literal["width", "both", "depth", "pool"] | None = None, trained_by: Literal["own", "able"] = "own"
) -> Method:
    """Make the method.

    Args:
        split: How the levels' models are cut out of the full one; "pool": S_1, M_1 and L_1 of AdaptiveFL's pool. By
            default as `fleet.split` says, else "width".
        trained_by: A level is trained by its "own" clients, or by a cohort of all those that are "able" to.
    """
    levels = make_coarse_pool if split == "pool" else partial(split_levels, mode=split, exits="last", default="width")
    method = Method(levels=levels, dispatch=dispatch_own_model, aggregate=SeparateMeans)
    if trained_by == "own":
        return method
    return replace(
        method,
        assign=assign_cohorts,
        choose=lambda *arguments: [client for client, _, _ in assign_cohorts(*arguments)],
        replaces=("choose", "channels"),
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


def dispatch_own_model(federation: Federation, server: Server, client: int | None, submodel: Submodel) -> State:
    """Send the level's own model, without its prefix; before a client trained it, a part of the initial model."""
    prefix = _prefix(federation.level_index(submodel))
    own = {name.removeprefix(prefix): t for name, t in server.state.items() if name.startswith(prefix)}
    return own or extract(federation.problem.layout, get_initial_state(server.state), submodel)


def get_initial_state(state: State) -> State:
    """Return the initial model's tensors of the server's state: those that are not a level's own."""
    return {name: tensor for name, tensor in state.items() if not LEVEL_PREFIX.match(name)}


class SeparateMeans:
    """The mean of each level's updates; an update of a part of its level counts for that part."""

    def __init__(self, federation: Federation, server: Server) -> None:
        self._federation, self._server = federation, server
        self._means: dict[int, Mean] = {}
        self._submodels: dict[int, Submodel] = {}

    def add(self, update: Update, weight: float) -> None:
        """Add an update to the mean of its level."""
        if update.level not in self._means:
            self._means[update.level] = Mean(narrow_layout(self._federation.problem.layout, update.dispatched))
        self._submodels[update.level] = update.dispatched
        part = find_positions(update.submodel, update.dispatched)
        self._means[update.level].add(part, update.state, weight, update.untrained)

    def result(self) -> Aggregate:
        """Return the means of all levels, their tensors under the level's prefix."""
        results = {_prefix(level): mean.result() for level, mean in self._means.items()}
        before = {
            _prefix(level) + name: tensor
            for level, submodel in self._submodels.items()
            for name, tensor in dispatch_own_model(self._federation, self._server, None, submodel).items()
        }
        return Aggregate(
            {prefix + name: tensor for prefix, result in results.items() for name, tensor in result.mean.items()},
            {prefix + name: tensor for prefix, result in results.items() for name, tensor in result.coverage.items()},
            before=before,
        )


def _prefix(level: int) -> str:
    return f"level{level + 1}/"
