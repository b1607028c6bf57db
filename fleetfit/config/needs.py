"""What a method needs of a run, checked before anything is loaded."""

from fleetfit.config.schema import Experiment
from fleetfit.errors import ConfigError
from fleetfit.method import Method


def check_needs(experiment: Experiment, method: Method) -> None:
    """Check that the run has what its method needs, and tells the server nothing that it must not know.

    Raises:
        ConfigError: Budgets are told, or not, against the method; or the server has no data and trains.
    """
    name, told = experiment.method.name, experiment.fleet.told
    if told is False and method.told:
        raise ConfigError(
            f"[fleet] told: {name} needs the budgets that clients tell the server; adaptivefl does without. Leave told "
            "out, or choose another method."
        )
    if told and not method.told:
        raise ConfigError(f"[fleet] told: {name} never learns a budget; leave told out.")
    if method.own_data and experiment.data.server is None:
        raise ConfigError(
            f"[method] {name} trains on the server, on data without labels. Say on which: server = "
            '{ name = "cifar100" } in [data], or any set whose samples have the shape of the clients\'.'
        )
