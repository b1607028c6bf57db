"""The values that engines carry, and the server between two rounds."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fleetfit.aggregate import SummedBlock
from fleetfit.core.local import Compression, Local
from fleetfit.core.section import Norm
from fleetfit.layout import State
from fleetfit.submodel import Submodel

Kind = Literal["train", "evaluate", "statistics", "labels"]
Split = Literal["test", "validation", "train"]


@dataclass(frozen=True)
class Evaluation:
    """Settings of an evaluation or statistics job.

    Attributes:
        split: "test", "validation" or "train".
        norm: "static" (re-estimated statistics) or "batch" (those of each batch), for batch norm.
        batch_size: Samples per forward pass.
        samples: Largest number of samples (statistics jobs, and `evaluate.samples`), or None for all.
        shuffle: Seeded order instead of the stored one; matters for batch statistics only.
        own: The device takes the largest part of the sub-model that it affords, where the server does not know which;
            the job's statistics are then those of all levels, under `level{l}/`.
        metrics: Functions of outputs [N, ...] and labels [N, ...], by name, reported beside the accuracy.
        scope: "local": a client's own level, on its own data; "global": the largest level on a client's data, or any
            level on the server's test set. A client at the largest level gets one job for both, "global", unless the
            method sets `adapt_job`.
        personal: Whether predictions with the client's own class frequencies are scored, too.
    """

    split: Split = "test"
    norm: Norm = "static"
    batch_size: int = 128
    samples: int | None = None
    shuffle: bool = True
    own: bool = False
    metrics: tuple[str, ...] = ()
    scope: Literal["local", "global"] = "global"
    personal: bool = False


@dataclass(frozen=True, eq=False)
class Job:
    """One piece of work for one client; a value that any engine can carry.

    Attributes:
        kind: "train", "evaluate", "statistics" (of batch norm) or "labels" (frequencies of classes).
        round: 0-based.
        rounds: Rounds of the run.
        index: Its place in the round's order.
        client: Its client, or None for the server's own device.
        submodel: The sub-model that is sent, and after `adapt_job` the one that is trained.
        state: The sub-model's tensors, by name.
        method: The spec that the method is built from.
        seed: Seed of the job's random choices.
        level: 0-based.
        local: Settings of local training, with this round's learning rate.
        evaluation: Settings of the other kinds of jobs.
        statistics: Re-estimated batch-norm statistics, for an evaluation.
        memory_version: The round whose memory the client begins from; -1 for none.
        prior: The fleet's class frequencies, for training with a class prior and for personal predictions; empty where
            they are not known.
        extra: Tensors beside the state, by name, that the method's hook `attach` made for a training job; as the method
            declares them for the sub-model that is sent.
        dispatched: The sub-model that was sent, where the job runs; it is not sent again.
        levels: The sub-models of all levels, smallest first, with prefix channels, where the job runs. They are not
            sent: a device takes them from its problem. Hooks of the server have `federation.levels`.
    """

    kind: Kind
    round: int
    rounds: int
    index: int
    client: int | None
    submodel: Submodel
    state: State
    method: Mapping[str, Any]
    seed: int
    level: int = 0
    local: Local = field(default_factory=Local)
    evaluation: Evaluation = field(default_factory=Evaluation)
    statistics: State = field(default_factory=dict)
    memory_version: int = -1
    prior: tuple[float, ...] = ()
    extra: State = field(default_factory=dict)
    dispatched: Submodel | None = None
    levels: tuple[Submodel, ...] = ()


@dataclass(frozen=True, eq=False)
class LocalResult:
    """What local training leaves on the device.

    Attributes:
        state: All tensors of the sub-model, float32, in the layout's order.
        loss: The object that the hook `make_loss` made.
        task: The task that training saw, of the hook `adapt_task`.
        steps: Optimizer steps that made the state; with early stopping, those up to its best check.
        rate_sum: Sum of the learning rates of these steps.
        untrained: Parameters that no gradient reached; they are as they were sent.
    """

    state: State
    loss: Any
    task: Any = None
    steps: int = 0
    rate_sum: float = 0.0
    untrained: tuple[str, ...] = ()


FREQUENCIES = "frequencies"
"""The one tensor in the state of an update that answers a job "labels", float64 [classes]."""


@dataclass(frozen=True, eq=False)
class Update:
    """The result of a job. It names the sub-model that it contains, which may be a part of the one that was sent.

    Attributes:
        round: That of the job.
        index: That of the job.
        client: That of the job.
        level: That of the job.
        dispatched: The sub-model that was sent.
        submodel: The sub-model of the state: a part of `dispatched`.
        state: Its tensors, by name; what `fleetfit.messages` makes of them until the update is validated.
        num_examples: Samples that the client trained on.
        metrics: Plain values: "loss", "steps", what the method's hook `report` adds, and what the server notes.
        bytes_down: Of the job, as it is sent.
        bytes_up: Of the update, as it is sent.
        multiply_adds: Multiply-adds of the training.
        simulated_s: Seconds of the job if the device has a speed, or None.
        compressed: Compression of the state, or "".
        scales: Scales that undo the compression.
        untrained: Parameters of the state that the loss never reached; they are as they were sent, and do not count in
            the average.
        extra: Tensors beside the state, by name, that the method's hook `report` returned; as the method declares them
            for `dispatched`.
    """

    round: int
    index: int
    client: int | None
    level: int
    dispatched: Submodel
    submodel: Submodel
    state: State
    num_examples: int
    metrics: Mapping[str, Any]
    bytes_down: int = 0
    bytes_up: int = 0
    multiply_adds: int = 0
    simulated_s: float | None = None
    compressed: Literal["", Compression] = ""
    scales: State = field(default_factory=dict)
    untrained: tuple[str, ...] = ()
    extra: State = field(default_factory=dict)

    @staticmethod
    def of(job: Job, state: State, samples: int, **more: Any) -> "Update":
        """Return the update that answers a job, of the sub-model that was sent; `more`: further fields."""
        more = {"metrics": {}, **more}
        return Update(job.round, job.index, job.client, job.level, job.submodel, job.submodel, state, samples, **more)


@dataclass(frozen=True, eq=False)
class Failure:
    """A job without an update, and the reason.

    Attributes:
        round: That of the job.
        index: That of the job.
        client: That of the job.
        level: That of the job.
        dispatched: The sub-model that was sent.
        reason: A sentence.
        bytes_down: Of the job, as it was sent.
        bytes_up: Of the reply, if there was one.
        declined: Whether the device could not afford any part of it.
        late: Whether its time ran out.
        multiply_adds: Multiply-adds of the training.
        simulated_s: Seconds of the job if the device has a speed, or None.
        absent: Whether the client was not connected all the time.
    """

    round: int
    index: int
    client: int | None
    level: int
    dispatched: Submodel
    reason: str
    bytes_down: int = 0
    bytes_up: int = 0
    declined: bool = False
    late: bool = False
    multiply_adds: int = 0
    simulated_s: float | None = None
    absent: bool = False

    @staticmethod
    def of(job: Job, reason: str, **more: Any) -> "Failure":
        """Return the failure that answers a job; `more`: further fields."""
        return Failure(job.round, job.index, job.client, job.level, job.submodel, reason, **more)


@dataclass(frozen=True, eq=False)
class RoundSums:
    """The result of a round of which the server sees sums only, in place of updates.

    Attributes:
        blocks: Sums over clients, in whole numbers.
        step: The change of an element by a 1 in them.
        reports: Updates without states and metrics, and failures, in the jobs' order.
        hidden: Elements that clients trained, and that stayed hidden since too few cover them.
        clipped: Clients with an element beyond the range, in the block that has most of them; an upper bound.
        lost: Why there are no sums, or "".
    """

    blocks: tuple[SummedBlock, ...]
    step: float
    reports: tuple[Update | Failure, ...]
    hidden: int = 0
    clipped: int = 0
    lost: str = ""


@dataclass(frozen=True, eq=False)
class ClientMemory:
    """The memory of a client from one accepted update to its next; stored and sent as a payload.

    Attributes:
        method: The method's part.
        lost: The rounding errors of compression, which the next update adds (see `fleetfit.messages`), or None.
    """

    method: Any = None
    lost: Mapping[str, Any] | None = None

    @property
    def payload(self) -> Any:
        """Plain values and tensors; None for an empty memory."""
        return self.method if self.lost is None else {_OWN: self.method, _LOST: self.lost}

    @staticmethod
    def from_payload(payload: Any) -> "ClientMemory":
        """Return the memory of a payload."""
        if isinstance(payload, Mapping) and payload.keys() == {_OWN, _LOST}:
            return ClientMemory(payload[_OWN], payload[_LOST])
        return ClientMemory(payload)


_OWN, _LOST = "of the method", "lost by compression"  # in checkpoints, and in the memory of a fleet's nodes


@dataclass(frozen=True, eq=False)
class Server:
    """The server between two rounds; the checkpoint has all of it.

    Attributes:
        state: The full model's tensors, by name.
        round: Rounds done.
        memory: The method's memory: a payload of plain values and tensors.
        trained: Where clients report no budget: by client the largest level that it has trained (0-based).
        prior: The fleet's class frequencies, if the method needs them and the server has asked for them.
    """

    state: State
    round: int = 0
    memory: Any = None
    trained: Mapping[int, int] = field(default_factory=dict)
    prior: tuple[float, ...] = ()
