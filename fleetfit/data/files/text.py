"""Labeled texts on disk: Parquet, CSV, TSV, JSON lines, or a folder of .txt or .md files per class.

Examples are the unpacked IMDB, or your own table. A set is a folder with a train file (`train.csv`) and optionally
`validation` (or `valid`, `val`, `dev`) and `test`, or a single file. Parquet files may be numbered like those of
`images`. CSV may be quoted, TSV is not. All files are UTF-8. Folders are `train/CLASS/*.txt` and so on, or just
`CLASS/*.txt`; texts of devices are in `DEVICE/CLASS/*.txt`, or a CSV file names the file, label and device of each (see
`fleetfit.data.files.labeled`).
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetfit.data.dataset import Data, Facts
from fleetfit.data.files import parquet
from fleetfit.data.files.folders import (
    convert_saved_dataset,
    download,
    find_new_tables,
    find_or_download,
    find_parquet_files,
    find_tables,
    list_sample_files,
    resolve_folder,
)
from fleetfit.data.files.labeled import find_labeled_files, find_new_files
from fleetfit.data.files.table import IN_MEMORY, TEXT_COLUMNS, read_cells, read_objects
from fleetfit.data.files.tokens import Texts, encode, encode_texts, load_tokenizer
from fleetfit.data.rows import Rows, make_new_data
from fleetfit.errors import DataError, quote_some, truncate
from fleetfit.files import parse_path, read_text

FACTS = Facts(source="a folder or a file of labeled texts")
FILE_SUFFIXES = (".txt", ".md")
"""Suffixes of files with a text each."""
SUFFIXES = (".parquet", ".csv", ".tsv", ".jsonl", ".json")
_LABEL = ("label", "labels")
_SHOWN = 20  # columns listed in a note


def text(
    folder: str,
    text: str | tuple[str, ...] | None = None,
    label: str | None = None,
    groups: str | None = None,
    header: bool = True,
    tokenizer: str | None = None,
    vocabulary: int = 8000,
    length: int = 64,
    samples: int | None = None,
    validation: float = 0.1,
    test: float = 0.2,
    seed: int = 0,
    hub: bool = False,
) -> Data:
    """Return a set of labeled texts as tokens [N, length], named after its folder or file.

    Missing splits are held out of the training texts: in proportion for each label, or for each group if `groups` is
    set. Without a test file, a validation file is the test set. A test or validation file whose labels are all -1
    (withheld) is left out, and so are folders called "unsup", which have no label in the IMDB set, and rows of CSV, TSV
    and JSON without a label.

    Args:
        folder: A folder or a single file. A relative path that does not exist is looked up in the folder FLEETFIT_DATA.
        text: Column of the texts, or several, which are joined by a space; None: `text` or `sentence`.
        label: Column of the labels, integers or text; None: `label` or `labels`. In CSV, TSV and JSON its distinct
            values, in ascending order, are the classes.
        groups: Column of a natural group such as an author, numbered in ascending order; None: no groups.
        header: Whether the first line of a CSV or TSV file has the names of the columns. If not, they are "1", "2" and
            so on.
        tokenizer: Folder of a Hugging Face checkpoint, or a tokenizer.json; None: word pieces are learned from the
            training texts, lower-cased.
        vocabulary: Maximal number of word pieces, if they are learned.
        length: Tokens of a text; longer texts are cut, shorter ones padded.
        samples: Number of training samples to draw, in proportion for every label, those held out for validation
            included; None: all.
        validation: Share of the training texts to hold out, if there is no validation file.
        test: Share of the texts to hold out as the test set, if there is only a train file.
        seed: Seed of the held out and drawn samples.
        hub: Whether `folder` is a repository of the Hugging Face hub ("stanfordnlp/imdb"), downloaded once.

    Raises:
        DataError: A file, a column, a label or the tokenizer is missing or wrong, or a number is out of range.
        MissingExtra: A package for the tokenizer or the hub is not installed.
    """
    if hub:
        name = folder.rpartition("/")[2]
        path = download(name, folder)
    else:
        path = resolve_folder(folder)
        name = path.resolve().stem if path.is_file() else path.resolve().name
        path = convert_saved_dataset(path)
    rows = read_rows(name, path, text, label, groups, header)
    data = make_data(name, rows, tokenizer, vocabulary, length, samples, validation, test, seed)
    others = [file.name for file in rows.x.files if file.suffix.lower() not in (".csv", ".tsv")]
    if header or not others:
        return data
    note = f"{name}: header = false only applies to CSV and TSV, but there is {others[0]}. Leave it out."
    return dataclasses.replace(data, notes=(*data.notes, note))


def make_data(
    name: str,
    rows: Rows,
    tokenizer: str | None,
    vocabulary: int,
    length: int,
    samples: int | None,
    validation: float,
    test: float,
    seed: int,
) -> Data:
    """Return texts as a data set (see `text`). Their `x` are `Texts`.

    Raises:
        DataError: A share, a number or the tokenizer is wrong.
        MissingExtra: `tokenizers` or `transformers` is not installed.
    """
    splits = rows.divide(name, validation, test, seed, samples)
    x, facts = encode_texts(name, rows.x, splits["train"], tokenizer, vocabulary, length)
    return rows.make_data(name, x, splits, **facts)


def make_texts_in_memory(
    splits: Mapping[str, Any], text: str | tuple[str, ...] | None = None, label: str | None = None,
    groups: str | None = None, tokenizer: str | None = None, vocabulary: int = 8000, length: int = 64,
    samples: int | None = None, validation: float = 0.1, test: float = 0.2, seed: int = 0,
) -> Data:  # fmt: skip
    """Return tables with texts in memory as a data set.

    `splits` has the `pyarrow.Table` of each split, "train" first. The other arguments are those of `text`.

    Raises:
        DataError: As `text`.
        MissingExtra: As `text`.
    """
    tables = {
        split: [{name: rows.column(name).to_pylist() for name in rows.column_names}] for split, rows in splits.items()
    }
    digest = hashlib.sha256(json.dumps(tables, default=str).encode()).hexdigest()
    rows = _read_tables("texts", tables, text, label, groups, digest)
    return make_data("texts", rows, tokenizer, vocabulary, length, samples, validation, test, seed)


# ---- tables of text, with the same questions asked of them as of Parquet files ---------------------------------------


def _open_rows(path: Path, header: bool) -> parquet.RowFile:
    """Open the rows of a file by its suffix, one of `SUFFIXES`."""
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return parquet.File(path)
    if suffix in (".csv", ".tsv"):
        is_tsv = suffix == ".tsv"
        return Cells(path, read_cells(path, "\t" if is_tsv else None, header, quoted=not is_tsv))
    if suffix in (".jsonl", ".json"):
        return Cells(path, read_objects(path))
    raise DataError(f"{path} has an unknown suffix. Use one of {', '.join(SUFFIXES)}.", path=path)


class Cells(parquet.RowFile):
    """The columns of one file, in memory."""

    numbered = False

    def __init__(self, path: Path, cells: dict[str, list[Any]]) -> None:
        self.path, self._cells, self.columns = path, cells, list(cells)
        self.rows = len(next(iter(cells.values()), []))
        self._numbers: Sequence[int] = range(self.rows)  # of the rows that are left, in the file
        self.advice = "" if path == IN_MEMORY else ", or header = false if its first line is not a header"

    def texts(self, column: str) -> list[str]:
        """Return a column of text (see `parquet.RowFile.texts`)."""
        self.column(column, (), "the column's name:")
        for row, value in enumerate(self._cells[column]):
            if not isinstance(value, str | int) or isinstance(value, bool):
                raise self.error(f"has {value!r:.80}, which must be text.", column, row)
            if isinstance(value, str) and not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
                raise self.error("has an incomplete character.", column, row)
        return [str(value) for value in self._cells[column]]

    def read_values(self, column: str, missing: str | None = None) -> NDArray[Any]:
        """Return a column: integers if all values are integers as they are written (not 007), else text."""
        self.column(column, (), "the column's name:")
        cells = [_format_value(value).strip() for value in self._cells[column]]
        if "" in cells:
            raise self.error("has no value. Fill it in, or remove the row.", column, cells.index(""))
        if all(re.fullmatch(r"-?(?:0|[1-9]\d{0,17})", cell) for cell in cells):
            return np.array([int(cell) for cell in cells], dtype=np.int64)
        return np.array(cells, dtype=object)

    def drop_rows_without(self, column: str) -> int:
        """Leave out the rows without a value in a column. Return how many."""
        self.column(column, (), "label")
        left = [i for i, value in enumerate(self._cells[column]) if _format_value(value).strip()]
        dropped = self.rows - len(left)
        if dropped:
            self._cells = {name: [values[i] for i in left] for name, values in self._cells.items()}
            self.rows, self._numbers = len(left), left
        return dropped

    def error(self, reason: str, column: str, row: int | None = None) -> DataError:
        """Return an error on a column, or on its value in a row (see `parquet.RowFile.error`)."""
        return super().error(reason, column, None if row is None else self._numbers[row])

    def is_empty(self, column: str) -> bool:
        """Return whether no row has a value in a column."""
        return not any(str(value).strip() for value in self._cells[column] if value is not None)


def _format_value(value: Any) -> str:
    """Return a class or a group as text: whole numbers of a frame are floats as soon as one is missing."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return "" if value is None else str(value)


def read_rows(
    name: str,
    path: Path,
    text: str | tuple[str, ...] | None = None,
    label: str | None = None,
    groups: str | None = None,
    header: bool = True,
) -> Rows:
    """Return the rows of a set. All columns are read, except the texts.

    Args:
        name: The set's name, for messages.
        path: A file, or a folder with train.parquet (.csv, .tsv, .jsonl, .json) and so on, or with a folder of .txt
            files for each class, in a folder for each split or not.
        text: Column of the texts, or several to join by a space; None: `text` or `sentence`.
        label: Column of the labels, integers or text; None: `label` or `labels`.
        groups: Column of a natural group such as an author; None: no groups.
        header: Whether the first line of a CSV or TSV file names the columns.

    Raises:
        DataError: A file or a column is missing or wrong.
    """
    listed = find_labeled_files(name, path, FILE_SUFFIXES, label, groups, in_table=text is None)
    if listed:
        paths = listed.paths
        return dataclasses.replace(listed, x=Texts(paths, [], lambda: [read_text(file, DataError) for file in paths]))
    return _read_tables(name, find_tables(path, SUFFIXES[1:]), text, label, groups, header)


def _read_tables(
    name: str, sources: Mapping[str, Sequence[Path | dict[str, list[Any]]]], text: str | tuple[str, ...] | None,
    label: str | None, groups: str | None, key: bool | str,
) -> Rows:  # fmt: skip
    """Return the rows of files, or of columns in memory.

    `key` is the files' `header`, or the hash of the columns.
    """
    tables = {
        split: [Cells(IN_MEMORY, one) if isinstance(one, dict) else _open_rows(one, key is True) for one in some]
        for split, some in sources.items()
    }
    first = tables["train"][0]
    label = first.column(label, _LABEL, "label")
    if groups is not None:
        first.column(groups, (), "groups")
    names = [text] if isinstance(text, str) else list(text or [None])
    columns = [first.column(column, TEXT_COLUMNS, "text") for column in names]
    if label in columns:
        raise DataError(f'{first.path}: the column "{truncate(label)}" is both text and label.', key="text")
    cells = [table for split_tables in tables.values() for table in split_tables if isinstance(table, Cells)]
    unlabeled = sum(table.drop_rows_without(label) for table in cells)
    for split in [
        s for s in tables if s != "train" and all(parquet.has_withheld_labels(table, label) for table in tables[s])
    ]:
        del tables[split]
    all_tables = [table for split_tables in tables.values() for table in split_tables]
    notes = [_describe_columns(name, first.columns, columns, label, groups)]
    if unlabeled:
        notes.append(f'{name}: {unlabeled} rows without "{truncate(label)}" are left out.')
    if not sum(table.rows for table in tables.get("train", ())):
        raise DataError(f"{first.path} has no rows to train on: it is empty, or no row has a label.", path=first.path)
    y, classes, class_names = parquet.read_labels(all_tables, label)
    return Rows(
        x=Texts(
            [table.path for table in all_tables if table.path != IN_MEMORY],
            [columns, key, *([label] if unlabeled else [])],  # rows that another label has are left out
            lambda: [text for table in all_tables for text in _join_columns(table, columns)],
        ),
        y=y,
        sizes={split: sum(table.rows for table in split_tables) for split, split_tables in tables.items()},
        classes=classes,
        class_names=class_names,
        groups=None if groups is None else parquet.encode_values(parquet.read_values(all_tables, groups), True)[0],
        notes=tuple(notes),
    )


def _describe_columns(name: str, every: Sequence[str], texts: Sequence[str], label: str, groups: str | None) -> str:
    """Describe which columns of a table are the text and the label, and which are left out."""
    named = [f"text {quote_some(texts)}", f"label {quote_some([label])}"]
    named += [] if groups is None else [f"groups {quote_some([groups])}"]
    others = [column for column in every if column not in (*texts, label, groups)]
    left_out = f"; left out: {quote_some(others, _SHOWN)}" if others else ""
    more = " Set data.text or data.label for other columns." if others else ""
    return f"{name}: columns used: {', '.join(named)}{left_out}.{more}"


def read_named_set(name: str, facts: Facts, repository: str, folder: str | None, hub: bool) -> Rows:
    """Read a named set, downloaded with `hub`, and compare it with its key figures.

    Raises:
        DataError: As `text`, or the files are those of another set, or there is no test set.
        MissingExtra: As `text`.
    """
    set_folder = find_or_download(name, folder, hub, repository, find=_find_set_files)
    rows = _read_tables(name, _find_set_files(name, set_folder), None, None, None, True)
    if rows.classes != facts.classes:
        raise DataError(
            f"{name} has {facts.classes} classes of texts, but the files have {rows.classes}. Is this another data set?"
        )
    if "test" not in rows.sizes and "validation" not in rows.sizes:
        raise DataError(f"{name}: test.parquet is missing next to its train file.")
    return dataclasses.replace(rows, notes=())


def _find_set_files(name: str, folder: str | None) -> dict[str, list[Path]]:
    """Return the files of each split of a named set, given its folder or the parent; None: in FLEETFIT_DATA."""
    if folder is None:
        return find_parquet_files(name, None)
    path = parse_path(folder, "data.folder")
    return find_tables(path / name if (path / name).is_dir() else path, SUFFIXES[1:])


def _join_columns(table: parquet.RowFile, columns: Sequence[str]) -> list[str]:
    return [" ".join(cells) for cells in zip(*(table.texts(column) for column in columns), strict=True)]


# ---- new texts for a trained model -----------------------------------------------------------------------------------


def prepare_texts(path: Path, facts: Data, settings: Mapping[str, Any], halves: bool = False) -> Data | None:
    """Return new texts of a file, or of a folder of files or tables, as tokens (see `transform.KINDS`).

    A row of a table has the label of its column, a file that of `find_new_files`. A single .txt file has a text on
    each line, without labels; a single .md file is one text. If a text has no label, the data have none.
    """
    label = None if settings.get("text") else settings.get("label")
    names, labels = None, None
    notes: list[str] = []
    if path.suffix.lower() == ".txt" and path.is_file():
        lines = read_text(path, DataError).split("\n")
        texts = [line for line in lines if line.strip()]
        if blank := len(lines[:-1]) + bool(lines[-1]) - len(texts):
            notes.append(f"{path.name}: lines that are left out because they are blank: {blank}.")
    elif found := find_new_files(path, FILE_SUFFIXES, facts, label, SUFFIXES):
        names, labels, notes = found.file_names, found.y, [*found.notes]
        texts = [read_text(file, DataError) for file in found.paths]
    elif tables := _open_new_tables(path, settings):
        texts, labels, notes = _read_new_rows(tables, facts, settings)
    else:
        return None
    name = path.resolve().stem if path.is_file() else path.resolve().name
    return _encode_new_texts(facts, name, path, texts, labels, halves, notes=tuple(notes), file_names=names)


def prepare_text_cells(
    cells: dict[str, list[Any]], facts: Data, settings: Mapping[str, Any], halves: bool = False
) -> Data:
    """Return texts in memory as tokens.

    Args:
        cells: The columns of a table, with one of texts.
        facts: The training data, or their facts.
        settings: The keys of the training data.
        halves: Whether one half is for validation.

    Raises:
        DataError: A text or a label is wrong.
    """
    table = Cells(IN_MEMORY, cells)
    label = _find_label(table, settings)
    if label is not None and None in cells[label]:  # as no text has one
        table = Cells(IN_MEMORY, {name: values for name, values in cells.items() if name != label})
    texts, labels, notes = _read_new_rows([table], facts, settings)
    return _encode_new_texts(facts, "texts", IN_MEMORY, texts, labels, halves, notes=tuple(notes))


def _encode_new_texts(
    facts: Data, name: str, path: Path, texts: Sequence[str], labels: Any, halves: bool, **more: Any
) -> Data:
    if not texts:
        raise DataError(f"{path} has no texts.", path=path)
    tokenizer, _ = load_tokenizer(path.name, Path(facts.tokenizer))
    x = encode(path.name, tokenizer, texts, facts.x.shape[1], facts.padding)
    return make_new_data(facts, name, x, labels, halves, **more)


def _open_new_tables(path: Path, settings: Mapping[str, Any]) -> list[parquet.RowFile]:
    """Return the tables of new texts; none of a labeled training set, which is read with its own splits."""
    header = settings.get("header") is not False
    if path.is_dir() and list_sample_files(path, "**/*.txt"):  # the tables name them
        return []
    paths = find_new_tables(path, SUFFIXES, lambda file: _find_label(_open_rows(file, header), settings) is not None)
    return [_open_rows(file, header) for file in paths]


def _find_label(table: parquet.RowFile, settings: Mapping[str, Any]) -> str | None:
    usual = (settings["label"],) if settings.get("label") else _LABEL
    return next((name for name in usual if name in table.columns), None)


def _read_new_rows(
    tables: Sequence[parquet.RowFile], facts: Data, settings: Mapping[str, Any]
) -> tuple[list[str], NDArray[np.int64] | None, list[str]]:
    """Return the texts of tables, their classes if all have one, and notes."""
    first, text = tables[0], settings.get("text")
    label, notes = _find_label(first, settings), []
    others = [name for name in first.columns if name != label]
    if len(others) == 1 and (text is None or isinstance(text, str)):  # of any name
        columns = others
        if others[0] not in (TEXT_COLUMNS if text is None else (text,)):
            notes.append(f'{first.path.name}: the texts are those of the column "{truncate(others[0])}".')
    else:
        columns = [
            _find_text_column(first, TEXT_COLUMNS if column is None else (column,))
            for column in ([text] if isinstance(text, str) or text is None else text)
        ]
    texts = [text for table in tables for text in _join_columns(table, columns)]
    classes = [] if label is None or not texts else [parquet.encode_labels(facts, table, label) for table in tables]
    labels = [some for some in classes if some is not None]
    return texts, np.concatenate(labels) if labels and len(labels) == len(tables) else None, notes


def _find_text_column(table: parquet.RowFile, usual: Sequence[str]) -> str:
    for name in usual:
        if name in table.columns:
            return name
    raise DataError(
        f"{table.path} has no column {' or '.join(map(repr, usual))}, where the texts of the run are. Its columns are "
        f"{quote_some(table.columns)}. Rename the one with the texts, or name a .txt file with a text on each line.",
        path=table.path,
        column=usual[0],
    )
