"""Shakespeare's speaking roles and what they say, from whichever files there are.

Parquet with one row for each role and its text (`client_id`, `text`), Parquet with LEAF's windows (`character_id`, `x`,
`y`, as the hub has them), or LEAF's JSON. LEAF's windows of 80 characters that overlap by all but one are put together
again, so that all files give running text.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fleetfit.data import _cache, parquet
from fleetfit.data._decode import need
from fleetfit.data._kept import kept
from fleetfit.data._leaf import Users, leaf_files, leaf_users
from fleetfit.errors import DataError
from fleetfit.paths import given

Roles = dict[str, list[str]]
"""Role -> passages of running text, in order."""

_ROLE = ("client_id", "character_id", "role")


def located(name: str, folder: str | None) -> dict[str, list[Path]]:
    """Return the files of each split that is there, "train" first.

    Raises:
        DataError: There are none.
    """
    if folder is not None:
        path = given(folder, "data.folder")
        for place in (path, path / name):
            if found := leaf_files(place):
                return found
    return parquet.locate(name, folder)


def read_roles(name: str, folder: str | None) -> tuple[dict[str, Roles], bool]:
    """Return split -> role -> passages, and whether they have lines, which LEAF's have lost.

    "test" is there only if it has files of its own.

    Raises:
        DataError: A file is missing or wrong.
        MissingExtra: There are Parquet files and pyarrow is not installed.
    """
    splits = located(name, folder)
    files = [file for paths in splits.values() for file in paths]
    if files[0].suffix != ".json" and "x" not in _opened(files[0]).columns:
        return {split: _from_rows(paths) for split, paths in splits.items()}, True

    def build(place: Path) -> None:
        found = {split: _from_windows(paths) for split, paths in splits.items()}
        (place / "roles.json").write_text(json.dumps(found), encoding="utf-8")

    def load(place: Path) -> dict[str, Roles]:
        found: dict[str, Roles] = json.loads((place / "roles.json").read_text(encoding="utf-8"))
        return found

    return kept(_cache.key(name, files, [sorted(splits)], suffix=""), build, load), False


def _opened(path: Path) -> parquet.File:
    need("pyarrow", "text", "Reading text from Parquet files")
    return parquet.File(path)


def _from_rows(paths: Iterable[Path]) -> Roles:
    roles: Roles = {}
    for path in paths:
        file = _opened(path)
        names = file.texts(file.column(None, _ROLE, "role"))
        for role, text in zip(names, file.texts(file.column(None, ("text",), "text")), strict=True):
            roles.setdefault(role, []).append(text)
    return roles


def _from_windows(paths: list[Path]) -> Roles:
    users: Users = {}
    if paths[0].suffix == ".json":
        users = leaf_users(paths)
    else:
        for path in paths:
            file = _opened(path)
            columns = (file.texts(file.column(None, _ROLE, "role")), file.texts("x"), file.texts("y"))
            for role, x, y in zip(*columns, strict=True):
                known = users.setdefault(role, ([], []))
                known[0].append(x)
                known[1].append(y)
    return {user: joined(x, y, paths[0]) for user, (x, y) in users.items()}


def joined(x: list[Any], y: list[Any], path: Path) -> list[str]:
    """Put windows and the characters that follow them together again.

    Args:
        x: Windows; one that is the window before it without its first character and with the character that follows
            that window continues the passage, any other begins a new one.
        y: The character that follows each.
        path: Where they come from, for messages.

    Raises:
        DataError: One of them is no text.
    """
    passages: list[list[str]] = []
    expected = None
    for row, (window, following) in enumerate(zip(x, y, strict=True)):
        if not isinstance(window, str) or not isinstance(following, str):
            raise DataError(
                f'{path}: sample {row} of a role must have text in "x" and "y", got {window!r:.40}, {following!r:.40}.'
            )
        if window == expected:
            passages[-1].append(following)
        else:
            passages.append([window, following])
        expected = window[1:] + following
    return ["".join(parts) for parts in passages]
