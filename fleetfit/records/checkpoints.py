"""Nests of plain values and tensors on disk: safetensors with their structure as JSON in the header; no pickle."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fleetfit import files
from fleetfit.errors import RunError
from fleetfit.records.tensors import Damaged, read_tensors, write_tensors

FORMAT = 1
"""Version of checkpoints; one that is not known is refused."""
_KIND, _DEPTH = "checkpoint", 100


def flatten(nest: Any, tensors: dict[str, Tensor], where: str = "", depth: int = 0) -> Any:
    """Return a nest's structure as JSON values, and collect its tensors by place.

    Args:
        nest: Dicts, lists, tuples, numbers, text, None, tensors and NumPy arrays.
        tensors: Where the tensors go.
        where: Place of the nest, for names and messages.
        depth: How deep it stands in the whole.

    Raises:
        RunError: Something else is in it, or it is nested too deeply.
    """
    if depth > _DEPTH:
        raise RunError(f"a checkpoint is nested at most {_DEPTH} deep; {where[:60]} is deeper.")
    if isinstance(nest, Tensor | np.ndarray):
        name = where or "value"
        while name in tensors:  # keys 1 and "1" give one place
            name += "'"
        tensors[name] = torch.from_numpy(nest) if isinstance(nest, np.ndarray) else nest
        return {"$array" if isinstance(nest, np.ndarray) else "$tensor": name}
    if isinstance(nest, Mapping):
        items = [
            (key, flatten(value, tensors, f"{where}/{key}" if where else str(key), depth + 1))
            for key, value in nest.items()
        ]
        if all(isinstance(key, str) and not key.startswith("$") for key, _ in items):
            return dict(items)
        return {"$items": [[flatten(key, tensors, where, depth + 1), value] for key, value in items]}
    if isinstance(nest, list | tuple):
        values = [flatten(value, tensors, f"{where}/{i}", depth + 1) for i, value in enumerate(nest)]
        return {"$tuple": values} if isinstance(nest, tuple) else values
    if isinstance(nest, np.generic):
        nest = nest.item()
    if nest is None or isinstance(nest, bool | int | float | str):
        return nest
    raise RunError(f"a checkpoint holds numbers, text, tensors and nests of them; {where} is a {type(nest).__name__}.")


def restore(nest: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return what `flatten` took apart.

    Raises:
        Damaged: It is nothing that `flatten` returns; or tensors are missing, or are not named.
    """
    left = dict(tensors)
    found = _restored(nest, left, 0)
    if left:
        raise Damaged(f'it holds a tensor "{next(iter(left))}" that it does not name')
    return found


def _restored(nest: Any, left: dict[str, Tensor], depth: int) -> Any:
    if depth > 2 * _DEPTH:  # a tuple or a table of pairs is two levels in JSON
        raise Damaged("it is nested too deeply")
    if isinstance(nest, list):
        return [_restored(value, left, depth + 1) for value in nest]
    if not isinstance(nest, dict):
        return nest
    if not any(key.startswith("$") for key in nest):
        return {key: _restored(value, left, depth + 1) for key, value in nest.items()}
    (word, inner), *more = nest.items()
    if not more and word in ("$tensor", "$array") and isinstance(inner, str):
        if inner not in left:
            raise Damaged(f'it has no tensor "{inner}", or names it twice')
        tensor = left.pop(inner)
        return tensor if word == "$tensor" else tensor.numpy()
    if not more and word == "$tuple" and isinstance(inner, list):
        return tuple(_restored(value, left, depth + 1) for value in inner)
    if not more and word == "$items" and isinstance(inner, list):
        return _items(inner, left, depth)
    raise Damaged(f'"{word}" in it is unknown')


def _items(pairs: list[Any], left: dict[str, Tensor], depth: int) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    depth += 1
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2:
            raise Damaged("a table in it has something else than pairs")
        key = _restored(pair[0], left, depth)
        if not _plain(key):
            raise Damaged("a table in it has a key that is none")
        found[key] = _restored(pair[1], left, depth)
    return found


def _plain(key: Any) -> bool:
    return all(map(_plain, key)) if isinstance(key, tuple) else isinstance(key, str | int | float | None)


# ---- files --------------------------------------------------------------------------------------------------------


def write_checkpoint(path: Path, nest: Mapping[str, Any]) -> None:
    """Write a nest atomically.

    Raises:
        RunError: The disk is full, or the folder is not to be written.
    """
    tensors: dict[str, Tensor] = {}
    structure = flatten(nest, tensors)
    about = {"fleetfit": _KIND, "format": str(FORMAT), "nest": json.dumps(structure)}
    try:
        write_tensors(path, tensors, about)
    except OSError as error:
        raise RunError(
            f"the checkpoint {path} cannot be written: {error.strerror or error}. What was written before is intact."
        ) from None


def read_checkpoint(path: Path) -> Any:
    """Return what `write_checkpoint` wrote.

    Raises:
        Damaged: It is not what was written.
        RunError: Another version wrote it.
    """
    tensors, about = read_tensors(path)
    version = about.get("format", "none")
    if about.get("fleetfit") != _KIND or version != str(FORMAT):
        raise RunError(
            f"{path} has format {version}; this version of FleetFit reads format {FORMAT}. Use the version of "
            "FleetFit that wrote it."
        )
    if about.keys() != {"fleetfit", "format", "nest"}:
        raise Damaged(f"its header has {', '.join(sorted(about))}")
    try:
        structure = files.json_of(about["nest"])
    except ValueError as error:
        raise Damaged(f"its structure cannot be read: {error}") from None
    return restore(structure, tensors)
