"""Which kind of data lies at a path: `data.path = "..."` becomes a name and the keys that go with it.

Only names of files, the first bytes of some, and the first rows of a table are looked at; nothing is decoded.
"""

import inspect
import itertools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fleetfit import files
from fleetfit.data.files import table
from fleetfit.data.files.images import has_class_folders, sizes_of_some
from fleetfit.data.files.places import is_saved, is_system_name, sample_files, set_folder
from fleetfit.data.files.text import TEXT_COLUMNS, has_text_folders, text
from fleetfit.errors import DataError, did_you_mean, truncate

_TEXT = (".txt", ".md")
_ROWS = (".jsonl", ".json")
_LARGE, _SMALL = 64, 32  # sides that images of several sizes, or large ones, are brought to
_ENTRIES = 10_000  # of a folder that are looked at

Found = Mapping[str, Any]
"""Keys of `[data]`: its name and what goes with it."""


def found_at(path: str, given: Found | None = None) -> Found:
    """Return the keys of `[data]` for what lies at a path.

    Args:
        path: A file or a folder; a relative path that does not exist is sought in the folder FLEETFIT_DATA.
        given: Keys that somebody wrote beside it, which say more of what it is.

    Raises:
        DataError: There is nothing, or nothing that is known.
    """
    place = set_folder(path)
    try:
        if place.is_dir():
            return _of_folder(place, given or {})
        if place.exists():
            return _of_file(place, given or {})
    except OSError as error:
        raise DataError(f"{place} cannot be read: {files.format_os_error(error)}.") from None
    here = files.parse_path(path, "data.path")
    sought = [place] if place == here else [here, place]
    beside = [name for one in sought for name in _beside(one)]
    near = next((name for name in beside if name.lower() == place.name.lower() or Path(name).stem == place.name), None)
    hint = f' Did you mean "{truncate(near)}"?' if near else did_you_mean(place.name, beside)
    where = " nor ".join(map(str, sought)) + (" (FLEETFIT_DATA)" if len(sought) > 1 else "")
    raise DataError(f"data.path: there is no file or folder {where}.{hint}")


def _beside(place: Path) -> list[str]:
    """Return the names in the folder where something was sought; none where that cannot be looked into."""
    if not place.parent.is_dir():
        return []
    return sorted(entry.name for entry in itertools.islice(os.scandir(place.parent), _ENTRIES))


def _of_file(place: Path, given: Found) -> Found:
    suffix = place.suffix.lower()
    if suffix in table.SUFFIXES:
        return _of_rows(place, place, given)
    if suffix in _ROWS:
        return {"name": "text", "folder": str(place)}
    if suffix == ".npz":
        return {"name": "arrays", "file": str(place), **_standardised(place, given)}
    if suffix == ".npy":
        return _of_arrays(place.parent, given, f"{place.name} is one array, and two are needed, samples and labels")
    if suffix in _TEXT:
        return _running(place)
    raise DataError(
        f"data.path: {place} has no suffix that FleetFit knows. A table ends in .csv, .tsv or "
        ".parquet, arrays in .npz, running text in .txt, texts with labels in .csv, .jsonl or .parquet; images are "
        "in one folder for each class. Otherwise set data.name = ..."
    )


def _of_folder(place: Path, given: Found) -> Found:
    if is_saved(place):
        return _of_saved(place, given)
    if has_class_folders(place):
        return {"name": "images", "folder": str(place), **_sides(place, given)}
    if has_text_folders(place):
        return {"name": "text", "folder": str(place)}
    files = itertools.islice(os.scandir(place), _ENTRIES)
    names = {entry.name.lower() for entry in files if entry.is_file() and not is_system_name(entry.name)}
    if any(name.endswith(".npy") for name in names):
        return _of_arrays(place, given, f"{place} has no array of samples and one of labels")
    try:
        tables = table.find_files(place)
    except DataError:
        tables = {}
    if tables:
        return _of_rows(tables["train"][0], place, given)
    if any(name.endswith(_ROWS) for name in names):
        return {"name": "text", "folder": str(place)}
    if any(name.endswith(".txt") for name in names):
        return _running(place)
    archives = [name for name in names if name.endswith(".npz")]
    if len(archives) == 1:
        return found_at(str(place / archives[0]), given)
    raise DataError(
        f"data.path: nothing in {place} says what it is. It may be a folder of images for each "
        "class (CLASS/*.jpg, or train/CLASS/*.jpg), of .txt files for each class, train.csv or train.parquet, x.npy "
        "and y.npy, .txt files, or what save_to_disk of Hugging Face datasets wrote."
    )


def _running(place: Path) -> Found:
    """Return the keys of running text: each of several files is a natural client, one file is divided evenly."""
    several = place.is_dir() and len(sample_files(place, "**/*.txt")) > 1
    return {"name": "plain_text", "folder": str(place), "partition": {"kind": "natural" if several else "iid"}}


def _of_arrays(place: Path, given: Found, otherwise: str) -> Found:
    there = {file.stem for file in sample_files(place, "*.npy")}
    if not ({"x", "y"} <= there or {"x_train", "y_train"} <= there):
        raise DataError(
            f"data.path: {otherwise}: x.npy and y.npy (or x_train.npy, y_train.npy, x_test.npy, y_test.npy) in one "
            'folder, or one .npz file. Other names: data.name = "arrays", with x = "..." and y = "...".'
        )
    return {"name": "arrays", "file": str(place), **_standardised(place, given)}


def _standardised(place: Path, given: Found) -> Found:
    """Return the names of the arrays, where they are usual ones, and that features are brought to mean 0, variance 1.

    So are rows and series of numbers other than uint8, unless somebody gave mean or std, or says that they are tokens.
    """
    from fleetfit.data.files.arrays import Arrays

    arrays = Arrays(place)
    names: dict[str, str] = {}
    for key, also in (("x", ("X", "data", "samples", "features", "images", "inputs")),
                      ("y", ("Y", "label", "labels", "target", "targets"))):  # fmt: skip
        if not any(name in arrays for name in (key, f"{key}_train")):
            other = next((name for name in also if name in arrays or f"{name}_train" in arrays), None)
            if other is not None:
                names[key] = other
    x = given.get("x", names.get("x", "x"))
    first = next((name for name in (x, f"{x}_train") if name in arrays), None)
    tokens = given.get("vocabulary") or given.get("task") == "next_token"
    if first is None or tokens or given.get("mean") or given.get("std"):
        return names  # whoever reads them says what is there
    samples = arrays.load(first)
    numbers = samples.dtype.kind in "biuf" and samples.dtype != "uint8"
    return {**names, "standardise": True} if numbers and samples.ndim in (2, 3) else names


def _sides(place: Path, given: Found) -> Found:
    """Return the side that images are brought to, where they are of several sizes, or large."""
    sizes = sizes_of_some(place, upright=given.get("exif_orientation") is not False)
    sides = [side for size in sizes for side in size]
    if not sides or (len(set(sizes)) == 1 and max(sides) <= _LARGE):
        return {}
    return {"size": _LARGE if min(sides) >= _LARGE else _SMALL}


def _of_rows(first: Path, place: Path, given: Found) -> Found:
    """Return whether the rows of a file are images, texts with labels, or a table of numbers and categories.

    The label that somebody gave is none of the texts, and keys that only a table takes make it one.
    """
    columns = table.guess_kinds(first)
    if any(kind == "image" for kind in columns.values()):
        return {"name": "images", "folder": str(place)}
    if _says_table(given):
        return {"name": "table", "folder": str(place)}
    texts = [name for name, kind in columns.items() if kind == "text"]
    label = _given_label(given, columns) or next((name for name in columns if name.lower() in table.LABELS), None)
    label = label or list(columns)[-1]
    texts = [name for name in texts if name != label]
    known = [name for name in columns if name.lower() in TEXT_COLUMNS and name != label]
    others = [name for name in columns if name not in (*texts, label)]
    if known and (known[0] in texts or len(others) <= 1):
        return {"name": "text", "folder": str(place), "text": known[0], "label": label}
    if texts and all(columns[name] == "other" for name in others):
        return {"name": "text", "folder": str(place), "text": texts[0] if len(texts) == 1 else texts, "label": label}
    return {"name": "table", "folder": str(place)}


def _given_label(given: Found, columns: Mapping[str, str]) -> str | None:
    """Return the column that somebody gave as label; None where nobody did, or there is none of that name."""
    label = given.get("label")
    return label if isinstance(label, str) and label in columns else None  # whoever reads them says what there is


def _says_table(given: Found) -> bool:
    """Tell whether somebody gave a key that a table takes and texts do not, such as `drop`."""
    takes, of_texts = (inspect.signature(one).parameters for one in (table.table, text))
    return any(key in takes and key not in of_texts for key in given)


def _of_saved(place: Path, given: Found) -> Found:
    """Return the kind of a Hugging Face data set that was saved, by what `datasets` wrote of its columns."""
    infos = sorted(place.glob("*/dataset_info.json")) or [place / "dataset_info.json"]
    try:
        features = json.loads(files.read_text(infos[0], DataError))["features"]
        kinds = {str(name): _feature(value) for name, value in features.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise DataError(f"{infos[0]} does not say what the columns of the data set are.", path=infos[0]) from None
    label = _given_label(given, kinds) or next((name for name in kinds if name.lower() in table.LABELS), None) or next(
        (name for name, kind in kinds.items() if kind == "classes"), list(kinds)[-1])  # fmt: skip
    images = [name for name, kind in kinds.items() if kind == "image"]
    if images:
        return {"name": "images", "folder": str(place), "image": images[0], "label": label}
    texts = [name for name, kind in kinds.items() if kind == "string" and name != label]
    known = [name for name in texts if name.lower() in TEXT_COLUMNS]
    numbers = [name for name, kind in kinds.items() if kind == "number" and name != label]
    if (known or (texts and not numbers)) and not _says_table(given):
        chosen = known[:1] or texts
        return {"name": "text", "folder": str(place), "label": label, "text": chosen[0] if len(chosen) == 1 else chosen}
    return {"name": "table", "folder": str(place), "label": label}


def _feature(value: Mapping[str, Any]) -> str:
    kind = value.get("_type")
    if kind == "Image":
        return "image"
    if kind == "ClassLabel":
        return "classes"
    return "string" if value.get("dtype") in ("string", "large_string") else "number"
