"""Build the spec of the method from `[method]` and `[cohort] selection`, and check its requirements."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from fleetfit.config.keys import replace_key
from fleetfit.config.schema import Experiment
from fleetfit.core import DataDescription, Federation, Problem
from fleetfit.data import Data
from fleetfit.errors import ConfigError
from fleetfit.hooks import Method, build, find_replaced_parameters
from fleetfit.hooks.fedavg import get_round_submodel, keep_prefix
from fleetfit.hooks.level_tensors import has_level_tensors
from fleetfit.options import krum, outliers, trimmed_mean
from fleetfit.peft.lora import B


def build_method_spec(experiment: Experiment) -> dict[str, Any]:
    """Return the spec of a run's method; see `fleetfit.hooks.build`.

    Raises:
        ConfigError: The same hook is set twice.
    """
    section, choose = experiment.method, experiment.cohort.selection
    choice = dict(choose) if isinstance(choose, Mapping) else {"name": choose}
    spec = {"name": section.name, **section.settings}
    if choice != {"name": "uniform"}:
        if "choose_clients" in section.hooks:
            raise ConfigError(
                "cohort.selection and method.hooks.choose_clients set the same hook. Leave one out.",
                key="cohort.selection",
            )
        spec["cohort"] = choice
    options = section.options
    if experiment.cohort.deadline_s is not None and experiment.cohort.on_deadline == "shallower":
        options = {**options, "in_time": {}}
    return spec | ({"options": options} if options else {}) | ({"hooks": section.hooks} if section.hooks else {})


def choose_for_task(experiment: Experiment, data: Data | DataDescription) -> Experiment:
    """Return the experiment with the method's defaults for the task of the data, unless the file sets them."""
    section = experiment.method
    are_tokens = data.task == "next_token" or 0 < data.vocabulary <= 2 * data.classes  # labels may lack some tokens
    if isinstance(section.name, Method):
        return experiment
    spec = build_method_spec(experiment)
    defaults = build(spec).task_defaults.get("tokens" if are_tokens else data.task, {})
    open_keys = {key for key in defaults if f"method.{key}" not in experiment.request.decided}
    open_keys -= find_replaced_parameters({key: value for key, value in spec.items() if key not in open_keys})
    for key in open_keys:
        experiment = replace_key(experiment, f"method.{key}", defaults[key])
    return experiment


def check_needs(experiment: Experiment, method: Method) -> None:
    """Check the method's requirements before data are loaded.

    Raises:
        ConfigError: `reports_budget` contradicts the method, or the server trains without data.
    """
    name, reports = experiment.method.name, experiment.fleet.reports_budget
    if reports is False and method.needs_budgets:
        raise ConfigError(
            f"[fleet] reports_budget: {name} needs the budgets of the clients. Leave reports_budget out, or choose "
            "adaptivefl, which does not need them.",
            key="fleet.reports_budget",
        )
    if reports and not method.needs_budgets:
        raise ConfigError(
            f"[fleet] reports_budget: {name} does not use budgets. Leave reports_budget out.",
            key="fleet.reports_budget",
        )
    if method.needs_server_data and experiment.data.server is None:
        raise ConfigError(
            f"[method] {name} trains on unlabeled data on the server. Set server = "
            '{ name = "cifar100" } in [data], or another set whose samples have the clients\' shape.',
            key="data.server",
        )


def check_model(experiment: Experiment, problem: Problem) -> None:
    """Check that the model has the tensors that the method's options average.

    Raises:
        ConfigError: `lora_product` averages LoRA's products, and the model has none.
    """
    if "lora_product" in experiment.method.options and not any(name.endswith(B) for name in problem.layout.tensors):
        raise ConfigError(
            f"[method.options.lora_product] averages products of LoRA, but this model has no tensor {B}. Set [peft] "
            "name "
            '= "lora", or leave the option out.',
            key="peft.name",
        )


def describe_class_prior(federation: Federation, experiment: Experiment) -> list[str]:
    """Return a note where a class prior is off, or relative to a uniform one."""
    if not federation.method.needs_prior:
        return []
    if not federation.classes:
        return [f"The class prior is off: a task of the kind {federation.problem.task.name} has no classes."]
    if experiment.is_private:
        return ["The class prior is relative to a uniform one: with [privacy] no client reports its frequencies."]
    return []


COMPARING: dict[str, Callable[..., bool]] = {
    "outliers": outliers.is_large_enough,
    "krum": krum.is_large_enough,
    "trimmed_mean": trimmed_mean.is_large_enough,
}
"""Options that compare the updates of a round, each with a check of the number of updates."""
_MAX_CLIENTS = 10_000  # tried sizes when looking for the smallest cohort
_MAX_DRAWS = 4  # clients of a level, and rounds: with few channels two draws may coincide


def check_level_tensors(federation: Federation) -> None:
    """Check that each level with tensors of its own has one set of channels.

    Raises:
        ConfigError: Its clients train other channels, which would be averaged by their position.
    """
    if has_level_tensors(federation) and federation.method.choose_channels is not keep_prefix:
        raise ConfigError(
            "a method that keeps tensors for each level sends and averages them by position, so that each level has "
            'the same channels in all rounds. Leave method.hooks.choose_channels out, or set it to "prefix".',
            key="method.hooks.choose_channels",
        )


def check_comparable(experiment: Experiment, federation: Federation, updates: int) -> None:
    """Check the requirements of options that compare updates.

    Args:
        experiment: The run.
        federation: The server's view.
        updates: Number of updates that ends a round.

    Raises:
        ConfigError: They are too few, or clients of one level do not train the same elements.
    """
    for option in sorted(experiment.method.options.keys() & COMPARING.keys()):
        where, key = f"[method.options.{option}]", f"method.options.{option}"
        is_enough = partial(COMPARING[option], **experiment.method.options[option])
        if not is_enough(updates):
            fewest = next((n for n in range(updates, _MAX_CLIENTS) if is_enough(n)), _MAX_CLIENTS)
            raise ConfigError(
                f"{where} compares the updates of a round, which needs at least {fewest} with these keys, got "
                f"{updates}. Raise cohort.count or cohort.quorum, or leave the option out.",
                key=key,
            )
        if "dispatch" in federation.method.own_hooks:
            raise ConfigError(
                f"{where} compares updates of the same elements, but {experiment.method.name} sends each level its "
                "own tensors. Leave the option out, or choose another method.",
                key=key,
            )
        for level in range(len(federation.levels)):
            clients = np.flatnonzero(federation.level_of == level)[:_MAX_DRAWS].tolist()
            rounds = ({get_round_submodel(federation, r, client) for client in clients} for r in range(_MAX_DRAWS))
            if any(len(submodels) > 1 for submodels in rounds):
                raise ConfigError(
                    f"{where} compares clients that train the same channels, but here each client gets its own "
                    'channels. Set method.hooks.choose_channels = "prefix" or "rolling", or leave the option out.',
                    key="method.hooks.choose_channels",
                )
