"""Handwritten digits, 8x8 pixels: small enough for a test, real enough to learn, and part of scikit-learn.

Alpaydin and Kaynak, "Optical Recognition of Handwritten Digits" (1998), UCI Machine Learning Repository; of the two
parts, scikit-learn has the one of 1,797 images.
"""

import gzip
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fleetfit.data.dataset import Data, Facts
from fleetfit.data.splits import hold_out

FACTS = Facts(
    train=1_438,
    test=359,
    classes=10,
    resolution="8x8",
    source="Alpaydin and Kaynak (1998), 1,797 images in scikit-learn; split here",
)


def digits(validation: float = 0.1, test: float = 0.2, seed: int = 0, augment: str | None = None) -> Data:
    """Return the digits as images [1797, 1, 8, 8], their 17 grey values 0..16 spread over 0..255.

    Args:
        validation: Share of the training images to hold out, class by class, 0 <= validation < 1.
        test: Share of all images to hold out as the test set, class by class, 0 <= test < 1.
        seed: Seed of the held out samples.
        augment: None or "shift" (one pixel); digits should not be mirrored.

    Raises:
        DataError: A share or the seed is out of range.
    """
    grey, y = _read_digits()
    x = np.rint(grey * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
    remaining, test_indices = hold_out(np.arange(len(y)), y, test, seed, "test")
    train, validation_indices = hold_out(remaining, y[remaining], validation, seed)
    return Data(
        name="digits",
        x=torch.from_numpy(x),
        y=torch.from_numpy(y),
        splits={
            "train": torch.from_numpy(train),
            "validation": torch.from_numpy(validation_indices),
            "test": torch.from_numpy(test_indices),
        },
        classes=10,
        class_names=tuple("0123456789"),
        mean=(0.305,),
        std=(0.376,),
        augment=augment,
    )


def _read_digits() -> tuple[NDArray[Any], NDArray[Any]]:
    """Return grey values [1797, 64] and labels [1797] from scikit-learn's file, without its slower import."""
    package = importlib.util.find_spec("sklearn")
    folders = (package.submodule_search_locations or ()) if package is not None else ()
    for folder in folders:
        path = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if path.is_file():
            with gzip.open(path, "rt", encoding="ascii") as file:
                rows = np.loadtxt(file, delimiter=",")
            return rows[:, :-1], rows[:, -1].astype(np.int64)
    from sklearn.datasets import load_digits  # a release with the file elsewhere

    grey, label = load_digits(return_X_y=True)
    return np.asarray(grey), np.asarray(label, dtype=np.int64)
