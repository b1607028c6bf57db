"""Build the problem from `[model]` and `[peft]`: the architecture that the method and the data need."""

import inspect
from collections.abc import Mapping
from typing import Any

from fleetfit import names
from fleetfit.config.components import build_component, check_not_module
from fleetfit.config.schema import Experiment
from fleetfit.data import Data
from fleetfit.errors import ConfigError, ModelError
from fleetfit.layout import Architecture, validate_architecture
from fleetfit.method import is_portable
from fleetfit.tasks import get_task
from fleetfit.values import DataDescription, Problem, apply_peft


def build_problem(experiment: Experiment, data: Data | DataDescription) -> Problem:
    """Return the problem with the full model's last exit only; the method's levels determine the exits."""
    section = experiment.model
    shape = data.sample_shape
    context = {"classes": data.classes, "channels": shape[0] if shape else 1, "input_shape": shape,
               "vocabulary": data.vocabulary, "padding": data.padding}  # fmt: skip
    spec = None
    if isinstance(section.name, str) or (callable(section.name) and not hasattr(section.name, "build")):
        _check_sample_shape(section.name, data)
        architecture = build_component("models", section.name, "[model]", section.settings, **context)
        model = {"name": section.name, **section.settings}
        spec = {"model": model, "given": {**context, "input_shape": list(shape)}, "task": data.task, "exits": []}
    else:
        architecture = section.name
    check_architecture(architecture, section.name if spec else type(architecture).__name__)
    peft = {"name": experiment.peft.name, **experiment.peft.settings}
    architecture = apply_peft(architecture, peft)
    spec = None if spec is None else {**spec, "peft": peft}
    return Problem(
        architecture,
        shape,
        get_task(data.task),
        (architecture.blocks,),
        start=experiment.start,
        spec=spec if is_portable(spec) else None,
    )


def _check_sample_shape(name: Any, data: Data | DataDescription) -> None:
    """Refuse a built-in image model for samples that are not images, before it is built."""
    if not isinstance(name, str) or ":" in name or data.vocabulary:
        return
    parameters = inspect.signature(names.resolve("models", name)).parameters
    takes_images = "channels" in parameters or (name not in ("mlp", "mlp_2nn") and "input_shape" in parameters)
    if takes_images and len(data.sample_shape) != 3:
        raise ConfigError(
            f"[model] {name} takes images [channels, height, width], but a sample of {data.name} is "
            f'{list(data.sample_shape)}. For rows of numbers, set name = "mlp".',
            key="model.name",
        )


def build_architecture(name: Any, settings: Mapping[str, Any], **context: Any) -> Architecture:
    """Return the architecture of a name, for `plan` and `check-model`."""
    architecture: Architecture = build_component("models", name, "[model]", settings, **context)
    check_architecture(architecture, name)
    return architecture


def check_architecture(architecture: Any, label: Any) -> None:
    """Refuse an object that lacks a part of the protocol `Architecture`."""
    check_not_module(architecture, f"the result of {label}")
    members = ("axes", "blocks", "build", "sizes", "positions")
    for name in members:
        if inspect.getattr_static(architecture, name, None) is None and not hasattr(architecture, name):
            raise ConfigError(
                f'[model] {label} must return an Architecture, but {type(architecture).__name__} lacks "{name}". '
                "Inherit from fleetfit.Architecture, set axes and blocks, and write build(self, axes, exits).",
                key="model.name",
            )
    try:
        validate_architecture(architecture)
    except ModelError as error:
        raise ConfigError(f"[model] {label}: {error}", key=error.key or "model.name") from error


def describe_task(problem: Problem) -> list[str]:
    """Name the measure that replaces accuracy in this task, if any."""
    measure = problem.task.measure
    return [] if measure == "accuracy" else [f"Accuracy here is {measure}."]
