"""Labelled files: a folder for each class, or for each device and class, or a table of file, label and device.

Folders are `train/CLASS/*`, `validation/CLASS/*` (or `valid`, `val`, `dev`) and `test/CLASS/*`, or just `CLASS/*`.
Files may be one folder deeper, in `CLASS/images`, as in Tiny ImageNet. A `test` folder without class folders has
unlabelled files and is left out. The images, sounds or texts of a device are a natural group: `DEVICE/CLASS/*` differs
from `CLASS/*` in that the outer folders have no files of their own, and at least two of them share an inner folder's
name.
"""

import functools
import json
import os
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fleetfit.data import cache
from fleetfit.data.dataset import Data
from fleetfit.data.files import table
from fleetfit.data.files.folders import (
    find_tables,
    is_saved_dataset,
    is_system_name,
    list_class_folders,
    list_sample_files,
)
from fleetfit.data.rows import Rows
from fleetfit.data.splits import find_splits
from fleetfit.errors import DataError, quote_some, truncate

GROUPS = ("device", "device_id", "client", "client_id", "user", "user_id", "camera", "sensor", "phone")
"""Usual names of the column of the devices."""
IMAGES = (".jpeg", ".jpg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
_UNLABELLED = "unsup"  # the folder of unlabelled texts in IMDB
_SUFFIXES = (".csv", ".tsv")
_SAMPLE = 200  # rows from which the column of files is found
_START = 1 << 14  # bytes of a table in which a name of a file is looked for
_MOST = 0.9  # share of values that must be files, and different ones


def find_labelled_files(
    name: str, path: Path, suffixes: tuple[str, ...], label: str | None, groups: str | None, in_table: bool = True
) -> Rows | None:
    """Return the files of a set with their labels: of class folders, or of a table of files; None if there are none.

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
    has_folders = has_class_folders(path, suffixes)
    if in_table and path.exists() and (not has_folders or (label, groups) != (None, None)):
        file_table = find_file_table(path, suffixes, label, groups)
        if file_table is not None:
            return read_file_table(file_table)
    if has_folders and (label, groups) != (None, None):
        raise DataError(
            f"{name}: {path} has a folder for each class and no columns. Leave label and groups out.",
            path=path,
            key="groups" if label is None else "label",
        )
    return read_class_folders(name, path, suffixes) if has_folders else None


# ---- a folder for each class, or each device and class ---------------------------------------------------------------


def has_class_folders(path: Path, suffixes: tuple[str, ...]) -> bool:
    """Return whether a folder has class folders of files, of its training split and perhaps within folders of devices.

    Raises:
        DataError: Folders within folders have no class in common.
    """
    if not path.is_dir():
        return False
    folder = _find_split_folders(path)["train"]
    by_device = has_devices(path, suffixes)
    return any(_list_files(class_folder, suffixes) for class_folder in _list_classes(folder, by_device, suffixes))


def has_devices(path: Path, suffixes: tuple[str, ...]) -> bool:
    """Return whether a folder has a folder of files for each device and class.

    Raises:
        DataError: It has folders within folders, and no class is in two of them.
    """
    folder = _find_split_folders(path)["train"]
    outer = list_class_folders(folder)
    if any(_list_files(path, suffixes) for path in outer):
        return False
    inner = {path: [one for one in list_class_folders(path) if _list_files(one, suffixes)] for path in outer}
    devices = [path for path in outer if inner[path]]
    if len(devices) > 1 and max(Counter(one.name for some in inner.values() for one in some).values()) < 2:
        raise DataError(
            f"{folder} has folders within folders, none of whose names occurs twice: "
            f"{quote_some(f'{path.name}/{inner[path][0].name}' for path in devices)}. Expected DEVICE/CLASS, with the "
            "same classes in several devices, or CLASS alone. Move the files of each class into one folder.",
            path=folder,
        )
    return len(devices) > 1


def sample_class_files(path: Path, suffixes: tuple[str, ...], count: int = 64) -> list[Path]:
    """Return some evenly spaced training files of class folders, about as many as `count`."""
    folders = _list_classes(_find_split_folders(path)["train"], has_devices(path, suffixes), suffixes)
    per_class = max(1, count // max(1, len(folders)))
    paths = []
    for folder in folders[:: max(1, len(folders) // count)]:
        names = _list_files(folder, suffixes)
        paths += [folder / name for name in names[:: max(1, len(names) // per_class)][:per_class]]
    return paths


def read_class_folders(name: str, folder: Path, suffixes: tuple[str, ...]) -> Rows:
    """Return the files of class folders. The folders' names in the training split are the classes in ascending order.

    Args:
        name: The set's name, for messages and the cache.
        folder: Its folder.
        suffixes: Suffixes of the files, in lower case.

    Raises:
        DataError: A split has no class folders, or a class that the training split lacks.
    """
    folder = folder.resolve()
    splits, by_device = _find_split_folders(folder), has_devices(folder, suffixes)
    folders = {split: _list_classes(path, by_device, suffixes) for split, path in splits.items()}
    class_names = tuple(sorted({path.name for path in folders["train"]}))
    stamped = [
        path
        for split, split_folder in splits.items()
        for path in (
            split_folder,
            *(list_class_folders(split_folder) if by_device else ()),
            *(path for top in folders[split] for path in (top, top / "images") if path.is_dir()),
        )
    ]
    key = cache.make_key(name, stamped, ["class folders", suffixes[0], *splits, *class_names], suffix="")
    write = functools.partial(_write_index, folder=folder, folders=folders, class_names=class_names, suffixes=suffixes)
    names, y, sizes = cache.load_folder(key, write, _read_index)
    for split, size in sizes.items():
        if not size:
            raise DataError(
                f"{name}: {splits[split]} has no class folders with files. Put the files of each class into a folder "
                "with the name of the training class.",
                path=splits[split],
            )
    counts = np.bincount(y[: sizes["train"]], minlength=len(class_names))
    empty = [class_names[i] for i in np.flatnonzero(counts == 0)]
    notes, groups = [], None
    if by_device:
        depth = len(splits["train"].relative_to(folder).parts)
        devices, groups = np.unique([Path(os.fsdecode(one)).parts[depth] for one in names], return_inverse=True)
        notes.append(
            f"{name}: DEVICE/CLASS folders, {len(devices)} devices ({quote_some(devices.tolist())}) with "
            f"{len(class_names)} classes ({quote_some(class_names)}). If the outer folders are the classes, put their "
            "files directly into them."
        )
    if empty:
        notes.append(
            f"{name}: class folders without files in {splits['train']}: {quote_some(empty)} ({len(empty)} of "
            f"{len(class_names)}). They count as classes. Remove the folders to exclude them."
        )
    return Rows(None, y, sizes, len(class_names), class_names, groups, tuple(notes), folder, names)


def _find_split_folders(folder: Path) -> dict[str, Path]:
    """Return the folder of each split that exists, "train" first; without them the folder itself."""
    splits = find_splits(lambda name: path if (path := folder / name).is_dir() else None)
    return {split: path for split, path in splits.items() if split != "test" or list_class_folders(path)} or {
        "train": folder
    }


def _list_classes(folder: Path, by_device: bool, suffixes: tuple[str, ...]) -> list[Path]:
    """Return the class folders of a split, also those within folders of devices: of images in the devices' order.

    A folder without files is a class of images.
    """
    outer = list_class_folders(folder)
    classes = [path for device in outer for path in list_class_folders(device)] if by_device else outer
    if suffixes == IMAGES:
        return classes
    classes = [path for path in classes if path.name != _UNLABELLED and _list_files(path, suffixes)]
    return sorted(classes, key=lambda path: (path.name, path))


def _list_files(class_folder: Path, suffixes: tuple[str, ...]) -> list[str]:
    """Return the sorted names of the files of a class, relative to its folder."""
    names = []
    for folder, prefix in ((class_folder, ""), (class_folder / "images", "images/")):
        if folder.is_dir():
            entries = (e for e in os.scandir(folder) if e.name.lower().endswith(suffixes) and e.is_file())
            names += [prefix + entry.name for entry in entries if not is_system_name(entry.name)]
    return sorted(names)


def _write_index(
    target: Path, folder: Path, folders: dict[str, list[Path]], class_names: Sequence[str],
    suffixes: tuple[str, ...],
) -> None:  # fmt: skip
    """Write the relative path of each file, its label, and the sizes of the splits."""
    names: list[bytes] = []
    y: list[int] = []
    sizes = {}
    for split, class_folders in folders.items():
        start = len(names)
        for class_folder in class_folders:
            if class_folder.name not in class_names:
                raise DataError(
                    f"{class_folder} is a class of the {split} split, but not of the train split.", path=class_folder
                )
            paths = [class_folder / name for name in _list_files(class_folder, suffixes)]
            names += [os.fsencode(path.relative_to(folder)) for path in paths]
            y += [class_names.index(class_folder.name)] * len(paths)
        sizes[split] = len(names) - start
    np.save(target / "names.npy", np.array(names, dtype=np.bytes_))
    np.save(target / "y.npy", np.array(y, dtype=np.int64))
    (target / "sizes.json").write_text(json.dumps(sizes))


def _read_index(folder: Path) -> tuple[NDArray[np.bytes_], NDArray[np.int64], dict[str, int]]:
    """Return the names of the files, their labels, and the sizes of the splits."""
    names = np.load(folder / "names.npy", mmap_mode="r")
    y = np.load(folder / "y.npy")
    sizes = json.loads((folder / "sizes.json").read_text())
    if not len(names) == len(y) == sum(sizes.values()):
        raise ValueError("the parts of the index have different lengths")
    return names, y, sizes


# ---- a table of files ------------------------------------------------------------------------------------------------


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


def _find_files(path: Path, suffixes: tuple[str, ...]) -> tuple[table.TableSheet, str, list[Path | None]] | None:
    """Return a table that names files, the column of the files, and the file of each row."""
    try:
        tables = [file for files in find_tables(path, _SUFFIXES).values() for file in files]
    except DataError:
        return None
    is_csv = tables[0].suffix.lower() in _SUFFIXES
    if not is_csv or (path.is_file() and not _has_names(path, suffixes)):
        return None
    every = _index_files(path if path.is_dir() else path.parent, suffixes)
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


def _index_files(root: Path, suffixes: tuple[str, ...]) -> dict[str, Path | None]:
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


def read_file_table(files: FileTable) -> Rows:
    """Return the files, labels and devices of a table. Rows without a label are left out.

    Raises:
        DataError: A file is missing, a device is missing, or the label is wrong.
    """
    sheet = files.sheet
    labels = table.read_classes(sheet, files.label, files.groups)
    rows = labels.x.tolist()
    root = sheet.path.parent.resolve()
    paths = [_check_file(sheet, files.files, row, files.paths[row]) for row in rows]
    used = [files.files, files.label, *([] if files.groups is None else [files.groups])]
    others = [name for name in sheet.table.column_names if name not in used]
    devices = "" if labels.groups is None else f', devices "{files.groups}" ({int(labels.groups.max()) + 1})'
    left_out = f"; left out: {quote_some(others, len(others))}" if others else ""
    more = " Set data.groups to the column of the devices for a client of each." if others and not devices else ""
    note = f'{sheet.path.name}: columns used: files "{files.files}", label "{files.label}"{devices}{left_out}.{more}'
    empty = sheet.table.num_rows - len(rows)
    return replace(
        labels,
        x=None,
        folder=root,
        file_names=np.array([os.fsencode(path.resolve().relative_to(root)) for path in paths], dtype=np.bytes_),
        notes=(note, *([f"{empty} rows without a label are left out."] if empty else [])),
    )


# ---- new files for a trained model -----------------------------------------------------------------------------------


def find_new_files(
    path: Path, suffixes: tuple[str, ...], facts: Data, label: str | None, tables: Collection[str] = (".parquet",)
) -> Rows | None:
    """Return the files of new samples for a trained model; None if there are none.

    A file has the label of its row in a table of files, or of the nearest folder that is named after a class. A folder
    with splits or with tables of samples has none: it is a data set.

    Args:
        path: A file, a folder, or a table of files.
        suffixes: Suffixes of the files, in lower case.
        facts: The training data, or their facts.
        label: The training data's column of labels in a table of files, or None.
        tables: Suffixes of tables of samples.

    Raises:
        DataError: A file of the table is missing.
    """
    listing = _find_files(path, suffixes) if path.exists() and (path.is_file() or label is not None) else None
    labels: list[str | None] | None = None
    if listing is not None:
        sheet, column, rows = listing
        paths = [_check_file(sheet, column, row, file) for row, file in enumerate(rows)]
        usual = table.LABELS if label is None else (label,)
        name = next((name for name in sheet.table.column_names if name in usual), None)
        if name is not None:
            codes, texts = table.detect_columns(sheet)[name].encode_values()
            labels = [texts[code] if code >= 0 else None for code in codes.tolist()]
    elif path.is_file():
        paths = [path]
    elif not path.is_dir() or (path / "train").is_dir() or is_saved_dataset(path):
        return None
    else:
        paths = list_sample_files(path, "**/*")
        if any(file.suffix.lower() in tables for file in paths):
            return None
    paths = [file for file in paths if file.suffix.lower() in suffixes]
    if not paths:
        return None
    folder = path if path.is_dir() else path.parent
    names = [file.relative_to(folder) for file in paths]
    classes = facts.class_names or tuple(map(str, range(facts.classes)))
    places = names if labels is None else [Path(one or "", name.name) for one, name in zip(labels, names, strict=True)]
    y, notes = _label_by_folders(places, classes)
    encoded = np.array([os.fsencode(name) for name in names], dtype=np.bytes_)
    return Rows(None, y, {"test": len(names)}, facts.classes, classes, None, tuple(notes), folder, encoded)


def _label_by_folders(names: Sequence[Path], class_names: Sequence[str]) -> tuple[NDArray[np.int64] | None, list[str]]:
    """Return the label of each file by the nearest folder that is named after a class, int64 [N], and notes.

    Args:
        names: The files, relative to the folder that the user named.
        class_names: One per class.

    Returns:
        None in place of labels if a file has none; a note says why, if it is in a folder.
    """
    codes = {name: label for label, name in enumerate(class_names)}
    folders = [next((part for part in reversed(name.parts[:-1]) if part in codes), None) for name in names]
    if None not in folders:
        return np.array([codes[folder] for folder in folders if folder is not None], dtype=np.int64), []
    others = {name.parts[0] for name, folder in zip(names, folders, strict=True) if folder is None and name.parts[1:]}
    note = (
        f"No accuracy, because not every folder is a class of the run: {quote_some(sorted(others))}. The classes are "
        f"{quote_some(class_names)}."
    )
    return None, [note] if others else []
