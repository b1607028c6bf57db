"""Text and tables on stdout."""

import json
import shutil
import sys
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from fleetfit.errors import make_printable
from fleetfit.report.tables import OF_THE_PAPER
from fleetfit.report.text import Table

_PLAIN_WIDTH = 160  # where nobody says how wide the output is


def say(text: str) -> None:
    """Print text."""
    print(make_printable(text), flush=True)


def say_json(value: Any) -> None:
    """Print a value as JSON, which is ASCII; no text in it is cut."""
    print(json.dumps(value, indent=2), flush=True)


def show(table: Table, most: int | None = None) -> None:
    """Print a table, perhaps so many columns of text wide at most; headings above columns go above their own."""
    rich = RichTable()
    above = [name for name, span in table.groups for _ in range(span)] or [""] * len(table.columns)
    for group, column in zip(above, table.columns, strict=True):
        rich.add_column(escape(f"{group}\n{column}" if any(above) else column), overflow="fold")
    for row in table.rows:
        rich.add_row(*map(escape, row), style="dim" if row and row[0].endswith(OF_THE_PAPER) else None)
    width = None if sys.stdout.isatty() else _PLAIN_WIDTH
    if most is not None:
        width = min(most, width or shutil.get_terminal_size().columns)
    console = Console(highlight=False, width=width)
    if table.title:
        console.print(f"\n[bold]{escape(table.title)}[/bold]", soft_wrap=True)
    console.print(rich)
    for note in table.notes:
        console.print(escape(note), soft_wrap=True)
