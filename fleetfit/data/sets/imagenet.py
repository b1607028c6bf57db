"""ImageNet: 1.3 million photographs of 1,000 kinds of things, decoded batch by batch.

Russakovsky et al., "ImageNet Large Scale Visual Recognition Challenge" (2015), the data of 2012: ILSVRC2012.
"""

from fleetfit.data.dataset import Data, Facts
from fleetfit.data.files.folders import find_or_download, find_set_folder
from fleetfit.data.files.images import load_images, read_parquet
from fleetfit.data.files.labeled import IMAGES, find_class_folders
from fleetfit.data.image_reader import ImageSpec
from fleetfit.errors import DataError

FACTS = Facts(
    train=1_281_167,
    test=50_000,
    classes=1_000,
    resolution="any",
    source="Russakovsky et al. (2015), https://image-net.org; the official validation images are the test set",
)


def imagenet(
    folder: str | None = None,
    size: int = 224,
    center: float = 0.875,
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
        folder: The folder with its files or the one above; None: in the folder FLEETFIT_DATA.
        size: Side in pixels of the images that a model gets.
        center: Share of the shorter side that evaluation sees, 0 < center <= 1; 0.875 is 224 of 256 pixels.
        lazy: Whether images stay encoded; None: above 8 GiB of decoded images, as the whole set is from 47 pixels on.
        validation: Share of the training images to hold out, class by class, 0 <= validation < 1.
        augment: Augmentation of training batches; "resized-crop" takes 8% to 100% of the area. "none": the center.
        seed: Seed of the held out samples.
        resize: Side in pixels to which batches are enlarged after augmentation; None: no resizing.
        exif_orientation: Whether to apply the EXIF orientation; false: images stay as stored.
        hub: Whether to download the set from the Hugging Face hub if it is not on disk; requires its license.

    Raises:
        DataError: The files are missing or wrong, or a parameter is out of range.
        MissingExtra: `datasets` is not installed and the set has to be downloaded.
    """
    spec = ImageSpec(size, 3, center, lazy, upright=exif_orientation)
    set_folder = find_set_folder("imagenet", folder)
    if set_folder is not None and (folders := find_class_folders(set_folder, IMAGES)):
        labeled = folders.read("imagenet")
    else:
        parquet_folder = find_or_download("imagenet", folder, hub, "ILSVRC/imagenet-1k")
        # the labels of the test set were never published
        labeled = read_parquet("imagenet", parquet_folder, splits=("train", "validation"))
    labeled = load_images("imagenet", labeled, spec)
    if labeled.classes != FACTS.classes:
        raise DataError(
            f'imagenet has {FACTS.classes} classes, but the files have {labeled.classes}; data.name = "images" reads '
            "any set of this layout.",
            key="name",
        )
    return labeled.make_data(
        "imagenet", labeled.x, labeled.divide("imagenet", validation, 0.0, seed), augment, resize,
        mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), file_names=labeled.file_names,
    )  # fmt: skip
