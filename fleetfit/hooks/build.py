"""The record of a method's hooks, and how a spec becomes one: by name, with its options and single hooks."""

import contextlib
import dataclasses
import functools
import inspect
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fleetfit import names
from fleetfit.core import Device, Federation, Job, Problem, Server, Update
from fleetfit.errors import ConfigError, FleetFitError, did_you_mean, truncate
from fleetfit.factories import call_factory, is_default
from fleetfit.hooks import fedavg
from fleetfit.submodel import Submodel, random, rolling, window

CALLED_BY: Mapping[str, str] = {"choose": "assign", "channels": "assign", "weight": "aggregate"}
"""Hooks that another hook calls, and which one; rounds call all others."""


@dataclass(frozen=True)
class Method:
    """A method: one function per hook, FedAvg's where it does not differ. docs/hooks.md says what each is for.

    Attributes:
        needs_budgets: Whether its levels need the budgets that clients report; without, the server never gets them.
        own_data: Whether the server trains, and so needs data of its own, `[data] server`.
        needs_prior: Whether training jobs carry the fleet's class frequencies, `job.prior`. The server asks up to 1,000
            clients for them before the first round; with `[privacy]` it does not, and the prior is empty.
        settles: Keys of the run file that the method sets itself, whatever the file says: of `[local]`, such as
            "epochs", which its `adapt` sets, or dotted, such as "fleet.levels", which its `levels` does not look at.
        replaces: Hooks that the method never calls: "choose" and "channels" where its `assign` takes clients or
            channels in another way, "weight" where its `aggregate` does not weigh.
        defaults: The method's own defaults of keys of the run file, dotted: `{"local.optimiser": "adam"}`. A key of the
            file, an override or a keyword wins over them.
        token_defaults: The method's own defaults of its hyperparameters where classes are tokens: `{"tau": 0.0}`.
        gives_way: Hooks that an option may set in the method's place, each with the hyperparameter of the method that
            makes it: `{"step": "momentum"}`. With that hyperparameter set, both at once are refused.
        declare_extra: Returns names and shapes of tensors beside the state, for the sub-model that is sent, as
            `ExtraShapes(down=..., up=...)`: of those that `attach` makes, and of those that `report` returns. Both
            sides refuse other tensors.
        check_memory: Raises an error if the method's entries in a memory from a checkpoint, the server's or a client's,
            do not fit the run. States by the tensors' names, and those beside their sub-model, are checked anyway.
        describe: Returns notes for a run from its problem, levels and `[local]`, such as parts of the method without
            effect there. It raises a `ConfigError` where the method cannot train with them.
    """

    model: fedavg.ModelHook = fedavg.keep_model
    levels: fedavg.LevelsHook = fedavg.make_full_level
    assign: fedavg.AssignHook = fedavg.assign_own_levels
    choose: fedavg.ChooseHook = fedavg.choose_uniformly
    channels: fedavg.ChannelsHook = fedavg.keep_prefix
    dispatch: fedavg.DispatchHook = fedavg.dispatch_submodel
    attach: fedavg.AttachHook = fedavg.attach_nothing
    adapt: fedavg.AdaptHook = fedavg.keep_job
    task: fedavg.TaskHook = fedavg.keep_task
    loss: fedavg.LossHook = fedavg.last_exit_loss
    penalty: fedavg.PenaltyHook = fedavg.skip_penalty
    remember: fedavg.RememberHook = fedavg.keep_memory
    reply: fedavg.ReplyHook = fedavg.send_all
    report: fedavg.ReportHook = fedavg.report_nothing
    receive: fedavg.ReceiveHook = fedavg.receive_all
    note: fedavg.NoteHook = fedavg.note_nothing
    weight: fedavg.WeightHook = fedavg.weigh_by_samples
    aggregate: fedavg.AggregateHook = fedavg.CoverageMean
    step: fedavg.StepHook = fedavg.take_mean
    observe: fedavg.ObserveHook = fedavg.observe_nothing
    needs_budgets: bool = True
    own_data: bool = False
    needs_prior: bool = False
    settles: tuple[str, ...] = ()
    replaces: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    token_defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    gives_way: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)
    declare_extra: fedavg.ExtraFunction = fedavg.declare_no_extra
    check_memory: fedavg.CheckMemoryFunction = fedavg.check_nothing
    describe: fedavg.DescribeFunction = fedavg.describe_nothing

    @functools.cached_property
    def own_hooks(self) -> frozenset[str]:
        """The hooks that the method sets; the others are FedAvg's.

        What depends on it: with `receive` the tensors of all updates of a round are held; `dispatch` is called for each
        slot; with `adapt` a client at the largest level has an evaluation job for each scope; with `levels` the targets
        of `[fleet]` count. `[secure]` and `[privacy]` refuse some hooks.
        """
        return frozenset(hook for hook in HOOKS if getattr(self, hook) is not getattr(FEDAVG, hook))

    def __post_init__(self) -> None:
        """Check `replaces`."""
        unknown = next((hook for hook in self.replaces if hook not in CALLED_BY), None)
        if unknown is not None:
            raise ConfigError(
                f'Method(replaces=...): a method can replace {", ".join(CALLED_BY)}, got "{truncate(unknown)}".'
            )


DECLARED = ("needs_budgets", "own_data", "needs_prior", "settles", "replaces", "defaults", "token_defaults",
            "gives_way", "declare_extra", "check_memory", "describe")  # fmt: skip
"""Fields of a method that are not hooks."""
HOOKS = tuple(f.name for f in dataclasses.fields(Method) if f.name not in DECLARED)
FEDAVG = Method()

# built-in functions by hook, for `method.hooks.channels = "rolling"`
_CHOICES: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    "channels": {"prefix": fedavg.keep_prefix, "window": window, "rolling": rolling, "random": random},
    "choose": {"uniform": fedavg.choose_uniformly},
    "weight": {"by_samples": fedavg.weigh_by_samples, "by_count": fedavg.weigh_equally},
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


def rebuild_problem(spec: Mapping[str, Any]) -> Problem:
    """Build the problem that a spec describes, its model changed by the method's hook `model`."""
    problem = apply_model_hook(Problem.from_spec(spec), spec.get("method", {}))
    problem.check_levels()
    return problem


def apply_model_hook(problem: Problem, spec: Mapping[str, Any]) -> Problem:
    """Return the problem with its model changed by a method's hook `model`.

    Args:
        problem: With the model of the run file.
        spec: The method's.
    """
    method = build(spec)
    if "model" not in method.own_hooks:
        return problem
    architecture = method.model(problem.architecture, problem.input_shape)
    is_rebuilt = problem.spec is not None and is_portable(spec)
    return replace(
        problem, architecture=architecture, spec={**(problem.spec or {}), "method": dict(spec)} if is_rebuilt else None
    )


def is_portable(spec: Any) -> bool:
    """Return whether another process can rebuild from a spec: plain values only."""
    try:
        json.dumps(spec)
    except TypeError:
        return False
    return True


@functools.lru_cache(maxsize=64)
def _build_cached(text: str) -> Method:
    return build_anew(json.loads(text))


def build_anew(spec: Mapping[str, Any]) -> Method:
    """Build the method that a spec describes, past the cache of `build`."""
    method, values = _make_base_method(spec)
    own_hooks, selection = spec.get("hooks", {}), dict(spec.get("cohort", {}))
    if selection:
        name = selection.pop("name")
        option = _make_method("selection", name, selection)
        method = _add_option(method, option, str(name), own_hooks, values)
    for name, settings in spec.get("plus", {}).items():
        method = _add_option(method, _make_method("options", name, settings), name, own_hooks, values)
    functions = {hook: _resolve_hook(hook, value) for hook, value in own_hooks.items()}
    replaces = tuple(hook for hook in method.replaces if CALLED_BY[hook] not in functions)
    return replace(method, replaces=replaces, **functions)  # type: ignore[arg-type]  # hooks only, all of them functions


def find_replaced_parameters(spec: Mapping[str, Any]) -> set[str]:
    """Return the hyperparameters whose hook an option of the spec sets in the method's place (`Method.gives_way`)."""
    if not spec.get("plus"):
        return set()
    method, values = _make_base_method(spec)
    options = [_make_method("options", name, settings) for name, settings in spec["plus"].items()]
    return {
        key
        for hook, key in method.gives_way.items()
        if key not in values and any(hook in option.own_hooks for option in options)
    }


def _make_base_method(spec: Mapping[str, Any]) -> tuple[Method, Mapping[str, Any]]:
    """Return the method of a spec without options and single hooks, and its hyperparameters."""
    values = {key: v for key, v in spec.items() if key not in ("name", "cohort", "plus", "hooks")}
    return _make_method("methods", spec.get("name", "fedavg"), values), values


_SECTIONS = {"methods": "[method]", "selection": "[cohort] choose", "options": "[method.plus.{}]"}


def _make_method(kind: str, name: Any, values: Mapping[str, Any]) -> Method:
    if isinstance(name, Method):
        return name
    where = _SECTIONS[kind].format(name)
    factory: Callable[..., Any] = name if callable(name) else names.resolve(kind, name)
    label = getattr(name, "__name__", name)
    method = call_factory(factory, str(label), where, values)
    if not isinstance(method, Method):
        raise ConfigError(
            f"{where} {label} must return a Method, got {type(method).__name__}.",
            key=where.replace("[", "").replace("] ", ".").replace("]", ""),
        )
    return method


def _add_option(
    method: Method, option: Method, name: str, own_hooks: Collection[str], own_values: Collection[str] = ()
) -> Method:
    """Add an option to a method: some hooks chain, penalties add up, any other may be set once.

    Args:
        method: The method.
        option: A method, too; hooks that it does not set are FedAvg's.
        name: Of the option, for messages.
        own_hooks: Hooks that the spec sets one by one; they win.
        own_values: Hyperparameters that the spec sets; their hooks do not give way.
    """
    changes: Any = {}
    gives_way, needs_prior = dict(method.gives_way), method.needs_prior  # where its own task stays
    for hook in (hook for hook in HOOKS if hook in option.own_hooks):
        current, added, is_set = getattr(method, hook), getattr(option, hook), hook in method.own_hooks
        if added is current:
            continue
        key = gives_way.pop(hook, None)
        if not is_set or (key is not None and key not in own_values):
            changes[hook] = added
            needs_prior = needs_prior and (hook != "task" or not is_set)
        elif hook in _COMBINED:
            changes[hook] = functools.partial(_COMBINED[hook], current, added)
        elif hook == "choose" and "choose" in method.replaces:
            raise ConfigError(
                f'[cohort] choose: "{truncate(name)}" has no effect: the method chooses its clients itself. Leave it '
                "out.",
                key="cohort.choose",
            )
        elif hook not in own_hooks and key is not None:
            raise ConfigError(
                f'[method] {key} and "{truncate(name)}" set the same hook, "{hook}". Leave one out.',
                key=f"method.{key}",
            )
        elif hook not in own_hooks:
            raise ConfigError(
                f'both the method and "{name}" set hook "{hook}". Say whose wins with method.hooks.{hook} = '
                '"module:function".',
                key=f"method.hooks.{hook}",
            )
    return replace(
        method,
        needs_budgets=method.needs_budgets and option.needs_budgets,
        own_data=method.own_data or option.own_data,
        needs_prior=needs_prior or option.needs_prior,
        settles=(*method.settles, *option.settles),
        replaces=(*method.replaces, *option.replaces),
        defaults={**method.defaults, **option.defaults},
        gives_way=gives_way,
        declare_extra=_join_extra(method.declare_extra, option.declare_extra),
        check_memory=_join_checks(method.check_memory, option.check_memory),
        describe=_join_descriptions(method.describe, option.describe),
        **changes,
    )


def _join_descriptions(first: fedavg.DescribeFunction, second: fedavg.DescribeFunction) -> fedavg.DescribeFunction:
    return lambda problem, levels, local: [*first(problem, levels, local), *second(problem, levels, local)]


def _join_extra(first: fedavg.ExtraFunction, second: fedavg.ExtraFunction) -> fedavg.ExtraFunction:
    def declare_extra(problem: Problem, submodel: Submodel) -> fedavg.ExtraShapes:
        (down, up), (more_down, more_up) = first(problem, submodel), second(problem, submodel)
        if common := (down.keys() & more_down.keys()) | (up.keys() & more_up.keys()):
            raise ConfigError(f"two parts of the method send tensors of one name, {sorted(common)}.", key="method.plus")
        return fedavg.ExtraShapes({**down, **more_down}, {**up, **more_up})

    return declare_extra


def _join_checks(first: fedavg.CheckMemoryFunction, second: fedavg.CheckMemoryFunction) -> fedavg.CheckMemoryFunction:
    return lambda federation, memory: (first(federation, memory), second(federation, memory))


def _chain_adapt(
    first: Callable[..., Job | None], second: Callable[..., Job | None], job: Job, device: Device
) -> Job | None:
    changed = first(job, device)
    return None if changed is None else second(changed, device)


def _add_penalties(first: Callable[..., Any], second: Callable[..., Any], job: Job, device: Device) -> Any:
    penalties = [p for p in (first(job, device), second(job, device)) if p is not None]
    if len(penalties) < 2:
        return penalties[0] if penalties else None
    return lambda module: penalties[0](module) + penalties[1](module)


def _merge_tables(first: Callable[..., Any], second: Callable[..., Any], *arguments: Any) -> Mapping[str, Any]:
    return {**first(*arguments), **second(*arguments)}


def _chain_observe(
    first: Callable[..., Server], second: Callable[..., Server], federation: Federation, server: Server, *arguments: Any
) -> Server:
    return second(federation, first(federation, server, *arguments), *arguments)


def _chain_receive(
    first: Callable[..., Iterable[Update]], second: Callable[..., Iterable[Update]], federation: Federation,
    server: Server, updates: Sequence[Update],
) -> Iterable[Update]:  # fmt: skip
    return second(federation, server, list(first(federation, server, updates)))


def _chain_remember(
    first: Callable[..., Any], second: Callable[..., Any], job: Job, device: Device, *arguments: Any
) -> Any:
    return second(job, replace(device, memory=first(job, device, *arguments)), *arguments)


_COMBINED: Mapping[str, Callable[..., Any]] = {
    "adapt": _chain_adapt, "penalty": _add_penalties, "remember": _chain_remember, "receive": _chain_receive,
    "attach": _merge_tables, "report": _merge_tables, "note": _merge_tables, "observe": _chain_observe,
}  # fmt: skip


def _resolve_hook(hook: str, value: Any) -> Callable[..., Any]:
    if hook not in HOOKS:
        raise ConfigError(
            f'a method has no hook "{hook}"; it has {", ".join(HOOKS)}.{did_you_mean(hook, HOOKS)}',
            key=f"method.hooks.{hook}",
        )
    if callable(value):
        return value
    choices = _CHOICES.get(hook, {})
    if isinstance(value, str) and value in choices:
        return choices[value]
    if isinstance(value, str) and ":" in value:
        return names.resolve("hooks", value)
    listed = f"one of {', '.join(choices)}, or " if choices else ""
    raise ConfigError(
        f'method.hooks.{hook} must be {listed}"module:function", got {truncate(repr(value))}.'
        f"{did_you_mean(str(value), choices)}",
        key=f"method.hooks.{hook}",
    )


# ---- keys of a spec without effect ---------------------------------------------------------------------------------

_NEVER_CALLS = {
    "choose": "never calls it: it chooses clients in a way of its own",
    "channels": "never calls it: it chooses channels in a way of its own",
    "weight": "never calls it: it averages without weights",
}


def find_unused_parts(spec: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys of a spec, as a run file names them, that have no effect in a round, each with the reason.

    A hook is unused where the method declares to replace it. A hyperparameter or an option is unused where all hooks
    that it changes are set one by one in `method.hooks`, or replaced.

    Args:
        spec: The method's; see `build`.
    """
    method, own_hooks = build(spec), spec.get("hooks", {})
    name = spec.get("name", "fedavg")
    label = name if isinstance(name, str) else str(getattr(name, "__name__", "this method"))
    unused = {key if "." in key else f"local.{key}": f"{label} sets it itself" for key in method.settles}
    unused |= {f"method.hooks.{hook}": f"{label} {_NEVER_CALLS[hook]}" for hook in own_hooks if hook in method.replaces}
    reason = f"method.hooks.{', '.join(sorted(own_hooks))} takes the place of all that it would do"
    for key, changed in _find_changed_hooks(spec):
        if changed <= {*own_hooks, *method.replaces}:
            unused[key] = reason if changed & own_hooks.keys() else f"{label} is the same without it"
    return unused


def _find_changed_hooks(spec: Mapping[str, Any]) -> Iterator[tuple[str, set[str]]]:
    """Yield each hyperparameter and option of a spec, and the fields of the method that differ without it."""
    name = spec.get("name", "fedavg")
    values = {key: v for key, v in spec.items() if key not in ("name", "cohort", "plus", "hooks")}
    factory = None if isinstance(name, Method) else name if callable(name) else names.resolve("methods", name)
    parameters = {} if factory is None else inspect.signature(factory).parameters
    for key, value in values.items() if factory is not None else ():
        parameter = parameters.get(key)
        if parameter is not None and is_default(value, parameter.default):
            continue
        rest = {other: v for other, v in values.items() if other != key}
        with contextlib.suppress(FleetFitError):  # raised where the method needs the key
            without = _make_method("methods", name, rest)
            yield f"method.{key}", _find_differences(_make_method("methods", name, values), without)
    for option, settings in spec.get("plus", {}).items():
        yield f"method.plus.{option}", _find_differences(_make_method("options", option, settings), FEDAVG)


def _find_differences(one: Method, other: Method) -> set[str]:
    fields = {*HOOKS, *DECLARED} - {
        "replaces",
        "declare_extra",
        "check_memory",
        "describe",
    }  # which go with other hooks
    return {name for name in fields if not _is_same(getattr(one, name), getattr(other, name))}


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two hooks are the same function, with the same arguments where they are partial."""
    if isinstance(one, functools.partial) and isinstance(other, functools.partial):
        parts = [(p.func, p.args, p.keywords) for p in (one, other)]
        return _is_same(*parts)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_is_same(value, other[key]) for key, value in one.items())
    return one is other or (isinstance(one, bool | int | float | str) and bool(one == other))
