"""False level: clients send back the smallest level's part of their sub-model, as if they afforded no more.

Elements of larger levels get fewer updates, and a method that learns budgets from updates learns wrong ones
(AdaptiveFL). Clients whose sub-model does not contain the smallest level's exits are honest.
"""

from dataclasses import replace

import torch

from fleetfit.attacks.base import Attack, Scene
from fleetfit.core import Update
from fleetfit.submodel import Channels, Submodel, move_state


def false_level() -> Attack:
    """Make the attack."""
    return Attack(forge=cut_to_core)


def cut_to_core(update: Update, scene: Scene, rng: torch.Generator) -> Update:
    """Return the smallest level's part of the update."""
    core = scene.core
    if not set(core.exits) <= set(update.submodel.exits):
        return update
    channels: dict[str, Channels] = dict(update.submodel.channels)
    for axis, kept in core.channels.items():
        channels[axis] = channels.get(axis, range(scene.layout.axes[axis].size))[: len(kept)]
    submodel = Submodel(channels, core.exits)
    state = move_state(scene.layout, update.state, update.submodel, submodel)
    return replace(update, submodel=submodel, state=state, untrained=tuple(n for n in update.untrained if n in state))
