"""A table of text with its Markdown, the formats of numbers in tables, and lines for a terminal."""

import shutil
import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TextIO

from fleetfit.errors import make_printable
from fleetfit.markup import html_table

if TYPE_CHECKING:  # `list` prints a table without pydantic
    from fleetfit.runs.schema import SummaryRecord

_LONGEST_CELL = 1000


@dataclass(frozen=True)
class Table:
    """A table of text. All text is safe to print (`fleetfit.errors.make_printable`).

    Attributes:
        columns: Headings.
        rows: One text per column.
        title: Title above the table.
        notes: Sentences below it.
        groups: Headings above the columns, each with the number of its columns. The numbers add up to all columns.
        keys: Columns at the left that name a row. A narrow terminal repeats them beside each part of the others.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""
    notes: tuple[str, ...] = field(default=())
    groups: tuple[tuple[str, int], ...] = field(default=())
    keys: int = 1

    def __post_init__(self) -> None:
        """Make all text printable."""
        cells = [make_printable(cell, _LONGEST_CELL) for cell in self.columns]
        object.__setattr__(self, "columns", tuple(cells))
        rows = (tuple(make_printable(cell, _LONGEST_CELL) for cell in row) for row in self.rows)
        object.__setattr__(self, "rows", tuple(rows))
        object.__setattr__(self, "title", make_printable(self.title))
        object.__setattr__(self, "notes", tuple(map(make_printable, self.notes)))
        groups = ((make_printable(name, _LONGEST_CELL), span) for name, span in self.groups)
        object.__setattr__(self, "groups", tuple(groups))

    def __str__(self) -> str:
        return self.to_markdown()

    def to_markdown(self) -> str:
        """Return the table as Markdown. A heading above columns is repeated in each of them."""
        lines = [_format_markdown_line(self.headings), "|" + " --- |" * len(self.columns)]
        lines += [_format_markdown_line(row) for row in self.rows]
        parts = [f"**{self.title}**\n"] if self.title else []
        return "\n".join([*parts, *lines, *(f"\n{note}" for note in self.notes)]) + "\n"

    def to_latex(self) -> str:
        """Return the table as LaTeX, with the rules of the package booktabs and the notes below it."""
        count = len(self.columns)
        lines = [rf"\begin{{tabular}}{{{'l' * self.keys}{'r' * (count - self.keys)}}}", r"\toprule"]
        if any(name for name, _ in self.groups):
            above = " & ".join(rf"\multicolumn{{{span}}}{{c}}{{{_escape_latex(name)}}}" for name, span in self.groups)
            lines.append(rf"{above} \\")
        lines += [_format_latex_line(self.columns), r"\midrule", *map(_format_latex_line, self.rows)]
        lines += [r"\bottomrule", r"\end{tabular}"]
        return "\n".join([*lines, *(f"\n{_escape_latex(note)}" for note in self.notes)]) + "\n"

    def to_html(self) -> str:
        """Return the table as HTML, for notebooks."""
        return html_table(self.columns, self.rows, self.title, self.notes, self.groups)

    _repr_html_ = to_html

    @property
    def headings(self) -> list[str]:
        """The heading of each column, with the heading above it."""
        above = [name for name, span in self.groups for _ in range(span)] or [""] * len(self.columns)
        return [f"{a} {c}".strip() for a, c in zip(above, self.columns, strict=True)]


def _format_markdown_line(cells: Sequence[str]) -> str:
    escaped = (cell.replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(escaped)} |"


_LATEX = str.maketrans({
    **{mark: rf"\{mark}" for mark in "&%$#_{}"}, "\\": r"\textbackslash{}", "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}", "±": r"$\pm$", "<": "$<$", ">": "$>$", "|": "$|$",
})  # fmt: skip


def _escape_latex(text: str) -> str:
    return text.translate(_LATEX)


def _format_latex_line(cells: Sequence[str]) -> str:
    return rf"{' & '.join(map(_escape_latex, cells))} \\"


# ---- numbers as text -----------------------------------------------------------------------------------------------


_SPLITS = {"test": "test", "validation": "validation", "train": "training"}

_ROUNDS_UP = 0.99995
"""Share of a unit from which a number in the smaller unit would be rounded to 1000.0."""

EXITS = "exits (after block)"
"""The title of a column of `exit_names`."""


def exit_names(exits: Sequence[int], every: Sequence[int]) -> list[str]:
    """Return the names of exits in tables: the number among all exits of the model (from 1), and the blocks before it.

    Args:
        exits: Block counts of the exits to name.
        every: Block counts of all exits of the model, shallow to deep.
    """
    return [f"{list(every).index(e) + 1} ({e})" for e in exits]


def get_score_name(*summaries: "SummaryRecord") -> str:
    """Return the name of the runs' accuracy, such as "accuracy" or "R2"; "score" if runs differ in it.

    Args:
        *summaries: Their final numbers.
    """
    names = {summary.score for summary in summaries}
    return names.pop() if len(names) == 1 else "score" if names else "accuracy"


def describe_data(*summaries: "SummaryRecord") -> str:
    """Return the data of the runs' accuracies, such as "test data", by `[evaluate] split`.

    Args:
        *summaries: Their final numbers.
    """
    splits = {summary.evaluate.split for summary in summaries}
    names = [name for split, name in _SPLITS.items() if split in splits]
    return f"{' or '.join(names or ['test'])} data"


def format_percent(share: float | None) -> str:
    """Return a fraction in percent as in the papers, "79.61"; "-" for None."""
    return "-" if share is None else f"{100 * share:.2f}"


def format_count(count: float) -> str:
    """Abbreviate a count: 950, 57.6 K, 1.73 M, 253.1 M."""
    for unit, name in ((1e9, " G"), (1e6, " M"), (1e3, " K")):
        if count >= _ROUNDS_UP * unit:
            scaled = count / unit
            return f"{scaled:.2f}{name}" if scaled < 10 else f"{scaled:.1f}{name}"
    return f"{count:g}"


def format_bytes(count: float) -> str:
    """Abbreviate a number of bytes, in powers of ten: 12.3 MB."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= _ROUNDS_UP * unit:
            return f"{count / unit:.1f} {name}"
    return f"{count:.0f} B"


def format_duration(seconds: float) -> str:
    """Abbreviate seconds: 3.2 s, 4 min 10 s, 2 h 05 min."""
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, remainder = divmod(round(seconds), 60)
    return f"{minutes} min {remainder:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def format_privacy(epsilon: float, delta: float) -> str:
    """Format spent privacy: epsilon 4.96 at delta 0.001."""
    return f"epsilon {epsilon:.2f} at delta {delta:.3g}"


def format_mean(values: Sequence[float | None]) -> str:
    """Return "mean ± standard deviation" in percent; one value alone; "-" for none."""
    numbers = [100 * value for value in values if value is not None]
    if not numbers:
        return "-"
    if len(numbers) == 1:
        return f"{numbers[0]:.2f}"
    return f"{statistics.mean(numbers):.2f} ± {statistics.stdev(numbers):.2f}"


def wrap_text(text: str, stream: TextIO) -> str:
    """Return text for people in lines of the terminal's width; as it is where the stream is not a terminal."""
    if not stream.isatty():
        return text
    width = shutil.get_terminal_size().columns
    return textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)
