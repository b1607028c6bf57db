"""Tables: numbers as scikit-learn makes them, what is recognized and said, and what is refused by a sentence."""

import csv
import decimal
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from sklearn.datasets import load_breast_cancer, load_iris, load_wine
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from support import Expected, raises

from fleetfit.data import Data
from fleetfit.data.files.memory import TableSplits, read_memory
from fleetfit.data.files.table import TableEncoder, make_data_in_memory, prepare_table, table
from fleetfit.errors import DataError

Write = Callable[..., Path]
GOLDEN = Path(__file__).parents[1] / "golden"


def wrap(frame: Any, label: str | None = None) -> Data:
    """Return a DataFrame as a data set."""
    memory = read_memory(frame)
    assert isinstance(memory, TableSplits)
    return make_data_in_memory(memory.splits, label)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(rows: Sequence[Sequence[Any]], name: str = "things.csv", separator: str = ",") -> Path:
        path = tmp_path / name
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, delimiter=separator).writerows(rows)
        return path

    return written


def make_mixed_rows(rows: int = 60, seed: int = 0) -> list[list[Any]]:
    """Return rows of a number, one with gaps, a category and a label, after the names."""
    rng = np.random.default_rng(seed)
    colors = rng.choice(["red", "green", "blue"], rows)
    sizes = [f"{size:.3f}" for size in rng.normal(5, 2, rows)]
    ages = ["" if i % 7 == 0 else f"{age:.2f}" for i, age in enumerate(rng.normal(40, 9, rows))]
    kinds = rng.choice(["cat", "dog"], rows)
    return [["size", "age", "color", "kind"], *zip(sizes, ages, colors, kinds, strict=True)]


@pytest.mark.parametrize("load", [load_iris, load_wine, load_breast_cancer])
def test_numbers_are_those_of_scikit_learn(load: Callable[..., Any], write: Write) -> None:
    dataset = load()
    names = [dataset.target_names[label] for label in dataset.target]
    path = write(
        [[*dataset.feature_names, "kind"], *([*row, name] for row, name in zip(dataset.data, names, strict=True))]
    )
    data = table(str(path))
    train = data.splits["train"].numpy()
    expected = StandardScaler().fit(dataset.data[train]).transform(dataset.data)
    np.testing.assert_allclose(data.x.numpy(), expected, rtol=1e-5, atol=1e-5)
    assert [data.class_names[label] for label in data.y.tolist()] == names
    assert sorted(torch.cat(list(data.splits.values())).tolist()) == list(range(len(names)))


def test_categories_are_those_of_scikit_learn(write: Write) -> None:
    rows = make_mixed_rows()
    data = table(str(write(rows)))
    colors = np.array([row[2] for row in rows[1:]])[:, None]
    train = data.splits["train"].numpy()
    expected = OneHotEncoder(sparse_output=False).fit(colors[train]).transform(colors)
    np.testing.assert_array_equal(data.x.numpy()[:, 3:], expected)
    ages = np.array([float(row[1] or "nan") for row in rows[1:]])
    scaled = (ages - np.nanmean(ages[train])) / np.nanstd(ages[train])
    np.testing.assert_allclose(data.x.numpy()[:, 1], np.nan_to_num(scaled), atol=1e-5)
    np.testing.assert_array_equal(data.x.numpy()[:, 2], np.isnan(ages))


@pytest.mark.parametrize(("file", "keys"), [("columns", {}), ("columns-regression", {"label": "age"})])
def test_stored_encodings_keep_their_bytes(file: str, keys: dict[str, Any], write: Write) -> None:
    """Files that an earlier reader of tables wrote for the same rows, which runs on disk have."""
    stored = (GOLDEN / f"{file}.json").read_text()
    path = write(make_mixed_rows())
    data = table(str(path), missing=("unknown",) if keys else (), **keys)
    assert data.columns == stored
    labeled = [bool(row[1]) or not keys for row in make_mixed_rows()[1:]]
    assert torch.equal(prepare_table(path, data).x[labeled], data.x)


def test_held_out_rows_change_no_number(write: Write) -> None:
    """Other values in the test rows leave means and categories as they are."""
    rows = make_mixed_rows()
    before = table(str(write(rows)))
    for row in before.splits["test"].tolist():
        rows[row + 1] = ["1000", "-999", "purple", rows[row + 1][3]]
    after = table(str(write(rows, "changed.csv")))
    assert after.columns == before.columns
    assert torch.equal(after.x[after.splits["train"]], before.x[before.splits["train"]])


def test_it_says_what_it_took(write: Write) -> None:
    notes = table(str(write(make_mixed_rows()))).notes
    assert "things.csv" in notes[0] and '"kind"' in notes[0]
    assert [int(number) for number in re.findall(r"\d+", notes[0])] == [2, 1, 2, 60, 12, 5]
    assert '"kind"' in notes[1] and "age" in notes[2]


@pytest.mark.parametrize("name", ["label", "Target", "class", "y"])
def test_the_label_is_found_by_its_name(name: str, write: Write) -> None:
    rows = [["a", name, "b"], *([i * 0.5, "no" if i % 2 else "yes", i % 5] for i in range(40))]
    data = table(str(write(rows)))
    assert data.class_names == ("no", "yes") and f'label "{name}"' in data.notes[0]


def test_what_is_no_measurement_is_left_out_and_said(write: Write) -> None:
    heads = ["Id", "customer_id", "born", "signed", "remark", "constant", "nothing", "height", "kind"]
    rows = [
        [i + 1, 9000 - 7 * i, f"1990-01-{1 + i % 28:02d}", f"{1 + i % 28}.02.2020", f"a long remark number {i}", 3, "",
         i % 13 + 0.5, "ab"[i % 2]] for i in range(50)
    ]  # fmt: skip
    data = table(str(write([heads, *rows])))
    assert TableEncoder.from_json(data.columns, "").features == ["height"]
    for columns in ("Id, customer_id", "born, signed", "remark", "constant", "nothing"):
        assert sum(f": {columns}." in note for note in data.notes) == 1, columns


@pytest.mark.parametrize(("separator", "comma"), [(";", True), (";", False), ("\t", False), ("|", False)])
def test_separators_and_decimal_commas(separator: str, comma: bool, write: Write) -> None:
    rows = make_mixed_rows()
    plain = table(str(write(rows)))
    if comma:
        rows = [rows[0], *([row[0].replace(".", ","), row[1].replace(".", ","), *row[2:]] for row in rows[1:])]
    data = table(str(write(rows, "other.csv", separator)))
    assert torch.equal(data.x, plain.x) and torch.equal(data.y, plain.y)


def test_byte_order_mark_blank_lines_and_quoted_line_ends(tmp_path: Path) -> None:
    lines = ["size,kind"] + [f'{i},"a\nb"' if i % 2 else f"{i},c" for i in range(3, 33)]
    path = tmp_path / "t.csv"
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n\r\n".join(lines).encode())
    data = table(str(path))
    assert data.class_names == ("a\nb", "c") and len(data.x) == 30


def test_a_number_as_label_is_classes_or_a_regression(write: Write) -> None:
    few = table(str(write([["a", "b"], *([i * 1.1, i % 3] for i in range(60))])))
    assert few.task == "classification" and few.class_names == ("0", "1", "2")
    rows = [["a", "b"], *([i * 1.1, i * 0.37 + 1] for i in range(60))]
    data = table(str(write(rows, "r.csv")))
    assert data.task == "regression" and "(regression)" in data.notes[0]
    train = data.splits["train"]
    assert data.batch(train)[1].mean().abs() < 1e-5 and abs(data.batch(train)[1].std(correction=0) - 1) < 1e-5
    other = prepare_table(write(rows[:20], "other.csv"), data)  # in the unit of the training rows, not of its own
    assert torch.allclose(other.batch(torch.arange(19))[1], data.batch(torch.arange(19))[1])


@pytest.mark.parametrize("names", [["a", "a", "kind"], ["a", 1, "1", "kind"], ["a", "kind", "kind"]])
def test_a_frame_has_each_column_once(names: list[Any]) -> None:
    rows = [[*(i * 0.5 + at for at in range(len(names) - 1)), "xy"[i % 2]] for i in range(40)]
    twice = next(name for name in map(str, names) if [*map(str, names)].count(name) > 1)
    with raises(DataError, f'"{twice}"', column=twice):
        wrap(pandas.DataFrame(rows, columns=names))
    once = wrap(pandas.DataFrame(rows, columns=[*range(len(names) - 1), "kind"]))
    assert TableEncoder.from_json(once.columns, "").features == [str(at) for at in range(len(names) - 1)]


def test_rows_that_are_new_become_the_same_numbers(write: Write) -> None:
    rows = make_mixed_rows()
    data = table(str(write(rows)))
    assert torch.equal(prepare_table(write(rows, "again.csv"), data).x, data.x)
    shuffled = [[row[2], "further", row[1], row[0]] for row in rows]  # other order, other columns, no label
    other = prepare_table(write(shuffled, "shuffled.csv"), data)
    assert torch.equal(other.x, data.x) and not other.labeled
    strange = prepare_table(write([rows[0], ["1", "2", "violet", "cat"]], "strange.csv"), data)
    assert not strange.x[0, 3:].any() and "1 row " in strange.notes[0]


def test_new_categories_are_written_as_in_the_training_rows(write: Write) -> None:
    """Also where they alone look like numbers, and where pandas reads the words as truth values."""
    rows = [["code", "old", "kind"], *([["1.0", "2", "beta", "01"][i % 4], str(i % 3 == 0), "ab"[i % 2]]
                                      for i in range(60))]  # fmt: skip
    data = table(str(write(rows)))
    new = write([rows[0], *(row for row in rows if row[0] in ("1.0", "01"))], "new.csv")
    expected = torch.as_tensor(data.x)[[i for i in range(60) if i % 4 in (0, 3)]]
    assert torch.equal(prepare_table(new, data).x, expected)  # type: ignore[arg-type]
    for dtype in ({"old": str}, {}):
        memory = read_memory(pandas.read_csv(new, dtype={"code": str, **dtype}))
        assert isinstance(memory, TableSplits)
        assert torch.equal(prepare_table(memory.splits["train"], data).x, expected)  # type: ignore[arg-type]
    (note,) = prepare_table(write([rows[0], ["2.0", "True", "a"]], "strange.csv"), data).notes
    assert '"2.0"' in note and '"code"' in note


def test_truth_values_are_classes_that_are_called_so(write: Write) -> None:
    rows = [["size", "kind"], *([i % 7, str(i % 3 == 0).upper()] for i in range(60))]
    path = write(rows)
    memory = read_memory(pandas.read_csv(path))
    assert isinstance(memory, TableSplits) and memory.splits["train"].column("kind").to_pylist()[0] is True
    data = table(str(path))
    assert torch.equal(prepare_table(memory.splits["train"], data).y, data.y)


def test_a_parquet_file_and_a_folder_of_splits(write: Write, tmp_path: Path) -> None:
    rows = make_mixed_rows()
    plain = table(str(write(rows)))
    frame = pandas.read_csv(tmp_path / "things.csv")
    frame.to_parquet(tmp_path / "things.parquet")
    data = table(str(tmp_path / "things.parquet"))
    assert torch.equal(data.x, plain.x) and data.columns == plain.columns
    folder = tmp_path / "set"
    folder.mkdir()
    frame[:40].to_csv(folder / "train.csv", index=False)
    frame[40:][["kind", "color", "age", "size"]].to_csv(folder / "test.csv", index=False)
    divided = table(str(folder))
    assert divided.splits["test"].tolist() == list(range(40, 60)) and len(divided.splits["validation"]) == 4


def test_rows_are_read_once_and_no_split_is_passed_over(write: Write, tmp_path: Path) -> None:
    """Of two divisions of one split, and of a test set of another format."""
    frame = pandas.read_csv(write(make_mixed_rows()))
    for name, rows in (("of-00001", frame), ("00000-of-00002", frame[:30]), ("00001-of-00002", frame[30:])):
        path = tmp_path / "parts" / f"train-{name}.parquet"
        path.parent.mkdir(exist_ok=True)
        rows.to_parquet(path)
    with raises(DataError, 1, 2, path=tmp_path / "parts"):
        table(str(tmp_path / "parts"))
    (tmp_path / "mixed").mkdir()
    frame.to_csv(tmp_path / "mixed" / "test.tsv", sep="\t")
    for name, save in (("train.csv", frame.to_csv), ("train.parquet", frame.to_parquet)):
        save(tmp_path / "mixed" / name)
        with raises(DataError, name, path=tmp_path / "mixed" / "test.tsv"):
            table(str(tmp_path / "mixed"))
        (tmp_path / "mixed" / name).unlink()


@pytest.mark.parametrize(("dtype", "mark"), [("int64", -999), ("float64", -999.9), ("float32", -999.9), (None, -999)])
def test_a_number_that_means_no_value_does_so_in_parquet(dtype: Any, mark: float, tmp_path: Path, write: Write) -> None:
    numbers = [mark if i % 7 == 3 else float(i % 5) for i in range(60)]
    rows = [["a", "b", "kind"], *([number, i * 0.5, "xy"[i % 2]] for i, number in enumerate(numbers))]
    frame = pandas.DataFrame(rows[1:], columns=rows[0])
    frame["a"] = [decimal.Decimal(str(number)) for number in numbers] if dtype is None else frame["a"].astype(dtype)
    frame.to_parquet(tmp_path / "things.parquet")
    frame.to_csv(tmp_path / "things.csv", index=False)
    plain = table(str(tmp_path / "things.csv"), missing=(str(frame["a"][3]),))
    data = table(str(tmp_path / "things.parquet"), missing=("unknown", str(mark)))
    assert TableEncoder.from_json(data.columns, "").features == ["a", "a is missing", "b"]
    assert torch.equal(data.x, plain.x) and data.x[3, 0] == 0 and data.x[:, 1].sum() == numbers.count(mark)
    again = prepare_table(tmp_path / "things.parquet", data)
    assert torch.equal(again.x, data.x)


def test_what_is_infinite_or_untrue_in_parquet_can_mean_no_value(tmp_path: Path) -> None:
    path = tmp_path / "things.parquet"
    sizes = [math.inf if i == 3 else float(i % 5) for i in range(60)]
    pandas.DataFrame({"size": sizes, "wet": [i % 3 == 0 for i in range(60)], "kind": ["x", "y"] * 30}).to_parquet(path)
    with raises(DataError, '"inf"', row=4, column="size", path="things.parquet"):
        table(str(path))
    data = table(str(path), missing=("inf", "1"))
    assert data.x[3, 0] == 0 and TableEncoder.from_json(data.columns, "").features[-1] == "wet"
    with raises(DataError, column="wet", path="things.parquet"):
        table(str(path), label="wet", missing=("inf", "true", "false"))


@pytest.mark.parametrize(("key", "value"), [("separator", ";"), ("header", False)])
def test_keys_of_csv_files_are_refused_beside_parquet(key: str, value: Any, tmp_path: Path) -> None:
    pandas.DataFrame({"a": range(40), "kind": ["x", "y"] * 20}).to_parquet(tmp_path / "things.parquet")
    with raises(DataError, key=key, path="things.parquet"):
        table(str(tmp_path / "things.parquet"), **{key: value})


def text(tmp_path: Path, content: str | bytes, name: str = "bad.csv") -> str:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


GOOD = "".join(f"{i},{i * 3 % 7},{'ab'[i % 2]}\n" for i in range(30))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", Expected()),
        ("a,b,c\n", Expected()),
        ("a\n1\n2\n", Expected(key="separator")),
        ("1,2,3\n4,5,6\n", Expected("header = false", key="header")),
        ("a,a,c\n" + GOOD, Expected(column="a")),
        ("a,b,c\n" + GOOD + "1,2\n", Expected(2, 3, row=32)),
        ("a,b,c\n" + GOOD + "1,2,3,4\n", Expected(4, 3, row=32)),
        ("a,b,c\n" + GOOD + "1,\0,b\n", Expected(1, row=31, column="b")),
        ("a,b,c\n" + GOOD + "1,inf,b\n", Expected('missing = ["inf"]', row=31, column="b")),
        ("a,b,c\n" + GOOD + "1,1e999,b\n", Expected('missing = ["inf"]', row=31, column="b")),
        ("a,b,c\n" + GOOD + "1,many,b\n", Expected(1, '"many"', row=31, column="b")),
        ("a,b,c\n" + GOOD + '1,"2,b\n', Expected(row=32)),
        ("a,b,c\n" + "".join(f"{i},{i % 4},same\n" for i in range(30)), Expected('"same"', column="c")),
        ("a,b,c\n" + "".join(f"{i},{i % 4},\n" for i in range(30)), Expected(column="c", key="label")),
        ("a,c\n" + "".join(f"5,{'ab'[i % 2]}\n" for i in range(30)), Expected(key="drop")),
        ("a,b,c\n" + "".join(f"{i}e300,{i % 4},{'ab'[i % 2]}\n" for i in range(30)), Expected(column="a")),
        ("a,c\n" + "".join(f"{i % 7},a note number {i}\n" for i in range(2000)), Expected("number 0", column="c")),
        (b"a,b,c\n\xff\xfe\xfa,2,x\n", Expected("UTF-8", "0xff")),
        ("a,b\n1,2\n".encode("utf-16"), Expected("UTF-16")),
        (b"PK\x03\x04" + bytes(100), Expected()),
        ("x" * 300 + ",b\n1,2\n", Expected(300)),
        ("a,b\n" + "1" * (5 << 20) + ",2\n", Expected("4,194,304", row=2)),
    ],
)  # fmt: skip
def test_what_is_no_table_is_a_sentence(content: str | bytes, expected: Expected, tmp_path: Path) -> None:
    with raises(DataError, expected, path=text(tmp_path, content)) as error:
        table(text(tmp_path, content))
    assert len(str(error.value)) < 900


def test_other_wishes_that_cannot_be_met(write: Write, tmp_path: Path) -> None:
    path = str(write(make_mixed_rows()))
    with raises(DataError, '"color"', column="colr", path="things.csv"):
        table(path, drop=("colr",))
    with raises(DataError, '"kind"', column="knd", path="things.csv"):
        table(path, label="knd")
    with raises(DataError, key="separator"):
        table(path, separator="::")
    with raises(DataError, path="a.csv.gz"):
        table(text(tmp_path, b"x", "a.csv.gz"))
    data = table(path)
    with raises(DataError, column="age", path="less.csv"):
        prepare_table(write([row[:1] + row[2:] for row in make_mixed_rows()], "less.csv"), data)
    with raises(DataError, '"cow"', row=1, column="kind", path="cow.csv"):
        prepare_table(write([["size", "age", "color", "kind"], [1, 2, "red", "cow"]], "cow.csv"), data)
    with raises(DataError, '"big"', row=1, column="size", path="big.csv"):
        prepare_table(write([["size", "age", "color", "kind"], ["big", 2, "red", "cat"]], "big.csv"), data)


@pytest.mark.parametrize(("key", "value", "says"), [
    ("label", "color", 'the column "kind" is the label'), ("task", "regression", "the task is classification"),
    ("drop", ("age",), "the column is a feature"), ("categories", ("size",), "the column has numbers"),
])  # fmt: skip
def test_what_columns_says_otherwise_is_refused(key: str, value: Any, says: str, write: Write, tmp_path: Path) -> None:
    path = str(write([[*row, i % 5] for i, row in enumerate(make_mixed_rows())]))
    data = table(path, label="kind", drop=("0",), categories=("color",))
    (tmp_path / "columns.json").write_text(data.columns)
    settings = {"transform": str(tmp_path)}
    again = table(path, label="kind", task="classification", drop=("0",), categories=("color",), **settings)
    assert torch.equal(again.x, data.x)
    with raises(DataError, says, key=key, path="columns.json"):
        table(path, **{key: value}, **settings)


def test_further_marks_count_beside_columns(write: Write, tmp_path: Path) -> None:
    rows = make_mixed_rows()
    (tmp_path / "columns.json").write_text(table(str(write(rows))).columns)
    rows[1] = [rows[1][0], "unknown", *rows[1][2:]]
    path = str(write(rows, "mine.csv"))
    with raises(DataError, '"unknown"', row=1, column="age", path="mine.csv"):
        table(path, transform=str(tmp_path))
    data = table(path, transform=str(tmp_path), missing=("unknown",))
    assert data.x[0, 1:3].tolist() == [0, 1]


@pytest.mark.parametrize("change", [
    {"format": 2}, {"task": "magic"}, {"columns": []}, {"label": {"name": "kind", "classes": []}},
    {"columns": [{"kind": "number", "name": "size", "mean": 0, "std": 0}]},
    {"columns": [{"kind": "number", "name": "size", "mean": 0, "std": 1}] * 2}, {"more": 1},
])  # fmt: skip
def test_a_damaged_description_is_a_sentence(change: dict[str, Any], write: Write) -> None:
    description = json.loads(table(str(write(make_mixed_rows()))).columns)
    with raises(DataError, "columns.json"):
        TableEncoder.from_json(json.dumps({**description, **change}), "columns.json")
    with raises(DataError, "columns.json", "double"):
        TableEncoder.from_json("{", "columns.json")


def test_wishes(write: Write) -> None:
    rows = [["zip", "hospital", "size", "kind"], *([10 + i % 3, "xyz"[i % 3], i * 0.5, "ab"[i % 2]] for i in range(60))]
    data: Data = table(str(write(rows)), categories=("zip",), groups="hospital", drop=("size",), samples=30)
    assert TableEncoder.from_json(data.columns, "").features == ["zip = 10", "zip = 11", "zip = 12"]
    assert data.groups is not None and set(data.groups.tolist()) == {0, 1, 2}
    assert len(data.splits["train"]) + len(data.splits["validation"]) == 30
