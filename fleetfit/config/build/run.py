"""An experiment becomes what a run needs: data, problem, federation, simulated devices, settings."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fleetfit.attack import Attack
from fleetfit.config.assembly import Assembly
from fleetfit.config.build.local import build_local_training
from fleetfit.config.build.method import build_method_spec
from fleetfit.config.build.model import build_problem
from fleetfit.config.comparable import check_comparable
from fleetfit.config.computing import Computing, choose_computing
from fleetfit.config.defaults import describe_files, sets_client_count
from fleetfit.config.fleet import (
    add_further_costs,
    build_plan,
    build_targets,
    describe_single_level,
    find_counted_submodel,
    target_full_model,
)
from fleetfit.config.hostile import apply_attack, build_attack, describe_attackers, draw_attackers
from fleetfit.config.links import configure_links
from fleetfit.config.naming import check_keys, load_data
from fleetfit.config.participants import (
    Expected,
    ExpectedClients,
    FleetMembers,
    Nodes,
    Participants,
    PlannedProblem,
    SimulatedClients,
    make_conditions,
    make_connected,
    server_accelerator,
)
from fleetfit.config.privacy import apply_privacy, build_privacy, describe_privacy
from fleetfit.config.requirements import find_unused_keys
from fleetfit.config.schema import (
    CLIENTS,
    FEWEST,
    FRACTION,
    EngineSection,
    Experiment,
)
from fleetfit.config.secure import build_secure_run, describe_secure_run
from fleetfit.cost import cost_of, training_memory
from fleetfit.data import Data
from fleetfit.errors import ConfigError, DataError, MissingExtra, PlanError
from fleetfit.evaluate import EvaluationScope
from fleetfit.layout import State
from fleetfit.method import Method, apply_model_hook, build
from fleetfit.peft.lora import B
from fleetfit.rounds import Settings
from fleetfit.submodel import Submodel
from fleetfit.training import initial_base, notes_on_start
from fleetfit.values import (
    Clients,
    DataDescription,
    Evaluation,
    Federation,
    Level,
    Local,
    NodeDescription,
    Problem,
)
from fleetfit.values.problem import AS_MUCH

# ---- what a method needs of a run, checked before anything is loaded -----------------------------------------------


def check_needs(experiment: Experiment, method: Method) -> None:
    """Check that the run has what its method needs, and tells the server nothing that it must not know.

    Raises:
        ConfigError: Budgets are reported, or not, against the method; or the server has no data and trains.
    """
    name, reports = experiment.method.name, experiment.fleet.reports_budget
    if reports is False and method.needs_budgets:
        raise ConfigError(
            f"[fleet] reports_budget: {name} needs the budgets that clients report to the server; adaptivefl does "
            "without. Leave reports_budget out, or choose another method."
        )
    if reports and not method.needs_budgets:
        raise ConfigError(f"[fleet] reports_budget: {name} never learns a budget; leave reports_budget out.")
    if method.own_data and experiment.data.server is None:
        raise ConfigError(
            f"[method] {name} trains on the server, on data without labels. Say on which: server = "
            '{ name = "cifar100" } in [data], or any set whose samples have the shape of the clients\'.'
        )


def check_fits(experiment: Experiment, problem: Problem) -> None:
    """Check that the model has what the options average.

    Raises:
        ConfigError: LoRA's products are to be averaged, and the model has none.
    """
    if "lora_product" in experiment.method.plus and not any(name.endswith(B) for name in problem.layout.tensors):
        raise ConfigError(
            f"[method.plus.lora_product] averages LoRA's products, and this model has no tensor {B}. Set "
            '[peft] name = "lora", or leave the option out.'
        )


# ---- the run -------------------------------------------------------------------------------------------------------


def assemble(experiment: Experiment, base: State | None = None) -> Assembly:
    """Make everything that a run of simulated clients needs; what can be checked without the data is checked first.

    Args:
        experiment: The description.
        base: What of the model is never trained, if the run has it already.

    Raises:
        FleetFitError: Something in the experiment does not fit.
    """
    return assemble_with(experiment, SimulatedClients, base)


def assemble_with(
    experiment: Experiment, participants: Callable[[Experiment, Method], Participants], base: State | None,
    on_a_fleet: bool = False,
) -> Assembly:  # fmt: skip
    """Build everything that a run needs, for simulated clients and real nodes.

    Args:
        experiment: The description.
        participants: Finds the clients, after the checks that need none.
        base: What of the model is never trained, if the run has it already.
        on_a_fleet: Whether the clients are nodes, which have their own data.

    Raises:
        FleetFitError: Something in the experiment does not fit.
    """
    assembly = _assembled(experiment, participants, base, build_attack(experiment, on_a_fleet))
    unused = tuple(find_unused_keys(assembly, experiment))
    return replace(assembly, unused=unused, notes=(*assembly.notes, *map(str, unused)))


def _assembled(
    experiment: Experiment, participants: Callable[[Experiment, Method], Participants], base: State | None,
    attack: Attack | None,
) -> Assembly:  # fmt: skip
    method_spec = build_method_spec(experiment)
    method = build(method_spec)
    check_needs(experiment, method)
    who = participants(experiment, method)
    found = plan_problem(experiment, method_spec, who, base)
    problem, joined = found.problem, who.joined(found)
    federation = build_federation(experiment, who, found, joined)
    known = replace(federation, clients=joined.clients)  # for descriptions of the fleet, not for the server
    absent, further = who.notes(known, found, joined)
    if not len(federation.able) or not len(known.able):
        raise PlanError(
            f"{who.none_of_them} can take part. {' '.join(absent)} Raise the budgets or the tolerance, or add "
            "a smaller level."
        )
    notes = (
        *describe_data_files(experiment, who),
        *absent,
        *describe_task(problem),
        *further,
        *notes_on_start(problem),
        *found.how.notes,
    )
    settings = build_settings(experiment)
    federation, settings = configure_links(experiment, federation, joined.simulation, settings)
    privacy, secure = build_privacy(experiment, federation), build_secure_run(experiment, federation)
    if privacy is not None:
        federation, settings = apply_privacy(experiment, federation, settings, privacy)
        notes += describe_privacy(privacy, federation, experiment.rounds)
    check_comparable(experiment, federation)
    settings = replace(settings, secure=secure)
    notes += describe_secure_run(secure, federation, None if privacy is None else privacy.rate)
    attackers = None if attack is None else draw_attackers(experiment, attack, known)
    federation, simulation, settings = apply_attack(federation, joined.simulation, settings, attackers)
    notes += describe_attackers(attackers)
    if simulation is None:  # devices evaluate what they afford, and nothing else
        settings = replace(settings, wanted=replace(settings.wanted, whole=False, beyond=False))
    plan = build_plan(known, found.fleet, found.targets)
    notes += tuple(describe_single_level(experiment, federation, plan))
    experiment = record_computing(replace_measured(experiment, found.fleet.conditions.measured), found.how)
    experiment = experiment if simulation is None else record_client_count(experiment, who.count)
    return Assembly(experiment, who.data, found.fleet, federation, simulation, settings, plan, attackers, notes)


def build_federation(
    experiment: Experiment, who: Participants, found: PlannedProblem, joined: FleetMembers
) -> Federation:
    """Return the server's view, of clients who tell the truth."""
    method, everything, simulation = found.method, joined.clients, joined.simulation
    return Federation(
        problem=found.problem,
        clients=everything if method.needs_budgets else Clients(everything.num_examples, labels=everything.labels),
        levels=found.levels,
        cohort=compute_cohort_size(experiment, who.count),
        method=method,
        method_spec=found.method_spec,
        seed=experiment.seed,
        device=joined.device,
        connected=None if simulation is None else make_connected(simulation.resources),
    )


def plan_problem(
    experiment: Experiment, method_spec: Mapping[str, Any], who: Expected, base: State | None,
    accelerator: torch.device | None = None,
) -> PlannedProblem:  # fmt: skip
    """Return the problem with the exits of its levels, who the clients are, and the levels.

    Args:
        experiment: The description.
        method_spec: The method's.
        who: Who is expected to take part.
        base: What of the model is never trained, or None to make it.
        accelerator: Where the levels are computed; by default where the engine's device is.
    """
    method = build(method_spec)
    problem = apply_model_hook(build_problem(experiment, who.data), method_spec)
    fleet = who.budgets(problem, make_conditions(experiment, who))
    targets = (
        build_targets(experiment.fleet, fleet, problem.architecture.blocks)
        if method.needs_budgets
        else target_full_model(fleet)
    )
    levels = add_further_costs(method.levels(problem, targets), problem, fleet)
    problem = problem.with_exits({e for level in levels for e in level.submodel.exits})
    check_fits(experiment, problem)
    problem = replace(problem, base=initial_base(problem, experiment.seed) if base is None else base)
    problem = set_feature_cache(problem, experiment.engine)
    how = choose_computing(experiment.engine, problem, levels, accelerator or server_accelerator(experiment))
    problem = problem.with_computed(how.computed)
    return PlannedProblem(problem, method, method_spec, fleet, targets, levels, how)


def set_feature_cache(problem: Problem, section: EngineSection) -> Problem:
    """Return the problem with how much of what a frozen backbone makes of samples is kept; of others nothing is."""
    if not problem.base:
        return problem
    asked = section.features_bytes
    if asked is None:
        asked = AS_MUCH if section.speed == "fast" else 0.0
    return problem.with_features(asked)


def describe_task(problem: Problem) -> list[str]:
    """Say what accuracy means where it is something else."""
    measure = problem.task.measure
    return [] if measure == "accuracy" else [f"Accuracy here is {measure}."]


def describe_data_files(experiment: Experiment, who: Expected) -> list[str]:
    """Say what was found in the files, and how many clients there are if that is fewer than usual."""
    if not isinstance(who.data, Data):
        return []
    said = describe_files(experiment.data.name, who.data)
    if who.count >= CLIENTS or not _small(experiment):
        return said
    return [*said, f"Divided among {who.count} clients, because the data are small: [data] partition.clients says "
            "otherwise."]  # fmt: skip


def replace_measured(experiment: Experiment, measured: Mapping[str, list[float]]) -> Experiment:
    """Return the experiment with what was measured for it, so that it can be repeated with the same numbers."""
    if measured == experiment.fleet.measured:
        return experiment
    return experiment.model_copy(update={"fleet": experiment.fleet.model_copy(update={"measured": dict(measured)})})


def _sized_as(experiment: Experiment, recorded: Experiment) -> Experiment:
    """Return the experiment with what a run of it found in its data: how many clients there are, and its columns."""
    data, theirs, cohort = experiment.data, recorded.data, experiment.cohort
    if data.name != theirs.name:
        return experiment
    changes: dict[str, Any] = {}
    if _small(experiment):
        division = data.partition.model_copy(update={"clients": theirs.partition.clients})
        data = data.model_copy(update={"partition": division})
        if cohort.count is None and cohort.fraction is None:
            changes["cohort"] = cohort.model_copy(update={"fraction": recorded.cohort.fraction})
    for key in ("columns", "channels_last"):
        if (value := theirs.settings.get(key)) is not None and key not in data.settings:
            data = data.model_copy(update={key: value})
    return experiment.model_copy(update={**changes, "data": data})


def record_client_count(experiment: Experiment, count: int) -> Experiment:
    """Return the experiment with the number of its clients, where the size of the data said it."""
    data, division, cohort = experiment.data, experiment.data.partition, experiment.cohort
    if not _small(experiment):
        return experiment
    division = division.model_copy(update={"clients": count})
    changes: dict[str, Any] = {"data": data.model_copy(update={"partition": division})}
    if cohort.count is None and cohort.fraction is None:
        fraction = FRACTION if count >= CLIENTS else compute_cohort_size(experiment, count) / count
        changes["cohort"] = cohort.model_copy(update={"fraction": fraction})
    return experiment.model_copy(update=changes)


def _small(experiment: Experiment) -> bool:
    """Tell whether the size of the data says how many clients there are."""
    data, division = experiment.data, experiment.data.partition
    return division.clients is None and division.kind != "natural" and sets_client_count(data.name)


def record_computing(experiment: Experiment, how: Computing) -> Experiment:
    """Return the experiment with how its levels are computed, so that it resumes and repeats in the same way."""
    if how.chosen == experiment.engine.chosen:
        return experiment
    return experiment.model_copy(update={"engine": experiment.engine.model_copy(update={"chosen": dict(how.chosen)})})


def replace_callbacks(experiment: Experiment, callbacks: list[Any]) -> Experiment:
    """Return the experiment with other callbacks."""
    return experiment.model_copy(update={"callbacks": callbacks})


def restore_recorded(experiment: Experiment, recorded: Experiment) -> Experiment:
    """Return the experiment with what was measured and chosen for a run of it, as the run's folder says.

    Whom a run tells is no part of what it is: `callbacks` are those of the folder, too.
    """
    found = replace_callbacks(replace_measured(experiment, recorded.fleet.measured), recorded.callbacks)
    found = _sized_as(found, recorded)
    if found.engine.speed != "fast" or found.engine.chosen:
        return found
    return found.model_copy(update={"engine": found.engine.model_copy(update={"chosen": recorded.engine.chosen})})


# ---- what names stand for ----------------------------------------------------------------------------------------


def compute_cohort_size(experiment: Experiment, clients: int) -> int:
    """Return how many clients take part in a round.

    Raises:
        ConfigError: More than there are.
    """
    section = experiment.cohort
    if section.count is None:
        fraction = FRACTION if section.fraction is None else section.fraction
        fewest = min(FEWEST, clients) if section.fraction is None and _small(experiment) else 1
        return max(fewest, round(fraction * clients))
    if section.count > clients:
        raise ConfigError(
            f"[cohort] count: {section.count} clients a round are more than the {clients} clients there are."
        )
    return section.count


def build_settings(experiment: Experiment) -> Settings:
    """Return what a round does."""
    local, evaluate = experiment.local, experiment.evaluate
    wanted = EvaluationScope(
        Evaluation(split=evaluate.split, batch_size=evaluate.batch_size, metrics=tuple(evaluate.metrics)),
        tuple(dict.fromkeys(evaluate.norms)),
        evaluate.statistics_samples,
        clients=evaluate.clients,
        always=evaluate.whole,
    )
    training = build_local_training(local, experiment.cohort)
    schedule = functools.partial(local.schedule.factor_at, experiment.rounds)
    return Settings(experiment.rounds, training, schedule, evaluate.every, wanted)


# ---- a real fleet, and a run's levels before there are data ---------------------------------------------------------


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
    return assemble_with(experiment, lambda described, method: Nodes(described, method, told), base, on_a_fleet=True)


@dataclass(frozen=True, eq=False)
class LevelPlan:
    """A run's levels, and what a client trains them with.

    Attributes:
        experiment: The run.
        found: Problem, method, fleet and levels.
        local: Settings of local training.
        batch_size: Samples of a training step.
        facts: What the model knows of the data.
    """

    experiment: Experiment
    found: PlannedProblem
    local: Local
    batch_size: int
    facts: Data | DataDescription

    @property
    def method(self) -> Mapping[str, Any]:
        """The method's spec."""
        return self.found.method_spec

    def cost(self, level: Level | None, cost: str) -> float:
        """Return what the planner takes a level to cost, or the full model: None."""
        problem, whole = self.found.problem, Submodel({}, (self.found.problem.architecture.blocks,))
        piece = whole if level is None else find_counted_submodel(problem, level)
        return cost_of(problem.architecture, piece, problem.input_shape, cost, self.found.fleet.conditions)

    def memory(self, level: Level) -> int:
        """Return the bytes that a training step of a level should take, with all the exits that it trains."""
        problem, piece = self.found.problem, level.submodel
        sizes = {**problem.layout.full_sizes, **piece.sizes}
        return training_memory(
            problem.architecture, sizes, piece.exits, problem.input_shape, self.batch_size, self.local.moments
        )


def plan_levels(
    experiment: Experiment, facts: DataDescription | None = None, accelerator: torch.device | None = None
) -> LevelPlan:
    """Return the levels of a run: those of `fleetfit plan`.

    Args:
        experiment: The run.
        facts: What a model needs to know of the data; without them the run's data are loaded to find out.
        accelerator: Where the levels are computed; by default where the engine's device is.

    Raises:
        FleetFitError: Something does not fit, or the data cannot be had.
    """
    method_spec = build_method_spec(experiment)
    check_needs(experiment, build(method_spec))
    check_keys(experiment)
    who = ExpectedClients(experiment, _loaded(experiment) if facts is None else facts)
    found = plan_problem(experiment, method_spec, who, {}, accelerator)
    return LevelPlan(experiment, found, build_settings(experiment).local, found.fleet.conditions.batch_size, who.data)


def _loaded(experiment: Experiment) -> Data:
    try:
        return load_data(experiment.data)
    except (DataError, MissingExtra) as error:
        raise DataError(
            f"{error} To go without the run's data, say what a sample is: --input-shape 3,32,32 --classes 10."
        ) from None
