"""Public sets of images: CIFAR-10 and CIFAR-100, MNIST and Fashion-MNIST, ImageNet.

CIFAR: Krizhevsky, "Learning Multiple Layers of Features from Tiny Images" (2009). Held out and normalised as in
ScaleFL, section 4.1: 5,000 training images for validation, mean 0.5 and standard deviation 0.25; or by the mean and
standard deviation of its training images, as in AdaptiveFL and ReeFL. Differs from the paper: the same number of images
is held out of every class, not simply random ones.

MNIST: LeCun, Bottou, Bengio and Haffner, "Gradient-Based Learning Applied to Document Recognition" (1998). Xiao, Rasul
and Vollgraf, "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning Algorithms" (2017).

ImageNet: Russakovsky et al., "ImageNet Large Scale Visual Recognition Challenge" (2015), the data of 2012: ILSVRC2012.
"""

import dataclasses
from typing import Literal

from fleetfit.data.dataset import Data, Facts
from fleetfit.data.files.folders import find_or_download, find_set_folder
from fleetfit.data.files.images import load_labelled, make_data, read_named_set, read_parquet
from fleetfit.data.files.labelled import IMAGES, has_class_folders, read_class_folders
from fleetfit.data.image_reader import ImageSpec
from fleetfit.errors import DataError
from fleetfit.factories import Preset, make_presets

_CIFAR = "Krizhevsky (2009), https://www.cs.toronto.edu/~kriz/cifar.html"
_MNIST = "LeCun et al. (1998), http://yann.lecun.com/exdb/mnist"
_FASHION = "Xiao et al. (2017), https://github.com/zalandoresearch/fashion-mnist"
_IMAGENET = "Russakovsky et al. (2015), https://image-net.org; the official validation images are the test set"
FACTS = {
    "cifar10": Facts(train=50_000, test=10_000, classes=10, resolution="32x32", source=_CIFAR),
    "cifar100": Facts(train=50_000, test=10_000, classes=100, resolution="32x32", source=_CIFAR),
    "mnist": Facts(train=60_000, test=10_000, classes=10, resolution="28x28", source=_MNIST),
    "fashion_mnist": Facts(train=60_000, test=10_000, classes=10, resolution="28x28", source=_FASHION),
    "imagenet": Facts(train=1_281_167, test=50_000, classes=1_000, resolution="any", source=_IMAGENET),
}
_GREY = {"label": "label", "coarse": False, "normalise": "own"}
SETS = {
    "cifar10": Preset(
        "CIFAR-10: 60,000 colour photographs of 10 kinds of things.",
        {"name": "cifar10", "repository": "uoft-cs/cifar10", "label": "label", "coarse": False,
         "mean": (0.4914, 0.4822, 0.4465), "std": (0.2470, 0.2435, 0.2616)},
    ),
    "cifar100": Preset(
        "CIFAR-100: 60,000 colour photographs of 100 kinds of things, in 20 superclasses.",
        {"name": "cifar100", "repository": "uoft-cs/cifar100", "label": "fine_label",
         "mean": (0.5071, 0.4865, 0.4409), "std": (0.2673, 0.2564, 0.2762)},
    ),
    "mnist": Preset(
        "MNIST: 70,000 handwritten digits.",
        {"name": "mnist", "repository": "ylecun/mnist", **_GREY, "mean": (0.1307,), "std": (0.3081,)},
        {"augment": None},
    ),
    "fashion_mnist": Preset(
        "Fashion-MNIST: 70,000 grey images of clothes, in the format of MNIST.",
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
    normalise: Literal["fixed", "own"] = "fixed",
) -> Data:
    """Return a set from Parquet files (see `fleetfit.data.files.images` for the layouts).

    Args:
        name: The set's name.
        repository: Its repository on the hub.
        label: Column of the labels.
        mean: Mean of its training images, one per channel.
        std: Standard deviation of its training images, one per channel.
        folder: The folder with its files or the one above; None: FLEETFIT_DATA names the one above.
        validation: Share of the training images to hold out, class by class, 0 <= validation < 1.
        augment: Augmentation of training batches; "crop-flip" pads 4 pixels, "crop" does not mirror, "none" is nothing.
        seed: Seed of the held out samples.
        coarse: Whether the labels are the 20 superclasses.
        resize: Side in pixels to which batches are enlarged after augmentation; None: they keep their size.
        samples: Number of training images to draw, class by class, those held out included; None: all.
        hub: Whether to download the set from the Hugging Face hub if it is not on disk.
        normalise: By "fixed" values, mean 0.5 and deviation 0.25, or by the set's "own" mean and deviation per channel.

    Raises:
        DataError: The files are missing or wrong, or `validation` is out of range.
        MissingExtra: `datasets` is not installed and the set has to be downloaded.
    """
    facts = dataclasses.replace(FACTS[name], classes=20) if coarse else FACTS[name]
    labelled = read_named_set(
        name, facts, repository, folder, hub, channels=len(mean), label="coarse_label" if coarse else label
    )
    if normalise == "fixed":
        mean, std = (0.5,), (0.25,)
    return make_data(name, labelled, validation, 0.0, seed, augment, mean, std, resize, samples)


cifar10, cifar100, mnist, fashion_mnist = make_presets(_make_images, SETS)


def imagenet(
    folder: str | None = None,
    size: int = 224,
    centre: float = 0.875,
    lazy: bool | None = None,
    validation: float = 0.01,
    augment: str | None = "resized-crop",
    seed: int = 0,
    resize: int | None = None,
    exif_orientation: bool = True,
    hub: bool = False,
) -> Data:
    """Return ImageNet from folders train/CLASS/*.JPEG and val/CLASS/*.JPEG, or from Parquet files as on the hub.

    The 50,000 official validation images are the test set. The archives must have been unpacked, and the validation
    images sorted into folders of classes. From Parquet files (about 150 GB) the images are copied once into the cache,
    which takes as much again; folders are read in place.

    Args:
        folder: The folder with its files or the one above; None: FLEETFIT_DATA names the one above.
        size: Side in pixels of the images that a model gets.
        centre: Share of the shorter side that evaluation sees, 0 < centre <= 1; 0.875 is 224 of 256 pixels.
        lazy: Whether images stay encoded; None: above 8 GiB of decoded images, as the whole set is from 47 pixels on.
        validation: Share of the training images to hold out, class by class, 0 <= validation < 1.
        augment: Augmentation of training batches; "resized-crop" takes 8% to 100% of the area. "none": the centre.
        seed: Seed of the held out samples.
        resize: Side in pixels to which batches are enlarged after augmentation; None: they keep their size.
        exif_orientation: Whether to apply the EXIF orientation; false: images stay as stored.
        hub: Whether to download the set from the Hugging Face hub if it is not on disk; requires its licence.

    Raises:
        DataError: The files are missing or wrong, or a parameter is out of range.
        MissingExtra: `datasets` is not installed and the set has to be downloaded.
    """
    spec = ImageSpec(size, 3, centre, lazy, upright=exif_orientation)
    set_folder = find_set_folder("imagenet", folder)
    if set_folder is not None and has_class_folders(set_folder, IMAGES):
        labelled = load_labelled("imagenet", read_class_folders("imagenet", set_folder, IMAGES), spec)
    else:
        parquet_folder = find_or_download("imagenet", folder, hub, "ILSVRC/imagenet-1k")
        # the labels of the test set were never published
        labelled = read_parquet("imagenet", parquet_folder, spec=spec, splits=("train", "validation"))
    classes = FACTS["imagenet"].classes
    if labelled.classes != classes:
        raise DataError(
            f'imagenet has {classes} classes, but the files have {labelled.classes}; data.name = "images" reads '
            "any set of this layout.",
            key="name",
        )
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    return make_data("imagenet", labelled, validation, 0.0, seed, augment, mean, std, resize)
