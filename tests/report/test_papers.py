"""The papers' tables, computed: within one percent of what is printed, where the printed ratios give it."""

import pytest

from fleetfit.errors import ConfigError
from fleetfit.report.papers import TABLES, paper_table


def test_table_1_is_reproduced_within_one_percent() -> None:
    table = paper_table("table-1")
    assert [row[0] for row in table.rows] == ["4", "3", "2", "1"]
    for _, _, _, _, parameters, printed, multiply_adds, printed_too in table.rows:
        assert multiply_adds == pytest.approx(printed_too, rel=0.01)
        assert parameters == pytest.approx(printed, rel=0.015)  # 0.465727 stands there as 0.46
    assert [len(row) for row in table.rows] == [len(table.columns)] * 4


def test_width_only_rows_fit_where_the_notes_say_so() -> None:
    rows = {str(row[0]): row for row in paper_table("table-1").parts[0].rows}
    for level in ("3-w", "2-w", "1-w"):
        assert rows[level][4] == pytest.approx(rows[level][5], rel=0.03)
        assert rows[level][6] == pytest.approx(rows[level][7], rel=0.01)
    for level in ("2-w, as printed", "1-w, as printed"):
        assert rows[level][6] < 0.8 * rows[level][7]


def test_eq_1_beside_table_1() -> None:
    table = paper_table("table-1").parts[1]
    assert [row[1] for row in table.rows] == [1.0, 0.5, 0.25, 0.125]
    assert [row[4] for row in table.rows][1:] == ["45 at 0.83, 0.003", "40 at 0.74, 0.001", "36 at 0.69, 0.023"]
    for row in table.rows:
        for cost in row[3::2]:
            assert abs(float(cost) / float(row[1]) - 1) <= 0.1 + 1e-3  # every column satisfies Eq. 1's constraint


def test_unknown_tables_are_named() -> None:
    assert list(TABLES) == ["table-1"]
    with pytest.raises(ConfigError, match='Did you mean "table-1"'):
        paper_table("table1")
