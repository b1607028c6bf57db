"""CIFAR-100: 60,000 colour photographs of 100 kinds of things, in 20 superclasses.

Krizhevsky, "Learning Multiple Layers of Features from Tiny Images" (2009). Held out and normalised as in ScaleFL,
section 4.1: 5,000 training images for validation, mean 0.5 and standard deviation 0.25; or by the mean and standard
deviation of its training images, as in AdaptiveFL and ReeFL.

Differs from the paper: the images held out are as many of every class, not simply random.
"""

import dataclasses
from typing import Literal

from fleetfit.data.dataset import Data, Facts
from fleetfit.data.images import named

FACTS = Facts(
    train=50_000,
    test=10_000,
    classes=100,
    resolution="32x32",
    source="Krizhevsky (2009), https://www.cs.toronto.edu/~kriz/cifar.html",
)
NORMALISATION = {
    "fixed": ((0.5,), (0.25,)),
    "own": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}
HUB = "uoft-cs/cifar100"


def cifar100(
    folder: str | None = None,
    validation: float = 0.1,
    augment: str | None = "crop-flip",
    seed: int = 0,
    coarse: bool = False,
    resize: int | None = None,
    samples: int | None = None,
    hub: bool = False,
    normalise: Literal["fixed", "own"] = "fixed",
) -> Data:
    """Return CIFAR-100 from Parquet files (see `parquet` for the layouts), images [60000, 3, 32, 32].

    Args:
        folder: The folder with its files or the one above; None: FLEETFIT_DATA names the one above.
        validation: Share of the training images that is held out, class by class, 0 <= validation < 1.
        augment: What training batches go through; "crop-flip" pads 4 pixels, "none" is nothing.
        seed: Of what is held out.
        resize: Side in pixels to which batches are enlarged, after augmentation; None: they stay as they are.
        samples: So many training images only, drawn class by class, those held out included; None: all.
        hub: Whether the set is downloaded from the Hugging Face hub where it is not on disk.
        normalise: By "fixed" values, mean 0.5 and deviation 0.25, or by the set's "own" mean and deviation per channel.
        coarse: Whether the labels are the 20 superclasses.

    Raises:
        DataError: The files are missing or wrong, or `validation` is out of range.
        MissingExtra: pyarrow or Pillow is not installed, or `datasets` is not and the set has to be downloaded.
    """
    facts = dataclasses.replace(FACTS, classes=20) if coarse else FACTS
    label = "coarse_label" if coarse else "fine_label"
    return named("cifar100", facts, HUB, folder, 3, label, validation, augment, seed,
                 *NORMALISATION[normalise], resize, samples, hub)  # fmt: skip
