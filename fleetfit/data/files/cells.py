"""The columns of a table: of a CSV file row by row, of a Parquet file column by column, bounded whatever the file is.

A CSV file is UTF-8, with or without a byte order mark; cells are separated by a comma, a semicolon, a tab or a bar,
found in the first line. Where semicolons separate, a number may have a decimal comma. Whatever a file has that no table
has (ragged rows, null characters, a line without an end) is said with the row in which it is.
"""

import csv
import io
import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from fleetfit import files
from fleetfit.data.files import parquet
from fleetfit.errors import DataError, did_you_mean, import_optional, truncate

SEPARATORS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "bar"}
MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?", "-", "<na>", "nat"})
"""What a cell without a value may hold, in small letters."""
MOST_COLUMNS = 10_000
_MOST_CELLS = 1 << 29  # of all columns: 4 GiB of numbers
_MOST_VALUES = 1000  # distinct texts of a column that are kept
_LONGEST_LINE = 1 << 22
_LONGEST_NAME = 200  # characters of a column's name
_SAMPLE = 200  # first texts of a column that are kept as they are
_LOOK = 20  # rows from which the separator is guessed
_AT_ONCE = 1 << 15  # rows that are taken apart together


@dataclass(frozen=True, eq=False)
class Column:
    """One column.

    Attributes:
        name: As in the first line.
        numbers: float64 [N], NaN where there is no value or no number.
        codes: Place of each text in `values`, int32 [N], -1 where there is none; None where there are too many.
        values: The distinct texts, in the order in which they come first.
        empty: How many rows have no value.
        strange: How many have a value that is no number.
        first_strange: Row (from 1) and text of the first of those.
        sample: The first texts.
        what: "cells", or what a Parquet file says it is: "dates" or "nested values".
    """

    name: str
    numbers: NDArray[np.float64]
    codes: NDArray[np.int32] | None
    values: tuple[str, ...]
    empty: int
    strange: int
    first_strange: tuple[int, str]
    sample: tuple[str, ...]
    what: str = "cells"

    def __len__(self) -> int:
        return len(self.numbers)


@dataclass(frozen=True, eq=False)
class TableRows:
    """The columns of one file.

    Attributes:
        path: The file.
        columns: By name, in the file's order.
        rows: How many.
    """

    path: Path
    columns: dict[str, Column]
    rows: int

    def column(self, name: str, what: str) -> Column:
        """Return a column.

        Raises:
            DataError: There is none of that name.
        """
        if name not in self.columns:
            known = list(self.columns)
            more = f" and {len(known) - 30} more" if len(known) > 30 else ""
            raise DataError(
                f'{self.path} has no column "{truncate(name)}"{what}; its columns are '
                f"{', '.join(map(truncate, known[:30]))}{more}.{did_you_mean(name, known)}",
                path=self.path,
                column=name,
            )
        return self.columns[name]


def read(path: Path, separator: str | None, header: bool, missing: Sequence[str]) -> TableRows:
    """Read a table.

    Args:
        path: A file that ends in .parquet, or else a file of separated cells.
        separator: Of the cells; None: found out.
        header: Whether the first line names the columns; if not, they are "1", "2" and so on.
        missing: Further texts that mean that there is no value; numbers in a Parquet file that they say have none, too.

    Raises:
        DataError: The file cannot be read, or is no table; or it is a Parquet file, and a key is one of other files.
        MissingExtra: It is a Parquet file and pyarrow is not installed.
    """
    if path.suffix.lower() == ".parquet":
        if separator is not None or not header:
            key, of = ("header", "no first line of names") if separator is None else ("separator", "no separators")
            raise DataError(
                f"{key}: {path} is a Parquet file, which has {of}, and names its columns. Leave {key} out.",
                path=path,
                key=key,
            )
        return _parquet(path, _without_value(missing))
    if path.suffix.lower() in (".gz", ".zip", ".bz2", ".xz", ".zst"):
        raise DataError(f"{path} is packed; unpack it first.", path=path)
    if path.suffix.lower() in (".xls", ".xlsx", ".ods"):
        raise DataError(f"{path} is a spreadsheet; save it as CSV (in UTF-8) first.", path=path)
    return _separated(path, separator, header, _without_value(missing))


def _without_value(missing: Sequence[str]) -> frozenset[str]:
    return MISSING | {mark.strip().lower() for mark in missing}


# ---- separated cells -------------------------------------------------------------------------------------------------


def _separated(path: Path, separator: str | None, header: bool, missing: frozenset[str]) -> TableRows:
    if separator is not None and (len(separator) != 1 or separator in '"\r\n'):
        raise DataError(f"separator must be one character, such as ; or a tab, got {separator!r}.", key="separator")
    found = separator or _guessed(path)
    number = 0
    try:
        with _text(path) as text:
            rows = csv.reader(_lines(text, path), delimiter=found, strict=True)
            first = next((row for row in rows if row), None)
            if first is None:
                raise DataError(f"{path} is empty.", path=path)
            names = _names(path, first, header)
            building = [_Building(name, missing, found == ";") for name in names]
            chunk: list[list[str]] = [] if header else [first]
            for row in rows:
                if not row or (len(names) > 1 and len(row) == 1 and not row[0].strip()):
                    continue
                if len(row) != len(names):
                    raise DataError(
                        f"{path}, line {rows.line_num}: {len(row)} cells, and the first line has {len(names)}. A cell "
                        f"that contains the separator ({SEPARATORS.get(found, found)}) must be in double quotes.",
                        path=path,
                        row=rows.line_num,
                    )
                chunk.append(row)
                if len(chunk) == _AT_ONCE:
                    number = _added(path, building, chunk, number)
                    chunk = []
            number = _added(path, building, chunk, number)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text (a byte {error.object[error.start]:#04x} near byte {error.start:,} of a part)."
            ' Save it as UTF-8; spreadsheets call that "CSV UTF-8".',
            path=path,
        ) from None
    except csv.Error as error:
        raise DataError(
            f"{path}, line {rows.line_num}: {error}. Is a double quote missing?", path=path, row=rows.line_num
        ) from None
    if not number:
        raise DataError(f"{path} has a first line and no rows.", path=path)
    return TableRows(path, {one.name: one.done() for one in building}, number)


def _text(path: Path) -> io.TextIOWrapper:
    file = files.open_file(path, DataError)
    start = file.read(4)
    file.seek(0)
    if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
        file.close()
        raise DataError(f'{path} is UTF-16; save it as UTF-8 (spreadsheets call that "CSV UTF-8").', path=path)
    if start[:4] == b"PAR1" or start[:2] == b"PK":
        file.close()
        what = "a Parquet file: name it so, .parquet" if start[:4] == b"PAR1" else "a packed file or a spreadsheet"
        raise DataError(f"{path} is {what}.", path=path)
    return io.TextIOWrapper(file, encoding="utf-8-sig", newline="")


def _lines(text: io.TextIOWrapper, path: Path) -> Iterator[str]:
    """Yield lines; one without an end is refused before it fills the memory."""
    number = 0
    while line := text.readline(_LONGEST_LINE):
        number += 1
        if len(line) == _LONGEST_LINE and not line.endswith("\n"):
            raise DataError(
                f"{path}, line {number}: more than {_LONGEST_LINE:,} characters. Is this a table?",
                path=path,
                row=number,
            )
        if "\0" in line:
            raise DataError(f"{path}, line {number}: a null character. Is this a table of text?", path=path, row=number)
        yield line


def _guessed(path: Path) -> str:
    """Return the separator that cuts the first rows into equally many cells, the most there are."""
    try:
        with _text(path) as text:
            head = [line for _, line in zip(range(_LOOK), _lines(text, path), strict=False)]
    except UnicodeDecodeError:
        return ","  # whoever reads on says what is wrong
    if not any(line.strip() for line in head):
        raise DataError(f"{path} is empty.", path=path)
    best, most = "", (0, 0)
    for one in SEPARATORS:
        try:
            rows = [row for row in csv.reader(head, delimiter=one) if row]
        except csv.Error:
            return ","  # whoever reads on says what is wrong
        cells = len(rows[0])
        alike = sum(len(row) == cells for row in rows)
        if cells > 1 and (alike == len(rows), cells) > most:
            best, most = one, (alike == len(rows), cells)
    if not best:
        raise DataError(
            f"{path} has one column only. A table has several, separated by a comma, a semicolon, a tab or a bar; "
            'give another one as separator = "...".',
            path=path,
            key="separator",
        )
    return best


def first_rows(path: Path, rows: int) -> tuple[list[str], list[list[str]]]:
    """Return the names of the columns of a CSV file, and its first rows.

    Raises:
        DataError: It cannot be read, or is no table.
    """
    try:
        separator = _guessed(path)
        with _text(path) as text:
            reader = csv.reader(_lines(text, path), delimiter=separator)
            first = next((row for row in reader if row), [])
            found = [row for _, row in zip(range(rows), reader, strict=False)]
    except UnicodeDecodeError:
        raise DataError(
            f'{path} is not UTF-8 text. Save it as UTF-8; spreadsheets call that "CSV UTF-8".', path=path
        ) from None
    except csv.Error as error:
        raise DataError(f"{path} cannot be read as CSV: {error}. Is a double quote missing?", path=path) from None
    return [name.strip() or f"column {place}" for place, name in enumerate(first, 1)], found


def _names(path: Path, first: Sequence[str], header: bool) -> list[str]:
    """Return the names of the columns.

    Raises:
        DataError: There are too many, or one is there twice.
    """
    if len(first) > MOST_COLUMNS:
        raise DataError(f"{path} has {len(first):,} columns; there may be {MOST_COLUMNS:,}.", path=path)
    if not header:
        return [str(place) for place in range(1, len(first) + 1)]
    if len(first) > 1 and all(_number(cell.strip(), False) is not None for cell in first):
        raise DataError(
            f"{path} has numbers in its first line, where the names of the columns should be. Add a line with names, "
            "or set header = false.",
            path=path,
            key="header",
        )
    names = [name.strip() or f"column {place}" for place, name in enumerate(first, 1)]
    return each_once(path, names)


def each_once(path: Path | str, names: list[str]) -> list[str]:
    """Return the names of the columns.

    Raises:
        DataError: One is there twice, or is no name.
    """
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise DataError(f'{path} has two columns "{truncate(name)}"; rename one of them.', path=path, column=name)
        if len(name) > _LONGEST_NAME:
            raise DataError(f'{path}: a column is called "{truncate(name)}", with {len(name):,} characters. Is the '
                            "first line one of names?", path=path, column=name)  # fmt: skip
        seen.add(name)
    return names


def _added(path: Path, building: "Sequence[_Building]", chunk: Sequence[Sequence[str]], before: int) -> int:
    if (before + len(chunk)) * len(building) > _MOST_CELLS:
        raise DataError(
            f"{path} has more than {_MOST_CELLS:,} cells; make it smaller, or use arrays (.npz).", path=path
        )
    for one, cells in zip(building, zip(*chunk, strict=True), strict=False):
        one.add(path, cells, before)
    return before + len(chunk)


def _number(text: str, comma: bool) -> float | None:
    """Return the number that a text is, or None."""
    if "_" in text:
        return None
    if comma and "," in text and "." not in text:
        text = text.replace(",", ".", 1)
    try:
        return float(text)
    except ValueError:
        return None


@dataclass
class _Building:
    """A column while its cells come in."""

    name: str
    missing: frozenset[str]
    comma: bool
    parts: list[NDArray[np.float64]] = field(default_factory=list)
    codes: Any = field(default_factory=lambda: array("i"))
    known: dict[str, int] = field(default_factory=dict)
    many: bool = False
    empty: int = 0
    strange: int = 0
    first_strange: tuple[int, str] = (0, "")
    sample: list[str] = field(default_factory=list)

    def add(self, path: Path, cells: Sequence[str], before: int) -> None:
        """Take cells in."""
        numbers = np.full(len(cells), np.nan)
        for row, cell in enumerate(cells):
            text = cell.strip()
            if text.lower() in self.missing:
                self.empty += 1
                self._coded(None)
                continue
            found = _number(text, self.comma)
            if found is not None and not math.isfinite(found):
                raise DataError(
                    f'{path}, row {before + row + 1}: "{truncate(text)}" in column "{truncate(self.name)}" is not '
                    f'finite. Fix the value, or treat it as missing: missing = ["{truncate(text)}"].',
                    path=path,
                    row=before + row + 1,
                    column=self.name,
                )
            if found is None:
                self.strange += 1
                if self.strange == 1:
                    self.first_strange = (before + row + 1, text)
            else:
                numbers[row] = found
            if len(self.sample) < _SAMPLE:
                self.sample.append(text)
            self._coded(text)
        self.parts.append(numbers)

    def _coded(self, text: str | None) -> None:
        if self.many:
            return
        code = -1 if text is None else self.known.setdefault(text, len(self.known))
        self.codes.append(code)
        if len(self.known) > _MOST_VALUES:
            self.many, self.known, self.codes = True, {}, array("i")

    def done(self) -> Column:
        """Return the column."""
        codes = None if self.many else np.array(self.codes, dtype=np.int32)
        return Column(
            self.name, np.concatenate(self.parts), codes, tuple(self.known), self.empty, self.strange,
            self.first_strange, tuple(self.sample),
        )  # fmt: skip


# ---- Parquet ---------------------------------------------------------------------------------------------------------


def _parquet(path: Path, missing: frozenset[str]) -> TableRows:
    import_optional("pyarrow", "tables", "Reading tables from Parquet files")
    file = parquet.File(path)
    names = each_once(path, [name for name in file.columns if not name.startswith("__index_level_")])
    if len(names) > MOST_COLUMNS:
        raise DataError(f"{path} has {len(names):,} columns; there may be {MOST_COLUMNS:,}.", path=path)
    if file.rows * len(names) > _MOST_CELLS:
        raise DataError(
            f"{path} has more than {_MOST_CELLS:,} cells; make it smaller, or use arrays (.npz).", path=path
        )
    if not file.rows:
        raise DataError(f"{path} has no rows.", path=path)
    return TableRows(path, {name: _arrow(file, name, missing) for name in names}, file.rows)


def _arrow(file: parquet.File, name: str, missing: frozenset[str]) -> Column:
    """Return one column of a Parquet file."""
    types, compute = (
        import_optional("pyarrow.types", "tables", "Reading tables"),
        import_optional("pyarrow.compute", "tables", "Tables"),
    )
    values = file.values(name, nulls=True)
    if types.is_dictionary(values.type):
        values = values.dictionary_decode()
    kind, rows = values.type, len(values)
    if types.is_temporal(kind) or types.is_null(kind):
        what = "cells" if types.is_null(kind) else "dates"
        return Column(name, np.full(rows, np.nan), None, (), values.null_count, 0, (0, ""), (), what)
    if types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind):
        numbers = compute.cast(values, "float64", safe=False).to_numpy(zero_copy_only=False).astype(np.float64)
        stored = np.dtype(kind.to_pandas_dtype()) if types.is_floating(kind) else np.dtype(np.float64)
        numbers = _unmarked(numbers, missing, bool if types.is_boolean(kind) else stored)
        infinite = np.flatnonzero(np.isinf(numbers))
        if len(infinite):
            raise DataError(
                f'{file.place(int(infinite[0]))}: column "{truncate(name)}" is not finite. Fix the value, or treat '
                f'it as missing: missing = ["{numbers[infinite[0]]}"].',
                column=name,
                path=file.path,
                row=int(infinite[0]),
            )
        return _of_numbers(name, numbers)
    if not (types.is_string(kind) or types.is_large_string(kind)):
        return Column(name, np.full(rows, np.nan), None, (), values.null_count, 0, (0, ""), (), "nested values")
    building = _Building(name, missing, False)
    for start in range(0, rows, _AT_ONCE):
        building.add(file.path, [v or "" for v in values.slice(start, _AT_ONCE).to_pylist()], start)
    return building.done()


def of_array(name: str, values: Sequence[Any] | NDArray[Any], missing: Sequence[str] = ()) -> Column:
    """Return a column of values in memory: numbers, or whatever their text says; None and NaN are no value."""
    found = np.asarray(values)
    if found.dtype.kind in "biuf":
        return _of_numbers(name, _unmarked(found.astype(np.float64), _without_value(missing), found.dtype))
    if found.dtype.kind == "M":
        return Column(name, np.full(len(found), np.nan), None, (), 0, 0, (0, ""), (), "dates")
    building = _Building(name, _without_value(missing), False)
    building.add(Path("the table"), ["" if v is None or v != v else str(v) for v in found.tolist()], 0)
    return building.done()


def _unmarked(numbers: NDArray[np.float64], missing: frozenset[str], stored: DTypeLike) -> NDArray[np.float64]:
    """Return numbers with NaN where a mark says that there is no value, as it does in a CSV file of the same cells.

    Args:
        numbers: As they are in the file.
        missing: The marks, in small letters; those that are no numbers mark none.
        stored: What the file stores; -999.9 in fewer bits is another number.
    """
    if np.dtype(stored).kind == "b":
        marks = [float(value) for value in (False, True) if str(value).lower() in missing]
    else:
        with np.errstate(over="ignore"):
            said = [number for mark in missing if (number := _number(mark, False)) is not None]
            marks = np.array(said).astype(stored if np.dtype(stored).kind == "f" else np.float64).tolist()
    return np.where(np.isin(numbers, marks), np.nan, numbers)


def _of_numbers(name: str, numbers: NDArray[np.float64]) -> Column:
    distinct = np.unique(numbers[~np.isnan(numbers)])
    codes, values = None, tuple[str, ...]()
    if len(distinct) <= _MOST_VALUES:
        codes = np.where(np.isnan(numbers), -1, np.searchsorted(distinct, numbers)).astype(np.int32)
        values = tuple(text_of(number) for number in distinct.tolist())
    return Column(name, numbers, codes, values, int(np.isnan(numbers).sum()), 0, (0, ""), values[:_SAMPLE])


def text_of(number: float) -> str:
    """Return a number as a class or a category is called: whole ones without a point."""
    return str(int(number)) if number == int(number) else repr(number)
