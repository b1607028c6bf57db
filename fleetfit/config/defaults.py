"""What a run takes where its file says little: the data at a path, and a model that fits the kind of data."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fleetfit import names
from fleetfit.config.toml import path_exists, resolve_path
from fleetfit.data import Data
from fleetfit.errors import ConfigError, DataError, truncate

Table = dict[str, Any]
_PLACES = ("folder", "file")
"""What a data set calls the place of its files."""
ANYBODYS = ("arrays", "images", "plain_text", "table", "text")
"""Kinds of the user's own files, of any size."""
_SIDE = 48  # pixels, from which on images get the larger of the usual models
_DEEP_LSTM = {"name": "char_lstm", "embedding": 64, "hidden": 128, "layers": 4}  # the paper's two: no room for 4 levels
_SMALL_BERT = {"name": "bert", "hidden": 128, "layers": 4, "attention_heads": 4, "intermediate": 256}

# ---- the data at a path ----------------------------------------------------------------------------------------------


def detect_data_source(section: Mapping[str, Any], folder: Path, where: str = "[data]") -> Table:
    """Return the keys of `[data]` with a name and its keys in the place of `path`.

    A name that is no data set's and looks like a path is one.

    Args:
        section: The section as given.
        folder: From where relative paths are seen.
        where: The section, for messages.

    Raises:
        ConfigError: The path is no text, or the named data set reads no files.
        DataError: Nothing is there, or nothing that is known.
    """
    given = dict(section)
    name, path = given.get("name"), given.get("path")
    if path is None and isinstance(name, str) and _is_path(name, folder):
        name, path = None, given.pop("name")
    if path is None or (name is not None and (not isinstance(name, str) or ":" in name)):
        return given  # a plug-in's own key
    if not isinstance(path, str | Path) or not str(path):
        raise ConfigError(f"{where} path: should be a path in quotes, got {truncate(repr(path))}.")
    given.pop("path", None)
    there = resolve_path(str(path), folder, f"{where} path")
    place = str(there) if path_exists(there) else str(path)  # else FLEETFIT_DATA may have it
    if name is not None:
        return {_place_of(name, where): place, **given}
    from fleetfit.data.files.found import found_at

    found = found_at(place, given)
    division = given.get("partition")
    if isinstance(division, Mapping):  # of which the kind that was found stays, unless one was given
        given["partition"] = {**found.get("partition", {}), **division}
    return {**found, **given}


def wrap_in_memory_data(section: Any, begun_with: Sequence[int] = ()) -> Any:
    """Return a section `[data]` in which samples and labels in memory, or a DataFrame, are a data set.

    Args:
        section: `(x, y)`, `((x, y), (x_test, y_test))`, a DataFrame, anything else; or a table with it as its name, and
            perhaps `channels_last`.
        begun_with: The shape of a sample in the run that is resumed; empty for a new run.

    Raises:
        DataError: They do not fit together.
    """
    if isinstance(section, Mapping) and isinstance(section.get("name"), tuple):
        further = {key: value for key, value in section.items() if key not in ("name", "channels_last")}
        return {**further, "name": _in_memory(section["name"], section.get("channels_last"), begun_with)}
    if isinstance(section, tuple) and len(section) == 2:
        return {"name": _in_memory(section, None, begun_with)}
    if is_frame(section):
        from fleetfit.data.files.table import of_frame

        return {"name": of_frame(section)}
    return section


def _in_memory(values: tuple[Any, ...], channels_last: bool | None, begun_with: Sequence[int]) -> Any:
    from fleetfit.data.files.arrays import in_memory

    if len(values) != 2:
        return values
    pairs = all(isinstance(one, tuple) and len(one) == 2 for one in values)
    (x, y), held = values if pairs else (values, None)
    data = in_memory(x, y, held, channels_last=channels_last, begun_with=begun_with)
    return replace(data, notes=(describe_data(data), *data.notes))


def is_frame(section: Any) -> bool:
    """Tell whether a section `[data]` is a DataFrame."""
    return not isinstance(section, Mapping | str) and hasattr(section, "columns") and hasattr(section, "iloc")


def _is_path(name: str, folder: Path) -> bool:
    """Return whether a name is a path."""
    if ":" in name or names.match_name("data", name) in names.list_names("data"):
        return False
    if any(mark in name for mark in ("/", "\\", "~")) or Path(name).suffix:
        return True
    return path_exists(folder / name)


def _place_of(name: str, where: str) -> str:
    """Return what a data set calls the place of its files."""
    keys = inspect.signature(names.resolve("data", name)).parameters
    found = next((key for key in _PLACES if key in keys), None)
    if found is None:
        raise ConfigError(f"{where} path: {name} reads no files. Leave path out, or leave the name out.")
    return found


def sets_client_count(name: Any) -> bool:
    """Tell whether data of this name may be small, so that their size says how many clients there are by default."""
    return isinstance(name, Data) or (isinstance(name, str) and name in ANYBODYS)


def describe_files(name: Any, data: Data) -> list[str]:
    """Return what was found in the files of a data set of some name; a table's own notes describe it."""
    described = name not in ANYBODYS or data.columns
    return [*([] if described else [describe_data(data)]), *data.notes]


def describe_data(data: Data) -> str:
    """Describe a data set of the user's own files in one line."""
    shape, rows = data.sample_shape, f"{len(data.x):,}"
    if data.task == "next_token":
        what = f"{rows} windows of {shape[0]} tokens, {data.classes} different ones"
    elif data.vocabulary:
        what = f"{rows} texts of {shape[0]} tokens (of {data.vocabulary:,}), {data.classes} classes"
    elif data.x.dtype == torch.uint8 and len(shape) == 3:
        what = f"{rows} images of {shape[1]}x{shape[2]}, {'grey' if shape[0] == 1 else f'{shape[0]} channels'}"
        what += f", {data.classes} classes"
    else:
        learned = f"{data.classes} classes" if data.task == "classification" else data.task.replace("_", "-")
        what = f"{rows} samples {list(shape)}, {learned}"
    held = " and ".join(f"{len(data.split(split))} for {purpose}" for split, purpose in (
        ("test", "testing"), ("validation", "validation")) if len(data.split(split)))  # fmt: skip
    return f"{data.name}: {what}; {held or 'none'} held out."


# ---- the model that fits ---------------------------------------------------------------------------------------------


def choose_model(data: Mapping[str, Any]) -> Table:
    """Return the keys of `[model]` that fit a kind of data; none where the default does, or nothing is known.

    Args:
        data: The keys of `[data]`.
    """
    name = data.get("name")
    if isinstance(name, Data):
        return _for_shape(name.sample_shape, name.task, name.vocabulary)
    name = names.match_name("data", name) if isinstance(name, str) else ""
    if name == "table":
        return {"name": "mlp"}
    if name in ("plain_text", "shakespeare"):
        return {**_DEEP_LSTM, "name": "word_lstm"} if data.get("level") == "words" else dict(_DEEP_LSTM)
    if name in ("text", "sst2", "ag_news"):
        return dict(_SMALL_BERT)
    if name == "images":
        side = data.get("resize") or data.get("size") or 0
        return {"name": "resnet20"} if isinstance(side, int) and side >= _SIDE else {}
    if name == "arrays" and isinstance(data.get("file"), str):
        return _for_arrays(data)
    return {}


def _for_shape(shape: tuple[int, ...], task: str, vocabulary: int) -> Table:
    if vocabulary:
        return dict(_DEEP_LSTM if task == "next_token" else _SMALL_BERT)
    if len(shape) != 3 or min(shape[1:]) < 8:
        return {"name": "mlp"}
    return {"name": "resnet20"} if min(shape[1:]) >= _SIDE else {}


def _for_arrays(data: Mapping[str, Any]) -> Table:
    """Return the model for arrays on disk, by the shape in their header."""
    from fleetfit.data.files.arrays import shape_of

    try:
        shape = shape_of(str(data["file"]), data.get("x", "x"), data.get("channels_last"))
    except (DataError, ConfigError, OSError):  # who loads them says what is wrong
        return {}
    side = data.get("resize")
    shape = (*shape[:-2], side, side) if isinstance(side, int) and len(shape) == 3 else shape
    return _for_shape(shape, str(data.get("task", "classification")), int(data.get("vocabulary") or 0))
