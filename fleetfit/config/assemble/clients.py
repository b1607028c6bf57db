"""The clients of a run: simulated clients that share one data set, or the nodes of a real fleet."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fleetfit.config.assemble.data import build_data, build_partition, build_server_data
from fleetfit.config.assemble.engine import find_server_device
from fleetfit.config.assemble.fleet import DeviceBudgets, build_resources, compute_node_budgets
from fleetfit.config.assemble.levels import (
    PlannedProblem,
    Population,
    describe_absent_clients,
    make_conditions,
)
from fleetfit.config.components import check_keys
from fleetfit.config.schema import Experiment, FleetSection
from fleetfit.core import (
    Clients,
    DataDescription,
    Device,
    DeviceResources,
    Federation,
    NodeDescription,
    Problem,
    Simulation,
)
from fleetfit.cost import Conditions
from fleetfit.data import Data, class_counts, count_samples, find_unassigned
from fleetfit.errors import ConfigError, format_ranges, quote_some
from fleetfit.hooks import Method


@dataclass(frozen=True, eq=False)
class FleetMembers:
    """Clients and devices of a run.

    Attributes:
        clients: All facts about the clients, including facts hidden from the server.
        device: The server's own device, or None.
        simulation: The simulated devices; None on a real fleet, which has no test data on the server either.
    """

    clients: Clients
    device: Device | None
    simulation: Simulation | None = None


_FEW_SAMPLES, _SMALL_COHORT = 10, 2


class SimulatedClients(Population):
    """Clients whose data are parts of one data set, dealt to budget groups."""

    def __init__(self, experiment: Experiment, method: Method) -> None:
        check_keys(experiment)
        self._data = build_data(experiment.data)
        self._server_data = build_server_data(experiment, self._data) if method.needs_server_data else None
        self._parts = build_partition(experiment, self._data)
        largest = max(1, int(count_samples(self._parts).max()))
        super().__init__(experiment, self._data, len(self._parts), largest)

    def join(self, planned: PlannedProblem) -> FleetMembers:
        """Return clients and simulated devices."""
        experiment = self.experiment
        resources = build_resources(experiment.fleet, planned.budgets, experiment.seed)
        simulation = Simulation(planned.problem, self._data, self._parts, resources, unlabeled=self._server_data)
        server = replace(simulation.device(None), accelerator=find_server_device(experiment.engine))
        return FleetMembers(build_clients(experiment, self._data, self._parts, planned.budgets), server, simulation)

    def describe(
        self, federation: Federation, planned: PlannedProblem, members: FleetMembers
    ) -> tuple[list[str], list[str]]:
        """Return notes on clients that do not take part, and further notes."""
        assert members.simulation is not None
        resources, notes = members.simulation.resources, self._describe_uncounted_samples()
        if self.experiment.cohort.deadline_s is not None and not resources.speeds:
            notes.insert(0, "No group has a profile, so the deadline counts real time and results differ between runs.")
        if not self.experiment.is_private:
            notes += describe_small_data(federation, self._data, self._parts, self.experiment)
        absent = describe_absent_clients(federation, planned.budgets)
        return absent, notes + describe_offline_clients(federation, resources) if len(federation.able) else notes

    def _describe_uncounted_samples(self) -> list[str]:
        """Describe the evaluated samples that `local` and `global` leave out."""
        data, evaluate = self._data, self.experiment.evaluate
        if self.experiment.is_private:
            return []
        notes = []
        if evaluate.clients is not None and evaluate.clients < len(self._parts):
            notes.append(
                f"local and global are measured on {evaluate.clients} of {len(self._parts)} clients ([evaluate] "
                "clients)."
            )
        unassigned = find_unassigned(data, self._parts, evaluate.split)
        if not len(unassigned):
            return notes
        reason = "the partition assigns them to no client"
        if data.task == "classification":
            classes = set(data.y[unassigned].unique().tolist())
            if not classes.intersection(data.y[data.split("train")].unique().tolist()):
                names = [data.class_names[i] if data.class_names else i for i in sorted(classes)]
                reason = f"their classes have no training samples ({quote_some(names)})"
        notes.append(
            f"{len(unassigned)} of {len(data.split(evaluate.split))} {evaluate.split} samples belong to no client, so "
            f"local and global do not count them: {reason}."
        )
        return notes


class RecordedClients(Population):
    """Clients of a run whose data are absent. Nothing is known of their samples."""

    def join(self, planned: PlannedProblem) -> FleetMembers:
        """Return the clients, each with one sample."""
        budgets, counts = planned.budgets, np.ones(self.count, dtype=np.int64)
        return FleetMembers(Clients(counts, budgets.budgets, budgets.tolerances, budgets.further), None)

    def describe(
        self, federation: Federation, planned: PlannedProblem, members: FleetMembers
    ) -> tuple[list[str], list[str]]:
        """Return no notes."""
        return [], []


def build_clients(
    experiment: Experiment, data: Data, parts: Sequence[Mapping[str, Tensor]], budgets: DeviceBudgets
) -> Clients:
    """Return the facts about simulated clients, with the classes of their samples if they report them.

    Raises:
        ConfigError: Clients report classes, but the task has none.
    """
    labels = None
    if experiment.fleet.reports_labels:
        if data.task != "classification":
            raise ConfigError(
                "[fleet] reports_labels: clients report samples per class only in a classification, but the task of "
                f"{data.name} is {data.task}. Leave reports_labels out.",
                key="fleet.reports_labels",
            )
        labels = class_counts(data, [dict(part) for part in parts]).numpy()
    return Clients(count_samples(parts), budgets.budgets, budgets.tolerances, budgets.further, labels)


def describe_small_data(
    federation: Federation, data: Data, parts: Sequence[Mapping[str, Tensor]], experiment: Experiment
) -> list[str]:
    """Name what makes results of small data uncertain: few evaluated samples, a small cohort, levels of one class.

    Args:
        federation: The clients that take part, with their levels.
        data: The data set.
        parts: The samples of each client, by split.
        experiment: The run. The clients of a natural partition are what they are, so that no other is suggested.
    """
    able, notes = federation.able.tolist(), []
    split, is_natural = experiment.evaluate.split, experiment.data.partition.kind == "natural"
    evaluated = [len(parts[client].get(split, ())) for client in able]
    if able and 0 < sum(evaluated) < _FEW_SAMPLES * len(able):
        notes.append(
            f"Clients have {sum(evaluated) / len(able):.2g} {split} samples on average, so that their accuracies are "
            f"coarse. {'Gather' if is_natural else 'Use fewer clients ([data] partition.clients) or'} more data."
        )
    if federation.cohort <= _SMALL_COHORT < len(able):
        notes.append(
            f"Each round trains {federation.cohort} of {len(able)} clients, so that rounds differ much. Set a larger "
            "[cohort] count."
        )
    for index, level in enumerate(federation.levels if data.task == "classification" and data.classes > 1 else ()):
        own = [parts[client]["train"] for client in able if federation.level_of[client] == index]
        labels = data.y[torch.cat(own)].unique().tolist() if own else []
        if len(labels) == 1:
            label = labels[0]
            name = data.class_names[label] if data.class_names else label
            notes.append(
                f"All clients of level {level.name} have one class ({quote_some([name])}), so that it learns no other "
                f"by itself. {'Use' if is_natural else 'Divide the data more evenly ([data] partition), or use'} fewer "
                "levels."
            )
    return notes


def describe_offline_clients(federation: Federation, resources: DeviceResources) -> list[str]:
    """List the clients that the trace never has online.

    Raises:
        ConfigError: No client is ever online.
    """
    trace = None if resources.availability is None else resources.availability.trace
    if trace is None:
        return []
    missing = federation.able[~np.asarray(trace[:, federation.able].any(axis=0))]
    if not len(missing):
        return []
    if len(missing) == len(federation.able):
        raise ConfigError(
            "[fleet] availability.trace: no client that can take part is ever online. Change the trace or the budgets.",
            key="fleet.availability.trace",
        )
    return [
        f"{len(missing)} clients cannot take part: the trace never has them online. Clients {format_ranges(missing)}."
    ]


# ---- the nodes of a real fleet -------------------------------------------------------------------------------------


class NodeClients(Population):
    """The nodes of a real fleet. They have their own data and may report budgets."""

    def __init__(self, experiment: Experiment, method: Method, nodes: Sequence[NodeDescription]) -> None:
        self._method, self._nodes = method, nodes
        data = find_common_data(nodes)
        self._server_data = build_server_data(experiment, data) if method.needs_server_data else None
        super().__init__(experiment, data, len(nodes), _find_largest(nodes))

    def find_budgets(self, fleet: FleetSection, problem: Problem, conditions: Conditions) -> DeviceBudgets:
        """Return the budgets that the nodes report."""
        return compute_node_budgets(fleet, problem, self._nodes, conditions)

    def join(self, planned: PlannedProblem) -> FleetMembers:
        """Return the facts about the nodes, and the server's own device if it trains."""
        server_data = self._server_data
        accelerator = find_server_device(self.experiment.engine)
        device = (
            None
            if server_data is None
            else Device(planned.problem, server_data, accelerator=accelerator, unlabeled=server_data)
        )
        return FleetMembers(build_node_clients(self.experiment, self._method, planned.budgets, self._nodes), device)

    def describe(
        self, federation: Federation, planned: PlannedProblem, members: FleetMembers
    ) -> tuple[list[str], list[str]]:
        """Return notes on nodes that do not take part, and further notes."""
        if self._method.needs_budgets:
            return describe_absent_clients(federation, planned.budgets), []
        return [
            "Nodes do not report budgets. Each node is evaluated with the largest model that it has trained so far. "
            "A node that has trained no model is not evaluated."
        ], []


def _find_largest(nodes: Sequence[NodeDescription]) -> int:
    return max(1, *(node.num_examples for node in nodes))


def find_common_data(nodes: Sequence[NodeDescription]) -> DataDescription:
    """Return the data description that most nodes report, the first one on a tie."""
    counts = Counter(node.facts.shape for node in nodes)
    most = max(counts, key=lambda shape: counts[shape])
    return next(node.facts for node in nodes if node.facts.shape == most)


def find_node_budgets(experiment: Experiment, problem: Problem, nodes: Sequence[NodeDescription]) -> DeviceBudgets:
    """Return the budgets that nodes report; each node is a group."""
    return compute_node_budgets(experiment.fleet, problem, nodes, make_conditions(experiment, _find_largest(nodes)))


def build_node_clients(
    experiment: Experiment, method: Method, budgets: DeviceBudgets, nodes: Sequence[NodeDescription]
) -> Clients:
    """Return the facts about the nodes that the server learns."""
    counts = np.array([node.num_examples for node in nodes])
    labels = np.array([node.labels for node in nodes]) if experiment.fleet.reports_labels else None
    if not method.needs_budgets:
        return Clients(counts, labels=labels)
    return Clients(counts, budgets.budgets, budgets.tolerances, budgets.further, labels)
