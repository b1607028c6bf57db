"""The verb `list`: built-in names with their keys and defaults.

These are parsed from the source, because importing takes PyTorch and more than a second. If the source computes a key
or a default, the module is imported.
"""

import ast
import inspect
import json
import re
from collections.abc import Iterator, Mapping
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
from fleetfit.report.tables import make_data_table
from fleetfit.report.text import Table, format_bytes

_CONTEXT = {"architecture", "classes", "channels", "input_shape", "vocabulary", "padding", "simulation"}
"""Parameters of factories that come from the system, and never from a run file."""
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
        kinds = ", ".join(ListKind)
        raise typer.BadParameter(
            f'"{truncate(text)}" cannot be listed. Choose one of {kinds}.{did_you_mean(text, ListKind)}'
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
    name: Annotated[
        str | None, typer.Argument(help="Name of one entry: list its keys, their defaults and meanings.")
    ] = None,
) -> None:
    """List built-in methods, models, data sets and more, one per line. With a name, list its keys."""
    output.print_table(make_list_table(kind.value) if name is None else make_key_table(kind.value, name))


@dataclass(frozen=True)
class Entry:
    """A built-in or a user's function, as `list` shows it.

    Attributes:
        summary: Its description in one line.
        keys: Its keys and their defaults.
        doc: The docstring that explains them.
        facts: The numbers of a data set, or None.
    """

    summary: str
    keys: Mapping[str, Any] = field(default_factory=dict)
    doc: str = ""
    facts: Any = None


def make_list_table(kind: str) -> Table:
    """Return the built-ins of a kind as a table."""
    if kind == "profiles":
        return make_profile_table(PROFILES)
    entries = {name: find_entry(kind, name) for name in names.list_names(kind)}
    if kind == "data":
        return make_data_table({name: entry.facts for name, entry in entries.items()})
    rows = [(name, entry.summary, ", ".join(entry.keys)) for name, entry in entries.items()]
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
    entry = find_entry(kind, name) if name in names.list_names(kind) else import_entry(kind, name)
    rows = []
    for key, default in entry.keys.items():
        value = "" if default in (REQUIRED, None) else json.dumps(default, default=str)  # as TOML writes it
        rows.append((key, value, find_meaning(entry.doc, key)))
    notes = () if rows else (f"{name} has no keys of its own.",)
    return Table(("key", "default", "meaning"), tuple(rows), f"{name}: {entry.summary}", notes)


def find_meaning(doc: str, key: str) -> str:
    """Return the description of an argument in a docstring."""
    match = re.search(rf"^ +{re.escape(key)}: (.*(?:\n {{8}}.*)*)", doc, re.MULTILINE)
    return " ".join(match[1].split()) if match else ""


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


# ---- by importing it -----------------------------------------------------------------------------------------------


def import_entry(kind: str, name: str) -> Entry:
    """Import a built-in or a user's function, and return its entry.

    Raises:
        ConfigError: The name is unknown, or its module fails to import.
    """
    factory = names.resolve(kind, name)
    doc = inspect.getdoc(factory) or ""
    keys = {k: p.default for k, p in inspect.signature(factory).parameters.items() if k not in _CONTEXT}
    if ":" in name:
        return Entry(doc.partition("\n")[0], keys, doc)
    facts = getattr(names.import_home(kind, name), "FACTS", None)
    facts = facts.get(name) if isinstance(facts, Mapping) else facts
    return Entry(names.describe_entry(kind, name), keys, doc, facts)


# ---- by reading it -------------------------------------------------------------------------------------------------


class NotLiteral(Exception):
    """A source computes a value that is needed, so its module must be imported."""


def find_entry(kind: str, name: str) -> Entry:
    """Return the entry of a built-in."""
    try:
        return parse_entry(kind, name)
    except NotLiteral:
        return import_entry(kind, name)


def parse_entry(kind: str, name: str) -> Entry:
    """Return the entry of a built-in, parsed from its source.

    Raises:
        NotLiteral: The source computes a part of it.
    """
    module = _parse_file(names.find_source(kind, name))
    facts = module.get_value("FACTS") if "FACTS" in module.assigned else None
    facts = facts.get(name) if isinstance(facts, dict) else facts
    if facts is not None and any(isinstance(value, ast.AST) for value in vars(facts).values()):
        raise NotLiteral(name)
    if name in module.functions:
        function = module.functions[name]
        summary = _get_first_line(ast.get_docstring(module.tree))
        return Entry(summary, module.list_keys(function), ast.get_docstring(function) or "", facts)
    for table, factory in module.list_tables():
        row = module.get_value(table).get(name)
        if isinstance(row, SimpleNamespace):
            summary, fixed, *defaults = row.positional
            if not isinstance(fixed, dict):
                raise NotLiteral(name)
            function = module.functions[factory]
            keys = {key: default for key, default in module.list_keys(function).items() if key not in fixed}
            keys |= {key: default for key, default in (defaults[0] if defaults else {}).items() if key in keys}
            return Entry(_get_first_line(summary), keys, ast.get_docstring(function) or "", facts)
    raise NotLiteral(name)


def _get_first_line(doc: str | None) -> str:
    return doc.strip().splitlines()[0] if doc and doc.strip() else ""


@cache
def _parse_file(path: Any) -> "_Source":
    return _Source(ast.parse(path.read_text(encoding="utf-8")))


def _is_declaration(decorator: ast.expr) -> bool:
    """Return whether a decorator leaves the function as it is, like those that declare unused parameters."""
    function = decorator.func if isinstance(decorator, ast.Call) else decorator
    return isinstance(function, ast.Name) and function.id in ("declare_unused", "needs_group_norm")


class _Source:
    """A parsed module.

    Attributes:
        tree: Its syntax tree.
        functions: Its functions, by name.
        assigned: The expressions that are assigned to names at its top level.
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

    def list_tables(self) -> Iterator[tuple[str, str]]:
        """Yield the names of tables of rows, and of the factories behind them."""
        for statement in self.tree.body:
            call = statement.value if isinstance(statement, ast.Assign) else None
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "make_presets":
                factory, table = call.args
                if isinstance(factory, ast.Name) and isinstance(table, ast.Name):
                    yield table.id, factory.id

    def list_keys(self, function: ast.FunctionDef) -> dict[str, Any]:
        """Return the keys of a factory and their defaults.

        Raises:
            NotLiteral: The factory takes `*args` or `**kwargs`, or a default is computed.
        """
        parameters = function.args
        if parameters.vararg or parameters.kwarg:
            raise NotLiteral(function.name)
        ordered = [*parameters.posonlyargs, *parameters.args]
        required = [None] * (len(ordered) - len(parameters.defaults))
        defaults = [*required, *parameters.defaults, *parameters.kw_defaults]
        return {
            parameter.arg: REQUIRED if default is None else self._evaluate(default)
            for parameter, default in zip([*ordered, *parameters.kwonlyargs], defaults, strict=True)
            if parameter.arg not in _CONTEXT
        }

    def get_value(self, name: str) -> Any:
        """Return a value of the top level of this module, or of the FleetFit module that it is imported from.

        Raises:
            NotLiteral: It is computed, or comes from another package.
        """
        if name in self.assigned:
            return self._evaluate(self.assigned[name])
        for statement in self.tree.body:
            if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith("fleetfit."):
                original = next((a.name for a in statement.names if (a.asname or a.name) == name), None)
                path = names.PACKAGE_FOLDER.joinpath(*(statement.module or "").split(".")[1:]).with_suffix(".py")
                if original is not None and path.is_file():
                    return _parse_file(path).get_value(original)
        raise NotLiteral(name)

    def _evaluate(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Name):
            return self.get_value(node.id)
        if isinstance(node, ast.Dict):
            table: dict[Any, Any] = {}
            for key, value in zip(node.keys, node.values, strict=True):
                table |= self._evaluate(value) if key is None else {self._evaluate(key): self._evaluate_known(value)}
            return table
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in self.functions:
            last = self.functions[node.func.id].body[-1]
            if isinstance(last, ast.Return) and isinstance(last.value, ast.Dict):
                return self._evaluate(last.value)
            raise NotLiteral(ast.unparse(node))
        if isinstance(node, ast.Call):
            keywords = {word.arg: self._evaluate_known(word.value) for word in node.keywords if word.arg}
            return SimpleNamespace(positional=[self._evaluate(a) for a in node.args], **keywords)
        try:
            return ast.literal_eval(node)
        except ValueError:
            raise NotLiteral(ast.unparse(node)) from None

    def _evaluate_known(self, node: ast.expr) -> Any:
        """Return the value of an expression, or the expression itself if it is computed."""
        try:
            return self._evaluate(node)
        except NotLiteral:
            return node
