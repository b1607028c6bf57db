"""Encode the rows of a CSV file as columns.json says, as in training. Needs only numpy."""

import csv
import json
from pathlib import Path

import numpy as np

MISSING = {"", "na", "n/a", "nan", "null", "none", "?", "-", "<na>", "nat"}


def read_rows(path, folder="."):
    """Return the rows of a CSV file with a header as float32 [N, features]."""
    table = json.loads((Path(folder) / "columns.json").read_text(encoding="utf-8"))
    missing = MISSING | {mark.strip().lower() for mark in table["missing"]}
    codes, encoded = table.get("codes", ()), []
    with Path(path).open(encoding="utf-8-sig", newline="") as file:
        start = file.read(65536)
        file.seek(0)
        rows = csv.DictReader(file, delimiter=max(",;\t|", key=start.partition("\n")[0].count))
        for column in table["columns"]:
            if column["name"] not in (rows.fieldnames or ()):
                raise SystemExit(f"{path} has no column {column['name']!r}, which the model needs.")
        for row in rows:
            values = []
            for column in table["columns"]:
                text = (row[column["name"]] or "").strip()
                is_missing = text.lower() in missing
                if column["kind"] == "category":
                    text = text if column["name"] in codes else shorten(text)
                    values += [float(text == value and not is_missing) for value in column["values"]]
                    continue
                number = column["mean"] if is_missing else parse(text, column, f"{path}, line {rows.line_num}")
                values += [(number - column["mean"]) / column["std"], *[float(is_missing)] * column["missing"]]
            encoded.append(values)
    return np.array(encoded, dtype=np.float32)


def shorten(text):
    """Return a text; of a whole number without its fraction, so that 1.0 is the category 1."""
    try:
        return str(int(float(text))) if float(text) == int(float(text)) and len(text) < 16 else text
    except (ValueError, OverflowError):
        return text


def parse(text, column, where):
    form = column.get("form") or {"sign": "", "thousands": "", "decimal": "."}
    plain = text.replace(form["thousands"], "") if form["thousands"] else text
    plain = plain.replace(form["sign"], "") if form["sign"] else plain
    try:
        return float(plain.replace(form["decimal"], "."))
    except ValueError:
        raise SystemExit(f"{where}: {column['name']!r} has {text[:40]!r}, which is not a number.") from None
