"""Labeled files: a folder for each class, or for each device and class, or a table of file, label and device.

Folders are `train/CLASS/*`, `validation/CLASS/*` (or `valid`, `val`, `dev`) and `test/CLASS/*`, or just `CLASS/*`.
Files may be one folder deeper, in `CLASS/images`, as in Tiny ImageNet. A `test` folder without class folders has
unlabeled files and is left out. The images, sounds or texts of a device are a natural group: `DEVICE/CLASS/*` differs
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
from fleetfit.data.files import folders as listings, parquet, table
from fleetfit.data.files.folders import (
    ListFolder,
    find_new_tables,
    find_tables,
    is_saved_dataset,
    list_sample_files,
)
from fleetfit.data.rows import Rows
from fleetfit.data.splits import find_splits
from fleetfit.errors import DataError, quote_some, truncate

GROUPS = ("device", "device_id", "client", "client_id", "user", "user_id", "camera", "sensor", "phone")
"""Usual names of the column of the devices."""
IMAGES = (".jpeg", ".jpg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
_UNLABELED = "unsup"  # the folder of unlabeled texts in IMDB
_SUFFIXES = (".csv", ".tsv")
_SAMPLE = 200  # rows from which the column of files is found
_START = 1 << 14  # bytes of a table in which a name of a file is looked for
_MOST = 0.9  # share of values that must be files, and different ones


def find_labeled_files(
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
    folders = find_class_folders(path, suffixes)
    if in_table and path.exists() and (folders is None or (label, groups) != (None, None)):
        file_table = find_file_table(path, suffixes, label, groups)
        if file_table is not None:
            return _read_file_table(file_table)
    if folders is not None and (label, groups) != (None, None):
        raise DataError(
            f"{name}: {path} has a folder for each class and no columns. Leave label and groups out.",
            path=path,
            key="groups" if label is None else "label",
        )
    return None if folders is None else folders.read(name)


# ---- a folder for each class, or each device and class ---------------------------------------------------------------


def find_class_folders(
    path: Path, suffixes: tuple[str, ...], list_folder: ListFolder | None = None
) -> "ClassFolders | None":
    """Return the class folders of files, of a folder's splits and perhaps within folders of devices; None without any.

    Args:
        path: The folder.
        suffixes: Suffixes of the files, in lower case.
        list_folder: Lists a folder, such as `folders.list_folder` with a cache.

    Raises:
        DataError: Folders within folders have no class in common.
    """
    if not path.is_dir():
        return None
    folders = ClassFolders(path.resolve(), suffixes, list_folder or functools.cache(listings.list_folder))
    return folders if any(map(folders.list_files, folders.list_classes("train"))) else None


class ClassFolders:
    """The class folders of a set. A folder is listed once, when it is needed.

    Attributes:
        folder: The set's folder.
        splits: The folder of each split, "train" first; without them the folder itself.
        by_device: Whether there is a folder for each device and class.
    """

    def __init__(self, folder: Path, suffixes: tuple[str, ...], list_folder: ListFolder) -> None:
        self.folder, self._suffixes, self._list = folder, suffixes, list_folder
        inner = {path.name: path for path in list_folder(folder)[0]}
        splits = find_splits(inner.get)
        self.splits = {split: path for split, path in splits.items() if split != "test" or list_folder(path)[0]} or {
            "train": folder
        }
        self.by_device = self._has_devices(self.splits["train"])

    def _has_devices(self, folder: Path) -> bool:
        outer = self._list(folder)[0]
        if any(map(self.list_files, outer)):
            return False
        inner = {path: [one for one in self._list(path)[0] if self.list_files(one)] for path in outer}
        devices = [path for path in outer if inner[path]]
        if len(devices) > 1 and max(Counter(one.name for some in inner.values() for one in some).values()) < 2:
            raise DataError(
                f"{folder} has folders within folders, none of whose names occurs twice: "
                f"{quote_some(f'{path.name}/{inner[path][0].name}' for path in devices)}. Expected DEVICE/CLASS, with "
                "the same classes in several devices, or CLASS alone. Move the files of each class into one folder.",
                path=folder,
            )
        return len(devices) > 1

    def list_files(self, class_folder: Path) -> list[str]:
        """Return the sorted names of the files of a class, relative to its folder."""
        folders, names = self._list(class_folder)
        names = list(names)
        if class_folder / "images" in folders:
            names += [f"images/{name}" for name in self._list(class_folder / "images")[1]]
        return sorted(name for name in names if name.lower().endswith(self._suffixes))

    def list_classes(self, split: str) -> list[Path]:
        """Return the class folders of a split, also those within folders of devices: of images in the devices' order.

        A folder without files is a class of images.
        """
        outer = self._list(self.splits[split])[0]
        classes = [path for device in outer for path in self._list(device)[0]] if self.by_device else outer
        if self._suffixes == IMAGES:
            return list(classes)
        classes = [path for path in classes if path.name != _UNLABELED and self.list_files(path)]
        return sorted(classes, key=lambda path: (path.name, path))

    def sample(self, count: int = 64) -> list[Path]:
        """Return some evenly spaced training files, about as many as `count`."""
        folders = self.list_classes("train")
        per_class = max(1, count // max(1, len(folders)))
        paths = []
        for folder in folders[:: max(1, len(folders) // count)]:
            names = self.list_files(folder)
            paths += [folder / name for name in names[:: max(1, len(names) // per_class)][:per_class]]
        return paths

    def read(self, name: str) -> Rows:
        """Return the files. The folders' names in the training split are the classes in ascending order.

        Args:
            name: The set's name, for messages and the cache.

        Raises:
            DataError: A split has no class folders, or a class that the training split lacks.
        """
        classes = {split: self.list_classes(split) for split in self.splits}
        class_names = tuple(sorted({path.name for path in classes["train"]}))
        stamped = [
            path
            for split, split_folder in self.splits.items()
            for path in (
                split_folder,
                *(self._list(split_folder)[0] if self.by_device else ()),
                *(path for top in classes[split] for path in (top, top / "images") if path.is_dir()),
            )
        ]
        key = cache.make_key(name, stamped, ["class folders", self._suffixes[0], *self.splits, *class_names])
        write = functools.partial(self._write_index, classes=classes, class_names=class_names)
        names, y, sizes = cache.load_folder(key, write, _read_index)
        for split, size in sizes.items():
            if not size:
                raise DataError(
                    f"{name}: {self.splits[split]} has no class folders with files. Put the files of each class into a "
                    "folder with the name of the training class.",
                    path=self.splits[split],
                )
        counts = np.bincount(y[: sizes["train"]], minlength=len(class_names))
        empty = [class_names[i] for i in np.flatnonzero(counts == 0)]
        notes, groups = [], None
        if self.by_device:
            depth = len(self.splits["train"].relative_to(self.folder).parts)
            devices, groups = np.unique([Path(os.fsdecode(one)).parts[depth] for one in names], return_inverse=True)
            notes.append(
                f"{name}: DEVICE/CLASS folders, {len(devices)} devices ({quote_some(devices.tolist())}) with "
                f"{len(class_names)} classes ({quote_some(class_names)}). If the outer folders are the classes, put "
                "their files directly into them."
            )
        if empty:
            notes.append(
                f"{name}: class folders without files in {self.splits['train']}: {quote_some(empty)} ({len(empty)} of "
                f"{len(class_names)}). They count as classes. Remove the folders to exclude them."
            )
        return Rows(None, y, sizes, len(class_names), class_names, groups, tuple(notes), self.folder, names)

    def _write_index(self, target: Path, classes: dict[str, list[Path]], class_names: Sequence[str]) -> None:
        """Write the relative path of each file, its label, and the sizes of the splits."""
        names: list[bytes] = []
        y: list[int] = []
        sizes = {}
        for split, class_folders in classes.items():
            start = len(names)
            for class_folder in class_folders:
                if class_folder.name not in class_names:
                    raise DataError(
                        f"{class_folder} is a class of the {split} split, but not of the train split.",
                        path=class_folder,
                    )
                paths = [class_folder / name for name in self.list_files(class_folder)]
                names += [os.fsencode(path.relative_to(self.folder)) for path in paths]
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

    Values are paths relative to the table, or names that one file below has, with or without suffix. Folders before a
    name must not contradict those of its file.

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
    root = path if path.is_dir() else path.parent
    every = _index_files(root, suffixes)
    sheet = table.read_sheet(path) if every else None
    if sheet is None:
        return None
    columns: dict[str, list[Path | None]] = {}
    for name in sheet.table.column_names:
        values = [None if value is None else str(value) for value in sheet.table.column(name).to_pylist()]
        paths = [None if value is None else _locate(value, every, root) for value in values[:_SAMPLE]]
        if len(set(paths) - {None}) >= _MOST * len(paths):
            columns[name] = [None if value is None else _locate(value, every, root) for value in values]
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


def _locate(value: str, every: dict[str, Path | None], root: Path) -> Path | None:
    """Return the file of a value by its path, or by its name where the inner folders of both, if any, are the same."""
    name = os.path.normpath(value.strip().replace("\\", "/"))
    path = every.get(name) or every.get(name.rpartition("/")[2])
    if path is None:
        return None
    folders = [part for part in name.split("/")[:-1] if part not in ("", "..")]
    pairs = zip(reversed(folders), reversed(path.relative_to(root).parts[:-1]), strict=False)
    return path if all(ours == theirs for ours, theirs in pairs) else None


def _read_file_table(files: FileTable) -> Rows:
    """Return the files, labels and devices of a table. Rows without a label are left out."""
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
        if len(sheet.sizes) > 1:
            return None
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
    folders = [name.parts[:-1] for name in names] if labels is None else [(one,) if one else () for one in labels]
    y, notes = _label_by_folders(folders, classes)
    encoded = np.array([os.fsencode(name) for name in names], dtype=np.bytes_)
    return Rows(None, y, {"test": len(names)}, facts.classes, classes, None, tuple(notes), folder, encoded)


def read_new_parquet(
    path: Path, facts: Data, labels: Sequence[str]
) -> tuple[list[parquet.File], NDArray[np.int64] | None] | None:
    """Return the Parquet files of new samples, and the labels if all files have them; None if there are no files.

    Args:
        path: A file, a folder, or a saved data set.
        facts: The training data, or their facts.
        labels: Names of the column of the labels.

    Raises:
        DataError: A file is damaged, or a label is not a class of the run.
    """
    paths = find_new_tables(path, (".parquet",), lambda file: not {*labels}.isdisjoint(parquet.File(file).columns))
    if not paths:
        return None
    files = [*map(parquet.File, paths)]
    label = next((name for name in labels if name in files[0].columns), None)
    encoded = [] if label is None else [parquet.encode_labels(facts, file, label) for file in files]
    classes = [some for some in encoded if some is not None]
    return files, np.concatenate(classes) if classes and len(classes) == len(files) else None


def _label_by_folders(
    folders: Sequence[Sequence[str]], class_names: Sequence[str]
) -> tuple[NDArray[np.int64] | None, list[str]]:
    """Return the label of each file by the nearest folder that is named after a class, int64 [N], and notes.

    It is None in place of labels if a file has none; a note says why, if that is in a folder.

    Args:
        folders: The folders of each file, outermost first.
        class_names: The classes.
    """
    codes = {name: label for label, name in enumerate(class_names)}
    labels = [next((codes[folder] for folder in reversed(some) if folder in codes), None) for some in folders]
    if None not in labels:
        return np.array(labels, dtype=np.int64), []
    others = {some[0] for some, label in zip(folders, labels, strict=True) if label is None and some}
    note = (
        f"No accuracy, because not every folder is a class of the run: {quote_some(sorted(others))}. The classes are "
        f"{quote_some(class_names)}."
    )
    return None, [note] if others else []
