"""Files of devices: a folder for each device and class, or a table of file, label and device beside the files.

`DEVICE/CLASS/*` differs from `CLASS/*` in that the outer folders have no files of their own, and at least two of them
share an inner folder's name. The images, sounds or texts of a device are a natural group.
"""

import os
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fleetfit.data.dataset import Data
from fleetfit.data.files import table
from fleetfit.data.files.folders import is_saved_dataset, label_by_folders, list_class_folders, list_sample_files
from fleetfit.data.splits import ALIASES
from fleetfit.errors import DataError, quote_some, truncate

GROUPS = ("device", "device_id", "client", "client_id", "user", "user_id", "camera", "sensor", "phone")
"""Usual names of the column of the devices."""
SPLIT_FOLDERS = {**ALIASES, "validation": (*ALIASES["validation"], "dev")}
_UNLABELLED = "unsup"  # the folder of unlabelled texts in IMDB
_SUFFIXES = (".csv", ".tsv")
_SAMPLE = 200  # rows from which the column of files is found
_START = 1 << 14  # bytes of a table in which a name of a file is looked for
_MOST = 0.9  # share of values that must be files, and different ones


def list_devices(folder: Path, has_files: Callable[[Path], object]) -> list[Path]:
    """Return the folders of devices in a folder, sorted; empty if it has no DEVICE/CLASS folders.

    Args:
        folder: The folder of a set, or of one of its splits.
        has_files: Whether a folder has samples directly in it.
    """
    outer = list_class_folders(folder)
    if any(map(has_files, outer)):
        return []
    inner = {path: [one for one in list_class_folders(path) if has_files(one)] for path in outer}
    devices = [path for path in outer if inner[path]]
    if len(devices) < 2:
        return []
    if max(Counter(one.name for some in inner.values() for one in some).values()) < 2:
        raise DataError(
            f"{folder} has folders within folders, none of whose names occurs twice: "
            f"{quote_some(f'{path.name}/{inner[path][0].name}' for path in devices)}. Expected DEVICE/CLASS, with the "
            "same classes in several devices, or CLASS alone. Move the files of each class into one folder.",
            path=folder,
        )
    return devices


def describe_devices(name: str, devices: Collection[str], classes: Collection[str]) -> str:
    """Describe the devices and classes that the folders were read as."""
    return (
        f"{name}: DEVICE/CLASS folders, {len(devices)} devices ({quote_some(devices)}) with {len(classes)} classes "
        f"({quote_some(classes)}). If the outer folders are the classes, put their files directly into them."
    )


@dataclass(frozen=True)
class FileTable:
    """A table of files with labels.

    Attributes:
        sheet: Its rows.
        files: The column of the files.
        label: The column of the labels.
        groups: The column of the devices, or None.
        paths: The file of each row; None if it does not exist.
    """

    sheet: table.TableSheet
    files: str
    label: str
    groups: str | None
    paths: list[Path | None]


def find_file_table(
    path: Path, suffixes: tuple[str, ...], label: str | None = None, groups: str | None = None
) -> FileTable | None:
    """Return the table at a path or in a folder that names files below its folder; None if there is none.

    Values are paths relative to the table, or names that one file below has, with or without suffix.

    Args:
        path: A CSV or TSV file, or the folder of one (or of `train.csv` and `test.csv`).
        suffixes: Suffixes of the files, in lower case.
        label: Column of the labels; None: `label`, `labels`, `target`, `class` or `y`, else the last one.
        groups: Column of the devices; None: one of the usual names, if there is one.

    Raises:
        DataError: A named column does not exist.
    """
    listing = _find_files(path, suffixes)
    if listing is None:
        return None
    sheet, files, paths = listing
    for column in (label, groups):
        if column is not None:
            sheet.check_column(column)
    others = [name for name in sheet.table.column_names if name != files]
    groups = groups or next((name for name in others if name.lower() in GROUPS and name != label), None)
    others = [name for name in others if name != groups]
    label = label or next((name for name in others if name.lower() in table.LABELS), others[-1] if others else None)
    return None if label is None else FileTable(sheet, files, label, groups, paths)


def find_listed_files(
    path: Path, suffixes: tuple[str, ...], label: str | None
) -> tuple[list[Path], list[str | None] | None] | None:
    """Return the files that a table names, and their labels if it has the column; None if it is no such table.

    Args:
        path: As of `find_file_table`.
        suffixes: As of `find_file_table`.
        label: Column of the labels; None: `label`, `labels`, `target`, `class` or `y`.

    Raises:
        DataError: A file is missing.
    """
    listing = _find_files(path, suffixes)
    if listing is None:
        return None
    sheet, files, paths = listing
    every = [_check_file(sheet, files, row, path) for row, path in enumerate(paths)]
    names = table.LABELS if label is None else (label,)
    column = next((name for name in sheet.table.column_names if name in names), None)
    if column is None:
        return every, None
    codes, texts = table.detect_columns(sheet)[column].encode_values()
    return every, [texts[code] if code >= 0 else None for code in codes.tolist()]


def _find_files(path: Path, suffixes: tuple[str, ...]) -> tuple[table.TableSheet, str, list[Path | None]] | None:
    """Return a table that names files, the column of the files, and the file of each row."""
    try:
        tables = [file for files in table.find_files(path).values() for file in files]
    except DataError:
        return None
    is_csv = tables[0].suffix.lower() in _SUFFIXES
    if not is_csv or (path.is_file() and not _has_names(path, suffixes)):
        return None
    every = _list_files(path if path.is_dir() else path.parent, suffixes)
    sheet = table.read_sheet(path) if every else None
    if sheet is None:
        return None
    columns: dict[str, list[Path | None]] = {}
    for name in sheet.table.column_names:
        values = [None if value is None else str(value) for value in sheet.table.column(name).to_pylist()]
        paths = [None if value is None else _locate(value, every) for value in values[:_SAMPLE]]
        if len(set(paths) - {None}) >= _MOST * len(paths):
            columns[name] = [None if value is None else _locate(value, every) for value in values]
    if not columns:
        return None
    files = max(columns, key=lambda name: sum(path is not None for path in columns[name]))
    return sheet, files, columns[files]


def _has_names(path: Path, suffixes: tuple[str, ...]) -> bool:
    """Return whether the beginning of a table has names with a suffix: others are not worth a look at its folder."""
    with path.open("rb") as file:
        start = file.read(_START).lower()
    return any(suffix.encode() in start for suffix in suffixes)


def _check_file(sheet: table.TableSheet, files: str, row: int, path: Path | None) -> Path:
    if path is None:
        value = truncate(str(sheet.table.column(files)[row].as_py()))
        raise sheet.error(files, f'has "{value}", which is no file below {sheet.path.parent}.', row)
    return path


def _list_files(root: Path, suffixes: tuple[str, ...]) -> dict[str, Path | None]:
    """Return files by their relative path, by name and by stem; None if several have the name."""
    every: dict[str, Path | None] = {}
    paths = [path for path in list_sample_files(root, "**/*") if path.suffix.lower() in suffixes]
    for names in ([path.stem for path in paths], [path.name for path in paths]):
        counts = Counter(names)
        every |= {name: path if counts[name] == 1 else None for name, path in zip(names, paths, strict=True)}
    return every | {path.relative_to(root).as_posix(): path for path in paths}


def _locate(value: str, every: dict[str, Path | None]) -> Path | None:
    name = os.path.normpath(value.strip().replace("\\", "/"))
    return every.get(name) or every.get(name.rpartition("/")[2])


@dataclass(frozen=True)
class ListedFiles:
    """Files with labels, one split after the other.

    Attributes:
        paths: The files, [N].
        y: int64 [N].
        class_names: One per class.
        groups: int64 [N], or None.
        sizes: Split -> number of files, in their order.
        notes: Sentences on the table.
    """

    paths: list[Path]
    y: NDArray[np.int64]
    class_names: tuple[str, ...]
    groups: NDArray[np.int64] | None
    sizes: dict[str, int]
    notes: tuple[str, ...]


def read_file_table(files: FileTable) -> ListedFiles:
    """Return the files, labels and devices of a table. Rows without a label are left out.

    Raises:
        DataError: A file is missing, a device is missing, or the label is wrong.
    """
    sheet = files.sheet
    labels = table.read_classes(sheet, files.label, files.groups)
    rows = np.flatnonzero(labels.labelled).tolist()
    paths = [_check_file(sheet, files.files, row, files.paths[row]) for row in rows]
    used = [files.files, files.label, *([] if files.groups is None else [files.groups])]
    others = [name for name in sheet.table.column_names if name not in used]
    devices = "" if labels.groups is None else f', devices "{files.groups}" ({int(labels.groups.max()) + 1})'
    left_out = f"; left out: {quote_some(others, len(others))}" if others else ""
    more = " Set data.groups to the column of the devices for a client of each." if others and not devices else ""
    note = f'{sheet.path.name}: columns used: files "{files.files}", label "{files.label}"{devices}{left_out}.{more}'
    empty = len(labels.labelled) - len(rows)
    return ListedFiles(
        paths=paths,
        y=labels.y,
        class_names=labels.class_names,
        groups=labels.groups,
        sizes=labels.sizes,
        notes=(note, *([f"{empty} rows without a label are left out."] if empty else [])),
    )


# ---- a folder for each class, or each device and class ---------------------------------------------------------------

ClassFiles = dict[str, dict[str, list[Path]]]
"""Split -> class -> files, "train" first."""


def has_class_files(path: Path, suffixes: tuple[str, ...]) -> bool:
    """Return whether a folder has a subfolder of files per class, or per device and class."""
    return bool(_find_class_files(path, suffixes))


def has_device_files(path: Path, suffixes: tuple[str, ...]) -> bool:
    """Return whether a folder has a folder of files per device and class."""
    train = path / "train"
    return bool(list_devices(train if train.is_dir() else path, lambda folder: _list_direct_files(folder, suffixes)))


def find_labelled_files(
    name: str, path: Path, suffixes: tuple[str, ...], label: str | None, groups: str | None, in_table: bool = True
) -> ListedFiles | None:
    """Return the files of a set with their labels: of a table of files, or of class folders; None if there are none.

    Args:
        name: The set's name, for messages.
        path: The set's folder, or its table.
        suffixes: Suffixes of the files, in lower case.
        label: As of `find_file_table`. Beside class folders, a table is read if `label` or `groups` is set.
        groups: As of `find_file_table`.
        in_table: Whether to look for a table of files.

    Raises:
        DataError: A file, a column, a label or a device is missing or wrong.
    """
    splits = _find_class_files(path, suffixes)
    if in_table and path.exists() and (not splits or (label, groups) != (None, None)):
        file_table = find_file_table(path, suffixes, label, groups)
        if file_table is not None:
            return read_file_table(file_table)
    if splits and groups is not None:
        raise DataError(f"{name}: class folders have no column of groups. Leave groups out.", key="groups")
    return _read_class_files(name, splits, has_device_files(path, suffixes)) if splits else None


def _find_class_files(path: Path, suffixes: tuple[str, ...]) -> ClassFiles:
    """Return the files of each class and split, or {} if there are none."""
    if not path.is_dir():
        return {}
    by_device = has_device_files(path, suffixes)
    splits = {split: classes for split, aliases in SPLIT_FOLDERS.items() for alias in aliases
              if (classes := _list_class_files(path / alias, suffixes, by_device))}  # fmt: skip
    if "train" in splits:
        return {split: splits[split] for split in SPLIT_FOLDERS if split in splits}
    classes = {} if splits else _list_class_files(path, suffixes, by_device)
    return {"train": classes} if classes else {}


def _list_class_files(path: Path, suffixes: tuple[str, ...], by_device: bool) -> dict[str, list[Path]]:
    if not path.is_dir():
        return {}
    folders = [one for device in list_class_folders(path) for one in list_class_folders(device)] if by_device else []
    classes: dict[str, list[Path]] = {}
    for folder in sorted(folders or list_class_folders(path), key=lambda folder: (folder.name, folder)):
        if folder.name != _UNLABELLED and (files := _list_direct_files(folder, suffixes)):
            classes.setdefault(folder.name, []).extend(files)
    return classes


def _list_direct_files(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    return [path for path in list_sample_files(folder, "*") if path.suffix.lower() in suffixes]


def _read_class_files(name: str, splits: ClassFiles, by_device: bool) -> ListedFiles:
    class_names = tuple(splits["train"])
    for split, classes in splits.items():
        for class_name, paths in classes.items():
            if class_name not in class_names:
                raise DataError(
                    f"{paths[0].parent} is a class of the {split} split, but not of the train split.",
                    path=paths[0].parent,
                )
    files = [file for classes in splits.values() for paths in classes.values() for file in paths]
    groups, notes = None, tuple[str, ...]()
    if by_device:
        devices, groups = np.unique([file.parent.parent.name for file in files], return_inverse=True)
        notes = (describe_devices(name, devices.tolist(), class_names),)
    return ListedFiles(
        paths=files,
        y=np.array(
            [class_names.index(one) for classes in splits.values() for one, paths in classes.items() for _ in paths],
            dtype=np.int64,
        ),
        class_names=class_names,
        groups=groups,
        sizes={split: sum(map(len, classes.values())) for split, classes in splits.items()},
        notes=notes,
    )


# ---- new files for a trained model -----------------------------------------------------------------------------------


def list_new_files(path: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """Return a file itself, or the files below a folder, sorted.

    A folder of splits or of Parquet files has none: it is a data set.
    """
    if path.is_file():
        return [path] if path.suffix.lower() in suffixes else []
    if not path.is_dir() or (path / "train").is_dir() or is_saved_dataset(path):
        return []
    paths = list_sample_files(path, "**/*")
    has_parquet = any(file.suffix.lower() == ".parquet" for file in paths)
    return [] if has_parquet else [file for file in paths if file.suffix.lower() in suffixes]


def label_new_files(
    trained: Data, path: Path, paths: Sequence[Path], listed: Sequence[str | None] | None
) -> tuple[NDArray[np.bytes_], NDArray[np.int64] | None, list[str]]:
    """Return the names and labels of new files, both [N], and notes. The labels are None if a file has none.

    Args:
        trained: The training set.
        path: The file or folder that the user named.
        paths: Its files, at least one.
        listed: The label of each in a table of files; None: the nearest folder that is named after a class.
    """
    names = [file.relative_to(path if path.is_dir() else path.parent) for file in paths]
    folders = (
        names if listed is None else [Path(label or "", name.name) for label, name in zip(listed, names, strict=True)]
    )
    labels, notes = label_by_folders(folders, trained.class_names or tuple(map(str, range(trained.classes))))
    return np.array([os.fsencode(name) for name in names], dtype=np.bytes_), labels, notes
