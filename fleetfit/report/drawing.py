"""How plots look, without pyplot: sizes, colours, axes, and which numbers of a run's reports are drawn."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fleetfit import files
from fleetfit.data import Data
from fleetfit.errors import MissingExtra, RunError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#1f5fa8", "#d1661b", "#2f8a4b", "#8a4fa3", "#b3272d", "#6b5b4b", "#17808a", "#a8891f")
LIGHT, DARK = "#d9dee4", "#3c4650"
Metrics = Sequence[Mapping[str, Any]]
Summary = Mapping[str, Any]
_ROUNDING = 1e-3


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
        return files.inside(folder, "plots/any").parent
    except OSError as error:
        raise RunError(f"no picture can be written to {folder / 'plots'}: {error.strerror or error}.") from None


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
            raise RunError(f"the picture cannot be written to {written[-1]}: {error.strerror or error}.") from None
    return written


def draw(figure: "Figure", place: Path) -> None:
    """Write a figure, in the format that the file's ending names.

    Raises:
        OSError: It cannot be written.
    """
    with files.replacing(place) as file:
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


def unscaled(images: Tensor, data: Data) -> Tensor:
    """Return images as they were before the data's mean and std, from 0 to 1; others are stretched to that."""
    if data.mean:
        mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (data.mean, data.std))
        images = images * std + mean
    low, high = images.amin((1, 2, 3), keepdim=True), images.amax((1, 2, 3), keepdim=True)
    inside = (low >= -_ROUNDING) & (high <= 1 + _ROUNDING)
    stretched = (images - low) / (high - low).clamp_min(1e-12)
    return torch.where(inside, images, stretched).clamp(0, 1)
