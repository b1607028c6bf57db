"""Write what docs/ takes from the code: hooks.md, keys.md, built-in.md, verbs.md, networks.md, the keys in methods.md
and trust.md; and fleetfit/cli/catalogue.json, which `fleetfit list` prints.

    .venv/bin/python docs/generate.py

The text of hooks.md is that of FedAvg's functions in `fleetfit.hooks.fedavg`, and of the values' docstrings; the keys
of a method, an option or a way of client selection are its parameters, explained in its docstring. A test compares.
"""

import ast
import inspect
import re
import textwrap
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fleetfit import core as values, names
from fleetfit.cli import listing
from fleetfit.hooks import FEDAVG, HOOKS, Method
from fleetfit.hooks.build import DECLARED

DOCS = Path(__file__).parent
WIDTH = 120
BEGIN, END = "<!-- keys: made by docs/generate.py -->", "<!-- end of keys -->"
VALUES = ("Job", "LocalResult", "Update", "Failure", "Device", "Clients", "Server", "Federation")
RULED = ("Where", "Before", "After", "Keeps", "FedAvg")
OPTIONAL = "Keeps"

HEAD = """# Hooks

<!-- made by docs/generate.py from fleetfit/hooks/ and fleetfit/core/: change the docstrings there -->

Look up the hooks of a method, in the order of a round. A method is a record of functions, one for each hook; FedAvg's
are the defaults. Hooks of the server see the federation and no data; hooks of the device see one client's data and
budget. [Add a method](add-a-method.md) has the smallest example of each, and the rules that keep runs reproducible.

Arguments are positional, so their names are free. `method.hooks.NAME = "file.py:function"` sets a single hook.
"""


def sections(doc: str) -> dict[str, str]:
    """Return the parts of a docstring by their headings; "" is what comes before, "Args" and the like are dedented."""
    parts = re.split(r"^(Args|Returns|Raises|Attributes):\n", inspect.cleandoc(doc), flags=re.MULTILINE)
    return {"": parts[0].strip()} | {
        parts[i]: textwrap.dedent(parts[i + 1]).strip() for i in range(1, len(parts), 2)
    }  # fmt: skip


def listed(text: str) -> dict[str, str]:
    """Return the entries `name: what it is` of a section, each on one line."""
    found = re.findall(r"^(\w+): (.*?)(?=^\w+: |\Z)", text, re.DOTALL | re.MULTILINE)
    return {name: joined(said) for name, said in found}


def joined(text: str) -> str:
    return " ".join(text.split())


def ruled(doc: str) -> tuple[str, dict[str, str], str]:
    """Return a hook's first sentence, its paragraphs (`RULED`), and the text after them."""
    first, _, rest = sections(doc)[""].partition("\n\n")
    block, _, more = rest.partition("\n\n")
    found = re.findall(r"^(\w+): (.*?)(?=^[A-Z]\w+: |\Z)", block, re.DOTALL | re.MULTILINE)
    return joined(first), {name: joined(said) for name, said in found if name in RULED}, joined(more)


def hooks_page() -> str:
    """Return hooks.md."""
    hook_sections = [hook_section(hook) for hook in HOOKS]
    rows = ["| hook | where | what it does | FedAvg |", "| --- | --- | --- | --- |"]
    for hook in HOOKS:
        summary, rules, _ = ruled(getattr(FEDAVG, hook).__doc__)
        where = re.split(r"[,:]", rules["Where"])[0]
        rows.append(f"| [`{hook}`](#{hook}) | {where} | {summary} | {rules['FedAvg']} |")
    parts = [HEAD, "\n".join(rows), *hook_sections, declared_section(), *map(value_section, VALUES)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def hook_section(hook: str) -> str:
    """Return what hooks.md says of one hook."""
    default = getattr(FEDAVG, hook)
    summary, rules, more = ruled(default.__doc__)
    missing = [rule for rule in RULED if rule not in rules and rule != OPTIONAL]
    if missing:
        raise ValueError(f"{default.__name__} does not document: {', '.join(missing)}")
    parts = sections(default.__doc__)
    arguments, parameters = listed(parts["Args"]), list(inspect.signature(default).parameters)
    if list(arguments) != parameters:
        raise ValueError(f"{default.__name__} takes {parameters} and documents {list(arguments)}")
    lines = [f"## {hook}", "", f"`{hook}({', '.join(parameters)})`", "", summary, ""]
    lines += [bullet(f"- **{rule}**: {text}") for rule, text in rules.items() if rule != "FedAvg"]
    lines += [bullet(f"- `{name}`: {text}") for name, text in arguments.items()]
    lines += [
        bullet(f"- **Returns**: {joined(parts['Returns'])}"),
        bullet(f"- **FedAvg**, `{default.__name__}`: {rules['FedAvg']}"),
    ]
    return "\n".join([*lines, *(["", textwrap.fill(more, WIDTH)] if more else [])])


def declared_section() -> str:
    """Return what hooks.md says of the fields of a method that are not hooks."""
    explained, fields = listed(sections(Method.__doc__ or "")["Attributes"]), dict(annotated(Method))
    if set(explained) != set(DECLARED):
        raise ValueError(f"Method declares {list(DECLARED)} and explains {list(explained)}")
    lines = ["## What a method declares", "", "Fields of `Method` that are not hooks:", ""]
    return "\n".join([*lines, *(bullet(f"- `{name}: {fields[name]}`: {explained[name]}") for name in DECLARED)])


def value_section(name: str) -> str:
    """Return what hooks.md says of a value: its fields with their types, from its docstring."""
    kind = getattr(values, name)
    parts = sections(kind.__doc__)
    explained = listed(parts.get("Attributes", ""))
    fields = dict(annotated(kind))
    if set(explained) - set(fields) or set(fields) - set(explained):
        raise ValueError(f"{name} has the fields {list(fields)} and explains {list(explained)}")
    lines = [f"## {name}", "", textwrap.fill(joined(parts[""]), WIDTH), ""]
    return "\n".join([*lines, *(bullet(f"- `{field}: {fields[field]}`: {explained[field]}") for field in fields)])


def annotated(kind: type) -> Iterator[tuple[str, str]]:
    """Yield the fields of a dataclass with their annotations, as they are written."""
    [found] = ast.parse(inspect.getsource(kind)).body
    assert isinstance(found, ast.ClassDef)
    for node in found.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, ast.unparse(node.annotation).strip("'")


def bullet(text: str) -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)


# ---- keys ----------------------------------------------------------------------------------------------------------


def written(value: object) -> str:
    """Return a default as it stands in a run file."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(written, value))}]"
    return f'"{value}"' if isinstance(value, str) else str(value)


def keys_of(factory: Callable[..., Any]) -> list[str]:
    """Return a bullet for each parameter of a factory: key, default, what it is, and the words that it may be."""
    explained = listed(sections(factory.__doc__ or "").get("Args", ""))
    hints, lines = typing.get_type_hints(factory), []
    for key, parameter in inspect.signature(factory).parameters.items():
        words = [w for w in typing.get_args(hints.get(key)) if typing.get_origin(hints[key]) is typing.Literal]
        said = explained[key].rstrip(".")
        missing = [written(word) for word in words if f'"{word}' not in said]
        said += f" ({', '.join(map(written, words))})." if missing else "."
        default = "" if parameter.default is None else f" = {written(parameter.default)}"
        lines.append(bullet(f"- `{key}{default}`: {said}"))
    return lines


def methods_page(page: str) -> str:
    """Return methods.md with the keys between the marks as the docstrings say them."""
    return with_keys(page, ("methods", "options", "selection"))


def trust_page(page: str) -> str:
    """Return trust.md with the keys of the attacks between the marks."""
    return with_keys(page, ("attacks",))


def with_keys(page: str, kinds: tuple[str, ...]) -> str:
    """Return a page that has a section for each built-in of some kinds, with their keys between the marks."""
    for kind in kinds:
        for name in names.list_names(kind):
            keys = keys_of(names.resolve(kind, name))
            section = re.search(rf"^## {name}\n.*?(?=^#|\Z)", page, re.DOTALL | re.MULTILINE)
            if section is None or (keys and BEGIN not in section[0]):
                raise ValueError(f"the page has no section ## {name}, or no {BEGIN} ... {END} in it")
            if keys:
                made = "\n".join([BEGIN, *keys, END])
                before, _, rest = section[0].partition(BEGIN)
                page = page.replace(section[0], before + made + rest.partition(END)[2])
    return page


if __name__ == "__main__":
    import reference  # beside this file

    listing.CATALOGUE.write_text(reference.catalogue(), encoding="utf-8")  # first: pages are made from it
    listing.read_catalogue.cache_clear()
    (DOCS / "hooks.md").write_text(hooks_page(), encoding="utf-8")
    (DOCS / "keys.md").write_text(reference.keys_page(), encoding="utf-8")
    (DOCS / "built-in.md").write_text(reference.built_in_page(), encoding="utf-8")
    (DOCS / "verbs.md").write_text(reference.verbs_page(), encoding="utf-8")
    (DOCS / "networks.md").write_text(reference.networks_page(), encoding="utf-8")
    methods = DOCS / "methods.md"
    methods.write_text(methods_page(methods.read_text(encoding="utf-8")), encoding="utf-8")
    trust = DOCS / "trust.md"
    trust.write_text(trust_page(trust.read_text(encoding="utf-8")), encoding="utf-8")
