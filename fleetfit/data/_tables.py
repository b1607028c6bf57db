"""Tables of text in CSV, TSV and JSON-lines files, with the same questions asked of them as of Parquet files."""

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from fleetfit import paths
from fleetfit.data._decode import need
from fleetfit.data.parquet import File
from fleetfit.errors import DataError

SUFFIXES = (".parquet", ".csv", ".tsv", ".jsonl", ".json")


class Rows(Protocol):
    """One file of rows."""

    path: Path
    rows: int
    columns: list[str]

    def column(self, wanted: str | None, usual: Sequence[str], what: str) -> str:
        """Return the name of a column that is there."""

    def texts(self, column: str) -> list[str]:
        """Return a column as text."""


def opened(path: Path, header: bool) -> Rows:
    """Return the rows of a file, by its suffix.

    Args:
        path: Ends in one of `SUFFIXES`.
        header: Whether the first line of a CSV or TSV file names the columns; they are "1", "2" and so on if not.

    Raises:
        DataError: The file cannot be read, or has another suffix.
        MissingExtra: pyarrow is not installed.
    """
    if path.suffix == ".parquet":
        need("pyarrow", "text", "Reading text from Parquet files")
        return File(path)
    if path.suffix in (".csv", ".tsv"):
        return Cells(path, _separated(path, header))
    if path.suffix in (".jsonl", ".json"):
        return Cells(path, _objects(path))
    raise DataError(f"{path} has no suffix that says what it is; there are {', '.join(SUFFIXES)}.")


class Cells:
    """The columns of one file, in memory."""

    def __init__(self, path: Path, cells: dict[str, list[Any]]) -> None:
        self.path, self._cells = path, cells
        self.columns = list(cells)
        self.rows = len(next(iter(cells.values()), []))

    def column(self, wanted: str | None, usual: Sequence[str], what: str) -> str:
        """Return the name of a column that is there.

        Raises:
            DataError: There is none.
        """
        for name in usual if wanted is None else (wanted,):
            if name in self._cells:
                return name
        asked = f'no column "{wanted}"' if wanted is not None else f"no {what} column ({' or '.join(usual)})"
        raise DataError(
            f'{self.path} has {asked}; its columns are {", ".join(self.columns)}. Give {what} = "...", or header = '
            "false if its first line is no header."
        )

    def texts(self, column: str) -> list[str]:
        """Return a column as text.

        Raises:
            DataError: A row has nothing in it, or what is no single value.
        """
        self.column(column, (), "the column's name:")
        for row, value in enumerate(self._cells[column]):
            if not isinstance(value, str | int) or isinstance(value, bool):
                raise DataError(f'row {row} of {self.path} has {value!r:.80} in column "{column}"; it must be text.')
            if isinstance(value, str) and not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
                raise DataError(f'row {row} of {self.path} has half a character in column "{column}".')
        return [str(value) for value in self._cells[column]]


def _separated(path: Path, header: bool) -> dict[str, list[Any]]:
    """Return the cells of a CSV file (quoted where need be) or a TSV file (never quoted), all of them text."""
    arrow, table = need("pyarrow", "text", "Reading text"), need("pyarrow.csv", "text", "Reading text")
    tab = path.suffix == ".tsv"
    try:
        with io.TextIOWrapper(paths.opened(path, DataError), encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE) if tab else csv.reader(file)
            first = next(reader, [])
        names = first if header else [str(i + 1) for i in range(len(first))]
        if not names:
            return {}
        _check_once(path, names)
        found = table.read_csv(
            path,
            read_options=table.ReadOptions(column_names=names, skip_rows=0, skip_rows_after_names=1 if header else 0),
            parse_options=table.ParseOptions(
                delimiter="\t" if tab else ",", quote_char=False if tab else '"', newlines_in_values=not tab
            ),
            convert_options=table.ConvertOptions(column_types=dict.fromkeys(names, arrow.string())),
        )
    except (OSError, UnicodeDecodeError, csv.Error, arrow.ArrowException) as error:
        raise DataError(f"{path} cannot be read as {path.suffix[1:].upper()} in UTF-8: {error}") from error
    return {name: found.column(i).to_pylist() for i, name in enumerate(names)}


def _check_once(path: Path, names: Sequence[str]) -> None:
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise DataError(f'{path} has more than one column "{twice}".')


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found


def _objects(path: Path) -> dict[str, list[Any]]:
    """Return the values of a file with one JSON object a line, or of one JSON list of objects."""
    content = paths.text_of(path, DataError)
    whole = content.lstrip()[:1] == "["
    objects: list[Any] = []
    for number, part in enumerate([content] if whole else content.split("\n"), 1):
        if part.strip():
            try:
                found = json.loads(part, object_pairs_hook=_each_once)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{'' if whole else f'line {number} of '}{path} is no JSON: {error}") from error
            objects.extend(found if whole else [found])
    wrong = next((i for i, value in enumerate(objects) if not isinstance(value, dict)), None)
    if wrong is not None:
        raise DataError(f"{path} must hold JSON objects, one a line or in one list; row {wrong} is none.")
    names = dict.fromkeys(name for value in objects for name in value)
    return {name: [value.get(name) for value in objects] for name in names}
