"""Any table on disk, numbers and categories: a CSV file, a Parquet file, or a folder with one of them for each split.

A folder has `train.csv` and perhaps `validation.csv` (or `valid`, `val`, `dev`) and `test.csv`, or the same in Parquet,
or a single such file. Of a CSV file (UTF-8; commas, semicolons, tabs or bars, found out) the first line names the
columns. What stands in a column is found by looking at it, and said: numbers are standardised, categories become one
column each, both from the training rows only (`fleetfit.data.files.columns`); dates, free text, and columns that number
the rows or are the same in all of them are left out.
"""

import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fleetfit.data.dataset import Data, Facts
from fleetfit.data.files import cells, columns, parquet
from fleetfit.data.files.cells import Column, TableRows
from fleetfit.data.files.columns import Asked, Category, Columns, Label, Number
from fleetfit.data.files.folders import convert_saved_dataset, find_parquet_files, list_sample_files, resolve_folder
from fleetfit.data.splits import ALIASES, fill_missing_splits, hold_out, subsample
from fleetfit.errors import DataError, import_optional, truncate

FACTS = Facts(train=None, test=None, classes=None, resolution="any", source="a table in CSV or Parquet")
SUFFIXES = (".csv", ".tsv", ".parquet")
LABELS = ("label", "labels", "target", "class", "y")
"""What the column that is learned is called, if it is not the last one."""
MOST_CATEGORIES = 64
"""Categories of a column that get a column of their own: the most frequent of the training rows."""
_MOST_CLASSES = 50  # whole numbers in the label's column are classes up to so many
_MOST_FEATURES = 20_000
_LOOK, _WORDS = 200, 4.0  # rows that are looked at, and words of a text on average
_FEW = 20  # rows, below which nothing can be told from all values being different
_MOST_SHOWN = 8  # columns in a sentence
_ALIASES = {**ALIASES, "validation": (*ALIASES["validation"], "dev")}
_ID = re.compile(
    r"(?i:(?:^|[_\s-])(?:id|ids|uuid|guid|index|idx|key|row)$|^unnamed: \d+$|^column 1$)|(?<=[a-z])(?:ID|Id)$"
)
_DATE = re.compile(r"(?:^|[_\s-])(?:date|datetime|timestamp)(?:$|[_\s-])", re.IGNORECASE)
_DATES = ("%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%Y/%m/%d", "%d-%m-%Y", "%d %b %Y", "%b %d, %Y", "%d.%m.%Y %H:%M",
          "%d.%m.%Y %H:%M:%S", "%m/%d/%Y %H:%M", "%m/%d/%Y %H:%M:%S", "%d/%m/%Y %H:%M")  # fmt: skip


def table(
    folder: str,
    label: str | None = None,
    task: Literal["classification", "regression"] | None = None,
    groups: str | None = None,
    categories: tuple[str, ...] = (),
    drop: tuple[str, ...] = (),
    missing: tuple[str, ...] = (),
    columns: str | None = None,
    separator: str | None = None,
    header: bool = True,
    samples: int | None = None,
    validation: float = 0.1,
    test: float = 0.2,
    seed: int = 0,
) -> Data:
    """Return a table as numbers [N, features], named after its file or folder.

    What has no file of its own is held out from the rows: in proportion for every class, or for every group where
    `groups` is given. Without a test file, a validation file is the test set. Rows without a label are left out.

    Args:
        folder: A file, or a folder with a train file; a relative path that does not exist is sought in FLEETFIT_DATA.
        label: Column that is learned; None: `label`, `labels`, `target`, `class` or `y`, else the last one.
        task: What is learned; None: classification, but regression where the label is a number with a fraction or
            one of more than 50 different ones.
        groups: Column of a natural group such as a hospital, which is not learned from; None: no groups.
        categories: Columns of numbers that are categories, such as a postcode.
        drop: Columns that are left out.
        missing: Further texts or numbers that mean that there is no value, such as "unknown" or "-999"; empty cells,
            NA, N/A, NaN, null, None, ? and - always do.
        columns: A `columns.json` of a run: the columns become numbers as they did there, whatever these rows are, and
            what the other keys say of them must be the same; None: as these training rows say.
        separator: Of the cells in a CSV file; None: found out.
        header: Whether the first line of a CSV file names the columns; if not, they are "1", "2" and so on.
        samples: So many training rows only, drawn in proportion for every class, those held out for validation
            included; None: all.
        validation: Share of the training rows that is held out, if there is no validation file.
        test: Share of the rows that is held out as the test set, if there is only a train file.
        seed: Of what is held out and drawn.

    Raises:
        DataError: A file, a column or a value is missing or wrong, or a share is out of range.
        MissingExtra: It is a Parquet file, and pyarrow is not installed.
    """
    path = resolve_folder(folder)
    name = path.resolve().stem if path.is_file() else path.resolve().name
    path = convert_saved_dataset(path)
    asked = Asked(label, task, groups, categories, drop, missing)
    known = None
    if columns is not None:
        known = columns_in(columns)
        asked.check(known, columns)
    sheets = sheets_of(path, separator, header, missing if known is None else (*known.missing, *missing))
    return from_sheets(name, sheets, asked, known, samples, validation, test, seed)


def columns_in(file: str) -> Columns:
    """Return what a `columns.json` says, whose relative path may be sought in FLEETFIT_DATA."""
    return columns.read(resolve_folder(file))


def of_frame(frame: Any, label: str | None = None, seed: int = 0) -> Data:
    """Return a table in memory as a data set; see `table`.

    Args:
        frame: A DataFrame of pandas, or whatever else has `columns` and gives each by its name.
        label: Column that is learned; None: as of `table`.
        seed: Of what is held out.

    Raises:
        DataError: As `table`.
    """
    return from_sheets("table", {"train": rows_of(frame)}, Asked(label=label), None, None, 0.1, 0.2, seed)


def rows_of(frame: Any) -> TableRows:
    """Return the rows of a table in memory.

    Raises:
        DataError: It has none, or two columns of one name.
    """
    names = cells.each_once("data=frame: the table", [str(name) for name in frame.columns])
    named = {name: cells.of_array(name, np.asarray(frame[key])) for name, key in zip(names, frame.columns, strict=True)}
    if not named or not len(frame):
        raise DataError("data=frame: the table has no rows or no columns.", key="data")
    return TableRows(Path("in memory"), named, len(frame))


def from_sheets(
    name: str,
    sheets: dict[str, TableRows],
    asked: Asked,
    known: Columns | None,
    samples: int | None,
    validation: float,
    test: float,
    seed: int,
) -> Data:
    """Return the rows of the files of each split as a data set; see `table`.

    Raises:
        DataError: As `table`.
    """
    whole = columns.joined(sheets)
    for wanted in (*asked.categories, *asked.drop, *([asked.groups] if asked.groups else [])):
        whole.column(wanted, "")
    label, notes = _label(whole, asked) if known is None else (known.label.name, [])
    column = whole.column(label, ", which is to be learned")
    there = _has_label(column, whole.path)
    if not there.any():
        raise DataError(
            f'{whole.path}: column "{truncate(label)}", which is to be learned, has no values.',
            path=whole.path,
            column=label,
            key="label",
        )
    if not there.all():
        notes.append(
            f'{int((~there).sum())} rows without "{truncate(label)}" are left out. NA, N/A, NaN, null, None, ? and - '
            "are not labels; rename a class that is called so."
        )
    sizes, start = {}, 0
    for split, sheet in sheets.items():
        sizes[split] = int(there[start : start + sheet.rows].sum())
        start += sheet.rows
    if not sizes["train"]:
        raise DataError(f"{whole.path} has no rows with a label to train on.", path=whole.path)
    whole = columns.without(whole, there)
    column = whole.columns[label]
    learned = Columns(task=_task(whole, column, asked), label=_classes(whole, column, asked), columns=(_ANY,),
                      missing=asked.missing) if known is None else known  # fmt: skip
    y = columns.labels_of(whole, learned)
    assert y is not None
    group = _groups(whole, asked.groups)
    strata = strata_of(learned, y, group, whole.rows)
    splits = fill_missing_splits(sizes, strata, validation if samples is None else 0.0, test, seed)
    if samples is not None:
        splits["train"] = subsample(name, splits["train"], strata[splits["train"]], samples, seed)
        if not len(splits["validation"]):
            rest = splits["train"]
            splits["train"], splits["validation"] = hold_out(rest, strata[rest], validation, seed)
    if known is None:
        found = _Found(whole, label, asked, splits["train"])
        learned = found.described(learned, y)
        notes = [found.counted, *notes, *found.notes]
    x, further = learned.encoded(whole)
    if known is not None:
        notes = [f"{len(learned.columns)} columns as {len(learned.features)} features", *notes, *further]
    what = _what(learned, _named(label, asked, known), whole.rows, splits)
    file = name if whole.path.stem in splits else whole.path.name  # train.csv and the like say nothing
    notes = [f"table {file}: {notes[0]}, {what}", *notes[1:]]
    held = {split: torch.from_numpy(np.sort(indices)) for split, indices in splits.items()}
    return data_of(name, x, y, held, learned, group, tuple(notes))


def data_of(
    name: str, x: NDArray[np.float32], y: NDArray[np.generic] | None, splits: dict[str, torch.Tensor], known: Columns,
    group: NDArray[np.int64] | None, notes: tuple[str, ...],
) -> Data:  # fmt: skip
    """Return encoded rows as a data set."""
    regression = known.task == "regression"
    labels = np.zeros((len(x), 1) if regression else len(x), np.float32 if regression else np.int64) if y is None else y
    return Data(
        name=name,
        x=torch.from_numpy(x),
        y=torch.from_numpy(labels),
        splits=splits,
        classes=1 if regression else len(known.label.classes),
        groups=None if group is None else torch.from_numpy(group),
        class_names=() if regression else known.label.classes,
        task=known.task,
        columns=known.text(),
        targets=((known.label.mean,), (known.label.std,)) if regression else (),
        labelled=y is not None,
        notes=notes,
    )


def _what(learned: Columns, label: str, rows: int, splits: dict[str, NDArray[np.int64]]) -> str:
    """Return the rest of the line that says what was taken."""
    of = "numbers (regression)" if learned.task == "regression" else f"{len(learned.label.classes)} classes"
    held = " and ".join(
        f"{len(splits[split])} for {what}"
        for split, what in (("test", "testing"), ("validation", "validation"))
        if len(splits[split])
    )
    return f"{label} of {of}, {rows:,} rows; {held or 'none'} held out."


def _named(label: str, asked: Asked, known: Columns | None) -> str:
    last = asked.label is None and known is None and label.lower() not in LABELS
    return f'{"the last column as label" if last else "label"} "{truncate(label)}"'


# ---- the files -------------------------------------------------------------------------------------------------------


def sheets_of(path: Path, separator: str | None, header: bool, missing: Sequence[str]) -> dict[str, TableRows]:
    """Return the rows of each split that has files."""
    found = {}
    for split, parts in files_of(path).items():
        read = {str(part): cells.read(part, separator, header, missing) for part in parts}
        found[split] = columns.joined(read)
    return found


def files_of(path: Path) -> dict[str, list[Path]]:
    """Return the files of each split, "train" first.

    Raises:
        DataError: There are none.
    """
    if not path.is_dir():
        return {"train": [path]}
    for suffix in SUFFIXES:
        found = {split: [place for alias in names if (place := path / f"{alias}{suffix}").is_file()][:1]
                 for split, names in _ALIASES.items()}  # fmt: skip
        if found["train"]:
            return {split: files for split, files in found.items() if files}
    try:
        return find_parquet_files(path.name, str(path))
    except DataError:
        alone = [file for file in list_sample_files(path, "*") if file.suffix.lower() in SUFFIXES]
        if len(alone) == 1:
            return {"train": alone}
        several = f" It has {len(alone)} tables; which one? Name the file." if alone else ""
        raise DataError(f"{path} has no train.csv, train.tsv or train.parquet.{several}", path=path) from None


def kinds_in_parquet(file: Path) -> Iterator[tuple[str, str]]:
    """Yield the columns of a Parquet file and what they look like: "image", "text" or "other"."""
    types = import_optional("pyarrow.types", "tables", "Reading tables from Parquet files")
    found = parquet.File(file)
    for name, kind in found.types():
        if types.is_struct(kind) or types.is_binary(kind) or types.is_large_binary(kind):
            yield name, "image" if name.lower() in ("img", "image", "images") else "other"
        elif types.is_string(kind) or types.is_large_string(kind):
            yield name, _looks(found.first_texts(name, _LOOK))
        else:
            yield name, "other"


def kinds_in_first_rows(file: Path) -> Iterator[tuple[str, str]]:
    """Yield the columns of a CSV file and what they look like: "text" or "other"."""
    names, rows = cells.first_rows(file, _LOOK)
    for place, name in enumerate(names):
        yield name, _looks([row[place].strip() for row in rows if len(row) == len(names)])


def _looks(texts: Sequence[str]) -> str:
    """Return whether texts are those of people: several words each, nearly all of them different."""
    filled = [text for text in texts if text]
    words = [len(text.split()) for text in filled]
    long = bool(words) and sum(words) / len(words) >= _WORDS
    return "text" if long and len(set(filled)) > len(filled) * 0.8 and not _is_date(filled[0]) else "other"


# ---- what is learned -------------------------------------------------------------------------------------------------


_ANY = Number(name="", mean=0.0, std=1.0)  # until the columns are known


def _label(sheet: TableRows, asked: Asked) -> tuple[str, list[str]]:
    """Return the column that is learned, and what is to be said of that."""
    if asked.label is not None:
        return sheet.column(asked.label, ", which is to be learned").name, []
    left = [name for name in sheet.columns if name not in asked.drop and name != asked.groups]
    for wanted in LABELS:
        found = [name for name in left if name.lower() == wanted]
        if found:
            return found[0], []
    if not left:
        raise DataError(f"{sheet.path} has no columns left to learn.", path=sheet.path)
    return left[-1], []


def _has_label(column: Column, path: Path) -> NDArray[np.bool_]:
    if column.what != "cells":
        raise DataError(
            f'column "{truncate(column.name)}" holds {column.what}; the label must be classes or numbers. Name '
            'another column: label = "...".',
            column=column.name,
            key="label",
            path=path,
        )
    found: NDArray[np.bool_]
    if column.codes is not None:
        found = column.codes >= 0
    elif column.strange:
        some = ", ".join(f'"{truncate(text, 30)}"' for text in column.sample[:3])
        raise DataError(
            f'column "{truncate(column.name)}", which is to be learned, has too many different texts for classes: '
            f"{some}, ... "
            'Name another column: label = "...". For texts with labels: name = "text".',
            column=column.name,
            key="label",
            path=path,
        )
    else:
        found = ~np.isnan(column.numbers)
    return found


def _task(sheet: TableRows, column: Column, asked: Asked) -> Literal["classification", "regression"]:
    if asked.task is not None:
        return asked.task
    if column.strange:
        return "classification"
    numbers = column.numbers[~np.isnan(column.numbers)]
    whole = bool((numbers == np.floor(numbers)).all())
    few = column.codes is not None and len(set(column.codes.tolist())) <= _MOST_CLASSES
    return "classification" if whole and few else "regression"


def _classes(sheet: TableRows, column: Column, asked: Asked) -> Label:
    if _task(sheet, column, asked) == "regression":
        columns.numbers_of(sheet, column)
        return Label(name=column.name)
    if column.codes is None:
        raise DataError(
            f'{sheet.path}: column "{truncate(column.name)}", which is to be learned, has too many different values '
            'for classes. Numbers can be learned with task = "regression".',
            path=sheet.path,
            column=column.name,
            key="task",
        )
    values = columns.texts_of(column)
    used = {values[code] for code in np.unique(column.codes[column.codes >= 0])}
    classes = tuple(sorted(used) if column.strange else sorted(used, key=float))
    if len(classes) < 2:
        raise DataError(
            f'{sheet.path}: column "{truncate(column.name)}" is "{truncate(classes[0])}" in every row, so there is '
            'nothing to learn. Name another column: label = "...".',
            path=sheet.path,
            column=column.name,
            key="label",
        )
    return Label(name=column.name, classes=classes)


def strata_of(
    known: Columns, y: NDArray[np.generic] | None, group: NDArray[np.int64] | None, rows: int
) -> NDArray[np.int64]:
    """Return what held out rows are drawn in proportion for: groups, else classes."""
    if group is not None:
        return group
    if y is None or known.task == "regression":
        return np.zeros(rows, dtype=np.int64)
    return y.astype(np.int64)


def _groups(sheet: TableRows, name: str | None) -> NDArray[np.int64] | None:
    if name is None:
        return None
    column = sheet.column(name, ", which is to say the groups")
    if column.empty:
        raise DataError(
            f'{sheet.path}: {column.empty} rows have no value in "{truncate(name)}", the column of groups.',
            path=sheet.path,
            key="groups",
            column=name,
        )
    if column.codes is None and column.strange:
        raise DataError(
            f'{sheet.path}: column "{truncate(name)}" has too many different texts to be groups.',
            path=sheet.path,
            column=name,
            key="groups",
        )
    values = column.numbers if column.codes is None or not column.strange else np.array(column.values)[column.codes]
    return np.unique(values, return_inverse=True)[1].astype(np.int64)


# ---- what it is learned from -----------------------------------------------------------------------------------------


class _Found:
    """What the columns of a table are, by looking at them.

    Attributes:
        notes: What was left out or filled in, in sentences.
    """

    def __init__(self, sheet: TableRows, label: str, asked: Asked, train: NDArray[np.int64]) -> None:
        """Look at each column but the label's, the groups' and those that are dropped."""
        self.sheet, self.train = sheet, np.sort(train)
        self.columns: list[Number | Category] = []
        self.out: dict[str, list[str]] = {}
        self.filled: list[str] = []
        self.rare: list[str] = []
        for name, column in sheet.columns.items():
            if name in (label, asked.groups) or name in asked.drop:
                continue
            why = self._number(column) if not column.strange and name not in asked.categories else self._category(
                column, name in asked.categories)  # fmt: skip
            if why:
                self.out.setdefault(why, []).append(name)
        if not self.columns:
            raise DataError(
                f"{sheet.path} has no column to learn from. {' '.join(self._left_out())}".rstrip(),
                path=sheet.path,
                key="drop",
            )
        features = sum(len(one.features) for one in self.columns)
        if features > _MOST_FEATURES:
            raise DataError(
                f"{sheet.path}: {features:,} features are more than the {_MOST_FEATURES:,} that there may be; leave "
                "columns out with drop = [...].",
                path=sheet.path,
                key="drop",
            )

    @property
    def counted(self) -> str:
        """How many columns of each kind there are."""
        numbers = sum(isinstance(one, Number) for one in self.columns)
        kinds = ((numbers, "numeric column"), (len(self.columns) - numbers, "column of categories"))
        said = [f"{count} {what}{'' if count == 1 else 's'}" for count, what in kinds if count]
        return " and ".join(said).replace("column of categoriess", "columns of categories")

    @property
    def notes(self) -> list[str]:
        """What was done that somebody may want otherwise."""
        notes = self._left_out()
        if self.filled:
            notes.append(f"Missing values count as the mean, and a feature says where they are: {_some(self.filled)}.")
        if self.rare:
            notes.append(f"Of many categories the {MOST_CATEGORIES} most frequent count: {_some(self.rare)}.")
        return notes

    def described(self, learned: Columns, y: NDArray[np.generic]) -> Columns:
        """Return how the table becomes numbers."""
        label = learned.label
        if learned.task == "regression":
            values = y[self.train, 0].astype(np.float64)
            std = float(values.std())
            label = Label(name=label.name, mean=float(values.mean()), std=std if std > 0 else 1.0)
        return Columns(task=learned.task, label=label, columns=tuple(self.columns), missing=learned.missing)

    def _left_out(self) -> list[str]:
        return [f"Left out, {why}: {_some(names)}." for why, names in self.out.items()]

    def _number(self, column: Column) -> str:
        """Take a column of numbers in, or return why not."""
        if column.what != "cells":
            return f"because they hold {column.what}"
        if column.empty == len(column):
            return "because they are empty"
        if _DATE.search(column.name):
            return "because they hold dates"
        if _numbers_rows(column):
            return "because they number the rows"
        values = column.numbers[self.train]
        gone = np.isnan(values)
        values = values[~gone]
        if not len(values) or values.min() == values.max():
            return "because they are the same in all training rows"
        with np.errstate(over="ignore", invalid="ignore"):
            mean, std = float(values.mean()), float(values.std())
        if not np.isfinite(mean) or not np.isfinite(std) or not std > 0:
            raise DataError(
                f'{self.sheet.path}: the numbers of column "{truncate(column.name)}" are too large or too near to each '
                f'other to compute with. Fix them, or leave the column out: drop = ["{truncate(column.name)}"].',
                path=self.sheet.path,
                column=column.name,
                key="drop",
            )
        if gone.any():
            self.filled.append(column.name)
        elif column.empty:
            self.filled.append(f"{column.name} (outside of training only)")
        self.columns.append(Number(name=column.name, mean=mean, std=std, missing=bool(gone.any())))
        return ""

    def _category(self, column: Column, asked: bool) -> str:
        """Take a column of categories in, or return why not."""
        if column.what != "cells":
            return f"because they hold {column.what}"
        rows = len(column) - column.empty
        if not asked:
            if column.sample and all(_is_date(text) for text in column.sample):
                return "because they hold dates"
            self._check_numbers(column, rows)
        distinct = None if column.codes is None else len(set(column.codes.tolist()) - {-1})
        if distinct is None or (not asked and rows >= _FEW and distinct > rows / 2):
            if asked:
                raise DataError(f'{self.sheet.path}: column "{truncate(column.name)}" has too many different values '
                                "for categories.", path=self.sheet.path, column=column.name)  # fmt: skip
            words = sum(len(text.split()) > 2 for text in column.sample)
            return "because they hold free text" if words > len(column.sample) / 2 else (
                "because nearly every row has a value of its own")  # fmt: skip
        assert column.codes is not None
        codes = column.codes[self.train]
        counts = np.bincount(codes[codes >= 0], minlength=len(column.values))
        texts = columns.texts_of(column)
        known = dict[str, int]()
        for code in np.flatnonzero(counts).tolist():
            known[texts[code]] = known.get(texts[code], 0) + int(counts[code])
        if len(known) < 2 and not (known and column.empty):
            return "because they are the same in all training rows"
        kept = sorted(known, key=lambda value: (-known[value], value))[:MOST_CATEGORIES]
        if len(known) > MOST_CATEGORIES:
            self.rare.append(f"{column.name} ({len(known)})")
        self.columns.append(Category(name=column.name, values=tuple(sorted(kept))))
        return ""

    def _check_numbers(self, column: Column, rows: int) -> None:
        """Refuse a column of numbers with a few values among them that are none: likely a slip, or a mark."""
        if column.strange * 10 <= rows and column.strange < rows:
            row, text = column.first_strange
            count = column.strange
            raise DataError(
                f'{self.sheet.path}: column "{truncate(column.name)}" holds numbers, but {count} of {rows} values '
                f'{"are none" if count > 1 else "is none"}, such as "{truncate(text)}" in row {row}. Fix the value, '
                f'treat it as missing (missing = ["{truncate(text)}"]), or take the column as categories '
                f'(categories = ["{truncate(column.name)}"]).',
                path=self.sheet.path,
                row=row,
                column=column.name,
            )


def _numbers_rows(column: Column) -> bool:
    """Tell whether a column of numbers is one that numbers the rows."""
    values = column.numbers
    if len(values) < _FEW or column.empty or not bool((values == np.floor(values)).all()):
        return False
    steps = np.diff(values)
    if bool((steps == 1).all()) and values[0] in (0, 1):
        return True
    return bool(_ID.search(column.name)) and len(np.unique(values)) == len(values)


def _is_date(text: str) -> bool:
    if len(text) > 40 or not any(mark in text for mark in "-/. :"):
        return False
    try:
        datetime.fromisoformat(text)
        return True
    except ValueError:
        pass
    for form in _DATES:
        try:
            datetime.strptime(text, form)
            return True
        except ValueError:
            continue
    return False


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
    return ", ".join(truncate(name) for name in names[:_MOST_SHOWN]) + more
