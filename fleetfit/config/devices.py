"""What the simulated devices are, and what they tell the server of themselves."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from torch import Tensor

from fleetfit.config.availability import availability_of
from fleetfit.config.fleet import Fleet, ranges
from fleetfit.config.schema import DriftSection, Experiment
from fleetfit.config.speeds import speeds_of
from fleetfit.data import Data, class_counts
from fleetfit.errors import ConfigError
from fleetfit.values import Clients, Drift, Federation, Resources


def resources_of(experiment: Experiment, fleet: Fleet) -> Resources:
    """Return what the simulated devices afford, how fast they are, and when they are connected."""
    section, seed, drift = experiment.fleet, experiment.seed, experiment.fleet.drift
    moving = None if drift is None else _drift_of(drift)
    budgets = {fleet.cost: fleet.budgets, **fleet.further}
    speeds = speeds_of(section, fleet.group, seed)
    coming = availability_of(section.availability, len(fleet.budgets), seed)
    return Resources(budgets, fleet.tolerances, moving, fleet.conditions, seed, speeds, section.jitter, coming)


def _drift_of(section: DriftSection) -> Drift:
    """Return how budgets move; without jumps, how low they go says nothing."""
    return Drift(section.sd, section.jump, section.low) if section.jump else Drift(section.sd, 0.0)


def connected(resources: Resources) -> Callable[[int], np.ndarray] | None:
    """Return what tells the server who is connected in a round."""
    return None if resources.availability is None else resources.availability.online


def clients_of(experiment: Experiment, data: Data, parts: Sequence[Mapping[str, Tensor]], fleet: Fleet) -> Clients:
    """Return all that clients could tell the server, and whether they tell their classes.

    Raises:
        ConfigError: They are to tell classes, and the task has none.
    """
    counts, labels = np.array([len(part["train"]) for part in parts]), None
    if experiment.fleet.tells_labels:
        if data.task != "classification":
            raise ConfigError(
                f"[fleet] tells_labels: clients can tell how many samples of each class they have in a classification; "
                f"the task of {data.name} is {data.task}. Leave tells_labels out."
            )
        labels = class_counts(data, [dict(part) for part in parts]).numpy()
    return Clients(counts, fleet.budgets, fleet.tolerances, fleet.further, labels)


def absences_of(federation: Federation, resources: Resources) -> list[str]:
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
