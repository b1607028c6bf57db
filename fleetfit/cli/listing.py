"""The verb `list`: built-in names with their keys and defaults.

Importing them takes PyTorch and more than a second, so they are in `catalogue.json`, which docs/generate.py writes.
"""

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer

from fleetfit import names
from fleetfit.cli import output
from fleetfit.errors import did_you_mean, truncate
from fleetfit.profiles import PROFILES, DeviceProfile
from fleetfit.report.tables import make_data_table
from fleetfit.report.text import Table, format_bytes

_CONTEXT = {"architecture", "classes", "channels", "input_shape", "vocabulary", "padding", "simulation"}
"""Parameters of factories that come from the system, and never from a run file."""
CATALOGUE = Path(__file__).with_name("catalogue.json")
"""The entries of all built-ins."""


class ListKind(StrEnum):
    """What can be listed."""

    methods = "methods"
    options = "options"
    models = "models"
    data = "data"
    selection = "selection"
    peft = "peft"
    attacks = "attacks"
    engines = "engines"
    callbacks = "callbacks"
    profiles = "profiles"


def parse_kind(text: str) -> ListKind:
    """Return the kind of a name."""
    if text not in list(ListKind):
        kinds = ", ".join(ListKind)
        raise typer.BadParameter(
            f'"{truncate(text)}" cannot be listed. Choose one of {kinds}.{did_you_mean(text, ListKind)}'
        )
    return ListKind(text)


def list_builtins(
    kind: Annotated[
        ListKind | None,
        typer.Argument(
            help="What to list. Default: the names of every kind.",
            parser=parse_kind,
            metavar=f"{{{'|'.join(ListKind)}}}",
            autocompletion=lambda: [*ListKind],
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Argument(help="Name of one entry: list its keys, their defaults and meanings.")
    ] = None,
) -> None:
    """List built-in methods, models, data sets and more, one per line. With a name, list its keys."""
    if kind is None:
        output.print_table(make_kind_table())
    else:
        output.print_table(make_list_table(kind.value) if name is None else make_key_table(kind.value, name))


@dataclass(frozen=True)
class Entry:
    """A built-in or a user's function, as `list` shows it.

    Attributes:
        summary: Its description in one line.
        keys: Name, default as TOML has it ("" for none) and meaning of each of its keys.
        facts: The numbers of a data set, or None.
    """

    summary: str
    keys: Sequence[Sequence[str]]
    facts: Mapping[str, Any] | None = None


def make_kind_table() -> Table:
    """Return the names of every kind as a table."""
    rows = [(kind.value, ", ".join(PROFILES if kind == "profiles" else names.list_names(kind))) for kind in ListKind]
    return Table(("kind", "names"), tuple(rows), notes=("fleetfit list KIND describes each name, with its keys.",))


def make_list_table(kind: str) -> Table:
    """Return the built-ins of a kind as a table."""
    if kind == "profiles":
        return make_profile_table(PROFILES)
    entries = {name: find_entry(kind, name) for name in names.list_names(kind)}
    if kind == "data":
        return make_data_table({name: entry.facts for name, entry in entries.items()})
    rows = [(name, entry.summary, ", ".join(key for key, *_ in entry.keys)) for name, entry in entries.items()]
    return Table(("name", "what it is", "keys"), tuple(rows))


def make_key_table(kind: str, name: str) -> Table:
    """Return the keys of a built-in or of a user's function, with their defaults and meanings."""
    if kind == "profiles":
        name = names.find_match(name, PROFILES)
        if name not in PROFILES:
            from fleetfit.config.assemble.fleet import find_profile

            find_profile(name)  # raises an error with the known names
        return make_profile_table({name: PROFILES[name]})
    name = names.match_name(kind, name)
    entry = find_entry(kind, name)
    notes = () if entry.keys else (f"{name} has no keys of its own.",)
    return Table(("key", "default", "meaning"), tuple(map(tuple, entry.keys)), f"{name}: {entry.summary}", notes)


def make_profile_table(profiles: Mapping[str, DeviceProfile]) -> Table:
    """Return device profiles with their figures; the notes cite the sources."""
    columns = ("name", "what it is", "multiply-adds/s", "down/s", "up/s", "latency ms", "memory")
    rows = [
        (
            name, p.what, f"{p.multiply_adds_per_s / 1e9:.1f} G",
            format_bytes(p.down_bytes_per_s), format_bytes(p.up_bytes_per_s),
            f"{1000 * p.latency_s:g}", "-" if p.memory_bytes is None else format_bytes(p.memory_bytes),
        )
        for name, p in profiles.items()
    ]  # fmt: skip
    links = (
        "links: Ookla, Speedtest Global Index, September 2020, global means; the link of each device is an assumption"
    )
    return Table(columns, tuple(rows), notes=(*(f"{name}: {p.source}" for name, p in profiles.items()), links))


# ---- entries -------------------------------------------------------------------------------------------------------


def find_entry(kind: str, name: str) -> Entry:
    """Return the entry of a built-in from the catalogue, or of any other name by importing it.

    Raises:
        ConfigError: The name is unknown, or its module fails to import.
    """
    entry = read_catalogue()[kind].get(name)
    return import_entry(kind, name) if entry is None else Entry(**entry)


@cache
def read_catalogue() -> dict[str, dict[str, Any]]:
    """Return the entries of all built-ins by kind and name."""
    catalogue: dict[str, dict[str, Any]] = json.loads(CATALOGUE.read_text(encoding="utf-8"))
    return catalogue


def import_entry(kind: str, name: str) -> Entry:
    """Import a built-in or a user's function, and return its entry.

    Raises:
        ConfigError: The name is unknown, or its module fails to import.
    """
    factory = names.resolve(kind, name)
    doc = inspect.getdoc(inspect.unwrap(factory)) or ""  # a preset's keys are described by the general factory
    keys = [
        (key, *format_key(parameter.default, find_meaning(doc, key)))
        for key, parameter in inspect.signature(factory).parameters.items()
        if key not in _CONTEXT
    ]
    if ":" in name:
        return Entry((inspect.getdoc(factory) or "").partition("\n")[0], keys)
    facts = getattr(names.import_home(kind, name), "FACTS", None)
    facts = facts.get(name) if isinstance(facts, Mapping) else facts
    return Entry(names.describe_entry(kind, name), keys, None if facts is None else vars(facts))


def format_key(default: Any, meaning: str) -> tuple[str, str]:
    """Return a key's default as TOML has it, and its meaning.

    Of a key that is None by default, which TOML does not have, a clause of the docstring says what holds instead:
    "None: the run's", "the run's by default" or "by default the run's". It becomes the default.
    """
    if default is inspect.Parameter.empty:
        return "needed", meaning
    clauses = re.split(r"(?<=[;.]) (?=\S)", meaning)
    if default not in (None, "", [], {}, ()):
        others = " ".join(clause for clause in clauses if not re.fullmatch(r"\S+ by default[;.]", clause))
        return json.dumps(default, default=str), f"{others.rstrip(';.')}."
    for index, clause in enumerate(clauses):
        match = re.match(r'None(?: or "none")?: (.*)', clause)
        if match or re.search(r"\bby default\b", clause, re.IGNORECASE):
            words = match[1] if match else re.sub(r"(?i)^by default,? | by default", "", clause)
            rest = " ".join(clauses[:index]).rstrip(";."), " ".join(clauses[index + 1 :])
            joint = "; " if clause.endswith(";") and not rest[1][:1].isupper() else ". "
            words, rest_of_all = words.strip(" ;."), joint.join(filter(None, rest)).rstrip(".")
            return words, f"{rest_of_all}." if rest_of_all else ""
    return "none" if default is None else json.dumps(default), meaning


def find_meaning(doc: str, key: str) -> str:
    """Return the description of an argument in a docstring."""
    match = re.search(rf"^ +{re.escape(key)}: (.*(?:\n {{8}}.*)*)", doc, re.MULTILINE)
    return " ".join(match[1].split()) if match else ""
