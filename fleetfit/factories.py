"""Factories declare parameters that have no effect under a condition.

    @declare_unused("temperature", when=lambda values: values["beta"] == 0, reason="beta = 0 switches it off")
    def my_method(beta: float = 0.1, temperature: float = 3.0) -> Method: ...

A run notes or refuses such a parameter if it is set; see `fleetfit.config.requirements`.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
_ATTRIBUTE = "unused_parameters"


@dataclass(frozen=True)
class UnusedParameters:
    """Parameters of a factory that have no effect under a condition.

    Attributes:
        names: The parameters.
        when: The condition, on the values of all parameters by name.
        reason: Why they have no effect then.
    """

    names: tuple[str, ...]
    when: Callable[[Mapping[str, Any]], bool]
    reason: str


def declare_unused(*names: str, when: Callable[[Mapping[str, Any]], bool], reason: str) -> Callable[[F], F]:
    """Declare parameters of the decorated factory to have no effect under a condition.

    Args:
        *names: The parameters.
        when: The condition, on the values of all parameters by name, defaults included.
        reason: Why they have no effect then, such as "beta = 0 switches the distillation off".
    """

    def declare(factory: F) -> F:
        rows = (UnusedParameters(names, when, reason), *getattr(factory, _ATTRIBUTE, ()))
        setattr(factory, _ATTRIBUTE, rows)
        return factory

    return declare


def copy_declarations(source: Callable[..., Any], target: Callable[..., Any]) -> None:
    """Copy the declarations of a factory to one that is made from it."""
    setattr(target, _ATTRIBUTE, getattr(source, _ATTRIBUTE, ()))


def find_unused_parameters(factory: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, str]:
    """Return the parameters that differ from their default and have no effect, each with the reason.

    Args:
        factory: A function or class.
        values: The values that the user set, by parameter.
    """
    rows: tuple[UnusedParameters, ...] = getattr(factory, _ATTRIBUTE, ())
    defaults = {name: p.default for name, p in inspect.signature(factory).parameters.items()} if rows else {}
    complete = {**defaults, **values}
    return {
        name: row.reason
        for row in rows
        if row.when(complete)
        for name in row.names
        if name in values and not is_default(values[name], defaults.get(name))
    }


def is_default(value: Any, default: Any) -> bool:
    """Return whether a value of a run file equals a default; TOML has lists where Python has tuples."""
    value, default = (tuple(one) if isinstance(one, list) else one for one in (value, default))
    return bool(value == default)
