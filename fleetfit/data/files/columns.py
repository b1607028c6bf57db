"""How the columns of a table become numbers for a model, found on training rows only: `columns.json` in a run folder.

A column of numbers becomes (value - mean) / std with the mean and the standard deviation of its training rows, as
scikit-learn's `StandardScaler` has it; a missing value becomes 0, the mean, and a column that lacks some in training
gets a second one that is 1 there. A column of categories becomes one column for each category of the training rows, 1
where it is this one (`OneHotEncoder`); a category that they do not have, or none, is 0 in all of them.

The same file makes the same numbers of other rows: new ones that are to be predicted, and those of a fleet's nodes.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pydantic
from numpy.typing import NDArray

from fleetfit import files
from fleetfit.data.dataset import MAX_CLASSES
from fleetfit.data.files.cells import Column, TableRows, text_of
from fleetfit.errors import DataError, escape_controls, truncate
from fleetfit.files import parse_json

Finite = Annotated[float, pydantic.Field(allow_inf_nan=False)]
Positive = Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]


class _Part(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


class Number(_Part):
    """A column of numbers.

    Attributes:
        name: The column's.
        mean: Of its training rows.
        std: Of its training rows, with n in the denominator.
        missing: Whether a second column says where there is no value.
    """

    kind: Literal["number"] = "number"
    name: str
    mean: Finite
    std: Positive
    missing: bool = False

    @property
    def features(self) -> list[str]:
        """What the model gets of it, by name."""
        return [self.name, *([f"{self.name} is missing"] if self.missing else [])]


class Category(_Part):
    """A column of categories.

    Attributes:
        name: The column's.
        values: The categories that have a column of their own.
    """

    kind: Literal["category"] = "category"
    name: str
    values: Annotated[tuple[str, ...], pydantic.Field(min_length=1)]

    @property
    def features(self) -> list[str]:
        """What the model gets of it, by name."""
        return [f"{self.name} = {value}" for value in self.values]


class Label(_Part):
    """The column that is learned.

    Attributes:
        name: The column's.
        classes: Of a classification, in their order.
        mean: Of a regression, of its training rows.
        std: Of a regression, of its training rows.
    """

    name: str
    classes: tuple[str, ...] = ()
    mean: Finite = 0.0
    std: Positive = 1.0


class Columns(_Part):
    """How a table becomes numbers.

    Attributes:
        format: Of the file.
        task: "classification" or "regression".
        label: What is learned.
        columns: What it is learned from, in the model's order.
        missing: Further texts that mean that there is no value.
    """

    format: Literal[1] = 1
    task: Literal["classification", "regression"]
    label: Label
    columns: Annotated[tuple[Annotated[Number | Category, pydantic.Field(discriminator="kind")], ...],
                       pydantic.Field(min_length=1)]  # fmt: skip
    missing: tuple[str, ...] = ()

    @property
    def features(self) -> list[str]:
        """What the model gets, by name, [features]."""
        return [feature for column in self.columns for feature in column.features]

    def text(self) -> str:
        """Return the text of `columns.json`."""
        nest = self.model_dump(mode="json")
        return escape_controls(json.dumps(nest, indent=1, ensure_ascii=False, allow_nan=False)) + "\n"

    def encoded(
        self, sheet: TableRows, where: str = ", which the model needs"
    ) -> tuple[NDArray[np.float32], list[str]]:
        """Return the rows of a table as numbers float32 [N, features], and what is worth saying of them.

        Raises:
            DataError: A column is not there, or a value is no number where one is needed.
        """
        x = np.zeros((sheet.rows, len(self.features)), dtype=np.float32)
        notes, at = [], 0
        for column in self.columns:
            found = sheet.column(column.name, where)
            if isinstance(column, Number):
                values = numbers_of(sheet, found)
                gone = np.isnan(values)
                with np.errstate(over="ignore"):
                    x[:, at] = np.where(gone, 0.0, (values - column.mean) / column.std)
                if not np.isfinite(x[:, at]).all():
                    raise DataError(
                        f'{sheet.path}: column "{truncate(column.name)}" has a value that is too far from the training '
                        "rows' to compute with. Fix the value.",
                        path=sheet.path,
                        column=column.name,
                    )
                if column.missing:
                    x[:, at + 1] = gone
            else:
                places, strange = _places(found, column)
                rows = np.flatnonzero(places >= 0)
                x[rows, at + places[rows]] = 1.0
                if strange:
                    notes.append(
                        f"{strange} row{'s have a value' if strange > 1 else ' has a value'} of "
                        f'"{truncate(column.name)}" that the training rows do not have (or rarely); it counts as none '
                        "of theirs."
                    )
            at += len(column.features)
        return x, notes


@dataclass(frozen=True)
class Asked:
    """What a run file says of the columns; see `fleetfit.data.files.table`."""

    label: str | None = None
    task: Literal["classification", "regression"] | None = None
    groups: str | None = None
    categories: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    def check(self, known: Columns, file: str) -> None:
        """Refuse what a `columns.json` beside it says otherwise.

        Args:
            known: What that says.
            file: Its name, for the message.

        Raises:
            DataError: They do not agree.
        """
        kinds = {column.name: column.kind for column in known.columns}
        dropped = next((name for name in self.drop if name in kinds), None)
        number = next((name for name in self.categories if kinds.get(name) == "number"), None)
        for key, got, here, otherwise in (
            ("label", self.label, known.label.name, f'the column "{truncate(known.label.name)}" is learned'),
            ("task", self.task, known.task, f"it is a {known.task}"),
            ("drop", dropped, None, "it is a column to learn from"),
            ("categories", number, None, "it is a column of numbers"),
        ):
            if got not in (None, here):
                raise DataError(
                    f'{key}: got "{truncate(got)}", but {file}, which columns names, says {otherwise}. Leave '
                    f"{key} out; or leave columns out, and the columns are detected in these rows.",
                    path=file,
                    key=key,
                )


def numbers_of(sheet: TableRows, column: Column) -> NDArray[np.float64]:
    """Return a column as numbers, NaN where there is no value.

    Raises:
        DataError: A value is none, or the column holds something else.
    """
    if column.what != "cells":
        raise DataError(
            f'{sheet.path}: column "{truncate(column.name)}" holds {column.what}, and numbers are needed.',
            path=sheet.path,
            column=column.name,
        )
    if column.strange:
        row, text = column.first_strange
        raise DataError(
            f'{sheet.path}, row {row}: "{truncate(text)}" in column "{truncate(column.name)}" is not a number. Fix '
            f'the value, or treat it as missing: missing = ["{truncate(text)}"].',
            path=sheet.path,
            row=row,
            column=column.name,
        )
    return column.numbers


def _places(column: Column, known: Category) -> tuple[NDArray[np.int64], int]:
    """Return each row's place among the known categories, -1 for none; and how many rows have another one."""
    if column.codes is None:
        return np.full(len(column), -1), len(column) - column.empty
    number = {value: place for place, value in enumerate(known.values)}
    table = np.array([*(number.get(value, -1) for value in texts_of(column)), -1], dtype=np.int64)
    places = table[column.codes]
    return places, int(((places < 0) & (column.codes >= 0)).sum())


def texts_of(column: Column) -> list[str]:
    """Return the distinct values of a column as categories are called: 1 and 1.0 are the same."""
    if column.strange or column.codes is None:
        return list(column.values)
    first = dict[int, float]()
    for code, number in zip(column.codes.tolist(), column.numbers.tolist(), strict=True):
        if code >= 0 and code not in first:
            first[code] = number
            if len(first) == len(column.values):
                break
    return [text_of(first[code]) for code in range(len(column.values))]


def labels_of(sheet: TableRows, columns: Columns) -> NDArray[Any] | None:
    """Return the labels of a table: int64 [N] of a classification, float32 [N, 1] of a regression; None: it has none.

    A row without a label has -1, or NaN.

    Raises:
        DataError: A label is no class that the model knows.
    """
    column = sheet.columns.get(columns.label.name)
    if column is None or column.empty == len(column):
        return None
    if columns.task == "regression":
        return numbers_of(sheet, column).astype(np.float32)[:, None]
    if column.codes is None:
        raise DataError(
            f'{sheet.path}: column "{truncate(column.name)}" has too many values for classes.',
            path=sheet.path,
            column=column.name,
        )
    number = {value: place for place, value in enumerate(columns.label.classes)}
    values = texts_of(column)
    strange = next((value for value in values if value not in number), None)
    if strange is not None:
        row = int(np.flatnonzero(column.codes == values.index(strange))[0]) + 1
        some = ", ".join(map(truncate, columns.label.classes[:10]))
        raise DataError(
            f'{sheet.path}, row {row}: "{truncate(strange)}" in column "{truncate(column.name)}" is none of the '
            f"classes that the model knows: {some}{', ...' if len(number) > 10 else ''}.",
            path=sheet.path,
            row=row,
            column=column.name,
        )
    return np.array([*(number[value] for value in values), -1], dtype=np.int64)[column.codes]


def read(path: Path) -> Columns:
    """Return what `columns.json` says.

    Raises:
        DataError: It cannot be read, or says something else.
    """
    return of_text(files.read_text(path, DataError), str(path))


def of_text(text: str, what: str) -> Columns:
    """Return what the text of a `columns.json` says.

    Args:
        text: The file's.
        what: The file, for messages.

    Raises:
        DataError: It says something else.
    """
    try:
        nest: Any = parse_json(text)
        found = Columns.model_validate(nest)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "it"
        raise DataError(f"{what} does not describe columns: {truncate(place)}: {first['msg'].lower()}.") from None
    except ValueError as error:
        raise DataError(f"{what} is damaged: {error}.") from None
    names = [column.name for column in found.columns]
    if len(set(names)) < len(names) or len(found.label.classes) > MAX_CLASSES:
        raise DataError(f"{what} does not describe columns: a column is there twice, or there are too many classes.")
    if found.task == "classification" and not found.label.classes:
        raise DataError(f"{what} does not describe columns: a classification has classes.")
    return found


def joined(sheets: Mapping[str, TableRows]) -> TableRows:
    """Return the rows of several files one after the other, with the columns of the first.

    Raises:
        DataError: A later file lacks one of them.
    """
    first, *others = sheets.values()
    if not others:
        return first
    columns = {}
    for name in first.columns:
        parts = [sheet.column(name, f", which {first.path.name} has") for sheet in sheets.values()]
        known: dict[str, int] = {}
        codes = None
        if all(part.codes is not None for part in parts):
            moved = []
            for part in parts:
                table = np.array([*(known.setdefault(value, len(known)) for value in part.values), -1], dtype=np.int32)
                assert part.codes is not None
                moved.append(table[part.codes])
            codes = np.concatenate(moved)
        strange = next((part for part in parts if part.strange), parts[0])
        columns[name] = Column(
            name, np.concatenate([part.numbers for part in parts]), codes, tuple(known) if codes is not None else (),
            sum(part.empty for part in parts), sum(part.strange for part in parts), strange.first_strange,
            parts[0].sample, next((part.what for part in parts if part.what != "cells"), "cells"),
        )  # fmt: skip
    return TableRows(first.path, columns, sum(sheet.rows for sheet in sheets.values()))


def without(sheet: TableRows, rows: NDArray[np.bool_]) -> TableRows:
    """Return a table with some of its rows only, those that are true [N]."""
    if rows.all():
        return sheet
    columns = {}
    for name, column in sheet.columns.items():
        codes = None if column.codes is None else column.codes[rows]
        numbers = column.numbers[rows]
        empty = int((codes < 0).sum()) if codes is not None else int(np.isnan(numbers).sum()) - column.strange
        columns[name] = Column(name, numbers, codes, column.values, max(0, empty), column.strange, column.first_strange,
                               column.sample, column.what)  # fmt: skip
    return TableRows(sheet.path, columns, int(rows.sum()))
