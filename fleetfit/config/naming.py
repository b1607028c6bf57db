"""What the names in an experiment stand for: functions, found and called with a section's keys."""

import contextlib
import functools
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from torch import nn

from fleetfit import names
from fleetfit.config.schema import DataSection, Experiment, ServerDataSection
from fleetfit.data import Data
from fleetfit.data.partition import KINDS
from fleetfit.errors import ConfigError, FleetFitError, ModelError, truncate
from fleetfit.factories import call_factory
from fleetfit.layout import Architecture, check_described


def find_function(kind: str, name: Any) -> tuple[Callable[..., Any], str]:
    """Return the function of a name, or the object that stands for one, and what messages call it."""
    if callable(name):
        function, label = name, getattr(name, "__name__", type(name).__name__)
    else:
        function, label = names.resolve(kind, name), str(name)
    if kind == "models":
        _refuse_module(function, label)
    return function, label


def _refuse_module(found: Any, label: str) -> None:
    """Say how a bare module, or a class of modules, becomes an architecture."""
    kind = found if inspect.isclass(found) else type(found)
    if issubclass(kind, nn.Module):
        raise ConfigError(
            f"[model] {label} is a torch module, and FleetFit needs to build it at many sizes. Wrap it: write a class "
            'that inherits from fleetfit.Architecture, set axes (such as {"hidden": Axis(64)}) and blocks in it, and '
            f"return {kind.__name__}(...) of the sizes asked for from build(self, axes, exits). See docs/own-model.md."
        )


def build_component(kind: str, name: Any, where: str, values: Mapping[str, Any], **given: Any) -> Any:
    """Return what the function of a name returns for a section's keys."""
    function, label = find_function(kind, name)
    try:
        return call_factory(function, label, where, values, **given)
    except FleetFitError:
        raise
    except Exception as error:
        if kind != "models":
            raise
        raise ConfigError(f"{where} {label} {names.describe_failure(error)}.") from error


_BY_NAME_TOO = inspect.Parameter.POSITIONAL_OR_KEYWORD
_NO_HINT = ("name", "partition", "server", "chosen")
"""Keys of a section that nobody misses in a list of those that a name takes."""


def check_keys(experiment: Experiment) -> None:
    """Check the free keys of model, data set, engine and partition against their signatures, calling nothing."""
    given = dict.fromkeys(("classes", "channels", "input_shape", "vocabulary", "padding"))
    named: list[tuple[str, str, Any, dict[str, Any]]] = [
        ("engines", "[engine]", experiment.engine, {"simulation": None}),
        ("models", "[model]", experiment.model, given),
        ("peft", "[peft]", experiment.peft, {"architecture": None}),
        ("data", "[data]", experiment.data, {}),
        ("data", "[data] server", experiment.data.server or experiment.data, {}),
    ]
    for kind, where, section, known in named:
        if isinstance(section.name, str) or callable(section.name):
            function, label = find_function(kind, section.name)
            own = [key for key in type(section).model_fields if key not in _NO_HINT]
            unsaid = [key for key in type(section).model_fields if key in _NO_HINT and key != "chosen"]
            unsaid += ["path"] if where == "[data]" else []
            call_factory(make_signature_stub(function), label, where, section.settings, own=own, hidden=unsaid, **known)
        elif section.settings:
            raise ConfigError(
                f"{where} {next(iter(section.settings))}: an object takes no further keys; set them on the object."
            )
    _check_metrics(experiment.evaluate.metrics)
    for entry in experiment.callbacks:
        _check_callback({"name": entry} if isinstance(entry, str) else dict(entry))
    division = experiment.data.partition
    if division.kind in KINDS:
        known = {"data": None, "clients": None, "rng": None}
        function = make_signature_stub(KINDS[division.kind])
        own = list(type(division).model_fields)
        call_factory(function, division.kind, "[data] partition", division.settings, own=own, **known)


def _check_metrics(wanted: Sequence[str]) -> None:
    """Find the functions of metrics, calling nothing.

    Raises:
        ConfigError: One cannot be found, or two have one name.
    """
    for name in wanted:
        if ":" not in name:
            raise ConfigError(
                f'[evaluate] metrics: "{truncate(name)}" names no function; write "file.py:function" or '
                '"package.module:function", a function of outputs and labels.'
            )
        names.resolve("metrics", name)
    called = [name.rpartition(":")[2] for name in wanted]
    twice = next((name for name in called if called.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f'[evaluate] metrics: two functions are called "{truncate(twice)}"; give one another name.')


def _check_callback(table: dict[str, Any]) -> None:
    """Check the keys of one of `callbacks`, calling nothing.

    Raises:
        ConfigError: Its name or one of its keys does not fit.
    """
    function, label = find_function("callbacks", table.pop("name"))
    first = next(iter(inspect.signature(function).parameters.values()), None)
    needed = first is not None and first.default is inspect.Parameter.empty and first.kind is _BY_NAME_TOO
    if needed and inspect.isfunction(function) and first is not None and first.name not in ("report", *table):
        raise ConfigError(
            f'callbacks: {label} needs "{first.name}". A function that is called after each round takes `report` '
            "first; any other one makes a callback of its keys."
        )
    call_factory(make_signature_stub(function), label, "callbacks:", table, report=None)


def make_signature_stub(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what takes the same keys, and returns those that it is given."""

    @functools.wraps(function)
    def checked(**values: Any) -> dict[str, Any]:
        return values

    return checked


_MOST_SHARED = 2  # a run's data, and those of its server
_SHARED: ContextVar[dict[str, Data] | None] = ContextVar("shared", default=None)
"""Data sets by name and keys."""


@contextlib.contextmanager
def share_data() -> Iterator[None]:
    """Load data sets once for sections that say the same, and keep the last two: for several runs in a row."""
    token = _SHARED.set({})
    try:
        yield
    finally:
        _SHARED.reset(token)


def load_data(section: DataSection | ServerDataSection, where: str = "[data]", **settings: Any) -> Data:
    """Return the data set of a section, with further settings.

    Raises:
        FleetFitError: It cannot be had.
    """
    shared, key = _SHARED.get(), _key(section.name, section.settings | settings)
    if shared is None or key is None:
        return _loaded(section, where, settings)
    data = shared.pop(key) if key in shared else _loaded(section, where, settings)
    shared[key] = data  # the newest is the last
    while len(shared) > _MOST_SHARED:
        shared.pop(next(iter(shared)))
    return data


def _key(name: Any, settings: Mapping[str, Any]) -> str | None:
    """Return what says which data set it is, as text; None where objects stand for it."""
    try:
        return json.dumps([name, settings], sort_keys=True) if isinstance(name, str) else None
    except TypeError:
        return None


def _loaded(section: DataSection | ServerDataSection, where: str, settings: Mapping[str, Any]) -> Data:
    if isinstance(section.name, Data):
        return section.name
    if not isinstance(section.name, str) and not callable(section.name):
        raise ConfigError(f"data must be a name, a function or a fleetfit.Data, got {type(section.name).__name__}.")
    try:
        data = build_component("data", section.name, where, {**section.settings, **settings})
    except FleetFitError:
        raise
    except (OSError, ImportError) as error:
        raise ConfigError(f"{where} {section.name} failed: {error}") from error
    if not isinstance(data, Data):
        raise ConfigError(f"{where} {section.name} must return a fleetfit.Data, got {type(data).__name__}.")
    return data


def build_architecture(name: Any, settings: Mapping[str, Any], **given: Any) -> Architecture:
    """Return the architecture of a name, for `plan` and `check-model`."""
    architecture: Architecture = build_component("models", name, "[model]", settings, **given)
    check_architecture(architecture, name)
    return architecture


def check_architecture(found: Any, label: Any) -> None:
    """Refuse what is no architecture.

    Raises:
        ConfigError: It is none.
    """
    _refuse_module(found, f"what {label} returns")
    needed = ("axes", "blocks", "build", "sizes", "positions")
    missing = [a for a in needed if inspect.getattr_static(found, a, None) is None and not hasattr(found, a)]
    if missing:
        kind = type(found).__name__
        raise ConfigError(
            f'[model] {label} must give an Architecture; {kind} lacks "{missing[0]}". Inherit from '
            "fleetfit.Architecture, set axes and blocks, and write build(self, axes, exits)."
        )
    try:
        check_described(found)
    except ModelError as error:
        raise ConfigError(f"[model] {label}: {error}") from error
