"""Names in a configuration become objects: the one place where a string decides what is imported.

Built in: `resolve("methods", "fedrolex")` is function `fedrolex` in `fleetfit/methods/fedrolex.py`. Anybody else's:
`package.module:function` or `file.py:function`. Nothing else is ever imported; a run file that names such a function
runs its code (see SECURITY.md).

A module is an entry if it has a function or class of its own name. What differs in numbers only is not a module each,
but rows of a table in one of them, a literal that is called as `_TABLES` says, so that its names are read without
running the module (and torch). Every row is a function in the module, too; `entries` makes them of one function:

    SIZES = {
        "resnet20": Row("ResNet-20: 9 blocks.", {"depth": 20}),
        "resnet32": Row("ResNet-32: 15 blocks.", {"depth": 32}),
    }
    resnet20, resnet32 = entries(resnet, SIZES)
"""

import ast
import functools
import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import sysconfig
import traceback
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, TypeVar

from fleetfit import paths
from fleetfit.errors import ConfigError, FleetFitError, did_you_mean, format_cause, format_expected, truncate
from fleetfit.factories import copy_declarations

OWN = Path(__file__).parent
"""The package's folder."""
_SAID = {"selection": "ways of client selection", "peft": "ways of fine-tuning"}
_LONGEST = 200  # characters of a name
_IDENTIFIER = re.compile(r"[a-z_][a-z0-9_]*", re.IGNORECASE)
_TABLES = {"models": "SIZES", "data": "SETS"}
"""What the table of a kind's module is called, if it has one."""
_ROOMS = {"data": ("sets", "files")}
"""The folders of a kind in which its entries are, where they are not in its own."""
_T = TypeVar("_T")


def list_names(kind: str) -> list[str]:
    """Return the built-in names of a kind, sorted: "methods", "models" or another one of `resolve`."""
    return sorted(_homes(kind))


def match_name(kind: str, name: str) -> str:
    """Return the built-in name that a text means: `ag-news` is `ag_news`, `ResNet-20` is `resnet20`; or the text.

    Hyphens, underscores and capital letters make no difference, unless two names differ in nothing else.

    Args:
        kind: As of `resolve`.
        name: As somebody wrote it.
    """
    return find_match(name, _homes(kind))


def find_match(name: str, known: Iterable[str]) -> str:
    """Return which of some names a text means, by the rule of `understood`; or the text."""
    known = list(known)
    if not isinstance(name, str) or ":" in name or len(name) > _LONGEST or name in known:
        return name
    found = [one for one in known if _bare(one) == _bare(name)]
    return found[0] if len(found) == 1 else name


def _bare(name: str) -> str:
    return re.sub(r"[-_]", "", name).lower()


@functools.cache
def _homes(kind: str) -> Mapping[str, str]:
    """Return the module of each built-in name of a kind, found in their source: none of them is imported."""
    found: dict[str, str] = {}
    for room in _ROOMS.get(kind, ("",)):
        place, path = Path(_package(kind), room), ".".join(filter(None, (f"fleetfit.{kind}", room)))
        for file in (*place.glob("*.py"), *place.glob("*/__init__.py")):
            module = file.parent.name if file.name == "__init__.py" else file.stem
            if module.startswith("_"):
                continue
            source = file.read_text(encoding="utf-8")
            own = re.search(rf"^(?:def|class) {module}\b", source, re.MULTILINE)
            for name in (*([module] if own else []), *_rows(source, _TABLES.get(kind))):
                found[name] = f"{path}.{module}"
    return MappingProxyType(found)


def _rows(source: str, table: str | None) -> Iterator[str]:
    """Yield the keys of a module's literal table."""
    text = re.search(rf"^{table}\b.*?(?:^\}}|\Z)", source, re.MULTILINE | re.DOTALL)  # to parse it all takes 100 ms
    for statement in ast.parse(text[0]).body if table and text else ():
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        value = getattr(statement, "value", None)
        if isinstance(value, ast.Dict) and any(isinstance(t, ast.Name) and t.id == table for t in targets):
            yield from (str(ast.literal_eval(key)) for key in value.keys if key is not None)


def _package(kind: str) -> Path:
    """Return the folder of a kind, without importing what is in it."""
    spec = importlib.util.find_spec(f"fleetfit.{kind}")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"fleetfit has no package {kind}")
    return Path(spec.submodule_search_locations[0])


def find_source(kind: str, name: str) -> Path:
    """Return the file that a built-in name stands in."""
    place = _package(kind).joinpath(*_homes(kind)[name].split(".")[2:])
    return place / "__init__.py" if place.is_dir() else place.with_suffix(".py")


def import_home(kind: str, name: str) -> ModuleType:
    """Return the module that a built-in name stands in."""
    return importlib.import_module(_homes(kind)[name])


def describe_entry(kind: str, name: str) -> str:
    """Return what a built-in is, in one line: the first of its module's docstring, or what the table's row says."""
    module = import_home(kind, name)
    row = name in getattr(module, _TABLES.get(kind, ""), {})
    doc = (getattr(module, name) if row else module).__doc__ or ""
    return doc.strip().splitlines()[0] if doc.strip() else ""


def resolve(kind: str, name: str) -> Callable[..., Any]:
    """Return the function that a name stands for.

    Args:
        kind: The package that holds the built-in ones: "methods", "options", "selection", "models", "peft", "data",
            "engines", "callbacks".
        name: `identifier`, `package.module:function` or `file.py:function`.

    Raises:
        ConfigError: The name is unknown, malformed, or its module fails to import.
    """
    if not isinstance(name, str) or not name:
        raise ConfigError(f"a name in {kind} must be text, got {truncate(repr(name))}.")
    if ":" in name:
        place, _, attribute = name.rpartition(":")
        if kind in _TABLES and place == f"fleetfit.{kind}.{attribute}" and attribute in list_names(kind):
            return resolve(kind, attribute)  # by the path of a module of its own, which a row may have had once
        return _outside(kind, name)
    name = match_name(kind, name)
    if not _IDENTIFIER.fullmatch(name.replace("-", "_")):
        raise ConfigError(
            f'"{truncate(name)}" is no valid name in {kind}: write a built-in name, "package.module:function" or '
            '"file.py:function".'
        )
    known = list_names(kind)
    if name not in known:
        raise ConfigError(
            f'"{truncate(name)}" is not among the {_SAID.get(kind, kind)}: {", ".join(known)}.'
            f"{did_you_mean(name.replace('-', '_').lower(), known)}"
        )
    return typing.cast(Callable[..., Any], getattr(import_home(kind, name), name))


def _outside(kind: str, name: str) -> Callable[..., Any]:
    place, _, attribute = name.rpartition(":")
    from fleetfit.tensor_defaults import tensor_defaults  # PyTorch, which other names do not need

    with tensor_defaults():  # a plug-in that sets PyTorch's default type does so for itself
        module = _module_of_file(place, name) if place.endswith(".py") else _module_by_name(place, name)
    found = getattr(module, attribute, None)
    if found is None:
        public = [key for key in vars(module) if not key.startswith("_")]
        raise ConfigError(f'"{name}": {place} has no "{attribute}".{did_you_mean(attribute, public)}')
    if not callable(found):
        raise ConfigError(f'"{name}" in {kind} must be a function or a class, got {type(found).__name__}.')
    return typing.cast(Callable[..., Any], found)


def _module_by_name(place: str, name: str) -> ModuleType:
    if not all(part.isidentifier() for part in place.split(".")):
        raise ConfigError(f'"{name}": "{place}" is no module name; write "package.module:function".')
    if "" not in sys.path and str(Path.cwd()) not in sys.path:  # an installed script does not see the working folder
        sys.path.append(str(Path.cwd()))
    try:
        found = importlib.import_module(place)
    except (FleetFitError, KeyboardInterrupt):
        raise
    except BaseException as error:  # also sys.exit, which would end this process without a word
        raise ConfigError(f'"{name}": importing {place} failed: {format_cause(error, typed=True)}') from error
    _note(found, name)
    return found


def _module_of_file(place: str, name: str) -> ModuleType:
    try:
        path = paths.parse_path(place).resolve()
        paths.check_file(path, ConfigError)
    except (ConfigError, OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise ConfigError(f'"{name}": {error}') from None
    key = f"_fleetfit_file_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if key in sys.modules:
        return sys.modules[key]
    spec = importlib.util.spec_from_file_location(key, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f'"{name}": {path} cannot be read as Python.')
    if str(path.parent) not in sys.path:  # last, so that the file's neighbours can be imported and shadow nothing
        sys.path.append(str(path.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[key] = module  # before running it: dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        sys.modules.pop(key, None)
        if isinstance(error, FleetFitError | KeyboardInterrupt):
            raise
        raise ConfigError(f'"{name}": importing {path} failed: {format_cause(error, typed=True)}') from error
    _note(module, name)
    return module


# ---- the rows of a table -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """An entry that is one of several sizes of the same thing.

    Attributes:
        what: What it is, in one line.
        fixed: The arguments that make it so; they are no keys of it.
        usual: Its keys' defaults, where they are not those of the function that makes all of them.
    """

    what: str
    fixed: Mapping[str, Any]
    usual: Mapping[str, Any] = field(default_factory=dict)


def make_entries(make: Callable[..., _T], table: Mapping[str, Row]) -> list[Callable[..., _T]]:
    """Return the function of each row, with the keys, defaults and explanations that are left for it.

    Args:
        make: What they all are made by. Its module gives each of them its row's name.
        table: The rows by their names.
    """
    return [_entry(make, name, row) for name, row in table.items()]


def _entry(make: Callable[..., _T], name: str, row: Row) -> Callable[..., _T]:
    signature, hints = inspect.signature(make), typing.get_type_hints(make)
    keys = [
        p.replace(default=row.usual.get(k, p.default)) for k, p in signature.parameters.items() if k not in row.fixed
    ]
    kept = signature.replace(parameters=keys)

    def made(*values: Any, **keys: Any) -> _T:
        return make(**{**row.fixed, **row.usual, **kept.bind(*values, **keys).arguments})

    doc = inspect.cleandoc(make.__doc__ or "").partition("\n")[2]
    for key in row.fixed:
        doc = re.sub(rf"\n +{key}: .*(?:\n {{8}}.*)*", "", doc)
    made.__name__ = made.__qualname__ = name
    made.__module__, made.__doc__ = make.__module__, f"{row.what}\n{doc}"
    made.__annotations__ = {key: hint for key, hint in hints.items() if key not in row.fixed}
    made.__signature__ = kept  # type: ignore[attr-defined]
    copy_declarations(make, made)
    return made


# ---- whose code it was ---------------------------------------------------------------------------------------------

_plug_ins: dict[str, str] = {}
"""File of a plug-in's module -> how the configuration calls it."""
_OWN = f"{OWN}{os.sep}"
_INSTALLED = tuple(sysconfig.get_path(key) for key in ("stdlib", "platstdlib", "purelib", "platlib"))


def _note(module: ModuleType, name: str) -> None:
    if isinstance(getattr(module, "__file__", None), str):
        _plug_ins.setdefault(str(module.__file__), name)


def find_plug_in(error: BaseException) -> str | None:
    """Return the plug-in in whose code an error was raised, and where in it; None: it was FleetFit's own.

    What a library raises is of whoever called it. A plug-in's code is in the module that a configuration has named, or
    in another one that is neither FleetFit's nor installed.
    """
    found = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if file in _plug_ins:
            found = f'"{_plug_ins[file]}" ({Path(file).name}, line {line})'
        elif file.startswith(_OWN):
            found = None
        elif found is not None and not file.startswith((*_INSTALLED, "<")):
            found = f"{found.partition(' (')[0]} ({Path(file).name}, line {line})"
    return found


def describe_failure(error: BaseException) -> str:
    """Return what a plug-in did, as the end of a sentence."""
    if isinstance(error, SystemExit):
        return f"called sys.exit({error.code!r}), which would end the whole program; raise an error instead"
    return f"raised {format_cause(error, typed=True)}"


def anchor_name(name: str, folder: Path) -> str:
    """Return the name with a relative `file.py` made absolute, seen from the folder of the run file."""
    place, colon, attribute = name.rpartition(":")
    if not colon or not place.endswith(".py"):
        return name
    path = paths.parse_path(place, f'"{name}"')
    return f"{path if path.is_absolute() else (folder / path).resolve()}:{attribute}"


@functools.lru_cache(maxsize=256)
def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def call(
    function: Callable[..., Any], name: str, where: str, values: Mapping[str, Any], own: Sequence[str] = (),
    unsaid: Sequence[str] = (), **given: Any,
) -> Any:  # fmt: skip
    """Call a factory with the values of a configuration, checked against its signature.

    Args:
        function: The factory; its signature is its schema.
        name: How the configuration calls it, for messages.
        where: The configuration section, for messages, such as "[method]".
        values: Keyword arguments from the configuration.
        own: Keys that the section has beside the factory's, for messages.
        unsaid: Further ones that a message does not list, but may mean.
        **given: Keyword arguments from FleetFit, passed only where the signature has them.

    Raises:
        ConfigError: An unknown key, a missing one, or a value of the wrong type.
    """
    parameters = _parameters(function)
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    known = [key for key, p in parameters.items() if p.kind is not inspect.Parameter.VAR_KEYWORD and key not in given]
    arguments: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known and not open_ended:
            options = ", ".join((*own, *known)) or "nothing"
            raise ConfigError(
                f'{where} {name} has no "{truncate(key)}"; it takes '
                f"{options}.{did_you_mean(key, (*own, *known, *unsaid))}"
            )
        arguments[key] = (
            _fit(value, parameters[key], function, f"{where} {name}: {key}") if key in parameters else value
        )
    arguments |= {key: value for key, value in given.items() if key in parameters or open_ended}
    for key in known:
        if (
            parameters[key].default is inspect.Parameter.empty
            and key not in arguments
            and (parameters[key].kind is not inspect.Parameter.VAR_POSITIONAL)
        ):
            raise ConfigError(f'{where} {name} needs "{key}".')
    try:
        return function(**arguments)
    except SystemExit as error:  # which would end a run with exit code 0 and without a word
        raise ConfigError(f"{find_plug_in(error) or f'{where} {name}'} {describe_failure(error)}.") from error


def _fit(value: Any, parameter: inspect.Parameter, function: Callable[..., Any], where: str) -> Any:
    """Check one value against the annotation of its parameter; lists become tuples, whole numbers floats."""
    try:
        hint = typing.get_type_hints(function).get(parameter.name, Any)
    except Exception:  # an annotation that cannot be evaluated outside its own module: nothing to check against
        return value
    if hint is Any or hint is inspect.Parameter.empty:
        return value
    import pydantic

    try:
        adapter = pydantic.TypeAdapter(hint, config=pydantic.ConfigDict(arbitrary_types_allowed=True))
    except pydantic.PydanticSchemaGenerationError:
        return value
    try:
        strict = isinstance(value, bool | str)  # "3" is no number and true is no 1
        return adapter.validate_python(value, strict=strict)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "literal_error":
            raise ConfigError(f"{where}: {format_expected(first['ctx']['expected'], first['input'])}") from None
        raise ConfigError(f"{where}: {first['msg'].lower()}, got {truncate(repr(value))}.") from None
