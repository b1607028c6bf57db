"""Plots in the words of plotly.js: lines with bands, bars, dots; `page.js` turns numbers into a scheme's colours.

Lines of different rows differ in colour, dash and marker, so that they can be told apart without colours. Labels are
what users wrote, and plotly.js reads a few tags in text: `plain` takes them away.
"""

import html
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fleetfit.errors import truncate
from fleetfit.report.page.parts import Plot
from fleetfit.report.record import RowRecord

DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "cross", "triangle-down", "star")
COLORS = 8
"""How many colours there are."""
FAILED = 1
"""The colour of what failed: vermilion."""
_OF_LEVELS = (0, 2, 4, 5, 3, 6, 7)
MOST_MARKERS = 40
"""Points of a line, at most, of which each has a marker."""
BUDGET = 60_000
"""Points of all lines of a page together, about; each of many lines gets fewer."""
_LABEL = 80
_FEW = 12

Point = tuple[float, float]
Line = Sequence[Point]


def level_color(index: int) -> int:
    """Return the colour of a level, counted from 0, wherever levels are drawn: never that of failures."""
    return _OF_LEVELS[index % len(_OF_LEVELS)]


def plain(label: object) -> str:
    """Return text that plotly.js shows as it is, without reading tags in it."""
    return html.escape(truncate(label, _LABEL), quote=False)


def color(index: int, opacity: float | None = None) -> str:
    """Return a colour by its number."""
    return f"@{index % COLORS}" + ("" if opacity is None else f"/{opacity:g}")


def thinned(line: Line, most: int) -> list[Point]:
    """Return at most so many points of a line, evenly chosen, the first and the last among them."""
    if len(line) <= most:
        return list(line)
    step = (len(line) - 1) / (most - 1)
    return [line[round(i * step)] for i in range(most)]


@dataclass(frozen=True)
class PlotAxis:
    """An axis.

    Attributes:
        title: What it counts.
        unit: What stands behind a number when it is pointed at.
        digits: Digits behind the point then.
        zero: Whether it begins at zero.
        whole: Whether it counts what has no halves, such as rounds.
    """

    title: str
    unit: str = ""
    digits: int = 0
    zero: bool = False
    whole: bool = False

    def shown(self, letter: str) -> str:
        """Return how a point's number is shown."""
        return f"%{{{letter}:,.{self.digits}f}}{self.unit}"

    @property
    def nest(self) -> dict[str, Any]:
        """The axis for plotly.js."""
        found: dict[str, Any] = {"title": {"text": self.title}}
        return found | ({"rangemode": "tozero"} if self.zero else {})


ROUNDS = PlotAxis("round", whole=True)


def score_axis(score: str) -> PlotAxis:
    """Return the axis of accuracies, whatever they are called (`fleetfit.report.text.score_of`)."""
    return PlotAxis(f"{score} (%)", " %", 2)


def laid_out(x: PlotAxis, y: PlotAxis, traces: Sequence[Mapping[str, Any]], **further: Any) -> dict[str, Any]:
    """Return a layout with two axes; few rounds, or the like, have a tick each, so that none stands between two."""
    across = x.nest
    if x.whole and max((at for trace in traces for at in trace["x"]), default=0) <= _FEW:
        across["dtick"] = 1
    return {"xaxis": across, "yaxis": y.nest, **further}


@dataclass(frozen=True)
class NamedLine:
    """A line of a plot.

    Attributes:
        name: Its label.
        points: Where it goes; what was not measured is no point of it.
        color: Number of its colour, its dash and its marker.
        hidden: Whether it is shown only when its label is clicked.
        strong: Whether it is thick.
    """

    name: str
    points: Line
    color: int
    hidden: bool = False
    strong: bool = False


def lines(
    name: str, title: str, found: Sequence[NamedLine], x: PlotAxis, y: PlotAxis, caption: str = ""
) -> Plot | None:
    """Return a plot of lines; None where none of them has a point."""
    kept = [one for one in found if one.points]
    if not kept:
        return None
    most = max(12, BUDGET // 8 // len(kept))
    traces = [_line(one, thinned(one.points, most), x, y) for one in kept]
    return Plot(name, title, traces, laid_out(x, y, traces), caption, height_for(len(kept)))


def _line(one: NamedLine, points: Line, x: PlotAxis, y: PlotAxis) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(points) <= MOST_MARKERS else "lines",
        "name": plain(one.name),
        "x": [p[0] for p in points],
        "y": [p[1] for p in points],
        "line": {
            "color": color(one.color),
            "dash": DASHES[one.color % len(DASHES)],
            "width": 2.6 if one.strong else 1.8,
        },
        "marker": {"color": color(one.color), "symbol": SYMBOLS[one.color % len(SYMBOLS)], "size": 7},
        "hovertemplate": _said(x, y),
        **({"visible": "legendonly"} if one.hidden else {}),
    }


def _said(x: PlotAxis, y: PlotAxis) -> str:
    """Return what is shown of a point of a line."""
    return f"%{{fullData.name}}<br>{x.title.split(' (')[0]} {x.shown('x')}: {y.shown('y')}<extra></extra>"


def height_for(labels: int) -> int:
    """Return the height of a plot whose legend has so many labels below it."""
    return 320 + 18 * max(0, labels - 3)


def same_scale(plots: Sequence[Plot | None]) -> list[Plot]:
    """Return the plots that are there, those of accuracy with one vertical axis, so that neighbours can be compared."""
    kept = [plot for plot in plots if plot is not None]
    alike = [plot for plot in kept if plot.layout["yaxis"]["title"]["text"].endswith(" (%)")]
    seen = [y for plot in alike for trace in plot.traces if trace.get("visible") != "legendonly" for y in trace["y"]]
    if not seen:
        return kept
    low, high = min(seen), min(100.0, max(seen))
    room = max(1.0, 0.06 * (high - low))
    scale = [round(low - room, 2), round(high + room, 2)]
    return [
        replace(plot, layout={**plot.layout, "yaxis": {**plot.layout["yaxis"], "range": scale}})
        if plot in alike else plot
        for plot in kept
    ]  # fmt: skip


# ---- seeds -----------------------------------------------------------------------------------------------------------

HOW_SEEDS = "Thin lines: each seed. Thick line with markers: their mean. Band: one standard deviation around it."


@dataclass(frozen=True)
class Bundle:
    """The lines of all seeds of a row, and its number among the rows."""

    name: str
    seeds: Sequence[tuple[int, Line]]
    color: int


def bundles(groups: Sequence[RowRecord], rows: Sequence[str], line: Any) -> list[Bundle]:
    """Return the lines of rows, all seeds of each.

    Args:
        groups: The runs of one setting.
        rows: All rows of the page, by whose place a row has its colour.
        line: Returns a run's points.
    """
    return [Bundle(one.row, [(seed, line(run)) for seed, run in one.runs], rows.index(one.row)) for one in groups]


def bundled(
    name: str, title: str, found: Sequence[Bundle], x: PlotAxis, y: PlotAxis, caption: str = "", plots: int = 8
) -> Plot | None:
    """Return a plot of rows with all their seeds, their means and bands; None where no row has a point.

    Args:
        name: The plot's.
        title: What stands above it.
        found: The rows.
        x: What the lines are drawn over.
        y: What they show.
        caption: What stands below it.
        plots: How many such plots the page has, about, which share its size.
    """
    kept = [one for one in found if any(line for _, line in one.seeds)]
    if not kept:
        return None
    count = sum(len(one.seeds) + 3 for one in kept)
    most = max(8, BUDGET // plots // count)
    traces = [trace for one in kept for trace in _bundle(one, most, x, y)]
    return Plot(name, title, traces, laid_out(x, y, traces), caption, height_for(len(kept)))


def _bundle(one: Bundle, most: int, x: PlotAxis, y: PlotAxis) -> list[dict[str, Any]]:
    """Return the traces of a row: band, seeds, mean; the line alone where it has one seed."""
    there = [(seed, line) for seed, line in one.seeds if line]
    if len(there) == 1:
        label = NamedLine(one.name, there[0][1], one.color, strong=True)
        return [_line(label, thinned(there[0][1], most), x, y) | {"legendgroup": plain(one.name)}]
    mean, low, high = _spread([line for _, line in there])
    group: dict[str, Any] = {"legendgroup": plain(one.name), "showlegend": False, "type": "scatter", "mode": "lines"}
    edge = group | {"hoverinfo": "skip", "line": {"width": 0, "color": color(one.color, 0)}}
    traces = [
        edge | _xy(thinned(low, most)),
        edge | _xy(thinned(high, most)) | {"fill": "tonexty", "fillcolor": color(one.color, 0.14)},
    ]
    for seed, line in there:
        thin = {"line": {"color": color(one.color, 0.5), "width": 0.9}, "hovertemplate": _said(x, y)}
        traces.append(group | _xy(thinned(line, most)) | thin | {"name": f"{plain(one.name)}, seed {seed}"})
    thick = _line(NamedLine(f"{one.name}", mean, one.color, strong=True), thinned(mean, most), x, y)
    said = thick["hovertemplate"].replace("<br>", f", mean of {len(there)} seeds<br>", 1)
    return [*traces, thick | {"legendgroup": plain(one.name), "hovertemplate": said}]


def _xy(points: Line) -> dict[str, Any]:
    return {"x": [p[0] for p in points], "y": [p[1] for p in points]}


def _spread(found: Sequence[Line]) -> tuple[list[Point], list[Point], list[Point]]:
    """Return mean, and mean less and more one standard deviation, point by point of those that all lines have.

    Lines over rounds share their rounds; over bytes or seconds the points of one evaluation lie a little apart, and
    their mean is that of both coordinates.
    """
    common = min(len(line) for line in found)
    mean, low, high = [], [], []
    for points in zip(*(line[:common] for line in found), strict=True):
        at, value = statistics.fmean(p[0] for p in points), statistics.fmean(p[1] for p in points)
        off = statistics.stdev(p[1] for p in points)
        mean.append((_short(at), _short(value)))
        low.append((_short(at), _short(value - off)))
        high.append((_short(at), _short(value + off)))
    return mean, low, high


def _short(value: float) -> float:
    return float(f"{value:.6g}")


# ---- bars and dots ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bars:
    """One part of stacked bars.

    Attributes:
        name: Its label.
        x: Where the bars stand.
        y: How high each is.
        color: Number of its colour.
        pattern: "" for plain; "/" and the like for hatched.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    color: int
    pattern: str = ""


def stacked(name: str, title: str, found: Sequence[Bars], x: PlotAxis, y: PlotAxis, caption: str = "") -> Plot | None:
    """Return a plot of stacked bars; None where there is nothing to stack."""
    kept = [one for one in found if any(one.y)]
    if not kept:
        return None
    traces = [
        {
            "type": "bar", "name": plain(one.name), "x": list(one.x), "y": list(one.y),
            "marker": {"color": color(one.color), "pattern": {"shape": one.pattern, "fillmode": "overlay"}},
            "hovertemplate": f"%{{fullData.name}}<br>{x.title} {x.shown('x')}: {y.shown('y')}<extra></extra>",
        }
        for one in kept
    ]  # fmt: skip
    layout = laid_out(x, y, traces, barmode="stack", bargap=0.15)
    return Plot(name, title, traces, layout, caption, height_for(len(kept)))


@dataclass(frozen=True)
class Dots:
    """Dots of one kind over places with names, all seeds beside each other."""

    name: str
    x: Sequence[str]
    y: Sequence[float]
    said: Sequence[str]
    color: int


def dotted(
    name: str, title: str, found: Sequence[Dots], places: Sequence[str], y: PlotAxis, caption: str = ""
) -> Plot | None:
    """Return a plot of dots over named places, in their order; None where there are no dots."""
    kept = [one for one in found if one.y]
    if not kept:
        return None
    traces = [
        {
            "type": "scatter", "mode": "markers", "name": plain(one.name),
            "x": [plain(place) for place in one.x], "y": list(one.y), "text": [plain(text) for text in one.said],
            "marker": {"color": color(one.color, 0.8), "symbol": SYMBOLS[one.color % len(SYMBOLS)], "size": 10},
            "hovertemplate": f"%{{fullData.name}}, %{{text}}<br>%{{x}}: {y.shown('y')}<extra></extra>",
        }
        for one in kept
    ]  # fmt: skip
    axes = laid_out(PlotAxis(""), y, traces, scattermode="group", scattergap=0.35)
    axes["xaxis"] |= {"type": "category", "categoryorder": "array", "categoryarray": list(map(plain, places))}
    return Plot(name, title, traces, axes, caption, height_for(len(kept)))


def partition(name: str, title: str, counts: Sequence[Sequence[int]], caption: str) -> Plot | None:
    """Return a dot for each client and class, its area in proportion to the client's samples of that class.

    Args:
        name: The plot's.
        title: What stands above it.
        counts: Training samples [clients, classes].
        caption: What stands below it.
    """
    most = max((n for row in counts for n in row), default=0)
    found = [(k, c, n) for k, row in enumerate(counts) for c, n in enumerate(row) if n]
    if not found:
        return None
    widest = max(6.0, min(26.0, 520 / max(len(counts), len(counts[0]))))
    sizes = [max(2.0, round(widest * (n / most) ** 0.5, 1)) for *_, n in found]
    trace: Mapping[str, Any] = {
        "type": "scatter", "mode": "markers", "name": "samples",
        "x": [k for k, _, _ in found], "y": [c for _, c, _ in found], "text": [n for _, _, n in found],
        "marker": {"color": color(0, 0.75), "size": sizes},
        "hovertemplate": "client %{x}, class %{y}: %{text} samples<extra></extra>", "showlegend": False,
    }  # fmt: skip
    axes = laid_out(PlotAxis("client"), PlotAxis("class"), [])
    classes = len(counts[0])
    axes["yaxis"] |= {"range": [-0.8, classes - 0.2], "dtick": max(1, classes // 20)}
    axes["xaxis"] |= {"range": [-0.8, len(counts) - 0.2], "dtick": 1 if len(counts) <= 20 else 5}
    return Plot(name, title, [trace], axes, caption, max(300, min(720, 90 + int(widest * 1.1 * classes))))
