"""Labelled texts on disk, in whatever layout; the texts themselves are read only when they are asked for."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetfit.data import parquet
from fleetfit.data._tables import SUFFIXES, Rows, opened
from fleetfit.errors import DataError
from fleetfit.paths import text_of

_TEXT = ("text", "sentence")
_LABEL = ("label", "labels")
_ALIASES = {"train": ("train",), "validation": ("validation", "valid", "val", "dev"), "test": ("test",)}
_UNLABELLED = "unsup"  # the folder of texts without a label in the IMDB set
_WITHHELD = -1


@dataclass(frozen=True)
class Corpus:
    """The texts of all files of a set, one split after the other.

    Attributes:
        files: Where they come from.
        marks: What else decides about the texts: columns and the like.
        texts: Reads them, [N].
        y: int64 [N].
        sizes: split -> number of texts, in their order; only the splits that are there.
        classes: Number of classes.
        class_names: One per class, or ().
        groups: int64 [N], or None.
    """

    files: list[Path]
    marks: list[object]
    texts: Callable[[], list[str]]
    y: NDArray[np.int64]
    sizes: dict[str, int]
    classes: int
    class_names: tuple[str, ...]
    groups: NDArray[np.int64] | None


def read(
    name: str,
    path: Path | None,
    text: str | tuple[str, ...] | None = None,
    label: str | None = None,
    groups: str | None = None,
    header: bool = True,
) -> Corpus:
    """Find the files of a set and read everything but the texts.

    Args:
        name: The set's name, for messages.
        path: A file, or a folder with train.parquet (.csv, .tsv, .jsonl, .json) and so on, or with a folder of .txt
            files for each class, in a folder for each split or not. None: FLEETFIT_DATA holds its Parquet files.
        text: Column of the texts, or several to be joined by a space; None: `text` or `sentence`.
        label: Column of the labels, integers or text; None: `label` or `labels`.
        groups: Column of a natural group such as an author; None: no groups.
        header: Whether the first line of a CSV or TSV file names the columns.

    Raises:
        DataError: A file or a column is missing or wrong.
        MissingExtra: pyarrow is not installed.
    """
    if path is not None and path.is_dir() and (found := _class_folders(path)):
        if groups is not None:
            raise DataError(f"{name}: a folder for each class has no column of groups; leave groups out.")
        return _of_folders(found)
    splits = located(name, path)
    tables = {split: [opened(file, header) for file in files] for split, files in splits.items()}
    first = tables["train"][0]
    label = first.column(label, _LABEL, "label")
    named = [text] if isinstance(text, str) or text is None else list(text)
    columns = [first.column(column, _TEXT, "text") for column in named]
    for split in [s for s in tables if s != "train" and all(_withheld(rows, label) for rows in tables[s])]:
        del tables[split]
    every = [rows for parts in tables.values() for rows in parts]
    if not sum(rows.rows for rows in tables.get("train", ())):
        raise DataError(f"{first.path} has no rows to train on, or all of their labels are -1.")
    y, classes, class_names = _labels(every, label)
    return Corpus(
        files=[rows.path for rows in every],
        marks=[columns, header],
        texts=lambda: [" ".join(cells) for rows in every for cells in _cells(rows, columns)],
        y=y,
        sizes={split: sum(rows.rows for rows in parts) for split, parts in tables.items()},
        classes=classes,
        class_names=class_names,
        groups=None if groups is None else parquet.numbered(_values(every, groups))[0],
    )


def located(name: str, path: Path | None) -> dict[str, list[Path]]:
    """Return the files of rows of each split, "train" first.

    Raises:
        DataError: There are none.
    """
    if path is None:
        return parquet.locate(name, None)
    if path.is_file():
        return {"train": [path]}
    for suffix in SUFFIXES[1:]:
        for place in (path, path / "data"):
            found = {split: [place / f"{alias}{suffix}" for alias in names if (place / f"{alias}{suffix}").is_file()]
                     for split, names in _ALIASES.items()}  # fmt: skip
            if found["train"]:
                return {split: files[:1] for split, files in found.items() if files}
    try:
        return parquet.locate(name, str(path))
    except DataError as error:
        raise DataError(
            f"{error} Nor is there a train file that ends in {', '.join(SUFFIXES[1:])}, nor a folder of .txt files for "
            "each class."
        ) from error


def _cells(rows: Rows, columns: Sequence[str]) -> list[tuple[str, ...]]:
    return list(zip(*(rows.texts(column) for column in columns), strict=True))


def _values(every: Sequence[Rows], column: str) -> NDArray[Any]:
    """Return a column over all files: integers if they all are some, else text."""
    found = [rows for rows in every if isinstance(rows, parquet.File)]
    if found:
        return parquet.values_of(found, column)
    cells = [text.strip() for rows in every for text in rows.texts(column)]
    for rows in every:
        for row, text in enumerate(rows.texts(column)):
            if not text.strip():
                raise DataError(f'row {row} of {rows.path} has no value in column "{column}".')
    if all(re.fullmatch(r"-?\d{1,18}", cell) for cell in cells):
        return np.array([int(cell) for cell in cells], dtype=np.int64)
    return np.array(cells, dtype=object)


def _labels(every: Sequence[Rows], column: str) -> tuple[NDArray[np.int64], int, tuple[str, ...]]:
    """Return labels, the number of classes and their names; in CSV and JSON, classes are the distinct values."""
    found = [rows for rows in every if isinstance(rows, parquet.File)]
    if found:
        return parquet.labels_of(found, column)
    values = _values(every, column)
    for rows, row in parquet.too_long(values, every):
        raise DataError(f"row {row} of {rows.path} has a text of more than {parquet.LONGEST} characters as its label.")
    y, names = parquet.numbered(values)
    return y, len(names), names


def _withheld(rows: Rows, label: str) -> bool:
    """Return whether a file's labels are all -1, as in the test sets of competitions."""
    values = _values([rows], label)
    return values.dtype.kind == "i" and bool((values == _WITHHELD).all())


# ---- a folder for each class -------------------------------------------------------------------------------------


def _class_folders(path: Path) -> dict[str, dict[str, list[Path]]]:
    """Return split -> class -> files, or {} if there are none."""
    found = {split: classes for split, names in _ALIASES.items() for alias in names
             if (classes := _text_files(path / alias))}  # fmt: skip
    if "train" in found:
        return {split: found[split] for split in _ALIASES if split in found}
    whole = {} if found else _text_files(path)
    return {"train": whole} if whole else {}


def _text_files(path: Path) -> dict[str, list[Path]]:
    if not path.is_dir():
        return {}
    folders = sorted(place for place in path.iterdir() if place.is_dir() and place.name != _UNLABELLED)
    found = {place.name: sorted(place.glob("*.txt")) for place in folders}
    return {name: files for name, files in found.items() if files}


def _of_folders(found: dict[str, dict[str, list[Path]]]) -> Corpus:
    names = tuple(found["train"])
    for split, classes in found.items():
        for name, files in classes.items():
            if name not in names:
                raise DataError(f"{files[0].parent} is a class of the {split} split that the train split lacks.")
    pairs = [(file, names.index(name)) for classes in found.values() for name in classes for file in classes[name]]

    def texts() -> list[str]:
        return [_content(file) for file, _ in pairs]

    return Corpus(
        files=[file for file, _ in pairs],
        marks=[],
        texts=texts,
        y=np.array([label for _, label in pairs], dtype=np.int64),
        sizes={split: sum(map(len, classes.values())) for split, classes in found.items()},
        classes=len(names),
        class_names=names,
        groups=None,
    )


def _content(file: Path) -> str:
    return text_of(file, DataError)
