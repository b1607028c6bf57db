"""A data set written for worker processes, which map its samples into memory instead of copying them."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fleetfit.data._encoded import Encoded
from fleetfit.data.dataset import Data

_APART = ("x", "y", "splits")


def store(data: Data, folder: Path) -> dict[str, Any]:
    """Write samples and labels as files in a folder; return the rest as a nest of plain values and tensors.

    Of encoded images only the places are written.
    """
    encoded = data.x.store(folder) if isinstance(data.x, Encoded) else None
    if not isinstance(data.x, Encoded):
        np.save(folder / "x.npy", data.x.cpu().numpy())
    np.save(folder / "y.npy", data.y.cpu().numpy())
    rest = {f.name: getattr(data, f.name) for f in dataclasses.fields(data) if f.init and f.name not in _APART}
    return {"fields": rest, "splits": dict(data.splits), "encoded": encoded}


def restored(nest: Mapping[str, Any], folder: Path) -> Data:
    """Return what `store` wrote, its samples memory-mapped."""
    encoded = nest["encoded"]
    x = Encoded.stored(encoded, folder) if encoded else torch.from_numpy(np.load(folder / "x.npy", mmap_mode="c"))
    y = torch.from_numpy(np.load(folder / "y.npy"))
    return Data(x=x, y=y, splits=nest["splits"], **nest["fields"])
