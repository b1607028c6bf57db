"""Factories: functions whose signature is the schema of a section's keys.

`call_factory` calls one with the values of a configuration, checked against its signature.

Factories that differ in numbers only are presets of one, made from a table:

    SIZES = {
        "resnet20": Preset("ResNet-20: 9 blocks.", {"depth": 20}),
        "resnet32": Preset("ResNet-32: 15 blocks.", {"depth": 32}),
    }
    resnet20, resnet32 = make_presets(resnet, SIZES)

A factory declares which of its parameters the others leave without effect:

    @declare_unused("temperature", when=lambda values: values["beta"] == 0, reason="beta = 0 switches it off")
    def my_method(beta: float = 0.1, temperature: float = 3.0) -> Method: ...

A run notes or refuses such a parameter if it is set; see `fleetfit.config.requirements`.
"""

import functools
import inspect
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fleetfit.errors import ConfigError, did_you_mean, format_expected, truncate
from fleetfit.names import describe_failure, find_other_name, find_plug_in

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
_DECLARATIONS = "unused_parameters"  # the attribute of a factory
_SECTION = re.compile(r"\[([\w.]+)\](?: (\w+))?")  # such as "[method]" and "[cohort] selection"


# ---- calling ---------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def list_parameters(factory: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function or class by name."""
    return inspect.signature(factory).parameters


def bind_keys(
    factory: Callable[..., Any], name: str, section: str, values: Mapping[str, Any], own: Sequence[str] = (),
    hidden: Sequence[str] = (), **context: Any,
) -> dict[str, Any]:  # fmt: skip
    """Return the arguments for a factory: the values of a configuration, checked against its signature.

    Args:
        factory: Its signature is its schema.
        name: Its name in the configuration, for messages.
        section: The configuration section, for messages, such as "[method]".
        values: Keyword arguments from the configuration.
        own: Keys that the section has beside the factory's, for messages.
        hidden: Further ones, which a message does not list but may suggest.
        **context: Keyword arguments from FleetFit, passed only where the signature has them.

    Raises:
        ConfigError: An unknown key, a missing one, or a value of the wrong type. Its `key` is the section's and the
            parameter's name, such as "method.beta".
    """
    parameters = list_parameters(factory)
    is_open = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    keys = [key for key, p in parameters.items() if p.kind is not inspect.Parameter.VAR_KEYWORD and key not in context]
    arguments: dict[str, Any] = {}
    if not is_open and (unknown := [key for key in values if key not in keys]):
        takes = f"; it takes {', '.join((*own, *keys)) or 'nothing'}"
        reasons = [_describe_unknown_key(key, section, (*own, *keys), hidden, context, takes) for key in unknown]
        message = " ".join(f"{section} {name} {reason}" for reason in reasons)
        raise ConfigError(message.replace(takes, "", message.count(takes) - 1), key=_join_key(section, unknown[0]))
    for key, value in values.items():
        in_signature = key in parameters
        arguments[key] = _convert(value, factory, key, f"{section} {name}: {key}", section) if in_signature else value
    arguments |= {key: value for key, value in context.items() if key in parameters or is_open}
    missing = [
        key
        for key in keys
        if key not in arguments
        and parameters[key].default is inspect.Parameter.empty
        and parameters[key].kind is not inspect.Parameter.VAR_POSITIONAL
    ]
    if missing:
        quoted = ", ".join(f'"{key}"' for key in missing)
        lines = " and ".join(f"{key} = ..." for key in missing)
        raise ConfigError(
            f"{section} {name} needs {quoted}: write {lines} under {section}.", key=_join_key(section, missing[0])
        )
    return arguments


def call_factory(
    factory: Callable[..., Any], name: str, section: str, values: Mapping[str, Any], own: Sequence[str] = (),
    **context: Any,
) -> Any:  # fmt: skip
    """Call a factory with the arguments of `bind_keys`.

    Raises:
        ConfigError: As `bind_keys`, or the factory's own, whose `key` is completed by the section's.
    """
    arguments = bind_keys(factory, name, section, values, own, **context)
    try:
        return factory(**arguments)
    except ConfigError as error:
        if error.key in list_parameters(factory):  # as `check_range` names it
            error.key = _join_key(section, str(error.key))
        raise
    except SystemExit as error:  # which would end a run with exit code 0 and without a word
        raise ConfigError(f"{find_plug_in(error) or f'{section} {name}'} {describe_failure(error)}.") from error


def _describe_unknown_key(
    key: str, section: str, keys: Sequence[str], hidden: Sequence[str], context: Mapping[str, Any], takes: str
) -> str:
    """Return why a key cannot be set, and the closest name, which may be one that FleetFit passes."""
    remedy = f"{'The data give' if section == '[model]' else 'FleetFit passes'} it: leave it out."
    if key in context:
        return f'does not take "{key}" here. {remedy}'
    other = find_other_name(_join_key(section, key))
    outer, _, inner = other.partition(".")
    name = other.rpartition(".")[2]
    if inner and name not in keys and (outer != section.strip("[]").partition(".")[0] or "." in inner):
        return f'has no "{truncate(key)}". Did you mean [{outer}] {inner}?'
    hint = did_you_mean(name if name in keys else key, (*keys, *hidden, *context))
    if hint and hint == did_you_mean(key, context.keys() - {*keys}):
        hint += f" {remedy}"
    return f'has no "{truncate(key)}"{takes}.{hint}'


def _join_key(section: str, key: str) -> str:
    match = _SECTION.fullmatch(section)
    return ".".join(filter(None, [*(match.groups() if match else ()), key]))


def _convert(value: Any, factory: Callable[..., Any], parameter: str, label: str, section: str) -> Any:
    """Check one value against the annotation of its parameter; lists become tuples, whole numbers floats."""
    try:
        hint = typing.get_type_hints(factory).get(parameter, Any)
    except Exception:  # an annotation that cannot be evaluated outside its own module: nothing to check against
        return value
    if hint is Any or hint is inspect.Parameter.empty:
        as_default = list_parameters(factory).get(parameter)
        is_tuple = as_default is not None and isinstance(as_default.default, tuple)
        return tuple(value) if is_tuple and isinstance(value, list) else value
    import pydantic

    try:
        adapter = pydantic.TypeAdapter(hint, config=pydantic.ConfigDict(arbitrary_types_allowed=True))
    except pydantic.PydanticSchemaGenerationError:
        return value
    try:
        strict = isinstance(value, bool | str)  # "3" is not a number, and true is not 1
        return adapter.validate_python(value, strict=strict)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "literal_error":
            message = format_expected(first["ctx"]["expected"], first["input"])
        else:
            message = f"{first['msg'].lower()}, got {truncate(repr(value))}."
        raise ConfigError(f"{label}: {message}", key=_join_key(section, parameter)) from None


# ---- presets ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Preset:
    """A factory that is another one with some arguments fixed: one of several sizes of the same thing.

    Attributes:
        summary: What it is, in one line.
        fixed: The arguments that make it so; they are not among its keys.
        defaults: Defaults of its keys that differ from the general factory's.
    """

    summary: str
    fixed: Mapping[str, Any]
    defaults: Mapping[str, Any] = field(default_factory=dict)


def make_presets(factory: Callable[..., T], table: Mapping[str, Preset]) -> list[Callable[..., T]]:
    """Return the function of each preset, with the keys and defaults that are left for it.

    Args:
        factory: The general factory. Its module gives each function its preset's name.
        table: The presets by name.
    """
    return [_make_preset(factory, name, preset) for name, preset in table.items()]


def _make_preset(factory: Callable[..., T], name: str, preset: Preset) -> Callable[..., T]:
    parameters = [
        p.replace(default=preset.defaults.get(key, p.default))
        for key, p in list_parameters(factory).items()
        if key not in preset.fixed
    ]
    signature = inspect.signature(factory).replace(parameters=parameters)

    @functools.wraps(factory)
    def make(*values: Any, **keys: Any) -> T:
        return factory(**{**preset.fixed, **preset.defaults, **signature.bind(*values, **keys).arguments})

    make.__name__ = make.__qualname__ = name
    make.__doc__ = f"{preset.summary}\n\n`fleetfit list` describes the keys that are left open."
    make.__signature__ = signature  # type: ignore[attr-defined]
    make.preset = preset  # type: ignore[attr-defined]
    return make


# ---- parameters without effect ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UnusedParameters:
    """Parameters of a factory that have no effect under a condition.

    Attributes:
        names: The parameters.
        when: The condition, on the values of all parameters by name.
        task: The name of the only task in which they have no effect; None for all tasks.
        reason: Why they have no effect then.
    """

    names: tuple[str, ...]
    when: Callable[[Mapping[str, Any]], bool]
    task: str | None
    reason: str


def declare_unused(
    *names: str, when: Callable[[Mapping[str, Any]], bool] = lambda values: True, task: str | None = None, reason: str
) -> Callable[[F], F]:
    """Declare parameters of the decorated factory to have no effect under a condition.

    Args:
        *names: The parameters.
        when: The condition, on the values of all parameters by name, defaults included.
        task: The name of the only task in which they have no effect, such as "regression"; None for all tasks.
        reason: Why they have no effect then, such as "beta = 0 switches the distillation off".
    """

    def declare(factory: F) -> F:
        rows = (UnusedParameters(names, when, task, reason), *getattr(factory, _DECLARATIONS, ()))
        setattr(factory, _DECLARATIONS, rows)
        return factory

    return declare


def find_unused_parameters(factory: Callable[..., Any], values: Mapping[str, Any], task: str) -> dict[str, str]:
    """Return the parameters that differ from their default and have no effect, each with the reason.

    Args:
        factory: A function or class.
        values: The values that the user set, by parameter.
        task: The name of the run's task.
    """
    rows: tuple[UnusedParameters, ...] = getattr(factory, _DECLARATIONS, ())
    defaults = {name: p.default for name, p in list_parameters(factory).items()} if rows else {}
    complete = {**defaults, **values}
    return {
        name: row.reason
        for row in rows
        if row.task in (None, task) and row.when(complete)
        for name in row.names
        if name in values and not is_default(values[name], defaults.get(name))
    }


def is_default(value: Any, default: Any) -> bool:
    """Return whether a value of a run file equals a default; TOML has lists where Python has tuples."""
    value, default = (tuple(one) if isinstance(one, list) else one for one in (value, default))
    return bool(value == default)
