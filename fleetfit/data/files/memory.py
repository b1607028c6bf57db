"""Data in memory for `data=`: tables, pairs of arrays, data sets of PyTorch and Hugging Face."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    default_collate,
    default_convert,
)

from fleetfit.data.dataset import Data, DataInMemory
from fleetfit.data.files.arrays import as_array, is_sparse, to_array, wrap_arrays
from fleetfit.data.splits import BY_NAME, find_splits
from fleetfit.errors import DataError, format_cause, quote_some, truncate
from fleetfit.seeds import isolate_global_rngs

ACCEPTED = (
    "(x, y) or ((x, y), (x_test, y_test)) of arrays, tensors, texts or lists; a dict of arrays with x and y, and with "
    "groups (the user of each sample) if there are any, or with x_train, y_train, x_test and y_test; a table (a "
    "DataFrame, a pyarrow.Table, a dict of columns or a datasets.Dataset), with the label among its columns; a torch "
    "Dataset of pairs (sample, label), or (train, test) of two; a fleetfit.Data; or a path"
)


_SAMPLES = ({"x", "y"}, {"x", "y", "groups"}, {"x_train", "y_train"}, {"x_train", "y_train", "x_test", "y_test"})
_ONE_INPUT = ". A model has one input: join several in one array, and take them apart in its forward"
_READ_TWICE = 32  # samples of a Dataset
_FEWEST_ROWS = 10  # of a table of lists; shorter lists may be keys of [data], such as mean


@dataclass(frozen=True, eq=False)
class Samples:
    """Samples with labels: arrays, tensors, or lists of numbers; for predictions, also texts, and without labels.

    Attributes:
        train: Samples [N, ...] and labels [N] or None.
        test: The same for testing; None: they are held out.
        notes: Sentences on how they were read.
        groups: The natural group (user, device) of each sample, whole numbers or text [N]; None: no groups.
    """

    train: tuple[Any, Any]
    test: tuple[Any, Any] | None = None
    notes: tuple[str, ...] = ()
    groups: Any = None

    def __post_init__(self) -> None:
        """Check that samples and labels with indexes have the same one: they are paired by place.

        Raises:
            DataError: The indexes differ.
        """
        for x, y in filter(None, (self.train, self.test)):
            of_pandas = hasattr(x, "iloc") and hasattr(y, "iloc")
            if of_pandas and len(x) == len(y) and not x.index.equals(y.index):
                raise DataError(
                    "data=(x, y): x and y have different indexes, so their rows may not belong together. Put y in the "
                    "order of x: y.loc[x.index]. If the rows belong together as they are, pass y.to_numpy().",
                    key="y",
                )

    def wrap(self, begun_with: Sequence[int] = ()) -> DataInMemory:
        """Return them for `[data]`; `begun_with` is the shape of a sample in the resumed run."""
        values = {"x": self.train[0], "y": self.train[1], "test_set": self.test, "notes": self.notes}
        values |= {} if self.groups is None else {"groups": self.groups}
        return DataInMemory("arrays in memory", wrap_arrays, {**values, "begun_with": tuple(begun_with)})

    def make_text_table(self) -> "TableSplits | None":
        """Return texts as tables with the column `text` and, of labels, `label`; None if the samples are no texts.

        Raises:
            DataError: The number of labels is another one.
        """
        splits = {"train": self.train} | ({} if self.test is None else {"test": self.test})
        tables = {}
        for split, (x, y) in splits.items():
            texts = _list_texts(x)
            if texts is None:
                return None
            columns: dict[str, list[Any]] = {"text": texts}
            for name, values, key in (("label", y, "y"), ("groups", self.groups, "groups")):
                if values is not None:
                    columns[name] = as_array(values, key).tolist()
                    if len(columns[name]) != len(texts):
                        raise DataError(f"data: {len(texts)} texts have {len(columns[name])} {key}.", key=key)
            tables[split] = _make_table(list(columns), list(columns.values()))
        return TableSplits(tables)


@dataclass(frozen=True, eq=False)
class TableSplits:
    """The rows of a table.

    Attributes:
        splits: The `pyarrow.Table` of each split, "train" first.
    """

    splits: dict[str, Any]

    def wrap(self, as_texts: bool) -> DataInMemory:
        """Return them for `[data]`, read as texts or as numbers and categories."""
        from fleetfit.data.files import table, text

        if as_texts:
            return DataInMemory("texts in memory", text.make_texts_in_memory, {"splits": self.splits})
        return DataInMemory("table in memory", table.make_data_in_memory, {"splits": self.splits})

    def name_columns(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        """Return keys of `[data]` with the names of columns as text: a DataFrame may number its columns."""
        named = dict(keys)
        for key in ("text", "label", "groups", "categories", "drop"):
            value = keys.get(key)
            if isinstance(value, int | np.integer):
                named[key] = str(value)
            elif value is not None and not isinstance(value, str):
                named[key] = [str(name) for name in value]
        return named


def read_memory(value: Any, labeled: bool = True) -> Samples | TableSplits | None:
    """Return data in memory as samples or a table; None for anything else, such as a path or keys of `[data]`.

    Args:
        value: The data.
        labeled: Whether samples need labels, as for training. If not, a `DataLoader` stands for its data set.

    Raises:
        DataError: The form is not accepted.
    """
    try:
        return _read_memory(value, labeled)
    except DataError:
        raise
    except Exception as error:  # objects of other libraries may raise any error
        raise _refuse(f"a {type(value).__name__} that cannot be read ({format_cause(error)})") from error


def _read_memory(value: Any, labeled: bool) -> Samples | TableSplits | None:
    if value is None or isinstance(value, str | Data | DataInMemory | type):
        return None
    if isinstance(value, tuple) or (isinstance(value, list) and [*map(type, value)] == [Subset, Subset]):
        return _read_tuple(value, labeled)
    if isinstance(value, Mapping):
        return _read_mapping(value, labeled)
    if _is_table(value):
        return TableSplits({"train": _convert_table(value)})
    if isinstance(value, DataLoader) and not labeled:
        if not isinstance(value.dataset, IterableDataset):
            _check_loader(value)
        value = value.dataset
    if isinstance(value, IterableDataset | DataLoader):
        remedy = "its dataset: data=loader.dataset" if isinstance(value, DataLoader) else "a list of its pairs"
        raise _refuse(f"a {type(value).__name__}, which has no length and order of its own; pass {remedy}")
    if isinstance(value, Dataset):
        return _read_dataset(value, labeled)
    if isinstance(value, list) or _is_array(value):
        if not labeled:
            return Samples((value, None))
        raise _refuse(f"a {type(value).__name__} without labels")
    return None


def _read_tuple(value: Sequence[Any], labeled: bool) -> Samples | None:
    """Read samples with labels, pairs of them for training and testing, or two data sets."""
    if len(value) == 2 and all(isinstance(part, Dataset) for part in value):
        train, test = (_read_dataset(part, labeled) for part in value)
        return Samples(train.train, test.train, train.notes)
    if len(value) == 2:
        pairs = all(isinstance(part, tuple) and len(part) == 2 for part in value)
        if not pairs and isinstance(value[0], tuple | list) and _are_inputs(*value):
            raise _refuse(f"samples of {len(value[0])} arrays", _ONE_INPUT)
        return Samples(*value) if pairs else Samples((value[0], value[1]))
    if len(value) > 2 and all(map(_is_array, value)):
        raise _refuse(f"a tuple of {len(value)} arrays", _ONE_INPUT)
    return None


def _check_loader(loader: DataLoader[Any]) -> None:
    """Refuse a loader whose samples are not those of its data set: they are read from the latter, in its order."""
    parts = {"sampler": (loader.sampler, SequentialSampler, RandomSampler),
             "batch_sampler": (loader.batch_sampler, BatchSampler, NoneType)}  # fmt: skip
    own = [name for name, (part, *usual) in parts.items() if type(part) not in usual]
    if loader.collate_fn not in (default_collate, default_convert):
        own.append("collate_fn")
    lengths: list[Any] = [loader.sampler, loader.dataset]
    if own or len({*map(len, lengths)}) > 1:
        raise _refuse(
            f"a DataLoader with its own {' and '.join(own) or 'number of samples'}; pass what it gives as arrays, or "
            "a Dataset such as torch.utils.data.Subset"
        )


def _read_mapping(value: Mapping[Any, Any], labeled: bool) -> Samples | TableSplits | None:
    if set(value) == {"train", "test"} and all(isinstance(part, Dataset) for part in value.values()):
        return _read_tuple((value["train"], value["test"]), labeled)
    if not labeled and set(value) == {"x"}:
        return Samples((value["x"], None))
    if value and all(key in BY_NAME and _is_table(part) for key, part in value.items()):
        splits = find_splits({name: _convert_table(part) for name, part in value.items()}.get)
        if not splits:
            raise _refuse(f"a dict of {', '.join(value)} without train")
        return TableSplits(splits)
    if "train" in value and all(map(_is_table, value.values())):
        others = quote_some([name for name in value if name not in BY_NAME])
        raise _refuse(f"a dict of tables with {others}, which is no split. Leave it out, or rename it")
    keys = set(value)
    is_section = isinstance(value.get("name"), str) or "path" in value
    fewest = _FEWEST_ROWS if labeled else 1
    columns = [isinstance(column, list) and len(column) >= fewest for column in value.values()]
    if keys not in _SAMPLES and (is_section or not (any(map(_is_array, value.values())) or (columns and all(columns)))):
        return None
    if keys in _SAMPLES[:2]:
        return Samples((value["x"], value["y"]), groups=value.get("groups"))
    if keys in _SAMPLES:
        train, test = ((value.get(f"x_{split}"), value.get(f"y_{split}")) for split in ("train", "test"))
        return Samples(train, None if test[0] is None else test)
    if all(map(is_column, value.values())):
        return TableSplits({"train": _make_table(list(value), list(value.values()))})
    raise _refuse(f"a dict with the keys {', '.join(truncate(str(key)) for key in value)}")


def _refuse(got: str, reason: str = "") -> DataError:
    return DataError(f"data: got {got}{reason}. Accepted are {ACCEPTED}.", key="data")


def _is_table(value: Any) -> bool:
    """Return whether a value is a DataFrame, a `pyarrow.Table` or a `datasets.Dataset`."""
    if isinstance(value, Mapping | type):
        return False
    return hasattr(value, "column_names") or (hasattr(value, "columns") and hasattr(value, "__getitem__"))


def _list_texts(x: Any) -> list[str | None] | None:
    """Return samples that are a text each, also of other libraries; None for other samples."""
    if isinstance(x, str | bytes | Mapping | Tensor) or is_sparse(x) or getattr(x, "ndim", 1) != 1:
        return None
    if not hasattr(x, "__len__") or not len(x) or not isinstance(_unwrap(next(iter(x))), str):
        return None
    values = [None if _is_missing(value) else value for value in map(_unwrap, x)]
    return values if all(value is None or isinstance(value, str) for value in values) else None


def _is_missing(value: Any) -> bool:
    return value is None or type(value).__name__ in ("NAType", "NaTType") or bool(value != value)


def _unwrap(value: Any) -> Any:
    return value.as_py() if hasattr(value, "as_py") else value


def _is_array(value: Any) -> bool:
    arrays = isinstance(value, Tensor | np.ndarray) or (hasattr(value, "__array__") and hasattr(value, "__len__"))
    return arrays or is_sparse(value)


def _are_inputs(parts: Sequence[Any], y: Any) -> bool:
    """Return whether samples are several arrays of as many rows as there are labels."""
    arrays = len(parts) > 1 and all(map(_is_array, parts)) and hasattr(y, "__len__")
    return arrays and len(parts) != len(y) and all(getattr(part, "ndim", 0) and len(part) == len(y) for part in parts)


def is_column(value: Any) -> bool:
    """Return whether a value may be a column of a table: a list, or an array of one dimension."""
    return isinstance(value, list) or (_is_array(value) and getattr(value, "ndim", 0) == 1)


def _convert_table(value: Any) -> Any:
    """Return a `pyarrow.Table`."""
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
    if hasattr(value, "collect_schema") and hasattr(value, "collect"):  # polars.LazyFrame
        value = value.collect()
    if hasattr(value, "iloc"):  # names of pandas may occur twice
        return _make_table(list(value.columns), [value.iloc[:, i] for i in range(len(value.columns))])
    if hasattr(value, "__arrow_c_stream__"):  # polars.DataFrame and others
        import pyarrow as pa

        value = pa.table(value)
    if hasattr(value, "column_names"):  # pyarrow.Table
        return _make_table(value.column_names, value.columns)
    return _make_table(list(value.columns), [value[name] for name in value.columns])


def _decode_classes(feature: Any, column: Any) -> Any:
    """Replace numbers of classes by names, if a feature of `datasets` has names."""
    names = getattr(feature, "names", None)
    return (
        column if names is None else [None if code is None or code < 0 else names[code] for code in column.to_pylist()]
    )


def _make_table(names: Sequence[Any], columns: Sequence[Any]) -> Any:
    import pyarrow as pa

    from fleetfit.data.files.table import check_names  # runs on other data start without it

    names = check_names("data: the table", [str(name) for name in names])
    lengths = {len(column) for column in columns}
    if len(lengths) > 1:
        raise _refuse(f"columns of {', '.join(map(str, sorted(lengths)))} rows")
    if not names or lengths == {0}:
        raise DataError("data: the table has no rows or no columns.", key="data")
    return pa.table([_convert_column(name, column) for name, column in zip(names, columns, strict=True)], names)


def _convert_column(name: str, column: Any) -> Any:
    """Return a column as an arrow array. Values of mixed kinds become texts; lists and arrays stay without values."""
    import pyarrow as pa

    try:
        if isinstance(column, Tensor):
            column = to_array(column)
        with contextlib.suppress(Exception):  # of types that arrow lacks
            is_array = isinstance(column, pa.Array | pa.ChunkedArray)
            return _simplify(column if is_array else pa.array(column, from_pandas=True))
        return _convert_objects([value.item() if getattr(value, "ndim", 1) == 0 else value for value in column])
    except Exception as error:
        reason = f"cannot be read: {format_cause(error).rstrip('.!')}. Convert it to numbers or texts, or leave it out."
        raise DataError(f'data: column "{truncate(name)}" {reason}', key="data", column=name) from error


def _simplify(array: Any) -> Any:
    """Return an arrow array of a type that tables read: intervals as texts, periods as times."""
    import pyarrow as pa
    from pyarrow import compute, types

    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        values = array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array
        if kind.extension_name == "pandas.period":  # of any frequency: times are left out of the features
            return values.storage.cast(pa.timestamp("s"))
        if kind.extension_name == "pandas.interval":
            return pa.array([None if value is None else str(value) for value in values.to_pandas()], "string")
        return _simplify(values.storage)
    if types.is_run_end_encoded(kind):
        return compute.run_end_decode(array)
    if types.is_dictionary(kind) and not (types.is_string(kind.value_type) or types.is_large_string(kind.value_type)):
        return _simplify(array.cast(kind.value_type))
    return array


def _convert_objects(values: list[Any]) -> Any:
    """Return Python objects as texts, or as empty lists if one has several values."""
    import pyarrow as pa

    if any(isinstance(value, complex) for value in values):
        raise TypeError("complex numbers; pass real and imaginary parts as two columns")
    if any(hasattr(value, "__len__") and not isinstance(value, str | bytes) for value in values):
        return pa.array([[]] * len(values), pa.list_(pa.null()))
    return pa.array([None if _is_missing(value) else str(value) for value in values], "string")


def _read_dataset(dataset: Any, labeled: bool) -> Samples:
    """Read the samples [N, ...] and labels [N] of a torch Dataset of pairs; note if a second read gives others."""
    rows = range(len(dataset))
    try:
        read = [_read_sample(dataset, i) for i in rows]
        x, *labels = (np.stack(part) for part in zip(*read, strict=True))
        [y] = labels if labels or labeled else [None]
        if not labeled:
            return Samples((x, y))
        with isolate_global_rngs():
            few = rows[:: max(1, -(-len(rows) // _READ_TWICE))]
            again = np.stack([_read_sample(dataset, i)[0] for i in few])
    except Exception as error:  # the user's code may raise any error
        raise _refuse(f"a {type(dataset).__name__} without pairs of one shape ({format_cause(error)})") from error
    if np.array_equal(x[few], again, equal_nan=x.dtype.kind in "fc"):
        return Samples((x, y))
    note = (
        f"{type(dataset).__name__} gives other samples at each read, but is read once, so each epoch trains on the "
        'same values. For images replace its random transforms by [data] augment, such as data={"name": dataset, '
        '"augment": "crop-flip"}.'
    )
    return Samples((x, y), notes=(note,))


def _read_sample(dataset: Any, row: int) -> list[Any]:
    """Return a sample, and its label if there is one."""
    value = dataset[row]
    if isinstance(value, Mapping):
        raise TypeError(f"its samples are dicts of {', '.join(map(str, value))}; return (sample, label)")
    return [to_array(part) for part in (value if isinstance(value, tuple | list) else [value])]
