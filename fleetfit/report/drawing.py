"""How plots look, without pyplot: sizes, colours, axes, and which numbers of a run's reports are drawn."""

import importlib.util
import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fleetfit import files
from fleetfit.data import Data
from fleetfit.errors import MissingExtra, RunError, make_printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#1f5fa8", "#d1661b", "#2f8a4b", "#8a4fa3", "#b3272d", "#6b5b4b", "#17808a", "#a8891f")
LIGHT, DARK = "#d9dee4", "#3c4650"
Metrics = Sequence[Mapping[str, Any]]
Summary = Mapping[str, Any]
Points = Sequence[tuple[float, float | None]]
"""Places and what was measured there; None where nothing was."""
_ROUNDING = 1e-3
_MANY = 40  # measurements of a line; of more, the markers are small
_BELOW = 0.42  # inches from axes to their legend: numbers and a label are in between
_LONGEST = 300  # characters in a line of text
_LEGEND = 48  # letters in a line of a label below the axes
_LEAST_SPAN = 10.0  # points of percent that an axis has at least: what is less is chance, and should look like it


def available() -> bool:
    """Tell whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def empty(width: float, height: float) -> "Figure":
    """Return a figure without axes, of a size in inches.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    if not available():
        raise MissingExtra("plots", "Drawing plots")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def figure_with_axes(width: float, height: float) -> tuple["Figure", "Axes"]:
    """Return a figure with one pair of axes."""
    figure = empty(width, height)
    return figure, figure.add_subplot()


def finish(axes: "Axes", x: str, y: str, title: str) -> None:
    """Label axes and make them quiet."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.locator_params(axis="x", integer=x == "round")
    axes.set_title(title, fontsize=10, loc="left", color=DARK)
    axes.grid(color=LIGHT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(LIGHT)
    axes.tick_params(color=LIGHT, labelcolor=DARK)


def curve_of_seeds(
    axes: "Axes",
    seeds: Sequence[Points],
    shade: str,
    label: str,
    width: float = 1.8,
    percent: bool = True,
    style: str = "-",
) -> None:
    """Draw what was measured of one thing: each seed as a thin line, their mean as a thick one with markers.

    The mean is over all seeds, so it stands where all of them have a measurement. One seed is drawn as its own mean.

    Args:
        axes: Where.
        seeds: What was measured, by seed.
        shade: The colour.
        label: What it is.
        width: Of the thick line, in points.
        percent: Whether the numbers are shares, drawn in percent.
        style: Of the thick line.
    """
    scale = 100 if percent else 1
    known = [[(at, scale * value) for at, value in points if value is not None] for points in seeds]
    size = (2.0 + width) if max(map(len, known), default=0) <= _MANY else 0.8 * width
    if len(known) > 1:
        for points in known:
            places, values = zip(*points, strict=True) if points else ((), ())
            axes.plot(places, values, color=shade, linewidth=0.7, alpha=0.4, marker="o", markersize=size / 2)
    mean = []
    if len({len(points) for points in seeds}) == 1:
        for here in zip(*seeds, strict=True):
            values_here = [value for _, value in here if value is not None]
            if len(values_here) == len(seeds):
                mean.append((statistics.fmean(at for at, _ in here), scale * statistics.fmean(values_here)))
    places, values = zip(*mean, strict=True) if mean else ((), ())
    axes.plot(places, values, color=shade, linewidth=width, linestyle=style, marker="o", markersize=size, label=label)


def same_accuracies(every: Iterable["Axes"]) -> None:
    """Give axes the same range of percents, at least ten points high, and ticks at whole numbers."""
    import numpy as np
    from matplotlib.ticker import MaxNLocator

    every = list(every)
    drawn = np.concatenate([np.zeros(0), *(np.asarray(line.get_ydata(), float) for a in every for line in a.lines)])
    values = drawn[np.isfinite(drawn)].tolist()
    low, high = (min(values), max(values)) if values else (0.0, 100.0)
    wide = max(0.0, _LEAST_SPAN - (high - low)) / 2
    room = 0.06 * max(high - low, _LEAST_SPAN)
    for axes in every:
        lowest = -1.5 if low >= 0 else low - wide - room  # below zero is only the score of a regression
        axes.set_ylim(max(lowest, low - wide - room), min(101.5, high + wide + room))
        axes.yaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))


def legend_below(axes: "Axes", columns: int = 3) -> None:
    """Say what the lines of axes are below them, where no data can lie, in so many columns."""
    from matplotlib.transforms import ScaledTranslation

    handles, labels = axes.get_legend_handles_labels()
    if labels:
        figure = axes.get_figure(root=True)
        assert figure is not None
        labels = [wrapped(label, _LEGEND) for label in labels]
        longest = max(len(line) for label in labels for line in label.splitlines() or [""])
        columns = min(columns, max(1, int(figure.get_figwidth() * 14 / (longest + 6))))
        lower = axes.transAxes + ScaledTranslation(0, -_BELOW, figure.dpi_scale_trans)
        axes.legend(
            handles, labels, loc="upper left", bbox_to_anchor=(0, 0), bbox_transform=lower, frameon=False, fontsize=8,
            ncols=min(columns, len(labels)),
        )  # fmt: skip


def wrapped(label: str, width: int, most: int = 2) -> str:
    """Return a label in at most so many lines of so many letters; what is left over is cut, with an ellipsis."""
    return "\n".join(textwrap.wrap(make_printable(label), width, max_lines=most, placeholder=" …"))


def noted(figure: "Figure", sentences: Sequence[str]) -> None:
    """Write sentences below a figure, in lines that fit its width."""
    width = int(figure.get_figwidth() * 17.5)  # letters of this size
    lines = [line for sentence in sentences for line in textwrap.wrap(make_printable(sentence), width)]
    if lines:
        figure.supxlabel("\n".join(lines), fontsize=8, color=DARK, x=0.01, ha="left")


def shade_of(base: str, index: int, count: int) -> str:
    """Return a colour of a row of so many, from pale to the base."""
    from matplotlib.colors import to_hex, to_rgb

    pale = 0.65 * (1 - (index + 1) / count)
    red, green, blue = (pale + (1 - pale) * part for part in to_rgb(base))
    return to_hex((red, green, blue))


def plain(axes: "Axes", framed: bool = False) -> None:
    """Take ticks away, and draw a frame or none."""
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set(visible=framed, color=DARK, linewidth=1.8)


def plots_in(folder: Path) -> Path:
    """Return `plots` in a folder, which is made if need be.

    Raises:
        RunError: It is a link, which could lead anywhere, or cannot be made.
    """
    try:
        return files.safe_join(folder, "plots/any").parent
    except OSError as error:
        raise RunError(
            f"no picture can be written to {folder / 'plots'}: {error.strerror or error}.", path=folder / "plots"
        ) from None


def saved(figures: Mapping[str, "Figure"], folder: Path, ending: str = "png") -> list[Path]:
    """Write figures into a folder, by name, as "png", "pdf" or "svg"; return the files.

    Raises:
        RunError: They cannot be written.
    """
    written = []
    for name, figure in figures.items():
        written.append(folder / f"{name}.{ending}")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            draw(figure, written[-1])
        except OSError as error:
            raise RunError(
                f"the picture cannot be written to {written[-1]}: {error.strerror or error}.", path=written[-1]
            ) from None
    return written


def draw(figure: "Figure", place: Path) -> None:
    """Write a figure, in the format that the file's ending names.

    Raises:
        OSError: It cannot be written.
    """
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        text.set_text(make_printable(text.get_text(), _LONGEST))
    with files.atomic_write(place) as file:
        figure.savefig(file, dpi=130, format=place.suffix.removeprefix("."))


def evaluated(metrics: Metrics, norm: str) -> list[tuple[int, Mapping[str, Any]]]:
    """Return the rounds that were evaluated, with their columns."""
    return [(m["round"], m["evaluate"][norm]) for m in metrics if norm in m.get("evaluate", {})]


def in_percent(value: float | None) -> float:
    """Return an accuracy in percent; not a number where there is none."""
    return float("nan") if value is None else 100 * value


def color(index: int) -> str:
    """Return the colour of a row."""
    return COLORS[index % len(COLORS)]


def style_of(index: int) -> str:
    """Return how the line of a row is drawn: rows of the same colour differ in it."""
    return ("-", "--", ":", "-.")[index // len(COLORS) % 4]


def unscaled(images: Tensor, data: Data) -> Tensor:
    """Return images as they were before the data's mean and std, from 0 to 1; others are stretched to that."""
    if data.mean:
        mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (data.mean, data.std))
        images = images * std + mean
    low, high = images.amin((1, 2, 3), keepdim=True), images.amax((1, 2, 3), keepdim=True)
    inside = (low >= -_ROUNDING) & (high <= 1 + _ROUNDING)
    stretched = (images - low) / (high - low).clamp_min(1e-12)
    return torch.where(inside, images, stretched).clamp(0, 1)
