"""Data in memory: each form that `data=` takes gives the values of pandas or NumPy; others are refused by a list."""

import datetime
import decimal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow
import pytest
import torch
from sklearn.datasets import load_iris
from support import raises
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import fleetfit as ff
from fleetfit.config import load_experiment
from fleetfit.data import Data
from fleetfit.data.files.arrays import wrap_arrays
from fleetfit.data.files.memory import Samples, TableSplits, read_memory
from fleetfit.data.files.table import IN_MEMORY, Column, TableEncoder, detect_columns, make_sheet
from fleetfit.errors import DataError

IRIS = load_iris()
QUICK: dict[str, Any] = {"rounds": 1, "model": {"name": "mlp", "hidden": 16, "layers": 4}}


def detect(frame: Any) -> dict[str, Column]:
    memory = read_memory(frame)
    assert isinstance(memory, TableSplits)
    return detect_columns(make_sheet([("train", IN_MEMORY, memory.splits["train"])]))


def data_of(value: Any) -> ff.Data:
    """Return the data set that a run would train on."""
    data = load_experiment(data=value).data.name
    assert isinstance(data, ff.Data)
    return data


NUMBERS: dict[str, Callable[[], Any]] = {
    **{name: lambda name=name: pandas.array([1, None, 3], dtype=name)  # type: ignore[misc]
       for name in ("Int8", "Int16", "Int32", "Int64", "UInt8", "UInt16", "UInt32", "UInt64", "Float32", "Float64")},
    **{f"{name} of pyarrow": lambda name=name: pandas.array([1, None, 3], dtype=f"{name}[pyarrow]")  # type: ignore[misc]
       for name in ("int8", "int64", "uint32", "float", "double")},
    "floats": lambda: np.array([1, np.nan, 3]),
    "objects": lambda: np.array([1, None, 3.0], dtype=object),
    "objects with pd.NA": lambda: np.array([1, pandas.NA, 3], dtype=object),
    "decimals": lambda: np.array([decimal.Decimal(1), None, decimal.Decimal(3)], dtype=object),
    "categories of numbers": lambda: pandas.Categorical([1, None, 3]),
    "texts": lambda: ["1", None, " 3 "],
    "sparse": lambda: pandas.arrays.SparseArray([1, np.nan, 3]),
}  # fmt: skip


@pytest.mark.parametrize("kind", NUMBERS)
def test_columns_of_numbers(kind: str) -> None:
    columns = detect(pandas.DataFrame({"a": NUMBERS[kind](), "b": [1, 2, 3]}))
    np.testing.assert_array_equal(columns["a"].numbers, [1, np.nan, 3])
    assert columns["b"].numbers.tolist() == [1, 2, 3]


@pytest.mark.parametrize("dtype", ["bool", "boolean", "bool[pyarrow]", "object"])
def test_columns_of_truths(dtype: str) -> None:
    values = [True, False, True] if dtype == "bool" else [True, None, False]
    column = detect(pandas.DataFrame({"a": pandas.array(values, dtype=dtype), "b": [1, 2, 3]}))["a"]
    np.testing.assert_array_equal(column.numbers, [1, 0, 1] if dtype == "bool" else [1, np.nan, 0])


@pytest.mark.parametrize("dtype", ["object", "str", "string", "string[pyarrow]", "category", "large_string[pyarrow]"])
def test_columns_of_texts(dtype: str) -> None:
    values = pandas.Series(["x", None, " y", "x"]).astype(
        pandas.ArrowDtype(pyarrow.large_string()) if dtype.startswith("large") else dtype
    )
    column = detect(pandas.DataFrame({"a": values, "b": [1, 2, 3, 4]}))["a"]
    assert column.kind == "texts" and [
        column.texts[code].as_py() if code >= 0 else "" for code in column.codes.tolist()
    ] == [
        "x",
        "",
        "y",
        "x",
    ]


@pytest.mark.parametrize("values", [
    pandas.to_datetime(["2020-01-01", "2020-01-02"]), pandas.to_datetime(["2020-01-01", None]),
    pandas.to_datetime(["2020-01-01", "2020-01-02"]).tz_localize("Europe/Zurich"),
    pandas.to_timedelta(["1 day", "2 days"]), [datetime.date(2020, 1, 1), None],
    [datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC), datetime.datetime(2020, 1, 2, tzinfo=datetime.UTC)],
])  # fmt: skip
def test_columns_of_dates(values: Any) -> None:
    assert detect(pandas.DataFrame({"a": values, "b": [1, 2]}))["a"].kind == "dates"


def test_values_of_several_kinds_are_texts() -> None:
    mixed = detect(pandas.DataFrame({"a": np.array([1, "x", None, pandas.NA, 2.5], dtype=object), "b": range(5)}))["a"]
    assert (
        mixed.kind == "texts"
        and mixed.texts.to_pylist() == ["1", "x", "2.5"]
        and mixed.codes.tolist() == [0, 1, -1, -1, 2]
    )
    lists = detect(pandas.DataFrame({"a": [[1], [2, 3]], "b": [1, 2]}))["a"]
    assert lists.kind == "nested values"


def frame_of_iris() -> pandas.DataFrame:
    frame = pandas.DataFrame(IRIS.data, columns=list("abcd"))
    return frame.assign(
        wet=frame.a > 5.5, colour=np.where(frame.b > 3, "red", "green"), kind=IRIS.target_names[IRIS.target]
    )


def with_gaps() -> pandas.DataFrame:
    """Return the frame with missing values in every column but the label."""
    frame = frame_of_iris()
    for place, name in enumerate(frame.columns[:-1]):
        frame[name] = frame[name].astype(object).where(frame.index % 11 != place, None)
    return frame.infer_objects()


@pytest.mark.parametrize("make", [frame_of_iris, with_gaps])
def test_every_form_of_one_table_is_the_same_data(make: Callable[[], pandas.DataFrame], tmp_path: Path) -> None:
    frame = make()
    expected = data_of(frame)
    frame.to_parquet(tmp_path / "t.parquet")
    table = pyarrow.Table.from_pandas(frame)
    forms = [frame.convert_dtypes(), frame.convert_dtypes(dtype_backend="pyarrow"), table,
             {name: frame[name] for name in frame}]  # fmt: skip
    for form in forms:
        data = data_of(form)
        assert data.columns == expected.columns and torch.equal(data.x, expected.x) and torch.equal(data.y, expected.y)  # type: ignore[arg-type]


def test_a_label_may_lack_values_in_any_nullable_type() -> None:
    frame = pandas.DataFrame(
        {"a": np.arange(40.0) % 7, "kind": pandas.array([True, False, None, True] * 10, "boolean")}
    )
    data = data_of(frame)
    assert len(data.x) == 30 and data.class_names == ("0", "1") and any("10 rows" in note for note in data.notes)
    frame["kind"] = pandas.array(["x", "y", pandas.NA, "x"] * 10, "string")
    assert len(data_of(frame).x) == 30 and data_of(frame).class_names == ("x", "y")


def test_a_dataset_of_hugging_face_is_a_table() -> None:
    datasets = pytest.importorskip("datasets", reason="it is an extra: fleetfit[hub]")
    frame = frame_of_iris()
    expected = data_of(frame)
    whole = datasets.Dataset.from_pandas(frame, preserve_index=False)
    data = data_of(whole)
    assert data.columns == expected.columns and torch.equal(data.x, expected.x)  # type: ignore[arg-type]
    coded = whole.class_encode_column("kind")
    assert data_of(coded).columns == expected.columns
    chosen = data_of(whole.select(range(10, 140)))
    assert len(chosen.x) == 130 and torch.equal(chosen.y, expected.y[10:140])
    splits = data_of(datasets.DatasetDict({"test": whole.select(range(100, 150)), "train": whole.select(range(100))}))
    assert splits.splits["test"].tolist() == list(range(100, 150))
    pictures = whole.add_column("picture", [None] * 150).cast_column("picture", datasets.Image())
    with raises(DataError, '"picture"', "save_to_disk", key="data"):
        read_memory(pictures)


class HasTheAttributes:
    """What a `datasets.Dataset` has that is read, for a machine without the library."""

    def __init__(self, table: Any) -> None:
        self.table, self.column_names = table, table.column_names
        self.features = dict.fromkeys(table.column_names)

    def with_format(self, form: str) -> Any:
        assert form == "arrow"
        return self

    def __getitem__(self, rows: slice) -> Any:
        return self.table[rows]


def test_what_has_the_attributes_of_such_a_dataset_is_one() -> None:
    frame = frame_of_iris()
    assert data_of(HasTheAttributes(pyarrow.Table.from_pandas(frame))).columns == data_of(frame).columns


X, Y = IRIS.data.astype(np.float32), IRIS.target


@pytest.mark.parametrize("form", [
    (torch.tensor(X), torch.tensor(Y)), (X.tolist(), Y.tolist()), (pandas.DataFrame(X), pandas.Series(Y)),
    (pandas.DataFrame(X).convert_dtypes(), pandas.Series(Y, dtype="Int64")),
    (X, pandas.Series(Y).astype("category")), (X, pandas.Series(Y, dtype="int64[pyarrow]")),
    {"x": X, "y": Y}, {"x_train": X, "y_train": Y}, TensorDataset(torch.tensor(X), torch.tensor(Y)),
    torch.utils.data.Subset(TensorDataset(torch.tensor(X), torch.tensor(Y)), range(150)),
])  # fmt: skip
def test_every_form_of_samples_and_labels_is_the_same_data(form: Any) -> None:
    data, expected = data_of(form), data_of((X, Y))
    assert torch.allclose(data.x.float(), expected.x.float()) and torch.equal(data.y, expected.y)  # type: ignore[union-attr]
    assert {name: rows.tolist() for name, rows in data.splits.items()} == {
        name: rows.tolist() for name, rows in expected.splits.items()
    }


def test_labels_of_texts_and_truths() -> None:
    names = IRIS.target_names[Y]
    for labels in (pandas.Series(names), pandas.Series(names, dtype="string"), pandas.Series(names, dtype="category")):
        assert data_of((X, labels)).class_names == tuple(IRIS.target_names)
    truths = data_of((X, pandas.Series(Y > 0, dtype="boolean")))
    assert truths.y.tolist() == (Y > 0).tolist()


@pytest.mark.parametrize("make", [np.asarray, torch.tensor, lambda y: pandas.DataFrame(y, columns=["a", "b", "c"]),
                                  lambda y: y.astype(bool), lambda y: y.tolist()])  # fmt: skip
def test_a_matrix_of_0_and_1_has_several_labels_per_sample(make: Callable[[np.ndarray], Any], tmp_path: Path) -> None:
    """In memory and in a file of arrays; the task is multi_label, and the run trains."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(90, 4)).astype("float32"), rng.integers(0, 2, (90, 3))
    run = ff.run(data=(x, make(y)), rounds=1, model={"name": "mlp", "hidden": 8}, out=tmp_path / "run")
    data = run.assembly.data
    assert isinstance(data, Data) and data.task == "multi_label" and data.y.tolist() == y.tolist()
    np.savez(tmp_path / "a.npz", x=x, y=np.asarray(make(y)))
    experiment = load_experiment({"data": {"path": str(tmp_path / "a.npz")}})
    assert experiment.data.settings["task"] == "multi_label" and experiment.data.partition.kind == "iid"


def test_a_matrix_of_the_fractions_0_and_1_names_the_task() -> None:
    y = np.random.default_rng(0).integers(0, 2, (30, 3)).astype("float32")
    data = wrap_arrays(np.zeros((30, 2)), y)
    assert data.task == "regression" and any("multi_label" in note for note in data.notes)


def test_a_test_set_of_ones_own() -> None:
    whole = {"x_train": X[:100], "y_train": Y[:100], "x_test": X[100:], "y_test": Y[100:]}
    for form in (whole, ((X[:100], Y[:100]), (X[100:], Y[100:]))):
        assert data_of(form).splits["test"].tolist() == list(range(100, 150))


class Stream(IterableDataset):  # type: ignore[type-arg]
    """A torch Dataset without a length."""

    def __iter__(self) -> Any:
        return iter(())


@pytest.mark.parametrize("form", [
    pandas.Series(Y), X, torch.tensor(X), [X, Y], DataLoader(TensorDataset(torch.tensor(X))), Stream(),
    TensorDataset(torch.tensor(X)), {"x": X, "labels": Y, "more": 3}, {"x": X}, {"x_train": X, "y_test": Y},
    {"test": pandas.DataFrame(X)}, {"a": X[:, 0], "b": X[:9, 1]}, pyarrow.array([1]),
])  # fmt: skip
def test_other_forms_are_refused_by_what_is_accepted(form: Any) -> None:
    with raises(DataError, "(x, y)", "DataFrame", "datasets.Dataset", "torch Dataset", key="data"):
        read_memory(form)


@pytest.mark.parametrize(("x", "y", "key", "row"), [
    (X[:4], pandas.Series([0, 1, None, 1], dtype="Int64"), "y", 2),
    (X[:4], pandas.Series(["a", None, "b", "a"], dtype="string"), "y", 1),
    (pandas.DataFrame(X[:4]).convert_dtypes().replace(X[3, 0], pandas.NA), [0, 1, 0, 1], "x", 3),
])  # fmt: skip
def test_a_gap_in_samples_or_labels_names_its_sample(x: Any, y: Any, key: str, row: int) -> None:
    with raises(DataError, row, "data=frame", key=key):
        load_experiment(data=(x, y))


def test_a_frame_of_samples_with_texts_is_sent_to_the_table() -> None:
    with raises(DataError, "data=frame", key="x"):
        load_experiment(data=(frame_of_iris(), Y))


@pytest.mark.parametrize("value", ["digits", {"name": "digits"}, {"path": "a.csv"}, {"mean": [0.5]}, None, {},
                                   {"name": "images", "mean": np.ones(3)}])  # fmt: skip
def test_keys_of_a_run_file_are_no_data(value: Any) -> None:
    assert read_memory(value) is None


def test_a_run_is_trained_evaluated_and_predicts_on_them(tmp_path: Path) -> None:
    frame = with_gaps().convert_dtypes()
    run = ff.run(data={"name": frame, "partition": {"clients": 3}}, out=tmp_path / "run", **QUICK)
    features = TableEncoder.from_json((run.folder / "columns.json").read_text(), "").features
    assert "wet is missing" in features and "colour = red" in features
    expected = run.evaluate(data=frame)["static"]
    assert run.evaluate(data=pyarrow.Table.from_pandas(frame))["static"] == expected and expected["samples"] == 150
    pair = ff.run(data={"x": X, "y": Y}, out=tmp_path / "pair", **QUICK)
    expected = pair.evaluate(data=(X, Y))["static"]
    assert pair.evaluate(data=TensorDataset(torch.tensor(X), torch.tensor(Y)))["static"] == expected
    assert isinstance(read_memory((X, Y)), Samples)
