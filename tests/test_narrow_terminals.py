"""Tables on a narrow terminal: in parts that fit, with whole cells, and nothing lost."""

import re

import pytest

from fleetfit.cli import output
from fleetfit.report.text import Table

ROWS = (
    ("FleetFit", "1", "0.96", "7.19 K", "120.8 K", "52.5 MB / 52.1 MB"),
    ("", "2", "1.00", "57.5 K", "411.7 K", ""),
    ("smallest model", "1", "0.36", "7.60 K", "56.3 K", "15.0 MB / 14.7 MB"),
)
SIZES = Table(("run", "level", "width", "parameters", "multiply-adds", "bytes down / up"), ROWS, keys=2)


def print_at(width: int, table: Table, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    output.print_table(table)
    return re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)


def read_parts(printed: str) -> list[list[list[str]]]:
    """Return the parts of a table, each the cells of its lines below the headings."""
    parts = re.findall(r"┡.*\n((?:│.*\n)+)└", printed)
    return [[[cell.strip() for cell in line.strip("│").split("│")] for line in part.splitlines()] for part in parts]


@pytest.mark.parametrize(("width", "parts"), [(120, 1), (85, 1), (84, 1), (60, 2), (48, 3)])
def test_parts_fit_and_repeat_the_keys(
    width: int, parts: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = print_at(width, SIZES, monkeypatch, capsys)
    assert max(map(len, printed.splitlines())) <= width
    read = read_parts(printed)
    assert len(read) == parts
    for part in read:
        assert [tuple(line[:2]) for line in part] == [row[:2] for row in ROWS]
    joined = [tuple(cell for part in read for cell in part[row][2:]) for row in range(3)]
    assert joined == [row[2:] for row in ROWS]


def test_headings_break_at_blanks_and_hyphens_alone(monkeypatch, capsys) -> None:
    printed = print_at(60, SIZES, monkeypatch, capsys)
    words = set(re.findall(r"[\w-]+", "".join(re.findall(r"┃.*\n", printed))))
    assert words == {"run", "level", "width", "parameters", "multiply-", "adds", "bytes", "down", "up"}


def test_a_file_gets_one_table(capsys: pytest.CaptureFixture[str]) -> None:
    wide = Table(tuple("abcdefgh"), (("x" * 40,) * 8,))
    output.print_table(wide)
    assert len(read_parts(capsys.readouterr().out)) == 1


@pytest.mark.parametrize("width", [12, 20, 30, 50])
def test_no_character_is_lost_where_nothing_fits(width, monkeypatch, capsys) -> None:
    texts = ("a folder with a long name", "x" * 60, "日本語" * 8)
    table = Table(("name", "first", "second"), (texts,))
    printed = print_at(width, table, monkeypatch, capsys)
    for text in texts[1:]:
        assert printed.count(text[0]) >= text.count(text[0])
    assert len(read_parts(printed)) == 2


def test_a_table_of_its_keys_alone_and_one_without_rows_are_printed(monkeypatch, capsys) -> None:
    assert "only" in print_at(12, Table(("only one-long-heading",), ()), monkeypatch, capsys)
    assert "cell" in print_at(12, Table(("only one-long-heading",), (("cell",),)), monkeypatch, capsys)


def test_headings_above_columns_stay_above_them(monkeypatch, capsys) -> None:
    rows = (("FleetFit", "98.72", "98.54", "97.40", "98.22"),)
    table = Table(("method", "local", "global", "local", "global"), rows, groups=(("", 1), ("skewed", 2), ("iid", 2)))
    printed = print_at(36, table, monkeypatch, capsys)
    first, second = printed.split("└")[0], printed.split("└")[1]
    assert "skewed" in first and "iid" in second and "iid" not in first


def test_notes_are_wrapped_between_words_on_a_terminal_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    note = (
        "Levels keep whole early blocks: see /a/path-that-is/not/broken-anywhere for it, and what each of them costs."
    )
    monkeypatch.setenv("COLUMNS", "40")
    for is_terminal in (False, True):
        monkeypatch.setattr("sys.stdout.isatty", lambda is_terminal=is_terminal: is_terminal)
        output.print_notes([note])
        output.print_table(Table(("a",), (("b",),), notes=(note,)))
        printed = capsys.readouterr().out
        assert printed.count(f"Note: {note}\n") == (not is_terminal)
        assert " ".join(printed.split()).count(note) == 2 and "/a/path-that-is/not/broken-anywhere" in printed
        assert max(map(len, printed.splitlines())) <= 40 or not is_terminal
