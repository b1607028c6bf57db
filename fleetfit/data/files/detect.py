"""Detect the format of the data at a path: `data.path = "..."` becomes `data.name` and its keys.

It only reads names of files, headers of some images and arrays, and the first rows of a table.
"""

import functools
import inspect
import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from fleetfit import files
from fleetfit.data.files import table
from fleetfit.data.files.folders import (
    ListFolder,
    find_tables,
    is_saved_dataset,
    list_folder,
    list_sample_files,
    resolve_folder,
)
from fleetfit.data.files.images import sample_sizes, unpack_zip
from fleetfit.data.files.labeled import (
    IMAGES,
    find_class_folders,
    find_file_table,
    find_labeled_files,
)
from fleetfit.data.files.sounds import RATE, SUFFIXES as SOUNDS, read_header
from fleetfit.data.files.text import FILE_SUFFIXES, text
from fleetfit.errors import DataError

_LARGE, _SMALL = 64, 32  # sides for resizing images of several sizes, or large ones
_NATURAL = {"kind": "natural"}

_FILES = {"images": IMAGES, "sounds": SOUNDS, "text": FILE_SUFFIXES}

Keys = Mapping[str, Any]
"""Keys of the section `[data]`."""


def detect_format(path: str, keys: Keys | None = None) -> Keys:
    """Return the keys of `[data]` for the data at a path, its name first.

    Args:
        path: A file or a folder. A relative path that does not exist is looked up in the folder FLEETFIT_DATA.
        keys: The user's other keys. Some of them determine the format.

    Raises:
        DataError: The path does not exist, or its format is unknown.
    """
    location = resolve_folder(path)
    try:
        if location.is_dir():
            return _detect_folder(location, keys or {})
        if location.exists():
            return _detect_file(location, keys or {})
    except OSError as error:
        raise DataError(f"{location} cannot be read: {files.format_os_error(error)}.", path=location) from None
    path_here = files.parse_path(path, "data.path")
    candidates = [location] if location == path_here else [path_here, location]
    hint = files.suggest_neighbor(*candidates)
    paths = " nor ".join(map(str, candidates)) + (" (FLEETFIT_DATA)" if len(candidates) > 1 else "")
    raise DataError(f"data.path: no such file or folder: {paths}.{hint}", path=location)


def _detect_file(path: Path, keys: Keys) -> Keys:
    suffix = path.suffix.lower()
    if suffix in table.SUFFIXES:
        rows = _detect_file_table(path, keys) or choose_reader(table.guess_kinds(path), keys)
        return {**rows, "folder": str(path)}
    if suffix in (".jsonl", ".json"):
        return {"name": "text", "folder": str(path)}
    if suffix == ".npz":
        return _detect_arrays(path, keys)
    if suffix == ".zip":
        if classes := _detect_class_folders(unpack_zip(path), keys, functools.cache(list_folder)):
            return {**classes, "folder": str(path)}
        raise DataError(f"{path} has no folder for each class: expected CLASS/*.jpg in it.", path=path)
    if suffix == ".npy":
        return _detect_array_folder(
            path.parent, keys, f"{path.name} is a single array, but samples and labels are needed"
        )
    if suffix in (".txt", ".md"):
        return _detect_plain_text(path)
    raise DataError(
        f"{path} has an unknown suffix. Use .csv, .tsv or .parquet for a table, .npz for arrays, .txt for "
        "running text, .csv, .jsonl or .parquet for labeled texts, and a folder per class for images (or a .zip of "
        "them), sounds or texts. For other names set data.name.",
        path=path,
    )


def _detect_folder(folder: Path, keys: Keys) -> Keys:
    if is_saved_dataset(folder):
        return _detect_saved_dataset(folder, keys)
    list_once = functools.cache(list_folder)
    folders, files = list_once(folder)
    names = {name.lower() for name in files}
    inner = list_once(folder / "data")[1] if folder / "data" in folders else ()
    has_csv = any(name.lower().endswith(table.SUFFIXES[:2]) for name in (*files, *inner))
    if has_csv and (listed := _detect_file_table(folder, keys)):
        return listed
    if classes := _detect_class_folders(folder, keys, list_once):
        return classes
    if any(name.endswith(".npy") for name in names):
        return _detect_array_folder(folder, keys, f"{folder} lacks an array of samples or one of labels")
    try:
        tables = find_tables(folder, table.SUFFIXES[:2])
    except DataError:
        tables = {}
    if tables:
        return {**choose_reader(table.guess_kinds(tables["train"][0]), keys), "folder": str(folder)}
    if any(name.endswith((".jsonl", ".json")) for name in names):
        return {"name": "text", "folder": str(folder)}
    if any(name.endswith(".txt") for name in names):
        return _detect_plain_text(folder)
    archives = [name for name in names if name.endswith(".npz")]
    if len(archives) == 1:
        return detect_format(str(folder / archives[0]), keys)
    problem = "has an unknown format" if any(folder.iterdir()) else "has no files"
    raise DataError(
        f"{folder} {problem}. Expected a folder of images per class (CLASS/*.jpg, or train/CLASS/*.jpg), of sounds "
        "(.wav, .flac, .ogg) or of .txt or .md files per class, or a folder with train.csv, train.parquet, x.npy and "
        "y.npy, .txt files, or a data set of Hugging Face datasets (save_to_disk).",
        path=folder,
    )


def _detect_class_folders(folder: Path, keys: Keys, list_once: ListFolder) -> Keys:
    """Return the keys for class folders, also within folders of devices; {} if there are none."""
    for name, suffixes in _FILES.items():
        if classes := find_class_folders(folder, suffixes, list_once):
            partition = {"partition": _NATURAL} if classes.by_device else {}
            return {
                "name": name,
                "folder": str(folder),
                **partition,
                **_choose_form(name, folder, classes.sample(), keys),
            }
    return {}


def _detect_file_table(path: Path, keys: Keys) -> Keys:
    """Return the keys for a table of files beside them; {} if there is none, or class folders come first."""
    for name, suffixes in _FILES.items():
        if not (files := find_file_table(path, suffixes, keys.get("label"), keys.get("groups"))):
            continue
        is_asked = path.is_file() or "label" in keys or files.groups is not None
        if not is_asked and find_class_folders(path, suffixes) and len(list_folder(path)[0]) > 1:
            return {}
        groups = {} if files.groups is None else {"groups": files.groups, "partition": _NATURAL}
        image = {"image": files.files} if name == "images" else {}
        columns = {"name": name, "folder": str(path), "label": files.label, **groups, **image}
        paths = [one for one in files.paths if one is not None]
        return {**columns, **_choose_form(name, path, paths, {**keys, **columns})}
    return {}


def _choose_form(name: str, path: Path, paths: list[Path], keys: Keys) -> Keys:
    """Return the size of images of several sizes, or large ones, or the sampling rate of sounds, if it is not usual."""
    if name == "images":
        sizes = sample_sizes(paths, upright=keys.get("exif_orientation") is not False)
        sides = [side for size in sizes for side in size]
        if not sides or (len(set(sizes)) == 1 and max(sides) <= _LARGE):
            return {}
        return {"size": _LARGE if min(sides) >= _LARGE else _SMALL}
    if name != "sounds" or "sample_rate" in keys:
        return {}
    listed = find_labeled_files(path.name, path, SOUNDS, keys.get("label"), keys.get("groups"))
    rates = [] if listed is None else [read_header(file)[1] for file in listed.paths[: listed.sizes["train"]]]
    rate = max(sorted(set(rates)), key=rates.count, default=RATE)
    return {} if rate == RATE else {"sample_rate": rate}


def _detect_plain_text(path: Path) -> Keys:
    is_many = path.is_dir() and len(list_sample_files(path, "**/*.txt")) > 1  # each file is a client
    return {"name": "plain_text", "folder": str(path), "partition": {"kind": "natural" if is_many else "iid"}}


def _detect_array_folder(folder: Path, keys: Keys, problem: str) -> Keys:
    names = {file.stem for file in list_sample_files(folder, "*.npy")}
    if not ({"x", "y"} <= names or {"x_train", "y_train"} <= names):
        raise DataError(
            f"{problem}. Put x.npy and y.npy (or x_train.npy, y_train.npy, x_test.npy, y_test.npy) in one "
            'folder, or in one .npz file. For other names set data.name = "arrays" with x and y.',
            path=folder,
        )
    return _detect_arrays(folder, keys)


def _detect_arrays(path: Path, keys: Keys) -> Keys:
    """Return the names of samples and labels, and whether to standardize: rows and series of numbers but uint8."""
    from fleetfit.data.files.arrays import Arrays, has_several_labels

    arrays = Arrays(path)
    usual = {
        "x": ("x", "X", "data", "samples", "features", "images", "inputs"),
        "y": ("y", "Y", "label", "labels", "target", "targets"),
    }
    result: dict[str, Any] = {"name": "arrays", "file": str(path)}
    first: dict[str, Any] = {}  # the training samples and labels
    for key, aliases in usual.items():
        name = next((name for name in aliases if name in arrays or f"{name}_train" in arrays), key)
        result |= {} if name == key else {key: name}
        name = keys.get(key, name)
        first[key] = next((arrays.load(one) for one in (name, f"{name}_train") if one in arrays), None)
    samples, is_tokens = first["x"], keys.get("vocabulary") or keys.get("task") == "next_token"
    is_numeric = samples is not None and samples.dtype.kind in "biuf" and samples.dtype != "uint8"
    if is_numeric and samples.ndim in (2, 3) and not (is_tokens or keys.get("mean") or keys.get("std")):
        result["standardize"] = True
    if first["y"] is not None and not keys.get("task") and has_several_labels(first["y"]):
        result |= {"task": "multi_label", "partition": {"kind": "iid"}}
    return result


def choose_reader(kinds: Mapping[str, str], keys: Keys) -> dict[str, Any]:
    """Return whether rows are images, texts with labels, or a table of numbers and categories, as keys of `[data]`.

    Args:
        kinds: The kind of each column, as of `table.guess_kinds`.
        keys: The keys that a user set.
    """
    if "image" in kinds.values():
        return {"name": "images"}
    columns = {name: kind for name, kind in kinds.items() if name != keys.get("groups")} or kinds
    values = [name for name, kind in columns.items() if kind not in ("text", "short text", "id")]
    label = _find_label(columns, keys) or (values or list(columns))[-1]
    if keys.get("text"):
        return {"name": "text", "text": keys["text"], "label": label}
    is_asked = _has_keys(keys, text, table.table)
    if not is_asked and (_has_keys(keys, table.table, text) or columns[label] == "amount"):
        return {"name": "table"}
    features = {name: kind for name, kind in columns.items() if name != label}
    texts = [name for name, kind in features.items() if kind in ("text", "short text")]
    usual = [
        name for name in features if name.lower() in table.TEXT_COLUMNS and kinds[name] not in ("number", "amount")
    ]
    if usual and (usual[0] in texts or len(features) - len(texts) <= 1):
        return {"name": "text", "text": usual[0], "label": label}
    if not is_asked and not {"number", "amount"}.isdisjoint(features.values()):
        texts = [name for name in texts if kinds[name] == "text"]  # names beside numbers are not what a table is about
    if texts:
        return {"name": "text", "text": texts[0] if len(texts) == 1 else texts, "label": label}
    return {"name": "table"}


def _detect_saved_dataset(folder: Path, keys: Keys) -> Keys:
    """Return the format of a data set of Hugging Face `datasets`, by the features in its metadata."""
    infos = sorted(folder.glob("*/dataset_info.json")) or [folder / "dataset_info.json"]
    try:
        features = json.loads(files.read_text(infos[0], DataError))["features"]
        kinds = {str(name): _parse_feature(value) for name, value in features.items()}
        last = list(kinds)[-1]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise DataError(f"{infos[0]} has no valid features, the columns of the data set.", path=infos[0]) from None
    classes = [name for name, kind in kinds.items() if kind == "classes"]
    label = _find_label(kinds, keys) or (*classes, last)[0]
    images = [name for name, kind in kinds.items() if kind == "image"]
    if images:
        return {"name": "images", "folder": str(folder), "image": images[0], "label": label}
    texts = [name for name, kind in kinds.items() if kind == "string" and name != label]
    usual = [name for name in texts if name.lower() in table.TEXT_COLUMNS]
    numbers = [name for name, kind in kinds.items() if kind == "number" and name != label]
    if (usual or (texts and not numbers)) and not _has_keys(keys, table.table, text):
        texts = usual[:1] or texts
        return {"name": "text", "folder": str(folder), "label": label, "text": texts[0] if len(texts) == 1 else texts}
    return {"name": "table", "folder": str(folder), "label": label}


def _parse_feature(feature: Mapping[str, Any]) -> str:
    kind = {"Image": "image", "ClassLabel": "classes"}.get(feature.get("_type", ""))
    return kind or ("string" if feature.get("dtype") in ("string", "large_string") else "number")


def _find_label(columns: Collection[str], keys: Keys) -> str | None:
    label = keys.get("label")
    if isinstance(label, str) and label in columns:  # the reader refuses other labels
        return label
    return table.find_usual_label(columns)


def _has_keys(keys: Keys, reader: Callable[..., Any], other: Callable[..., Any]) -> bool:
    """Return whether there is a key of one reader that another does not have, such as `drop` of tables."""
    own, others = (inspect.signature(function).parameters for function in (reader, other))
    return any(key in own and key not in others and key != "transform" for key in keys)
