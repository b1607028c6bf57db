"""An `Experiment` becomes tables and TOML again, with every default visible."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import pydantic
import tomli_w

from fleetfit import names
from fleetfit.config.defaults import sets_client_count
from fleetfit.config.merge import Table
from fleetfit.config.parse import parse_experiment
from fleetfit.config.schema import CLIENTS, FRACTION, Experiment
from fleetfit.data.partition import KINDS
from fleetfit.errors import escape_controls

_KINDS = {"data": "data", "model": "models", "peft": "peft", "method": "methods", "engine": "engines"}
_GIVEN = {
    "data": (),
    "model": ("classes", "channels", "input_shape", "vocabulary", "padding"),
    "peft": ("architecture",),
    "method": (),
    "engine": ("simulation",),
}


def to_table(experiment: Experiment) -> Table:
    """Return the experiment as tables for TOML: every default visible, keys without a value left out.

    The defaults of the functions that it names are filled in from their signatures; `[compare]` is no part of a run.
    An object that stands in for a name is written as "<type>", which no name can be.
    """
    table: Table = make_plain(dump_section(experiment))
    for section, kind in _KINDS.items():
        named = getattr(experiment, section)
        if isinstance(named.name, str):
            defaults = _defaults(names.resolve(kind, named.name), skip=(*_GIVEN[section], *table[section]))
            own = {key: value for key, value in table[section].items() if key in type(named).model_fields}
            table[section] = {**own, **defaults, **table[section]}
    server = table["data"].get("server")
    if server and not server["name"].startswith("<"):
        defaults = _defaults(names.resolve("data", server["name"]), skip=tuple(server))
        table["data"]["server"] = {"name": server["name"], **defaults, **server}
    division = table["data"]["partition"]
    sized = sets_client_count(experiment.data.name)  # by the data; of all others there are 40
    if division["kind"] in KINDS:
        table["data"]["partition"] = {
            "kind": division["kind"],
            "seed": experiment.seed,
            **({} if division["kind"] == "natural" or sized else {"clients": CLIENTS}),
            **_defaults(KINDS[division["kind"]], skip=("data", "clients", "rng")),
            **division,
        }
    if experiment.cohort.count is None and (division["kind"] == "natural" or "clients" in division or not sized):
        table["cohort"] = {"choose": table["cohort"]["choose"], "fraction": FRACTION, **table["cohort"]}
    kind = experiment.attack.kind
    if kind is None:
        del table["attack"]
    elif isinstance(kind, str):
        table["attack"] = {**_defaults(names.resolve("attacks", kind), skip=()), **table["attack"]}
    if not experiment.is_secure:
        del table["secure"]
    if not experiment.privacy.is_set:
        del table["privacy"]
    del table["compare"]
    plus = {
        name: {**_defaults(names.resolve("options", name), skip=()), **values}
        for name, values in table["method"].pop("plus").items()
    }
    table = _without_empty(table)
    if plus:  # an option is there also where it has nothing to set
        table["method"]["plus"] = plus
    return table


def _without_empty(table: Table) -> Table:
    """Remove what is empty by default; what a user has set empty stays, and is refused later."""
    for section, key in (("fleet", "measured"), ("method", "hooks"), ("engine", "chosen"), ("evaluate", "metrics")):
        if table[section].get(key) in ({}, []):
            del table[section][key]
    return {key: value for key, value in table.items() if key not in ("name", "start", "callbacks") or value}


def dump_section(value: Any, only_set: bool = False) -> Any:
    """Return a section as tables; unlike pydantic's own dump it leaves objects as they are."""
    if isinstance(value, pydantic.BaseModel):
        own = {key: getattr(value, key) for key in type(value).model_fields}
        stated = own | (value.model_extra or {})  # not by getattr: a key may be called as one of pydantic's methods
        return {k: dump_section(v, only_set) for k, v in stated.items() if not only_set or k in value.model_fields_set}
    return [dump_section(inner, only_set) for inner in value] if isinstance(value, list) else value


def to_toml(experiment: Experiment) -> str:
    """Return the experiment as the text of a run file."""
    return escape_controls(tomli_w.dumps(to_table(experiment)))


def _defaults(function: Any, skip: Sequence[str]) -> Table:
    """Return the defaults that a function's signature states, without those that TOML cannot hold."""
    parameters = inspect.signature(function).parameters.values()
    stated = {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty and p.name not in skip}
    return {key: value for key, value in make_plain(stated).items() if value not in (None, "", {})}


def make_plain(value: Any) -> Any:
    """Return what TOML can hold: None left out, tuples as lists, objects as "<type>"."""
    if isinstance(value, Mapping):
        return {str(key): make_plain(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list | tuple):
        return [make_plain(inner) for inner in value]
    return value if isinstance(value, bool | int | float | str) else f"<{type(value).__name__}>"


def find_object_sections(table: Mapping[str, Any]) -> list[str]:
    """Return the places of a resolved configuration where an object stood in for a name."""
    found = []
    for section, key in (
        *((section, "name") for section in _KINDS),
        ("cohort", "choose"),
        ("attack", "kind"),
    ):
        value = table.get(section, {}).get(key)
        if isinstance(value, str) and value.startswith("<"):
            found.append(section)
    server = table.get("data", {}).get("server", {}).get("name", "")
    if server.startswith("<") and "data" not in found:
        found.append("data")
    hooks = table.get("method", {}).get("hooks", {})
    found += ["method"] if any(isinstance(v, str) and v.startswith("<") for v in hooks.values()) else []
    return found


def dump_with_defaults(experiment: Experiment) -> Table:
    """Return the experiment's tables with every default visible, and the objects that stand in for names."""
    table = to_table(experiment)
    return table | {section: dump_section(getattr(experiment, section)) for section in find_object_sections(table)}


def fill_in_defaults(experiment: Experiment) -> Experiment:
    """Return the experiment as `config.toml` will describe it, so that a resumed run is the same to the last byte."""
    return parse_experiment(dump_with_defaults(experiment), is_complete=True)
