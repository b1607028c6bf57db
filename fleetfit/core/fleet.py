"""The fleet: clients as the server knows them, reports of nodes, and devices, which exist where jobs run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fleetfit.aggregate import Aggregate
from fleetfit.core.problem import Level, Problem
from fleetfit.core.resources import Clock, DeviceResources
from fleetfit.core.work import Update
from fleetfit.cost import Conditions, compute_cost
from fleetfit.data import Data
from fleetfit.errors import ModelError
from fleetfit.planner import Budget, affords, assign
from fleetfit.submodel import Submodel

if TYPE_CHECKING:  # methods are made of these values
    from fleetfit.hooks import Method

# ---- reports of nodes -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DataDescription:
    """The properties of the data that a model depends on: the same on all nodes.

    Attributes:
        name: Name of the data set.
        task: Name of the task.
        sample_shape: Shape of one sample, as a model gets it.
        classes: Number of classes.
        vocabulary: Tokens, or 0.
        padding: Id of the padding token, or -1.
        channels_last: Whether the channels of a sample are its last dimension.
        encoding: Digest of the names of classes, the tokenizer and the encoding of columns; "" without them.
        stored: The type of samples before they are scaled, such as "uint8", and " standardized" behind it where each
            node takes its own means; "" where that is not known.
    """

    name: str
    task: str
    sample_shape: tuple[int, ...]
    classes: int
    vocabulary: int = 0
    padding: int = -1
    channels_last: bool = False
    encoding: str = ""
    stored: str = ""

    @property
    def channels(self) -> int:
        """The channels of a sample, or its first dimension where none are last."""
        return (*self.sample_shape, 1)[-2 if self.channels_last else 0]

    @property
    def tokenizer(self) -> str:
        """The file of the tokenizer; the nodes have it."""
        return ""

    @property
    def shape(self) -> "DataDescription":
        """The description without the name: the same on all nodes."""
        return replace(self, name="")

    def __str__(self) -> str:
        """Return it as text."""
        samples = f"samples {list(self.sample_shape)}{' with channels last' * self.channels_last}"
        encoding = f", classes, tokens and columns {self.encoding[:8]}" * bool(self.encoding)
        stored = f", {self.stored}" * bool(self.stored)
        return f"{self.task}, {samples}{stored}, {self.classes} classes, {self.vocabulary} tokens{encoding}"


@dataclass(frozen=True)
class NodeDescription:
    """A node's own report.

    Attributes:
        name: Its name.
        facts: Its data.
        num_examples: Training samples.
        budget: Its budget, or None where it does not report one.
        tolerance: Fraction of the budget by which a model may exceed it.
        labels: Training samples by class, or None where it does not report them.
        held_out: Its samples for validation and for testing.
    """

    name: str
    facts: DataDescription
    num_examples: int
    budget: Budget | None = None
    tolerance: float = 0.1
    labels: tuple[int, ...] | None = None
    held_out: Mapping[str, int] = field(default_factory=dict)

    @property
    def payload(self) -> dict[str, Any]:
        """Plain values, as a node sends them and a run folder keeps them."""
        facts = {**vars(self.facts), "sample_shape": list(self.facts.sample_shape)}
        examples = {"train": self.num_examples, **self.held_out}
        return {"name": self.name, "facts": facts, "examples": examples, "budget": self.budget,
                "tolerance": self.tolerance, "labels": None if self.labels is None else list(self.labels)}  # fmt: skip


# ---- clients, devices, federation ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Clients:
    """All that the server knows of the registered clients, as arrays: a million of them cost nothing per round.

    Attributes:
        num_examples: Training samples of each, int [K].
        budget: Budget of each, as a fraction of the full model's cost, float [K], or None if no client reports one.
        tolerance: Tolerance of each, float [K].
        further: The same for each further cost that a client reports; infinite for clients that do not.
        labels: Training samples by class of each, int [K, classes], or None if no client reports them.
    """

    num_examples: np.ndarray
    budget: np.ndarray | None = None
    tolerance: np.ndarray | None = None
    further: Mapping[str, np.ndarray] = field(default_factory=dict)
    labels: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.num_examples)


@dataclass(eq=False)
class Device:
    """A device, which exists only where jobs run: its data, its budgets, its memory.

    Attributes:
        problem: The problem.
        data: Its own data.
        id: The client's id, or None for the server's own device.
        budgets: Its budgets by cost, as a fraction of the full model's; empty where they are unknown.
        tolerance: Fraction of a budget by which a model may exceed it.
        conditions: Conditions under which costs are counted.
        memory: The method's memory after the client's last accepted job.
        accelerator: Device of the tensors.
        clock: Its clock.
        absent: Reason for dropping out of this round; "" if it takes part.
        unlabeled: Data that the server trains on, without labels; None on the devices of clients.
    """

    problem: Problem
    data: Data
    id: int | None = None
    budgets: Mapping[str, float] = field(default_factory=dict)
    tolerance: float = 0.1
    conditions: Conditions = field(default_factory=Conditions)
    memory: Any = None
    accelerator: torch.device = field(default_factory=lambda: torch.device("cpu"))
    clock: Clock = field(default_factory=Clock)
    absent: str = ""
    unlabeled: Data | None = None

    def put(self, tensor: Tensor) -> Tensor:
        """Return a tensor where this device computes."""
        return tensor if tensor.device == self.accelerator else tensor.to(self.accelerator, non_blocking=True)

    def affords(self, piece: Submodel) -> bool:
        """Return whether every cost of a sub-model is within the device's budgets."""
        problem = self.problem
        whole = Submodel({}, (problem.architecture.blocks,))
        for cost, budget in self.budgets.items():
            part, full = (
                compute_cost(problem.architecture, p, problem.input_shape, cost, self.conditions)
                for p in (piece, whole)
            )
            if not affords(budget, self.tolerance, part / full):
                return False
        return True


_KEPT_SHARES = 1000


@dataclass(frozen=True, eq=False)
class Simulation:
    """A simulated fleet: makes the device of a client when a job needs it.

    Attributes:
        problem: The problem.
        data: The whole data set.
        parts: Splits of each client (indices into the data set).
        resources: Resources of each client.
        unlabeled: The server's own data, without labels; engines need not carry them to other processes.
    """

    problem: Problem
    data: Data
    parts: Sequence[Mapping[str, Tensor]]
    resources: DeviceResources = field(default_factory=DeviceResources)
    accelerator: torch.device = field(default_factory=lambda: torch.device("cpu"))
    unlabeled: Data | None = None
    _shares: dict[int, Data] = field(init=False, default_factory=dict)

    def device(self, client: int | None, memory: Any = None, round: int = 0) -> Device:
        """Return the device of a client as it is in a round, or the server's own one."""
        if client is None:
            return Device(self.problem, self.data, accelerator=self.accelerator, unlabeled=self.unlabeled)
        resources = self.resources
        return Device(
            self.problem, self._share(client), client, resources.get_budgets(client, round),
            resources.get_tolerance(client), resources.conditions, memory, self.accelerator,
            Clock(resources.get_speed(client, round)),
            resources.absence(client, round),
        )  # fmt: skip

    def _share(self, client: int) -> Data:
        """Return a client's view of the data; those of recent clients are kept."""
        if client not in self._shares:
            while len(self._shares) >= _KEPT_SHARES:
                self._shares.pop(next(iter(self._shares)))
            self._shares[client] = self.data.share(self.parts[client])
        return self._shares[client]


class Aggregator(Protocol):
    """Puts the updates of one round together; a method's hook `make_aggregator` makes it."""

    def add(self, update: Update, weight: float) -> None:
        """Take an update with its aggregation weight, finite and at least 0."""
        ...

    def result(self) -> Aggregate:
        """Return what the updates add up to."""
        ...


@dataclass(frozen=True, eq=False)
class Federation:
    """The server's view: the problem, the clients and the method.

    Attributes:
        problem: The problem.
        clients: All registered clients, as far as the server knows them.
        levels: Smallest first.
        cohort: Number of clients in a round.
        method: The method.
        method_spec: What a worker builds the method from.
        seed: Seed of the run.
        device: The server's own: its test set, and its data without labels (FedDF); None where it has none.
        connected: Round -> which clients are connected, bool [K]; None: all of them, always.
        classes: Classes, or tokens, that the task predicts; 0 for a task without them.
    """

    problem: Problem
    clients: Clients
    levels: tuple[Level, ...]
    cohort: int
    method: "Method"
    method_spec: Mapping[str, Any] = field(default_factory=lambda: {"name": "fedavg"})
    seed: int = 0
    device: Device | None = None
    connected: Callable[[int], np.ndarray] | None = None
    classes: int = 0

    @cached_property
    def level_of(self) -> np.ndarray:
        """Level of each client, int [K]: the largest that it affords within its tolerance; -1 under the smallest.

        If no client reports a budget, every client has the largest level.
        """
        clients = self.clients
        if clients.budget is None:
            return np.full(len(clients), len(self.levels) - 1)
        tolerance = 0.1 if clients.tolerance is None else clients.tolerance
        further = [(b, [level.further.get(cost, 0.0) for level in self.levels]) for cost, b in clients.further.items()]
        return assign(clients.budget, tolerance, [level.needs for level in self.levels], further)

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """Number of each level in reports: its name, or its position from 1 where the name is no number."""
        return tuple(int(one.name) if one.name.isdecimal() else i for i, one in enumerate(self.levels, 1))

    @cached_property
    def able(self) -> np.ndarray:
        """Ids of the clients that afford some level and have data to train on."""
        return np.flatnonzero((self.level_of >= 0) & (self.clients.num_examples > 0))

    def reachable(self, round: int) -> np.ndarray:
        """Return the ids of those among `able` that are connected in a round: every selection begins here."""
        return self.able if self.connected is None else self.able[self.connected(round)[self.able]]

    def level_index(self, submodel: Submodel) -> int:
        """Return the level whose exits and sizes a sub-model has."""
        for index, level in enumerate(self.levels):
            if level.submodel.exits == submodel.exits and level.submodel.sizes == submodel.sizes:
                return index
        raise ModelError(f"no level has exits {submodel.exits} and sizes {submodel.sizes}.", key="levels")
