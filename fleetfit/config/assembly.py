"""An experiment becomes what a run needs: data, problem, federation, simulated devices, settings."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fleetfit import names, paths, used
from fleetfit.config.availability import availability_of
from fleetfit.config.fleet import (
    DeviceBudgets,
    fleet_of,
    notes_of,
    only_full,
    plan_of,
    ranges,
    targets_of,
    with_further,
)
from fleetfit.config.naming import called, check_architecture, check_keys, load_data
from fleetfit.config.schema import (
    CLIENTS,
    FRACTION,
    CohortSection,
    DriftSection,
    EvaluateSection,
    Experiment,
    LocalSection,
    ServerDataSection,
)
from fleetfit.config.speeds import speeds_of
from fleetfit.config.unused import Unused, unused_of
from fleetfit.data import Data, class_counts, partition, unlabelled
from fleetfit.errors import ConfigError, PlanError
from fleetfit.evaluate import EvaluationScope
from fleetfit.layout import State
from fleetfit.method import Method, build, is_portable, modelled
from fleetfit.method.unused import reads_targets
from fleetfit.peft.lora import B
from fleetfit.planner import Plan, Targets
from fleetfit.rounds import Engine, Settings
from fleetfit.tasks import task_named
from fleetfit.training import accelerator_named, initial_base, notes_on_start
from fleetfit.values import (
    Clients,
    DataDescription,
    DeviceResources,
    Drift,
    Evaluation,
    Federation,
    Level,
    Local,
    Problem,
    Simulation,
    tuned,
)
from fleetfit.values.local import OF_OPTIMISERS, OPTIMISERS, moments_of

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
    return paths.text_of(Path(file), ConfigError)


def server_accelerator(experiment: Experiment) -> torch.device:
    """Return where the server computes: on the engine's device, if there is one here."""
    named = experiment.engine.settings.get("device", "cpu")
    try:
        return accelerator_named(named if isinstance(named, str) else "cpu")
    except ConfigError:  # the engine will say so, if a run is started
        return torch.device("cpu")


# ---- devices, and what they tell -----------------------------------------------------------------------------------


def resources_of(experiment: Experiment, fleet: DeviceBudgets) -> DeviceResources:
    """Return what the simulated devices afford, how fast they are, and when they are connected."""
    section, seed, drift = experiment.fleet, experiment.seed, experiment.fleet.drift
    moving = None if drift is None else _drift_of(drift)
    budgets = {fleet.cost: fleet.budgets, **fleet.further}
    speeds = speeds_of(section, fleet.group, seed)
    coming = availability_of(section.availability, len(fleet.budgets), seed)
    return DeviceResources(budgets, fleet.tolerances, moving, fleet.conditions, seed, speeds, section.jitter, coming)


def _drift_of(section: DriftSection) -> Drift:
    """Return how budgets move; without jumps, how low they go says nothing."""
    return Drift(section.sd, section.jump, section.low) if section.jump else Drift(section.sd, 0.0)


def connected(resources: DeviceResources) -> Callable[[int], np.ndarray] | None:
    """Return what tells the server who is connected in a round."""
    return None if resources.availability is None else resources.availability.online


def clients_of(
    experiment: Experiment, data: Data, parts: Sequence[Mapping[str, Tensor]], fleet: DeviceBudgets
) -> Clients:
    """Return all that clients could tell the server, and whether they tell their classes.

    Raises:
        ConfigError: They are to tell classes, and the task has none.
    """
    counts, labels = np.array([len(part["train"]) for part in parts]), None
    if experiment.fleet.reports_labels:
        if data.task != "classification":
            raise ConfigError(
                f"[fleet] reports_labels: clients can report how many samples of each class they have in a "
                f"classification; the task of {data.name} is {data.task}. Leave reports_labels out."
            )
        labels = class_counts(data, [dict(part) for part in parts]).numpy()
    return Clients(counts, fleet.budgets, fleet.tolerances, fleet.further, labels)


def absences_of(federation: Federation, resources: DeviceResources) -> list[str]:
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
    return [f"{len(missing)} clients cannot take part: the trace never has them online. Clients {ranges(missing)}."]


# ---- the run -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Assembly:
    """Everything that a run needs.

    Attributes:
        experiment: The description that it was made from, and what was measured for it.
        data: The whole data set, or of a real fleet what its nodes say of theirs.
        fleet: Who the clients are.
        federation: The server's view.
        simulation: The simulated devices; None of a real fleet, whose devices are elsewhere.
        settings: What a round does.
        plan: The method's levels, counted, and who got which.
        notes: Sentences that the user must see, such as who does not take part.
        unused: The keys of the experiment that the run does not use; the notes say so.
    """

    experiment: Experiment
    data: Data | DataDescription
    fleet: DeviceBudgets
    federation: Federation
    simulation: Simulation | None
    settings: Settings
    plan: Plan
    notes: tuple[str, ...] = field(default=())
    unused: tuple[Unused, ...] = field(default=())

    def engine(self) -> Engine:
        """Start the engine that the experiment names.

        Raises:
            ConfigError: It cannot be had, or the run is one of a real fleet.
        """
        section = self.experiment.engine
        if self.simulation is None:
            raise ConfigError(
                "this run's data are on the nodes of a fleet, so it goes on with `fleetfit flower resume`, and needs "
                "them to train or to evaluate."
            )
        engine: Engine = called("engines", section.name, "[engine]", section.settings, simulation=self.simulation)
        return engine


def assemble(experiment: Experiment, base: State | None = None) -> Assembly:
    """Make everything that a run needs; whatever can be checked without the data is checked first.

    Args:
        experiment: The description.
        base: What of the model is never trained, if the run has it already.

    Raises:
        FleetFitError: Something in the experiment does not fit.
    """
    with used.reading() as found:
        assembly = _assembled(experiment, base)
        return with_unused(assembly, unused_of(experiment, found, assembly.federation.method_spec))


def with_unused(assembly: Assembly, unused: tuple[Unused, ...]) -> Assembly:
    """Return the assembly with the keys that it does not use, and a note for each."""
    return replace(assembly, unused=unused, notes=(*assembly.notes, *map(str, unused)))


def _assembled(experiment: Experiment, base: State | None) -> Assembly:
    method_spec = spec_of_method(experiment)
    method = build(method_spec)
    check_needs(experiment, method)
    with used.looking():
        check_keys(experiment)
    data = load_data(experiment.data)
    own = server_data(experiment, data, load_data) if method.own_data else None
    parts = divided(experiment, data)
    size = _batch_size(experiment, parts)
    found = planned(
        experiment,
        data,
        method_spec,
        lambda p: fleet_of(
            experiment.fleet, p, len(parts), experiment.seed, size, moments_of(experiment.local.optimiser)
        ),
        base,
    )
    problem, fleet, levels = found.problem, found.fleet, found.levels
    simulation = Simulation(problem, data, parts, resources_of(experiment, fleet), unlabelled=own)
    everything = clients_of(experiment, data, parts, fleet)
    federation = Federation(
        problem=problem,
        clients=everything if method.needs_budgets else Clients(everything.num_examples, labels=everything.labels),
        levels=levels,
        cohort=cohort_of(experiment, len(parts)),
        method=method,
        method_spec=method_spec,
        seed=experiment.seed,
        device=replace(simulation.device(None), accelerator=server_accelerator(experiment)),
        connected=connected(simulation.resources),
    )
    known = replace(federation, clients=everything)  # to whoever describes the fleet, not to the server
    notes = notes_of(known, fleet)
    if not len(federation.able) or not len(known.able):
        raise PlanError(
            f"nobody can take part. {' '.join(notes)} Raise the budgets or the tolerance, or add a smaller level."
        )
    notes += notes_on_task(problem)
    if experiment.cohort.deadline_s is not None and not simulation.resources.speeds:
        notes.append("The deadline is one of real time, since no group has a profile: results differ from run to run.")
    notes += [*absences_of(known, simulation.resources), *notes_on_start(problem)]
    plan = plan_of(known, fleet, found.targets)
    settings = settings_of(experiment)  # of the experiment as it was given, whose keys are noted as read
    experiment = with_measured(experiment, fleet.conditions.measured)
    return Assembly(experiment, data, fleet, federation, simulation, settings, plan, tuple(notes))


@dataclass(frozen=True, eq=False)
class PlannedProblem:
    """What is trained, by whom, at which levels."""

    problem: Problem
    fleet: DeviceBudgets
    targets: Targets
    levels: tuple[Level, ...]


def planned(
    experiment: Experiment, data: Data | DataDescription, method_spec: Mapping[str, Any],
    who: Callable[[Problem], DeviceBudgets], base: State | None,
) -> PlannedProblem:  # fmt: skip
    """Return the problem with the exits of its levels, who the clients are, and the levels.

    Args:
        experiment: The description.
        data: What is trained on.
        method_spec: The method's.
        who: Makes the fleet for a problem.
        base: What of the model is never trained, or None to make it.
    """
    method = build(method_spec)
    problem = modelled(problem_of(experiment, data), method_spec)
    fleet = who(problem)
    with contextlib.nullcontext() if reads_targets(method) else used.looking():
        targets = (
            targets_of(experiment.fleet, fleet, problem.architecture.blocks)
            if method.needs_budgets
            else only_full(fleet)
        )
    levels = with_further(method.levels(problem, targets), problem, fleet)
    problem = problem.with_exits({e for level in levels for e in level.submodel.exits})
    check_fits(experiment, problem)
    problem = replace(problem, base=initial_base(problem, experiment.seed) if base is None else base)
    return PlannedProblem(problem, fleet, targets, levels)


def notes_on_task(problem: Problem) -> list[str]:
    """Say what accuracy means where it is something else."""
    measure = problem.task.measure
    return [] if measure == "accuracy" else [f"Accuracy here is {measure}."]


def with_measured(experiment: Experiment, measured: Mapping[str, list[float]]) -> Experiment:
    """Return the experiment with what was measured for it, so that it can be repeated with the same numbers."""
    if measured == experiment.fleet.measured:
        return experiment
    return experiment.model_copy(update={"fleet": experiment.fleet.model_copy(update={"measured": dict(measured)})})


def _batch_size(experiment: Experiment, parts: Sequence[Mapping[str, Tensor]]) -> int:
    """Return the samples of the largest training step."""
    said = experiment.local.batch_size
    return max(1, *(len(part["train"]) for part in parts)) if said == "all" else int(said)


# ---- what names stand for ----------------------------------------------------------------------------------------


def spec_of_method(experiment: Experiment) -> dict[str, Any]:
    """Return the spec from which the method is built wherever a job runs."""
    section, choose = experiment.method, experiment.cohort.choose
    choice = dict(choose) if isinstance(choose, Mapping) else {"name": choose}
    if "name" not in choice:
        raise ConfigError('[cohort] choose: a table needs the name of a choice, such as { name = "loss" }.')
    spec = {"name": section.name, **section.settings}
    if choice != {"name": "uniform"}:
        if "choose" in section.hooks:
            raise ConfigError("cohort.choose and method.hooks.choose name the same hook; set one of them.")
        spec["cohort"] = choice
    plus = section.plus
    if experiment.cohort.deadline_s is not None and experiment.cohort.late == "shallower":
        plus = {**plus, "in_time": {}}
    return spec | ({"plus": plus} if plus else {}) | ({"hooks": section.hooks} if section.hooks else {})


def divided(experiment: Experiment, data: Data) -> Sequence[Mapping[str, Tensor]]:
    """Return each client's splits."""
    division = experiment.data.partition
    clients = division.clients or (None if division.kind == "natural" else CLIENTS)
    seed = experiment.seed if division.seed is None else division.seed
    return partition(data, division.kind, clients, seed, **division.settings)


def problem_of(experiment: Experiment, data: Data | DataDescription) -> Problem:
    """Return the problem with the full model's last exit only; the method's levels say which exits there are."""
    section = experiment.model
    shape = data.sample_shape
    given = {"classes": data.classes, "channels": shape[0] if shape else 1, "input_shape": shape,
             "vocabulary": data.vocabulary, "padding": data.padding}  # fmt: skip
    spec = None
    if isinstance(section.name, str) or (callable(section.name) and not hasattr(section.name, "build")):
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


def cohort_of(experiment: Experiment, clients: int) -> int:
    """Return how many clients take part in a round.

    Raises:
        ConfigError: More than there are.
    """
    section = experiment.cohort
    if section.count is None:
        fraction = FRACTION if section.fraction is None else section.fraction
        return max(1, round(fraction * clients))
    if section.count > clients:
        raise ConfigError(
            f"[cohort] count: {section.count} clients a round are more than the {clients} clients there are."
        )
    return section.count


def settings_of(experiment: Experiment) -> Settings:
    """Return what a round does."""
    local, evaluate = experiment.local, experiment.evaluate
    static = "static" in evaluate.norms
    wanted = EvaluationScope(
        Evaluation(split=evaluate.split, batch_size=evaluate.batch_size),
        tuple(dict.fromkeys(evaluate.norms)),
        evaluate.statistics_samples if static else EvaluateSection().statistics_samples,
        clients=evaluate.clients,
        always=evaluate.whole,
    )
    deadline_s = experiment.cohort.deadline_s
    late = CohortSection().late if deadline_s is None else experiment.cohort.late
    training = replace(local_of(local), deadline_s=deadline_s, late=late)
    schedule = functools.partial(local.schedule.factor_at, experiment.rounds)
    schedule(0)  # which reads its keys
    return Settings(experiment.rounds, training, schedule, evaluate.every, wanted)


def local_of(section: LocalSection) -> Local:
    """Return the settings of local training that a section gives: every field that has a key of its name."""
    keys = LocalSection.model_fields.keys() & {field.name for field in fields(Local)}
    unread = set() if section.patience is not None else {"check_every"}  # nobody looks, so it says nothing
    given = {key: getattr(section, key) for key in keys - unread - _unset(section)}
    return Local(**{**given, "batch_size": None if section.batch_size == "all" else section.batch_size})


def _unset(section: LocalSection) -> set[str]:
    """Return the keys of other optimisers."""
    return set(OF_OPTIMISERS) - OPTIMISERS[section.optimiser].keys()
