"""False budget: clients say that they afford the full model, and move of it what they afford in truth.

The rest goes back as it came, and so holds back what the others train. What is computed is the full model's training,
as in every attack on updates. Needs a method to which clients tell a budget.
"""

from dataclasses import replace

import numpy as np
import torch

from fleetfit.attack import Attack, Scene
from fleetfit.errors import ConfigError
from fleetfit.values import Clients, Update


def false_budget() -> Attack:
    """Make the attack."""
    return Attack(tell=registered, forge=own_part)


def registered(clients: Clients, hostile: np.ndarray) -> Clients:
    """Return what is told of the budgets."""
    if clients.reported is None:
        raise ConfigError(
            "[attack] kind: false_budget is a lie about what clients tell, and this method never asks for budgets. "
            'Choose another attack ("false_level"), or another method.',
            key="attack.kind",
        )
    reported = clients.reported.copy()
    reported[hostile] = np.maximum(reported[hostile], 1.0)
    further = {cost: values.copy() for cost, values in clients.further.items()}
    for values in further.values():
        values[hostile] = np.maximum(values[hostile], 1.0)
    return replace(clients, reported=reported, further=further)


def own_part(update: Update, scene: Scene, rng: torch.Generator) -> Update:
    """Return the update in what the client affords, and what was sent elsewhere."""
    movement = scene.movement(update)
    return scene.moved(update, torch.where(scene.inside(update, scene.own), movement, torch.zeros_like(movement)))
