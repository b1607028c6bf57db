"""Style of figures (sizes, colors, axes, legends), and writing them to files. Does not use pyplot."""

import importlib.util
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fleetfit import files
from fleetfit.errors import MissingExtra, RunError, make_printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#1f5fa8", "#d1661b", "#2f8a4b", "#8a4fa3", "#b3272d", "#6b5b4b", "#17808a", "#a8891f")
LIGHT, DARK = "#d9dee4", "#3c4650"
_LEGEND_GAP = 0.42  # inches between axes and their legend, for ticks and a label
_LONGEST = 300  # characters of a text
_LEGEND_WIDTH = 48  # characters in a line of a legend


def is_available() -> bool:
    """Return whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def make_figure(width: float, height: float) -> "Figure":
    """Return a figure without axes.

    Args:
        width: In inches.
        height: In inches.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    if not is_available():
        raise MissingExtra("plots", "Drawing plots")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def label_axes(axes: "Axes", x: str, y: str, title: str) -> None:
    """Set axis labels and a pale grid, and remove the frame."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.locator_params(axis="x", integer=x == "round")
    axes.set_title(title, fontsize=10, loc="left", color=DARK)
    axes.grid(color=LIGHT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(LIGHT)
    axes.tick_params(color=LIGHT, labelcolor=DARK)


def add_legend_below(axes: "Axes", columns: int = 3, panels: bool = False) -> None:
    """Put the legend of axes below them.

    Args:
        axes: The axes.
        columns: Maximal number of columns of the legend.
        panels: Whether to put it below the whole figure, as all panels have the same lines.
    """
    from matplotlib.transforms import ScaledTranslation

    handles, labels = axes.get_legend_handles_labels()
    if not labels:
        return
    figure = axes.get_figure(root=True)
    assert figure is not None
    labels = [wrap_label(label, _LEGEND_WIDTH) for label in labels]
    longest = max(len(line) for label in labels for line in label.splitlines() or [""])
    columns = min(columns, len(labels), max(1, int(figure.get_figwidth() * 14 / (longest + 6))))
    if panels:
        figure.legend(handles, labels, loc="outside lower left", frameon=False, fontsize=8, ncols=columns)
        return
    lower = axes.transAxes + ScaledTranslation(0, -_LEGEND_GAP, figure.dpi_scale_trans)
    axes.legend(
        handles, labels, loc="upper left", bbox_to_anchor=(0, 0), bbox_transform=lower, frameon=False, fontsize=8,
        ncols=columns,
    )  # fmt: skip


def wrap_label(label: str, width: int) -> str:
    """Wrap a label in two lines of `width` characters. Longer labels end in an ellipsis."""
    return "\n".join(textwrap.wrap(make_printable(label), width, max_lines=2, placeholder=" …"))


def add_notes(figure: "Figure", sentences: Sequence[str]) -> None:
    """Write sentences below a figure, wrapped at its width; above the legend of the whole figure if it has one."""
    width = int(figure.get_figwidth() * 17.5)  # characters per line at this font size
    lines = [line for sentence in sentences for line in textwrap.wrap(make_printable(sentence), width)]
    if lines and figure.legends:  # the layout puts a label of the figure and its legend in the same place
        (legend,) = figure.legends
        legend.set_title("\n".join(lines))
        legend.get_title().set(color=DARK, size=8)
        legend.set_alignment("left")
    elif lines:
        figure.supxlabel("\n".join(lines), fontsize=8, color=DARK, x=0.01, ha="left")


def get_color(index: int) -> str:
    """Return the color of a row."""
    return COLORS[index % len(COLORS)]


def get_level_color(index: int) -> str:
    """Return the color of a level, other than those of the first two rows, which `local` and `global` have."""
    return COLORS[2 + index % (len(COLORS) - 2)]


# ---- files -----------------------------------------------------------------------------------------------------------


def make_plots_folder(folder: Path) -> Path:
    """Return the folder `plots` in a run folder, and create it if it is missing.

    Raises:
        RunError: It is a link, or cannot be created.
    """
    try:
        return files.safe_join(folder, "plots/any").parent
    except OSError as error:
        raise RunError(
            f"cannot write figures to {folder / 'plots'}: {error.strerror or error}.", path=folder / "plots"
        ) from None


def save_figures(figures: Mapping[str, "Figure"], folder: Path, suffix: str = "png") -> list[Path]:
    """Write figures to a folder as "png", "pdf" or "svg", and return the files.

    Raises:
        RunError: A file cannot be written.
    """
    paths = [folder / f"{name}.{suffix}" for name in figures]
    for path, figure in zip(paths, figures.values(), strict=True):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            save_figure(figure, path)
        except OSError as error:
            raise RunError(f"cannot write the figure to {path}: {error.strerror or error}.", path=path) from None
    return paths


def save_figure(figure: "Figure", path: Path) -> None:
    """Write a figure in the format of the file's suffix.

    Raises:
        OSError: The file cannot be written.
    """
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        text.set_text(make_printable(text.get_text(), _LONGEST))
    with files.atomic_write(path) as file:
        figure.savefig(file, dpi=130, format=path.suffix.removeprefix("."))
