"""Shakespeare's plays, character by character or word by word; each speaking role is a client's natural data.

McMahan, Moore, Ramage, Hampson and Arcas, "Communication-Efficient Learning of Deep Networks from Decentralized Data"
(2017), section 3: the next character, in windows of 80; each role's first 80% of lines are for training and the rest
for testing; roles with fewer than two lines are left out. LEAF (Caldas et al., 2018) made another set of the plays,
whose files are read as well.

Differs from the paper: the roles are those of your files (the paper has 1,146). The characters are fixed: tab, line
feed and the 95 printable ones of ASCII, 99 tokens with padding and the unknown one, whatever the files hold. Windows
neither overlap nor remember the one before, and every character that follows one in a window is predicted. LEAF scores
only the one after a window, which `score = "last"` does; its windows are put together again first. Validation data are
the last windows of a role's training data.

Files are Parquet with one row for each role and its text (`client_id`, `text`), Parquet with LEAF's windows
(`character_id`, `x`, `y`, as the hub has them), or LEAF's JSON. LEAF's windows of 80 characters that overlap by all but
one are put together again, so that all files give running text.
"""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fleetfit.data import cache
from fleetfit.data.cache import load_folder
from fleetfit.data.dataset import Data, Facts
from fleetfit.data.files import parquet
from fleetfit.data.files.folders import find_or_download, find_parquet_files
from fleetfit.data.files.leaf import Users, leaf_files, leaf_users
from fleetfit.data.files.plain_text import (
    PRINTABLE,
    Level,
    Passages,
    Score,
    Vocabulary,
    check_windows,
    most_frequent,
    next_tokens,
)
from fleetfit.errors import DataError, import_optional
from fleetfit.files import parse_path

FACTS = Facts(
    train=None,
    test=None,
    classes=99,
    resolution="80 characters",
    source="by speaking role as in McMahan et al. (2017); your Parquet files, LEAF's JSON or the hub",
)
HUB = "flwrlabs/shakespeare"
Roles = dict[str, list[str]]
"""Role -> passages of running text, in order."""

_ROLE = ("client_id", "character_id", "role")


def shakespeare(
    folder: str | None = None,
    level: Level = "characters",
    length: int = 80,
    score: Score = "all",
    vocabulary: int = 10_000,
    validation: float = 0.1,
    test: float = 0.2,
    hub: bool = False,
) -> Data:
    """Return the plays as next-token data, tokens [N, length]; the groups are the roles, by name.

    The folder has Parquet files with a row for each role, columns `client_id` and `text` (its lines); or LEAF's JSON
    files in `data/train` and `data/test`, or `data/all_data`; or Parquet files of LEAF's windows, as the hub has them.

    Args:
        folder: The folder with its files or the one above; None: FLEETFIT_DATA names the one above.
        level: "characters", or "words" (lower-cased; marks and line ends are words too).
        length: Tokens of a window.
        score: "all": every token of a window predicts the next one, and windows do not overlap. "last": only a
            window's last one, and there is a window for each character; takes `length` times the memory and time.
        vocabulary: Words that are known at most, the most frequent of the training data; not used for characters.
        validation: Share of a role's training windows, the last ones, that is held out; rounded down.
        test: Share of a role's lines (of its characters, in LEAF's files), the last ones, that is for testing, if
            there is no test file; rounded up, but at least one line is for training.
        hub: Whether the set is downloaded from the Hugging Face hub where it is not on disk: LEAF's, all roles.

    Raises:
        DataError: The files are missing or wrong, or a number is out of range.
        MissingExtra: pyarrow is not installed, or `datasets` is not and the set has to be downloaded.
    """
    name = "shakespeare"
    check_windows(name, length, level, score)
    found, lines = read_roles(name, find_or_download(name, folder, hub, HUB, find=_located))
    train, later = found["train"], found.get("test")
    groups = []
    for role in sorted({*train, *(later or {})}):
        said, rest = train.get(role, []), (later or {}).get(role, [])
        if not lines or sum(text.count("\n") + 1 for text in [*said, *rest]) >= 2:
            groups.append(divided(said, test, lines) if later is None else Passages(said, rest))
    known = Vocabulary("characters", PRINTABLE)
    if level == "words":
        known = most_frequent(level, (text for group in groups for text in group.train), vocabulary)
    return next_tokens(name, groups, known, length, score, validation)


def divided(said: list[str], test: float, lines: bool) -> Passages:
    """Return what a role has said, its last share for testing, rounded up; at least one line is for training.

    Args:
        said: The role's passages.
        test: Share for testing, 0 <= test < 1.
        lines: Whether whole lines are counted and the passages follow each other, else characters.

    Raises:
        DataError: The share is out of range.
    """
    if not 0 <= test < 1:
        raise DataError(f"shakespeare: test must be at least 0 and below 1, got {test}.", key="test")
    if lines:
        pieces = "\n".join(said).split("\n")
        count = len(pieces) - min(len(pieces) - 1, math.ceil(len(pieces) * test - 1e-9))
        return Passages(["\n".join(pieces[:count])], ["\n".join(pieces[count:])])
    left = sum(map(len, said)) - math.ceil(sum(map(len, said)) * test - 1e-9)
    train, rest = [], []
    for passage in said:
        train.append(passage[: max(0, left)])
        rest.append(passage[max(0, left) :])
        left -= len(passage)
    return Passages(train, rest)


# ---- roles and what they say, from whichever files there are ---------------------------------------------------------


def _located(name: str, folder: str | None) -> dict[str, list[Path]]:
    """Return the files of each split that is there, "train" first.

    Raises:
        DataError: There are none.
    """
    if folder is not None:
        path = parse_path(folder, "data.folder")
        for place in (path, path / name):
            if found := leaf_files(place):
                return found
    return find_parquet_files(name, folder)


def read_roles(name: str, folder: str | None) -> tuple[dict[str, Roles], bool]:
    """Return split -> role -> passages, and whether they have lines, which LEAF's have lost.

    "test" is there only if it has files of its own.

    Raises:
        DataError: A file is missing or wrong.
        MissingExtra: There are Parquet files and pyarrow is not installed.
    """
    splits = _located(name, folder)
    files = [file for paths in splits.values() for file in paths]
    if files[0].suffix != ".json" and "x" not in _opened(files[0]).columns:
        return {split: _from_rows(paths) for split, paths in splits.items()}, True

    def build(place: Path) -> None:
        found = {split: _from_windows(paths) for split, paths in splits.items()}
        (place / "roles.json").write_text(json.dumps(found), encoding="utf-8")

    def load(place: Path) -> dict[str, Roles]:
        found: dict[str, Roles] = json.loads((place / "roles.json").read_text(encoding="utf-8"))
        return found

    return load_folder(cache.make_key(name, files, [sorted(splits)], suffix=""), build, load), False


def _opened(path: Path) -> parquet.File:
    import_optional("pyarrow", "text", "Reading text from Parquet files")
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
                f'{path}: sample {row} of a role must have text in "x" and "y", got {window!r:.40}, {following!r:.40}.',
                path=path,
            )
        if window == expected:
            passages[-1].append(following)
        else:
            passages.append([window, following])
        expected = window[1:] + following
    return ["".join(parts) for parts in passages]
