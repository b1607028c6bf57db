"""A paper's table: what is printed, and what this package computes beside it."""

from dataclasses import dataclass
from typing import Any, cast

from fleetfit import names
from fleetfit.cost import Cost
from fleetfit.layout import Architecture
from fleetfit.report.text import Table

Value = str | int | float | None


@dataclass(frozen=True)
class PaperTable:
    """A table: a title, columns, rows in their order, and notes.

    Attributes:
        parts: Tables that belong under this one.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]
    notes: tuple[str, ...] = ()
    parts: tuple["PaperTable", ...] = ()

    def as_text(self) -> list[Table]:
        """Return the table, and those under it, as they are printed."""
        rows = tuple(tuple(_cell(value) for value in row) for row in self.rows)
        below = [inner for part in self.parts for inner in part.as_text()]
        return [Table(self.columns, rows, self.title, self.notes), *below]


def _cell(value: Value) -> str:
    return "-" if value is None else f"{value:.5g}" if isinstance(value, float) else str(value)


def built_in(name: str, **settings: Any) -> Architecture:
    """Return a built-in model family by the name that a run file has for it."""
    return cast(Architecture, names.resolve("models", name)(**settings))


def beside(cost: Cost, parameters: float, multiply_adds: float) -> tuple[float, float, float, float]:
    """Return computed and printed millions of parameters, then of multiply-adds."""
    return round(cost.parameters / 1e6, 3), parameters, round(cost.multiply_adds / 1e6, 1), multiply_adds
