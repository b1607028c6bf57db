"""The settings of local training. Each is declared here, with its only default: a run file's `[local]` has the same."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

OPTIMISERS: Mapping[str, Mapping[str, Any]] = {
    "sgd": {"lr": 0.1, "weight_decay": 5e-4, "momentum": 0.9, "nesterov": False},
    "adam": {"lr": 1e-3, "weight_decay": 0.0, "betas": (0.9, 0.999), "eps": 1e-8},
    "adamw": {"lr": 1e-3, "weight_decay": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8},
}
"""The settings that each optimiser takes, with its defaults: of Adam and AdamW those of PyTorch."""
OPTIMISER_KEYS = tuple(dict.fromkeys(key for own in OPTIMISERS.values() for key in own))
"""The settings that some optimiser takes."""
FROM_OPTIMISER: Any = None
"""Stands for a default that depends on the optimiser; where the optimiser takes no such setting, it is the value."""


@dataclass(frozen=True)
class Local:
    """Settings of one round's local training.

    Attributes:
        lr: Learning rate of this round.
        epochs: Passes over the client's data.
        batch_size: Samples per step; None for all at once.
        momentum: Of SGD.
        weight_decay: Times the weights, added to the gradient; by AdamW taken from the weights instead, times lr.
        clip_norm: Largest norm of the gradient, or None.
        clip_value: Largest absolute value of each of its elements, or None; before `clip_norm`.
        max_steps: Largest number of optimiser steps, or None.
        patience: Stop after this number of epochs in a row without a lower loss on the client's validation data, and go
            back to the weights of the best one; None, or no such data: train all epochs.
        deadline_s: Seconds within which the update must be there, or None for no end.
        late: What a client does that cannot train everything in time. "shallower": it trains the deepest exit of its
            sub-model that it can finish, and stops at the last finished step where it finishes none; "stop": it stops
            at the last finished step; "drop": its work is lost.
        check_every: Evaluate on the validation data every `check_every` steps instead, and before the first; `patience`
            is then counted in steps. None: after every epoch.
        optimiser: "sgd", "adam" or "adamw". It begins anew in every job: nothing of it is kept from round to round.
        nesterov: Whether SGD's momentum is Nesterov's.
        betas: Of Adam and AdamW: by how much the two moving averages keep of their past, from step to step.
        eps: Of Adam and AdamW: added to the root of the second moving average.
        schedule_in_round: "cosine" lets the learning rate fall to 0 along half a cosine over the round's steps.
        compress: Send what training changed in "float16" or "int8" (`fleetfit.messages`); None: the state itself.
    """

    lr: float = FROM_OPTIMISER
    epochs: int = 5
    batch_size: int | None = 16
    momentum: float = FROM_OPTIMISER
    weight_decay: float = FROM_OPTIMISER
    clip_norm: float | None = None
    clip_value: float | None = None
    max_steps: int | None = None
    patience: int | None = None
    deadline_s: float | None = None
    late: Literal["shallower", "stop", "drop"] = "shallower"
    check_every: int | None = None
    optimiser: Literal["sgd", "adam", "adamw"] = "sgd"
    nesterov: bool = FROM_OPTIMISER
    betas: tuple[float, float] = FROM_OPTIMISER
    eps: float = FROM_OPTIMISER
    schedule_in_round: Literal["constant", "cosine"] = "constant"
    compress: Literal["float16", "int8"] | None = None

    def __post_init__(self) -> None:
        """Fill in the defaults of the optimiser."""
        for key, default in self.own.items():
            if getattr(self, key) is FROM_OPTIMISER:
                object.__setattr__(self, key, default)
        if isinstance(self.betas, list):  # as it comes out of a message
            object.__setattr__(self, "betas", tuple(self.betas))

    @property
    def own(self) -> Mapping[str, Any]:
        """The settings that the optimiser takes, with their defaults; none of an optimiser that is unknown."""
        return OPTIMISERS.get(self.optimiser, {}) if isinstance(self.optimiser, str) else {}

    @property
    def moments(self) -> int:
        """Numbers that the optimiser keeps of each trained parameter."""
        return count_moments(self.optimiser)


def count_moments(optimiser: str) -> int:
    """Return the numbers that an optimiser keeps of each trained parameter; SGD counts as with momentum."""
    return 2 if "betas" in OPTIMISERS.get(optimiser, {}) else 1
