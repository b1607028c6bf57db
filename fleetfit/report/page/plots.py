"""Plots for plotly.js: curves with bands, bars, dots. `page.js` replaces color numbers by the scheme's colors.

Rows differ in color, dash and marker, so they are distinct without colors. Labels come from users and plotly.js
interprets some tags, so `escape_label` escapes them.
"""

import html
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from fleetfit.errors import truncate
from fleetfit.report.curves import Series, round_digits, thin
from fleetfit.report.page.blocks import Plot

DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "cross", "triangle-down", "star")
COLORS = 8
"""The number of colors."""
FAILURE_COLOR = 1
"""The color of failures: vermilion."""
_LEVEL_COLORS = (0, 2, 4, 3, 6, 7, 5)
MAX_MARKERS = 40
"""The number of points of a line with markers, at most."""
_MAX_POINTS = 60_000  # points of all lines of a page together, approximately
_LABEL = 80  # characters
_CLASS = 18  # characters of a class on an axis
_FEW = 12  # whole numbers with a tick each, at most


def get_color(index: int, opacity: float | None = None) -> str:
    """Return a color by its number, as `page.js` reads it."""
    return f"@{index % COLORS}" + ("" if opacity is None else f"/{opacity:g}")


def get_level_color(index: int) -> int:
    """Return the number of a level's color, which differs from that of failures."""
    return _LEVEL_COLORS[index % len(_LEVEL_COLORS)]


def escape_label(label: object) -> str:
    """Escape text so that plotly.js does not interpret tags in it."""
    return html.escape(truncate(label, _LABEL), quote=False)


@dataclass(frozen=True)
class PlotAxis:
    """An axis.

    Attributes:
        title: Its title.
        unit: Unit after a number in the text of a point.
        digits: Decimals of numbers in that text.
        zero: Whether the axis begins at zero.
        whole: Whether it has whole numbers, such as rounds or clients.
    """

    title: str
    unit: str = ""
    digits: int = 0
    zero: bool = False
    whole: bool = False

    def format_number(self, letter: str) -> str:
        """Return the format of a point's number, for the coordinate "x" or "y"."""
        return f"%{{{letter}:,.{self.digits}f}}{self.unit}"

    def to_layout(self) -> dict[str, Any]:
        """Return the axis for plotly.js."""
        return {"title": {"text": self.title}} | ({"rangemode": "tozero"} if self.zero else {})


ROUNDS = PlotAxis("round", whole=True)


def make_score_axis(score: str) -> PlotAxis:
    """Return the axis of accuracies, with the task's name for them."""
    return PlotAxis(f"{score} (%)", " %", 2)


def _make_plot(
    name: str,
    title: str,
    traces: Sequence[Mapping[str, Any]],
    axes: tuple[PlotAxis, PlotAxis],
    caption: str,
    labels: int,
    **layout: Any,
) -> Plot:
    """Return a plot with two axes. Whole numbers up to `_FEW` have a tick each."""
    x, y = axes
    across, up = x.to_layout(), y.to_layout()
    if x.whole and max((x_value for trace in traces for x_value in trace["x"]), default=0) <= _FEW:
        across["dtick"] = 1
    if y.whole and sum(max(trace["y"]) for trace in traces) <= _FEW:  # stacked at most
        up["dtick"] = 1
    height = 320 + 18 * max(0, labels - 3)  # the legend is below the plot
    return Plot(name, title, traces, {"xaxis": across, "yaxis": up, **layout}, caption, height)


# ---- curves ----------------------------------------------------------------------------------------------------------

SEEDS_CAPTION = "Thin lines: each seed. Thick line with markers: their mean. Band: one standard deviation around it."


@dataclass(frozen=True)
class Line:
    """A line of a plot, with the lines of its seeds.

    Attributes:
        series: The curves.
        color: Number of its color, its dash and its marker.
        hidden: Whether the line is hidden until its label is clicked.
        strong: Whether it is thick.
    """

    series: Series
    color: int
    _: KW_ONLY
    hidden: bool = False
    strong: bool = True


def plot_lines(
    name: str, title: str, lines: Sequence[Line], x: PlotAxis, y: PlotAxis, caption: str = "", plots: int = 8
) -> Plot | None:
    """Return a plot of lines. Several seeds have a line each, their mean and a band.

    Args:
        name: Name of the plot, unique on the page.
        title: Above it.
        lines: The lines. Lines without points are left out.
        x: The horizontal axis.
        y: The vertical axis.
        caption: Below it.
        plots: Approximate number of such plots on the page, which share the limit on points.

    Returns:
        The plot; None if no line has a point.
    """
    lines = [line for line in lines if any(line.series.curves.values())]
    if not lines:
        return None
    seeds = [sum(map(bool, line.series.curves.values())) for line in lines]
    most = max(8, _MAX_POINTS // plots // sum(count + 3 if count > 1 else 1 for count in seeds))
    traces = [trace for line in lines for trace in _trace_line(line, most, x, y)]
    return _make_plot(name, title, traces, (x, y), caption, len(lines))


def _trace_line(line: Line, most: int, x: PlotAxis, y: PlotAxis) -> list[dict[str, Any]]:
    """Return the traces of a line: band, seeds and mean; for one seed, only the line."""
    curves = {seed: curve for seed, curve in line.series.curves.items() if curve}
    label = escape_label(line.series.label)
    mean = thin(line.series.mean, most)
    after = "" if len(curves) == 1 else f", mean of {len(curves)} seeds"
    numbers = f"<br>{x.title.split(' (')[0]} {x.format_number('x')}: {y.format_number('y')}<extra></extra>"
    thick = {
        "type": "scatter", "mode": "lines+markers" if len(mean) <= MAX_MARKERS else "lines", "name": label,
        "x": [point.x for point in mean], "y": [point.y for point in mean],
        "line": {"color": get_color(line.color), "dash": DASHES[line.color % len(DASHES)],
                 "width": 2.6 if line.strong else 1.8},
        "marker": {"color": get_color(line.color), "symbol": SYMBOLS[line.color % len(SYMBOLS)], "size": 7},
        "hovertemplate": f"%{{fullData.name}}{after}{numbers}",
        **({"visible": "legendonly"} if line.hidden else {}),
    }  # fmt: skip
    if len(curves) == 1:
        return [thick]
    group = {"legendgroup": label, "showlegend": False, "type": "scatter", "mode": "lines"}
    edge = group | {"hoverinfo": "skip", "line": {"width": 0, "color": get_color(line.color, 0)}}
    xs = [point.x for point in mean]
    low, high = ([round_digits(point.y + sign * point.deviation) for point in mean] for sign in (-1, 1))
    seeds = [
        group | {"x": [point.x for point in points], "y": [point.y for point in points],
                 "line": {"color": get_color(line.color, 0.5), "width": 0.9},
                 "hovertemplate": f"%{{fullData.name}}{numbers}", "name": f"{label}, seed {seed}"}
        for seed, curve in curves.items() for points in [thin(curve, most)]
    ]  # fmt: skip
    return [
        edge | {"x": xs, "y": low},
        edge | {"x": xs, "y": high, "fill": "tonexty", "fillcolor": get_color(line.color, 0.14)},
        *seeds,
        thick | {"legendgroup": label},
    ]


def share_accuracy_axis(plots: Sequence[Plot | None]) -> list[Plot]:
    """Return the plots that are not None. Plots of accuracy share the vertical range, so that they are comparable."""
    present = [plot for plot in plots if plot is not None]
    alike = [plot for plot in present if plot.layout["yaxis"]["title"]["text"].endswith(" (%)")]
    ys = [y for plot in alike for trace in plot.traces if trace.get("visible") != "legendonly" for y in trace["y"]]
    if not ys:
        return present
    low, high = min(ys), min(100.0, max(ys))
    margin = max(1.0, 0.06 * (high - low))
    scale = [round(low - margin, 2), round(high + margin, 2)]
    return [
        replace(plot, layout={**plot.layout, "yaxis": {**plot.layout["yaxis"], "range": scale}})
        if plot in alike else plot
        for plot in present
    ]  # fmt: skip


# ---- bars and dots ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bars:
    """One part of stacked bars.

    Attributes:
        name: Its label.
        x: The places of the bars.
        y: Their heights.
        color: Number of its color.
        pattern: "" for plain; "/" and the like for hatched.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    color: int
    pattern: str = ""


def plot_stacked_bars(
    name: str, title: str, parts: Sequence[Bars], x: PlotAxis, y: PlotAxis, caption: str = ""
) -> Plot | None:
    """Return a plot of stacked bars; None if all are 0."""
    parts = [part for part in parts if any(part.y)]
    if not parts:
        return None
    traces = [
        {
            "type": "bar", "name": escape_label(part.name), "x": list(part.x), "y": list(part.y),
            "marker": {"color": get_color(part.color), "pattern": {"shape": part.pattern, "fillmode": "overlay"}},
            "hovertemplate":
                f"%{{fullData.name}}<br>{x.title} {x.format_number('x')}: {y.format_number('y')}<extra></extra>",
        }
        for part in parts
    ]  # fmt: skip
    return _make_plot(name, title, traces, (x, y), caption, len(parts), barmode="stack", bargap=0.15)


@dataclass(frozen=True)
class Dots:
    """Dots of one label over categories, with all seeds side by side.

    Attributes:
        name: The label.
        places: The category of each dot.
        y: Its height.
        texts: Hover text of each dot.
        color: Number of its color.
    """

    name: str
    places: Sequence[str]
    y: Sequence[float]
    texts: Sequence[str]
    color: int


def plot_dots(
    name: str, title: str, dots: Sequence[Dots], places: Sequence[str], y: PlotAxis, caption: str = ""
) -> Plot | None:
    """Return a plot of dots over categories, in order; None without dots."""
    dots = [one for one in dots if one.y]
    if not dots:
        return None
    traces = [
        {
            "type": "scatter", "mode": "markers", "name": escape_label(one.name),
            "x": [escape_label(place) for place in one.places], "y": list(one.y),
            "text": [escape_label(text) for text in one.texts],
            "marker": {"color": get_color(one.color, 0.8), "symbol": SYMBOLS[one.color % len(SYMBOLS)], "size": 10},
            "hovertemplate": f"%{{fullData.name}}, %{{text}}<br>%{{x}}: {y.format_number('y')}<extra></extra>",
        }
        for one in dots
    ]  # fmt: skip
    plot = _make_plot(name, title, traces, (PlotAxis(""), y), caption, len(dots), scattermode="group", scattergap=0.35)
    order = {"type": "category", "categoryorder": "array", "categoryarray": list(map(escape_label, places))}
    return replace(plot, layout={**plot.layout, "xaxis": {**plot.layout["xaxis"], **order}})


def plot_class_counts(
    name: str, title: str, counts: Sequence[Sequence[int]], class_names: Sequence[str], caption: str
) -> Plot | None:
    """Return a plot with a dot for each client and class, with an area proportional to the samples.

    Args:
        name: Of the plot.
        title: Above it.
        counts: Training samples [clients, classes].
        class_names: Of the classes.
        caption: Below it.
    """
    dots = [(k, c, n) for k, row in enumerate(counts) for c, n in enumerate(row) if n]
    if not dots:
        return None
    largest, clients, classes = max(n for *_, n in dots), len(counts), len(counts[0])
    widest = max(6.0, min(26.0, 520 / max(clients, classes)))
    trace: Mapping[str, Any] = {
        "type": "scatter", "mode": "markers", "name": "samples",
        "x": [k for k, _, _ in dots], "y": [c for _, c, _ in dots], "text": [n for *_, n in dots],
        "customdata": [escape_label(class_names[c]) for _, c, _ in dots],
        "marker": {"color": get_color(0, 0.75),
                   "size": [max(2.0, round(widest * (n / largest) ** 0.5, 1)) for *_, n in dots]},
        "hovertemplate": "client %{x}, class %{customdata}: %{text} samples<extra></extra>", "showlegend": False,
    }  # fmt: skip
    x, y = PlotAxis("client").to_layout(), PlotAxis("class").to_layout()
    x |= {"range": [-0.8, clients - 0.2], "dtick": 1 if clients <= 20 else 5}
    ticks = range(0, classes, max(1, classes // 20))
    labels = [escape_label(truncate(class_names[c], _CLASS)) for c in ticks]
    y |= {"range": [-0.8, classes - 0.2], "tickvals": [*ticks], "ticktext": labels}
    height = max(300, min(720, 90 + int(widest * 1.1 * classes)))
    return Plot(name, title, [trace], {"xaxis": x, "yaxis": y}, caption, height)
