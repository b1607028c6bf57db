"""An experiment becomes what a run needs: data, problem, federation, simulated devices, settings."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from fleetfit import names
from fleetfit.config.devices import absences_of, clients_of, connected, resources_of
from fleetfit.config.fleet import Fleet, fleet_of, notes_of, only_full, plan_of, targets_of, with_further
from fleetfit.config.needs import check_needs
from fleetfit.config.schema import CLIENTS, FRACTION, DataSection, Experiment, ServerDataSection
from fleetfit.config.server_data import server_accelerator, server_data
from fleetfit.data import Data, partition
from fleetfit.data.partition import KINDS
from fleetfit.errors import ConfigError, PlanError
from fleetfit.evaluate import Wanted
from fleetfit.layout import Architecture
from fleetfit.method import build, is_portable
from fleetfit.planner import Plan
from fleetfit.rounds import Engine, Settings
from fleetfit.tasks import task_named
from fleetfit.train import notes_on_start
from fleetfit.values import Clients, Evaluation, Federation, Local, Problem, Simulation


@dataclass(frozen=True, eq=False)
class Assembly:
    """Everything that a run needs.

    Attributes:
        experiment: The description that it was made from, and what was measured for it.
        data: The whole data set.
        fleet: Who the clients are.
        federation: The server's view.
        simulation: The devices.
        settings: What a round does.
        plan: The method's levels, counted, and who got which.
        notes: Sentences that the user must see, such as who does not take part.
    """

    experiment: Experiment
    data: Data
    fleet: Fleet
    federation: Federation
    simulation: Simulation
    settings: Settings
    plan: Plan
    notes: tuple[str, ...] = field(default=())

    def engine(self) -> Engine:
        """Start the engine that the experiment names."""
        section = self.experiment.engine
        engine: Engine = _called("engines", section.name, "[engine]", section.settings, simulation=self.simulation)
        return engine


def assemble(experiment: Experiment) -> Assembly:
    """Make everything that a run needs; whatever can be checked without the data is checked first.

    Raises:
        FleetFitError: Something in the experiment does not fit.
    """
    method_spec = spec_of_method(experiment)
    method = build(method_spec)
    check_needs(experiment, method)
    check_keys(experiment)
    data = load_data(experiment.data)
    own = server_data(experiment, data, load_data) if method.own_data else None
    parts = divided(experiment, data)
    problem = problem_of(experiment, data)
    fleet = fleet_of(experiment.fleet, problem, len(parts), experiment.seed, _batch_size(experiment, parts))
    targets = targets_of(experiment.fleet, fleet) if method.told else only_full(fleet)
    levels = with_further(method.levels(problem, targets), problem, fleet)
    problem = problem.with_exits({e for level in levels for e in level.submodel.exits})
    simulation = Simulation(problem, data, parts, resources_of(experiment, fleet), unlabelled=own)
    everything = clients_of(experiment, data, parts, fleet)
    federation = Federation(
        problem=problem,
        clients=everything if method.told else Clients(everything.num_examples, labels=everything.labels),
        levels=levels,
        cohort=_cohort(experiment, len(parts)),
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
    if problem.task.measure != "accuracy":
        notes.append(f"Accuracy here is {problem.task.measure}.")
    if experiment.cohort.deadline_s is not None and not simulation.resources.speeds:
        notes.append("The deadline is one of real time, since no group has a profile: results differ from run to run.")
    notes += [*absences_of(known, simulation.resources), *notes_on_start(problem)]
    plan = plan_of(known, fleet, targets)
    experiment = with_measured(experiment, fleet.conditions.measured)
    return Assembly(experiment, data, fleet, federation, simulation, settings_of(experiment), plan, tuple(notes))


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


def _function(kind: str, name: Any) -> tuple[Callable[..., Any], str]:
    if callable(name):
        function, label = name, getattr(name, "__name__", type(name).__name__)
    else:
        function, label = names.resolve(kind, name), str(name)
    if kind == "models":
        _refuse_module(function, label)
    return function, label


def _refuse_module(found: Any, label: str) -> None:
    """Say how a bare module, or a class of modules, becomes an architecture."""
    kind = found if inspect.isclass(found) else type(found)
    if issubclass(kind, nn.Module):
        raise ConfigError(
            f"[model] {label} is a torch module, and FleetFit needs to build it at many sizes. Wrap it: write a class "
            'that inherits from fleetfit.Architecture, set axes (such as {"hidden": Axis(64)}) and blocks in it, and '
            f"return {kind.__name__}(...) of the sizes asked for from build(self, axes, exits). See docs/own-model.md."
        )


def _called(kind: str, name: Any, where: str, values: Mapping[str, Any], **given: Any) -> Any:
    function, label = _function(kind, name)
    return names.call(function, label, where, values, **given)


def check_keys(experiment: Experiment) -> None:
    """Check the free keys of model, data set, engine and partition against their signatures, calling nothing."""
    given = dict.fromkeys(("classes", "channels", "input_shape", "vocabulary", "padding"))
    named: list[tuple[str, str, Any, dict[str, Any]]] = [
        ("engines", "[engine]", experiment.engine, {"simulation": None}),
        ("models", "[model]", experiment.model, given),
        ("data", "[data]", experiment.data, {}),
        ("data", "[data] server", experiment.data.server or experiment.data, {}),
    ]
    for kind, where, section, known in named:
        if isinstance(section.name, str) or callable(section.name):
            function, label = _function(kind, section.name)
            names.call(_without_calling(function), label, where, section.settings, **known)
        elif section.settings:
            raise ConfigError(
                f"{where} {next(iter(section.settings))}: an object takes no further keys; set them on the object."
            )
    division = experiment.data.partition
    if division.kind in KINDS:
        known = {"data": None, "clients": None, "rng": None}
        function = _without_calling(KINDS[division.kind])
        names.call(function, division.kind, "[data] partition", division.settings, **known)


def _without_calling(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def checked(**values: Any) -> dict[str, Any]:
        return values

    return checked


def load_data(section: DataSection | ServerDataSection, where: str = "[data]", **settings: Any) -> Data:
    """Return the data set of a section, with further settings.

    Raises:
        FleetFitError: It cannot be had.
    """
    if isinstance(section.name, Data):
        return section.name
    if not isinstance(section.name, str) and not callable(section.name):
        raise ConfigError(f"data must be a name, a function or a fleetfit.Data, got {type(section.name).__name__}.")
    try:
        data = _called("data", section.name, where, section.settings | settings)
    except (OSError, ImportError) as error:
        raise ConfigError(f"{where} {section.name} failed: {error}") from error
    if not isinstance(data, Data):
        raise ConfigError(f"{where} {section.name} must return a fleetfit.Data, got {type(data).__name__}.")
    return data


def divided(experiment: Experiment, data: Data) -> Sequence[Mapping[str, Tensor]]:
    """Return each client's splits."""
    division = experiment.data.partition
    clients = division.clients or (None if division.kind == "natural" else CLIENTS)
    seed = experiment.seed if division.seed is None else division.seed
    return partition(data, division.kind, clients, seed, **division.settings)


def problem_of(experiment: Experiment, data: Data) -> Problem:
    """Return the problem with the full model's last exit only; the method's levels say which exits there are."""
    section = experiment.model
    shape = data.sample_shape
    given = {"classes": data.classes, "channels": shape[0] if shape else 1, "input_shape": shape,
             "vocabulary": data.vocabulary, "padding": data.padding}  # fmt: skip
    spec = None
    if isinstance(section.name, str) or (callable(section.name) and not hasattr(section.name, "build")):
        architecture = _called("models", section.name, "[model]", section.settings, **given)
        model = {"name": section.name, **section.settings}
        spec = {"model": model, "given": {**given, "input_shape": list(shape)}, "task": data.task, "exits": []}
    else:
        architecture = section.name
    _check_architecture(architecture, section.name if spec else type(architecture).__name__)
    return Problem(
        architecture,
        shape,
        task_named(data.task),
        (architecture.blocks,),
        start=experiment.start,
        spec=spec if is_portable(spec) else None,
    )


def architecture_of(name: Any, settings: Mapping[str, Any], **given: Any) -> Architecture:
    """Return the architecture of a name, for `plan` and `check-model`."""
    architecture: Architecture = _called("models", name, "[model]", settings, **given)
    _check_architecture(architecture, name)
    return architecture


def _check_architecture(found: Any, label: Any) -> None:
    _refuse_module(found, f"what {label} returns")
    missing = [a for a in ("axes", "blocks", "build", "sizes", "positions") if not hasattr(found, a)]
    if missing:
        kind = type(found).__name__
        raise ConfigError(
            f'[model] {label} must give an Architecture; {kind} lacks "{missing[0]}". Inherit from '
            "fleetfit.Architecture, set axes and blocks, and write build(self, axes, exits)."
        )


def _cohort(experiment: Experiment, clients: int) -> int:
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
    wanted = Wanted(
        Evaluation(split=evaluate.split, batch_size=evaluate.batch_size),
        tuple(dict.fromkeys(evaluate.norms)),
        evaluate.statistics_samples,
        clients=evaluate.clients,
        always=evaluate.whole,
    )
    size = None if local.batch_size == "all" else int(local.batch_size)
    training = Local(
        local.lr, local.epochs, size, local.momentum, local.weight_decay, local.clip_norm, local.clip_value,
        local.max_steps, local.patience, experiment.cohort.deadline_s, experiment.cohort.late,
    )  # fmt: skip
    schedule = functools.partial(local.schedule.factor_at, experiment.rounds)
    return Settings(experiment.rounds, training, schedule, evaluate.every, wanted)
