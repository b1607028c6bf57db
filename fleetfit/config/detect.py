"""Find the data of a short run file: the data set at a path or in memory, and a model and an optimiser for the data."""

import contextlib
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fleetfit import names
from fleetfit.config.merge import Table
from fleetfit.config.toml import path_exists, resolve_path
from fleetfit.data import Data, DataInMemory
from fleetfit.data.transform import Transform
from fleetfit.errors import ConfigError, DataError, truncate

OWN_FILES = ("arrays", "images", "plain_text", "sounds", "table", "text")
"""Data sets that read the user's own files, of any size."""
_LARGE_SIDE = 48  # pixels from which images get the larger of two models
_DEEP_LSTM = {"name": "char_lstm", "embedding": 64, "hidden": 128, "layers": 4}  # the paper's two layers make 2 levels
_SMALL_BERT = {"name": "bert", "hidden": 128, "layers": 4, "attention_heads": 4, "intermediate": 256}

# ---- the data at a path ----------------------------------------------------------------------------------------------


def resolve_data(section: Mapping[str, Any], folder: Path, where: str = "[data]") -> Table:
    """Return the keys of `[data]` with an absolute path. Without a name, the path is the name.

    A name that looks like a path, and is not the name of a data set, is a path. Nothing is opened.

    Args:
        section: The section.
        folder: Base folder of relative paths.
        where: The section, for messages.

    Raises:
        ConfigError: The path is not a string.
    """
    table = dict(section)
    name, path = table.get("name"), table.get("path")
    if path is None and isinstance(name, str) and _is_path(name, folder):
        name, path = None, table.pop("name")
    if path is None or (name is not None and (not isinstance(name, str) or ":" in name)):
        return table  # a plug-in's own key
    key = {"[data]": "data.path", "[data] server": "data.server.path"}.get(where)
    if not isinstance(path, str | Path) or not str(path):
        raise ConfigError(f"{where} path: should be a path in quotes, got {truncate(repr(path))}.", key=key)
    absolute = resolve_path(str(path), folder, f"{where} path", key)
    location = str(absolute) if path_exists(absolute) else str(path)  # the data set may look in FLEETFIT_DATA
    if name is not None or ":" in location:
        return {**table, "path": location}
    table.pop("path", None)
    return {"name": location if _is_path(location, folder) else f"./{location}", **table}


def detect_data(section: Mapping[str, Any], where: str = "[data]") -> Table:
    """Return the keys of `[data]` with a data set's name and keys in place of a path. The data are opened.

    Args:
        section: The section, as `resolve_data` returns it.
        where: The section, for messages.

    Raises:
        ConfigError: The named data set reads no files.
        DataError: The path is missing, or its format is unknown.
    """
    table = resolve_data(section, Path.cwd(), where)
    transform = _load_transform(table, where)
    hints = table if transform is None else {**transform.settings, **table}
    detected = _detect_path(table, hints, where)
    keys = {key: value for key, value in table.items() if key not in ("name", "path")} if detected else table
    partition = table.get("partition")
    if isinstance(partition, Mapping):  # the section's kind wins over the detected one
        keys["partition"] = {**detected.get("partition", {}), **partition}
    kind = {**detected, **keys}.get("name")
    if transform is None or not isinstance(kind, str):
        return {**detected, **keys}
    return {**detected, **transform.select_keys(names.match_name("data", kind), keys)}


def _load_transform(table: Table, where: str) -> Transform | None:
    place = table.get("transform")
    if place is None or where != "[data]":
        return None
    if not isinstance(place, str | Path):
        raise ConfigError(f"[data] transform: should be a folder, got {truncate(repr(place))}.", key="data.transform")
    return Transform.load(place)


def _detect_path(table: Table, hints: Mapping[str, Any], where: str) -> Table:
    """Return the name and keys of the data at a section's path; {} without a path."""
    name, path = table.get("name"), table.get("path")
    if name is None and path is not None:
        name, path = path, None
    elif not isinstance(name, str) or ":" in name or (path is None and not _is_path(name, Path.cwd())):
        return {}
    if path is not None:
        parameters = inspect.signature(names.resolve("data", name)).parameters
        location_key = next((key for key in ("folder", "file") if key in parameters), None)
        if location_key is None:
            key = {"[data]": "data.path", "[data] server": "data.server.path"}.get(where)
            raise ConfigError(f"{where} path: {name} reads no files. Leave out path or name.", key=key)
        return {"name": name, location_key: path}
    from fleetfit.data.files.detect import detect_format

    keys = {key: value for key, value in hints.items() if key not in ("name", "path", "transform")}
    return dict(detect_format(name, keys))


def _is_path(name: str, folder: Path) -> bool:
    if ":" in name or names.match_name("data", name) in names.list_names("data"):
        return False
    if any(mark in name for mark in ("/", "\\", "~")) or Path(name).suffix:
        return True
    return path_exists(folder / name)


def wrap_in_memory_data(section: Any, begun_with: Sequence[int] = ()) -> Any:
    """Return a section `[data]` in which `DataInMemory` stands for data in memory.

    Args:
        section: Data in memory (`fleetfit.data.files.memory`), or a table with them as its name and further keys.
            Anything else is returned unchanged.
        begun_with: Shape of a sample in the resumed run; empty for a new run.

    Raises:
        DataError: The form is not accepted.
    """
    from fleetfit.data.files.memory import is_column, read_memory

    is_named = isinstance(section, Mapping) and not isinstance(section.get("name", ""), str)
    is_named = is_named and not is_column(section["name"])  # a table may have a column "name"
    memory = read_memory(section["name"] if is_named else section)
    if memory is None:
        return section
    keys = {key: value for key, value in section.items() if key != "name"} if is_named else {}
    return {**memory.name_columns(keys), "name": memory.wrap(begun_with)}


def choose_partition(data: Mapping[str, Any]) -> Table:
    """Return the keys of `[data]`, with a partition for data in memory of several labels: no classes to divide by.

    Args:
        data: The keys of `[data]`.
    """
    if not isinstance(data.get("name"), DataInMemory) or load_in_memory(data).task != "multi_label":
        return dict(data)
    return {**data, "partition": {"kind": "iid", **data.get("partition", {})}}


def load_in_memory(data: Mapping[str, Any]) -> Data:
    """Return the data set of the keys of `[data]`, whose name is data in memory."""
    loaded: Data = data["name"].load({k: v for k, v in data.items() if k not in ("name", "partition", "server")})
    return loaded


def sets_client_count(name: Any) -> bool:
    """Return whether the size of a data set determines the default number of clients."""
    return isinstance(name, Data | DataInMemory) or (isinstance(name, str) and name in OWN_FILES)


def describe_data(data: Data, kind: Any = "images", is_resized: bool = False) -> str:
    """Describe a data set of the user's own files in one line; the kind tells images from sounds."""
    shape, rows = data.sample_shape, f"{len(data.x):,}"
    if data.task == "next_token":
        content = f"{rows} windows of {shape[0]} tokens, {data.classes} different ones"
    elif data.vocabulary:
        content = f"{rows} texts of {shape[0]} tokens (of {data.vocabulary:,}), {data.classes} classes"
    elif data.x.dtype == torch.uint8 and len(shape) == 3:
        colours = "grey" if shape[0] == 1 else f"{shape[0]} channels"
        samples = "sounds as images" if kind == "sounds" else "images"
        size = f"{'resized to' if is_resized else 'of'} {shape[1]}x{shape[2]} pixels (height x width)"
        content = f"{rows} {samples} {size}, {colours}, {data.classes} classes"
    else:
        target = f"{data.classes} classes" if data.task == "classification" else data.task.replace("_", "-")
        content = f"{rows} samples {list(shape)}, {target}"
    splits = [("test", "testing"), ("validation", "validation")]
    held_out = " and ".join(f"{len(data.split(name))} for {use}" for name, use in splits if len(data.split(name)))
    return f"{data.name}: {content}; {held_out or 'none'} held out."


# ---- the series that a model expects ---------------------------------------------------------------------------------


def choose_layout(data: Mapping[str, Any], model: Mapping[str, Any]) -> Table:
    """Return `channels_last` of series where a module's convolution or recurrent layer has their number of channels.

    Args:
        data: The keys of `[data]`.
        model: The keys of `[model]`.
    """
    net, name = model.get("name"), data.get("name")
    shape: tuple[int, ...] = ()
    if not isinstance(net, nn.Module) or "channels_last" in data:
        return {}
    if isinstance(name, DataInMemory):
        shape = tuple(getattr(name.values.get("x"), "shape", ()))[1:]
    elif name == "arrays" and isinstance(data.get("file"), str):
        from fleetfit.data.files.arrays import find_sample_shape

        with contextlib.suppress(DataError, ConfigError, OSError):  # loading the data raises the error
            shape = find_sample_shape(str(data["file"]), data.get("x", "x"))
    if len(shape) != 2:
        return {}
    for part in net.modules():
        is_recurrent = isinstance(part, nn.RNNBase | nn.RNNCellBase)
        channels = part.input_size if is_recurrent else part.in_channels if isinstance(part, nn.Conv1d) else None
        if channels in shape:
            return {"channels_last": is_recurrent if shape[0] == shape[1] else channels == shape[1]}
    return {}


# ---- the model that fits ---------------------------------------------------------------------------------------------


_TRANSFORMERS = ("bert", "vit", "deit", "vim")


def choose_model(data: Mapping[str, Any]) -> Table:
    """Return the keys of `[model]` that fit the data; empty if the default model fits or the data are unknown.

    Args:
        data: The keys of `[data]`.
    """
    name = data.get("name")
    if isinstance(name, DataInMemory):
        name = load_in_memory(data)
    if isinstance(name, Data):
        return _choose_by_shape(name.sample_shape, name.task, name.vocabulary)
    name = names.match_name("data", name) if isinstance(name, str) else ""
    if name == "table":
        return {"name": "mlp"}
    if name in ("plain_text", "shakespeare"):
        return {**_DEEP_LSTM, "name": "word_lstm"} if data.get("level") == "words" else dict(_DEEP_LSTM)
    if name in ("text", "sst2", "ag_news"):
        return dict(_SMALL_BERT)
    if name == "images":
        side = data.get("resize") or data.get("size") or 0
        return {"name": "resnet20"} if isinstance(side, int) and side >= _LARGE_SIDE else {}
    if name == "sounds":
        return {"name": "resnet20"} if data.get("mels", 64) >= _LARGE_SIDE else {}
    if name == "arrays" and isinstance(data.get("file"), str):
        from fleetfit.data.files.arrays import find_sample_shape

        try:
            shape = find_sample_shape(str(data["file"]), data.get("x", "x"), data.get("channels_last"))
        except (DataError, ConfigError, OSError):  # loading the data raises the error
            return {}
        side = data.get("resize")
        shape = (*shape[:-2], side, side) if isinstance(side, int) and len(shape) == 3 else shape
        return _choose_by_shape(shape, str(data.get("task", "classification")), int(data.get("vocabulary") or 0))
    return {}


def choose_training(model: Mapping[str, Any]) -> Table:
    """Return the keys of `[local]` that suit the model; empty for SGD.

    Transformers and LSTMs learn next to nothing in a short run of SGD at its default learning rate.

    Args:
        model: The keys of `[model]`.
    """
    name = model.get("name")
    name = names.match_name("models", name) if isinstance(name, str) else ""
    if name.endswith("_lstm"):
        return {"optimiser": "adamw", "lr": 0.01}
    return {"optimiser": "adamw"} if name.partition("_")[0] in _TRANSFORMERS else {}


def _choose_by_shape(shape: tuple[int, ...], task: str, vocabulary: int) -> Table:
    if vocabulary:
        return dict(_DEEP_LSTM if task == "next_token" else _SMALL_BERT)
    if len(shape) != 3 or min(shape[1:]) < 8:
        return {"name": "mlp"}
    return {"name": "resnet20"} if min(shape[1:]) >= _LARGE_SIDE else {}
