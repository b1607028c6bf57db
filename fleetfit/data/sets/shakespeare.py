"""Shakespeare's plays, character by character or word by word; each speaking role is a client's natural data.

McMahan, Moore, Ramage, Hampson and Arcas, "Communication-Efficient Learning of Deep Networks from Decentralized Data"
(2017), section 3: the next character, in windows of 80; each role's first 80% of lines are for training and the rest
for testing; roles with fewer than two lines are left out. LEAF (Caldas et al., 2018) made another set of the plays,
whose files are read as well.

Differs from the paper: the roles are those of your files (the paper has 1,146). The characters are fixed: tab, line
feed and the 95 printable ones of ASCII, 99 tokens with padding and the unknown one. Windows neither overlap nor
remember the one before, and every next character is predicted. LEAF scores only the character after a window, as
`score = "last"` does. Validation data are the last windows of a role's training data.

Files are Parquet with one row for each role and its text (`client_id`, `text`), Parquet with LEAF's windows
(`character_id`, `x`, `y`, as on the hub), or LEAF's JSON. LEAF's windows of 80 characters overlap by all but one; they
are joined, so that all files give running text.
"""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fleetfit.data import cache
from fleetfit.data.dataset import Data, Facts
from fleetfit.data.files import parquet
from fleetfit.data.files.folders import find_or_download, find_parquet_files, find_set_folder, resolve_folder
from fleetfit.data.files.leaf import Users, find_leaf_files, read_leaf_users
from fleetfit.data.files.plain_text import (
    PRINTABLE,
    Level,
    Passages,
    Score,
    Vocabulary,
    build_vocabulary,
    check_windows,
    make_data,
)
from fleetfit.errors import DataError
from fleetfit.files import parse_path

FACTS = Facts(
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
    files in `data/train` and `data/test`, or `data/all_data`; or Parquet files of LEAF's windows, as on the hub.

    Args:
        folder: The folder with its files or the one above; a relative path that does not exist is searched for in the
            folder FLEETFIT_DATA. None: in the folder FLEETFIT_DATA.
        level: "characters", or "words" (lower-cased; punctuation marks and line ends are words, too).
        length: Tokens of a window.
        score: "all": every token of a window predicts the next one, and windows do not overlap. "last": only the last
            token of a window does, and each token has a window; takes `length` times the memory and time.
        vocabulary: Maximal number of known words, the most frequent of the training data; not used for characters.
        validation: Share of a role's training windows, the last ones, to hold out; rounded down.
        test: Share of a role's lines (of its characters, in LEAF's files), the last ones, for testing, if there is no
            test file; rounded up, but at least one line is for training.
        hub: Whether to download the set (LEAF's, all roles) from the Hugging Face hub if it is not on disk.

    Raises:
        DataError: The files are missing or wrong, or a number is out of range.
        MissingExtra: `datasets` is not installed and the set has to be downloaded.
    """
    name = "shakespeare"
    check_windows(name, length, level, score)
    folder = None if folder is None else str(resolve_folder(folder))
    splits, has_lines = _read_roles(name, find_or_download(name, folder, hub, HUB, find=_find_files))
    groups = []
    for role in sorted({*splits["train"], *splits.get("test", {})}):
        train, held_out = splits["train"].get(role, []), splits.get("test", {}).get(role, [])
        if has_lines and sum(passage.count("\n") + 1 for passage in [*train, *held_out]) < 2:
            continue
        groups.append(Passages(train, held_out) if "test" in splits else split_role(train, test, has_lines))
    tokens = Vocabulary("characters", PRINTABLE)
    if level == "words":
        tokens = build_vocabulary(level, (text for group in groups for text in group.train), vocabulary)
    return make_data(name, groups, tokens, length, score, validation)


def split_role(passages: list[str], test: float, has_lines: bool) -> Passages:
    """Split a role's text: its last share is for testing, rounded up, but at least one line is for training.

    Args:
        passages: The role's passages.
        test: Share for testing, 0 <= test < 1.
        has_lines: Whether the share counts lines and the passages follow each other; else it counts characters.

    Raises:
        DataError: The share is out of range.
    """
    if not 0 <= test < 1:
        raise DataError(f"shakespeare: test must be at least 0 and below 1, got {test}.", key="test")
    if has_lines:
        lines = "\n".join(passages).split("\n")
        count = len(lines) - min(len(lines) - 1, math.ceil(len(lines) * test - 1e-9))
        return Passages(["\n".join(lines[:count])], ["\n".join(lines[count:])])
    total = sum(map(len, passages))
    remaining = total - math.ceil(total * test - 1e-9)  # characters for training
    train, held_out = [], []
    for passage in passages:
        train.append(passage[: max(0, remaining)])
        held_out.append(passage[max(0, remaining) :])
        remaining -= len(passage)
    return Passages(train, held_out)


# ---- roles and their text, from all layouts of files -----------------------------------------------------------------


def _find_files(name: str, folder: str | None) -> dict[str, list[Path]]:
    """Return the files of each split, "train" first."""
    path = find_set_folder(name, None) if folder is None else parse_path(folder, "data.folder")
    for set_folder in () if path is None else (path, path / name):
        if files := find_leaf_files(set_folder):
            return files
    return find_parquet_files(name, folder)


def _read_roles(name: str, folder: str | None) -> tuple[dict[str, Roles], bool]:
    """Return split -> role -> passages, and whether the passages have line ends, which LEAF's lack.

    "test" is there only if it has files of its own.
    """
    splits = _find_files(name, folder)
    files = [file for paths in splits.values() for file in paths]
    if files[0].suffix != ".json" and "x" not in parquet.File(files[0]).columns:
        return {split: _read_texts(paths) for split, paths in splits.items()}, True

    def build(target: Path) -> None:
        roles = {split: _read_windows(paths) for split, paths in splits.items()}
        (target / "roles.json").write_text(json.dumps(roles), encoding="utf-8")

    def load(target: Path) -> dict[str, Roles]:
        roles: dict[str, Roles] = json.loads((target / "roles.json").read_text(encoding="utf-8"))
        return roles

    return cache.load_folder(cache.make_key(name, files, [sorted(splits)]), build, load), False


def _read_texts(paths: Iterable[Path]) -> Roles:
    roles: Roles = {}
    for path in paths:
        file = parquet.File(path)
        names = file.texts(file.column(None, _ROLE, "role"))
        for role, text in zip(names, file.texts(file.column(None, ("text",), "text")), strict=True):
            roles.setdefault(role, []).append(text)
    return roles


def _read_windows(paths: list[Path]) -> Roles:
    users: Users = {}
    if paths[0].suffix == ".json":
        users = read_leaf_users(paths)
    else:
        for path in paths:
            file = parquet.File(path)
            columns = (file.texts(file.column(None, _ROLE, "role")), file.texts("x"), file.texts("y"))
            for role, x, y in zip(*columns, strict=True):
                windows, following = users.setdefault(role, ([], []))
                windows.append(x)
                following.append(y)
    return {user: join_windows(x, y, paths[0]) for user, (x, y) in users.items()}


def join_windows(x: list[Any], y: list[Any], path: Path) -> list[str]:
    """Join windows and the characters that follow them to passages.

    Args:
        x: Windows. One that continues the window before it by its next character continues the passage; any other
            begins a new one.
        y: The character that follows each.
        path: Their file, for messages.

    Raises:
        DataError: A window or a character is not text.
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
