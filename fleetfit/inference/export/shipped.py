"""A level's model as it goes to a device: the module with everything that writers of files need to know."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fleetfit.data import Data
from fleetfit.errors import ConfigError
from fleetfit.inference.stopping import Policy
from fleetfit.layout import Architecture, some_input
from fleetfit.values import DataDescription

_SAMPLES, _LOGITS = 1000, 20_000_000


@dataclass(frozen=True, eq=False)
class Shipped:
    """A level's model as it goes to a device.

    Attributes:
        level: Its name, "1" for the smallest.
        architecture: The model family, as the method made it (a recurrent exit, LoRA).
        sizes: The size of every axis.
        exits: Block counts of its exits, shallow to deep.
        module: The module, in eval mode, with static batch-norm statistics re-estimated for this level.
        data: The data that it was trained on: preprocessing, class names, tokeniser, validation and test samples. Of a
            real fleet only what its nodes told.
        policy: When samples leave early, if it was calibrated.
        facts: What a model card tells: method, model, rounds, costs; empty where unknown.
    """

    level: str
    architecture: Architecture
    sizes: Mapping[str, int]
    exits: tuple[int, ...]
    module: nn.Module
    data: Data | DataDescription
    policy: Policy | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def own_data(self) -> Data:
        """The data themselves.

        Raises:
            ConfigError: They are on the nodes of a fleet.
        """
        if isinstance(self.data, DataDescription):
            raise ConfigError(
                "this run's data are on the nodes of a fleet, and this command needs data: name a data set like "
                "theirs with --data (from Python: data=...).",
                key="data",
            )
        return self.data

    @property
    def takes_tokens(self) -> bool:
        """Whether samples are token ids."""
        return self.data.vocabulary > 0

    @property
    def filled_split(self) -> str:
        """The split that forms are compared on: test, or the next best where that is empty."""
        if isinstance(self.data, DataDescription):
            return "test"
        data = self.data
        return next((name for name in ("test", "validation", "train") if len(data.split(name))), "test")

    @property
    def looked_at(self) -> str:
        """What the samples are called that forms are compared on."""
        if isinstance(self.data, DataDescription):
            return "drawn"
        return {"train": "training"}.get(self.filled_split, self.filled_split)

    @property
    def most_samples(self) -> int:
        """How many samples forms are compared on: a thousand, and fewer where the logits would fill the memory."""
        each = (
            len(self.exits) * self.data.classes * (self.data.sample_shape[0] if self.data.task == "next_token" else 1)
        )
        return max(2, min(_SAMPLES, _LOGITS // each))

    def samples(self, split: str, most: int) -> tuple[Tensor, Tensor]:
        """Return samples as they are stored, and labels: evenly spread over a split; of a fleet, drawn samples.

        Args:
            split: "test", "validation" or "train".
            most: At most so many.
        """
        if isinstance(self.data, DataDescription):
            rng = torch.Generator().manual_seed(0)
            return some_input(self.architecture, self.data.sample_shape, 8, rng), torch.empty(0, dtype=torch.int64)
        there = self.data.split(split)
        count = min(most, len(there))
        indices = there[torch.arange(count) * len(there) // max(1, count)]
        return self.data.stored(indices), self.data.labels(indices)
