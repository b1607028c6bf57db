"""Images in one folder for each class, the layout of ImageNet: `train/CLASS/*.JPEG` and `val/CLASS/*.JPEG`.

The folders of the splits are `train`, `validation` (or `valid`, `val`) and `test`; without `train` the class folders
lie in the set's folder itself. Images may lie one folder deeper, in `CLASS/images`, as in Tiny ImageNet. A `test`
folder without class folders holds unlabelled images and is left out.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fleetfit.data import _cache
from fleetfit.data._encoded import Files
from fleetfit.data._kept import kept
from fleetfit.data._pictures import Form, Table, pictures
from fleetfit.errors import DataError

_SPLITS = {"train": ("train",), "validation": ("validation", "valid", "val"), "test": ("test",)}
_ENDINGS = (".jpeg", ".jpg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
_AT_ONCE = 256  # images in memory as files at a time

Index = tuple[NDArray[np.bytes_], NDArray[np.int64], dict[str, int]]


def has_class_folders(folder: Path) -> bool:
    """Return whether a folder looks like this layout."""
    train = folder / "train"
    return bool(_folders(train)) if train.is_dir() else any(_images_of(place) for place in _folders(folder))


def read_class_folders(name: str, folder: Path, form: Form) -> Table:
    """Read a set; labels follow the names of the class folders of the training images, in ascending order.

    Args:
        name: The set's name, for messages and the cache.
        folder: Its folder.
        form: What images are brought to.

    Raises:
        DataError: A folder or an image is missing or wrong.
        MissingExtra: Pillow is not installed.
    """
    form.check(name)
    folder = folder.resolve()
    places = _split_folders(name, folder)
    classes = [place.name for place in _folders(places["train"])]
    seen = [deep for place in places.values() for deep in (place, *_with_images(place))]
    stem = _cache.key(name, seen, ["class folders", *places], suffix="")
    names, y, sizes = kept(stem, lambda target: _write_index(target, folder, places, classes), _read_index)
    source = _Images(Files(folder, names))
    return Table(
        x=pictures(name, [source], "", form, source.paths, lambda: source.files),
        y=y,
        sizes=sizes,
        classes=len(classes),
        class_names=tuple(classes),
        groups=None,
    )


@dataclass(frozen=True)
class _Images:
    """The images as a `_decode.Source`."""

    files: Files

    @property
    def path(self) -> Path:
        return self.files.root / "train"

    @property
    def rows(self) -> int:
        return len(self.files)

    def images(self, column: str) -> Iterator[list[bytes]]:
        for start in range(0, self.rows, _AT_ONCE):
            yield [self.files.read(i) for i in range(start, min(self.rows, start + _AT_ONCE))]

    def place(self, row: int) -> str:
        return self.files.place(row)

    def paths(self) -> list[Path]:
        return [Path(self.files.place(row)) for row in range(self.rows)]


def _folders(place: Path) -> list[Path]:
    """Return the folders in a folder, sorted, but for hidden ones."""
    found = (place / entry.name for entry in os.scandir(place) if entry.is_dir() and not entry.name.startswith("."))
    return sorted(found)


def _with_images(place: Path) -> list[Path]:
    """Return the folders in which a split's images lie, class by class."""
    return [deep for one in _folders(place) for deep in (one, one / "images") if deep.is_dir()]


def _images_of(place: Path) -> list[str]:
    """Return the names of the images of a class folder, sorted."""
    found = []
    for deep in (place, place / "images"):
        if deep.is_dir():
            prefix = "" if deep == place else "images/"
            found += [prefix + e.name for e in os.scandir(deep) if e.name.lower().endswith(_ENDINGS) and e.is_file()]
    return sorted(name for name in found if not name.startswith("."))


def _split_folders(name: str, folder: Path) -> dict[str, Path]:
    """Return the folder of each split that is there, "train" first."""
    found = {}
    for split, aliases in _SPLITS.items():
        place = next((folder / alias for alias in aliases if (folder / alias).is_dir()), None)
        if place is None or (split == "test" and not _folders(place)):
            continue
        found[split] = place
    if "train" not in found:
        return {"train": folder}
    lacking = [place for place in found.values() if not any(_images_of(one) for one in _folders(place))]
    if lacking:
        raise DataError(
            f"{name}: {lacking[0]} has no class folders with images in them. Put the images of each class into a "
            "folder of its own, with the same names as the class folders of the training images."
        )
    return found


def _write_index(target: Path, folder: Path, places: dict[str, Path], classes: list[str]) -> None:
    """Write the path of each image below the set's folder, its label, and how many each split has."""
    label = {name: number for number, name in enumerate(classes)}
    names: list[bytes] = []
    y: list[int] = []
    sizes = {}
    for split, place in places.items():
        before = len(names)
        for one in _folders(place):
            if one.name not in label:
                raise DataError(
                    f"{one}: there is no class of this name among the training images in {places['train']}."
                )
            images = [os.fsencode((one / name).relative_to(folder)) for name in _images_of(one)]
            names += images
            y += [label[one.name]] * len(images)
        sizes[split] = len(names) - before
    np.save(target / "names.npy", np.array(names, dtype=np.bytes_))
    np.save(target / "y.npy", np.array(y, dtype=np.int64))
    (target / "sizes.json").write_text(json.dumps(sizes))


def _read_index(folder: Path) -> Index:
    names = np.load(folder / "names.npy", mmap_mode="r")
    y = np.load(folder / "y.npy")
    sizes = json.loads((folder / "sizes.json").read_text())
    if not len(names) == len(y) == sum(sizes.values()):
        raise ValueError("the parts of the index have different lengths")
    return names, y, sizes
