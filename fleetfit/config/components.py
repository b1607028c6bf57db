"""Resolve names in an experiment to functions, check the keys of their sections, and call them."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from fleetfit import names
from fleetfit.config.schema import Experiment
from fleetfit.data import DataInMemory
from fleetfit.data.partition import KINDS
from fleetfit.errors import ConfigError, FleetFitError, truncate
from fleetfit.factories import call_factory


def find_function(kind: str, name: Any, where: str = "") -> tuple[Callable[..., Any], str]:
    """Return the function of a name (or the object in its place), and its label in messages.

    Args:
        kind: Kind of the name, as in `fleetfit.names.BUILT_IN`.
        name: The name, or an object.
        where: The section, for the key of an error, such as "[data] server".
    """
    if isinstance(name, DataInMemory):
        function, label = name.make, name.label
    elif callable(name):
        function, label = name, getattr(name, "__name__", type(name).__name__)
    else:
        key = "data.server.name" if where == "[data] server" else None
        function, label = names.resolve(kind, name, key), str(name)
        if isinstance(function, nn.Module):
            raise ConfigError(
                f"[model] {label} is a module that is made already, with weights that differ from process to process. "
                "Name a class, or a function that returns the module.",
                key="model.name",
            )
    return function, label


def is_factory(name: Any) -> bool:
    """Return whether a section's name takes its keys: text, data in memory, a function or a class, but no module."""
    return isinstance(name, str | DataInMemory) or (callable(name) and not isinstance(name, nn.Module))


def build_component(kind: str, name: Any, where: str, settings: Mapping[str, Any], **context: Any) -> Any:
    """Call the function of a name with the keys of its section.

    Args:
        kind: Kind of the name, as in `fleetfit.names.BUILT_IN`.
        name: The name, or an object that replaces it.
        where: The section in messages, such as "[data] server".
        settings: Keys of the section that belong to the function.
        **context: Further arguments, passed if the function takes them.
    """
    function, label = find_function(kind, name, where)
    try:
        return call_factory(function, label, where, settings, **context)
    except FleetFitError:
        raise
    except Exception as error:
        if kind != "models":
            raise
        raise ConfigError(f"{where} {label} {names.describe_failure(error)}.", key="model.name") from error


_UNLISTED = ("name", "partition", "server", "chosen")
"""Keys left out of "valid keys" hints."""


def check_keys(experiment: Experiment) -> None:
    """Check the free keys of model, data, engine, partition, metrics and callbacks without calling functions."""
    context = dict.fromkeys(("classes", "channels", "input_shape", "vocabulary", "padding"))
    sections: list[tuple[str, str, Any, dict[str, Any]]] = [
        ("engines", "[engine]", experiment.engine, {"simulation": None}),
        ("models", "[model]", experiment.model, context),
        ("peft", "[peft]", experiment.peft, {"architecture": None}),
        ("data", "[data]", experiment.data, {}),
        ("data", "[data] server", experiment.data.server or experiment.data, {}),
    ]
    for kind, where, section, further in sections:
        if is_factory(section.name):
            function, label = find_function(kind, section.name, where)
            field_names = [key for key in type(section).model_fields if key not in _UNLISTED]
            hidden = [key for key in type(section).model_fields if key in _UNLISTED and key != "chosen"]
            field_names += ["path"] if where == "[data]" else []
            if isinstance(section.name, DataInMemory):
                further = dict(section.name.values)
            call_factory(
                make_signature_stub(function), label, where, section.settings, own=field_names, hidden=hidden, **further
            )
        elif section.settings:
            key, section_name = next(iter(section.settings)), where.replace("[", "").replace("] ", ".").replace("]", "")
            raise ConfigError(
                f"{where} {key}: an object takes no keys. Set them on the object.",
                key=f"{section_name}.{key}",
            )
    _check_metrics(experiment.evaluate.metrics)
    for index, entry in enumerate(experiment.callbacks):
        _check_callback({"name": entry} if isinstance(entry, str) else dict(entry), f"callbacks.{index}")
    partition = experiment.data.partition
    if partition.kind in KINDS:
        further = {"data": None, "clients": None, "rng": None}
        function = make_signature_stub(KINDS[partition.kind])
        field_names = list(type(partition).model_fields)
        call_factory(function, partition.kind, "[data] partition", partition.settings, own=field_names, **further)


def _check_metrics(metrics: list[str]) -> None:
    for index, name in enumerate(metrics):
        if ":" not in name:
            raise ConfigError(
                f'[evaluate] metrics: "{truncate(name)}" is not a function. Name a function of outputs and labels, as '
                '"file.py:function" or "package.module:function".',
                key=f"evaluate.metrics.{index}",
            )
        names.resolve("metrics", name)
    functions = [name.rpartition(":")[2] for name in metrics]
    twice = next((name for name in functions if functions.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(
            f'[evaluate] metrics: two functions have the name "{truncate(twice)}". Rename one.',
            key="evaluate.metrics",
        )


def _check_callback(table: dict[str, Any], key: str) -> None:
    function, label = find_function("callbacks", table.pop("name"))
    first = next(iter(inspect.signature(function).parameters.values()), None)
    if (
        inspect.isfunction(function)
        and first is not None
        and first.default is inspect.Parameter.empty
        and first.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        and first.name not in ("report", *table)
    ):
        raise ConfigError(
            f'callbacks: {label} needs "{first.name}". A function to call after each round takes `report` first. Any '
            "other function makes a callback from its keys.",
            key=f"{key}.{first.name}",
        )
    call_factory(make_signature_stub(function), label, "callbacks:", table, report=None)


def make_signature_stub(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with the same signature that returns its arguments."""

    @functools.wraps(function)
    def stub(**values: Any) -> dict[str, Any]:
        return values

    return stub
