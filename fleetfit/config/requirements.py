"""What the keys of a run file require to have an effect: one table of conditions on the assembled run.

A key that is set and whose condition is false is noted, or refused where it was asked for with `--set` or a keyword.
Factories declare the same of their parameters (`fleetfit.factories`), methods of hooks that they replace and of keys
that they set themselves (`fleetfit.method.Method`).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fleetfit.config.assembly import Assembly, UnusedKey
from fleetfit.config.computing import build_level
from fleetfit.config.naming import find_function
from fleetfit.config.schema import Experiment, LocalSection
from fleetfit.config.section import Open, Section
from fleetfit.data.partition import KINDS
from fleetfit.factories import find_unused_parameters, is_default
from fleetfit.method import FEDAVG, find_unused_parts
from fleetfit.training.speed import has_convolutions


@dataclass(frozen=True)
class Requirement:
    """A condition under which a key has an effect.

    Attributes:
        key: Dotted; of a section, it is meant for all keys of the section that have no row before.
        is_met: Whether an assembled run uses the key.
        reason: Why the run does not use it otherwise.
    """

    key: str
    is_met: Callable[[Assembly], Any]
    reason: str


def is_simulated(run: Assembly) -> bool:
    """Return whether clients are simulated; the nodes of a fleet have data and resources of their own."""
    return run.simulation is not None


def has_profiles(run: Assembly) -> bool:
    """Return whether clients differ in speed; the server of a fleet sees real ones."""
    return run.simulation is None or bool(run.simulation.resources.speeds)


def has_open_cohort(run: Assembly) -> bool:
    """Return whether the number of clients says how many take part in a round."""
    return is_simulated(run) or (run.experiment.cohort.count is None and run.experiment.cohort.fraction is None)


def is_sized_by_data(run: Assembly) -> bool:
    """Return whether the kind of data says how many clients there are, and so how many take part in a round."""
    return is_simulated(run) or (has_open_cohort(run) and run.experiment.data.partition.clients is None)


def takes_levels(run: Assembly) -> bool:
    """Return whether the method's levels follow the targets that `[fleet] levels` sets."""
    return run.method.needs_budgets and run.method.levels is not FEDAVG.levels


def has_jumps(run: Assembly) -> bool:
    """Return whether budgets jump."""
    drift = run.experiment.fleet.drift
    return drift is not None and drift.jump > 0


def has_image_layers(run: Assembly) -> bool:
    """Return whether a level has convolutions, whose images have a memory format."""
    problem = run.federation.problem
    return any(has_convolutions(build_level(problem, level)) for level in run.federation.levels)


_NODES = "on a fleet the nodes have their own"
_EQUALLY_FAST = "no group has a profile, so all clients are equally fast"

REQUIREMENTS = (
    Requirement("data.server", lambda run: run.method.own_data, "the server trains in methods such as feddf only"),
    Requirement("data.name", is_sized_by_data, _NODES),
    Requirement("data.partition.kind", is_sized_by_data, _NODES),
    Requirement("data.partition.clients", has_open_cohort, _NODES),
    Requirement("data", is_simulated, _NODES),
    Requirement("fleet.levels", takes_levels, "the method has levels of its own"),
    Requirement("fleet.tolerance", is_simulated, _NODES),
    Requirement(
        "fleet.tolerance",
        lambda run: any(group.tolerance is None for group in run.experiment.fleet.groups),
        "each of the groups has its own",
    ),
    Requirement("fleet.groups", is_simulated, _NODES),
    Requirement("fleet.slow", is_simulated, _NODES),
    Requirement("fleet.jitter", is_simulated, _NODES),
    Requirement("fleet.availability", is_simulated, _NODES),
    Requirement("fleet.links", is_simulated, _NODES),
    Requirement("fleet.drift", is_simulated, _NODES),
    Requirement("fleet.drift.low", has_jumps, "with jump = 0 no budget ever jumps"),
    Requirement("local.check_every", lambda run: run.experiment.local.patience, "there is no patience"),
    Requirement("cohort.late", lambda run: run.experiment.cohort.deadline_s, "there is no deadline_s"),
    Requirement("cohort.quorum", has_profiles, _EQUALLY_FAST),
    Requirement("cohort.over_selection", has_profiles, _EQUALLY_FAST),
    Requirement("attack.share", lambda run: run.experiment.attack.kind, "there is no kind of attack"),
    Requirement("attack.among", lambda run: run.experiment.attack.kind, "there is no kind of attack"),
    Requirement("engine.memory_format", has_image_layers, "the model has no convolutions"),
    Requirement("engine.features_bytes", lambda run: run.federation.problem.base, "nothing of the model is frozen"),
    Requirement(
        "engine.chosen", lambda run: run.experiment.engine.speed == "fast", 'with speed = "exact" nothing is chosen'
    ),
    Requirement(
        "evaluate.statistics_samples", lambda run: "static" in run.experiment.evaluate.norms, 'norms has no "static"'
    ),
)


_ROWS = frozenset(requirement.key for requirement in REQUIREMENTS)


def find_unused_keys(run: Assembly, experiment: Experiment) -> Iterator[UnusedKey]:
    """Yield the keys that differ from their default and have no effect.

    Args:
        run: The assembled run.
        experiment: The description from which it was assembled.
    """
    defaults = run.method.defaults
    unused: dict[str, str] = {}
    for requirement in REQUIREMENTS:
        keys = [key for key in find_set_keys(experiment, requirement.key, defaults) if key not in unused]
        if keys and not requirement.is_met(run):
            unused |= dict.fromkeys(keys, requirement.reason)
    unused |= _find_unused_parameters(experiment)
    for key, reason in find_unused_parts(run.federation.method_spec).items():
        if key == "method.plus.in_time" and "in_time" not in experiment.method.plus:
            key = "cohort.late"  # which brought the option along
        if key.startswith("method.") or list(find_set_keys(experiment, key, defaults)):
            unused[key] = reason
    yield from (UnusedKey(key, reason) for key, reason in unused.items())


def find_set_keys(experiment: Experiment, key: str, defaults: Mapping[str, Any]) -> Iterator[str]:
    """Yield the key if it differs from its default; of a section, all such keys in it that have no row of their own.

    Args:
        experiment: The run.
        key: Dotted.
        defaults: The method's own, by dotted key.
    """
    *path, name = key.split(".")
    section: Any = experiment
    for part in path:
        section = getattr(section, part, None)
    if not isinstance(section, Section):
        return
    value, default = getattr(section, name), defaults.get(key, _find_default(section, name))
    if not isinstance(default, Section):
        if not is_default(value, default):
            yield key
        return
    for inner in type(value).model_fields:
        if f"{key}.{inner}" not in _ROWS:
            yield from find_set_keys(experiment, f"{key}.{inner}", defaults)
    if isinstance(value, Open):
        yield from (f"{key}.{inner}" for inner in value.settings)


def _find_default(section: Section, name: str) -> Any:
    if isinstance(section, LocalSection):  # whose defaults are those of the optimiser
        return getattr(LocalSection(optimiser=section.optimiser), name)
    return type(section).model_fields[name].get_default(call_default_factory=True)


def _find_unused_parameters(experiment: Experiment) -> dict[str, str]:
    """Return the parameters of named functions that others switch off, by dotted key."""
    data, server, method, choose = experiment.data, experiment.data.server, experiment.method, experiment.cohort.choose
    named: list[tuple[str, str, Any, Mapping[str, Any]]] = [
        ("data", "data", data.name, data.settings),
        ("model", "models", experiment.model.name, experiment.model.settings),
        ("peft", "peft", experiment.peft.name, experiment.peft.settings),
        ("method", "methods", method.name, method.settings),
        *((f"method.plus.{name}", "options", name, settings) for name, settings in method.plus.items()),
        ("attack", "attacks", experiment.attack.kind, experiment.attack.settings),
        ("engine", "engines", experiment.engine.name, experiment.engine.settings),
    ]
    if server is not None:
        named.append(("data.server", "data", server.name, server.settings))
    if isinstance(choose, Mapping):
        own = {key: value for key, value in choose.items() if key != "name"}
        named.append(("cohort.choose", "selection", choose.get("name"), own))
    unused: dict[str, str] = {}
    for place, kind, name, settings in named:
        if settings and (isinstance(name, str) or callable(name)):
            factory, _ = find_function(kind, name)
            unused |= {f"{place}.{key}": reason for key, reason in find_unused_parameters(factory, settings).items()}
    if data.partition.kind in KINDS:
        rows = find_unused_parameters(KINDS[data.partition.kind], data.partition.settings)
        unused |= {f"data.partition.{key}": reason for key, reason in rows.items()}
    return unused
