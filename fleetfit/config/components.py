"""The components that an experiment names: list them, resolve their names, check their keys, and call them."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn

from fleetfit import names
from fleetfit.config.keys import get_value
from fleetfit.config.schema import Experiment
from fleetfit.core.section import OpenSection
from fleetfit.data import DataInMemory
from fleetfit.errors import ConfigError, FleetFitError, truncate
from fleetfit.factories import bind_keys, call_factory, list_parameters


class Component(NamedTuple):
    """A component that an experiment names.

    Attributes:
        kind: One of `fleetfit.names.KINDS`.
        key: Dotted key of the name.
        path: Dotted key of the table with its settings.
        name: The name, or an object in its place.
        settings: Its own keys.
        fields: Further keys of the table.
    """

    kind: str
    key: str
    path: str
    name: Any
    settings: Mapping[str, Any] = {}
    fields: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """The table in messages, such as "[data] server"."""
        section, _, inner = self.path.partition(".")
        return "callbacks:" if section == "callbacks" else f"[{section}] {inner}".rstrip()


def list_components(experiment: Experiment) -> Iterator[Component]:
    """Yield the components of an experiment. Of partitions, only the built-in kinds have keys to check."""
    for kind, row in names.KINDS.items():
        for key in row.keys:
            path, _, last = key.rpartition(".")
            section, value = get_value(experiment, path), get_value(experiment, key)
            if isinstance(section, OpenSection) and last in ("name", "kind"):
                if not ((kind == "attacks" and value is None) or (kind == "partitions" and ":" in value)):
                    yield Component(kind, key, path, value, section.settings, tuple(type(section).model_fields))
            elif kind in ("options", "hooks"):
                for name, inner in (value or {}).items():
                    own = f"{key}.{name}"
                    yield Component(kind, own, own, *((name, inner) if kind == "options" else (inner,)))
            elif isinstance(value, list):
                yield from (_read_entry(kind, f"{key}.{index}", entry) for index, entry in enumerate(value))
            elif value is not None:
                yield _read_entry(kind, key, value)


def _read_entry(kind: str, key: str, entry: Any) -> Component:
    """Return the component of a name, or of a table with a name and keys."""
    if not isinstance(entry, Mapping):
        return Component(kind, key, key, entry)
    settings = {name: value for name, value in entry.items() if name != "name"}
    return Component(kind, f"{key}.name", key, entry.get("name"), settings)


def find_function(kind: str, name: Any, where: str = "") -> tuple[Callable[..., Any], str]:
    """Return the function of a name (or the object in its place), and its label in messages.

    Args:
        kind: Kind of the name, as in `fleetfit.names.KINDS`.
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
        kind: Kind of the name, as in `fleetfit.names.KINDS`.
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


_HIDDEN = ("name", "partition", "server", "transform")
"""Keys left out of "valid keys" hints, but suggested."""
_CHECKED_ELSEWHERE = ("methods", "options", "hooks", "selection", "attacks")
"""Kinds that a run builds before it loads data."""


def check_keys(experiment: Experiment) -> None:
    """Check the free keys of model, data, engine, partition, metrics and callbacks without calling functions."""
    for one in list_components(experiment):
        if one.kind in _CHECKED_ELSEWHERE or one.kind == "metrics":
            continue
        if one.kind == "callbacks":
            _check_report(one)
        if is_factory(one.name):
            function, label = find_function(one.kind, one.name, one.where)
            in_memory = isinstance(one.name, DataInMemory)
            context = dict(one.name.values) if in_memory else dict.fromkeys(names.KINDS[one.kind].context)
            own = [key for key in one.fields if key not in _HIDDEN] + ["path"] * (one.path == "data")
            hidden = [key for key in one.fields if key in _HIDDEN]
            bind_keys(function, label, one.where, one.settings, own, hidden, **context)
        elif one.settings:
            key = next(iter(one.settings))
            raise ConfigError(
                f"{one.where} {key}: an object takes no keys. Set them on the object.", key=f"{one.path}.{key}"
            )
    _check_metrics(experiment.evaluate.metrics)


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


def _check_report(callback: Component) -> None:
    """Refuse a function that is neither called with a report nor makes a callback from its keys."""
    function, label = find_function("callbacks", callback.name)
    first = next(iter(list_parameters(function).values()), None)
    if (
        inspect.isfunction(function)
        and first is not None
        and first.default is inspect.Parameter.empty
        and first.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        and first.name not in ("report", *callback.settings)
    ):
        raise ConfigError(
            f'callbacks: {label} needs "{first.name}". A function to call after each round takes `report` first. Any '
            "other function makes a callback from its keys.",
            key=f"{callback.path}.{first.name}",
        )
