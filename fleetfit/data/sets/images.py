"""Public sets of images: CIFAR-10 and CIFAR-100, MNIST and Fashion-MNIST.

CIFAR: Krizhevsky, "Learning Multiple Layers of Features from Tiny Images" (2009). Held out and normalized as in
ScaleFL, section 4.1: 5,000 training images for validation, mean 0.5 and standard deviation 0.25; or by the mean and
standard deviation of its training images, as in AdaptiveFL and ReeFL. Differs from the paper: the same number of images
is held out of every class, not simply random ones.

MNIST: LeCun, Bottou, Bengio and Haffner, "Gradient-Based Learning Applied to Document Recognition" (1998). Xiao, Rasul
and Vollgraf, "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning Algorithms" (2017).
"""

import dataclasses
from typing import Literal

from fleetfit.data.dataset import Data, Facts
from fleetfit.data.files.folders import find_or_download
from fleetfit.data.files.images import load_images, read_parquet
from fleetfit.data.image_reader import MAX_BYTES, ImageSpec
from fleetfit.errors import DataError
from fleetfit.factories import Preset, make_presets

_CIFAR = "Krizhevsky (2009), https://www.cs.toronto.edu/~kriz/cifar.html"
_MNIST = "LeCun et al. (1998), http://yann.lecun.com/exdb/mnist"
_FASHION = "Xiao et al. (2017), https://github.com/zalandoresearch/fashion-mnist"
FACTS = {
    "cifar10": Facts(train=50_000, test=10_000, classes=10, resolution="32x32", source=_CIFAR),
    "cifar100": Facts(train=50_000, test=10_000, classes=100, resolution="32x32", source=_CIFAR),
    "mnist": Facts(train=60_000, test=10_000, classes=10, resolution="28x28", source=_MNIST),
    "fashion_mnist": Facts(train=60_000, test=10_000, classes=10, resolution="28x28", source=_FASHION),
}
_GREY = {"label": "label", "coarse": False, "normalize": "own"}
SETS = {
    "cifar10": Preset(
        "CIFAR-10: 60,000 color photographs of 10 kinds of things.",
        {"name": "cifar10", "repository": "uoft-cs/cifar10", "label": "label", "coarse": False,
         "mean": (0.4914, 0.4822, 0.4465), "std": (0.2470, 0.2435, 0.2616)},
    ),
    "cifar100": Preset(
        "CIFAR-100: 60,000 color photographs of 100 kinds of things, in 20 superclasses.",
        {"name": "cifar100", "repository": "uoft-cs/cifar100", "label": "fine_label",
         "mean": (0.5071, 0.4865, 0.4409), "std": (0.2673, 0.2564, 0.2762)},
    ),
    "mnist": Preset(
        "MNIST: 70,000 handwritten digits.",
        {"name": "mnist", "repository": "ylecun/mnist", **_GREY, "mean": (0.1307,), "std": (0.3081,)},
        {"augment": None},
    ),
    "fashion_mnist": Preset(
        "Fashion-MNIST: 70,000 gray images of clothes, in the format of MNIST.",
        {"name": "fashion_mnist", "repository": "zalando-datasets/fashion_mnist", **_GREY,
         "mean": (0.2860,), "std": (0.3530,)},
        {"augment": None},
    ),
}  # fmt: skip


def _make_images(
    name: str,
    repository: str,
    label: str,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    folder: str | None = None,
    validation: float = 0.1,
    augment: str | None = "crop-flip",
    seed: int = 0,
    coarse: bool = False,
    resize: int | None = None,
    samples: int | None = None,
    hub: bool = False,
    normalize: Literal["fixed", "own"] = "fixed",
) -> Data:
    """Return a set from Parquet files (see `fleetfit.data.files.images` for the layouts).

    Args:
        name: The set's name.
        repository: Its repository on the hub.
        label: Column of the labels.
        mean: Mean of its training images, one per channel.
        std: Standard deviation of its training images, one per channel.
        folder: The folder with its files or the one above; None: in the folder FLEETFIT_DATA.
        validation: Share of the training images to hold out, class by class, 0 <= validation < 1.
        augment: Augmentation of training batches; "crop-flip" pads 4 pixels, "crop" does not mirror, "none" is nothing.
        seed: Seed of the held out samples.
        coarse: Whether the labels are the 20 superclasses.
        resize: Side in pixels to which batches are enlarged after augmentation; None: no resizing.
        samples: Number of training images to draw, class by class, those held out included; None: all.
        hub: Whether to download the set from the Hugging Face hub if it is not on disk.
        normalize: By "fixed" values, mean 0.5 and deviation 0.25, or by the set's "own" mean and deviation per channel.

    Raises:
        DataError: The files are missing or wrong, or `validation` is out of range.
        MissingExtra: `datasets` is not installed and the set has to be downloaded.
    """
    facts = dataclasses.replace(FACTS[name], classes=20) if coarse else FACTS[name]
    folder = find_or_download(name, folder, hub, repository)
    rows = read_parquet(name, folder, label="coarse_label" if coarse else label)
    labeled = load_images(name, rows, ImageSpec(channels=len(mean), lazy=False, max_bytes=MAX_BYTES))
    height, width = labeled.x.shape[2:]
    if f"{height}x{width}" != facts.resolution or labeled.classes != facts.classes:
        raise DataError(
            f"{name} has {facts.classes} classes of {facts.resolution} images, but the files have "
            f"{labeled.classes} classes of {height}x{width}. Is this another data set?"
        )
    if "test" not in labeled.sizes:
        raise DataError(f"{name}: test.parquet is missing next to its train file.")
    if normalize == "fixed":
        mean, std = (0.5,), (0.25,)
    splits = labeled.divide(name, validation, 0.0, seed, samples)
    return labeled.make_data(name, labeled.x, splits, augment, resize, mean=mean, std=std)


cifar10, cifar100, mnist, fashion_mnist = make_presets(_make_images, SETS)
