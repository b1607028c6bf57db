"""Find the data of a short run file: the data set at a path or in memory, and a model and an optimizer for the data."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from fleetfit import names
from fleetfit.config.keys import format_key
from fleetfit.config.merge import Table
from fleetfit.config.schema import DataSection
from fleetfit.config.toml import path_exists
from fleetfit.data import Data, DataInMemory
from fleetfit.data.transform import Transform
from fleetfit.errors import ConfigError, DataError, truncate
from fleetfit.factories import list_parameters

OWN_FILES = ("arrays", "images", "plain_text", "sounds", "table", "text")
"""Data sets that read the user's own files, of any size."""
_RUNNING_TEXT = ("plain_text", "shakespeare")
_LARGE_SIDE = 48  # pixels from which images get the larger of two models
_DEEP_LSTM = {"name": "char_lstm", "embedding": 64, "hidden": 128, "layers": 4}  # the paper's two layers make 2 levels
_SMALL_BERT = {"name": "bert", "hidden": 128, "layers": 4, "attention_heads": 4, "intermediate": 256}

# ---- the data at a path ----------------------------------------------------------------------------------------------


def complete_data(section: Mapping[str, Any], model: Mapping[str, Any]) -> tuple[Table, Table]:
    """Return the keys of `[data]` with those that follow from the data, and keys of `[model]` if it has no name.

    The data are opened. Without keys of `[model]`, the default model fits, or the data are unknown.

    Args:
        section: `[data]`, with a path as its name (`fleetfit.config.load`).
        model: `[model]`.

    Raises:
        ConfigError: The named data set reads no files.
        DataError: The path is missing, or its format is unknown.
    """
    data = detect_data(section)
    if isinstance(data.get("server"), Mapping):
        server = detect_data(data["server"], "data.server")
        data["server"] = {k: v for k, v in server.items() if k != "partition" or k in data["server"]}
    name, net, is_open = data.get("name"), model.get("name"), "name" not in model
    shape = _find_sample_shape(data) if is_open or isinstance(net, nn.Module) else None
    if shape is not None and "channels_last" not in data:
        data |= _choose_layout(net, shape)
    if isinstance(name, DataInMemory):
        name = name.load({key: value for key, value in data.items() if key not in DataSection.model_fields})
    task = name.task if isinstance(name, Data) else "next_token" if name in _RUNNING_TEXT else data.get("task")
    if task in ("multi_label", "next_token") and isinstance(partition := data.get("partition", {}), Mapping):
        data["partition"] = {"kind": "iid", **partition}  # there are no classes to divide by
    if not is_open:
        return data, {}
    if isinstance(name, Data):
        return data, _choose_model_by_shape(name.sample_shape, name.task, name.vocabulary)
    return data, _choose_model(data, shape)


def detect_data(section: Mapping[str, Any], key: str = "data") -> Table:
    """Return the keys of a data set, with its name and keys in place of a path. The data are opened.

    Args:
        section: The section, with a path as its name (`fleetfit.config.load`).
        key: Dotted key of the section.

    Raises:
        ConfigError: The named data set reads no files.
        DataError: The path is missing, or its format is unknown.
    """
    table = dict(section)
    transform = _load_transform(table) if key == "data" else None
    hints = table if transform is None else {**transform.settings, **table}
    detected = _detect_path(table, hints, key)
    keys = {k: v for k, v in table.items() if k not in ("name", "path")} if detected else table
    if "groups" in table or (isinstance(table.get("name"), DataInMemory) and "groups" in table["name"].values):
        detected = {**detected, **_divide_by_groups(table.get("partition", {}))}
    partition = table.get("partition")
    if isinstance(partition, Mapping):  # the section's kind wins over the detected one
        keys["partition"] = {**detected.get("partition", {}), **partition}
    kind = {**detected, **keys}.get("name")
    if transform is None or not isinstance(kind, str):
        return {**detected, **keys}
    return {**detected, **transform.select_keys(kind, keys)}


def _divide_by_groups(partition: Any) -> Table:
    """Return the partition of data whose groups a user names: one client each, unless another kind's key is set."""
    own = {"clients", "seed", *list_parameters(names.resolve("partitions", "natural"))}
    return {"partition": {"kind": "natural"}} if isinstance(partition, Mapping) and partition.keys() <= own else {}


def _load_transform(table: Table) -> Transform | None:
    place = table.get("transform")
    if place is None:
        return None
    if not isinstance(place, str | Path):
        raise ConfigError(f"[data] transform: should be a folder, got {truncate(repr(place))}.", key="data.transform")
    return Transform.load(place)


def _detect_path(table: Table, hints: Mapping[str, Any], key: str) -> Table:
    """Return the name and keys of the data at a section's path; {} without a path."""
    name, path = table.get("name"), table.get("path")
    if isinstance(name, str) and ":" not in name and path is not None:
        parameters = list_parameters(names.resolve("data", name, f"{key}.name"))
        location_key = next((one for one in ("folder", "file") if one in parameters), None)
        if location_key is None:
            raise ConfigError(
                f"{format_key(key)} path: {name} reads no files. Leave out path or name.", key=f"{key}.path"
            )
        return {"name": name, location_key: path}
    if name is None and path is not None:
        name = path
    elif not isinstance(name, str) or not is_path(name):
        return {}
    from fleetfit.data.files.detect import detect_format

    return dict(detect_format(name, {k: v for k, v in hints.items() if k not in ("name", "path", "transform")}))


def is_path(name: str, folder: Path | None = None) -> bool:
    """Return whether a name looks like a path or, in a folder, is one there and not the name of a data set."""
    if ":" in name:
        return False
    if any(mark in name for mark in ("/", "\\", "~")) or Path(name).suffix:
        return True
    is_set = names.match_name("data", name) in names.KINDS["data"].modules
    return folder is not None and not is_set and path_exists(folder / name)


def _find_sample_shape(data: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the shape of a sample of arrays, in memory or in files; None if it is unknown."""
    name, file, x = data.get("name"), data.get("file"), data.get("x", "x")
    if isinstance(name, DataInMemory):
        return tuple(getattr(name.values.get("x"), "shape", ()))[1:]
    if name != "arrays" or not isinstance(file, str) or not isinstance(x, str):
        return None
    from fleetfit.data.files.arrays import find_sample_shape

    try:
        return find_sample_shape(file, x, data.get("channels_last"))
    except (DataError, ConfigError, OSError):  # loading the data raises the error
        return None


def wrap_in_memory_data(
    section: Any, begun_with: Sequence[int] = (), recorded: Mapping[str, Any] = MappingProxyType({})
) -> Any:
    """Return a section `[data]` in which `DataInMemory` stands for data in memory.

    Args:
        section: Data in memory (`fleetfit.data.files.memory`), or a table with them as its name and further keys.
            Anything else is returned unchanged.
        begun_with: Shape of a sample in the resumed run; empty for a new run.
        recorded: Its section; its keys stay.

    Raises:
        DataError: The form is not accepted.
    """
    from fleetfit.data.files.memory import Samples, is_column, read_memory

    is_named = isinstance(section, Mapping) and not isinstance(section.get("name", ""), str)
    is_named = is_named and not is_column(section["name"])  # a table may have a column "name"
    memory = read_memory(section["name"] if is_named else section)
    if memory is None:
        return section
    keys = {key: value for key, value in section.items() if key != "name"} if is_named else {}
    if isinstance(memory, Samples):
        if "groups" in keys and not isinstance(keys["groups"], str):
            memory = replace(memory, groups=keys.pop("groups"))
        table = memory.make_text_table()
        if table is None:
            return {**keys, "name": memory.wrap(begun_with)}
        if "label" not in table.splits["train"].column_names:
            raise DataError("data: the texts have no labels. Pass (texts, labels).", key="y")
        own = {"text": "text", "label": "label"} | ({} if memory.groups is None else {"groups": "groups"})
        memory, keys = table, {**own, **keys}
    from fleetfit.data.files.detect import choose_reader
    from fleetfit.data.files.table import guess_column_kinds

    keys = memory.name_columns(keys)
    reader = choose_reader(guess_column_kinds(memory.splits["train"]), {**recorded, **keys})
    is_text = "text" in recorded if recorded else reader["name"] == "text"
    chosen = {key: reader[key] for key in ("text", "label") if is_text and key not in recorded}
    return {**chosen, **keys, "name": memory.wrap(is_text)}


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
        colors = "gray" if shape[0] == 1 else f"{shape[0]} channels"
        samples = "sounds as images" if kind == "sounds" else "images"
        size = f"{'resized to' if is_resized else 'of'} {shape[1]}x{shape[2]} pixels (height x width)"
        content = f"{rows} {samples} {size}, {colors}, {data.classes} classes"
    else:
        target = f"{data.classes} classes" if data.task == "classification" else data.task.replace("_", "-")
        content = f"{rows} samples {list(shape)}, {target}"
    splits = [("test", "testing"), ("validation", "validation")]
    held_out = " and ".join(f"{len(data.split(name))} for {use}" for name, use in splits if len(data.split(name)))
    return f"{data.name}: {content}; {held_out or 'none'} held out."


# ---- the layout, the model and the optimizer that fit ----------------------------------------------------------------


def _choose_layout(net: Any, shape: tuple[int, ...]) -> Table:
    """Return `channels_last` of series where a module's convolution or recurrent layer has their number of channels."""
    if not isinstance(net, nn.Module) or len(shape) != 2:
        return {}
    for part in net.modules():
        is_recurrent = isinstance(part, nn.RNNBase | nn.RNNCellBase)
        channels = part.input_size if is_recurrent else part.in_channels if isinstance(part, nn.Conv1d) else None
        if channels in shape:
            return {"channels_last": is_recurrent if shape[0] == shape[1] else channels == shape[1]}
    return {}


_TRANSFORMERS = ("bert", "vit", "deit", "vim")


def _choose_model(data: Mapping[str, Any], shape: tuple[int, ...] | None) -> Table:
    name = data.get("name")
    if name == "table":
        return {"name": "mlp"}
    if name in _RUNNING_TEXT:
        return {**_DEEP_LSTM, "name": "word_lstm"} if data.get("level") == "words" else dict(_DEEP_LSTM)
    if name in ("text", "sst2", "ag_news"):
        return dict(_SMALL_BERT)
    if name == "images":
        side = data.get("resize") or data.get("size") or 0
        return {"name": "resnet20"} if isinstance(side, int) and side >= _LARGE_SIDE else {}
    if name == "sounds":
        n_mels = data.get("n_mels", 64)
        return {"name": "resnet20"} if isinstance(n_mels, int) and n_mels >= _LARGE_SIDE else {}
    if shape is None:
        return {}
    side, vocabulary = data.get("resize"), data.get("vocabulary")
    shape = (*shape[:-2], side, side) if isinstance(side, int) and len(shape) == 3 else shape
    return _choose_model_by_shape(shape, data.get("task"), vocabulary if isinstance(vocabulary, int) else 0)


def choose_training(model: Mapping[str, Any]) -> Table:
    """Return the keys of `[local]` that suit the model; empty for SGD.

    Transformers and LSTMs learn next to nothing in a short run of SGD at its default learning rate.

    Args:
        model: The keys of `[model]`.
    """
    name = str(model.get("name", ""))
    if ":" in name:  # an own function, whatever it is called
        return {}
    if name.endswith("_lstm"):
        return {"optimizer": "adamw", "lr": 0.01}
    return {"optimizer": "adamw"} if name.partition("_")[0] in _TRANSFORMERS else {}


def _choose_model_by_shape(shape: tuple[int, ...], task: Any, vocabulary: int) -> Table:
    if vocabulary:
        return dict(_DEEP_LSTM if task == "next_token" else _SMALL_BERT)
    if len(shape) != 3 or min(shape[1:]) < 8:
        return {"name": "mlp"}
    return {"name": "resnet20"} if min(shape[1:]) >= _LARGE_SIDE else {}
