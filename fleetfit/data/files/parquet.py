"""Read Parquet files: whole tables, and columns of encoded samples, texts, labels and groups.

Such files may be downloaded, so they are untrusted: checksums of pages are verified, and claimed sizes are checked
before allocation.
"""

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetfit.data.dataset import MAX_CLASSES, Data
from fleetfit.data.rows import number_classes
from fleetfit.errors import DataError, FleetFitError, format_cause, quote_some
from fleetfit.files import check_file

_ROWS = 1024  # encoded images in memory at a time
_FEW_ROWS = 1_000_000  # files with more rows must have bytes for them
_PER_BYTE = 8  # rows
_WITHHELD = -1  # a label
_LARGE_BYTES, _RATIO = 1 << 30, 200  # a larger column may have up to this multiple of the file's size


class RowFile:
    """A file of rows with named columns.

    Attributes:
        path: The file.
        columns: The names of its columns.
        rows: Number of rows.
        advice: What else may help if a column is missing.
        numbered: Whether integers as labels are the numbers of the classes; if not, classes are the distinct values.
    """

    path: Path
    columns: list[str]
    rows: int
    advice = ""
    numbered = True

    def texts(self, column: str) -> list[str]:
        """Return a column of text.

        Raises:
            DataError: The column is missing, has other values, or has an empty row.
        """
        raise NotImplementedError

    def read_values(self, column: str, missing: str | None = None) -> NDArray[Any]:
        """Return a column: int64 [N], or text as objects [N].

        Args:
            column: Its name.
            missing: Value for missing values; None: refuse missing values.

        Raises:
            DataError: The column is missing, has other values, or has an empty row.
        """
        raise NotImplementedError

    def class_names(self, column: str) -> tuple[str, ...]:
        """Return the class names of a column of integers, or ()."""
        return ()

    def is_empty(self, column: str) -> bool:
        """Return whether no row has a value in a column, as far as that is known."""
        return False

    def column(self, requested: str | None, usual: Sequence[str], what: str) -> str:
        """Return the name of an existing column.

        Raises:
            DataError: There is none, or more than one.
        """
        for name in usual if requested is None else (requested,):
            if self.columns.count(name) > 1:
                raise DataError(f'{self.path} has more than one column "{name}".', path=self.path, column=name)
            if name in self.columns:
                return name
        problem = f'no column "{requested}"' if requested is not None else f"no {what} column ({' or '.join(usual)})"
        raise DataError(
            f'{self.path} has {problem}. Its columns are {", ".join(self.columns)}. Set {what} = "..."{self.advice}.',
            path=self.path,
        )

    def error(self, reason: str, column: str, row: int | None = None) -> DataError:
        """Return an error on a column, or on its value in a row, from 0."""
        place = f"{self.path}: " if row is None else f"row {row} of {self.path}: "
        return DataError(f'{place}column "{column}" {reason}', path=self.path, row=row, column=column)


class File(RowFile):
    """A Parquet file. Errors of pyarrow become a `DataError`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        from pyarrow import parquet

        check_file(path, DataError)
        with self._convert_errors():
            self._parquet = parquet.ParquetFile(path, memory_map=True, page_checksum_verification=True)
            self.rows = self._parquet.metadata.num_rows
            self.schema = self._parquet.schema_arrow
            self.columns = self.schema.names
        size = path.stat().st_size
        if self.rows < 0 or self.rows > max(_FEW_ROWS, _PER_BYTE * size):
            raise DataError(f"{path} claims {self.rows:,} rows in {size:,} bytes. It is damaged.", path=path)

    @contextlib.contextmanager
    def _convert_errors(self, column: str = "") -> Iterator[None]:
        try:
            yield
        except FleetFitError:
            raise
        except Exception as error:
            what = f' (column "{column}")' if column else ""
            message = f"{self.path} cannot be read as Parquet{what}: {format_cause(error)}"
            raise DataError(message, path=self.path) from None

    def find_bytes_column(self, requested: str | None, usual: Sequence[str], what: str) -> str:
        """Return the name of the column of encoded samples, of any name if no other has bytes (see `column`)."""
        encoded = [field.name for field in self.schema if _has_bytes(field.type)]
        if requested is None and len(encoded) == 1 and not set(usual) & set(self.columns):
            return self.column(encoded[0], (), what)
        return self.column(requested, usual, what)

    def _check_size(self, column: str) -> None:
        """Refuse a column that claims to unpack to more than memory can hold."""
        about = self._parquet.metadata
        parts = [about.row_group(g).column(c) for g in range(about.num_row_groups) for c in range(about.num_columns)]
        size = sum(p.total_uncompressed_size for p in parts if p.path_in_schema.partition(".")[0] == column)
        if size > _LARGE_BYTES and size > _RATIO * self.path.stat().st_size:
            raise self.error(f"claims to unpack to {size:,} bytes. It is damaged.", column)

    def _check_rows(self, column: str, rows: int) -> None:
        if rows != self.rows:
            raise self.error(f"has {rows} rows instead of {self.rows}.", column)

    def read(self, columns: list[str]) -> Any:
        """Return columns as a `pyarrow.Table`."""
        for column in columns:
            self._check_size(column)
        with self._convert_errors():
            rows = self._parquet.read(columns=columns, use_threads=False)
            rows.validate(full=True)
        return rows

    def read_first(self, column: str, count: int) -> list[Any]:
        """Return the first values of a column."""
        with self._convert_errors(column):
            batch = next(self._parquet.iter_batches(batch_size=count, columns=[column]), None)
        return [] if batch is None else list(batch.column(0).to_pylist())

    def _read_plain(self, column: str, missing: str | None = None) -> Any:
        """Return one column without missing values, an arrow array."""
        from pyarrow import types

        self.column(column, (), "the column's name:")
        with self._convert_errors(column):
            values = self.read([column]).column(column).combine_chunks()
        self._check_rows(column, len(values))
        if values.null_count and missing is None:
            raise self.error("has no value.", column, values.is_null().to_pylist().index(True))
        values = values.fill_null(missing) if values.null_count else values
        return values.dictionary_decode() if types.is_dictionary(values.type) else values

    def images(self, column: str, what: str = "image") -> Iterator[list[bytes]]:
        """Yield batches of encoded images, or of other values as bytes."""
        from pyarrow import types

        self.column(column, (), what)
        row = 0
        for batch in self._iter_batches(column):
            values = batch.column(0)
            if not _has_bytes(values.type):
                raise self.error(f"has {values.type}, not the bytes of {what}s.", column)
            encoded = (values.field("bytes") if types.is_struct(values.type) else values).to_pylist()
            if None in encoded:
                raise self.error(f"has no {what}.", column, row + encoded.index(None))
            row += len(encoded)
            yield encoded
        self._check_rows(column, row)

    def _iter_batches(self, column: str) -> Iterator[Any]:
        with self._convert_errors(column):
            self._check_size(column)
            batches = self._parquet.iter_batches(batch_size=_ROWS, columns=[column])
        while True:
            with self._convert_errors(column):
                batch = next(batches, None)
                if batch is not None:
                    batch.validate(full=True)
            if batch is None:
                return
            yield batch

    def texts(self, column: str) -> list[str]:
        """Return a column of text (see `RowFile.texts`)."""
        values = self._read_plain(column)
        if not is_text(values.type):
            raise self.error(f"has {values.type}, but must have text.", column)
        return list(values.to_pylist())

    def read_values(self, column: str, missing: str | None = None) -> NDArray[Any]:
        """Return a column of integers or text (see `RowFile.read_values`)."""
        from pyarrow import types

        values = self._read_plain(column, missing)
        if is_text(values.type):
            return np.array(values.to_pylist(), dtype=object)
        if not types.is_integer(values.type):
            raise self.error(f"has {values.type}, but must have integers or text.", column)
        numbers = values.to_numpy(zero_copy_only=False)
        if numbers.dtype == np.uint64 and len(numbers) and numbers.max() > np.iinfo(np.int64).max:
            raise self.error(f"has {numbers.max()}, above 63 bits.", column, int(numbers.argmax()))
        return np.asarray(numbers.astype(np.int64))

    def class_names(self, column: str) -> tuple[str, ...]:
        """Return the class names of a column in the schema's metadata, or ()."""
        try:
            features = json.loads((self.schema.metadata or {})[b"huggingface"])["info"]["features"]
            names = features[column]["names"]
        except (KeyError, TypeError, ValueError, RecursionError, IndexError):
            return ()
        return tuple(names) if isinstance(names, list) and all(map(_is_name, names)) else ()


def is_text(kind: Any) -> bool:
    """Return whether an arrow type is text, also in a dictionary."""
    from pyarrow import types

    kind = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _has_bytes(kind: Any) -> bool:
    from pyarrow import types

    if types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        kind = kind.field("bytes").type
    return bool(types.is_binary(kind) or types.is_large_binary(kind))


def _is_name(name: object) -> bool:
    return isinstance(name, str) and not any("\ud800" <= c <= "\udfff" for c in name)


def read_values(files: Sequence[RowFile], column: str, missing: str | None = None) -> NDArray[Any]:
    """Return a column of integers or text over all files (see `RowFile.read_values`)."""
    parts = [file.read_values(column, missing) for file in files]
    if len({part.dtype.kind for part in parts}) > 1:
        if files[0].numbered:
            folder = files[0].path.parent
            reason = f'column "{column}" has integers in some files of {folder} and text in others.'
            raise DataError(reason, column=column, path=folder)
        parts = [np.array([*map(str, part.tolist())], dtype=object) for part in parts]
    return np.concatenate(parts)


def encode_values(values: NDArray[Any], by_number: bool = False) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Return the index of each value among the sorted distinct values, and these.

    Args:
        values: Integers, or text as objects [N].
        by_number: Whether texts that are all digits are in the order of their numbers.
    """
    if values.dtype.kind == "O":  # text: NumPy's text arrays reserve the longest length in every row
        texts = sorted(set(values.tolist()))
        if by_number and all(re.fullmatch(r"-?\d+", text) for text in texts):
            texts.sort(key=int)
        codes = {text: number for number, text in enumerate(texts)}
        return np.array([codes[text] for text in values.tolist()], dtype=np.int64), tuple(texts)
    names, indices = np.unique(values, return_inverse=True)
    return indices.astype(np.int64), tuple(str(name) for name in names)


def read_labels(files: Sequence[RowFile], column: str) -> tuple[NDArray[np.int64], int, tuple[str, ...]]:
    """Return a column of labels over all files, the number of classes and their names or ().

    Raises:
        DataError: A label is missing, withheld (-1) or out of range.
    """
    values, numbered = read_values(files, column), files[0].numbered
    if values.dtype.kind == "O" or not numbered:
        y, names = encode_values(values, by_number=not numbered)
        return y, len(names), names
    names = files[0].class_names(column)
    limit, start = len(names) or MAX_CLASSES, 0
    for file in files:
        part = values[start : start + file.rows]
        start += file.rows
        wrong = np.flatnonzero((part < 0) | (part >= limit))
        if len(wrong):
            label = part[wrong[0]]
            advice = "-1 often means that the labels are withheld" if label < 0 else "number the classes from 0"
            reason = f"has label {label}; labels must be in 0..{limit - 1:,} ({advice})."
            raise file.error(reason, column, int(wrong[0]))
    return values, len(names) or int(values.max(initial=0)) + 1, names


def has_withheld_labels(rows: RowFile, label: str) -> bool:
    """Return whether all labels of a file are -1, as in test sets of competitions."""
    values = rows.read_values(label)
    return values.dtype.kind == "i" and bool((values == _WITHHELD).all())


def encode_labels(trained: Data, table: RowFile, column: str) -> NDArray[np.int64] | None:
    """Return a column as classes of the training set; None if all labels are empty or withheld."""
    if table.is_empty(column) or has_withheld_labels(table, column):
        return None
    codes = number_classes(trained)
    values = table.read_values(column).tolist()
    names = table.class_names(column) if isinstance(values[0], int) else ()
    cells = [names[value] if names and 0 <= value < len(names) else str(value) for value in values]
    for row, cell in enumerate(cells):
        if cell not in codes:
            classes = quote_some(trained.class_names or codes)
            reason = f'has "{cell:.80}", which is not a class of the run: {classes}. Correct it, or drop the column.'
            raise table.error(reason, column, row)
    return np.array([codes[cell] for cell in cells], dtype=np.int64)
