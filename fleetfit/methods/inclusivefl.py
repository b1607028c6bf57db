"""InclusiveFL: depth only, a last block per level that learns from deeper levels' momentum (Liu et al., KDD 2022).

A client trains its blocks and its deepest classifier. Each level has a classifier and a last block of its own, averaged
over its own clients; all else is averaged over all clients that have it. The last block of a level also learns from the
blocks that the next deeper level has beyond it: with g its movement in this round (mean less the state that was sent)
and m the mean of those blocks' movements in the last round, by that level's clients,

    g <- beta m + (1 - beta) g

as ReeFL's authors run it (ICML 2024, appendices A and B). Their server optimizer on top of that is `options.fedadam`
with `lr = 1e-3`, `beta2 = 0.999`, `tau = 1e-6` and `v0 = 0.0`. A level hands down g after its own mixing.

The server keeps the last block of the level with d blocks under `exit{d}/`, from the round on in which a client of that
level first trained it. Until then, and for the deepest level always, it is the full model's. All blocks are averaged in
one layout: a level of d blocks has its last block under `exit{d}/` only, and copies of its blocks beyond the level
below under that prefix too, since their movements by this level's clients are needed.

Differs from the paper: the texts at hand do not say what m is when no client of the deeper level trained in the last
round, as before the first one. Here nothing is mixed in and g is whole; with `damped`, m is zero, as in ReeFL's code,
and the step is shorter. Clients weigh by samples throughout; there, by samples within a level and by number between
levels. FedAdam has one pair of moments per element; there, one per level. There the deepest level keeps all its further
blocks to itself, which is equivalent, since no other level has them. m is over those further blocks whose tensors have
the names and shapes of the block that learns; if none has, as behind a CNN's change of channels, beta has no effect.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fleetfit.aggregate import Aggregate, Mean
from fleetfit.core import Federation, Server, Update
from fleetfit.errors import ConfigError
from fleetfit.factories import declare_unused
from fleetfit.hooks import Method, Reports
from fleetfit.hooks.levels import split_levels
from fleetfit.layout import Layout, State, TensorLayout
from fleetfit.submodel import Submodel, check_shapes, extract, get_slice_plan, is_finite

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
        make_levels=partial(split_levels, scaling="depth", exits="last"),
        dispatch=dispatch_own_block,
        make_aggregator=partial(LevelMeans, beta=beta, damped=damped),
        update_server_memory=store_movements,
        check_memory=check_movements,
    )


def dispatch_own_block(federation: Federation, server: Server, client: int | None, submodel: Submodel) -> State:
    """Send the sub-model with its level's own last block."""
    layout, prefix = federation.problem.layout, f"exit{submodel.depth}/"
    state = {name: server.state.get(prefix + name, server.state[name]) for name in layout.tensors}
    return extract(layout, state, submodel)


class LevelMeans:
    """The mean of the shared blocks, and of each level's own last block; then the movements are mixed."""

    def __init__(self, federation: Federation, server: Server, beta: float, damped: bool) -> None:
        depths = tuple(sorted({level.submodel.depth for level in federation.levels}))
        self._server, self._beta, self._damped = server, beta, damped
        self._blocks = find_own_blocks(federation.problem.layout, depths)
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
            return Aggregate({}, {}, {}, base_state={})
        server, blocks, mean = self._server, self._blocks, self._mean.result()
        before = {name: server.state.get(name, server.state[source]) for name, source in blocks.source.items()}
        memory = server.memory or {}
        round = memory.get("movement_round", server.round)  # an older one where the last round had no client
        received = memory.get("movement", {}) if round == server.round else {}
        mixed, movements = mix_movements(
            blocks, replace(mean, base_state=before), self._depths, received, self._beta, self._damped
        )
        trained = frozenset[str]().union(*(blocks.kept[depth] for depth in self._depths))
        names = [name for name, source in blocks.source.items() if name == source or name in trained]
        return Aggregate(
            {name: mixed.get(name, mean.mean[name]) for name in names},
            {name: mean.coverage[name] for name in names},
            movements,
            base_state={name: before[name] for name in names},
        )


def store_movements(federation: Federation, server: Server, aggregate: Aggregate, reports: Reports) -> Server:
    """Store this round's movements for the next one."""
    movements = {"movement": aggregate.extra, "movement_round": server.round}
    return replace(server, memory={**(server.memory or {}), **movements})


def check_movements(federation: Federation, memory: Mapping[str, Any]) -> None:
    """Check that movements are finite, and those of the last blocks of levels."""
    layout = federation.problem.layout
    shapes = layout.shapes({}, layout.exits)
    for depth, movement in memory.get("movement", {}).items():
        check_shapes(movement, {key: shapes[name] for key, name in _find_block(layout, int(depth) - 1, "").items()})
        if not is_finite(movement):
            raise ValueError(f"movement/{depth} has numbers that are not finite")


def mix_movements(
    blocks: "_OwnBlocks", aggregate: Aggregate, depths: set[int], received: Movements, beta: float, damped: bool
) -> tuple[State, Movements]:
    """Return the means of last blocks after the distillation, and the movements for the next round.

    Args:
        blocks: The shared blocks, and those of each level.
        aggregate: Means of all its tensors, and the values before the round.
        depths: Depths of the levels that trained.
        received: The last round's movements.
        beta: Share of the received movement.
        damped: Whether a missing movement counts as zero.
    """
    before = aggregate.base_state or {}

    def compute_movement(name: str) -> Tensor:
        return torch.where(aggregate.coverage[name] > 0, aggregate.mean[name] - before[name], 0.0)

    mixed: dict[str, Tensor] = {}
    movements: dict[str, State] = {}
    for depth, below in blocks.below.items():
        m = received.get(str(below))
        if beta and below in depths and blocks.further[depth] and (m is not None or damped):
            for key, name in blocks.top[below].items():
                mixed[name] = (1 - beta) * compute_movement(name) + (0 if m is None else beta * m[key])
    for depth, below in blocks.below.items():
        if beta and depth in depths and blocks.further[depth]:
            movements[str(below)] = {
                key: torch.stack([mixed.get(b[key], compute_movement(b[key])) for b in blocks.further[depth]]).mean(0)
                for key in blocks.top[below]
            }
    return {name: before[name] + g for name, g in mixed.items()}, movements


# ---- the blocks of levels --------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _OwnBlocks:
    """The blocks that levels share, and those that each level, by its depth, has for itself."""

    layout: Layout  # of all of them; a sub-model with one exit has the tensors that it trains
    source: Mapping[str, str]  # the model's tensor of which each tensor is the original or a copy
    kept: Mapping[int, frozenset[str]]  # tensors of a level's last block that the server keeps for it
    top: Mapping[int, Mapping[str, str]]  # trained tensors of its last block: by name within the block, the name here
    # the blocks beyond the level below that have the names and shapes of that level's last one, each as in `top`
    further: Mapping[int, Sequence[Mapping[str, str]]]
    below: Mapping[int, int]  # the depth of the level below; the first level has none


@functools.lru_cache(maxsize=16)
def find_own_blocks(layout: Layout, depths: tuple[int, ...]) -> _OwnBlocks:
    """Return the blocks of levels of these depths, ascending."""
    full, below = depths[-1], dict(zip(depths[1:], depths, strict=False))
    tensors: dict[str, TensorLayout] = {}
    source: dict[str, str] = {}
    kept: dict[int, set[str]] = {depth: set() for depth in depths}
    for name, tensor in layout.tensors.items():
        block = tensor.block
        source[name], tensors[name] = name, tensor
        if block == full - 1:
            tensors[name] = replace(tensor, block=None, exit=full)
        elif block is not None:
            tensors[name] = replace(tensor, block=block + 1)  # shared by the levels of which it is not the last block
            for depth in depths:
                if below.get(depth, depth - 1) <= block < depth:
                    copy = f"exit{depth}/{name}"
                    source[copy], tensors[copy] = name, replace(tensor, block=None, exit=depth)
                    if block == depth - 1:
                        kept[depth].add(copy)
    top = {depth: _find_block(layout, depth - 1, "" if depth == full else f"exit{depth}/") for depth in depths}
    shapes = layout.shapes({}, layout.exits)
    further: dict[int, list[dict[str, str]]] = {depth: [] for depth in below}
    for depth, lower in below.items():
        expected = {key: shapes[source[name]] for key, name in top[lower].items()}
        for names in (*(_find_block(layout, i, f"exit{depth}/") for i in range(lower, depth - 1)), top[depth]):
            if {key: shapes[source[name]] for key, name in names.items()} == expected:
                further[depth].append(names)
    kept_blocks = {depth: frozenset(names) for depth, names in kept.items()}
    return _OwnBlocks(Layout(layout.axes, layout.exits, tensors), source, kept_blocks, top, further, below)


def _find_block(layout: Layout, number: int, prefix: str) -> dict[str, str]:
    """Return the trained tensors of a block: by "block:" and the name within it, the name behind a prefix.

    A name of its own, because a checkpoint's tensors with names of the model are checked as those.
    """
    names = [name for name, tensor in layout.tensors.items() if tensor.block == number and tensor.trainable]
    marker = f"blocks.{number}."
    if all(marker in name for name in names):
        return {f"block:{name.rpartition(marker)[2]}": prefix + name for name in names}
    # a block of another name: the common beginning of its tensors' names
    paths, common = [name.split(".") for name in names], 0
    for parts in zip(*(path[:-1] for path in paths), strict=False):
        if len(set(parts)) > 1:
            break
        common += 1
    return {f"block:{'.'.join(path[common:])}": prefix + name for path, name in zip(paths, names, strict=True)}
