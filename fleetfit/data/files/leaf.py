"""Read LEAF's JSON: samples by user, in the form of its preprocessing.

Caldas et al., "LEAF: A Benchmark for Federated Settings" (2018). A file has "users", "num_samples" and "user_data",
with "x" and "y" for each user. The files are in `data/train` and `data/test`, or in `data/all_data` before LEAF's
split.
"""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fleetfit import files
from fleetfit.data.files.folders import list_sample_files
from fleetfit.data.splits import find_splits
from fleetfit.errors import DataError

Users = dict[str, tuple[list[Any], list[Any]]]
"""User -> x and y of the samples, in the order of the files."""


def find_leaf_files(folder: Path) -> dict[str, list[Path]]:
    """Return the files of each split, "train" first, or {} if there are none.

    Args:
        folder: The set's folder, the folder `data` in it, or a single file; without splits all files are "train".
    """
    if folder.is_file():
        return {"train": [folder]} if folder.suffix == ".json" else {}
    for top in (folder / "data", folder):
        if splits := find_splits(functools.partial(_list_json, top)):
            return splits
        for unsplit in (top / "all_data", top):
            paths = [path for path in list_sample_files(unsplit, "*.json") if _is_leaf(path)]
            if paths:
                return {"train": paths}
    return {}


def read_leaf_users(paths: Sequence[Path]) -> Users:
    """Return the samples of each user in LEAF's files, joined over files.

    Raises:
        DataError: A file is not LEAF's JSON, or a user's numbers of labels and samples differ.
    """
    users: Users = {}
    for path in paths:
        try:
            content = files.parse_json(files.read_text(path, DataError))
        except ValueError as error:
            raise DataError(f"{path} cannot be read as JSON: {error}", path=path) from None
        data = content.get("user_data") if isinstance(content, Mapping) else None
        if not isinstance(data, Mapping):
            raise DataError(f'{path} is not in LEAF\'s format: it has no "user_data".', path=path)
        names = content.get("users", list(data))
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise DataError(f'{path}: "users" must be a list of names.', path=path)
        if len(set(names)) != len(names) or set(data) - set(names):
            raise DataError(f'{path}: "users" must list each user of "user_data" once.', path=path)
        for name in names:
            samples = data.get(name)
            x, y = (samples.get("x"), samples.get("y")) if isinstance(samples, Mapping) else (None, None)
            if not isinstance(x, list) or not isinstance(y, list) or len(x) != len(y):
                raise DataError(
                    f'{path}: user "{name}" must have lists "x" and "y" of one length in "user_data".', path=path
                )
            all_x, all_y = users.setdefault(name, ([], []))
            all_x.extend(x)
            all_y.extend(y)
    return users


def _list_json(folder: Path, split: str) -> list[Path]:
    return list_sample_files(folder / split, "*.json")


def _is_leaf(path: Path) -> bool:
    """Return whether a file starts like LEAF's; it may be too large to parse."""
    with files.open_file(path, DataError) as file:
        start = file.read(64)
    return start.lstrip()[:1] == b"{" and (b'"users"' in start or b'"user' in start or b'"num_samples"' in start)
