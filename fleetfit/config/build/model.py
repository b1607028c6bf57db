"""`[model]` and `[peft]` become the problem: the architecture, as the method and the data need it."""

import inspect
from typing import Any

from fleetfit import names
from fleetfit.config.naming import build_component, check_architecture
from fleetfit.config.schema import Experiment
from fleetfit.data import Data
from fleetfit.errors import ConfigError
from fleetfit.method import is_portable
from fleetfit.tasks import task_named
from fleetfit.values import DataDescription, Problem, tuned


def build_problem(experiment: Experiment, data: Data | DataDescription) -> Problem:
    """Return the problem with the full model's last exit only; the method's levels say which exits there are."""
    section = experiment.model
    shape = data.sample_shape
    given = {"classes": data.classes, "channels": shape[0] if shape else 1, "input_shape": shape,
             "vocabulary": data.vocabulary, "padding": data.padding}  # fmt: skip
    spec = None
    if isinstance(section.name, str) or (callable(section.name) and not hasattr(section.name, "build")):
        _check_takes(section.name, shape, data)
        architecture = build_component("models", section.name, "[model]", section.settings, **given)
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


def _check_takes(name: Any, shape: tuple[int, ...], data: Data | DataDescription) -> None:
    """Refuse a built-in model for images where samples are none, before it fails somewhere inside.

    Raises:
        ConfigError: It is one.
    """
    if not isinstance(name, str) or ":" in name or data.vocabulary:
        return
    takes = inspect.signature(names.resolve("models", name)).parameters
    images = "channels" in takes or (name not in ("mlp", "mlp_2nn") and "input_shape" in takes)
    if images and len(shape) != 3:
        raise ConfigError(
            f"[model] {name} takes images [channels, height, width], and a sample of {data.name} is {list(shape)}. "
            'A model for rows of numbers: name = "mlp".'
        )
