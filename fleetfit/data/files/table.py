"""Tables of numbers and categories, on disk and in memory: read them, detect kinds of columns, and encode them.

A table is a CSV file, a Parquet file, or a folder with one per split: `train.csv`, and optionally `validation.csv` (or
`valid`, `val`, `dev`) and `test.csv`. pyarrow reads both. CSV is UTF-8. Its separator (comma, semicolon, tab, bar) is
detected, and its first line has the names of the columns. Lines before it that start with # are comments.

Numbers are standardized and each category becomes a feature, both fitted to the training rows. Dates, free text, row
numbers and constant columns are left out, with a note. The encoding is written to `columns.json` in the run folder. It
encodes other rows in the same way, such as rows to predict and rows of a fleet's nodes.

The encoding is that of scikit-learn's `StandardScaler` and `OneHotEncoder`, and tests compare with them. It is computed
here because theirs differs in stored values: `StandardScaler` has other last digits than NumPy's mean and standard
deviation, on which stored runs depend, and `OneHotEncoder` gives rare categories a feature of their own.
"""

import codecs
import contextlib
import csv
import io
import itertools
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pydantic
import torch
from numpy.typing import NDArray

from fleetfit import files
from fleetfit.data.dataset import MAX_CLASSES, Data, Facts
from fleetfit.data.files import parquet
from fleetfit.data.files.folders import convert_saved_dataset, find_new_tables, find_tables, resolve_folder
from fleetfit.data.rows import Rows, make_new_data
from fleetfit.data.splits import fill_missing_splits, hold_out
from fleetfit.errors import DataError, did_you_mean, escape_controls, format_cause, join_some, quote_some, truncate
from fleetfit.files import parse_json

FACTS = Facts(source="a table in CSV or Parquet")
_CSV = (".csv", ".tsv")
SUFFIXES = (*_CSV, ".parquet")
JSON = (".jsonl", ".json")
LABELS = ("label", "labels", "target", "class", "y")
"""Default names of the label column; otherwise it is the last column."""
TEXT_COLUMNS = ("text", "sentence")
"""Usual names of the column of the texts."""
IN_MEMORY = Path("the data frame")
"""The name of a table in memory in messages."""
SEPARATORS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "bar"}
MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?", "-", "<na>", "nat"})
"""Cells without a value, in lower case."""
MAX_CATEGORIES = 64
"""Maximal number of categories of a column that become features, most frequent first."""
_MAX_TEXTS = 1000  # limit for the distinct values of classes or categories
_MAX_CLASSES = 50  # whole numbers are classes up to this number of distinct values
_MAX_FEATURES = 20_000
_FEW_ROWS = 20  # with fewer rows, distinct values in all rows are not suspicious
_SAMPLE = 200  # number of first rows or texts for detection
_FREE_TEXT = "they hold free text"
_WORDS, _MANY_WORDS = 4.0, 8.0  # average number of words of free text, and of one that is more than a name or a title
_BLOCK = 1 << 22  # block size of pyarrow in bytes; also the limit for a row
_EXACT = 1 << 53  # float64 holds whole numbers below
_LONGEST_NAME = 200
_SHOWN = 8  # columns listed in a sentence
_ID = re.compile(
    r"(?i:(?:^|[_\s-])(?:id|ids|uuid|guid|index|idx|key|row)$|^unnamed: \d+$|^column 1$)|(?<=[a-z])(?:ID|Id)$"
)
_DATE = re.compile(r"(?:^|[_\s-])(?:date|datetime|timestamp)(?:$|[_\s-])", re.IGNORECASE)
_DATES = ("%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%Y/%m/%d", "%d-%m-%Y", "%d %b %Y", "%b %d, %Y", "%d.%m.%Y %H:%M",
          "%d.%m.%Y %H:%M:%S", "%m/%d/%Y %H:%M", "%m/%d/%Y %H:%M:%S", "%d/%m/%Y %H:%M")  # fmt: skip
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")

Task = Literal["classification", "regression"]


@dataclass(frozen=True)
class TableOptions:
    """The keys of a run file that describe columns (see `table`)."""

    label: str | None = None
    task: Task | None = None
    groups: str | None = None
    categories: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


def table(
    folder: str,
    label: str | None = None,
    task: Task | None = None,
    groups: str | None = None,
    categories: tuple[str, ...] = (),
    drop: tuple[str, ...] = (),
    missing: tuple[str, ...] = (),
    transform: str | None = None,
    separator: str | None = None,
    header: bool = True,
    samples: int | None = None,
    validation: float = 0.1,
    test: float = 0.2,
    seed: int = 0,
) -> Data:
    """Return a table as numbers [N, features], named after its file or folder.

    Splits without a file are held out from the rows: in proportion for each class, or for each group if `groups` is
    set. Without a test file, a validation file is the test set. Rows without a label are left out.

    Args:
        folder: A file, or a folder with a train file. A relative path that does not exist is looked up in
            FLEETFIT_DATA.
        label: Column of the label; None: `label`, `labels`, `target`, `class` or `y`, else the last one.
        task: The task; None: regression if the label has fractions or more than 50 distinct numbers, else
            classification.
        groups: Column of a natural group such as a hospital, which is not a feature; None: no groups.
        categories: Columns of numbers that are categories, such as a postcode.
        drop: Columns to leave out.
        missing: Further texts or numbers that count as missing, such as "unknown" or "-999"; empty cells, NA, N/A, NaN,
            null, None, ? and - always do.
        transform: The folder of a run, whose `columns.json` has the encoding. Other keys must not contradict it. None:
            fit the encoding to the training rows.
        separator: Separator of the cells in a CSV file; None: detected.
        header: Whether the first line of a CSV file has the names of the columns. If not, they are "1", "2" and so on.
        samples: Number of training rows to draw, in proportion for each class, including rows held out for validation;
            None: all.
        validation: Share of the training rows to hold out, if there is no validation file.
        test: Share of the rows to hold out as the test set, if there is only a train file.
        seed: Seed of held out and drawn rows.

    Raises:
        DataError: A file, a column or a value is missing or wrong, or a share is out of range.
    """
    path = resolve_folder(folder)
    name = path.resolve().stem if path.is_file() else path.resolve().name
    options, encoder = TableOptions(label, task, groups, categories, drop, missing), None
    if transform is not None:
        file = Path(transform) / "columns.json"
        encoder = TableEncoder.from_json(files.read_text(file, DataError), str(file))
        _check_options(options, encoder, str(file))
        options = replace(options, missing=(*encoder.missing, *missing))
    sheet = read_sheet(convert_saved_dataset(path), separator, header, options.missing)
    return _make_data(name, sheet, options, encoder, samples, validation, test, seed)


def _check_options(options: TableOptions, encoder: "TableEncoder", file: str) -> None:
    """Refuse options that contradict a given `columns.json`."""
    kinds = {column.name: column.kind for column in encoder.columns}
    dropped = next((name for name in options.drop if name in kinds), None)
    number = next((name for name in options.categories if kinds.get(name) == "number"), None)
    label = encoder.label.name
    for key, value, expected, reason in (
        ("label", options.label, label, f'the column "{truncate(label)}" is the label'),
        ("task", options.task, encoder.task, f"the task is {encoder.task}"),
        ("drop", dropped, None, "the column is a feature"),
        ("categories", number, None, "the column has numbers"),
    ):
        if value not in (None, expected):
            raise DataError(
                f'{key}: got "{truncate(value)}", but {file} (transform) has another encoding: {reason}. Leave '
                f"out {key}; or leave out transform, to detect the columns in these rows.",
                path=file,
                key=key,
            )


# ---- files -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class TableSheet:
    """The rows of one or several files, concatenated.

    Attributes:
        table: The rows, a `pyarrow.Table`.
        parts: Split, path and number of rows of each file.
        texts: For some columns, texts of `MISSING` that are values there, in lower case.
    """

    table: Any
    parts: tuple[tuple[str, Path, int], ...]
    texts: Mapping[str, Collection[str]] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """The first file."""
        return self.parts[0][1]

    @property
    def sizes(self) -> dict[str, int]:
        """Number of rows of each split."""
        return {split: sum(rows for part, _, rows in self.parts if part == split) for split, _, _ in self.parts}

    def check_column(self, name: str, purpose: str = "") -> str:
        """Return the name of a column.

        Raises:
            DataError: The column does not exist.
        """
        names = self.table.column_names
        if name not in names:
            raise DataError(
                f'{self.path} has no column "{truncate(name)}"{purpose}. Its columns are '
                f"{join_some(list(map(truncate, names)), 30)}.{did_you_mean(name, names)}",
                path=self.path,
                column=name,
            )
        return name

    def error(self, column: str, reason: str, row: int | None = None, key: str | None = None) -> DataError:
        """Return an error on a column, or on its value in a row. `row` counts from 0, the message from 1."""
        starts = np.cumsum([0, *(rows for _, _, rows in self.parts)])
        part = int(np.searchsorted(starts, row or 0, side="right")) - 1
        path, number = self.parts[part][1], None if row is None else row - int(starts[part]) + 1
        location = path if number is None else f"{path}, row {number}"
        return DataError(
            f'{location}: column "{truncate(column)}" {reason}', path=path, row=number, column=column, key=key
        )


def make_sheet(parts: Sequence[tuple[str, Path, Any]]) -> TableSheet:
    """Concatenate tables, with the columns of the first.

    Args:
        parts: Split, file and rows (a `pyarrow.Table`) of each table.

    Raises:
        DataError: A table lacks a column.
    """
    import pyarrow as pa

    first, names = parts[0][1], parts[0][2].column_names
    for split, path, rows in parts[1:]:
        for name in names:
            TableSheet(rows, ((split, path, rows.num_rows),)).check_column(name, f", which {first.name} has")
    tables = [rows.select(names) for _, _, rows in parts]
    if any(rows.schema != tables[0].schema for rows in tables):
        fields = [(name, _find_common_type([rows.schema.field(name).type for rows in tables])) for name in names]
        tables = [rows.cast(pa.schema(fields, tables[0].schema.metadata)) for rows in tables]
    return TableSheet(pa.concat_tables(tables), tuple((split, path, rows.num_rows) for split, path, rows in parts))


def _find_common_type(types: Sequence[Any]) -> Any:
    import pyarrow as pa

    if any(map(parquet.is_text, types)):
        return pa.large_string()
    return pa.float64() if any(map(_is_number, types)) else next((t for t in types if t != pa.null()), pa.null())


def read_sheet(
    path: Path, separator: str | None = None, header: bool = True, missing: Sequence[str] = ()
) -> TableSheet:
    """Read a file, or the files of a folder. The arguments are those of `read_table`.

    Raises:
        DataError: A file cannot be read, or lacks a column of the first one.
    """
    paths = [(split, file) for split, files in find_tables(path, _CSV).items() for file in files]
    return make_sheet([(split, file, read_table(file, separator, header, missing)) for split, file in paths])


def read_table(path: Path, separator: str | None = None, header: bool = True, missing: Sequence[str] = ()) -> Any:
    """Read a file of CSV, Parquet or JSON.

    Args:
        path: A file that ends in .parquet, in .jsonl or .json, or a file of separated cells.
        separator: Separator of cells; None: detected in the first rows.
        header: Whether the first line names the columns; if not, they are "1", "2" and so on.
        missing: Further cells without a value, in addition to `MISSING`.

    Returns:
        A `pyarrow.Table`. The columns of a CSV file have texts. Cells without a value are null.

    Raises:
        DataError: The file is not a table, or a key of CSV files is set for a Parquet file.
    """
    import pyarrow as pa

    suffix = path.suffix.lower()
    is_csv = suffix != ".parquet" and suffix not in JSON
    if not is_csv and (separator is not None or not header):
        key = "header" if separator is None else "separator"
        raise DataError(f"{key}: {path} is a file of {suffix}, not of CSV. Leave {key} out.", path=path, key=key)
    if suffix in (".gz", ".zip", ".bz2", ".xz", ".zst"):
        raise DataError(f"{path} is compressed. Decompress it first.", path=path)
    if suffix in (".xls", ".xlsx", ".ods"):
        raise DataError(f"{path} is a spreadsheet. Save it as CSV (in UTF-8) first.", path=path)
    if is_csv:
        rows = _read_csv(path, _detect_layout(path, separator, header), missing)
    elif suffix == ".parquet":
        file = parquet.File(path)
        rows = file.read(check_names(path, [name for name in file.columns if not name.startswith("__index_level_")]))
    else:
        columns = read_objects(path)
        check_names(path, list(columns))
        try:
            rows = pa.table(columns)
        except pa.ArrowException as error:
            raise DataError(f"{path} cannot be read as a table: {format_cause(error)}", path=path) from None
    if not rows.num_rows:
        raise DataError(f"{path} has no rows.", path=path)
    return rows


def _refuse_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key occurs twice")
    return table


def read_objects(path: Path) -> dict[str, list[Any]]:
    """Return the columns of a file with one JSON object per line, or with one JSON list of objects.

    Raises:
        DataError: It has something else.
    """
    content = files.read_text(path, DataError)
    whole = content.lstrip()[:1] == "["
    objects: list[Any] = []
    for number, part in enumerate([content] if whole else content.split("\n"), 1):
        if part.strip():
            try:
                parsed = json.loads(part, object_pairs_hook=_refuse_duplicate_keys)
            except (ValueError, RecursionError) as error:
                raise DataError(
                    f"{'' if whole else f'line {number} of '}{path} is not JSON: {error}", path=path, row=number
                ) from None
            objects.extend(parsed if whole else [parsed])
    wrong = next((i for i, value in enumerate(objects) if not isinstance(value, dict)), None)
    if wrong is not None:
        raise DataError(
            f"{path} must have JSON objects, one per line or in one list; row {wrong} is not an object.",
            path=path,
            row=wrong,
        )
    names = dict.fromkeys(name for value in objects for name in value)
    return {name: [value.get(name) for value in objects] for name in names}


def read_cells(
    path: Path, separator: str | None = None, header: bool = True, quoted: bool = True
) -> dict[str, list[str]]:
    """Return all cells of a CSV file, by column. Without `quoted`, double quotes are part of a cell.

    Raises:
        DataError: The file is not a table.
    """
    cells: dict[str, list[str]] = _read_csv(path, _detect_layout(path, separator, header, quoted), None).to_pydict()
    return cells


def guess_kinds(path: Path) -> dict[str, str]:
    """Return for each column of a file what its first rows look like.

    That is "image", "text", "short text" (as few words as a name or a title), "number", "amount" (fractions, or too
    many different numbers for classes), "id" (row numbers and dates, by their name), or "other".

    Raises:
        DataError: The file cannot be read, or is not a table.
    """
    if path.suffix.lower() != ".parquet":
        layout = _detect_layout(path, None, True, strict=False)
        rows = [row for row in layout.rows if len(row) == len(layout.names)]
        return {name: _guess_kind(name, [row[i].strip() for row in rows]) for i, name in enumerate(layout.names)}
    file = parquet.File(path)
    return _guess_kinds(file.schema, lambda name: file.read_first(name, _SAMPLE))


def guess_column_kinds(table: Any) -> dict[str, str]:
    """Return the kinds of the columns of a `pyarrow.Table`, as `guess_kinds`."""
    return _guess_kinds(table.schema, lambda name: table.column(name).slice(0, _SAMPLE).to_pylist())


def _guess_kinds(schema: Any, read_first: Callable[[str], Sequence[Any]]) -> dict[str, str]:
    from pyarrow import types

    kinds = {}
    for column in schema:
        if types.is_struct(column.type) or types.is_binary(column.type) or types.is_large_binary(column.type):
            kinds[column.name] = "image" if column.name.lower() in ("img", "image", "images") else "other"
        else:
            is_plain = parquet.is_text(column.type) or (_is_number(column.type) and not types.is_boolean(column.type))
            values = read_first(column.name) if is_plain else ()
            kinds[column.name] = _guess_kind(column.name, ["" if one is None else str(one) for one in values])
    return kinds


def _guess_kind(name: str, texts: Sequence[str]) -> str:
    filled = [text for text in texts if text.strip().lower() not in MISSING]
    if _ID.search(name) or _DATE.search(name) or not filled:
        return "id" if filled else "other"
    if all(_NUMBER.fullmatch(text.strip()) for text in filled):
        numbers = [float(text) for text in filled]
        is_amount = len(set(numbers)) > _MAX_CLASSES or any(not value.is_integer() for value in numbers)
        return "amount" if is_amount else "number"
    words = sum(map(_count_words, filled)) / len(filled)
    is_mostly = len(set(filled)) > len(filled) * 0.8 and len(filled) * 2 > len(texts)
    if is_mostly and words >= (1 if name.lower() in TEXT_COLUMNS else _WORDS) and not _is_date(filled[0]):
        return "text" if words >= _MANY_WORDS else "short text"
    return "other"


def _count_words(text: str) -> float:
    """Return the words of a text, numbers aside; two characters of a script without spaces are one."""
    dense = sum(character >= "\u2e80" for character in text)
    return dense / 2 or sum(any(map(str.isalpha, word)) for word in text.split())


def check_names(source: Path | str, names: list[str]) -> list[str]:
    """Check and return the names of columns.

    Raises:
        DataError: A name occurs twice, or is too long.
    """
    path = source if isinstance(source, Path) else None
    for name, count in Counter(names).items():
        if count > 1:
            raise DataError(f'{source} has two columns "{truncate(name)}". Rename one of them.', path=path, column=name)
        if len(name) > _LONGEST_NAME:
            raise DataError(
                f'{source}: the name of column "{truncate(name)}" has {len(name):,} characters. Set header = false if '
                "the first line has no names.",
                path=path,
                column=name,
            )
    return names


def _is_number(kind: Any) -> bool:
    from pyarrow import types

    return types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)


# ---- CSV by pyarrow --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Layout:
    """The layout of a CSV file, with its first rows after the names."""

    separator: str
    names: list[str]
    header: bool
    skip: int  # empty lines and comments before the first row
    rows: list[list[str]]
    quoting: Literal[0, 3]  # of the csv module


def _detect_layout(
    path: Path, separator: str | None, header: bool, quoted: bool = True, strict: bool = True
) -> _Layout:
    """Detect the layout from the first lines of a CSV file. `strict`: refuse data in place of names."""
    if separator is not None and (len(separator) != 1 or separator in '"\r\n'):
        raise DataError(f"separator must be one character, such as ; or a tab, got {separator!r}.", key="separator")
    lines = _read_first_lines(path)
    skip = next((i for i, line in enumerate(lines) if line.strip() and not line.startswith("#")), len(lines))
    comment = lines[skip - 1] if skip and lines[skip - 1].startswith("#") else ""
    quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE
    candidates = []
    for mark in [separator] if separator else SEPARATORS:
        rows, first = _split(lines[skip:], mark, quoting), _split([comment], mark, quoting)
        is_header = bool(first and rows and len(first[0]) == len(rows[0]) > 1)  # whose first name begins with #
        candidates.append((mark, skip - is_header, [*first, *rows] if is_header else rows))
    if not candidates[0][2]:
        raise DataError(f"{path} is empty.", path=path)
    mark, skip, rows = max(candidates, key=lambda candidate: _count_columns(candidate[2]))
    if not header:
        return _Layout(mark, [str(i + 1) for i in range(len(rows[0]))], header, skip, rows, quoting)
    names = [name.strip() or f"column {i + 1}" for i, name in enumerate(rows[0])]
    if strict:
        if _is_data_line(rows[0], rows[1:]):
            raise DataError(
                f"{path} has numbers in its first line instead of column names. Add a line with names, or set header "
                "= false.",
                path=path,
                key="header",
            )
        if any("\ufffd" in name for name in names):
            raise _make_encoding_error(path, "the first line")
        check_names(path, names)
    return _Layout(mark, names, header, skip, rows[1:], quoting)


def _count_columns(rows: Sequence[Sequence[str]]) -> tuple[bool, int]:
    """Return whether all first rows have the same number of cells, more than one, and that number."""
    cells = len(rows[0])
    return cells > 1 and all(len(row) == cells for row in rows[:_FEW_ROWS]), cells


def _is_data_line(first: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    """Return whether a line has at least one number, and otherwise only numbers and texts that occur again below."""
    numbers = [_NUMBER.fullmatch(cell.strip()) is not None for cell in first]
    below = [{row[i] for row in rows if len(row) == len(first)} for i in range(len(first))]
    return any(numbers) and all(n or cell in cells for n, cell, cells in zip(numbers, first, below, strict=True))


def _read_first_lines(path: Path) -> list[str]:
    """Return the first lines of a text file in UTF-8."""
    with files.open_file(path, DataError) as file:
        start = file.read(4)
        if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise _make_encoding_error(path, "it is UTF-16")
        if start == b"PAR1" or start[:2] == b"PK":
            kind = "a Parquet file. Name it .parquet" if start == b"PAR1" else "a compressed file or a spreadsheet"
            raise DataError(f"{path} is {kind}.", path=path)
        file.seek(0)
        text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="replace", newline="")
        lines, size = list[str](), 0
        while len(lines) < _SAMPLE and size < _BLOCK and (line := text.readline(_BLOCK)):
            lines.append(line)
            size += len(line)
        if lines and len(lines[-1]) == _BLOCK:
            raise _make_line_error(path, len(lines), f"more than {_BLOCK:,} characters. Is this a table?")
    return lines


def _split(lines: Sequence[str], separator: str, quoting: Literal[0, 3]) -> list[list[str]]:
    with _lift_cell_limit():
        rows = csv.reader(lines, delimiter=separator, quoting=quoting)
        return [row for row in rows if "".join(row).strip() or len(row) > 1]


@contextlib.contextmanager
def _lift_cell_limit() -> Iterator[None]:
    """Lift the csv module's limit of 131,072 characters per cell, which is global in the process."""
    limit = csv.field_size_limit(1 << 30)
    try:
        yield
    finally:
        csv.field_size_limit(limit)


def _read_csv(path: Path, layout: _Layout, missing: Sequence[str] | None) -> Any:
    """Read a CSV file as texts. `missing` has further cells without a value; None: no cell is null."""
    import pyarrow as pa
    from pyarrow import csv as arrow_csv

    marks = {
        form for mark in (*MISSING, *(missing or ())) for form in (mark, mark.lower(), mark.upper(), mark.capitalize())
    }
    quoted = layout.quoting == csv.QUOTE_MINIMAL
    if not _is_plain(path, quoted):
        _check_rows(path, layout)
    try:
        rows = arrow_csv.read_csv(
            path,
            arrow_csv.ReadOptions(use_threads=False, block_size=_BLOCK, skip_rows=layout.skip,
                                  column_names=layout.names, skip_rows_after_names=int(layout.header)),
            arrow_csv.ParseOptions(delimiter=layout.separator, newlines_in_values=quoted, quote_char=quoted and '"',
                                   invalid_row_handler=lambda row: "error" if row.text.strip() else "skip"),
            arrow_csv.ConvertOptions(column_types=dict.fromkeys(layout.names, pa.string()),
                                     strings_can_be_null=missing is not None,
                                     null_values=sorted({*marks, "NaN", "NaT"})),
        )  # fmt: skip
    except pa.ArrowException as error:
        _check_rows(path, layout)
        raise DataError(f"{path} cannot be read as CSV: {format_cause(error)}", path=path) from None
    has_commas = any(re.fullmatch(r"\s*[+-]?\d*,\d+\s*", cell) for row in layout.rows for cell in row)
    return rows.replace_schema_metadata({"decimal": "," if has_commas else "."} if layout.separator == ";" else {})


def _are_codes(texts: Any) -> bool:
    """Return whether texts are digits that numbers would not give back: 007, +49 30, or more than float64 holds."""
    from pyarrow import compute

    length = compute.binary_length(texts)
    is_long = compute.greater_equal(length, len(str(_EXACT)))
    has_mark = compute.match_substring_regex(texts, r"^\s*(?:\+|0\d)")
    if not compute.any(compute.or_(is_long, has_mark)).as_py():
        return False
    texts = compute.utf8_trim_whitespace(texts)
    if compute.all(compute.match_substring_regex(texts, r"^\+\d[\d ]*$")).as_py():
        return True
    if not compute.all(compute.match_substring_regex(texts, r"^\+?\d+$")).as_py():
        return False
    if compute.any(compute.match_substring_regex(texts, r"^\+?0\d")).as_py():
        return True
    return any(int(text) != int(float(text)) for text in texts.filter(is_long).to_pylist() if text)


def _is_plain(path: Path, quoted: bool) -> bool:
    """Return whether a file has what pyarrow reads as meant.

    It prints a traceback if a row that it hands over is not UTF-8, and reads one cell from an open quote up to the end.
    """
    decoder, quotes = codecs.getincrementaldecoder("utf-8")(), 0
    try:
        with path.open("rb") as file:
            for part in iter(lambda: file.read(1 << 20), b""):
                decoder.decode(part)
                quotes += part.count(b'"')
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return not (quoted and quotes % 2)


def _check_rows(path: Path, layout: _Layout) -> None:
    """Refuse a file with a row of another number of cells, of too many characters or not in UTF-8, or an open quote."""
    line, number = layout.skip + 1, -int(layout.header)
    with files.open_file(path, DataError) as file, _lift_cell_limit():
        text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
        for _ in range(layout.skip):
            text.readline()
        rows = csv.reader(text, delimiter=layout.separator, quoting=layout.quoting, strict=True)
        try:
            for row in rows:
                last = layout.skip + rows.line_num
                is_row = len(row) > 1 or bool("".join(row).strip())
                number += is_row
                if is_row and len(row) != len(layout.names):
                    separator = SEPARATORS.get(layout.separator, layout.separator)
                    reason = f"{len(row)} cells, but the first line has {len(layout.names)}. Put cells that contain the"
                    raise _make_line_error(path, last, f"{reason} separator ({separator}) in double quotes.")
                if sum(map(len, row)) > _BLOCK:
                    raise _make_line_error(
                        path, line, f"more than {_BLOCK:,} characters. Check for a missing double quote."
                    )
                for name, cell in zip(layout.names, row, strict=False):
                    if wrong := re.search("[\udc80-\udcff]", cell):
                        place = f'row {number}, column "{truncate(name)}": byte {ord(wrong[0]) - 0xDC00:#04x}'
                        raise _make_encoding_error(path, place, row=number, column=name)
                line = last + 1
        except csv.Error as error:
            raise _make_line_error(path, line, f"{error}. Check for a missing double quote.") from None


def _make_encoding_error(path: Path, reason: str, **details: Any) -> DataError:
    sentence = f'{path} is not UTF-8 text ({reason}). Save it as UTF-8; spreadsheets call that "CSV UTF-8".'
    return DataError(sentence, path=path, **details)


def _make_line_error(path: Path, line: int, reason: str) -> DataError:
    return DataError(f"{path}, line {line}: {reason}", path=path, row=line)


# ---- kinds of columns ------------------------------------------------------------------------------------------------


class _Stored(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


class NumberForm(_Stored):
    """The format of the numbers of a column.

    Attributes:
        sign: A currency sign or %.
        thousands: Thousands separator.
        decimal: Decimal separator.
    """

    sign: str = ""
    thousands: Literal["", ",", ".", " ", "'"] = ""
    decimal: Literal[".", ","] = "."


PLAIN = NumberForm()


@dataclass(frozen=True, eq=False)
class Column:
    """One column of a table.

    Attributes:
        name: Name in the file.
        kind: Kind of values. A column without values has numbers.
        numbers: float64 [N], NaN for a missing value; empty for texts.
        codes: int64 [N], indices into `texts`, -1 for a missing value; empty except for texts.
        texts: The distinct texts, an arrow array.
        form: Format of the numbers.
        example: The first number, if the format is not plain.
        strange: int64, the rows whose text is not a number.
        is_code: Whether the texts are digits, such as 007.
    """

    name: str
    kind: Literal["numbers", "texts", "dates", "nested values"]
    numbers: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    codes: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    texts: Any = ()
    form: NumberForm = PLAIN
    example: str = ""
    strange: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    is_code: bool = False

    @property
    def missing(self) -> NDArray[np.bool_]:
        """Whether a row has no value, [N]."""
        return self.codes < 0 if self.kind == "texts" else np.isnan(self.numbers)

    def select(self, rows: NDArray[Any]) -> "Column":
        """Return the column with some rows: their numbers, or a mask [N]."""
        texts = self.kind == "texts"
        return replace(self, codes=self.codes[rows]) if texts else replace(self, numbers=self.numbers[rows])

    def encode_values(self) -> tuple[NDArray[np.int64], list[str]]:
        """Return indices into the distinct values (-1 for a missing one), and these as texts: 1 and 1.0 are "1"."""
        if self.kind == "texts":
            return self.codes, self.texts.to_pylist()
        values, codes = np.unique(self.numbers, return_inverse=True)
        texts = [*map(_format_number, values[~np.isnan(values)].tolist())]
        return np.where(np.isnan(self.numbers), -1, codes), texts


def _format_number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


def _is_plain_number(text: str) -> bool:
    """Return whether a text is a number as it is written here: 1, not 1.0 or 01."""
    number = float(text) if _NUMBER.fullmatch(text) else np.inf
    return abs(number) < np.inf and text == _format_number(number)


def detect_columns(
    sheet: TableSheet,
    missing: Sequence[str] = (),
    forms: Mapping[str, NumberForm] | None = None,
    codes: Mapping[str, bool] | None = None,
) -> dict[str, Column]:
    """Return the columns of a table.

    Texts are numbers if all texts of a column are. They may be plain, such as 1.5e3, or have thousands separators,
    decimal commas, a currency sign or a percent sign. Digits that a number would not give back stay texts.

    Args:
        sheet: The table.
        missing: Further texts and numbers that count as missing.
        forms: Format of the numbers of some columns; that of others is detected.
        codes: Whether the values of some columns are texts of digits; of others it is detected.

    Raises:
        DataError: A number is infinite.
    """
    forms, codes = forms or {}, codes or {}
    return {
        name: _detect_column(sheet, name, missing, forms.get(name), codes.get(name))
        for name in sheet.table.column_names
    }


def _detect_column(
    sheet: TableSheet, name: str, missing: Sequence[str], form: NumberForm | None, is_code: bool | None
) -> Column:
    from pyarrow import compute, types

    values = sheet.table.column(name)
    if types.is_integer(values.type) or types.is_decimal(values.type):
        largest = compute.max(compute.abs(compute.cast(values, "float64", safe=False))).as_py() or 0
        if is_code or (is_code is None and largest >= _EXACT):
            values = values.cast("string")
    if parquet.is_text(values.type):
        decimal = (sheet.table.schema.metadata or {}).get(b"decimal", b"").decode()
        marks = MISSING.difference(sheet.texts.get(name, ())).union(mark.strip().lower() for mark in missing)
        column = _detect_text_column(name, values, marks, form, decimal, is_code)
    else:
        values = values.cast(values.type.value_type) if types.is_dictionary(values.type) else values
        column = Column(
            name, "dates" if types.is_temporal(values.type) else "nested values", np.full(len(values), np.nan)
        )
        if _is_number(values.type):
            numbers = compute.cast(values, "float64", safe=False).to_numpy()
            column = Column(name, "numbers", _drop_marks(numbers, missing, values.type))
        elif types.is_null(values.type):
            column = replace(column, kind="numbers")
    infinite = np.isinf(column.numbers)
    if infinite.any():
        row = int(infinite.argmax())
        raise sheet.error(
            name, f'has "{column.numbers[row]}", which is not finite. {_format_advice(str(column.numbers[row]))}', row
        )
    return column


def _format_advice(text: str) -> str:
    return f'Fix the value, or treat it as missing: missing = ["{truncate(text)}"].'


def _drop_marks(numbers: NDArray[np.float64], missing: Sequence[str], kind: Any = None) -> NDArray[np.float64]:
    """Replace numbers that count as missing by NaN. The arrow type counts: -999.9 in fewer bits is another number."""
    from pyarrow import types

    texts = [mark.strip().lower() for mark in missing]
    if kind is not None and types.is_boolean(kind):
        marks = [float(value) for value in (False, True) if str(value).lower() in texts]
    else:
        dtype = kind.to_pandas_dtype() if kind is not None and types.is_floating(kind) else np.float64
        with np.errstate(over="ignore"):
            marks = [float(dtype(text)) for text in texts if _NUMBER.fullmatch(text) or text.strip("+-") == "inf"]
    marked = np.isin(numbers, marks) if marks else np.zeros(0, bool)
    return np.where(marked, np.nan, numbers) if marked.any() else numbers


def _detect_text_column(
    name: str, values: Any, missing: Collection[str], form: NumberForm | None, decimal: str, is_code: bool | None
) -> Column:
    import pyarrow as pa
    from pyarrow import compute, types

    if types.is_dictionary(values.type):
        chunks = values.unify_dictionaries().chunks
    else:  # one dictionary: unifying those of chunks takes seconds if most texts differ
        wide = types.is_string_view(values.type) or values.nbytes >= 1 << 31
        chunks = [(values.cast(pa.large_string()) if wide else values).combine_chunks().dictionary_encode()]
    distinct = chunks[0].dictionary
    codes = np.concatenate([chunk.indices.cast("int64").fill_null(-1).to_numpy() for chunk in chunks])
    # Texts for missing values and unused categories are left out. Texts that differ only in white space are equal.
    texts = compute.utf8_trim_whitespace(distinct)
    marks = pa.array(sorted(missing), texts.type)
    short = compute.less_equal(compute.binary_length(texts), compute.max(compute.binary_length(marks)))
    short = np.flatnonzero(short.to_numpy(zero_copy_only=False))
    empty = compute.is_in(compute.utf8_lower(texts.take(pa.array(short))), marks).to_numpy(zero_copy_only=False)
    used = np.zeros(len(distinct) + 1, bool)
    used[codes] = True
    used[short[empty]] = False
    if not used[:-1].all() or not texts.equals(distinct):
        unified = texts.filter(pa.array(used[:-1])).dictionary_encode()
        places = np.full(len(distinct) + 1, -1)
        places[:-1][used[:-1]] = unified.indices.to_numpy()
        codes, texts = places[codes], unified.dictionary
    if is_code or (is_code is None and len(texts) and _are_codes(texts)):
        return Column(name, "texts", codes=codes, texts=texts, is_code=True)
    form = _detect_form(texts, decimal) if form is None else form
    numbers = np.append(_parse_numbers(texts, form, bool(decimal)), np.nan)
    strange = np.append(np.isnan(numbers[:-1]), False)
    if not strange.any():
        example = "" if form == PLAIN or not len(texts) else texts[int(codes[codes >= 0][0])].as_py()
        return Column(name, "numbers", _drop_marks(numbers[codes], sorted(missing)), form=form, example=example)
    return Column(name, "texts", codes=codes, texts=texts, strange=np.flatnonzero(strange[codes]))


def _detect_form(texts: Any, decimal: str) -> NumberForm:
    """Return the format in which all texts are numbers; plain if there is none.

    `decimal` is the usual separator of a file with semicolons, where 1,234 and 1.234 may be thousands; else "".
    """
    from pyarrow import compute

    first = texts[0].as_py() if len(texts) else ""
    if not re.search(r"\d", first):
        return PLAIN
    signs = [mark for mark in first if mark == "%" or unicodedata.category(mark) == "Sc"]
    sign = signs[0] if signs and compute.all(compute.match_substring(texts, signs[0])).as_py() else ""
    order: list[tuple[str, str]] = [("", "."), (",", "."), (".", ","), ("'", "."), (" ", "."), (" ", ",")]
    if decimal and (sign or compute.any(compute.match_substring(texts, "." if decimal == "," else ",")).as_py()):
        order.sort(key=lambda marks: marks[1] != ",")
    for thousands, mark in order:
        form = NumberForm.model_validate({"sign": sign, "thousands": thousands, "decimal": mark})
        if all(not np.isnan(_parse_numbers(some, form, bool(decimal))).any() for some in (texts[:_SAMPLE], texts)):
            return form
    return PLAIN


def _parse_numbers(texts: Any, form: NumberForm, decimal_comma: bool) -> NDArray[np.float64]:
    """Parse texts as numbers [N], with NaN for other texts. A number without the sign of the form is valid, too."""
    import pyarrow as pa
    from pyarrow import compute

    if form.sign:
        texts = compute.replace_substring_regex(texts, rf"\s*{re.escape(form.sign)}\s*", "", max_replacements=1)
    if form.thousands:
        mark = {" ": r"[ \x{a0}\x{202f}]", "'": r"['\x{2019}]"}.get(form.thousands, re.escape(form.thousands))
        grouped = rf"^[+-]?(?:[1-9]\d{{0,2}}(?:{mark}\d{{3}})+|\d+)(?:{re.escape(form.decimal)}\d*)?$"
        ungrouped = compute.replace_substring_regex(texts, mark, "")
        texts = compute.if_else(compute.match_substring_regex(texts, grouped), ungrouped, pa.scalar("", texts.type))
    if form.decimal == "," or (decimal_comma and form == PLAIN):
        texts = compute.replace_substring_regex(texts, r"^([^.,]*),([^.,]*)$", r"\1.\2")
    fits = compute.match_substring_regex(texts, f"^(?:{_NUMBER.pattern}|-?(?i:inf(?:inity)?))$")
    if not compute.any(fits).as_py():
        return np.full(len(texts), np.nan)
    numbers = compute.cast(compute.if_else(fits, texts, pa.scalar(None, texts.type)), "float64")
    return numbers.to_numpy(zero_copy_only=False)


def _check_numbers(sheet: TableSheet, column: Column) -> NDArray[np.float64]:
    """Return a column as numbers, with NaN for missing values; refuse one with other values."""
    if column.kind in ("dates", "nested values"):
        raise sheet.error(column.name, f"has {column.kind}, but numbers are needed.")
    if column.kind == "texts":
        row = int(column.strange[0])
        text = _find_text(sheet, column, row)
        raise sheet.error(column.name, f'has "{truncate(text)}", which is not a number. {_format_advice(text)}', row)
    return column.numbers


def _find_text(sheet: TableSheet, column: Column, row: int) -> str:
    return str(sheet.table.column(column.name)[row].as_py()).strip()


def _is_date(text: str) -> bool:
    if len(text) > 40 or not any(mark in text for mark in "-/. :"):
        return False
    with contextlib.suppress(ValueError):
        datetime.fromisoformat(text)
        return True
    for form in _DATES:
        with contextlib.suppress(ValueError):
            datetime.strptime(text, form)
            return True
    return False


# ---- the encoding ----------------------------------------------------------------------------------------------------

Finite = Annotated[float, pydantic.Field(allow_inf_nan=False)]
Positive = Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]


class Number(_Stored):
    """A column of numbers, encoded as (value - mean) / std. A missing value becomes 0.

    Attributes:
        name: Name of the column.
        mean: Mean of the training rows.
        std: Standard deviation of the training rows, with n in the denominator.
        missing: Whether a second feature marks missing values with 1.
        form: Format of the numbers; left out of the file if plain.
    """

    kind: Literal["number"] = "number"
    name: str
    mean: Finite
    std: Positive
    missing: bool = False
    form: NumberForm = PLAIN

    @property
    def features(self) -> list[str]:
        """The names of the column's features."""
        return [self.name, *([f"{self.name} is missing"] if self.missing else [])]


class Category(_Stored):
    """A column of categories, encoded as a feature each. For another or a missing value all are 0.

    Attributes:
        name: Name of the column.
        values: The categories.
    """

    kind: Literal["category"] = "category"
    name: str
    values: Annotated[tuple[str, ...], pydantic.Field(min_length=1)]

    @property
    def features(self) -> list[str]:
        """The names of the column's features."""
        return [f"{self.name} = {value}" for value in self.values]


class Label(_Stored):
    """The label column.

    Attributes:
        name: Name of the column.
        classes: The classes of a classification, in order.
        mean: For a regression, the mean of the training rows.
        std: For a regression, the standard deviation of the training rows.
        form: For a regression, the format of the numbers; left out of the file if plain.
    """

    name: str
    classes: tuple[str, ...] = ()
    mean: Finite = 0.0
    std: Positive = 1.0
    form: NumberForm = PLAIN


class TableEncoder(_Stored):
    """The encoding of a table's columns as numbers, stored as `columns.json`.

    Attributes:
        format: Format of the file.
        task: The task.
        label: The label column.
        columns: The feature columns, in the model's order.
        missing: Further texts and numbers that count as missing.
        codes: Columns of digits that are texts, such as 007; left out of the file if there are none.
    """

    format: Literal[1] = 1
    task: Task
    label: Label
    columns: Annotated[tuple[Annotated[Number | Category, pydantic.Field(discriminator="kind")], ...],
                       pydantic.Field(min_length=1)]  # fmt: skip
    missing: tuple[str, ...] = ()
    codes: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, text: str, source: str) -> "TableEncoder":
        """Return the encoder of a `columns.json`.

        Args:
            text: Content of the file.
            source: Name of the file in messages.

        Raises:
            DataError: The content is not a valid encoder.
        """
        try:
            encoder = cls.model_validate(parse_json(text))
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"]) or "it"
            raise DataError(f"{source} does not describe columns: {truncate(key)}: {first['msg'].lower()}.") from None
        except ValueError as error:
            raise DataError(f"{source} is damaged: {error}.") from None
        names, classes = [column.name for column in encoder.columns], encoder.label.classes
        if len(set(names)) < len(names) or len(classes) > MAX_CLASSES:
            raise DataError(f"{source} does not describe columns: one occurs twice, or there are too many classes.")
        if encoder.task == "classification" and not classes:
            raise DataError(f"{source} does not describe columns: a classification has classes.")
        return encoder

    def to_json(self) -> str:
        """Return the text of `columns.json`."""
        payload = self.model_dump(mode="json")
        for entry in (payload["label"], *payload["columns"]):
            if entry.get("form") == PLAIN.model_dump():
                del entry["form"]
        if not self.codes:
            del payload["codes"]
        return escape_controls(json.dumps(payload, indent=1, ensure_ascii=False, allow_nan=False)) + "\n"

    @property
    def features(self) -> list[str]:
        """The names of the features, [features]."""
        return [feature for column in self.columns for feature in column.features]

    @property
    def number_forms(self) -> dict[str, NumberForm]:
        """The format of each column whose numbers are not plain."""
        columns: list[Label | Number] = [self.label, *(c for c in self.columns if isinstance(c, Number))]
        return {column.name: column.form for column in columns if column.form != PLAIN}

    def detect_columns(self, sheet: TableSheet, missing: Sequence[str]) -> dict[str, Column]:
        """Return the columns of a table in the form of the training rows (see the function of this name)."""
        names = sheet.table.column_names
        forms = dict.fromkeys(names, PLAIN) | self.number_forms
        categories = {column.name: column.values for column in self.columns if isinstance(column, Category)}
        categories |= {self.label.name: self.label.classes}
        texts = {name for name, values in categories.items() if not all(map(_is_plain_number, values))}
        codes = {name: name in self.codes or name in texts for name in names}
        return detect_columns(_name_truth_values(sheet, categories), missing, forms, codes)

    def transform(self, sheet: TableSheet, columns: Mapping[str, Column]) -> tuple[NDArray[np.float32], list[str]]:
        """Encode rows as float32 [N, features]; return them with notes.

        Args:
            sheet: The table, for messages.
            columns: Its columns, with all or some rows.

        Raises:
            DataError: A column is missing, or a value is not a number in a column of numbers.
        """
        for encoding in self.columns:
            sheet.check_column(encoding.name, ", which the model needs")
        x = np.zeros((len(columns[self.columns[0].name].missing), len(self.features)), dtype=np.float32)
        notes, start = [], 0
        for encoding in self.columns:
            column = columns[encoding.name]
            features = x[:, start : start + len(encoding.features)]
            start += len(encoding.features)
            if isinstance(encoding, Number):
                values = _check_numbers(sheet, column)
                with np.errstate(over="ignore"):
                    features[:, 0] = np.where(column.missing, 0.0, (values - encoding.mean) / encoding.std)
                if not np.isfinite(features[:, 0]).all():
                    reason = "has a value too far from those of the training rows. Fix the value."
                    raise sheet.error(column.name, reason)
                if encoding.missing:
                    features[:, 1] = column.missing
                continue
            codes, texts = column.encode_values()
            numbers = {value: number for number, value in enumerate(encoding.values)}
            codes_of_row = np.array([*(numbers.get(text, -1) for text in texts), -1])[codes]
            rows = np.flatnonzero(codes_of_row >= 0)
            features[rows, codes_of_row[rows]] = 1.0
            unknown = np.flatnonzero((codes_of_row < 0) & (codes >= 0))
            if len(unknown):
                notes.append(
                    f"{len(unknown)} row{'s have a value' if len(unknown) > 1 else ' has a value'} of "
                    f'"{truncate(column.name)}", such as "{truncate(texts[codes[unknown[0]]])}", that is written '
                    "otherwise in the training rows, or rare or missing there. It is encoded as no category."
                )
        return x, notes


def _name_truth_values(sheet: TableSheet, categories: Mapping[str, Sequence[str]]) -> TableSheet:
    """Return the sheet with texts in place of booleans where the training rows have the words true and false."""
    import pyarrow as pa
    from pyarrow import compute, types

    table = sheet.table
    for place, name in enumerate(table.column_names):
        words = {value.lower(): value for value in categories.get(name, ())}
        if types.is_boolean(table.column(place).type) and words and words.keys() <= {"true", "false"}:
            texts = [pa.scalar(words.get(word, word)) for word in ("true", "false")]
            table = table.set_column(place, name, compute.if_else(table.column(place), *texts))
    return replace(sheet, table=table)


def _fit_encoder(
    sheet: TableSheet, columns: Mapping[str, Column], label: Label, task: Task, options: TableOptions,
    train: NDArray[np.int64],
) -> tuple[TableEncoder, list[str]]:  # fmt: skip
    """Fit the encoding to the training rows; return it with notes, the first on the number of columns of each kind."""
    encodings: list[Number | Category] = []
    left_out: dict[str, list[str]] = {}
    rare = []
    for name, column in columns.items():
        if name in (label.name, options.groups) or name in options.drop:
            continue
        encoding: Number | Category | str
        if column.kind == "texts" or name in options.categories:
            encoding, count = _fit_category(sheet, column, train, name in options.categories)
            rare += [f"{name} ({count})"] if count > MAX_CATEGORIES else []
        else:
            encoding = _fit_number(sheet, column, train)
        if isinstance(encoding, str):
            left_out.setdefault(encoding, []).append(name)
        else:
            encodings.append(encoding)
    notes = [f"Left out, because {reason}: {_list_some(names)}." for reason, names in left_out.items()]
    notes += ["Set data.text to train on texts instead."] if _FREE_TEXT in left_out else []
    features = sum(len(encoding.features) for encoding in encodings)
    if not 0 < features <= _MAX_FEATURES:
        reason = f"{features:,} features, more than {_MAX_FEATURES:,}" if features else "no usable feature column"
        remedy = "Leave columns out: drop = [...]." if features else " ".join(notes)
        raise DataError(f"{sheet.path} has {reason}. {remedy}".rstrip(), path=sheet.path, key="drop")
    numbers = [encoding for encoding in encodings if isinstance(encoding, Number)]
    filled = [f"{encoding.name}{'' if encoding.missing else ' (outside of training only)'}" for encoding in numbers
              if columns[encoding.name].missing.any()]  # fmt: skip
    if filled:
        notes.append(f"Missing values are replaced by the mean and marked by a feature: {_list_some(filled)}.")
    if rare:
        notes.append(f"Only the {MAX_CATEGORIES} most frequent categories are used: {_list_some(rare)}.")
    kinds = ((len(numbers), "numeric column", "numeric columns"),
             (len(encodings) - len(numbers), "column of categories", "columns of categories"))  # fmt: skip
    counts = " and ".join(f"{count} {one if count == 1 else many}" for count, one, many in kinds if count)
    used = {label.name, options.groups, *(encoding.name for encoding in encodings)}
    codes = [column.name for column in columns.values() if column.is_code and column.name in used]
    if codes:
        some = [f'{name} (such as "{truncate(columns[name].texts[0].as_py(), 30)}")' for name in codes]
        notes.append(f"Kept as text, because numbers lose leading zeros, signs or digits: {_list_some(some)}.")
    encoder = TableEncoder(
        task=task, label=label, columns=tuple(encodings), missing=options.missing, codes=tuple(codes)
    )
    forms = [f'{name} (such as "{truncate(columns[name].example, 30)}")' for name in encoder.number_forms]
    notes += [f"Read as numbers: {_list_some(forms)}."] if forms else []
    return encoder, [counts, *notes]


def _fit_number(sheet: TableSheet, column: Column, train: NDArray[np.int64]) -> Number | str:
    """Return the encoding of a column of numbers, or the reason to leave it out."""
    if column.kind != "numbers" or _DATE.search(column.name):
        return f"they hold {'dates' if column.kind == 'numbers' else column.kind}"
    if column.missing.all():
        return "they are empty"
    if _is_row_number(column):
        return "they number the rows"
    values = column.numbers[train]
    missing = np.isnan(values)
    values = values[~missing]
    if not len(values) or values.min() == values.max():
        return "they are the same in all training rows"
    with np.errstate(over="ignore", invalid="ignore"):
        mean, std = float(values.mean()), float(values.std())
    if not np.isfinite(mean) or not np.isfinite(std) or not std > 0:
        reason = "has numbers that are too large or too near to each other to compute with. Fix them, or leave it out"
        raise sheet.error(column.name, f'{reason}: drop = ["{truncate(column.name)}"].', key="drop")
    return Number(name=column.name, mean=mean, std=std, missing=bool(missing.any()), form=column.form)


def _fit_category(
    sheet: TableSheet, column: Column, train: NDArray[np.int64], is_given: bool
) -> tuple[Category | str, int]:
    """Return the encoding of a column of categories or the reason to leave it out, and the number of categories."""
    if column.kind in ("dates", "nested values"):
        return f"they hold {column.kind}", 0
    if not is_given:
        codes = column.codes[column.codes >= 0]
        sample = [column.texts[code].as_py() for code in codes[:_SAMPLE].tolist()]
        rows, distinct = len(codes), len(np.unique(codes))
        if sample and all(map(_is_date, sample)):
            return "they hold dates", 0
        strange = len(column.strange)
        if 0 < strange < rows and strange * 10 <= rows:  # probably a typo, or a mark for a missing value
            row = int(column.strange[0])
            text = truncate(_find_text(sheet, column, row))
            raise sheet.error(
                column.name,
                f'holds numbers, but {strange} of {rows} values {"are" if strange > 1 else "is"} none, such as "{text}"'
                f' here. Fix it, treat it as missing (missing = ["{text}"]), or treat the column as categories '
                f'(categories = ["{truncate(column.name)}"]).',
                row,
            )
        if distinct > _MAX_TEXTS or (rows >= _FEW_ROWS and distinct > rows / 2):
            long = sum(len(text.split()) > 2 for text in sample) > len(sample) / 2
            return _FREE_TEXT if long else "nearly every row has a different value", 0
    codes, texts = column.encode_values()
    if len(texts) > _MAX_TEXTS:
        raise sheet.error(column.name, "has too many distinct values for categories.")
    codes = codes[train]
    counts = np.bincount(codes[codes >= 0], minlength=len(texts)).tolist()
    names = {text: count for text, count in zip(texts, counts, strict=True) if count}
    if len(names) < 2 and not (names and column.missing.any()):
        return "they are the same in all training rows", 0
    frequent = sorted(names, key=lambda name: (-names[name], name))[:MAX_CATEGORIES]
    return Category(name=column.name, values=tuple(sorted(frequent))), len(names)


def _is_row_number(column: Column) -> bool:
    values = column.numbers
    if len(values) < _FEW_ROWS or column.missing.any() or not bool((values == np.floor(values)).all()):
        return False
    if bool((np.diff(values) == 1).all()) and values[0] in (0, 1):
        return True
    return bool(_ID.search(column.name)) and len(np.unique(values)) == len(values)


def _list_some(names: Sequence[str]) -> str:
    return join_some([truncate(name) for name in names], _SHOWN)


# ---- labels and groups -----------------------------------------------------------------------------------------------


def _find_label(sheet: TableSheet, options: TableOptions) -> str:
    if options.label is not None:
        return sheet.check_column(options.label, ", the label column")
    names = [name for name in sheet.table.column_names if name not in options.drop and name != options.groups]
    if not names:
        raise DataError(f"{sheet.path} has no columns left. Shorten drop.", path=sheet.path)
    return find_usual_label(names) or names[-1]


def find_usual_label(names: Iterable[str]) -> str | None:
    """Return the column with the first usual name of a label; None without one."""
    return min((name for name in names if name.lower() in LABELS), key=lambda n: LABELS.index(n.lower()), default=None)


def _check_label(sheet: TableSheet, column: Column) -> None:
    """Refuse a column that cannot be the label."""
    reason = ""
    if column.kind in ("dates", "nested values"):
        reason = f"has {column.kind}, but the label must have classes or numbers"
    elif column.missing.all():
        reason = "has no values"
    elif len(column.texts) > _MAX_TEXTS:
        some = ", ".join(f'"{truncate(text.as_py(), 30)}"' for text in column.texts[:3])
        reason = f'has too many distinct texts for classes: {some}, ... For labeled texts, set name = "text"'
    if reason:
        reason = f'is the label, but {reason}. Name another column: label = "...".'
        raise sheet.error(column.name, reason, key="label")


def _fit_label(sheet: TableSheet, column: Column, task: Task | None) -> tuple[Label, Task]:
    """Return the label (for a regression without mean) and the task."""
    texts = column.encode_values()[1]
    numbers = column.numbers[~column.missing] if column.kind == "numbers" else np.full(1, np.nan)
    if task is None:
        few = bool((numbers == np.floor(numbers)).all()) and len(texts) <= _MAX_CLASSES
        task = "classification" if column.kind == "texts" or few else "regression"
    if task == "regression":
        _check_numbers(sheet, column)
        return Label(name=column.name, form=column.form), task
    if len(texts) > _MAX_TEXTS:
        reason = "is the label, but has too many distinct values for classes. For numbers, set"
        raise sheet.error(column.name, f'{reason} task = "regression".', key="task")
    if len(texts) < 2:
        reason = f'is "{truncate(texts[0])}" in every row, so there is nothing to learn. Name another column'
        raise sheet.error(column.name, f'{reason}: label = "...".', key="label")
    return Label(name=column.name, classes=tuple(sorted(texts, key=None if column.kind == "texts" else float))), task


def _encode_labels(sheet: TableSheet, columns: Mapping[str, Column], label: Label, task: Task) -> NDArray[Any] | None:
    """Return the labels of a table: int64 [N] (classification), float64 [N, 1] (regression), or None.

    A row without a label has -1, or NaN.
    """
    column = columns.get(label.name)
    if column is None or (column.kind in ("numbers", "texts") and column.missing.all()):
        return None
    if task == "regression":
        return _check_numbers(sheet, column)[:, None]
    codes, texts = column.encode_values()
    classes = {name: number for number, name in enumerate(label.classes)}
    unknown = np.array([*(text not in classes for text in texts), False])[codes]
    if unknown.any():
        row = int(unknown.argmax())
        some = f"{', '.join(map(truncate, label.classes[:10]))}{', ...' if len(classes) > 10 else ''}"
        reason = f'has "{truncate(texts[codes[row]])}", which is not a class of the model: {some}.'
        raise sheet.error(column.name, reason, row)
    return np.array([*(classes[text] for text in texts), -1], dtype=np.int64)[codes]


def _list_rows(sheet: TableSheet, rows: NDArray[np.int64]) -> str:
    """Return rows of a sheet by their numbers in their files, from 1."""
    starts = np.cumsum([0, *(size for _, _, size in sheet.parts)]).tolist()
    here = [rows[(rows >= start) & (rows < end)] - start + 1 for start, end in itertools.pairwise(starts)]
    lists = zip(here, sheet.parts, strict=True)
    return ", ".join(f"{_list_some([*map(str, some)])} ({path.name})" for some, (_, path, _) in lists if len(some))


def _encode_groups(sheet: TableSheet, column: Column, labeled: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the groups of labeled rows."""
    missing = np.flatnonzero(column.missing & labeled)
    if len(missing):
        reason = f"is the column of groups, but has no value in row {_list_rows(sheet, missing)}. Fill it in, or remove"
        raise sheet.error(column.name, f"{reason} such rows.", int(missing[0]), key="groups")
    if len(column.texts) > _MAX_TEXTS and not column.is_code:
        raise sheet.error(column.name, "has too many distinct texts for groups.", key="groups")
    column = column.select(labeled)
    values = np.array(column.texts.to_pylist())[column.codes] if column.kind == "texts" else column.numbers
    return np.unique(values, return_inverse=True)[1].astype(np.int64)


def read_classes(sheet: TableSheet, label: str, groups: str | None) -> Rows:
    """Return classes and groups of a table, and the numbers of its labeled rows as samples.

    Raises:
        DataError: The label has no classes, or a labeled row has no group.
    """
    columns = detect_columns(sheet)
    _check_label(sheet, columns[label])
    return _read_labels(
        sheet, columns, _fit_label(sheet, columns[label], "classification")[0], "classification", groups
    )


def _read_labels(
    sheet: TableSheet, columns: Mapping[str, Column], label: Label, task: Task, groups: str | None
) -> Rows:
    """Return the labels and groups of the labeled rows, and the numbers of these as samples."""
    y = _encode_labels(sheet, columns, label, task)
    assert y is not None
    labeled = ~columns[label.name].missing
    group = None if groups is None else _encode_groups(sheet, columns[groups], labeled)
    ends = np.cumsum([*sheet.sizes.values()])
    sizes = {split: int(part.sum()) for split, part in zip(sheet.sizes, np.split(labeled, ends[:-1]), strict=True)}
    if not sizes["train"]:
        raise DataError(f"{sheet.path} has no rows with a label to train on.", path=sheet.path)
    return Rows(np.flatnonzero(labeled), y[labeled], sizes, len(label.classes) or 1, label.classes, group)


# ---- data sets -------------------------------------------------------------------------------------------------------


def _make_data(
    name: str, sheet: TableSheet, options: TableOptions, encoder: TableEncoder | None, samples: int | None,
    validation: float, test: float, seed: int,
) -> Data:  # fmt: skip
    """Return a table as a data set. Without an encoder, one is fitted to the training rows."""
    _check_columns(sheet, options)
    label_name = encoder.label.name if encoder else _find_label(sheet, options)
    sheet.check_column(label_name, ", the label column")
    if encoder:
        columns = encoder.detect_columns(sheet, options.missing)
    else:
        columns = _detect_new_columns(sheet, options, label_name)
    _check_label(sheet, columns[label_name])
    label, task = (encoder.label, encoder.task) if encoder else _fit_label(sheet, columns[label_name], options.task)
    rows = _read_labels(sheet, columns, label, task, options.groups)
    columns = {key: column.select(rows.x) for key, column in columns.items()}
    splits = fill_missing_splits(rows.sizes, rows.strata, validation, test, seed, name, samples)
    notes = []
    if unlabeled := sheet.table.num_rows - len(rows.y):
        none = "" if label_name in sheet.texts else "None, "
        notes.append(
            f'{unlabeled} rows without "{truncate(label_name)}" are left out. NA, N/A, NaN, null, {none}? '
            "and - are not labels: rename such a class."
        )
    if encoder is None and options.label is None:
        notes += _describe_label_choice(columns, label_name)
    exact = rows.y if task == "regression" else None
    if exact is not None:
        rows = replace(rows, y=exact.astype(np.float32))
    if encoder is None:
        if exact is not None:
            values = rows.y[splits["train"], 0].astype(np.float64)
            label = label.model_copy(update={"mean": float(values.mean()), "std": float(values.std()) or 1.0})
        encoder, (counts, *further) = _fit_encoder(sheet, columns, label, task, options, splits["train"])
        x, _ = encoder.transform(sheet, columns)
    else:
        x, further = encoder.transform(sheet, columns)
        counts = f"{len(encoder.columns)} columns as {len(encoder.features)} features"
    file = name if sheet.path.stem in splits else sheet.path.name  # train.csv and the like are not informative
    classes = "numbers (regression)" if task == "regression" else f"{len(label.classes)} classes"
    uses = {"test": "testing", "validation": "validation"}
    held_out = " and ".join(f"{len(splits[split])} for {use}" for split, use in uses.items() if len(splits[split]))
    first = (
        f'table {file}: {counts}, label "{truncate(label_name)}" of '
        f"{classes}, {len(rows.y):,} rows; {held_out or 'none'} held out."
    )
    return replace(rows, notes=(first, *notes, *further)).make_data(
        name,
        x,
        splits,
        task=task,
        columns=encoder.to_json(),
        targets=() if exact is None else ((encoder.label.mean,), (encoder.label.std,)),
        exact_targets=exact,
    )


def _detect_new_columns(sheet: TableSheet, options: TableOptions, label: str) -> dict[str, Column]:
    """Return the columns of a table without a given encoding. Digits are numbers if they are a regression's label."""
    forms = dict.fromkeys(options.categories, PLAIN)
    columns = detect_columns(sheet, options.missing, forms, {label: False} if options.task == "regression" else {})
    distinct = len(columns[label].texts)
    if columns[label].is_code and options.task is None and distinct > max(_MAX_CLASSES, sheet.table.num_rows / 2):
        return detect_columns(sheet, options.missing, forms, {label: False})
    return columns


def _describe_label_choice(columns: Mapping[str, Column], label: str) -> list[str]:
    """Say which column is the label where another one may be meant, or several by binary columns right before it."""
    if label.lower() in LABELS:
        others = quote_some([name for name in columns if name.lower() in LABELS and name != label])
        note = f"{others} could be the label as well, and is a feature now. Set [data] label or drop."
        return [note] if others else []
    notes = [f'The label is the last column, "{truncate(label)}". Set [data] label for another.']
    binary = [name if column.kind == "numbers" and bool(np.isin(column.numbers, (0, 1)).all()) else None
              for name, column in columns.items()]  # fmt: skip
    last = [*itertools.takewhile(lambda name: name is not None, reversed(binary))][::-1]
    if len(last) > 1 and last[-1] == label:
        notes.append(
            f'{_list_some([name for name in last[:-1] if name])} have 0 and 1, like the label "{truncate(label)}", and '
            "are features. If they are labels, too, save the samples and a matrix of all labels as arrays (.npz) with "
            'task = "multi_label".'
        )
    return notes


def _check_columns(sheet: TableSheet, options: TableOptions) -> None:
    """Refuse a table that lacks columns of the run file, or has only one column."""
    if len(sheet.table.column_names) < 2:
        raise DataError(
            f"{sheet.path} has only one column, but needs a label and features. Detected separators are comma, "
            "semicolon, tab and bar. Set separator for another one.",
            path=sheet.path,
            key="separator",
        )
    for name in (*options.categories, *options.drop, *([options.groups] if options.groups else [])):
        sheet.check_column(name)


def make_data_in_memory(
    splits: Mapping[str, Any], label: str | None = None, task: Task | None = None, groups: str | None = None,
    categories: tuple[str, ...] = (), drop: tuple[str, ...] = (), missing: tuple[str, ...] = (),
    samples: int | None = None, validation: float = 0.1, test: float = 0.2, seed: int = 0,
) -> Data:  # fmt: skip
    """Return tables in memory as a data set. The label "none" is a class there; a missing one is null.

    `splits` has the `pyarrow.Table` of each split, "train" first. The other arguments are those of `table`.

    Raises:
        DataError: As `table`.
    """
    paths = {split: Path(f'{IN_MEMORY} "{split}"') if len(splits) > 1 else IN_MEMORY for split in splits}
    sheet = make_sheet([(split, paths[split], rows) for split, rows in splits.items()])
    options = TableOptions(label, task, groups, categories, drop, missing)
    sheet = replace(sheet, texts={_find_label(sheet, options): ("none",)})
    return _make_data("table", sheet, options, None, samples, validation, test, seed)


def prepare_table(source: Any, facts: Data, settings: Mapping[str, Any] | None = None, halves: bool = False) -> Data:
    """Return the rows of a file or a folder, or a `pyarrow.Table`, for a trained model (see `transform.KINDS`).

    Rows without a split are for testing. The encoding of the training data has all keys. A missing label is 0.
    """
    encoder = TableEncoder.from_json(facts.columns, "columns.json")
    name, folder, new = "table", Path(), [(IN_MEMORY, source)]
    if isinstance(source, Path):
        name, folder = source.resolve().stem, convert_saved_dataset(source, training=False)
        paths = find_new_tables(folder, (*_CSV, ".parquet", *JSON), lambda _: True) if folder.is_dir() else []
        new = [(file, read_table(file, missing=encoder.missing)) for file in paths]
    if new:
        sheet = make_sheet([("test", path, rows) for path, rows in new])
    else:  # with a training set
        sheet = read_sheet(folder, missing=encoder.missing)
    sheet = replace(sheet, texts={encoder.label.name: [name.lower() for name in encoder.label.classes]})
    columns = encoder.detect_columns(sheet, encoder.missing)
    x, notes = encoder.transform(sheet, columns)
    y = _encode_labels(sheet, columns, encoder.label, encoder.task)
    labeled_rows = None
    if y is not None and (missing := columns[encoder.label.name].missing).any():
        notes.append(f"{int(missing.sum())} of {len(x)} rows have no label, so accuracy is not measured.")
        y = y.copy()
        y[missing], labeled_rows = 0, torch.from_numpy(np.flatnonzero(~missing))
    splits = {"test": np.arange(len(x))}
    if len(sheet.sizes) > 1:
        splits = fill_missing_splits(sheet.sizes, np.zeros(len(x), dtype=np.int64), 0.0, 0.0, 0)
    elif halves:
        strata = np.zeros(len(x), dtype=np.int64) if y is None or encoder.task == "regression" else y
        splits = dict(zip(("validation", "test"), hold_out(splits["test"], strata, 0.5, 0), strict=True))
    more: dict[str, Any] = {"notes": tuple(notes)}
    if encoder.task == "regression":  # all digits of the targets and of their mean
        label, exact = encoder.label, y
        y = None if exact is None else exact.astype(np.float32)
        more |= {"targets": ((label.mean,), (label.std,)), "exact_targets": exact}
    return make_new_data(facts, name, x, y, splits=splits, labeled_rows=labeled_rows, **more)
