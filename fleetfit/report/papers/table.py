"""What a paper prints, and rows that put our numbers beside it."""

from collections.abc import Sequence
from dataclasses import dataclass

from fleetfit.cost import Cost, submodel_cost
from fleetfit.layout import Architecture

Value = str | int | float | None

COLUMNS = ("level", "s_d", "s_w", "exit at block", "parameters (M)", "printed", "multiply-adds (M)", "printed")


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


@dataclass(frozen=True)
class Printed:
    """A row of ScaleFL's tables.

    Attributes:
        level: What the row is called.
        s_d: The printed split ratio along depth.
        s_w: The printed split ratio along width.
        parameters: In millions, as printed.
        multiply_adds: In millions, as printed.
        exits: The classifiers that count.
        fits: The width whose costs are the printed ones, where that is not the printed one.
    """

    level: str
    s_d: str
    s_w: float
    parameters: float
    multiply_adds: float
    exits: tuple[int, ...]
    fits: float | None = None

    @property
    def width(self) -> float:
        """The width that gives the printed costs."""
        return self.s_w if self.fits is None else self.fits


def rows_of(
    architecture: Architecture, input_shape: Sequence[int], printed: Sequence[Printed]
) -> tuple[tuple[Value, ...], ...]:
    """Return a row for each printed one, and a second one where the printed ratio does not give the printed costs."""
    rows: list[tuple[Value, ...]] = []
    for row in printed:
        widths = {row.level: row.width} | ({} if row.fits is None else {f"{row.level}, as printed": row.s_w})
        for name, width in widths.items():
            cost = submodel_cost(architecture, (architecture.sizes(width), row.exits), input_shape)
            rows.append((name, row.s_d, width, row.exits[-1], *beside(cost, row.parameters, row.multiply_adds)))
    return tuple(rows)


def beside(cost: Cost, parameters: float, multiply_adds: float) -> tuple[float, float, float, float]:
    """Return computed and printed millions of parameters, then of multiply-adds."""
    return round(cost.parameters / 1e6, 3), parameters, round(cost.multiply_adds / 1e6, 1), multiply_adds
