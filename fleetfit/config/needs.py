"""What a method needs of a run, checked before anything is loaded."""

from fleetfit.config.schema import Experiment
from fleetfit.errors import ConfigError
from fleetfit.method import Method
from fleetfit.tuning.lora import B
from fleetfit.values import Problem


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


def check_fits(experiment: Experiment, problem: Problem) -> None:
    """Check that the model has what the options average.

    Raises:
        ConfigError: LoRA's products are to be averaged, and the model has none.
    """
    if "lora_product" in experiment.method.plus and not any(name.endswith(B) for name in problem.layout.tensors):
        raise ConfigError(
            f"[method.plus.lora_product] averages LoRA's products, and this model has no tensor {B}. Set "
            '[tuning] name = "lora", or leave the option out.'
        )
