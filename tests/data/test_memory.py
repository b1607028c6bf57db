"""Data in memory: each form that `data=` takes gives the values of pandas or NumPy; others are refused by a list."""

import datetime
import decimal
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow
import pytest
import scipy.sparse
import torch
from sklearn.datasets import load_iris
from support import raises
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import fleetfit as ff
from fleetfit.config import load_experiment
from fleetfit.config.assemble.data import build_data
from fleetfit.data import Data
from fleetfit.data.files.arrays import prepare_arrays, wrap_arrays
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
    return build_data(load_experiment(data=value).data)


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


def test_samples_and_labels_in_another_order_are_refused() -> None:
    x, y = pandas.DataFrame(IRIS.data), pandas.Series(IRIS.target)
    shuffled = y.sample(frac=1.0, random_state=0)
    with raises(DataError, "x.index", key="y"):
        data_of((x, shuffled))
    with raises(DataError, "x.index", key="y"):
        data_of(((x, y), (x, shuffled)))
    assert data_of((x, shuffled.loc[x.index])).y.tolist() == y.tolist()
    assert data_of((x, shuffled.to_numpy())).y.tolist() == shuffled.tolist()


def test_an_unknown_column_is_one_of_the_data_frame() -> None:
    frame = pandas.DataFrame({"a": [1.0, 2.0], "b": [0, 1]})
    with raises(DataError, "the data frame", '"c"', "a, b"):
        data_of({"name": frame, "label": "c"})
    with raises(DataError, 'the data frame "test"', 'the data frame "train"'):
        data_of({"name": {"train": frame, "test": frame[["a"]]}, "label": "b"})


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
        wet=frame.a > 5.5, color=np.where(frame.b > 3, "red", "green"), kind=IRIS.target_names[IRIS.target]
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


class _Dicts(Dataset[Any]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"pixels": np.zeros(4), "kind": row % 2}


def test_samples_of_several_inputs_or_by_name_are_refused() -> None:
    u, v, y = np.zeros((9, 6)), np.zeros((9, 3)), np.arange(9) % 2
    for data in (((u, v), y), ([u, v], y), (u, v, y)):
        with raises(DataError, 3 if len(data) == 3 else 2, key="data"):
            data_of(data)
    with raises(DataError, "pixels", "kind", key="data"):
        data_of(_Dicts())


@pytest.mark.filterwarnings("error")
def test_samples_to_predict_may_be_read_only_and_are_not_copied(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((20, 1, 8, 8), dtype="uint8"))
    x = np.load(tmp_path / "x.npy", mmap_mode="r")
    facts = data_of((x, np.arange(20) % 2))
    assert prepare_arrays(x, None, facts).x.data_ptr() == x.ctypes.data


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


def test_many_whole_numbers_of_a_float_type_are_amounts() -> None:
    """As those of a table; few are classes, and a task that is set counts."""
    x, y = np.random.default_rng(0).normal(size=(120, 2)), np.arange(120.0) % 60
    data = wrap_arrays(x, y)
    assert data.task == "regression" and any("50" in note and "task" in note for note in data.notes)
    assert wrap_arrays(x, y, task="classification").classes == 60 and wrap_arrays(x, y % 50).classes == 50
    assert wrap_arrays(x, y.astype(int)).classes == 60
    assert not any("50" in note for note in wrap_arrays(x, y, task="regression").notes)


def test_pixels_are_not_tested_by_numbers() -> None:
    x = np.random.default_rng(0).integers(0, 255, (40, 1, 8, 8), dtype=np.uint8)
    for train, test in ((x, x / 255), (x / 255, x)):
        with raises(DataError, "uint8", "float64", key="x"):
            wrap_arrays(train, Y[:40] % 2, (test, Y[:40] % 2))


def test_a_test_set_of_ones_own() -> None:
    whole = {"x_train": X[:100], "y_train": Y[:100], "x_test": X[100:], "y_test": Y[100:]}
    every = TensorDataset(torch.tensor(X), torch.tensor(Y))
    train, test = Subset(every, range(100)), Subset(every, range(100, 150))
    for form in (whole, ((X[:100], Y[:100]), (X[100:], Y[100:])), (train, test), [train, test],
                 {"train": train, "test": test}):  # fmt: skip
        assert np.array_equal(data_of(form).y, Y)
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
    assert "wet is missing" in features and "color = red" in features
    expected = run.evaluate(data=frame)["static"]
    assert run.evaluate(data=pyarrow.Table.from_pandas(frame))["static"] == expected and expected["samples"] == 150
    pair = ff.run(data={"x": X, "y": Y}, out=tmp_path / "pair", **QUICK)
    expected = pair.evaluate(data=(X, Y))["static"]
    assert pair.evaluate(data=TensorDataset(torch.tensor(X), torch.tensor(Y)))["static"] == expected
    assert isinstance(read_memory((X, Y)), Samples)


def beside(values: Any) -> pandas.DataFrame:
    """Return the frame of iris with a further first column of the value, or of the values, that is given."""
    column = values if isinstance(values, pandas.Series) else pandas.Series([values] * 150)
    return frame_of_iris().assign(more=column)[["more", "a", "b", "kind"]]


@pytest.mark.parametrize("value", [
    np.eye(2), torch.ones(3), torch.ones(2, dtype=torch.bfloat16), torch.ones(2, device="meta"), {"u": 1}, {1, 2},
    (1, 2), pandas.DataFrame({"u": [1]}), b"bytes",
])  # fmt: skip
def test_a_column_of_several_values_is_left_out(value: Any) -> None:
    data = data_of(beside(value))
    assert data.sample_shape == (2,) and data.class_names == tuple(IRIS.target_names)
    assert any("nested values: more" in note for note in data.notes)
    with raises(DataError, '"kind"', key="label", column="kind"):
        data_of(frame_of_iris().assign(kind=[value] * 150))


@pytest.mark.parametrize("kind", ["series", "categories", "arrow"])
def test_intervals_are_classes_and_categories(kind: str) -> None:
    parts = pandas.cut(IRIS.data[:, 0], [4, 5, 6, 8])
    label = pandas.Series(parts if kind == "categories" else pandas.arrays.IntervalArray(parts))
    frame = frame_of_iris().assign(kind=label)
    data = data_of(pyarrow.Table.from_pandas(frame) if kind == "arrow" else frame)
    assert data.class_names == ("(4, 5]", "(5, 6]", "(6, 8]")
    assert data.y.tolist() == np.digitize(IRIS.data[:, 0], [5, 6], right=True).tolist()
    assert data_of((X, parts)).y.tolist() == data.y.tolist()
    assert data_of(beside(label)).sample_shape == (5,)


def test_periods_are_dates() -> None:
    months = pandas.Series(pandas.period_range("2020-01", periods=150, freq="M"))
    assert any("dates: more" in note for note in data_of(beside(months)).notes)
    assert (
        data_of((X, pandas.period_range("2020-01", periods=2, freq="M").repeat(75))).y.tolist() == [0] * 75 + [1] * 75
    )


@pytest.mark.parametrize("column", [pandas.Series(np.ones(150) * 1j), [torch.empty((), device="meta")] * 150])
def test_a_column_that_cannot_be_read_is_named(column: Any) -> None:
    with raises(DataError, '"more"', key="data", column="more"):
        data_of({"more": list(column), "a": X[:, 0], "kind": Y})


SAMPLES: dict[str, Callable[[], Any]] = {
    **{kind: lambda kind=kind: getattr(scipy.sparse, kind)(X)  # type: ignore[misc]
       for kind in ("csr_matrix", "csc_array", "coo_array", "lil_matrix")},
    "sparse tensor": lambda: torch.tensor(X).to_sparse(),
    "bfloat16": lambda: torch.tensor(X).bfloat16().float().bfloat16(),
    "list of bfloat16": lambda: [torch.tensor(row).bfloat16() for row in X],
    "half": lambda: torch.tensor(X).half(),
    "objects": lambda: np.array([*X, None], dtype=object)[:-1],
}  # fmt: skip


@pytest.mark.parametrize("kind", SAMPLES)
def test_samples_of_other_types_have_the_same_values(kind: str) -> None:
    data = data_of((SAMPLES[kind](), Y))
    torch.testing.assert_close(data.x.float(), torch.tensor(X), rtol=0.01 if "float" in kind else 1e-3, atol=0)  # type: ignore[union-attr]
    for labels in (scipy.sparse.csr_matrix(Y[:, None]), np.char.encode(IRIS.target_names[Y].astype(str))):
        assert data_of((X, labels)).y.tolist() == Y.tolist()
    assert data_of({"x": SAMPLES[kind](), "y": Y.tolist()}).y.tolist() == Y.tolist()


@pytest.mark.parametrize(("x", "y", "key"), [
    (X, torch.empty(150, dtype=torch.long, device="meta"), "y"), (torch.empty(150, 4, device="meta"), Y, "x"),
    (X * 1j, Y, "x"), (torch.tensor(X).cfloat(), Y, "x"), ([[1.0] * (1 + i % 3) for i in range(150)], Y, "x"),
    (np.array([np.ones(1 + i % 3) for i in range(150)], dtype=object), Y, "x"), (X, [{"a": 1}] * 150, "y"),
    (np.ma.masked_less(X, 1), Y, "x"), (X, np.ma.masked_equal(Y, 2), "y"), ((row for row in X), Y, "x"),
    (scipy.sparse.csr_matrix((150, 1 << 40)), Y, "x"),
])  # fmt: skip
def test_samples_that_cannot_be_converted_are_refused(x: Any, y: Any, key: str) -> None:
    with raises(DataError, key=key):
        data_of((x, y))


class Lazy:
    """What a `polars.LazyFrame` has, for a machine without the library."""

    columns = ("a", "kind")

    def collect_schema(self) -> None: ...

    def __getitem__(self, name: str) -> Any:
        raise TypeError

    def collect(self) -> Any:
        table = pyarrow.table({"a": X[:, 0], "kind": IRIS.target_names[Y].astype(str)})
        eager = type("DataFrame", (), {"columns": table.column_names, "__getitem__": table.column})()
        type(eager).__arrow_c_stream__ = lambda self, schema=None: table.__arrow_c_stream__(schema)
        return eager


def test_a_lazy_table_is_collected() -> None:
    expected = data_of({"a": X[:, 0], "kind": IRIS.target_names[Y]})
    assert data_of(Lazy()).columns == expected.columns and data_of(Lazy().collect()).columns == expected.columns
    with raises(DataError, key="data"):
        read_memory(type("Broken", (), {"columns": ["a"], "__getitem__": Lazy.__getitem__})())


# ---- keys of [data] --------------------------------------------------------------------------------------------------

RNG = np.random.default_rng(3)
VISITS = pandas.DataFrame({
    "serial": range(300, 420), "ward": [10, 20, 30, 40] * 30, "age": RNG.normal(50, 9, 120),
    "outcome": ["none", "mild", "cured"] * 40, "note": [f"words {i} of a nurse" for i in range(120)],
})  # fmt: skip
KEYS: dict[str, Any] = {"label": "outcome", "drop": ["serial"], "categories": ["ward"], "seed": 4}


@pytest.mark.parametrize("form", [lambda: VISITS, lambda: pyarrow.Table.from_pandas(VISITS),
                                  lambda: VISITS.to_dict("list")])  # fmt: skip
def test_keys_apply_to_a_table_in_memory(form: Callable[[], Any]) -> None:
    """The right values: age by pandas, four wards, labels in order of their names."""
    by_table = data_of({"name": form(), **KEYS})
    overrides = ["data.label=outcome", 'data.drop=["serial"]', 'data.categories=["ward"]', "data.seed=4"]
    by_overrides = build_data(load_experiment(None, overrides, data=form()).data)
    for data in (by_table, by_overrides):
        assert data.class_names == ("cured", "mild", "none") and data.y.tolist() == [2, 1, 0] * 40
        train = VISITS.age[data.split("train").numpy()]
        expected = (VISITS.age - train.mean()) / train.std(ddof=0)
        np.testing.assert_allclose(data.x[:, 4].numpy(), expected, rtol=1e-5, atol=1e-6)  # type: ignore[union-attr]
        assert data.x[:, :4].argmax(1).tolist() == [0, 1, 2, 3] * 30  # type: ignore[union-attr]
    assert by_table.splits["test"].tolist() == by_overrides.splits["test"].tolist()


def test_keys_of_columns_may_be_numbers_of_a_frame() -> None:
    frame = pandas.DataFrame(X).assign(kind=Y)
    assert data_of({"name": frame, "label": 2, "drop": [3]}).sample_shape == (3,)
    assert data_of({"name": frame, "label": 2}).task == "regression"


def test_keys_apply_to_arrays_in_memory() -> None:
    data = data_of({"name": (X, Y), "task": "regression", "test": 0.5, "validation": 0.0, "standardize": False})
    assert data.task == "regression" and data.y[:, 0].tolist() == Y.tolist() and not data.mean
    assert [len(data.split(name)) for name in ("train", "validation", "test")] == [75, 0, 75]


def test_the_values_are_not_shown() -> None:
    assert repr(load_experiment(data=(X, Y)).data.name).startswith("DataInMemory(")
    assert not re.search(r"\d", repr(load_experiment(data=(X, Y)).data.name))


def test_an_unknown_key_is_refused_by_name() -> None:
    for value, key in ((VISITS, "labell"), ((X, Y), "user")):
        with raises(ff.errors.ConfigError, f'"{key}"', key=f"data.{key}"):
            load_experiment(data={"name": value, key: "outcome"})


def test_a_column_may_be_called_name() -> None:
    data = data_of({"name": IRIS.target_names[Y].tolist(), "a": X[:, 0], "y": Y})
    assert data.class_names == ("0", "1", "2") and data.sample_shape == (4,)


def test_groups_and_keys_hold_in_a_run_and_when_it_is_opened(tmp_path: Path) -> None:
    keys = {"label": "outcome", "groups": "ward", "partition": {"kind": "natural"}}
    run = ff.run(data={"name": VISITS, **keys}, out=tmp_path / "run", **QUICK)
    assert len(run.assembly.federation.clients) == 4  # wards
    again = ff.load(tmp_path / "run", data=VISITS)
    assert torch.equal(again.assembly.data.y, run.assembly.data.y)  # type: ignore[union-attr]
    assert again.evaluate(data={"name": VISITS, "label": "outcome"})["static"]["samples"] == 120


# ---- texts -----------------------------------------------------------------------------------------------------------

REVIEWS = pandas.DataFrame({
    "stars": [i % 5 for i in range(60)], "review": [f"the film number {i} was {w} and I left the hall {w}"
                                                    for i, w in enumerate(["glad", "sad"] * 30)],
    "mood": ["good", "bad"] * 30,
})  # fmt: skip
PAIR = (REVIEWS.review.tolist(), REVIEWS.mood.tolist())


@pytest.mark.parametrize("form", [lambda: REVIEWS, lambda: {"name": REVIEWS, "text": "review", "label": "mood"},
                                  lambda: PAIR, lambda: (np.array(PAIR[0]), np.array(PAIR[1])),
                                  lambda: (REVIEWS.review, REVIEWS.mood)])  # fmt: skip
def test_texts_in_memory_are_those_of_a_file(form: Callable[[], Any], tmp_path: Path) -> None:
    REVIEWS.to_csv(tmp_path / "reviews.csv", index=False)
    data, expected = data_of(form()), data_of({"path": str(tmp_path / "reviews.csv")})
    assert torch.equal(data.x, expected.x) and torch.equal(data.y, expected.y)  # type: ignore[arg-type]
    assert data.class_names == expected.class_names == ("bad", "good") and data.vocabulary == expected.vocabulary
    assert all(torch.equal(data.split(name), expected.split(name)) for name in ("train", "validation", "test"))


def test_texts_in_memory_train_and_are_predicted(tmp_path: Path) -> None:
    run = ff.run(data=REVIEWS, rounds=1, out=tmp_path / "run")
    by_frame, by_list = run.predict(REVIEWS), run.predict(PAIR[0])
    assert len(by_frame) == 60 and by_frame.classes.tolist() == by_list.classes.tolist()  # type: ignore[union-attr]
    assert ff.load(run.folder, data=REVIEWS).evaluate()["static"] == run.evaluate()["static"]


def test_rows_of_texts_without_a_label_are_left_out() -> None:
    """Labels of a frame are floats as soon as one is missing, and may be truths."""
    frame = REVIEWS.assign(mood=[None, 1.0] + [0.0, 1.0] * 29)
    assert (
        (data := data_of(frame)).class_names == ("0", "1") and len(data.y) == 59 and any("1" in n for n in data.notes)
    )
    assert data_of(REVIEWS.assign(mood=[False, True] * 30)).class_names == ("False", "True")
    with raises(DataError, row=3, column="review"):
        data_of(REVIEWS.assign(review=REVIEWS.review.where(REVIEWS.index != 3, None)))


def test_a_text_that_is_missing_is_named() -> None:
    texts = [*PAIR[0][:3], pandas.NA, *PAIR[0][4:]]
    for values in (texts, pandas.Series(texts, dtype="string")):
        with raises(DataError, row=3, column="text"):
            data_of((values, PAIR[1]))


def test_names_beside_numbers_are_not_the_texts_of_a_table(tmp_path: Path) -> None:
    """A table of passengers is about their ages, not about their names; without other features texts may be short."""
    names = [f"Braund, Mr. Owen Harris {i}" for i in range(60)]
    passengers = pandas.DataFrame({"id": range(60), "name": names, "age": RNG.normal(40, 9, 60), "alive": [0, 1] * 30})
    passengers.to_csv(tmp_path / "t.csv", index=False)
    passengers.to_parquet(tmp_path / "t.parquet")
    for form in (passengers, {"path": str(tmp_path / "t.csv")}, {"path": str(tmp_path / "t.parquet")}):
        assert data_of(form).columns and data_of(form).sample_shape == (1,)
    assert data_of({"name": passengers, "text": "name"}).vocabulary
    assert data_of(passengers.drop(columns="age")).vocabulary


MIXED = {
    "groups last": ({"name": REVIEWS[["review", "mood"]].assign(user=[1, 2, 3] * 20), "groups": "user"}, 2, True),
    "label first": (REVIEWS[["mood", "review"]], 2, True),
    "two usual labels": (REVIEWS.assign(y=np.arange(60) * 0.7, label=REVIEWS.mood)[["y", "review", "label"]], 2, True),
    "row numbers last": (REVIEWS[["review", "mood"]].assign(id=range(60)), 2, True),
    "a price": (REVIEWS[["review", "stars"]].assign(price=np.arange(60) * 7), 1, False),
    "a price with cents": (REVIEWS[["review", "stars"]].assign(price=np.arange(60) * 0.7), 1, False),
    "few remarks": (REVIEWS.assign(review=REVIEWS.review.where(REVIEWS.index == 0, None)), 2, False),
    "a sentence in months": (REVIEWS.assign(sentence=range(60))[["sentence", "review", "mood"]], 2, True),
    "signs without spaces": (pandas.DataFrame({"text": [chr(0x4E00 + i) + "\u597d" * 20 for i in range(60)],
                                               "stars": REVIEWS.stars, "mood": REVIEWS.mood}), 2, True),
    "pixels as text": (pandas.DataFrame({"pixels": [" ".join(map(str, range(i, i + 40))) for i in range(60)],
                                         "area": REVIEWS.stars, "mood": REVIEWS.mood}), 2, False),
    "a key of texts": ({"name": REVIEWS.assign(review=[f"a long title of film {i}" for i in range(60)]),
                        "length": 8}, 2, True),
}  # fmt: skip


@pytest.mark.parametrize("case", MIXED)
def test_texts_are_told_from_tables(case: str, tmp_path: Path) -> None:
    value, classes, is_text = MIXED[case]
    frame, keys = (
        (value["name"], {k: v for k, v in value.items() if k != "name"}) if isinstance(value, dict) else (value, {})
    )
    frame.to_csv(tmp_path / "t.csv", index=False)
    frame.to_parquet(tmp_path / "t.parquet")
    files = [{"path": str(tmp_path / name), **keys} for name in ("t.csv", "t.parquet")]
    for form in (value, *(files if case != "few remarks" else files[1:])):
        data = data_of(form)
        assert (bool(data.vocabulary), data.classes) == (is_text, classes)


def test_a_run_on_texts_keeps_its_columns_when_it_is_opened(tmp_path: Path) -> None:
    frame = REVIEWS.assign(site=["de", "fr"] * 30)
    run = ff.run(data={"name": frame, "label": "mood"}, rounds=1, out=tmp_path / "run")
    again = ff.load(tmp_path / "run", data=frame)
    assert again.assembly.data.class_names == ("bad", "good") and again.evaluate()["static"] == run.evaluate()["static"]  # type: ignore[union-attr]


@pytest.mark.parametrize("labels", [[True, False] * 30, [1.0, None, 0.0] * 20])
def test_the_frame_of_a_training_is_predicted(labels: list[Any], tmp_path: Path) -> None:
    frame = REVIEWS.assign(mood=labels)
    run = ff.run(data=frame, rounds=1, out=tmp_path / "run")
    assert len(run.predict(frame)) == 60
    whole = frame[frame.mood.notna()]
    assert run.predict(whole).accuracy is not None and run.evaluate(whole)["static"]["samples"] == len(whole)


def test_mistakes_in_texts_are_named() -> None:
    cases: list[tuple[Any, dict[str, Any]]] = [
        ((PAIR[0], None), {"key": "y"}), ((PAIR[0], PAIR[1][:5]), {"key": "y"}),
        ({"name": REVIEWS, "text": "mood", "label": "mood"}, {"key": "text"}),
        ({"train": REVIEWS, "test": REVIEWS, "unsupervised": REVIEWS}, {"key": "data"}),
    ]  # fmt: skip
    for value, attributes in cases:
        with raises(DataError, **attributes):
            data_of(value)
    for form in (pyarrow.array(PAIR[0]), pandas.Series(PAIR[0], dtype="string")):
        assert data_of((form, PAIR[1])).vocabulary


def test_a_second_column_that_may_be_the_label_is_named() -> None:
    frame = pandas.DataFrame(X, columns=list("abcd")).assign(target=Y, label=Y % 2)
    assert any('"target"' in note for note in data_of(frame).notes)
    assert not any('"target"' in note for note in data_of({"name": frame, "label": "label"}).notes)


# ---- a Dataset that draws --------------------------------------------------------------------------------------------


class Noisy(torch.utils.data.Dataset[Any]):
    """Samples to which a library's generator adds noise at each read."""

    def __init__(self, draw: Callable[[], float]) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 90

    def __getitem__(self, i: int) -> Any:
        return X[i] + self.draw(), int(Y[i + 30])


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: float(torch.rand(())),
                                  lambda: random.random() if random.random() < 0.3 else 0.0])  # fmt: skip
def test_a_dataset_that_draws_is_said_to_be_read_once(draw: Callable[[], float]) -> None:
    notes = [note for note in data_of(Noisy(draw)).notes if "Noisy" in note]
    assert len(notes) == 1 and "augment" in notes[0]


def test_the_second_read_leaves_the_generators_and_others_get_no_note() -> None:
    random.seed(1)
    data_of(Noisy(random.random))
    after = random.random()
    random.seed(1)
    for _ in range(90):
        random.random()
    assert random.random() == after
    assert not any("augment" in note for note in data_of(Noisy(lambda: 0.0)).notes)
    gaps = np.where(X > 5, np.nan, X)
    assert not read_memory(TensorDataset(torch.tensor(gaps), torch.tensor(Y))).notes  # type: ignore[union-attr]
