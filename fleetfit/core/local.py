"""The settings of local training: `[local]` of a run file, and the same in each job. Each is declared here only."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, field_validator, model_validator

from fleetfit.core.section import Below1, Count, NotNegative, Positive, Section
from fleetfit.errors import ConfigError, truncate

# ---- schedules of the learning rate: `[local] schedule` ------------------------------------------------------------


class Constant(Section):
    """The same learning rate in all rounds."""

    kind: Literal["constant"] = "constant"

    def factor_at(self, rounds: int, round: int) -> float:
        """Return the multiplier of the learning rate in a round, counted from 0."""
        return 1.0


class Step(Section):
    """Multiply by `factor` from each round in `at` on."""

    kind: Literal["step"]
    at: list[Annotated[int, Field(ge=0)]]
    factor: Positive = 0.1

    def factor_at(self, rounds: int, round: int) -> float:
        """Return factor^n after n of the rounds in `at`."""
        return float(self.factor ** sum(round >= r for r in self.at))


class Cosine(Section):
    """Fall along half a cosine from 1 in the first round to `minimum` in the last."""

    kind: Literal["cosine"]
    minimum: NotNegative = 0.0

    def factor_at(self, rounds: int, round: int) -> float:
        """Return minimum + (1 - minimum) * (1 + cos(pi * round / (rounds - 1))) / 2."""
        progress = round / max(1, rounds - 1)
        return self.minimum + (1 - self.minimum) * (1 + math.cos(math.pi * min(progress, 1.0))) / 2


class Exponential(Section):
    """Multiply by `factor` each round."""

    kind: Literal["exponential"]
    factor: Positive

    def factor_at(self, rounds: int, round: int) -> float:
        """Return factor^round."""
        return float(self.factor**round)


Schedule = Annotated[Constant | Step | Cosine | Exponential, Field(discriminator="kind")]

# ---- optimizers ----------------------------------------------------------------------------------------------------

OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    "sgd": {"lr": 0.1, "weight_decay": 5e-4, "momentum": 0.9, "nesterov": False},
    "adam": {"lr": 1e-3, "weight_decay": 0.0, "betas": (0.9, 0.999), "eps": 1e-8},
    "adamw": {"lr": 1e-3, "weight_decay": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8},
}
"""The settings that each optimizer takes, with its defaults: of Adam and AdamW those of PyTorch."""
OPTIMIZER_KEYS = tuple(dict.fromkeys(key for keys in OPTIMIZERS.values() for key in keys))
"""The settings that some optimizer takes."""


def _make_optimizer_field(key: str) -> Any:
    """Return a field whose default is the optimizer's; None for an optimizer without the key."""
    return Field(default_factory=lambda values: OPTIMIZERS.get(values.get("optimizer", ""), {}).get(key))


_LARGEST = torch.finfo(torch.float32).max
Late = Literal["shallower", "stop", "drop"]
Compression = Literal["float16", "int8"]

# ---- `[local]` -----------------------------------------------------------------------------------------------------


class LocalSection(Section):
    """`[local]`: training on a client.

    Attributes:
        optimizer: "sgd", "adam" or "adamw"; by default "adamw" for built-in transformers, Vision Mamba and LSTMs, these
            at `lr = 0.01`, unless `momentum` or `nesterov` is set, and for PyTorch modules of your own, at `lr = 0.005`
            (0.001 from a million parameters on), unless a key of the optimizer or of clipping is set. It begins anew in
            every job: nothing of it is kept from round to round.
        epochs: Passes over the client's data.
        batch_size: Samples per step, or "all".
        lr: Learning rate of the first round; `schedule` changes it. `optimizer` names models with another default.
        momentum: Momentum of SGD.
        nesterov: Whether SGD's momentum is Nesterov's.
        betas: Decay rates of the two moving averages of Adam and AdamW.
        eps: Added to the root of the second moving average of Adam and AdamW.
        weight_decay: Times the weights, added to the gradient; by AdamW taken from the weights instead, times lr.
        clip_norm: Largest norm of the gradient; 1.0 by default where a module of your own is trained by "sgd".
        clip_value: Largest absolute value of an element of the gradient; applied before `clip_norm`.
        max_steps: Largest number of optimizer steps.
        patience: Early stopping: stop after this many checks without improvement of the client's validation loss, and
            restore the best weights. A client without validation data trains all epochs.
        check_every: Steps between two checks of early stopping, with one before the first step; by default after
            every epoch.
        compress: Send the change of the state in "float16" or "int8" (`fleetfit.messages`), instead of the state.
        schedule: Learning rate over the rounds.
        schedule_in_round: "cosine" lets the learning rate fall to 0 along half a cosine over the round's steps.
    """

    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    epochs: Count = 5
    batch_size: Count | Literal["all"] = 16
    lr: Positive = _make_optimizer_field("lr")
    momentum: Below1 = _make_optimizer_field("momentum")
    nesterov: bool = _make_optimizer_field("nesterov")
    betas: Annotated[tuple[Below1, Below1], Field(strict=False)] = _make_optimizer_field("betas")
    eps: Positive = _make_optimizer_field("eps")
    weight_decay: NotNegative = _make_optimizer_field("weight_decay")
    clip_norm: Positive | None = None
    clip_value: Positive | None = None
    max_steps: Count | None = None
    patience: Count | None = None
    check_every: Count | None = None
    compress: Compression | None = None
    schedule: Schedule = Field(default_factory=Constant)
    schedule_in_round: Literal["constant", "cosine"] = "constant"

    @property
    def foreign(self) -> list[str]:
        """The set keys that the optimizer does not take."""
        taken = OPTIMIZERS[self.optimizer]
        return [key for key in OPTIMIZER_KEYS if key in self.model_fields_set and key not in taken]

    @property
    def optimizer_settings(self) -> dict[str, Any]:
        """The settings that the optimizer takes, by PyTorch's names."""
        return {key: getattr(self, key) for key in OPTIMIZERS[self.optimizer]}

    @property
    def moments(self) -> int:
        """Numbers that the optimizer keeps of each trained parameter; SGD counts as with momentum."""
        return 2 if "betas" in OPTIMIZERS[self.optimizer] else 1

    def count_batch(self, samples: int) -> int:
        """Return the largest batch of a client with this many samples."""
        return samples if self.batch_size == "all" else self.batch_size


class Local(LocalSection):
    """Local training in one round: `[local]` with the round's learning rate, and the deadline of `[cohort]`.

    Attributes:
        deadline_s: That of `[cohort]`.
        late: That of `[cohort]`.
    """

    deadline_s: Positive | None = None
    late: Late = "shallower"

    @model_validator(mode="before")
    @classmethod
    def _drop_foreign(cls, values: Any) -> Any:
        """Leave out settings that are None since another optimizer takes them."""
        if not isinstance(values, Mapping):
            return values
        return {key: value for key, value in values.items() if value is not None or key not in OPTIMIZER_KEYS}

    @field_validator("lr", mode="wrap")
    @classmethod
    def _accept_zero(cls, value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        """Accept 0, at which a schedule may end."""
        return value if value == 0.0 and type(value) is float else validate(value)

    @field_validator("*")
    @classmethod
    def _check_size(cls, value: Any) -> Any:
        """Refuse numbers that a tensor cannot have."""
        if isinstance(value, float) and value > _LARGEST:
            raise ValueError(f"Input should be at most {_LARGEST:g}")
        return value

    def at_round(self, rounds: int, round: int) -> Self:
        """Return the settings with the learning rate of a round, counted from 0."""
        lr = self.lr * self.schedule.factor_at(rounds, round)
        return self.model_copy(update={"lr": lr, "schedule": Constant()})

    def replace(self, **changes: Any) -> Self:
        """Return the settings with other values; raise a `ConfigError` as `load` does."""
        return self.load({**dict(self), **changes})

    def dump(self) -> dict[str, Any]:
        """Return the settings of a round as a job carries them."""
        return {key: value for key, value in self if key != "schedule"}

    @classmethod
    def load(cls, settings: Any) -> Self:
        """Return the settings of a table.

        Raises:
            ConfigError: A key is unknown, or a value is of another type or out of range.
        """
        try:
            return cls.model_validate(settings)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
        key = ".".join(map(str, ("local", *first["loc"])))
        raise ConfigError(f"{key}: {first['msg']}, got {truncate(repr(first['input']))}.", key=key)
