"""FEMNIST: handwritten digits and letters of 62 classes, by writer.

Caldas et al., "LEAF: A Benchmark for Federated Settings" (2018), made from NIST Special Database 19 (Cohen et al.,
"EMNIST", 2017, has the same characters). Each writer is a natural group, so that `partition = { kind = "natural" }`
makes every writer a client.

Differs from the paper: missing splits are held out here, within each writer; ink is made bright and paper dark, as in
MNIST.
"""

import dataclasses
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fleetfit.data import cache
from fleetfit.data.dataset import Data, Facts
from fleetfit.data.files.folders import find_or_download, find_parquet_files, find_set_folder, resolve_folder
from fleetfit.data.files.images import load_images, read_parquet
from fleetfit.data.files.leaf import find_leaf_files, read_leaf_users
from fleetfit.data.image_reader import MAX_BYTES, ImageSpec
from fleetfit.data.rows import Rows
from fleetfit.errors import DataError

FACTS = Facts(
    classes=62,
    resolution="28x28",
    source="Caldas et al. (2018), https://leaf.cmu.edu: 805,263 images of 3,550 writers; its parts vary",
)
HUB = "flwrlabs/femnist"
_NAMES = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_DIGITS = 10
_SIDE = 28


def femnist(
    folder: str | None = None,
    validation: float = 0.1,
    test: float = 0.1,
    augment: str | None = None,
    seed: int = 0,
    resize: int | None = None,
    hub: bool = False,
    samples: int | None = None,
) -> Data:
    """Return FEMNIST from LEAF's JSON or from Parquet files, images [N, 1, 28, 28], groups = writers.

    LEAF's folder has `data/all_data/all_data_*.json`, or `data/train` and `data/test` if LEAF has split them; it may
    also be the folder `data` or the one above. Parquet files have the columns image, label or character, and writer_id,
    in a folder with `train.parquet` or numbered files. A set of the ten digits alone has ten classes.

    Args:
        folder: The folder with its files or the one above; a relative path that does not exist is searched for in the
            folder FLEETFIT_DATA. None: in the folder FLEETFIT_DATA.
        validation: Share of each writer's training images to hold out, 0 <= validation < 1.
        test: Share of each writer's images to hold out as the test set, if there is no test file.
        augment: Augmentation of training batches, such as "crop"; None: nothing.
        seed: Seed of the held out samples.
        resize: Side in pixels to which batches are enlarged after augmentation; None: no resizing.
        hub: Whether to download the set from the Hugging Face hub if it is not on disk.
        samples: Number of training images to draw, class by class, those held out included; None: all.

    Raises:
        DataError: The files are missing or wrong, or a share is out of range.
        MissingExtra: `datasets` is not installed and the set has to be downloaded.
    """
    if folder is not None:
        folder = str(resolve_folder(folder))
    folder = find_or_download(
        "femnist", folder, hub, HUB, find=lambda *place: _find_leaf_files(place[1]) or find_parquet_files(*place)
    )
    if leaf_files := _find_leaf_files(folder):
        labeled = _read_leaf(leaf_files)
    else:
        spec = ImageSpec(channels=1, lazy=False, max_bytes=MAX_BYTES)
        labeled = load_images("femnist", read_parquet("femnist", folder, groups="writer_id"), spec)
    if labeled.class_names and set(labeled.class_names) <= set(_NAMES):  # texts, of which some may be absent
        numbers = np.array([_NAMES.index(name) for name in labeled.class_names])
        labeled = dataclasses.replace(labeled, y=numbers[labeled.y], classes=int(numbers.max()) + 1)
    height, width = labeled.x.shape[2:]
    if (height, width) != (_SIDE, _SIDE) or labeled.classes > len(_NAMES):
        raise DataError(
            "femnist has 62 classes (or the 10 digits) of 28x28 images, but the files have "
            f"{labeled.classes} classes of {height}x{width}. Is this another data set?"
        )
    classes = _DIGITS if labeled.classes <= _DIGITS else len(_NAMES)
    pixels = np.asarray(labeled.x)
    if len(pixels) and pixels.mean() > 127.5:  # bright paper, which most of a page is
        pixels = 255 - pixels
    labeled = dataclasses.replace(labeled, x=pixels, classes=classes, class_names=tuple(_NAMES[:classes]), notes=())
    splits = labeled.divide("femnist", validation, test, seed, samples)
    return labeled.make_data("femnist", labeled.x, splits, augment, resize, mean=(0.04,), std=(0.17,))


def _find_leaf_files(folder: str | None) -> dict[str, list[Path]]:
    set_folder = find_set_folder("femnist", folder)
    return {} if set_folder is None else find_leaf_files(set_folder)


def _read_leaf(splits: dict[str, list[Path]]) -> Rows:
    """Return LEAF's images, read file by file into the cache: as text they take twenty times the memory."""
    files = [path for paths in splits.values() for path in paths]

    def build(target: Path) -> None:
        y: list[NDArray[np.int64]] = []
        writers: list[str] = []
        sizes = {}
        with (target / "x.bin").open("wb") as out:
            for split, paths in splits.items():
                start = len(writers)
                for path in paths:
                    for writer, (x, labels) in read_leaf_users([path]).items():
                        out.write(_parse_pixels(x, path, writer).tobytes())
                        y.append(_parse_labels(labels, path, writer))
                        writers += [writer] * len(labels)
                sizes[split] = len(writers) - start
        np.save(target / "y.npy", np.concatenate(y) if y else np.zeros(0, np.int64))
        np.save(target / "groups.npy", np.unique(writers, return_inverse=True)[1].astype(np.int64))
        (target / "sizes.json").write_text(json.dumps(sizes))

    def load(target: Path) -> Rows:
        y, groups = np.load(target / "y.npy"), np.load(target / "groups.npy")
        sizes = json.loads((target / "sizes.json").read_text())
        if not len(y):
            raise DataError(f"{files[0]}: the files of the set have no samples.", path=files[0])
        x = np.memmap(target / "x.bin", np.uint8, "c", shape=(len(y), 1, _SIDE, _SIDE))
        return Rows(x, y, sizes, len(_NAMES), (), groups)

    return cache.load_folder(cache.make_key("femnist", files, ["leaf", list(splits)]), build, load)


def _parse_pixels(x: list[object], path: Path, writer: str) -> NDArray[np.uint8]:
    """Return LEAF's gray values 0..1 as 0..255, from which LEAF made them."""
    if not x:
        return np.zeros((0, _SIDE**2), dtype=np.uint8)
    try:
        gray = np.array(x, dtype=np.float64).reshape(len(x), -1)
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(
            f'{path}: the images of writer "{writer}" must be lists of numbers: {error}', path=path
        ) from None
    if gray.shape[1] != _SIDE**2 or not 0 <= gray.min() <= gray.max() <= 1:
        raise DataError(
            f'{path}: an image of writer "{writer}" must be {_SIDE**2} numbers from 0 to 1, got {gray.shape[1]} from '
            f"{gray.min():g} to {gray.max():g}.",
            path=path,
        )
    return np.rint(gray * 255).astype(np.uint8)


def _parse_labels(labels: list[object], path: Path, writer: str) -> NDArray[np.int64]:
    if not all(type(label) is int and 0 <= label < len(_NAMES) for label in labels):
        raise DataError(
            f'{path}: the labels of writer "{writer}" must be whole numbers in 0..{len(_NAMES) - 1}.', path=path
        )
    return np.array(labels, dtype=np.int64)
