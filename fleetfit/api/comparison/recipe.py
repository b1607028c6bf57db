"""The recipe of a row: keys of training that are no method's idea, and so no reason to prefer it.

They are the schedule of the learning rate, the server's optimizer, all other keys of `[local]` and `[cohort]`, and the
kind of the model's classifiers. A table of methods whose rows differ in them says so. `compare.same_recipe` gives all
rows the schedule and the server's optimizer of the first.
"""

import contextlib
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fleetfit.config import Experiment, to_table
from fleetfit.config.assemble.method import build_method_spec
from fleetfit.config.load import complete_experiment
from fleetfit.config.merge import flatten
from fleetfit.errors import ConfigError, FleetFitError
from fleetfit.hooks import build
from fleetfit.runs.schema import SummaryRecord

_SERVER_OPTIMIZERS = ("fedadam", "fedavgm", "fedyogi")
_PLAIN_MEAN = {"momentum": 0.0, "lr": 1.0}
"""`fedavgm` with these keys is the plain mean."""
_ALIKE = 0.01
"""Costs that differ by a smaller share are equal."""

ServerOptimizer = tuple[str, Mapping[str, Any]]
"""The name of an option, and its keys."""


def find_server_optimizer(experiment: Experiment) -> ServerOptimizer:
    """Return the server's optimizer. A method's own momentum is that of `fedavgm`."""
    method = to_table(experiment)["method"]
    for name in _SERVER_OPTIMIZERS:
        if name in method.get("options", {}):
            return name, method["options"][name]
    return "fedavgm", {**_PLAIN_MEAN, "momentum": float(method.get(_find_momentum_key(experiment), 0.0))}


def _find_momentum_key(experiment: Experiment) -> str:
    """Return the method's key for momentum on the server; "" if it has none, or cannot be built here."""
    with contextlib.suppress(FleetFitError):
        return build(build_method_spec(experiment)).overridable_hooks.get("step", "")
    return ""


def copy_recipe(first: Experiment, table: Mapping[str, Any], own_keys: Collection[str]) -> dict[str, Any]:
    """Return the tables of a row with another row's schedule and server optimizer.

    Args:
        first: The other row.
        table: The tables.
        own_keys: The dotted keys that the row sets itself, which stay. So does the optimizer of a method with another
            step on the server.
    """
    changed = dict(table)
    if not any(key.startswith("local.schedule") for key in own_keys):
        schedule = to_table(first)["local"]["schedule"]
        changed["local"] = {**changed.get("local", {}), "schedule": schedule}
    row, (name, keys) = complete_experiment(changed), find_server_optimizer(first)
    momentum_key = _find_momentum_key(row)
    own = (
        f"method.{momentum_key or 'options.fedavgm'}",
        *(f"method.options.{option}" for option in _SERVER_OPTIMIZERS),
    )
    if (name, keys) == find_server_optimizer(row) or any(key.startswith(own) for key in own_keys):
        return changed
    method = dict(changed.get("method", {}))
    if momentum_key and keys == {**_PLAIN_MEAN, "momentum": keys.get("momentum")}:
        method[momentum_key] = keys["momentum"]
    else:
        method["options"] = {**row.method.options, name: dict(keys)}
    try:
        build(build_method_spec(complete_experiment({**changed, "method": method})))
    except ConfigError:  # the method has another step
        return changed
    return {**changed, "method": method}


def describe_recipes(settings: Sequence[Mapping[str, Experiment]]) -> str:
    """Return a sentence with the keys of the recipe in which rows differ, and who has which value.

    Args:
        settings: For each setting, the experiments of its rows, by label.
    """
    differences: dict[str, str] = {}
    for rows in settings:
        recipes = {label: _list_recipe(experiment) for label, experiment in rows.items()}
        for key in dict.fromkeys(key for recipe in recipes.values() for key in recipe):
            labels: dict[str, list[str]] = {}
            for label, recipe in recipes.items():
                labels.setdefault(recipe.get(key, "not set"), []).append(label)
            if len(labels) > 1:
                values = "; ".join(f"{value} in {', '.join(group)}" for value, group in labels.items())
                differences.setdefault(key, f"{key} ({values})")
    if not differences:
        return "All rows have the same schedule, server momentum, [local] and [cohort]."
    return f"Rows differ in keys that are no method's idea: {', '.join(differences.values())}."


def _list_recipe(experiment: Experiment) -> dict[str, str]:
    """Return the recipe of a run as texts, by key."""
    table = to_table(experiment)
    local, cohort = dict(table["local"]), dict(table["cohort"])
    schedule, _ = local.pop("schedule"), cohort.pop("selection", None)
    recipe = {
        "local.schedule": _format(schedule.pop("kind"), schedule),
        "server momentum": _describe_step(experiment),
    }
    head = {"model": {"head": head}} if (head := table["model"].get("head")) else {}
    rest = {"local": local, "cohort": cohort, **head}
    return recipe | {key: str(value) for key, value in flatten(rest).items()}


def _describe_step(experiment: Experiment) -> str:
    """Return the momentum of the server, or the option or method that gives it another step."""
    name, keys = find_server_optimizer(experiment)
    options = to_table(experiment)["method"].get("options", {})
    if name in options:
        is_momentum = keys == {**_PLAIN_MEAN, "momentum": keys.get("momentum")}
        return f"{keys['momentum']:g}" if is_momentum else _format(name, keys)
    with contextlib.suppress(FleetFitError):
        for option, values in options.items():
            if "step" in build({"name": "fedavg", "options": {option: values}}).own_hooks:
                return _format(option, values)
        method = build(build_method_spec(experiment))
        if "step" in method.own_hooks and "step" not in method.overridable_hooks:
            return "its own step"
    return f"{keys['momentum']:g}"


def _format(name: str, keys: Mapping[str, Any]) -> str:
    return " ".join([name, *(f"{key}={value}" for key, value in keys.items())])


def describe_costs(rows: Mapping[str, Mapping[tuple[str, int], SummaryRecord]]) -> list[str]:
    """Return a sentence with each row's multiply-adds and bytes as shares of the first row's; empty if all are equal.

    Args:
        rows: The final numbers of each row by setting and seed. Those that another row lacks do not count.
    """
    first, *others = rows
    common = [key for key in rows[first] if all(key in rows[row] for row in others)]
    parts = []
    for title, names in (("multiply-adds", ("multiply_adds",)), ("bytes", ("bytes_down", "bytes_up"))):
        totals = {row: _sum_costs([runs[key] for key in common], names) for row, runs in rows.items()}
        base = totals[first]
        shares = {row: total / base for row in others if base and (total := totals[row]) is not None}
        if any(abs(share - 1) > _ALIKE for share in shares.values()):
            parts.append(f"{title} {', '.join(f'{share:.2f} in {row}' for row, share in shares.items())}")
    return [f"Cost of training, as a share of {first}: {'; '.join(parts)}."] if parts else []


def _sum_costs(summaries: Sequence[SummaryRecord], names: Sequence[str]) -> float | None:
    numbers = [summary.number(name) for summary in summaries for name in names]
    return None if None in numbers else math.fsum(number for number in numbers if number is not None)
