"""Which parts of a method's spec no round would call: hooks, options and hyperparameters without effect.

A part is without effect if the method without it has the same hooks, leaving out those that the method never calls: a
method with an `assign` of its own need not ask `choose` for clients, nor `channels` for theirs. Functions are compared
by what they are made of, and searched for the name of the hook; where neither can be told, the part counts as used.
"""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from fleetfit import names, used
from fleetfit.errors import FleetFitError
from fleetfit.method.building import HOOKS, Method, build_anew
from fleetfit.method.functions import alike, mentions, takes

_ASKED_BY = {"choose": "assign", "channels": "assign"}
"""Hooks that another hook calls, or does not; all others are called by the core."""
_NEVER = {
    "choose": "never calls it: it chooses clients in a way of its own",
    "channels": "never calls it: it chooses channels in a way of its own",
    "weight": "never calls it: it averages without weights",
}


def unused_parts(spec: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys of a spec without effect, as they are written in a run file, and why.

    Args:
        spec: The method's; see `build`.
    """
    whole = build_anew(spec)  # not one that is kept: its factories say which parameters are idle when they are called
    found = {f"local.{key}": f"{_named(spec)} sets it itself" for key in whole.settles}
    called = called_hooks(whole)
    with used.looking():
        for key, place, less in _without_each(spec):
            hook = place[1] if place[0] == "hooks" else ""
            if hook and hook not in called:
                found[key] = f"{_named(spec)} {_NEVER[hook]}"
            elif not hook and not _is_default(spec, place) and _without_effect(less, whole, called):
                found[key] = _why(spec, place, called)
    return found


def _is_default(spec: Mapping[str, Any], place: tuple[str, ...]) -> bool:
    """Tell whether a part is a hyperparameter whose value says what is so anyway."""
    name = spec.get("name", "fedavg")
    if len(place) > 1 or place[0] == "cohort" or isinstance(name, Method):
        return False
    factory = name if callable(name) else names.resolve("methods", name)
    parameter = inspect.signature(factory).parameters.get(place[0])
    value = tuple(spec[place[0]]) if isinstance(spec[place[0]], list) else spec[place[0]]  # a run file has no tuples
    return parameter is not None and bool(value == parameter.default)


def called_hooks(method: Method) -> frozenset[str]:
    """Return the hooks that are called in rounds of a method."""
    idle = {hook for hook, by in _ASKED_BY.items() if not mentions(getattr(method, by), hook)}
    idle |= set() if takes(method.merge, 3) else {"weight"}
    return frozenset(HOOKS) - idle


def reads_targets(method: Method) -> bool:
    """Tell whether a method's levels depend on what the run file says that they should cost."""
    return takes(method.levels, 1)


def _without_each(spec: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, ...], dict[str, Any]]]:
    """Yield each part of a spec: its key in a run file, its place in the spec, and the spec without it."""
    for key, value in spec.items():
        without = {k: v for k, v in spec.items() if k != key}
        if key == "name":
            continue
        if key == "cohort":
            yield "cohort.choose", ("cohort",), without
        elif key in ("plus", "hooks"):
            for name in value:
                rest = {k: v for k, v in value.items() if k != name}
                yield f"method.{key}.{name}", (key, name), {**without, key: rest}
        else:
            yield f"method.{key}", (key,), without


def _without_effect(less: Mapping[str, Any], whole: Method, called: frozenset[str]) -> bool:
    try:
        other = build_anew(less)
    except FleetFitError:  # it needs the part
        return False
    rest = [f.name for f in fields(Method) if f.name not in HOOKS]
    return all(alike(getattr(whole, name), getattr(other, name)) for name in (*called, *rest))


def _why(spec: Mapping[str, Any], place: tuple[str, ...], called: frozenset[str]) -> str:
    hooks = sorted(spec.get("hooks", {}))
    if place[0] == "cohort" and "choose" not in called:
        return f"{_named(spec)} chooses its clients itself"
    if hooks:
        return f"method.hooks.{', '.join(hooks)} takes the place of all that it would do"
    return f"{_named(spec)} is the same without it"


def _named(spec: Mapping[str, Any]) -> str:
    name = spec.get("name", "fedavg")
    return name if isinstance(name, str) else str(getattr(name, "__name__", "this method"))
