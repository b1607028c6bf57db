"""False level: clients send back the smallest level's part of what they were sent, as if they afforded no more.

What only larger levels train starves, and a method that learns from what comes back learns wrong budgets (AdaptiveFL).
Clients whose piece does not contain the smallest level's exits are honest.
"""

from dataclasses import replace

import torch

from fleetfit.attack import Attack, Scene
from fleetfit.submodel import Channels, Submodel, move_state
from fleetfit.values import Update


def false_level() -> Attack:
    """Make the attack."""
    return Attack(forge=smallest)


def smallest(update: Update, scene: Scene, rng: torch.Generator) -> Update:
    """Return the smallest level's part of the update."""
    mine, core = update.submodel, scene.core
    if not set(core.exits) <= set(mine.exits):
        return update
    channels: dict[str, Channels] = dict(mine.channels)
    for axis, kept in core.channels.items():
        channels[axis] = mine.channels.get(axis, range(scene.layout.axes[axis].size))[: len(kept)]
    piece = Submodel(channels, core.exits)
    state = move_state(scene.layout, update.state, mine, piece)
    return replace(update, submodel=piece, state=state, untrained=tuple(n for n in update.untrained if n in state))
