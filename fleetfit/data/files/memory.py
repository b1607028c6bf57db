"""Data in memory for `data=`: tables, pairs of arrays, data sets of PyTorch and Hugging Face."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from fleetfit.data.dataset import Data
from fleetfit.data.splits import ALIASES
from fleetfit.errors import DataError, format_cause, truncate

ACCEPTED = (
    "(x, y) or ((x, y), (x_test, y_test)) of arrays, tensors or lists; a dict of arrays with x and y, or x_train, "
    "y_train, x_test and y_test; a table (a DataFrame, a pyarrow.Table, a dict of columns or a datasets.Dataset), with "
    "the label among its columns; a torch Dataset of pairs (sample, label); a fleetfit.Data; or a path"
)


@dataclass(frozen=True, eq=False)
class Samples:
    """Samples with labels: arrays, tensors, or lists of numbers.

    Attributes:
        train: Samples [N, ...] and labels [N].
        test: The same for testing; None: they are held out.
    """

    train: tuple[Any, Any]
    test: tuple[Any, Any] | None = None


@dataclass(frozen=True, eq=False)
class TableSplits:
    """The rows of a table.

    Attributes:
        splits: The `pyarrow.Table` of each split, "train" first.
    """

    splits: dict[str, Any]


def read_memory(value: Any) -> Samples | TableSplits | None:
    """Return data in memory as samples or a table; None for anything else, such as a path or keys of `[data]`.

    Raises:
        DataError: The form is not accepted.
    """
    if value is None or isinstance(value, str | Data | type):
        return None
    if isinstance(value, tuple) and len(value) == 2:
        pairs = all(isinstance(part, tuple) and len(part) == 2 for part in value)
        return Samples(*value) if pairs else Samples(value)
    if isinstance(value, Mapping):
        return _read_mapping(value)
    if _is_table(value):
        return TableSplits({"train": _convert_table(value)})
    if isinstance(value, Dataset) and not isinstance(value, IterableDataset):
        return Samples(_stack_samples(value))
    if isinstance(value, list | Dataset | DataLoader) or _is_array(value):
        raise _refuse(f"a {type(value).__name__} without labels")
    return None


def _read_mapping(value: Mapping[Any, Any]) -> Samples | TableSplits | None:
    names = {alias: split for split, aliases in ALIASES.items() for alias in aliases}
    if value and all(key in names and _is_table(part) for key, part in value.items()):
        splits = {names[key]: _convert_table(part) for key, part in value.items()}
        if "train" not in splits:
            raise _refuse(f"a dict of {', '.join(value)} without train")
        return TableSplits({split: splits[split] for split in ALIASES if split in splits})
    if isinstance(value.get("name"), str) or "path" in value or not any(map(_is_array, value.values())):
        return None
    keys = set(value)
    if keys == {"x", "y"}:
        return Samples((value["x"], value["y"]))
    if keys in ({"x_train", "y_train"}, {"x_train", "y_train", "x_test", "y_test"}):
        train, test = ((value.get(f"x_{split}"), value.get(f"y_{split}")) for split in ("train", "test"))
        return Samples(train, None if test[0] is None else test)
    if all((_is_array(column) and column.ndim == 1) or isinstance(column, list) for column in value.values()):
        return TableSplits({"train": _make_table(list(value), list(value.values()))})
    raise _refuse(f"a dict with the keys {', '.join(truncate(str(key)) for key in value)}")


def _refuse(got: str, reason: str = "") -> DataError:
    return DataError(f"data: got {got}{reason}. Accepted are {ACCEPTED}.", key="data")


def _is_table(value: Any) -> bool:
    """Return whether a value is a DataFrame, a `pyarrow.Table` or a `datasets.Dataset`."""
    if isinstance(value, Mapping | type):
        return False
    return hasattr(value, "column_names") or (hasattr(value, "columns") and hasattr(value, "__getitem__"))


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray) or (hasattr(value, "__array__") and hasattr(value, "__len__"))


def _convert_table(value: Any) -> Any:
    """Return a `pyarrow.Table`.

    Raises:
        DataError: It has no rows or columns, two columns of one name, or images or sounds.
    """
    if hasattr(value, "with_format"):  # datasets.Dataset
        media = [name for name, kind in value.features.items() if type(kind).__name__ in ("Image", "Audio", "Video")]
        if media:
            raise _refuse(
                f'a {type(value).__name__} with the column "{truncate(media[0])}" of {value.features[media[0]]}',
                '. Write it to a folder with data.save_to_disk("folder"), and pass the path',
            )
        columns = [_decode_classes(value.features[name], value.with_format("arrow")[:].column(name))
                   for name in value.column_names]  # fmt: skip
        return _make_table(value.column_names, columns)
    if hasattr(value, "column_names"):  # pyarrow.Table
        return _make_table(value.column_names, value.columns)
    if hasattr(value, "iloc"):  # names of pandas may occur twice
        return _make_table(list(value.columns), [value.iloc[:, i] for i in range(len(value.columns))])
    return _make_table(list(value.columns), [value[name] for name in value.columns])


def _decode_classes(feature: Any, column: Any) -> Any:
    """Replace numbers of classes by names, if a feature of `datasets` has names."""
    names = getattr(feature, "names", None)
    return (
        column if names is None else [None if code is None or code < 0 else names[code] for code in column.to_pylist()]
    )


def _make_table(names: Sequence[Any], columns: Sequence[Any]) -> Any:
    import pyarrow as pa

    from fleetfit.data.files.table import check_names

    names = check_names("data: the table", [str(name) for name in names])
    lengths = {len(column) for column in columns}
    if len(lengths) > 1:
        raise _refuse(f"columns of {', '.join(map(str, sorted(lengths)))} rows")
    if not names or lengths == {0}:
        raise DataError("data: the table has no rows or no columns.", key="data")
    return pa.table([_convert_column(column) for column in columns], names)


def _convert_column(column: Any) -> Any:
    """Return a column as an arrow array. Values of mixed kinds become texts."""
    import pyarrow as pa

    if isinstance(column, pa.Array | pa.ChunkedArray):
        return column
    column = column.detach().cpu().numpy() if isinstance(column, Tensor) else column
    try:
        return pa.array(column, from_pandas=True)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        values = np.asarray(column, dtype=object).tolist()
        return pa.array([None if _is_missing(value) else str(value) for value in values], "string")


def _is_missing(value: Any) -> bool:
    return value is None or type(value).__name__ in ("NAType", "NaTType") or value != value


def _stack_samples(dataset: Any) -> tuple[Any, Any]:
    """Return the samples [N, ...] and labels [N] of a torch Dataset of pairs."""
    try:
        pairs = [(x, y) for x, y in (dataset[i] for i in range(len(dataset)))]
        x = np.stack([_to_numpy(sample) for sample, _ in pairs])
        y = np.stack([_to_numpy(label) for _, label in pairs])
    except Exception as error:  # the user's code may raise any error
        raise _refuse(f"a {type(dataset).__name__} without pairs of one shape ({format_cause(error)})") from error
    return x, y


def _to_numpy(value: Any) -> Any:
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
