"""The ratios that were written down, `written.toml`, and what is to be said where measured ones are worse.

Only ratios are written down, since amounts differ from machine to machine. Each has a margin, a share of the value:
the regression that it takes to fail. A margin is 5%, or as far as the worst repetition was from the median where that
is more; one that was changed by hand is kept when the value is written anew.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from benchmarks.measuring import Figure, shown

FILE = Path(__file__).with_name("written.toml")
MARGIN = 0.05


@dataclass(frozen=True)
class Written:
    """A ratio that was written down.

    Attributes:
        value: The ratio.
        margin: The share of it by which a measured one may be worse.
        better: "lower" or "higher".
        machine: What it was measured on.
    """

    value: float
    margin: float
    better: str = "lower"
    machine: str = ""


Known = dict[str, dict[str, Written]]


def read(file: Path | None = None) -> Known:
    """Return what was written down, by part and name.

    Raises:
        ValueError: An entry is no ratio with a margin.
    """
    file = FILE if file is None else file
    if not file.exists():
        return {}
    nest = tomllib.loads(file.read_text())
    return {part: {name: _entry(entry, f"{file.name}: {part}, {name}") for name, entry in entries.items()}
            for part, entries in nest.items()}  # fmt: skip


def _entry(entry: Any, where: str) -> Written:
    try:
        found = Written(**entry)
    except TypeError as error:
        raise ValueError(f"{where}: expected value, margin, better and machine; {error}.") from None
    if not (found.value > 0 and found.margin > 0 and found.better in ("lower", "higher")):
        raise ValueError(
            f'{where}: expected a value and a margin above 0, and better = "lower" or "higher"; got {found}.'
        )
    return found


def write(part: str, figures: Sequence[Figure], machine: str, file: Path | None = None) -> None:
    """Write a part's measured ratios down: other parts stay as they are, margins of known names too."""
    file = FILE if file is None else file
    known = read(file)
    margins = {name: entry.margin for name, entry in known.get(part, {}).items()}
    known[part] = {
        f.name: Written(round(f.value, 4), margins.get(f.name, margin_of(f)), f.better, machine)
        for f in figures
        if not f.unit
    }
    nest = {part: {name: vars(entry) for name, entry in entries.items()} for part, entries in known.items() if entries}
    file.write_text(tomli_w.dumps(nest))


def margin_of(figure: Figure) -> float:
    """Return how much worse the worst repetition was than the median, as a share of it; at least 5%."""
    worst = figure.high - figure.value if figure.better == "lower" else figure.value - figure.low
    return round(max(MARGIN, worst / figure.value), 3)


def compared(found: Mapping[str, Sequence[Figure]], known: Known, processor: str = "") -> tuple[list[str], list[str]]:
    """Return complaints, which fail a check, and notes, which do not; of the parts that were measured."""
    complaints, notes = [], []
    for part, figures in found.items():
        expected = known.get(part, {})
        elsewhere = {entry.machine for entry in expected.values() if processor not in entry.machine}
        notes += [f"{part}: written down on {machine}, now on {processor}." for machine in sorted(elsewhere)]
        ratios = {f.name: f for f in figures if not f.unit}
        complaints += [f"{part}, {name}: written down as {shown(expected[name].value)}, but nothing was measured."
                       for name in expected if name not in ratios]  # fmt: skip
        notes += [f"{part}, {name}: {shown(f.value)} is not written down yet."
                  for name, f in ratios.items() if name not in expected]  # fmt: skip
        for name, entry in expected.items():
            if name in ratios:
                _judge(f"{part}, {name}", ratios[name].value, entry, complaints, notes)
    return complaints, notes


def _judge(what: str, value: float, entry: Written, complaints: list[str], notes: list[str]) -> None:
    higher = entry.better == "higher"
    limit = entry.value * (1 - entry.margin if higher else 1 + entry.margin)
    side = "at least" if higher else "at most"
    said = f"expected {side} {shown(limit)} ({shown(entry.value)} with a margin of {entry.margin:.1%})"
    if (value < limit) if higher else not (value <= limit):
        complaints.append(f"{what}: {said}, found {shown(value)}.")
    elif (value > entry.value * (1 + entry.margin)) if higher else (value < entry.value * (1 - entry.margin)):
        notes.append(f"{what}: found {shown(value)}, better than the {shown(entry.value)} written down; --write it.")
