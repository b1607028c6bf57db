"""Samples of a class by the exit where they left (ScaleFL, CVPR 2023, appendix 6.3, Figures 5 to 9).

One panel for each exit. A blue border: predicted rightly where the sample left. An orange one: wrongly there, but
rightly by the base model. None: wrongly by both.

The paper does not say what its base model is. Here it is the same model's last exit, with which the appendix compares
its accuracy, and which every sample would reach without early stopping. So an orange border is a sample that stopping
early has lost, and the panel of the last exit has none.

Differs from the paper: a panel's title says which share of the class's samples left there, and the samples that are
shown lie at equal distances among those that left at that exit, at least one of them.
"""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fleetfit.data import Data
from fleetfit.errors import ConfigError, did_you_mean
from fleetfit.inference import Scores
from fleetfit.report.drawing import COLORS, DARK, LIGHT, empty, plain, unscaled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RIGHT, LOST, WRONG = 0, 1, 2
"""Right where the sample left; wrong there and right at the last exit; wrong at both."""
BORDERS = {
    RIGHT: (COLORS[0], "right where it left"),
    LOST: (COLORS[1], "wrong there, right at the last exit"),
    WRONG: ("none", "no border: wrong at both"),
}
"""Colour and meaning of each border."""
MOST = 400
"""Samples in one picture, at most."""
OF_THE_PAPER = ("airplane", "truck", "bird", "cat", "deer")
"""The classes of Figures 5 to 9."""
_SHARE, _FEWEST = 0.1, 50
_PANELS, _NARROWEST = 4, 5  # panels in a row, samples in a row of a panel
_TILE, _GAP, _TITLE = 0.44, 0.07, 0.5  # inches; share of a tile; inches


@dataclass(frozen=True, eq=False)
class Panel:
    """The samples of a class that left at one exit.

    Attributes:
        share: How many of the class's samples left there, from 0 to 1.
        shown: Those that are drawn, as positions among the scored samples, int64 [n].
    """

    share: float
    shown: Tensor


def verdicts(found: Scores, exits: Tensor) -> Tensor:
    """Return for each sample RIGHT, LOST or WRONG, int64 [N].

    Args:
        found: The samples' logits at every exit.
        exits: Where each sample left, from 0, int64 [N].
    """
    right = found.logits.argmax(-1) == found.labels
    here = right.gather(0, exits[None])[0]
    return torch.where(here, RIGHT, torch.where(right[-1], LOST, WRONG))


def panels_of_class(found: Scores, exits: Tensor, label: int, share: float | None = None) -> list[Panel]:
    """Return which samples of a class left at each exit, and which of them are drawn [E].

    Args:
        found: The samples' logits at every exit.
        exits: Where each sample left, from 0, int64 [N].
        label: The class.
        share: How many of the samples are drawn, above 0 and up to 1; by default a tenth, or as many as make 50.

    Raises:
        ConfigError: The class has no samples, the share is none, or more samples are asked for than fit into a picture.
    """
    of_class = found.labels == label
    count = int(of_class.sum())
    if not count:
        raise ConfigError(f"none of the {len(found.labels)} test samples is of class {label}.", key="label")
    wanted = max(_SHARE, min(1.0, _FEWEST / count)) if share is None else share
    if share is None:  # a default never asks for more than fits, with one sample more for each exit's rounding
        wanted = min(wanted, (MOST - len(found.logits)) / count)
    if not 0 < wanted <= 1:
        raise ConfigError(f"share must be above 0 and at most 1, got {wanted:g}.", key="share")
    left = [(of_class & (exits == i)).nonzero()[:, 0] for i in range(len(found.logits))]
    shown = [_evenly(places, wanted) for places in left]
    total = sum(map(len, shown))
    if total > MOST:
        raise ConfigError(
            f"a share of {wanted:g} puts {total} of {count} samples into one picture, and {MOST} fit; choose a share "
            f"up to {math.floor(1000 * (MOST - len(shown)) / count) / 1000:g}.",
            key="share",
        )
    return [Panel(len(places) / count, few) for places, few in zip(left, shown, strict=True)]


def exits_of_class(
    data: Data, found: Scores, exits: Tensor, label: int, share: float | None = None, title: str = ""
) -> "Figure":
    """Draw test samples of a class by the exit where they left.

    Args:
        data: Images, grey or with three colours.
        found: The test samples' logits at every exit.
        exits: Where each sample left, from 0, int64 [N].
        label: The class.
        share: How many of its samples are drawn; see `panels_of_class`.
        title: What stands above.

    Raises:
        ConfigError: As of `panels_of_class`.
        MissingExtra: matplotlib is not installed.
    """
    panels, meant = panels_of_class(found, exits, label, share), verdicts(found, exits)
    columns = max(_NARROWEST, math.ceil(math.sqrt(max(len(panel.shown) for panel in panels))))
    name = class_names(data)[label]
    samples = f'"{name}" samples that left' if name.isdecimal() else f"{name} samples that left"
    above = textwrap.fill(samples, max(22, int(columns * _TILE * 12)))
    figure, places = _laid_out(panels, columns, data.sample_shape[-2] / data.sample_shape[-1], title)
    for i, (panel, axes) in enumerate(zip(panels, places, strict=True)):
        axes.set_title(f"{above}\nat exit {i + 1} ({100 * panel.share:.0f}%)", fontsize=9, color=DARK)
        _images(axes, _pictures(data, found.indices[panel.shown]), meant[panel.shown].tolist(), columns)
    return figure


def class_names(data: Data) -> tuple[str, ...]:
    """Return a name for each class; their numbers where they have none."""
    return data.class_names or tuple(str(c) for c in range(data.classes))


def chosen_classes(data: Data, wanted: Sequence[str] = ()) -> list[int]:
    """Return classes by their names: by default those of the paper if the data have all of them, else the first five.

    Raises:
        ConfigError: There is no such class.
    """
    known = class_names(data)
    default = OF_THE_PAPER if set(OF_THE_PAPER) <= set(known) else known[:5]
    for name in wanted:
        if name not in known:
            some = f"{', '.join(known[:10])}{', ...' if len(known) > 10 else ''}"
            raise ConfigError(
                f'{data.name} has no class "{name}"; it has {some}.{did_you_mean(name, known)}', key="label"
            )
    return [known.index(name) for name in dict.fromkeys(wanted or default)]


def no_images(data: Data) -> str:
    """Return why samples cannot be drawn, or "" if they can."""
    shape = list(data.sample_shape)
    if data.vocabulary or len(shape) != 3 or shape[0] not in (1, 3):
        what = "tokens" if data.vocabulary else f"of shape {shape}"
        return f"samples of {data.name} are {what}, no grey or coloured images"
    return ""


def _laid_out(panels: Sequence[Panel], columns: int, ratio: float, title: str) -> tuple["Figure", list["Axes"]]:
    """Return a figure with axes for each panel, up to four in a row, in which a sample is one wide and `ratio` high."""
    across = min(_PANELS, len(panels))
    rows = [panels[i : i + across] for i in range(0, len(panels), across)]
    deep = [max(1, *(math.ceil(len(panel.shown) / columns) for panel in row)) for row in rows]
    tall = [_TITLE + count * _TILE * ratio for count in deep]
    figure = empty(across * (columns * _TILE + 0.22) + 0.1, sum(tall) + 0.1 * len(rows) + (0.55 if title else 0.3))
    figure.suptitle(title, fontsize=10, color=DARK)
    grid = figure.add_gridspec(len(rows), across, height_ratios=tall)
    places = []
    for i in range(len(panels)):
        axes = figure.add_subplot(grid[divmod(i, across)])
        axes.set(xlim=(0, columns), ylim=(deep[i // across] * ratio, 0), autoscale_on=False)
        axes.set_anchor("N")
        plain(axes)
        places.append(axes)
    _legend(figure)
    return figure, places


def _evenly(places: Tensor, share: float) -> Tensor:
    """Return a share of places, at equal distances, at least one."""
    count = len(places)
    few = min(count, max(1, round(share * count)))
    return places[(2 * torch.arange(few) + 1) * count // max(1, 2 * few)]


def _pictures(data: Data, indices: Tensor) -> Tensor:
    """Return images as they were before normalisation, on the host [n, channels, height, width]."""
    if not len(indices):
        return torch.zeros(0, *data.sample_shape)
    return unscaled(data.batch(indices)[0].cpu(), data)


def _images(axes: "Axes", images: Tensor, meant: Sequence[int], columns: int) -> None:
    """Draw images row by row, each with its border; pixels stay sharp."""
    from matplotlib.patches import Rectangle

    if not len(images):
        axes.text(0.5, 0.9, "none", ha="center", va="top", fontsize=9, color=DARK, transform=axes.transAxes)
        return
    ratio, inside = images.shape[-2] / images.shape[-1], 1 - 2 * _GAP
    for i, (image, verdict) in enumerate(zip(images, meant, strict=True)):
        left, top = i % columns + _GAP, (i // columns + _GAP) * ratio
        pixels = (image if len(image) == 3 else image.expand(3, -1, -1)).permute(1, 2, 0).numpy()
        at = (left, left + inside, top + inside * ratio, top)
        axes.imshow(pixels, extent=at, interpolation="nearest")
        if verdict != WRONG:
            color = BORDERS[verdict][0]
            axes.add_patch(Rectangle((left, top), inside, inside * ratio, fill=False, edgecolor=color, linewidth=2.2))


def _legend(figure: "Figure") -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(facecolor=LIGHT, edgecolor=color, linewidth=2.2, label=meaning) for color, meaning in BORDERS.values()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=8, labelcolor=DARK)
