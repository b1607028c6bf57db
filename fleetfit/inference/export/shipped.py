"""A level's model as it goes to a device: the module with everything that writers of files need to know."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fleetfit.data import Data
from fleetfit.layout import Architecture


@dataclass(frozen=True, eq=False)
class Shipped:
    """A level's model as it goes to a device.

    Attributes:
        level: Its name, "1" for the smallest.
        architecture: The model family, as the method made it (a recurrent exit, LoRA).
        sizes: The size of every axis.
        exits: Block counts of its exits, shallow to deep.
        module: The module, in eval mode, with static batch-norm statistics re-estimated for this level.
        data: The data that it was trained on: preprocessing, class names, tokeniser, validation and test samples.
        facts: What a model card tells: method, model, rounds, accuracy of each exit, costs; empty where unknown.
    """

    level: str
    architecture: Architecture
    sizes: Mapping[str, int]
    exits: tuple[int, ...]
    module: nn.Module
    data: Data
    facts: Mapping[str, Any] = field(default_factory=dict)
