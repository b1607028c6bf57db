"""Who takes part in a run and on which data: simulated clients, the nodes of a fleet, or those that are expected."""

import inspect
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fleetfit import files, names
from fleetfit.config.availability import build_availability
from fleetfit.config.computing import Computing
from fleetfit.config.defaults import sets_client_count
from fleetfit.config.fleet import (
    DeviceBudgets,
    deal_clients,
    describe_absent_clients,
    format_ranges,
)
from fleetfit.config.naming import check_keys, load_data
from fleetfit.config.schema import (
    CLIENTS,
    FEWEST,
    ROWS,
    DriftSection,
    Experiment,
    ServerDataSection,
)
from fleetfit.config.speeds import build_speeds
from fleetfit.cost import Conditions, Piece, cost_of
from fleetfit.data import Data, class_counts, find_unassigned, partition, sizes_of, unlabelled
from fleetfit.errors import ConfigError, quote_some
from fleetfit.method import FEDAVG, Method
from fleetfit.planner import Targets, budgets_by_cost
from fleetfit.training import accelerator_named
from fleetfit.values import (
    Clients,
    DataDescription,
    Device,
    DeviceResources,
    Drift,
    Federation,
    Level,
    NodeDescription,
    Problem,
    Simulation,
)
from fleetfit.values.fleet import ServerHooks
from fleetfit.values.local import moments_of

# ---- the server's own data (`[data] server`), and where it trains on them ------------------------------------------


def server_data(experiment: Experiment, data: Data | DataDescription, load: Callable[..., Data]) -> Data:
    """Return the server's own data, without labels.

    Texts are cut into the tokens of the clients' texts, unless `tokenizer` says otherwise.

    Args:
        experiment: The run.
        data: The clients' data.
        load: Loads the data set of a section.

    Raises:
        FleetFitError: They cannot be had, or a model for the clients' data cannot take them.
    """
    section = experiment.data.server
    assert section is not None
    found = load(section, "[data] server", **_same_tokens(experiment, section, data))
    _check_alike(data, found)
    return unlabelled(found, experiment.seed)


def _same_tokens(experiment: Experiment, section: ServerDataSection, data: Data | DataDescription) -> dict[str, Any]:
    if "tokenizer" in section.settings or isinstance(section.name, Data):
        return {}
    factory = section.name if callable(section.name) else names.resolve("data", section.name)
    theirs = experiment.data.settings.get("tokenizer") or data.tokenizer
    return {"tokenizer": theirs} if theirs and "tokenizer" in inspect.signature(factory).parameters else {}


def _check_alike(data: Data | DataDescription, server: Data) -> None:
    """Refuse data that a model for the clients' data cannot take.

    Raises:
        ConfigError: Shapes or tokens differ.
    """
    if server.sample_shape != data.sample_shape:
        raise ConfigError(
            f"[data] server: a sample of {server.name} is {list(server.sample_shape)} and one of the clients' "
            f"{data.name} is {list(data.sample_shape)}; they must be alike. Images can be brought to one size with "
            "resize, texts with length."
        )
    if data.tokenizer and server.tokenizer and _text(data.tokenizer) != _text(server.tokenizer):
        raise ConfigError(
            f"[data] server: the texts of {server.name} are cut into other tokens than the clients' {data.name}. Give "
            "both the same tokenizer, or none to the server's."
        )
    ours, theirs = (data.vocabulary, data.padding), (server.vocabulary, server.padding)
    if ours != theirs:
        raise ConfigError(
            f"[data] server: {server.name} has {theirs[0]} tokens and padding {theirs[1]}, the clients' {data.name} "
            f"{ours[0]} and {ours[1]}; the same token must mean the same in both. Give both the same tokenizer."
        )


def _text(file: str) -> str:
    return files.read_text(Path(file), ConfigError)


def server_accelerator(experiment: Experiment) -> torch.device:
    """Return where the server computes: on the engine's device, if there is one here."""
    named = experiment.engine.settings.get("device", "cpu")
    try:
        return accelerator_named(named if isinstance(named, str) else "cpu")
    except ConfigError:  # the engine will say so, if a run is started
        return torch.device("cpu")


# ---- simulated devices, and what they tell -------------------------------------------------------------------------


def build_resources(experiment: Experiment, fleet: DeviceBudgets) -> DeviceResources:
    """Return what the simulated devices afford, how fast they are, and when they are connected."""
    section, seed, drift = experiment.fleet, experiment.seed, experiment.fleet.drift
    moving = None if drift is None else _drift_of(drift)
    budgets = {fleet.cost: fleet.budgets, **fleet.further}
    speeds = build_speeds(section, fleet.group, seed)
    coming = build_availability(section.availability, len(fleet.budgets), seed)
    return DeviceResources(budgets, fleet.tolerances, moving, fleet.conditions, seed, speeds, section.jitter, coming)


def _drift_of(section: DriftSection) -> Drift:
    """Return how budgets move; without jumps, how low they go says nothing."""
    return Drift(section.sd, section.jump, section.low) if section.jump else Drift(section.sd, 0.0)


def make_connected(resources: DeviceResources) -> Callable[[int], np.ndarray] | None:
    """Return what tells the server who is connected in a round."""
    return None if resources.availability is None else resources.availability.online


def build_clients(
    experiment: Experiment, data: Data, parts: Sequence[Mapping[str, Tensor]], fleet: DeviceBudgets
) -> Clients:
    """Return all that clients could tell the server, and whether they tell their classes.

    Raises:
        ConfigError: They are to tell classes, and the task has none.
    """
    counts, labels = sizes_of(parts), None
    if experiment.fleet.reports_labels:
        if data.task != "classification":
            raise ConfigError(
                f"[fleet] reports_labels: clients can report how many samples of each class they have in a "
                f"classification; the task of {data.name} is {data.task}. Leave reports_labels out."
            )
        labels = class_counts(data, [dict(part) for part in parts]).numpy()
    return Clients(counts, fleet.budgets, fleet.tolerances, fleet.further, labels)


def describe_absences(federation: Federation, resources: DeviceResources) -> list[str]:
    """Name the clients that could take part, but are in no round of the trace.

    Raises:
        ConfigError: That is all of them.
    """
    trace = None if resources.availability is None else resources.availability.trace
    if trace is None:
        return []
    missing = federation.able[~np.asarray(trace[:, federation.able].any(axis=0))]
    if not len(missing):
        return []
    if len(missing) == len(federation.able):
        raise ConfigError("[fleet] availability.trace: no client that can take part is ever online.")
    return [
        f"{len(missing)} clients cannot take part: the trace never has them online. Clients {format_ranges(missing)}."
    ]


def _usual_clients(experiment: Experiment, data: Data) -> int:
    """Return how many clients there are where nobody says: 40, and fewer where each would have under 30 samples."""
    if not sets_client_count(experiment.data.name):
        return CLIENTS
    samples = len(data.split("train"))
    return max(1, min(CLIENTS, samples // ROWS if samples >= FEWEST * ROWS else min(FEWEST, samples)))


def divide_data(experiment: Experiment, data: Data) -> Sequence[Mapping[str, Tensor]]:
    """Return each client's splits."""
    division = experiment.data.partition
    clients = division.clients or (None if division.kind == "natural" else _usual_clients(experiment, data))
    seed = experiment.seed if division.seed is None else division.seed
    return partition(data, division.kind, clients, seed, **division.settings)


# ---- what an assembly asks of whoever takes part -------------------------------------------------------------------


class Expected(Protocol):
    """Who is expected to take part, and on which data: enough to plan the levels of a run.

    Attributes:
        data: What is trained on, or what is known of it.
        count: How many clients there are.
    """

    data: Data | DataDescription
    count: int

    def largest(self) -> int:
        """Return the training samples of the client that has most.

        Raises:
            ConfigError: Nobody knows.
        """
        ...

    def budgets(self, problem: Problem, conditions: Conditions) -> DeviceBudgets:
        """Return who the clients are, once there is a problem whose costs can be counted."""
        ...


class Participants(Expected, Protocol):
    """Who takes part: simulated clients, or the nodes of a fleet.

    Attributes:
        none_of_them: How a message calls none of them.
    """

    none_of_them: str

    def joined(self, planned: "PlannedProblem") -> "FleetMembers":
        """Return clients and devices of the run, once its levels are planned."""
        ...

    def notes(
        self, known: Federation, planned: "PlannedProblem", joined: "FleetMembers"
    ) -> tuple[list[str], list[str]]:
        """Say who does not take part, and what else the user must see of them."""
        ...


@dataclass(frozen=True, eq=False)
class FleetMembers:
    """Clients and devices of a run.

    Attributes:
        clients: All that whoever describes the run knows of the clients, even if the server is not told.
        device: The server's own, or None.
        simulation: The simulated devices; None where devices are elsewhere, and no test data here either.
    """

    clients: Clients
    device: Device | None
    simulation: Simulation | None = None


@dataclass(frozen=True, eq=False)
class PlannedProblem:
    """What is trained, how, by whom, at which levels.

    Attributes:
        problem: With the exits of the levels.
        method: What the spec builds.
        method_spec: From which the method is built wherever a job runs.
        fleet: Who the clients are.
        targets: What the levels should cost.
        levels: The method's.
        how: How they are computed.
    """

    problem: Problem
    method: Method
    method_spec: Mapping[str, Any]
    fleet: DeviceBudgets
    targets: Targets
    levels: tuple[Level, ...]
    how: Computing


def make_conditions(experiment: Experiment, who: Expected) -> Conditions:
    """Return under which conditions costs are counted."""
    said = experiment.local.batch_size
    size = who.largest() if said == "all" else said
    return Conditions(size, dict(experiment.fleet.measured), moments_of(experiment.local.optimiser))


# ---- simulated clients; clients that are expected; nodes -----------------------------------------------------------


class SimulatedClients:
    """Clients whose data are parts of one data set, dealt to budget groups; see `Participants`."""

    none_of_them = "no client"

    def __init__(self, experiment: Experiment, method: Method) -> None:
        """Load the data and divide them."""
        check_keys(experiment)
        self._experiment = experiment
        self._whole = load_data(experiment.data)
        self.data: Data | DataDescription = self._whole
        self._own = server_data(experiment, self._whole, load_data) if method.own_data else None
        self.parts = divide_data(experiment, self._whole)
        self.count = len(self.parts)

    def largest(self) -> int:
        """Return the training samples of the client that has most."""
        return max(1, int(sizes_of(self.parts).max()))

    def budgets(self, problem: Problem, conditions: Conditions) -> DeviceBudgets:
        """Deal the clients to the groups of the run file."""
        return deal_clients(self._experiment.fleet, problem, self.count, self._experiment.seed, conditions)

    def joined(self, planned: PlannedProblem) -> FleetMembers:
        """Return clients and simulated devices."""
        experiment, data, parts = self._experiment, self._whole, self.parts
        resources = build_resources(experiment, planned.fleet)
        simulation = Simulation(planned.problem, data, parts, resources, unlabelled=self._own)
        server = replace(simulation.device(None), accelerator=server_accelerator(experiment))
        return FleetMembers(build_clients(experiment, data, parts, planned.fleet), server, simulation)

    def notes(self, known: Federation, planned: PlannedProblem, joined: FleetMembers) -> tuple[list[str], list[str]]:
        """Say who does not take part, and what real time and a trace do to the run."""
        assert joined.simulation is not None
        resources, further = joined.simulation.resources, []
        if self._experiment.cohort.deadline_s is not None and not resources.speeds:
            further = [
                "The deadline is one of real time, since no group has a profile: results differ from run to run."
            ]
        further += self._notes_on_samples()
        absent = describe_absent_clients(known, planned.fleet)
        return absent, further + describe_absences(known, resources) if len(known.able) else further

    def _notes_on_samples(self) -> list[str]:
        """Say which samples of the split that is evaluated `local` and `global` do not count, and why."""
        data, evaluate = self._whole, self._experiment.evaluate
        if self._experiment.privacy.is_set:
            return []
        notes = []
        if evaluate.clients is not None and evaluate.clients < self.count:
            notes.append(f"local and global are of {evaluate.clients} of {self.count} clients: [evaluate] clients.")
        rest = find_unassigned(data, self.parts, evaluate.split)
        if not len(rest):
            return notes
        why = "the division gives them to no client"
        if data.task == "classification":
            classes = set(data.y[rest].unique().tolist())
            if not classes.intersection(data.y[data.split("train")].unique().tolist()):
                names = [data.class_names[i] if data.class_names else i for i in sorted(classes)]
                why = f"there are no training samples of their classes ({quote_some(names)})"
        return [
            *notes,
            f"{len(rest)} of {len(data.split(evaluate.split))} {evaluate.split} samples belong to no client, so local "
            f"and global do not count them: {why}.",
        ]


class ExpectedClients:
    """The clients that a run file describes, perhaps without their data; see `Expected`."""

    def __init__(self, experiment: Experiment, data: Data | DataDescription) -> None:
        """Divide the data, if they are there."""
        self._experiment, self.data = experiment, data
        self._parts = divide_data(experiment, data) if isinstance(data, Data) else None
        self.count = len(self._parts) if self._parts is not None else experiment.data.partition.clients or CLIENTS

    def largest(self) -> int:
        """Return the training samples of the client that has most.

        Raises:
            ConfigError: There are no data.
        """
        if self._parts is None:
            raise ConfigError(
                '[local] batch_size is "all", and without the data nobody knows how many that is: say it, such as '
                "--set local.batch_size=64."
            )
        return max(1, int(sizes_of(self._parts).max()))

    def budgets(self, problem: Problem, conditions: Conditions) -> DeviceBudgets:
        """Deal the clients to the groups of the run file."""
        return deal_clients(self._experiment.fleet, problem, self.count, self._experiment.seed, conditions)


SILENT = (
    "Nodes do not tell what they afford. Each is evaluated with the largest model that it has trained so far, and one "
    "that has trained none not at all."
)


class Nodes:
    """The nodes of a real fleet, which have their data and tell what they want; see `Participants`."""

    none_of_them = "no node"

    def __init__(self, experiment: Experiment, method: Method, told: Sequence[NodeDescription]) -> None:
        """Take the data to be what most nodes say."""
        self._experiment, self._method, self._told = experiment, method, told
        self.data: Data | DataDescription = find_common_data(told)
        self._own = server_data(experiment, self.data, load_data) if method.own_data else None
        self.count = len(told)

    def largest(self) -> int:
        """Return the training samples of the node that has most."""
        return max(1, *(one.num_examples for one in self._told))

    def budgets(self, problem: Problem, conditions: Conditions) -> DeviceBudgets:
        """Make every node a budget group of its own."""
        return compute_node_budgets(self._experiment, problem, self._told, conditions)

    def joined(self, planned: PlannedProblem) -> FleetMembers:
        """Return what the nodes told, and the server's own device if it trains."""
        own, accelerator = self._own, server_accelerator(self._experiment)
        device = None if own is None else Device(planned.problem, own, accelerator=accelerator, unlabelled=own)
        return FleetMembers(build_node_clients(self._experiment, self._method, planned.fleet, self._told), device)

    def notes(self, known: Federation, planned: PlannedProblem, joined: FleetMembers) -> tuple[list[str], list[str]]:
        """Say who does not take part, as far as nodes tell."""
        return describe_absent_clients(known, planned.fleet) if self._method.needs_budgets else [SILENT], []


def find_common_data(told: Sequence[NodeDescription]) -> DataDescription:
    """Return what most nodes say of their data; of equally many, the first."""
    counted = Counter(one.facts.shape for one in told)
    most = max(counted, key=lambda shape: counted[shape])
    return next(one.facts for one in told if one.facts.shape == most)


def make_fleet_of_nodes(experiment: Experiment, problem: Problem, told: Sequence[NodeDescription]) -> DeviceBudgets:
    """Return who the clients are; every node is a budget group of its own."""
    nodes = Nodes(experiment, FEDAVG, told)
    return nodes.budgets(problem, make_conditions(experiment, nodes))


def compute_node_budgets(
    experiment: Experiment, problem: Problem, told: Sequence[NodeDescription], conditions: Conditions
) -> DeviceBudgets:
    """Return what nodes afford, counted under some conditions."""
    cost = experiment.fleet.cost
    whole: Piece = ({}, (problem.architecture.blocks,))

    def full(name: str) -> float:
        return cost_of(problem.architecture, whole, problem.input_shape, name, conditions)

    found = budgets_by_cost([math.inf if one.budget is None else one.budget for one in told], cost, full)
    return DeviceBudgets(
        np.arange(len(told)), tuple(one.name for one in told), found[cost], np.array([one.tolerance for one in told]),
        cost, {name: values for name, values in found.items() if name != cost}, conditions,
    )  # fmt: skip


def build_node_clients(
    experiment: Experiment, method: ServerHooks, fleet: DeviceBudgets, told: Sequence[NodeDescription]
) -> Clients:
    """Return all that the server knows of the nodes."""
    counts = np.array([one.num_examples for one in told])
    labels = np.array([one.labels for one in told]) if experiment.fleet.reports_labels else None
    if not method.needs_budgets:
        return Clients(counts, labels=labels)
    return Clients(counts, fleet.budgets, fleet.tolerances, fleet.further, labels)
