"""Hostile text for every place of a run's files: what a stranger may write there to reach a terminal."""

import json
import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import tomli_w
from safetensors import safe_open
from safetensors.torch import save_file

TITLE, COLOR, C1 = "\x1b]0;owned\x07", "\x1b[31mred\x1b[0m", "\x9b31m"
BACK, TURNED, LINES = "\rdone\x08\x08", "\u202eevil\u2066\u200f", "\u2028\x0b\x0c\x85\x7f"
CODES = TITLE + COLOR + C1 + BACK + TURNED + LINES
LONG = TITLE + "A" * 1_000_000
LONGEST, LONGEST_HTML = 5_000, 10**6  # characters of a line
_RAW = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_SCRIPTS = re.compile(r"<(script|style)\b.*?</\1>", re.DOTALL)

Place = tuple[Any, ...]
"""Keys and indices that lead to a value; a last `KEY` means the key itself."""
KEY = "<the key>"


def check_text(text: str, longest: int = LONGEST) -> None:
    """Expect that text holds no control character but line feeds, and no very long line."""
    control = _RAW.search(text)
    assert not control, f"a control character came out: {text[max(0, control.start() - 80) : control.end() + 80]!r}"
    most = max(text.split("\n"), key=len)
    assert len(most) <= longest, f"a line of {len(most)} characters came out: {most[:300]!r}"


def check_files(folder: Path, longest: int = 10**9) -> None:
    """Expect the same of the texts that a verb wrote; the scripts of a page are FleetFit's own."""
    for path in folder.rglob("*"):
        if path.suffix in (".md", ".csv", ".html", ".svg", ".json", ".jsonl", ".toml", ".py", ".txt"):
            text = path.read_bytes().decode()
            text = _SCRIPTS.sub("", text) if path.suffix == ".html" else text
            check_text(text.replace("\r\n", "\n") if path.suffix == ".csv" else text, longest)


# ---- places ----------------------------------------------------------------------------------------------------------


def places_in(document: Any, at: Place = ()) -> Iterator[Place]:
    """Yield the places of all values that are no containers, and of all keys."""
    if isinstance(document, dict):
        for key, value in document.items():
            yield (*at, key, KEY)
            yield from places_in(value, (*at, key))
    elif isinstance(document, list):
        for number, value in enumerate(document):
            yield from places_in(value, (*at, number))
    else:
        yield at


def one_of_each(places: Iterable[Place]) -> Iterator[Place]:
    """Yield the first of places that differ only in their index in a list."""
    kinds = set()
    for place in places:
        kind = tuple("" if isinstance(step, int) else step for step in place)
        if kind not in kinds:
            kinds.add(kind)
            yield place


def put(document: Any, place: Place, text: str, behind: bool) -> None:
    """Put text in a place, or behind the text that is there; of a key always behind it."""
    if place[-1] == KEY:
        *way, old, _ = place
        holder = _holder(document, way)
        items = [(key + text if key == old else key, value) for key, value in holder.items()]
        holder.clear()
        holder.update(items)
        return
    holder = _holder(document, place[:-1])
    old = holder[place[-1]]
    holder[place[-1]] = old + text if isinstance(old, str) and behind else text


def _holder(document: Any, way: Any) -> Any:
    for step in way:
        document = document[step]
    return document


# ---- files -----------------------------------------------------------------------------------------------------------


def read_nest(path: Path) -> Any:
    """Return what a file holds as a list: TOML, JSON, lines of JSON; of a checkpoint metadata, names and structure."""
    if path.suffix == ".toml":
        return [tomllib.loads(path.read_text())]
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    if path.suffix == ".json":
        return [json.loads(path.read_text())]
    with safe_open(path, framework="pt") as file:
        metadata = dict(file.metadata() or {})
        names = list(file.keys())
    structure = json.loads(metadata.pop("nest")) if "nest" in metadata else None
    return [metadata, names, *([] if structure is None else [structure])]


def write_nest(path: Path, content: Any) -> None:
    """Write such a nest into the file."""
    if path.suffix == ".toml":
        path.write_text(tomli_w.dumps(content[0]), encoding="utf-8")
    elif path.suffix in (".json", ".jsonl"):
        path.write_text("".join(json.dumps(one) + "\n" for one in content))
    else:
        about, names, *structure = content
        with safe_open(path, framework="pt") as file:
            old = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            previous = dict(file.metadata() or {})
        tensors = dict(zip(names, old.values(), strict=True))
        metadata = {key: str(value) for key, value in about.items()}
        if metadata.get("sha256") == previous.get("sha256"):
            metadata.pop("sha256", None)  # it would be all that is said
        if structure:
            metadata["nest"] = json.dumps(structure[0])
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, path, metadata)
