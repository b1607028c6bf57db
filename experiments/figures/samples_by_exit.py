"""Samples of a class by the exit where they stopped (ScaleFL, CVPR 2023, appendix 6.3, Figures 5 to 9).

One panel per exit. A blue border marks samples whose exit is right. An orange border marks samples whose exit is wrong
and the base model right. Without a border, both are wrong.

The paper does not name its base model. Here it is the last exit of the same model: the appendix compares with its
accuracy, and every sample would reach it without early stopping. So an orange border marks a sample lost by early
stopping, and the panel of the last exit has none.

Differs from the paper: a panel's title has the share of the class's samples that stopped there. Its samples are evenly
spaced among those, at least one of them.
"""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from experiments.figures.images import remove_ticks, restore_images, select_evenly
from fleetfit.data import Data
from fleetfit.errors import ConfigError, did_you_mean
from fleetfit.inference import Scores
from fleetfit.report.drawing import COLORS, DARK, LIGHT, make_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RIGHT, LOST, WRONG = 0, 1, 2
"""Right at the sample's exit; wrong there and right at the last exit; wrong at both."""
BORDERS = {
    RIGHT: (COLORS[0], "right at its exit"),
    LOST: (COLORS[1], "wrong at its exit, right at the last exit"),
    WRONG: ("none", "no border: wrong at both"),
}
"""Color and meaning of each border."""
MAX_SAMPLES = 400
"""Maximal number of samples in a figure."""
PAPER_CLASSES = ("airplane", "truck", "bird", "cat", "deer")
"""The classes of Figures 5 to 9."""
_SHARE, _FEWEST = 0.1, 50
_PANELS, _NARROWEST = 4, 5  # panels in a row, samples in a row of a panel
_TILE, _GAP, _TITLE = 0.44, 0.07, 0.5  # inches; share of a tile; inches


@dataclass(frozen=True, eq=False)
class Panel:
    """The samples of a class that stopped at one exit.

    Attributes:
        share: Share of the class's samples that stopped there.
        samples: The samples to draw, as positions among the scored samples, int64 [n].
    """

    share: float
    samples: Tensor


def judge_samples(scores: Scores, exits: Tensor) -> Tensor:
    """Classify each sample as RIGHT, LOST or WRONG, int64 [N].

    Args:
        scores: The samples' logits at each exit.
        exits: The exit where each sample stopped, from 0, int64 [N].
    """
    is_right = scores.logits.argmax(-1) == scores.labels
    return torch.where(is_right.gather(0, exits[None])[0], RIGHT, torch.where(is_right[-1], LOST, WRONG))


def select_panels(scores: Scores, exits: Tensor, label: int, share: float | None = None) -> list[Panel]:
    """Return for each exit the share of a class's samples that stopped there, and the samples to draw [E].

    Args:
        scores: The samples' logits at each exit.
        exits: The exit where each sample stopped, from 0, int64 [N].
        label: The class.
        share: Share of the samples to draw, above 0 and up to 1; by default a tenth, at least 50.

    Raises:
        ConfigError: The class has no samples, the share is out of range, or a figure cannot hold the samples.
    """
    is_class = scores.labels == label
    count = int(is_class.sum())
    if not count:
        raise ConfigError(f"none of the {len(scores.labels)} test samples is of class {label}.", key="label")
    if share is None:  # the number that fits, less one sample per exit for rounding
        share = min(max(_SHARE, min(1.0, _FEWEST / count)), (MAX_SAMPLES - len(scores.logits)) / count)
    if not 0 < share <= 1:
        raise ConfigError(f"share must be above 0 and at most 1, got {share:g}.", key="share")
    panels = []
    for i in range(len(scores.logits)):
        samples = (is_class & (exits == i)).nonzero()[:, 0]
        selected = select_evenly(samples, min(len(samples), max(1, round(share * len(samples)))))
        panels.append(Panel(len(samples) / count, selected))
    total = sum(len(panel.samples) for panel in panels)
    if total > MAX_SAMPLES:
        raise ConfigError(
            f"a share of {share:g} puts {total} of {count} samples into one figure, but at most {MAX_SAMPLES} fit. "
            f"Choose a share up to {math.floor(1000 * (MAX_SAMPLES - len(panels)) / count) / 1000:g}.",
            key="share",
        )
    return panels


def draw_exits(
    data: Data, scores: Scores, exits: Tensor, label: int, share: float | None = None, title: str = ""
) -> "Figure":
    """Draw test samples of a class by the exit where they stopped.

    Args:
        data: Images, gray or with three colors.
        scores: The test samples' logits at each exit.
        exits: The exit where each sample stopped, from 0, int64 [N].
        label: The class.
        share: Share of its samples to draw (see `select_panels`).
        title: The title above the panels.

    Raises:
        ConfigError: See `select_panels`.
        MissingExtra: matplotlib is not installed.
    """
    panels, meanings = select_panels(scores, exits, label, share), judge_samples(scores, exits)
    columns = max(_NARROWEST, math.ceil(math.sqrt(max(len(panel.samples) for panel in panels))))
    name = get_class_names(data)[label]
    heading = f'"{name}" samples that stopped' if name.isdecimal() else f"{name} samples that stopped"
    heading = textwrap.fill(heading, max(22, int(columns * _TILE * 12)))
    figure, axes_of_panels = _make_axes(panels, columns, data.sample_shape[-2] / data.sample_shape[-1], title)
    for i, (panel, axes) in enumerate(zip(panels, axes_of_panels, strict=True)):
        axes.set_title(f"{heading}\nat exit {i + 1} ({100 * panel.share:.0f}%)", fontsize=9, color=DARK)
        images = torch.zeros(0, *data.sample_shape)
        if len(panel.samples):  # undo the normalization on the host
            images = restore_images(data.batch(scores.indices[panel.samples])[0].cpu(), data)
        _draw_images(axes, images, meanings[panel.samples].tolist(), columns)
    return figure


def get_class_names(data: Data) -> tuple[str, ...]:
    """Return a name for each class; by default its number."""
    return data.class_names or tuple(str(c) for c in range(data.classes))


def select_classes(data: Data, requested: Sequence[str] = ()) -> list[int]:
    """Return classes by name; by default the paper's if the data have them all, else the first five.

    Raises:
        ConfigError: The class is unknown.
    """
    names = get_class_names(data)
    default = PAPER_CLASSES if set(PAPER_CLASSES) <= set(names) else names[:5]
    for name in requested:
        if name not in names:
            some = f"{', '.join(names[:10])}{', ...' if len(names) > 10 else ''}"
            raise ConfigError(
                f'{data.name} has no class "{name}". Its classes are {some}.{did_you_mean(name, names)}', key="label"
            )
    return [names.index(name) for name in dict.fromkeys(requested or default)]


def explain_no_images(data: Data) -> str:
    """Return why samples cannot be drawn, or ""."""
    shape = list(data.sample_shape)
    if data.vocabulary or len(shape) != 3 or shape[0] not in (1, 3):
        kind = "tokens" if data.vocabulary else f"of shape {shape}"
        return f"samples of {data.name} are {kind}, not gray or colored images"
    return ""


def _make_axes(panels: Sequence[Panel], columns: int, ratio: float, title: str) -> tuple["Figure", list["Axes"]]:
    """Return a figure with axes for each panel, up to four in a row. A sample is one wide and `ratio` high."""
    from matplotlib.patches import Patch

    across = min(_PANELS, len(panels))
    rows = [panels[i : i + across] for i in range(0, len(panels), across)]
    tiles = [max(1, *(math.ceil(len(panel.samples) / columns) for panel in row)) for row in rows]
    heights = [_TITLE + count * _TILE * ratio for count in tiles]
    figure = make_figure(
        across * (columns * _TILE + 0.22) + 0.1, sum(heights) + 0.1 * len(rows) + (0.55 if title else 0.3)
    )
    figure.suptitle(title, fontsize=10, color=DARK)
    grid = figure.add_gridspec(len(rows), across, height_ratios=heights)
    axes_of_panels = []
    for i in range(len(panels)):
        axes = figure.add_subplot(grid[divmod(i, across)])
        axes.set(xlim=(0, columns), ylim=(tiles[i // across] * ratio, 0), autoscale_on=False)
        axes.set_anchor("N")
        remove_ticks(axes)
        axes_of_panels.append(axes)
    handles = [
        Patch(facecolor=LIGHT, edgecolor=color, linewidth=2.2, label=meaning) for color, meaning in BORDERS.values()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=8, labelcolor=DARK)
    return figure, axes_of_panels


def _draw_images(axes: "Axes", images: Tensor, meanings: Sequence[int], columns: int) -> None:
    """Draw images row by row, each with its border and sharp pixels."""
    from matplotlib.patches import Rectangle

    if not len(images):
        axes.text(0.5, 0.9, "none", ha="center", va="top", fontsize=9, color=DARK, transform=axes.transAxes)
        return
    ratio, inside = images.shape[-2] / images.shape[-1], 1 - 2 * _GAP
    for i, (image, verdict) in enumerate(zip(images, meanings, strict=True)):
        left, top = i % columns + _GAP, (i // columns + _GAP) * ratio
        pixels = (image if len(image) == 3 else image.expand(3, -1, -1)).permute(1, 2, 0).numpy()
        extent = (left, left + inside, top + inside * ratio, top)
        axes.imshow(pixels, extent=extent, interpolation="nearest")
        if verdict != WRONG:
            color = BORDERS[verdict][0]
            axes.add_patch(Rectangle((left, top), inside, inside * ratio, fill=False, edgecolor=color, linewidth=2.2))
