"""InclusiveFL: depth only, a last block per level that learns from deeper levels' momentum (Liu et al., KDD 2022).

A client trains its blocks and its deepest classifier. Each level has a classifier and a last block of its own, averaged
among its own clients; all else is averaged over all who have it. The last block of a level also learns from the blocks
that the next deeper level has beyond it: with g its movement in this round (mean less what was sent) and m the mean of
those blocks' movements in the last round, by that level's clients,

    g <- beta m + (1 - beta) g

as ReeFL's authors run it (ICML 2024, appendices A and B). Their server optimiser on top of that is `plus.fedadam` with
`lr = 1e-3`, `beta2 = 0.999`, `tau = 1e-6` and `begins = 0.0`. What a level hands down is g after its own mixing.

The server keeps the last block of the level with d blocks under `exit{d}/`, from the round on in which a client of that
level first trained it. Until then, and for the deepest level always, it is the full model's.

Differs from the paper: the texts at hand do not say what m is when no client of the deeper level trained in the last
round, as before the first one. Here nothing is mixed in and g is whole; with `damped`, m is zero, as in ReeFL's code,
and the step is shorter. Clients weigh by samples throughout; there, by samples within a level and by number between
levels. FedAdam has one pair of moments per element; there, one per level. There the deepest level keeps all its further
blocks to itself, which comes to the same, as nobody else has them. m is over those further blocks whose tensors have
the names and shapes of the block that learns; where none has, as behind a CNN's change of channels, beta does nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from fleetfit.aggregate import Aggregate, Mean
from fleetfit.errors import ConfigError
from fleetfit.factories import declare_unused
from fleetfit.layout import State
from fleetfit.levels import split_levels
from fleetfit.method import Method
from fleetfit.methods._own_blocks import OwnBlocks, own_blocks
from fleetfit.submodel import Submodel, extract, get_slice_plan
from fleetfit.values import Failure, Federation, Server, Update

Movements = Mapping[str, State]
"""By depth of a level, as text: m for the level below it, by the tensors' names within a block."""


@declare_unused(
    "damped", when=lambda values: values["beta"] == 0, reason="beta = 0 switches the momentum distillation off"
)
def inclusivefl(beta: float = 0.2, damped: bool = False) -> Method:
    """Make the method.

    Args:
        beta: Share of the deeper level's movement, in [0, 1]; 0 switches the momentum distillation off.
        damped: Take a movement that is missing for zero, as ReeFL's code does, and not for nothing to mix in.
    """
    if not 0 <= beta <= 1:
        raise ConfigError(f"inclusivefl's beta must be between 0 and 1, got {beta}.", key="beta")
    return Method(
        levels=partial(split_levels, mode="depth", exits="last"),
        dispatch=with_own_top,
        aggregate=partial(LevelMeans, beta=beta, damped=damped),
        observe=keep_movements,
    )


def with_own_top(federation: Federation, server: Server, client: int | None, piece: Submodel) -> State:
    """Send the sub-model with its level's own last block."""
    layout, prefix = federation.problem.layout, f"exit{piece.depth}/"
    state = {name: server.state.get(prefix + name, server.state[name]) for name in layout.tensors}
    return extract(layout, state, piece)


class LevelMeans:
    """The mean of what levels share, and of each level's own last block; then the movements are mixed."""

    def __init__(self, federation: Federation, server: Server, beta: float, damped: bool) -> None:
        depths = tuple(sorted({level.submodel.depth for level in federation.levels}))
        self._server, self._beta, self._damped = server, beta, damped
        self._blocks = own_blocks(federation.problem.layout, depths)
        self._mean = Mean(self._blocks.layout, next(iter(server.state.values())).device)
        self._depths: set[int] = set()  # of levels that trained

    def add(self, update: Update, weight: float) -> None:
        """Add an update to the means of its level."""
        submodel, source = Submodel(update.submodel.channels, update.submodel.exits[-1:]), self._blocks.source
        names = get_slice_plan(self._blocks.layout, submodel).names
        untrained = tuple(name for name in names if source[name] in update.untrained)
        self._mean.add(submodel, {name: update.state[source[name]] for name in names}, weight, untrained)
        self._depths.add(submodel.depth)

    def result(self) -> Aggregate:
        """Return the means after the distillation of movements, and the movements for the next round."""
        if not self._depths:
            return Aggregate({}, {}, {}, before={})
        server, blocks, mean = self._server, self._blocks, self._mean.result()
        before = {name: server.state.get(name, server.state[source]) for name, source in blocks.source.items()}
        memory = server.memory or {}
        round = memory.get("movement_round", server.round)  # an older one where the last round had no client
        received = memory.get("movement", {}) if round == server.round else {}
        mixed, movements = distilled(
            blocks, replace(mean, before=before), self._depths, received, self._beta, self._damped
        )
        trained = frozenset[str]().union(*(blocks.kept[depth] for depth in self._depths))
        names = [name for name, source in blocks.source.items() if name == source or name in trained]
        return Aggregate(
            {name: mixed.get(name, mean.mean[name]) for name in names},
            {name: mean.coverage[name] for name in names},
            movements,
            before={name: before[name] for name in names},
        )


def keep_movements(
    federation: Federation, server: Server, aggregate: Aggregate, reports: Sequence[Update | Failure]
) -> Server:
    """Remember this round's movements for the next one."""
    kept = {"movement": aggregate.extra, "movement_round": server.round}
    return replace(server, memory={**(server.memory or {}), **kept})


def distilled(
    blocks: OwnBlocks, found: Aggregate, seen: set[int], received: Movements, beta: float, damped: bool
) -> tuple[State, Movements]:
    """Return the means of last blocks after the distillation, and the movements for the next round.

    Args:
        blocks: What levels share and what they do not.
        found: Means of all its tensors, and what they replace.
        seen: Depths of the levels that trained.
        received: The last round's movements.
        beta: Share of what was received.
        damped: Whether zero was received where nothing was.
    """
    before = found.before or {}

    def moved(name: str) -> Tensor:
        return torch.where(found.coverage[name] > 0, found.mean[name] - before[name], 0.0)

    mixed: dict[str, Tensor] = {}
    handed: dict[str, State] = {}
    for depth, least in blocks.below.items():
        m = received.get(str(least))
        if beta and least in seen and blocks.further[depth] and (m is not None or damped):
            for key, name in blocks.top[least].items():
                mixed[name] = (1 - beta) * moved(name) + (0 if m is None else beta * m[key])
    for depth, least in blocks.below.items():
        if beta and depth in seen and blocks.further[depth]:
            handed[str(least)] = {
                key: torch.stack([mixed.get(b[key], moved(b[key])) for b in blocks.further[depth]]).mean(0)
                for key in blocks.top[least]
            }
    return {name: before[name] + g for name, g in mixed.items()}, handed
