"""The papers' tables, computed: parameters within one percent of what is printed and multiply-adds within three."""

import subprocess
import sys
from pathlib import Path

import pytest
from support import raises

from fleetfit.cost import submodel_cost
from fleetfit.errors import ConfigError
from fleetfit.models.msdnet import msdnet24
from fleetfit.papers import TABLES, paper_table
from fleetfit.papers.table import PaperTable, Value

PAGE = Path(__file__).parents[2] / "docs" / "paper-tables.md"

# Rows that no ratio reproduces: level, and which of the two costs is off.
INCONSISTENT = {("table-7", "1-w", "multiply-adds"), ("table-9", "1-w", "multiply-adds")}
# The last digit that a table prints of its parameters, in millions.
LAST_DIGIT = {"table-1": 0.01, "table-6": 0.01, "table-7": 0.01, "table-8": 0.1, "table-9": 0.1,
              "adaptivefl-table-1": 0.01}  # fmt: skip
# What is printed: parameters and multiply-adds in millions, copied from the papers.
PRINTED = {
    "table-1": {"4": (1.73, 253.1), "3": (0.86, 138.5), "2": (0.46, 99.7), "1": (0.21, 83.4)},
    "table-6": {"4": (1.73, 253.1), "3-w": (0.82, 119.7), "2-w": (0.44, 63.2), "1-w": (0.21, 28.0),
                "3-dw": (0.86, 138.5), "2-dw": (0.46, 99.7), "1-dw": (0.21, 83.4)},
    "table-7": {"4": (2.64, 101.9), "3-w": (1.33, 48.1), "2-w": (0.66, 25.6), "1-w": (0.30, 12.4),
                "3-dw": (1.38, 59.7), "2-dw": (0.64, 32.4), "1-dw": (0.28, 15.8)},
    "table-8": {"4": (17.2, 1223.5), "3-w": (8.6, 613.3), "2-w": (4.2, 299.2), "1-w": (2.1, 148.8),
                "3-dw": (8.6, 799.6), "2-dw": (4.5, 641.5), "1-dw": (2.1, 534.1)},
    "table-9": {"4": (109.5, 163.5), "3-w": (57.3, 106.2), "2-w": (27.1, 72.0), "1-w": (14.7, 22.3),
                "3-dw": (54.8, 85.3), "2-dw": (26.1, 42.9), "1-dw": (13.7, 22.2)},
    "adaptivefl-table-1": {"L1": (33.65, 333.22), "M1": (16.81, 272.17), "M2": (15.41, 239.95), "M3": (14.84, 203.41),
                           "S1": (8.39, 239.00), "S2": (6.48, 191.31), "S3": (5.67, 139.07)},
}  # fmt: skip


@pytest.fixture(scope="module")
def tables() -> dict[str, PaperTable]:
    return {name: paper_table(name) for name in TABLES}


def numbers(table: PaperTable, row: tuple[Value, ...]) -> tuple[float, float, float, float]:
    """Parameters and multiply-adds, each as computed and as printed."""
    at = [i for i, column in enumerate(table.columns) if column == "printed"][:2]
    found = [row[i] for place in at for i in (place - 1, place)]
    assert all(isinstance(value, float) for value in found)
    return tuple(found)  # type: ignore[return-value]


@pytest.mark.parametrize("name", list(PRINTED))
def test_every_row_has_the_printed_costs(name: str, tables: dict[str, PaperTable]) -> None:
    """A printed number has two or three digits, so a parameter count may also be off by less than the last of them."""
    table, seen = tables[name], {}
    assert {len(row) for row in table.rows} == {len(table.columns)}
    for row in table.rows:
        parameters, said, multiply_adds, said_too = numbers(table, row)
        level = str(row[0])
        if level.endswith(", as printed"):
            assert parameters < 0.8 * said and multiply_adds < 0.8 * said_too  # the printed ratio is plainly wrong
            continue
        seen[level] = said, said_too
        assert abs(parameters - said) <= max(0.01 * said, LAST_DIGIT[name]), level
        off = abs(multiply_adds / said_too - 1)
        assert (off > 0.03) == ((name, level, "multiply-adds") in INCONSISTENT), (level, off)
    assert seen == PRINTED[name]


def test_rows_whose_printed_ratio_is_wrong_say_so(tables: dict[str, PaperTable]) -> None:
    found = {(name, row[0], row[2]) for name, table in tables.items() for row in table.rows if "printed" in str(row[0])}
    assert found == {
        ("table-6", "2-w, as printed", 0.45), ("table-6", "1-w, as printed", 0.30),
        ("table-8", "2-dw, as printed", 0.65), ("table-8", "1-dw, as printed", 0.65),
    }  # fmt: skip


def test_no_width_of_msdnet_has_both_costs_of_row_1_w() -> None:
    """Base and growth numbers are 5 and 2, then 6 and 2, then 6 and 2 with more in the classifiers."""
    for width in (0.35, 0.38, 0.42):
        cost = submodel_cost(msdnet24(), (msdnet24().sizes(width), (15, 18, 21, 24)), (3, 32, 32))
        off = abs(cost.parameters / 0.30e6 - 1), abs(cost.multiply_adds / 12.4e6 - 1)
        assert off[0] > 0.01 or off[1] > 0.03


def test_table_9_counts_by_hand(tables: dict[str, PaperTable]) -> None:
    """Level 4: 12 (4 * 768^2 + 2 * 768 * 3072) + 768^2 + 2 * 768 once; 12 * 2 * 64^2 * 768; 25 * 2 * 64 * 768."""
    linear, pooler = 12 * (4 * 768**2 + 2 * 768 * 3072), 768**2 + 2 * 768
    products, norms = 12 * 2 * 64**2 * 768, 25 * 2 * 64 * 768
    row = tables["table-9"].rows[0]
    assert row[6] == round((linear + pooler + products + norms) / 1e6, 1) == 163.5
    assert row[8] == round((64 * linear + pooler + products) / 1e6)  # the pooler and the classifier see one token


def test_the_pool_is_the_papers(tables: dict[str, PaperTable]) -> None:
    """Settings of the rows, and the ratios, which are printed with two digits."""
    rows = tables["adaptivefl-table-1"].rows
    assert [row[:3] for row in rows] == [("L1", 1.0, None), ("M1", 0.66, 8), ("M2", 0.66, 6), ("M3", 0.66, 4),
                                         ("S1", 0.4, 8), ("S2", 0.4, 6), ("S3", 0.4, 4)]  # fmt: skip
    assert [row[7] for row in rows] == [row[8] for row in rows]


def test_eq_1_beside_table_1(tables: dict[str, PaperTable]) -> None:
    table = tables["table-1"].parts[0]
    assert [row[1] for row in table.rows] == [1.0, 0.5, 0.25, 0.125]
    assert [row[4] for row in table.rows][1:] == ["45 at 0.83, 0.003", "40 at 0.74, 0.001", "36 at 0.69, 0.023"]
    for row in table.rows:
        for cost in row[3::2]:
            assert abs(float(str(cost)) / float(str(row[1])) - 1) <= 0.1 + 1e-3  # every column satisfies the constraint


def test_the_page_has_every_row(tables: dict[str, PaperTable]) -> None:
    """docs/paper-tables.md is what `fleetfit plan --paper` prints, as Markdown."""
    page = PAGE.read_text(encoding="utf-8")
    for name, table in tables.items():
        assert f"`fleetfit plan --paper {name}`" in page
        for line in table.as_text()[0].to_markdown().splitlines()[2:]:
            if line.startswith("|"):
                assert line in page, (name, line)


def test_every_table_is_held() -> None:
    """Those of ReeFL in test_papers_of_reefl.py."""
    assert set(TABLES) == {*PRINTED, "reefl-table-1", "reefl-table-2"}


def test_unknown_tables_are_named() -> None:
    with raises(ConfigError, '"table-1"', key="name"):
        paper_table("table1")


def test_nothing_below_the_verbs_imports_them() -> None:
    """Nor what is drawn at a run's end: in a process that ran and reported, none of it is loaded."""
    code = (
        "import pkgutil, importlib, sys, fleetfit\n"
        "for package in ('api', 'report', 'inference', 'engines', 'methods'):\n"
        "    for module in pkgutil.iter_modules([f'{fleetfit.__path__[0]}/{package}']):\n"
        "        importlib.import_module(f'fleetfit.{package}.{module.name}')\n"
        "print([name for name in sys.modules if name.startswith('fleetfit.papers')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
