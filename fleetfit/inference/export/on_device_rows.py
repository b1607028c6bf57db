"""Encode the rows of a CSV file as columns.json says, as in training. Needs only numpy."""

import csv
import itertools
import json
import math
import re
from pathlib import Path

import numpy as np

MISSING = {"", "na", "n/a", "nan", "null", "none", "?", "-", "<na>", "nat"}
NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


def read_rows(path, folder="."):
    """Return the rows of a CSV file with a header, after comments that begin with #, as float32 [N, features]."""
    table = json.loads((Path(folder) / "columns.json").read_text(encoding="utf-8"))
    missing = MISSING | {mark.strip().lower() for mark in table["missing"]}
    marks = {float(mark) for mark in missing if NUMBER.fullmatch(mark)}
    codes, encoded = table.get("codes", ()), []
    with Path(path).open(encoding="utf-8-sig", newline="") as file:
        before, comment, line = 0, "", file.readline()
        while line and (not line.strip() or line.startswith("#")):
            before, comment, line = before + 1, line, file.readline()
        starts = {mark: comment[:1] == "#" and comment.count(mark) == line.count(mark) > 0 for mark in ",;\t|"}
        separator = max(starts, key=lambda mark: (starts[mark], line.count(mark)))
        header = [comment] if starts[separator] else []  # whose first name begins with #
        before -= len(header)
        rows = csv.DictReader(itertools.chain(header, [line], file), delimiter=separator)
        rows.fieldnames = names = [name.strip() for name in rows.fieldnames or ()]
        for column in table["columns"]:
            if column["name"] not in names:
                raise SystemExit(f"{path} has no column {column['name']!r}, which the model needs.")
        for row in rows:
            values = []
            for column in table["columns"]:
                text = (row[column["name"]] or "").strip()
                is_text = column["name"] in codes or text in column.get("values", ())
                number = None if is_text else parse(text, column.get("form"), separator)
                is_missing = text.lower() in missing or number in marks
                if column["kind"] == "category":
                    if number is not None:
                        text = str(int(number)) if number == int(number) else repr(number)
                    values += [float(text == value and not is_missing) for value in column["values"]]
                    continue
                if number is None and not is_missing:
                    where = f"{path}, line {before + rows.line_num}"
                    raise SystemExit(f"{where}: {column['name']!r} has {text[:40]!r}, which is not a number.")
                number = column["mean"] if is_missing else number
                values += [(number - column["mean"]) / column["std"], *[float(is_missing)] * column["missing"]]
            encoded.append(values)
    return np.array(encoded, dtype=np.float32)


def parse(text, form, separator):
    """Return a finite number in the format of a column; None for another text."""
    if form and form["sign"]:
        text = re.sub(rf"\s*{re.escape(form['sign'])}\s*", "", text, count=1)
    if form and form["thousands"]:
        mark = {" ": "[ \xa0\u202f]", "'": "['\u2019]"}.get(form["thousands"], re.escape(form["thousands"]))
        grouped = rf"[+-]?([1-9][0-9]{{0,2}}({mark}[0-9]{{3}})+|[0-9]+)({re.escape(form['decimal'])}[0-9]*)?"
        text = re.sub(mark, "", text) if re.fullmatch(grouped, text) else ""
    if form["decimal"] == "," if form else separator == ";":
        text = re.sub(r"^([^.,]*),([^.,]*)$", r"\1.\2", text)
    return float(text) if NUMBER.fullmatch(text) and math.isfinite(float(text)) else None
