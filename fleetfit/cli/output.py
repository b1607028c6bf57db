"""Output of the command line: results on stdout, messages on stderr."""

import contextlib
import json
import logging
import os
import shutil
import sys
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fleetfit.errors import COMMAND, make_printable

if TYPE_CHECKING:
    from fleetfit.report.text import Table

_PLAIN_WIDTH = 160  # width of a table if the output is not a terminal
_TEXT_WIDTH = 110  # characters of a line of text there
_SHORT_CELL = 24  # characters; such a cell stays on one line of a narrow table
_LINES = 3  # characters between two columns: a blank, a line, a blank


# ---- stderr --------------------------------------------------------------------------------------------------------


class UserInterrupt(Exception):
    """Ctrl-C ended a verb. The message has the command that continues it."""


def print_sentence(sentence: str) -> None:
    """Print a message to stderr on one line, commands in it on a line of their own; ignore failures."""
    with contextlib.suppress(OSError, ValueError):
        lines = [" ".join(line.split()) for line in f"fleetfit: {sentence}".split(COMMAND)]
        line = make_printable(COMMAND.join(lines))
        line = f"\n{line}" if sentence.startswith("stopped.") and sys.stderr.isatty() else line  # behind the ^C
        print(line, file=sys.stderr)


@contextlib.contextmanager
def explain_interrupt(command: str = "") -> Iterator[None]:
    """Turn Ctrl-C into a message: the command that continues, or that nothing was written."""
    try:
        yield
    except KeyboardInterrupt:
        advice = f"Nothing is half written; continue with:{COMMAND}{command}" if command else "Nothing was written."
        raise UserInterrupt(f"stopped. {advice}") from None


class _SentenceHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        print_sentence(record.getMessage())


def setup_logging(level: str = "warning") -> None:
    """Print the package's log messages of a level and above to stderr."""
    logger = logging.getLogger("fleetfit")
    if not any(isinstance(handler, _SentenceHandler) for handler in logger.handlers):
        logger.addHandler(_SentenceHandler())
    logger.setLevel(level.upper())


@contextlib.contextmanager
def redirect_stdout() -> Iterator[None]:
    """Redirect stdout to stderr, for plug-ins and workers too, so that only JSON reaches stdout."""
    sys.stdout.flush()
    is_real = sys.stdout is sys.__stdout__
    saved = os.dup(1) if is_real else -1
    try:
        if is_real:
            os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        if is_real:
            sys.stderr.flush()
            os.dup2(saved, 1)
            os.close(saved)


# ---- stdout --------------------------------------------------------------------------------------------------------


def print_line(text: str) -> None:
    """Print text."""
    print(make_printable(text), flush=True)


def print_json(value: Any) -> None:
    """Print a value as ASCII JSON; texts are not truncated."""
    print(json.dumps(value, indent=2), flush=True)


def print_table(table: "Table", width: int | None = None) -> None:
    """Print a table with its title and notes. On a terminal, what is too wide comes in parts, one below the other.

    Args:
        table: The table; headings above columns are printed above their own.
        width: Maximal characters of a line; by default those of the terminal.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table as RichTable

    from fleetfit.report.tables import OF_THE_PAPER
    from fleetfit.report.text import wrap_text

    available = None if sys.stdout.isatty() else _PLAIN_WIDTH
    if width is not None:
        available = min(width, available or shutil.get_terminal_size().columns)
    console = Console(highlight=False, width=available)
    if table.title:
        console.print(f"\n[bold]{escape(table.title)}[/bold]", soft_wrap=True)
    for columns in _split_columns(table, console.width):
        rich = RichTable()
        for column in columns:
            rich.add_column(escape(column.heading), overflow="fold", width=column.width)
        for row in table.rows:
            style = "dim" if row and row[0].endswith(OF_THE_PAPER) else None
            rich.add_row(*(escape(row[column.number]) for column in columns), style=style)
        console.print(rich)
    for note in table.notes:
        print_line(wrap_text(note, sys.stdout))


class _Column(NamedTuple):
    """A column as it is printed. Rich chooses the width where it is None."""

    number: int
    heading: str
    width: int | None = None


def _split_columns(table: "Table", width: int) -> list[list[_Column]]:
    """Return the columns that fit beside each other, in parts that each begin with the key columns."""
    from rich.cells import cell_len

    above = [name for name, span in table.groups for _ in range(span)] or [""] * len(table.columns)
    headings = [f"{group}\n{name}" if any(above) else name for group, name in zip(above, table.columns, strict=True)]
    longest = [max((cell_len(row[index]) for row in table.rows), default=0) for index in range(len(headings))]
    full = [max(cells, *map(cell_len, heading.split("\n"))) for cells, heading in zip(longest, headings, strict=True)]
    if sum(full) + _LINES * len(full) < width or not sys.stdout.isatty():
        return [[_Column(index, heading) for index, heading in enumerate(headings)]]

    least = []
    for index, heading in enumerate(headings):
        words = heading.replace("-", "- ").split()
        unbroken = width // 2 if index < table.keys else _SHORT_CELL
        least.append(max(min(longest[index], unbroken), *map(cell_len, words), 1))
    parts = list[list[int]]()
    for index in range(table.keys, len(headings)):
        if not parts or sum(least[i] + _LINES for i in [*parts[-1], index]) >= width:
            parts.append(list(range(table.keys)))
        parts[-1].append(index)
    return [list(_widen_columns(part, headings, least, longest, width)) for part in parts or [list(range(table.keys))]]


def _widen_columns(
    part: Sequence[int], headings: Sequence[str], least: Sequence[int], longest: Sequence[int], width: int
) -> Iterator[_Column]:
    """Yield the columns of a part, the left ones as wide as their cells if there is space for it."""
    spare = width - 1 - sum(least[index] + _LINES for index in part)
    for index in part:
        more = max(0, min(spare, longest[index] - least[index]))
        wide = least[index] + more
        heading = "\n".join(textwrap.fill(line, wide) for line in headings[index].split("\n"))
        yield _Column(index, heading, wide if spare >= 0 else None)
        spare -= more


def print_block(block: "str | Table") -> None:
    """Print a table, or text whose lines are wrapped at the output's width and keep their indent."""
    if not isinstance(block, str):
        print_table(block)
        return
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _TEXT_WIDTH
    for line in block.splitlines():
        indent = " " * (len(line) - len(line.lstrip()))
        print_line(textwrap.fill(line, width, subsequent_indent=f"{indent}    ", break_long_words=False,
                                 break_on_hyphens=False))  # fmt: skip


def print_notes(notes: Iterable[str]) -> None:
    """Print notes, a line each."""
    from fleetfit.report.text import wrap_text

    for note in notes:
        print_line(wrap_text(f"Note: {note}", sys.stdout))


def print_summary(summary: Mapping[str, Any], printed_notes: Collection[str] = ()) -> None:
    """Print the tables of a finished run, its levels and its totals, without the notes that are already printed."""
    from fleetfit.report.tables import make_level_table, make_total_table
    from fleetfit.runs.schema import SummaryRecord

    notes = [note for note in summary["notes"] if note not in printed_notes]
    record = SummaryRecord.load({**summary, "notes": notes})
    print_table(make_level_table(record))
    print_table(make_total_table(record))
    sys.stdout.flush()


def print_locations(folder: Path, label: str = "Run folder", quiet: bool = False) -> None:
    """Print the locations of the plots and the page of a run or a comparison; if quiet, its folder alone."""
    if quiet:
        print_line(str(folder))
        return
    from fleetfit.report import drawing
    from fleetfit.report.page import NAME

    if drawing.is_available():
        print_line(f"Plots: {folder}/plots")
    else:
        print_line('No plots were drawn: matplotlib is not installed. Install it: pip install "fleetfit[plots]".')
    if (folder / NAME).is_file():
        print_line(f"Page: {folder / NAME}")
    print_line(f"{label}: {folder}")


def print_figure_paths(paths: Sequence[Path], notes: Sequence[str]) -> None:
    """Print the notes on figures, and the paths of their files."""
    print_notes(notes)
    for path in paths:
        print_line(f"Drawn: {path}")
