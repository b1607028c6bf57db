"""A paper's table: what is printed, and what this package computes beside it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from fleetfit import names
from fleetfit.cost import Cost, Latency, Timed
from fleetfit.layout import Architecture
from fleetfit.report.tables import LATENCIES, latency_cells
from fleetfit.report.text import Table

Value = str | int | float | None


@dataclass(frozen=True)
class PaperTable:
    """A table: a title, columns, rows in their order, and notes; latencies stand in columns behind the others.

    Attributes:
        parts: Tables that belong under this one.
        models: The sub-model of each row, the full one first; none where the rows are something else.
        printed_ms: The latency of each row in milliseconds, as printed; none where the paper prints none.
        latencies: The latency of each row on this machine; none where nothing was measured.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]
    notes: tuple[str, ...] = ()
    parts: tuple["PaperTable", ...] = ()
    models: tuple[Timed, ...] = ()
    printed_ms: tuple[float, ...] = ()
    latencies: tuple[Latency, ...] = ()

    def measured(self, latencies: Sequence[Latency], how: Sequence[str]) -> "PaperTable":
        """Return the table with the latencies of its rows, and what is to be known of them."""
        notes = (*self.notes, *how)
        if self.printed_ms:
            notes += ("The paper names no machine for its latencies; between machines, compare the fractions of the "
                      "full model's.",)  # fmt: skip
        return replace(self, latencies=tuple(latencies), notes=notes)

    def as_text(self) -> list[Table]:
        """Return the table, and those under it, as they are printed."""
        columns, behind = self._latency_columns()
        rows = tuple(
            tuple(_cell(value) for value in (*row, *more)) for row, more in zip(self.rows, behind, strict=True)
        )
        below = [inner for part in self.parts for inner in part.as_text()]
        return [Table((*self.columns, *columns), rows, self.title, self.notes), *below]

    def _latency_columns(self) -> tuple[tuple[str, ...], list[tuple[Value, ...]]]:
        """Return the columns of latencies, and what stands in them; of a paper's alone one."""
        if not self.latencies:
            if self.printed_ms:
                return ("printed latency (ms)",), [(ms,) for ms in self.printed_ms]
            return (), [()] * len(self.rows)
        cells = [latency_cells(latency, self.latencies[0]) for latency in self.latencies]
        if not self.printed_ms:
            return LATENCIES, list(cells)
        absolute, relative = LATENCIES
        theirs = [(ms, f"{ms / self.printed_ms[0]:.3f}") for ms in self.printed_ms]
        rows: list[tuple[Value, ...]] = [(a, ms, r, part) for (a, r), (ms, part) in zip(cells, theirs, strict=True)]
        return (absolute, "printed", relative, "printed"), rows


def _cell(value: Value) -> str:
    return "-" if value is None else f"{value:.5g}" if isinstance(value, float) else str(value)


def built_in(name: str, **settings: Any) -> Architecture:
    """Return a built-in model family by the name that a run file has for it."""
    return cast(Architecture, names.resolve("models", name)(**settings))


def beside(cost: Cost, parameters: float, multiply_adds: float) -> tuple[float, float, float, float]:
    """Return computed and printed millions of parameters, then of multiply-adds."""
    return round(cost.parameters / 1e6, 3), parameters, round(cost.multiply_adds / 1e6, 1), multiply_adds
