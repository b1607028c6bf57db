"""Assemble a run from an experiment: data, problem, clients, levels and settings, in this order."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from fleetfit.config.assemble.clients import FleetMembers, NodeClients, RecordedClients, SimulatedClients
from fleetfit.config.assemble.data import describe_data_files
from fleetfit.config.assemble.levels import (
    PlannedProblem,
    Population,
    build_plan,
    describe_default_budgets,
    describe_percentages,
    describe_single_level,
    plan_problem,
)
from fleetfit.config.assemble.method import (
    build_method_spec,
    check_comparable,
    check_level_tensors,
    check_needs,
    describe_class_prior,
)
from fleetfit.config.assemble.model import describe_derivation, describe_task
from fleetfit.config.assemble.rounds import (
    build_settings,
    check_personal,
    choose_evaluations,
    compute_cohort_size,
    configure_links,
    count_quorum,
)
from fleetfit.config.assemble.splits import describe_groups, describe_misses, describe_split
from fleetfit.config.assemble.trust import (
    apply_attack,
    apply_privacy,
    build_attack,
    build_privacy,
    build_secure_run,
    describe_attackers,
    describe_privacy,
    describe_secure_run,
    draw_attackers,
)
from fleetfit.config.assembly import Assembly
from fleetfit.config.records import record_choices
from fleetfit.config.requirements import find_unused_keys
from fleetfit.config.schema import Experiment
from fleetfit.core import Clients, Federation, NodeDescription
from fleetfit.data import AbsentData
from fleetfit.errors import PlanError
from fleetfit.hooks import Method, build
from fleetfit.hooks.levels import find_split
from fleetfit.layout import State
from fleetfit.names import explain_plug_ins
from fleetfit.planner import Plan
from fleetfit.training import describe_start


@explain_plug_ins()
def assemble(
    experiment: Experiment,
    base: State | None = None,
    say: Callable[[str], None] | None = None,
    kept: Plan | None = None,
) -> Assembly:
    """Build a run of simulated clients. Checks that need no data come first.

    Args:
        experiment: The run.
        base: The frozen part of the model, if it is already loaded.
        say: Called with a sentence before a slow step.
        kept: The levels that the run has had so far, which keep their shapes.

    Raises:
        FleetFitError: Keys contradict each other, or data, model or method cannot be built.
    """
    return _assemble(experiment, SimulatedClients, base, on_a_fleet=False, say=say, kept=kept)


def assemble_fleet(
    experiment: Experiment, nodes: Sequence[NodeDescription], base: State | None = None, kept: Plan | None = None
) -> Assembly:
    """Build the server's part of a run on a real fleet.

    Devices evaluate the levels that they afford. The server has no test set.

    Args:
        experiment: The run; of its `[data]` only `server` is used.
        nodes: Descriptions that the nodes sent. A client's id is its position.
        base: The frozen part of the model, if it is already loaded.
        kept: The levels that the run has had so far, which keep their shapes.

    Raises:
        FleetFitError: Keys contradict each other, or data, model or method cannot be built.
    """
    return _assemble(experiment, lambda exp, method: NodeClients(exp, method, nodes), base, on_a_fleet=True, kept=kept)


def assemble_without_data(
    experiment: Experiment,
    data: AbsentData,
    clients: int,
    largest: int,
    base: State | None = None,
    kept: Plan | None = None,
) -> Assembly:
    """Build a run whose data are absent: its models and levels, for predictions. It cannot train.

    Args:
        experiment: The run.
        data: The facts of its data.
        clients: Number of clients.
        largest: Batch size of a client whose samples are one batch.
        base: The frozen part of the model, if it is already loaded.
        kept: The levels that the run has had so far, which keep their shapes.

    Raises:
        FleetFitError: Keys contradict each other, or model or method cannot be built.
    """
    return _assemble(
        experiment, lambda exp, _: RecordedClients(exp, data, clients, largest), base, on_a_fleet=False, kept=kept
    )


def _assemble(
    experiment: Experiment,
    build_clients: Callable[[Experiment, Method], SimulatedClients | RecordedClients | NodeClients],
    base: State | None,
    on_a_fleet: bool,
    say: Callable[[str], None] | None = None,
    kept: Plan | None = None,
) -> Assembly:
    attack = build_attack(experiment, on_a_fleet)
    method = build(build_method_spec(experiment))
    check_needs(experiment, method)
    clients = build_clients(experiment, method)
    planned = plan_problem(experiment, clients, base, say=say, kept=kept)
    budgets = describe_default_budgets(planned.experiment.fleet, experiment.fleet)
    experiment = planned.experiment
    members = clients.join(planned)
    federation = build_federation(experiment, clients, planned, members)
    truth = replace(federation, clients=members.clients)  # for descriptions of the fleet; hidden from the server
    absent, further = clients.describe(truth, planned, members)
    if not len(federation.able) or not len(truth.able):
        raise PlanError(
            f"no {'node' if on_a_fleet else 'client'} can take part. {' '.join(absent)} Raise the budgets or the "
            "tolerance, or add a smaller level.",
            key="fleet.groups",
        )
    plan, settings = build_plan(truth, planned.budgets, planned.targets), build_settings(experiment)
    notes = [
        *describe_data_files(experiment, clients.data, clients.count),
        *absent,
        *budgets,
        *describe_percentages(experiment.fleet),
        *describe_derivation(planned.problem, planned.levels, find_split(method.make_levels, planned.targets)),
        *describe_task(planned.problem),
        *planned.method.describe(planned.problem, planned.levels, settings.local),
        *([] if on_a_fleet else describe_groups(experiment, planned.budgets.group, truth)),
        *describe_misses(planned, plan, on_a_fleet),
        *describe_split(truth, planned),
        *further,
        *describe_start(planned.problem),
        *planned.computing.notes,
    ]
    federation, settings = configure_links(experiment, federation, members.simulation, settings)
    privacy, secure = build_privacy(experiment, federation), build_secure_run(experiment, federation)
    if privacy is not None:
        federation, settings = apply_privacy(federation, settings, privacy)
        notes += describe_privacy(privacy, federation, experiment.rounds)
    settings = choose_evaluations(experiment, settings, truth, clients.data)
    notes += describe_class_prior(federation, experiment)
    quorum = count_quorum(experiment.cohort, federation.cohort) if on_a_fleet else settings.quorum
    check_comparable(experiment, federation, quorum or federation.cohort)
    check_level_tensors(federation)
    check_personal(experiment, federation)
    settings = replace(settings, secure=secure)
    notes += describe_secure_run(secure, federation, None if privacy is None else privacy.rate)
    attackers = None if attack is None else draw_attackers(experiment, attack, truth)
    federation, simulation, settings = apply_attack(federation, members.simulation, settings, attackers)
    notes += describe_attackers(attackers)
    if simulation is None:  # devices evaluate only the levels that they afford
        settings = replace(settings, scope=replace(settings.scope, whole=False, beyond=False))
    notes += describe_single_level(experiment, federation, plan)
    recorded = record_choices(
        experiment, planned.budgets.conditions.measured, planned.computing, settings,
        None if simulation is None else clients.count,
    )  # fmt: skip
    assembly = Assembly(
        recorded, clients.data, planned.budgets, federation, simulation, settings, plan, attackers, tuple(notes)
    )
    unused = tuple(find_unused_keys(assembly, experiment))
    return replace(assembly, unused=unused, notes=(*assembly.notes, *map(str, unused)))


def build_federation(
    experiment: Experiment, population: Population, planned: PlannedProblem, members: FleetMembers
) -> Federation:
    """Return the server's view of the clients, without budgets if the method does not need them."""
    truth, simulation = members.clients, members.simulation
    availability = None if simulation is None else simulation.resources.availability
    return Federation(
        problem=planned.problem,
        clients=truth if planned.method.needs_budgets else Clients(truth.num_examples, labels=truth.labels),
        levels=planned.levels,
        cohort=compute_cohort_size(experiment, population.count),
        method=planned.method,
        method_spec=planned.method_spec,
        seed=experiment.seed,
        device=members.device,
        connected=None if availability is None else availability.online,
        classes=population.data.classes if planned.problem.task.has_classes else 0,
    )
