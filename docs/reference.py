"""The pages keys.md, built-in.md, verbs.md and networks.md; see generate.py."""

import inspect
import json
import re
import textwrap
import tomllib
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from fleetfit import names
from fleetfit.cli import listing
from fleetfit.cli.main import make_app
from fleetfit.config.schema import Experiment, GroupSection, LevelSection, PartitionSection
from fleetfit.core.local import OPTIMIZERS, Constant, Cosine, Exponential, Step
from fleetfit.core.section import OpenSection, Section, Unit

MADE = "<!-- made by docs/generate.py from {0}: change those -->"
MAX_REASON = 100
LIMITS = {"gt": "above {0:g}", "ge": "from {0:g}", "lt": "below {0:g}", "le": "up to {0:g}"}
TYPES = {int: "whole number", float: "number", str: "text", bool: "true or false", typing.Any: "name"}


# ---- networks.md ---------------------------------------------------------------------------------------------------

BED = Path(__file__).parents[1] / "tests" / "bed"
NETWORKS = """# Networks of others

{made}

{total} networks of other people's packages, small and with random weights. {derived} are derived and proved, and train
for a round at four levels without a failed job. {refused} refused, with the reason. Each is used as it comes:
`fleetfit.run(model=network, data=data)`. `make test-zoo` repeats this for the packages that are installed
([how](install.md#networks-of-other-packages)), and `make zoo-table` writes this page.

- **Axes** are those of width that are cut; what stays **whole** at every level has its size and the reason.
- **Exits** count the network's own classifier.
- **Levels** are the shares of the parameters that four levels took for budgets of 1/8, 1/4, 1/2 and 1.
- **CPU s** is the time to derive and prove on one core.
- HuBERT and Wav2Vec2 are without masks of time (`mask_time_prob=0.0`): HuBERT's mask is a parameter that only training
  uses, and is refused.
- `Encoder` and `Columns`, in `tests/bed/networks.py`, put a classifier on an encoder and pass numbers of a table on.
"""


def networks_page() -> str:
    """Return networks.md: the networks of tests/bed/networks.toml, with what is recorded of them beside it."""
    rows = tomllib.loads((BED / "networks.toml").read_text(encoding="utf-8"))["network"]
    record = json.loads((BED / "networks.json").read_text(encoding="utf-8"))
    sections: dict[str, list[str]] = {}
    refused = 0
    for row in rows:
        outcome, name = record[f"{row['package']}: {row['name']}"], row["name"].replace("_", "\\_")
        lines = sections.setdefault(row["package"], [])
        python = f"`{row['line']}`"
        if "refused" in outcome:
            refused += 1
            lines.append(f"| {name} | refused | | | {outcome['derived in s']:g} | {python} | {row['refused']} |")
            continue
        levels = " ".join(f"{share:.2f}" for share in outcome["levels"])
        figures = f"{outcome['axes']} | {outcome['exits']} | {levels} | {outcome['derived in s']:g}"
        lines.append(f"| {name} | {figures} | {python} | {_join_whole(outcome['whole'])} |")
    count = "One is" if refused == 1 else f"{refused} are"
    made = MADE.format("tests/bed/networks.toml and networks.json")
    page = NETWORKS.format(made=made, total=len(rows), derived=len(rows) - refused, refused=count)
    head = "| network | axes | exits | levels | CPU s | Python | whole |\n| --- | --- | --- | --- | --- | --- | --- |"
    tables = [f"## {package}\n\n{head}\n" + "\n".join(lines) for package, lines in sections.items()]
    return "\n\n".join([page.strip(), *tables]) + "\n"


def _join_whole(lines: Sequence[str]) -> str:
    """Return what stays whole, by its reason of one line, for a cell of a table."""
    axes: dict[str, list[str]] = {}
    for line in lines:
        axis, _, reason = line.rstrip(".").partition(": ")
        reason = reason if len(reason) <= MAX_REASON else reason[: MAX_REASON - 3].rstrip() + "..."
        reason = reason.replace("|", "\\|").replace("*", "\\*").replace("_", "\\_").replace("<", "&lt;")
        axes.setdefault(reason, []).append(f"`{axis}`")
    return "; ".join(f"{', '.join(dict.fromkeys(names))}: {reason}" for reason, names in axes.items())


# ---- keys.md -------------------------------------------------------------------------------------------------------


def explained(doc: str) -> dict[str, str]:
    """Return the entries of the section Attributes, or Args, of a docstring."""
    found = re.search(r"^(?:Attributes|Args):\n(.*?)(?=^\w+:\n|\Z)", inspect.cleandoc(doc), re.DOTALL | re.MULTILINE)
    entries = re.findall(
        r"^(\w+): (.*?)(?=^\w+: |\Z)", textwrap.dedent(found[1]) if found else "", re.DOTALL | re.MULTILINE
    )
    return {name: " ".join(said.split()) for name, said in entries}


def written(value: object) -> str:
    """Return a value as a run file has it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(written, value))}]"
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{k} = {written(v)}' for k, v in value.items())} }}"
    if isinstance(value, BaseModel):
        return written(value.model_dump(exclude_defaults=not isinstance(value, Constant)))
    return f'"{value}"' if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else str(value)


def limits(metadata: Iterator[Any] | list[Any]) -> str:
    """Return the limits of a number in words."""
    said = [words.format(value) for one in metadata for name, words in LIMITS.items()
            if isinstance(value := getattr(one, name, None), int | float)]  # fmt: skip
    return ", ".join(dict.fromkeys(said))


def type_in_words(kind: Any, metadata: list[Any] | None = None) -> str:
    """Return the type of a key in words."""
    if kind is None or kind is type(None):
        return ""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind == Unit:
        return 'text with a unit, such as "20 ms"'
    if origin is typing.Annotated:
        further = [m for one in inner[1:] for m in (getattr(one, "metadata", None) or [one])]
        return type_in_words(inner[0], [*further, *(metadata or [])])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(filter(None, map(type_in_words, inner))))
    if origin is typing.Literal:
        return " or ".join(f"`{written(word)}`" for word in inner)
    if origin in (list, tuple):
        return f"list of {type_in_words(inner[0])}".replace("list of name", "list")
    if origin is dict or (isinstance(kind, type) and issubclass(kind, BaseModel)):
        return "table"
    words = TYPES.get(kind, getattr(kind, "__name__", str(kind)))
    between = limits(metadata or [])
    return f"{words} {between}".strip()


def find_default(name: str, field: FieldInfo, said: str) -> tuple[str, str]:
    """Return a key's default, as a run file has it or in words, and its meaning without it."""
    if field.default_factory_takes_validated_data:  # which depends on the optimizer
        optimizers: dict[str, list[str]] = {}
        for optimizer, settings in OPTIMIZERS.items():
            if name in settings:
                optimizers.setdefault(written(settings[name]), []).append(optimizer)
        return ", ".join(f"`{value}` ({', '.join(names)})" for value, names in optimizers.items()), said
    if field.is_required():
        return "needed", said
    return split_default(field.get_default(call_default_factory=True), said)


def split_default(value: object, said: str) -> tuple[str, str]:
    """Return a default, as a run file has it or in words, and the meaning of its key without it."""
    default, rest = listing.format_key(value, said)
    default = default if value in (None, "", [], {}) else written(value)
    return mark_value(default), rest


def mark_value(default: str) -> str:
    """Return a default with backticks, unless it is in words."""
    return f"`{default}`" if re.fullmatch(r"""".*"|\[.*\]|\{.*\}|-?[\d.e-]+|true|false""", default) else default


def inner_sections(kind: Any) -> Iterator[type[Section]]:
    """Yield the sections that a key's value may be."""
    if isinstance(kind, type) and issubclass(kind, Section):
        yield kind
    for one in typing.get_args(kind):
        yield from inner_sections(one)


def first_sentences(section: type[Section]) -> str:
    """Return what a section's docstring says above its attributes."""
    first = " ".join(re.split(r"\n\n|\nAttributes:", inspect.cleandoc(section.__doc__ or ""))[0].split())
    first = re.sub(r"^`[^`]+`: (\w)", lambda m: m[1].upper(), first)
    return re.sub(r" ?\(see `fleetfit\.[\w.]+`\)", "", first)


def keys_table(
    section: type[Section], meanings: Mapping[str, str], anchors: Mapping[type[Section], str] | None = None
) -> str:
    """Return the keys of a section as a table: key, values, default, meaning.

    Args:
        section: The section.
        meanings: What its keys mean.
        anchors: Where the page has the keys of an inner section.

    Raises:
        ValueError: A key is not explained.
    """
    lines = ["| key | takes | default | meaning |", "| --- | --- | --- | --- |"]
    for name, field in section.model_fields.items():
        is_section = isinstance(field.annotation, type) and issubclass(field.annotation, Section)
        if not is_section and name not in meanings:
            raise ValueError(f"{section.__name__} does not explain {name}: give it a line under Attributes.")
        said = meanings[name] if name in meanings else first_sentences(field.annotation)
        there = {anchors[inner] for inner in inner_sections(field.annotation) if anchors and inner in anchors}
        default, said = ("", said) if is_section else find_default(name, field, said)
        said += "".join(f" [Its keys](#{anchor})." for anchor in sorted(there))
        cells = (f"`{name}`", type_in_words(field.annotation, field.metadata), default, said)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join([*lines, *(partition_rows() if section is PartitionSection else ())])


def partition_rows() -> Iterator[str]:
    """Yield a row for each key of a built-in kind of partition."""
    for kind in names.KINDS["partitions"].modules:
        function = names.resolve("partitions", kind)
        meanings = explained(function.__doc__ or "")
        for key, parameter in [*inspect.signature(function, eval_str=True).parameters.items()][3:]:
            default, said = split_default(parameter.default, meanings[key])
            said = said[:1].lower() + said[1:]
            yield f'| `{key}` | {type_in_words(parameter.annotation)} | {default} | With "{kind}": {said} |'


def sections_of(section: type[Section], where: str = "") -> Iterator[tuple[str, type[Section]]]:
    """Yield each section with its dotted name, outer ones first; a list's has brackets twice."""
    yield where, section
    for name, field in section.model_fields.items():
        there = f"{where}.{name}" if where else name
        for inner in inner_sections(field.annotation):
            if inner in (GroupSection, LevelSection):
                yield f"[{there}]", inner
            elif inner not in (Constant, Step, Cosine, Exponential):
                yield from sections_of(inner, there)


def keys_page() -> str:
    """Return keys.md."""
    parts = [
        "# Every key of a run file",
        MADE.format("the docstrings of fleetfit/config/schema.py"),
        "Look up a key, its type and its limits. [The run file](run-file.md) has all defaults in one block, and "
        "explains overrides. A section that names a method, a model, a data set or an engine takes its keys, too: "
        "[methods](methods.md), [all others](built-in.md).",
    ]
    places: dict[type[Section], str] = {}
    for where, section in sections_of(Experiment):
        places.setdefault(section, where)
    anchors = {section: re.sub(r"\W", "", where) for section, where in places.items() if where}
    anchors |= dict.fromkeys((Constant, Step, Cosine, Exponential), "localschedule")
    for section, where in places.items():
        doc = inspect.cleandoc(section.__doc__ or "")
        meanings = explained(doc)
        first = first_sentences(section)
        own = (
            " Further keys are those of its kind."
            if issubclass(section, OpenSection) and "urther keys" not in first
            else ""
        )
        title = f"`[{where}]`" if where else "At the top"
        parts += [f"## {title}", first + own, keys_table(section, meanings, anchors)]
    parts += ["## `local.schedule`", "The learning rate over the rounds: a table with `kind`."]
    rows = ["| kind | effect | keys |", "| --- | --- | --- |"]
    for kind in (Constant, Step, Cosine, Exponential):
        [name] = typing.get_args(kind.model_fields["kind"].annotation)
        keys = [
            f"`{key}`" + (f" = {written(field.default)}" if not field.is_required() else "")
            for key, field in kind.model_fields.items()
            if key != "kind"
        ]
        rows.append(f'| `"{name}"` | {(kind.__doc__ or "").strip()} | {", ".join(keys)} |')
    return "\n\n".join([*parts, "\n".join(rows)]) + "\n"


# ---- built-in.md ---------------------------------------------------------------------------------------------------

BUILT_IN = {
    "data": ("Data sets and kinds of files", "`data.name`", "[Your data](data.md) lists their files."),
    "models": ("Models", "`model.name`", "[Your model](own-model.md) adds one."),
    "peft": ("Ways of fine-tuning", "`peft.name`", "[Fine-tuning](models.md#fine-tuning) compares them."),
    "engines": ("Engines", "`engine.name`", "[Engines](engines.md) compares them."),
    "callbacks": ("Callbacks", "the name in `callbacks`", "[Track a run](callbacks.md) shows their use."),
}


def function_keys(function: Callable[..., Any], skip: int = 0) -> str:
    """Return the parameters of a function as a table, from the given place on."""
    meanings, rows = explained(function.__doc__ or ""), ["| key | default | meaning |", "| --- | --- | --- |"]
    for key, parameter in [*inspect.signature(function).parameters.items()][skip:]:
        rows.append(f"| `{key}` | {' | '.join(split_default(parameter.default, meanings[key]))} |")
    return "\n".join(rows) if len(rows) > 2 else "No keys of its own."


def catalogue() -> str:
    """Return fleetfit/cli/catalogue.json: what `fleetfit list` shows of each built-in."""
    kinds = []
    for kind in (str(kind) for kind in listing.ListKind if kind != "profiles"):
        entries = {name: json.dumps(vars(listing.import_entry(kind, name))) for name in names.list_names(kind)}
        lines = [f'  "{name}": {entry}' for name, entry in entries.items()]  # one for each, so that changes are seen
        kinds.append(f' "{kind}": {{\n' + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(kinds) + "\n}\n"


def built_in_page() -> str:
    """Return built-in.md."""
    parts = [
        "# Data, models, fine-tuning, engines: every key",
        MADE.format("the plug-ins' docstrings"),
        "The output of `fleetfit list KIND NAME`, on one page. [Methods, options and client selection](methods.md) "
        "and [attacks](trust.md) have pages of their own.",
    ]
    for kind, (title, key, more) in BUILT_IN.items():
        parts += [f"## {title}", f"Keys beside {key}. {more}"]
        for name in names.list_names(kind):
            table = listing.make_key_table(kind, name)
            summary = table.title.partition(": ")[2]
            rows = ["| key | default | meaning |", "| --- | --- | --- |"]
            rows += [f"| `{k}` | {mark_value(d)} | {said} |".replace("\\|", "|") for k, d, said in table.rows]
            parts += [f"### `{name}`", summary, "\n".join(rows) if table.rows else "No keys of its own."]
    parts += ["## Partitions", "Keys beside `data.partition.kind`."]
    for name in names.KINDS["partitions"].modules:
        function = names.resolve("partitions", name)
        summary = " ".join(inspect.cleandoc(function.__doc__ or "").partition("\n\n")[0].split())
        parts += [f"### `{name}`", summary, function_keys(function, skip=3)]
    return "\n\n".join(parts) + "\n"


# ---- verbs.md ------------------------------------------------------------------------------------------------------


def verbs_of(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield each verb with its full name, in the order of the command line."""
    inner = getattr(command, "commands", {})
    if not inner:
        yield name, command
    for word, one in inner.items():
        yield from verbs_of(one, f"{name} {word}")


def metavar_of(parameter: Any) -> str:
    """Return the metavar of an option."""
    if getattr(parameter, "is_flag", False):
        return ""
    if parameter.metavar:
        return str(parameter.metavar).strip("[]") if parameter.param_type_name == "argument" else str(parameter.metavar)
    choices = getattr(parameter.type, "choices", None)
    if choices:
        return "{" + ",".join(choices) + "}"
    return {"INT": "N", "FLOAT": "X"}.get(str(parameter.type.name).upper().split()[0], "TEXT")


def option_row(parameter: Any) -> str:
    """Return the row of an argument or an option."""
    if parameter.param_type_name == "argument":
        word = (parameter.metavar or parameter.name).strip("[]").upper()
        name = f"`{word}`" if "{" not in word else f"`{parameter.name.upper()}`"
    else:
        words = [f"{option} {metavar_of(parameter)}".strip() for option in parameter.opts]
        name = ", ".join(f"`{word}`" for word in [*words, *parameter.secondary_opts])
    default = parameter.default
    silent = default in (None, False, "") or (default is True and parameter.secondary_opts)
    shown = "needed" if parameter.required else "" if silent else f"`{default}`"
    return f"| {name} | {shown} | {(parameter.help or '').strip()} |".replace("[[", "`[[").replace("]]", "]]`")


def usage_of(argument: Any) -> str:
    """Return an argument as in a usage line, in brackets if it is optional."""
    word = (argument.metavar or argument.name).strip("[]")
    word = word if "{" in word else word.upper()
    return word if argument.required else f"[{word}]"


def verbs_page() -> str:
    """Return verbs.md."""
    root = typer.main.get_command(make_app())
    parts = [
        "# Every verb",
        MADE.format("fleetfit/cli/"),
        "The output of `fleetfit VERB --help`, on one page. Exit codes: 0, done; 1, a fault of FleetFit; 2, an error; "
        "3, no usable update; 130, stopped with Ctrl-C ([errors](errors.md)).",
        "Before any verb: " + ", ".join(f"`{p.opts[0]}` ({(p.help or '').rstrip('.')})" for p in root.params[:3]) + ".",
    ]
    for name, command in verbs_of(root, "fleetfit"):
        arguments = [p for p in command.params if p.param_type_name == "argument"]
        usage = " ".join([name, *map(usage_of, arguments), "[OPTIONS]"])
        rows = ["| option | default | meaning |", "| --- | --- | --- |", *map(option_row, command.params)]
        said = inspect.cleandoc(command.help or "")
        parts += [f"## {name}", f"```text\n{usage}\n```", said, "\n".join(rows)]
    return "\n\n".join(parts) + "\n"
