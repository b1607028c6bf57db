"""The verb `list`: what is built in, with keys and defaults.

These are parsed from the source, because importing takes PyTorch and more than a second. Where the source computes a
key or a default, the module is imported.
"""

import ast
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from types import SimpleNamespace
from typing import Annotated, Any

import typer

from fleetfit import names
from fleetfit.cli import output
from fleetfit.errors import did_you_mean, truncate
from fleetfit.profiles import PROFILES, DeviceProfile
from fleetfit.report.tables import data_table
from fleetfit.report.text import Table, size

_GIVEN = {"architecture", "classes", "channels", "input_shape", "vocabulary", "padding", "simulation"}
"""What the system gives to factories, and no run file."""
REQUIRED = inspect.Parameter.empty
"""The default of a key that has none."""


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
        known = ", ".join(ListKind)
        raise typer.BadParameter(
            f'"{truncate(text)}" cannot be listed; there are {known}.{did_you_mean(text, ListKind)}'
        )
    return ListKind(text)


def list_builtins(
    kind: Annotated[
        ListKind,
        typer.Argument(
            help="What to list.",
            parser=parse_kind,
            metavar=f"{{{'|'.join(ListKind)}}}",
            autocompletion=lambda: [*ListKind],
        ),
    ],
    name: Annotated[str | None, typer.Argument(help="One of them: its keys, their defaults and meaning.")] = None,
) -> None:
    """List what is built in, one line each; data sets with sizes, profiles with figures. With a name, its keys."""
    output.print_table(make_list_table(kind.value) if name is None else make_key_table(kind.value, name))


@dataclass(frozen=True)
class Entry:
    """A built-in, or a function of your own, as `list` shows it.

    Attributes:
        summary: What it is, in one line.
        keys: Its keys and their defaults.
        doc: The docstring that explains them.
        facts: Of a data set: what it is in numbers, or None.
    """

    summary: str
    keys: Mapping[str, Any] = field(default_factory=dict)
    doc: str = ""
    facts: Any = None


def make_list_table(kind: str) -> Table:
    """Return what is built in, one line each."""
    if kind == "profiles":
        return make_profile_table(PROFILES)
    known = {name: find_entry(kind, name) for name in names.list_names(kind)}
    if kind == "data":
        return data_table({name: found.facts for name, found in known.items()})
    rows = [(name, found.summary, ", ".join(found.keys)) for name, found in known.items()]
    return Table(("name", "what it is", "keys"), tuple(rows))


def make_key_table(kind: str, name: str) -> Table:
    """Return the keys of a built-in, or of a function of your own, with their defaults and meanings."""
    if kind == "profiles":
        name = names.find_match(name, PROFILES)
        if name not in PROFILES:
            from fleetfit.config.build.fleet import find_profile

            find_profile(name)  # says which there are
        return make_profile_table({name: PROFILES[name]})
    name = names.match_name(kind, name)
    found = find_entry(kind, name) if name in names.list_names(kind) else import_entry(kind, name)
    rows = []
    for key, default in found.keys.items():
        said = "" if default in (REQUIRED, None) else json.dumps(default, default=str)  # which is how TOML writes it
        rows.append((key, said, _explained(found.doc, key)))
    notes = () if rows else (f"{name} has no keys of its own.",)
    return Table(("key", "default", "meaning"), tuple(rows), f"{name}: {found.summary}", notes)


def _explained(doc: str, key: str) -> str:
    """Return what a docstring says of an argument."""
    found = re.search(rf"^ +{re.escape(key)}: (.*(?:\n {{8}}.*)*)", doc, re.MULTILINE)
    return " ".join(found[1].split()) if found else ""


def make_profile_table(profiles: Mapping[str, DeviceProfile]) -> Table:
    """Return device profiles with their figures, and below where these come from."""
    columns = ("name", "what it is", "multiply-adds/s", "down/s", "up/s", "latency ms", "memory")
    rows = [
        (
            name, p.what, f"{p.multiply_adds_per_s / 1e9:.1f} G", size(p.down_bytes_per_s), size(p.up_bytes_per_s),
            f"{1000 * p.latency_s:g}", "-" if p.memory_bytes is None else size(p.memory_bytes),
        )
        for name, p in profiles.items()
    ]  # fmt: skip
    links = "links: Ookla, Speedtest Global Index, September 2020, global means; which link a device has is assumed"
    return Table(columns, tuple(rows), notes=(*(f"{name}: {p.source}" for name, p in profiles.items()), links))


# ---- by importing it -----------------------------------------------------------------------------------------------


def import_entry(kind: str, name: str) -> Entry:
    """Import a built-in, or a function of your own, and return its entry.

    Raises:
        ConfigError: There is no such name, or its module fails to import.
    """
    factory = names.resolve(kind, name)
    doc = inspect.getdoc(factory) or ""
    keys = {k: p.default for k, p in inspect.signature(factory).parameters.items() if k not in _GIVEN}
    if ":" in name:
        return Entry(doc.partition("\n")[0], keys, doc)
    facts = getattr(names.import_home(kind, name), "FACTS", None)
    facts = facts.get(name) if isinstance(facts, Mapping) else facts
    return Entry(names.describe_entry(kind, name), keys, doc, facts)


# ---- by reading it -------------------------------------------------------------------------------------------------


class NotLiteral(Exception):
    """A source says something in a way that only running it tells."""


def find_entry(kind: str, name: str) -> Entry:
    """Return the entry of a built-in."""
    try:
        return parse_entry(kind, name)
    except NotLiteral:
        return import_entry(kind, name)


def parse_entry(kind: str, name: str) -> Entry:
    """Return what the source of a built-in says of it.

    Raises:
        Unclear: It takes running it.
    """
    module = _parsed_file(names.find_source(kind, name))
    facts = module.value("FACTS") if "FACTS" in module.assigned else None
    facts = facts.get(name) if isinstance(facts, dict) else facts
    if facts is not None and any(isinstance(value, ast.AST) for value in vars(facts).values()):
        raise NotLiteral(name)
    if name in module.functions:
        function = module.functions[name]
        return Entry(_first(ast.get_docstring(module.tree)), module.keys(function), _doc(function), facts)
    for table, maker in module.tables():
        row = module.value(table).get(name)
        if isinstance(row, SimpleNamespace):
            what, fixed, *usual = row.positional
            if not isinstance(fixed, dict):
                raise NotLiteral(name)
            function = module.functions[maker]
            keys = {k: default for k, default in module.keys(function).items() if k not in fixed}
            keys |= {k: default for k, default in (usual[0] if usual else {}).items() if k in keys}
            return Entry(_first(what), keys, _doc(function), facts)
    raise NotLiteral(name)


def _first(doc: str | None) -> str:
    return doc.strip().splitlines()[0] if doc and doc.strip() else ""


def _doc(function: ast.FunctionDef) -> str:
    return ast.get_docstring(function) or ""


@cache
def _parsed_file(path: Any) -> "_Source":
    return _Source(ast.parse(path.read_text(encoding="utf-8")))


def _is_declaration(decorator: ast.expr) -> bool:
    """Return whether a decorator leaves the function as it is, like those that declare unused parameters."""
    function = decorator.func if isinstance(decorator, ast.Call) else decorator
    return isinstance(function, ast.Name) and function.id in ("declare_unused", "needs_group_norm")


class _Source:
    """A module as it is written.

    Attributes:
        tree: All of it.
        functions: Its functions, by name.
        assigned: What is assigned to names at its top level, once each.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        functions = [statement for statement in tree.body if isinstance(statement, ast.FunctionDef)]
        self.functions = {f.name: f for f in functions if all(map(_is_declaration, f.decorator_list))}
        self.assigned: dict[str, ast.expr] = {}
        for statement in tree.body:
            targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
            value = getattr(statement, "value", None)
            if isinstance(targets[0], ast.Name) and isinstance(value, ast.expr):
                self.assigned[targets[0].id] = value

    def tables(self) -> Iterator[tuple[str, str]]:
        """Yield the names of tables of rows, and of the functions that make their entries."""
        for statement in self.tree.body:
            made = statement.value if isinstance(statement, ast.Assign) else None
            if isinstance(made, ast.Call) and isinstance(made.func, ast.Name) and made.func.id == "make_presets":
                maker, table = made.args
                if isinstance(maker, ast.Name) and isinstance(table, ast.Name):
                    yield table.id, maker.id

    def keys(self, function: ast.FunctionDef) -> dict[str, Any]:
        """Return the keys of a factory and their defaults.

        Raises:
            Unclear: It takes anything by name, or a default is computed.
        """
        given = function.args
        if given.vararg or given.kwarg:
            raise NotLiteral(function.name)
        ordered = [*given.posonlyargs, *given.args]
        defaults = [None] * (len(ordered) - len(given.defaults)) + [*given.defaults] + [*given.kw_defaults]
        return {
            argument.arg: REQUIRED if default is None else self._value(default)
            for argument, default in zip([*ordered, *given.kwonlyargs], defaults, strict=True)
            if argument.arg not in _GIVEN
        }

    def value(self, name: str) -> Any:
        """Return a value that is assigned at the top level.

        Raises:
            Unclear: It is computed, or comes from elsewhere.
        """
        if name in self.assigned:
            return self._value(self.assigned[name])
        for statement in self.tree.body:
            if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith("fleetfit."):
                there = next((a.name for a in statement.names if (a.asname or a.name) == name), None)
                path = names.PACKAGE_FOLDER.joinpath(*(statement.module or "").split(".")[1:]).with_suffix(".py")
                if there is not None and path.is_file():
                    return _parsed_file(path).value(there)
        raise NotLiteral(name)

    def _value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Name):
            return self.value(node.id)
        if isinstance(node, ast.Dict):
            found: dict[Any, Any] = {}
            for key, value in zip(node.keys, node.values, strict=True):
                found |= self._value(value) if key is None else {self._value(key): _or_unknown(self._value, value)}
            return found
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in self.functions:
            last = self.functions[node.func.id].body[-1]
            if isinstance(last, ast.Return) and isinstance(last.value, ast.Dict):
                return self._value(last.value)
            raise NotLiteral(ast.unparse(node))
        if isinstance(node, ast.Call):
            by_name = {word.arg: _or_unknown(self._value, word.value) for word in node.keywords if word.arg}
            return SimpleNamespace(positional=[self._value(a) for a in node.args], **by_name)
        try:
            return ast.literal_eval(node)
        except ValueError:
            raise NotLiteral(ast.unparse(node)) from None


def _or_unknown(value: Callable[[ast.expr], Any], node: ast.expr) -> Any:
    """Return the value of an expression; of one that nothing here needs, the expression."""
    try:
        return value(node)
    except NotLiteral:
        return node
