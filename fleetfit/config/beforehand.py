"""The levels of a run before there are data: for a device that wants to know what each of them would cost it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fleetfit.config.assembly import Planned, divided, planned, settings_of, spec_of_method
from fleetfit.config.fleet import counted_piece, fleet_of
from fleetfit.config.naming import check_keys, load_data
from fleetfit.config.needs import check_needs
from fleetfit.config.schema import CLIENTS, Experiment
from fleetfit.cost import cost_of, training_memory
from fleetfit.data import Data
from fleetfit.errors import ConfigError, DataError, MissingExtra
from fleetfit.method import build
from fleetfit.submodel import Submodel
from fleetfit.values import Facts, Level, Local


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
    facts: Data | Facts
    found: Planned
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
        return training_memory(problem.architecture, sizes, piece.exits, problem.input_shape, self.batch_size)


def beforehand(experiment: Experiment, facts: Facts | None = None) -> Beforehand:
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
        experiment, data, method_spec, lambda p: fleet_of(experiment.fleet, p, clients, experiment.seed, size), base={}
    )
    return Beforehand(experiment, data, found, method_spec, settings_of(experiment).local, size)


def _loaded(experiment: Experiment) -> Data:
    try:
        return load_data(experiment.data)
    except (DataError, MissingExtra) as error:
        raise DataError(
            f"{error} To go without the run's data, say what a sample is: --input-shape 3,32,32 --classes 10."
        ) from None
