"""The blocks of a page, as values. Their text is never markup: the template escapes it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fleetfit.report.text import Table

_NUMBER = re.compile(r"[-+]?\d[^,;:]*(,\d{3}[^,;:]*)*|[-+]\d.*|-|withheld|")
"""A cell with a number, optionally with a unit or a spread. "1 (3), 2 (4)" is a list."""


@dataclass(frozen=True)
class Paragraph:
    """A paragraph.

    Attributes:
        text: The text.
        weight: "plain"; "quiet" for explanations; "note" for warnings.
    """

    kind: ClassVar[str] = "paragraph"
    text: str
    weight: str = "plain"


@dataclass(frozen=True)
class Link:
    """A link to a file.

    Attributes:
        text: Its text.
        to: Its address, relative to the page and quoted.
    """

    text: str
    to: str


Fact = tuple[str, str | Sequence[Link]]
"""A name with its value."""


@dataclass(frozen=True)
class FactList:
    """Names with their values, one below the other."""

    kind: ClassVar[str] = "facts"
    rows: Sequence[Fact]


@dataclass(frozen=True)
class Sheet:
    """A table, with its notes below it."""

    kind: ClassVar[str] = "sheet"
    table: Table

    @property
    def numbers(self) -> list[bool]:
        """Whether each column has numbers, which are right-aligned."""
        columns = zip(*self.table.rows, strict=True) if self.table.rows else ([""] for _ in self.table.columns)
        return [all(map(_NUMBER.fullmatch, cells)) and any(cells) for cells in columns]


@dataclass(frozen=True)
class Plot:
    """A plot for plotly.js.

    Attributes:
        name: Unique on the page.
        title: Above it.
        traces: Its data. A color is "@" and a number or name of `page.js`, perhaps with "/" and an opacity.
        layout: Its axes.
        caption: Below it.
        height: In pixels.
    """

    name: str
    title: str
    traces: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any]
    caption: str = ""
    height: int = 320


@dataclass(frozen=True)
class Plots:
    """Plots, side by side if the window is wide enough."""

    kind: ClassVar[str] = "plots"
    plots: Sequence[Plot]


@dataclass(frozen=True)
class LevelRectangle:
    """A level as a rectangle in the frame of the full model.

    Attributes:
        title: "level 2".
        width: Share of the channels.
        depth: Share of the blocks.
        exits: Shares of the blocks before its exits.
        smaller: Width and depth of the smaller levels.
        facts: Below it: sizes, costs, clients, accuracy.
        color: Number of its color.
    """

    title: str
    width: float
    depth: float
    exits: Sequence[float]
    smaller: Sequence[tuple[float, float]]
    facts: Sequence[tuple[str, str]]
    color: int = 0


@dataclass(frozen=True)
class LevelRectangles:
    """The levels of a model side by side."""

    kind: ClassVar[str] = "levels"
    rectangles: Sequence[LevelRectangle]
    title: str = ""


@dataclass(frozen=True)
class Listing:
    """The text of a file, folded."""

    kind: ClassVar[str] = "listing"
    title: str
    text: str


@dataclass(frozen=True)
class Fold:
    """Blocks shown after a click."""

    kind: ClassVar[str] = "fold"
    title: str
    blocks: "Sequence[Block]"


Block = Paragraph | FactList | Sheet | Plots | LevelRectangles | Listing | Fold


@dataclass(frozen=True)
class PageSection:
    """A heading with blocks."""

    name: str
    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Page:
    """A page.

    Attributes:
        title: Its title.
        subtitle: Below it.
        sections: Its sections.
        tiles: The main numbers at the top: label, value, hint.
        notes: Warnings at its top.
    """

    title: str
    subtitle: str
    sections: Sequence[PageSection]
    tiles: Sequence[tuple[str, str, str]] = ()
    notes: Sequence[str] = field(default=())
