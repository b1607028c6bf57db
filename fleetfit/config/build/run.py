"""An experiment becomes what a run needs: data, problem, federation, simulated devices, settings."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from fleetfit import names
from fleetfit.attack import Attack
from fleetfit.config.assembly import Assembly
from fleetfit.config.build.method import build_method_spec
from fleetfit.config.comparable import check_comparable
from fleetfit.config.computing import Computing, computing
from fleetfit.config.fleet import (
    counted_piece,
    notes_on_the_one_model,
    only_full,
    plan_of,
    targets_of,
    with_further,
)
from fleetfit.config.hostile import attack_of, attacked, attackers_of, notes_on_attackers
from fleetfit.config.links import on_the_way
from fleetfit.config.naming import called, check_architecture, check_keys, load_data
from fleetfit.config.participants import (
    Expected,
    ExpectedClients,
    Joined,
    Nodes,
    Participants,
    PlannedProblem,
    SimulatedClients,
    conditions_of,
    connected,
    server_accelerator,
)
from fleetfit.config.privacy import made_private, notes_on_privacy, privacy_of
from fleetfit.config.requirements import find_unused_keys
from fleetfit.config.schema import (
    CLIENTS,
    FEWEST,
    FRACTION,
    EngineSection,
    Experiment,
    LocalSection,
)
from fleetfit.config.secure import notes_on_secure, secure_of
from fleetfit.config.usual import notes_on_files, says_clients
from fleetfit.cost import cost_of, training_memory
from fleetfit.data import Data
from fleetfit.errors import ConfigError, DataError, MissingExtra, PlanError
from fleetfit.evaluate import EvaluationScope
from fleetfit.layout import State
from fleetfit.method import Method, build, is_portable, modelled
from fleetfit.peft.lora import B
from fleetfit.rounds import Settings
from fleetfit.submodel import Submodel
from fleetfit.tasks import task_named
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
    tuned,
)
from fleetfit.values.local import OF_OPTIMISERS, OPTIMISERS
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
    return assembled(experiment, SimulatedClients, base)


def assembled(
    experiment: Experiment, participants: Callable[[Experiment, Method], Participants], base: State | None,
    on_a_fleet: bool = False,
) -> Assembly:  # fmt: skip
    """Make everything that a run needs, whoever takes part in it.

    Args:
        experiment: The description.
        participants: Finds out who takes part, after what needs nobody was checked.
        base: What of the model is never trained, if the run has it already.
        on_a_fleet: Whether the clients are nodes, which have their own data.

    Raises:
        FleetFitError: Something in the experiment does not fit.
    """
    assembly = _assembled(experiment, participants, base, attack_of(experiment, on_a_fleet))
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
    found = planned(experiment, method_spec, who, base)
    problem, joined = found.problem, who.joined(found)
    federation = federation_of(experiment, who, found, joined)
    known = replace(federation, clients=joined.clients)  # to whoever describes the fleet, not to the server
    absent, further = who.notes(known, found, joined)
    if not len(federation.able) or not len(known.able):
        raise PlanError(
            f"{who.nobody} can take part. {' '.join(absent)} Raise the budgets or the tolerance, or add a smaller "
            "level."
        )
    notes = (
        *notes_on_data(experiment, who),
        *absent,
        *notes_on_task(problem),
        *further,
        *notes_on_start(problem),
        *found.how.notes,
    )
    settings = settings_of(experiment)
    federation, settings = on_the_way(experiment, federation, joined.simulation, settings)
    privacy, secure = privacy_of(experiment, federation), secure_of(experiment, federation)
    if privacy is not None:
        federation, settings = made_private(experiment, federation, settings, privacy)
        notes += notes_on_privacy(privacy, federation, experiment.rounds)
    check_comparable(experiment, federation)
    settings = replace(settings, secure=secure)
    notes += notes_on_secure(secure, federation, None if privacy is None else privacy.rate)
    attackers = None if attack is None else attackers_of(experiment, attack, known)
    federation, simulation, settings = attacked(federation, joined.simulation, settings, attackers)
    notes += notes_on_attackers(attackers)
    if simulation is None:  # devices evaluate what they afford, and nothing else
        settings = replace(settings, wanted=replace(settings.wanted, whole=False, beyond=False))
    plan = plan_of(known, found.fleet, found.targets)
    notes += tuple(notes_on_the_one_model(experiment, federation, plan))
    experiment = with_chosen(with_measured(experiment, found.fleet.conditions.measured), found.how)
    experiment = experiment if simulation is None else with_clients(experiment, who.count)
    return Assembly(experiment, who.data, found.fleet, federation, simulation, settings, plan, attackers, notes)


def federation_of(experiment: Experiment, who: Participants, found: PlannedProblem, joined: Joined) -> Federation:
    """Return the server's view, of clients who tell the truth."""
    method, everything, simulation = found.method, joined.clients, joined.simulation
    return Federation(
        problem=found.problem,
        clients=everything if method.needs_budgets else Clients(everything.num_examples, labels=everything.labels),
        levels=found.levels,
        cohort=cohort_of(experiment, who.count),
        method=method,
        method_spec=found.method_spec,
        seed=experiment.seed,
        device=joined.device,
        connected=None if simulation is None else connected(simulation.resources),
    )


def planned(
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
    problem = modelled(problem_of(experiment, who.data), method_spec)
    fleet = who.budgets(problem, conditions_of(experiment, who))
    targets = (
        targets_of(experiment.fleet, fleet, problem.architecture.blocks) if method.needs_budgets else only_full(fleet)
    )
    levels = with_further(method.levels(problem, targets), problem, fleet)
    problem = problem.with_exits({e for level in levels for e in level.submodel.exits})
    check_fits(experiment, problem)
    problem = replace(problem, base=initial_base(problem, experiment.seed) if base is None else base)
    problem = with_kept_features(problem, experiment.engine)
    how = computing(experiment.engine, problem, levels, accelerator or server_accelerator(experiment))
    problem = problem.with_computed(how.computed)
    return PlannedProblem(problem, method, method_spec, fleet, targets, levels, how)


def with_kept_features(problem: Problem, section: EngineSection) -> Problem:
    """Return the problem with how much of what a frozen backbone makes of samples is kept; of others nothing is."""
    if not problem.base:
        return problem
    asked = section.features_bytes
    if asked is None:
        asked = AS_MUCH if section.speed == "fast" else 0.0
    return problem.with_features(asked)


def notes_on_task(problem: Problem) -> list[str]:
    """Say what accuracy means where it is something else."""
    measure = problem.task.measure
    return [] if measure == "accuracy" else [f"Accuracy here is {measure}."]


def notes_on_data(experiment: Experiment, who: Expected) -> list[str]:
    """Say what was found in the files, and how many clients there are if that is fewer than usual."""
    if not isinstance(who.data, Data):
        return []
    said = notes_on_files(experiment.data.name, who.data)
    if who.count >= CLIENTS or not _small(experiment):
        return said
    return [*said, f"Divided among {who.count} clients, because the data are small: [data] partition.clients says "
            "otherwise."]  # fmt: skip


def with_measured(experiment: Experiment, measured: Mapping[str, list[float]]) -> Experiment:
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


def with_clients(experiment: Experiment, count: int) -> Experiment:
    """Return the experiment with the number of its clients, where the size of the data said it."""
    data, division, cohort = experiment.data, experiment.data.partition, experiment.cohort
    if not _small(experiment):
        return experiment
    division = division.model_copy(update={"clients": count})
    changes: dict[str, Any] = {"data": data.model_copy(update={"partition": division})}
    if cohort.count is None and cohort.fraction is None:
        fraction = FRACTION if count >= CLIENTS else cohort_of(experiment, count) / count
        changes["cohort"] = cohort.model_copy(update={"fraction": fraction})
    return experiment.model_copy(update=changes)


def _small(experiment: Experiment) -> bool:
    """Tell whether the size of the data says how many clients there are."""
    data, division = experiment.data, experiment.data.partition
    return division.clients is None and division.kind != "natural" and says_clients(data.name)


def with_chosen(experiment: Experiment, how: Computing) -> Experiment:
    """Return the experiment with how its levels are computed, so that it goes on, and can be repeated, the same way."""
    if how.chosen == experiment.engine.chosen:
        return experiment
    return experiment.model_copy(update={"engine": experiment.engine.model_copy(update={"chosen": dict(how.chosen)})})


def with_callbacks(experiment: Experiment, callbacks: list[Any]) -> Experiment:
    """Return the experiment with other callbacks."""
    return experiment.model_copy(update={"callbacks": callbacks})


def as_recorded(experiment: Experiment, recorded: Experiment) -> Experiment:
    """Return the experiment with what was measured and chosen for a run of it, as the run's folder says.

    Whom a run tells is no part of what it is: `callbacks` are those of the folder, too.
    """
    found = with_callbacks(with_measured(experiment, recorded.fleet.measured), recorded.callbacks)
    found = _sized_as(found, recorded)
    if found.engine.speed != "fast" or found.engine.chosen:
        return found
    return found.model_copy(update={"engine": found.engine.model_copy(update={"chosen": recorded.engine.chosen})})


# ---- what names stand for ----------------------------------------------------------------------------------------


def problem_of(experiment: Experiment, data: Data | DataDescription) -> Problem:
    """Return the problem with the full model's last exit only; the method's levels say which exits there are."""
    section = experiment.model
    shape = data.sample_shape
    given = {"classes": data.classes, "channels": shape[0] if shape else 1, "input_shape": shape,
             "vocabulary": data.vocabulary, "padding": data.padding}  # fmt: skip
    spec = None
    if isinstance(section.name, str) or (callable(section.name) and not hasattr(section.name, "build")):
        _check_takes(section.name, shape, data)
        architecture = called("models", section.name, "[model]", section.settings, **given)
        model = {"name": section.name, **section.settings}
        spec = {"model": model, "given": {**given, "input_shape": list(shape)}, "task": data.task, "exits": []}
    else:
        architecture = section.name
    check_architecture(architecture, section.name if spec else type(architecture).__name__)
    peft = {"name": experiment.peft.name, **experiment.peft.settings}
    architecture = tuned(architecture, peft)
    spec = None if spec is None else {**spec, "peft": peft}
    return Problem(
        architecture,
        shape,
        task_named(data.task),
        (architecture.blocks,),
        start=experiment.start,
        spec=spec if is_portable(spec) else None,
    )


def _check_takes(name: Any, shape: tuple[int, ...], data: Data | DataDescription) -> None:
    """Refuse a built-in model for images where samples are none, before it fails somewhere inside.

    Raises:
        ConfigError: It is one.
    """
    if not isinstance(name, str) or ":" in name or data.vocabulary:
        return
    takes = inspect.signature(names.resolve("models", name)).parameters
    images = "channels" in takes or (name not in ("mlp", "mlp_2nn") and "input_shape" in takes)
    if images and len(shape) != 3:
        raise ConfigError(
            f"[model] {name} takes images [channels, height, width], and a sample of {data.name} is {list(shape)}. "
            'A model for rows of numbers: name = "mlp".'
        )


def cohort_of(experiment: Experiment, clients: int) -> int:
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


def settings_of(experiment: Experiment) -> Settings:
    """Return what a round does."""
    local, evaluate = experiment.local, experiment.evaluate
    wanted = EvaluationScope(
        Evaluation(split=evaluate.split, batch_size=evaluate.batch_size, metrics=tuple(evaluate.metrics)),
        tuple(dict.fromkeys(evaluate.norms)),
        evaluate.statistics_samples,
        clients=evaluate.clients,
        always=evaluate.whole,
    )
    training = replace(local_of(local), deadline_s=experiment.cohort.deadline_s, late=experiment.cohort.late)
    schedule = functools.partial(local.schedule.factor_at, experiment.rounds)
    return Settings(experiment.rounds, training, schedule, evaluate.every, wanted)


def local_of(section: LocalSection) -> Local:
    """Return the settings of local training that a section gives: every field that has a key of its name."""
    keys = LocalSection.model_fields.keys() & {field.name for field in fields(Local)}
    without_patience = {"check_every"} if section.patience is None else set()
    given = {key: getattr(section, key) for key in keys - without_patience - _unset(section)}
    return Local(**{**given, "batch_size": None if section.batch_size == "all" else section.batch_size})


def _unset(section: LocalSection) -> set[str]:
    """Return the keys of other optimisers."""
    return set(OF_OPTIMISERS) - OPTIMISERS[section.optimiser].keys()


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
    return assembled(experiment, lambda described, method: Nodes(described, method, told), base, on_a_fleet=True)


@dataclass(frozen=True, eq=False)
class Beforehand:
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
        piece = whole if level is None else counted_piece(problem, level)
        return cost_of(problem.architecture, piece, problem.input_shape, cost, self.found.fleet.conditions)

    def memory(self, level: Level) -> int:
        """Return the bytes that a training step of a level should take, with all the exits that it trains."""
        problem, piece = self.found.problem, level.submodel
        sizes = {**problem.layout.full_sizes, **piece.sizes}
        return training_memory(
            problem.architecture, sizes, piece.exits, problem.input_shape, self.batch_size, self.local.moments
        )


def beforehand(
    experiment: Experiment, facts: DataDescription | None = None, accelerator: torch.device | None = None
) -> Beforehand:
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
    found = planned(experiment, method_spec, who, {}, accelerator)
    return Beforehand(experiment, found, settings_of(experiment).local, found.fleet.conditions.batch_size, who.data)


def _loaded(experiment: Experiment) -> Data:
    try:
        return load_data(experiment.data)
    except (DataError, MissingExtra) as error:
        raise DataError(
            f"{error} To go without the run's data, say what a sample is: --input-shape 3,32,32 --classes 10."
        ) from None
