"""Names in a configuration become objects: the one place where a string decides what is imported.

A built-in name is a row of `BUILT_IN`: `resolve("methods", "fedrolex")` is function `fedrolex` of module
`fleetfit.methods.fedrolex`. A plug-in is `package.module:function` or `file.py:function`. Nothing else is ever
imported; a run file that names a plug-in runs its code (see SECURITY.md).

Entries that differ in numbers only are rows of a table in one module, and `make_entries` makes their functions:

    SIZES = {
        "resnet20": Row("ResNet-20: 9 blocks.", {"depth": 20}),
        "resnet32": Row("ResNet-32: 15 blocks.", {"depth": 32}),
    }
    resnet20, resnet32 = make_entries(resnet, SIZES)
"""

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from fleetfit import files
from fleetfit.errors import ConfigError, FleetFitError, did_you_mean, format_cause, format_expected, truncate
from fleetfit.factories import copy_declarations

OWN = Path(__file__).parent
"""The package's folder."""


def _list_modules(kind: str, names: str, tables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the module of each name: one of the same name, or the one in whose table it is."""
    modules = {name: f"fleetfit.{kind}.{name}" for name in names.split()}
    for module, rows in (tables or {}).items():
        modules |= dict.fromkeys(rows.split(), f"fleetfit.{kind}.{module}")
    return modules


BUILT_IN: Mapping[str, Mapping[str, str]] = {
    "methods": _list_modules("methods", (
        "adaptivefl all_large decoupled depthfl exclusivefl fedavg feddf feddropout fedrolex fedsgd heterofl "
        "inclusivefl reefl scalefl"
    )),
    "options": _list_modules("options", (
        "fedadam fedavgm feddyn fedprox fedyogi in_time krum lora_product outliers trimmed_mean"
    )),
    "selection": _list_modules("selection", "availability diversity loss rl size uniform"),
    "attacks": _list_modules("attacks", (
        "backdoor beyond_core false_budget false_level false_samples free_rider inner_product label_flip "
        "little_is_enough min_max noise sign_flip"
    )),
    "models": _list_modules("models", "bert cnn mlp msdnet resnet vgg16 vim vit", {
        "bert": "bert_base bert_small bert_tiny",
        "fedavg_images": "fedavg_cifar_cnn fedavg_cnn mlp_2nn",
        "inverted": "efficientnet_b0 efficientnet_b4 mobilenetv2",
        "lstm": "char_lstm word_lstm",
        "msdnet": "msdnet24",
        "resnet": "resnet20 resnet32 resnet56 resnet110",
        "resnet_four_stages": "resnet18 resnet34",
        "vim": "vim_ti",
        "vit": "deit_b deit_s deit_ti",
    }),
    "peft": _list_modules("peft", "frozen full lora parallel_adapter serial_adapter ssf"),
    "data": _list_modules("data", "", {
        "files.arrays": "arrays", "files.images": "images", "files.plain_text": "plain_text", "files.table": "table",
        "files.text": "text", "sets.cifar": "cifar10 cifar100", "sets.digits": "digits", "sets.femnist": "femnist",
        "sets.imagenet": "imagenet", "sets.mnist": "fashion_mnist mnist", "sets.shakespeare": "shakespeare",
        "sets.short_texts": "ag_news sst2", "sets.speech_commands": "speech_commands", "sets.widar": "widar",
    }),
    "engines": _list_modules("engines", "flower local processes ray"),
    "callbacks": _list_modules("callbacks", "tensorboard wandb"),
}  # fmt: skip
"""The module of each built-in name, by kind; the name is a function or class in it."""
_PLURALS = {"selection": "ways of client selection", "peft": "ways of fine-tuning"}
_LONGEST = 200  # characters of a name
_IDENTIFIER = re.compile(r"[a-z_][a-z0-9_]*", re.IGNORECASE)
_SECTION = re.compile(r"\[([\w.]+)\](?: (\w+))?")  # such as "[method]" and "[cohort] choose"
_T = TypeVar("_T")


def list_names(kind: str) -> list[str]:
    """Return the built-in names of a kind, sorted; the kinds are those of `BUILT_IN`."""
    return sorted(BUILT_IN.get(kind, ()))


def match_name(kind: str, name: str) -> str:
    """Return the built-in name that a text means: `ag-news` is `ag_news`, `ResNet-20` is `resnet20`; or the text.

    Hyphens, underscores and capital letters make no difference, unless two names differ in nothing else.
    """
    return find_match(name, list_names(kind))


def find_match(name: str, known: Iterable[str]) -> str:
    """Return which of some names a text means, by the rule of `match_name`; or the text."""
    known = list(known)
    if not isinstance(name, str) or ":" in name or len(name) > _LONGEST or name in known:
        return name
    matches = [one for one in known if _simplify(one) == _simplify(name)]
    return matches[0] if len(matches) == 1 else name


def _simplify(name: str) -> str:
    return re.sub(r"[-_]", "", name).lower()


def find_source(kind: str, name: str) -> Path:
    """Return the source file of a built-in name."""
    path = OWN.joinpath(*BUILT_IN[kind][name].split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def import_home(kind: str, name: str) -> ModuleType:
    """Return the module of a built-in name."""
    return importlib.import_module(BUILT_IN[kind][name])


def describe_entry(kind: str, name: str) -> str:
    """Return the first line of a built-in's docstring: of its module, or of a row's function."""
    module = import_home(kind, name)
    entry = getattr(module, name)
    own = module if not hasattr(entry, "row") else entry
    return (own.__doc__ or "").strip().partition("\n")[0]


def resolve(kind: str, name: str) -> Callable[..., Any]:
    """Return the function of a name.

    Args:
        kind: As in `BUILT_IN`, or one without built-in names, such as "hooks".
        name: `identifier`, `package.module:function` or `file.py:function`.

    Raises:
        ConfigError: The name is unknown, malformed, or its module fails to import.
    """
    if not isinstance(name, str) or not name:
        raise ConfigError(f"a name in {kind} must be text, got {truncate(repr(name))}.")
    if ":" in name:
        return _load_plug_in(kind, name)
    name = match_name(kind, name)
    if not _IDENTIFIER.fullmatch(name.replace("-", "_")):
        raise ConfigError(
            f'"{truncate(name)}" is not a valid name in {kind}: write a built-in name, "package.module:function" or '
            '"file.py:function".'
        )
    known = list_names(kind)
    if name not in known:
        raise ConfigError(
            f'"{truncate(name)}" is not among the {_PLURALS.get(kind, kind)}: {", ".join(known)}.'
            f"{did_you_mean(name.replace('-', '_').lower(), known)}"
        )
    return typing.cast(Callable[..., Any], getattr(import_home(kind, name), name))


def _load_plug_in(kind: str, name: str) -> Callable[..., Any]:
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
        raise ConfigError(f'"{name}": "{place}" is not a module name; write "package.module:function".')
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
        path = files.parse_path(place).resolve()
        files.check_file(path, ConfigError)
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
    made.row = row  # type: ignore[attr-defined]
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
    """Return the plug-in that raised an error, with file and line; None if FleetFit raised it.

    An error that a library raises belongs to the library's caller. A plug-in's code is the module that a configuration
    names, and every module that is neither FleetFit's nor installed.
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
    """Return how a plug-in failed, as the end of a sentence."""
    if isinstance(error, SystemExit):
        return f"called sys.exit({error.code!r}), which would end the whole program; raise an error instead"
    return f"raised {format_cause(error, typed=True)}"


def anchor_name(name: str, folder: Path) -> str:
    """Return the name with a relative `file.py` made absolute, seen from the folder of the run file."""
    place, colon, attribute = name.rpartition(":")
    if not colon or not place.endswith(".py"):
        return name
    path = files.parse_path(place, f'"{name}"')
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
        ConfigError: An unknown key, a missing one, or a value of the wrong type. Its `key` is the section's and the
            parameter's name, such as "method.beta", also where the factory raises it.
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
                f"{options}.{did_you_mean(key, (*own, *known, *unsaid))}",
                key=_join_key(where, key),
            )
        arguments[key] = (
            _fit(value, parameters[key], function, f"{where} {name}: {key}", _join_key(where, key))
            if key in parameters
            else value
        )
    arguments |= {key: value for key, value in given.items() if key in parameters or open_ended}
    for key in known:
        if (
            parameters[key].default is inspect.Parameter.empty
            and key not in arguments
            and (parameters[key].kind is not inspect.Parameter.VAR_POSITIONAL)
        ):
            raise ConfigError(f'{where} {name} needs "{key}".', key=_join_key(where, key))
    try:
        return function(**arguments)
    except ConfigError as error:
        if error.key in parameters:  # as `check_range` names it
            error.key = _join_key(where, str(error.key))
        raise
    except SystemExit as error:  # which would end a run with exit code 0 and without a word
        raise ConfigError(f"{find_plug_in(error) or f'{where} {name}'} {describe_failure(error)}.") from error


def _join_key(where: str, key: str) -> str:
    section = _SECTION.fullmatch(where)
    return ".".join(filter(None, [*(section.groups() if section else ()), key]))


def _fit(value: Any, parameter: inspect.Parameter, function: Callable[..., Any], where: str, key: str) -> Any:
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
            raise ConfigError(
                f"{where}: {format_expected(first['ctx']['expected'], first['input'])}", key=key
            ) from None
        raise ConfigError(f"{where}: {first['msg'].lower()}, got {truncate(repr(value))}.", key=key) from None
