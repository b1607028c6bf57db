"""A data set on its way to worker processes, which share its samples instead of copying them."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fleetfit.data._encoded import Encoded
from fleetfit.data.dataset import Data

_APART = ("x", "y", "splits")


def taken_apart(data: Data) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return a data set as a nest of plain values and small tensors, and its large arrays: samples and labels.

    Of encoded images there are only the places.
    """
    rest = {f.name: getattr(data, f.name) for f in dataclasses.fields(data) if f.init and f.name not in _APART}
    encoded, x = data.x.taken_apart() if isinstance(data.x, Encoded) else (None, data.x.cpu().numpy())
    return {"fields": rest, "splits": dict(data.splits), "encoded": encoded}, {"x": x, "y": data.y.cpu().numpy()}


def put_together(nest: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Data:
    """Return what `taken_apart` took apart; it shares the arrays' memory."""
    encoded = nest["encoded"]
    x = Encoded.put_together(encoded, arrays["x"]) if encoded else torch.from_numpy(arrays["x"])
    return Data(x=x, y=torch.from_numpy(arrays["y"]), splits=nest["splits"], **nest["fields"])


def store(data: Data, folder: Path) -> dict[str, Any]:
    """Write the arrays of a data set as files in a folder; return the rest."""
    nest, arrays = taken_apart(data)
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    return nest


def restored(nest: Mapping[str, Any], folder: Path) -> Data:
    """Return what `store` wrote, its arrays memory-mapped."""
    return put_together(nest, {name: np.load(folder / f"{name}.npy", mmap_mode="c") for name in ("x", "y")})
