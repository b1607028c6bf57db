"""Dump an `Experiment` as tables and TOML, with every default."""

import contextlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pydantic
import tomli_w

from fleetfit import names
from fleetfit.config.assemble.method import build_method_spec
from fleetfit.config.detect import sets_client_count
from fleetfit.config.merge import Table
from fleetfit.config.parse import parse_experiment
from fleetfit.config.schema import CLIENTS, FRACTION, Experiment
from fleetfit.data.partition import KINDS
from fleetfit.errors import FleetFitError, escape_controls
from fleetfit.method import find_replaced_parameters

_KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "data": ("data", ()),
    "model": ("models", ("classes", "channels", "input_shape", "vocabulary", "padding")),
    "peft": ("peft", ("architecture",)),
    "method": ("methods", ()),
    "engine": ("engines", ("simulation",)),
}
"""By section, the kind of its name, and parameters that FleetFit passes to the named function."""


def to_table(experiment: Experiment) -> Table:
    """Return the experiment as tables for TOML: with every default, without keys that have no value.

    Defaults of named functions come from their signatures. `[compare]` is left out. An object in place of a name
    becomes "<type>", which is never a valid name.
    """
    table: Table = make_plain(dump_section(experiment))
    for key, (kind, context) in _KINDS.items():
        section = getattr(experiment, key)
        if isinstance(section.name, str):
            replaced = _find_replaced_keys(experiment) if key == "method" else ()
            defaults = _find_defaults(names.resolve(kind, section.name), skip=(*context, *table[key], *replaced))
            fields = {name: value for name, value in table[key].items() if name in type(section).model_fields}
            table[key] = {**fields, **defaults, **table[key]}
    server = table["data"].get("server")
    if server and not server["name"].startswith("<"):
        defaults = _find_defaults(names.resolve("data", server["name"]), skip=tuple(server))
        table["data"]["server"] = {"name": server["name"], **defaults, **server}
    partition = table["data"]["partition"]
    is_sized = sets_client_count(experiment.data.name)
    if partition["kind"] in KINDS:
        table["data"]["partition"] = {
            "kind": partition["kind"],
            "seed": experiment.seed,
            **({} if partition["kind"] == "natural" or is_sized else {"clients": CLIENTS}),
            **_find_defaults(KINDS[partition["kind"]], skip=("data", "clients", "rng")),
            **partition,
        }
    if experiment.cohort.count is None and ("clients" in partition or not is_sized):
        table["cohort"] = {"choose": table["cohort"]["choose"], "fraction": FRACTION, **table["cohort"]}
    kind = experiment.attack.kind
    if kind is None and not experiment.attack.settings:
        del table["attack"]
    elif isinstance(kind, str):
        table["attack"] = {**_find_defaults(names.resolve("attacks", kind), skip=()), **table["attack"]}
    if not experiment.is_secure:
        del table["secure"]
    if not experiment.is_private:
        del table["privacy"]
    del table["compare"]
    plus = {
        name: {**_find_defaults(names.resolve("options", name), skip=()), **values}
        for name, values in table["method"].pop("plus").items()
    }
    table = _remove_empty(table)
    if plus:  # keep an option without keys, too
        table["method"]["plus"] = plus
    return table


def _remove_empty(table: Table) -> Table:
    """Remove values that are empty by default. Other empty values are the user's, and refused later."""
    for section, key in (("fleet", "measured"), ("method", "hooks"), ("engine", "chosen"), ("evaluate", "metrics")):
        if table[section].get(key) in ({}, []):
            del table[section][key]
    return {key: value for key, value in table.items() if key not in ("name", "start", "callbacks") or value}


def dump_section(value: Any, only_set: bool = False) -> Any:
    """Return a section as tables. pydantic's own dump would convert objects, too."""
    if isinstance(value, pydantic.BaseModel):
        return {k: dump_section(v, only_set) for k, v in value if not only_set or k in value.model_fields_set}
    return [dump_section(inner, only_set) for inner in value] if isinstance(value, list) else value


def to_toml(experiment: Experiment) -> str:
    """Return the experiment as the text of a run file."""
    return escape_controls(tomli_w.dumps(to_table(experiment)))


def _find_replaced_keys(experiment: Experiment) -> set[str]:
    """Return the method's keys that an option takes the place of: written out, both would be set."""
    with contextlib.suppress(FleetFitError):  # assembling the run raises it
        return find_replaced_parameters(build_method_spec(experiment))
    return set()


def _find_defaults(function: Any, skip: Sequence[str]) -> Table:
    """Return the defaults of a function's parameters that TOML can hold."""
    parameters = inspect.signature(function).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty and p.name not in skip}
    return {key: value for key, value in make_plain(defaults).items() if value not in (None, "", {})}


def make_plain(value: Any) -> Any:
    """Return a value for TOML: without None, tuples as lists, objects as "<type>"."""
    if isinstance(value, Mapping):
        return {str(key): make_plain(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list | tuple):
        return [make_plain(inner) for inner in value]
    return value if isinstance(value, bool | int | float | str) else f"<{type(value).__name__}>"


def find_object_sections(table: Mapping[str, Any]) -> list[str]:
    """Return the sections of `to_table` that have an object in place of a name."""
    sections = []
    for section, key in (
        *((section, "name") for section in _KINDS),
        ("cohort", "choose"),
        ("attack", "kind"),
    ):
        value = table.get(section, {}).get(key)
        if isinstance(value, str) and value.startswith("<"):
            sections.append(section)
    server = table.get("data", {}).get("server", {}).get("name", "")
    if server.startswith("<") and "data" not in sections:
        sections.append("data")
    hooks = table.get("method", {}).get("hooks", {})
    if any(isinstance(v, str) and v.startswith("<") for v in hooks.values()):
        sections.append("method")
    return sections


def dump_with_defaults(experiment: Experiment) -> Table:
    """Return the experiment's tables with every default, and with the objects in place of names."""
    table = to_table(experiment)
    return table | {section: dump_section(getattr(experiment, section)) for section in find_object_sections(table)}


def fill_in_defaults(experiment: Experiment) -> Experiment:
    """Return the experiment as `config.toml` will describe it, so that a resumed run has the same bits."""
    filled = parse_experiment(dump_with_defaults(experiment), is_complete=True)
    filled._overrides = replace(filled.overrides, given=experiment.overrides.given)
    return filled
