"""A table of the conditions under which keys of a run file have an effect.

If a key is set and its condition is false, the run gets a note; with `--set` or a keyword the key is refused. Factories
declare such conditions for their parameters (`fleetfit.factories`). Methods declare the hooks that they replace and the
keys that they set (`fleetfit.hooks.Method`).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fleetfit.config.assemble.engine import build_level
from fleetfit.config.assembly import Assembly, UnusedKey
from fleetfit.config.components import find_function, is_factory, list_components
from fleetfit.config.keys import get_value
from fleetfit.config.load import fill_in_parameters
from fleetfit.config.parse import parse_experiment
from fleetfit.config.schema import Experiment
from fleetfit.core.local import LocalSection
from fleetfit.core.section import OpenSection, Section
from fleetfit.factories import find_unused_parameters, is_default
from fleetfit.hooks import find_unused_parts
from fleetfit.training.runtime import has_convolutions


@dataclass(frozen=True)
class Requirement:
    """A condition under which a key has an effect.

    Attributes:
        key: Dotted. The key of a section covers its keys without a row of their own.
        is_met: Whether an assembled run uses the key.
        reason: Why the key has no effect if the condition is false.
    """

    key: str
    is_met: Callable[[Assembly], Any]
    reason: str


def is_simulated(run: Assembly) -> bool:
    """Return whether clients are simulated. Nodes of a fleet have their own data and resources."""
    return run.simulation is not None


def has_profiles(run: Assembly) -> bool:
    """Return whether clients differ in speed, as nodes of a fleet do."""
    return run.simulation is None or bool(run.simulation.resources.speeds)


def takes_levels(run: Assembly) -> bool:
    """Return whether the method's levels follow the targets of `[fleet] levels`."""
    return run.method.needs_budgets and "make_levels" in run.method.own_hooks


def has_jumps(run: Assembly) -> bool:
    """Return whether budgets jump."""
    drift = run.experiment.fleet.drift
    return drift is not None and drift.jump > 0


def has_earlier_evaluations(run: Assembly) -> bool:
    """Return whether rounds before the last one are evaluated."""
    return 0 < run.settings.evaluate_every < run.settings.rounds


def has_memory_format(run: Assembly) -> bool:
    """Return whether the format of images changes something: a level has convolutions, or PyTorch's own is set."""
    if run.experiment.engine.memory_format != "channels_last":
        return True
    problem = run.federation.problem
    return any(has_convolutions(build_level(problem, level)) for level in run.federation.levels)


_NODES = "on a fleet the nodes have their own"
_EQUALLY_FAST = "no group has a profile, so all clients are equally fast"

REQUIREMENTS = (
    Requirement(
        "data.server", lambda run: run.method.needs_server_data, "the server only trains in methods such as feddf"
    ),
    Requirement("data.transform", lambda run: True, ""),  # holds for nodes, too
    Requirement("data", is_simulated, _NODES),
    Requirement("fleet.levels", takes_levels, "the method has levels of its own"),
    Requirement("fleet.scaling", takes_levels, "the method has levels of its own"),
    Requirement("fleet.tolerance", is_simulated, _NODES),
    Requirement(
        "fleet.tolerance",
        lambda run: any(group.tolerance is None for group in run.experiment.fleet.groups),
        "each of the groups has its own",
    ),
    *(
        Requirement(f"fleet.{key}", is_simulated, _NODES)
        for key in ("slow", "jitter", "availability", "links", "drift")
    ),
    Requirement("fleet.drift.low", has_jumps, "with jump = 0 no budget ever jumps"),
    Requirement("local.check_every", lambda run: run.experiment.local.patience, "patience is not set"),
    Requirement("cohort.on_deadline", lambda run: run.experiment.cohort.deadline_s, "deadline_s is not set"),
    Requirement("cohort.quorum", has_profiles, _EQUALLY_FAST),
    Requirement("cohort.over_selection", has_profiles, _EQUALLY_FAST),
    Requirement("attack.fraction", lambda run: run.experiment.attack.kind, "no attack is set"),
    Requirement("attack.among", lambda run: run.experiment.attack.kind, "no attack is set"),
    Requirement("engine.memory_format", has_memory_format, "the model has no convolutions"),
    Requirement(
        "engine.feature_cache_bytes", lambda run: run.federation.problem.base, "no part of the model is frozen"
    ),
    Requirement(
        "evaluate.personal",
        lambda run: run.settings.privacy is None,
        "with [privacy] the accuracy of clients is withheld",
    ),
    Requirement("evaluate.patience", has_earlier_evaluations, "only the last round is evaluated"),
    Requirement(
        "evaluate.patience",
        lambda run: run.settings.privacy is None,
        "with [privacy] the accuracy of clients is withheld",
    ),
    Requirement("evaluate.between", has_earlier_evaluations, "only the last round is evaluated"),
    Requirement(
        "evaluate.between.samples", lambda run: run.settings.scope.always, "only the last evaluation has the test set"
    ),
    Requirement("evaluate.samples", is_simulated, "on a fleet the server has no test set"),
    Requirement(
        "evaluate.statistics_samples",
        lambda run: "static" in run.experiment.evaluate.batch_norm,
        'batch_norm has no "static"',
    ),
)


_ROWS = frozenset(requirement.key for requirement in REQUIREMENTS)


def find_unused_keys(run: Assembly, experiment: Experiment) -> Iterator[UnusedKey]:
    """Yield the keys that differ from their default and have no effect.

    Args:
        run: The assembled run.
        experiment: The experiment before the run recorded measured and chosen values.
    """
    defaults = run.method.defaults
    unused: dict[str, str] = {}
    for requirement in REQUIREMENTS:
        keys = [key for key in find_set_keys(experiment, requirement.key, defaults) if key not in unused]
        if keys and not requirement.is_met(run):
            unused |= dict.fromkeys(keys, requirement.reason)
    unused |= _find_unused_parameters(experiment, run.federation.problem.task.name)
    for key, reason in find_unused_parts(run.federation.method_spec).items():
        if key == "method.options.in_time" and "in_time" not in experiment.method.options:
            key = "cohort.on_deadline"  # the key that adds the option
        if key.startswith("method.") or list(find_set_keys(experiment, key, defaults)):
            unused[key] = reason
    if not is_simulated(run):  # defaults of the data that stand in a run file without [data]
        data = {"name": experiment.data.name, "partition": {"kind": experiment.data.partition.kind}}
        default = fill_in_parameters(parse_experiment({"seed": experiment.seed, "data": data}))
        unused = {k: v for k, v in unused.items() if v != _NODES or get_value(experiment, k) != get_value(default, k)}
    yield from (UnusedKey(key, reason) for key, reason in unused.items())


def find_set_keys(experiment: Experiment, key: str, defaults: Mapping[str, Any]) -> Iterator[str]:
    """Yield the key if it differs from its default; for a section, its keys that do and have no row of their own.

    Args:
        experiment: The run.
        key: Dotted.
        defaults: Defaults that the method declares, by dotted key.
    """
    path, _, name = key.rpartition(".")
    section = get_value(experiment, path)
    if not isinstance(section, Section):
        return
    if key in defaults:
        default = defaults[key]
    elif isinstance(section, LocalSection):  # their defaults depend on the optimizer
        default = getattr(LocalSection(optimizer=section.optimizer), name)
    else:
        default = type(section).model_fields[name].get_default(call_default_factory=True)
    value = getattr(section, name)
    if not isinstance(default, Section):
        if not is_default(value, default):
            yield key
        return
    for inner in type(value).model_fields:
        if f"{key}.{inner}" not in _ROWS:
            yield from find_set_keys(experiment, f"{key}.{inner}", defaults)
    if isinstance(value, OpenSection):
        yield from (f"{key}.{inner}" for inner in value.settings)


def _find_unused_parameters(experiment: Experiment, task: str) -> dict[str, str]:
    """Return the parameters of named functions that have no effect because of others or the task, by dotted key."""
    unused: dict[str, str] = {}
    for one in list_components(experiment):
        if one.settings and is_factory(one.name):
            rows = find_unused_parameters(find_function(one.kind, one.name)[0], one.settings, task)
            unused |= {f"{one.path}.{key}": reason for key, reason in rows.items()}
    return unused
