"""Handwritten digits, 8x8 pixels: small enough for a test, real enough to learn, and part of FleetFit.

Alpaydin and Kaynak, "Optical Recognition of Handwritten Digits" (1998), UCI Machine Learning Repository, CC BY 4.0;
of the two parts, `digits.csv.gz` has the one of 1,797 images, as in scikit-learn.
"""

import gzip
from pathlib import Path

import numpy as np

from fleetfit.data.dataset import Data, Facts
from fleetfit.data.rows import Rows

FACTS = Facts(
    train=1_438,
    test=359,
    classes=10,
    resolution="8x8",
    source="Alpaydin and Kaynak (1998), 1,797 images; split here",
)


def digits(validation: float = 0.1, test: float = 0.2, seed: int = 0, augment: str | None = None) -> Data:
    """Return the digits as images [1797, 1, 8, 8], their 17 gray values 0..16 spread over 0..255.

    Args:
        validation: Share of the training images to hold out, class by class, 0 <= validation < 1.
        test: Share of all images to hold out as the test set, class by class, 0 <= test < 1.
        seed: Seed of the held out samples.
        augment: "shift" moves training images by one pixel; digits should not be mirrored.

    Raises:
        DataError: A share or the seed is out of range.
    """
    with gzip.open(Path(__file__).with_name("digits.csv.gz"), "rt", encoding="ascii") as file:
        table = np.loadtxt(file, delimiter=",")
    gray, y = table[:, :-1], table[:, -1].astype(np.int64)
    x = np.rint(gray * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
    rows = Rows(x, y, {"train": len(y)}, 10, tuple("0123456789"))
    splits = rows.divide("digits", validation, test, seed)
    return rows.make_data("digits", x, splits, augment, mean=(0.305,), std=(0.376,))
