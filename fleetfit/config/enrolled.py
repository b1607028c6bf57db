"""A real fleet: its levels before there are data, and its run once the nodes told what they have."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fleetfit import used
from fleetfit.config.assembly import (
    Assembly,
    PlannedProblem,
    check_needs,
    cohort_of,
    divided,
    notes_on_task,
    planned,
    server_accelerator,
    server_data,
    settings_of,
    spec_of_method,
    with_measured,
    with_unused,
)
from fleetfit.config.fleet import DeviceBudgets, counted_piece, fleet_of, notes_of, plan_of
from fleetfit.config.naming import check_keys, load_data
from fleetfit.config.schema import CLIENTS, Experiment
from fleetfit.config.unused import unused_of
from fleetfit.cost import Conditions, Piece, cost_of, training_memory
from fleetfit.data import Data
from fleetfit.errors import ConfigError, DataError, MissingExtra, PlanError
from fleetfit.layout import State
from fleetfit.method import build
from fleetfit.planner import budgets_by_cost
from fleetfit.submodel import Submodel
from fleetfit.training import notes_on_start
from fleetfit.values import Clients, DataDescription, Device, Federation, Level, Local, NodeDescription, Problem
from fleetfit.values.local import moments_of

# ---- the levels of a run before there are data: for a device that wants to know what each of them would cost it ----


@dataclass(frozen=True, eq=False)
class Beforehand:
    """A run's levels, and what a client trains them with.

    Attributes:
        experiment: The run.
        facts: What the model knows of the data.
        found: Problem, fleet and levels.
        method: The method's spec.
        local: Settings of local training.
        batch_size: Samples of a training step.
    """

    experiment: Experiment
    facts: Data | DataDescription
    found: PlannedProblem
    method: Mapping[str, Any]
    local: Local
    batch_size: int

    def cost(self, level: Level | None, cost: str) -> float:
        """Return what the planner takes a level to cost, or the full model: None."""
        problem, whole = self.found.problem, Submodel({}, (self.found.problem.architecture.blocks,))
        piece = whole if level is None else counted_piece(problem, level)
        return cost_of(problem.architecture, piece, problem.input_shape, cost, self.found.fleet.conditions)

    def memory(self, level: Level) -> int:
        """Return the bytes that a training step of a level should take, with all the exits that it trains."""
        problem, piece = self.found.problem, level.submodel
        sizes = {**problem.layout.full_sizes, **piece.sizes}
        return training_memory(
            problem.architecture, sizes, piece.exits, problem.input_shape, self.batch_size, self.local.moments
        )


def beforehand(experiment: Experiment, facts: DataDescription | None = None) -> Beforehand:
    """Return the levels of a run: those of `fleetfit plan`.

    Args:
        experiment: The run.
        facts: What a model needs to know of the data; without them the run's data are loaded to find out.

    Raises:
        FleetFitError: Something does not fit, or the data cannot be had.
    """
    method_spec = spec_of_method(experiment)
    check_needs(experiment, build(method_spec))
    check_keys(experiment)
    data = _loaded(experiment) if facts is None else facts
    parts = divided(experiment, data) if isinstance(data, Data) else None
    clients = experiment.data.partition.clients or CLIENTS if parts is None else len(parts)
    said = experiment.local.batch_size
    if said != "all":
        size = int(said)
    elif parts is not None:
        size = max(1, *(len(part["train"]) for part in parts))
    else:
        raise ConfigError(
            '[local] batch_size is "all", and without the data nobody knows how many that is: say it, such as '
            "--set local.batch_size=64."
        )
    found = planned(
        experiment,
        data,
        method_spec,
        lambda p: fleet_of(experiment.fleet, p, clients, experiment.seed, size, moments_of(experiment.local.optimiser)),
        base={},
    )
    return Beforehand(experiment, data, found, method_spec, settings_of(experiment).local, size)


def _loaded(experiment: Experiment) -> Data:
    try:
        return load_data(experiment.data)
    except (DataError, MissingExtra) as error:
        raise DataError(
            f"{error} To go without the run's data, say what a sample is: --input-shape 3,32,32 --classes 10."
        ) from None


# ---- enrolled itself -----------------------------------------------------------------------------------------------

SILENT = (
    "Nodes do not tell what they afford. Each is evaluated with the largest model that it has trained so far, and one "
    "that has trained none not at all."
)


def assemble_fleet(experiment: Experiment, told: Sequence[NodeDescription], base: State | None = None) -> Assembly:
    """Make everything that the server of a real fleet needs.

    Devices evaluate what they afford, and nothing else; there is no test set on the server.

    Args:
        experiment: The description; its `[data]` says nothing here but what the server has of its own.
        told: What each node told of itself; a client's id is its place.
        base: What of the model is never trained, if the run has it already.

    Raises:
        FleetFitError: Something does not fit.
    """
    with used.reading() as found:
        assembly = _assembled(experiment, told, base)
        spec = assembly.federation.method_spec
        return with_unused(assembly, unused_of(experiment, found, spec, on_a_fleet=True))


def _assembled(experiment: Experiment, told: Sequence[NodeDescription], base: State | None) -> Assembly:
    method_spec = spec_of_method(experiment)
    method = build(method_spec)
    check_needs(experiment, method)
    facts = facts_of_all(told)
    own = server_data(experiment, facts, load_data) if method.own_data else None
    found = planned(experiment, facts, method_spec, lambda problem: fleet_of_nodes(experiment, problem, told), base)
    problem, fleet = found.problem, found.fleet
    accelerator = server_accelerator(experiment)
    federation = Federation(
        problem=problem,
        clients=clients_of_nodes(experiment, fleet, told),
        levels=found.levels,
        cohort=cohort_of(experiment, len(told)),
        method=method,
        method_spec=method_spec,
        seed=experiment.seed,
        device=None if own is None else Device(problem, own, accelerator=accelerator, unlabelled=own),
    )
    notes = notes_of(federation, fleet) if method.needs_budgets else [SILENT]
    if not len(federation.able):
        raise PlanError(
            f"no node can take part. {' '.join(notes)} Raise the budgets or the tolerance, or add a smaller level."
        )
    notes += [*notes_on_task(problem), *notes_on_start(problem)]
    settings = settings_of(experiment)
    settings = replace(settings, wanted=replace(settings.wanted, whole=False, beyond=False))
    plan = plan_of(federation, fleet, found.targets)
    experiment = with_measured(experiment, fleet.conditions.measured)
    return Assembly(experiment, facts, fleet, federation, None, settings, plan, tuple(notes))


def facts_of_all(told: Sequence[NodeDescription]) -> DataDescription:
    """Return what most nodes say of their data; of equally many, the first."""
    counted = Counter(one.facts.shape for one in told)
    most = max(counted, key=lambda shape: counted[shape])
    return next(one.facts for one in told if one.facts.shape == most)


def fleet_of_nodes(experiment: Experiment, problem: Problem, told: Sequence[NodeDescription]) -> DeviceBudgets:
    """Return who the clients are; every node is a budget group of its own."""
    cost = experiment.fleet.cost
    size = experiment.local.batch_size
    largest = max(1, *(one.num_examples for one in told)) if size == "all" else int(size)
    conditions = Conditions(largest, dict(experiment.fleet.measured), moments_of(experiment.local.optimiser))
    whole: Piece = ({}, (problem.architecture.blocks,))

    def full(name: str) -> float:
        return cost_of(problem.architecture, whole, problem.input_shape, name, conditions)

    found = budgets_by_cost([math.inf if one.budget is None else one.budget for one in told], cost, full)
    return DeviceBudgets(
        np.arange(len(told)), tuple(one.name for one in told), found[cost], np.array([one.tolerance for one in told]),
        cost, {name: values for name, values in found.items() if name != cost}, conditions,
    )  # fmt: skip


def clients_of_nodes(experiment: Experiment, fleet: DeviceBudgets, told: Sequence[NodeDescription]) -> Clients:
    """Return all that the server knows of the nodes."""
    counts = np.array([one.num_examples for one in told])
    labels = np.array([one.labels for one in told]) if experiment.fleet.reports_labels else None
    if not build(spec_of_method(experiment)).needs_budgets:
        return Clients(counts, labels=labels)
    return Clients(counts, fleet.budgets, fleet.tolerances, fleet.further, labels)
