"""What a page is made of: values that the template shows. Text in them is text, never markup: it is escaped there."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fleetfit.report.text import Table

_NUMBER = re.compile(r"[-+]?\d[^,;:]*(,\d{3}[^,;:]*)*|[-+]\d.*|-|withheld|")
"""A cell that is a number, perhaps with a unit or a spread; "1 (3), 2 (4)" is a list."""


@dataclass(frozen=True)
class Words:
    """A paragraph.

    Attributes:
        text: What it says.
        weight: "plain"; "quiet" for how something was drawn; "note" for what the reader must know.
    """

    kind: ClassVar[str] = "words"
    text: str
    weight: str = "plain"


@dataclass(frozen=True)
class Link:
    """A link to a file.

    Attributes:
        text: What is clicked.
        to: Its address, relative to the page and already quoted.
    """

    text: str
    to: str


@dataclass(frozen=True)
class FactList:
    """Names with their values, one below the other; a value is text, or links."""

    kind: ClassVar[str] = "facts"
    rows: Sequence[tuple[str, str | Sequence[Link]]]


@dataclass(frozen=True)
class Tiles:
    """The few numbers that are read first: label, value, and a word on it."""

    kind: ClassVar[str] = "tiles"
    rows: Sequence[tuple[str, str, str]]


@dataclass(frozen=True)
class Sheet:
    """A table; its notes stand below it."""

    kind: ClassVar[str] = "sheet"
    table: Table

    @property
    def numbers(self) -> list[bool]:
        """Which columns hold numbers, which stand to the right."""
        columns = zip(*self.table.rows, strict=True) if self.table.rows else ([""] for _ in self.table.columns)
        return [all(map(_NUMBER.fullmatch, cells)) and any(cells) for cells in columns]


@dataclass(frozen=True)
class Plot:
    """A plot, in the words of plotly.js.

    Attributes:
        name: Unique on the page; a test finds the plot by it.
        title: What stands above it.
        traces: Its data. A colour is "@" and a number or name of `page.js`, perhaps "/" and an opacity.
        layout: Its axes.
        caption: What stands below it.
        height: In pixels.
    """

    kind: ClassVar[str] = "plot"
    name: str
    title: str
    traces: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any]
    caption: str = ""
    height: int = 320


@dataclass(frozen=True)
class Plots:
    """Plots side by side, where there is room."""

    kind: ClassVar[str] = "plots"
    plots: Sequence[Plot]


@dataclass(frozen=True)
class Piece:
    """One level of a model, drawn as a rectangle in the frame of the full model.

    Attributes:
        title: "level 2".
        width: Share of the channels.
        depth: Share of the blocks.
        exits: Shares of the blocks that lie before its exits.
        inside: Width and depth of the smaller levels.
        lines: What stands below it: sizes, costs, clients, accuracy.
        color: Number of its colour.
    """

    title: str
    width: float
    depth: float
    exits: Sequence[float]
    inside: Sequence[tuple[float, float]]
    lines: Sequence[tuple[str, str]]
    color: int = 0


@dataclass(frozen=True)
class Pieces:
    """The levels of a model side by side."""

    kind: ClassVar[str] = "pieces"
    pieces: Sequence[Piece]
    title: str = ""


@dataclass(frozen=True)
class Listing:
    """A text as it stands in a file, folded in."""

    kind: ClassVar[str] = "listing"
    title: str
    text: str


@dataclass(frozen=True)
class Fold:
    """Parts that are shown when asked for."""

    kind: ClassVar[str] = "fold"
    title: str
    parts: "Sequence[Part]"


Part = Words | FactList | Tiles | Sheet | Plots | Pieces | Listing | Fold


@dataclass(frozen=True)
class PageSection:
    """A heading, and what stands below it."""

    name: str
    title: str
    parts: Sequence[Part]


@dataclass(frozen=True)
class Page:
    """A whole page."""

    title: str
    subtitle: str
    sections: Sequence[PageSection]
    tiles: Sequence[tuple[str, str, str]] = ()
    notes: Sequence[str] = field(default=())
