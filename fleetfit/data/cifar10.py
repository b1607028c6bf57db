"""CIFAR-10: 60,000 colour photographs of 10 kinds of things.

Krizhevsky, "Learning Multiple Layers of Features from Tiny Images" (2009). Held out and normalised as in ScaleFL,
section 4.1: 5,000 training images for validation, mean 0.5 and standard deviation 0.25; or by the mean and standard
deviation of its training images, as in AdaptiveFL and ReeFL.

Differs from the paper: the images held out are as many of every class, not simply random.
"""

from typing import Literal

from fleetfit.data.dataset import Data, Facts
from fleetfit.data.images import named

FACTS = Facts(
    train=50_000,
    test=10_000,
    classes=10,
    resolution="32x32",
    source="Krizhevsky (2009), https://www.cs.toronto.edu/~kriz/cifar.html",
)
NORMALISATION = {
    "fixed": ((0.5,), (0.25,)),
    "own": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
}
HUB = "uoft-cs/cifar10"


def cifar10(
    folder: str | None = None,
    validation: float = 0.1,
    augment: str | None = "crop-flip",
    seed: int = 0,
    resize: int | None = None,
    samples: int | None = None,
    hub: bool = False,
    normalise: Literal["fixed", "own"] = "fixed",
) -> Data:
    """Return CIFAR-10 from Parquet files (see `parquet` for the layouts), images [60000, 3, 32, 32].

    Args:
        folder: The folder with its files or the one above; None: FLEETFIT_DATA names the one above.
        validation: Share of the training images that is held out, class by class, 0 <= validation < 1.
        augment: What training batches go through; "crop-flip" pads 4 pixels, "none" is nothing.
        seed: Of what is held out.
        resize: Side in pixels to which batches are enlarged, after augmentation; None: they stay as they are.
        samples: So many training images only, drawn class by class, those held out included; None: all.
        hub: Whether the set is downloaded from the Hugging Face hub where it is not on disk.
        normalise: By "fixed" values, mean 0.5 and deviation 0.25, or by the set's "own" mean and deviation per channel.

    Raises:
        DataError: The files are missing or wrong, or `validation` is out of range.
        MissingExtra: pyarrow or Pillow is not installed, or `datasets` is not and the set has to be downloaded.
    """
    return named("cifar10", FACTS, HUB, folder, 3, "label", validation, augment, seed,
                 *NORMALISATION[normalise], resize, samples, hub)  # fmt: skip
