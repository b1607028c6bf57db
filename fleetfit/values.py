"""The values of a round: problem, clients, levels, devices, federation, job, update, server.

Values, not services: a `Job` goes in, an `Update` comes out; state is passed and returned. What the server knows of a client
(`Client`) and what a device has (`Device`) are two types, and no function gets both.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fleetfit import names
from fleetfit.data import Data
from fleetfit.errors import ModelError
from fleetfit.layout import Architecture, Layout, State, infer_layout
from fleetfit.planner import assign
from fleetfit.submodel import Submodel
from fleetfit.tasks import Task, task_named

if TYPE_CHECKING:
    from fleetfit.method import Method

# ---- what is trained -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Problem:
    """What is trained: an architecture, the exits chosen for it, their layout, and the task.

    Attributes:
        architecture: The model family.
        input_shape: Shape of one sample, without the batch.
        task: Loss, divergence and metrics.
        exits: Exits of the full model.
        base: Tensors that are never trained and do not travel.
        spec: How another process rebuilds the problem; None for objects that have no import path.
    """

    architecture: Architecture
    input_shape: tuple[int, ...]
    task: Task
    exits: tuple[int, ...]
    base: State = field(default_factory=dict)
    spec: Mapping[str, Any] | None = None

    @cached_property
    def layout(self) -> Layout:
        """The layout of the model with all its exits."""
        return infer_layout(self.architecture, self.exits, self.base)

    @staticmethod
    def rebuilt(spec: Mapping[str, Any]) -> "Problem":
        """Build the problem that a spec describes: {"model": {...}, "given": {...}, "task": ..., "exits": [...]}."""
        model = dict(spec["model"])
        name = model.pop("name")
        given = {key: tuple(v) if isinstance(v, list) else v for key, v in spec["given"].items()}
        architecture = names.call(names.resolve("models", name), name, "[model]", model, **given)
        exits = tuple(spec["exits"]) or (architecture.blocks,)
        return Problem(architecture, tuple(given["input_shape"]), task_named(spec["task"]), exits, spec=spec)

    def with_exits(self, exits: Iterable[int]) -> "Problem":
        """Return the same problem with other exits."""
        chosen = tuple(sorted(set(exits)))
        spec = None if self.spec is None else {**self.spec, "exits": list(chosen)}
        return replace(self, exits=chosen, spec=spec)

    def submodel(self, width: float, exits: tuple[int, ...]) -> Submodel:
        """Return the prefix sub-model of a width and some exits."""
        sizes = self.architecture.sizes(width)
        return Submodel({axis: range(sizes[axis]) for axis in self.architecture.axes}, exits)


@dataclass(frozen=True, eq=False)
class Level:
    """One complexity level.

    Attributes:
        name: What people call it, "1" for the smallest.
        submodel: Its sub-model, with prefix channels; the one that is evaluated and deployed.
        width: Fraction of the channels kept (s_w).
        needs: Cost as a fraction of the full model's, which a client must afford; 0 for everybody.
    """

    name: str
    submodel: Submodel
    width: float
    needs: float


# ---- who takes part --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Client:
    """All that the server knows of a client; a budget is here only if the client told it."""

    id: int
    num_examples: int
    reported: float | None = None
    tolerance: float = 0.1


@dataclass(frozen=True, eq=False)
class Clients(Sequence[Client]):
    """All registered clients, held as arrays so that a million of them cost nothing per round.

    Attributes:
        num_examples: Training samples of each, int [K].
        reported: Budget that each told, as a fraction of the full model's cost, float [K], or None when nobody told.
        tolerance: Tolerance of each, float [K].
    """

    num_examples: np.ndarray
    reported: np.ndarray | None = None
    tolerance: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.num_examples)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        reported = None if self.reported is None else float(self.reported[index])
        tolerance = 0.1 if self.tolerance is None else float(self.tolerance[index])
        return Client(int(index), int(self.num_examples[index]), reported, tolerance)


@dataclass(eq=False)
class Device:
    """A device, which exists only where jobs run: its own data, what it affords now, what it remembers.

    Attributes:
        problem: What is trained.
        data: Its own data.
        id: The client's id, or None for the server's own device.
        budget: What it affords now, as a fraction of the full model's cost; None where nobody measures.
        memory: What it kept from its last accepted job.
        accelerator: Where tensors are computed on.
    """

    problem: Problem
    data: Data
    id: int | None = None
    budget: float | None = None
    memory: Any = None
    accelerator: torch.device = field(default_factory=lambda: torch.device("cpu"))


@dataclass(frozen=True, eq=False)
class Simulation:
    """A simulated fleet: makes the device of a client when a job needs it.

    Attributes:
        problem: What is trained.
        data: The whole data set.
        parts: Splits of each client (indices into the data set).
        budgets: What each client affords, or None.
    """

    problem: Problem
    data: Data
    parts: Sequence[Mapping[str, Tensor]]
    budgets: np.ndarray | None = None
    accelerator: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def device(self, client: int | None, memory: Any = None) -> Device:
        """Return the device of a client, or the server's own one."""
        if client is None:
            return Device(self.problem, self.data, None, None, None, self.accelerator)
        budget = None if self.budgets is None else float(self.budgets[client])
        return Device(self.problem, self.data.share(self.parts[client]), client, budget, memory, self.accelerator)


@dataclass(frozen=True, eq=False)
class Federation:
    """The server's view: problem, clients, levels, and how many clients take part in a round."""

    problem: Problem
    clients: Clients
    levels: tuple[Level, ...]
    cohort: int
    method: "Method"
    method_spec: Mapping[str, Any] = field(default_factory=lambda: {"name": "fedavg"})
    seed: int = 0
    device: Device | None = None

    @cached_property
    def level_of(self) -> np.ndarray:
        """Level of each client, int [K]: the largest that it affords within its tolerance; -1 under the smallest."""
        if self.clients.reported is None:
            return np.full(len(self.clients), len(self.levels) - 1)
        tolerance = 0.1 if self.clients.tolerance is None else self.clients.tolerance
        return assign(self.clients.reported, tolerance, [level.needs for level in self.levels])

    @cached_property
    def able(self) -> np.ndarray:
        """Ids of the clients that afford some level and have data to train on."""
        return np.flatnonzero((self.level_of >= 0) & (self.clients.num_examples > 0))

    def level_index(self, submodel: Submodel) -> int:
        """Return the level whose exits and sizes a sub-model has."""
        for index, level in enumerate(self.levels):
            if level.submodel.exits == submodel.exits and level.submodel.sizes == submodel.sizes:
                return index
        raise ModelError(f"no level has exits {submodel.exits} and sizes {submodel.sizes}.")


# ---- values that engines carry ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Local:
    """Settings of one round's local training.

    Attributes:
        lr: Learning rate of this round.
        epochs: Passes over the client's data.
        batch_size: Samples per step; None for all at once.
        clip_norm: Largest norm of the gradient, or None.
    """

    lr: float = 0.1
    epochs: int = 1
    batch_size: int | None = 16
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip_norm: float | None = None


@dataclass(frozen=True)
class Evaluation:
    """Settings of an evaluation or statistics job.

    Attributes:
        split: "test", "validation" or "train".
        norm: "static" (re-estimated statistics) or "batch" (those of each batch), for batch norm.
        batch_size: Samples per forward pass.
        samples: At most so many samples (statistics jobs), or None for all.
        shuffle: Seeded order instead of the stored one; matters for batch statistics only.
    """

    split: str = "test"
    norm: str = "static"
    batch_size: int = 128
    samples: int | None = None
    shuffle: bool = True


@dataclass(frozen=True, eq=False)
class Job:
    """One piece of work for one client; a value that any engine can carry."""

    kind: str
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


@dataclass(frozen=True, eq=False)
class Update:
    """What came back: it says what it contains; the server never assumes that a client trained what it was sent."""

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


@dataclass(frozen=True, eq=False)
class Failure:
    """A job that brought nothing back, and why."""

    round: int
    index: int
    client: int | None
    level: int
    dispatched: Submodel
    reason: str
    bytes_down: int = 0
    bytes_up: int = 0


@dataclass(frozen=True, eq=False)
class Server:
    """The server between two rounds: the state, how many rounds are done, and what a method keeps."""

    state: State
    round: int = 0
    memory: Any = None
