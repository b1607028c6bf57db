"""The record of a method's hooks, and how a spec becomes one: by name, with its options and single hooks."""

import dataclasses
import functools
import inspect
import json
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fleetfit import names, submodel
from fleetfit.errors import ConfigError, did_you_mean, truncate
from fleetfit.method import hooks
from fleetfit.method.functions import mentions
from fleetfit.values import Device, Federation, Job, Problem, Server, Update


@dataclass(frozen=True)
class Method:
    """A method: one function per hook, FedAvg's where it does not differ. docs/hooks.md says what each is for.

    Attributes:
        needs_budgets: Whether its levels need the budgets that clients report; without, the server never gets them.
        own_data: Whether the server trains, and so needs data of its own, `[data] server`.
        settles: The keys of `[local]` that its `adapt` sets whatever the run file says.
    """

    model: hooks.ModelHook = hooks.as_it_is
    levels: hooks.LevelsHook = hooks.full_level
    assign: hooks.AssignHook = hooks.own_level
    choose: hooks.ChooseHook = hooks.uniform
    channels: hooks.ChannelsHook = submodel.prefix
    dispatch: hooks.DispatchHook = hooks.cut_out
    adapt: hooks.AdaptHook = hooks.as_sent
    loss: hooks.LossHook = hooks.last_exit_loss
    penalty: hooks.PenaltyHook = hooks.no_penalty
    remember: hooks.RememberHook = hooks.nothing_new
    reply: hooks.ReplyHook = hooks.all_of_it
    receive: hooks.ReceiveHook = hooks.all_received
    note: hooks.NoteHook = hooks.nothing_noted
    weight: hooks.WeightHook = hooks.by_samples
    merge: hooks.MergeHook = hooks.coverage_mean
    step: hooks.StepHook = hooks.take_mean
    observe: hooks.ObserveHook = hooks.nothing_observed
    needs_budgets: bool = True
    own_data: bool = False
    settles: tuple[str, ...] = ()
    told: dataclasses.InitVar[bool | None] = None

    def __post_init__(self, told: bool | None) -> None:
        """Understand `told`, as `needs_budgets` was called."""
        if told is not None:
            warnings.warn("Method(told=...) is Method(needs_budgets=...) now.", DeprecationWarning, stacklevel=3)
            object.__setattr__(self, "needs_budgets", told)


HOOKS = tuple(f.name for f in dataclasses.fields(Method) if f.name not in ("needs_budgets", "own_data", "settles"))
FEDAVG = Method()

# built-in functions by hook, for `method.hooks.channels = "rolling"`
_CHOICES: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    "channels": {"prefix": submodel.prefix, "window": submodel.window, "rolling": submodel.rolling,
                 "random": submodel.random},
    "choose": {"uniform": hooks.uniform},
    "weight": {"by_samples": hooks.by_samples, "by_count": hooks.by_count},
}  # fmt: skip


def build(spec: Mapping[str, Any]) -> Method:
    """Build the method that a spec describes.

    Args:
        spec: Name, hyperparameters, `cohort` (how clients are chosen), `plus` (options) and `hooks` (single functions).

    Raises:
        ConfigError: Unknown names or hyperparameters, or a hook that two parts set without the spec saying whose wins.
    """
    if is_portable(spec):
        # options keep their order, in which they chain; the order of all else says nothing
        return _build_cached(json.dumps({key: spec[key] for key in sorted(spec)}))
    return build_anew(spec)


def rebuilt(spec: Mapping[str, Any]) -> Problem:
    """Build the problem that a spec describes, with what its method makes of the model."""
    return modelled(Problem.rebuilt(spec), spec.get("method", {}))


def modelled(problem: Problem, spec: Mapping[str, Any]) -> Problem:
    """Return the problem with what a method makes of the model.

    Args:
        problem: With the model as it is.
        spec: The method's.
    """
    change = build(spec).model
    if change is FEDAVG.model:
        return problem
    architecture = change(problem.architecture, problem.input_shape)
    own = None if problem.spec is None or not is_portable(spec) else {**problem.spec, "method": dict(spec)}
    return replace(problem, architecture=architecture, spec=own)


def is_portable(spec: Any) -> bool:
    """Tell whether another process can rebuild from a spec: plain values only."""
    try:
        json.dumps(spec)
    except TypeError:
        return False
    return True


@functools.lru_cache(maxsize=64)
def _build_cached(text: str) -> Method:
    return build_anew(json.loads(text))


def build_anew(spec: Mapping[str, Any]) -> Method:
    """Build the method that a spec describes, though one like it may have been built before."""
    values = {key: v for key, v in spec.items() if key not in ("name", "cohort", "plus", "hooks")}
    method = _made("methods", spec.get("name", "fedavg"), "[method]", values)
    single, plus, choice = spec.get("hooks", {}), spec.get("plus", {}), dict(spec.get("cohort", {}))
    if choice:
        name = choice.pop("name")
        method = _with_option(method, _made("selection", name, "[cohort] choose", choice), str(name), set(single))
    for name, settings in plus.items():
        option = _made("options", name, f"[method.plus.{name}]", settings)
        method = _with_option(method, option, name, set(single))
    named = {hook: _single_hook(hook, value) for hook, value in single.items()}
    return replace(method, **named)  # type: ignore[arg-type]  # hooks only, all of them functions


def _made(kind: str, name: Any, where: str, values: Mapping[str, Any]) -> Method:
    if isinstance(name, Method):
        return name
    factory = name if callable(name) else names.resolve(kind, name)
    label = getattr(name, "__name__", name)
    made = names.call(factory, str(label), where, values)
    if not isinstance(made, Method):
        raise ConfigError(f"{where} {label} must return a Method, got {type(made).__name__}.")
    return made


def _with_option(method: Method, option: Method, name: str, decided: set[str]) -> Method:
    """Join an option to a method: some hooks chain, penalties add up, any other may be set once."""
    changes: Any = {}
    for hook in HOOKS:
        ours, theirs, default = getattr(method, hook), getattr(option, hook), getattr(FEDAVG, hook)
        if theirs is default or theirs is ours:
            continue
        if ours is default:
            changes[hook] = theirs
        elif hook in _JOINED:
            changes[hook] = functools.partial(_JOINED[hook], ours, theirs)
        elif hook == "choose" and not mentions(method.assign, "choose"):
            raise ConfigError(
                f'[cohort] choose: "{truncate(name)}" would never be asked, since the method chooses clients in a '
                "way of "
                "its own; leave it out.",
                key="cohort.choose",
            )
        elif hook not in decided:
            raise ConfigError(
                f'both the method and "{name}" set hook "{hook}". Say whose wins with method.hooks.{hook} = '
                '"module:function".',
                key=f"method.hooks.{hook}",
            )
    needs, own_data = method.needs_budgets and option.needs_budgets, method.own_data or option.own_data
    return replace(
        method, needs_budgets=needs, own_data=own_data, settles=(*method.settles, *option.settles), **changes
    )


def _chained(
    first: Callable[..., Job | None], second: Callable[..., Job | None], job: Job, device: Device
) -> Job | None:
    changed = first(job, device)
    return None if changed is None else second(changed, device)


def _added(first: Callable[..., Any], second: Callable[..., Any], job: Job, device: Device) -> Any:
    parts = [p for p in (first(job, device), second(job, device)) if p is not None]
    if len(parts) < 2:
        return parts[0] if parts else None
    return lambda module: parts[0](module) + parts[1](module)


def _noted(first: Callable[..., Any], second: Callable[..., Any], *given: Any) -> Mapping[str, Any]:
    return {**first(*given), **second(*given)}


def _observed(
    first: Callable[..., Server], second: Callable[..., Server], federation: Federation, server: Server, *given: Any
) -> Server:
    return second(federation, first(federation, server, *given), *given)


def _received(
    first: Callable[..., Iterable[Update]], second: Callable[..., Iterable[Update]], federation: Federation,
    server: Server, updates: Iterable[Update],
) -> Iterable[Update]:  # fmt: skip
    return second(federation, server, iter(first(federation, server, updates)))


def _remembered(first: Callable[..., Any], second: Callable[..., Any], job: Job, device: Device, *given: Any) -> Any:
    return second(job, replace(device, memory=first(job, device, *given)), *given)


_JOINED: Mapping[str, Callable[..., Any]] = {
    "adapt": _chained, "penalty": _added, "remember": _remembered, "receive": _received, "note": _noted,
    "observe": _observed,
}  # fmt: skip


def _single_hook(hook: str, value: Any) -> Callable[..., Any]:
    if hook not in HOOKS:
        raise ConfigError(
            f'a method has no hook "{hook}"; it has {", ".join(HOOKS)}.{did_you_mean(hook, HOOKS)}',
            key=f"method.hooks.{hook}",
        )
    if callable(value):
        return value
    known = _CHOICES.get(hook, {})
    if isinstance(value, str) and value in known:
        return known[value]
    if isinstance(value, str) and ":" in value:
        return names.resolve("hooks", value)
    listed = f"one of {', '.join(known)}, or " if known else ""
    raise ConfigError(
        f'method.hooks.{hook} must be {listed}"module:function", got {truncate(repr(value))}.'
        f"{did_you_mean(str(value), known)}",
        key=f"method.hooks.{hook}",
    )


def hyperparameters(factory: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return a factory's hyperparameters: its signature."""
    return dict(inspect.signature(factory).parameters)
