"""Tables as people write them: every value is the one that pandas reads, and a fault names file, row and column."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from support import Expected, raises

from fleetfit.data import Data
from fleetfit.data.files import table as table_module
from fleetfit.data.files.memory import TableSplits, read_memory
from fleetfit.data.files.table import (
    Column,
    NumberForm,
    TableEncoder,
    detect_columns,
    make_data_in_memory,
    prepare_table,
    read_sheet,
    read_table,
    table,
)
from fleetfit.errors import DataError


def detect(path: Path, **keys: Any) -> dict[str, Column]:
    return detect_columns(read_sheet(path, **keys), keys.get("missing", ()))


def check_values(columns: dict[str, Column], frame: pandas.DataFrame) -> None:
    """Compare columns with those of pandas, by their places."""
    assert list(columns) == [str(name) for name in frame.columns]
    for column, (_, series) in zip(columns.values(), frame.items(), strict=True):
        assert column.missing.tolist() == series.isna().tolist(), column.name
        if pandas.api.types.is_numeric_dtype(series):
            np.testing.assert_array_equal(column.numbers, series.astype("float64"))
        else:
            texts = [column.texts[code].as_py() if code >= 0 else None for code in column.codes.tolist()]
            assert texts == [None if pandas.isna(text) else str(text).strip() for text in series], column.name


PLAIN = "a,b,kind\n1,0.5,cat\n2,,dog\n3,1.5,cat\n"
LONG = "x" * 200_000
CASES: dict[str, tuple[str | bytes, dict[str, Any]]] = {
    "plain": (PLAIN, {}),
    "byte order mark": ("\ufeff" + PLAIN, {"encoding": "utf-8-sig"}),
    "semicolons": (PLAIN.replace(",", ";"), {"sep": ";"}),
    "tabs": (PLAIN.replace(",", "\t"), {"sep": "\t"}),
    "bars": (PLAIN.replace(",", "|"), {"sep": "|"}),
    "CRLF": (PLAIN.replace("\n", "\r\n"), {}),
    "old Macintosh": (PLAIN.replace("\n", "\r"), {}),
    "no end of line": (PLAIN.rstrip(), {}),
    "empty lines": ("\n\n" + PLAIN.replace("\n", "\n\n"), {}),
    "lines of white space": (PLAIN + "   \n", {"skipfooter": 1, "engine": "python"}),
    "comment": ("# made by hand, in 2020\n" + PLAIN, {"comment": "#"}),
    "comments": ("# made by hand\n\n#\n" + PLAIN, {"comment": "#"}),
    "names that begin with #": ("#" + PLAIN, {}),
    "quotes within quotes": ('a,kind\n1,"the ""big"" one"\n2,"a, b"\n3,"the ""big"" one"\n', {}),
    "lines within quotes": ('a,kind\n1,"two\nlines"\n2,one\n', {}),
    "quotes in a cell": ('a,kind\n1,5" wide\n2,6" wide\n', {"quoting": 3}),
    "a long cell": (f"a,kind\n1,{LONG}\n2,b\n", {}),
    "a long cell in quotes": (f'a,kind\n1,"{LONG},{LONG}"\n2,b\n', {}),
    "one column": ("a\n1\n2\n", {}),
    "one column of texts": ("kind\ncat\ndog\n", {}),
    "exponents and signs": ("a,b\n1e5,+1\n-2.5E-3,-.5\n7.,+.25\n", {}),
    "large whole numbers": ("a,b\n9007199254740992,1\n18446744073709551616,2\n", {"dtype": "float64"}),
    "white space around numbers": ("a,b\n 1 ,x\n 2,y\n", {}),
    "decimal commas": ("a;b\n1,5;x\n-0,25;y\n3;z\n", {"sep": ";", "decimal": ","}),
    "decimal points between semicolons": ("a;b\n1.5;x\n-0.25;y\n", {"sep": ";"}),
    "decimal commas in quotes": ('a,b\n"1,5",x\n"-0,25",y\n', {"decimal": ","}),
    "decimal commas between tabs": ("a\tb\n1,5\tx\n0,25\ty\n3\tz\n", {"sep": "\t", "decimal": ","}),
    "thousands": ('a,b\n"1,234",x\n"12,345,678.5",y\n999,z\n', {"thousands": ","}),
    "thousands between tabs": ("a\tb\n1,234\tx\n-5,678\ty\n", {"sep": "\t", "thousands": ","}),
    "thousands and decimal commas": ("a;b\n1.234,5;x\n12.345.678;y\n", {"sep": ";", "thousands": ".", "decimal": ","}),
    "thousands in spaces": ("a,b\n1 234,x\n12 345 678,y\n", {"thousands": " "}),
    "apostrophes": ("a,b\n1'234.5,x\n12'345,y\n", {"thousands": "'"}),
    "no value": ("a,b\n1,NA\nn/a,x\n?,y\n-,NULL\nnan,z\n4,None\n", {"na_values": ["n/a", "?", "-", "None"]}),
    "truths are texts": ("a,b\ntrue,True\nfalse,False\n", {"dtype": str}),
    "dates are texts": ("a,b,c\n2020-01-01,10:30,2020-01-01 10:30\n2021-02-03,11:45,2021-02-03\n", {"dtype": str}),
    "other alphabets": ("Größe,Ünïcode\n1,日本\n2,ελληνικά\n", {}),
    "texts after many numbers": ("a,b\n" + "1,2\n" * 3000 + "x,3\n", {"dtype": {"a": str}}),
    "fractions after many whole numbers": ("a,b\n" + "1,2\n" * 3000 + "1.5,3\n", {}),
    "numbers after many empty cells": ("a,b\n" + ",2\n" * 3000 + "1.5,3\n", {}),
    "times after many dates": ("a,b\n" + "2020-01-01,2\n" * 3000 + "10:30,3\n", {}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("block", [1 << 22, 1 << 10])
def test_values_are_those_of_pandas(case: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pyarrow parses a block at a time; what a column holds is the same wherever the blocks end."""
    content, keys = CASES[case]
    if LONG not in content:
        monkeypatch.setattr(table_module, "_BLOCK", block)
    path = tmp_path / "t.csv"
    path.write_bytes(content.encode())
    check_values(detect(path), pandas.read_csv(path, **keys))


@pytest.mark.parametrize("rows", [["5.1,3.5,setosa", "4.9,3.0,virginica", "5.0,3.1,setosa"], ["1,2", "3,4"]])
def test_a_file_without_names(rows: list[str], tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("\n".join(rows))
    with raises(DataError, "header = false", key="header", path="t.csv"):
        read_table(path)
    frame = pandas.read_csv(path, header=None)
    check_values(detect(path, header=False), frame.rename(columns=lambda place: place + 1))


@pytest.mark.parametrize(
    ("cells", "form", "values"),
    [
        (["$1,234.50", "-$3", "$0.25"], NumberForm(sign="$", thousands=","), [1234.5, -3, 0.25]),
        (["1.234,50 €", "3 €", "0,25€"], NumberForm(sign="€", thousands=".", decimal=","), [1234.5, 3, 0.25]),
        (["45%", "4.5 %", "100%"], NumberForm(sign="%"), [45, 4.5, 100]),
        (["£5", "£-6", "£7"], NumberForm(sign="£"), [5, -6, 7]),
        (["3,5%", "12,25%", "7%"], NumberForm(sign="%", thousands=".", decimal=","), [3.5, 12.25, 7]),
    ],
)
def test_signs_are_left_out_of_numbers_with_a_note(
    cells: list[str], form: NumberForm, values: list[float], tmp_path: Path
) -> None:
    frame = pandas.DataFrame({"price": cells * 12, "kind": list("abc") * 12})
    frame.to_csv(tmp_path / "t.csv", index=False)
    expected = frame.price.str.replace(form.thousands or "\0", "").str.replace(form.decimal, ".")
    expected = expected.str.replace(form.sign, "").str.replace(" ", "").astype(float)
    assert expected[:3].tolist() == values
    column = detect(tmp_path / "t.csv")["price"]
    assert column.form == form and column.numbers.tolist() == expected.tolist()
    data = table(str(tmp_path / "t.csv"))
    assert any("price" in note and cells[0] in note for note in data.notes[1:])
    assert TableEncoder.from_json(data.columns, "").number_forms == {"price": form}
    frame[:3].to_csv(tmp_path / "new.csv", index=False)
    assert prepare_table(tmp_path / "new.csv", data).x.equal(data.x[:3])  # type: ignore[union-attr, arg-type]
    categories = table(str(tmp_path / "t.csv"), categories=("price",))
    assert TableEncoder.from_json(categories.columns, "").features == sorted(f"price = {cell}" for cell in cells)


@pytest.mark.parametrize("cells", [["45%", "many", "5%"], ["$5", "€6", "$7"], ["1.2.3", "1.2.4", "2.0.1"],
                                   ["12%", "13", "14%"], ["030 123", "030 456", "031 789"]])  # fmt: skip
def test_a_column_that_is_not_all_numbers_stays_text(cells: list[str], tmp_path: Path) -> None:
    pandas.DataFrame({"a": cells, "b": "xyz"}).to_csv(tmp_path / "t.csv", index=False)
    column = detect(tmp_path / "t.csv")["a"]
    assert column.kind == "texts" and column.texts.to_pylist() == cells


def test_new_rows_are_read_in_the_form_of_the_training_rows(tmp_path: Path) -> None:
    """1.234 is 1234 where the training rows have 1.234,50; a form of the new rows' own is refused."""
    rows = "".join(f"{i}.234,50;{'ab'[i % 2]}\n" for i in range(1, 41))
    (tmp_path / "t.csv").write_text("price;kind\n" + rows)
    data = table(str(tmp_path / "t.csv"))
    (tmp_path / "new.csv").write_text("price;kind\n1.234,50;a\n1.234;b\n")
    column = detect_columns(read_sheet(tmp_path / "new.csv"), (), {"price": NumberForm(
        thousands=".", decimal=",")})["price"]  # fmt: skip
    assert column.numbers.tolist() == [1234.5, 1234.0]
    (tmp_path / "new.csv").write_text("price;kind\n5%;a\n7%;b\n")
    with raises(DataError, '"5%"', row=1, column="price", path="new.csv"):
        prepare_table(tmp_path / "new.csv", data)


def test_a_column_of_one_kind_in_one_file_and_of_another_in_the_next(tmp_path: Path) -> None:
    """As if both files were one: texts, as they are in the files."""
    (tmp_path / "train.csv").write_text("code,kind\n" + "1.0,a\n2.50,b\n" * 20)
    (tmp_path / "test.csv").write_text("code,kind\nx,a\n2.50,b\n" * 1)
    sheet = read_sheet(tmp_path)
    assert sheet.table.column("code").to_pylist() == ["1.0", "2.50"] * 20 + ["x", "2.50"]
    assert sheet.sizes == {"train": 40, "test": 2}


@pytest.mark.parametrize("kind", ["int64", "Int64", "float32", "string", "category", "bool", "boolean"])
def test_parquet_has_the_values_of_pandas(kind: str, tmp_path: Path) -> None:
    frame = pandas.DataFrame({"a": [0, 1, 1], "b": [0.5, None, 2.5]})
    frame["a"] = frame["a"].astype(kind)
    frame.to_parquet(tmp_path / "t.parquet")
    columns = detect(tmp_path / "t.parquet")
    assert columns["a"].numbers.tolist() == [0, 1, 1]
    np.testing.assert_array_equal(columns["b"].numbers, frame["b"])


CODES = {
    "zeros in front": (["007", "7", "070"], ["0042", "42", "0420", "4200"]),
    "phone numbers": (["+4930123", "+49301", "+1"], ["+49 30 12", "+49 30", "+1 9"]),
    "too many digits for a float": (["12345678901234567890", "12345678901234567891", "3"], ["9007199254740993", "5"]),
    "white space": ([" 01", "1 ", "10"], ["00", "0", "000"]),
}


@pytest.mark.parametrize("case", CODES)
@pytest.mark.parametrize("form", ["csv", "tsv", "parquet", "memory", "folder"])
def test_digits_that_a_number_would_not_give_back_stay_text(case: str, form: str, tmp_path: Path) -> None:
    """Labels, groups and categories have the values that pandas reads as texts, also in a table read later."""
    labels, sites = CODES[case]
    frame = pandas.DataFrame({"site": (sites * 60)[:120], "size": np.arange(120) * 0.5, "kind": labels * 40})
    path = tmp_path / {"csv": "t.csv", "tsv": "t.tsv", "parquet": "t.parquet"}.get(form, "")
    if form == "parquet":
        frame.to_parquet(path)
    elif form == "folder":
        frame[:90].to_csv(path / "train.csv", index=False)
        frame[90:].to_csv(path / "test.csv", index=False)
    elif form != "memory":
        frame.to_csv(path, index=False, sep="," if form == "csv" else "\t")
    if form == "memory":
        memory = read_memory(frame)
        assert isinstance(memory, TableSplits)
        data = make_data_in_memory(memory.splits)
    else:
        data = table(str(path), groups="site")
    kinds, places = ([text.strip() for text in frame[name]] for name in ("kind", "site"))
    assert [data.class_names[code] for code in data.y.tolist()] == kinds
    encoder = TableEncoder.from_json(data.columns, "")
    if form == "memory":
        assert encoder.features == [*(f"site = {place}" for place in sorted(set(places))), "size"]
        assert prepare_table(memory.splits["train"], data).x.equal(data.x)  # type: ignore[union-attr, arg-type]
        return
    assert data.groups is not None and data.groups.tolist() == [sorted(set(places)).index(place) for place in places]
    assert encoder.codes == ("site", "kind")
    again = table(str(path), groups="site", transform=str(_store(tmp_path, data)))
    assert again.groups is not None and again.y.equal(data.y) and again.groups.equal(data.groups)


def _store(folder: Path, data: Data) -> Path:
    (folder / "columns.json").write_text(data.columns)
    return folder


def test_numbers_stay_numbers_beside_codes(tmp_path: Path) -> None:
    """Signed numbers, 0, decimals with a zero in front, and whole numbers that a float holds are no codes."""
    cells = {"a": ["+1", "-2", "+3"], "b": ["0", "10", "7"], "c": ["00.5", "01.5", "2"], "d": ["4503599627370496"] * 3}
    pandas.DataFrame({**cells, "e": ["x", "y", "x"]}).to_csv(tmp_path / "t.csv", index=False)
    columns = detect(tmp_path / "t.csv")
    assert {name: column.numbers.tolist() for name, column in columns.items() if name != "e"} == {
        name: [float(cell) for cell in texts] for name, texts in cells.items()
    }


def test_a_run_from_before_this_rule_reads_its_numbers(tmp_path: Path) -> None:
    """A `columns.json` without codes has the classes 7 and 42, and numbers in the column "size"."""
    pandas.DataFrame({"size": np.arange(40) * 3, "kind": [7, 42] * 20}).to_csv(tmp_path / "old.csv", index=False)
    data = table(str(tmp_path / "old.csv"))
    (tmp_path / "new.csv").write_text("size,kind\n09,007\n0012,42\n")
    again = prepare_table(tmp_path / "new.csv", data)
    assert [data.class_names[code] for code in again.y.tolist()] == ["7", "42"]
    assert again.x.equal(data.x[3:5])  # type: ignore[union-attr, arg-type]


def test_a_label_of_many_different_digits_is_a_regression(tmp_path: Path) -> None:
    values = [f"{value:05d}" for value in range(900, 1100)]
    pandas.DataFrame({"a": np.arange(200) % 7, "price": values}).to_csv(tmp_path / "t.csv", index=False)
    data = table(str(tmp_path / "t.csv"))
    assert data.task == "regression" and data.y[:, 0].tolist() == list(range(900, 1100))


@pytest.mark.parametrize("empty", [{"test": [0, 5, 11]}, {"validation": [3]}, {"train": [1], "test": [2]}])
def test_rows_without_a_group_are_named_in_their_file(empty: dict[str, list[int]], tmp_path: Path) -> None:
    for split, rows in {"train": 40, "validation": 10, "test": 20}.items():
        frame = pandas.DataFrame({"a": np.arange(rows) * 0.5, "bus": list("uv") * (rows // 2), "kind": "x"})
        frame.loc[::3, "kind"] = "y"
        frame.loc[empty.get(split, []), "bus"] = None
        frame.to_csv(tmp_path / f"{split}.csv", index=False)
    split, rows = next(iter(empty.items()))
    numbers = [row + 1 for rows in empty.values() for row in rows]
    with raises(DataError, *numbers, *(f"{name}.csv" for name in empty), path=f"{split}.csv", row=rows[0] + 1,
                column="bus", key="groups"):  # fmt: skip
        table(str(tmp_path), groups="bus")


FAULTS: dict[str, tuple[str | bytes, Expected]] = {
    "empty": ("", Expected()),
    "white space": (" \n\n", Expected()),
    "a comment only": ("# nothing\n", Expected()),
    "no rows": ("a,b\n", Expected()),
    "a cell too few": ("a,b\n1,2\n3\n", Expected(1, 2, row=3)),
    "a cell too many": ("a,b\n" + "1,2\n" * 5000 + "3,4,5\n", Expected(3, 2, row=5002)),
    "after a cell of two lines": ('a,b\n1,"x\ny"\n3\n', Expected(row=4)),
    "an open quote": ('a,b\n1,x\n2,"y\n3,z\n', Expected(row=3)),
    "an open quote far up": ('a,b\n1,x\n2,"y\n' + "3,z\n" * 9000, Expected(row=3)),
    "Latin-1": ("a,b\n1,x\n2,größe\n".encode("latin-1"), Expected("0xf6", row=2, column="b")),
    "Latin-1 names": ("größe,b\n1,x\n".encode("latin-1"), Expected("UTF-8")),
    "a row of another size in Latin-1": (b"a,b\n1,x\n2,x\n\xff\xfe\n", Expected(4, 1, 2)),
    "UTF-16": ("a,b\n1,x\n".encode("utf-16"), Expected("UTF-16")),
    "two columns of one name": ("a,b,a\n1,2,3\n", Expected(column="a")),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_fault_names_its_place(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content, expected = FAULTS[case]
    monkeypatch.setattr(table_module, "_BLOCK", 1 << 13)
    path = tmp_path / "t.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with raises(DataError, expected, path=path):
        read_table(path)


def test_a_column_of_amounts_may_be_empty_in_new_rows(tmp_path: Path) -> None:
    rows = "".join(f'"${i},{100 + i}",{"ab"[i % 2]}\n' for i in range(1, 41))
    (tmp_path / "t.csv").write_text("price,kind\n" + rows)
    (tmp_path / "new.csv").write_text("price,kind\n,a\n")
    data = table(str(tmp_path / "t.csv"))
    assert prepare_table(tmp_path / "new.csv", data).x.tolist() == [[0.0]]  # type: ignore[union-attr]


def test_new_rows_of_one_column(tmp_path: Path) -> None:
    """A model of one feature takes a file of one column; such a file alone has nothing to learn from."""
    pandas.DataFrame({"size": np.arange(40) * 0.5, "kind": list("ab") * 20}).to_csv(tmp_path / "t.csv", index=False)
    data = table(str(tmp_path / "t.csv"))
    (tmp_path / "new.csv").write_text("size\n0.0\n0.5\n")
    assert prepare_table(tmp_path / "new.csv", data).x.equal(data.x[:2])  # type: ignore[union-attr, arg-type]
    with raises(DataError, key="separator", path="new.csv"):
        table(str(tmp_path / "new.csv"))


def test_numbers_have_the_last_digit_of_python() -> None:
    """pyarrow rounds a decimal to the nearest float, as `float` does."""
    from pyarrow import csv

    rng = np.random.default_rng(0)
    texts = [repr(float(number)) for number in rng.standard_normal(2000) * 10.0 ** rng.integers(-300, 300, 2000)]
    texts += [f"{number:.25g}" for number in rng.standard_normal(2000)]
    column = csv.read_csv(io.BytesIO(("a\n" + "\n".join(texts)).encode())).column("a")
    assert column.to_pylist() == [float(text) for text in texts]
