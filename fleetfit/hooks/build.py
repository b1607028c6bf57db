"""The record of a method's hooks, and how a spec becomes one: by name, with its options and single hooks."""

import contextlib
import dataclasses
import functools
import inspect
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fleetfit import names
from fleetfit.aggregate import Aggregate
from fleetfit.anatomy import Architecture, Axis, State
from fleetfit.core import (
    Aggregator,
    Device,
    Federation,
    Job,
    Level,
    Local,
    LocalResult,
    Problem,
    Server,
    Update,
)
from fleetfit.core.tasks import Task
from fleetfit.errors import ConfigError, FleetFitError, did_you_mean, truncate
from fleetfit.factories import call_factory, is_default
from fleetfit.hooks import fedavg
from fleetfit.hooks.fedavg import Loss, Penalty, Reports
from fleetfit.planner import Targets
from fleetfit.submodel import Channels, Submodel, random, rolling, window
from fleetfit.submodel.state import Shapes

CALLED_BY: Mapping[str, str] = {"choose_clients": "assign", "choose_channels": "assign", "weigh": "make_aggregator"}
"""Hooks that another hook calls, and which one; rounds call all others."""


@dataclass(frozen=True)
class Method:
    """A method: one function per hook, FedAvg's where it does not differ. docs/hooks.md says what each is for.

    Attributes:
        needs_budgets: Whether its levels need the budgets that clients report; without, the server never gets them.
        needs_server_data: Whether the server trains, and so needs data of its own, `[data] server`.
        needs_prior: Whether training jobs carry the fleet's class frequencies, `job.prior`. The server asks up to 1,000
            clients for them before the first round; with `[privacy]` it does not, and the prior is empty.
        fixed_keys: Keys of the run file that the method sets itself, whatever the file says: of `[local]`, such as
            "epochs", which its `adapt_job` sets, or dotted, such as "fleet.levels", which its `make_levels` ignores.
        unused_hooks: Hooks that the method never calls: "choose_clients" and "choose_channels" where its `assign` takes
            clients or channels in another way, "weigh" where its `make_aggregator` does not weigh.
        defaults: The method's own defaults of keys of the run file, dotted: `{"local.optimizer": "adam"}`. A key of the
            file, an override or a keyword wins over them.
        task_defaults: The method's own defaults of its hyperparameters by the name of a task, or "tokens" where classes
            are tokens: `{"tokens": {"tau": 0.0}}`.
        overridable_hooks: Hooks that an option may set in the method's place, each with the hyperparameter of the
            method that makes it: `{"step": "momentum"}`. With that hyperparameter set, both at once are refused.
        declare_extra: Returns names and shapes of tensors beside the state, for the sub-model that is sent, as
            `ExtraShapes(down=..., up=...)`: of those that `attach` makes, and of those that `report` returns. Both
            sides refuse other tensors.
        check_memory: Raises an error if the method's entries in a memory from a checkpoint, the server's or a client's,
            do not fit the run. States by the tensors' names, and those beside their sub-model, are checked anyway.
        describe: Returns notes for a run from its problem, levels and `[local]`, such as parts of the method without
            effect there. It raises a `ConfigError` where the method cannot train with them.
    """

    adapt_model: Callable[[Architecture, tuple[int, ...]], Architecture] = fedavg.keep_model
    make_levels: Callable[[Problem, Targets], list[Level]] = fedavg.make_full_level
    assign: Callable[[Federation, Server, np.random.Generator], Sequence[tuple[int, int, Submodel]]] = (
        fedavg.assign_own_levels
    )
    choose_clients: Callable[[Federation, Server, np.random.Generator], list[int]] = fedavg.choose_uniformly
    choose_channels: Callable[[Axis, int, int, int | None, np.random.Generator], Channels] = fedavg.keep_prefix
    dispatch: Callable[[Federation, Server, int | None, Submodel], State] = fedavg.dispatch_submodel
    attach: Callable[[Federation, Server, int | None, Submodel], State] = fedavg.attach_nothing
    adapt_job: Callable[[Job, Device], Job | None] = fedavg.keep_job
    adapt_task: Callable[[Job, Device], Task] = fedavg.keep_task
    make_loss: Callable[[Job, Device], Loss] = fedavg.last_exit_loss
    make_penalty: Callable[[Job, Device], Penalty | None] = fedavg.skip_penalty
    update_client_memory: Callable[[Job, Device, LocalResult], Any] = fedavg.keep_client_memory
    reply: Callable[[Job, Device, LocalResult], tuple[Submodel, State]] = fedavg.send_all
    report: Callable[[Job, Device, LocalResult], Mapping[str, Any]] = fedavg.report_nothing
    filter_updates: Callable[[Federation, Server, Sequence[Update]], Iterable[Update]] = fedavg.keep_updates
    annotate: Callable[[Federation, Server, Update], Mapping[str, Any]] = fedavg.annotate_nothing
    weigh: Callable[[Update], float] = fedavg.weigh_by_samples
    make_aggregator: Callable[[Federation, Server], Aggregator] = fedavg.CoverageMean
    step: Callable[[Federation, Server, Aggregate, Reports], Server] = fedavg.take_mean
    update_server_memory: Callable[[Federation, Server, Aggregate, Reports], Server] = fedavg.keep_server_memory
    needs_budgets: bool = True
    needs_server_data: bool = False
    needs_prior: bool = False
    fixed_keys: tuple[str, ...] = ()
    unused_hooks: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    task_defaults: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict, hash=False)
    overridable_hooks: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)
    declare_extra: Callable[[Problem, Submodel], tuple[Shapes, Shapes]] = lambda problem, submodel: fedavg.ExtraShapes()
    check_memory: Callable[[Federation, Mapping[str, Any]], Any] = lambda federation, memory: None
    describe: Callable[[Problem, Sequence[Level], Local], Iterable[str]] = lambda problem, levels, local: ()

    @functools.cached_property
    def own_hooks(self) -> frozenset[str]:
        """The hooks that the method sets; the others are FedAvg's.

        What depends on it: with `filter_updates` the tensors of all updates of a round are held; `dispatch` is called
        for each slot; with `adapt_job` a client at the largest level has an evaluation job for each scope; with
        `make_levels` the targets of `[fleet]` count. `[secure]` and `[privacy]` refuse some hooks.
        """
        return frozenset(hook for hook in HOOKS if getattr(self, hook) is not getattr(FEDAVG, hook))

    def __post_init__(self) -> None:
        """Check `unused_hooks`."""
        unknown = next((hook for hook in self.unused_hooks if hook not in CALLED_BY), None)
        if unknown is not None:
            raise ConfigError(
                f'Method(unused_hooks=...): they can be {", ".join(CALLED_BY)}, got "{truncate(unknown)}".'
            )


DECLARED = ("needs_budgets", "needs_server_data", "needs_prior", "fixed_keys", "unused_hooks", "defaults",
            "task_defaults", "overridable_hooks", "declare_extra", "check_memory", "describe")  # fmt: skip
"""Fields of a method that are not hooks."""
HOOKS = tuple(f.name for f in dataclasses.fields(Method) if f.name not in DECLARED)
FEDAVG = Method()

# built-in functions by hook, for `method.hooks.choose_channels = "rolling"`
_CHOICES: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    "choose_channels": {"prefix": fedavg.keep_prefix, "window": window, "rolling": rolling, "random": random},
    "choose_clients": {"uniform": fedavg.choose_uniformly},
    "weigh": {"by_samples": fedavg.weigh_by_samples, "by_count": fedavg.weigh_equally},
}  # fmt: skip


def build(spec: Mapping[str, Any]) -> Method:
    """Build the method that a spec describes.

    Args:
        spec: Name, hyperparameters, `cohort` (how clients are chosen), `options` and `hooks` (single functions).

    Raises:
        ConfigError: Unknown names or hyperparameters, or a hook that two parts set without the spec saying whose wins.
    """
    if is_portable(spec):
        # options keep their order, in which they chain; the order of all else says nothing
        return _build_cached(json.dumps({key: spec[key] for key in sorted(spec)}))
    return build_anew(spec)


def dump_problem(problem: Problem) -> dict[str, Any]:
    """Return what another process rebuilds a problem from: its spec, with the layout, which takes long to infer.

    The spec goes to workers once, and to nodes with every job, since a node may have started anew. It is no part of the
    job, whose bytes are counted (`fleetfit.messages.job_size`): neither are the names of model and method.

    Raises:
        ModelError: The layout cannot be inferred.
    """
    return {**(problem.spec or {}), "layout": problem.layout.to_payload()}


def rebuild_problem(spec: Mapping[str, Any]) -> Problem:
    """Build the problem that a spec describes, its model changed by the method's hook `adapt_model`.

    Raises:
        FleetFitError: A part of the spec is wrong, or does not fit the model.
    """
    problem = apply_model_hook(Problem.from_spec(spec), spec.get("method", {}))
    problem.check_levels()
    if "layout" in spec:
        _ = problem.layout  # a damaged one is refused now
    return problem


def apply_model_hook(problem: Problem, spec: Mapping[str, Any]) -> Problem:
    """Return the problem with its model changed by a method's hook `adapt_model`.

    Args:
        problem: With the model of the run file.
        spec: The method's.
    """
    method = build(spec)
    if "adapt_model" not in method.own_hooks:
        return problem
    architecture = method.adapt_model(problem.architecture, problem.input_shape)
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


def check_portable(spec: Any, who: str) -> None:
    """Check that other processes can rebuild a method from its spec.

    Raises:
        ConfigError: A function in it has no import path.
    """
    if not is_portable(spec):
        raise ConfigError(
            f"{who} rebuild the method, so its functions need import paths "
            '("package.module:function" or "file.py:function"); functions made in Python run with engine.name = '
            '"local".',
            key="method",
        )


@functools.lru_cache(maxsize=64)
def _build_cached(text: str) -> Method:
    return build_anew(json.loads(text))


def build_anew(spec: Mapping[str, Any]) -> Method:
    """Build the method that a spec describes, past the cache of `build`."""
    method, values = _make_base_method(spec)
    own_hooks, selection = spec.get("hooks", {}), dict(spec.get("cohort", {}))
    if selection:
        name = selection.pop("name")
        method = _add_option(method, _make_method("selection", name, selection), str(name), own_hooks, values)
    for name, settings in spec.get("options", {}).items():
        method = _add_option(method, _make_method("options", name, settings), name, own_hooks, values)
    functions = {hook: _resolve_hook(hook, value) for hook, value in own_hooks.items()}
    unused = tuple(hook for hook in method.unused_hooks if CALLED_BY[hook] not in functions)
    return replace(method, unused_hooks=unused, **functions)  # type: ignore[arg-type]  # hooks only, all of them functions


def find_replaced_parameters(spec: Mapping[str, Any]) -> set[str]:
    """Return the hyperparameters whose hook (`Method.overridable_hooks`) an option of the spec sets in their place."""
    if not spec.get("options"):
        return set()
    method, values = _make_base_method(spec)
    options = [_make_method("options", name, settings) for name, settings in spec["options"].items()]
    return {
        key
        for hook, key in method.overridable_hooks.items()
        if key not in values and any(hook in option.own_hooks for option in options)
    }


def _make_base_method(spec: Mapping[str, Any]) -> tuple[Method, Mapping[str, Any]]:
    """Return the method of a spec without options and single hooks, and its hyperparameters."""
    values = {key: v for key, v in spec.items() if key not in ("name", "cohort", "options", "hooks")}
    return _make_method("methods", spec.get("name", "fedavg"), values), values


_SECTIONS = {"methods": "[method]", "selection": "[cohort] selection", "options": "[method.options.{}]"}


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

    Hooks that the spec sets one by one (`own_hooks`) win. Hooks of hyperparameters that it sets do not give way.
    """
    changes: Any = {}
    overridable, needs_prior = dict(method.overridable_hooks), method.needs_prior  # where its own task stays
    for hook in (hook for hook in HOOKS if hook in option.own_hooks):
        current, added, is_set = getattr(method, hook), getattr(option, hook), hook in method.own_hooks
        if added is current:
            continue
        key = overridable.pop(hook, None)
        if not is_set or (key is not None and key not in own_values):
            changes[hook] = added
            needs_prior = needs_prior and (hook != "adapt_task" or not is_set)
        elif hook in _COMBINED:
            changes[hook] = functools.partial(_COMBINED[hook], current, added)
        elif hook == "choose_clients" and "choose_clients" in method.unused_hooks:
            raise ConfigError(
                f'[cohort] selection: "{truncate(name)}" has no effect: the method chooses its clients itself. '
                "Leave it out.",
                key="cohort.selection",
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
        needs_server_data=method.needs_server_data or option.needs_server_data,
        needs_prior=needs_prior or option.needs_prior,
        fixed_keys=(*method.fixed_keys, *option.fixed_keys),
        unused_hooks=(*method.unused_hooks, *option.unused_hooks),
        defaults={**method.defaults, **option.defaults},
        overridable_hooks=overridable,
        declare_extra=_join_extra(method.declare_extra, option.declare_extra),
        check_memory=lambda *arguments: (method.check_memory(*arguments), option.check_memory(*arguments)),
        describe=lambda *arguments: [*method.describe(*arguments), *option.describe(*arguments)],
        **changes,
    )


def _join_extra(
    first: Callable[..., tuple[Shapes, Shapes]], second: Callable[..., tuple[Shapes, Shapes]]
) -> Callable[..., tuple[Shapes, Shapes]]:
    def declare_extra(problem: Problem, submodel: Submodel) -> fedavg.ExtraShapes:
        (down, up), (more_down, more_up) = first(problem, submodel), second(problem, submodel)
        if common := (down.keys() & more_down.keys()) | (up.keys() & more_up.keys()):
            raise ConfigError(
                f"two parts of the method send tensors of one name, {sorted(common)}.", key="method.options"
            )
        return fedavg.ExtraShapes({**down, **more_down}, {**up, **more_up})

    return declare_extra


def _chain_job_changes(
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


_COMBINED: Mapping[str, Callable[..., Any]] = {
    "adapt_job": _chain_job_changes, "make_penalty": _add_penalties,
    "attach": _merge_tables, "report": _merge_tables, "annotate": _merge_tables,
    "update_client_memory": lambda first, second, job, device, result: second(
        job, replace(device, memory=first(job, device, result)), result
    ),
    "filter_updates": lambda first, second, federation, server, updates: second(
        federation, server, list(first(federation, server, updates))
    ),
    "update_server_memory": lambda first, second, federation, server, *arguments: second(
        federation, first(federation, server, *arguments), *arguments
    ),
}  # fmt: skip
"""How two parts of a method share a hook."""


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
    "choose_clients": "never calls it: it chooses clients in a way of its own",
    "choose_channels": "never calls it: it chooses channels in a way of its own",
    "weigh": "never calls it: it averages without weights",
}


def find_unused_parts(spec: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys of a spec, as a run file names them, that have no effect in a round, each with the reason.

    A hook is unused where the method declares it. A hyperparameter or an option is unused where the method that is
    built without it has the same hooks, whatever the task, such as where they are set in `method.hooks`.

    Args:
        spec: The method's; see `build`.
    """
    method, own_hooks = build(spec), spec.get("hooks", {})
    name = spec.get("name", "fedavg")
    label = name if isinstance(name, str) else str(getattr(name, "__name__", "this method"))
    unused = {key if "." in key else f"local.{key}": f"{label} sets it itself" for key in method.fixed_keys}
    unused |= {
        f"method.hooks.{hook}": f"{label} {_NEVER_CALLS[hook]}" for hook in own_hooks if hook in method.unused_hooks
    }
    winners = f"method.hooks.{', '.join(sorted(own_hooks))} takes the place of all that it would do"
    for key, rest in _leave_out_each(spec):
        with contextlib.suppress(FleetFitError):  # raised where the method needs the key
            others = [build_anew({**defaults, **rest}) for defaults in ({}, *method.task_defaults.values())]
            fields = {*HOOKS, *_COMPARED} - {*method.unused_hooks}
            if all(_is_same(getattr(method, name), getattr(other, name)) for other in others for name in fields):
                unused[key] = winners if own_hooks else f"{label} is the same without it"
    return unused


_COMPARED = ("needs_budgets", "needs_server_data", "needs_prior", "fixed_keys", "defaults", "task_defaults")


def _leave_out_each(spec: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each option of a spec, and each hyperparameter that has not its default, with the rest of the spec."""
    name, options = spec.get("name", "fedavg"), spec.get("options", {})
    factory = name if callable(name) or isinstance(name, Method) else names.resolve("methods", name)
    parameters = {} if isinstance(factory, Method) else inspect.signature(factory).parameters
    for key in (key for key in spec if key not in ("name", "cohort", "options", "hooks")):
        if key not in parameters or not is_default(spec[key], parameters[key].default):
            yield f"method.{key}", {other: value for other, value in spec.items() if other != key}
    for option in options:
        rest = {other: settings for other, settings in options.items() if other != option}
        yield f"method.options.{option}", {**spec, "options": rest}


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
