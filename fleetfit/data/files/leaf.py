"""LEAF's JSON: samples by user, as its preprocessing writes them.

Caldas et al., "LEAF: A Benchmark for Federated Settings" (2018). A file has "users", "num_samples" and "user_data", in
which each user has "x" and "y"; the files lie in `data/train` and `data/test`, or in `data/all_data` where nothing has
been divided yet.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fleetfit import files
from fleetfit.data.files.folders import list_sample_files
from fleetfit.errors import DataError
from fleetfit.files import parse_json

Users = dict[str, tuple[list[Any], list[Any]]]
"""User -> x and y of its samples, in the order of the files."""

_WHOLE = ("all_data", ".")


def leaf_files(folder: Path) -> dict[str, list[Path]]:
    """Return the files of each split that is there, "train" first, or {} if there are none.

    Args:
        folder: The set's folder, the folder `data` in it, or a single file; what is not divided is "train".
    """
    if folder.is_file():
        return {"train": [folder]} if folder.suffix == ".json" else {}
    for place in (folder / "data", folder):
        found = {split: list_sample_files(place / split, "*.json") for split in ("train", "test")}
        if found["train"]:
            return {split: files for split, files in found.items() if files}
        for whole in _WHOLE:
            files = [file for file in list_sample_files(place / whole, "*.json") if _is_leaf(file)]
            if files:
                return {"train": files}
    return {}


def leaf_users(files: Sequence[Path]) -> Users:
    """Return the samples of every user in LEAF's files; users that are in several are joined.

    Raises:
        DataError: A file is no JSON of LEAF's, or a user has not as many labels as samples.
    """
    users: Users = {}
    for path in files:
        content = _content(path)
        data = content.get("user_data") if isinstance(content, Mapping) else None
        if not isinstance(data, Mapping):
            raise DataError(f'{path} is not in LEAF\'s format: it has no "user_data".', path=path)
        for user in _users(content, data, path):
            samples = data.get(user)
            x, y = (samples.get("x"), samples.get("y")) if isinstance(samples, Mapping) else (None, None)
            if not isinstance(x, list) or not isinstance(y, list) or len(x) != len(y):
                raise DataError(
                    f'{path}: user "{user}" must have lists "x" and "y" of one length in "user_data".', path=path
                )
            known = users.setdefault(str(user), ([], []))
            known[0].extend(x)
            known[1].extend(y)
    return users


def _users(content: Mapping[str, Any], data: Mapping[str, Any], path: Path) -> list[str]:
    """Return the users of a file, each once and none forgotten."""
    users = content.get("users", list(data))
    if not isinstance(users, list) or not all(isinstance(user, str) for user in users):
        raise DataError(f'{path}: "users" must be a list of names.', path=path)
    if len(set(users)) != len(users) or set(data) - set(users):
        raise DataError(f'{path}: "users" must name each user of "user_data" once.', path=path)
    return users


def _content(path: Path) -> Any:
    text = files.read_text(path, DataError)
    try:
        return parse_json(text)
    except ValueError as error:
        raise DataError(f"{path} cannot be read as JSON: {error}", path=path) from error


def _is_leaf(path: Path) -> bool:
    """Return whether a file begins like one of LEAF's, without reading all of it."""
    with files.open_file(path, DataError) as file:
        start = file.read(64)
    return start.lstrip()[:1] == b"{" and (b'"users"' in start or b'"user' in start or b'"num_samples"' in start)
