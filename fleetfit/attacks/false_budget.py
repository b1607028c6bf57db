"""False budget: clients report that they afford the full model, and train only the part that they really afford.

They send the rest back unchanged, and so slow down the others' training. The simulation computes the full model's
training, as in every attack on updates. Needs a method to which clients report a budget.
"""

from dataclasses import replace

import numpy as np
import torch

from fleetfit.attacks.base import Attack, Scene
from fleetfit.core import Clients, Update
from fleetfit.errors import ConfigError


def false_budget() -> Attack:
    """Make the attack."""
    return Attack(misreport=report_full_budget, forge=move_own_part)


def report_full_budget(clients: Clients, hostile: np.ndarray) -> Clients:
    """Return the clients with the full model's budget for hostile ones."""
    if clients.budget is None:
        raise ConfigError(
            "[attack] kind: false_budget changes the budgets that clients report, and this method needs none. "
            'Choose another attack ("false_level"), or another method.',
            key="attack.kind",
        )
    reported = clients.budget.copy()
    reported[hostile] = np.maximum(reported[hostile], 1.0)
    further = {cost: values.copy() for cost, values in clients.further.items()}
    for values in further.values():
        values[hostile] = np.maximum(values[hostile], 1.0)
    return replace(clients, budget=reported, further=further)


def move_own_part(update: Update, scene: Scene, rng: torch.Generator) -> Update:
    """Return the update within the part that the client affords, and the sent state elsewhere."""
    movement = scene.movement(update)
    return scene.move(update, torch.where(scene.mask(update, scene.own), movement, torch.zeros_like(movement)))
