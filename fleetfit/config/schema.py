"""The typed description of a run: every key of a run file with its type, range and default.

A section is a value; reading and merging are in `fleetfit.config.reading`, messages in `fleetfit.config.checking`, and
what becomes of it in `fleetfit.config.assembly`.
"""

import math
from typing import Annotated, Any, Literal

from pydantic import Field

from fleetfit.config.comparing import CompareSection
from fleetfit.config.section import Count, Fraction, NotNegative, Open, Positive, Section

Unit = Annotated[str, Field(pattern=r"[0-9]\s*[A-Za-z]+\s*$")]
Norm = Literal["static", "batch"]

CLIENTS = 40
"""Clients, where the partition does not say."""
FRACTION = 0.1
"""p, the share of the clients in a cohort, where the cohort does not say."""


# ---- schedules of the learning rate ------------------------------------------------------------------------------


class Constant(Section):
    """The same learning rate in all rounds."""

    kind: Literal["constant"] = "constant"

    def factor_at(self, rounds: int, round: int) -> float:
        """Return what the learning rate is multiplied by in a round, counted from 0."""
        return 1.0


class Step(Section):
    """Multiply by `factor` from each round in `at` on."""

    kind: Literal["step"]
    at: list[Annotated[int, Field(ge=0)]]
    factor: Positive = 0.1

    def factor_at(self, rounds: int, round: int) -> float:
        """Return factor^(how many of `at` have come), counted from round 0."""
        return float(self.factor ** sum(round >= r for r in self.at))


class Cosine(Section):
    """Fall along half a cosine from 1 in the first round to `minimum` in the last."""

    kind: Literal["cosine"]
    minimum: NotNegative = 0.0

    def factor_at(self, rounds: int, round: int) -> float:
        """Return minimum + (1 - minimum) * (1 + cos(pi * round / (rounds - 1))) / 2."""
        done = round / max(1, rounds - 1)
        return self.minimum + (1 - self.minimum) * (1 + math.cos(math.pi * min(done, 1.0))) / 2


class Exponential(Section):
    """Multiply by `factor` each round."""

    kind: Literal["exponential"]
    factor: Positive

    def factor_at(self, rounds: int, round: int) -> float:
        """Return factor^round."""
        return float(self.factor**round)


Schedule = Annotated[Constant | Step | Cosine | Exponential, Field(discriminator="kind")]


# ---- the sections ------------------------------------------------------------------------------------------------


class PartitionSection(Open):
    """How the data are divided among clients; further keys are those of the kind.

    Attributes:
        kind: "iid", "dirichlet", "shards" or "natural".
        clients: How many; 40 by default, and with "natural" one per natural group.
        seed: Of the division; the run's seed by default.
    """

    kind: str = "dirichlet"
    clients: Count | None = None
    seed: Annotated[int, Field(ge=0)] | None = None


class DataSection(Open):
    """`[data]`: which data set, and how it is divided. Further keys (folder, validation, ...) are its own."""

    name: Any = "digits"
    partition: PartitionSection = Field(default_factory=lambda: PartitionSection(kind="dirichlet"))


class ModelSection(Open):
    """`[model]`: the architecture. Further keys are its own."""

    name: Any = "cnn"


class Group(Section):
    """One budget class of the fleet.

    Attributes:
        budget: What a device affords: of the fleet's cost, or a table of costs, all of which must fit. A number up to 1
            is a fraction of the full model's cost, a larger one and text with a unit ("20 ms", "200 MB") are absolute.
        share: Its share of the clients; groups without one divide what the others leave, equally.
        tolerance: epsilon_k of its clients; `fleet.tolerance` by default.
        name: What reports call it; "1/8" for a budget of 0.125 by default.
    """

    budget: Positive | Unit | dict[str, Positive | Unit]
    share: Fraction | None = None
    tolerance: NotNegative | None = None
    name: str | None = None


class DriftSection(Section):
    """`[fleet] drift`: how budgets move during the run (see `fleetfit.values.Drift`).

    Attributes:
        sd: Standard deviation of the slow movement, of the budget's logarithm.
        jump: Probability that a budget jumps in a round.
        low: What a jump leaves at least, as a fraction.
    """

    sd: NotNegative = 0.1
    jump: Annotated[float, Field(ge=0, le=1)] = 0.05
    low: Fraction = 0.25


class FleetSection(Section):
    """`[fleet]`: what the devices afford, and how that becomes levels.

    Attributes:
        cost: What the levels are planned in, and budgets that are numbers are meant in: "parameters", "multiply_adds",
            "size_bytes", "memory_bytes" (of a training step) or "latency_s" (measured on this machine).
        tolerance: How far a level may exceed a budget, as a fraction of it.
        levels: "cluster", "halving", target cost ratios, or a saved plan (its path, or the plan itself).
        told: Whether clients tell the server their budgets; by default, whether the method needs it.
        drift: How budgets move during the run; they stay by default.
        groups: The budget classes.
        measured: Latencies that were measured when the run was prepared; written by a run, so that it can be repeated.
    """

    cost: str = "parameters"
    tolerance: NotNegative = 0.1
    levels: str | list[Fraction] | dict[str, Any] = "cluster"
    told: bool | None = None
    drift: DriftSection | None = None
    groups: Annotated[list[Group], Field(min_length=1)] = Field(
        default_factory=lambda: [Group(budget=b) for b in (0.125, 0.25, 0.5, 1.0)]
    )
    measured: dict[str, list[float]] = Field(default_factory=dict)


class MethodSection(Open):
    """`[method]`: the algorithm, its hyperparameters, options (`plus`) and single hooks (`hooks`)."""

    name: Any = "scalefl"
    plus: dict[str, dict[str, Any]] = Field(default_factory=dict)
    hooks: dict[str, Any] = Field(default_factory=dict)


class LocalSection(Section):
    """`[local]`: training on a client."""

    epochs: Count = 5
    batch_size: Count | Literal["all"] = 16
    lr: Positive = 0.1
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    weight_decay: NotNegative = 5e-4
    clip_norm: Positive | None = None
    clip_value: Positive | None = None
    max_steps: Count | None = None
    patience: Count | None = None
    schedule: Schedule = Field(default_factory=Constant)


class CohortSection(Section):
    """`[cohort]`: who takes part in a round.

    Attributes:
        choose: "uniform" leaves it to the method, most of which choose uniformly; or the name of a choice, or a table
            with its name and its own keys.
        fraction: p: max(1, round(p * clients)) clients take part; 0.1 by default.
        count: How many, instead of a fraction.
    """

    choose: Any = "uniform"
    fraction: Fraction | None = None
    count: Count | None = None


class EngineSection(Open):
    """`[engine]`: where jobs run. Further keys (device, workers, threads, ...) are the engine's own."""

    name: Any = "local"


class EvaluateSection(Section):
    """`[evaluate]`: when and how accuracy is measured.

    Attributes:
        every: Rounds between evaluations; 0 for none on the way. The last round is always evaluated.
        batch_size: Samples per forward pass, which batch statistics depend on.
        split: Which of each client's splits.
        norms: Batch-norm policies, "static" and "batch"; the first is the headline.
        statistics_samples: Training samples, over all clients, from which static statistics are re-estimated.
        clients: At most so many clients, drawn once; all by default.
        whole: Whether each evaluation covers the whole test set as well, not only the last.
    """

    every: Annotated[int, Field(ge=0)] = 10
    batch_size: Count = 128
    split: Literal["test", "validation", "train"] = "test"
    norms: Annotated[list[Norm], Field(min_length=1)] = Field(default_factory=lambda: list[Norm](("static", "batch")))
    statistics_samples: Count = 5000
    clients: Count | None = None
    whole: bool = False


class CheckpointSection(Section):
    """`[checkpoint]`: how often the run can be taken up again: every so many rounds, and how many are kept."""

    every: Count = 1
    keep: Count = 2


class Experiment(Section):
    """A run, described. The empty description trains ScaleFL on the handwritten digits.

    Attributes:
        start: The folder of another run, whose last state is the first one of this run.
    """

    name: str = ""
    seed: Annotated[int, Field(ge=0)] = 0
    rounds: Count = 30
    start: str = ""
    data: DataSection = Field(default_factory=DataSection)
    model: ModelSection = Field(default_factory=ModelSection)
    fleet: FleetSection = Field(default_factory=FleetSection)
    method: MethodSection = Field(default_factory=MethodSection)
    local: LocalSection = Field(default_factory=LocalSection)
    cohort: CohortSection = Field(default_factory=CohortSection)
    engine: EngineSection = Field(default_factory=EngineSection)
    evaluate: EvaluateSection = Field(default_factory=EvaluateSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    compare: CompareSection = Field(default_factory=CompareSection)


NOT_YET = {
    "data.server": "data for the server (FedDF) come with a later version; leave data.server out.",
    "cohort.deadline_s": "deadlines come with a later version; leave cohort.deadline_s out.",
    "fleet.groups.profile": "device profiles come with a later version; write a budget as a fraction instead.",
}
"""Keys that the design has and this version has not: refused, never ignored."""
