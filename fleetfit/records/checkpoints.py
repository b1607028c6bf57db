"""Nests of plain values and tensors on disk: safetensors with their structure as JSON in the header; no pickle."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fleetfit.errors import RunError
from fleetfit.records.writing import into_place

FORMAT = 1
"""Version of checkpoints; one that is not known is refused."""
DAMAGE = (SafetensorError, OSError, json.JSONDecodeError, KeyError)
"""What reading a damaged checkpoint raises."""


def flatten(nest: Any, tensors: dict[str, Tensor], where: str = "") -> Any:
    """Return a nest's structure as JSON values, and collect its tensors by place.

    Args:
        nest: Dicts, lists, tuples, numbers, text, None, tensors and NumPy arrays.
        tensors: Where the tensors go.
        where: Place of the nest, for names and messages.

    Raises:
        RunError: Something else is in it.
    """
    if isinstance(nest, Tensor | np.ndarray):
        name = where or "value"
        while name in tensors:  # keys 1 and "1" give one place
            name += "'"
        tensors[name] = torch.from_numpy(nest) if isinstance(nest, np.ndarray) else nest
        return {"$array" if isinstance(nest, np.ndarray) else "$tensor": name}
    if isinstance(nest, Mapping):
        items = [(key, flatten(value, tensors, f"{where}/{key}" if where else str(key))) for key, value in nest.items()]
        if all(isinstance(key, str) and not key.startswith("$") for key, _ in items):
            return dict(items)
        return {"$items": [[flatten(key, tensors, where), value] for key, value in items]}
    if isinstance(nest, list | tuple):
        values = [flatten(value, tensors, f"{where}/{i}") for i, value in enumerate(nest)]
        return {"$tuple": values} if isinstance(nest, tuple) else values
    if isinstance(nest, np.generic):
        nest = nest.item()
    if nest is None or isinstance(nest, bool | int | float | str):
        return nest
    raise RunError(f"a checkpoint holds numbers, text, tensors and nests of them; {where} is a {type(nest).__name__}.")


def restore(nest: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return what `flatten` took apart."""
    if isinstance(nest, list):
        return [restore(value, tensors) for value in nest]
    if not isinstance(nest, dict):
        return nest
    if "$tensor" in nest:
        return tensors[nest["$tensor"]]
    if "$array" in nest:
        return tensors[nest["$array"]].numpy()
    if "$tuple" in nest:
        return tuple(restore(value, tensors) for value in nest["$tuple"])
    if "$items" in nest:
        return {restore(key, tensors): restore(value, tensors) for key, value in nest["$items"]}
    return {key: restore(value, tensors) for key, value in nest.items()}


# ---- files --------------------------------------------------------------------------------------------------------


def write_checkpoint(path: Path, nest: Mapping[str, Any]) -> None:
    """Write a nest atomically.

    Raises:
        RunError: The disk is full, or the folder is not to be written.
    """
    tensors: dict[str, Tensor] = {}
    structure = flatten(nest, tensors)
    header = {"fleetfit": "checkpoint", "format": str(FORMAT), "nest": json.dumps(structure)}
    part = path.with_name(f".{path.name}.part")
    try:
        save_file(_separate(tensors), part, header)
        into_place(part, path)
    except (OSError, SafetensorError) as error:
        raise RunError(
            f"the checkpoint {path} cannot be written: {error}. What was written before is intact."
        ) from None


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous tensors on the host, of which no two share memory, as safetensors wants them."""
    seen: set[int] = set()
    found = {}
    for name, tensor in tensors.items():
        here = tensor.detach().cpu()
        place = here.untyped_storage().data_ptr()
        alone = here.is_contiguous() and here.untyped_storage().nbytes() == here.nbytes and place not in seen
        found[name] = here if alone else here.contiguous().clone()
        seen.add(place)
    return found


def read_checkpoint(path: Path) -> Any:
    """Return what `write_checkpoint` wrote.

    Raises:
        RunError: Another version wrote it.
    """
    with safe_open(path, framework="pt") as file:
        header = file.metadata() or {}
        version = header.get("format", "none")
        if header.get("fleetfit") != "checkpoint" or version != str(FORMAT):
            raise RunError(
                f"{path} has format {version}; this version of FleetFit reads format {FORMAT}. Use the version of "
                "FleetFit that wrote it."
            )
        stored = file.keys()
        tensors = {name: file.get_tensor(name) for name in stored}
        return restore(json.loads(header["nest"]), tensors)
